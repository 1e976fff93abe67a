/* Every decoder on any bytes: a status or an answer, never a read outside. Run by libFuzzer
 * (`make fuzz`), and by test_damage on mutations of real blocks and keys. */
#include "tablet/layers.h"
#include "tests/fuzz_core.h"

#include <stdlib.h>

#include "codec/crc32c.h"
#include "codec/key.h"
#include "codec/keys_inline.h"
#include "common/bits.h"
#include "rowset/access.h"
#include "rowset/block.h"
#include "rowset/bloom.h"
#include "rowset/match.h"
#include "rowset/unpack.h"
#include "rowset/zone.h"

static void decode(const block_t *block, block_rows_t rows) {
    uint64_t size;
    uint32_t nulls;
    if (block_decode_size(block, rows, &size) != STATUS_OK) return;
    uint8_t *values = malloc(size + 1), *validity = malloc(bits_bytes(rows.n) + 1);
    uint32_t *offsets = malloc(4 * ((size_t)rows.n + 1));
    if (values != NULL && validity != NULL && offsets != NULL) {
        block_decode(block, rows, validity, offsets, values, size, &nulls);
    }
    free(values);
    free(validity);
    free(offsets);
}

static void decode_but(const block_t *block) {
    uint64_t size;
    uint32_t nulls;
    const uint32_t gone[] = {block->rows / 2};
    if (block->rows == 0) return;
    const uint32_t n = block->rows, left = n - 1;
    if (block_decode_but_size(block, 0, n, gone, 1, &size) != STATUS_OK) return;
    uint8_t *values = malloc(size + 1), *validity = malloc(bits_bytes(left) + 1);
    uint32_t *offsets = malloc(4 * ((size_t)left + 1));
    if (values != NULL && validity != NULL && offsets != NULL) {
        block_decode_but(block, 0, n, gone, 1, validity, offsets, values, size, &nulls);
    }
    free(values);
    free(validity);
    free(offsets);
}

static void decode_key_column(const keys_t *keys, const key_type_t *types, uint32_t n_types,
                              uint32_t column) {
    uint64_t size;
    if (types[column] != KEY_BYTES) {
        const size_t len = (size_t)keys->n * key_type_width(types[column]);
        uint8_t *out = malloc(len + 1);
        if (out != NULL) key_decode_fixed(keys, types, n_types, column, 0, keys->n, out, len);
        free(out);
        return;
    }
    uint32_t *offsets = malloc(4 * ((size_t)keys->n + 1));
    if (offsets == NULL) return;
    if (key_decode_offsets(keys, types, n_types, column, 0, keys->n, offsets, &size) ==
        STATUS_OK) {
        uint8_t *out = malloc(size + 1);
        if (out != NULL) {
            key_decode_bytes(keys, types, n_types, column, 0, keys->n, offsets, out, size);
        }
        free(out);
    }
    free(offsets);
}

void fuzz_keys(const keys_t *keys) {
    static const key_type_t types[] = {KEY_I32, KEY_BYTES, KEY_BOOL, KEY_BYTES, KEY_F64};
    static const uint32_t n_types = sizeof types / sizeof types[0];
    for (uint32_t c = 0; c < n_types; c++) decode_key_column(keys, types, n_types, c);
    decode_key_column(keys, types, 2, 1);
}

/* Reads of single rows, which trust block_verify for the order of offsets alone. */
static void read_rows(const block_t *block) {
    const block_t columns[2] = {*block, {0}};
    const layer_block_t at = {.columns = columns};
    const uint32_t rows[4] = {0, 0, 0, block->rows == 0 ? 0 : block->rows - 1};
    row_slot_t slots[2] = {{ROW_VARLEN, 0, 0}, {ROW_VARLEN, 0, 0}};
    if (block->kind == BLOCK_BIT) slots[0] = (row_slot_t){ROW_BIT, 1, 0};
    if (block->kind == BLOCK_FIXED) slots[0] = (row_slot_t){ROW_FIXED, block->width, 0};
    row_layout_t layout;
    uint8_t out[64], defaults[64] = {0};
    if (slots[0].width < (1u << 20)) {
        row_layout_init(slots, 2, &layout);
        for (uint32_t i = 0; i < 4; i++) {
            const layer_found_t found = {.block = &at, .row = rows[i], .state = LAYERS_BLOCK};
            row_slice_t slice;
            layers_row(&layout, defaults, sizeof defaults, &found, out, sizeof out);
            layers_rows(&layout, defaults, sizeof defaults, &found, 0, 1, out, sizeof out, &slice);
        }
    }
}

/* A verified block as the keys of a row set, and as all that stands beside them. */
static void fuzz_layers(const uint8_t *data, size_t len, const block_t *block) {
    const layer_block_t at = {*block, *block, *block, {NULL, NULL, 0}, block};
    const layer_block_t *list[1] = {&at};
    const uint8_t least[1] = {0}, most[16] = {255, 255, 255, 255, 255, 255, 255, 255};
    const uint8_t ends[16] = {0, 0, 0, 0, 16};
    layer_row_set_t set = {{least, 0, ends + 8, 0, 1}, {most, 16, ends, 0, 1}, list, 1, 9, 1, 0, 0, 0};
    layers_init_row_set(&set);
    const layer_step_t step = {&set, 0, 0};
    const layers_t layers = {NULL, &step, NULL, 0, 0, 1, NULL};
    layer_found_t found;
    for (uint64_t snapshot = 1; snapshot < 10; snapshot += 8) {
        layers_find(&layers, NULL, data, len < 8 ? len : 8, snapshot, &found);
    }
}

/* Keys of a light block, as they lie and unpacked. */
static void read_keys(const block_t *block) {
    uint32_t row;
    int order;
    uint64_t size;
    const uint8_t probe[8] = {0x80};
    const keys_t probes = {probe, sizeof probe, NULL, sizeof probe, 1};
    uint32_t position, found;
    access_lower_bound(block, probe, sizeof probe, &row);
    if (block->rows > 1000) match_block(block, &probes, 1, 1, &row, &position, &found);
    access_compare(block, block->rows / 2, probe, sizeof probe, &order);
    if (unpack_keys_size(block, &size) != STATUS_OK || size > (1u << 24)) return;
    uint8_t *out = malloc(size + 1);
    uint32_t *offsets = malloc(4 * ((size_t)block->rows + 1));
    if (out != NULL && offsets != NULL) {
        unpack_keys(block, out, size, offsets);
        if (block->width != 0) unpack_integers(block, 1, 0, block->rows, NULL, 0, out);
    }
    free(out);
    free(offsets);
}

int fuzz_block(const uint8_t *data, size_t len, uint32_t seed) {
    block_t block;
    zone_t zone;
    keys_t keys;
    if (block_parse(data, len, &block) != STATUS_OK) return 0;
    const uint32_t list[] = {0, UINT32_MAX, block.rows / 2, block.rows == 0 ? 0 : block.rows - 1};
    const block_rows_t all = {NULL, 0, block.rows}, half = {NULL, block.rows / 2, block.rows / 2},
                       some = {list, 0, 4}, outside = {NULL, block.rows, 1};
    for (uint32_t i = 0; i < 4; i++) {
        access_value_t value;
        volatile uint8_t seen = 0;
        if (access_value(&block, list[i], &value) != STATUS_OK) continue;
        for (size_t at = 0; at < value.len; at++) seen = seen ^ value.data[at];
    }
    read_rows(&block);
    if (block.rows < (1u << 20)) {
        decode(&block, all);
        decode(&block, half);
        decode(&block, some);
        decode(&block, outside);
        decode_but(&block);
        for (int type = KEY_BOOL; type <= KEY_UUID; type++) {
            zone_compute(&block, (key_type_t)type, &zone);
        }
    }
    if (block.kind == BLOCK_OPAQUE && block.data_len != 0 && block.data_len % 32 == 0) {
        bloom_probe(block.data, block.data_len, data, len);
    }
    if (block_verify(data, len, seed) != STATUS_OK) return 0;
    if (block_keys(data, len, &keys) == STATUS_OK) fuzz_keys(&keys);
    read_keys(&block);
    fuzz_layers(data, len, &block);
    return 1;
}

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t len);

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t len) {
    fuzz_block(data, len, 0);
    fuzz_log(data, len);
    fuzz_value(data, len);
    fuzz_json(data, len);
    fuzz_kafka(data, len);
    uint8_t *copy = malloc(len + 1);
    if (copy != NULL && len >= 4) { /* as if the checksum were right */
        copy_bytes(copy, data, len);
        store_le32(copy, crc32c(0, copy + 4, len - 4));
        fuzz_block(copy, len, 0);
    }
    free(copy);
    return 0;
}
