#include "codec/keys.h"
#include "codec/keys_inline.h"
#include "common/check.h"
#include "common/rows.h"

status_t keys_but_size(const keys_t *keys, uint32_t lo, uint32_t n, const uint32_t *gone,
                       uint32_t gone_n, uint64_t *out_size) {
    const rows_but_t rows = {gone, gone_n, lo, n};
    if (!rows_but_sane(rows, keys->n)) return STATUS_RANGE;
    if (keys->offsets == NULL) {
        *out_size = (uint64_t)(n - gone_n) * keys->width;
        return STATUS_OK;
    }
    const uint8_t *ends = keys->offsets + 4 * (size_t)lo;
    uint64_t size = load_le32(ends + 4 * (size_t)n) - load_le32(ends);
    for (uint32_t i = 0; i < gone_n; i++) size -= keys_at(keys, gone[i]).len;
    *out_size = size;
    return STATUS_OK;
}

static void copy_run(const keys_t *keys, rows_run_t run, uint32_t end, uint8_t *out,
                     uint32_t *out_offsets) {
    const uint8_t *ends = keys->offsets + 4 * (size_t)run.lo;
    const uint32_t from = load_le32(ends);
    for (size_t k = 1; k <= run.n; k++) out_offsets[k] = load_le32(ends + 4 * k) - from + end;
    copy_bytes(out + end, keys->data + from, load_le32(ends + 4 * (size_t)run.n) - from);
}

status_t keys_but(const keys_t *keys, uint32_t lo, uint32_t n, const uint32_t *gone,
                  uint32_t gone_n, uint8_t *out, size_t out_len, uint32_t *out_offsets) {
    const rows_but_t rows = {gone, gone_n, lo, n};
    uint64_t size;
    const status_t status = keys_but_size(keys, lo, n, gone, gone_n, &size);
    if (status != STATUS_OK) return status;
    CHECK(size <= out_len);
    if (keys->offsets != NULL) *out_offsets = 0;
    for (uint32_t i = 0; i <= gone_n; i++) {
        const rows_run_t run = rows_run(rows, i);
        if (keys->offsets != NULL) {
            copy_run(keys, run, *out_offsets, out, out_offsets);
            out_offsets += run.n;
        } else {
            const size_t len = (size_t)run.n * keys->width;
            copy_bytes(out, keys->data + (size_t)run.lo * keys->width, len);
            out += len;
        }
    }
    return STATUS_OK;
}
