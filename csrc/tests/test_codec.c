#include "codec/crc32c.h"
#include "codec/crc32c_shift.h"
#include "codec/crc32c_table.h"
#include "codec/hash.h"
#include "tests/harness.h"

static void check_table(void) {
    for (unsigned k = 0; k < 8; k++) {
        for (uint32_t b = 0; b < 256; b++) {
            uint32_t crc = b;
            for (unsigned bit = 0; bit < 8 * (k + 1); bit++) {
                crc = crc >> 1 ^ ((crc & 1) != 0 ? UINT32_C(0x82F63B78) : 0);
            }
            EXPECT(crc32c_table[k][b] == crc);
        }
    }
}

static void check_shifts(void) {
    static const uint8_t zeros[CRC32C_LONG] = {0};
    for (unsigned k = 0; k < 4; k++) {
        for (uint32_t b = 0; b < 256; b++) {
            const uint32_t seed = ~(b << (8 * k)); /* the register is kept inverted */
            EXPECT(crc32c_shift_long[k][b] == ~crc32c_portable(seed, zeros, CRC32C_LONG));
            EXPECT(crc32c_shift_short[k][b] == ~crc32c_portable(seed, zeros, CRC32C_SHORT));
        }
    }
}

void test_crc32c(void) {
    uint8_t bytes[32] = {0};
    check_shifts();
    check_table();
    EXPECT(crc32c(0, (const uint8_t *)"123456789", 9) == UINT32_C(0xE3069283));
    EXPECT(crc32c(0, bytes, 32) == UINT32_C(0x8A9136AA)); /* RFC 3720, B.4 */
    memset(bytes, 0xff, 32);
    EXPECT(crc32c(0, bytes, 32) == UINT32_C(0x62A8AB43));
    EXPECT(crc32c(5, NULL, 0) == 5);
    for (size_t len = 0; len < 100000; len = len * 5 / 4 + 1) {
        uint8_t *data = exact(len);
        random_bytes(data, len);
        const size_t cut = len == 0 ? 0 : random_below((uint32_t)len);
        const uint32_t seed = (uint32_t)random_u64(), whole = crc32c(seed, data, len);
        EXPECT(whole == crc32c_portable(seed, data, len));
        EXPECT(whole == crc32c(crc32c(seed, data, cut), data + cut, len - cut));
        free(data);
    }
}

static uint64_t hash_of(const char *text) {
    const size_t len = strlen(text);
    uint8_t *copy = exact_copy(text, len);
    const uint64_t hash = hash64(copy, len);
    free(copy);
    return hash;
}

void test_hash(void) {
    EXPECT(hash64(NULL, 0) == UINT64_C(0xEF46DB3751D8E999));
    EXPECT(hash_of("a") == UINT64_C(0xD24EC4F1A98C6E5B));
    EXPECT(hash_of("abc") == UINT64_C(0x44BC2CF5AD770999));
    EXPECT(hash_of("Nobody inspects the spammish repetition") == UINT64_C(0xFBCEA83C8A378BF1));
    EXPECT(hash_of("\x80\x01\x02\x03\x04\x05\x06\x07") == UINT64_C(0x70089B9867FE4E01));
}
