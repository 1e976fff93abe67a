#include "memory/mem_node.h"

const mem_entry_t *mem_row_set_get(const mem_row_set_t *set, const uint8_t *key, size_t key_len,
                                   uint64_t after, uint64_t upto) {
    const slice_t bytes = {key, key_len};
    const mem_probe_t probe = mem_probe(bytes, upto);
    const mem_node_t *node = mem_seek(set, &probe);
    if (node == NULL || node->entry.stamp <= after) return NULL;
    return mem_compare_key(node, &probe) == 0 ? &node->entry : NULL;
}

/* A search that goes on from where the last one ended. */
typedef struct {
    const mem_link_t *prev[MEM_LEVELS];
    uint32_t levels;
    slice_t key;
} finger_t;

static void finger_reset(finger_t *finger, const mem_row_set_t *set) {
    finger->levels = mem_levels(set);
    for (uint32_t level = 0; level < finger->levels; level++) finger->prev[level] = set->head;
    finger->key = (slice_t){NULL, 0};
}

/* Ascending keys: up as long as the next link stays before the probe, then down. */
static const mem_node_t *finger_seek(finger_t *finger, const mem_row_set_t *set,
                                     const mem_probe_t *probe) {
    if (slice_compare(probe->key, finger->key) < 0) finger_reset(finger, set);
    finger->key = probe->key;
    uint32_t level = 0;
    while (level + 1 < finger->levels) {
        const mem_node_t *next = mem_next(finger->prev[level], level);
        if (next == NULL || !mem_before(next, probe)) break;
        level++;
    }
    return mem_descend(finger->prev[level], level, probe, finger->prev);
}

static const mem_entry_t *finger_find(finger_t *finger, const mem_row_set_t *set, slice_t key,
                                      uint64_t after, uint64_t upto) {
    const mem_probe_t probe = mem_probe(key, upto);
    const mem_node_t *node = finger_seek(finger, set, &probe);
    if (node == NULL || node->entry.stamp <= after) return NULL;
    return mem_compare_key(node, &probe) == 0 ? &node->entry : NULL;
}

void mem_row_set_lookup(const mem_row_set_t *set, const keys_t *keys, uint64_t after,
                        uint64_t upto, const mem_entry_t **out) {
    finger_t finger;
    finger_reset(&finger, set);
    for (uint32_t i = 0; i < keys->n; i++) {
        out[i] = finger_find(&finger, set, keys_at(keys, i), after, upto);
    }
}

int64_t mem_row_set_changed_keys(const mem_row_set_t *set, const keys_t *keys, uint64_t after) {
    if (mem_max_stamp(set) <= after) return -1;
    finger_t finger;
    finger_reset(&finger, set);
    for (uint32_t i = 0; i < keys->n; i++) {
        if (finger_find(&finger, set, keys_at(keys, i), after, UINT64_MAX) != NULL) return i;
    }
    return -1;
}

const mem_entry_t *mem_row_set_changed_of(const mem_row_set_t *set, const mem_row_set_t *own,
                                          uint64_t after) {
    if (mem_max_stamp(set) <= after) return NULL;
    finger_t finger;
    finger_reset(&finger, set);
    for (const mem_node_t *node = mem_next(own->head, 0); node != NULL;
         node = mem_next(node->next, 0)) {
        const slice_t key = mem_key(&node->entry);
        if (finger_find(&finger, set, key, after, UINT64_MAX) != NULL) return &node->entry;
    }
    return NULL;
}

/* -- ranges ------------------------------------------------------------------------------- */

static const mem_node_t *range_start(const mem_row_set_t *set, const uint8_t *low, size_t len) {
    if (low == NULL) return mem_next(set->head, 0);
    const slice_t key = {low, len};
    const mem_probe_t probe = mem_probe(key, UINT64_MAX);
    return mem_seek(set, &probe);
}

static bool below(const mem_entry_t *entry, const uint8_t *high, size_t len) {
    const slice_t key = {high, len};
    return high == NULL || slice_compare(mem_key(entry), key) < 0;
}

static bool same_key(const mem_entry_t *a, const mem_entry_t *b) {
    return slice_compare(mem_key(a), mem_key(b)) == 0;
}

enum { RUN = 8 /* versions that are passed one by one, before a search is cheaper */ };

/* Goes on from an entry that nobody wants, the `passed`-th in a row: behind the versions of its key
 * that are newer than `stamp`, once that is worth a search. */
static const mem_node_t *pass(const mem_row_set_t *set, const mem_node_t *node, uint64_t stamp,
                              uint32_t passed) {
    const mem_node_t *next = mem_next(node->next, 0);
    if (passed % RUN != 0 || next == NULL || !same_key(&node->entry, &next->entry)) return next;
    const mem_probe_t probe = mem_probe(mem_key(&node->entry), stamp);
    const mem_node_t *found = mem_seek(set, &probe);
    return found == node ? next : found;
}

uint32_t mem_row_set_select(const mem_row_set_t *set, const mem_range_t *range,
                            const mem_entry_t **last, uint32_t cap, const mem_entry_t **out) {
    if (mem_max_stamp(set) <= range->after) return 0;
    const mem_node_t *node = *last == NULL ? range_start(set, range->low, range->low_len)
                                           : mem_next(mem_node_of(*last)->next, 0);
    uint32_t n = 0, passed = 0;
    while (node != NULL && n < cap) {
        const mem_entry_t *entry = &node->entry;
        if (!below(entry, range->high, range->high_len)) break;
        if (entry->stamp > range->upto) {
            node = pass(set, node, range->upto, ++passed);
        } else if (entry->stamp <= range->after ||
                   (range->versions == 0 && *last != NULL && same_key(*last, entry))) {
            node = pass(set, node, 0, ++passed);
        } else {
            out[n++] = *last = entry;
            node = mem_next(node->next, 0);
            passed = 0;
        }
    }
    return n;
}

enum { MOST_PASSED = 4096 };

/* The last node with a key below `high`, data NULL for no bound. */
static const mem_node_t *last_below(const mem_row_set_t *set, slice_t high) {
    const mem_probe_t probe = mem_probe(high, UINT64_MAX);
    const mem_link_t *links = set->head;
    const mem_node_t *found = NULL;
    for (uint32_t level = mem_levels(set); level-- > 0;) {
        const mem_node_t *next;
        while ((next = mem_next(links, level)) != NULL &&
               (high.data == NULL || mem_before(next, &probe))) {
            found = next;
            links = next->next;
        }
    }
    return found;
}

status_t mem_row_set_last(const mem_row_set_t *set, const mem_range_t *range,
                          const mem_entry_t **out) {
    const slice_t low = {range->low, range->low_len};
    slice_t high = {range->high, range->high_len};
    *out = NULL;
    if (mem_max_stamp(set) <= range->after) return STATUS_OK;
    for (uint32_t passed = 0; passed < MOST_PASSED; passed++) {
        const mem_node_t *node = last_below(set, high);
        if (node == NULL) return STATUS_OK;
        high = mem_key(&node->entry);
        if (low.data != NULL && slice_compare(high, low) < 0) return STATUS_OK;
        *out = mem_row_set_get(set, high.data, high.len, range->after, range->upto);
        if (*out != NULL) return STATUS_OK;
    }
    return STATUS_LIMIT;
}

const mem_entry_t *mem_row_set_changed(const mem_row_set_t *set, const uint8_t *low,
                                       size_t low_len, const uint8_t *high, size_t high_len,
                                       uint64_t after) {
    if (mem_max_stamp(set) <= after) return NULL;
    const mem_node_t *node = range_start(set, low, low_len);
    uint32_t passed = 0;
    while (node != NULL && below(&node->entry, high, high_len)) {
        if (node->entry.stamp > after) return &node->entry;
        node = pass(set, node, 0, ++passed);
    }
    return NULL;
}

/* -- rows that were put last -------------------------------------------------------------- */

const mem_entry_t *mem_row_set_newest(const mem_row_set_t *set) {
    const mem_node_t *node = mem_newest(set);
    return node == NULL ? NULL : &node->entry;
}

const mem_entry_t *mem_row_set_older(const mem_entry_t *entry) {
    const mem_node_t *node = mem_node_of(entry)->older;
    return node == NULL ? NULL : &node->entry;
}
