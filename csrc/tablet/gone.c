#include "tablet/gone.h"

#include <stdbool.h>

#include "codec/hash.h"
#include "codec/keys_inline.h"

#define NO_BOUND UINT32_MAX

static bool take(gone_t *gone) {
    return __atomic_exchange_n(&gone->busy, 1, __ATOMIC_ACQUIRE) == 0;
}

static void give_back(gone_t *gone) { __atomic_store_n(&gone->busy, 0, __ATOMIC_RELEASE); }

static gone_range_t *place_of(gone_t *gone, slice_t low) {
    return gone->ranges + hash64(low.data, low.len) % GONE_RANGES;
}

static bool is_for(const gone_range_t *range, slice_t low, uint64_t snapshot) {
    return range->stamp != 0 && range->stamp <= snapshot && range->low_len == low.len &&
           compare_bytes(range->low, low.data, low.len) == 0;
}

static void set_end(gone_range_t *range, slice_t end) {
    range->end_len = end.data == NULL ? NO_BOUND : (uint32_t)end.len;
    copy_bytes(range->end, end.data, end.data == NULL ? 0 : end.len);
}

/* Up to the first row that was put into it since. */
static void shorten(gone_range_t *range, const mem_row_set_t *memory) {
    const mem_entry_t *newest = mem_row_set_newest(memory), *first;
    const uint8_t *end = range->end_len == NO_BOUND ? NULL : range->end;
    const status_t status = mem_row_set_first_since(memory, range->newest, range->low,
                                                    range->low_len, end, range->end_len, &first);
    range->newest = newest;
    if (status != STATUS_OK || (first != NULL && first->key_len > GONE_KEY_BYTES)) {
        range->stamp = 0;
    } else if (first != NULL) {
        const slice_t key = {first->row - first->key_len, first->key_len};
        set_end(range, key);
    }
}

int64_t gone_end(gone_t *gone, const mem_row_set_t *memory, const uint8_t *low, size_t low_len,
                 uint64_t snapshot, uint8_t *end) {
    const slice_t from = {low, low_len};
    int64_t len = -1;
    if (low_len > GONE_KEY_BYTES || !take(gone)) return -1;
    gone_range_t *range = place_of(gone, from);
    if (is_for(range, from, snapshot)) {
        shorten(range, memory);
        if (range->stamp != 0) {
            len = range->end_len;
            copy_bytes(end, range->end, len == NO_BOUND ? 0 : (size_t)len);
        }
    }
    give_back(gone);
    return len;
}

void gone_note(gone_t *gone, const mem_entry_t *newest, const uint8_t *low, size_t low_len,
               const uint8_t *end, size_t end_len, uint64_t snapshot) {
    const slice_t from = {low, low_len}, to = {end, end_len};
    if (low_len > GONE_KEY_BYTES || (end != NULL && end_len > GONE_KEY_BYTES)) return;
    if (!take(gone)) return;
    gone_range_t *range = place_of(gone, from);
    range->stamp = snapshot;
    range->newest = newest;
    range->low_len = (uint32_t)low_len;
    copy_bytes(range->low, low, low_len);
    set_end(range, to);
    give_back(gone);
}
