/* The headers of messages against the lists that they came from, and on damaged bytes. */
#include "common/bytes.h"
#include "log/headers.h"
#include "tests/harness.h"

#include <stdlib.h>

enum { ROWS = 40, MOST = 5, LONGEST = 9 };

typedef struct {
    uint32_t ends[ROWS + 1];
    uint8_t data[ROWS * (2 + MOST * (6 + 2 * LONGEST))];
    uint32_t lists[ROWS + 1];
    uint32_t name_ends[ROWS * MOST + 1];
    uint32_t value_ends[ROWS * MOST + 1];
    uint8_t names[ROWS * MOST * LONGEST];
    uint8_t values[ROWS * MOST * LONGEST];
} sample_t;

static uint32_t put_string(uint8_t *to, size_t width, uint32_t *ends, uint8_t *bytes) {
    const uint32_t len = random_below(LONGEST + 1);
    if (width == 2) store_le16(to, (uint16_t)len);
    if (width == 4) store_le32(to, len);
    for (uint32_t i = 0; i < len; i++) {
        to[width + i] = bytes[ends[0] + i] = (uint8_t)random_below(256);
    }
    ends[1] = ends[0] + len;
    return (uint32_t)width + len;
}

static void sample(sample_t *s) {
    uint32_t at = 0, count = 0;
    s->ends[0] = s->lists[0] = s->name_ends[0] = s->value_ends[0] = 0;
    for (uint32_t i = 0; i < ROWS; i++) {
        const uint32_t n = random_below(MOST + 1);
        if (n != 0 || random_below(2) == 0) {
            store_le16(s->data + at, (uint16_t)n);
            at += 2;
        }
        for (uint32_t k = 0; k < n; k++, count++) {
            at += put_string(s->data + at, 2, s->name_ends + count, s->names);
            at += put_string(s->data + at, 4, s->value_ends + count, s->values);
        }
        s->ends[i + 1] = at;
        s->lists[i + 1] = count;
    }
}

static void split_is_right(const sample_t *s) {
    const size_t len = s->ends[ROWS];
    uint8_t *data = exact_copy(s->data, len);
    headers_sizes_t sizes;
    EXPECT(headers_size(s->ends, ROWS, data, len, &sizes) == STATUS_OK);
    const uint32_t count = s->lists[ROWS];
    EXPECT(sizes.count == count);
    EXPECT(sizes.name_bytes == s->name_ends[count] && sizes.value_bytes == s->value_ends[count]);
    const size_t ends_len = 4 * ((size_t)count + 1);
    uint32_t *lists = (uint32_t *)(void *)exact(4 * (ROWS + 1));
    uint32_t *name_ends = (uint32_t *)(void *)exact(ends_len);
    uint32_t *value_ends = (uint32_t *)(void *)exact(ends_len);
    uint8_t *names = exact(sizes.name_bytes), *values = exact(sizes.value_bytes);
    headers_split(s->ends, ROWS, data, lists, name_ends, names, value_ends, values);
    EXPECT(compare_bytes(lists, s->lists, sizeof s->lists) == 0);
    EXPECT(compare_bytes(name_ends, s->name_ends, ends_len) == 0);
    EXPECT(compare_bytes(value_ends, s->value_ends, ends_len) == 0);
    EXPECT(compare_bytes(names, s->names, sizes.name_bytes) == 0);
    EXPECT(compare_bytes(values, s->values, sizes.value_bytes) == 0);
    free(lists);
    free(name_ends);
    free(value_ends);
    free(names);
    free(values);
    free(data);
}

/* One row of any bytes: sizes that it says OK to can be written. */
static void one_row(const uint8_t *bytes, uint32_t len, bool is_whole) {
    const uint32_t ends[2] = {0, len};
    uint8_t *data = exact_copy(bytes, len);
    headers_sizes_t sizes;
    const status_t status = headers_size(ends, 1, data, len, &sizes);
    EXPECT(status == STATUS_OK || status == STATUS_CORRUPT);
    EXPECT(!is_whole || status == STATUS_OK);
    if (status == STATUS_OK) {
        uint32_t lists[2], *name_ends = (uint32_t *)(void *)exact(4 * (sizes.count + 1));
        uint32_t *value_ends = (uint32_t *)(void *)exact(4 * (sizes.count + 1));
        uint8_t *names = exact(sizes.name_bytes), *values = exact(sizes.value_bytes);
        headers_split(ends, 1, data, lists, name_ends, names, value_ends, values);
        EXPECT(lists[1] == sizes.count && name_ends[sizes.count] == sizes.name_bytes);
        free(name_ends);
        free(value_ends);
        free(names);
        free(values);
    }
    free(data);
}

static void damage(const sample_t *s) {
    const uint32_t len = s->ends[1];
    one_row(s->data, len, true);
    for (uint32_t cut = 1; cut < len; cut++) one_row(s->data, cut, false);
    uint8_t *bytes = exact_copy(s->data, len);
    for (uint32_t bit = 0; bit < 8 * len; bit++) {
        bytes[bit / 8] ^= (uint8_t)(1u << (bit % 8));
        one_row(bytes, len, false);
        bytes[bit / 8] ^= (uint8_t)(1u << (bit % 8));
    }
    free(bytes);
}

static void wrong_ends(void) {
    const uint8_t data[2] = {0, 0};
    headers_sizes_t sizes;
    EXPECT(headers_size((const uint32_t[]){0, 3}, 1, data, 2, &sizes) == STATUS_INPUT);
    EXPECT(headers_size((const uint32_t[]){2, 0}, 1, data, 2, &sizes) == STATUS_INPUT);
    EXPECT(headers_size((const uint32_t[]){0, 2, 2}, 2, data, 2, &sizes) == STATUS_OK);
    EXPECT(sizes.count == 0);
    EXPECT(headers_size((const uint32_t[]){0}, 0, NULL, 0, &sizes) == STATUS_OK);
}

void test_log_headers(void) {
    wrong_ends();
    for (int i = 0; i < 200; i++) {
        sample_t s;
        sample(&s);
        split_is_right(&s);
        damage(&s);
    }
}
