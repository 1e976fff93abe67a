#include "codec/json.h"

#include "common/bits.h"
#include "common/bytes.h"
#include "common/check.h"

#include <stdbool.h>
#include <string.h>

/* A text and how far it was read; every function below leaves `at` where it could not go on. */
typedef struct {
    const uint8_t *text;
    size_t len;
    size_t at;
} cursor_t;

static inline uint8_t here(const cursor_t *c) { return c->at < c->len ? c->text[c->at] : 0; }

static void skip_space(cursor_t *c) {
    while (c->at < c->len) {
        const uint8_t byte = c->text[c->at];
        if (byte != ' ' && byte != '\n' && byte != '\r' && byte != '\t') return;
        c->at++;
    }
}

static bool is_digit(uint8_t byte) { return byte >= '0' && byte <= '9'; }

static bool is_hex(uint8_t byte) {
    return is_digit(byte) || (byte >= 'a' && byte <= 'f') || (byte >= 'A' && byte <= 'F');
}

static bool read_digits(cursor_t *c) {
    if (!is_digit(here(c))) return false;
    while (is_digit(here(c))) c->at++;
    return true;
}

static bool read_number(cursor_t *c) {
    if (here(c) == '-') c->at++;
    if (here(c) == '0') {
        c->at++;
    } else if (!read_digits(c)) {
        return false;
    }
    if (here(c) == '.') {
        c->at++;
        if (!read_digits(c)) return false;
    }
    if (here(c) == 'e' || here(c) == 'E') {
        c->at++;
        if (here(c) == '+' || here(c) == '-') c->at++;
        if (!read_digits(c)) return false;
    }
    return true;
}

static bool read_escape(cursor_t *c) {
    const uint8_t kind = here(c);
    if (kind == 0 || strchr("\"\\/bfnrtu", kind) == NULL) return false;
    c->at++;
    for (int i = 0; kind == 'u' && i < 4; i++, c->at++) {
        if (!is_hex(here(c))) return false;
    }
    return true;
}

static bool read_string(cursor_t *c) {
    if (here(c) != '"') return false;
    c->at++;
    while (c->at < c->len) {
        const uint8_t byte = c->text[c->at];
        if (byte < 0x20) return false;
        c->at++;
        if (byte == '"') return true;
        if (byte == '\\' && !read_escape(c)) return false;
    }
    return false;
}

static bool read_word(cursor_t *c, const char *word) {
    for (; *word != 0; word++, c->at++) {
        if (here(c) != (uint8_t)*word) return false;
    }
    return true;
}

static bool read_scalar(cursor_t *c) {
    switch (here(c)) {
        case '"': return read_string(c);
        case 't': return read_word(c, "true");
        case 'f': return read_word(c, "false");
        case 'n': return read_word(c, "null");
        default: return read_number(c);
    }
}

static bool read_name(cursor_t *c) {
    skip_space(c);
    if (!read_string(c)) return false;
    skip_space(c);
    if (here(c) != ':') return false;
    c->at++;
    return true;
}

/* The brackets that are open: a bit each, set for an object. */
typedef struct {
    uint8_t bits[JSON_DEPTH / 8];
    uint32_t depth;
} open_t;

static bool in_object(const open_t *open) { return bits_get(open->bits, open->depth - 1) != 0; }

static bool push(open_t *open, bool object) {
    if (open->depth == JSON_DEPTH) return false;
    const uint8_t bit = (uint8_t)(1U << (open->depth & 7)), old = open->bits[open->depth >> 3];
    open->bits[open->depth >> 3] = (uint8_t)(object ? old | bit : old & ~bit);
    open->depth++;
    return true;
}

/* Behind a value: closes what ends there, and goes on to where the next value begins. False: it
 * can not, or nothing is open any more. */
static bool go_on(cursor_t *c, open_t *open) {
    for (;;) {
        skip_space(c);
        if (open->depth == 0) return false;
        const bool object = in_object(open);
        if (here(c) == ',') {
            c->at++;
            return !object || read_name(c);
        }
        if (here(c) != (object ? '}' : ']')) return false;
        c->at++;
        open->depth--;
    }
}

/* One value and what space is before it; false: there is none. */
static bool read_value(cursor_t *c) {
    open_t open = {{0}, 0};
    for (;;) {
        skip_space(c);
        const uint8_t first = here(c);
        if (first != '{' && first != '[') {
            if (!read_scalar(c)) return false;
        } else {
            const bool object = first == '{';
            if (!push(&open, object)) return false;
            c->at++;
            skip_space(c);
            if (here(c) != (object ? '}' : ']')) {
                if (object && !read_name(c)) return false;
                continue; /* its first value comes next */
            }
            c->at++;
            open.depth--;
        }
        if (!go_on(c, &open)) return open.depth == 0;
    }
}

int json_text(const uint8_t *text, size_t len, size_t *out_at) {
    cursor_t c = {text, len, 0};
    const bool sane = read_value(&c);
    if (sane) skip_space(&c);
    *out_at = c.at;
    return sane && c.at == len;
}

static status_t check_texts(const row_column_t *texts) {
    const uint64_t end = texts->offset + texts->length;
    CHECK(texts->length < UINT32_MAX);
    if (texts->length == 0) return STATUS_OK;
    if (texts->offsets_len / 4 <= end) return STATUS_INPUT;
    if (texts->validity != NULL && texts->validity_len < bits_bytes(end)) return STATUS_INPUT;
    return STATUS_OK;
}

static const uint8_t EMPTY[1] = {0}; /* what has no bytes is no null */

/* Text i; data is NULL where it is null. INPUT: it is not within the buffer. */
static status_t text_at(const row_column_t *texts, uint32_t i, row_slice_t *out) {
    const uint64_t at = texts->offset + i;
    *out = (row_slice_t){NULL, 0};
    if (texts->validity != NULL && bits_get(texts->validity, at) == 0) return STATUS_OK;
    const uint32_t from = load_le32(texts->offsets + 4 * at);
    const uint32_t to = load_le32(texts->offsets + 4 * at + 4);
    if (from > to || to > texts->values_len) return STATUS_INPUT;
    *out = (row_slice_t){from == to ? EMPTY : texts->values + from, to - from};
    return STATUS_OK;
}

status_t json_column(const row_column_t *texts, uint32_t *out_row, uint64_t *out_at) {
    status_t status = check_texts(texts);
    *out_row = (uint32_t)texts->length;
    *out_at = 0;
    for (uint32_t i = 0; status == STATUS_OK && i < texts->length; i++) {
        row_slice_t text;
        size_t at;
        status = text_at(texts, i, &text);
        if (status != STATUS_OK || text.data == NULL) continue;
        if (!json_text(text.data, text.len, &at)) {
            *out_row = i;
            *out_at = at;
            break;
        }
    }
    return status;
}

/* The number of a name; names->n when there is no such. */
static uint32_t name_number(const json_names_t *names, const uint8_t *name, size_t len) {
    for (uint32_t i = 0; i < names->n; i++) {
        const uint32_t from = i == 0 ? 0 : names->ends[i - 1];
        if (names->ends[i] - from == len && memcmp(names->names + from, name, len) == 0) return i;
    }
    return names->n;
}

/* The value of a member; data is NULL where there is none, or a null. False: it is no object, or
 * has a name that is not known, or that of the member twice. */
static bool find_member(cursor_t *c, const json_names_t *names, uint32_t wanted,
                        row_slice_t *out) {
    bool seen = false;
    *out = (row_slice_t){NULL, 0};
    skip_space(c);
    if (here(c) != '{') return false;
    c->at++;
    skip_space(c);
    if (here(c) == '}') return true;
    for (;;) {
        skip_space(c);
        const size_t from = c->at + 1;
        if (!read_string(c)) return false;
        const size_t len = c->at - from - 1;
        const uint32_t number = name_number(names, c->text + from, len);
        if (number == names->n || (number == wanted && seen)) { /* one with escapes is none */
            c->at = from;
            return false;
        }
        skip_space(c);
        if (here(c) != ':') return false;
        c->at++;
        skip_space(c);
        const size_t begin = c->at;
        if (!read_value(c)) return false;
        if (number == wanted) {
            seen = true;
            size_t end = c->at;
            while (strchr(" \n\r\t", c->text[end - 1]) != NULL) end--;
            const bool null = end - begin == 4 && memcmp(c->text + begin, "null", 4) == 0;
            *out = null ? (row_slice_t){NULL, 0} : (row_slice_t){c->text + begin, end - begin};
        }
        if (here(c) == '}') return true;
        if (here(c) != ',') return false;
        c->at++;
    }
}

status_t json_member_offsets(const row_column_t *texts, const json_names_t *names, uint32_t wanted,
                             uint8_t *out_validity, uint32_t *out_offsets, uint32_t *out_row,
                             uint64_t *out_at) {
    status_t status = check_texts(texts);
    uint64_t size = 0;
    memset(out_validity, 0, bits_bytes(texts->length));
    out_offsets[0] = 0;
    for (uint32_t i = 0; status == STATUS_OK && i < texts->length; i++) {
        row_slice_t text, value = {NULL, 0};
        status = text_at(texts, i, &text);
        if (status == STATUS_OK && text.data != NULL) {
            cursor_t c = {text.data, text.len, 0};
            *out_row = i;
            const bool sane = find_member(&c, names, wanted, &value);
            *out_at = c.at;
            if (!sane) return STATUS_CORRUPT;
        }
        if (value.data != NULL) bits_set(out_validity, i);
        size += value.len;
        if (size > INT32_MAX) return STATUS_LIMIT;
        out_offsets[i + 1] = (uint32_t)size;
    }
    return status;
}

void json_member_bytes(const row_column_t *texts, const json_names_t *names, uint32_t wanted,
                       const uint32_t *offsets, uint8_t *out, size_t out_len) {
    CHECK(offsets[texts->length] <= out_len);
    for (uint32_t i = 0; i < texts->length; i++) {
        row_slice_t text, value;
        if (offsets[i] == offsets[i + 1]) continue;
        CHECK(text_at(texts, i, &text) == STATUS_OK && text.data != NULL);
        cursor_t c = {text.data, text.len, 0};
        CHECK(find_member(&c, names, wanted, &value));
        CHECK(value.len == offsets[i + 1] - offsets[i]);
        copy_bytes(out + offsets[i], value.data, value.len);
    }
}
