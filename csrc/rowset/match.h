/* Keys that a block and a list have in common. Safe from any thread. */
#ifndef TXNKV_ROWSET_MATCH_H
#define TXNKV_ROWSET_MATCH_H

#include "rowset/block.h"

/* Rows of a block of ascending keys that have one of `some`, ascending, and the position of that
 * key (of the first of equal ones); both ascending. Few are searched in the block as it lies.
 * versioned: equal keys may stand together in the block.
 * LIMIT: there are more rows than `room`. CORRUPT: it is no block of keys, or damaged. NO_MEMORY. */
status_t match_block(const block_t *block, const keys_t *some, uint32_t versioned, uint32_t room,
                     uint32_t *out_rows, uint32_t *out_positions, uint32_t *out_count);

#endif
