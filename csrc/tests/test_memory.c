/* MemRowSets against a sorted array of versions. */
#include "codec/keys_inline.h"
#include "common/alloc.h"
#include "memory/mem_entries.h"
#include "memory/mem_row_set.h"
#include "memory/mem_section.h"
#include "tests/harness.h"

enum { MOST = 400, TOMBSTONE_OF = 5 };

/* A version of key i: its row is a number, or it is a tombstone. */
typedef struct {
    uint32_t key;
    uint64_t stamp;
    uint64_t row;
    bool tombstone;
} version_t;

typedef struct {
    keys_t keys; /* strictly ascending */
    version_t versions[MOST];
    uint32_t n;
    uint32_t stamps; /* 1 to this */
} model_t;

static bool model_before(const version_t *a, uint32_t key, uint64_t stamp) {
    return a->key < key || (a->key == key && a->stamp > stamp);
}

static void model_put(model_t *model, version_t put) {
    uint32_t at = 0;
    while (at < model->n && model_before(model->versions + at, put.key, put.stamp)) at++;
    const version_t *there = model->versions + at;
    if (at < model->n && there->key == put.key && there->stamp == put.stamp) return;
    EXPECT(model->n < MOST);
    memmove(model->versions + at + 1, there, (model->n - at) * sizeof *there);
    model->versions[at] = put;
    model->n++;
}

static bool inside(const version_t *version, uint64_t after, uint64_t upto) {
    return version->stamp > after && version->stamp <= upto;
}

static const version_t *model_get(const model_t *model, uint32_t key, uint64_t after,
                                  uint64_t upto) {
    for (uint32_t i = 0; i < model->n; i++) {
        const version_t *version = model->versions + i;
        if (version->key == key && inside(version, after, upto)) return version;
    }
    return NULL;
}

static void expect_same(const model_t *model, const mem_entry_t *entry, const version_t *version) {
    EXPECT((entry == NULL) == (version == NULL));
    if (entry == NULL) return;
    const slice_t key = keys_at(&model->keys, version->key);
    EXPECT(entry->stamp == version->stamp && entry->key_len == key.len);
    EXPECT(compare_bytes(entry->row - entry->key_len, key.data, key.len) == 0);
    EXPECT((entry->row_len == UINT32_MAX) == version->tombstone);
    if (!version->tombstone) {
        EXPECT(entry->row_len == 8 && load_le64(entry->row) == version->row);
    }
}

static void expect_reads(const mem_row_set_t *set, const model_t *model, uint64_t after,
                         uint64_t upto) {
    const uint32_t n = model->keys.n;
    const mem_entry_t **found = (const mem_entry_t **)(void *)exact(n * sizeof *found);
    mem_row_set_lookup(set, &model->keys, after, upto, found);
    int64_t first = -1;
    for (uint32_t i = n; i-- > 0;) {
        const slice_t key = keys_at(&model->keys, i);
        const version_t *version = model_get(model, i, after, upto);
        expect_same(model, mem_row_set_get(set, key.data, key.len, after, upto), version);
        expect_same(model, found[i], version);
        if (model_get(model, i, after, UINT64_MAX) != NULL) first = i;
    }
    EXPECT(mem_row_set_changed_keys(set, &model->keys, after) == first);
    free(found);
    mem_row_set_t *own = mem_row_set_create(model->keys.width);
    const mem_entry_t *changed = mem_row_set_changed_of(set, own, after);
    EXPECT(own != NULL && changed == NULL);
    EXPECT(mem_row_set_put_many(own, &model->keys, 1, NULL, NULL) == STATUS_OK);
    changed = mem_row_set_changed_of(set, own, after);
    EXPECT((changed == NULL) == (first < 0));
    if (changed != NULL) {
        const slice_t key = keys_at(&model->keys, (uint32_t)first);
        EXPECT(changed->key_len == key.len);
        EXPECT(compare_bytes(changed->row - key.len, key.data, key.len) == 0);
    }
    mem_row_set_destroy(own);
}

/* In calls of a few entries each, as a reader beside a writer may have to. */
static void expect_range(const mem_row_set_t *set, const model_t *model, mem_range_t range,
                         uint32_t lo, uint32_t hi) {
    const mem_entry_t *last = NULL, *few[3];
    uint32_t n = 0, at = 0, cap = 1 + random_below(3);
    const version_t *first_changed = NULL, *emitted = NULL;
    for (uint32_t i = 0; i < model->n; i++) {
        const version_t *version = model->versions + i;
        if (version->key < lo || version->key >= hi) continue;
        if (first_changed == NULL && version->stamp > range.after) first_changed = version;
        if (!inside(version, range.after, range.upto)) continue;
        if (range.versions == 0 && emitted != NULL && emitted->key == version->key) continue;
        emitted = version;
        if (at == n) {
            n = mem_row_set_select(set, &range, &last, cap, few);
            EXPECT(n <= cap && n != 0);
            at = 0;
        }
        expect_same(model, few[at++], version);
    }
    EXPECT(at == n);
    EXPECT(mem_row_set_select(set, &range, &last, cap, few) == 0);
    expect_same(model,
                mem_row_set_changed(set, range.low, range.low_len, range.high, range.high_len,
                                    range.after),
                first_changed);
}

static void expect_ranges(const mem_row_set_t *set, const model_t *model) {
    for (int i = 0; i < 20; i++) {
        const uint32_t lo = random_below(model->keys.n), hi = random_below(model->keys.n);
        const slice_t low = keys_at(&model->keys, lo), high = keys_at(&model->keys, hi);
        mem_range_t range = {low.data, low.len, high.data, high.len,
                             random_below(model->stamps + 2), random_below(model->stamps + 3),
                             random_below(2)};
        if (i % 3 == 0) range.low = NULL;
        if (i % 4 == 0) range.high = NULL;
        expect_range(set, model, range, range.low == NULL ? 0 : lo,
                     range.high == NULL ? UINT32_MAX : hi);
    }
}

static version_t random_version(const model_t *model) {
    const version_t version = {random_below(model->keys.n), 1 + random_below(model->stamps),
                               random_u64(), random_below(TOMBSTONE_OF) == 0};
    return version;
}

static status_t put(mem_row_set_t *set, const model_t *model, version_t version) {
    const slice_t key = keys_at(&model->keys, version.key);
    uint8_t row[8];
    store_le64(row, version.row);
    return mem_row_set_put(set, key.data, key.len, version.stamp, version.tombstone ? NULL : row,
                           8);
}

static void put_slice(mem_row_set_t *set, model_t *model) {
    const uint32_t lo = random_below(model->keys.n);
    const uint32_t n = random_below(model->keys.n - lo < 8 ? model->keys.n - lo + 1 : 8);
    const uint64_t stamp = 1 + random_below(model->stamps);
    const bool tombstones = random_below(TOMBSTONE_OF) == 0;
    keys_t keys = model->keys;
    keys.n = n;
    if (keys.offsets == NULL) {
        keys.data += (size_t)lo * keys.width;
    } else {
        keys.offsets += 4 * (size_t)lo;
    }
    uint64_t rows[8];
    uint32_t offsets[9] = {0};
    for (uint32_t i = 0; i < n; i++) {
        rows[i] = random_u64();
        offsets[i + 1] = 8 * (i + 1);
        const version_t version = {lo + i, stamp, rows[i], tombstones};
        model_put(model, version);
    }
    EXPECT(mem_row_set_put_many(set, &keys, stamp, tombstones ? NULL : (const uint8_t *)rows,
                                offsets) == STATUS_OK);
}

/* A section holds the newest of each key; damage puts nothing. */
static void check_section(const mem_row_set_t *set, const model_t *model) {
    uint64_t len;
    EXPECT(mem_section_size(set, &len) == STATUS_OK);
    uint8_t *section = exact(len);
    mem_section_write(set, section, len);
    mem_row_set_t *other = mem_row_set_create(model->keys.width);
    for (uint64_t cut = 0; cut < len; cut += 1 + random_below(5)) {
        uint8_t *damaged = exact_copy(section, cut);
        EXPECT(mem_section_apply(other, damaged, cut, 7) == STATUS_CORRUPT);
        free(damaged);
        mem_row_set_t *third = mem_row_set_create(model->keys.width);
        damaged = exact_copy(section, len);
        damaged[cut] = (uint8_t)(damaged[cut] ^ 1u << random_below(8));
        const status_t status = mem_section_apply(third, damaged, len, 7);
        EXPECT(status == STATUS_OK || mem_row_set_count(third) == 0);
        mem_row_set_destroy(third);
        free(damaged);
    }
    EXPECT(mem_row_set_count(other) == 0);
    EXPECT(mem_section_apply(other, section, len, 7) == STATUS_OK);
    for (uint32_t i = 0; i < model->keys.n; i++) {
        const slice_t key = keys_at(&model->keys, i);
        const version_t *version = model_get(model, i, 0, UINT64_MAX);
        version_t moved = {0, 0, 0, false};
        if (version != NULL) {
            moved = *version;
            moved.stamp = 7;
        }
        expect_same(model, mem_row_set_get(other, key.data, key.len, 0, 7),
                    version == NULL ? NULL : &moved);
    }
    mem_row_set_destroy(other);
    free(section);
}

static void check_copy(const mem_row_set_t *set, const model_t *model) {
    const uint64_t after = random_below(model->stamps - 1);
    const uint64_t upto = after + random_below(model->stamps - 2);
    mem_row_set_t *copy = mem_row_set_copy(set, after, upto);
    uint64_t n = 0;
    for (uint32_t i = 0; i < model->n; i++) n += inside(model->versions + i, after, upto);
    EXPECT(mem_row_set_count(copy) == n);
    for (uint32_t i = 0; i < model->keys.n; i++) {
        const slice_t key = keys_at(&model->keys, i);
        expect_same(model, mem_row_set_get(copy, key.data, key.len, 0, UINT64_MAX),
                    model_get(model, i, after, upto));
    }
    mem_row_set_destroy(copy);
}

static void check_model(shape_t shape, uint32_t keys, uint32_t stamps, bool dense) {
    model_t *model = calloc(1, sizeof *model);
    EXPECT(model != NULL);
    model->keys = keys_random_sorted(shape, keys, dense);
    model->stamps = stamps;
    mem_row_set_t *set = mem_row_set_create(model->keys.width);
    expect_reads(set, model, 0, UINT64_MAX);
    while (model->n < MOST - 100 && random_below(200) != 0) {
        if (random_below(10) == 0) {
            put_slice(set, model);
        } else {
            const version_t version = random_version(model);
            model_put(model, version);
            EXPECT(put(set, model, version) == STATUS_OK);
        }
    }
    EXPECT(mem_row_set_count(set) == model->n);
    for (int i = 0; i < 10; i++) {
        expect_reads(set, model, random_below(stamps + 1), random_below(stamps + 3));
    }
    expect_ranges(set, model);
    check_section(set, model);
    check_copy(set, model);
    mem_row_set_destroy(set);
    keys_drop(model->keys);
    free(model);
}

/* No memory at any moment: a call that says so has put nothing. */
static void check_no_memory(void) {
    const keys_t keys = keys_random(KEYS_8, 400, false);
    uint32_t offsets[401];
    for (uint32_t i = 0; i <= 400; i++) offsets[i] = 8 * i;
    alloc_fail_at(1);
    EXPECT(mem_row_set_create(8) == NULL);
    for (size_t fail = 1; fail < 12; fail++) {
        mem_row_set_t *set = mem_row_set_create(8);
        alloc_fail_at(fail);
        for (uint32_t i = 0; i < 200; i++) {
            const slice_t key = keys_at(&keys, i);
            const uint64_t before = mem_row_set_count(set);
            const status_t status = mem_row_set_put(set, key.data, key.len, 1, key.data, 8);
            EXPECT(mem_row_set_count(set) == before + (status == STATUS_OK));
            if (status == STATUS_NO_MEMORY) i--; /* it works the next time */
        }
        const uint64_t bytes = mem_row_set_bytes(set);
        alloc_fail_at(1);
        EXPECT(mem_row_set_put_many(set, &keys, 2, keys.data, offsets) == STATUS_NO_MEMORY);
        EXPECT(mem_row_set_count(set) == 200 && mem_row_set_bytes(set) == bytes);
        alloc_fail_at(fail);
        mem_row_set_t *copy = mem_row_set_copy(set, 0, 9);
        EXPECT((copy == NULL) == (fail <= 5)); /* the set itself, chunks of 1 to 8 KiB */
        mem_row_set_destroy(copy);
        alloc_fail_at(0);
        EXPECT(mem_row_set_put_many(set, &keys, 2, keys.data, offsets) == STATUS_OK);
        EXPECT(mem_row_set_count(set) == 600);
        mem_row_set_destroy(set);
    }
    keys_drop(keys);
}

static void check_entries(void) {
    mem_row_set_t *set = mem_row_set_create(0);
    EXPECT(mem_row_set_put(set, (const uint8_t *)"b", 1, 3, (const uint8_t *)"row", 3) ==
           STATUS_OK);
    EXPECT(mem_row_set_put(set, (const uint8_t *)"aa", 2, 4, NULL, 0) == STATUS_OK);
    const mem_entry_t *list[3] = {mem_row_set_get(set, (const uint8_t *)"b", 1, 0, 9), NULL,
                                  mem_row_set_get(set, (const uint8_t *)"aa", 2, 0, 9)};
    uint8_t kinds[3], bytes[3];
    uint64_t stamps[3], size;
    uint32_t ends[4];
    const uint32_t picked[] = {2, UINT32_MAX, 0}, outside[] = {3};
    row_slice_t slices[3];
    mem_entries_kinds(list, 3, kinds);
    mem_entries_stamps(list, 3, stamps);
    EXPECT(kinds[0] == 1 && kinds[1] == 0 && kinds[2] == 2);
    EXPECT(stamps[0] == 3 && stamps[1] == 0 && stamps[2] == 4);
    EXPECT(mem_entries_keys_size(list, 3, &size) == STATUS_OK && size == 3);
    mem_entries_keys(list, 3, bytes, 3, ends);
    EXPECT(memcmp(bytes, "baa", 3) == 0 && ends[1] == 1 && ends[2] == 1 && ends[3] == 3);
    EXPECT(mem_entries_rows(list, 3, picked, 3, slices) == STATUS_OK);
    EXPECT(slices[0].data == NULL && slices[1].data == NULL && slices[2].len == 3);
    EXPECT(mem_entries_rows(list, 3, outside, 1, slices) == STATUS_RANGE);
    mem_row_set_destroy(set);
}

void test_memory(void) {
    for (int shape = 0; shape < KEYS_SHAPES; shape++) {
        for (int i = 0; i < 12; i++) {
            check_model((shape_t)shape, 1 + random_below(100), 6, i % 2 == 0);
            check_model((shape_t)shape, 1 + random_below(4), 100, i % 2 == 0);
        }
    }
    check_no_memory();
    check_entries();
}
