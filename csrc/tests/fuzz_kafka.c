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

static void encode(const uint8_t *data, size_t len) {
    const kafka_source_t source = {.log = data, .log_len = len, .upto = UINT64_MAX};
    uint64_t size;
    if (kafka_batches_size(&source, &size) != STATUS_OK || size > (1u << 24)) return;
    uint8_t *out = malloc(size + 1);
    if (out != NULL) kafka_batches_encode(&source, out, size);
    free(out);
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
