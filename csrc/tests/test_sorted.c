/* Sorting, searching, merging, partitioning: against the plainest model of each. */
#include "codec/keys_inline.h"
#include "common/alloc.h"
#include "common/bits.h"
#include "rowset/merge.h"
#include "rowset/partition.h"
#include "rowset/search.h"
#include "rowset/sort.h"
#include "tests/harness.h"

static const uint32_t sizes[] = {0, 1, 2, 3, 25, 400, 3000};
enum { SIZES = sizeof sizes / sizeof sizes[0] };

static void check_sorted(const keys_t *keys, const uint32_t *rows, uint32_t n) {
    uint32_t *order = calloc((size_t)n + 1, sizeof *order), duplicates = 0, marked;
    uint8_t *bits = exact(bits_bytes(n));
    int ascending;
    EXPECT(order != NULL && sort_order(keys, rows, n, order, &ascending) == STATUS_OK);
    bool strict = true;
    for (uint32_t i = 1; i < n; i++) {
        const uint32_t a = rows == NULL ? i - 1 : rows[i - 1], b = rows == NULL ? i : rows[i];
        strict = strict && keys_compare(keys, a, keys, b) < 0;
    }
    EXPECT(ascending == strict);
    if (!ascending) {
        uint64_t sum = 0;
        for (uint32_t i = 0; i < n; i++) sum += (uint64_t)order[i] - (rows == NULL ? i : rows[i]);
        EXPECT(sum == 0); /* with the next, a permutation */
        for (uint32_t i = 1; i < n; i++) {
            const int compared = keys_compare(keys, order[i - 1], keys, order[i]);
            EXPECT(compared < 0 || (compared == 0 && (rows != NULL || order[i - 1] < order[i])));
            duplicates += compared == 0;
        }
    }
    const uint32_t *shown = ascending ? rows : order;
    EXPECT(sort_mark_duplicates(keys, shown, n, bits, &marked) == STATUS_OK);
    EXPECT(marked == duplicates && bits_count(bits, 0, n) == marked);
    free(order);
    free(bits);
}

static void check_stable_subset(const keys_t *keys) {
    uint32_t rows[64], order[64];
    int ascending;
    for (uint32_t i = 0; i < 64; i++) rows[i] = keys->n - 1 - i;
    EXPECT(sort_order(keys, rows, 64, order, &ascending) == STATUS_OK);
    for (uint32_t i = 1; i < 64 && !ascending; i++) {
        const int compared = keys_compare(keys, order[i - 1], keys, order[i]);
        EXPECT(compared < 0 || (compared == 0 && order[i - 1] > order[i]));
    }
    rows[5] = keys->n;
    EXPECT(sort_order(keys, rows, 64, order, &ascending) == STATUS_RANGE);
}

/* Keys a, aa, aaa, ...: each round of the sort splits only few off. */
static void check_nested(void) {
    enum { N = 600 };
    uint8_t *offsets = exact(4 * (N + 1));
    uint8_t *spread = exact((size_t)N * N / 2 + N);
    uint32_t at = 0;
    store_le32(offsets, 0);
    for (uint32_t i = 0; i < N; i++) {
        const uint32_t len = (i * 7) % N;
        memset(spread + at, 'a', len);
        at += len;
        store_le32(offsets + 4 * (size_t)(i + 1), at);
    }
    const keys_t keys = {spread, at, offsets, 0, N};
    check_sorted(&keys, NULL, N);
    keys_drop(keys);
}

void test_sort(void) {
    for (int shape = 0; shape < KEYS_SHAPES; shape++) {
        for (int s = 0; s < SIZES; s++) {
            const keys_t keys = keys_random((shape_t)shape, sizes[s], s % 2 == 0);
            check_sorted(&keys, NULL, keys.n);
            if (keys.n > 64) check_stable_subset(&keys);
            keys_drop(keys);
        }
        const keys_t sorted = keys_random_sorted((shape_t)shape, 500, false);
        check_sorted(&sorted, NULL, sorted.n);
        keys_drop(sorted);
    }
    check_nested();
    const keys_t many = keys_random(KEYS_4, 300000, false); /* scratch in huge pages */
    check_sorted(&many, NULL, many.n);
    keys_drop(many);
    const keys_t keys = keys_random(KEYS_8, 1000, false);
    uint32_t order[1000];
    int ascending;
    alloc_fail_at(1);
    EXPECT(sort_order(&keys, NULL, 1000, order, &ascending) == STATUS_NO_MEMORY);
    alloc_fail_at(0);
    keys_drop(keys);
}

static uint32_t bound_of(const keys_t *keys, const keys_t *probes, uint32_t i) {
    uint32_t at = 0;
    while (at < keys->n && keys_compare(keys, at, probes, i) < 0) at++;
    return at;
}

static void check_search(const keys_t *keys, const keys_t *probes) {
    int32_t *out = calloc((size_t)probes->n + 1, sizeof *out);
    EXPECT(out != NULL);
    search_batch(keys, probes, out);
    for (uint32_t i = 0; i < probes->n; i++) {
        const slice_t probe = keys_at(probes, i);
        const uint32_t at = bound_of(keys, probes, i);
        const bool found = at < keys->n && keys_compare(keys, at, probes, i) == 0;
        EXPECT(search_lower_bound(keys, probe.data, probe.len) == at);
        EXPECT(out[i] == (found ? (int32_t)at : -1));
    }
    free(out);
}

void test_search(void) {
    for (int shape = 0; shape < KEYS_SHAPES; shape++) {
        for (int s = 0; s < SIZES - 1; s++) {
            const bool dense = s % 2 == 0;
            const keys_t keys = keys_random_sorted((shape_t)shape, sizes[s], dense);
            const keys_t random = keys_random((shape_t)shape, 200, dense);
            const keys_t sorted = keys_random_sorted((shape_t)shape, 200, dense);
            check_search(&keys, &random);
            check_search(&keys, &sorted);
            check_search(&keys, &keys);
            keys_drop(keys);
            keys_drop(random);
            keys_drop(sorted);
        }
    }
}

static void check_common(const keys_t *a, const keys_t *b) {
    uint8_t *bits = exact(bits_bytes(a->n));
    uint32_t count, seen = 0;
    merge_common(a, b, bits, &count);
    for (uint32_t i = 0; i < a->n; i++) {
        const uint32_t at = bound_of(b, a, i);
        const unsigned in = at < b->n && keys_compare(a, i, b, at) == 0;
        EXPECT(bits_get(bits, i) == in);
        seen += in;
    }
    EXPECT(count == seen);
    free(bits);
}

enum { SOURCES = 5 };

static void check_merged(const keys_t *sources, const uint8_t *ends) {
    uint32_t cursors[SOURCES] = {0}, total = 0, out = 0, n, index[64];
    uint16_t source[64];
    uint32_t last_source = 0, last_index = 0;
    for (int s = 0; s < SOURCES; s++) total += sources[s].n;
    while (out < total) {
        uint32_t before[SOURCES];
        memcpy(before, cursors, sizeof before);
        EXPECT(merge_kway(sources, SOURCES, ends, cursors, 64, source, index, &n) == STATUS_OK);
        EXPECT(n > 0 && n <= 64);
        for (uint32_t i = 0; i < n; i++, out++) {
            EXPECT(index[i] == before[source[i]]++);
            if (out > 0) {
                const int order = keys_compare(&sources[last_source], last_index,
                                               &sources[source[i]], index[i]);
                EXPECT(order < 0 || (order == 0 && last_source < source[i]));
            }
            last_source = source[i];
            last_index = index[i];
        }
        EXPECT(memcmp(before, cursors, sizeof before) == 0);
        const uint32_t s = source[n - 1];
        EXPECT(n == 64 || out == total || (cursors[s] == sources[s].n && !ends[s]));
    }
    EXPECT(merge_kway(sources, SOURCES, ends, cursors, 64, source, index, &n) == STATUS_OK && n == 0);
}

void test_merge(void) {
    for (int shape = 0; shape < KEYS_SHAPES; shape++) {
        for (int s = 0; s < SIZES - 1; s++) {
            for (int t = 0; t < SIZES - 1; t++) {
                const keys_t a = keys_random_sorted((shape_t)shape, sizes[s], true);
                const keys_t b = keys_random_sorted((shape_t)shape, sizes[t], true);
                check_common(&a, &b);
                check_common(&a, &a);
                keys_drop(a);
                keys_drop(b);
            }
        }
        keys_t sources[SOURCES];
        for (uint32_t s = 0; s < SOURCES; s++) {
            sources[s] = keys_random_sorted((shape_t)shape, s * 90, s % 2 == 0);
        }
        for (uint32_t round = 0; round < 1 << SOURCES; round++) {
            uint8_t ends[SOURCES];
            for (uint32_t s = 0; s < SOURCES; s++) ends[s] = (uint8_t)(round >> s & 1);
            check_merged(sources, ends);
        }
        for (int s = 0; s < SOURCES; s++) keys_drop(sources[s]);
    }
    uint32_t n;
    alloc_fail_at(1);
    EXPECT(merge_kway(NULL, 0, NULL, NULL, 1, NULL, NULL, &n) == STATUS_NO_MEMORY);
    alloc_fail_at(0);
}

static void check_scattered(const uint16_t *numbers, uint32_t n, uint32_t parts) {
    uint32_t *rows = calloc((size_t)n + 1, sizeof *rows), *starts = calloc(parts + 1, sizeof *starts);
    EXPECT(rows != NULL && starts != NULL);
    EXPECT(partition_scatter(numbers, n, parts, rows, starts) == STATUS_OK);
    EXPECT(starts[0] == 0 && starts[parts] == n);
    for (uint32_t p = 0; p < parts; p++) {
        for (uint32_t i = starts[p]; i < starts[p + 1]; i++) {
            EXPECT(numbers[rows[i]] == p && (i == starts[p] || rows[i - 1] < rows[i]));
        }
    }
    free(rows);
    free(starts);
}

void test_partition(void) {
    for (int shape = 0; shape < KEYS_SHAPES; shape++) {
        const keys_t keys = keys_random((shape_t)shape, 1000, shape == KEYS_VARIABLE);
        const keys_t bounds = keys_random_sorted((shape_t)shape, 20, shape == KEYS_VARIABLE);
        uint16_t numbers[1000];
        partition_range(&keys, &bounds, numbers);
        for (uint32_t i = 0; i < keys.n; i++) {
            uint32_t below = 0;
            while (below < bounds.n && keys_compare(&bounds, below, &keys, i) <= 0) below++;
            EXPECT(numbers[i] == below);
        }
        check_scattered(numbers, 1000, bounds.n + 1);
        partition_hash(&keys, 7, numbers);
        check_scattered(numbers, 1000, 7);
        uint32_t out[1000], starts[8];
        EXPECT(partition_scatter(numbers, 1000, 3, out, starts) == STATUS_RANGE);
        keys_drop(keys);
        keys_drop(bounds);
    }
}
