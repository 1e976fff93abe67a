/* Ranges from whose front all rows were deleted, so that who takes from there again and again, as
 * from a queue, passes what is gone once, and not each time.
 *
 *   low ....... gone ....... end      of what is committed at or below `stamp` no row has a key in
 *                                     [low, end)
 *
 * That stays so for later snapshots, but for rows that were put into memory since: they are looked
 * through (mem_row_set_first_since) before it is believed, and the range ends at the first of them.
 *
 * Threads: any number; where one is at it, others do without. */
#ifndef TXNKV_TABLET_GONE_H
#define TXNKV_TABLET_GONE_H

#include "memory/mem_row_set.h"

enum { GONE_RANGES = 16, GONE_KEY_BYTES = 48 };

/* Length of an end UINT32_MAX: no bound. Stamp 0: nothing is noted. */
typedef struct {
    uint64_t stamp;
    const mem_entry_t *newest;
    uint32_t low_len;
    uint32_t end_len;
    uint8_t low[GONE_KEY_BYTES];
    uint8_t end[GONE_KEY_BYTES];
} gone_range_t;

/* All zero: nothing is gone. */
typedef struct {
    uint32_t busy;
    gone_range_t ranges[GONE_RANGES];
} gone_t;

/* The end of what is gone from `low` on as a snapshot sees it, copied to `end`, which has room for
 * GONE_KEY_BYTES; its length, UINT32_MAX for no bound, or -1: nothing is known. */
int64_t gone_end(gone_t *gone, const mem_row_set_t *memory, const uint8_t *low, size_t low_len,
                 uint64_t snapshot, uint8_t *end);

/* Notes that no row is in [low, end), an end NULL for no bound. `newest`: of the memory, as it was
 * before the rows were looked for; nothing in it was above the snapshot then. */
void gone_note(gone_t *gone, const mem_entry_t *newest, const uint8_t *low, size_t low_len,
               const uint8_t *end, size_t end_len, uint64_t snapshot);

#endif
