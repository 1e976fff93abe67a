/* Blocks in the lightest encoding for what is in them, or plain where none pays. Part of the format:
 * docs/format-blocks.md, "Light blocks". What is chosen follows from the values alone, so encoding
 * is canonical still.
 *
 *   few runs                        their ends and values
 *   integers, times, decimals       packed numbers; sorted keys and constants, too
 *   floats with few digits          the integers that they are over a power of ten
 *   few values, often               packed codes, and the values
 *   strings else                    packed offsets
 *
 * A null has the value before it (varlen: no bytes), so that it costs nothing; it reads as zeros.
 * Safe from any thread. */
#ifndef TXNKV_ROWSET_ENCODE_H
#define TXNKV_ROWSET_ENCODE_H

#include "rowset/block.h"

/* A column, or some rows of it, as a block. out_len: as block_encode_size says; the block takes
 * *out_used of it. RANGE, INPUT, LIMIT: as there. NO_MEMORY. */
status_t encode_column(const block_column_t *column, block_rows_t rows, uint32_t seed,
                       uint8_t *out, size_t out_len, size_t *out_used);

/* Keys as a block; out_len: as block_size_of_keys says. NO_MEMORY. */
status_t encode_keys(const keys_t *keys, uint32_t seed, uint8_t *out, size_t out_len,
                     size_t *out_used);

#endif
