/* Ranges whose front was deleted, against a plain walk: what is noted as gone hides no row. */
#include "common/alloc.h"
#include "common/bytes.h"
#include "tablet/layers.h"
#include "tests/harness.h"

enum { KEYS = 400, STAMPS = 600, NONE = 0, ROW = 1, TOMBSTONE = 2 };

typedef struct {
    mem_row_set_t *memory;
    mem_row_set_t *own;
    gone_t *gone;
    uint8_t states[STAMPS + 4][KEYS]; /* at each stamp */
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
    uint64_t stamps[GONE_RANGES];
    for (uint32_t i = 0; i < GONE_RANGES; i++) {
        stamps[i] = shop->gone->ranges[i] == NULL ? 0 : shop->gone->ranges[i]->stamp;
    }
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
        const gone_range_t *range = shop->gone->ranges[i];
        EXPECT(range == NULL || range->n == 0 || range->stamp == stamps[i]);
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
            const uint32_t key = random_below(KEYS);
            for (uint32_t i = random_below(4); i != UINT32_MAX; i--) {
                commit(shop, (key + 90 * i) % KEYS, (key + 90 * i) % KEYS + 1, ROW);
            }
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
    gone_clear(shop->gone);
    free(shop->gone);
    free(shop);
    free(out);
}

typedef struct {
    gone_t gone;
    gone_range_t found;
    mem_row_set_t *memory;
} noted_t;

static const gone_range_t *find(noted_t *noted, uint32_t low, uint64_t snapshot) {
    uint8_t bytes[8];
    gone_find(&noted->gone, noted->memory, key_bytes(bytes, low), 8, snapshot, &noted->found);
    return &noted->found;
}

static void note(noted_t *noted, uint32_t low, uint32_t end, uint64_t snapshot) {
    uint8_t from[8], to[8];
    gone_note(&noted->gone, &noted->found, key_bytes(from, low), 8, key_bytes(to, end), 8,
              snapshot);
}

static bool is_part(const noted_t *noted, uint32_t i, uint32_t low, uint32_t end) {
    uint8_t from[8], to[8];
    const gone_part_t *part = noted->found.parts + i;
    return i < noted->found.n && part->low.len == 8 && part->end.len == 8 &&
           memcmp(part->low.data, key_bytes(from, low), 8) == 0 &&
           memcmp(part->end.data, key_bytes(to, end), 8) == 0;
}

/* Only what is deleted at the front is noted, and a row that is put there is seen. */
static void check_noted(void) {
    noted_t noted = {.memory = mem_row_set_create(8)};
    mem_row_set_t *memory = noted.memory;
    put(memory, 9, 1, ROW);
    EXPECT(find(&noted, 0, 5)->n == 0);
    note(&noted, 0, 300, 5);
    EXPECT(find(&noted, 0, 4)->n == 0);
    EXPECT(find(&noted, 1, 5)->n == 0);
    EXPECT(find(&noted, 0, 5)->n == 1 && is_part(&noted, 0, 0, 300));
    put(memory, 350, 6, ROW);
    put(memory, 200, 7, TOMBSTONE);
    EXPECT(find(&noted, 0, 7)->n == 1 && is_part(&noted, 0, 0, 300));
    put(memory, 250, 8, ROW);
    put(memory, 260, 8, ROW);
    EXPECT(find(&noted, 0, 8)->n == 3);
    EXPECT(is_part(&noted, 0, 0, 250) && is_part(&noted, 1, 250, 260));
    EXPECT(is_part(&noted, 2, 260, 300));
    note(&noted, 0, 260, 9); /* what lies behind stays known */
    EXPECT(find(&noted, 0, 9)->n == 2);
    EXPECT(is_part(&noted, 0, 0, 260) && is_part(&noted, 1, 260, 300));
    note(&noted, 0, 10, 8); /* not by who sees less */
    EXPECT(find(&noted, 0, 9)->n == 2 && find(&noted, 0, 8)->n == 0);
    for (uint32_t key = 10; key < 20; key++) put(memory, key, 10, ROW);
    EXPECT(find(&noted, 0, 9)->n == GONE_PARTS); /* the narrow ones went */
    EXPECT(is_part(&noted, 0, 0, 10) && is_part(&noted, GONE_PARTS - 1, 260, 300));
    for (uint32_t i = 0; i < 5000; i++) put(memory, 399, 10 + i, ROW);
    EXPECT(find(&noted, 0, 9)->n == 0); /* more than are looked at */
    gone_clear(&noted.gone);
    mem_row_set_destroy(memory);
}

static void check_bounds(void) {
    noted_t noted = {.memory = mem_row_set_create(8)};
    uint8_t large[GONE_KEY_BYTES + 1] = {0}, key[8];
    gone_find(&noted.gone, noted.memory, NULL, 0, 9, &noted.found);
    gone_note(&noted.gone, &noted.found, NULL, 0, NULL, 0, 9); /* all of it */
    gone_find(&noted.gone, noted.memory, NULL, 0, 9, &noted.found);
    EXPECT(noted.found.n == 1 && noted.found.parts[0].end.len == UINT32_MAX);
    put(noted.memory, 7, 10, ROW);
    gone_find(&noted.gone, noted.memory, NULL, 0, 9, &noted.found);
    EXPECT(noted.found.n == 2 && noted.found.parts[0].end.len == 8);
    EXPECT(memcmp(noted.found.parts[1].low.data, key_bytes(key, 7), 8) == 0);
    EXPECT(noted.found.parts[1].end.len == UINT32_MAX);
    gone_note(&noted.gone, &noted.found, large, sizeof large, NULL, 0, 9);
    gone_find(&noted.gone, noted.memory, large, sizeof large, 9, &noted.found);
    EXPECT(noted.found.n == 0);
    gone_clear(&noted.gone);
    alloc_fail_at(1);
    gone_note(&noted.gone, &noted.found, NULL, 0, NULL, 0, 9);
    gone_find(&noted.gone, noted.memory, NULL, 0, 9, &noted.found);
    EXPECT(noted.found.n == 0);
    mem_row_set_destroy(noted.memory);
}

void test_gone(void) {
    check_noted();
    check_bounds();
    for (int i = 0; i < 60; i++) check_shop();
}
