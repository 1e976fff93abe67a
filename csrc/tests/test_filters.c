#include <string.h>

#include "codec/keys_inline.h"
#include "common/alloc.h"
#include "common/bits.h"
#include "memory/key_owners.h"
#include "rowset/bloom.h"
#include "rowset/visible.h"
#include "tests/harness.h"

void test_bloom(void) {
    EXPECT(bloom_size(0) == 32 && bloom_size(1) == 32 && bloom_size(26) == 64);
    for (int shape = 0; shape < KEYS_SHAPES; shape++) {
        const keys_t keys = keys_random((shape_t)shape, 5000, false);
        const keys_t others = keys_random((shape_t)shape, 5000, false);
        const size_t len = bloom_size(keys.n);
        uint8_t *filter = exact(len), *bits = exact(bits_bytes(5000));
        uint32_t count;
        bloom_build(&keys, filter, len);
        bloom_probe_batch(filter, len, &keys, bits, &count);
        EXPECT(count == 5000 && bits_count(bits, 0, 5000) == 5000);
        bloom_probe_batch(filter, len, &others, bits, &count);
        EXPECT(count < (shape == KEYS_VARIABLE ? 1500 : 150)); /* short strings repeat */
        for (uint32_t i = 0; i < 5000; i++) {
            const slice_t key = keys_at(&others, i);
            EXPECT((unsigned)bloom_probe(filter, len, key.data, key.len) == bits_get(bits, i));
        }
        free(filter);
        free(bits);
        keys_drop(keys);
        keys_drop(others);
    }
}

void test_key_owners(void) {
    enum { OWNERS = 300 };
    for (int shape = 0; shape < KEYS_SHAPES; shape++) {
        key_owners_t *owners = key_owners_create();
        keys_t keys[OWNERS];
        uint8_t *bits = exact(bits_bytes(OWNERS)), *found = exact(bits_bytes(2000));
        uint32_t n = 0, more = 0;
        for (uint32_t i = 0; i < OWNERS; i++) {
            keys[i] = keys_random((shape_t)shape, random_below(i % 50 == 0 ? 2000 : 20), false);
            alloc_fail_at(i % 7 == 0 ? 1 : 0);
            if (i % 7 == 0 && keys[i].n > 0) {
                EXPECT(key_owners_add(owners, keys + i, i, 0, 1) == STATUS_NO_MEMORY);
            }
            alloc_fail_at(0);
            EXPECT(key_owners_count(owners) == n);
            EXPECT(key_owners_add(owners, keys + i, i, 0, 1) == STATUS_OK);
            n += keys[i].n;
        }
        for (uint32_t i = 0; i < OWNERS; i++) {
            memset(bits, 0, bits_bytes(OWNERS));
            memset(found, 0, bits_bytes(2000));
            if (key_owners_find(owners, keys + i, bits, found) == 0) {
                EXPECT(shape == KEYS_VARIABLE);
                continue;
            }
            EXPECT(keys[i].n == 0 || bits_get(bits, i) == 1);
            EXPECT(bits_count(found, 0, 2000) == keys[i].n);
            more += (uint32_t)bits_count(bits, 0, OWNERS);
        }
        if (shape != KEYS_VARIABLE) EXPECT(more < 2 * OWNERS); /* short strings repeat */
        for (uint32_t i = 0; i < OWNERS; i++) keys_drop(keys[i]);
        free(bits);
        free(found);
        key_owners_destroy(owners);
    }
}

static bool has_key(const keys_t *keys, slice_t key) {
    for (uint32_t i = 0; i < keys->n; i++) {
        if (slice_compare(keys_at(keys, i), key) == 0) return true;
    }
    return false;
}

void test_key_owners_pairs(void) {
    enum { OWNERS = 40, CAP = 1 << 19 };
    for (int round = 0; round < 40; round++) {
        const shape_t shape = (shape_t)(round % KEYS_SHAPES);
        const uint32_t shares = 1 + random_below(3);
        keys_t keys[OWNERS];
        uint32_t seen[OWNERS], writers[OWNERS], n = 0;
        uint32_t *const pairs = (uint32_t *)(void *)exact(2 * CAP * sizeof *pairs);
        for (uint32_t i = 0; i < OWNERS; i++) {
            keys[i] = keys_random_sorted(shape, random_below(20), round % 3 != 0);
            seen[i] = random_below(i + 1);
            writers[i] = i == 0 || random_below(3) == 0 ? random_below(9) : writers[i - 1];
        }
        for (uint32_t share = 0, more = 0; share < shares; share++, n += more) {
            key_owners_t *owners = key_owners_create();
            for (uint32_t i = 0; i < OWNERS; i++) {
                EXPECT(key_owners_add(owners, keys + i, i, share, shares) == STATUS_OK);
            }
            alloc_fail_at(1);
            const status_t status =
                key_owners_pairs(owners, seen, writers, pairs + 2 * n, CAP - n, &more);
            alloc_fail_at(0);
            if (status == STATUS_NO_MEMORY) {
                EXPECT(key_owners_pairs(owners, seen, writers, pairs + 2 * n, CAP - n, &more) ==
                       STATUS_OK);
            }
            key_owners_destroy(owners);
        }
        uint32_t expected = 0;
        bool wanted[OWNERS][OWNERS] = {{false}};
        for (uint32_t later = 0; later < OWNERS; later++) {
            for (uint32_t k = 0; k < keys[later].n; k++) {
                const slice_t key = keys_at(keys + later, k);
                for (uint32_t at = seen[later]; at < later; at++) {
                    const bool knows = writers[at] == writers[later] || wanted[at][later];
                    if (knows || !has_key(keys + at, key)) continue;
                    wanted[at][later] = true;
                    expected++;
                }
            }
        }
        uint32_t found = 0;
        for (uint32_t i = 0; i < n; i++) {
            EXPECT(pairs[2 * i] < pairs[2 * i + 1] && pairs[2 * i + 1] < OWNERS);
            const bool once = wanted[pairs[2 * i]][pairs[2 * i + 1]];
            found += once;
            if (once) wanted[pairs[2 * i]][pairs[2 * i + 1]] = false;
        }
        EXPECT(found == expected);
        for (uint32_t i = 0; i < OWNERS; i++) keys_drop(keys[i]);
        free(pairs);
    }
}

static uint64_t random_stamp(uint64_t own) {
    const uint64_t top = UINT64_C(1) << 63;
    switch (random_below(6)) {
        case 0: return own;
        case 1: return top | random_below(4);
        case 2: return top - 1;
        default: return random_below(100);
    }
}

static bool seen(uint64_t stamp, uint64_t snapshot, uint64_t own) {
    if (stamp >> 63 == 0) return stamp <= snapshot;
    return stamp == own;
}

static void check_visible(uint32_t n, bool deletes, uint64_t own) {
    uint8_t *in = exact(8 * (size_t)n + 1), *out = exact(8 * (size_t)n + 1); /* unaligned by 1 */
    uint8_t *bits = exact(bits_bytes(n)), *plain = exact(bits_bytes(n));
    const uint64_t snapshot = random_below(100);
    uint32_t visible, undecided, plain_visible, plain_undecided, want = 0, asked = 0;
    for (size_t i = 0; i < n; i++) {
        store_le64(in + 1 + 8 * i, random_stamp(own));
        store_le64(out + 1 + 8 * i, random_stamp(own));
    }
    const uint8_t *del = deletes ? out + 1 : NULL;
    visible_bitmap(in + 1, del, n, snapshot, own, bits, &visible, &undecided);
    visible_bitmap_portable(in + 1, del, n, snapshot, own, plain, &plain_visible,
                            &plain_undecided);
    EXPECT(compare_bytes(bits, plain, bits_bytes(n)) == 0);
    for (size_t i = 0; i < n; i++) {
        const uint64_t a = load_le64(in + 1 + 8 * i), b = load_le64(out + 1 + 8 * i);
        const bool row = seen(a, snapshot, own) && !(deletes && seen(b, snapshot, own));
        EXPECT(bits_get(bits, i) == row);
        want += row;
        asked += (a >> 63 != 0 && a != own) || (deletes && b >> 63 != 0 && b != own);
    }
    EXPECT(visible == want && undecided == asked);
    EXPECT(plain_visible == want && plain_undecided == asked);
    free(in);
    free(out);
    free(bits);
    free(plain);
}

void test_visible(void) {
    const uint64_t own = (UINT64_C(1) << 63) + 2;
    for (uint32_t n = 0; n < 200; n++) {
        check_visible(n, n % 2 == 0, n % 3 == 0 ? 0 : own);
        check_visible(n, n % 2 != 0, own);
    }
}
