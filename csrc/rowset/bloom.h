/* The split-block Bloom filter of Parquet (docs/format-blocks.md, "Bloom filter"): blocks of 256
 * bits, one per key, 8 bits set in each by 8 odd multipliers. Pure; safe from any thread. */
#ifndef TXNKV_ROWSET_BLOOM_H
#define TXNKV_ROWSET_BLOOM_H

#include "codec/keys.h"

/* Bytes of a filter for n keys at 10 bits a key (one in a hundred false hits): a multiple
 * of 32, at least 32. */
uint64_t bloom_size(uint32_t n);

/* Writes the filter of the keys; `out_len` is a multiple of 32. */
void bloom_build(const keys_t *keys, uint8_t *out, size_t out_len);

/* 0: the key is in no set that the filter was built of. 1: it may be. */
int bloom_probe(const uint8_t *filter, size_t filter_len, const uint8_t *key, size_t key_len);

/* The same for many: bit i of out_bits and how many are set. */
void bloom_probe_batch(const uint8_t *filter, size_t filter_len, const keys_t *probes,
                       uint8_t *out_bits, uint32_t *out_count);

#endif
