#include "rowset/match.h"

#include "codec/keys_inline.h"
#include "common/alloc.h"
#include "rowset/access.h"
#include "rowset/search.h"
#include "rowset/unpack.h"

enum { FEW = 64 }; /* a search in a packed block costs as much as so many of its keys unpacked */

/* A look for the keys of a block and of `some` in each other. */
typedef void look_t(const keys_t *block, const keys_t *some, int32_t *out);

static void rows_of(const keys_t *block, const keys_t *some, int32_t *out_rows) {
    search_batch(block, some, out_rows);
}

static void positions_of(const keys_t *block, const keys_t *some, int32_t *out_positions) {
    search_batch(some, block, out_positions);
}

static status_t look_unpacked(const block_t *block, const keys_t *some, look_t *look,
                              int32_t *out) {
    uint64_t size;
    status_t status = unpack_keys_size(block, &size);
    if (status != STATUS_OK) return status;
    const size_t head = block->kind == BLOCK_VARLEN ? 4 * ((size_t)block->rows + 1) : 0;
    uint8_t *memory = alloc_array(head + size, 1);
    if (memory == NULL) return STATUS_NO_MEMORY;
    status = unpack_keys(block, memory + head, size, (uint32_t *)(void *)memory);
    if (status == STATUS_OK) {
        const keys_t keys = {memory + head, size, head == 0 ? NULL : memory, block->width,
                             block->rows};
        look(&keys, some, out);
    }
    alloc_free(memory);
    return status;
}

static status_t look_in(const block_t *block, const keys_t *some, look_t *look, int32_t *out) {
    if (block->encoding != BLOCK_PLAIN) return look_unpacked(block, some, look, out);
    if (block->kind != BLOCK_FIXED && block->kind != BLOCK_VARLEN) return STATUS_CORRUPT;
    const keys_t keys = {block->data, block->data_len, block->offsets, block->width, block->rows};
    look(&keys, some, out);
    return STATUS_OK;
}

static status_t find_few(const block_t *block, const keys_t *some, int32_t *out_rows) {
    status_t status = STATUS_OK;
    for (uint32_t i = 0; status == STATUS_OK && i < some->n; i++) {
        const slice_t key = keys_at(some, i);
        int64_t row = -1;
        status = access_find(block, key.data, key.len, &row);
        out_rows[i] = (int32_t)row;
    }
    return status;
}

static status_t find_all(const block_t *block, const keys_t *some, int32_t *out_rows) {
    if (some->n < block->rows / FEW) return find_few(block, some, out_rows);
    return look_in(block, some, rows_of, out_rows);
}

/* As match_block, of a block that has fewer rows than `some` has keys, and no two with one key. */
static status_t match_rows(const block_t *block, const keys_t *some, uint32_t room,
                           uint32_t *out_rows, uint32_t *out_positions, uint32_t *out_count) {
    int32_t *found = alloc_array(block->rows, sizeof *found);
    if (found == NULL) return STATUS_NO_MEMORY;
    status_t status = look_in(block, some, positions_of, found);
    for (uint32_t row = 0; status == STATUS_OK && row < block->rows; row++) {
        if (found[row] < 0) continue;
        if (*out_count == room) {
            status = STATUS_LIMIT;
            break;
        }
        out_rows[*out_count] = row;
        out_positions[(*out_count)++] = (uint32_t)found[row];
    }
    alloc_free(found);
    return status;
}

status_t match_block(const block_t *block, const keys_t *some, uint32_t versioned, uint32_t room,
                     uint32_t *out_rows, uint32_t *out_positions, uint32_t *out_count) {
    *out_count = 0;
    if (block->rows > INT32_MAX) return STATUS_CORRUPT;
    if (!versioned && block->rows < some->n && some->n <= INT32_MAX) {
        return match_rows(block, some, room, out_rows, out_positions, out_count);
    }
    int32_t *found = alloc_array(some->n, sizeof *found);
    if (found == NULL) return STATUS_NO_MEMORY;
    status_t status = find_all(block, some, found);
    for (uint32_t i = 0; status == STATUS_OK && i < some->n; i++) {
        if (found[i] < 0 || (i != 0 && found[i] == found[i - 1])) continue;
        const slice_t key = keys_at(some, i);
        uint32_t row = (uint32_t)found[i];
        int order = 0;
        do {
            if (*out_count == room) {
                status = STATUS_LIMIT;
                break;
            }
            out_rows[*out_count] = row;
            out_positions[(*out_count)++] = i;
            if (!versioned || ++row == block->rows) break;
            status = access_compare(block, row, key.data, key.len, &order);
        } while (status == STATUS_OK && order == 0);
    }
    alloc_free(found);
    return status;
}
