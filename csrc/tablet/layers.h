/* The published state of a tablet: the layers that a key is looked for in, one above the other.
 *
 *   own         what a transaction wrote, in memory        a row, or a tombstone, decides
 *   staged      its row sets, the newest first
 *   memory      committed, flushed < stamp <= snapshot
 *   steps       committed row sets, in the order in which they are asked
 *
 * A row set is its blocks as they lie in the map, parsed once. A block that nobody asked for yet is
 * NULL: the answer is LAYERS_LOAD with its place, the caller parses and sets it, and asks again.
 *
 * Nothing here is changed once it is made, but for blocks that are set, which is atomic, and for
 * what is noted as gone, by one thread at a time. The caller keeps all memory, and the map and its
 * pages, for as long as a call goes on. Blocks are those that block_verify has accepted; what is
 * damaged all the same gives LAYERS_CORRUPT, never a read outside. Safe from any thread; nothing is
 * allocated. */
#ifndef TXNKV_TABLET_LAYERS_H
#define TXNKV_TABLET_LAYERS_H

#include "codec/row.h"
#include "memory/mem_row_set.h"
#include "rowset/block.h"
#include "rowset/delta.h"
#include "tablet/gone.h"

/* One block of a row set. `filter` or `inserts` of no rows: there is none, or all have the row
 * set's stamp. A column of kind 0 is not there: the default counts. */
typedef struct {
    block_t keys;
    block_t filter;
    block_t inserts;
    delta_t deletes;
    const block_t *columns;
} layer_block_t;

/* Keys: the first and the last of each block; `low` and `high` are the beginnings of the first and
 * the last of all, as numbers. Stamps: the lowest and the highest of its rows, both 0 when a
 * transaction staged it, and all of it is seen. */
typedef struct {
    keys_t firsts;
    keys_t lasts;
    const layer_block_t **blocks;
    uint64_t first_stamp;
    uint64_t stamp;
    uint32_t versioned;  /* a key may be there several times, newest first */
    uint32_t tombstones; /* its keys are deleted ones; there are no rows */
    uint64_t low;        /* filled by layers_init_row_set */
    uint64_t high;
} layer_row_set_t;

/* Rows inserted below `before` are hidden by a later step. `hides`: no key of it is looked for any
 * further, whether its row is seen or not. */
typedef struct {
    layer_row_set_t *row_set;
    uint64_t before;
    uint32_t hides;
} layer_step_t;

typedef struct {
    const layer_step_t *staged;
    const layer_step_t *steps;
    const mem_row_set_t *memory;
    uint64_t flushed;
    uint32_t staged_n;
    uint32_t steps_n;
    gone_t *gone; /* what is known to be gone of memory and steps; NULL: that is not kept */
} layers_t;

typedef enum {
    LAYERS_ABSENT = 0,
    LAYERS_MEMORY = 1, /* `entry` */
    LAYERS_OWN = 2,    /* the same, of the transaction's own memory */
    LAYERS_BLOCK = 3,  /* `block` and `row`; it is number `number` of step `step` */
    LAYERS_LOAD = 4,   /* block `number` of step `step`, staged ones first, is to be set */
    LAYERS_CORRUPT = 5 /* so is that one */
} layers_state_t;

typedef struct {
    const mem_entry_t *entry;
    const layer_block_t *block;
    uint32_t row;
    uint32_t state;
    uint32_t step;
    uint32_t number;
} layer_found_t;

/* Notes between which keys it has any: most others are then passed with a look at two numbers. */
void layers_init_row_set(layer_row_set_t *row_set);

/* Gives a row set a block. */
void layers_set_block(layer_row_set_t *row_set, uint32_t number, const layer_block_t *block);

/* Whether a step may have the key, so that pages are to be read for it. */
int layers_meet(const layers_t *layers, const uint8_t *key, size_t key_len, uint64_t snapshot);

/* The row that a snapshot sees; own NULL: no writes. Returns out->state. */
uint32_t layers_find(const layers_t *layers, const mem_row_set_t *own, const uint8_t *key,
                     size_t key_len, uint64_t snapshot, layer_found_t *out);

/* The first row of a key in a row set, where that is known. */
typedef struct {
    const layer_row_set_t *row_set;
    uint32_t number;
    uint32_t row;
} layer_place_t;

/* The same of a key that has a place. */
uint32_t layers_find_at(const layers_t *layers, const mem_row_set_t *own, const uint8_t *key,
                        size_t key_len, uint64_t snapshot, const layer_place_t *place,
                        layer_found_t *out);

/* In memory alone: LAYERS_ABSENT when it does not decide. */
uint32_t layers_find_memory(const layers_t *layers, const mem_row_set_t *own, const uint8_t *key,
                            size_t key_len, uint64_t snapshot, layer_found_t *out);

/* The same for keys [from, n): keys rows[i], or i where rows is NULL. Returns how many are done: n,
 * or the first whose block is to be loaded, or is damaged. */
uint32_t layers_find_many(const layers_t *layers, const mem_row_set_t *own, const keys_t *keys,
                          const uint32_t *rows, uint32_t from, uint32_t n, uint64_t snapshot,
                          layer_found_t *out);

/* Bits of the keys whose row was found, (n + 7) / 8 bytes; returns how many are set. */
uint32_t layers_present(const layer_found_t *found, uint32_t n, uint8_t *out_bits);

/* The bytes of a row that is in a block; columns that are not there as in `defaults`, a row of
 * the layout. Returns its length, or that of its head where `cap` has no room for it: when it is
 * above `cap`, nothing usable was written. -1: a column is damaged, or of another kind than the layout
 * says. */
int64_t layers_row(const row_layout_t *layout, const uint8_t *defaults, size_t defaults_len,
                   const layer_found_t *found, uint8_t *out, size_t cap);

/* Slices of the rows found[from, n), NULL where there is none: those in blocks are written to
 * `out`, one behind the other. Returns how many are done, all unless `cap` is used up; -1 as above. */
int64_t layers_rows(const row_layout_t *layout, const uint8_t *defaults, size_t defaults_len,
                    const layer_found_t *found, uint32_t from, uint32_t n, uint8_t *out,
                    size_t cap, row_slice_t *out_slices);

/* -- short ranges ------------------------------------------------------------------------- */

enum { LAYERS_FEW = 1024, LAYERS_CURSORS = 16, LAYERS_KEY_BYTES = 1 << 16 };

/* Room for what a range has. */
typedef struct {
    uint32_t n;
    layer_found_t found[LAYERS_FEW];
    uint32_t ends[LAYERS_FEW + 1]; /* of keys, the first is 0 */
    uint8_t keys[LAYERS_KEY_BYTES];
} layers_range_t;

typedef enum {
    LAYERS_RANGE_OK = 0,
    LAYERS_RANGE_LONG = 1, /* too much for this way: many keys, row sets or blocks */
    LAYERS_RANGE_STOP = 2  /* out->found[out->n] says which block is to be loaded, or is damaged */
} layers_range_status_t;

/* The rows with low <= key < high (NULL: no bound) that a snapshot sees, ascending: the first `most`
 * of them; or, `descending`, the last ones, the last of all first. Where `most` is LAYERS_FEW or
 * more, all are wanted, and more than that are too many. */
layers_range_status_t layers_range(const layers_t *layers, const mem_row_set_t *own,
                                   const uint8_t *low, size_t low_len, const uint8_t *high,
                                   size_t high_len, uint64_t snapshot, uint32_t most,
                                   uint32_t descending, layers_range_t *out);

#endif
