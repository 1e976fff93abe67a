#include "codec/keys_inline.h"
#include "common/bits.h"
#include "rowset/unpack.h"

/* Offsets of some rows of BLOCK_ENDS; a frame has the numbers of rows [lo, lo + 1024). */
static status_t packed_offsets(const block_t *block, uint32_t lo, uint32_t n, uint32_t *out) {
    uint64_t numbers[PACKED_FRAME], base = 0, last = 0;
    for (uint32_t done = 0, some; done <= n; done += some) {
        const uint32_t skip = (lo + done) % PACKED_FRAME;
        const uint32_t count = packed_frame(block->numbers, (lo + done) / PACKED_FRAME, numbers);
        if (count <= skip) return STATUS_CORRUPT;
        some = count - skip < n + 1 - done ? count - skip : n + 1 - done;
        if (done == 0) base = last = numbers[skip];
        for (uint32_t i = 0; i < some; i++) {
            const uint64_t number = numbers[skip + i];
            if (number < last || number > block->data_len) return STATUS_CORRUPT;
            out[done + i] = (uint32_t)(number - base);
            last = number;
        }
        if (last - base > UINT32_MAX) return STATUS_LIMIT;
        if (done + some > n) break;
    }
    return STATUS_OK;
}

static bool is_null(const block_t *block, uint32_t row) {
    return block->validity != NULL && !bits_get(block->validity, row);
}

/* The value of a dictionary; false when its offsets fall. */
static bool entry(const block_t *block, uint64_t code, slice_t *out) {
    if (code >= block->values) return false;
    const uint8_t *ends = block->offsets + 4 * (size_t)code;
    const uint32_t from = load_le32(ends), to = load_le32(ends + 4);
    *out = (slice_t){block->data + from, to - from};
    return from <= to && to <= block->data_len;
}

/* Short values are copied as 16 bytes where there is room for these: one move for most. */
static void copy_short(slice_t value, const uint8_t *end, uint8_t *to, size_t room) {
    if (value.len <= 16 && room >= 16 && (size_t)(end - value.data) >= 16) {
        memcpy(to, value.data, 16);
    } else {
        copy_bytes(to, value.data, value.len);
    }
}

/* Where the values of coded rows go; NULL: they are counted. */
typedef struct {
    uint32_t *offsets;
    uint8_t *out;
    size_t len;
    uint64_t end;
} strings_t;

static status_t count_coded(const block_t *block, const uint64_t *codes, uint32_t row, uint32_t n,
                            uint64_t *end) {
    uint64_t sum = 0;
    for (uint32_t i = 0; i < n; i++) {
        slice_t value;
        if (!entry(block, codes[i], &value)) return STATUS_CORRUPT;
        sum += is_null(block, row + i) ? 0 : value.len;
    }
    *end += sum;
    return *end > UINT32_MAX ? STATUS_LIMIT : STATUS_OK;
}

static status_t put_coded_strings(const block_t *block, const uint64_t *codes, uint32_t row,
                                  uint32_t n, strings_t *to) {
    const uint8_t *const last = block->data + block->data_len;
    uint8_t *const out = to->out;
    uint32_t *const offsets = to->offsets;
    const size_t room = to->len;
    size_t end = to->end;
    for (uint32_t i = 0; i < n; i++) {
        slice_t value;
        if (!entry(block, codes[i], &value)) return STATUS_CORRUPT;
        if (is_null(block, row + i)) value.len = 0;
        if (value.len > room - end) return STATUS_CORRUPT;
        copy_short(value, last, out + end, room - end);
        end += value.len;
        offsets[i + 1] = (uint32_t)end;
    }
    to->end = end;
    to->offsets += n;
    return end > UINT32_MAX ? STATUS_LIMIT : STATUS_OK;
}

static status_t coded_strings(const block_t *block, uint32_t lo, uint32_t n, strings_t *to) {
    uint64_t codes[PACKED_FRAME];
    for (uint32_t done = 0, some; done < n; done += some) {
        const uint32_t skip = (lo + done) % PACKED_FRAME;
        const uint32_t count = packed_frame(block->numbers, (lo + done) / PACKED_FRAME, codes);
        if (count <= skip) return STATUS_CORRUPT;
        some = count - skip < n - done ? count - skip : n - done;
        const status_t status =
            to->offsets == NULL ? count_coded(block, codes + skip, lo + done, some, &to->end)
                                : put_coded_strings(block, codes + skip, lo + done, some, to);
        if (status != STATUS_OK) return status;
    }
    return STATUS_OK;
}

static status_t ends_range(const block_t *block, uint32_t lo, uint32_t n, uint64_t *out_from,
                           uint64_t *out_size) {
    uint64_t to;
    if (packed_get(block->numbers, lo, out_from) != STATUS_OK) return STATUS_CORRUPT;
    if (packed_get(block->numbers, lo + n, &to) != STATUS_OK) return STATUS_CORRUPT;
    *out_size = to - *out_from;
    return *out_from <= to && to <= block->data_len ? STATUS_OK : STATUS_CORRUPT;
}

status_t unpack_size(const block_t *block, uint32_t lo, uint32_t n, uint64_t *out_size) {
    uint64_t from;
    strings_t none = {0};
    if (block->kind != BLOCK_VARLEN) return STATUS_CORRUPT;
    if (block->encoding == BLOCK_ENDS) return ends_range(block, lo, n, &from, out_size);
    if (block->encoding != BLOCK_DICTIONARY) return STATUS_CORRUPT;
    const status_t status = coded_strings(block, lo, n, &none);
    *out_size = none.end;
    return status;
}

status_t unpack_varlen(const block_t *block, uint32_t lo, uint32_t n, uint32_t *out_offsets,
                       uint8_t *out, size_t out_len) {
    uint64_t from, size;
    if (block->kind != BLOCK_VARLEN) return STATUS_CORRUPT;
    out_offsets[0] = 0;
    if (block->encoding == BLOCK_DICTIONARY) {
        strings_t to = {out_offsets, out, out_len, 0};
        return coded_strings(block, lo, n, &to);
    }
    if (block->encoding != BLOCK_ENDS) return STATUS_CORRUPT;
    status_t status = ends_range(block, lo, n, &from, &size);
    if (status == STATUS_OK) status = packed_offsets(block, lo, n, out_offsets);
    if (status != STATUS_OK) return status;
    if (size > out_len || out_offsets[n] != size) return STATUS_CORRUPT;
    copy_bytes(out, block->data + from, size);
    return STATUS_OK;
}
