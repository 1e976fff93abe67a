/* Headers of batches: one golden, places, walks, and every kind of damage. */
#include "codec/crc32c.h"
#include "common/bytes.h"
#include "tests/fuzz_core.h"
#include "tests/log_sample.h"

/* As in tests/core/test_log_golden.py: a COMMIT marker of transaction 7 at offset 5. */
static const uint8_t golden[] = {
    5,    0,    0,    0,    0, 0, 0, 0,                         /* base offset */
    0,    0,    0,    0,    0, 0, 0, 0,                         /* commit timestamp */
    0,    0,    0,    0,    104, 0, 0, 0,                       /* crc, below; length */
    1,    0,    24,   0,    1, 0, 0, 0,                         /* magic, attributes, count */
    7,    0,    0,    0,    0, 0, 0, 0,                         /* transaction */
    3,    0,    0,    0,    0, 0, 0, 0,                         /* least timestamp */
    3,    0,    0,    0,    0, 0, 0, 0,                         /* greatest timestamp */
    0,    0,    0,    0,    0, 0, 0, 0,                         /* producer */
    0xFF, 0xFF, 0xFF, 0xFF, 0, 0, 0, 0,                         /* sequence, epoch, reserved */
    0,    0,    0,    0,    24, 0, 0, 0,                        /* rows, raw bytes */
    0,    0,    1,    0,    0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, /* version, type, low water mark */
    0,    0,    0,    0,    0, 0, 0, 0,                         /* first offset */
};

static void check_golden(void) {
    const batch_header_t head = {.base_offset = 5,
                                 .txn_id = 7,
                                 .attributes = BATCH_TRANSACTIONAL,
                                 .base_timestamp = 3,
                                 .max_timestamp = 3,
                                 .base_sequence = -1};
    size_t len;
    uint8_t *batch = log_control_of(CONTROL_COMMIT, head, &len);
    EXPECT(len == sizeof golden);
    EXPECT(load_le32(batch + 16) == crc32c_portable(0, batch + 20, len - 20));
    store_le32(batch + 16, 0);
    EXPECT(memcmp(batch, golden, len) == 0);
    free(batch);
}

static uint8_t *some_batches(uint32_t n, size_t *out_len, uint64_t *out_at) {
    log_bytes_t all = {NULL, 0};
    for (uint32_t i = 0; i < n; i++) {
        const log_sample_t sample = log_sample(1 + random_below(20), random_below(3));
        const batch_header_t head = {.producer_id = random_u64(), .base_sequence = -1};
        size_t len;
        uint8_t *batch = log_batch_of(&sample, head, &len);
        out_at[i] = all.len;
        log_append(&all, batch, len);
        free(batch);
        log_sample_drop(sample);
    }
    uint8_t *bytes = exact_copy(all.bytes, all.len);
    free(all.bytes);
    *out_len = all.len;
    return bytes;
}

static void check_place(uint32_t n) {
    uint64_t at[16], found[16], next = random_u64() >> 8;
    size_t len;
    uint8_t *bytes = some_batches(n, &len, at), *before = exact_copy(bytes, len);
    uint32_t counted;
    EXPECT(batch_count(bytes, len, &counted) == STATUS_OK && counted == n);
    EXPECT(batch_walk(bytes, len, found, n) == STATUS_OK);
    if (n != 0) EXPECT(batch_walk(bytes, len, found, n - 1) == STATUS_CORRUPT);
    EXPECT(batch_place(bytes, len, next, 77) == STATUS_OK);
    EXPECT(batch_place(bytes, len, next, 0) == STATUS_OK); /* which leaves the timestamp */
    for (uint32_t i = 0; i < n; i++) {
        batch_header_t header;
        EXPECT(found[i] == at[i]);
        EXPECT(batch_check(bytes + at[i], len - at[i]) == STATUS_OK);
        EXPECT(batch_parse(bytes + at[i], len - at[i], &header) == STATUS_OK);
        EXPECT(header.base_offset == next && header.commit_ts == 77);
        EXPECT(memcmp(bytes + at[i] + 16, before + at[i] + 16, header.length - 16) == 0);
        next += header.count;
    }
    if (n != 0) {
        EXPECT(batch_place(bytes, len, INT64_MAX - 1, 1) == STATUS_LIMIT || n == 1);
        EXPECT(batch_place(bytes, len, INT64_MAX, 1) == STATUS_LIMIT);
        EXPECT(batch_place(bytes, len - 1, 1, 1) == STATUS_CORRUPT);
        EXPECT(load_le64(bytes + 8) == 77 || n == 1); /* refused: nothing was changed */
    }
    free(bytes);
    free(before);
}

/* Every flipped bit is found: by the header, by the checksum, or it is in the place. */
static void check_flips(void) {
    uint64_t at[1];
    size_t len;
    uint8_t *bytes = some_batches(1, &len, at);
    for (size_t bit = 0; bit < 8 * len; bit++) {
        bytes[bit / 8] = (uint8_t)(bytes[bit / 8] ^ 1u << bit % 8);
        const status_t status = batch_check(bytes, len);
        if (bit >= 8 * 16) EXPECT(status == STATUS_CORRUPT);
        fuzz_log(bytes, len);
        bytes[bit / 8] = (uint8_t)(bytes[bit / 8] ^ 1u << bit % 8);
    }
    for (size_t cut = 0; cut < len; cut++) {
        uint8_t *part = exact_copy(bytes, cut);
        EXPECT(batch_check(part, cut) == STATUS_CORRUPT);
        fuzz_log(part, cut);
        free(part);
    }
    free(bytes);
}

/* What is found whole ends before a batch with a flipped bit, wherever the search begins; the
 * commit timestamp is not asked about. */
static void check_sound(void) {
    uint64_t at[3], out[3];
    size_t len;
    uint8_t *bytes = some_batches(3, &len, at);
    EXPECT(batch_place(bytes, len, 7, 1) == STATUS_OK);
    batch_header_t last;
    memcpy(&last, bytes + at[2], sizeof last);
    const uint64_t end = last.base_offset + last.count;
    for (size_t bit = 0; bit <= 8 * len; bit++) {
        const bool flipped = bit < 8 * len;
        size_t hurt = 0;
        while (hurt < 3 && (hurt == 2 || bit / 8 >= at[hurt + 1])) hurt++;
        hurt = hurt > 2 ? 2 : hurt;
        const size_t within = bit / 8 - at[hurt];
        if (flipped) bytes[bit / 8] = (uint8_t)(bytes[bit / 8] ^ 1u << bit % 8);
        const bool told = flipped && (within < 8 || within >= 16);
        batch_sound(bytes, len, 7, 7, UINT32_MAX, true, out);
        EXPECT(out[0] == 0 && out[1] == (told ? at[hurt] : len));
        const bool covered = told && within >= 16;
        const size_t intact = batch_intact(bytes, len);
        EXPECT(intact == at[hurt] || (!covered && intact == len));
        EXPECT(flipped || intact == len);
        EXPECT(told || out[2] == end);
        batch_sound(bytes, len, 7, last.base_offset, 1, true, out);
        EXPECT(out[0] <= out[1] && out[1] <= len);
        EXPECT(out[0] == out[1] || (out[0] == at[2] && out[1] == len && out[2] == end));
        if (told && hurt == 2) EXPECT(out[0] == out[1] && out[2] == last.base_offset);
        uint64_t loose[3];
        batch_sound(bytes, len, 7, 7, UINT32_MAX, false, loose);
        EXPECT(loose[0] == 0 && loose[1] <= len);
        EXPECT(!told || loose[1] >= at[hurt]);
        if (flipped) bytes[bit / 8] = (uint8_t)(bytes[bit / 8] ^ 1u << bit % 8);
    }
    for (size_t cut = 0; cut < len; cut++) {
        uint8_t *part = exact_copy(bytes, cut);
        batch_sound(part, cut, 7, 7, UINT32_MAX, true, out);
        EXPECT(out[1] == (cut < at[1] ? 0 : cut < at[2] ? at[1] : at[2]));
        batch_sound(part, cut, 7, end + 1, 2, false, out);
        EXPECT(out[0] == out[1] && out[1] <= cut);
        free(part);
    }
    free(bytes);
}

/* Bytes of a header changed at random, with the right checksum: any answer, no harm. */
static void check_forged(void) {
    uint64_t starts[3];
    size_t len;
    uint8_t *bytes = some_batches(3, &len, starts);
    for (int i = 0; i < 3000; i++) {
        uint8_t *copy = exact_copy(bytes, len);
        const uint64_t batch = starts[random_below(3)];
        for (uint32_t n = 1 + random_below(3); n != 0; n--) {
            const uint64_t left = len - batch - 20;
            const uint32_t at = 20 + random_below(left < 120 ? (uint32_t)left : 120);
            copy[batch + at] = (uint8_t)(1u << random_below(8));
        }
        const uint32_t length = load_le32(copy + batch + 20);
        if (length >= 80 && length <= len - batch) {
            store_le32(copy + batch + 16, crc32c(0, copy + batch + 20, length - 20));
        }
        fuzz_log(copy, len);
        free(copy);
    }
    free(bytes);
}

/* What fits is told by the decoded size of whole batches, whatever is stored. */
static void check_within(void) {
    uint64_t starts[8], out_len, decoded, sum = 0;
    size_t len;
    uint8_t *bytes = some_batches(8, &len, starts);
    batch_within(bytes, 0, 7, &out_len, &decoded);
    EXPECT(out_len == 0 && decoded == 0);
    for (uint32_t i = 0; i < 8; i++) {
        batch_header_t header;
        EXPECT(batch_parse(bytes + starts[i], len - starts[i], &header) == STATUS_OK);
        const uint64_t size = 80 + (uint64_t)header.raw_bytes + 24 * (uint64_t)header.rows;
        batch_within(bytes, len, sum + size - 1, &out_len, &decoded);
        EXPECT(out_len == starts[i] && decoded == sum);
        sum += size;
        batch_within(bytes, len, sum, &out_len, &decoded);
        EXPECT(out_len == (i < 7 ? starts[i + 1] : len) && decoded == sum);
    }
    bytes[starts[1] + 24] ^= 1; /* no batch: all that follows is one of its own length */
    batch_within(bytes, len, UINT64_MAX, &out_len, &decoded);
    EXPECT(out_len == len && decoded < sum && decoded > len - starts[1]);
    batch_within(bytes, len, len - starts[1] - 1, &out_len, &decoded);
    EXPECT(out_len <= starts[1]);
    free(bytes);
}

void test_log_batch(void) {
    check_golden();
    check_within();
    for (uint32_t n = 0; n < 10; n++) check_place(n);
    check_flips();
    check_sound();
    check_forged();
}
