/* Zone maps: the least and greatest value of a block. Safe from any thread. */
#ifndef TXNKV_ROWSET_ZONE_H
#define TXNKV_ROWSET_ZONE_H

#include "codec/key.h"
#include "rowset/block.h"

enum { ZONE_BYTES = 16 };

/* Values in the encoding of a key's last column, cut to 16 bytes. A cut min is still a lower
 * bound; a cut max stands for every value that begins with it. */
typedef struct {
    uint8_t min[16];
    uint8_t max[16];
    uint32_t min_len;
    uint32_t max_len;
    uint32_t null_count;
    uint32_t has_values; /* 0: all rows are null, or there are none; no min, no max */
    uint32_t exact;      /* 0: min or max was cut */
} zone_t;

/* CORRUPT when the block is not one of values of `type`. NO_MEMORY: one that is not plain is
 * looked at by way of a plain one. */
status_t zone_compute(const block_t *block, key_type_t type, zone_t *out);

#endif
