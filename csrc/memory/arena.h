/* Memory that is taken piece by piece and given back all at once. */
#ifndef TXNKV_MEMORY_ARENA_H
#define TXNKV_MEMORY_ARENA_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

typedef struct arena_chunk arena_chunk_t;

/* All zero is an empty arena. Chunks grow from 1 KiB to 1 MiB, so that the many small ones of
 * transactions cost little. One thread at a time. */
typedef struct {
    arena_chunk_t *chunks;
    uint8_t *at;
    size_t left;
    size_t next;
} arena_t;

/* Sees to it that the next `len` bytes, taken in any pieces that are multiples of 8, are there
 * without another allocation. False: no memory, and nothing was changed. */
bool arena_reserve(arena_t *arena, size_t len);

/* Reserved memory, 8-byte aligned; len is a multiple of 8. */
void *arena_take(arena_t *arena, size_t len);

void arena_free(arena_t *arena);

#endif
