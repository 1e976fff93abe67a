/* Access to one key of an array. */
#ifndef TXNKV_CODEC_KEYS_INLINE_H
#define TXNKV_CODEC_KEYS_INLINE_H

#include "codec/keys.h"
#include "common/bytes.h"

typedef struct {
    const uint8_t *data;
    size_t len;
} slice_t;

static inline slice_t keys_at(const keys_t *keys, uint32_t i) {
    slice_t key;
    if (keys->offsets == NULL) {
        key.data = keys->data + (size_t)i * keys->width;
        key.len = keys->width;
    } else {
        const uint32_t from = load_le32(keys->offsets + 4 * (size_t)i);
        key.data = keys->data + from;
        key.len = load_le32(keys->offsets + 4 * (size_t)i + 4) - from;
    }
    return key;
}

/* Most keys differ in their first 8 bytes: a call of memcmp is for the rest. */
static inline int slice_compare(slice_t a, slice_t b) {
    if (a.len >= 8 && b.len >= 8) {
        const uint64_t x = load_be64(a.data), y = load_be64(b.data);
        if (x != y) return x < y ? -1 : 1;
    }
    const int order = compare_bytes(a.data, b.data, a.len < b.len ? a.len : b.len);
    if (order != 0) return order;
    return (a.len > b.len) - (a.len < b.len);
}

/* Keys of 4 and 8 bytes are numbers, compared as such. */
static inline int keys_are_numbers(const keys_t *a, const keys_t *b) {
    return a->width == b->width && (a->width == 8 || a->width == 4);
}

/* Key i of 4- or 8-byte keys; `width` is a constant at each call. */
static inline uint64_t keys_number(const uint8_t *data, uint32_t width, size_t i) {
    return width == 8 ? load_be64(data + 8 * i) : load_be32(data + 4 * i);
}

/* The 8 bytes from `skip` on as a number that orders as they do; zeros stand for what is
 * behind the end, so equal numbers say nothing about order, unequal ones do. */
static inline uint64_t slice_prefix(slice_t key, size_t skip) {
    if (key.len >= skip + 8) return load_be64(key.data + skip);
    uint8_t padded[8] = {0};
    if (key.len > skip) memcpy(padded, key.data + skip, key.len - skip);
    return load_be64(padded);
}

#endif
