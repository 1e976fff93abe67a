/* Numbers of 64 bits in as few bits as they need, each read in constant time. Part of the format:
 * docs/format-blocks.md, "Packed numbers".
 *
 * They are cut into frames of 1024. A frame is a line and what each number is above it:
 *
 *     number i = base + (i * slope >> shift) + rest i        (falls: base - ...), modulo 2^64
 *
 *      |            . ' `           A counter is a line without rests; sorted keys, offsets and
 *      |       . ' .                times are near one; other numbers have slope 0, and their
 *      |  . ' .   <- rest           least is the base.
 *
 * The rests have as many bits as the greatest needs. They lie in 16 lanes: rest i is in lane
 * i % 16, and a row of words has one word of each lane, so that plain loops over the lanes
 * read and write many at once. A frame of b bits has b rows of words, a last one that is not
 * full fewer. All functions are safe from any thread. */
#ifndef TXNKV_ROWSET_PACKED_H
#define TXNKV_ROWSET_PACKED_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#include "common/status.h"

enum { PACKED_FRAME = 1024, PACKED_LANES = 16, PACKED_FRAME_BYTES = 24, PACKED_ROW_BYTES = 128 };

/* A frame as it is stored, little-endian. */
typedef struct {
    uint64_t base;
    uint64_t slope;
    uint32_t at;    /* its first row of words */
    uint8_t bits;   /* of a rest, at most 64 */
    uint8_t shift;  /* at most 63 */
    uint8_t falls;  /* 1: the line falls */
    uint8_t unused; /* 0 */
} packed_frame_t;

/* n numbers in a block: (n + 1023) / 1024 frames, then rows of words. At any alignment. */
typedef struct {
    const uint8_t *frames;
    const uint8_t *words;
    uint64_t rows;
    uint32_t n;
} packed_t;

/* Takes n packed numbers off the front of `len` bytes; out_len says how many they are. CORRUPT:
 * they are not there. In constant time: single frames are checked as they are read. */
status_t packed_parse(const uint8_t *bytes, uint64_t len, uint32_t n, packed_t *out,
                      uint64_t *out_len);

/* Whether the words of all frames are there. */
bool packed_sane(const packed_t *packed);

/* Number i. CORRUPT: its frame is damaged. i is below n. */
status_t packed_get(const packed_t *packed, uint32_t i, uint64_t *out);

/* Asks for the memory of number i, which is below n, once that of its frame is there. */
void packed_prefetch(const packed_t *packed, uint32_t i);

/* The numbers of a frame, 1024 or, of the last, as many as there are; returns how many, 0 when
 * the frame is damaged. `out` has room for 1024. */
uint32_t packed_frame(const packed_t *packed, uint32_t frame, uint64_t *out);

/* The first position from lo to hi whose number is not below `number`, else hi, in numbers that
 * ascend (as all unsigned). CORRUPT: a frame is damaged. hi is not above n. */
status_t packed_lower_bound(const packed_t *packed, uint64_t number, uint32_t lo, uint32_t hi,
                            uint32_t *out);

/* How n <= 1024 numbers are packed best, with `at` rows of words before theirs. Only the low
 * `bits` bits of them (8, 16, 32, 64) come back. Returns the rows of words that they need. */
uint32_t packed_plan(const uint64_t *numbers, uint32_t n, uint32_t bits, uint32_t at,
                     packed_frame_t *out);

/* Writes the rests of a planned frame into its rows of words. */
void packed_write(const uint64_t *numbers, uint32_t n, const packed_frame_t *frame, uint8_t *out);

/* Bytes of n packed numbers that need so many rows of words. */
uint64_t packed_size(uint32_t n, uint64_t rows);

/* The loops as they are for any CPU, and as this one has them: for tests, which compare them. */
void packed_frame_plain(const packed_frame_t *frame, const uint8_t *words, uint32_t n,
                        uint64_t *out);
uint32_t packed_plan_plain(const uint64_t *numbers, uint32_t n, uint32_t bits, uint32_t at,
                           packed_frame_t *out);
void packed_write_plain(const uint64_t *numbers, uint32_t n, const packed_frame_t *frame,
                        uint8_t *out);

#endif
