/* Record batches, the unit of a topic's log. Part of the format: docs/format-topics.md.
 *
 *   header (80 bytes) | chunk (24 bytes, of pieces of a large message) | columns or control
 *
 * The checksum covers all from `length` on: base_offset and commit_ts are set later. Columns
 * may be compressed; the core sees them before and after. Bytes from disk are checked: any cut
 * and any flipped bit give CORRUPT or an answer, never a read outside. Safe from any thread. */
#ifndef TXNKV_LOG_BATCH_H
#define TXNKV_LOG_BATCH_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#include "common/status.h"

enum {
    BATCH_HEADER_BYTES = 80,
    BATCH_CHUNK_BYTES = 24,
    BATCH_CONTROL_BYTES = 24, /* of a control body, before what belongs to its type */
    BATCH_MAGIC = 1,
    BATCH_CODECS = 3, /* none, lz4, zstd */
    BATCH_COUNT_MAX = 0x7FFFFFFF
};

typedef enum {
    BATCH_CODEC = 7, /* bits that hold a number below BATCH_CODECS */
    BATCH_TRANSACTIONAL = 8,
    BATCH_CONTROL = 16,
    BATCH_DECIDED = 32, /* transactional and committed: no marker comes */
    BATCH_KEYS = 64,
    BATCH_HEADERS = 128,
    BATCH_TIMES = 256,
    BATCH_NULL_VALUES = 512,
    BATCH_CHUNK = 1024,
    BATCH_PLACES = 2048, /* message i has not place i among the offsets taken */
    BATCH_ATTRIBUTES = 4095
} batch_attribute_t;

typedef enum {
    CONTROL_ABORT = 0,
    CONTROL_COMMIT = 1,
    CONTROL_FILLER = 2,
    CONTROL_SIDE_LIST = 3
} control_type_t;

/* Little-endian, at the start of every batch. */
typedef struct {
    uint64_t base_offset;
    uint64_t commit_ts;
    uint32_t crc; /* of everything behind it */
    uint32_t length;
    uint16_t magic;
    uint16_t attributes;
    uint32_t count; /* offsets taken */
    uint64_t txn_id;
    int64_t base_timestamp;
    int64_t max_timestamp;
    uint64_t producer_id;
    int32_t base_sequence;
    uint16_t epoch;
    uint16_t reserved;
    uint32_t rows;
    uint32_t raw_bytes; /* of columns or control before compression */
} batch_header_t;

/* The header of the batch at the start of `bytes`, which may go on behind it. CORRUPT: it makes
 * no sense, or the batch is cut off. The checksum is not looked at. */
status_t batch_parse(const uint8_t *bytes, size_t len, batch_header_t *out);

/* As batch_parse, and the bytes are those that were written. */
status_t batch_check(const uint8_t *bytes, size_t len);

/* What of `bytes` is as it was written: `most` batches at most, from the one on that holds an
 * offset, [out[0], out[1]) of the bytes; out[2] is the offset behind them. Their offsets follow
 * each other from base_offset on; batches before are passed by their headers, and without
 * `checksums` only headers and offsets are looked at. When it ends before `len` and `most`, the
 * batch at out[2] is damaged or gone. */
void batch_sound(const uint8_t *bytes, size_t len, uint64_t base_offset, uint64_t offset,
                 uint32_t most, bool checksums, uint64_t out[3]);

/* How many of the first bytes are batches, one behind the other, with the right checksums. */
size_t batch_intact(const uint8_t *bytes, size_t len);

/* How many batches fill `bytes`, one behind the other. CORRUPT: something else is there. */
status_t batch_count(const uint8_t *bytes, size_t len, uint32_t *out_n);

/* Where each of `room` batches begins, as many as batch_count said. */
status_t batch_walk(const uint8_t *bytes, size_t len, uint64_t *out_positions, uint32_t room);

/* The least that a message takes in memory beside what stands in its body: offset, timestamp and
 * transaction. */
enum { BATCH_ROW_BYTES = 24 };

/* The first batches of `bytes` that are `room` bytes together at most when they are decoded: how
 * long they are, and what they are decoded. From a header on that makes no sense bytes count as
 * they are, and as one batch: whoever reads them says what is wrong. */
void batch_within(const uint8_t *bytes, size_t len, uint64_t room, uint64_t *out_len,
                  uint64_t *out_decoded);

/* Sets the offsets of all batches of `bytes`, from base_offset on without a gap, and their
 * commit timestamp where it is not 0. CORRUPT: these are no batches; LIMIT: the offsets pass
 * 2^63. Nothing was changed then. */
status_t batch_place(uint8_t *bytes, size_t len, uint64_t base_offset, uint64_t commit_ts);

/* Writes the header and the checksum before a body that already stands at its place in `out`;
 * length, magic and crc of `header` are not read. CHECKs that the header is sane. */
void batch_seal(const batch_header_t *header, uint8_t *out, size_t out_len);

#endif
