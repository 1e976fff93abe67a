#include "rowset/encode.h"

#include "common/alloc.h"
#include "common/bits.h"
#include "common/check.h"
#include "rowset/encode_body.h"

/* Fewer rows stay plain: a frame and a row of words are as long. A block that is to be light has
 * to save an eighth of the plain one. */
enum { LEAST_ROWS = 32, SAVED = 8 };

/* -- the choice ---------------------------------------------------------------------- */

/* A second place for a body, to compare; the better one ends in the first. */
typedef struct {
    body_t best;
    uint8_t *other;
    bool found;
} choice_t;

static body_t choice_next(const choice_t *choice) {
    const uint64_t cap = choice->found ? (choice->best.used - 1) / 8 * 8 : choice->best.cap;
    return (body_t){.out = choice->found ? choice->other : choice->best.out, .cap = cap};
}

static void choice_take(choice_t *choice, const body_t *body) {
    const uint64_t cap = choice->best.cap;
    if (choice->found) choice->other = choice->best.out;
    choice->best = *body;
    choice->best.cap = cap;
    choice->found = true;
}

static void try_numbers(const values_t *values, choice_t *choice) {
    body_t body = choice_next(choice);
    if (body_decimal(values, &body)) choice_take(choice, &body);
    body = choice_next(choice);
    if (body_packed(values, &body)) choice_take(choice, &body);
}

static status_t choose_fixed(const values_t *values, choice_t *choice) {
    bool done;
    try_numbers(values, choice);
    /* Runs and codes are for what is not almost nothing already. */
    if (values->keys || (choice->found && choice->best.used < values->n / 8)) return STATUS_OK;
    body_t body = choice_next(choice);
    status_t status = body_runs(values, &body, &done);
    if (status != STATUS_OK) return status;
    if (done) choice_take(choice, &body);
    if (choice->found && choice->best.used < values->n) return STATUS_OK;
    body = choice_next(choice);
    status = body_dictionary(values, &body, &done);
    if (status == STATUS_OK && done) choice_take(choice, &body);
    return status;
}

static status_t choose_varlen(const values_t *values, choice_t *choice) {
    bool done = false;
    body_t body = choice_next(choice);
    if (!values->keys) {
        const status_t status = body_dictionary(values, &body, &done);
        if (status != STATUS_OK) return status;
        if (done) choice_take(choice, &body);
        body = choice_next(choice);
    }
    const uint32_t base = load_le32(values->offsets);
    const uint32_t len = load_le32(values->offsets + 4 * (size_t)values->n) - base;
    if (values->n == UINT32_MAX || !body_room(&body, len)) return STATUS_OK;
    body.header.encoding = BLOCK_ENDS;
    body.cap -= round_up_8(len); /* for the bytes, which stay */
    if (!body_offsets(values, &body)) return STATUS_OK;
    body.cap += round_up_8(len);
    body_align(&body);
    if (!body_put(&body, values->data + base, len)) return STATUS_OK;
    choice_take(choice, &body);
    return STATUS_OK;
}

/* The lightest body of some values. `plain`: the length of the plain one, `out` and `other` have
 * room for it. */
static status_t choose(const values_t *values, uint64_t plain, choice_t *choice) {
    if (values->n < LEAST_ROWS) return STATUS_OK;
    choice->best.cap = (plain - plain / SAVED) / 8 * 8;
    return values->kind == BLOCK_FIXED ? choose_fixed(values, choice)
                                       : choose_varlen(values, choice);
}

/* Puts a body behind header and validity bitmap, which is in its place. */
static size_t finish(const choice_t *choice, block_header_t header, uint64_t head, uint32_t seed,
                     uint8_t *out) {
    const body_t *body = &choice->best;
    if (body->out != out + head) memcpy(out + head, body->out, body->used);
    header.version = BLOCK_VERSION_LIGHT;
    header.encoding = body->header.encoding;
    header.digits = body->header.digits;
    header.keys = body->header.keys;
    header.body_len = head - BLOCK_HEADER_BYTES + body->used;
    const uint64_t size = BLOCK_HEADER_BYTES + round_up_8(header.body_len);
    block_seal(&header, seed, out, size);
    return size;
}

/* -- columns -------------------------------------------------------------------------- */

/* Nulls take the value before them, the first ones that of the first value. */
static void fill_nulls(const block_t *plain, uint8_t *data) {
    const size_t width = plain->width;
    const uint8_t *before = NULL;
    uint32_t leading = 0;
    for (uint32_t i = 0; i < plain->rows; i++) {
        uint8_t *at = data + i * width;
        if (bits_get(plain->validity, i)) {
            if (before == NULL) leading = i;
            before = at;
        } else if (before != NULL) {
            memcpy(at, before, width);
        }
    }
    for (uint32_t i = 0; before != NULL && i < leading; i++) {
        memcpy(data + i * width, data + leading * width, width);
    }
}

/* A column whose values lie as a plain block would have them: nothing is copied before it has to. */
static bool lies_plain(const block_column_t *column, block_rows_t rows) {
    return rows.rows == NULL && column->validity == NULL && column->offset + rows.lo < UINT32_MAX;
}

static values_t values_of(const block_column_t *column, block_rows_t rows) {
    const size_t first = (size_t)column->offset + rows.lo;
    values_t values = {column->kind, column->width, rows.n, 0, NULL, column->values};
    if (column->kind == BLOCK_VARLEN) {
        values.offsets = column->offsets + 4 * first;
    } else {
        values.data += first * column->width;
    }
    return values;
}

status_t encode_column(const block_column_t *column, block_rows_t rows, uint32_t seed,
                       uint8_t *out, size_t out_len, size_t *out_used) {
    uint64_t size;
    block_t plain = {.validity = NULL};
    status_t status = block_encode_size(column, rows, &size);
    if (status != STATUS_OK) return status;
    CHECK(out_len >= size);
    *out_used = size;
    const bool light = (column->kind == BLOCK_FIXED || column->kind == BLOCK_VARLEN) &&
                       rows.n >= LEAST_ROWS;
    const bool direct = light && lies_plain(column, rows);
    values_t values = {.kind = column->kind};
    if (direct) {
        values = values_of(column, rows);
    } else {
        status = block_encode(column, rows, seed, out, size);
        if (status != STATUS_OK || !light) return status;
        if (block_parse(out, size, &plain) != STATUS_OK) return STATUS_INPUT;
        values = (values_t){plain.kind, plain.width, plain.rows, 0, plain.offsets, plain.data};
    }
    const uint64_t head =
        BLOCK_HEADER_BYTES + (plain.validity == NULL ? 0 : round_up_8(bits_bytes(rows.n)));
    const uint64_t body = size - head;
    /* Two bodies to compare, one in its place unless the values are there; and where nulls are
     * filled, a copy of the values. */
    uint8_t *memory = alloc_array(direct ? 1 : 3, body);
    if (memory == NULL) return STATUS_NO_MEMORY;
    if (plain.validity != NULL && plain.kind == BLOCK_FIXED) {
        memcpy(memory + 2 * body, plain.data, plain.data_len);
        fill_nulls(&plain, memory + 2 * body);
        values.data = memory + 2 * body;
    }
    choice_t choice = {.best = {.out = direct ? out + head : memory + body}, .other = memory};
    status = choose(&values, body, &choice);
    if (status == STATUS_OK && choice.found) {
        const block_header_t header = {.kind = (uint8_t)column->kind,
                                       .flags = plain.validity == NULL ? 0 : BLOCK_HAS_VALIDITY,
                                       .rows = rows.n,
                                       .null_count = plain.null_count,
                                       .width = values.width};
        *out_used = finish(&choice, header, head, seed, out);
    } else if (status == STATUS_OK && direct) {
        status = block_encode(column, rows, seed, out, size);
    }
    alloc_free(memory);
    return status;
}

status_t encode_keys(const keys_t *keys, uint32_t seed, uint8_t *out, size_t out_len,
                     size_t *out_used) {
    const uint64_t size = block_size_of_keys(keys), body = size - BLOCK_HEADER_BYTES;
    CHECK(out_len >= size);
    *out_used = size;
    const block_kind_t kind = keys->offsets == NULL ? BLOCK_FIXED : BLOCK_VARLEN;
    const values_t values = {kind, keys->width, keys->n, 1, keys->offsets, keys->data};
    /* There is one way for them, so nothing to compare with. */
    choice_t choice = {.best = {.out = out + BLOCK_HEADER_BYTES}, .other = NULL};
    const status_t status = choose(&values, body, &choice);
    if (status != STATUS_OK) return status;
    if (choice.found) {
        const block_header_t header = {.kind = (uint8_t)kind, .rows = keys->n, .width = keys->width};
        *out_used = finish(&choice, header, BLOCK_HEADER_BYTES, seed, out);
    } else {
        block_encode_keys(keys, seed, out, size);
    }
    return STATUS_OK;
}
