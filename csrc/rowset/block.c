#include "rowset/block.h"

#include "codec/crc32c.h"
#include "common/bits.h"

#include <stdbool.h>

_Static_assert(sizeof(block_header_t) == BLOCK_HEADER_BYTES, "frozen format");
_Static_assert(offsetof(block_header_t, crc) == 0, "frozen format");
_Static_assert(offsetof(block_header_t, version) == 4, "frozen format");
_Static_assert(offsetof(block_header_t, kind) == 5, "frozen format");
_Static_assert(offsetof(block_header_t, flags) == 6, "frozen format");
_Static_assert(offsetof(block_header_t, rows) == 8, "frozen format");
_Static_assert(offsetof(block_header_t, null_count) == 12, "frozen format");
_Static_assert(offsetof(block_header_t, width) == 16, "frozen format");
_Static_assert(offsetof(block_header_t, encoding) == 20, "frozen format");
_Static_assert(offsetof(block_header_t, digits) == 21, "frozen format");
_Static_assert(offsetof(block_header_t, keys) == 22, "frozen format");
_Static_assert(offsetof(block_header_t, body_len) == 24, "frozen format");

/* Whether the block's kind may have its encoding. */
static bool encoding_sane(const block_header_t *header) {
    const uint32_t width = header->width;
    if (header->reserved != 0) return false;
    if ((header->encoding != BLOCK_DECIMAL) && header->digits != 0) return false;
    if ((header->encoding != BLOCK_PACKED) && header->keys != 0) return false;
    if (header->version == BLOCK_VERSION) return header->encoding == BLOCK_PLAIN;
    switch (header->encoding) {
        case BLOCK_PACKED: return width >= 1 && width <= 16 && header->keys <= 1;
        case BLOCK_DECIMAL:
            return (width == 4 || width == 8) && header->digits <= BLOCK_MOST_DIGITS;
        case BLOCK_DICTIONARY: return header->kind == BLOCK_FIXED || header->kind == BLOCK_VARLEN;
        case BLOCK_RUNS: return header->kind == BLOCK_FIXED;
        case BLOCK_ENDS: return header->kind == BLOCK_VARLEN;
        default: return false;
    }
}

static bool header_sane(const block_header_t *header, size_t len) {
    const bool has_validity = header->flags == BLOCK_HAS_VALIDITY;
    if (header->version != BLOCK_VERSION && header->version != BLOCK_VERSION_LIGHT) return false;
    if (header->flags != 0 && !has_validity) return false;
    if (header->kind < BLOCK_FIXED || header->kind > BLOCK_OPAQUE) return false;
    if ((header->kind == BLOCK_FIXED) != (header->width != 0)) return false;
    if (!encoding_sane(header)) return false;
    if (header->null_count > header->rows) return false;
    if (header->kind != BLOCK_OPAQUE && has_validity != (header->null_count != 0)) return false;
    if (header->kind == BLOCK_OPAQUE && has_validity) return false;
    const uint64_t room = len - BLOCK_HEADER_BYTES;
    return header->body_len <= room && round_up_8(header->body_len) == room;
}

/* Takes `len` bytes, and what pads them to 8, off the front of the body. The last section
 * may lack its padding: body_len ends without it. */
static const uint8_t *take_section(const uint8_t **at, uint64_t *left, uint64_t len) {
    const uint8_t *section = *at;
    if (len > *left) return NULL;
    const uint64_t padded = round_up_8(len) < *left ? round_up_8(len) : *left;
    *at += padded;
    *left -= padded;
    return section;
}

/* The data of `n` values; of varlen ones, their offsets before it. */
static bool take_values(block_t *block, uint32_t n, const uint8_t *at, uint64_t left) {
    uint64_t want;
    if (block->kind == BLOCK_VARLEN) {
        block->offsets = take_section(&at, &left, 4 * ((uint64_t)n + 1));
        if (block->offsets == NULL || load_le32(block->offsets) != 0) return false;
    }
    switch (block->kind) {
        case BLOCK_FIXED: want = (uint64_t)n * block->width; break;
        case BLOCK_BIT: want = bits_bytes(n); break;
        case BLOCK_VARLEN: want = load_le32(block->offsets + 4 * (size_t)n); break;
        default: want = left;
    }
    block->values = n;
    block->data = at;
    block->data_len = (size_t)left;
    return want == left;
}

static bool take_packed(const uint8_t **at, uint64_t *left, uint32_t n, packed_t *out) {
    uint64_t len;
    if (packed_parse(*at, *left, n, out, &len) != STATUS_OK) return false;
    return take_section(at, left, len) != NULL;
}

/* Codes or ends of runs, and the values; before them how many these are, and 4 zeros. */
static bool take_shared(block_t *block, const uint8_t *at, uint64_t left) {
    if (left < 8) return false;
    const uint32_t values = load_le32(at);
    if (load_le32(at + 4) != 0 || (values == 0) != (block->rows == 0)) return false;
    const uint32_t n = block->encoding == BLOCK_RUNS ? values : block->rows;
    at += 8;
    left -= 8;
    return take_packed(&at, &left, n, block->numbers) && take_values(block, values, at, left);
}

static bool take_body(block_t *block, const uint8_t *at, uint64_t left) {
    switch (block->encoding) {
        case BLOCK_PLAIN: return take_values(block, block->rows, at, left);
        case BLOCK_DICTIONARY:
        case BLOCK_RUNS: return take_shared(block, at, left);
        case BLOCK_PACKED:
        case BLOCK_DECIMAL:
            if (!take_packed(&at, &left, block->rows, block->numbers)) return false;
            if (block->width > 8 && !take_packed(&at, &left, block->rows, block->numbers + 1)) {
                return false;
            }
            return left == 0;
        case BLOCK_ENDS:
            if (block->rows == UINT32_MAX) return false;
            if (!take_packed(&at, &left, block->rows + 1, block->numbers)) return false;
            block->data = at;
            block->data_len = (size_t)left;
            return true;
    }
    return false;
}

status_t block_parse(const uint8_t *bytes, size_t len, block_t *out) {
    block_header_t header;
    if (len < sizeof header) return STATUS_CORRUPT;
    memcpy(&header, bytes, sizeof header);
    if (!header_sane(&header, len)) return STATUS_CORRUPT;
    *out = (block_t){.kind = (block_kind_t)header.kind,
                     .rows = header.rows,
                     .null_count = header.null_count,
                     .width = header.width,
                     .encoding = (block_encoding_t)header.encoding,
                     .digits = header.digits,
                     .keys = header.keys};
    const uint8_t *at = bytes + sizeof header;
    uint64_t left = header.body_len;
    if (header.flags == BLOCK_HAS_VALIDITY) {
        out->validity = take_section(&at, &left, bits_bytes(header.rows));
        if (out->validity == NULL) return STATUS_CORRUPT;
    }
    return take_body(out, at, left) ? STATUS_OK : STATUS_CORRUPT;
}

/* Packed numbers that never fall and end at `end`; strictly ascending ones when `strictly`. */
static bool numbers_ascend(const packed_t *packed, uint64_t end, bool strictly) {
    uint64_t numbers[PACKED_FRAME], last = 0;
    for (uint32_t lo = 0; lo < packed->n; lo += PACKED_FRAME) {
        const uint32_t n = packed_frame(packed, lo / PACKED_FRAME, numbers);
        if (n == 0) return false;
        for (uint32_t i = 0; i < n; i++) {
            if (numbers[i] < last + (strictly ? 1 : 0)) return false;
            last = numbers[i];
        }
    }
    return last == end;
}

/* Packed numbers whose frames are all there, all below `limit`. */
static bool numbers_below(const packed_t *packed, uint64_t limit) {
    uint64_t numbers[PACKED_FRAME];
    for (uint32_t lo = 0; lo < packed->n; lo += PACKED_FRAME) {
        const uint32_t n = packed_frame(packed, lo / PACKED_FRAME, numbers);
        if (n == 0) return false;
        uint64_t most = 0;
        for (uint32_t i = 0; i < n; i++) most = numbers[i] > most ? numbers[i] : most;
        if (most >= limit) return false;
    }
    return true;
}

static bool encoding_verified(const block_t *block) {
    uint64_t first;
    switch (block->encoding) {
        case BLOCK_PLAIN: return true;
        case BLOCK_DICTIONARY:
            return numbers_below(block->numbers, block->values);
        case BLOCK_RUNS: return numbers_ascend(block->numbers, block->rows, true);
        case BLOCK_PACKED:
        case BLOCK_DECIMAL:
            return packed_sane(block->numbers) &&
                   (block->width <= 8 || packed_sane(block->numbers + 1));
        case BLOCK_ENDS:
            return numbers_ascend(block->numbers, block->data_len, false) &&
                   packed_get(block->numbers, 0, &first) == STATUS_OK && first == 0;
    }
    return false;
}

status_t block_verify(const uint8_t *bytes, size_t len, uint32_t seed) {
    block_t block;
    const status_t status = block_parse(bytes, len, &block);
    if (status != STATUS_OK) return status;
    if (load_le32(bytes) != crc32c(seed, bytes + 4, len - 4)) return STATUS_CORRUPT;
    if (block.validity != NULL &&
        bits_count(block.validity, 0, block.rows) != block.rows - block.null_count) {
        return STATUS_CORRUPT;
    }
    if (!encoding_verified(&block)) return STATUS_CORRUPT;
    if (block.offsets == NULL) return STATUS_OK;
    const keys_t strings = {block.data, block.data_len, block.offsets, 0, block.values};
    return keys_check(&strings);
}

status_t block_keys(const uint8_t *bytes, size_t len, keys_t *out) {
    block_t block;
    const status_t status = block_parse(bytes, len, &block);
    if (status != STATUS_OK) return status;
    if (block.kind != BLOCK_FIXED && block.kind != BLOCK_VARLEN) return STATUS_CORRUPT;
    if (block.validity != NULL || block.encoding != BLOCK_PLAIN) return STATUS_CORRUPT;
    *out = (keys_t){block.data, block.data_len, block.offsets, block.width, block.rows};
    return STATUS_OK;
}

void block_seal(const block_header_t *header, uint32_t seed, uint8_t *out, uint64_t size) {
    const uint64_t end = BLOCK_HEADER_BYTES + header->body_len;
    memset(out + end, 0, size - end);
    memcpy(out, header, sizeof *header);
    store_le32(out, crc32c(seed, out + 4, size - 4));
}
