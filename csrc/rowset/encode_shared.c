#include "codec/hash.h"
#include "codec/keys_inline.h"
#include "common/alloc.h"
#include "rowset/encode_body.h"
#include "rowset/unpack_inline.h"

/* Rows whose values say whether a dictionary may pay, before there is room for all. */
enum { LOOKED_AT = 2048 };

/* Rows whose changes are counted at once. */
enum { COUNTED = 4096 };

/* -- runs --------------------------------------------------------------------------- */

static inline uint32_t changes_of(const uint8_t *data, uint32_t n, size_t width) {
    uint32_t changes = 0;
    for (size_t i = 1; i < n; i++) {
        changes += memcmp(data + i * width, data + (i - 1) * width, width) != 0;
    }
    return changes;
}

/* Runs of the values; more than `most` when there are more. */
static uint32_t count_runs(const values_t *values, uint32_t most) {
    const size_t width = values->width;
    uint32_t runs = 1;
    for (uint32_t lo = 0; lo + 1 < values->n && runs <= most; lo += COUNTED) {
        const uint32_t left = values->n - lo, n = left <= COUNTED ? left : COUNTED + 1;
        const uint8_t *data = values->data + lo * width;
        switch (width) {
            case 1: runs += changes_of(data, n, 1); break;
            case 2: runs += changes_of(data, n, 2); break;
            case 4: runs += changes_of(data, n, 4); break;
            case 8: runs += changes_of(data, n, 8); break;
            case 16: runs += changes_of(data, n, 16); break;
            default: runs += changes_of(data, n, width);
        }
    }
    return runs;
}

/* The number of values, and 4 zeros, before codes or ends. */
static bool put_count(uint32_t count, body_t *body) {
    const uint32_t head[2] = {count, 0};
    return body_put(body, head, sizeof head);
}

status_t body_runs(const values_t *values, body_t *body, bool *done) {
    const size_t width = values->width;
    *done = false;
    const uint64_t room = body->cap / (width + 1);
    const uint32_t most = room < UINT32_MAX ? (uint32_t)room : UINT32_MAX - 1;
    const uint32_t runs = count_runs(values, most);
    if (runs > most) return STATUS_OK;
    uint32_t *ends = alloc_array(runs, sizeof *ends);
    if (ends == NULL) return STATUS_NO_MEMORY;
    uint32_t found = 0;
    for (size_t i = 1; i < values->n; i++) {
        const uint8_t *at = values->data + i * width;
        if (memcmp(at, at - width, width) != 0) ends[found++] = (uint32_t)i;
    }
    ends[found] = values->n;
    body->header.encoding = BLOCK_RUNS;
    if (put_count(runs, body) && body_list(ends, runs, body)) {
        body_align(body);
        *done = body_room(body, round_up_8(runs * width));
        for (size_t i = 0; *done && i < runs; i++) {
            memcpy(body->out + body->used, values->data + (ends[i] - 1) * width, width);
            body->used += width;
        }
    }
    alloc_free(ends);
    return STATUS_OK;
}

/* -- dictionaries ------------------------------------------------------------------- */

/* Values in the order in which they come first, found again by their hash. */
typedef struct {
    uint32_t *codes; /* of each row */
    uint32_t *rows;  /* of each value, the first that has it */
    uint32_t *slots; /* 1 + value, 0: free; open addressing */
    uint32_t mask;
    uint32_t count;
    uint64_t bytes;
} dictionary_t;

static slice_t value_at(const values_t *values, uint32_t row) {
    if (values->kind == BLOCK_FIXED) {
        return (slice_t){values->data + (size_t)row * values->width, values->width};
    }
    const uint8_t *ends = values->offsets + 4 * (size_t)row;
    const uint32_t from = load_le32(ends);
    return (slice_t){values->data + from, load_le32(ends + 4) - from};
}

static inline bool slice_equal(slice_t a, slice_t b) {
    if (a.len == 8 && b.len == 8) return load_le64(a.data) == load_le64(b.data);
    return a.len == b.len && compare_bytes(a.data, b.data, a.len) == 0;
}

/* The code of a value, made when it is new. `hash` is that of its bytes. */
static inline uint32_t code_of(dictionary_t *dictionary, const values_t *values, uint32_t row,
                               slice_t value, uint64_t hash) {
    for (uint64_t at = hash >> 32;; at++) {
        uint32_t *slot = dictionary->slots + (at & dictionary->mask);
        if (*slot == 0) {
            dictionary->rows[dictionary->count] = row;
            dictionary->bytes += value.len;
            *slot = ++dictionary->count;
            return dictionary->count - 1;
        }
        if (slice_equal(value_at(values, dictionary->rows[*slot - 1]), value)) return *slot - 1;
    }
}

/* Whether codes and values, were there no more of these, are shorter than `cap`. */
static bool may_pay(const dictionary_t *dictionary, uint32_t n, uint64_t cap) {
    const uint32_t most = dictionary->count - 1;
    const uint64_t bits = most == 0 ? 0 : 32 - (unsigned)__builtin_clz(most);
    return dictionary->bytes + bits * n / 8 < cap;
}

/* False: too many are different. */
static bool fill_dictionary(dictionary_t *dictionary, const values_t *values, uint32_t limit) {
    const bool words = values->kind == BLOCK_FIXED && values->width <= 8;
    for (uint32_t i = 0; i < values->n; i++) {
        const slice_t value = value_at(values, i);
        uint64_t hash;
        if (words) {
            hash = unpack_load(value.data, values->width, 0) * UINT64_C(0x9E3779B97F4A7C15);
        } else {
            hash = hash64(value.data, value.len);
        }
        dictionary->codes[i] = code_of(dictionary, values, i, value, hash);
        if (dictionary->count > limit) return false;
    }
    return true;
}

static bool looks_shared(const values_t *values, uint64_t cap) {
    uint32_t codes[LOOKED_AT], rows[LOOKED_AT + 1], slots[2 * LOOKED_AT] = {0};
    dictionary_t dictionary = {codes, rows, slots, 2 * LOOKED_AT - 1, 0, 0};
    values_t some = *values;
    if (some.n > LOOKED_AT) some.n = LOOKED_AT;
    return fill_dictionary(&dictionary, &some, some.n / 2) && may_pay(&dictionary, values->n, cap);
}

static bool put_entries(const dictionary_t *dictionary, const values_t *values, body_t *body) {
    const uint32_t n = dictionary->count;
    body_align(body);
    const uint64_t ends = values->kind == BLOCK_VARLEN ? round_up_8(4 * ((uint64_t)n + 1)) : 0;
    if (!body_room(body, ends + round_up_8(dictionary->bytes))) return false;
    uint8_t *offsets = body->out + body->used, *data = offsets + ends;
    uint32_t end = 0;
    if (ends != 0) memset(offsets, 0, ends);
    for (uint32_t i = 0; i < n; i++) {
        const slice_t value = value_at(values, dictionary->rows[i]);
        copy_bytes(data + end, value.data, value.len);
        end += (uint32_t)value.len;
        if (ends != 0) store_le32(offsets + 4 * ((size_t)i + 1), end);
    }
    body->used += ends + end;
    return true;
}

status_t body_dictionary(const values_t *values, body_t *body, bool *done) {
    uint32_t size = 64;
    *done = false;
    if (!looks_shared(values, body->cap)) return STATUS_OK;
    while (size < values->n) size *= 2; /* so never more than half full */
    const size_t n = values->n;
    uint32_t *memory = alloc_array(n + n / 2 + 2 + size, sizeof *memory);
    if (memory == NULL) return STATUS_NO_MEMORY;
    dictionary_t dictionary = {memory, memory + n, memory + n + n / 2 + 2, size - 1, 0, 0};
    memset(dictionary.slots, 0, size * sizeof *memory);
    body->header.encoding = BLOCK_DICTIONARY;
    if (fill_dictionary(&dictionary, values, values->n / 2)) {
        *done = put_count(dictionary.count, body) && body_list(dictionary.codes, values->n, body) &&
                put_entries(&dictionary, values, body);
    }
    alloc_free(memory);
    return STATUS_OK;
}
