/* Reads of single and scattered rows, against access_bytes and a search of each block. */
#include "codec/keys_inline.h"
#include "common/bits.h"
#include "rowset/access.h"
#include "rowset/blocks.h"
#include "rowset/bloom.h"
#include "rowset/point.h"
#include "rowset/search.h"
#include "tests/harness.h"

enum { MOST_BLOCKS = 6, PROBES = 200 };

static block_bytes_t key_block(const keys_t *keys) {
    const size_t len = block_size_of_keys(keys);
    uint8_t *bytes = exact(len);
    block_encode_keys(keys, 0, bytes, len);
    const block_bytes_t block = {bytes, len};
    return block;
}

static void drop(block_bytes_t block) { free((void *)(uintptr_t)block.bytes); }

static keys_t part_of(const keys_t *keys, uint32_t lo, uint32_t n) {
    keys_t part = *keys;
    part.n = n;
    if (part.offsets == NULL) {
        part.data += (size_t)lo * part.width;
    } else {
        part.offsets += 4 * (size_t)lo;
    }
    return part;
}

/* Search and comparison in a block as it lies, against those in an array of its keys. */
static void check_access(const keys_t *keys, block_bytes_t bytes, slice_t probe) {
    block_t block;
    uint32_t lower;
    int64_t found;
    int order;
    EXPECT(block_parse(bytes.bytes, bytes.len, &block) == STATUS_OK);
    EXPECT(access_lower_bound(&block, probe.data, probe.len, &lower) == STATUS_OK);
    EXPECT(lower == search_lower_bound(keys, probe.data, probe.len));
    EXPECT(access_find(&block, probe.data, probe.len, &found) == STATUS_OK);
    EXPECT(found == search_find(keys, probe.data, probe.len));
    const uint32_t row = random_below(keys->n);
    EXPECT(access_compare(&block, row, probe.data, probe.len, &order) == STATUS_OK);
    const int wanted = slice_compare(keys_at(keys, row), probe);
    EXPECT((order < 0) == (wanted < 0) && (order > 0) == (wanted > 0));
    EXPECT(access_compare(&block, keys->n, probe.data, probe.len, &order) == STATUS_RANGE);
}

static void check_one(const keys_t *keys, block_bytes_t block, slice_t probe) {
    const int64_t expected = search_find(keys, probe.data, probe.len);
    const size_t filter_len = bloom_size(keys->n), len = block_size_of_opaque(filter_len);
    uint8_t *filter = exact(filter_len), *bloom = exact(len);
    bloom_build(keys, filter, filter_len);
    block_encode_opaque(filter, filter_len, keys->n, 0, 0, bloom, len);
    EXPECT(point_find(block.bytes, block.len, NULL, 0, probe.data, probe.len) == expected);
    check_access(keys, block, probe);
    EXPECT(point_find(block.bytes, block.len, bloom, len, probe.data, probe.len) == expected);
    free(filter);
    free(bloom);
}

static void check_find(shape_t shape, uint32_t n, bool dense) {
    const keys_t keys = keys_random_sorted(shape, n, dense);
    const keys_t others = keys_random(shape, PROBES, dense);
    block_bytes_t blocks[MOST_BLOCKS];
    uint32_t starts[MOST_BLOCKS + 1] = {0}, count = 0, place[PROBES], row[PROBES];
    while (starts[count] < keys.n && count < MOST_BLOCKS) {
        const uint32_t left = keys.n - starts[count];
        const uint32_t some = count + 1 == MOST_BLOCKS ? left : 1 + random_below(left);
        const keys_t part = part_of(&keys, starts[count], some);
        blocks[count] = key_block(&part);
        check_one(&part, blocks[count], keys_at(&others, count));
        check_one(&part, blocks[count], keys_at(&part, random_below(some)));
        starts[count + 1] = starts[count] + some;
        count++;
    }
    uint64_t size;
    EXPECT(keys_gather_size(&keys, starts, count, &size) == STATUS_OK);
    uint8_t *data = exact(size), *ends = exact(4 * (MOST_BLOCKS + 1));
    EXPECT(keys_gather(&keys, starts, count, data, size, (uint32_t *)(void *)ends) == STATUS_OK);
    const keys_t firsts = {data, size, keys.offsets == NULL ? NULL : ends, keys.width, count};
    const uint32_t gone = random_below(count + 1);
    const block_bytes_t held = gone < count ? blocks[gone] : (block_bytes_t){NULL, 0};
    if (gone < count) blocks[gone] = (block_bytes_t){NULL, 0};
    const keys_t *asked[] = {&others, &keys};
    for (int i = 0; i < 2; i++) {
        const uint32_t m = asked[i]->n < PROBES ? asked[i]->n : PROBES;
        const keys_t probes = part_of(asked[i], 0, m);
        EXPECT(blocks_find(blocks, &firsts, &probes, place, row) == STATUS_OK);
        for (uint32_t p = 0; p < m; p++) {
            const slice_t probe = keys_at(&probes, p);
            const int64_t at = search_find(&keys, probe.data, probe.len);
            uint32_t block = 0;
            while (at >= 0 && starts[block + 1] <= (uint64_t)at) block++;
            const bool there = at >= 0 && block != gone;
            EXPECT(place[p] == (there ? block : UINT32_MAX));
            EXPECT(row[p] == (there ? (uint32_t)at - starts[block] : UINT32_MAX));
        }
    }
    for (uint32_t b = 0; b < count; b++) drop(b == gone ? held : blocks[b]);
    free(data);
    free(ends);
    keys_drop(keys);
    keys_drop(others);
}

/* A column with nulls, as a block. */
static block_bytes_t column_block(block_kind_t kind, uint32_t width, uint32_t n) {
    uint8_t *validity = exact(bits_bytes(n)), *offsets = exact(4 * ((size_t)n + 1));
    size_t len = kind == BLOCK_BIT ? bits_bytes(n) : (size_t)n * width;
    random_bytes(validity, bits_bytes(n));
    store_le32(offsets, 0);
    for (uint32_t i = 0; kind == BLOCK_VARLEN && i < n; i++) {
        len += random_below(9);
        store_le32(offsets + 4 * (size_t)(i + 1), (uint32_t)len);
    }
    uint8_t *values = exact(len);
    random_bytes(values, len);
    const block_column_t column = {.kind = kind, .width = width, .values = values,
                                   .values_len = len, .offsets = offsets,
                                   .offsets_len = 4 * ((size_t)n + 1),
                                   .validity = random_below(3) == 0 ? NULL : validity,
                                   .validity_len = bits_bytes(n), .length = n};
    const block_rows_t all = {NULL, 0, n};
    uint64_t size;
    EXPECT(block_encode_size(&column, all, &size) == STATUS_OK);
    uint8_t *bytes = exact(size);
    EXPECT(block_encode(&column, all, 0, bytes, size) == STATUS_OK);
    free(validity);
    free(offsets);
    free(values);
    const block_bytes_t block = {bytes, size};
    return block;
}

static bool read_value(block_bytes_t block, block_kind_t kind, uint32_t width, uint32_t row,
                       access_value_t *out) {
    if (block.bytes == NULL) return false;
    EXPECT(access_bytes(block.bytes, block.len, kind, width, row, out) == STATUS_OK);
    return out->is_null == 0;
}

static void check_gather(block_kind_t kind, uint32_t width) {
    block_bytes_t blocks[MOST_BLOCKS];
    uint32_t rows[MOST_BLOCKS], place[PROBES], row[PROBES], offsets[PROBES + 1], nulls, seen = 0;
    for (uint32_t b = 0; b < MOST_BLOCKS; b++) {
        rows[b] = 1 + random_below(100);
        blocks[b] = b == 2 ? (block_bytes_t){NULL, 0} : column_block(kind, width, rows[b]);
    }
    for (uint32_t i = 0; i < PROBES; i++) {
        place[i] = random_below(10) == 0 ? UINT32_MAX : random_below(MOST_BLOCKS);
        row[i] = place[i] == UINT32_MAX ? 0 : random_below(rows[place[i]]);
    }
    size_t size = kind == BLOCK_BIT ? bits_bytes(PROBES) : (size_t)PROBES * width;
    if (kind == BLOCK_VARLEN) {
        EXPECT(blocks_gather_ends(blocks, MOST_BLOCKS, place, row, PROBES, offsets) == STATUS_OK);
        size = offsets[PROBES];
    }
    const uint32_t *ends = kind == BLOCK_VARLEN ? offsets : NULL;
    uint8_t *validity = exact(bits_bytes(PROBES)), *values = exact(size);
    EXPECT(blocks_gather(blocks, MOST_BLOCKS, kind, width, place, row, PROBES, ends, validity,
                         values, &nulls) == STATUS_OK);
    for (uint32_t i = 0; i < PROBES; i++) {
        access_value_t value;
        const bool valid =
            place[i] != UINT32_MAX && read_value(blocks[place[i]], kind, width, row[i], &value);
        EXPECT(bits_get(validity, i) == valid);
        seen += !valid;
        if (!valid) continue;
        if (kind == BLOCK_BIT) {
            EXPECT(bits_get(values, i) == value.bit);
            continue;
        }
        const size_t at = ends == NULL ? (size_t)i * width : ends[i];
        EXPECT(ends == NULL || ends[i + 1] - ends[i] == value.len);
        EXPECT(compare_bytes(values + at, value.data, value.len) == 0);
    }
    EXPECT(nulls == seen);
    row[7] = 1000;
    place[7] = 0;
    const status_t status = kind == BLOCK_VARLEN
                                ? blocks_gather_ends(blocks, MOST_BLOCKS, place, row, PROBES,
                                                     offsets)
                                : blocks_gather(blocks, MOST_BLOCKS, kind, width, place, row,
                                                PROBES, NULL, validity, values, &nulls);
    EXPECT(status == STATUS_RANGE);
    free(validity);
    free(values);
    for (uint32_t b = 0; b < MOST_BLOCKS; b++) drop(blocks[b]);
}

/* Keys evenly spread, and with leaps, against a search and a read apart. */
static void check_get(const row_layout_t *layout, const block_bytes_t *blocks, uint32_t n) {
    uint8_t *data = exact(8 * (size_t)n);
    for (uint32_t leap = 0; leap < 3; leap++) {
        for (uint64_t i = 0, at = 0; i < n; i++) {
            at += 2 + (random_below(8) == 0 ? random_u64() >> (64 - 28 * leap - 1) : 0);
            store_be64(data + 8 * i, at);
        }
        const keys_t keys = {data, 8 * (size_t)n, NULL, 8, n};
        const block_bytes_t probe[2] = {key_block(&keys), {NULL, 0}};
        for (uint32_t i = 0; i < 3 * n; i++) {
            uint8_t key[8], out[100], expected[100];
            store_be64(key, load_be64(data + 8 * (i / 3)) + i % 3 - 1);
            const int64_t row = search_find(&keys, key, 8);
            EXPECT(point_find(probe[0].bytes, probe[0].len, NULL, 0, key, 8) == row);
            const int64_t len = point_get(layout, probe, blocks, key, 8, out, sizeof out);
            if (row < 0) {
                EXPECT(len == POINT_ABSENT);
                continue;
            }
            EXPECT(len == point_row(layout, blocks, (uint32_t)row, expected, sizeof expected));
            EXPECT(memcmp(out, expected, (size_t)len) == 0);
        }
        drop(probe[0]);
    }
    free(data);
}

static void check_row(void) {
    enum { COLUMNS = 6, N = 50 };
    static const row_slot_t kinds[COLUMNS] = {{ROW_BIT, 1, 0},    {ROW_FIXED, 8, 0},
                                              {ROW_VARLEN, 0, 0}, {ROW_FIXED, 3, 0},
                                              {ROW_VARLEN, 0, 0}, {ROW_FIXED, 4, 0}};
    static const block_kind_t of[] = {[ROW_BIT] = BLOCK_BIT, [ROW_FIXED] = BLOCK_FIXED,
                                      [ROW_VARLEN] = BLOCK_VARLEN};
    row_slot_t slots[COLUMNS];
    block_bytes_t blocks[COLUMNS];
    row_layout_t layout;
    memcpy(slots, kinds, sizeof slots);
    row_layout_init(slots, COLUMNS, &layout);
    for (uint32_t c = 0; c < COLUMNS; c++) {
        const uint32_t width = kinds[c].kind == ROW_FIXED ? kinds[c].width : 0;
        blocks[c] = c == 5 ? (block_bytes_t){NULL, 0} : column_block(of[kinds[c].kind], width, N);
    }
    for (uint32_t row = 0; row < N; row++) {
        uint8_t scratch[100];
        const int64_t len = point_row(&layout, blocks, row, scratch, sizeof scratch);
        EXPECT(len >= layout.head && len <= (int64_t)sizeof scratch);
        uint8_t *out = exact((size_t)len);
        EXPECT(point_row(&layout, blocks, row, out, (size_t)len) == len);
        for (size_t cap = 0; cap < (size_t)len; cap += 1 + random_below(6)) {
            uint8_t *small = exact(cap);
            EXPECT(point_row(&layout, blocks, row, small, cap) > (int64_t)cap);
            free(small);
        }
        const row_slice_t slice = {out, (size_t)len};
        EXPECT(row_check(&layout, &slice, 1) == STATUS_OK);
        for (uint32_t c = 0; c < COLUMNS; c++) {
            const uint32_t width = kinds[c].kind == ROW_FIXED ? kinds[c].width : 0;
            access_value_t value;
            const bool valid = read_value(blocks[c], of[kinds[c].kind], width, row, &value);
            EXPECT(bits_get(out, c) != valid);
            if (!valid) continue;
            if (kinds[c].kind == ROW_BIT) EXPECT(out[slots[c].at] == value.bit);
            if (kinds[c].kind == ROW_FIXED) {
                EXPECT(memcmp(out + slots[c].at, value.data, width) == 0);
            }
            if (kinds[c].kind == ROW_VARLEN) {
                const uint32_t to = load_le32(out + slots[c].at);
                EXPECT(compare_bytes(out + layout.head + to - value.len, value.data, value.len) ==
                       0);
            }
        }
        free(out);
    }
    check_get(&layout, blocks, N);
    uint8_t out[100];
    EXPECT(point_row(&layout, blocks, N, out, sizeof out) == POINT_RANGE);
    const block_bytes_t wrong[COLUMNS] = {blocks[1]};
    EXPECT(point_row(&layout, wrong, 0, out, sizeof out) == POINT_CORRUPT);
    for (uint32_t c = 0; c < COLUMNS; c++) drop(blocks[c]);
}

static void check_pick(void) {
    const uint8_t bytes[4] = {0};
    const block_bytes_t a[2] = {{bytes, 1}, {bytes + 1, 2}}, b[2] = {{bytes + 2, 3}, {NULL, 0}};
    const block_bytes_t *lists[3] = {a, NULL, b};
    block_bytes_t out[3];
    blocks_pick(lists, 3, 1, out);
    EXPECT(out[0].bytes == bytes + 1 && out[0].len == 2);
    EXPECT(out[1].bytes == NULL && out[2].bytes == NULL);
    blocks_pick(lists, 3, 0, out);
    EXPECT(out[2].bytes == bytes + 2 && out[2].len == 3);
}

void test_point(void) {
    check_pick();
    for (int shape = 0; shape < KEYS_SHAPES; shape++) {
        for (uint32_t n = 1; n < 300; n += 1 + random_below(60)) {
            check_find((shape_t)shape, n, false);
            check_find((shape_t)shape, n, true);
        }
    }
    check_gather(BLOCK_BIT, 0);
    check_gather(BLOCK_FIXED, 8);
    check_gather(BLOCK_FIXED, 4);
    check_gather(BLOCK_FIXED, 5);
    check_gather(BLOCK_VARLEN, 0);
    check_row();
}
