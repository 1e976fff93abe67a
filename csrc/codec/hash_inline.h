/* XXH64, inline so that loops over 8-byte keys keep it in registers. */
#ifndef TXNKV_CODEC_HASH_INLINE_H
#define TXNKV_CODEC_HASH_INLINE_H

#include "common/bytes.h"

#define HASH_PRIME_1 UINT64_C(0x9E3779B185EBCA87)
#define HASH_PRIME_2 UINT64_C(0xC2B2AE3D27D4EB4F)
#define HASH_PRIME_3 UINT64_C(0x165667B19E3779F9)
#define HASH_PRIME_4 UINT64_C(0x85EBCA77C2B2AE63)
#define HASH_PRIME_5 UINT64_C(0x27D4EB2F165667C5)

static inline uint64_t hash_rotl(uint64_t v, unsigned by) { return v << by | v >> (64 - by); }

static inline uint64_t hash_round(uint64_t lane, uint64_t input) {
    return hash_rotl(lane + input * HASH_PRIME_2, 31) * HASH_PRIME_1;
}

static inline uint64_t hash_merge(uint64_t hash, uint64_t lane) {
    return (hash ^ hash_round(0, lane)) * HASH_PRIME_1 + HASH_PRIME_4;
}

static inline uint64_t hash_word(uint64_t hash, uint64_t word) {
    return hash_rotl(hash ^ hash_round(0, word), 27) * HASH_PRIME_1 + HASH_PRIME_4;
}

static inline uint64_t hash_finish(uint64_t hash) {
    hash = (hash ^ hash >> 33) * HASH_PRIME_2;
    hash = (hash ^ hash >> 29) * HASH_PRIME_3;
    return hash ^ hash >> 32;
}

/* The hash of 8 bytes, given as the little-endian word they form. */
static inline uint64_t hash_8_bytes(uint64_t word) {
    return hash_finish(hash_word(HASH_PRIME_5 + 8, word));
}

#endif
