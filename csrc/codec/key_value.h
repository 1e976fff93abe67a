/* Single values between Arrow's form and the one that memcmp orders. */
#ifndef TXNKV_CODEC_KEY_VALUE_H
#define TXNKV_CODEC_KEY_VALUE_H

#include "common/bytes.h"

#define KEY_SIGN_32 UINT32_C(0x80000000)
#define KEY_SIGN_64 UINT64_C(0x8000000000000000)
#define KEY_NAN_32 UINT32_C(0x7FC00000)
#define KEY_NAN_64 UINT64_C(0x7FF8000000000000)

static inline uint32_t key_order_f32(uint32_t bits) {
    const uint32_t magnitude = bits & ~KEY_SIGN_32;
    if (magnitude > UINT32_C(0x7F800000)) bits = KEY_NAN_32;
    if (magnitude == 0) bits = 0;
    return (bits & KEY_SIGN_32) != 0 ? ~bits : bits | KEY_SIGN_32;
}

static inline uint64_t key_order_f64(uint64_t bits) {
    const uint64_t magnitude = bits & ~KEY_SIGN_64;
    if (magnitude > UINT64_C(0x7FF0000000000000)) bits = KEY_NAN_64;
    if (magnitude == 0) bits = 0;
    return (bits & KEY_SIGN_64) != 0 ? ~bits : bits | KEY_SIGN_64;
}

static inline uint32_t key_bits_f32(uint32_t ordered) {
    return (ordered & KEY_SIGN_32) != 0 ? ordered & ~KEY_SIGN_32 : ~ordered;
}

static inline uint64_t key_bits_f64(uint64_t ordered) {
    return (ordered & KEY_SIGN_64) != 0 ? ordered & ~KEY_SIGN_64 : ~ordered;
}

#endif
