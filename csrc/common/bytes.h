/* Loads and stores of integers at any address, in either byte order.
 *
 * Values in LMDB are only 2-byte aligned, so nothing from disk is read through a typed
 * pointer; compilers turn each memcpy below into one instruction. */
#ifndef TXNKV_COMMON_BYTES_H
#define TXNKV_COMMON_BYTES_H

#include <stddef.h>
#include <stdint.h>
#include <string.h>

#if !defined(__BYTE_ORDER__) || __BYTE_ORDER__ != __ORDER_LITTLE_ENDIAN__
#error "the core is written for little-endian machines"
#endif

static inline uint16_t load_le16(const void *p) {
    uint16_t v;
    memcpy(&v, p, sizeof v);
    return v;
}

static inline uint32_t load_le32(const void *p) {
    uint32_t v;
    memcpy(&v, p, sizeof v);
    return v;
}

static inline uint64_t load_le64(const void *p) {
    uint64_t v;
    memcpy(&v, p, sizeof v);
    return v;
}

static inline uint16_t load_be16(const void *p) { return __builtin_bswap16(load_le16(p)); }
static inline uint32_t load_be32(const void *p) { return __builtin_bswap32(load_le32(p)); }
static inline uint64_t load_be64(const void *p) { return __builtin_bswap64(load_le64(p)); }

static inline void store_le16(void *p, uint16_t v) { memcpy(p, &v, sizeof v); }
static inline void store_le32(void *p, uint32_t v) { memcpy(p, &v, sizeof v); }
static inline void store_le64(void *p, uint64_t v) { memcpy(p, &v, sizeof v); }
static inline void store_be16(void *p, uint16_t v) { store_le16(p, __builtin_bswap16(v)); }
static inline void store_be32(void *p, uint32_t v) { store_le32(p, __builtin_bswap32(v)); }
static inline void store_be64(void *p, uint64_t v) { store_le64(p, __builtin_bswap64(v)); }

/* memcpy and memcmp for which (NULL, 0) is fine. */
static inline void copy_bytes(void *to, const void *from, size_t len) {
    if (len != 0) memcpy(to, from, len);
}

static inline int compare_bytes(const void *a, const void *b, size_t len) {
    return len == 0 ? 0 : memcmp(a, b, len);
}

static inline uint64_t round_up_8(uint64_t len) { return (len + 7) & ~(uint64_t)7; }

#endif
