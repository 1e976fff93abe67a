#include "memory/mem_row_set.h"

#include "common/alloc.h"
#include "common/check.h"
#include "memory/mem_node.h"

_Static_assert(offsetof(struct mem_node, entry) == 0, "an entry is the front of its node");

mem_row_set_t *mem_row_set_create(uint32_t width) {
    mem_row_set_t *set = alloc_array(1, sizeof *set);
    if (set == NULL) return NULL;
    memset(set, 0, sizeof *set);
    for (uint32_t level = 0; level < MEM_LEVELS; level++) set->prev[level] = set->head;
    atomic_init(&set->levels, 1);
    set->width = width;
    set->random = UINT64_C(0x9E3779B97F4A7C15);
    return set;
}

void mem_row_set_destroy(mem_row_set_t *set) {
    if (set == NULL) return;
    arena_free(&set->arena);
    alloc_free(set);
}

uint64_t mem_row_set_count(const mem_row_set_t *set) {
    return atomic_load_explicit(&set->count, memory_order_relaxed);
}

uint64_t mem_row_set_bytes(const mem_row_set_t *set) {
    return atomic_load_explicit(&set->bytes, memory_order_relaxed);
}

uint64_t mem_row_set_max_stamp(const mem_row_set_t *set) { return mem_max_stamp(set); }

/* -- writing ------------------------------------------------------------------------------ */

uint32_t mem_draw_levels(uint64_t *random) {
    uint64_t x = *random; /* xorshift */
    x ^= x << 13;
    x ^= x >> 7;
    x ^= x << 17;
    *random = x;
    const uint32_t quarters = (uint32_t)__builtin_ctzll(x | UINT64_C(1) << 62) / 2;
    return quarters + 1 < MEM_LEVELS ? quarters + 1 : MEM_LEVELS;
}

static size_t held_len(size_t row_len) { return row_len == MEM_TOMBSTONE ? 0 : row_len; }

size_t mem_node_size(uint32_t levels, size_t key_len, size_t row_len) {
    const size_t fixed = sizeof(mem_node_t) + levels * sizeof(mem_link_t);
    return fixed + (size_t)round_up_8(key_len + held_len(row_len));
}

static mem_node_t *make_node(mem_row_set_t *set, uint32_t levels, const mem_probe_t *probe,
                             const uint8_t *row, uint32_t row_len) {
    const size_t size = mem_node_size(levels, probe->key.len, row_len);
    mem_node_t *node = arena_take(&set->arena, size);
    uint8_t *bytes = (uint8_t *)(node->next + levels);
    copy_bytes(bytes, probe->key.data, probe->key.len);
    copy_bytes(bytes + probe->key.len, row, held_len(row_len));
    node->entry = (mem_entry_t){probe->stamp, bytes + probe->key.len, row_len,
                                (uint32_t)probe->key.len};
    node->prefix = probe->prefix;
    node->older = mem_newest(set);
    return node;
}

/* Leaves in `prev` the links in front of the probe; returns the node at or behind it. Next to
 * the node added last they are known: `last` is the greatest before the probe, so what its
 * links and those passed on the way to it point at is behind. */
static mem_node_t *find_place(mem_row_set_t *set, const mem_probe_t *probe) {
    if (set->last != NULL && mem_before(set->last, probe)) {
        mem_node_t *next = mem_next(set->last->next, 0);
        if (next == NULL || !mem_before(next, probe)) return next;
    }
    const mem_link_t *prev[MEM_LEVELS];
    const uint32_t levels = mem_levels(set);
    mem_node_t *found = mem_descend(set->head, levels - 1, probe, prev);
    for (uint32_t level = 0; level < levels; level++) {
        set->prev[level] = (mem_link_t *)(uintptr_t)prev[level];
    }
    set->last = NULL; /* prev no longer stands behind it */
    return found;
}

static void add(_Atomic uint64_t *counter, uint64_t by) {
    const uint64_t now = atomic_load_explicit(counter, memory_order_relaxed);
    atomic_store_explicit(counter, now + by, memory_order_relaxed);
}

static void link_node(mem_row_set_t *set, mem_node_t *node, uint32_t levels) {
    for (uint32_t level = 0; level < levels; level++) {
        atomic_init(node->next + level, mem_next(set->prev[level], level));
    }
    for (uint32_t level = 0; level < levels; level++) {
        atomic_store_explicit(set->prev[level] + level, node, memory_order_release);
        set->prev[level] = node->next;
    }
    set->last = node;
}

void mem_insert(mem_row_set_t *set, slice_t key, uint64_t stamp, const uint8_t *row,
                uint32_t row_len) {
    const mem_probe_t probe = mem_probe(key, stamp);
    const uint32_t levels = mem_draw_levels(&set->random);
    const mem_node_t *at = find_place(set, &probe);
    if (at != NULL && at->entry.stamp == stamp && mem_compare_key(at, &probe) == 0) return;
    mem_node_t *node = make_node(set, levels, &probe, row, row_len);
    if (stamp > mem_max_stamp(set)) {
        atomic_store_explicit(&set->max_stamp, stamp, memory_order_release);
    }
    link_node(set, node, levels);
    if (row_len != MEM_TOMBSTONE) {
        atomic_store_explicit(&set->newest, node, memory_order_release);
    }
    if (levels > mem_levels(set)) {
        atomic_store_explicit(&set->levels, levels, memory_order_relaxed);
    }
    add(&set->count, 1);
    add(&set->bytes, mem_node_size(levels, key.len, row_len));
}

static status_t check_entry(const mem_row_set_t *set, size_t key_len, size_t row_len) {
    if (set->width != 0 && key_len != set->width) return STATUS_INPUT;
    return key_len < UINT32_MAX && row_len < UINT32_MAX ? STATUS_OK : STATUS_LIMIT;
}

status_t mem_row_set_put(mem_row_set_t *set, const uint8_t *key, size_t key_len, uint64_t stamp,
                         const uint8_t *row, size_t row_len) {
    const size_t held = row == NULL ? 0 : row_len;
    const status_t status = check_entry(set, key_len, held);
    if (status != STATUS_OK) return status;
    uint64_t random = set->random; /* as mem_insert will draw */
    const uint32_t levels = mem_draw_levels(&random);
    if (!arena_reserve(&set->arena, mem_node_size(levels, key_len, held))) {
        return STATUS_NO_MEMORY;
    }
    const slice_t bytes = {key, key_len};
    mem_insert(set, bytes, stamp, row, row == NULL ? MEM_TOMBSTONE : (uint32_t)row_len);
    return STATUS_OK;
}

status_t mem_row_set_put_many(mem_row_set_t *set, const keys_t *keys, uint64_t stamp,
                              const uint8_t *data, const uint32_t *offsets) {
    uint64_t random = set->random;
    size_t size = 0;
    for (uint32_t i = 0; i < keys->n; i++) {
        const size_t key_len = keys_at(keys, i).len;
        const size_t row_len = data == NULL ? 0 : offsets[i + 1] - offsets[i];
        const status_t status = check_entry(set, key_len, row_len);
        if (status != STATUS_OK) return status;
        size += mem_node_size(mem_draw_levels(&random), key_len, row_len);
    }
    if (!arena_reserve(&set->arena, size)) return STATUS_NO_MEMORY;
    for (uint32_t i = 0; i < keys->n; i++) {
        const uint8_t *row = data == NULL ? NULL : data + offsets[i];
        const uint32_t len = data == NULL ? MEM_TOMBSTONE : offsets[i + 1] - offsets[i];
        mem_insert(set, keys_at(keys, i), stamp, row, len);
    }
    return STATUS_OK;
}

mem_row_set_t *mem_row_set_copy(const mem_row_set_t *set, uint64_t after, uint64_t upto) {
    mem_row_set_t *copy = mem_row_set_create(set->width);
    if (copy == NULL) return NULL;
    const mem_node_t *node = mem_next(set->head, 0);
    for (; node != NULL; node = mem_next(node->next, 0)) {
        const mem_entry_t entry = node->entry;
        if (entry.stamp <= after || entry.stamp > upto) continue;
        const slice_t key = mem_key(&entry);
        const bool is_row = entry.row_len != MEM_TOMBSTONE;
        const status_t status = mem_row_set_put(copy, key.data, key.len, entry.stamp,
                                                is_row ? entry.row : NULL, entry.row_len);
        if (status != STATUS_OK) {
            mem_row_set_destroy(copy);
            return NULL;
        }
    }
    return copy;
}
