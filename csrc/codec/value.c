#include "codec/value.h"

#include "common/bits.h"
#include "common/check.h"

#include <stdbool.h>

status_t value_encode_size(const row_layout_t *layout, const row_column_t *columns,
                           const uint32_t *rows, uint32_t n, uint32_t *out_offsets) {
    const status_t status = row_encode_size(layout, columns, rows, n, out_offsets);
    if (status != STATUS_OK) return status;
    if ((uint64_t)out_offsets[n] + (uint64_t)VALUE_HEAD * n > INT32_MAX) return STATUS_LIMIT;
    for (uint32_t i = 1; i <= n; i++) out_offsets[i] += VALUE_HEAD * i;
    return STATUS_OK;
}

void value_encode(const row_layout_t *layout, const row_column_t *columns, const uint32_t *rows,
                  uint32_t n, uint16_t schema, const uint32_t *offsets, uint8_t *out,
                  size_t out_len) {
    CHECK((uint64_t)offsets[n] + VALUE_HEAD <= out_len);
    /* Each row begins behind its head: the same offsets, of an output that begins later. */
    row_encode(layout, columns, rows, n, offsets, out + VALUE_HEAD, out_len - VALUE_HEAD);
    for (uint32_t i = 0; i < n; i++) {
        out[offsets[i]] = VALUE_VERSION;
        store_le16(out + offsets[i] + 1, schema);
    }
}

static status_t check_buffers(const row_column_t *values) {
    const uint64_t end = values->offset + values->length;
    CHECK(values->length < UINT32_MAX);
    if (values->length == 0) return STATUS_OK;
    if (values->offsets_len / 4 <= end) return STATUS_INPUT;
    if (values->validity != NULL && values->validity_len < bits_bytes(end)) return STATUS_INPUT;
    return STATUS_OK;
}

static const uint8_t EMPTY[1] = {0}; /* what has no bytes is no null */

/* Value i; data is NULL where it is null. INPUT: it is not within the buffer. */
static status_t value_at(const row_column_t *values, uint32_t i, row_slice_t *out) {
    const uint64_t at = values->offset + i;
    *out = (row_slice_t){NULL, 0};
    if (values->validity != NULL && bits_get(values->validity, at) == 0) return STATUS_OK;
    const uint32_t from = load_le32(values->offsets + 4 * at);
    const uint32_t to = load_le32(values->offsets + 4 * at + 4);
    if (from > to || to > values->values_len) return STATUS_INPUT;
    *out = (row_slice_t){from == to ? EMPTY : values->values + from, to - from};
    return STATUS_OK;
}

static bool head_sane(row_slice_t value, uint16_t schema) {
    return value.len >= VALUE_HEAD && value.data[0] == VALUE_VERSION &&
           load_le16(value.data + 1) == schema;
}

status_t value_rows(const row_layout_t *layout, const row_column_t *values, uint16_t schema,
                    row_slice_t *out, uint32_t *out_bad) {
    status_t status = check_buffers(values);
    for (uint32_t i = 0; status == STATUS_OK && i < values->length; i++) {
        status = value_at(values, i, out + i);
        if (status != STATUS_OK || out[i].data == NULL) continue;
        *out_bad = i;
        if (!head_sane(out[i], schema)) return STATUS_CORRUPT;
        out[i] = (row_slice_t){out[i].data + VALUE_HEAD, out[i].len - VALUE_HEAD};
        status = row_check(layout, out + i, 1);
    }
    return status;
}

/* Bytes of the element at the beginning of a list's rest; 0 when there is none. */
static size_t element_len(const row_layout_t *element, row_slice_t rest) {
    if (rest.len < element->head) return 0;
    const size_t left = rest.len - element->head;
    const uint32_t end =
        element->ends == element->head ? 0 : load_le32(rest.data + element->head - 4);
    return end > left ? 0 : element->head + end;
}

status_t value_list_offsets(const row_layout_t *element, const row_column_t *lists,
                            uint32_t *out_offsets, uint32_t *out_bad) {
    CHECK(element->n == 1);
    status_t status = check_buffers(lists);
    out_offsets[0] = 0;
    for (uint32_t i = 0; status == STATUS_OK && i < lists->length; i++) {
        row_slice_t rest;
        status = value_at(lists, i, &rest);
        out_offsets[i + 1] = out_offsets[i];
        while (status == STATUS_OK && rest.len != 0) {
            const size_t len = element_len(element, rest);
            if (len == 0) {
                *out_bad = i;
                return STATUS_CORRUPT;
            }
            rest = (row_slice_t){rest.data + len, rest.len - len};
            out_offsets[i + 1]++;
        }
    }
    return status;
}

void value_list_rows(const row_layout_t *element, const row_column_t *lists, row_slice_t *out) {
    for (uint32_t i = 0; i < lists->length; i++) {
        row_slice_t rest;
        CHECK(value_at(lists, i, &rest) == STATUS_OK);
        while (rest.len != 0) {
            const size_t len = element_len(element, rest);
            CHECK(len != 0);
            *out++ = (row_slice_t){rest.data, len};
            rest = (row_slice_t){rest.data + len, rest.len - len};
        }
    }
}
