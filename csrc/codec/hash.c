#include "codec/hash.h"

#include "codec/hash_inline.h"

/* Takes whole stripes of 32 bytes from *data and folds them to one word. */
static uint64_t hash_stripes(const uint8_t **data, const uint8_t *end) {
    uint64_t a = HASH_PRIME_1 + HASH_PRIME_2, b = HASH_PRIME_2, c = 0, d = 0 - HASH_PRIME_1;
    const uint8_t *p = *data;
    for (; end - p >= 32; p += 32) {
        a = hash_round(a, load_le64(p));
        b = hash_round(b, load_le64(p + 8));
        c = hash_round(c, load_le64(p + 16));
        d = hash_round(d, load_le64(p + 24));
    }
    *data = p;
    uint64_t hash = hash_rotl(a, 1) + hash_rotl(b, 7) + hash_rotl(c, 12) + hash_rotl(d, 18);
    hash = hash_merge(hash, a);
    hash = hash_merge(hash, b);
    hash = hash_merge(hash, c);
    return hash_merge(hash, d);
}

uint64_t hash64(const uint8_t *data, size_t len) {
    if (len == 0) return hash_finish(HASH_PRIME_5);
    const uint8_t *p = data, *end = data + len;
    uint64_t hash = len >= 32 ? hash_stripes(&p, end) : HASH_PRIME_5;
    hash += len;
    for (; end - p >= 8; p += 8) hash = hash_word(hash, load_le64(p));
    if (end - p >= 4) {
        hash = hash_rotl(hash ^ load_le32(p) * HASH_PRIME_1, 23) * HASH_PRIME_2 + HASH_PRIME_3;
        p += 4;
    }
    for (; p < end; p++) hash = hash_rotl(hash ^ *p * HASH_PRIME_5, 11) * HASH_PRIME_1;
    return hash_finish(hash);
}
