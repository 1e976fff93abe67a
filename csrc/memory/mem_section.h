/* The entries of a MemRowSet as bytes: what a small transaction changed in one tablet, as the
 * commit log holds it. Part of the format: docs/format-blocks.md, "Payload section".
 *
 *   u32 n | n x { u32 key length | u32 row length, or 2^32 - 1: a tombstone | key | row } */
#ifndef TXNKV_MEMORY_MEM_SECTION_H
#define TXNKV_MEMORY_MEM_SECTION_H

#include "memory/mem_row_set.h"

/* The newest entry of each key, ascending: their size, then exactly that many bytes. LIMIT:
 * 4 GiB or more. No writer between the two. */
status_t mem_section_size(const mem_row_set_t *set, uint64_t *out_size);
void mem_section_write(const mem_row_set_t *set, uint8_t *out, size_t out_len);

/* Puts all of a section with one stamp; a writer's call. CORRUPT: its lengths do not add up, or
 * a key has not the set's width; nothing is put then. */
status_t mem_section_apply(mem_row_set_t *set, const uint8_t *section, size_t len, uint64_t stamp);

#endif
