/* A test is a function; EXPECT ends the run with the place and the random seed. */
#ifndef TXNKV_TESTS_HARNESS_H
#define TXNKV_TESTS_HARNESS_H

#include <stdbool.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "codec/keys.h"
#include "codec/keys_inline.h"

#define EXPECT(condition)                                                                      \
    do {                                                                                       \
        if (!(condition)) {                                                                    \
            fprintf(stderr, "%s:%d: expected %s (seed %llu)\n", __FILE__, __LINE__,            \
                    #condition, (unsigned long long)harness_seed);                             \
            exit(1);                                                                           \
        }                                                                                      \
    } while (0)

extern uint64_t harness_seed; /* set by TEST_SEED or the clock, printed on failure */

uint64_t random_u64(void);
/* In [0, limit); limit is not 0. */
uint32_t random_below(uint32_t limit);
void random_bytes(uint8_t *out, size_t len);

/* Memory of exactly this length, so that the sanitizer sees a read behind it. */
uint8_t *exact(size_t len);
uint8_t *exact_copy(const void *from, size_t len);

/* Random keys; free both parts with keys_drop. Few distinct values when `dense`. */
typedef enum { KEYS_8, KEYS_4, KEYS_13, KEYS_16, KEYS_VARIABLE, KEYS_SHAPES } shape_t;
keys_t keys_random(shape_t shape, uint32_t n, bool dense);
/* The same, strictly ascending; may be fewer than n. */
keys_t keys_random_sorted(shape_t shape, uint32_t n, bool dense);
void keys_drop(keys_t keys);
/* The plain comparison that everything is held against. */
int keys_compare(const keys_t *a, uint32_t i, const keys_t *b, uint32_t j);
/* The position of a key in strictly ascending ones, or -1. */
int64_t keys_find(const keys_t *keys, slice_t key);

void test_bitmap(void);
void test_shared(void);
void test_crc32c(void);
void test_hash(void);
void test_key(void);
void test_sort(void);
void test_search(void);
void test_merge(void);
void test_partition(void);
void test_bloom(void);
void test_key_owners(void);
void test_key_owners_pairs(void);
void test_visible(void);
void test_delta(void);
void test_block(void);
void test_packed(void);
void test_encode(void);
void test_encode_damage(void);
void test_zone(void);
void test_but(void);
void test_layers(void);
void test_gone(void);
void test_row(void);
void test_value(void);
void test_json(void);
void test_decimal(void);
void test_json_lines(void);
void test_memory(void);
void test_memory_threads(void);
void test_log_batch(void);
void test_log_messages(void);
void test_log_headers(void);
void test_log_last_keys(void);
void test_log_committed(void);
void test_log_kafka(void);
void test_damage(void);

#endif
