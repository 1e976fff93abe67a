/* Random messages and batches, for the tests of the log. */
#ifndef TXNKV_TESTS_LOG_SAMPLE_H
#define TXNKV_TESTS_LOG_SAMPLE_H

#include "codec/keys_inline.h"
#include "log/messages.h"
#include "tests/harness.h"

/* Messages whose columns begin `offset` rows into their buffers. Columns are there, have nulls
 * and differ in time by chance. */
typedef struct {
    messages_t messages;
    keys_t strings[3]; /* values, keys, headers */
    uint8_t *validity[3];
    uint8_t *times;
    uint8_t *times_validity;
    uint8_t *places;
} log_sample_t;

log_sample_t log_sample(uint32_t rows, uint32_t offset);
/* Gives them places with gaps between them. */
void log_sample_scatter(log_sample_t *sample);
void log_sample_drop(log_sample_t sample);

/* String `row` of column 0, 1, 2; NULL data when it is null. An empty one has data. */
slice_t log_sample_at(const log_sample_t *sample, unsigned column, uint32_t row);
int64_t log_sample_time(const log_sample_t *sample, uint32_t row);
uint32_t log_sample_place(const log_sample_t *sample, uint32_t row);

/* The messages as a batch of exact memory; of `head` all is taken but what they decide. */
uint8_t *log_batch_of(const log_sample_t *sample, batch_header_t head, size_t *out_len);
/* A control batch with the attributes and ids of `head`. */
uint8_t *log_control_of(control_type_t type, batch_header_t head, size_t *out_len);

/* Appends to a buffer that grows. */
typedef struct {
    uint8_t *bytes;
    size_t len;
} log_bytes_t;

void log_append(log_bytes_t *to, const uint8_t *bytes, size_t len);

#endif
