/* Readers beside the writer of a MemRowSet: what they find is whole, in order and complete up
 * to the stamp that the writer has announced. Also run under ThreadSanitizer (`make tsan`). */
#include <pthread.h>
#include <stdatomic.h>

#include "codec/keys_inline.h"
#include "memory/mem_row_set.h"
#include "memory/mem_section.h"
#include "tests/harness.h"

enum { STAMPS = 400, KEYS = 64, READERS = 3 };

typedef struct {
    mem_row_set_t *set;
    _Atomic uint64_t complete; /* all entries of stamps up to this one are in */
} shared_t;

/* Every stamp has KEYS keys of its own between those of the others, and a version of key 0. */
static uint64_t key_of(uint64_t stamp, uint64_t i) {
    return 1 + i * STAMPS + stamp * 151 % STAMPS;
}

static void expect_whole(const mem_entry_t *entry) {
    const uint64_t key = load_be64(entry->row - 8);
    EXPECT(entry->key_len == 8 && entry->row_len == 16);
    EXPECT(load_le64(entry->row) == key && load_le64(entry->row + 8) == entry->stamp);
}

static void read_range(const shared_t *shared, uint64_t upto) {
    const mem_range_t range = {NULL, 0, NULL, 0, 0, upto, 1};
    const mem_entry_t *last = NULL, *some[100];
    uint64_t seen = 0, before = 0;
    for (uint32_t n = 100; n == 100;) {
        n = mem_row_set_select(shared->set, &range, &last, 100, some);
        for (uint32_t i = 0; i < n; i++) {
            const uint64_t key = load_be64(some[i]->row - 8);
            expect_whole(some[i]);
            EXPECT(key >= before && (key != before || key == 0));
            before = key;
        }
        seen += n;
    }
    EXPECT(seen == upto * (KEYS + 1));
}

static void read_keys(const shared_t *shared, uint64_t upto) {
    uint8_t bytes[8 * KEYS];
    const mem_entry_t *found[KEYS];
    for (uint64_t i = 0; i < KEYS; i++) store_be64(bytes + 8 * i, key_of(upto, i));
    const keys_t keys = {bytes, sizeof bytes, NULL, 8, KEYS};
    mem_row_set_lookup(shared->set, &keys, 0, upto, found);
    for (uint64_t i = 0; i < KEYS; i++) {
        EXPECT(found[i] != NULL && found[i]->stamp == upto);
        expect_whole(found[i]);
        EXPECT(mem_row_set_get(shared->set, bytes + 8 * i, 8, 0, upto) == found[i]);
    }
    EXPECT(mem_row_set_changed_keys(shared->set, &keys, upto - 1) == 0);
    const mem_entry_t *newest = mem_row_set_get(shared->set, (const uint8_t[8]){0}, 8, 0, upto);
    EXPECT(newest != NULL && newest->stamp == upto);
}

static void *reader(void *argument) {
    shared_t *shared = argument;
    for (uint64_t upto = 0; upto < STAMPS;) {
        upto = atomic_load_explicit(&shared->complete, memory_order_acquire);
        read_range(shared, upto);
        if (upto != 0) read_keys(shared, upto);
    }
    return NULL;
}

static status_t put_one(mem_row_set_t *set, uint64_t key, uint64_t stamp) {
    uint8_t bytes[8], row[16];
    store_be64(bytes, key);
    store_le64(row, key);
    store_le64(row + 8, stamp);
    return mem_row_set_put(set, bytes, 8, stamp, row, 16);
}

/* Half of the stamps by single puts, half as the section of a transaction. */
static void write_stamp(shared_t *shared, uint64_t stamp) {
    mem_row_set_t *own = mem_row_set_create(8);
    mem_row_set_t *set = stamp % 2 == 0 ? shared->set : own;
    EXPECT(put_one(set, 0, stamp) == STATUS_OK);
    for (uint64_t i = 0; i < KEYS; i++) EXPECT(put_one(set, key_of(stamp, i), stamp) == STATUS_OK);
    if (set == own) {
        uint64_t len;
        EXPECT(mem_section_size(own, &len) == STATUS_OK);
        uint8_t *section = exact(len);
        mem_section_write(own, section, len);
        EXPECT(mem_section_apply(shared->set, section, len, stamp) == STATUS_OK);
        free(section);
    }
    mem_row_set_destroy(own);
    atomic_store_explicit(&shared->complete, stamp, memory_order_release);
}

void test_memory_threads(void) {
    shared_t shared = {.set = mem_row_set_create(8)};
    pthread_t readers[READERS];
    for (int i = 0; i < READERS; i++) {
        EXPECT(pthread_create(readers + i, NULL, reader, &shared) == 0);
    }
    for (uint64_t stamp = 1; stamp <= STAMPS; stamp++) write_stamp(&shared, stamp);
    for (int i = 0; i < READERS; i++) EXPECT(pthread_join(readers[i], NULL) == 0);
    EXPECT(mem_row_set_count(shared.set) == STAMPS * (KEYS + 1));
    mem_row_set_destroy(shared.set);
}
