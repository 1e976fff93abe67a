/* The messages of a batch as columns: from Arrow's memory into a body and back. A body, each
 * part padded by zeros to 8 bytes:
 *
 *   value ends | value bits | key bits | key ends | header ends | times | places | values | keys |
 *   headers
 *
 * Ends are u32 offsets[rows + 1] from 0, bits say "not null", places are u32 and ascend: of the
 * offsets that the batch takes, those of the messages. Which parts are there, the attributes say:
 * docs/format-topics.md. All functions are safe from any thread. */
#ifndef TXNKV_LOG_MESSAGES_H
#define TXNKV_LOG_MESSAGES_H

#include "log/batch.h"

/* An Arrow column of strings, or of i64 when it has no offsets. Lengths are those of whole
 * buffers in bytes, `offset` is Arrow's, in rows; validity is NULL when there are no nulls;
 * all is NULL when there is no such column. */
typedef struct {
    const uint8_t *values;
    size_t values_len;
    const uint8_t *offsets;
    size_t offsets_len;
    const uint8_t *validity;
    size_t validity_len;
    uint64_t offset;
} messages_column_t;

typedef struct {
    messages_column_t value;
    messages_column_t key;
    messages_column_t headers; /* no bytes are none */
    messages_column_t times;   /* microseconds; a null is `timestamp` */
    const uint8_t *places;     /* of each, u32, ascending; NULL: 0, 1, 2 */
    int64_t timestamp;
    uint32_t rows;
} messages_t;

/* What a body of these messages looks like. */
typedef struct {
    uint32_t attributes;
    uint32_t rows;
    uint32_t value_bytes;
    uint32_t key_bytes;
    uint32_t header_bytes;
    uint32_t raw_bytes;
    int64_t base_timestamp; /* the least */
    int64_t max_timestamp;
} messages_plan_t;

/* The plan, then the body into exactly raw_bytes. INPUT: a buffer is too short, Arrow offsets
 * fall, or places do not ascend. LIMIT: more than 2 GiB. The columns stay as they are between the two. */
status_t messages_plan(const messages_t *messages, messages_plan_t *out);
void messages_encode(const messages_t *messages, const messages_plan_t *plan, uint8_t *out,
                     size_t out_len);

/* A batch within a buffer; its rows are said, never asked for. */
typedef struct {
    uint64_t position;
    uint32_t length;
    uint32_t rows;
} messages_span_t;

/* Batches to be read: spans[0 .. n) of bytes, and for each that is compressed its body without
 * that (`bodies` is NULL when none is). Rows below from_offset are left out, and those behind
 * the first `limit`. */
typedef struct {
    const uint8_t *bytes;
    size_t len;
    const messages_span_t *spans;
    uint32_t n;
    const uint8_t *const *bodies;
    uint64_t from_offset;
    uint64_t limit;
} messages_source_t;

typedef struct {
    uint64_t rows;
    uint64_t value_bytes;
    uint64_t key_bytes;
    uint64_t header_bytes;
    uint32_t attributes; /* of all batches that give rows, joined by or */
} messages_sizes_t;

/* Arrow buffers: of `rows` numbers, `rows + 1` offsets, (rows + 7) / 8 bytes of bits, and as
 * many bytes as `sizes` says. value_validity may be NULL without BATCH_NULL_VALUES; the parts
 * of keys and of headers may be NULL without BATCH_KEYS and BATCH_HEADERS. */
typedef struct {
    uint64_t *offset;
    int64_t *timestamp;
    uint64_t *txn_id;
    uint8_t *value_validity;
    uint32_t *value_ends;
    uint8_t *values;
    uint8_t *key_validity;
    uint32_t *key_ends;
    uint8_t *keys;
    uint8_t *header_validity;
    uint32_t *header_ends;
    uint8_t *headers;
    uint64_t null_values;
    uint64_t null_keys;
    uint64_t null_headers;
} messages_out_t;

/* Of n spans in offset order, those that give rows: spans[lo .. lo + out_n). RANGE: a span is
 * outside of bytes; CORRUPT: there is no batch of its length. */
status_t messages_select(const uint8_t *bytes, size_t len, const messages_span_t *spans,
                         uint32_t n, uint64_t from_offset, uint64_t limit, uint32_t *out_lo,
                         uint32_t *out_n);

/* Looks at the batches that messages_select has accepted, at their checksums unless they are known
 * to be `intact`, and says which are compressed: their numbers into `out`, of room for n. CORRUPT:
 * one is damaged. */
status_t messages_check(const uint8_t *bytes, const messages_span_t *spans, uint32_t n,
                        bool intact, uint32_t *out, uint32_t *out_n);

/* What messages_decode will write, of spans that messages_check has accepted. CORRUPT: a body
 * makes no sense. LIMIT: more than Arrow's i32 offsets can say. */
status_t messages_decode_size(const messages_source_t *source, messages_sizes_t *out);
/* Of a source that messages_decode_size has accepted, and that is the same still. */
void messages_decode(const messages_source_t *source, const messages_sizes_t *sizes,
                     messages_out_t *out);

#endif
