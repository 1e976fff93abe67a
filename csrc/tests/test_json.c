#include "codec/json.h"

#include "tests/fuzz_core.h"
#include "tests/harness.h"

static bool sane(const char *text, size_t *at) {
    const size_t len = strlen(text);
    uint8_t *copy = exact_copy(text, len);
    const bool found = json_text(copy, len, at) != 0;
    free(copy);
    return found;
}

static void texts(void) {
    static const char *const good[] = {
        "1", "-0", "0.5", "1e9", "1.25E-3", " null ", "true", "false", "\"\"", "[]", "{}", "[[], {}]",
        "{\"a\": [1, {\"b\": null}], \"c\": \"\\u00e9\\n\"}", "\t[1,\r\n2]\n", "\"\xc3\xa9\"",
        "{\"a\":1,\"a\":2}"};
    static const struct { const char *text; size_t at; } bad[] = {
        {"", 0}, {" ", 1}, {"01", 1}, {"-", 1}, {"1.", 2}, {"1e", 2}, {".5", 0}, {"+1", 0},
        {"nul", 3}, {"nulL", 3}, {"NaN", 0}, {"\"", 1}, {"\"\n\"", 1}, {"\"\\x\"", 2},
        {"\"\\u00g0\"", 5}, {"[", 1}, {"[1", 2}, {"[1,]", 3}, {"[1 2]", 3}, {"[1}", 2}, {"{", 1},
        {"{1:2}", 1}, {"{\"a\"}", 4}, {"{\"a\":}", 5}, {"{\"a\":1,}", 7}, {"{\"a\":1]", 6},
        {"1 2", 2}, {"{} x", 3}, {"'a'", 0}, {"]", 0}};
    size_t at;
    for (size_t i = 0; i < sizeof good / sizeof good[0]; i++) EXPECT(sane(good[i], &at));
    for (size_t i = 0; i < sizeof bad / sizeof bad[0]; i++) {
        EXPECT(!sane(bad[i].text, &at));
        EXPECT(at == bad[i].at);
    }
}

static void depth(void) {
    char text[2 * (JSON_DEPTH + 1)];
    size_t at;
    for (size_t deep = JSON_DEPTH; deep <= JSON_DEPTH + 1; deep++) {
        memset(text, '[', deep);
        memset(text + deep, ']', deep);
        EXPECT((json_text((const uint8_t *)text, 2 * deep, &at) != 0) == (deep == JSON_DEPTH));
    }
    EXPECT(at == JSON_DEPTH);
}

/* Text made by a grammar is taken; the same, cut anywhere inside of its bracket, is not. */
static size_t grow(char *out, int depth_left) {
    size_t len = 0;
    if (depth_left == 0 || random_below(3) == 0) {
        static const char *const leaves[] = {"7", "-1.5e2", "null", "\"a\\\"]\"", "true"};
        const char *leaf = leaves[random_below(5)];
        len = strlen(leaf);
        memcpy(out, leaf, len);
        return len;
    }
    const bool object = random_below(2) == 0;
    out[len++] = object ? '{' : '[';
    const uint32_t n = random_below(4);
    for (uint32_t i = 0; i < n; i++) {
        if (i != 0) out[len++] = ',';
        if (random_below(2) == 0) out[len++] = ' ';
        if (object) {
            memcpy(out + len, "\"k\":", 4);
            len += 4;
        }
        len += grow(out + len, depth_left - 1);
    }
    out[len++] = object ? '}' : ']';
    return len;
}

static void grown(void) {
    static char text[1 << 16];
    for (int round = 0; round < 500; round++) {
        text[0] = '[';
        size_t len = 1 + grow(text + 1, 5), at;
        text[len++] = ']';
        uint8_t *copy = exact_copy(text, len);
        EXPECT(json_text(copy, len, &at));
        const size_t cut = random_below((uint32_t)len);
        EXPECT(!json_text(copy, cut, &at) && at <= cut);
        copy[random_below((uint32_t)len)] = (uint8_t)random_below(256);
        fuzz_json(copy, len);
        free(copy);
    }
}

static void column(void) {
    const uint8_t values[] = "1nope[]";
    const uint8_t validity[] = {0x0d}; /* the second is null */
    const uint8_t *offsets = exact_copy((const uint32_t[]){0, 1, 5, 7, 7}, 20);
    row_column_t texts = {values, 7, offsets, 20, validity, 1, 0, 3};
    uint32_t row;
    uint64_t at;
    EXPECT(json_column(&texts, &row, &at) == STATUS_OK && row == 3);
    texts.length = 4;
    EXPECT(json_column(&texts, &row, &at) == STATUS_OK && row == 3 && at == 0);
    texts.validity = NULL;
    EXPECT(json_column(&texts, &row, &at) == STATUS_OK && row == 1 && at == 1);
    texts.offset = 1;
    texts.length = 2;
    EXPECT(json_column(&texts, &row, &at) == STATUS_OK && row == 0 && at == 1);
    texts.values_len = 4;
    EXPECT(json_column(&texts, &row, &at) == STATUS_INPUT);
    texts.length = 4;
    EXPECT(json_column(&texts, &row, &at) == STATUS_INPUT);
    free((void *)(uintptr_t)offsets);
}

/* A member of each of some lines, or the row at which there was none. */
static void expect_member(const char *line, uint32_t number, const char *wanted) {
    const size_t len = strlen(line);
    const uint32_t ends[2] = {0, (uint32_t)len};
    uint8_t *copy = exact_copy(line, len), *offsets = exact_copy(ends, sizeof ends);
    const row_column_t texts = {copy, len, offsets, sizeof ends, NULL, 0, 0, 1};
    uint8_t validity, out[64];
    uint32_t found[2], row = 9;
    uint64_t at = 0;
    const uint32_t name_ends[3] = {1, 3, 4};
    const json_names_t names = {(const uint8_t *)"abbc", name_ends, 3};
    const status_t status =
        json_member_offsets(&texts, &names, number, &validity, found, &row, &at);
    EXPECT(status == (wanted == NULL ? STATUS_CORRUPT : STATUS_OK) && at <= len);
    if (wanted == NULL) {
        EXPECT(row == 0);
    } else {
        EXPECT(validity == (*wanted != 0) && found[1] == strlen(wanted));
        json_member_bytes(&texts, &names, number, found, out, sizeof out);
        EXPECT(memcmp(out, wanted, strlen(wanted)) == 0);
    }
    free(copy);
    free(offsets);
}

static void members(void) {
    expect_member("{\"a\": {\"b\" : [1, 2]} , \"c\":\"x\"}", 0, "{\"b\" : [1, 2]}");
    expect_member(" {\"a\": 1,\"c\" : \"x\" }", 2, "\"x\"");
    expect_member("{\"a\": 1.10 }", 0, "1.10");
    expect_member("{\"a\": 1, \"a\": [ ]}", 0, NULL);
    expect_member("{\"a\": null, \"a\": 1}", 0, NULL);
    expect_member("{\"a\": {\"a\": 1}, \"c\": 1, \"c\": 2}", 0, "{\"a\": 1}");
    expect_member("{\"bb\": {\"a\": 1}}", 0, "");
    expect_member("{}", 0, "");
    expect_member("{\"b\": 1}", 0, NULL);
    expect_member("[]", 0, NULL);
    expect_member("{\"\\u0061\": 1}", 0, NULL);
    expect_member("{\"a\": 1", 0, NULL);
    expect_member("{\"a\": nul}", 0, NULL);
    expect_member("{\"a\" 1}", 0, NULL);
}

void test_json(void) {
    members();
    texts();
    depth();
    grown();
    column();
}
