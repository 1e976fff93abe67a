#include "tests/harness.h"

#include <time.h>

#include "codec/keys_inline.h"

uint64_t harness_seed;
static uint64_t state;

uint64_t random_u64(void) {
    uint64_t z = (state += UINT64_C(0x9E3779B97F4A7C15));
    z = (z ^ z >> 30) * UINT64_C(0xBF58476D1CE4E5B9);
    z = (z ^ z >> 27) * UINT64_C(0x94D049BB133111EB);
    return z ^ z >> 31;
}

uint32_t random_below(uint32_t limit) { return (uint32_t)(random_u64() % limit); }

void random_bytes(uint8_t *out, size_t len) {
    for (size_t i = 0; i < len; i++) out[i] = (uint8_t)random_u64();
}

uint8_t *exact(size_t len) {
    uint8_t *memory = malloc(len == 0 ? 1 : len);
    EXPECT(memory != NULL);
    return memory;
}

uint8_t *exact_copy(const void *from, size_t len) {
    uint8_t *memory = exact(len);
    copy_bytes(memory, from, len);
    return memory;
}

static void random_key(uint8_t *out, size_t len, bool dense) {
    random_bytes(out, len);
    if (!dense) return;
    for (size_t i = 0; i < len; i++) out[i] = i + 2 < len ? 0 : out[i] & 3;
}

static keys_t variable_random(uint32_t n, bool dense) {
    uint8_t *data = exact((size_t)n * 40), *offsets = exact(4 * ((size_t)n + 1));
    uint32_t at = 0;
    store_le32(offsets, 0);
    for (uint32_t i = 0; i < n; i++) {
        const uint32_t len = random_below(dense ? 4 : 40);
        random_key(data + at, len, dense);
        if (len > 24) memset(data + at, 0x61, 20); /* common prefixes longer than a word */
        at += len;
        store_le32(offsets + 4 * (size_t)(i + 1), at);
    }
    const keys_t keys = {data, at, offsets, 0, n};
    return keys;
}

keys_t keys_random(shape_t shape, uint32_t n, bool dense) {
    static const uint32_t widths[] = {8, 4, 13, 16};
    if (shape == KEYS_VARIABLE) return variable_random(n, dense);
    const uint32_t width = widths[shape];
    uint8_t *data = exact((size_t)n * width);
    for (size_t i = 0; i < n; i++) random_key(data + i * width, width, dense);
    const keys_t keys = {data, (size_t)n * width, NULL, width, n};
    return keys;
}

int keys_compare(const keys_t *a, uint32_t i, const keys_t *b, uint32_t j) {
    const slice_t x = keys_at(a, i), y = keys_at(b, j);
    for (size_t at = 0; at < x.len && at < y.len; at++) {
        if (x.data[at] != y.data[at]) return x.data[at] < y.data[at] ? -1 : 1;
    }
    return (x.len > y.len) - (x.len < y.len);
}

int64_t keys_find(const keys_t *keys, slice_t key) {
    for (uint32_t i = 0; i < keys->n; i++) {
        if (slice_compare(keys_at(keys, i), key) == 0) return i;
    }
    return -1;
}

keys_t keys_random_sorted(shape_t shape, uint32_t n, bool dense) {
    const keys_t keys = keys_random(shape, n, dense);
    uint32_t *order = calloc((size_t)n + 1, sizeof *order), kept = 0;
    EXPECT(order != NULL);
    for (uint32_t i = 0; i < n; i++) { /* insertion, without equals */
        uint32_t at = kept;
        while (at > 0 && keys_compare(&keys, order[at - 1], &keys, i) > 0) at--;
        if (at > 0 && keys_compare(&keys, order[at - 1], &keys, i) == 0) continue;
        memmove(order + at + 1, order + at, (kept - at) * sizeof *order);
        order[at] = i;
        kept++;
    }
    uint64_t size;
    EXPECT(keys_gather_size(&keys, order, kept, &size) == STATUS_OK);
    uint8_t *data = exact(size);
    uint8_t *offsets = keys.offsets == NULL ? NULL : exact(4 * ((size_t)kept + 1));
    EXPECT(keys_gather(&keys, order, kept, data, size, (uint32_t *)(void *)offsets) == STATUS_OK);
    const keys_t sorted = {data, size, offsets, keys.width, kept};
    free(order);
    keys_drop(keys);
    return sorted;
}

void keys_drop(keys_t keys) {
    free((void *)(uintptr_t)keys.data);
    free((void *)(uintptr_t)keys.offsets);
}

/* TEST_ONLY=name runs one of them. */
#define RUN(test)                                                                              \
    do {                                                                                       \
        const char *only = getenv("TEST_ONLY");                                                \
        if (only != NULL && strcmp(only, #test) != 0) break;                                   \
        fprintf(stderr, "%s\n", #test);                                                        \
        test();                                                                                \
    } while (0)

int main(void) {
    const char *seed = getenv("TEST_SEED");
    harness_seed = seed == NULL ? (uint64_t)time(NULL) : strtoull(seed, NULL, 10);
    state = harness_seed;
    RUN(test_bitmap);
    RUN(test_shared);
    RUN(test_crc32c);
    RUN(test_hash);
    RUN(test_key);
    RUN(test_sort);
    RUN(test_search);
    RUN(test_merge);
    RUN(test_partition);
    RUN(test_bloom);
    RUN(test_key_owners);
    RUN(test_key_owners_pairs);
    RUN(test_visible);
    RUN(test_delta);
    RUN(test_block);
    RUN(test_packed);
    RUN(test_encode);
    RUN(test_encode_damage);
    RUN(test_zone);
    RUN(test_but);
    RUN(test_layers);
    RUN(test_gone);
    RUN(test_row);
    RUN(test_value);
    RUN(test_json);
    RUN(test_decimal);
    RUN(test_json_lines);
    RUN(test_memory);
    RUN(test_memory_threads);
    RUN(test_log_batch);
    RUN(test_log_messages);
    RUN(test_log_headers);
    RUN(test_log_last_keys);
    RUN(test_log_kafka);
    RUN(test_log_committed);
    RUN(test_damage);
    fprintf(stderr, "passed (seed %llu)\n", (unsigned long long)harness_seed);
    return 0;
}
