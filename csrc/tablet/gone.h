/* Ranges from whose front all rows were deleted, so that who takes from there again and again, as
 * from a queue, passes what is gone once, and not each time.
 *
 *   low ... gone ... end    row    low ... gone ... end     row ...
 *   the first part                 the next one
 *
 * Of what is committed at or below `stamp` no row has a key in a part. That stays so for later
 * snapshots, but for rows that were put into memory since: they are looked through before it is
 * believed, and cut the parts that they lie in. So a row that comes before others, as one of a
 * higher priority, leaves known what is gone behind it.
 *
 * Threads: any number; where one is at it, others do without. */
#ifndef TXNKV_TABLET_GONE_H
#define TXNKV_TABLET_GONE_H

#include "memory/mem_row_set.h"

enum { GONE_RANGES = 64, GONE_KEY_BYTES = 48, GONE_PARTS = 8 };

/* Length UINT32_MAX: no bound. */
typedef struct {
    uint32_t len;
    uint8_t data[GONE_KEY_BYTES];
} gone_bound_t;

/* The first part begins with its `low`, the others behind theirs. */
typedef struct {
    gone_bound_t low;
    gone_bound_t end;
} gone_part_t;

/* Parts that ascend, n of them; 0: nothing is noted. `newest`: of memory, when that was so. */
typedef struct {
    uint64_t stamp;
    const mem_entry_t *newest;
    uint32_t n;
    gone_part_t parts[GONE_PARTS];
} gone_range_t;

/* All zero: nothing is gone. Each range is made when something is noted in its place. */
typedef struct {
    uint32_t busy;
    gone_range_t *ranges[GONE_RANGES];
} gone_t;

/* Frees what was made: nothing is gone then. */
void gone_clear(gone_t *gone);

/* What is known to be gone from `low` on as a snapshot sees it; `newest` is set where nothing is. */
void gone_find(gone_t *gone, const mem_row_set_t *memory, const uint8_t *low, size_t low_len,
               uint64_t snapshot, gone_range_t *out);

/* Notes that no row is in [low, end), an end NULL for no bound. `found`: what `gone_find` gave before
 * the rows were looked for; nothing in memory was above the snapshot then. */
void gone_note(gone_t *gone, const gone_range_t *found, const uint8_t *low, size_t low_len,
               const uint8_t *end, size_t end_len, uint64_t snapshot);

#endif
