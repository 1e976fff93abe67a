/* Whole bitmaps in Arrow's order. Bits behind n are 0 in all that is written and never
 * looked at in what is read. Pure; safe from any thread. */
#ifndef TXNKV_COMMON_BITMAP_H
#define TXNKV_COMMON_BITMAP_H

#include <stdint.h>

#include "common/status.h"

/* How many of bits [at, at + n) are set. */
uint64_t bitmap_count(const uint8_t *bits, uint64_t at, uint64_t n);

/* Copies bits [at, at + n) to the front of `out`; returns how many are set. */
uint64_t bitmap_copy(const uint8_t *bits, uint64_t at, uint64_t n, uint8_t *out);

/* The positions, ascending, of the bits that equal `wanted` (0 or 1); returns how many. */
uint32_t bitmap_positions(const uint8_t *bits, uint32_t n, unsigned wanted, uint32_t *out);

/* n bits, set at the m positions, which may repeat. RANGE: one is not below n. */
status_t bitmap_of(const uint32_t *positions, uint32_t m, uint32_t n, uint8_t *out);

/* out = a | b, a & b, a & ~b; returns how many are set. */
uint32_t bitmap_or(const uint8_t *a, const uint8_t *b, uint32_t n, uint8_t *out);
uint32_t bitmap_and(const uint8_t *a, const uint8_t *b, uint32_t n, uint8_t *out);
uint32_t bitmap_and_not(const uint8_t *a, const uint8_t *b, uint32_t n, uint8_t *out);

#endif
