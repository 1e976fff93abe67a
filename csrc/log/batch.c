#include "log/batch.h"

#include <stdbool.h>

#include "codec/crc32c.h"
#include "common/bytes.h"
#include "common/check.h"

_Static_assert(sizeof(batch_header_t) == BATCH_HEADER_BYTES, "frozen format");
_Static_assert(offsetof(batch_header_t, base_offset) == 0, "frozen format");
_Static_assert(offsetof(batch_header_t, commit_ts) == 8, "frozen format");
_Static_assert(offsetof(batch_header_t, crc) == 16, "frozen format");
_Static_assert(offsetof(batch_header_t, length) == 20, "frozen format");
_Static_assert(offsetof(batch_header_t, magic) == 24, "frozen format");
_Static_assert(offsetof(batch_header_t, attributes) == 26, "frozen format");
_Static_assert(offsetof(batch_header_t, count) == 28, "frozen format");
_Static_assert(offsetof(batch_header_t, txn_id) == 32, "frozen format");
_Static_assert(offsetof(batch_header_t, base_timestamp) == 40, "frozen format");
_Static_assert(offsetof(batch_header_t, max_timestamp) == 48, "frozen format");
_Static_assert(offsetof(batch_header_t, producer_id) == 56, "frozen format");
_Static_assert(offsetof(batch_header_t, base_sequence) == 64, "frozen format");
_Static_assert(offsetof(batch_header_t, epoch) == 68, "frozen format");
_Static_assert(offsetof(batch_header_t, reserved) == 70, "frozen format");
_Static_assert(offsetof(batch_header_t, rows) == 72, "frozen format");
_Static_assert(offsetof(batch_header_t, raw_bytes) == 76, "frozen format");

#define CRC_FROM offsetof(batch_header_t, length)

static bool attributes_sane(const batch_header_t *header) {
    const unsigned flags = header->attributes;
    if ((flags & ~(unsigned)BATCH_ATTRIBUTES) != 0) return false;
    if ((flags & BATCH_CODEC) >= BATCH_CODECS) return false;
    if (((flags & BATCH_TRANSACTIONAL) != 0) != (header->txn_id != 0)) return false;
    if ((flags & BATCH_DECIDED) != 0 && (flags & BATCH_TRANSACTIONAL) == 0) return false;
    if ((flags & BATCH_PLACES) != 0 && (flags & BATCH_CHUNK) != 0) return false;
    if ((flags & BATCH_CONTROL) == 0) return true;
    const unsigned allowed = BATCH_CONTROL | BATCH_TRANSACTIONAL | BATCH_DECIDED;
    return (flags & ~allowed) == 0 && header->rows == 0;
}

/* The length must be one of the header's; that the batch is all there is asked elsewhere. */
static bool length_sane(const batch_header_t *header) {
    const unsigned flags = header->attributes;
    uint32_t least = BATCH_HEADER_BYTES;
    if ((flags & BATCH_CONTROL) != 0) least += BATCH_CONTROL_BYTES;
    if ((flags & BATCH_CHUNK) != 0) least += BATCH_CHUNK_BYTES;
    if (header->length < least || header->raw_bytes > INT32_MAX) return false;
    if ((flags & BATCH_CODEC) != 0) return true;
    if ((flags & BATCH_CONTROL) != 0) least -= BATCH_CONTROL_BYTES;
    return header->raw_bytes == header->length - least;
}

static bool header_sane(const batch_header_t *header) {
    if (header->magic != BATCH_MAGIC || header->reserved != 0) return false;
    if (header->count == 0 || header->count > BATCH_COUNT_MAX) return false;
    if (header->rows > header->count) return false;
    if (header->base_offset > (uint64_t)INT64_MAX - header->count) return false;
    return attributes_sane(header) && length_sane(header);
}

status_t batch_parse(const uint8_t *bytes, size_t len, batch_header_t *out) {
    if (len < sizeof *out) return STATUS_CORRUPT;
    memcpy(out, bytes, sizeof *out);
    if (!header_sane(out) || out->length > len) return STATUS_CORRUPT;
    return STATUS_OK;
}

status_t batch_check(const uint8_t *bytes, size_t len) {
    batch_header_t header;
    const status_t status = batch_parse(bytes, len, &header);
    if (status != STATUS_OK) return status;
    const uint32_t crc = crc32c(0, bytes + CRC_FROM, header.length - CRC_FROM);
    return crc == header.crc ? STATUS_OK : STATUS_CORRUPT;
}

void batch_sound(const uint8_t *bytes, size_t len, uint64_t base_offset, uint64_t offset,
                 uint32_t most, bool checksums, uint64_t out[3]) {
    batch_header_t header;
    uint64_t next = base_offset;
    size_t at = 0;
    bool found = false;
    while (batch_parse(bytes + at, len - at, &header) == STATUS_OK && header.base_offset == next) {
        found = next + header.count > offset;
        if (found) break;
        next += header.count;
        at += header.length;
    }
    /* Where the headers do not lead there, all are looked at: which one is damaged? */
    if (!found) next = base_offset;
    size_t stop = found ? at : 0;
    for (uint32_t n = 0; n < most || !found; n++) {
        const bool checked = checksums || !found;
        const status_t status = checked ? batch_check(bytes + stop, len - stop)
                                        : batch_parse(bytes + stop, len - stop, &header);
        if (status != STATUS_OK) break;
        memcpy(&header, bytes + stop, sizeof header);
        if (header.base_offset != next) break;
        next += header.count;
        stop += header.length;
    }
    out[0] = found ? at : stop;
    out[1] = stop;
    out[2] = next;
}

size_t batch_intact(const uint8_t *bytes, size_t len) {
    size_t at = 0;
    while (at < len && batch_check(bytes + at, len - at) == STATUS_OK) {
        at += load_le32(bytes + at + offsetof(batch_header_t, length));
    }
    return at;
}

status_t batch_count(const uint8_t *bytes, size_t len, uint32_t *out_n) {
    batch_header_t header;
    *out_n = 0;
    for (size_t at = 0; at < len; at += header.length) {
        const status_t status = batch_parse(bytes + at, len - at, &header);
        if (status != STATUS_OK) return status;
        if (++*out_n == UINT32_MAX) return STATUS_LIMIT;
    }
    return STATUS_OK;
}

status_t batch_walk(const uint8_t *bytes, size_t len, uint64_t *out_positions, uint32_t room) {
    batch_header_t header;
    size_t at = 0;
    for (uint32_t i = 0; i < room; i++, at += header.length) {
        const status_t status = batch_parse(bytes + at, len - at, &header);
        if (status != STATUS_OK) return status;
        out_positions[i] = at;
    }
    return at == len ? STATUS_OK : STATUS_CORRUPT;
}

void batch_within(const uint8_t *bytes, size_t len, uint64_t room, uint64_t *out_len,
                  uint64_t *out_decoded) {
    uint64_t decoded = 0;
    size_t at = 0;
    while (at < len) {
        batch_header_t header;
        uint64_t size = len - at, length = len - at;
        if (batch_parse(bytes + at, len - at, &header) == STATUS_OK) {
            length = header.length;
            size = BATCH_HEADER_BYTES + (uint64_t)header.raw_bytes +
                   BATCH_ROW_BYTES * (uint64_t)header.rows;
        }
        if (size > room - decoded) break;
        decoded += size;
        at += length;
    }
    *out_len = at;
    *out_decoded = decoded;
}

status_t batch_place(uint8_t *bytes, size_t len, uint64_t base_offset, uint64_t commit_ts) {
    batch_header_t header;
    uint64_t next = base_offset;
    for (size_t at = 0; at < len; at += header.length) {
        const status_t status = batch_parse(bytes + at, len - at, &header);
        if (status != STATUS_OK) return status;
        if (next > (uint64_t)INT64_MAX - header.count) return STATUS_LIMIT;
        next += header.count;
    }
    for (size_t at = 0; at < len; at += load_le32(bytes + at + CRC_FROM)) {
        store_le64(bytes + at, base_offset);
        if (commit_ts != 0) store_le64(bytes + at + offsetof(batch_header_t, commit_ts), commit_ts);
        base_offset += load_le32(bytes + at + offsetof(batch_header_t, count));
    }
    return STATUS_OK;
}

void batch_seal(const batch_header_t *header, uint8_t *out, size_t out_len) {
    batch_header_t sealed = *header;
    CHECK(out_len >= sizeof sealed && out_len <= UINT32_MAX);
    sealed.length = (uint32_t)out_len;
    sealed.magic = BATCH_MAGIC;
    sealed.crc = 0;
    CHECK(header_sane(&sealed));
    memcpy(out, &sealed, sizeof sealed);
    sealed.crc = crc32c(0, out + CRC_FROM, out_len - CRC_FROM);
    store_le32(out + offsetof(batch_header_t, crc), sealed.crc);
}
