/* Stable sort of keys by their bytes.
 *
 * Keys are looked at 8 bytes at a time, as numbers. What all keys of a group have in common
 * at the front is skipped, the next 8 bytes are sorted by an LSD radix sort that passes over
 * constant bytes, and each run of equal numbers is a group of its own, 8 bytes further on.
 * Small groups are sorted by insertion. For 8-byte keys that is one round. */
#include "rowset/sort.h"

#include "codec/keys_inline.h"
#include "common/alloc.h"
#include "common/bits.h"
#include "common/check.h"
#include "common/rows.h"

#include <stdbool.h>

typedef struct {
    uint64_t prefix;
    uint32_t row;
} entry_t;

enum { SMALL_GROUP = 24, MAX_DEPTH = 48, DIGITS = 8, RADIX = 256 };

static uint32_t row_at(const uint32_t *rows, uint32_t i) { return rows == NULL ? i : rows[i]; }

static bool strictly_ascending(const keys_t *keys, const uint32_t *rows, uint32_t n) {
    for (uint32_t i = 1; i < n; i++) {
        const slice_t a = keys_at(keys, row_at(rows, i - 1)), b = keys_at(keys, row_at(rows, i));
        if (slice_compare(a, b) >= 0) return false;
    }
    return true;
}

static size_t common_len(slice_t a, slice_t b, size_t from, size_t to) {
    if (a.len < to) to = a.len;
    if (b.len < to) to = b.len;
    while (from < to && a.data[from] == b.data[from]) from++;
    return from;
}

static void insertion_sort(const keys_t *keys, entry_t *entries, uint32_t n) {
    for (uint32_t i = 1; i < n; i++) {
        const entry_t moved = entries[i];
        const slice_t key = keys_at(keys, moved.row);
        uint32_t at = i;
        while (at > 0 && slice_compare(keys_at(keys, entries[at - 1].row), key) > 0) {
            entries[at] = entries[at - 1];
            at--;
        }
        entries[at] = moved;
    }
}

static void merge_sort(const keys_t *keys, entry_t *entries, entry_t *scratch, uint32_t n) {
    for (uint64_t from = 0; from < n; from += SMALL_GROUP) {
        const uint32_t left = n - (uint32_t)from;
        insertion_sort(keys, entries + from, left < SMALL_GROUP ? left : SMALL_GROUP);
    }
    for (uint64_t width = SMALL_GROUP; width < n; width *= 2) {
        for (uint64_t from = 0; from < n; from += 2 * width) {
            const uint64_t mid = from + width < n ? from + width : n;
            const uint64_t end = mid + width < n ? mid + width : n;
            uint64_t a = from, b = mid;
            for (uint64_t i = from; i < end; i++) {
                const bool take_a =
                    b == end || (a < mid && slice_compare(keys_at(keys, entries[a].row),
                                                          keys_at(keys, entries[b].row)) <= 0);
                scratch[i] = entries[take_a ? a++ : b++];
            }
        }
        memcpy(entries, scratch, n * sizeof *entries);
    }
}

/* One counting pass over byte `digit` of the prefixes (0 is the last). */
static void scatter(const entry_t *from, entry_t *to, uint32_t n, unsigned digit,
                    const uint32_t *counts) {
    uint32_t at[RADIX], sum = 0;
    for (unsigned v = 0; v < RADIX; v++) {
        at[v] = sum;
        sum += counts[v];
    }
    for (uint32_t i = 0; i < n; i++) to[at[from[i].prefix >> (8 * digit) & 0xff]++] = from[i];
}

/* Sorts by prefix; the result is in `entries`. */
static void radix_sort(entry_t *entries, entry_t *scratch, uint32_t n) {
    uint32_t counts[DIGITS][RADIX] = {{0}};
    for (uint32_t i = 0; i < n; i++) {
        for (unsigned d = 0; d < DIGITS; d++) counts[d][entries[i].prefix >> (8 * d) & 0xff]++;
    }
    entry_t *from = entries, *to = scratch;
    for (unsigned d = 0; d < DIGITS; d++) {
        if (counts[d][entries[0].prefix >> (8 * d) & 0xff] == n) continue;
        scatter(from, to, n, d, counts[d]);
        entry_t *swap = from;
        from = to;
        to = swap;
    }
    if (from != entries) memcpy(entries, from, n * sizeof *entries);
}

/* How many bytes all keys of the group have in common, given that `skip` are. */
static size_t group_common(const keys_t *keys, const entry_t *entries, uint32_t n, size_t skip) {
    const slice_t first = keys_at(keys, entries[0].row);
    size_t common = first.len;
    for (uint32_t i = 1; i < n && common > skip; i++) {
        common = common_len(first, keys_at(keys, entries[i].row), skip, common);
    }
    return common;
}

/* A variable key is looked at 7 bytes at a time. The last byte of the number says how many
 * of them are there, so that "a" comes before "a" and a zero; below 7, the key is over. */
static uint64_t variable_prefix(slice_t key, size_t skip) {
    const size_t rest = key.len - skip;
    return (slice_prefix(key, skip) & ~UINT64_C(0xff)) | (rest < 7 ? rest : 7);
}

/* Sorts entries whose keys agree in the first `skip` bytes. Each round eats 7 or more;
 * rounds beyond MAX_DEPTH are left to the merge sort, so that nested prefixes cannot
 * exhaust the stack. */
static void sort_group(const keys_t *keys, entry_t *entries, entry_t *scratch, uint32_t n,
                       size_t skip, unsigned depth) {
    const bool fixed = keys->offsets == NULL;
    if (n <= SMALL_GROUP) {
        insertion_sort(keys, entries, n);
        return;
    }
    if (depth == MAX_DEPTH) {
        merge_sort(keys, entries, scratch, n);
        return;
    }
    skip = group_common(keys, entries, n, skip);
    for (uint32_t i = 0; i < n; i++) {
        const slice_t key = keys_at(keys, entries[i].row);
        entries[i].prefix = fixed ? slice_prefix(key, skip) : variable_prefix(key, skip);
    }
    radix_sort(entries, scratch, n);
    skip += fixed ? 8 : 7;
    if (fixed && skip >= keys->width) return;
    for (uint32_t from = 0, to; from < n; from = to) {
        for (to = from + 1; to < n && entries[to].prefix == entries[from].prefix;) to++;
        if (to - from == 1 || (!fixed && (entries[from].prefix & 0xff) < 7)) continue;
        sort_group(keys, entries + from, scratch + from, to - from, skip, depth + 1);
    }
}

status_t sort_order(const keys_t *keys, const uint32_t *rows, uint32_t n, uint32_t *out_order,
                    int *ascending) {
    CHECK(rows != NULL || n <= keys->n);
    if (rows != NULL && !rows_below(rows, n, keys->n)) return STATUS_RANGE;
    *ascending = strictly_ascending(keys, rows, n);
    if (*ascending) return STATUS_OK;
    entry_t *entries = alloc_array(2 * (size_t)n, sizeof *entries);
    if (entries == NULL) return STATUS_NO_MEMORY;
    for (uint32_t i = 0; i < n; i++) entries[i].row = row_at(rows, i);
    sort_group(keys, entries, entries + n, n, 0, 0);
    for (uint32_t i = 0; i < n; i++) out_order[i] = entries[i].row;
    alloc_free(entries);
    return STATUS_OK;
}

status_t sort_mark_duplicates(const keys_t *keys, const uint32_t *order, uint32_t n,
                              uint8_t *out_bits, uint32_t *out_count) {
    CHECK(order != NULL || n <= keys->n);
    if (order != NULL && !rows_below(order, n, keys->n)) return STATUS_RANGE;
    uint32_t count = 0;
    memset(out_bits, 0, bits_bytes(n));
    for (uint32_t i = 1; i < n; i++) {
        const slice_t a = keys_at(keys, row_at(order, i - 1)), b = keys_at(keys, row_at(order, i));
        const bool equal = a.len == b.len && compare_bytes(a.data, b.data, a.len) == 0;
        bits_or(out_bits, i, equal);
        count += equal;
    }
    *out_count = count;
    return STATUS_OK;
}
