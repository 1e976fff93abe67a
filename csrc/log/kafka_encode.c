#include "codec/crc32c.h"
#include "common/bits.h"
#include "common/bytes.h"
#include "log/kafka.h"

enum {
    FORMAT = 2,
    IS_TRANSACTIONAL = 0x10,
    IS_CONTROL = 0x20,
    BATCH_BYTES = 1 << 20, /* a batch that has so many takes no more of the log */
    CRC_AT = 17,
    CHECKED_FROM = 21
};

/* Where bytes go, or only their number while `out` is NULL. */
typedef struct {
    uint8_t *out;
    uint64_t at;
} sink_t;

static void put_bytes(sink_t *sink, const uint8_t *from, uint64_t len) {
    if (sink->out != NULL) copy_bytes(sink->out + sink->at, from, len);
    sink->at += len;
}

static void put_varint(sink_t *sink, int64_t value) {
    uint64_t left = ((uint64_t)value << 1) ^ (uint64_t)(value >> 63);
    if (sink->out == NULL) {
        sink->at += (uint64_t)(63 - __builtin_clzll(left | 1)) / 7 + 1;
        return;
    }
    for (; left > 0x7F; left >>= 7) sink->out[sink->at++] = (uint8_t)(left | 0x80);
    sink->out[sink->at++] = (uint8_t)left;
}

/* A batch that is being put together: [base, next) of the offsets. */
typedef struct {
    uint64_t base, next;
    uint64_t first_row, rows;
    uint64_t bytes; /* about */
    int64_t producer; /* -1: nobody's */
    bool open;
} group_t;

static int64_t to_millis(int64_t micros) {
    return micros / 1000 - (micros % 1000 < 0 ? 1 : 0);
}

typedef struct {
    const uint8_t *bytes; /* NULL: a null */
    uint32_t len;
} string_t;

static string_t string_at(const uint8_t *validity, const uint32_t *ends, const uint8_t *bytes,
                          uint64_t row) {
    static const uint8_t empty[1] = {0};
    if (ends == NULL) return (string_t){NULL, 0};
    if (validity != NULL && (validity[row / 8] >> (row % 8) & 1) == 0) return (string_t){NULL, 0};
    const uint32_t len = ends[row + 1] - ends[row];
    return (string_t){len == 0 ? empty : bytes + ends[row], len};
}

static void put_string(sink_t *sink, string_t string) {
    put_varint(sink, string.bytes == NULL ? -1 : (int64_t)string.len);
    put_bytes(sink, string.bytes, string.len);
}

/* Headers as Kafka has them; false where they are not what log/headers.h says. */
static bool put_headers(sink_t *sink, string_t headers) {
    if (headers.len == 0) {
        put_varint(sink, 0);
        return true;
    }
    const uint8_t *at = headers.bytes, *end = at + headers.len;
    if (headers.len < 2) return false;
    const uint16_t n = load_le16(at);
    at += 2;
    put_varint(sink, n);
    for (uint32_t i = 0; i < 2 * (uint32_t)n; i++) {
        const size_t width = i % 2 == 0 ? 2 : 4;
        if ((size_t)(end - at) < width) return false;
        const uint32_t len = width == 2 ? load_le16(at) : load_le32(at);
        at += width;
        if ((size_t)(end - at) < len) return false;
        put_varint(sink, len);
        put_bytes(sink, at, len);
        at += len;
    }
    return at == end;
}

/* What stands in a record behind its length. */
static bool put_record(sink_t *sink, const kafka_source_t *source, const group_t *group,
                       uint64_t row, int64_t base_millis) {
    const uint8_t attributes = 0;
    put_bytes(sink, &attributes, 1);
    put_varint(sink, to_millis(source->timestamp[row]) - base_millis);
    put_varint(sink, (int64_t)(source->offset[row] - group->base));
    put_string(sink, string_at(source->key_validity, source->key_ends, source->keys, row));
    put_string(sink, string_at(source->value_validity, source->value_ends, source->values, row));
    return put_headers(
        sink, string_at(source->header_validity, source->header_ends, source->headers, row));
}

/* The header of the batch that has begun at `begin` and ends here. */
static void seal(sink_t *sink, uint64_t begin, const group_t *group, int attributes,
                 int64_t base_millis, int64_t max_millis, uint32_t count) {
    if (sink->out == NULL) return;
    uint8_t *to = sink->out + begin;
    store_be64(to, group->base);
    store_be32(to + 8, (uint32_t)(sink->at - begin - 12));
    store_be32(to + 12, (uint32_t)-1); /* the epoch of the leader: there is one only */
    to[16] = FORMAT;
    store_be16(to + 21, (uint16_t)attributes);
    store_be32(to + 23, (uint32_t)(group->next - 1 - group->base));
    store_be64(to + 27, (uint64_t)base_millis);
    store_be64(to + 35, (uint64_t)max_millis);
    store_be64(to + 43, (uint64_t)group->producer);
    store_be16(to + 51, (uint16_t)(group->producer < 0 ? -1 : 0));
    store_be32(to + 53, (uint32_t)-1);
    store_be32(to + 57, count);
    store_be32(to + CRC_AT,
               crc32c(0, to + CHECKED_FROM, (size_t)(sink->at - begin - CHECKED_FROM)));
}

/* Writes the batch and ends it. */
static bool close_group(sink_t *sink, const kafka_source_t *source, group_t *group) {
    if (!group->open) return true;
    const uint64_t begin = sink->at, first = group->first_row;
    const int64_t base = group->rows == 0 ? -1 : to_millis(source->timestamp[first]);
    int64_t most = base;
    sink->at += KAFKA_HEADER_BYTES;
    for (uint64_t row = first; row < first + group->rows; row++) {
        sink_t measured = {NULL, 0};
        if (!put_record(&measured, source, group, row, base)) return false;
        put_varint(sink, (int64_t)measured.at);
        if (sink->out == NULL) {
            sink->at += measured.at;
        } else {
            put_record(sink, source, group, row, base);
        }
        const int64_t millis = to_millis(source->timestamp[row]);
        if (millis > most) most = millis;
    }
    const int attributes = group->producer < 0 ? 0 : IS_TRANSACTIONAL;
    seal(sink, begin, group, attributes, base, most, (uint32_t)group->rows);
    group->open = false;
    return true;
}

static void put_control(sink_t *sink, const batch_header_t *header, control_type_t type) {
    /* length, attributes, two deltas, key of 4, value of 6, no headers; all fit one byte */
    const uint8_t record[] = {2 * 16, 0, 0, 0, 2 * 4, 0, 0, 0, (uint8_t)type, 2 * 6,
                              0,      0, 0, 0, 0,     0, 0};
    const group_t group = {.base = header->base_offset,
                           .next = header->base_offset + header->count,
                           .producer = (int64_t)header->txn_id};
    const int64_t millis = to_millis(header->max_timestamp);
    const uint64_t begin = sink->at;
    sink->at += KAFKA_HEADER_BYTES;
    put_bytes(sink, record, sizeof record);
    seal(sink, begin, &group, IS_TRANSACTIONAL | IS_CONTROL, millis, millis, 1);
}

/* Takes a batch of messages, or of nothing, into the one that is being put together. */
static bool take_batch(sink_t *sink, const kafka_source_t *source, group_t *group,
                       const batch_header_t *header, bool is_data, uint64_t *row) {
    const uint64_t next = header->base_offset + header->count;
    const bool undecided = (header->attributes & (BATCH_TRANSACTIONAL | BATCH_DECIDED)) ==
                           BATCH_TRANSACTIONAL;
    const int64_t producer = is_data && undecided ? (int64_t)header->txn_id : -1;
    const bool fits = group->open && group->next == header->base_offset &&
                      (!is_data || group->producer == producer) && group->bytes < BATCH_BYTES &&
                      next - group->base <= INT32_MAX;
    if (!fits) {
        if (!close_group(sink, source, group)) return false;
        *group = (group_t){.base = header->base_offset,
                           .first_row = *row,
                           .producer = producer,
                           .open = true};
    }
    group->next = next;
    group->bytes += header->raw_bytes;
    while (is_data && *row < source->rows && source->offset[*row] < next) {
        if (source->offset[*row] < group->base) return false;
        group->rows++;
        (*row)++;
    }
    return true;
}

static status_t encode(const kafka_source_t *source, sink_t *sink) {
    group_t group = {.open = false};
    batch_header_t header;
    uint64_t row = 0;
    for (size_t at = 0; at < source->log_len; at += header.length) {
        const uint8_t *batch = source->log + at;
        if (batch_parse(batch, source->log_len - at, &header) != STATUS_OK) return STATUS_CORRUPT;
        if (header.base_offset >= source->upto) break;
        control_type_t type = CONTROL_FILLER;
        const bool is_data = (header.attributes & BATCH_CONTROL) == 0;
        if (!is_data) {
            if (header.length < BATCH_HEADER_BYTES + BATCH_CONTROL_BYTES) return STATUS_CORRUPT;
            type = (control_type_t)load_le16(batch + BATCH_HEADER_BYTES + 2);
        }
        if (!is_data && (type == CONTROL_COMMIT || type == CONTROL_ABORT)) {
            if (!close_group(sink, source, &group)) return STATUS_CORRUPT;
            put_control(sink, &header, type);
        } else if (!take_batch(sink, source, &group, &header, is_data, &row)) {
            return STATUS_CORRUPT;
        }
        if (sink->at > INT32_MAX) return STATUS_LIMIT;
    }
    if (row != source->rows || !close_group(sink, source, &group)) return STATUS_CORRUPT;
    return sink->at > INT32_MAX ? STATUS_LIMIT : STATUS_OK;
}

status_t kafka_batches_size(const kafka_source_t *source, uint64_t *out) {
    sink_t sink = {NULL, 0};
    const status_t status = encode(source, &sink);
    *out = sink.at;
    return status;
}

void kafka_batches_encode(const kafka_source_t *source, uint8_t *out, uint64_t len) {
    sink_t sink = {out, 0};
    (void)len;
    encode(source, &sink);
}
