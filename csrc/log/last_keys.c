#include "log/last_keys.h"

#include "codec/hash.h"
#include "common/alloc.h"
#include "common/bits.h"
#include "common/bytes.h"
#include "memory/arena.h"

enum { FIRST_ROOM = 64 };

/* `key` is NULL where the slot is free. */
typedef struct {
    const uint8_t *key;
    uint64_t hash;
    uint64_t offset;
    uint32_t len;
} slot_t;

struct last_keys {
    slot_t *slots; /* a power of two of them, or NULL; half at least are free */
    uint64_t room;
    uint64_t count;
    uint64_t key_bytes;
    arena_t arena;
};

last_keys_t *last_keys_create(void) {
    last_keys_t *keys = alloc_array(1, sizeof *keys);
    if (keys != NULL) *keys = (last_keys_t){.slots = NULL};
    return keys;
}

void last_keys_destroy(last_keys_t *keys) {
    if (keys == NULL) return;
    alloc_free(keys->slots);
    arena_free(&keys->arena);
    alloc_free(keys);
}

void last_keys_held(const last_keys_t *keys, uint64_t *out_count, uint64_t *out_bytes) {
    *out_count = keys->count;
    *out_bytes = keys->key_bytes + keys->room * sizeof *keys->slots;
}

/* The slot of a key, or the free one where it would be. */
static slot_t *slot_of(slot_t *slots, uint64_t room, uint64_t hash, const uint8_t *key,
                       size_t len) {
    uint64_t at = hash & (room - 1);
    while (slots[at].key != NULL) {
        const slot_t *slot = &slots[at];
        if (slot->hash == hash && slot->len == len && compare_bytes(slot->key, key, len) == 0) {
            break;
        }
        at = (at + 1) & (room - 1);
    }
    return &slots[at];
}

static bool grow(last_keys_t *keys) {
    if (2 * (keys->count + 1) <= keys->room) return true;
    const uint64_t room = keys->room == 0 ? FIRST_ROOM : 2 * keys->room;
    slot_t *slots = alloc_array((size_t)room, sizeof *slots);
    if (slots == NULL) return false;
    memset(slots, 0, (size_t)room * sizeof *slots);
    for (uint64_t i = 0; i < keys->room; i++) {
        const slot_t *slot = &keys->slots[i];
        if (slot->key != NULL) *slot_of(slots, room, slot->hash, slot->key, slot->len) = *slot;
    }
    alloc_free(keys->slots);
    keys->slots = slots;
    keys->room = room;
    return true;
}

static bool note(last_keys_t *keys, const uint8_t *key, uint32_t len, uint64_t offset) {
    if (!grow(keys)) return false;
    const uint64_t hash = hash64(key, len);
    slot_t *slot = slot_of(keys->slots, keys->room, hash, key, len);
    if (slot->key == NULL) {
        const size_t taken = (size_t)round_up_8((uint64_t)len + 1); /* one that is empty has a place */
        if (!arena_reserve(&keys->arena, taken)) return false;
        uint8_t *copy = arena_take(&keys->arena, taken);
        copy_bytes(copy, key, len);
        *slot = (slot_t){.key = copy, .hash = hash, .len = len};
        keys->count++;
        keys->key_bytes += taken;
    }
    slot->offset = offset;
    return true;
}

static uint64_t find(const last_keys_t *keys, const uint8_t *key, size_t len) {
    if (keys->room == 0) return UINT64_MAX;
    const slot_t *slot = slot_of(keys->slots, keys->room, hash64(key, len), key, len);
    return slot->key == NULL ? UINT64_MAX : slot->offset;
}

uint64_t last_keys_find(const last_keys_t *keys, const uint8_t *key, size_t len) {
    return find(keys, key, len);
}

/* String `row` of a column; false when it is null. */
static bool string_at(const messages_column_t *column, uint64_t row, const uint8_t **out,
                      uint32_t *out_len) {
    const uint64_t at = column->offset + row;
    if (column->offsets == NULL) return false;
    if (column->validity != NULL && bits_get(column->validity, at) == 0) return false;
    const uint32_t begin = load_le32(column->offsets + 4 * at);
    *out = column->values + begin;
    *out_len = load_le32(column->offsets + 4 * at + 4) - begin;
    return true;
}

static int64_t time_at(const messages_t *messages, uint64_t row) {
    const messages_column_t *times = &messages->times;
    const uint64_t at = times->offset + row;
    const bool none = times->values == NULL ||
                      (times->validity != NULL && bits_get(times->validity, at) == 0);
    return none ? messages->timestamp : (int64_t)load_le64(times->values + 8 * at);
}

status_t last_keys_note(last_keys_t *keys, const messages_t *messages, const uint64_t *offsets) {
    messages_plan_t plan; /* says whether the columns are sane */
    const status_t status = messages_plan(messages, &plan);
    if (status != STATUS_OK) return status;
    for (uint32_t row = 0; row < messages->rows; row++) {
        const uint8_t *key;
        uint32_t len;
        if (!string_at(&messages->key, row, &key, &len)) continue;
        if (!note(keys, key, len, offsets[row])) return STATUS_NO_MEMORY;
    }
    return STATUS_OK;
}

status_t last_keys_choose(const last_keys_t *keys, const messages_t *messages,
                          const uint64_t *offsets, int64_t oldest, uint32_t *out,
                          uint32_t *out_n) {
    messages_plan_t plan;
    const status_t status = messages_plan(messages, &plan);
    if (status != STATUS_OK) return status;
    uint32_t n = 0;
    for (uint32_t row = 0; row < messages->rows; row++) {
        const uint8_t *key, *value;
        uint32_t len, value_len;
        if (string_at(&messages->key, row, &key, &len)) {
            const uint64_t last = find(keys, key, len);
            if (last != UINT64_MAX && last > offsets[row]) continue;
            const bool tombstone = !string_at(&messages->value, row, &value, &value_len);
            if (tombstone && time_at(messages, row) < oldest) continue;
        }
        out[n++] = row;
    }
    *out_n = n;
    return STATUS_OK;
}
