#include "codec/key.h"
#include "codec/key_value.h"
#include "codec/keys_inline.h"
#include "common/bits.h"
#include "common/check.h"
#include "common/rows.h"

/* Where an escaped string that begins at `from` ends: the place behind its 00 01, or 0
 * (no end mark can leave 0 behind it) when there is none or an escape is unknown. *zeros
 * is the number of escaped zeros. */
static size_t skip_escaped(slice_t key, size_t from, uint32_t *zeros) {
    *zeros = 0;
    for (size_t at = from; at < key.len;) {
        const uint8_t *zero = memchr(key.data + at, 0, key.len - at);
        if (zero == NULL || (size_t)(zero - key.data) + 1 >= key.len) return 0;
        at = (size_t)(zero - key.data) + 2;
        if (zero[1] == 0x01) return at;
        if (zero[1] != 0xFF) return 0;
        ++*zeros;
    }
    return 0;
}

typedef struct {
    const keys_t *keys;
    const key_type_t *types;
    uint32_t n_types;
    uint32_t column;
    uint32_t last_bytes; /* columns from here to `column` are fixed */
    size_t fixed_at;     /* width of those */
} walk_t;

static walk_t walk_make(const keys_t *keys, const key_type_t *types, uint32_t n_types,
                        uint32_t column, uint32_t lo, uint32_t n) {
    CHECK(column < n_types && n <= keys->n && lo <= keys->n - n);
    walk_t walk = {keys, types, n_types, column, 0, 0};
    for (uint32_t c = column; c > 0; c--) {
        if (types[c - 1] == KEY_BYTES) {
            walk.last_bytes = c;
            break;
        }
    }
    for (uint32_t c = walk.last_bytes; c < column; c++) walk.fixed_at += key_type_width(types[c]);
    return walk;
}

/* The column's bytes and all behind them; data is NULL when the key is damaged. */
static slice_t walk_to(const walk_t *walk, uint32_t row) {
    const slice_t key = keys_at(walk->keys, row), bad = {NULL, 0};
    size_t at = 0;
    for (uint32_t c = 0; c < walk->last_bytes; c++) {
        uint32_t zeros;
        if (walk->types[c] != KEY_BYTES) {
            at += key_type_width(walk->types[c]);
        } else if ((at = skip_escaped(key, at, &zeros)) == 0) {
            return bad;
        }
    }
    at += walk->fixed_at;
    if (at > key.len) return bad;
    const slice_t rest = {key.data + at, key.len - at};
    return rest;
}

static status_t decode_bools(const walk_t *walk, uint32_t lo, uint32_t n, uint8_t *out) {
    memset(out, 0, bits_bytes(n));
    for (uint32_t i = 0; i < n; i++) {
        const slice_t rest = walk_to(walk, lo + i);
        if (rest.data == NULL || rest.len < 1 || rest.data[0] > 1) return STATUS_CORRUPT;
        bits_or(out, i, rest.data[0]);
    }
    return STATUS_OK;
}

static inline void read_value(key_type_t type, const uint8_t *from, uint8_t *to) {
    switch (type) {
        case KEY_U8: *to = *from; break;
        case KEY_I8: *to = (uint8_t)(*from ^ 0x80); break;
        case KEY_U16: store_le16(to, load_be16(from)); break;
        case KEY_I16: store_le16(to, (uint16_t)(load_be16(from) ^ 0x8000)); break;
        case KEY_U32: store_le32(to, load_be32(from)); break;
        case KEY_I32: store_le32(to, load_be32(from) ^ KEY_SIGN_32); break;
        case KEY_U64: store_le64(to, load_be64(from)); break;
        case KEY_I64: store_le64(to, load_be64(from) ^ KEY_SIGN_64); break;
        case KEY_F32: store_le32(to, key_bits_f32(load_be32(from))); break;
        case KEY_F64: store_le64(to, key_bits_f64(load_be64(from))); break;
        case KEY_DECIMAL128:
            store_le64(to, load_be64(from + 8));
            store_le64(to + 8, load_be64(from) ^ KEY_SIGN_64);
            break;
        case KEY_UUID: memcpy(to, from, 16); break;
        case KEY_BOOL:
        case KEY_BYTES: CHECK(0);
    }
}

/* `type`, `width` and `stride` are constants where this is called from `decode_strided`. */
static inline void decode_loop(key_type_t type, size_t width, const uint8_t *from, size_t stride,
                               uint32_t n, uint8_t *out) {
    for (size_t i = 0; i < n; i++) read_value(type, from + i * stride, out + i * width);
}

static void decode_strided(key_type_t type, const uint8_t *from, size_t stride, uint32_t n,
                           uint8_t *out) {
#define CASE(type, width)                                                                  \
    case type:                                                                             \
        if (stride == (width)) {                                                           \
            decode_loop(type, (width), from, (width), n, out);                             \
        } else {                                                                           \
            decode_loop(type, (width), from, stride, n, out);                              \
        }                                                                                  \
        break;
    switch (type) {
        CASE(KEY_U8, 1)
        CASE(KEY_I8, 1)
        CASE(KEY_U16, 2)
        CASE(KEY_I16, 2)
        CASE(KEY_U32, 4)
        CASE(KEY_I32, 4)
        CASE(KEY_U64, 8)
        CASE(KEY_I64, 8)
        CASE(KEY_F32, 4)
        CASE(KEY_F64, 8)
        CASE(KEY_DECIMAL128, 16)
        CASE(KEY_UUID, 16)
        case KEY_BOOL:
        case KEY_BYTES: CHECK(0);
    }
#undef CASE
}

status_t key_decode_fixed(const keys_t *keys, const key_type_t *types, uint32_t n_types,
                          uint32_t column, uint32_t lo, uint32_t n, uint8_t *out,
                          size_t out_len) {
    const walk_t walk = walk_make(keys, types, n_types, column, lo, n);
    const key_type_t type = types[column];
    const size_t width = key_type_width(type);
    CHECK(type != KEY_BYTES);
    CHECK(out_len >= (type == KEY_BOOL ? bits_bytes(n) : width * n));
    if (type == KEY_BOOL) return decode_bools(&walk, lo, n, out);
    if (keys->offsets == NULL && walk.last_bytes == 0) {
        if (walk.fixed_at + width > keys->width) return STATUS_CORRUPT;
        if (n == 0) return STATUS_OK;
        decode_strided(type, keys->data + (size_t)lo * keys->width + walk.fixed_at, keys->width, n,
                       out);
        return STATUS_OK;
    }
    for (uint32_t i = 0; i < n; i++) {
        const slice_t rest = walk_to(&walk, lo + i);
        if (rest.data == NULL || rest.len < width) return STATUS_CORRUPT;
        read_value(type, rest.data, out + i * width);
    }
    return STATUS_OK;
}

status_t key_decode_but(const keys_t *keys, const key_type_t *types, uint32_t n_types,
                        uint32_t column, uint32_t lo, uint32_t n, const uint32_t *gone,
                        uint32_t gone_n, uint8_t *out, size_t out_len) {
    const rows_but_t rows = {gone, gone_n, lo, n};
    const size_t width = key_type_width(types[column]);
    CHECK(types[column] != KEY_BOOL && width != 0);
    if (!rows_but_sane(rows, keys->n)) return STATUS_RANGE;
    CHECK((n - gone_n) * width <= out_len);
    for (uint32_t i = 0; i <= gone_n; i++) {
        const rows_run_t run = rows_run(rows, i);
        if (run.n == 0) continue;
        const status_t status = key_decode_fixed(keys, types, n_types, column, run.lo, run.n, out,
                                                 run.n * width);
        if (status != STATUS_OK) return status;
        out += run.n * width;
    }
    return STATUS_OK;
}

status_t key_decode_offsets(const keys_t *keys, const key_type_t *types, uint32_t n_types,
                            uint32_t column, uint32_t lo, uint32_t n, uint32_t *out_offsets,
                            uint64_t *out_size) {
    const walk_t walk = walk_make(keys, types, n_types, column, lo, n);
    CHECK(types[column] == KEY_BYTES);
    uint64_t size = 0;
    out_offsets[0] = 0;
    for (uint32_t i = 0; i < n; i++) {
        const slice_t rest = walk_to(&walk, lo + i);
        if (rest.data == NULL) return STATUS_CORRUPT;
        if (column + 1 == n_types) {
            size += rest.len;
        } else {
            uint32_t zeros;
            const size_t end = skip_escaped(rest, 0, &zeros);
            if (end == 0) return STATUS_CORRUPT;
            size += end - 2 - zeros;
        }
        if (size > INT32_MAX) return STATUS_LIMIT; /* Arrow's offsets are i32 */
        out_offsets[i + 1] = (uint32_t)size;
    }
    *out_size = size;
    return STATUS_OK;
}

/* Copies `len` plain bytes out of an escaped string that key_decode_offsets measured. */
static void read_escaped(const uint8_t *from, size_t len, uint8_t *to) {
    while (len != 0) {
        const uint8_t *zero = memchr(from, 0, len);
        if (zero == NULL) {
            memcpy(to, from, len);
            return;
        }
        const size_t plain = (size_t)(zero - from) + 1;
        memcpy(to, from, plain);
        to += plain;
        from += plain + 1;
        len -= plain;
    }
}

status_t key_decode_bytes(const keys_t *keys, const key_type_t *types, uint32_t n_types,
                          uint32_t column, uint32_t lo, uint32_t n, const uint32_t *offsets,
                          uint8_t *out, size_t out_len) {
    const walk_t walk = walk_make(keys, types, n_types, column, lo, n);
    CHECK(types[column] == KEY_BYTES && offsets[n] <= out_len);
    for (uint32_t i = 0; i < n; i++) {
        const slice_t rest = walk_to(&walk, lo + i);
        const size_t len = offsets[i + 1] - offsets[i];
        if (rest.data == NULL || rest.len < len) return STATUS_CORRUPT;
        if (column + 1 == n_types) {
            copy_bytes(out + offsets[i], rest.data, len);
        } else {
            read_escaped(rest.data, len, out + offsets[i]);
        }
    }
    return STATUS_OK;
}
