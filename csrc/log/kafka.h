/* Record batches as Kafka's clients speak them (format 2), from and into columns:
 *
 *   base offset i64 | length i32 | leader epoch i32 | magic 2 | crc u32 | attributes i16 |
 *   last offset delta i32 | base and max timestamp i64 | producer i64 | its epoch i16 |
 *   base sequence i32 | count i32 | records                     61 bytes, big-endian
 *   record: length | attributes i8 | time delta | offset delta | key | value | headers
 *
 * Lengths and deltas of records are zigzag varints, the length -1 is null. The checksum (CRC-32C)
 * covers all from `attributes` on. Bytes from a client are checked: any cut and any flipped bit
 * give CORRUPT or an answer, never a read outside. Safe from any thread. */
#ifndef TXNKV_LOG_KAFKA_H
#define TXNKV_LOG_KAFKA_H

#include "log/batch.h"

enum { KAFKA_HEADER_BYTES = 61 };

/* What columns of some records take. */
typedef struct {
    uint64_t value_bytes;
    uint64_t key_bytes;
    uint64_t header_bytes; /* as log/headers.h has them */
    uint64_t null_values;
    uint64_t null_keys;
    uint64_t null_headers; /* records without any */
} kafka_sizes_t;

/* Arrow buffers of `count` rows: bits, count + 1 ends, bytes; times in microseconds. */
typedef struct {
    int64_t *timestamp;
    uint8_t *value_validity;
    uint32_t *value_ends;
    uint8_t *values;
    uint8_t *key_validity;
    uint32_t *key_ends;
    uint8_t *keys;
    uint8_t *header_validity;
    uint32_t *header_ends;
    uint8_t *headers;
} kafka_columns_t;

/* Looks at all `count` records of a batch, without compression, that fill `bytes`. CORRUPT: they
 * do not, their offsets are not 0, 1, 2, ..., or a time is no microsecond of 64 bits. LIMIT: more
 * than 2 GiB, or headers that have more than 65535 names or a longer one. */
status_t kafka_records_size(const uint8_t *bytes, size_t len, uint32_t count, int64_t base_millis,
                            kafka_sizes_t *out);

/* Writes the columns of records that kafka_records_size has accepted. */
void kafka_records_decode(const uint8_t *bytes, size_t len, uint32_t count, int64_t base_millis,
                          const kafka_columns_t *out);

/* Batches of a log up to an offset, and their messages as columns, in offset order: those that
 * were not asked for, and pieces of large ones, are missing. Null buffers are columns of nulls,
 * null validity is a column without any. */
typedef struct {
    const uint8_t *log;
    size_t log_len;
    uint64_t upto;
    uint64_t rows;
    const uint64_t *offset;
    const int64_t *timestamp;
    const uint8_t *value_validity;
    const uint32_t *value_ends;
    const uint8_t *values;
    const uint8_t *key_validity;
    const uint32_t *key_ends;
    const uint8_t *keys;
    const uint8_t *header_validity;
    const uint32_t *header_ends;
    const uint8_t *headers;
} kafka_source_t;

/* The same as Kafka's batches: messages of open, aborted and marked transactions under the
 * transaction's id, with control batches for its end; all else as messages of nobody. Batches of
 * a kind that follow each other are one. Each ends where the log's does, so that a reader comes
 * to `upto` also where nothing is to be read. The bytes that it takes; then these bytes. CORRUPT:
 * the log makes no sense; LIMIT: more than 2 GiB. */
status_t kafka_batches_size(const kafka_source_t *source, uint64_t *out);
void kafka_batches_encode(const kafka_source_t *source, uint8_t *out, uint64_t len);

#endif
