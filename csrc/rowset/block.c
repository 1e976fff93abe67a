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
_Static_assert(offsetof(block_header_t, reserved) == 20, "frozen format");
_Static_assert(offsetof(block_header_t, body_len) == 24, "frozen format");

static bool header_sane(const block_header_t *header, size_t len) {
    const bool has_validity = header->flags == BLOCK_HAS_VALIDITY;
    if (header->version != BLOCK_VERSION || header->reserved != 0) return false;
    if (header->flags != 0 && !has_validity) return false;
    if (header->kind < BLOCK_FIXED || header->kind > BLOCK_OPAQUE) return false;
    if ((header->kind == BLOCK_FIXED) != (header->width != 0)) return false;
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

static bool take_data(block_t *block, const uint8_t *at, uint64_t left) {
    uint64_t want = left;
    switch (block->kind) {
        case BLOCK_FIXED: want = (uint64_t)block->rows * block->width; break;
        case BLOCK_BIT: want = bits_bytes(block->rows); break;
        case BLOCK_VARLEN: want = load_le32(block->offsets + 4 * (size_t)block->rows); break;
        case BLOCK_OPAQUE: break;
    }
    block->data = at;
    block->data_len = (size_t)left;
    return want == left;
}

status_t block_parse(const uint8_t *bytes, size_t len, block_t *out) {
    block_header_t header;
    if (len < sizeof header) return STATUS_CORRUPT;
    memcpy(&header, bytes, sizeof header);
    if (!header_sane(&header, len)) return STATUS_CORRUPT;
    *out = (block_t){.kind = (block_kind_t)header.kind,
                     .rows = header.rows,
                     .null_count = header.null_count,
                     .width = header.width};
    const uint8_t *at = bytes + sizeof header;
    uint64_t left = header.body_len;
    if (header.flags == BLOCK_HAS_VALIDITY) {
        out->validity = take_section(&at, &left, bits_bytes(header.rows));
        if (out->validity == NULL) return STATUS_CORRUPT;
    }
    if (header.kind == BLOCK_VARLEN) {
        out->offsets = take_section(&at, &left, 4 * ((uint64_t)header.rows + 1));
        if (out->offsets == NULL || load_le32(out->offsets) != 0) return STATUS_CORRUPT;
    }
    return take_data(out, at, left) ? STATUS_OK : STATUS_CORRUPT;
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
    if (block.kind != BLOCK_VARLEN) return STATUS_OK;
    const keys_t strings = {block.data, block.data_len, block.offsets, 0, block.rows};
    return keys_check(&strings);
}

status_t block_keys(const uint8_t *bytes, size_t len, keys_t *out) {
    block_t block;
    const status_t status = block_parse(bytes, len, &block);
    if (status != STATUS_OK) return status;
    if (block.kind != BLOCK_FIXED && block.kind != BLOCK_VARLEN) return STATUS_CORRUPT;
    if (block.validity != NULL) return STATUS_CORRUPT;
    *out = (keys_t){block.data, block.data_len, block.offsets, block.width, block.rows};
    return STATUS_OK;
}
