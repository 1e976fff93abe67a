#include "memory/mem_entries.h"

#include "common/check.h"
#include "common/rows.h"
#include "memory/mem_node.h"

void mem_entries_kinds(const mem_entry_t *const *entries, uint32_t n, uint8_t *out) {
    for (uint32_t i = 0; i < n; i++) {
        out[i] = entries[i] == NULL ? 0 : entries[i]->row_len == MEM_TOMBSTONE ? 2 : 1;
    }
}

void mem_entries_stamps(const mem_entry_t *const *entries, uint32_t n, uint64_t *out) {
    for (uint32_t i = 0; i < n; i++) out[i] = entries[i] == NULL ? 0 : entries[i]->stamp;
}

status_t mem_entries_keys_size(const mem_entry_t *const *entries, uint32_t n, uint64_t *out_size) {
    uint64_t size = 0;
    for (uint32_t i = 0; i < n; i++) size += entries[i] == NULL ? 0 : entries[i]->key_len;
    *out_size = size;
    return size <= UINT32_MAX ? STATUS_OK : STATUS_LIMIT;
}

void mem_entries_keys(const mem_entry_t *const *entries, uint32_t n, uint8_t *out, size_t out_len,
                      uint32_t *out_offsets) {
    size_t at = 0;
    if (out_offsets != NULL) out_offsets[0] = 0;
    for (uint32_t i = 0; i < n; i++) {
        if (entries[i] != NULL) {
            const slice_t key = mem_key(entries[i]);
            CHECK(key.len <= out_len - at);
            copy_bytes(out + at, key.data, key.len);
            at += key.len;
        }
        if (out_offsets != NULL) out_offsets[i + 1] = (uint32_t)at;
    }
}

status_t mem_entries_rows(const mem_entry_t *const *entries, uint32_t n, const uint32_t *rows,
                          uint32_t m, row_slice_t *out) {
    if (rows == NULL ? m > n : !rows_below_or_null(rows, m, n)) return STATUS_RANGE;
    for (uint32_t i = 0; i < m; i++) {
        const uint32_t row = rows == NULL ? i : rows[i];
        const mem_entry_t *entry = row == ROWS_NULL ? NULL : entries[row];
        const bool is_row = entry != NULL && entry->row_len != MEM_TOMBSTONE;
        out[i].data = is_row ? entry->row : NULL;
        out[i].len = is_row ? entry->row_len : 0;
    }
    return STATUS_OK;
}
