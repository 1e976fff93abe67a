/* Ranges whose front was deleted, against a plain walk: what is noted as gone hides no row. */
#include "common/bytes.h"
#include "tablet/layers.h"
#include "tests/harness.h"

enum { KEYS = 400, STAMPS = 600, NONE = 0, ROW = 1, TOMBSTONE = 2 };

typedef struct {
    mem_row_set_t *memory;
    mem_row_set_t *own;
    gone_t *gone;
    uint8_t states[STAMPS + 1][KEYS]; /* at each stamp */
    uint8_t owned[KEYS];
    uint32_t stamp;
} shop_t;

static const uint8_t *key_bytes(uint8_t *out, uint32_t key) {
    memset(out, 0, 8);
    out[6] = (uint8_t)(key >> 8);
    out[7] = (uint8_t)key;
    return out;
}

static void put(mem_row_set_t *set, uint32_t key, uint64_t stamp, int state) {
    uint8_t bytes[8], row[4];
    store_le32(row, key);
    EXPECT(mem_row_set_put(set, key_bytes(bytes, key), 8, stamp, state == ROW ? row : NULL, 4) ==
           STATUS_OK);
}

static void commit(shop_t *shop, uint32_t from, uint32_t to, int state) {
    const uint32_t stamp = ++shop->stamp;
    memcpy(shop->states[stamp], shop->states[stamp - 1], KEYS);
    for (uint32_t key = from; key < to && key < KEYS; key++) {
        put(shop->memory, key, stamp, state);
        shop->states[stamp][key] = (uint8_t)state;
    }
}

static void check_range(shop_t *shop, layers_range_t *out) {
    static const uint32_t lows[] = {0, 0, 0, 3, 200};
    const layers_t layers = {NULL, NULL, shop->memory, 0, 0, 0, shop->gone};
    const uint32_t low = lows[random_below(5)];
    const uint32_t high = random_below(3) == 0 ? random_below(KEYS) : KEYS;
    const uint32_t snapshot = random_below(4) == 0 ? random_below(shop->stamp + 1) : shop->stamp;
    const uint32_t most = random_below(8) == 0 ? LAYERS_FEW : 1 + random_below(4);
    const bool with_own = random_below(6) == 0;
    const uint32_t descending = random_below(4) == 0;
    const gone_t before = *shop->gone;
    uint8_t from[8], to[8], key[8];
    EXPECT(layers_range(&layers, with_own ? shop->own : NULL, key_bytes(from, low), 8,
                        high == KEYS ? NULL : key_bytes(to, high), high == KEYS ? 0 : 8, snapshot,
                        most, descending, out) == LAYERS_RANGE_OK);
    uint32_t n = 0;
    for (uint32_t i = low; i < high && n < most; i++) {
        const uint32_t k = descending ? low + high - 1 - i : i;
        const int own = with_own ? shop->owned[k] : NONE;
        if ((own == NONE ? shop->states[snapshot][k] : own) != ROW) continue;
        EXPECT(n < out->n && memcmp(out->keys + out->ends[n], key_bytes(key, k), 8) == 0);
        n++;
    }
    EXPECT(n == out->n);
    for (uint32_t i = 0; with_own && i < GONE_RANGES; i++) { /* own deletes are nobody else's */
        const gone_range_t *range = shop->gone->ranges + i;
        EXPECT(range->stamp == 0 || range->stamp == before.ranges[i].stamp);
    }
}

static void check_shop(void) {
    shop_t *shop = (shop_t *)(void *)exact(sizeof *shop);
    layers_range_t *out = (layers_range_t *)(void *)exact(sizeof *out);
    memset(shop, 0, sizeof *shop);
    shop->memory = mem_row_set_create(8);
    shop->own = mem_row_set_create(8);
    shop->gone = (gone_t *)(void *)exact(sizeof *shop->gone);
    memset(shop->gone, 0, sizeof *shop->gone);
    for (uint32_t i = 0; i < 5; i++) {
        const uint32_t key = 80 * i + random_below(80);
        shop->owned[key] = (uint8_t)(1 + random_below(2));
        put(shop->own, key, 1, shop->owned[key]);
    }
    commit(shop, 0, KEYS, ROW);
    uint32_t front = 0;
    while (shop->stamp < STAMPS) {
        const uint32_t what = random_below(20), some = random_below(100);
        if (what == 0) {
            commit(shop, some, some + 1, ROW);
        } else if (what == 1) {
            commit(shop, KEYS - some, KEYS, ROW);
        } else if (what < 5) {
            commit(shop, front, front + some, TOMBSTONE);
            front = (front + some) % KEYS;
        } else {
            check_range(shop, out);
        }
    }
    mem_row_set_destroy(shop->memory);
    mem_row_set_destroy(shop->own);
    free(shop->gone);
    free(shop);
    free(out);
}

/* Only what is deleted at the front is noted, and a row that is put there is seen. */
static void check_noted(void) {
    gone_t gone = {0};
    mem_row_set_t *memory = mem_row_set_create(8);
    uint8_t end[GONE_KEY_BYTES], low[8], key[8];
    key_bytes(low, 0);
    put(memory, 9, 1, ROW);
    const mem_entry_t *newest = mem_row_set_newest(memory);
    gone_note(&gone, newest, low, 8, key_bytes(key, 300), 8, 5);
    EXPECT(gone_end(&gone, memory, low, 8, 4, end) == -1);
    EXPECT(gone_end(&gone, memory, low, 7, 5, end) == -1);
    EXPECT(gone_end(&gone, memory, low, 8, 5, end) == 8 && memcmp(end, key, 8) == 0);
    put(memory, 350, 6, ROW);
    put(memory, 200, 7, TOMBSTONE);
    EXPECT(gone_end(&gone, memory, low, 8, 7, end) == 8 && memcmp(end, key, 8) == 0);
    put(memory, 250, 8, ROW);
    put(memory, 260, 8, ROW);
    EXPECT(gone_end(&gone, memory, low, 8, 7, end) == 8);
    EXPECT(memcmp(end, key_bytes(key, 250), 8) == 0);
    gone_note(&gone, mem_row_set_newest(memory), low, 8, NULL, 0, 9);
    EXPECT(gone_end(&gone, memory, low, 8, 9, end) == UINT32_MAX);
    for (uint32_t i = 0; i < 5000; i++) put(memory, 399, 10 + i, ROW);
    EXPECT(gone_end(&gone, memory, low, 8, 9, end) == -1); /* more than are looked at */
    gone_note(&gone, mem_row_set_newest(memory), NULL, 0, key, 8, 9); /* from the first row on */
    EXPECT(gone_end(&gone, memory, NULL, 0, 9, end) == 8);
    uint8_t large[GONE_KEY_BYTES + 1] = {0};
    gone_note(&gone, newest, large, sizeof large, NULL, 0, 9);
    EXPECT(gone_end(&gone, memory, large, sizeof large, 9, end) == -1);
    mem_row_set_destroy(memory);
}

void test_gone(void) {
    check_noted();
    for (int i = 0; i < 60; i++) check_shop();
}
