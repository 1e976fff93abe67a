#include "codec/key.h"
#include "codec/key_value.h"
#include "common/bits.h"
#include "common/check.h"

#include <stdbool.h>

uint32_t key_type_width(key_type_t type) {
    static const uint8_t widths[] = {1, 1, 2, 4, 8, 1, 2, 4, 8, 4, 8, 16, 0, 16};
    CHECK((unsigned)type < sizeof widths);
    return widths[type];
}

uint32_t key_width(const key_type_t *types, uint32_t n_types) {
    uint32_t width = 0;
    for (uint32_t i = 0; i < n_types; i++) {
        if (types[i] == KEY_BYTES) return 0;
        width += key_type_width(types[i]);
    }
    return width;
}

static bool buffers_hold(const key_column_t *column, uint32_t n) {
    const uint64_t rows = column->offset + n;
    if (n == 0) return true;
    if (column->type == KEY_BYTES) return column->offsets_len / 4 > rows;
    if (column->type == KEY_BOOL) return column->values_len >= bits_bytes(rows);
    return column->values_len / key_type_width(column->type) >= rows;
}

/* A writer puts value i of a column at `to` and returns what is behind it. Fixed keys call
 * it with to = out + i * stride, variable ones at a cursor; each call is inlined. */
typedef uint8_t *value_writer_t(const uint8_t *values, uint64_t i, uint8_t *to);

#define WRITER(name, bytes, store)                                                      \
    static inline uint8_t *name(const uint8_t *values, uint64_t i, uint8_t *to) {       \
        const uint8_t *from = values + i * (bytes);                                     \
        store;                                                                          \
        return to + (bytes);                                                            \
    }
WRITER(write_u8, 1, *to = *from)
WRITER(write_u16, 2, store_be16(to, load_le16(from)))
WRITER(write_u32, 4, store_be32(to, load_le32(from)))
WRITER(write_u64, 8, store_be64(to, load_le64(from)))
WRITER(write_i8, 1, *to = (uint8_t)(*from ^ 0x80))
WRITER(write_i16, 2, store_be16(to, (uint16_t)(load_le16(from) ^ 0x8000)))
WRITER(write_i32, 4, store_be32(to, load_le32(from) ^ KEY_SIGN_32))
WRITER(write_i64, 8, store_be64(to, load_le64(from) ^ KEY_SIGN_64))
WRITER(write_f32, 4, store_be32(to, key_order_f32(load_le32(from))))
WRITER(write_f64, 8, store_be64(to, key_order_f64(load_le64(from))))
WRITER(write_uuid, 16, memcpy(to, from, 16))
WRITER(write_decimal, 16,
       (store_be64(to, load_le64(from + 8) ^ KEY_SIGN_64), store_be64(to + 8, load_le64(from))))
#undef WRITER

static inline uint8_t *write_bool(const uint8_t *values, uint64_t i, uint8_t *to) {
    *to = (uint8_t)bits_get(values, i);
    return to + 1;
}

/* One body for both shapes of keys: `offsets` is NULL for fixed ones. `stride` is a
 * constant where it is the width of the value, so that the loop becomes straight code. */
static inline void write_column(value_writer_t *write, const key_column_t *column, uint32_t n,
                                uint8_t *out, size_t stride, uint32_t *offsets) {
    if (offsets == NULL) {
        for (size_t i = 0; i < n; i++) {
            write(column->values, column->offset + i, out + i * stride);
        }
        return;
    }
    for (size_t i = 0; i < n; i++) {
        const uint8_t *end = write(column->values, column->offset + i, out + offsets[i + 1]);
        offsets[i + 1] = (uint32_t)(end - out);
    }
}

static void write_fixed(const key_column_t *column, uint32_t n, uint8_t *out, size_t stride,
                        uint32_t *offsets) {
#define CASE(type, writer, bytes)                                                           \
    case type:                                                                              \
        if (offsets == NULL && stride == (bytes)) {                                         \
            write_column(writer, column, n, out, (bytes), NULL);                            \
        } else {                                                                            \
            write_column(writer, column, n, out, stride, offsets);                          \
        }                                                                                   \
        break;
    switch (column->type) {
        CASE(KEY_BOOL, write_bool, 1)
        CASE(KEY_I8, write_i8, 1)
        CASE(KEY_I16, write_i16, 2)
        CASE(KEY_I32, write_i32, 4)
        CASE(KEY_I64, write_i64, 8)
        CASE(KEY_U8, write_u8, 1)
        CASE(KEY_U16, write_u16, 2)
        CASE(KEY_U32, write_u32, 4)
        CASE(KEY_U64, write_u64, 8)
        CASE(KEY_F32, write_f32, 4)
        CASE(KEY_F64, write_f64, 8)
        CASE(KEY_DECIMAL128, write_decimal, 16)
        CASE(KEY_UUID, write_uuid, 16)
        case KEY_BYTES: CHECK(column->type != KEY_BYTES);
    }
#undef CASE
}

status_t key_encode_fixed(const key_column_t *columns, uint32_t n_columns, uint32_t n,
                          uint8_t *out, size_t out_len) {
    size_t width = 0;
    for (uint32_t i = 0; i < n_columns; i++) {
        if (!buffers_hold(&columns[i], n)) return STATUS_INPUT;
        width += key_type_width(columns[i].type);
    }
    CHECK(out_len >= width * n);
    size_t at = 0;
    for (uint32_t i = 0; i < n_columns; i++) {
        write_fixed(&columns[i], n, out + at, width, NULL);
        at += key_type_width(columns[i].type);
    }
    return STATUS_OK;
}

static uint32_t value_start(const key_column_t *column, uint64_t i) {
    return load_le32(column->offsets + 4 * (column->offset + i));
}

static bool offsets_sane(const key_column_t *column, uint32_t n) {
    const uint8_t *at = column->offsets + 4 * column->offset;
    uint32_t falls = 0;
    for (size_t i = 0; i < n; i++) falls |= load_le32(at + 4 * i) > load_le32(at + 4 * i + 4);
    const uint32_t end = value_start(column, n);
    return falls == 0 && end <= column->values_len && end <= INT32_MAX;
}

static uint32_t count_zeros(const uint8_t *data, size_t len) {
    uint32_t zeros = 0;
    for (size_t i = 0; i < len; i++) zeros += data[i] == 0;
    return zeros;
}

status_t key_encode_starts(const key_column_t *columns, uint32_t n_columns, uint32_t n,
                           uint32_t *out_offsets, uint64_t *out_size) {
    uint32_t fixed = 0;
    for (uint32_t c = 0; c < n_columns; c++) {
        if (!buffers_hold(&columns[c], n)) return STATUS_INPUT;
        if (n != 0 && columns[c].type == KEY_BYTES && !offsets_sane(&columns[c], n)) {
            return STATUS_INPUT;
        }
        fixed += key_type_width(columns[c].type);
    }
    uint64_t size = 0;
    out_offsets[0] = 0;
    for (uint32_t i = 0; i < n; i++) {
        if (size > UINT32_MAX) return STATUS_LIMIT;
        out_offsets[i + 1] = (uint32_t)size;
        size += fixed;
        for (uint32_t c = 0; c < n_columns; c++) {
            if (columns[c].type != KEY_BYTES) continue;
            const uint32_t from = value_start(&columns[c], i), to = value_start(&columns[c], i + 1);
            size += to - from;
            if (c + 1 < n_columns) size += count_zeros(columns[c].values + from, to - from) + 2;
        }
    }
    if (size > UINT32_MAX) return STATUS_LIMIT;
    *out_size = size;
    return STATUS_OK;
}

/* Copies with 00 as 00 FF, then the end mark 00 01. */
static uint8_t *write_escaped(const uint8_t *from, size_t len, uint8_t *to) {
    for (const uint8_t *zero; len != 0 && (zero = memchr(from, 0, len)) != NULL;) {
        const size_t plain = (size_t)(zero - from) + 1;
        memcpy(to, from, plain);
        to += plain;
        *to++ = 0xFF;
        from += plain;
        len -= plain;
    }
    copy_bytes(to, from, len);
    to += len;
    *to++ = 0x00;
    *to++ = 0x01;
    return to;
}

static void write_bytes(const key_column_t *column, uint32_t n, bool last, uint8_t *out,
                        uint32_t *offsets) {
    for (size_t i = 0; i < n; i++) {
        const uint32_t from = value_start(column, i);
        const size_t len = value_start(column, i + 1) - from;
        uint8_t *to = out + offsets[i + 1];
        if (last) {
            copy_bytes(to, column->values + from, len);
            to += len;
        } else {
            to = write_escaped(column->values + from, len, to);
        }
        offsets[i + 1] = (uint32_t)(to - out);
    }
}

status_t key_encode_variable(const key_column_t *columns, uint32_t n_columns, uint32_t n,
                             uint32_t *offsets, uint8_t *out, size_t out_len) {
    if (n_columns == 1 && n != 0 && columns[0].type == KEY_BYTES) {
        const uint32_t from = value_start(&columns[0], 0);
        const size_t len = value_start(&columns[0], n) - from;
        CHECK(len <= out_len);
        copy_bytes(out, columns[0].values + from, len);
        for (size_t i = 0; i <= n; i++) offsets[i] = value_start(&columns[0], i) - from;
        return STATUS_OK;
    }
    for (uint32_t c = 0; c < n_columns; c++) {
        if (columns[c].type == KEY_BYTES) {
            write_bytes(&columns[c], n, c + 1 == n_columns, out, offsets);
        } else {
            write_fixed(&columns[c], n, out, 0, offsets);
        }
    }
    CHECK(offsets[n] <= out_len);
    return STATUS_OK;
}
