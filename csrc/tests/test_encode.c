/* Light blocks: each read of one gives what the same read of a plain block does. */
#include "codec/crc32c.h"
#include "codec/keys_inline.h"
#include "common/alloc.h"
#include "common/bits.h"
#include "rowset/access.h"
#include "rowset/encode.h"
#include "rowset/search.h"
#include "rowset/unpack.h"
#include "rowset/zone.h"
#include "tests/fuzz_core.h"
#include "tests/harness.h"
#include "tests/test_match.h"

enum { SEED = 5, MOST_ROWS = 5000 };

/* -- packed numbers ---------------------------------------------------------------- */

typedef enum { COUNTER, FALLING, NEAR_LINE, NARROW, WIDE, SAME, STEEP, MIXED, SHAPES } line_t;

static uint64_t line_number(line_t shape, uint32_t i, uint64_t start) {
    switch (shape) {
        case COUNTER: return start + i;
        case FALLING: return start - 3 * (uint64_t)i;
        case NEAR_LINE: return start + 1000 * (uint64_t)i + random_below(900);
        case NARROW: return start + random_below(1u << (1 + start % 20));
        case WIDE: return random_u64();
        case SAME: return start;
        case STEEP: return i * (UINT64_MAX / PACKED_FRAME) + random_below(100);
        default: return i % 97 == 0 ? random_u64() >> (start % 40) : start + i % 7;
    }
}

/* Both versions of each loop give the same, and the numbers back; so does one at a time. */
static void check_frame(line_t shape, uint32_t n, uint32_t bits) {
    uint64_t numbers[PACKED_FRAME], out[PACKED_FRAME], plain[PACKED_FRAME], one;
    const uint64_t start = random_u64(), mask = bits == 64 ? ~UINT64_C(0) : (UINT64_C(1) << bits) - 1;
    for (uint32_t i = 0; i < PACKED_FRAME; i++) {
        numbers[i] = line_number(shape, i < n ? i : n - 1, start) & mask;
    }
    for (uint32_t i = n; i < PACKED_FRAME; i++) numbers[i] = numbers[n - 1];
    packed_frame_t frame, again;
    memset(&frame, 0, sizeof frame);
    memset(&again, 0, sizeof again);
    const uint32_t rows = packed_plan(numbers, n, bits, 0, &frame);
    EXPECT(packed_plan_plain(numbers, n, bits, 0, &again) == rows);
    EXPECT(memcmp(&frame, &again, sizeof frame) == 0);
    const size_t len = packed_size(n, rows);
    uint8_t *bytes = exact(len), *other = exact(len);
    memcpy(bytes, &frame, sizeof frame);
    memcpy(other, &frame, sizeof frame);
    packed_write(numbers, n, &frame, bytes + PACKED_FRAME_BYTES);
    if (frame.bits != 0) packed_write_plain(numbers, n, &frame, other + PACKED_FRAME_BYTES);
    EXPECT(memcmp(bytes, other, len) == 0);
    packed_t packed;
    uint64_t used;
    EXPECT(packed_parse(bytes, len, n, &packed, &used) == STATUS_OK && used == len);
    EXPECT(packed_parse(bytes, len - 1, n, &packed, &used) == STATUS_CORRUPT);
    EXPECT(packed_parse(bytes, len, n, &packed, &used) == STATUS_OK && packed_sane(&packed));
    EXPECT(packed_frame(&packed, 0, out) == n);
    packed_frame_plain(&frame, packed.words, n, plain);
    for (uint32_t i = 0; i < n; i++) {
        EXPECT((out[i] & mask) == numbers[i] && plain[i] == out[i]);
        EXPECT(packed_get(&packed, i, &one) == STATUS_OK && one == out[i]);
        packed_prefetch(&packed, i);
    }
    free(bytes);
    free(other);
}

static int by_number(const void *a, const void *b) {
    const uint64_t x = load_le64(a), y = load_le64(b);
    return (x > y) - (x < y);
}

/* Lower bounds in ascending numbers, equal ones among them, over several frames. */
static void check_lower_bound(line_t shape, uint32_t n) {
    static uint64_t numbers[MOST_ROWS + PACKED_LANES];
    const uint64_t start = random_u64() >> 3;
    for (uint32_t i = 0; i < n; i++) numbers[i] = line_number(shape, i, start);
    if (random_below(3) == 0) {
        for (uint32_t i = 1; i < n; i++) numbers[i] = i % 5 == 0 ? numbers[i] : numbers[i - 1];
    }
    qsort(numbers, n, sizeof *numbers, by_number);
    const uint32_t frames = (n + PACKED_FRAME - 1) / PACKED_FRAME;
    uint8_t *bytes = exact((size_t)n * 9 + frames * 64 + 4096);
    uint32_t rows = 0;
    for (uint32_t f = 0; f < frames; f++) {
        const uint32_t left = n - f * PACKED_FRAME, some = left < PACKED_FRAME ? left : PACKED_FRAME;
        packed_frame_t frame;
        for (uint32_t i = n; i % PACKED_LANES != 0; i++) numbers[i] = numbers[n - 1];
        const uint32_t more = packed_plan(numbers + f * PACKED_FRAME, some, 64, rows, &frame);
        memcpy(bytes + f * PACKED_FRAME_BYTES, &frame, sizeof frame);
        packed_write(numbers + f * PACKED_FRAME, some, &frame,
                     bytes + packed_size(n, 0) + (size_t)rows * PACKED_ROW_BYTES);
        rows += more;
    }
    packed_t packed;
    uint64_t used;
    EXPECT(packed_parse(bytes, packed_size(n, rows), n, &packed, &used) == STATUS_OK);
    for (uint32_t i = 0; i < 200; i++) {
        const uint32_t a = random_below(n + 1), b = random_below(n + 1), at = random_below(n);
        const uint32_t lo = a < b ? a : b, hi = a < b ? b : a;
        const uint64_t probe = i % 4 == 0 ? random_u64() : numbers[at] + i % 3 - 1;
        uint32_t want = lo, got;
        while (want < hi && numbers[want] < probe) want++;
        EXPECT(packed_lower_bound(&packed, probe, lo, hi, &got) == STATUS_OK && got == want);
    }
    free(bytes);
}

void test_packed(void) {
    static const uint32_t widths[] = {64, 32, 16, 8};
    for (int shape = 0; shape < SHAPES; shape++) {
        for (uint32_t round = 0; round < 40; round++) {
            const uint32_t n = round == 0 ? PACKED_FRAME : 1 + random_below(PACKED_FRAME);
            check_frame((line_t)shape, n, widths[round % 4]);
            check_lower_bound((line_t)shape, 1 + random_below(MOST_ROWS));
        }
    }
}

/* -- blocks ------------------------------------------------------------------------ */

typedef enum {
    NUMBERS_LINE, NUMBERS_NARROW, NUMBERS_FEW, NUMBERS_RUNS, NUMBERS_SAME, NUMBERS_ANY, FLOATS,
    CONTENTS
} content_t;

typedef struct {
    block_column_t column;
    uint8_t *values;
    uint8_t *offsets;
    uint8_t *validity;
} table_t;

static void put_number(uint8_t *out, uint32_t width, uint64_t number) {
    uint8_t bytes[16];
    store_le64(bytes, number);
    store_le64(bytes + 8, 0 - (number >> 63)); /* of 16 bytes: as a decimal has it */
    memcpy(out, bytes, width);
}

static void put_float(uint8_t *out, uint32_t width) {
    const double value = (double)((int32_t)random_below(20000) - 10000) / 100;
    const float narrow = (float)value;
    if (width == 8) {
        memcpy(out, &value, 8);
    } else if (width == 4) {
        memcpy(out, &narrow, 4);
    } else {
        memset(out, 1, width);
    }
}

static void put_value(content_t content, uint32_t i, uint32_t width, uint64_t start, uint8_t *out) {
    switch (content) {
        case NUMBERS_LINE: put_number(out, width, start + 7 * (uint64_t)i); break;
        case NUMBERS_NARROW: put_number(out, width, (uint64_t)0 - 50 + random_below(100)); break;
        case NUMBERS_FEW: put_number(out, width, start * (1 + random_below(20))); break;
        case NUMBERS_RUNS: put_number(out, width, start * (1 + i / 300)); break;
        case NUMBERS_SAME: put_number(out, width, start); break;
        case FLOATS: put_float(out, width); break;
        default: put_number(out, width, random_u64());
    }
}

static table_t table_make(block_kind_t kind, uint32_t width, content_t content, uint32_t n,
                          uint32_t offset, bool nulls) {
    const uint32_t all = n + offset;
    const uint64_t start = random_u64() | 1;
    const size_t room = kind == BLOCK_VARLEN ? (size_t)all * 24 : (size_t)all * width;
    table_t table = {.values = exact(room), .offsets = NULL, .validity = NULL};
    uint32_t end = 0;
    if (kind == BLOCK_VARLEN) table.offsets = exact(4 * ((size_t)all + 1));
    for (uint32_t i = 0; i < all; i++) {
        if (kind == BLOCK_FIXED) {
            put_value(content, i, width, start, table.values + (size_t)i * width);
            continue;
        }
        store_le32(table.offsets + 4 * (size_t)i, end);
        const uint32_t few = content == NUMBERS_FEW ? random_below(9) : random_below(100000);
        if (content == NUMBERS_SAME)
            end += (uint32_t)snprintf((char *)table.values + end, 24, "same");
        else if (few % 9 != 0)
            end += (uint32_t)snprintf((char *)table.values + end, 24, "value %u", few);
    }
    if (kind == BLOCK_VARLEN) store_le32(table.offsets + 4 * (size_t)all, end);
    if (nulls) {
        table.validity = exact(bits_bytes(all));
        memset(table.validity, 0, bits_bytes(all));
        for (uint32_t i = 0; i < all; i++) bits_or(table.validity, i, random_below(4) != 0);
    }
    table.column = (block_column_t){.kind = kind,
                                    .width = kind == BLOCK_FIXED ? width : 0,
                                    .values = table.values,
                                    .values_len = kind == BLOCK_VARLEN ? end : room,
                                    .offsets = table.offsets,
                                    .offsets_len = kind == BLOCK_VARLEN ? 4 * ((size_t)all + 1) : 0,
                                    .validity = table.validity,
                                    .validity_len = nulls ? bits_bytes(all) : 0,
                                    .offset = offset,
                                    .length = n};
    return table;
}

static void table_drop(table_t table) {
    free(table.values);
    free(table.offsets);
    free(table.validity);
}

typedef struct {
    uint8_t *bytes;
    size_t len;
    block_t block;
} made_t;

static made_t make_plain(const table_t *table, block_rows_t rows) {
    uint64_t size;
    made_t made;
    EXPECT(block_encode_size(&table->column, rows, &size) == STATUS_OK);
    made.bytes = exact(size);
    made.len = size;
    EXPECT(block_encode(&table->column, rows, SEED, made.bytes, size) == STATUS_OK);
    EXPECT(block_parse(made.bytes, made.len, &made.block) == STATUS_OK);
    return made;
}

static made_t make_light(const table_t *table, block_rows_t rows) {
    uint64_t size;
    size_t used;
    EXPECT(block_encode_size(&table->column, rows, &size) == STATUS_OK);
    uint8_t *out = exact(size);
    EXPECT(encode_column(&table->column, rows, SEED, out, size, &used) == STATUS_OK);
    EXPECT(used <= size && used % 8 == 0);
    made_t made = {exact_copy(out, used), used, {0}};
    free(out);
    EXPECT(block_verify(made.bytes, made.len, SEED) == STATUS_OK);
    EXPECT(block_verify(made.bytes, made.len, SEED + 1) == STATUS_CORRUPT);
    EXPECT(block_parse(made.bytes, made.len, &made.block) == STATUS_OK);
    return made;
}

typedef struct {
    uint8_t *validity;
    uint32_t *offsets;
    uint8_t *values;
    uint64_t size;
    uint32_t nulls;
} arrow_t;

static arrow_t arrow_make(uint32_t n, uint64_t size) {
    const arrow_t out = {exact(bits_bytes(n)), calloc((size_t)n + 1, 4), exact(size), size, 0};
    memset(out.validity, 0, bits_bytes(n));
    return out;
}

static void arrow_equal(arrow_t a, arrow_t b, uint32_t n, bool varlen) {
    EXPECT(a.size == b.size && a.nulls == b.nulls);
    EXPECT(compare_bytes(a.validity, b.validity, bits_bytes(n)) == 0);
    EXPECT(compare_bytes(a.values, b.values, a.size) == 0);
    EXPECT(!varlen || compare_bytes(a.offsets, b.offsets, 4 * ((size_t)n + 1)) == 0);
    for (int i = 0; i < 2; i++) {
        const arrow_t out = i == 0 ? a : b;
        free(out.validity);
        free(out.offsets);
        free(out.values);
    }
}

static arrow_t decode(const block_t *block, block_rows_t rows) {
    uint64_t size;
    EXPECT(block_decode_size(block, rows, &size) == STATUS_OK);
    arrow_t out = arrow_make(rows.n, size);
    EXPECT(block_decode(block, rows, out.validity, out.offsets, out.values, size, &out.nulls) ==
           STATUS_OK);
    return out;
}

static arrow_t decode_but(const block_t *block, uint32_t lo, uint32_t n, const uint32_t *gone,
                          uint32_t gone_n) {
    uint64_t size;
    EXPECT(block_decode_but_size(block, lo, n, gone, gone_n, &size) == STATUS_OK);
    arrow_t out = arrow_make(n - gone_n, size);
    EXPECT(block_decode_but(block, lo, n, gone, gone_n, out.validity, out.offsets, out.values, size,
                            &out.nulls) == STATUS_OK);
    return out;
}

static void same_value(made_t plain, made_t light, uint32_t row) {
    access_value_t a, b;
    EXPECT(access_value(&plain.block, row, &a) == STATUS_OK);
    EXPECT(access_value(&light.block, row, &b) == STATUS_OK);
    EXPECT(a.is_null == b.is_null && a.len == b.len);
    EXPECT(compare_bytes(a.data, b.data, a.len) == 0);
}

static void same_zone(made_t plain, made_t light) {
    for (int type = KEY_BOOL; type <= KEY_UUID; type++) {
        zone_t a, b;
        memset(&a, 0, sizeof a);
        memset(&b, 0, sizeof b);
        const status_t status = zone_compute(&plain.block, (key_type_t)type, &a);
        EXPECT(zone_compute(&light.block, (key_type_t)type, &b) == status);
        if (status == STATUS_OK) EXPECT(memcmp(&a, &b, sizeof a) == 0);
    }
}

/* Every way to read. */
static void same(made_t plain, made_t light) {
    const uint32_t n = plain.block.rows;
    const bool varlen = plain.block.kind == BLOCK_VARLEN;
    uint32_t *list = calloc((size_t)n + 1, 4), m = 0;
    EXPECT(light.block.rows == n && light.block.null_count == plain.block.null_count);
    same_zone(plain, light);
    for (uint32_t i = 0; i < 5 && n != 0; i++) {
        const uint32_t lo = i == 0 ? 0 : random_below(n), some = i == 0 ? n : random_below(n - lo + 1);
        const block_rows_t rows = {NULL, lo, some};
        arrow_equal(decode(&plain.block, rows), decode(&light.block, rows), some, varlen);
        for (uint32_t row = m = 0; row < some; row++) {
            if (random_below(7) == 0) list[m++] = lo + row;
        }
        arrow_equal(decode_but(&plain.block, lo, some, list, m),
                    decode_but(&light.block, lo, some, list, m), some - m, varlen);
        m = random_below(i % 2 == 0 ? n + 1 : n / 9 + 1);
        for (uint32_t k = 0; k < m; k++) list[k] = random_below(9) == 0 ? UINT32_MAX : random_below(n);
        const block_rows_t picked = {list, 0, m};
        arrow_equal(decode(&plain.block, picked), decode(&light.block, picked), m, varlen);
        same_value(plain, light, random_below(n));
    }
    const uint32_t outside[] = {n};
    const block_rows_t late = {NULL, n, 1}, wrong = {outside, 0, 1};
    uint64_t size;
    access_value_t value;
    EXPECT(block_decode_size(&light.block, late, &size) == STATUS_RANGE);
    EXPECT(block_decode_size(&light.block, wrong, &size) == STATUS_RANGE);
    EXPECT(access_value(&light.block, n, &value) == STATUS_RANGE);
    free(list);
}

static const uint32_t widths[] = {1, 2, 4, 8, 16, 12};

static block_encoding_t check_column(block_kind_t kind, uint32_t width, content_t content,
                                     uint32_t n, bool nulls, bool picked) {
    const table_t table = table_make(kind, width, content, n, n % 5, nulls);
    uint32_t *list = calloc((size_t)n + 1, 4);
    for (uint32_t i = 0; i < n; i++) list[i] = random_below(n);
    const block_rows_t rows = {picked ? list : NULL, 0, n};
    const made_t plain = make_plain(&table, rows), light = make_light(&table, rows);
    same(plain, light);
    const block_encoding_t encoding = light.block.encoding;
    free(plain.bytes);
    free(light.bytes);
    free(list);
    table_drop(table);
    return encoding;
}

/* Integers but for some, against all of them. */
static void check_integers(const block_t *block) {
    const uint32_t lo = random_below(block->rows + 1), n = random_below(block->rows - lo + 1);
    const size_t width = block->width;
    uint8_t *all = exact(n * width), *left = exact(n * width);
    uint32_t *gone = calloc((size_t)n + 1, 4), gone_n = 0, kept = 0;
    for (uint32_t i = 0; i < n; i++) {
        if (random_below(8) == 0) gone[gone_n++] = lo + i;
    }
    const status_t status = unpack_integers(block, 1, lo, n, NULL, 0, all);
    EXPECT(status == (block->encoding == BLOCK_PACKED && (width == 4 || width == 8)
                          ? STATUS_OK : STATUS_CORRUPT));
    if (status == STATUS_OK) {
        EXPECT(unpack_integers(block, 1, lo, n, gone, gone_n, left) == STATUS_OK);
        for (uint32_t i = 0, at = 0; i < n; i++) {
            if (at < gone_n && gone[at] == lo + i) {
                at++;
            } else {
                EXPECT(memcmp(left + width * kept++, all + width * i, width) == 0);
            }
        }
        gone[0] = lo + n;
        EXPECT(unpack_integers(block, 1, lo, n, gone, 1, left) == STATUS_RANGE);
    }
    free(all);
    free(left);
    free(gone);
}

/* Keys of two numbers: many of one first number, so that frames begin and end within them, with
 * second numbers that are small, or any. */
static void fill_groups(keys_t *keys) {
    const uint32_t each = 1 + random_below(700), second = keys->width - 8;
    const uint64_t step = random_below(2) == 0 ? 3 : UINT64_MAX / (each + 1);
    for (uint32_t i = 0; i < keys->n; i++) {
        uint8_t *key = (uint8_t *)(uintptr_t)keys->data + (size_t)keys->width * i, number[8];
        store_be64(key, UINT64_C(1) << 63 | i / each);
        store_be64(number, (i % each * step + random_below(2)) << (64 - 8 * second));
        if (step > 3) store_be64(number, i % each * step);
        memcpy(key + 8, number, second);
    }
}

static void check_keys(shape_t shape, uint32_t n, bool counter) {
    keys_t keys = keys_random_sorted(shape, n, n % 2 == 0);
    if (keys.width > 8 && keys.width <= 16 && counter) fill_groups(&keys);
    const keys_t probes = keys_random_sorted(shape, 50, n % 2 == 0);
    if (counter && keys.width == 8) {
        for (uint32_t i = 0; i < keys.n; i++) {
            store_be64((uint8_t *)(uintptr_t)keys.data + 8 * i, UINT64_C(1) << 63 | (i * 3 + 17));
        }
    }
    const size_t room = block_size_of_keys(&keys);
    size_t len;
    uint8_t *out = exact(room);
    EXPECT(encode_keys(&keys, SEED, out, room, &len) == STATUS_OK);
    uint8_t *bytes = exact_copy(out, len);
    free(out);
    block_t block;
    EXPECT(block_verify(bytes, len, SEED) == STATUS_OK);
    EXPECT(block_parse(bytes, len, &block) == STATUS_OK && block.rows == keys.n);
    if (counter && keys.width == 8 && keys.n > 100) EXPECT(len < room / 4);
    for (uint32_t i = 0; i < 200; i++) {
        slice_t probe = i < probes.n ? keys_at(&probes, i) : keys_at(&keys, random_below(keys.n));
        if (i >= 100) probe.len = random_below((uint32_t)probe.len + 1);
        uint32_t lower;
        int64_t found;
        int order;
        EXPECT(access_lower_bound(&block, probe.data, probe.len, &lower) == STATUS_OK);
        EXPECT(lower == search_lower_bound(&keys, probe.data, probe.len));
        EXPECT(access_find(&block, probe.data, probe.len, &found) == STATUS_OK);
        EXPECT(found == keys_find(&keys, probe));
        const uint32_t row = random_below(keys.n);
        EXPECT(access_compare(&block, row, probe.data, probe.len, &order) == STATUS_OK);
        const int wanted = slice_compare(keys_at(&keys, row), probe);
        EXPECT((order < 0) == (wanted < 0) && (order > 0) == (wanted > 0));
    }
    check_match(&keys, &block, &probes);
    check_integers(&block);
    if (block.encoding != BLOCK_PLAIN) {
        uint64_t size;
        keys_t back;
        EXPECT(block_keys(bytes, len, &back) == STATUS_CORRUPT);
        EXPECT(unpack_keys_size(&block, &size) == STATUS_OK);
        uint8_t *data = exact(size);
        uint32_t *offsets = calloc((size_t)keys.n + 1, 4);
        EXPECT(unpack_keys(&block, data, size, offsets) == STATUS_OK);
        back = (keys_t){data, size, keys.offsets == NULL ? NULL : (uint8_t *)offsets, keys.width,
                        keys.n};
        for (uint32_t i = 0; i < keys.n; i++) EXPECT(keys_compare(&keys, i, &back, i) == 0);
        free(data);
        free(offsets);
    }
    free(bytes);
    keys_drop(keys);
    keys_drop(probes);
}

static void check_chosen(void) {
    static const struct {
        uint32_t width;
        content_t content;
        block_encoding_t wanted;
    } cases[] = {
        {8, NUMBERS_LINE, BLOCK_PACKED}, {8, NUMBERS_NARROW, BLOCK_PACKED},
        {8, NUMBERS_FEW, BLOCK_DICTIONARY}, {8, NUMBERS_RUNS, BLOCK_RUNS},
        {8, NUMBERS_ANY, BLOCK_PLAIN}, {8, FLOATS, BLOCK_DECIMAL}, {4, FLOATS, BLOCK_DECIMAL},
        {16, NUMBERS_NARROW, BLOCK_PACKED}, {2, NUMBERS_NARROW, BLOCK_PACKED}};
    for (size_t i = 0; i < sizeof cases / sizeof cases[0]; i++) {
        for (int nulls = 0; nulls < 2; nulls++) {
            const block_encoding_t got = check_column(BLOCK_FIXED, cases[i].width, cases[i].content,
                                                      MOST_ROWS, nulls != 0, false);
            if (got != cases[i].wanted && nulls == 0) fprintf(stderr, "case %zu: encoding %d\n", i, (int)got);
            EXPECT(got == cases[i].wanted || nulls != 0);
        }
    }
    EXPECT(check_column(BLOCK_VARLEN, 0, NUMBERS_FEW, 3000, false, false) == BLOCK_DICTIONARY);
    EXPECT(check_column(BLOCK_VARLEN, 0, NUMBERS_ANY, 3000, false, false) == BLOCK_ENDS);
}

/* Each allocation of a read or an encoding fails in turn: NO_MEMORY, and nothing is kept. */
static void check_no_memory(void) {
    const table_t table = table_make(BLOCK_FIXED, 8, NUMBERS_FEW, 2000, 0, true);
    const block_rows_t all = {NULL, 0, 2000};
    const made_t light = make_light(&table, all);
    uint64_t size;
    size_t used;
    EXPECT(block_encode_size(&table.column, all, &size) == STATUS_OK);
    uint8_t *out = exact(size);
    uint32_t failed = 0;
    for (size_t at = 1; at < 10; at++) {
        alloc_fail_at(at);
        const status_t status = encode_column(&table.column, all, SEED, out, size, &used);
        alloc_fail_at(0);
        EXPECT(status == STATUS_OK || status == STATUS_NO_MEMORY);
        failed += status == STATUS_NO_MEMORY;
    }
    EXPECT(failed >= 2);
    const uint32_t gone[] = {3};
    arrow_t arrow = arrow_make(2000, 16000);
    zone_t zone;
    alloc_fail_at(1);
    EXPECT(block_decode_but(&light.block, 0, 2000, gone, 1, arrow.validity, arrow.offsets,
                            arrow.values, 16000, &arrow.nulls) == STATUS_NO_MEMORY);
    alloc_fail_at(1);
    EXPECT(zone_compute(&light.block, KEY_I64, &zone) == STATUS_NO_MEMORY);
    alloc_fail_at(0);
    free(arrow.validity);
    free(arrow.offsets);
    free(arrow.values);
    free(out);
    free(light.bytes);
    table_drop(table);
}

void test_encode(void) {
    check_chosen();
    check_no_memory();
    for (int content = 0; content < CONTENTS; content++) {
        for (uint32_t round = 0; round < 6; round++) {
            const uint32_t n = random_below(round == 0 ? MOST_ROWS : 1200);
            const bool nulls = round % 2 != 0, picked = round % 3 == 2;
            for (size_t i = 0; i < sizeof widths / sizeof widths[0]; i++) {
                check_column(BLOCK_FIXED, widths[i], (content_t)content, n, nulls, picked);
            }
            check_column(BLOCK_VARLEN, 0, (content_t)content, n, nulls, picked);
        }
    }
    for (int shape = 0; shape < KEYS_SHAPES; shape++) {
        for (uint32_t round = 0; round < 6; round++) {
            check_keys((shape_t)shape, 1 + random_below(round == 0 ? 3000 : 400), round % 2 == 0);
        }
    }
    for (uint32_t round = 0; round < 8; round++) {
        check_keys(round % 2 == 0 ? KEYS_13 : KEYS_16, (1024 + random_below(3000)) | 1, true);
    }
}

/* -- damage ------------------------------------------------------------------------ */

static void damage(const uint8_t *block, size_t len) {
    EXPECT(fuzz_block(block, len, SEED) == 1);
    for (uint32_t round = 0; round < 1500; round++) {
        uint8_t *changed = exact_copy(block, len);
        /* The header and the frames are met more often than their share. */
        const size_t at = random_below((uint32_t)(round % 2 == 0 && len > 200 ? 200 : len));
        changed[at] = (uint8_t)(changed[at] ^ (1u << random_below(8)));
        EXPECT(fuzz_block(changed, len, SEED) == 0);
        store_le32(changed, crc32c(SEED, changed + 4, len - 4));
        fuzz_block(changed, len, SEED);
        free(changed);
    }
    for (size_t cut = 0; cut < len; cut += 1 + len / 200) {
        uint8_t *part = exact_copy(block, cut);
        if (cut >= 4) store_le32(part, crc32c(SEED, part + 4, cut - 4));
        EXPECT(fuzz_block(part, cut, SEED) == 0);
        free(part);
    }
}

void test_encode_damage(void) {
    for (int content = 0; content < CONTENTS; content++) {
        for (int kind = 0; kind < 3; kind++) {
            const uint32_t width = kind == 1 ? 16 : 8, n = 100 + random_below(1400);
            const table_t table = table_make(kind == 2 ? BLOCK_VARLEN : BLOCK_FIXED, width,
                                             (content_t)content, n, 0, content % 2 == 1);
            const block_rows_t all = {NULL, 0, n};
            const made_t light = make_light(&table, all);
            damage(light.bytes, light.len);
            free(light.bytes);
            table_drop(table);
        }
    }
}
