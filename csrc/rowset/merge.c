#include "rowset/merge.h"

#include "common/alloc.h"
#include "common/bits.h"
#include "common/check.h"
#include "rowset/search_inline.h"

#include <stdbool.h>

/* Beyond this ratio of lengths, searching costs less than walking. */
enum { LOPSIDED = 16 };

/* Without a branch on the keys, which come in no order that could be guessed. */
static inline uint32_t common_numbers(const keys_t *a, const keys_t *b, uint32_t width,
                                      uint8_t *bits) {
    uint32_t i = 0, j = 0, count = 0;
    while (i < a->n && j < b->n) {
        const uint64_t left = keys_number(a->data, width, i);
        const uint64_t right = keys_number(b->data, width, j);
        bits_or(bits, i, left == right);
        count += left == right;
        i += left <= right;
        j += right <= left;
    }
    return count;
}

static uint32_t common_dense(const keys_t *a, const keys_t *b, uint8_t *bits) {
    uint32_t i = 0, j = 0, count = 0;
    while (i < a->n && j < b->n) {
        const int order = slice_compare(keys_at(a, i), keys_at(b, j));
        bits_or(bits, i, order == 0);
        count += order == 0;
        i += order <= 0;
        j += order >= 0;
    }
    return count;
}

/* Walks the shorter side and gallops through the longer one. */
static uint32_t common_lopsided(const keys_t *a, const keys_t *b, uint8_t *bits) {
    const bool a_short = a->n < b->n;
    const keys_t *few = a_short ? a : b, *many = a_short ? b : a;
    uint32_t at = 0, count = 0;
    for (uint32_t i = 0; i < few->n && at < many->n; i++) {
        const slice_t key = keys_at(few, i);
        at = search_gallop(many, key, at);
        if (at < many->n && slice_compare(keys_at(many, at), key) == 0) {
            bits_set(bits, a_short ? i : at);
            count++;
        }
    }
    return count;
}

void merge_common(const keys_t *a, const keys_t *b, uint8_t *out_bits, uint32_t *out_count) {
    memset(out_bits, 0, bits_bytes(a->n));
    if (a->n / LOPSIDED > b->n || b->n / LOPSIDED > a->n) {
        *out_count = common_lopsided(a, b, out_bits);
    } else if (!keys_are_numbers(a, b)) {
        *out_count = common_dense(a, b, out_bits);
    } else if (a->width == 8) {
        *out_count = common_numbers(a, b, 8, out_bits);
    } else {
        *out_count = common_numbers(a, b, 4, out_bits);
    }
}

/* A heap of sources, the one with the least key (then the least number) on top. */
typedef struct {
    uint64_t prefix;
    slice_t key;
    uint32_t source;
} head_t;

static bool head_before(const head_t *a, const head_t *b) {
    if (a->prefix != b->prefix) return a->prefix < b->prefix;
    const int order = slice_compare(a->key, b->key);
    return order != 0 ? order < 0 : a->source < b->source;
}

static void head_load(head_t *head, const keys_t *keys, uint32_t cursor) {
    head->key = keys_at(keys, cursor);
    head->prefix = slice_prefix(head->key, 0);
}

static void sift_down(head_t *heap, uint32_t n, uint32_t at) {
    const head_t moved = heap[at];
    for (uint32_t child; (child = 2 * at + 1) < n; at = child) {
        if (child + 1 < n && head_before(&heap[child + 1], &heap[child])) child++;
        if (!head_before(&heap[child], &moved)) break;
        heap[at] = heap[child];
    }
    heap[at] = moved;
}

static uint32_t heap_make(head_t *heap, const keys_t *sources, uint32_t k,
                          const uint32_t *cursors) {
    uint32_t n = 0;
    for (uint32_t s = 0; s < k; s++) {
        CHECK(cursors[s] <= sources[s].n);
        if (cursors[s] == sources[s].n) continue;
        heap[n].source = s;
        head_load(&heap[n++], &sources[s], cursors[s]);
    }
    for (uint32_t i = n / 2; i-- > 0;) sift_down(heap, n, i);
    return n;
}

status_t merge_kway(const keys_t *sources, uint32_t k, const uint8_t *ends, uint32_t *cursors,
                    uint32_t cap, uint16_t *out_source, uint32_t *out_index, uint32_t *out_n) {
    CHECK(k <= 65536);
    head_t *heap = alloc_array(k, sizeof *heap);
    if (heap == NULL) return STATUS_NO_MEMORY;
    uint32_t live = heap_make(heap, sources, k, cursors);
    uint32_t n = 0;
    while (n < cap && live != 0) {
        const uint32_t source = heap[0].source;
        out_source[n] = (uint16_t)source;
        out_index[n++] = cursors[source]++;
        if (cursors[source] < sources[source].n) {
            head_load(&heap[0], &sources[source], cursors[source]);
        } else if (!ends[source]) {
            break;
        } else if (--live != 0) {
            heap[0] = heap[live];
        }
        if (live != 0) sift_down(heap, live, 0);
    }
    alloc_free(heap);
    *out_n = n;
    return STATUS_OK;
}
