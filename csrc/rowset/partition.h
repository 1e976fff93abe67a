/* Spreads rows over partitions. Pure; safe from any thread. Numbers are part of the format:
 * a row stays in the tablet that they name. */
#ifndef TXNKV_ROWSET_PARTITION_H
#define TXNKV_ROWSET_PARTITION_H

#include "codec/keys.h"
#include "common/status.h"

/* out[i] = a bucket below `buckets` (1 .. 65536) by the hash of key i. The hash is
 * multiplied by 2^64 / phi first: Bloom filters inside of a bucket use its high bits. */
void partition_hash(const keys_t *keys, uint32_t buckets, uint16_t *out);

/* out[i] = how many of the ascending bounds are not above key i. bounds->n is at most 65535. */
void partition_range(const keys_t *keys, const keys_t *bounds, uint16_t *out);

/* Rows 0 .. n in the order of their numbers, stable: those of partition p become
 * out_rows[out_starts[p] .. out_starts[p + 1]). RANGE: a number is not below n_parts
 * (1 .. 65536). */
status_t partition_scatter(const uint16_t *numbers, uint32_t n, uint32_t n_parts,
                           uint32_t *out_rows, uint32_t *out_starts);

#endif
