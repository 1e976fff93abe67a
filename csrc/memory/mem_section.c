#include "memory/mem_section.h"

#include "common/check.h"
#include "memory/mem_node.h"

enum { COUNT_BYTES = 4, LENGTHS_BYTES = 8 };

static size_t row_bytes(uint32_t row_len) { return row_len == MEM_TOMBSTONE ? 0 : row_len; }

/* The newest entry of the next key behind `node`'s. */
static const mem_node_t *next_key(const mem_node_t *node) {
    const mem_probe_t probe = mem_probe(mem_key(&node->entry), 0);
    do {
        node = mem_next(node->next, 0);
    } while (node != NULL && mem_compare_key(node, &probe) == 0);
    return node;
}

status_t mem_section_size(const mem_row_set_t *set, uint64_t *out_size) {
    uint64_t size = COUNT_BYTES;
    for (const mem_node_t *node = mem_next(set->head, 0); node != NULL; node = next_key(node)) {
        size += LENGTHS_BYTES + node->entry.key_len + row_bytes(node->entry.row_len);
    }
    *out_size = size;
    return size <= UINT32_MAX ? STATUS_OK : STATUS_LIMIT;
}

void mem_section_write(const mem_row_set_t *set, uint8_t *out, size_t out_len) {
    uint32_t n = 0;
    size_t at = COUNT_BYTES;
    for (const mem_node_t *node = mem_next(set->head, 0); node != NULL; node = next_key(node)) {
        const mem_entry_t *entry = &node->entry;
        const size_t row_len = row_bytes(entry->row_len);
        CHECK(at + LENGTHS_BYTES + entry->key_len + row_len <= out_len);
        store_le32(out + at, entry->key_len);
        store_le32(out + at + 4, entry->row_len);
        copy_bytes(out + at + LENGTHS_BYTES, mem_key(entry).data, entry->key_len + row_len);
        at += LENGTHS_BYTES + entry->key_len + row_len;
        n++;
    }
    CHECK(at == out_len);
    store_le32(out, n);
}

typedef struct {
    slice_t key;
    const uint8_t *row;
    uint32_t row_len;
} item_t;

/* The item at byte `*at`, which is moved behind it. */
static bool read_item(const uint8_t *section, size_t len, size_t *at, item_t *out) {
    if (len - *at < LENGTHS_BYTES) return false;
    const uint32_t key_len = load_le32(section + *at), row_len = load_le32(section + *at + 4);
    const size_t left = len - *at - LENGTHS_BYTES;
    if (key_len > left || row_bytes(row_len) > left - key_len) return false;
    out->key = (slice_t){section + *at + LENGTHS_BYTES, key_len};
    out->row = out->key.data + key_len;
    out->row_len = row_len;
    *at += LENGTHS_BYTES + key_len + row_bytes(row_len);
    return true;
}

/* What the arena must have for all items; checks every length on the way. */
static status_t measure(const mem_row_set_t *set, const uint8_t *section, size_t len,
                        size_t *out_size) {
    if (len < COUNT_BYTES) return STATUS_CORRUPT;
    uint64_t random = set->random;
    size_t at = COUNT_BYTES, size = 0;
    const uint32_t n = load_le32(section);
    for (uint32_t i = 0; i < n; i++) {
        item_t item;
        if (!read_item(section, len, &at, &item)) return STATUS_CORRUPT;
        if (set->width != 0 && item.key.len != set->width) return STATUS_CORRUPT;
        size += mem_node_size(mem_draw_levels(&random), item.key.len, item.row_len);
    }
    *out_size = size;
    return at == len ? STATUS_OK : STATUS_CORRUPT;
}

status_t mem_section_apply(mem_row_set_t *set, const uint8_t *section, size_t len,
                           uint64_t stamp) {
    size_t size, at = COUNT_BYTES;
    const status_t status = measure(set, section, len, &size);
    if (status != STATUS_OK) return status;
    if (!arena_reserve(&set->arena, size)) return STATUS_NO_MEMORY;
    const uint32_t n = load_le32(section);
    for (uint32_t i = 0; i < n; i++) {
        item_t item;
        const bool whole = read_item(section, len, &at, &item);
        CHECK(whole);
        mem_insert(set, item.key, stamp, item.row, item.row_len);
    }
    return STATUS_OK;
}
