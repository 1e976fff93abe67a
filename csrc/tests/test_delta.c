#include "rowset/delta.h"

#include "common/alloc.h"
#include "common/bits.h"
#include "tests/harness.h"

#define NEVER UINT64_C(0x7FFFFFFFFFFFFFFF)

/* A random delta over `limit` rows, one byte off alignment; the dense model beside it. */
typedef struct {
    uint8_t *rows;
    uint8_t *stamps;
    delta_t delta;
} sample_t;

static sample_t sample(uint32_t limit, uint32_t share, uint64_t *model) {
    sample_t s = {exact(4 * (size_t)limit + 1), exact(8 * (size_t)limit + 1), {NULL, NULL, 0}};
    uint32_t n = 0;
    for (uint32_t row = 0; row < limit; row++) {
        model[row] = NEVER;
        if (random_below(share) != 0) continue;
        model[row] = random_below(50);
        store_le32(s.rows + 1 + 4 * (size_t)n, row);
        store_le64(s.stamps + 1 + 8 * (size_t)n, model[row]);
        n++;
    }
    s.delta = (delta_t){s.rows + 1, s.stamps + 1, n};
    return s;
}

static void drop(sample_t s) {
    free(s.rows);
    free(s.stamps);
}

static void check_expanded(const delta_t *delta, uint32_t limit, const uint64_t *model) {
    uint8_t *dense = exact(8 * (size_t)limit);
    EXPECT(delta_check(delta, limit) == STATUS_OK);
    EXPECT(delta_expand(delta, limit, dense) == STATUS_OK);
    for (uint32_t i = 0; i < limit; i++) EXPECT(load_le64(dense + 8 * (size_t)i) == model[i]);
    free(dense);
    uint8_t *bits = exact(bits_bytes(limit));
    const uint64_t after = random_below(50), upto = after + random_below(20);
    uint32_t count, want = 0;
    EXPECT(delta_between(delta, limit, after, upto, bits, &count) == STATUS_OK);
    for (uint32_t i = 0; i < limit; i++) {
        const unsigned hit = model[i] > after && model[i] <= upto;
        EXPECT(bits_get(bits, i) == hit);
        want += hit;
    }
    EXPECT(count == want);
    free(bits);
}

static void check_merge(uint32_t limit, uint32_t share) {
    uint64_t *left = (uint64_t *)(void *)exact(8 * (size_t)limit);
    uint64_t *right = (uint64_t *)(void *)exact(8 * (size_t)limit);
    const sample_t a = sample(limit, share, left), b = sample(limit, 3, right);
    check_expanded(&a.delta, limit, left);
    const size_t room = (size_t)a.delta.n + b.delta.n;
    uint8_t *rows = exact(4 * room), *stamps = exact(8 * room);
    uint32_t n;
    delta_merge(&a.delta, &b.delta, rows, stamps, &n);
    for (uint32_t i = 0; i < limit; i++) left[i] = left[i] < right[i] ? left[i] : right[i];
    const delta_t merged = {rows, stamps, n};
    check_expanded(&merged, limit, left);
    free(rows);
    free(stamps);
    free(left);
    free(right);
    drop(a);
    drop(b);
}

static void check_refused(void) {
    const uint32_t rows[] = {3, 5, 5}, falling[] = {5, 3};
    const uint64_t stamps[] = {1, 2, 3};
    uint8_t out[8 * 5], bits[1];
    uint32_t count;
    const delta_t doubled = {(const uint8_t *)rows, (const uint8_t *)stamps, 3};
    const delta_t fallen = {(const uint8_t *)falling, (const uint8_t *)stamps, 2};
    const delta_t good = {(const uint8_t *)rows, (const uint8_t *)stamps, 2};
    EXPECT(delta_check(&doubled, 10) == STATUS_CORRUPT);
    EXPECT(delta_check(&fallen, 10) == STATUS_CORRUPT);
    EXPECT(delta_check(&good, 6) == STATUS_OK && delta_check(&good, 5) == STATUS_CORRUPT);
    EXPECT(delta_expand(&good, 5, out) == STATUS_RANGE);
    EXPECT(delta_between(&good, 5, 0, 9, bits, &count) == STATUS_RANGE);
}

static void check_order(uint32_t n, uint32_t run) {
    uint8_t *same = exact(bits_bytes(n)), *inserts = exact(8 * (size_t)n);
    uint32_t *order = (uint32_t *)(void *)exact(4 * (size_t)n);
    bool *seen = calloc(n, sizeof *seen);
    if (n != 0) memset(same, 0, bits_bytes(n));
    for (uint32_t i = 0; i < n; i++) {
        if (i != 0 && random_below(run) != 0) bits_set(same, i);
        store_le64(inserts + 8 * (size_t)i, random_below(40));
    }
    int moved;
    EXPECT(delta_order(same, inserts, n, order, &moved) == STATUS_OK);
    uint32_t start = 0;
    for (uint32_t i = 0; i < n; i++) {
        if (!bits_get(same, i)) start = i;
        EXPECT(order[i] >= start && order[i] < n && !seen[order[i]]);
        seen[order[i]] = true;
        EXPECT(moved || order[i] == i);
        if (i == start) continue;
        const uint64_t above = load_le64(inserts + 8 * (size_t)order[i - 1]);
        const uint64_t own = load_le64(inserts + 8 * (size_t)order[i]);
        EXPECT(above > own || (above == own && order[i - 1] < order[i]));
    }
    if (moved) {
        alloc_fail_at(1);
        EXPECT(delta_order(same, inserts, n, order, &moved) == STATUS_NO_MEMORY);
        alloc_fail_at(0);
    }
    free(same);
    free(inserts);
    free(order);
    free(seen);
}

void test_delta(void) {
    for (uint32_t limit = 0; limit < 200; limit += 1 + random_below(20)) {
        check_merge(limit, 1);
        check_merge(limit, 2);
        check_merge(limit, 20);
        check_order(limit, 1);
        check_order(limit, 3);
        check_order(limit, 1000);
    }
    check_refused();
}
