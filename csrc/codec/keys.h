/* An array of keys that memcmp orders: the common coin of the row set functions. */
#ifndef TXNKV_CODEC_KEYS_H
#define TXNKV_CODEC_KEYS_H

#include <stddef.h>
#include <stdint.h>

#include "common/status.h"

/* n keys. Fixed: key i is data[i * width, (i + 1) * width), offsets is NULL. Variable:
 * width is 0 and key i is data[o[i], o[i + 1]), where o are n + 1 little-endian u32 at any
 * alignment, never falling and never past data_len (block_verify and keys_check see to it).
 * A slice of keys is another keys_t over the same memory. */
typedef struct {
    const uint8_t *data;
    size_t data_len;
    const uint8_t *offsets;
    uint32_t width;
    uint32_t n;
} keys_t;

/* OK when offsets never fall and stay inside of the data; CORRUPT otherwise. For keys that
 * did not come out of this core. */
status_t keys_check(const keys_t *keys);

/* Copies keys rows[0 .. m) in that order. Fixed keys need m * width bytes and no offsets;
 * for variable ones keys_gather_size says how many, and m + 1 offsets are written.
 * RANGE: a row is not below keys->n. LIMIT: more than 4 GiB. */
status_t keys_gather_size(const keys_t *keys, const uint32_t *rows, uint32_t m,
                          uint64_t *out_size);
status_t keys_gather(const keys_t *keys, const uint32_t *rows, uint32_t m, uint8_t *out,
                     size_t out_len, uint32_t *out_offsets);

/* Copies keys [lo, lo + n) but for gone[0 .. gone_n), strictly ascending: their size, then as
 * keys_gather. RANGE: they are not all there. */
status_t keys_but_size(const keys_t *keys, uint32_t lo, uint32_t n, const uint32_t *gone,
                       uint32_t gone_n, uint64_t *out_size);
status_t keys_but(const keys_t *keys, uint32_t lo, uint32_t n, const uint32_t *gone,
                  uint32_t gone_n, uint8_t *out, size_t out_len, uint32_t *out_offsets);

/* The bytes of all keys, and a copy of them to `out`. Variable keys write offsets
 * [1 .. n] that begin at `base`, as where `out` stands in a longer array. */
uint64_t keys_data_len(const keys_t *keys);
void keys_copy(const keys_t *keys, uint32_t base, uint8_t *out, uint32_t *out_offsets);

#endif
