#include "rowset/bloom.h"

#include "codec/hash.h"
#include "codec/hash_inline.h"
#include "codec/keys_inline.h"
#include "common/bits.h"
#include "common/check.h"

enum { BLOCK_BYTES = 32, WORDS = 8, BITS_PER_KEY = 10, AHEAD = 16 };

static const uint32_t salts[WORDS] = {0x47b6137bU, 0x44974d91U, 0x8824ad5bU, 0xa2b7289dU,
                                      0x705495c7U, 0x2df1424bU, 0x9efc4947U, 0x5c6bfb31U};

uint64_t bloom_size(uint32_t n) {
    const uint64_t bits = (uint64_t)n * BITS_PER_KEY, block_bits = 8 * BLOCK_BYTES;
    return bits == 0 ? BLOCK_BYTES : (bits + block_bits - 1) / block_bits * BLOCK_BYTES;
}

static size_t block_at(uint64_t hash, uint64_t blocks) {
    return (size_t)(((hash >> 32) * blocks) >> 32) * BLOCK_BYTES;
}

static uint64_t hash_of(const keys_t *keys, uint32_t i) {
    if (keys->width == 8) return hash_8_bytes(load_le64(keys->data + 8 * (size_t)i));
    const slice_t key = keys_at(keys, i);
    return hash64(key.data, key.len);
}

static void block_insert(uint8_t *block, uint32_t low) {
    uint32_t words[WORDS];
    memcpy(words, block, sizeof words);
    for (unsigned w = 0; w < WORDS; w++) words[w] |= UINT32_C(1) << (low * salts[w] >> 27);
    memcpy(block, words, sizeof words);
}

static unsigned block_has(const uint8_t *block, uint32_t low) {
    uint32_t words[WORDS], missing = 0;
    memcpy(words, block, sizeof words);
    for (unsigned w = 0; w < WORDS; w++) {
        missing |= ~words[w] & UINT32_C(1) << (low * salts[w] >> 27);
    }
    return missing == 0;
}

static void check_len(size_t len) { CHECK(len >= BLOCK_BYTES && len % BLOCK_BYTES == 0); }

/* Hashes run some keys ahead of the filter, so that its cache lines are there in time. */
void bloom_build(const keys_t *keys, uint8_t *out, size_t out_len) {
    check_len(out_len);
    memset(out, 0, out_len);
    const uint64_t blocks = out_len / BLOCK_BYTES;
    uint64_t hashes[AHEAD];
    for (uint32_t from = 0; from < keys->n;) {
        const uint32_t n = keys->n - from < AHEAD ? keys->n - from : AHEAD;
        for (uint32_t i = 0; i < n; i++) {
            hashes[i] = hash_of(keys, from + i);
            __builtin_prefetch(out + block_at(hashes[i], blocks), 1);
        }
        for (uint32_t i = 0; i < n; i++) {
            block_insert(out + block_at(hashes[i], blocks), (uint32_t)hashes[i]);
        }
        from += n;
    }
}

int bloom_probe(const uint8_t *filter, size_t filter_len, const uint8_t *key, size_t key_len) {
    check_len(filter_len);
    const uint64_t hash = hash64(key, key_len);
    return (int)block_has(filter + block_at(hash, filter_len / BLOCK_BYTES), (uint32_t)hash);
}

void bloom_probe_batch(const uint8_t *filter, size_t filter_len, const keys_t *probes,
                       uint8_t *out_bits, uint32_t *out_count) {
    check_len(filter_len);
    memset(out_bits, 0, bits_bytes(probes->n));
    const uint64_t blocks = filter_len / BLOCK_BYTES;
    uint64_t hashes[AHEAD];
    uint32_t count = 0;
    for (uint32_t from = 0; from < probes->n;) {
        const uint32_t n = probes->n - from < AHEAD ? probes->n - from : AHEAD;
        for (uint32_t i = 0; i < n; i++) {
            hashes[i] = hash_of(probes, from + i);
            __builtin_prefetch(filter + block_at(hashes[i], blocks), 0);
        }
        for (uint32_t i = 0; i < n; i++) {
            const unsigned has =
                block_has(filter + block_at(hashes[i], blocks), (uint32_t)hashes[i]);
            bits_or(out_bits, from + i, has);
            count += has;
        }
        from += n;
    }
    *out_count = count;
}
