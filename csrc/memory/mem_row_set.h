/* A MemRowSet: rows by key and commit stamp in memory, as a skip list in an arena.
 *
 *   level 2  head ------------------> b@7 ----------------------------> nil
 *   level 1  head --------> a@3 ----> b@7 -----------------> d@5 -----> nil
 *   level 0  head -> a@9 -> a@3 ----> b@7 -> b@2 -> c@5 ---> d@5 -----> nil
 *
 * Entries stand in the order of their keys by memcmp, those of one key newest first. So the
 * version of a key that a snapshot sees is the first at or behind (key, snapshot).
 *
 * Threads: one writer at a time (put, put_many, apply: the caller has a lock), any number of
 * readers at the same time without one. An entry is written whole, then linked from the lowest
 * level up by release stores; readers follow links by acquire loads, so what they reach is
 * whole. Nothing is unlinked, changed or moved until the set is destroyed, so entries given
 * out stay valid for as long as it is there. A reader beside a writer sees some of what is
 * being written; stamps above its snapshot keep that away from it.
 *
 * Memory: nothing is changed by a call that returns NO_MEMORY. */
#ifndef TXNKV_MEMORY_MEM_ROW_SET_H
#define TXNKV_MEMORY_MEM_ROW_SET_H

#include "codec/keys.h"
#include "codec/row.h"
#include "common/status.h"

typedef struct mem_row_set mem_row_set_t;

/* An entry: the row's bytes, or row_len UINT32_MAX for a tombstone. The key's bytes stand
 * right before `row`, which is never NULL. */
typedef struct {
    uint64_t stamp;
    const uint8_t *row;
    uint32_t row_len;
    uint32_t key_len;
} mem_entry_t;

/* Keys in [low, high), NULL for no bound; stamps with after < stamp <= upto; of each key the
 * newest of these, or all of them when `versions`. */
typedef struct {
    const uint8_t *low;
    size_t low_len;
    const uint8_t *high;
    size_t high_len;
    uint64_t after;
    uint64_t upto;
    uint32_t versions;
} mem_range_t;

/* An empty set of keys of `width` bytes, 0: of any length. NULL: no memory. */
mem_row_set_t *mem_row_set_create(uint32_t width);
void mem_row_set_destroy(mem_row_set_t *set);

uint64_t mem_row_set_count(const mem_row_set_t *set);
/* Bytes of all entries, with what it takes to find them. */
uint64_t mem_row_set_bytes(const mem_row_set_t *set);
/* No entry has a higher stamp. */
uint64_t mem_row_set_max_stamp(const mem_row_set_t *set);

/* -- writing ------------------------------------------------------------------------------ */

/* Adds a version; row NULL is a tombstone. A version that is there stays as it is. INPUT: the
 * key has not the set's width. LIMIT: key or row have 4 GiB. */
status_t mem_row_set_put(mem_row_set_t *set, const uint8_t *key, size_t key_len, uint64_t stamp,
                         const uint8_t *row, size_t row_len);

/* Adds key i with row i, data[offsets[i], offsets[i + 1]); data NULL: tombstones. */
status_t mem_row_set_put_many(mem_row_set_t *set, const keys_t *keys, uint64_t stamp,
                              const uint8_t *data, const uint32_t *offsets);

/* A copy of the entries with after < stamp <= upto. NULL: no memory. */
mem_row_set_t *mem_row_set_copy(const mem_row_set_t *set, uint64_t after, uint64_t upto);

/* -- reading ------------------------------------------------------------------------------ */

/* The newest version of a key with after < stamp <= upto, NULL when there is none. */
const mem_entry_t *mem_row_set_get(const mem_row_set_t *set, const uint8_t *key, size_t key_len,
                                   uint64_t after, uint64_t upto);

/* The same for many; ascending keys go faster. */
void mem_row_set_lookup(const mem_row_set_t *set, const keys_t *keys, uint64_t after,
                        uint64_t upto, const mem_entry_t **out);

/* Entries of a range, `cap` at most; returns how many. `*last` is NULL at first; it is moved,
 * so that a call with the same goes on. */
uint32_t mem_row_set_select(const mem_row_set_t *set, const mem_range_t *range,
                            const mem_entry_t **last, uint32_t cap, const mem_entry_t **out);

/* The entry of a range with the greatest key, as `select` gives it last; NULL: none. LIMIT: too many
 * keys have none that is wanted. */
status_t mem_row_set_last(const mem_row_set_t *set, const mem_range_t *range,
                          const mem_entry_t **out);

/* The first entry with a key in [low, high), NULL for no bound, and a stamp > after. */
const mem_entry_t *mem_row_set_changed(const mem_row_set_t *set, const uint8_t *low,
                                       size_t low_len, const uint8_t *high, size_t high_len,
                                       uint64_t after);

/* The row that was put last, no tombstone; NULL: none. `max_stamp` asked afterwards is not below it. */
const mem_entry_t *mem_row_set_newest(const mem_row_set_t *set);

/* The row that was put before one that `mem_row_set_newest` or this has given; NULL: none. */
const mem_entry_t *mem_row_set_older(const mem_entry_t *entry);

/* The position of the first key that has an entry with a stamp > after, or -1. */
int64_t mem_row_set_changed_keys(const mem_row_set_t *set, const keys_t *keys, uint64_t after);

/* The same for the keys of another set, to which nobody writes: the first such entry of that. */
const mem_entry_t *mem_row_set_changed_of(const mem_row_set_t *set, const mem_row_set_t *own,
                                          uint64_t after);

#endif
