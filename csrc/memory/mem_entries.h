/* Lists of entries of a MemRowSet as arrays. NULL in a list: no entry. Pure; safe from any
 * thread for as long as the set is there. */
#ifndef TXNKV_MEMORY_MEM_ENTRIES_H
#define TXNKV_MEMORY_MEM_ENTRIES_H

#include "memory/mem_row_set.h"

/* 0: no entry (and stamp 0), 1: a row, 2: a tombstone. */
void mem_entries_kinds(const mem_entry_t *const *entries, uint32_t n, uint8_t *out);
void mem_entries_stamps(const mem_entry_t *const *entries, uint32_t n, uint64_t *out);

/* The keys, one behind the other: their bytes together, then the keys, with n + 1 offsets
 * unless out_offsets is NULL. No entry: no bytes. LIMIT: 4 GiB or more. */
status_t mem_entries_keys_size(const mem_entry_t *const *entries, uint32_t n, uint64_t *out_size);
void mem_entries_keys(const mem_entry_t *const *entries, uint32_t n, uint8_t *out, size_t out_len,
                      uint32_t *out_offsets);

/* The rows of entries rows[0 .. m), or of the first m when rows is NULL: none for ROWS_NULL,
 * for a tombstone and where there is no entry. RANGE: a number is not below n. */
status_t mem_entries_rows(const mem_entry_t *const *entries, uint32_t n, const uint32_t *rows,
                          uint32_t m, row_slice_t *out);

#endif
