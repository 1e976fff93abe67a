#ifndef TXNKV_TESTS_FUZZ_CORE_H
#define TXNKV_TESTS_FUZZ_CORE_H

#include "codec/keys.h"

/* Decodes in every way; 1 when block_verify accepts it. */
int fuzz_block(const uint8_t *data, size_t len, uint32_t seed);
void fuzz_keys(const keys_t *keys);
/* Reads batches in every way; 1 when they are sane to their end. */
int fuzz_log(const uint8_t *data, size_t len);
/* Reads a typed value by some layouts; 1 when it is one of them. */
int fuzz_value(const uint8_t *data, size_t len);
/* Checks the bytes as a JSON text; 1 when they are one. */
int fuzz_json(const uint8_t *data, size_t len);
/* Reads Kafka's records, and a log for Kafka; 1 when they are records. */
int fuzz_kafka(const uint8_t *data, size_t len);

#endif
