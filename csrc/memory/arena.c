#include "memory/arena.h"

#include "common/alloc.h"
#include "common/check.h"

#define FIRST ((size_t)1 << 10)
#define LARGEST ((size_t)1 << 20)

struct arena_chunk {
    arena_chunk_t *older;
    uint64_t memory[];
};

bool arena_reserve(arena_t *arena, size_t len) {
    if (len <= arena->left) return true;
    const size_t usual = arena->next == 0 ? FIRST : arena->next;
    const size_t size = len > usual - sizeof(arena_chunk_t) ? len : usual - sizeof(arena_chunk_t);
    if (size > SIZE_MAX - sizeof(arena_chunk_t)) return false;
    arena_chunk_t *chunk = alloc_array(1, sizeof(arena_chunk_t) + size);
    if (chunk == NULL) return false;
    chunk->older = arena->chunks;
    arena->chunks = chunk;
    arena->at = (uint8_t *)chunk->memory;
    arena->left = size;
    arena->next = usual < LARGEST ? 2 * usual : LARGEST;
    return true;
}

void *arena_take(arena_t *arena, size_t len) {
    CHECK(len % 8 == 0 && len <= arena->left);
    uint8_t *memory = arena->at;
    arena->at += len;
    arena->left -= len;
    return memory;
}

void arena_free(arena_t *arena) {
    while (arena->chunks != NULL) {
        arena_chunk_t *older = arena->chunks->older;
        alloc_free(arena->chunks);
        arena->chunks = older;
    }
    *arena = (arena_t){0};
}
