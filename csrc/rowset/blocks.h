/* Reads of rows that are scattered over many blocks, all in one call. Rows are named by the
 * number of their block and their row in it; 2^32 - 1 as a block is no row. What a step needs
 * from memory is asked for some rows ahead, so the calls wait less than single reads would.
 * Pure; safe from any thread. */
#ifndef TXNKV_ROWSET_BLOCKS_H
#define TXNKV_ROWSET_BLOCKS_H

#include "rowset/block.h"

/* Block `column` of each of n lists; NULL stands for a list of none. */
void blocks_pick(const block_bytes_t *const *lists, uint32_t n, uint32_t column,
                 block_bytes_t *out);

/* Where each probe stands: the block and the row of the first such key, or 2^32 - 1 twice.
 * Blocks hold ascending keys and follow each other; firsts are their first keys. A block that
 * is not there has no keys. Probes come in any order; ascending ones go faster. CORRUPT: a
 * block holds no keys. */
status_t blocks_find(const block_bytes_t *blocks, const keys_t *firsts, const keys_t *probes,
                     uint32_t *out_block, uint32_t *out_row);

/* Rows of n blocks of one kind and width, as block_decode gives them. A row in a block that is
 * not there is a null. RANGE: a block or row is not there. CORRUPT: a block is of another kind.
 * LIMIT: more than Arrow's i32 offsets can say. The size of values is rows * width, or a
 * bitmap's; BLOCK_VARLEN has blocks_gather_ends first, for offsets and size. */
status_t blocks_gather_ends(const block_bytes_t *blocks, uint32_t n, const uint32_t *block_of,
                            const uint32_t *row_of, uint32_t rows, uint32_t *out_offsets);
status_t blocks_gather(const block_bytes_t *blocks, uint32_t n, block_kind_t kind, uint32_t width,
                       const uint32_t *block_of, const uint32_t *row_of, uint32_t rows,
                       const uint32_t *offsets, uint8_t *out_validity, uint8_t *out_values,
                       uint32_t *out_null_count);

#endif
