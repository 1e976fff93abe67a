/* Many rows of a block that is not plain, as a plain one has them. Blocks are parsed; damage gives
 * CORRUPT, and then what was written is not usable. Safe from any thread. */
#ifndef TXNKV_ROWSET_UNPACK_H
#define TXNKV_ROWSET_UNPACK_H

#include "rowset/block.h"

/* Rows [lo, lo + n) of BLOCK_FIXED, width * n bytes; nulls are zeros. */
status_t unpack_fixed(const block_t *block, uint32_t lo, uint32_t n, uint8_t *out);

/* Rows [lo, lo + n) of BLOCK_VARLEN: how many bytes they have, then their n + 1 offsets, from 0, and
 * those bytes. Nulls have none. LIMIT: more than u32 offsets can say. */
status_t unpack_size(const block_t *block, uint32_t lo, uint32_t n, uint64_t *out_size);
status_t unpack_varlen(const block_t *block, uint32_t lo, uint32_t n, uint32_t *out_offsets,
                       uint8_t *out, size_t out_len);

/* The whole block as a plain one: `out` points into the block and into *memory, which alloc_free
 * takes (NULL when the block is plain: then `out` is a copy of `block`). NO_MEMORY. */
status_t unpack_block(const block_t *block, block_t *out, void **memory);

/* How many bytes the keys of a block have, then the keys, and, where their widths differ, their
 * rows + 1 offsets. CORRUPT: it is no block of keys, or a plain one. */
status_t unpack_keys_size(const block_t *block, uint64_t *out_size);
status_t unpack_keys(const block_t *block, uint8_t *out, size_t out_len, uint32_t *out_offsets);

/* Rows [lo, lo + n) of packed keys of 4 or 8 bytes, but for gone[0 .. gone_n), strictly ascending,
 * as the integers that they are of, little-endian; is_signed: of signed ones. `out` has room for
 * all n. CORRUPT: the block is not of such keys. RANGE: a row that is gone is not among them. */
status_t unpack_integers(const block_t *block, uint32_t is_signed, uint32_t lo, uint32_t n,
                         const uint32_t *gone, uint32_t gone_n, uint8_t *out);

#endif
