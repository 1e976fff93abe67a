/* What is published of a tablet, and reads of single keys and short ranges in it without a step of
 * Python.
 *
 * The layers (tablet/layers.h) are put there by a reader that came by the way through Python; they
 * are taken for true as long as all of this holds, else the answer is PUBLISHED_MISS and the way
 * through Python puts them anew:
 *
 *   the epoch is that of then    a word that everything moves which makes layers stale: another
 *                                manifest, memory or catalog, a map that moves or is closed
 *   the snapshot is in memory    all that was committed up to it; for the latest, the change word is
 *                                known: nobody has committed what is not in memory here
 *   LMDB's transaction is        nobody has written to the environment; asked, by a read that
 *   that of then                 lasts as long as the look, only where row sets may have the key
 *
 * All of it runs under the GIL, from the first word to the last byte copied, but for the begin of
 * LMDB's read, after which the epoch is asked again: who moves a map moves the epoch first, and holds
 * the GIL then. LMDB is used through its own module alone. */
#ifndef TXNKV_NATIVE_PUBLISHED_H
#define TXNKV_NATIVE_PUBLISHED_H

#include "codec/keys_inline.h"
#include "native/row_table.h"
#include "tablet/layers.h"

typedef struct published published_t;

typedef enum {
    PUBLISHED_ABSENT = 0,
    PUBLISHED_FOUND = 1,
    PUBLISHED_MISS = 2, /* no error is set */
    PUBLISHED_ERROR = 3, /* an error of Python is set */
    PUBLISHED_MANY = 4 /* of a range alone */
} published_status_t;

/* Words of `shown`, which the commit log writes: its docstring tells of them. */
enum { KNOWN = 0, VISIBLE = 1, FLIGHT = 2, APPLIED = 4, SHOWN_WORDS = 5 };

#define PUBLISHED_MOST_BYTES ((size_t)1 << 20) /* of rows that are read together under the GIL */
#define PUBLISHED_LATEST UINT64_MAX /* as a snapshot: the latest there is */

/* Appends the bytes of the row with this key to `row`; own NULL: no writes of a transaction. */
published_status_t published_find(published_t *published, const mem_row_set_t *own,
                                  const uint8_t *key, size_t key_len, uint64_t snapshot,
                                  row_bytes_t *row);

/* Finds the rows with low <= key < high (data NULL: no bound) that a snapshot sees, ascending, the
 * first `most` of them, or the last ones, descending; FOUND also where there are none, MANY where there is much of it. `ends` has
 * room for LAYERS_FEW ends of the rows in `rows`; `range` has their keys. */
typedef struct {
    const mem_row_set_t *own;
    slice_t low;
    slice_t high;
    uint64_t snapshot;
    uint32_t most;
    bool descending;
    layers_range_t *range;
    row_bytes_t *rows;
    size_t *ends;
} published_range_t;

published_status_t published_find_range(published_t *published, published_range_t *asked);

/* Room for what a range has, and back; -1 with an error set. */
int published_range_init(published_range_t *asked, row_bytes_t *rows);
void published_range_free(published_range_t *asked);

/* Takes two bounds, `most`, `descending` and a snapshot from the arguments of a call in Python; -1
 * with an error set. */
int published_range_of(PyObject *const *args, published_range_t *out);

/* The published tablet that an object is, else NULL with an error set. */
published_t *published_of(PyObject *object);

/* The epoch that is now, of which everything published has to be. */
uint64_t published_epoch(const published_t *published);

#endif
