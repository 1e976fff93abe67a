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

static bool head_sane(const uint8_t *value, size_t len, uint16_t schema) {
    return len >= VALUE_HEAD && value[0] == VALUE_VERSION && load_le16(value + 1) == schema;
}

status_t value_rows(const row_layout_t *layout, const row_column_t *values, uint16_t schema,
                    row_slice_t *out, uint32_t *out_bad) {
    const uint64_t end = values->offset + values->length;
    CHECK(values->length <= UINT32_MAX);
    if (values->length == 0) return STATUS_OK;
    if (values->offsets_len / 4 <= end) return STATUS_INPUT;
    if (values->validity != NULL && values->validity_len < bits_bytes(end)) return STATUS_INPUT;
    for (uint32_t i = 0; i < values->length; i++) {
        const uint64_t at = values->offset + i;
        out[i] = (row_slice_t){NULL, 0};
        if (values->validity != NULL && bits_get(values->validity, at) == 0) continue;
        const uint32_t from = load_le32(values->offsets + 4 * at);
        const uint32_t to = load_le32(values->offsets + 4 * at + 4);
        if (from > to || to > values->values_len) return STATUS_INPUT;
        *out_bad = i;
        if (!head_sane(values->values + from, to - from, schema)) return STATUS_CORRUPT;
        out[i] = (row_slice_t){values->values + from + VALUE_HEAD, to - from - VALUE_HEAD};
        if (row_check(layout, out + i, 1) != STATUS_OK) return STATUS_CORRUPT;
    }
    return STATUS_OK;
}
