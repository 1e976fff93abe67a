/* Access to rows of a block as it lies, and the layers of a tablet, against a plain walk. */
#include "codec/keys_inline.h"
#include "common/bits.h"
#include "rowset/access.h"
#include "rowset/bloom.h"
#include "rowset/search.h"
#include "tablet/layers.h"
#include "tests/harness.h"

enum { KEYS = 40, ROW_SETS = 4, VERSIONS = 3, SNAPSHOTS = 9 };

static block_bytes_t key_block(const keys_t *keys) {
    const size_t len = block_size_of_keys(keys);
    uint8_t *bytes = exact(len);
    block_encode_keys(keys, 0, bytes, len);
    const block_bytes_t block = {bytes, len};
    return block;
}

static void drop(block_bytes_t block) { free((void *)(uintptr_t)block.bytes); }

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
    EXPECT(found == keys_find(keys, probe));
    const uint32_t row = random_below(keys->n);
    EXPECT(access_compare(&block, row, probe.data, probe.len, &order) == STATUS_OK);
    const int wanted = slice_compare(keys_at(keys, row), probe);
    EXPECT((order < 0) == (wanted < 0) && (order > 0) == (wanted > 0));
    EXPECT(access_compare(&block, keys->n, probe.data, probe.len, &order) == STATUS_RANGE);
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

static bool read_value(block_bytes_t bytes, uint32_t row, access_value_t *out) {
    block_t block;
    if (bytes.bytes == NULL) return false;
    EXPECT(block_parse(bytes.bytes, bytes.len, &block) == STATUS_OK);
    EXPECT(access_value(&block, row, out) == STATUS_OK);
    return out->is_null == 0;
}

/* The bytes of a row, against its values one by one. */
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
    block_t parsed[COLUMNS] = {{0}};
    const layer_block_t block = {.columns = parsed};
    uint8_t *defaults = exact(layout.head);
    memset(defaults, 0, layout.head);
    bits_set(defaults, 5);
    for (uint32_t c = 0; c < COLUMNS; c++) {
        const uint32_t width = kinds[c].kind == ROW_FIXED ? kinds[c].width : 0;
        blocks[c] = c == 5 ? (block_bytes_t){NULL, 0} : column_block(of[kinds[c].kind], width, N);
        if (c != 5) EXPECT(block_parse(blocks[c].bytes, blocks[c].len, parsed + c) == STATUS_OK);
    }
    for (uint32_t row = 0; row < N; row++) {
        uint8_t scratch[100];
        const layer_found_t found = {.block = &block, .row = row, .state = LAYERS_BLOCK};
        const int64_t len = layers_row(&layout, defaults, layout.head, &found, scratch, sizeof scratch);
        EXPECT(len >= layout.head && len <= (int64_t)sizeof scratch);
        uint8_t *out = exact((size_t)len);
        EXPECT(layers_row(&layout, defaults, layout.head, &found, out, (size_t)len) == len);
        for (size_t cap = 0; cap < (size_t)len; cap += 1 + random_below(6)) {
            uint8_t *small = exact(cap);
            EXPECT(layers_row(&layout, defaults, layout.head, &found, small, cap) > (int64_t)cap);
            free(small);
        }
        row_slice_t one;
        EXPECT(layers_rows(&layout, defaults, layout.head, &found, 0, 1, scratch, sizeof scratch, &one) == 1);
        EXPECT(one.len == (size_t)len && memcmp(one.data, out, one.len) == 0);
        const row_slice_t slice = {out, (size_t)len};
        EXPECT(row_check(&layout, &slice, 1) == STATUS_OK);
        for (uint32_t c = 0; c < COLUMNS; c++) {
            const uint32_t width = kinds[c].kind == ROW_FIXED ? kinds[c].width : 0;
            access_value_t value;
            const bool valid = read_value(blocks[c], row, &value);
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
    uint8_t out[100];
    const layer_found_t outside = {.block = &block, .row = N, .state = LAYERS_BLOCK};
    row_slice_t none;
    EXPECT(layers_row(&layout, defaults, layout.head, &outside, out, sizeof out) == -1);
    EXPECT(layers_rows(&layout, defaults, layout.head, &outside, 0, 1, out, sizeof out, &none) == -1);
    const layer_found_t first = {.block = &block, .state = LAYERS_BLOCK};
    parsed[0] = parsed[1]; /* of another kind */
    EXPECT(layers_row(&layout, defaults, layout.head, &first, out, sizeof out) == -1);
    for (uint32_t c = 0; c < COLUMNS; c++) drop(blocks[c]);
    free(defaults);
}

/* -- layers ------------------------------------------------------------------------------- */

/* One version of a key, in a row set or in memory; `row` tells it apart, 0 is a tombstone. */
typedef struct {
    uint32_t key;
    uint64_t insert;
    uint64_t deleted;
    uint32_t row;
} version_t;

typedef struct {
    version_t versions[KEYS * VERSIONS];
    uint32_t n;
    bool versioned, tombstones;
    uint64_t before;
    bool hides;
    layer_row_set_t set;
    layer_block_t blocks[KEYS * VERSIONS];
    const layer_block_t *list[KEYS * VERSIONS];
    uint8_t *bytes[3 * KEYS * VERSIONS];
    uint8_t firsts[8 * KEYS * VERSIONS], lasts[8 * KEYS * VERSIONS];
    uint8_t gone_rows[4 * KEYS * VERSIONS], gone_stamps[8 * KEYS * VERSIONS];
    uint32_t starts[KEYS * VERSIONS + 1];
} source_t;

static const uint8_t *key_bytes(uint8_t *out, uint32_t key) {
    store_be64(out, (uint64_t)key * 1000003);
    return out;
}

static void fill(source_t *source, bool staged) {
    memset(source, 0, sizeof *source);
    source->versioned = !staged && random_below(2) == 0;
    source->tombstones = random_below(5) == 0;
    source->hides = staged || source->tombstones || random_below(4) == 0;
    source->before = !staged && random_below(3) == 0 ? random_below(SNAPSHOTS) : 0;
    const uint64_t uniform = random_below(2) == 0 ? 1 + random_below(SNAPSHOTS) : 0;
    for (uint32_t key = 0; key < KEYS; key++) {
        uint32_t count = random_below(2) == 0 ? 0 : source->versioned ? 1 + random_below(VERSIONS) : 1;
        uint64_t next = UINT64_MAX; /* each version ends when the next begins, or before */
        for (uint64_t stamp = SNAPSHOTS; count > 0 && stamp > 0; stamp--) {
            if (uniform != 0 ? stamp != uniform : random_below(2) == 0) continue;
            const bool dies = !staged && random_below(3) == 0;
            const uint64_t end = dies ? stamp + 1 + random_below(3) : UINT64_MAX;
            source->versions[source->n] =
                (version_t){key, staged ? 0 : stamp, end < next ? end : next, source->n + 1};
            source->n++;
            next = stamp;
            count--;
        }
    }
}

static uint8_t *stamps_block(const source_t *source, uint32_t lo, uint32_t n, size_t *len) {
    uint8_t *stamps = exact(8 * (size_t)n);
    for (uint32_t i = 0; i < n; i++) store_le64(stamps + 8 * i, source->versions[lo + i].insert);
    const block_column_t column = {
        .kind = BLOCK_FIXED, .width = 8, .values = stamps, .values_len = 8 * (size_t)n, .length = n};
    const block_rows_t all = {NULL, 0, n};
    uint64_t size;
    EXPECT(block_encode_size(&column, all, &size) == STATUS_OK);
    uint8_t *bytes = exact(size);
    EXPECT(block_encode(&column, all, 0, bytes, size) == STATUS_OK);
    free(stamps);
    *len = size;
    return bytes;
}

static void make_block(source_t *source, uint32_t b, uint32_t lo, uint32_t n) {
    layer_block_t *block = source->blocks + b;
    uint8_t *data = exact(8 * (size_t)n);
    for (uint32_t i = 0; i < n; i++) key_bytes(data + 8 * i, source->versions[lo + i].key);
    const keys_t keys = {data, 8 * (size_t)n, NULL, 8, n};
    const block_bytes_t bytes = key_block(&keys);
    source->bytes[3 * b] = (uint8_t *)(uintptr_t)bytes.bytes;
    EXPECT(block_parse(bytes.bytes, bytes.len, &block->keys) == STATUS_OK);
    const size_t filter_len = bloom_size(n), len = block_size_of_opaque(filter_len);
    uint8_t *filter = exact(filter_len), *bloom = source->bytes[3 * b + 1] = exact(len);
    bloom_build(&keys, filter, filter_len);
    block_encode_opaque(filter, filter_len, n, 0, 0, bloom, len);
    EXPECT(block_parse(bloom, len, &block->filter) == STATUS_OK);
    size_t stamps_len;
    uint8_t *stamps = source->bytes[3 * b + 2] = stamps_block(source, lo, n, &stamps_len);
    EXPECT(block_parse(stamps, stamps_len, &block->inserts) == STATUS_OK);
    block->deletes = (delta_t){source->gone_rows + 4 * (size_t)lo, source->gone_stamps + 8 * (size_t)lo, 0};
    for (uint32_t i = 0; i < n; i++) {
        if (source->versions[lo + i].deleted == UINT64_MAX) continue;
        const size_t at = lo + block->deletes.n++;
        store_le32(source->gone_rows + 4 * at, i);
        store_le64(source->gone_stamps + 8 * at, source->versions[lo + i].deleted);
    }
    memcpy(source->firsts + 8 * (size_t)b, data, 8);
    memcpy(source->lasts + 8 * (size_t)b, data + 8 * (size_t)(n - 1), 8);
    free(filter);
    free(data);
}

/* Blocks are set when they are asked for. */
static void make(source_t *source, bool staged) {
    uint32_t count = 0;
    while (source->starts[count] < source->n) {
        const uint32_t lo = source->starts[count], n = 1 + random_below(source->n - lo);
        make_block(source, count, lo, n);
        source->starts[++count] = lo + n;
    }
    uint64_t first = UINT64_MAX, last = 0;
    for (uint32_t i = 0; i < source->n; i++) {
        first = source->versions[i].insert < first ? source->versions[i].insert : first;
        last = source->versions[i].insert > last ? source->versions[i].insert : last;
    }
    source->set = (layer_row_set_t){
        .firsts = {source->firsts, 8 * (size_t)count, NULL, 8, count},
        .lasts = {source->lasts, 8 * (size_t)count, NULL, 8, count},
        .blocks = source->list,
        .first_stamp = staged ? 0 : first,
        .stamp = last,
        .versioned = source->versioned,
        .tombstones = source->tombstones};
    layers_init_row_set(&source->set);
}

static const version_t *newest(const version_t *versions, uint32_t n, uint32_t key, uint64_t upto) {
    const version_t *found = NULL;
    for (uint32_t i = 0; i < n; i++) {
        if (versions[i].key != key || versions[i].insert > upto) continue;
        if (found == NULL || versions[i].insert > found->insert) found = versions + i;
    }
    return found;
}

typedef struct {
    source_t sources[ROW_SETS];
    version_t memory[KEYS * VERSIONS];
    uint32_t memory_n, staged;
    uint64_t flushed;
    mem_row_set_t *set;
} tablet_t;

/* The row of a key as it is told in layers.h, or 0. */
static uint32_t expected(const tablet_t *tablet, uint32_t key, uint64_t snapshot) {
    for (uint32_t s = 0; s < ROW_SETS; s++) {
        if (s == tablet->staged) {
            const version_t *found = newest(tablet->memory, tablet->memory_n, key, snapshot);
            if (found != NULL && found->insert > tablet->flushed) return found->row;
        }
        const source_t *source = tablet->sources + s;
        const bool staged = s < tablet->staged;
        if (source->n == 0 || source->set.first_stamp > snapshot) continue;
        const version_t *found = newest(source->versions, source->n, key, snapshot);
        const bool seen = found != NULL && (staged || found->deleted > snapshot);
        if (seen && !source->tombstones && found->insert >= source->before) {
            return 1000 * (s + 1) + found->row;
        }
        if (source->hides && newest(source->versions, source->n, key, UINT64_MAX) != NULL) return 0;
    }
    return 0;
}

static uint32_t answered(const tablet_t *tablet, const layer_found_t *found) {
    if (found->state == LAYERS_ABSENT) return 0;
    if (found->state == LAYERS_MEMORY) return load_le32(found->entry->row);
    EXPECT(found->state == LAYERS_BLOCK);
    const source_t *source = tablet->sources + found->step;
    EXPECT(found->block == source->blocks + found->number);
    return 1000 * (found->step + 1) + source->versions[source->starts[found->number] + found->row].row;
}

static void set_block(tablet_t *tablet, const layer_found_t *found) {
    EXPECT(found->state == LAYERS_LOAD);
    source_t *source = tablet->sources + found->step;
    EXPECT(source->list[found->number] == NULL);
    layers_set_block(&source->set, found->number, source->blocks + found->number);
}

static void check_ranges(tablet_t *tablet, const layers_t *layers) {
    layers_range_t *out = (layers_range_t *)(void *)exact(sizeof *out);
    for (int i = 0; i < 30; i++) {
        uint8_t low[8], high[8], key[8];
        const uint32_t lo = random_below(KEYS), hi = random_below(KEYS + 1);
        const uint64_t snapshot = random_below(SNAPSHOTS + 1);
        const uint32_t most = random_below(2) == 0 ? LAYERS_FEW : random_below(6);
        const uint32_t descending = random_below(2);
        const uint8_t *bound = hi == KEYS ? NULL : key_bytes(high, hi);
        key_bytes(low, lo);
        layers_range_status_t status;
        while ((status = layers_range(layers, NULL, low, 8, bound, bound == NULL ? 0 : 8, snapshot,
                                      most, descending, out)) == LAYERS_RANGE_STOP) {
            set_block(tablet, out->found + out->n);
        }
        EXPECT(status == LAYERS_RANGE_OK || most == LAYERS_FEW);
        if (status == LAYERS_RANGE_LONG) continue; /* over many blocks */
        uint32_t n = 0;
        for (uint32_t i = lo; i < hi && n < most; i++) {
            const uint32_t k = descending ? lo + hi - 1 - i : i;
            const uint32_t row = expected(tablet, k, snapshot);
            if (row == 0) continue;
            EXPECT(n < out->n && out->ends[n + 1] - out->ends[n] == 8);
            EXPECT(memcmp(out->keys + out->ends[n], key_bytes(key, k), 8) == 0);
            EXPECT(answered(tablet, out->found + n) == row);
            n++;
        }
        EXPECT(n == out->n);
    }
    free(out);
}

static void check_layers(void) {
    tablet_t *tablet = (tablet_t *)(void *)exact(sizeof *tablet);
    layer_step_t steps[ROW_SETS];
    tablet->staged = random_below(3);
    tablet->flushed = random_below(4);
    tablet->set = mem_row_set_create(8);
    tablet->memory_n = 0;
    for (uint32_t s = 0; s < ROW_SETS; s++) {
        source_t *source = tablet->sources + s;
        fill(source, s < tablet->staged);
        make(source, s < tablet->staged);
        steps[s] = (layer_step_t){&source->set, source->before, source->hides};
    }
    for (uint32_t i = 0; i < KEYS; i++) {
        uint8_t key[8], row[4];
        const version_t version = {random_below(KEYS), 1 + random_below(SNAPSHOTS), UINT64_MAX,
                                   random_below(4) == 0 ? 0 : i + 1};
        store_le32(row, version.row);
        key_bytes(key, version.key);
        if (newest(tablet->memory, tablet->memory_n, version.key, UINT64_MAX) != NULL) continue;
        EXPECT(mem_row_set_put(tablet->set, key, 8, version.insert, version.row == 0 ? NULL : row,
                               4) == STATUS_OK);
        tablet->memory[tablet->memory_n++] = version;
    }
    const layers_t layers = {steps, steps + tablet->staged, tablet->set, tablet->flushed,
                             tablet->staged, ROW_SETS - tablet->staged, NULL};
    uint8_t data[8 * KEYS];
    for (uint32_t key = 0; key < KEYS; key++) key_bytes(data + 8 * (size_t)key, key);
    const keys_t keys = {data, sizeof data, NULL, 8, KEYS};
    for (uint64_t snapshot = 0; snapshot <= SNAPSHOTS; snapshot++) {
        layer_found_t found[KEYS];
        uint8_t bits[KEYS / 8];
        for (uint32_t done = 0;;) {
            done = layers_find_many(&layers, NULL, &keys, NULL, done, KEYS, snapshot, found);
            if (done == KEYS) break;
            set_block(tablet, found + done);
        }
        uint32_t there = 0;
        for (uint32_t key = 0; key < KEYS; key++) {
            const uint32_t row = expected(tablet, key, snapshot);
            EXPECT(answered(tablet, found + key) == row);
            there += row != 0;
        }
        EXPECT(layers_present(found, KEYS, bits) == there);
    }
    check_ranges(tablet, &layers);
    for (uint32_t s = 0; s < ROW_SETS; s++) {
        for (uint32_t i = 0; i < 3 * KEYS * VERSIONS; i++) free(tablet->sources[s].bytes[i]);
    }
    mem_row_set_destroy(tablet->set);
    free(tablet);
}

/* A key of which a transaction has a row of its own, and what memory alone says. */
static void check_own(void) {
    const uint8_t key[8] = {0, 0, 0, 0, 0, 0, 0, 1}, row[4] = {9, 0, 0, 0};
    mem_row_set_t *memory = mem_row_set_create(8), *own = mem_row_set_create(8);
    const layers_t layers = {NULL, NULL, memory, 2, 0, 0, NULL};
    layer_found_t found;
    EXPECT(layers_find(&layers, own, key, 8, 5, &found) == LAYERS_ABSENT);
    EXPECT(mem_row_set_put(memory, key, 8, 3, row, 4) == STATUS_OK);
    EXPECT(layers_find(&layers, own, key, 8, 5, &found) == LAYERS_MEMORY);
    EXPECT(layers_find_memory(&layers, own, key, 8, 5, &found) == LAYERS_MEMORY);
    EXPECT(layers_find(&layers, own, key, 8, 2, &found) == LAYERS_ABSENT);
    EXPECT(mem_row_set_put(own, key, 8, 1, row, 4) == STATUS_OK);
    EXPECT(layers_find(&layers, own, key, 8, 5, &found) == LAYERS_OWN);
    EXPECT(mem_row_set_put(own, key, 8, 2, NULL, 0) == STATUS_OK);
    EXPECT(layers_find(&layers, own, key, 8, 5, &found) == LAYERS_ABSENT && found.entry != NULL);
    EXPECT(layers_meet(&layers, key, 8, 5) == 0);
    mem_row_set_destroy(memory);
    mem_row_set_destroy(own);
}

/* Keys of any length, which differ behind the eighth byte, too: most are passed at once, rightly. */
static void check_meets(void) {
    uint8_t bytes[3][12];
    slice_t keys[3];
    for (uint32_t k = 0; k < 3; k++) {
        keys[k] = (slice_t){bytes[k], random_below(sizeof bytes[k])};
        for (uint32_t i = 0; i < keys[k].len; i++) {
            bytes[k][i] = i < 6 && random_below(8) != 0 ? 7 : (uint8_t)(random_below(3) * 127);
        }
    }
    const slice_t first = slice_compare(keys[0], keys[1]) < 0 ? keys[0] : keys[1];
    const slice_t last = slice_compare(keys[0], keys[1]) < 0 ? keys[1] : keys[0];
    uint8_t ends[2][8] = {{0}, {0}};
    store_le32(ends[0] + 4, (uint32_t)first.len);
    store_le32(ends[1] + 4, (uint32_t)last.len);
    layer_row_set_t set = {.firsts = {first.data, first.len, ends[0], 0, 1},
                           .lasts = {last.data, last.len, ends[1], 0, 1}};
    layers_init_row_set(&set);
    const layer_step_t step = {&set, 0, 0};
    const layers_t layers = {NULL, &step, NULL, 0, 0, 1, NULL};
    const int inside = slice_compare(first, keys[2]) <= 0 && slice_compare(keys[2], last) <= 0;
    EXPECT(layers_meet(&layers, keys[2].data, keys[2].len, 1) == inside);
}

void test_layers(void) {
    for (int shape = 0; shape < KEYS_SHAPES; shape++) {
        for (uint32_t n = 1; n < 300; n += 1 + random_below(60)) {
            const keys_t keys = keys_random_sorted((shape_t)shape, n, n % 2 == 0);
            const keys_t others = keys_random((shape_t)shape, 20, n % 2 == 0);
            const block_bytes_t block = key_block(&keys);
            for (uint32_t i = 0; i < 20; i++) check_access(&keys, block, keys_at(&others, i));
            check_access(&keys, block, keys_at(&keys, random_below(keys.n)));
            drop(block);
            keys_drop(keys);
            keys_drop(others);
        }
    }
    check_row();
    check_own();
    for (int i = 0; i < 5000; i++) check_meets();
    for (int i = 0; i < 200; i++) check_layers();
}
