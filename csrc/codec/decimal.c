#include "codec/decimal.h"

#include "codec/pow10_table.h"
#include "common/bytes.h"
#include "common/check.h"

#include <stdbool.h>

static const char PAIRS[201] =
    "0001020304050607080910111213141516171819202122232425262728293031323334353637383940414243444546"
    "4748495051525354555657585960616263646566676869707172737475767778798081828384858687888990919293"
    "949596979899";

static uint32_t count_digits(uint64_t value) {
    uint32_t n = 1;
    for (; value >= 10000; value /= 10000) n += 4;
    return n + (value >= 10) + (value >= 100) + (value >= 1000);
}

/* The n digits of a number that has no more. */
static void put_digits(uint64_t value, uint32_t n, uint8_t *out) {
    for (; n > 1; n -= 2, value /= 100) memcpy(out + n - 2, PAIRS + 2 * (value % 100), 2);
    if (n == 1) out[0] = (uint8_t)('0' + value);
}

size_t decimal_unsigned(uint64_t value, uint8_t *out) {
    const uint32_t n = count_digits(value);
    put_digits(value, n, out);
    return n;
}

size_t decimal_signed(int64_t value, uint8_t *out) {
    if (value >= 0) return decimal_unsigned((uint64_t)value, out);
    *out = '-';
    return 1 + decimal_unsigned(0 - (uint64_t)value, out + 1);
}

/* -- the shortest decimal --------------------------------------------------------------- */

/* A power of ten, of 128 bits, times a number of at most 59 bits, divided by 2^128. The lowest bit
 * is set for what is cut off, so that it still compares with numbers that are exact. */
static uint64_t times_power(const uint64_t *power, uint64_t number) {
    const unsigned __int128 low = (unsigned __int128)power[1] * number;
    const unsigned __int128 sum = (unsigned __int128)power[0] * number + (uint64_t)(low >> 64);
    return (uint64_t)(sum >> 64) | ((uint64_t)sum > 1);
}

/* v = c x 2^q, with the interval of what is read as v: all numbers are in units of 10^k / 4, and k
 * is such that the interval holds at least one multiple of 10^k and at most one of 10^(k + 1). */
static decimal_t search(uint64_t c, int32_t q, bool near_below) {
    const bool odd = (c & 1) != 0; /* then the ends of the interval are not part of it */
    const int32_t k = (q * 1262611 - (near_below ? 524031 : 0)) >> 22;
    const int32_t shift = q + ((-k * 1741647) >> 19) + 1;
    const uint64_t *power = pow10_table[-k - POW10_FIRST];
    CHECK(-k >= POW10_FIRST && -k <= POW10_LAST && shift >= 1 && shift <= 4);
    const uint64_t low = times_power(power, (4 * c - 2 + near_below) << shift) + odd;
    const uint64_t value = times_power(power, (4 * c) << shift);
    const uint64_t high = times_power(power, (4 * c + 2) << shift) - odd;

    const uint64_t s = value / 4;
    if (s >= 10) {
        const uint64_t tens = s / 10;
        const bool down = low <= 40 * tens, up = 40 * tens + 40 <= high;
        if (down != up) return (decimal_t){tens + up, k + 1};
    }
    const bool down = low <= 4 * s, up = 4 * s + 4 <= high;
    if (down != up) return (decimal_t){s + up, k};
    const uint64_t middle = 4 * s + 2;
    return (decimal_t){s + (value > middle || (value == middle && (s & 1) != 0)), k};
}

decimal_t decimal_shortest(double value) {
    uint64_t bits;
    memcpy(&bits, &value, sizeof bits);
    const uint64_t part = bits & ((UINT64_C(1) << 52) - 1);
    const int32_t exponent = (int32_t)(bits >> 52);
    CHECK(bits != 0 && exponent < 0x7ff);
    const uint64_t c = exponent == 0 ? part : part | UINT64_C(1) << 52;
    const int32_t q = (exponent == 0 ? 1 : exponent) - 1075;
    decimal_t found;
    if (q <= 0 && q > -53 && (c & ((UINT64_C(1) << -q) - 1)) == 0) {
        found = (decimal_t){c >> -q, 0}; /* a whole number */
    } else {
        found = search(c, q, part == 0 && exponent > 1);
    }
    while (found.digits % 10 == 0) found = (decimal_t){found.digits / 10, found.exponent + 1};
    return found;
}

/* -- the text of a double --------------------------------------------------------------- */

/* Digits with a point behind the first `whole` of them; behind all, ".0". */
static size_t put_fixed(uint64_t digits, uint32_t n, int32_t whole, uint8_t *out) {
    if (whole <= 0) { /* 0.000123 */
        memcpy(out, "0.0000000", 9);
        put_digits(digits, n, out + 2 - whole);
        return 2 + (size_t)(-whole) + n;
    }
    const uint32_t point = (uint32_t)whole;
    put_digits(digits, n, out);
    if (n <= point) { /* 12000.0 */
        memset(out + n, '0', point - n);
        memcpy(out + point, ".0", 2);
        return point + 2;
    }
    memmove(out + point + 1, out + point, n - point);
    out[point] = '.';
    return n + 1;
}

static size_t put_exponent(uint64_t digits, uint32_t n, int32_t exponent, uint8_t *out) {
    size_t len = n;
    put_digits(digits, n, out);
    if (n > 1) {
        memmove(out + 2, out + 1, n - 1);
        out[1] = '.';
        len++;
    }
    out[len++] = 'e';
    if (exponent > 0) out[len++] = '+';
    return len + decimal_signed(exponent, out + len);
}

size_t decimal_double(double value, uint8_t *out) {
    uint64_t bits;
    memcpy(&bits, &value, sizeof bits);
    const size_t sign = (size_t)(bits >> 63);
    *out = '-';
    out += sign;
    bits &= UINT64_MAX >> 1;
    if (bits == 0) {
        memcpy(out, "0.0", 3);
        return sign + 3;
    }
    memcpy(&value, &bits, sizeof value);
    const decimal_t found = decimal_shortest(value);
    const uint32_t n = count_digits(found.digits);
    const int32_t exponent = found.exponent + (int32_t)n - 1; /* of the first digit */
    if (exponent < -6 || exponent >= 10) {
        return sign + put_exponent(found.digits, n, exponent, out);
    }
    return sign + put_fixed(found.digits, n, exponent + 1, out);
}
