#include "common/check.h"
#include "log/messages.h"
#include "log/messages_body.h"

#include <stdbool.h>

static bool present(const messages_column_t *column) { return column->offsets != NULL; }

static bool is_null(const messages_column_t *column, uint64_t row) {
    return column->validity != NULL && bits_get(column->validity, column->offset + row) == 0;
}

static const uint8_t *starts_of(const messages_column_t *column) {
    return column->offsets + 4 * column->offset;
}

/* Sums what is not null, whatever Arrow's offsets say of nulls. */
static uint64_t sum_valid(const messages_column_t *column, uint32_t rows) {
    const uint8_t *starts = starts_of(column);
    uint64_t sum = 0;
    for (uint32_t i = 0; i < rows; i++) {
        const uint8_t *start = starts + 4 * (size_t)i;
        if (!is_null(column, i)) sum += load_le32(start + 4) - load_le32(start);
    }
    return sum;
}

static status_t plan_strings(const messages_column_t *column, uint32_t rows, uint32_t *out_nulls,
                             uint32_t *out_bytes) {
    const uint64_t end = column->offset + rows;
    *out_nulls = rows;
    *out_bytes = 0;
    if (!present(column) || rows == 0) return STATUS_OK;
    if (column->offsets_len / 4 <= end) return STATUS_INPUT;
    if (column->validity != NULL && column->validity_len < bits_bytes(end)) return STATUS_INPUT;
    const uint8_t *starts = starts_of(column);
    uint32_t bad = 0;
    for (size_t i = 0; i < rows; i++) {
        bad |= load_le32(starts + 4 * i) > load_le32(starts + 4 * i + 4);
    }
    const uint32_t last = load_le32(starts + 4 * (size_t)rows);
    if (bad != 0 || last > column->values_len) return STATUS_INPUT;
    *out_nulls = column->validity == NULL
                     ? 0
                     : rows - (uint32_t)bits_count(column->validity, column->offset, rows);
    *out_bytes = last - load_le32(starts);
    if (*out_nulls != 0) *out_bytes = (uint32_t)sum_valid(column, rows);
    return *out_bytes <= INT32_MAX ? STATUS_OK : STATUS_LIMIT;
}

static int64_t time_at(const messages_t *messages, uint32_t row) {
    const messages_column_t *times = &messages->times;
    if (is_null(times, row)) return messages->timestamp;
    return (int64_t)load_le64(times->values + 8 * (times->offset + row));
}

static status_t plan_times(const messages_t *messages, messages_plan_t *plan) {
    const messages_column_t *times = &messages->times;
    const uint64_t end = times->offset + messages->rows;
    plan->base_timestamp = plan->max_timestamp = messages->timestamp;
    if (times->values == NULL || messages->rows == 0) return STATUS_OK;
    if (times->values_len / 8 < end) return STATUS_INPUT;
    if (times->validity != NULL && times->validity_len < bits_bytes(end)) return STATUS_INPUT;
    int64_t least = time_at(messages, 0), most = least;
    for (uint32_t i = 1; i < messages->rows; i++) {
        const int64_t time = time_at(messages, i);
        least = time < least ? time : least;
        most = time > most ? time : most;
    }
    plan->base_timestamp = least;
    plan->max_timestamp = most;
    if (least != most) plan->attributes |= BATCH_TIMES;
    return STATUS_OK;
}

static bool places_ascend(const messages_t *messages) {
    const uint8_t *places = messages->places;
    for (size_t i = 1; places != NULL && i < messages->rows; i++) {
        if (load_le32(places + 4 * i) <= load_le32(places + 4 * i - 4)) return false;
    }
    return true;
}

status_t messages_plan(const messages_t *messages, messages_plan_t *out) {
    const uint32_t rows = messages->rows;
    messages_plan_t plan = {.rows = rows};
    uint32_t null_values, null_keys, null_headers;
    if (rows > BATCH_COUNT_MAX) return STATUS_LIMIT;
    if (!places_ascend(messages)) return STATUS_INPUT;
    status_t status = plan_strings(&messages->value, rows, &null_values, &plan.value_bytes);
    if (status == STATUS_OK) {
        status = plan_strings(&messages->key, rows, &null_keys, &plan.key_bytes);
    }
    if (status == STATUS_OK) {
        status = plan_strings(&messages->headers, rows, &null_headers, &plan.header_bytes);
    }
    if (status == STATUS_OK) status = plan_times(messages, &plan);
    if (status != STATUS_OK) return status;
    if (null_values != 0) plan.attributes |= BATCH_NULL_VALUES;
    if (null_keys != rows) plan.attributes |= BATCH_KEYS;
    if (plan.header_bytes != 0) plan.attributes |= BATCH_HEADERS;
    if (messages->places != NULL) plan.attributes |= BATCH_PLACES;
    const uint64_t raw = messages_places(plan.attributes, rows).values +
                         round_up_8(plan.value_bytes) + round_up_8(plan.key_bytes) +
                         round_up_8(plan.header_bytes);
    if (raw > INT32_MAX - BATCH_HEADER_BYTES - BATCH_CHUNK_BYTES) return STATUS_LIMIT;
    plan.raw_bytes = (uint32_t)raw;
    *out = plan;
    return STATUS_OK;
}

static void pad(uint8_t *out, uint64_t len) {
    memset(out + len, 0, (size_t)(round_up_8(len) - len));
}

static void write_bits(const messages_column_t *column, uint32_t rows, uint8_t *out) {
    const uint64_t len = bits_bytes(rows);
    if (!present(column)) {
        memset(out, 0, (size_t)len);
    } else if (column->validity == NULL) {
        for (uint32_t i = 0; i < rows; i += 64) {
            const unsigned count = rows - i < 64 ? rows - i : 64;
            bits_store(out, i, UINT64_MAX >> (64 - count), count);
        }
    } else {
        bits_copy(column->validity, column->offset, out, rows);
    }
    pad(out, len);
}

/* One by one, as the bytes under a null are left out. */
static void write_gaps(const messages_column_t *column, uint32_t rows, uint8_t *ends,
                       uint8_t *out) {
    const uint8_t *starts = starts_of(column);
    uint32_t at = 0;
    for (uint32_t i = 0; i < rows; i++) {
        const uint32_t from = load_le32(starts + 4 * (size_t)i);
        const uint32_t len = load_le32(starts + 4 * (size_t)i + 4) - from;
        if (!is_null(column, i)) {
            copy_bytes(out + at, column->values + from, len);
            at += len;
        }
        store_le32(ends + 4 * (size_t)i + 4, at);
    }
}

static void write_strings(const messages_column_t *column, uint32_t rows, uint32_t bytes,
                          uint8_t *ends, uint8_t *out) {
    pad(ends, 4 * ((uint64_t)rows + 1));
    pad(out, bytes);
    store_le32(ends, 0);
    if (rows == 0) return;
    if (!present(column)) {
        memset(ends, 0, 4 * ((size_t)rows + 1));
        return;
    }
    const uint8_t *starts = starts_of(column);
    const uint32_t first = load_le32(starts);
    if (load_le32(starts + 4 * (size_t)rows) - first != bytes) {
        write_gaps(column, rows, ends, out);
        return;
    }
    for (size_t i = 1; i <= rows; i++) store_le32(ends + 4 * i, load_le32(starts + 4 * i) - first);
    copy_bytes(out, column->values + first, bytes);
}

void messages_encode(const messages_t *messages, const messages_plan_t *plan, uint8_t *out,
                     size_t out_len) {
    const uint32_t rows = plan->rows, flags = plan->attributes;
    const messages_places_t places = messages_places(flags, rows);
    uint8_t *values = out + places.values, *keys = values + round_up_8(plan->value_bytes);
    uint8_t *headers = keys + round_up_8(plan->key_bytes);
    CHECK(out_len == plan->raw_bytes && rows == messages->rows);
    write_strings(&messages->value, rows, plan->value_bytes, out + places.value_ends, values);
    if ((flags & BATCH_NULL_VALUES) != 0) {
        write_bits(&messages->value, rows, out + places.value_bits);
    }
    if ((flags & BATCH_KEYS) != 0) {
        write_bits(&messages->key, rows, out + places.key_bits);
        write_strings(&messages->key, rows, plan->key_bytes, out + places.key_ends, keys);
    }
    if ((flags & BATCH_HEADERS) != 0) {
        write_strings(&messages->headers, rows, plan->header_bytes, out + places.header_ends,
                      headers);
    }
    for (uint32_t i = 0; (flags & BATCH_TIMES) != 0 && i < rows; i++) {
        store_le64(out + places.times + 8 * (size_t)i, (uint64_t)time_at(messages, i));
    }
    if ((flags & BATCH_PLACES) == 0) return;
    copy_bytes(out + places.places, messages->places, 4 * (size_t)rows);
    pad(out + places.places, 4 * (uint64_t)rows);
}
