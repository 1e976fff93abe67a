#include "common/bitmap.h"
#include "common/bits.h"
#include "common/shared.h"
#include "tests/harness.h"

static void check_combined(const uint8_t *a, const uint8_t *b, uint32_t n) {
    uint8_t *out = exact(bits_bytes(n));
    uint32_t count = bitmap_or(a, b, n, out), seen = 0;
    for (uint32_t i = 0; i < n; i++) {
        EXPECT(bits_get(out, i) == (bits_get(a, i) | bits_get(b, i)));
        seen += bits_get(out, i);
    }
    EXPECT(count == seen && bits_count(out, 0, n) == seen);
    bitmap_and(a, b, n, out);
    for (uint32_t i = 0; i < n; i++) EXPECT(bits_get(out, i) == (bits_get(a, i) & bits_get(b, i)));
    bitmap_and_not(a, b, n, out);
    for (uint32_t i = 0; i < n; i++) {
        EXPECT(bits_get(out, i) == (bits_get(a, i) & (1u ^ bits_get(b, i))));
    }
    free(out);
}

static void check_made(const uint8_t *bits, uint32_t n, const uint32_t *positions, uint32_t m) {
    uint8_t *made = exact(bits_bytes(n));
    EXPECT(bitmap_of(positions, m, n, made) == STATUS_OK);
    for (uint32_t i = 0; i < n; i++) EXPECT(bits_get(made, i) == bits_get(bits, i));
    EXPECT(bitmap_of(&n, 1, n, made) == STATUS_RANGE);
    free(made);
}

static void check_positions(const uint8_t *bits, uint32_t n, unsigned wanted) {
    uint32_t *out = calloc((size_t)n + 1, sizeof *out), next = 0;
    EXPECT(out != NULL);
    const uint32_t count = bitmap_positions(bits, n, wanted, out);
    for (uint32_t i = 0; i < n; i++) {
        if (bits_get(bits, i) == wanted) EXPECT(next < count && out[next++] == i);
    }
    EXPECT(next == count);
    if (wanted == 1) check_made(bits, n, out, count);
    free(out);
}

void test_bitmap(void) {
    for (uint32_t n = 0; n < 300; n++) {
        uint8_t *a = exact(bits_bytes(n)), *b = exact(bits_bytes(n));
        random_bytes(a, bits_bytes(n));
        random_bytes(b, bits_bytes(n));
        if (n % 3 == 0) memset(a, 0xff, bits_bytes(n));
        check_combined(a, b, n);
        check_positions(a, n, 0);
        check_positions(a, n, 1);
        const uint32_t at = n == 0 ? 0 : random_below(n);
        uint8_t *part = exact(bits_bytes(n - at));
        const uint64_t set = bitmap_copy(b, at, n - at, part);
        EXPECT(set == bitmap_count(b, at, n - at));
        for (uint32_t i = at; i < n; i++) EXPECT(bits_get(part, i - at) == bits_get(b, i));
        free(part);
        free(a);
        free(b);
    }
}

void test_shared(void) {
    uint64_t memory[4] = {1, 2, 3, 4};
    uint8_t *bytes = (uint8_t *)memory;
    EXPECT(shared_load(bytes, sizeof memory, 24) == 4);
    shared_store(bytes, sizeof memory, 0, UINT64_MAX);
    EXPECT(shared_add(bytes, sizeof memory, 0, 2) == UINT64_MAX && memory[0] == 1);
    EXPECT(shared_cas(bytes, sizeof memory, 8, 3, 9) == 0 && memory[1] == 2);
    EXPECT(shared_cas(bytes, sizeof memory, 8, 2, 9) == 1 && memory[1] == 9);
}
