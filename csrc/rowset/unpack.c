#include "rowset/unpack.h"

#include <stdbool.h>

#include "codec/keys_inline.h"
#include "common/alloc.h"
#include "common/bits.h"
#include "common/check.h"
#include "common/rows.h"
#include "rowset/unpack_inline.h"

/* -- numbers to values ----------------------------------------------------------- */

/* All but the numbers are constants at each call: loops of their own. */
static inline void put_each(const uint64_t *numbers, uint32_t n, uint32_t bytes, uint32_t keys,
                            size_t step, uint8_t *out) {
    for (uint32_t i = 0; i < n; i++) unpack_store(numbers[i], bytes, keys, out + i * step);
}

static void put_keys(const uint64_t *numbers, uint32_t n, uint32_t bytes, size_t step,
                     uint8_t *out) {
    if (bytes == 8 && step == 8) {
        put_each(numbers, n, 8, 1, 8, out);
    } else if (bytes == 4 && step == 4) {
        put_each(numbers, n, 4, 1, 4, out);
    } else if (bytes == 8 && step == 16) {
        put_each(numbers, n, 8, 1, 16, out);
    } else {
        put_each(numbers, n, bytes, 1, step, out);
    }
}

/* Numbers as the values of a column, or word by word, `step` bytes from each to the next. */
static void put_numbers(const uint64_t *numbers, uint32_t n, uint32_t bytes, size_t step,
                        uint8_t *out) {
    if (bytes == 8 && step == 8) {
        copy_bytes(out, numbers, (size_t)n * 8);
    } else if (bytes == 4 && step == 4) {
        put_each(numbers, n, 4, 0, 4, out);
    } else if (bytes == 2 && step == 2) {
        put_each(numbers, n, 2, 0, 2, out);
    } else if (bytes == 1 && step == 1) {
        put_each(numbers, n, 1, 0, 1, out);
    } else if (bytes == 8 && step == 16) {
        put_each(numbers, n, 8, 0, 16, out);
    } else {
        put_each(numbers, n, bytes, 0, step, out);
    }
}

static void put_decimals(const uint64_t *numbers, uint32_t n, uint32_t width, double power,
                         uint8_t *out) {
    if (width == 8) {
        for (size_t i = 0; i < n; i++) {
            const double value = unpack_decimal(numbers[i], power);
            memcpy(out + 8 * i, &value, 8);
        }
        return;
    }
    for (size_t i = 0; i < n; i++) {
        const float value = (float)unpack_decimal(numbers[i], power);
        memcpy(out + 4 * i, &value, 4);
    }
}

static inline void put_entries(const block_t *block, const uint64_t *codes, uint32_t n,
                               size_t width, uint8_t *out) {
    for (size_t i = 0; i < n; i++) {
        memcpy(out + i * width, block->data + codes[i] * width, width);
    }
}

static bool codes_below(const uint64_t *codes, uint32_t n, uint64_t limit) {
    uint64_t over = 0;
    for (uint32_t i = 0; i < n; i++) over |= (uint64_t)(codes[i] >= limit);
    return over == 0;
}

static status_t put_coded(const block_t *block, const uint64_t *codes, uint32_t n, uint8_t *out) {
    if (!codes_below(codes, n, block->values)) return STATUS_CORRUPT;
    switch (block->width) {
        case 1: put_entries(block, codes, n, 1, out); break;
        case 2: put_entries(block, codes, n, 2, out); break;
        case 4: put_entries(block, codes, n, 4, out); break;
        case 8: put_entries(block, codes, n, 8, out); break;
        case 16: put_entries(block, codes, n, 16, out); break;
        default: put_entries(block, codes, n, block->width, out);
    }
    return STATUS_OK;
}

static status_t put_values(const block_t *block, uint32_t word, const uint64_t *numbers,
                           uint32_t n, uint8_t *out) {
    const uint32_t bytes = unpack_word_bytes(block->width, word);
    out += 8 * (size_t)word;
    if (block->encoding == BLOCK_DICTIONARY) return put_coded(block, numbers, n, out);
    if (block->encoding == BLOCK_DECIMAL) {
        put_decimals(numbers, n, block->width, unpack_power(block->digits), out);
    } else if (block->keys) {
        put_keys(numbers, n, bytes, block->width, out);
    } else {
        put_numbers(numbers, n, bytes, block->width, out);
    }
    return STATUS_OK;
}

/* The packed numbers of rows [lo, lo + n), frame by frame. */
static status_t unpack_numbers(const block_t *block, uint32_t word, uint32_t lo, uint32_t n,
                               uint8_t *out) {
    uint64_t numbers[PACKED_FRAME];
    /* Numbers that are the values already are written where they go. */
    const bool as_they_are = block->encoding == BLOCK_PACKED && block->width == 8 &&
                             !block->keys && (uintptr_t)out % 8 == 0;
    for (uint32_t done = 0, some; done < n; done += some) {
        const uint32_t frame = (lo + done) / PACKED_FRAME, skip = (lo + done) % PACKED_FRAME;
        if (as_they_are && skip == 0 && n - done >= PACKED_FRAME) {
            uint64_t *to = (uint64_t *)(void *)(out + (size_t)done * 8);
            some = packed_frame(block->numbers, frame, to);
            if (some != PACKED_FRAME) return STATUS_CORRUPT;
            continue;
        }
        const uint32_t count = packed_frame(block->numbers + word, frame, numbers);
        if (count <= skip) return STATUS_CORRUPT;
        some = count - skip < n - done ? count - skip : n - done;
        const status_t status =
            put_values(block, word, numbers + skip, some, out + (size_t)done * block->width);
        if (status != STATUS_OK) return status;
    }
    return STATUS_OK;
}

/* -- runs ------------------------------------------------------------------------- */

/* Called with a constant `width` for the common ones. */
static inline void repeat(const uint8_t *value, uint32_t n, size_t width, uint8_t *out) {
    for (size_t i = 0; i < n; i++) memcpy(out + i * width, value, width);
}

static void put_run(const uint8_t *value, uint32_t n, uint32_t width, uint8_t *out) {
    switch (width) {
        case 1: memset(out, *value, n); break;
        case 2: repeat(value, n, 2, out); break;
        case 4: repeat(value, n, 4, out); break;
        case 8: repeat(value, n, 8, out); break;
        case 16: repeat(value, n, 16, out); break;
        default: repeat(value, n, width, out);
    }
}

static status_t unpack_runs(const block_t *block, uint32_t lo, uint32_t n, uint8_t *out) {
    const packed_t *ends = block->numbers;
    uint64_t numbers[PACKED_FRAME];
    uint32_t run, loaded = UINT32_MAX;
    const size_t width = block->width;
    status_t status = packed_lower_bound(ends, (uint64_t)lo + 1, 0, block->values, &run);
    for (uint32_t done = 0; status == STATUS_OK && done < n; run++) {
        if (run >= block->values) return STATUS_CORRUPT;
        if (run / PACKED_FRAME != loaded) {
            loaded = run / PACKED_FRAME;
            if (packed_frame(ends, loaded, numbers) == 0) return STATUS_CORRUPT;
        }
        const uint64_t end = numbers[run % PACKED_FRAME], at = (uint64_t)lo + done;
        if (end <= at) return STATUS_CORRUPT;
        const uint32_t some = end - at < n - done ? (uint32_t)(end - at) : n - done;
        put_run(block->data + run * width, some, block->width, out + done * width);
        done += some;
    }
    return status;
}

/* -- fixed ------------------------------------------------------------------------ */

static void clear_nulls(const block_t *block, uint32_t lo, uint32_t n, uint8_t *out) {
    if (block->validity == NULL) return;
    for (uint32_t i = 0; i < n;) {
        const unsigned count = n - i < 64 ? n - i : 64;
        const uint64_t all = count == 64 ? ~UINT64_C(0) : (UINT64_C(1) << count) - 1;
        uint64_t nulls = all & ~bits_load(block->validity, (uint64_t)lo + i, count);
        for (; nulls != 0; nulls &= nulls - 1) {
            const size_t at = (size_t)i + (unsigned)__builtin_ctzll(nulls);
            memset(out + at * block->width, 0, block->width);
        }
        i += count;
    }
}

status_t unpack_fixed(const block_t *block, uint32_t lo, uint32_t n, uint8_t *out) {
    if (block->kind != BLOCK_FIXED) return STATUS_CORRUPT;
    if (block->encoding == BLOCK_PLAIN) {
        copy_bytes(out, block->data + (size_t)lo * block->width, (size_t)n * block->width);
        return STATUS_OK;
    }
    status_t status;
    if (block->encoding == BLOCK_RUNS) {
        status = unpack_runs(block, lo, n, out);
    } else {
        status = unpack_numbers(block, 0, lo, n, out);
        if (status == STATUS_OK && block->encoding == BLOCK_PACKED && block->width > 8) {
            status = unpack_numbers(block, 1, lo, n, out);
        }
    }
    if (status == STATUS_OK) clear_nulls(block, lo, n, out);
    return status;
}

/* -- whole blocks ------------------------------------------------------------------ */

static status_t unpack_strings(const block_t *block, block_t *out, void **memory) {
    uint64_t len;
    status_t status = unpack_size(block, 0, block->rows, &len);
    if (status != STATUS_OK) return status;
    const size_t head = 4 * ((size_t)block->rows + 1);
    uint8_t *whole = alloc_array(head + len, 1);
    if (whole == NULL) return STATUS_NO_MEMORY;
    status = unpack_varlen(block, 0, block->rows, (uint32_t *)(void *)whole, whole + head, len);
    if (status != STATUS_OK) {
        alloc_free(whole);
        return status;
    }
    *memory = whole;
    out->offsets = whole;
    out->data = whole + head;
    out->data_len = len;
    return STATUS_OK;
}

status_t unpack_block(const block_t *block, block_t *out, void **memory) {
    *out = *block;
    *memory = NULL;
    if (block->encoding == BLOCK_PLAIN) return STATUS_OK;
    out->encoding = BLOCK_PLAIN;
    out->values = block->rows;
    if (block->kind == BLOCK_VARLEN) return unpack_strings(block, out, memory);
    out->data_len = (size_t)block->rows * block->width;
    uint8_t *data = alloc_array(block->rows, block->width);
    if (data == NULL) return STATUS_NO_MEMORY;
    const status_t status = unpack_fixed(block, 0, block->rows, data);
    if (status != STATUS_OK) {
        alloc_free(data);
        return status;
    }
    *memory = data;
    out->data = data;
    return STATUS_OK;
}

static bool holds_keys(const block_t *block) {
    return (block->kind == BLOCK_FIXED || block->kind == BLOCK_VARLEN) && block->validity == NULL;
}

status_t unpack_keys_size(const block_t *block, uint64_t *out_size) {
    if (!holds_keys(block) || block->encoding == BLOCK_PLAIN) return STATUS_CORRUPT;
    if (block->kind == BLOCK_VARLEN) return unpack_size(block, 0, block->rows, out_size);
    *out_size = (uint64_t)block->rows * block->width;
    return STATUS_OK;
}

status_t unpack_keys(const block_t *block, uint8_t *out, size_t out_len, uint32_t *out_offsets) {
    if (!holds_keys(block)) return STATUS_CORRUPT;
    if (block->kind == BLOCK_VARLEN) {
        return unpack_varlen(block, 0, block->rows, out_offsets, out, out_len);
    }
    CHECK(out_len == (uint64_t)block->rows * block->width);
    return unpack_fixed(block, 0, block->rows, out);
}

static void flip_signs(uint32_t width, uint32_t n, uint8_t *out) {
    for (size_t i = 0; width == 8 && i < n; i++) {
        store_le64(out + 8 * i, load_le64(out + 8 * i) ^ UINT64_C(1) << 63);
    }
    for (size_t i = 0; width == 4 && i < n; i++) {
        store_le32(out + 4 * i, load_le32(out + 4 * i) ^ UINT32_C(1) << 31);
    }
}

/* Moves the rows behind each that is gone down to those before it. */
static void close_holes(rows_but_t rows, size_t width, uint8_t *out) {
    size_t end = rows.gone_n == 0 ? 0 : (rows.gone[0] - rows.lo) * width;
    for (uint32_t i = 1; i <= rows.gone_n; i++) {
        const rows_run_t run = rows_run(rows, i);
        memmove(out + end, out + (run.lo - rows.lo) * width, run.n * width);
        end += run.n * width;
    }
}

status_t unpack_integers(const block_t *block, uint32_t is_signed, uint32_t lo, uint32_t n,
                         const uint32_t *gone, uint32_t gone_n, uint8_t *out) {
    const rows_but_t rows = {gone, gone_n, lo, n};
    block_t values = *block;
    if (block->encoding != BLOCK_PACKED || !block->keys) return STATUS_CORRUPT;
    if (block->width != 4 && block->width != 8) return STATUS_CORRUPT;
    if (!rows_but_sane(rows, block->rows)) return STATUS_RANGE;
    values.keys = 0;
    const status_t status = unpack_numbers(&values, 0, lo, n, out);
    if (status != STATUS_OK) return status;
    close_holes(rows, block->width, out);
    if (is_signed) flip_signs(block->width, n - gone_n, out);
    return STATUS_OK;
}
