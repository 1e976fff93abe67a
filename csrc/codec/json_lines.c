#include "codec/json_lines.h"

#include "codec/decimal.h"
#include "common/bits.h"
#include "common/bytes.h"
#include "common/check.h"

#include <stdbool.h>

/* -- texts ------------------------------------------------------------------------------- */

#define EACH(byte) (UINT64_C(0x0101010101010101) * (byte))

/* Of eight bytes, the high bit of the first that is a quote, a backslash or a control character;
 * those behind it may have theirs set, too, for a difference borrows from the next byte. */
static inline uint64_t escaped_in(uint64_t word) {
    const uint64_t quote = word ^ EACH('"'), slash = word ^ EACH('\\');
    const uint64_t below = (quote - EACH(1)) | (slash - EACH(1)) | (word - EACH(0x20));
    return below & ~word & EACH(0x80);
}

static uint8_t *put_escape(uint8_t byte, uint8_t *out) {
    static const char HEX[] = "0123456789abcdef";
    static const char SHORT[] = "btn\0fr"; /* 8 .. 13 */
    *out++ = '\\';
    if (byte >= 0x20) {
        *out++ = byte;
    } else if (byte >= 8 && byte <= 13 && byte != 11) {
        *out++ = (uint8_t)SHORT[byte - 8];
    } else {
        memcpy(out, "u00", 3);
        out[3] = (uint8_t)HEX[byte >> 4];
        out[4] = (uint8_t)HEX[byte & 15];
        out += 5;
    }
    return out;
}

static uint8_t *put_string(const uint8_t *text, size_t len, uint8_t *out) {
    const uint8_t *const end = text + len;
    *out++ = '"';
    while (text < end) {
        if (end - text >= 8) {
            const uint64_t word = load_le64(text);
            const uint64_t marks = escaped_in(word);
            store_le64(out, word); /* there is room: as many bytes come, at least */
            if (marks == 0) {
                text += 8;
                out += 8;
                continue;
            }
            const int plain = __builtin_ctzll(marks) / 8;
            text += plain;
            out += plain;
        }
        const uint8_t byte = *text++;
        if (byte < 0x20 || byte == '"' || byte == '\\') {
            out = put_escape(byte, out);
        } else {
            *out++ = byte;
        }
    }
    *out++ = '"';
    return out;
}

static uint8_t *put_base64(const uint8_t *data, size_t len, uint8_t *out) {
    static const char DIGITS[] = "ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123456789+/";
    *out++ = '"';
    for (; len >= 3; data += 3, len -= 3, out += 4) {
        const uint32_t bits = (uint32_t)data[0] << 16 | (uint32_t)data[1] << 8 | data[2];
        for (int i = 0; i < 4; i++) out[i] = (uint8_t)DIGITS[bits >> (18 - 6 * i) & 63];
    }
    if (len != 0) {
        const uint32_t bits = (uint32_t)data[0] << 16 | (len == 2 ? (uint32_t)data[1] << 8 : 0);
        out[0] = (uint8_t)DIGITS[bits >> 18];
        out[1] = (uint8_t)DIGITS[bits >> 12 & 63];
        out[2] = (uint8_t)(len == 2 ? DIGITS[bits >> 6 & 63] : '=');
        out[3] = '=';
        out += 4;
    }
    *out++ = '"';
    return out;
}

/* The bytes of one character of UTF-8 that is not ASCII; 0: it is none. */
static size_t character(const uint8_t *text, size_t len) {
    const uint8_t first = text[0];
    const size_t n = first >= 0xf0 ? 4 : first >= 0xe0 ? 3 : 2;
    if (first < 0xc2 || first > 0xf4 || n > len) return 0;
    for (size_t i = 1; i < n; i++) {
        if ((text[i] & 0xc0) != 0x80) return 0;
    }
    if (first == 0xe0 && text[1] < 0xa0) return 0; /* in more bytes than it needs */
    if (first == 0xf0 && text[1] < 0x90) return 0;
    if (first == 0xed && text[1] > 0x9f) return 0; /* a half of a pair of UTF-16 */
    if (first == 0xf4 && text[1] > 0x8f) return 0; /* beyond U+10FFFF */
    return n;
}

static bool is_utf8(const uint8_t *text, size_t len) {
    for (size_t at = 0; at < len;) {
        if (len - at >= 8 && (load_le64(text + at) & EACH(0x80)) == 0) {
            at += 8;
            continue;
        }
        const size_t n = text[at] < 0x80 ? 1 : character(text + at, len - at);
        if (n == 0) return false;
        at += n;
    }
    return true;
}

static uint8_t *put_either(const uint8_t *data, size_t len, uint8_t *out) {
    if (is_utf8(data, len)) return put_string(data, len, out);
    memcpy(out, "{\"base64\": ", 11);
    out = put_base64(data, len, out + 11);
    *out++ = '}';
    return out;
}

static uint8_t *put_raw(const uint8_t *text, size_t len, uint8_t *out) {
    bool in_end = false;
    for (size_t i = 0; i < len; i++) {
        const bool end = text[i] == '\n' || text[i] == '\r';
        if (!end) *out++ = text[i];
        if (end && !in_end) *out++ = ' ';
        in_end = end;
    }
    return out;
}

/* -- dates ------------------------------------------------------------------------------- */

static uint8_t *put_two(uint32_t value, uint8_t *out) {
    out[0] = (uint8_t)('0' + value / 10);
    out[1] = (uint8_t)('0' + value % 10);
    return out + 2;
}

/* Days since 1970 in the Gregorian calendar; years begin in March, so that a leap day is the last
 * of one, and 400 of them are an era of as many days each. */
static uint8_t *put_date(int64_t days, uint8_t *out) {
    days += 719468; /* since March 1 of the year 0 */
    const int64_t era = (days >= 0 ? days : days - 146096) / 146097;
    const uint32_t day = (uint32_t)(days - era * 146097);
    const uint32_t year = (day - day / 1460 + day / 36524 - day / 146096) / 365;
    const uint32_t in_year = day - (365 * year + year / 4 - year / 100);
    const uint32_t month = (5 * in_year + 2) / 153; /* from March on */
    const int64_t whole = (int64_t)year + era * 400 + (month >= 10);
    const uint64_t size = (uint64_t)(whole < 0 ? -whole : whole);
    if (whole < 0) *out++ = '-';
    for (uint64_t least = 1000; least > 1 && size < least; least /= 10) *out++ = '0';
    out += decimal_unsigned(size, out);
    *out++ = '-';
    out = put_two(month < 10 ? month + 3 : month - 9, out);
    *out++ = '-';
    return put_two(in_year - (153 * month + 2) / 5 + 1, out);
}

static uint8_t *put_time(int64_t micros, bool utc, uint8_t *out) {
    const int64_t day = INT64_C(86400000000);
    int64_t days = micros / day, rest = micros % day;
    if (rest < 0) {
        days--;
        rest += day;
    }
    const uint32_t seconds = (uint32_t)(rest / 1000000), parts = (uint32_t)(rest % 1000000);
    *out++ = '"';
    out = put_date(days, out);
    *out++ = 'T';
    out = put_two(seconds / 3600, out);
    *out++ = ':';
    out = put_two(seconds / 60 % 60, out);
    *out++ = ':';
    out = put_two(seconds % 60, out);
    if (parts != 0) {
        *out++ = '.';
        out = put_two(parts % 100, put_two(parts / 100 % 100, put_two(parts / 10000, out)));
    }
    if (utc) {
        memcpy(out, "+00:00", 6);
        out += 6;
    }
    *out++ = '"';
    return out;
}

/* -- values ------------------------------------------------------------------------------ */

static uint8_t *put_word(const char *word, size_t len, uint8_t *out) {
    memcpy(out, word, len);
    return out + len;
}

static int64_t load_signed(const uint8_t *at, uint32_t width) {
    switch (width) {
        case 1: return (int8_t)*at;
        case 2: return (int16_t)load_le16(at);
        case 4: return (int32_t)load_le32(at);
        default: return (int64_t)load_le64(at);
    }
}

static uint64_t load_unsigned(const uint8_t *at, uint32_t width) {
    switch (width) {
        case 1: return *at;
        case 2: return load_le16(at);
        case 4: return load_le32(at);
        default: return load_le64(at);
    }
}

static uint8_t *put_float(const uint8_t *at, uint32_t width, uint8_t *out) {
    double value;
    if (width == 4) {
        float narrow;
        memcpy(&narrow, at, sizeof narrow);
        value = (double)narrow;
    } else {
        memcpy(&value, at, sizeof value);
    }
    if (!__builtin_isfinite(value)) return put_word("null", 4, out);
    return out + decimal_double(value, out);
}

static uint8_t *put_bytes(const json_field_t *field, uint64_t row, uint8_t *out) {
    const uint32_t from = load_le32(field->values.offsets + 4 * row);
    const uint8_t *data = field->values.values + from;
    const size_t len = load_le32(field->values.offsets + 4 * row + 4) - from;
    switch (field->kind) {
        case JSON_LINE_STRING: return put_string(data, len, out);
        case JSON_LINE_BYTES: return put_base64(data, len, out);
        case JSON_LINE_EITHER: return put_either(data, len, out);
        default: return put_raw(data, len, out);
    }
}

static uint8_t *put_value(const json_field_t *field, uint64_t i, uint8_t *out) {
    const row_column_t *column = &field->values;
    const uint64_t row = column->offset + i;
    if (column->validity != NULL && bits_get(column->validity, row) == 0) {
        return put_word("null", 4, out);
    }
    const uint32_t width = field->width;
    const uint8_t *at = column->values + width * row;
    switch (field->kind) {
        case JSON_LINE_BOOL:
            return bits_get(column->values, row) != 0 ? put_word("true", 4, out)
                                                      : put_word("false", 5, out);
        case JSON_LINE_SIGNED: return out + decimal_signed(load_signed(at, width), out);
        case JSON_LINE_UNSIGNED: return out + decimal_unsigned(load_unsigned(at, width), out);
        case JSON_LINE_FLOAT: return put_float(at, width, out);
        case JSON_LINE_DATE:
            *out++ = '"';
            out = put_date((int32_t)load_le32(at), out);
            *out++ = '"';
            return out;
        case JSON_LINE_TIME: return put_time((int64_t)load_le64(at), false, out);
        case JSON_LINE_INSTANT: return put_time((int64_t)load_le64(at), true, out);
        default: return put_bytes(field, row, out);
    }
}

/* -- rows -------------------------------------------------------------------------------- */

/* Bytes of one value at most, without those of texts. */
enum { VALUE_BYTES = 40 };

/* The bytes that escapes of some text add. */
static uint64_t escapes(const uint8_t *text, size_t len) {
    uint64_t more = 0;
    for (size_t at = 0; at < len;) {
        const size_t end = len - at < 4096 ? len : at + 4096;
        uint32_t control = 0, marks = 0;
        for (; at < end; at++) {
            control += text[at] < 0x20;
            marks += text[at] == '"' || text[at] == '\\';
        }
        more += 5 * (uint64_t)control + marks;
    }
    return more;
}

static status_t text_bound(const json_field_t *field, uint64_t *out) {
    const row_column_t *column = &field->values;
    const uint64_t end = column->offset + column->length;
    if (column->offsets_len / 4 <= end) return STATUS_INPUT;
    const uint8_t *offsets = column->offsets + 4 * column->offset;
    const uint32_t first = load_le32(offsets), last = load_le32(column->offsets + 4 * end);
    uint32_t falls = last > column->values_len;
    for (uint64_t i = 0; i < column->length; i++) {
        falls |= load_le32(offsets + 4 * i) > load_le32(offsets + 4 * i + 4);
    }
    if (falls != 0) return STATUS_INPUT;
    const uint64_t bytes = last - first;
    const uint8_t *text = column->values + first;
    const bool string = field->kind == JSON_LINE_STRING || field->kind == JSON_LINE_EITHER;
    *out = bytes + (string && bytes != 0 ? escapes(text, bytes) : 0);
    if (field->kind == JSON_LINE_BYTES || field->kind == JSON_LINE_EITHER) {
        *out += bytes / 3 + 1;
    }
    return STATUS_OK;
}

static status_t field_bound(const json_field_t *field, uint64_t n, uint64_t *out) {
    const row_column_t *column = &field->values;
    const uint64_t end = column->offset + n;
    CHECK(column->length == n && end < UINT32_MAX);
    *out = 0;
    if (n == 0) return STATUS_OK;
    if (column->validity != NULL && column->validity_len < bits_bytes(end)) return STATUS_INPUT;
    if (field->kind >= JSON_LINE_STRING) return text_bound(field, out);
    const size_t wanted = field->kind == JSON_LINE_BOOL ? bits_bytes(end) : field->width * end;
    return column->values_len < wanted ? STATUS_INPUT : STATUS_OK;
}

status_t json_lines_bound(const json_field_t *fields, uint32_t n_fields, uint64_t n,
                          size_t behind_len, int ends, uint64_t *out) {
    uint64_t sum = 0, each = behind_len;
    for (uint32_t i = 0; i < n_fields; i++) {
        uint64_t texts;
        const status_t status = field_bound(&fields[i], n, &texts);
        if (status != STATUS_OK) return status;
        sum += texts;
        each += VALUE_BYTES + fields[i].before_len;
    }
    *out = sum + each * n;
    return ends && *out > INT32_MAX ? STATUS_LIMIT : STATUS_OK;
}

uint64_t json_lines_write(const json_field_t *fields, uint32_t n_fields, uint64_t n,
                          const uint8_t *behind, size_t behind_len, uint32_t *out_ends,
                          uint8_t *out, uint64_t out_len) {
    uint8_t *at = out;
    for (uint64_t row = 0; row < n; row++) {
        if (out_ends != NULL) out_ends[row] = (uint32_t)(at - out);
        for (uint32_t i = 0; i < n_fields; i++) {
            copy_bytes(at, fields[i].before, fields[i].before_len);
            at = put_value(&fields[i], row, at + fields[i].before_len);
        }
        copy_bytes(at, behind, behind_len);
        at += behind_len;
    }
    const uint64_t len = (uint64_t)(at - out);
    CHECK(len <= out_len);
    if (out_ends != NULL) out_ends[n] = (uint32_t)len;
    return len;
}
