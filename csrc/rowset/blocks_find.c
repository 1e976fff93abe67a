#include "common/rows.h"
#include "rowset/access.h"
#include "rowset/blocks.h"
#include "rowset/search_inline.h"

enum { LANES = 16 };

/* One of the searches that go on together: in [lo, lo + n) of its keys. In a block that is not
 * plain the search is over at once: `lo` is the place, as of keys without any to step through. */
typedef struct {
    block_t parsed;
    keys_t keys;
    bool found;
    slice_t probe;
    uint64_t number;
    uint32_t lo;
    uint32_t n;
    uint32_t block;
} lane_t;

static inline void prefetch_middle(const lane_t *lane, uint32_t width) {
    const size_t middle = (size_t)lane->lo + lane->n / 2 - (lane->n > 1);
    if (width != 0) {
        __builtin_prefetch(lane->keys.data + middle * width);
    } else if (lane->keys.offsets != NULL) {
        __builtin_prefetch(lane->keys.offsets + 4 * middle);
    } else {
        __builtin_prefetch(lane->keys.data + middle * lane->keys.width);
    }
}

/* `width`: 8 or 4 where both keys and probes are such numbers, else 0. */
static inline bool is_below(const lane_t *lane, uint32_t at, uint32_t width) {
    if (width != 0) return keys_number(lane->keys.data, width, at) < lane->number;
    return slice_compare(keys_at(&lane->keys, at), lane->probe) < 0;
}

/* A step of each lane by turns: while one waits for memory the others go on. */
static inline void search_lanes(lane_t *lanes, uint32_t count, uint32_t width) {
    for (bool going = true; going;) {
        going = false;
        for (uint32_t i = 0; i < count; i++) {
            lane_t *lane = lanes + i;
            if (lane->n <= 1) continue;
            const uint32_t half = lane->n / 2;
            lane->lo += is_below(lane, lane->lo + half - 1, width) ? half : 0;
            lane->n -= half;
            going |= lane->n > 1;
            prefetch_middle(lane, width);
        }
    }
    for (uint32_t i = 0; i < count; i++) {
        if (lanes[i].n == 1 && is_below(lanes + i, lanes[i].lo, width)) lanes[i].lo++;
    }
}

/* The block that may hold a key: the last whose first key is not above it. */
static uint32_t block_of(const keys_t *firsts, slice_t key) {
    uint32_t lo = 0, hi = firsts->n;
    while (lo < hi) {
        const uint32_t mid = lo + (hi - lo) / 2;
        if (slice_compare(keys_at(firsts, mid), key) <= 0) {
            lo = mid + 1;
        } else {
            hi = mid;
        }
    }
    return lo == 0 ? ROWS_NULL : lo - 1;
}

static status_t find_in_light(lane_t *lane) {
    int64_t row;
    const status_t status = access_find(&lane->parsed, lane->probe.data, lane->probe.len, &row);
    lane->found = status == STATUS_OK && row >= 0;
    lane->lo = lane->found ? (uint32_t)row : 0;
    return status;
}

static status_t open_lane(const block_bytes_t *blocks, const keys_t *firsts, slice_t probe,
                          const lane_t *before, lane_t *lane) {
    lane->probe = probe;
    lane->block = block_of(firsts, probe);
    lane->number = 0;
    lane->lo = lane->n = lane->keys.n = 0;
    lane->found = false;
    if (lane->block == ROWS_NULL || blocks[lane->block].bytes == NULL) return STATUS_OK;
    if (before != NULL && before->block == lane->block) {
        lane->parsed = before->parsed;
        lane->keys = before->keys;
    } else {
        const block_bytes_t block = blocks[lane->block];
        const status_t status = block_parse(block.bytes, block.len, &lane->parsed);
        if (status != STATUS_OK) return status;
        if (lane->parsed.encoding == BLOCK_PLAIN &&
            block_keys(block.bytes, block.len, &lane->keys) != STATUS_OK) {
            return STATUS_CORRUPT;
        }
    }
    if (lane->parsed.encoding != BLOCK_PLAIN) return find_in_light(lane);
    lane->n = lane->keys.n;
    return STATUS_OK;
}

static void close_lane(const lane_t *lane, uint32_t *out_block, uint32_t *out_row) {
    const bool found =
        lane->found || (lane->lo < lane->keys.n &&
                        slice_compare(keys_at(&lane->keys, lane->lo), lane->probe) == 0);
    *out_block = found ? lane->block : ROWS_NULL;
    *out_row = found ? lane->lo : ROWS_NULL;
}

/* Whether all lanes search numbers of `width` bytes. */
static bool are_numbers(const lane_t *lanes, uint32_t count, uint32_t width) {
    for (uint32_t i = 0; i < count; i++) {
        if (lanes[i].n != 0 && (lanes[i].keys.width != width || lanes[i].probe.len != width)) {
            return false;
        }
    }
    return true;
}

static void run_lanes(lane_t *lanes, uint32_t count) {
    const uint32_t width = are_numbers(lanes, count, 8) ? 8 : are_numbers(lanes, count, 4) ? 4 : 0;
    for (uint32_t i = 0; i < count; i++) {
        if (lanes[i].n != 0 && width != 0) {
            lanes[i].number = keys_number(lanes[i].probe.data, width, 0);
        }
    }
    switch (width) {
        case 8: search_lanes(lanes, count, 8); break;
        case 4: search_lanes(lanes, count, 4); break;
        default: search_lanes(lanes, count, 0);
    }
}

status_t blocks_find(const block_bytes_t *blocks, const keys_t *firsts, const keys_t *probes,
                     uint32_t *out_block, uint32_t *out_row) {
    lane_t lanes[LANES];
    for (uint32_t from = 0; from < probes->n;) {
        const uint32_t count = probes->n - from < LANES ? probes->n - from : LANES;
        for (uint32_t i = 0; i < count; i++) {
            const lane_t *before = i == 0 ? NULL : lanes + i - 1;
            const status_t status =
                open_lane(blocks, firsts, keys_at(probes, from + i), before, lanes + i);
            if (status != STATUS_OK) return status;
        }
        run_lanes(lanes, count);
        for (uint32_t i = 0; i < count; i++) {
            close_lane(lanes + i, out_block + from + i, out_row + from + i);
        }
        from += count;
    }
    return STATUS_OK;
}
