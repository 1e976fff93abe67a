#include "memory/key_owners.h"

#include <stdbool.h>
#include <stdlib.h>
#include <string.h>

#include "codec/hash.h"
#include "codec/hash_inline.h"
#include "codec/keys_inline.h"
#include "common/alloc.h"

/* Runs, each at least twice as long as the one behind it: so they are few, and a key is moved a
 * few times. */
enum { RUNS = 40, OWNER_BITS = 24, MOST = 1000, MOST_EACH = 4 /* owners of keys */ };

/* Ascending, of each key the upper bits of its hash above its owner. */
typedef struct {
    uint64_t *keys;
    uint32_t n;
} run_t;

struct key_owners {
    run_t runs[RUNS];
    uint32_t n; /* of runs */
};

static uint64_t hash_of(const keys_t *keys, uint32_t i) {
    if (keys->width == 8) return hash_8_bytes(load_le64(keys->data + 8 * (size_t)i));
    const slice_t key = keys_at(keys, i);
    return hash64(key.data, key.len);
}

static uint64_t hash_bits(uint64_t key) { return key >> OWNER_BITS << OWNER_BITS; }

static uint32_t owner_of(uint64_t key) { return (uint32_t)key & ((1u << OWNER_BITS) - 1); }

/* By bits that are kept of no key, so that each share lies as evenly as all. */
static bool in_share(uint64_t hash, uint32_t share, uint32_t shares) {
    return shares == 1 || (uint64_t)owner_of(hash) * shares >> OWNER_BITS == share;
}

static int compare(const void *a, const void *b) {
    const uint64_t x = *(const uint64_t *)a, y = *(const uint64_t *)b;
    return (x > y) - (x < y);
}

static void merge(run_t a, run_t b, uint64_t *out) {
    uint32_t i = 0, j = 0;
    for (size_t at = 0; at < (size_t)a.n + b.n; at++) {
        const bool from_a = j == b.n || (i < a.n && a.keys[i] <= b.keys[j]);
        out[at] = from_a ? a.keys[i++] : b.keys[j++];
    }
}

key_owners_t *key_owners_create(void) {
    key_owners_t *owners = alloc_array(1, sizeof *owners);
    if (owners != NULL) *owners = (key_owners_t){0};
    return owners;
}

void key_owners_destroy(key_owners_t *owners) {
    if (owners == NULL) return;
    for (uint32_t i = 0; i < owners->n; i++) alloc_free(owners->runs[i].keys);
    alloc_free(owners);
}

uint32_t key_owners_count(const key_owners_t *owners) {
    uint32_t n = 0;
    for (uint32_t i = 0; i < owners->n; i++) n += owners->runs[i].n;
    return n;
}

/* How many of the last runs become one with a run of n keys, and its length. */
static uint32_t runs_to_merge(const key_owners_t *owners, uint32_t *n) {
    uint32_t count = 0;
    while (count < owners->n && owners->runs[owners->n - 1 - count].n < 2 * (uint64_t)*n) {
        *n += owners->runs[owners->n - 1 - count++].n;
    }
    return count;
}

static uint32_t count_of(const keys_t *keys, uint32_t share, uint32_t shares) {
    if (shares == 1) return keys->n;
    uint32_t n = 0;
    for (uint32_t i = 0; i < keys->n; i++) n += in_share(hash_of(keys, i), share, shares);
    return n;
}

status_t key_owners_add(key_owners_t *owners, const keys_t *keys, uint32_t owner, uint32_t share,
                        uint32_t shares) {
    if (owner >> OWNER_BITS != 0) return STATUS_LIMIT;
    uint32_t n = count_of(keys, share, shares);
    if (n == 0) return STATUS_OK;
    if ((uint64_t)key_owners_count(owners) + n > INT32_MAX) return STATUS_LIMIT;
    const uint32_t merged = runs_to_merge(owners, &n);
    run_t run = {alloc_array(n, sizeof *run.keys), 0};
    uint64_t *spare = merged == 0 ? NULL : alloc_array(n, sizeof *spare);
    if (run.keys == NULL || (merged != 0 && spare == NULL)) {
        alloc_free(run.keys);
        alloc_free(spare);
        return STATUS_NO_MEMORY;
    }
    for (uint32_t i = 0; i < keys->n; i++) {
        const uint64_t hash = hash_of(keys, i);
        if (in_share(hash, share, shares)) run.keys[run.n++] = hash_bits(hash) | owner;
    }
    qsort(run.keys, run.n, sizeof *run.keys, compare);
    for (uint32_t i = 0; i < merged; i++) {
        const run_t last = owners->runs[--owners->n];
        merge(last, run, spare);
        uint64_t *const old = run.keys;
        run = (run_t){spare, last.n + run.n};
        spare = old;
        alloc_free(last.keys);
    }
    alloc_free(spare);
    owners->runs[owners->n++] = run;
    return STATUS_OK;
}

/* Hashes lie evenly, so the place of one is nearly known. */
static uint32_t lower_bound(const run_t *run, uint64_t key) {
    uint32_t lo = (uint32_t)((key >> 32) * run->n >> 32), hi = lo, step = 16;
    while (hi < run->n && run->keys[hi] < key) {
        lo = hi + 1;
        hi = run->n - hi > step ? hi + step : run->n;
        step *= 2;
    }
    while (lo > 0 && run->keys[lo - 1] >= key) {
        hi = lo - 1;
        lo = lo > step ? lo - step : 0;
        step *= 2;
    }
    while (lo < hi) {
        const uint32_t middle = lo + (hi - lo) / 2;
        if (run->keys[middle] < key) {
            lo = middle + 1;
        } else {
            hi = middle;
        }
    }
    return lo;
}

static void set_bit(uint8_t *bits, uint32_t i) { bits[i >> 3] |= (uint8_t)(1u << (i & 7)); }

uint32_t key_owners_find(const key_owners_t *owners, const keys_t *keys, uint8_t *out,
                         uint8_t *out_keys) {
    uint64_t found = 0;
    for (uint32_t i = 0; i < keys->n; i++) {
        const uint64_t wanted = hash_bits(hash_of(keys, i));
        for (uint32_t k = 0; k < owners->n; k++) {
            const run_t *run = owners->runs + k;
            for (uint32_t at = lower_bound(run, wanted); at < run->n; at++) {
                if (hash_bits(run->keys[at]) != wanted) break;
                if (++found > MOST + MOST_EACH * (uint64_t)i) return 0;
                set_bit(out, owner_of(run->keys[at]));
                set_bit(out_keys, i);
            }
        }
    }
    return 1;
}

/* All keys in one run, or in none. */
static status_t unite(key_owners_t *owners) {
    while (owners->n > 1) {
        const run_t a = owners->runs[owners->n - 2], b = owners->runs[owners->n - 1];
        uint64_t *const keys = alloc_array((size_t)a.n + b.n, sizeof *keys);
        if (keys == NULL) return STATUS_NO_MEMORY;
        merge(a, b, keys);
        alloc_free(a.keys);
        alloc_free(b.keys);
        owners->runs[--owners->n - 1] = (run_t){keys, a.n + b.n};
    }
    return STATUS_OK;
}

status_t key_owners_pairs(key_owners_t *owners, const uint32_t *seen, const uint32_t *writers,
                          uint32_t *out, uint32_t cap, uint32_t *n) {
    *n = 0;
    const status_t status = unite(owners);
    if (status != STATUS_OK || owners->n == 0) return status;
    const uint64_t *const keys = owners->runs[0].keys;
    uint32_t first = 0, end = 0; /* those of the key; behind `end` all are of one writer */
    for (uint32_t i = 1; i < owners->runs[0].n; i++) {
        const uint32_t later = owner_of(keys[i]);
        if (hash_bits(keys[i]) != hash_bits(keys[first])) {
            first = end = i;
        } else if (writers[later] != writers[owner_of(keys[i - 1])]) {
            end = i;
        }
        for (uint32_t k = end; k-- > first && owner_of(keys[k]) >= seen[later];) {
            const uint32_t pair[2] = {owner_of(keys[k]), later};
            if (writers[pair[0]] == writers[later]) continue;
            if (*n > 0 && memcmp(out + 2 * (size_t)*n - 2, pair, sizeof pair) == 0) continue;
            if (*n == cap) return STATUS_OK;
            memcpy(out + 2 * (size_t)*n, pair, sizeof pair);
            ++*n;
        }
    }
    return STATUS_OK;
}
