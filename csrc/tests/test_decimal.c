#include "codec/decimal.h"

#include "codec/pow10_table.h"
#include "tests/harness.h"

/* -- the table, by numbers of as many words as they need ---------------------------------- */

enum { WORDS = 40 }; /* 10^324 has 1,077 bits */
typedef struct {
    uint32_t words[WORDS];
} big_t;

static void times(big_t *a, uint32_t factor) {
    uint64_t carry = 0;
    for (int i = 0; i < WORDS; i++) {
        carry += (uint64_t)a->words[i] * factor;
        a->words[i] = (uint32_t)carry;
        carry >>= 32;
    }
    EXPECT(carry == 0);
}

static int compare(const big_t *a, const big_t *b) {
    for (int i = WORDS - 1; i >= 0; i--) {
        if (a->words[i] != b->words[i]) return a->words[i] < b->words[i] ? -1 : 1;
    }
    return 0;
}

static void subtract(big_t *a, const big_t *b) {
    int64_t borrow = 0;
    for (int i = 0; i < WORDS; i++) {
        borrow += (int64_t)a->words[i] - b->words[i];
        a->words[i] = (uint32_t)borrow;
        borrow >>= 32;
    }
}

/* 128 bits of a / b from the first set one on, rounded up. */
static void quotient(big_t a, big_t b, uint64_t out[2]) {
    while (compare(&a, &b) < 0) times(&a, 2);
    for (;;) {
        big_t twice = b;
        times(&twice, 2);
        if (compare(&a, &twice) < 0) break;
        b = twice;
    }
    unsigned __int128 bits = 0;
    for (int i = 0; i < 128; i++) {
        bits <<= 1;
        if (compare(&a, &b) >= 0) {
            subtract(&a, &b);
            bits |= 1;
        }
        times(&a, 2);
    }
    const big_t none = {{0}};
    bits += compare(&a, &none) != 0;
    out[0] = (uint64_t)(bits >> 64);
    out[1] = (uint64_t)bits;
}

static void table(void) {
    for (int k = POW10_FIRST; k <= POW10_LAST; k++) {
        const big_t one = {{1}};
        big_t power = one;
        for (int i = 0; i < abs(k); i++) times(&power, 10);
        uint64_t wanted[2];
        quotient(k < 0 ? one : power, k < 0 ? power : one, wanted);
        EXPECT(memcmp(wanted, pow10_table[k - POW10_FIRST], sizeof wanted) == 0);
    }
}

/* -- texts -------------------------------------------------------------------------------- */

static void expect_double(double value, const char *wanted) {
    uint8_t *out = exact(DECIMAL_DOUBLE);
    const size_t len = decimal_double(value, out);
    EXPECT(len == strlen(wanted) && memcmp(out, wanted, len) == 0);
    free(out);
}

static void golden(void) {
    expect_double(0.0, "0.0");
    expect_double(-0.0, "-0.0");
    expect_double(1.0, "1.0");
    expect_double(-213.91, "-213.91");
    expect_double(0.1 + 0.2, "0.30000000000000004");
    expect_double(1e-6, "0.000001");
    expect_double(1.25e-6, "0.00000125");
    expect_double(1e-7, "1e-7");
    expect_double(9999999999.0, "9999999999.0");
    expect_double(9999999999.5, "9999999999.5");
    expect_double(1e10, "1e+10");
    expect_double(12345678901.25, "1.234567890125e+10");
    expect_double(1e22, "1e+22");
    expect_double(1e23, "1e+23");
    expect_double(9007199254740993.0, "9.007199254740992e+15");
    expect_double(5e-324, "5e-324");
    expect_double(2.2250738585072014e-308, "2.2250738585072014e-308");
    expect_double(-1.7976931348623157e308, "-1.7976931348623157e+308");
    expect_double(5.684341886080802e-14, "5.684341886080802e-14"); /* 2^-44: two are as near */
    expect_double((double)0.1f, "0.10000000149011612");
}

/* The decimal of least digits by trial; its digits are those wanted, but next to a power of two,
 * where a farther one may be shorter. */
static void expect_shortest(double value) {
    uint8_t text[DECIMAL_DOUBLE + 1] = {0};
    text[decimal_double(value, text)] = 0;
    EXPECT(strtod((const char *)text, NULL) == value);
    const decimal_t found = decimal_shortest(value);
    EXPECT(found.digits % 10 != 0);
    char digits[24], tried[40];
    const int n = snprintf(digits, sizeof digits, "%llu", (unsigned long long)found.digits);
    EXPECT(n <= 17);
    uint64_t bits;
    memcpy(&bits, &value, sizeof bits);
    const int power = (bits & ((UINT64_C(1) << 52) - 1)) == 0;
    for (int more = 1; more <= n; more++) {
        snprintf(tried, sizeof tried, "%.*e", more - 1, value);
        if (strtod(tried, NULL) != value) {
            EXPECT(more < n || power);
            continue;
        }
        EXPECT(more == n);
        if (power) continue;
        EXPECT(tried[0] == digits[0]);
        EXPECT(n == 1 || memcmp(tried + 2, digits + 1, (size_t)n - 1) == 0);
    }
}

static void shortest(void) {
    for (int i = 0; i < 20000; i++) {
        const uint64_t bits = random_u64() >> 1;
        double value;
        memcpy(&value, &bits, sizeof value);
        if (bits != 0 && __builtin_isfinite(value)) expect_shortest(value);
        const uint32_t places = random_below(12);
        value = (double)(random_u64() >> random_below(64));
        for (uint32_t k = 0; k < places; k++) value /= 10;
        if (value != 0) expect_shortest(value);
    }
    for (uint64_t exponent = 0; exponent < 0x7ff; exponent++) {
        for (uint64_t part = exponent == 0; part < 3; part++) {
            const uint64_t bits = exponent << 52 | part;
            double value;
            memcpy(&value, &bits, sizeof value);
            expect_shortest(value);
        }
    }
}

static void integers(void) {
    for (int i = 0; i < 20000; i++) {
        const uint64_t value = i < 3 ? UINT64_MAX - (uint64_t)i : random_u64() >> random_below(64);
        uint8_t *out = exact(DECIMAL_INTEGER);
        char wanted[24];
        size_t len = (size_t)snprintf(wanted, sizeof wanted, "%llu", (unsigned long long)value);
        EXPECT(decimal_unsigned(value, out) == len && memcmp(out, wanted, len) == 0);
        len = (size_t)snprintf(wanted, sizeof wanted, "%lld", (long long)value);
        EXPECT(decimal_signed((int64_t)value, out) == len && memcmp(out, wanted, len) == 0);
        free(out);
    }
    uint8_t out[DECIMAL_INTEGER];
    EXPECT(decimal_signed(INT64_MIN, out) == 20 && memcmp(out, "-9223372036854775808", 20) == 0);
    EXPECT(decimal_unsigned(0, out) == 1 && *out == '0');
}

void test_decimal(void) {
    table();
    golden();
    shortest();
    integers();
}
