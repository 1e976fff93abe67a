/* The reader of Kafka's records on any bytes, and its writer on any log. */
#include "common/bits.h"
#include "log/kafka.h"
#include "tests/fuzz_core.h"

#include <stdlib.h>

static void decode(const uint8_t *data, size_t len, uint32_t count, const kafka_sizes_t *sizes) {
    const size_t bits = bits_bytes(count), ends = 4 * ((size_t)count + 1);
    const size_t lens[10] = {8 * (size_t)count, bits, ends, sizes->value_bytes,  bits,
                             ends, sizes->key_bytes,  bits, ends, sizes->header_bytes};
    uint8_t *parts[10];
    int whole = 1;
    for (int i = 0; i < 10; i++) {
        parts[i] = malloc(lens[i] == 0 ? 1 : lens[i]);
        whole &= parts[i] != NULL;
    }
    const kafka_columns_t out = {(int64_t *)(void *)parts[0],
                                 parts[1],
                                 (uint32_t *)(void *)parts[2],
                                 parts[3],
                                 parts[4],
                                 (uint32_t *)(void *)parts[5],
                                 parts[6],
                                 parts[7],
                                 (uint32_t *)(void *)parts[8],
                                 parts[9]};
    if (whole) kafka_records_decode(data, len, count, 7, &out);
    for (int i = 0; i < 10; i++) free(parts[i]);
}

static void encode_source(const kafka_source_t source) {
    uint64_t size;
    if (kafka_batches_size(&source, &size) != STATUS_OK || size > (1u << 24)) return;
    uint8_t *out = malloc(size + 1);
    if (out != NULL) kafka_batches_encode(&source, out, size);
    free(out);
}

/* Rows at the first offsets of the log, whose columns are pieces of it: headers are any bytes. */
static void encode(const uint8_t *data, size_t len) {
    enum { ROWS = 4 };
    kafka_source_t source = {.log = data, .log_len = len, .upto = UINT64_MAX};
    encode_source(source);
    batch_header_t header;
    if (len < ROWS || batch_parse(data, len, &header) != STATUS_OK) return;
    uint64_t offset[ROWS];
    int64_t timestamp[ROWS];
    uint32_t ends[ROWS + 1] = {0};
    for (uint32_t i = 0; i < ROWS; i++) {
        offset[i] = header.base_offset + i;
        timestamp[i] = (int64_t)((uint64_t)header.max_timestamp * (i + 1));
        ends[i + 1] = (uint32_t)(len / ROWS * (i + 1));
    }
    source.offset = offset;
    source.timestamp = timestamp;
    source.value_validity = source.key_validity = data;
    source.value_ends = source.key_ends = source.header_ends = ends;
    source.values = source.keys = source.headers = data;
    for (source.rows = 1; source.rows <= ROWS; source.rows++) {
        source.header_ends = ends;
        encode_source(source);
        source.header_ends = NULL;
        encode_source(source);
    }
}

int fuzz_kafka(const uint8_t *data, size_t len) {
    kafka_sizes_t sizes;
    int sane = 0;
    for (uint32_t count = 1; count <= 64; count++) {
        if (kafka_records_size(data, len, count, 7, &sizes) != STATUS_OK) continue;
        decode(data, len, count, &sizes);
        sane = 1;
    }
    encode(data, len);
    return sane;
}
