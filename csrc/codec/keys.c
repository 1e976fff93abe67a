#include "codec/keys.h"

#include "codec/keys_inline.h"
#include "common/check.h"
#include "common/rows.h"

status_t keys_check(const keys_t *keys) {
    if (keys->offsets == NULL) {
        return keys->data_len / (keys->width == 0 ? 1 : keys->width) >= keys->n ? STATUS_OK
                                                                                : STATUS_CORRUPT;
    }
    const uint8_t *at = keys->offsets;
    uint32_t falls = 0;
    for (size_t i = 0; i < keys->n; i++) falls |= load_le32(at + 4 * i) > load_le32(at + 4 * i + 4);
    const uint32_t end = load_le32(at + 4 * (size_t)keys->n);
    return falls == 0 && end <= keys->data_len ? STATUS_OK : STATUS_CORRUPT;
}

status_t keys_gather_size(const keys_t *keys, const uint32_t *rows, uint32_t m,
                          uint64_t *out_size) {
    if (!rows_below(rows, m, keys->n)) return STATUS_RANGE;
    uint64_t size = (uint64_t)m * keys->width;
    if (keys->offsets != NULL) {
        for (uint32_t i = 0; i < m; i++) size += keys_at(keys, rows[i]).len;
        if (size > UINT32_MAX) return STATUS_LIMIT;
    }
    *out_size = size;
    return STATUS_OK;
}

/* Called with a constant `width` for the common ones, so that each copy is one move. */
static inline void gather_fixed(const uint8_t *data, const uint32_t *rows, uint32_t m,
                                uint8_t *out, size_t width) {
    for (size_t i = 0; i < m; i++) memcpy(out + i * width, data + rows[i] * width, width);
}

status_t keys_gather(const keys_t *keys, const uint32_t *rows, uint32_t m, uint8_t *out,
                     size_t out_len, uint32_t *out_offsets) {
    uint64_t size;
    const status_t status = keys_gather_size(keys, rows, m, &size);
    if (status != STATUS_OK) return status;
    CHECK(size <= out_len);
    if (keys->offsets == NULL) {
        if (m == 0 || keys->width == 0) return STATUS_OK;
        switch (keys->width) {
            case 4: gather_fixed(keys->data, rows, m, out, 4); break;
            case 8: gather_fixed(keys->data, rows, m, out, 8); break;
            case 16: gather_fixed(keys->data, rows, m, out, 16); break;
            default: gather_fixed(keys->data, rows, m, out, keys->width);
        }
        return STATUS_OK;
    }
    uint32_t at = 0;
    out_offsets[0] = 0;
    for (uint32_t i = 0; i < m; i++) {
        const slice_t key = keys_at(keys, rows[i]);
        copy_bytes(out + at, key.data, key.len);
        at += (uint32_t)key.len;
        out_offsets[i + 1] = at;
    }
    return STATUS_OK;
}

uint64_t keys_data_len(const keys_t *keys) {
    if (keys->offsets == NULL) return (uint64_t)keys->n * keys->width;
    return load_le32(keys->offsets + 4 * (size_t)keys->n) - load_le32(keys->offsets);
}

void keys_copy(const keys_t *keys, uint32_t base, uint8_t *out, uint32_t *out_offsets) {
    const size_t len = (size_t)keys_data_len(keys);
    if (keys->offsets == NULL) {
        copy_bytes(out, keys->data, len);
        return;
    }
    const uint32_t from = load_le32(keys->offsets);
    copy_bytes(out, keys->data + from, len);
    for (size_t i = 1; i <= keys->n; i++) {
        out_offsets[i] = load_le32(keys->offsets + 4 * i) - from + base;
    }
}
