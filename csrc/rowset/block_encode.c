#include "rowset/block.h"

#include "common/bits.h"
#include "common/check.h"
#include "common/rows.h"

#include <stdbool.h>

static uint64_t row_of(const block_column_t *column, block_rows_t rows, uint32_t i) {
    return column->offset + (rows.rows == NULL ? (uint64_t)rows.lo + i : rows.rows[i]);
}

static bool is_null(const block_column_t *column, uint64_t row) {
    return column->validity != NULL && bits_get(column->validity, row) == 0;
}

static uint32_t value_start(const block_column_t *column, uint64_t row) {
    return load_le32(column->offsets + 4 * row);
}

/* The bytes of a value; nulls have none, whatever Arrow's offsets say. */
static uint32_t value_len(const block_column_t *column, uint64_t row) {
    if (is_null(column, row)) return 0;
    return value_start(column, row + 1) - value_start(column, row);
}

static bool buffers_hold(const block_column_t *column) {
    const uint64_t end = column->offset + column->length;
    CHECK((column->kind == BLOCK_FIXED) == (column->width != 0));
    if (column->length == 0) return true;
    if (column->validity != NULL && column->validity_len < bits_bytes(end)) return false;
    switch (column->kind) {
        case BLOCK_FIXED: return column->values_len / column->width >= end;
        case BLOCK_BIT: return column->values_len >= bits_bytes(end);
        case BLOCK_VARLEN: return column->offsets_len / 4 > end;
        case BLOCK_OPAQUE: break;
    }
    return false;
}

static bool rows_inside(const block_column_t *column, block_rows_t rows) {
    const uint64_t limit = column->length < UINT32_MAX ? column->length : UINT32_MAX;
    if (rows.rows == NULL) return rows.n <= limit && rows.lo <= limit - rows.n;
    return rows_below(rows.rows, rows.n, (uint32_t)limit);
}

static uint32_t count_nulls(const block_column_t *column, block_rows_t rows) {
    if (column->validity == NULL) return 0;
    if (rows.rows == NULL) {
        return rows.n - (uint32_t)bits_count(column->validity, column->offset + rows.lo, rows.n);
    }
    uint32_t nulls = 0;
    for (uint32_t i = 0; i < rows.n; i++) {
        nulls += 1 - bits_get(column->validity, column->offset + rows.rows[i]);
    }
    return nulls;
}

static status_t check_offsets(const block_column_t *column, block_rows_t rows) {
    uint32_t bad = 0;
    if (rows.rows == NULL) {
        const uint8_t *starts = column->offsets + 4 * (column->offset + rows.lo);
        for (size_t i = 0; i < rows.n; i++) {
            bad |= load_le32(starts + 4 * i) > load_le32(starts + 4 * i + 4);
        }
        if (rows.n != 0) bad |= load_le32(starts + 4 * (size_t)rows.n) > column->values_len;
        return bad == 0 ? STATUS_OK : STATUS_INPUT;
    }
    for (uint32_t i = 0; i < rows.n; i++) {
        const uint64_t row = row_of(column, rows, i);
        const uint32_t from = value_start(column, row), to = value_start(column, row + 1);
        bad |= (uint32_t)(from > to) | (uint32_t)(to > column->values_len);
    }
    return bad == 0 ? STATUS_OK : STATUS_INPUT;
}

static uint64_t sum_lens(const block_column_t *column, block_rows_t rows) {
    uint64_t sum = 0;
    if (rows.rows == NULL && column->validity == NULL) {
        const uint64_t row = column->offset + rows.lo;
        return rows.n == 0 ? 0 : value_start(column, row + rows.n) - value_start(column, row);
    }
    for (uint32_t i = 0; i < rows.n; i++) sum += value_len(column, row_of(column, rows, i));
    return sum;
}

/* Where the sections of a block stand, from its start. */
typedef struct {
    uint64_t offsets;
    uint64_t data;
    uint64_t body_len;
    uint64_t size;
} layout_t;

static layout_t layout_make(block_kind_t kind, uint32_t rows, uint32_t nulls, uint64_t data_len) {
    layout_t layout;
    layout.offsets = BLOCK_HEADER_BYTES + (nulls == 0 ? 0 : round_up_8(bits_bytes(rows)));
    layout.data = layout.offsets;
    if (kind == BLOCK_VARLEN) layout.data += round_up_8(4 * ((uint64_t)rows + 1));
    layout.body_len = layout.data + data_len - BLOCK_HEADER_BYTES;
    layout.size = BLOCK_HEADER_BYTES + round_up_8(layout.body_len);
    return layout;
}

static status_t measure(const block_column_t *column, block_rows_t rows, uint32_t *nulls,
                        uint64_t *data_len) {
    if (!buffers_hold(column)) return STATUS_INPUT;
    if (!rows_inside(column, rows)) return STATUS_RANGE;
    *nulls = count_nulls(column, rows);
    *data_len = 0;
    if (column->kind == BLOCK_FIXED) *data_len = (uint64_t)rows.n * column->width;
    if (column->kind == BLOCK_BIT) *data_len = bits_bytes(rows.n);
    if (column->kind != BLOCK_VARLEN) return STATUS_OK;
    const status_t status = check_offsets(column, rows);
    if (status != STATUS_OK) return status;
    *data_len = sum_lens(column, rows);
    return *data_len <= INT32_MAX ? STATUS_OK : STATUS_LIMIT;
}

status_t block_encode_size(const block_column_t *column, block_rows_t rows, uint64_t *out_size) {
    uint32_t nulls;
    uint64_t data_len;
    const status_t status = measure(column, rows, &nulls, &data_len);
    if (status == STATUS_OK) *out_size = layout_make(column->kind, rows.n, nulls, data_len).size;
    return status;
}

static void write_bits(const uint8_t *bits, const block_column_t *column, block_rows_t rows,
                       uint8_t *out) {
    if (rows.rows == NULL) {
        bits_copy(bits, column->offset + rows.lo, out, rows.n);
        return;
    }
    for (uint32_t i = 0; i < rows.n; i++) {
        bits_or(out, i, bits_get(bits, column->offset + rows.rows[i]));
    }
}

/* Called with a constant `width` for the common ones. */
static inline void gather_fixed(const block_column_t *column, block_rows_t rows, uint8_t *out,
                                size_t width) {
    const uint8_t *values = column->values + column->offset * width;
    for (size_t i = 0; i < rows.n; i++) {
        memcpy(out + i * width, values + rows.rows[i] * width, width);
    }
}

static void write_fixed(const block_column_t *column, block_rows_t rows, uint8_t *out) {
    const size_t width = column->width;
    if (rows.n == 0) return;
    if (rows.rows == NULL) {
        memcpy(out, column->values + (column->offset + rows.lo) * width, rows.n * width);
        return;
    }
    switch (width) {
        case 1: gather_fixed(column, rows, out, 1); break;
        case 2: gather_fixed(column, rows, out, 2); break;
        case 4: gather_fixed(column, rows, out, 4); break;
        case 8: gather_fixed(column, rows, out, 8); break;
        case 16: gather_fixed(column, rows, out, 16); break;
        default: gather_fixed(column, rows, out, width);
    }
}

/* Arrow leaves anything at all in the place of a null: nothing of it may reach the disk. */
static void clear_nulls(const uint8_t *validity, uint32_t n, size_t width, uint8_t *out) {
    for (uint32_t i = 0; i < n;) {
        const unsigned count = n - i < 64 ? n - i : 64;
        const uint64_t all = count == 64 ? ~UINT64_C(0) : (UINT64_C(1) << count) - 1;
        uint64_t nulls = all & ~bits_load(validity, i, count);
        for (; nulls != 0; nulls &= nulls - 1) {
            memset(out + ((size_t)i + (unsigned)__builtin_ctzll(nulls)) * width, 0, width);
        }
        i += count;
    }
}

static void and_bits(const uint8_t *validity, uint32_t n, uint8_t *out) {
    for (size_t i = 0; i < bits_bytes(n); i++) out[i] = out[i] & validity[i];
}

static void write_varlen(const block_column_t *column, block_rows_t rows, uint64_t data_len,
                         uint8_t *offsets, uint8_t *data) {
    const uint64_t first = column->offset + rows.lo;
    if (rows.rows == NULL && rows.n != 0 &&
        data_len == value_start(column, first + rows.n) - value_start(column, first)) {
        const uint32_t base = value_start(column, first);
        for (size_t i = 0; i <= rows.n; i++) {
            store_le32(offsets + 4 * i, value_start(column, first + i) - base);
        }
        copy_bytes(data, column->values + base, data_len);
        return;
    }
    uint32_t at = 0;
    store_le32(offsets, 0);
    for (size_t i = 0; i < rows.n; i++) {
        const uint64_t row = row_of(column, rows, (uint32_t)i);
        const uint32_t len = value_len(column, row);
        copy_bytes(data + at, column->values + value_start(column, row), len);
        at += len;
        store_le32(offsets + 4 * (i + 1), at);
    }
}

static void finish(block_header_t header, const layout_t *layout, uint32_t seed, uint8_t *out) {
    header.version = BLOCK_VERSION;
    header.body_len = layout->body_len;
    block_seal(&header, seed, out, layout->size);
}

status_t block_encode(const block_column_t *column, block_rows_t rows, uint32_t seed,
                      uint8_t *out, size_t out_len) {
    uint32_t nulls;
    uint64_t data_len;
    const status_t status = measure(column, rows, &nulls, &data_len);
    if (status != STATUS_OK) return status;
    const layout_t layout = layout_make(column->kind, rows.n, nulls, data_len);
    CHECK(out_len == layout.size);
    const uint8_t *validity = out + BLOCK_HEADER_BYTES;
    /* All but the data is small: clear it, so that padding and bits behind the end are 0. */
    memset(out, 0, layout.data);
    if (nulls != 0) write_bits(column->validity, column, rows, out + BLOCK_HEADER_BYTES);
    switch (column->kind) {
        case BLOCK_FIXED:
            write_fixed(column, rows, out + layout.data);
            if (nulls != 0) clear_nulls(validity, rows.n, column->width, out + layout.data);
            break;
        case BLOCK_BIT:
            memset(out + layout.data, 0, data_len);
            write_bits(column->values, column, rows, out + layout.data);
            if (nulls != 0) and_bits(validity, rows.n, out + layout.data);
            break;
        case BLOCK_VARLEN:
            write_varlen(column, rows, data_len, out + layout.offsets, out + layout.data);
            break;
        case BLOCK_OPAQUE: break;
    }
    const block_header_t header = {.kind = (uint8_t)column->kind,
                                   .flags = nulls == 0 ? 0 : BLOCK_HAS_VALIDITY,
                                   .rows = rows.n,
                                   .null_count = nulls,
                                   .width = column->kind == BLOCK_FIXED ? column->width : 0};
    finish(header, &layout, seed, out);
    return STATUS_OK;
}

static layout_t layout_of_keys(const keys_t *keys) {
    if (keys->offsets == NULL) {
        return layout_make(BLOCK_FIXED, keys->n, 0, (uint64_t)keys->n * keys->width);
    }
    const uint32_t from = load_le32(keys->offsets);
    const uint64_t len = load_le32(keys->offsets + 4 * (size_t)keys->n) - from;
    return layout_make(BLOCK_VARLEN, keys->n, 0, len);
}

uint64_t block_size_of_keys(const keys_t *keys) { return layout_of_keys(keys).size; }

void block_encode_keys(const keys_t *keys, uint32_t seed, uint8_t *out, size_t out_len) {
    const layout_t layout = layout_of_keys(keys);
    const uint64_t data_len = layout.body_len - (layout.data - BLOCK_HEADER_BYTES);
    block_header_t header = {.kind = BLOCK_FIXED, .rows = keys->n, .width = keys->width};
    uint32_t from = 0;
    CHECK(out_len == layout.size);
    if (keys->offsets != NULL) {
        header.kind = BLOCK_VARLEN;
        from = load_le32(keys->offsets);
        memset(out + layout.offsets, 0, layout.data - layout.offsets);
        for (size_t i = 0; i <= keys->n; i++) {
            store_le32(out + layout.offsets + 4 * i, load_le32(keys->offsets + 4 * i) - from);
        }
    }
    copy_bytes(out + layout.data, keys->data + from, data_len);
    finish(header, &layout, seed, out);
}

uint64_t block_size_of_opaque(size_t len) { return layout_make(BLOCK_OPAQUE, 0, 0, len).size; }

void block_encode_opaque(const uint8_t *data, size_t len, uint32_t rows, uint32_t null_count,
                         uint32_t seed, uint8_t *out, size_t out_len) {
    const layout_t layout = layout_make(BLOCK_OPAQUE, 0, 0, len);
    CHECK(out_len == layout.size && null_count <= rows);
    copy_bytes(out + layout.data, data, len);
    const block_header_t header = {.kind = BLOCK_OPAQUE, .rows = rows, .null_count = null_count};
    finish(header, &layout, seed, out);
}
