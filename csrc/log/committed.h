/* Which batches of a fetch a reader is shown, and the state of a READ_COMMITTED reader: a heap
 * of aborted transactions by their first offset, and those of them that the walk is inside of.
 *
 *   offset     0   1   2   3         4   5
 *   batch     P1  P1  P2  P1 commit  P2  P2 abort      aborted list: (P2, 2)
 *   shown      x   x
 *
 * At a batch, every entry whose first offset is not behind it goes from the heap into the set;
 * an ABORT marker takes its transaction out. A batch is left out when its transaction is in the
 * set with a first offset that is not behind it: the second half matters when a reader goes
 * back a little, to where the same transaction still wrote what it committed.
 *
 * A filter belongs to one thread at a time; its memory comes from the allocator and grows with
 * the aborted transactions at hand, never with the open ones or with what they wrote. */
#ifndef TXNKV_LOG_COMMITTED_H
#define TXNKV_LOG_COMMITTED_H

#include "log/messages.h"

typedef struct committed committed_t;

typedef struct {
    uint64_t txn_id;
    uint64_t first_offset;
} committed_aborted_t;

/* What is shown: n spans, their rows and attributes, and the offset to read on from. */
typedef struct {
    uint64_t rows;
    uint64_t next_offset;
    uint32_t attributes; /* joined by or */
    uint32_t n;
} committed_shown_t;

/* NULL: there is no memory. */
committed_t *committed_create(void);
void committed_destroy(committed_t *filter);
/* Forgets all, as a reader does that goes elsewhere. */
void committed_reset(committed_t *filter);
/* How many aborted transactions wait for their first offset, how many the walk is inside of,
 * and the bytes that both take. */
void committed_held(const committed_t *filter, uint64_t *out_waiting, uint64_t *out_inside,
                    uint64_t *out_bytes);

/* The committed data batches with rows at or above from_offset, of those that end at or below
 * `upto`; `aborted` is the fetch's list and is taken into the state. `out_spans` has room for
 * as many as batch_count says. CORRUPT: the bytes are damaged, or offsets fall; NO_MEMORY. The
 * state is as before then. */
status_t committed_keep(committed_t *filter, const uint8_t *bytes, size_t len,
                        const committed_aborted_t *aborted, uint32_t aborted_n,
                        uint64_t from_offset, uint64_t upto, messages_span_t *out_spans,
                        uint32_t room, committed_shown_t *out);

/* The same without a filter: for READ_UNCOMMITTED all data batches, and of these, for a reader
 * that takes transactions with markers otherwise, those that none will come for: batches that
 * are decided or of no transaction. */
typedef enum { COMMITTED_ALL = 0, COMMITTED_DECIDED = 1 } committed_which_t;
status_t committed_plain(const uint8_t *bytes, size_t len, committed_which_t which,
                         uint64_t from_offset, uint64_t upto, messages_span_t *out_spans,
                         uint32_t room, committed_shown_t *out);

#endif
