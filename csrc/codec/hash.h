/* XXH64 with seed 0: the hash of Bloom filters and of hash partitions. Part of the format.
 * Pure; safe from any thread. */
#ifndef TXNKV_CODEC_HASH_H
#define TXNKV_CODEC_HASH_H

#include <stddef.h>
#include <stdint.h>

uint64_t hash64(const uint8_t *data, size_t len);

#endif
