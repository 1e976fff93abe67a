/* Keys that a block and a list have in common, against a plain search. */
#include "codec/keys_inline.h"
#include "common/alloc.h"
#include "rowset/encode.h"
#include "rowset/match.h"
#include "tests/harness.h"
#include "tests/test_match.h"

enum { SEED = 5 };

/* Few keys and many, against a plain search. */
static void check_whole(const keys_t *keys, const block_t *block, const keys_t *any) {
    const keys_t *lists[] = {any, keys, any};
    uint32_t *rows = calloc((size_t)keys->n + 1, 4), *positions = calloc((size_t)keys->n + 1, 4);
    for (size_t k = 0; k < 3; k++) {
        const keys_t *some = lists[k];
        uint32_t count, at = 0;
        EXPECT(match_block(block, some, k == 0, keys->n, rows, positions, &count) == STATUS_OK);
        for (uint32_t i = 0; i < some->n; i++) {
            const int64_t row = k == 1 ? (int64_t)i : keys_find(keys, keys_at(some, i));
            if (row < 0) continue;
            EXPECT(at < count && rows[at] == row && positions[at] == i);
            at++;
        }
        EXPECT(at == count);
    }
    uint32_t count;
    if (keys->n > 0) {
        EXPECT(match_block(block, keys, 0, keys->n - 1, rows, positions, &count) == STATUS_LIMIT);
    }
    for (size_t n = 1; keys->n > 0 && n <= (block->encoding == BLOCK_PLAIN ? 1 : 2); n++) {
        alloc_fail_at(n);
        EXPECT(match_block(block, keys, 0, keys->n, rows, positions, &count) == STATUS_NO_MEMORY);
    }
    free(rows);
    free(positions);
}

/* A block of some keys among more of them. */
static void check_part(const keys_t *keys) {
    const uint32_t lo = keys->n / 4, n = keys->n / 2;
    const keys_t part = keys->offsets != NULL
                            ? (keys_t){keys->data, keys->data_len, keys->offsets + 4 * lo, 0, n}
                            : (keys_t){keys->data + (size_t)lo * keys->width,
                                       (size_t)n * keys->width, NULL, keys->width, n};
    const size_t room = block_size_of_keys(&part);
    size_t len;
    uint8_t *bytes = exact(room);
    uint32_t *rows = calloc((size_t)n + 1, 4), *positions = calloc((size_t)n + 1, 4), count;
    block_t block;
    EXPECT(encode_keys(&part, SEED, bytes, room, &len) == STATUS_OK);
    EXPECT(block_parse(bytes, len, &block) == STATUS_OK);
    EXPECT(match_block(&block, keys, 0, n, rows, positions, &count) == STATUS_OK && count == n);
    for (uint32_t i = 0; i < n; i++) EXPECT(rows[i] == i && positions[i] == lo + i);
    if (n > 0) {
        EXPECT(match_block(&block, keys, 0, n - 1, rows, positions, &count) == STATUS_LIMIT);
        alloc_fail_at(1);
        EXPECT(match_block(&block, keys, 0, n, rows, positions, &count) == STATUS_NO_MEMORY);
    }
    free(rows);
    free(positions);
    free(bytes);
}

void check_match(const keys_t *keys, const block_t *block, const keys_t *any) {
    check_whole(keys, block, any);
    check_part(keys);
}
