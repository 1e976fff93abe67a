#include "log/committed.h"

#include <stdbool.h>
#include <stdlib.h>

#include "common/alloc.h"
#include "common/bytes.h"
#include "common/check.h"

#define TRIM_AT 32 /* times too large */

/* Both parts have room for all that is here: `heap` as a binary heap on first_offset, `set` as a
 * hash table by txn_id (0: empty) with linear probing, at most half full. */
struct committed {
    committed_aborted_t *heap;
    size_t heap_n;
    size_t heap_room;
    committed_aborted_t *set;
    size_t set_n;
    size_t set_room; /* a power of 2, or 0 */
};

/* -- the heap -------------------------------------------------------------------------------- */

static void heap_push(committed_t *filter, committed_aborted_t entry) {
    committed_aborted_t *heap = filter->heap;
    size_t at = filter->heap_n++;
    for (; at != 0 && heap[(at - 1) / 2].first_offset > entry.first_offset; at = (at - 1) / 2) {
        heap[at] = heap[(at - 1) / 2];
    }
    heap[at] = entry;
}

static committed_aborted_t heap_pop(committed_t *filter) {
    committed_aborted_t *heap = filter->heap;
    const committed_aborted_t least = heap[0], last = heap[--filter->heap_n];
    size_t at = 0;
    for (;;) {
        size_t child = 2 * at + 1;
        if (child >= filter->heap_n) break;
        if (child + 1 < filter->heap_n && heap[child + 1].first_offset < heap[child].first_offset) {
            child++;
        }
        if (heap[child].first_offset >= last.first_offset) break;
        heap[at] = heap[child];
        at = child;
    }
    heap[at] = last;
    return least;
}

static int compare_entries(const void *left, const void *right) {
    const committed_aborted_t *a = left, *b = right;
    if (a->first_offset != b->first_offset) return a->first_offset < b->first_offset ? -1 : 1;
    return (a->txn_id > b->txn_id) - (a->txn_id < b->txn_id);
}

/* Each fetch names again what lies ahead. Sorted entries are a heap as well. */
static void heap_merge_equals(committed_t *filter) {
    committed_aborted_t *heap = filter->heap;
    size_t kept = 0;
    if (filter->heap_n < 2) return;
    qsort(heap, filter->heap_n, sizeof *heap, compare_entries);
    for (size_t i = 1; i < filter->heap_n; i++) {
        if (compare_entries(&heap[kept], &heap[i]) != 0) heap[++kept] = heap[i];
    }
    filter->heap_n = kept + 1;
}

static bool heap_resize(committed_t *filter, size_t room) {
    committed_aborted_t *heap = alloc_array(room, sizeof *heap);
    if (heap == NULL) return false;
    copy_bytes(heap, filter->heap, filter->heap_n * sizeof *heap);
    alloc_free(filter->heap);
    filter->heap = heap;
    filter->heap_room = room;
    return true;
}

static bool heap_reserve(committed_t *filter, size_t more) {
    if (filter->heap_room - filter->heap_n >= more) return true;
    heap_merge_equals(filter);
    /* Room to spare after merging, or the next call would merge again. */
    const size_t room = 2 * (filter->heap_n + more);
    return room <= filter->heap_room || heap_resize(filter, room);
}

/* -- the set --------------------------------------------------------------------------------- */

static size_t home_of(const committed_t *filter, uint64_t txn_id) {
    const uint64_t mixed = txn_id * UINT64_C(0x9E3779B97F4A7C15);
    return (size_t)(mixed ^ mixed >> 32) & (filter->set_room - 1);
}

/* The slot of a transaction, or the empty one where it would stand. */
static size_t slot_of(const committed_t *filter, uint64_t txn_id) {
    size_t at = home_of(filter, txn_id);
    while (filter->set[at].txn_id != 0 && filter->set[at].txn_id != txn_id) {
        at = (at + 1) & (filter->set_room - 1);
    }
    return at;
}

static void set_put(committed_t *filter, committed_aborted_t entry) {
    committed_aborted_t *slot = &filter->set[slot_of(filter, entry.txn_id)];
    if (slot->txn_id != 0) {
        if (entry.first_offset < slot->first_offset) slot->first_offset = entry.first_offset;
        return;
    }
    *slot = entry;
    filter->set_n++;
}

/* Entries behind the gap move up where their probes led across it. */
static void set_remove(committed_t *filter, uint64_t txn_id) {
    if (filter->set_n == 0) return;
    const size_t mask = filter->set_room - 1;
    size_t gap = slot_of(filter, txn_id);
    if (filter->set[gap].txn_id == 0) return;
    for (size_t at = (gap + 1) & mask; filter->set[at].txn_id != 0; at = (at + 1) & mask) {
        const size_t home = home_of(filter, filter->set[at].txn_id);
        if (((at - home) & mask) < ((at - gap) & mask)) continue;
        filter->set[gap] = filter->set[at];
        gap = at;
    }
    filter->set[gap].txn_id = 0;
    filter->set_n--;
}

static bool set_resize(committed_t *filter, size_t room) {
    committed_aborted_t *set = alloc_array(room, sizeof *set), *old = filter->set;
    if (set == NULL) return false;
    const size_t old_room = filter->set_room;
    memset(set, 0, room * sizeof *set);
    filter->set = set;
    filter->set_room = room;
    filter->set_n = 0;
    for (size_t i = 0; i < old_room; i++) {
        if (old[i].txn_id != 0) set_put(filter, old[i]);
    }
    alloc_free(old);
    return true;
}

static size_t set_room_for(size_t entries) {
    size_t room = 16;
    while (room < 2 * entries) room *= 2;
    return room;
}

static bool set_reserve(committed_t *filter, size_t entries) {
    const size_t room = set_room_for(entries);
    return room <= filter->set_room || entries == 0 || set_resize(filter, room);
}

static bool set_holds(const committed_t *filter, const batch_header_t *header) {
    if (filter->set_n == 0) return false;
    const committed_aborted_t *slot = &filter->set[slot_of(filter, header->txn_id)];
    return slot->txn_id != 0 && slot->first_offset <= header->base_offset;
}

/* -- the filter ------------------------------------------------------------------------------ */

committed_t *committed_create(void) {
    committed_t *filter = alloc_array(1, sizeof *filter);
    if (filter != NULL) *filter = (committed_t){.heap = NULL};
    return filter;
}

void committed_reset(committed_t *filter) {
    alloc_free(filter->heap);
    alloc_free(filter->set);
    *filter = (committed_t){.heap = NULL};
}

void committed_destroy(committed_t *filter) {
    if (filter == NULL) return;
    committed_reset(filter);
    alloc_free(filter);
}

void committed_held(const committed_t *filter, uint64_t *out_waiting, uint64_t *out_inside,
                    uint64_t *out_bytes) {
    *out_waiting = filter->heap_n;
    *out_inside = filter->set_n;
    *out_bytes = (filter->heap_room + filter->set_room) * sizeof *filter->heap;
}

static uint16_t control_type(const uint8_t *batch) {
    return load_le16(batch + BATCH_HEADER_BYTES + 2);
}

static status_t check_control(const uint8_t *batch, size_t len) {
    const status_t status = batch_check(batch, len);
    if (status != STATUS_OK) return status;
    const bool known = load_le16(batch + BATCH_HEADER_BYTES) == 0;
    return known && control_type(batch) <= CONTROL_SIDE_LIST ? STATUS_OK : STATUS_CORRUPT;
}

/* A long list does not leave its memory behind. Where there is none for less, it stays. */
static void trim(committed_t *filter) {
    const size_t heap_room = 2 * filter->heap_n + 16, set_room = set_room_for(filter->set_n);
    if (filter->heap_room / TRIM_AT > heap_room) (void)heap_resize(filter, heap_room);
    if (filter->set_room / TRIM_AT > set_room) (void)set_resize(filter, set_room);
}

/* All that a walk up to `upto` will trust: headers, rising offsets, control batches whole. */
static status_t validate(const uint8_t *bytes, size_t len, uint64_t upto, uint32_t room) {
    batch_header_t header;
    uint64_t before = 0;
    for (size_t at = 0; at < len; at += header.length) {
        status_t status = batch_parse(bytes + at, len - at, &header);
        if (status != STATUS_OK) return status;
        if (header.base_offset < before) return STATUS_CORRUPT;
        before = header.base_offset;
        if (header.base_offset + header.count > upto) return STATUS_OK;
        if ((header.attributes & BATCH_CONTROL) != 0) {
            status = check_control(bytes + at, len - at);
            if (status != STATUS_OK) return status;
        } else {
            CHECK(room-- != 0);
        }
    }
    return STATUS_OK;
}

/* What a batch does to the state, and whether it is shown as far as that goes. */
static bool step(committed_t *filter, const batch_header_t *header, const uint8_t *batch) {
    const uint64_t last = header->base_offset + header->count - 1;
    while (filter->heap_n != 0 && filter->heap[0].first_offset <= last) {
        set_put(filter, heap_pop(filter));
    }
    if ((header->attributes & BATCH_CONTROL) != 0) {
        if (header->txn_id != 0 && control_type(batch) == CONTROL_ABORT) {
            set_remove(filter, header->txn_id);
        }
        return false;
    }
    if ((header->attributes & BATCH_TRANSACTIONAL) == 0) return true;
    return (header->attributes & BATCH_DECIDED) != 0 || !set_holds(filter, header);
}

static bool is_plain(const batch_header_t *header, committed_which_t which) {
    const unsigned flags = header->attributes;
    if ((flags & BATCH_CONTROL) != 0) return false;
    if (which == COMMITTED_ALL || (flags & BATCH_TRANSACTIONAL) == 0) return true;
    return (flags & BATCH_DECIDED) != 0;
}

/* Without a filter `which` decides. The bytes are valid. */
static void show(committed_t *filter, committed_which_t which, const uint8_t *bytes, size_t len,
                 uint64_t from_offset, uint64_t upto, messages_span_t *out_spans,
                 committed_shown_t *out) {
    batch_header_t header;
    *out = (committed_shown_t){.next_offset = from_offset};
    for (size_t at = 0; at < len; at += header.length) {
        memcpy(&header, bytes + at, sizeof header);
        const uint64_t next = header.base_offset + header.count;
        if (next > upto) return;
        if (next > out->next_offset) out->next_offset = next;
        const bool shown = filter == NULL ? is_plain(&header, which)
                                          : step(filter, &header, bytes + at);
        const uint32_t reach = (header.attributes & BATCH_PLACES) != 0 ? header.count : header.rows;
        if (!shown || header.base_offset + reach <= from_offset) continue;
        out_spans[out->n++] = (messages_span_t){at, header.length, header.rows};
        out->rows += header.rows;
        out->attributes |= header.attributes;
    }
}

status_t committed_keep(committed_t *filter, const uint8_t *bytes, size_t len,
                        const committed_aborted_t *aborted, uint32_t aborted_n,
                        uint64_t from_offset, uint64_t upto, messages_span_t *out_spans,
                        uint32_t room, committed_shown_t *out) {
    const status_t status = validate(bytes, len, upto, room);
    if (status != STATUS_OK) return status;
    if (!heap_reserve(filter, aborted_n)) return STATUS_NO_MEMORY;
    if (!set_reserve(filter, filter->set_n + filter->heap_n + aborted_n)) return STATUS_NO_MEMORY;
    for (uint32_t i = 0; i < aborted_n; i++) {
        if (aborted[i].txn_id != 0) heap_push(filter, aborted[i]);
    }
    show(filter, COMMITTED_ALL, bytes, len, from_offset, upto, out_spans, out);
    trim(filter);
    return STATUS_OK;
}

status_t committed_plain(const uint8_t *bytes, size_t len, committed_which_t which,
                         uint64_t from_offset, uint64_t upto, messages_span_t *out_spans,
                         uint32_t room, committed_shown_t *out) {
    const status_t status = validate(bytes, len, upto, room);
    if (status != STATUS_OK) return status;
    show(NULL, which, bytes, len, from_offset, upto, out_spans, out);
    return STATUS_OK;
}
