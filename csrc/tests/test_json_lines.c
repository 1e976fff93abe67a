#include "codec/json_lines.h"

#include <time.h>

#include "codec/json.h"
#include "common/bits.h"
#include "tests/harness.h"

static const uint8_t OPEN[] = {'{', '"', 'a', '"', ':'}, NEXT[] = {',', '"', 'b', '"', ':'};
static const uint8_t CLOSE[] = {'}', '\n'};

/* Writes into memory of exactly the bytes that were said; the text, ended by 0. */
static char *written(const json_field_t *fields, uint32_t n_fields, uint64_t n, const char *behind,
                     uint32_t *ends) {
    uint64_t bound;
    const size_t len = strlen(behind);
    EXPECT(json_lines_bound(fields, n_fields, n, len, ends != NULL, &bound) == STATUS_OK);
    uint8_t *out = exact((size_t)bound);
    const uint64_t size =
        json_lines_write(fields, n_fields, n, (const uint8_t *)behind, len, ends, out, bound);
    EXPECT(size <= bound && (ends == NULL || ends[n] == size));
    char *text = (char *)exact((size_t)size + 1);
    memcpy(text, out, (size_t)size);
    text[size] = 0;
    free(out);
    return text;
}

static row_column_t fixed(const void *values, size_t bytes, uint64_t n) {
    return (row_column_t){values, bytes, NULL, 0, NULL, 0, 0, n};
}

static void expect_fixed(json_line_kind_t kind, uint32_t width, const void *values, size_t bytes,
                         uint64_t n, const char *wanted) {
    uint8_t *copy = exact_copy(values, bytes);
    const json_field_t field = {fixed(copy, bytes, n), NULL, 0, kind, width};
    char *text = written(&field, 1, n, " ", NULL);
    EXPECT(strcmp(text, wanted) == 0);
    free(text);
    free(copy);
}

#define FIXED(kind, type, wanted, ...)                                                         \
    do {                                                                                       \
        const type values[] = {__VA_ARGS__};                                                   \
        expect_fixed(kind, sizeof(type), values, sizeof values, sizeof values / sizeof(type),  \
                     wanted);                                                                  \
    } while (0)

static void scalars(void) {
    const uint8_t bits = 5;
    expect_fixed(JSON_LINE_BOOL, 0, &bits, 1, 3, "true false true ");
    FIXED(JSON_LINE_SIGNED, int8_t, "-128 7 ", INT8_MIN, 7);
    FIXED(JSON_LINE_SIGNED, int16_t, "-32768 ", INT16_MIN);
    FIXED(JSON_LINE_SIGNED, int32_t, "-2147483648 ", INT32_MIN);
    FIXED(JSON_LINE_SIGNED, int64_t, "-9223372036854775808 0 ", INT64_MIN, 0);
    FIXED(JSON_LINE_UNSIGNED, uint8_t, "255 ", UINT8_MAX);
    FIXED(JSON_LINE_UNSIGNED, uint16_t, "65535 ", UINT16_MAX);
    FIXED(JSON_LINE_UNSIGNED, uint32_t, "4294967295 ", UINT32_MAX);
    FIXED(JSON_LINE_UNSIGNED, uint64_t, "18446744073709551615 ", UINT64_MAX);
    FIXED(JSON_LINE_FLOAT, double, "0.1 null null null ", 0.1, __builtin_nan(""),
          __builtin_inf(), -__builtin_inf());
    FIXED(JSON_LINE_FLOAT, float, "0.10000000149011612 null ", 0.1f, __builtin_inff());
    FIXED(JSON_LINE_DATE, int32_t, "\"1970-01-01\" \"1969-12-31\" \"2024-02-29\" ", 0, -1, 19782);
    FIXED(JSON_LINE_DATE, int32_t, "\"0000-01-01\" \"-0001-12-31\" \"10000-01-01\" ", -719528,
          -719529, 2932897);
    FIXED(JSON_LINE_TIME, int64_t, "\"1970-01-01T00:00:00\" \"1969-12-31T23:59:59.999999\" ", 0,
          -1);
    FIXED(JSON_LINE_INSTANT, int64_t, "\"2023-11-14T22:13:20.000300+00:00\" ", 1700000000000300);
    FIXED(JSON_LINE_INSTANT, int64_t, "\"-290308-12-21T19:59:05.224192+00:00\" ", INT64_MIN);
}

static void dates(void) {
    for (int i = 0; i < 20000; i++) {
        const int32_t days = (int32_t)random_u64() >> random_below(32);
        const time_t seconds = (time_t)days * 86400;
        struct tm parts;
        EXPECT(gmtime_r(&seconds, &parts) != NULL);
        char wanted[40];
        const long year = parts.tm_year + 1900L;
        snprintf(wanted, sizeof wanted, "\"%s%04ld-%02d-%02d\"", year < 0 ? "-" : "",
                 year < 0 ? -year : year, parts.tm_mon + 1, parts.tm_mday);
        const json_field_t field = {fixed(&days, 4, 1), NULL, 0, JSON_LINE_DATE, 4};
        char *text = written(&field, 1, 1, "", NULL);
        EXPECT(strcmp(text, wanted) == 0);
        free(text);
    }
}

static void expect_text(json_line_kind_t kind, const char *data, size_t len, const char *wanted) {
    const uint32_t ends[2] = {0, (uint32_t)len};
    uint8_t *copy = exact_copy(data, len), *offsets = exact_copy(ends, sizeof ends);
    const json_field_t field = {{copy, len, offsets, sizeof ends, NULL, 0, 0, 1}, NULL, 0, kind, 0};
    char *text = written(&field, 1, 1, "", NULL);
    EXPECT(strcmp(text, wanted) == 0);
    free(text);
    free(copy);
    free(offsets);
}

static void texts(void) {
    static const struct { const char *data; size_t len; const char *text, *bytes; } known[] = {
        {"", 0, "\"\"", "\"\""}, {"f", 1, "\"f\"", "\"Zg==\""}, {"fo", 2, "\"fo\"", "\"Zm8=\""},
        {"foo", 3, "\"foo\"", "\"Zm9v\""}, {"foob", 4, "\"foob\"", "\"Zm9vYg==\""},
        {"a\"b\\c\n\r\t\b\f\x01\x1f\x7f", 13,
         "\"a\\\"b\\\\c\\n\\r\\t\\b\\f\\u0001\\u001f\x7f\"", "\"YSJiXGMKDQkIDAEffw==\""},
        {"12345678\"", 9, "\"12345678\\\"\"", "\"MTIzNDU2Nzgi\""},
        {"1234567\n12345678", 16, "\"1234567\\n12345678\"", "\"MTIzNDU2NwoxMjM0NTY3OA==\""},
        {"\xc3\xa9\xe2\x82\xac\xf0\x9f\x98\x80!", 10, "\"\xc3\xa9\xe2\x82\xac\xf0\x9f\x98\x80!\"",
         "\"w6nigqzwn5iAIQ==\""}};
    for (size_t i = 0; i < sizeof known / sizeof known[0]; i++) {
        expect_text(JSON_LINE_STRING, known[i].data, known[i].len, known[i].text);
        expect_text(JSON_LINE_EITHER, known[i].data, known[i].len, known[i].text);
        expect_text(JSON_LINE_BYTES, known[i].data, known[i].len, known[i].bytes);
    }
    expect_text(JSON_LINE_EITHER, "\xff", 1, "{\"base64\": \"/w==\"}");
    expect_text(JSON_LINE_EITHER, "\xe2\x82", 2, "{\"base64\": \"4oI=\"}");
    expect_text(JSON_LINE_EITHER, "\xc0\x80", 2, "{\"base64\": \"wIA=\"}");     /* too long */
    expect_text(JSON_LINE_EITHER, "\xed\xa0\x80", 3, "{\"base64\": \"7aCA\"}"); /* surrogate */
    expect_text(JSON_LINE_EITHER, "\xf4\x90\x80\x80", 4, "{\"base64\": \"9JCAgA==\"}");
    expect_text(JSON_LINE_EITHER, "\xf0\x8f\x80\x80", 4, "{\"base64\": \"8I+AgA==\"}");
    expect_text(JSON_LINE_EITHER, "\xe0\x9f\x80", 3, "{\"base64\": \"4J+A\"}");
    expect_text(JSON_LINE_RAW, "{\"a\":\r\n\n 1}\n", 12, "{\"a\":  1} ");
}

/* Random columns with nulls, from a row on: each line is JSON, and where it was said to be. */
static void lines(void) {
    for (int round = 0; round < 300; round++) {
        const uint32_t n = random_below(40), offset = random_below(5), all = n + offset;
        uint8_t *numbers = exact(8 * (size_t)all), *validity = exact(bits_bytes(all));
        uint32_t *ends = (uint32_t *)(void *)exact(4 * ((size_t)all + 1));
        random_bytes(numbers, 8 * (size_t)all);
        random_bytes(validity, bits_bytes(all));
        ends[0] = 0;
        for (uint32_t i = 0; i < all; i++) ends[i + 1] = ends[i] + random_below(20);
        uint8_t *text = exact(ends[all]);
        random_bytes(text, ends[all]);
        const json_field_t fields[2] = {
            {{numbers, 8 * (size_t)all, NULL, 0, validity, bits_bytes(all), offset, n}, OPEN,
             sizeof OPEN, (json_line_kind_t)(JSON_LINE_SIGNED + random_below(6)), 8},
            {{text, ends[all], (const uint8_t *)ends, 4 * ((size_t)all + 1), NULL, 0, offset, n},
             NEXT, sizeof NEXT, JSON_LINE_STRING + random_below(3), 0}};
        uint32_t *starts = (uint32_t *)(void *)exact(4 * ((size_t)n + 1));
        char *found = written(fields, 2, n, "}\n", starts);
        for (uint32_t i = 0; i < n; i++) {
            size_t at;
            const char *row = found + starts[i];
            EXPECT(json_text((const uint8_t *)row, starts[i + 1] - starts[i], &at));
            EXPECT(memcmp(row, OPEN, sizeof OPEN) == 0);
            EXPECT(memcmp(found + starts[i + 1] - 2, CLOSE, sizeof CLOSE) == 0);
            const bool null = bits_get(validity, offset + i) == 0;
            if (null) EXPECT(memcmp(row + sizeof OPEN, "null,", 5) == 0);
        }
        free(found);
        free(starts);
        free(text);
        free(ends);
        free(validity);
        free(numbers);
    }
}

static void refused(void) {
    const uint32_t good[] = {0, 2, 4}, falling[] = {0, 3, 2}, far[] = {0, 2, 5};
    const uint8_t text[] = "abcd", bits = 3;
    json_field_t field = {{text, 4, (const uint8_t *)good, 12, NULL, 0, 0, 2}, NULL, 0,
                          JSON_LINE_STRING, 0};
    uint64_t bound;
    EXPECT(json_lines_bound(&field, 1, 2, 0, 0, &bound) == STATUS_OK);
    EXPECT(json_lines_bound(&field, 1, 2, INT32_MAX, 0, &bound) == STATUS_OK);
    EXPECT(json_lines_bound(&field, 1, 2, INT32_MAX, 1, &bound) == STATUS_LIMIT);
    field.values.offsets = (const uint8_t *)falling;
    EXPECT(json_lines_bound(&field, 1, 2, 0, 0, &bound) == STATUS_INPUT);
    field.values.offsets = (const uint8_t *)far;
    EXPECT(json_lines_bound(&field, 1, 2, 0, 0, &bound) == STATUS_INPUT);
    field.values.offsets = (const uint8_t *)good;
    field.values.offsets_len = 11;
    EXPECT(json_lines_bound(&field, 1, 2, 0, 0, &bound) == STATUS_INPUT);
    field.values.offsets_len = 12;
    field.values.validity = &bits;
    EXPECT(json_lines_bound(&field, 1, 2, 0, 0, &bound) == STATUS_INPUT);
    const json_field_t number = {fixed(text, 4, 2), NULL, 0, JSON_LINE_SIGNED, 4};
    EXPECT(json_lines_bound(&number, 1, 2, 0, 0, &bound) == STATUS_INPUT);
    EXPECT(json_lines_bound(NULL, 0, 2, 3, 0, &bound) == STATUS_OK && bound == 6);
}

void test_json_lines(void) {
    scalars();
    dates();
    texts();
    lines();
    refused();
}
