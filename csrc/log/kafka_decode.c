#include "common/bits.h"
#include "common/bytes.h"
#include "log/kafka.h"

enum { NAMES_MAX = 0xFFFF };

/* What is left of some bytes; `bad` once they were too short or made no sense. */
typedef struct {
    const uint8_t *at;
    const uint8_t *end;
    bool bad;
} cursor_t;

static int64_t take_varint(cursor_t *cursor) {
    uint64_t found = 0;
    for (uint32_t shift = 0; shift < 64 && cursor->at != cursor->end; shift += 7) {
        const uint8_t byte = *cursor->at++;
        found |= (uint64_t)(byte & 0x7F) << shift;
        if (byte < 0x80) return (int64_t)(found >> 1) ^ -(int64_t)(found & 1);
    }
    cursor->bad = true;
    return 0;
}

/* A length and as many bytes; NULL of a null, and of what is too short. */
static const uint8_t *take_bytes(cursor_t *cursor, uint32_t *out_len) {
    const int64_t len = take_varint(cursor);
    *out_len = 0;
    if (len < -1 || len > cursor->end - cursor->at || len > INT32_MAX) cursor->bad = true;
    if (cursor->bad || len == -1) return NULL;
    const uint8_t *bytes = cursor->at;
    cursor->at += len;
    *out_len = (uint32_t)len;
    return bytes;
}

typedef struct {
    int64_t millis; /* behind the batch's base */
    int64_t number;
    const uint8_t *key, *value;
    uint32_t key_len, value_len;
    int64_t n_headers;
    cursor_t headers; /* to the end of the record */
} record_t;

static void take_record(cursor_t *cursor, record_t *out) {
    const int64_t len = take_varint(cursor);
    *out = (record_t){.number = -1};
    if (len < 1 || len > cursor->end - cursor->at) cursor->bad = true;
    if (cursor->bad) return;
    cursor_t inside = {cursor->at + 1, cursor->at + len, false};
    cursor->at += len;
    out->millis = take_varint(&inside);
    out->number = take_varint(&inside);
    out->key = take_bytes(&inside, &out->key_len);
    out->value = take_bytes(&inside, &out->value_len);
    out->n_headers = take_varint(&inside);
    out->headers = inside;
    cursor->bad = inside.bad;
}

/* Bytes that the headers of a record take as ours. */
static status_t size_headers(const record_t *record, uint64_t *bytes) {
    cursor_t cursor = record->headers;
    if (record->n_headers < 0) return STATUS_CORRUPT;
    if (record->n_headers > NAMES_MAX) return STATUS_LIMIT;
    if (record->n_headers != 0) *bytes += 2;
    for (int64_t i = 0; i < record->n_headers; i++) {
        uint32_t name_len, value_len;
        const uint8_t *name = take_bytes(&cursor, &name_len);
        take_bytes(&cursor, &value_len);
        if (cursor.bad || name == NULL) return STATUS_CORRUPT;
        if (name_len > NAMES_MAX) return STATUS_LIMIT;
        *bytes += 6 + (uint64_t)name_len + value_len;
    }
    return cursor.at == cursor.end ? STATUS_OK : STATUS_CORRUPT;
}

static bool to_micros(int64_t base, int64_t millis, int64_t *out) {
    int64_t sum;
    if (__builtin_add_overflow(base, millis, &sum)) return false;
    return !__builtin_mul_overflow(sum, (int64_t)1000, out);
}

status_t kafka_records_size(const uint8_t *bytes, size_t len, uint32_t count, int64_t base_millis,
                            kafka_sizes_t *out) {
    cursor_t cursor = {bytes, bytes + len, false};
    kafka_sizes_t sizes = {.value_bytes = 0};
    record_t record;
    int64_t micros;
    for (uint32_t i = 0; i < count; i++) {
        take_record(&cursor, &record);
        if (cursor.bad || record.number != i) return STATUS_CORRUPT;
        if (!to_micros(base_millis, record.millis, &micros)) return STATUS_LIMIT;
        const status_t status = size_headers(&record, &sizes.header_bytes);
        if (status != STATUS_OK) return status;
        sizes.value_bytes += record.value_len;
        sizes.key_bytes += record.key_len;
        sizes.null_values += record.value == NULL;
        sizes.null_keys += record.key == NULL;
        sizes.null_headers += record.n_headers == 0;
    }
    if (cursor.at != cursor.end) return STATUS_CORRUPT;
    if (sizes.value_bytes > INT32_MAX || sizes.key_bytes > INT32_MAX) return STATUS_LIMIT;
    if (sizes.header_bytes > INT32_MAX) return STATUS_LIMIT;
    *out = sizes;
    return STATUS_OK;
}

static void put_bit(uint8_t *bits, uint32_t i, bool value) {
    if (i % 8 == 0) bits[i / 8] = 0;
    bits[i / 8] |= (uint8_t)(value ? 1u << (i % 8) : 0);
}

static void put_bytes(uint8_t *validity, uint32_t *ends, uint8_t *bytes, uint32_t i,
                      const uint8_t *from, uint32_t len) {
    put_bit(validity, i, from != NULL);
    copy_bytes(bytes + ends[i], from, len);
    ends[i + 1] = ends[i] + len;
}

static void put_headers(const record_t *record, const kafka_columns_t *out, uint32_t i) {
    cursor_t cursor = record->headers;
    uint8_t *to = out->headers + out->header_ends[i];
    if (record->n_headers != 0) {
        store_le16(to, (uint16_t)record->n_headers);
        to += 2;
    }
    for (int64_t n = 0; n < record->n_headers; n++) {
        uint32_t len;
        const uint8_t *name = take_bytes(&cursor, &len);
        store_le16(to, (uint16_t)len);
        copy_bytes(to + 2, name, len);
        to += 2 + len;
        const uint8_t *value = take_bytes(&cursor, &len); /* a null is no bytes */
        store_le32(to, len);
        copy_bytes(to + 4, value, len);
        to += 4 + (size_t)len;
    }
    put_bit(out->header_validity, i, record->n_headers != 0);
    out->header_ends[i + 1] = (uint32_t)(to - out->headers);
}

void kafka_records_decode(const uint8_t *bytes, size_t len, uint32_t count, int64_t base_millis,
                          const kafka_columns_t *out) {
    cursor_t cursor = {bytes, bytes + len, false};
    record_t record;
    out->value_ends[0] = out->key_ends[0] = out->header_ends[0] = 0;
    for (uint32_t i = 0; i < count; i++) {
        take_record(&cursor, &record);
        to_micros(base_millis, record.millis, out->timestamp + i);
        put_bytes(out->value_validity, out->value_ends, out->values, i, record.value,
                  record.value_len);
        put_bytes(out->key_validity, out->key_ends, out->keys, i, record.key, record.key_len);
        put_headers(&record, out, i);
    }
}
