#include "common/bytes.h"
#include "rowset/encode_body.h"
#include "rowset/unpack_inline.h"

/* What looks as if it did not pay is given up after some frames. */
enum { TRIED_FRAMES = 4, SAMPLE = 32 };

bool body_room(const body_t *body, uint64_t len) {
    return len <= body->cap && body->used <= body->cap - len;
}

void body_align(body_t *body) {
    const uint64_t end = round_up_8(body->used);
    memset(body->out + body->used, 0, end - body->used);
    body->used = end;
}

bool body_put(body_t *body, const void *bytes, uint64_t len) {
    if (!body_room(body, round_up_8(len))) return false;
    copy_bytes(body->out + body->used, bytes, len);
    body->used += len;
    return true;
}

/* -- packed numbers ---------------------------------------------------------------- */

/* Where numbers come from. `load` writes [lo, lo + n) of them; false: they are none. */
typedef struct numbers {
    const values_t *values;
    const uint32_t *list;
    uint32_t word;
    double power;
    bool (*load)(const struct numbers *from, uint32_t lo, uint32_t n, uint64_t *out);
} numbers_t;

static inline void load_each(const uint8_t *data, uint32_t lo, uint32_t n, size_t width,
                             uint32_t bytes, uint32_t keys, uint64_t *out) {
    for (size_t i = 0; i < n; i++) out[i] = unpack_load(data + (lo + i) * width, bytes, keys);
}

static bool load_fixed(const numbers_t *from, uint32_t lo, uint32_t n, uint64_t *out) {
    const values_t *values = from->values;
    const uint32_t bytes = unpack_word_bytes(values->width, from->word);
    const uint8_t *data = values->data + 8 * (size_t)from->word;
    if (values->width == 8) {
        if (values->keys) {
            load_each(data, lo, n, 8, 8, 1, out);
        } else {
            memcpy(out, data + 8 * (size_t)lo, 8 * (size_t)n);
        }
    } else if (values->keys) {
        load_each(data, lo, n, values->width, bytes, 1, out);
    } else if (values->width == 4) {
        load_each(data, lo, n, 4, 4, 0, out);
    } else if (values->width == 16) {
        load_each(data, lo, n, 16, 8, 0, out);
    } else {
        load_each(data, lo, n, values->width, bytes, 0, out);
    }
    return true;
}

static bool load_list(const numbers_t *from, uint32_t lo, uint32_t n, uint64_t *out) {
    for (size_t i = 0; i < n; i++) out[i] = from->list[lo + i];
    return true;
}

static bool load_offsets(const numbers_t *from, uint32_t lo, uint32_t n, uint64_t *out) {
    const uint8_t *offsets = from->values->offsets;
    const uint32_t base = load_le32(offsets);
    for (size_t i = 0; i < n; i++) out[i] = load_le32(offsets + 4 * (lo + i)) - base;
    return true;
}

/* One value as a number over a power of ten, when that gives the value back, bit by bit. */
static inline bool is_scaled(double value, double power) {
    const double near = value * power + UNPACK_MAGIC, whole = near - UNPACK_MAGIC;
    return whole > -UNPACK_LIMIT && whole < UNPACK_LIMIT &&
           unpack_bits(whole / power) == unpack_bits(value);
}

static inline bool scale_float(const uint8_t *at, double power, uint64_t *out) {
    float value;
    memcpy(&value, at, 4);
    const double near = (double)value * power + UNPACK_MAGIC;
    *out = unpack_bits(near) - unpack_bits(UNPACK_MAGIC);
    const double whole = near - UNPACK_MAGIC;
    const float back = (float)(whole / power);
    return whole > -UNPACK_LIMIT && whole < UNPACK_LIMIT && memcmp(&back, &value, 4) == 0;
}

static bool load_decimals(const numbers_t *from, uint32_t lo, uint32_t n, uint64_t *out) {
    const uint8_t *data = from->values->data;
    uint64_t wrong = 0;
    if (from->values->width == 8) {
        for (size_t i = 0; i < n; i++) {
            const double value = unpack_double(load_le64(data + 8 * (lo + i)));
            const double near = value * from->power + UNPACK_MAGIC;
            const double back = (near - UNPACK_MAGIC) / from->power;
            out[i] = unpack_bits(near) - unpack_bits(UNPACK_MAGIC);
            wrong |= unpack_bits(back) ^ unpack_bits(value);
        }
        return wrong == 0;
    }
    for (size_t i = 0; i < n; i++) wrong |= !scale_float(data + 4 * (lo + i), from->power, out + i);
    return wrong == 0;
}

/* Packs n numbers at once, frame by frame. False: they are none, or it does not pay. */
static bool pack(const numbers_t *from, uint32_t n, uint32_t bits, body_t *body) {
    uint64_t numbers[PACKED_FRAME];
    packed_frame_t frame;
    const uint64_t start = body->used;
    uint32_t rows = 0;
    if (!body_room(body, packed_size(n, 0))) return false;
    uint8_t *words = body->out + start + packed_size(n, 0);
    for (uint32_t lo = 0, done = 0; lo < n; lo += PACKED_FRAME, done++) {
        const uint32_t count = n - lo < PACKED_FRAME ? n - lo : PACKED_FRAME;
        if (!from->load(from, lo, count, numbers)) return false;
        for (uint32_t i = count; i % PACKED_LANES != 0; i++) numbers[i] = numbers[count - 1];
        const uint32_t some = packed_plan(numbers, count, bits, rows, &frame);
        if (!body_room(body, packed_size(n, (uint64_t)rows + some))) return false;
        if (done == TRIED_FRAMES && packed_size(lo, rows) * n > body->cap * (uint64_t)lo) return false;
        memcpy(body->out + start + (size_t)done * PACKED_FRAME_BYTES, &frame, sizeof frame);
        packed_write(numbers, count, &frame, words + (size_t)rows * PACKED_ROW_BYTES);
        rows += some;
    }
    body->used = start + packed_size(n, rows);
    return true;
}

bool body_list(const uint32_t *list, uint32_t n, body_t *body) {
    const numbers_t from = {.list = list, .load = load_list};
    return pack(&from, n, 64, body);
}

bool body_offsets(const values_t *values, body_t *body) {
    const numbers_t from = {.values = values, .load = load_offsets};
    return pack(&from, values->n + 1, 64, body);
}

bool body_packed(const values_t *values, body_t *body) {
    const uint32_t words = values->width > 8 ? 2 : 1;
    if (values->width > 16) return false;
    body->header.encoding = BLOCK_PACKED;
    body->header.keys = (uint8_t)values->keys;
    for (uint32_t word = 0; word < words; word++) {
        const numbers_t from = {.values = values, .word = word, .load = load_fixed};
        /* Keys are searched as numbers: all bits of them come back. */
        const uint32_t bits = values->keys ? 64 : 8 * unpack_word_bytes(values->width, word);
        if (!pack(&from, values->n, bits, body)) return false;
    }
    return true;
}

/* -- floats ------------------------------------------------------------------------ */

/* The digits behind the point that some of the values have; above BLOCK_MOST_DIGITS: they are no
 * decimals. */
static uint32_t sample_digits(const values_t *values) {
    uint32_t digits = 0;
    for (uint32_t i = 0; i < SAMPLE; i++) {
        const uint8_t *at = values->data + (size_t)((uint64_t)values->n * i / SAMPLE) * values->width;
        uint64_t number;
        for (; digits <= BLOCK_MOST_DIGITS; digits++) {
            const double power = unpack_power(digits);
            if (values->width == 4 ? scale_float(at, power, &number)
                                   : is_scaled(unpack_double(load_le64(at)), power)) {
                break;
            }
        }
        if (digits > BLOCK_MOST_DIGITS) break;
    }
    return digits;
}

bool body_decimal(const values_t *values, body_t *body) {
    if (values->keys || (values->width != 4 && values->width != 8)) return false;
    const uint32_t digits = sample_digits(values);
    if (digits > BLOCK_MOST_DIGITS) return false;
    const numbers_t from = {.values = values, .power = unpack_power(digits), .load = load_decimals};
    body->header.encoding = BLOCK_DECIMAL;
    body->header.digits = (uint8_t)digits;
    return pack(&from, values->n, 64, body);
}
