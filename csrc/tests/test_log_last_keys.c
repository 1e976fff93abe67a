/* The table of last offsets against a list that is looked through, and without memory. */
#include "common/alloc.h"
#include "log/last_keys.h"
#include "tests/log_sample.h"

enum { ROUNDS = 6, MOST = 400 };

/* What was noted, in order. */
typedef struct {
    uint8_t *key;
    size_t len;
    uint64_t offset;
} noted_t;

typedef struct {
    noted_t all[ROUNDS * MOST];
    size_t n;
} model_t;

static uint64_t model_find(const model_t *model, slice_t key) {
    for (size_t i = model->n; i-- > 0;) {
        const noted_t *at = &model->all[i];
        if (at->len == key.len && compare_bytes(at->key, key.data, key.len) == 0) {
            return at->offset;
        }
    }
    return UINT64_MAX;
}

static uint64_t *offsets_of(uint32_t rows, uint64_t *next) {
    uint64_t *offsets = (uint64_t *)(void *)exact(8 * (size_t)rows);
    for (uint32_t i = 0; i < rows; i++, *next += 1 + random_below(2)) offsets[i] = *next;
    return offsets;
}

static void check_choice(const last_keys_t *keys, const model_t *model, const log_sample_t *sample,
                         const uint64_t *offsets) {
    const uint32_t rows = sample->messages.rows;
    uint32_t *chosen = (uint32_t *)(void *)exact(4 * (size_t)rows), n, expected = 0;
    const int64_t oldest = random_below(9);
    EXPECT(last_keys_choose(keys, &sample->messages, offsets, oldest, chosen, &n) == STATUS_OK);
    for (uint32_t i = 0; i < rows; i++) {
        const slice_t key = log_sample_at(sample, 1, i);
        bool stays = true;
        if (key.data != NULL) {
            const uint64_t last = model_find(model, key);
            EXPECT(last_keys_find(keys, key.data, key.len) == last);
            const bool tombstone = log_sample_at(sample, 0, i).data == NULL;
            stays = (last == UINT64_MAX || last <= offsets[i]) &&
                    !(tombstone && log_sample_time(sample, i) < oldest);
        }
        if (!stays) continue;
        EXPECT(expected < n && chosen[expected] == i);
        expected++;
    }
    EXPECT(expected == n);
    free(chosen);
}

static void model_note(model_t *model, const log_sample_t *sample, const uint64_t *offsets) {
    for (uint32_t i = 0; i < sample->messages.rows; i++) {
        const slice_t key = log_sample_at(sample, 1, i);
        if (key.data == NULL) continue;
        uint8_t *copy = exact_copy(key.data, key.len);
        model->all[model->n++] = (noted_t){copy, key.len, offsets[i]};
    }
}

static void against_a_list(uint32_t most) {
    last_keys_t *keys = last_keys_create();
    model_t *model = calloc(1, sizeof *model);
    log_sample_t samples[ROUNDS];
    uint64_t *offsets[ROUNDS], next = random_below(100), count, bytes;
    EXPECT(keys != NULL && model != NULL);
    for (int i = 0; i < ROUNDS; i++) {
        samples[i] = log_sample(random_below(most), random_below(9));
        offsets[i] = offsets_of(samples[i].messages.rows, &next);
        EXPECT(last_keys_note(keys, &samples[i].messages, offsets[i]) == STATUS_OK);
        model_note(model, &samples[i], offsets[i]);
    }
    for (int i = 0; i < ROUNDS; i++) check_choice(keys, model, &samples[i], offsets[i]);
    last_keys_held(keys, &count, &bytes);
    EXPECT(count <= model->n && (count == 0) == (model->n == 0) && bytes >= 8 * count);
    for (int i = 0; i < ROUNDS; i++) {
        log_sample_drop(samples[i]);
        free(offsets[i]);
    }
    for (size_t i = 0; i < model->n; i++) free(model->all[i].key);
    free(model);
    last_keys_destroy(keys);
}

/* Whichever allocation fails: what it answers then is what was noted, or what was before. */
static void without_memory(void) {
    for (size_t fail = 1; fail < 12; fail++) {
        log_sample_t sample = log_sample(300, 0);
        uint64_t next = 5, *offsets = offsets_of(300, &next);
        alloc_fail_at(fail);
        last_keys_t *keys = last_keys_create();
        const status_t status =
            keys == NULL ? STATUS_NO_MEMORY : last_keys_note(keys, &sample.messages, offsets);
        alloc_fail_at(0);
        EXPECT(status == STATUS_OK || status == STATUS_NO_MEMORY);
        for (uint32_t i = 0; keys != NULL && i < 300; i++) {
            const slice_t key = log_sample_at(&sample, 1, i);
            if (key.data == NULL) continue;
            const uint64_t last = last_keys_find(keys, key.data, key.len);
            EXPECT(status == STATUS_OK ? last >= offsets[i] && last <= next
                                       : last == UINT64_MAX || last <= next);
        }
        last_keys_destroy(keys);
        free(offsets);
        log_sample_drop(sample);
    }
}

static void broken_columns(void) {
    last_keys_t *keys = last_keys_create();
    log_sample_t sample = log_sample(10, 0);
    const uint64_t offsets[10] = {0};
    uint32_t out[10], n = 7;
    uint64_t count, bytes;
    messages_t broken = sample.messages;
    broken.value.offsets_len -= 4;
    EXPECT(last_keys_note(keys, &broken, offsets) == STATUS_INPUT);
    EXPECT(last_keys_choose(keys, &broken, offsets, 0, out, &n) == STATUS_INPUT);
    last_keys_held(keys, &count, &bytes);
    EXPECT(count == 0 && bytes == 0 && n == 7);
    EXPECT(last_keys_find(keys, (const uint8_t *)"", 0) == UINT64_MAX);
    log_sample_drop(sample);
    last_keys_destroy(keys);
    last_keys_destroy(NULL);
}

void test_log_last_keys(void) {
    for (uint32_t most = 2; most < MOST; most += 1 + random_below(60)) against_a_list(most);
    without_memory();
    broken_columns();
}
