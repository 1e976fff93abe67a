#include "common/alloc.h"
#include "common/bits.h"
#include "common/check.h"
#include "common/rows.h"
#include "rowset/access.h"
#include "rowset/unpack.h"

static uint32_t value_start(const block_t *block, uint32_t row) {
    return load_le32(block->offsets + 4 * (size_t)row);
}

static status_t varlen_size(const block_t *block, rows_but_t rows, uint64_t *out_size) {
    const uint32_t from = value_start(block, rows.lo);
    const uint8_t *at = block->offsets + 4 * (size_t)rows.lo;
    uint32_t falls = 0;
    for (size_t i = 0; i < rows.n; i++) falls |= load_le32(at + 4 * i) > load_le32(at + 4 * i + 4);
    const uint32_t end = value_start(block, rows.lo + rows.n);
    if (falls != 0 || end > block->data_len) return STATUS_CORRUPT;
    uint64_t size = end - from;
    for (uint32_t i = 0; i < rows.gone_n; i++) {
        size -= value_start(block, rows.gone[i] + 1) - value_start(block, rows.gone[i]);
    }
    *out_size = size;
    return size <= INT32_MAX ? STATUS_OK : STATUS_LIMIT;
}

static status_t light_size(const block_t *block, rows_but_t rows, uint64_t *out_size) {
    access_value_t value;
    status_t status = unpack_size(block, rows.lo, rows.n, out_size);
    for (uint32_t i = 0; status == STATUS_OK && i < rows.gone_n; i++) {
        status = access_value(block, rows.gone[i], &value);
        if (status == STATUS_OK && value.len > *out_size) status = STATUS_CORRUPT;
        if (status == STATUS_OK) *out_size -= value.len;
    }
    if (status != STATUS_OK) return status;
    return *out_size <= INT32_MAX ? STATUS_OK : STATUS_LIMIT;
}

static status_t measure(const block_t *block, rows_but_t rows, uint64_t *out_size) {
    if (!rows_but_sane(rows, block->rows)) return STATUS_RANGE;
    const uint32_t left = rows.n - rows.gone_n;
    switch (block->kind) {
        case BLOCK_FIXED: *out_size = (uint64_t)left * block->width; return STATUS_OK;
        case BLOCK_BIT: *out_size = bits_bytes(left); return STATUS_OK;
        case BLOCK_VARLEN:
            return block->encoding == BLOCK_PLAIN ? varlen_size(block, rows, out_size)
                                                  : light_size(block, rows, out_size);
        case BLOCK_OPAQUE: break;
    }
    return STATUS_CORRUPT;
}

status_t block_decode_but_size(const block_t *block, uint32_t lo, uint32_t n,
                               const uint32_t *gone, uint32_t gone_n, uint64_t *out_size) {
    const rows_but_t rows = {gone, gone_n, lo, n};
    return measure(block, rows, out_size);
}

/* Returns how many bits are set. */
static uint32_t copy_bits(const uint8_t *bits, rows_but_t rows, uint8_t *out) {
    uint32_t at = 0, set = 0;
    if (rows.n != rows.gone_n) memset(out, 0, bits_bytes(rows.n - rows.gone_n));
    for (uint32_t i = 0; i <= rows.gone_n; i++) {
        const rows_run_t run = rows_run(rows, i);
        for (uint32_t done = 0; done < run.n; done += 64) {
            const unsigned count = run.n - done < 64 ? run.n - done : 64;
            const uint64_t word = bits_load(bits, (uint64_t)run.lo + done, count);
            bits_append(out, at, word, count);
            set += (uint32_t)__builtin_popcountll(word);
            at += count;
        }
    }
    return set;
}

static void copy_fixed(const block_t *block, rows_but_t rows, uint8_t *out) {
    const size_t width = block->width;
    for (uint32_t i = 0; i <= rows.gone_n; i++) {
        const rows_run_t run = rows_run(rows, i);
        copy_bytes(out, block->data + run.lo * width, run.n * width);
        out += run.n * width;
    }
}

static void copy_varlen(const block_t *block, rows_but_t rows, uint32_t *offsets, uint8_t *out) {
    uint32_t end = 0;
    *offsets++ = 0;
    for (uint32_t i = 0; i <= rows.gone_n; i++) {
        const rows_run_t run = rows_run(rows, i);
        const uint32_t from = value_start(block, run.lo);
        const uint8_t *ends = block->offsets + 4 * ((size_t)run.lo + 1);
        for (size_t k = 0; k < run.n; k++) offsets[k] = load_le32(ends + 4 * k) - from + end;
        const uint32_t len = value_start(block, run.lo + run.n) - from;
        copy_bytes(out + end, block->data + from, len);
        end += len;
        offsets += run.n;
    }
}

status_t block_decode_but(const block_t *block, uint32_t lo, uint32_t n, const uint32_t *gone,
                          uint32_t gone_n, uint8_t *out_validity, uint32_t *out_offsets,
                          uint8_t *out_values, size_t out_len, uint32_t *out_null_count) {
    const rows_but_t rows = {gone, gone_n, lo, n};
    uint64_t size;
    status_t status = measure(block, rows, &size);
    if (status != STATUS_OK) return status;
    CHECK(size <= out_len);
    block_t plain;
    void *memory;
    status = unpack_block(block, &plain, &memory);
    if (status != STATUS_OK) return status;
    block = &plain;
    *out_null_count = 0;
    if (block->validity != NULL) {
        *out_null_count = n - gone_n - copy_bits(block->validity, rows, out_validity);
    }
    switch (block->kind) {
        case BLOCK_FIXED: copy_fixed(block, rows, out_values); break;
        case BLOCK_BIT: copy_bits(block->data, rows, out_values); break;
        case BLOCK_VARLEN: copy_varlen(block, rows, out_offsets, out_values); break;
        case BLOCK_OPAQUE: break;
    }
    alloc_free(memory);
    return STATUS_OK;
}
