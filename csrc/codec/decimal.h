/* Numbers as decimal text. A double becomes the shortest decimal that is read as the same double,
 * and of several so short the nearest: Raffaello Giulietti, "The Schubfach way to render doubles".
 *
 * All functions are pure and safe from any thread. */
#ifndef TXNKV_CODEC_DECIMAL_H
#define TXNKV_CODEC_DECIMAL_H

#include <stddef.h>
#include <stdint.h>

enum {
    DECIMAL_INTEGER = 20, /* bytes of an integer at most */
    DECIMAL_DOUBLE = 25   /* of a double: -2.2250738585072014e-308 */
};

/* digits x 10^exponent; digits end with no zero. */
typedef struct {
    uint64_t digits;
    int32_t exponent;
} decimal_t;

/* The shortest decimal of a finite double that is greater than 0. */
decimal_t decimal_shortest(double value);

/* Write text, and return its bytes. A double is finite: 0.5, -3.0, 0.000001, 1e-7, 1.5e+10;
 * numbers from 1e-6 to less than 1e10 have no exponent. */
size_t decimal_unsigned(uint64_t value, uint8_t *out);
size_t decimal_signed(int64_t value, uint8_t *out);
size_t decimal_double(double value, uint8_t *out);

#endif
