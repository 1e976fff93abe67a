/* Binary search in ascending keys. Pure; safe from any thread. */
#ifndef TXNKV_ROWSET_SEARCH_H
#define TXNKV_ROWSET_SEARCH_H

#include "codec/keys.h"

/* The number of keys below `key`: where it stands or would be put. */
uint32_t search_lower_bound(const keys_t *keys, const uint8_t *key, size_t key_len);

/* For each probe its position in strictly ascending keys, or -1. Probes in ascending order
 * go faster. keys->n is below 2^31. */
void search_batch(const keys_t *keys, const keys_t *probes, int32_t *out_positions);

#endif
