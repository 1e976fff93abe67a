/* The inside of a MemRowSet, for the files of this folder. */
#ifndef TXNKV_MEMORY_MEM_NODE_H
#define TXNKV_MEMORY_MEM_NODE_H

#include <stdatomic.h>
#include <stdbool.h>

#include "codec/keys_inline.h"
#include "memory/arena.h"
#include "memory/mem_row_set.h"

#define MEM_TOMBSTONE UINT32_MAX
#define MEM_LEVELS 12 /* a quarter of the nodes of a level are on the next: 16 M at level 12 */

typedef struct mem_node mem_node_t;
typedef _Atomic(mem_node_t *) mem_link_t;

/* In the arena: the node, its links, the key, the row. */
struct mem_node {
    mem_entry_t entry;
    uint64_t prefix; /* of the key: most comparisons need no other memory */
    const mem_node_t *older; /* the row that was put before it */
    mem_link_t next[];
};

struct mem_row_set {
    mem_link_t head[MEM_LEVELS];
    _Atomic uint32_t levels; /* in use; a reader that sees too few only goes slower */
    _Atomic uint64_t max_stamp;
    _Atomic(const mem_node_t *) newest; /* no tombstone */
    _Atomic uint64_t count;
    _Atomic uint64_t bytes;
    uint32_t width;
    /* The writer's alone: */
    uint64_t random;
    arena_t arena;
    mem_node_t *last;             /* the node added last, and the links in front of what is */
    mem_link_t *prev[MEM_LEVELS]; /* behind it: ascending writes need no search */
};

/* What is searched for: the first entry at or behind (key, stamp). */
typedef struct {
    slice_t key;
    uint64_t prefix;
    uint64_t stamp;
} mem_probe_t;

static inline mem_probe_t mem_probe(slice_t key, uint64_t stamp) {
    const mem_probe_t probe = {key, slice_prefix(key, 0), stamp};
    return probe;
}

static inline const mem_node_t *mem_node_of(const mem_entry_t *entry) {
    return (const mem_node_t *)(const void *)entry;
}

static inline mem_node_t *mem_next(const mem_link_t *links, uint32_t level) {
    return atomic_load_explicit(links + level, memory_order_acquire);
}

static inline slice_t mem_key(const mem_entry_t *entry) {
    const slice_t key = {entry->row - entry->key_len, entry->key_len};
    return key;
}

static inline int mem_compare_key(const mem_node_t *node, const mem_probe_t *probe) {
    if (node->prefix != probe->prefix) return node->prefix < probe->prefix ? -1 : 1;
    if (node->entry.key_len == 8 && probe->key.len == 8) return 0;
    return slice_compare(mem_key(&node->entry), probe->key);
}

/* Whether a node stands before what is searched for. */
static inline bool mem_before(const mem_node_t *node, const mem_probe_t *probe) {
    const int order = mem_compare_key(node, probe);
    return order != 0 ? order < 0 : node->entry.stamp > probe->stamp;
}

/* Goes right and down from links at `level`; the links passed last are kept in `prev`, if
 * given. Returns the first node at or behind the probe. */
static inline mem_node_t *mem_descend(const mem_link_t *links, uint32_t level,
                                      const mem_probe_t *probe, const mem_link_t **prev) {
    mem_node_t *next, *bound = NULL; /* bound: known not to be before the probe */
    for (;;) {
        next = mem_next(links, level);
        if (next != NULL && next != bound && mem_before(next, probe)) {
            links = next->next;
            continue;
        }
        if (prev != NULL) prev[level] = links;
        if (level == 0) return next;
        bound = next;
        level--;
    }
}

static inline uint32_t mem_levels(const mem_row_set_t *set) {
    return atomic_load_explicit(&set->levels, memory_order_relaxed);
}

static inline mem_node_t *mem_seek(const mem_row_set_t *set, const mem_probe_t *probe) {
    return mem_descend(set->head, mem_levels(set) - 1, probe, NULL);
}

/* Nothing in the set is newer. */
static inline uint64_t mem_max_stamp(const mem_row_set_t *set) {
    return atomic_load_explicit(&set->max_stamp, memory_order_acquire);
}

static inline const mem_node_t *mem_newest(const mem_row_set_t *set) {
    return atomic_load_explicit(&set->newest, memory_order_acquire);
}

/* The level of the next node, from a state that steps with each. */
uint32_t mem_draw_levels(uint64_t *random);

/* The bytes of a node. */
size_t mem_node_size(uint32_t levels, size_t key_len, size_t row_len);

/* Adds a version to a set whose arena has the room reserved. */
void mem_insert(mem_row_set_t *set, slice_t key, uint64_t stamp, const uint8_t *row,
                uint32_t row_len);

#endif
