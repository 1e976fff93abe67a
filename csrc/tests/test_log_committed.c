/* The filter of a READ_COMMITTED reader, against a log whose every batch knows its fate. */
#include "common/alloc.h"
#include "common/bytes.h"
#include "log/committed.h"
#include "tests/log_sample.h"

enum { MOST = 400, OPEN_MOST = 4 };

typedef struct {
    uint64_t position;
    batch_header_t header;
    uint32_t length;
    bool shown; /* committed data */
} entry_t;

typedef struct {
    committed_aborted_t aborted;
    uint64_t last_offset;
} index_t;

/* A log, what became of its batches, and the index of its aborted transactions. */
typedef struct {
    log_bytes_t all;
    entry_t entries[MOST];
    uint32_t n;
    index_t index[MOST];
    uint32_t index_n;
    uint64_t end;
    uint64_t stable; /* the last stable offset */
    uint32_t late_n; /* transactions with no ABORT marker behind what is aborted */
} story_t;

static void append(story_t *story, uint8_t *batch, size_t len, bool shown) {
    entry_t *entry = &story->entries[story->n++];
    entry->position = story->all.len;
    entry->length = (uint32_t)len;
    entry->shown = shown;
    EXPECT(batch_parse(batch, len, &entry->header) == STATUS_OK);
    log_append(&story->all, batch, len);
    story->end += entry->header.count;
    free(batch);
}

static void append_data(story_t *story, uint64_t txn_id, bool decided, bool shown) {
    const log_sample_t sample = log_sample(1 + random_below(3), 0);
    batch_header_t head = {.base_offset = story->end, .txn_id = txn_id};
    size_t len;
    if (txn_id != 0) head.attributes = BATCH_TRANSACTIONAL;
    if (decided) head.attributes |= BATCH_DECIDED;
    uint8_t *batch = log_batch_of(&sample, head, &len);
    append(story, batch, len, shown);
    log_sample_drop(sample);
}

static void append_marker(story_t *story, control_type_t type, uint64_t txn_id) {
    batch_header_t head = {.base_offset = story->end, .txn_id = txn_id};
    size_t len;
    if (txn_id != 0) head.attributes = BATCH_TRANSACTIONAL;
    head.count = 1 + random_below(3);
    uint8_t *batch = log_control_of(type, head, &len);
    append(story, batch, len, false);
}

static void note(story_t *story, uint64_t txn_id, uint64_t first, uint64_t last) {
    story->index[story->index_n++] = (index_t){{txn_id, first}, last};
}

/* What is open while the log is written: transactions with their fate, `first` 0: free. */
typedef struct {
    uint64_t txn_id[OPEN_MOST];
    uint64_t first[OPEN_MOST];
    bool commits[OPEN_MOST];
    uint64_t late_id; /* committed some time ago, writes again: 0 none */
    uint64_t late_first;
} writers_t;

static void write_one(story_t *story, writers_t *writers, uint64_t *next_id) {
    const uint32_t i = random_below(OPEN_MOST + 2);
    if (i == OPEN_MOST) {
        const uint64_t txn_id = random_below(2) == 0 ? 0 : (*next_id)++;
        append_data(story, txn_id, txn_id != 0, true);
    } else if (i > OPEN_MOST) {
        if (random_below(4) == 0) append_marker(story, CONTROL_FILLER, 0);
        if (writers->late_id == 0) return;
        if (writers->late_first == 0) writers->late_first = story->end;
        append_data(story, writers->late_id, false, false);
    } else if (writers->first[i] == 0) {
        writers->txn_id[i] = (*next_id)++;
        writers->first[i] = story->end;
        writers->commits[i] = random_below(3) != 0;
        append_data(story, writers->txn_id[i], false, writers->commits[i]);
    } else if (random_below(3) != 0) {
        append_data(story, writers->txn_id[i], false, writers->commits[i]);
    } else {
        const uint64_t at = story->end;
        append_marker(story, writers->commits[i] ? CONTROL_COMMIT : CONTROL_ABORT,
                      writers->txn_id[i]);
        if (writers->late_first != 0) { /* what came late is aborted by the next marker */
            note(story, writers->late_id, writers->late_first, at);
            story->late_n++;
            writers->late_id = writers->late_first = 0;
        }
        if (!writers->commits[i]) note(story, writers->txn_id[i], writers->first[i], at);
        if (writers->commits[i] && random_below(4) == 0) writers->late_id = writers->txn_id[i];
        writers->first[i] = 0;
    }
}

static story_t *story_make(void) {
    story_t *story = calloc(1, sizeof *story);
    EXPECT(story != NULL);
    writers_t writers = {.late_id = 0};
    uint64_t next_id = 1;
    story->end = 1; /* so that 0 can stand for "none" */
    while (story->n < MOST - 2) write_one(story, &writers, &next_id);
    story->stable = story->end;
    for (uint32_t i = 0; i < OPEN_MOST; i++) {
        if (writers.first[i] != 0 && writers.first[i] < story->stable) {
            story->stable = writers.first[i];
        }
    }
    if (writers.late_first != 0 && writers.late_first < story->stable) {
        story->stable = writers.late_first;
    }
    return story;
}

/* The index entries of a fetch: some more than are needed, twice, in any order. */
static uint32_t collect(const story_t *story, uint64_t from, uint64_t upto,
                        committed_aborted_t *out) {
    uint32_t n = 0;
    for (uint32_t i = 0; i < story->index_n; i++) {
        const index_t *entry = &story->index[i];
        if (entry->last_offset < from || entry->aborted.first_offset >= upto + 20) continue;
        out[n++] = entry->aborted;
        if (random_below(3) == 0) out[n++] = entry->aborted;
    }
    for (uint32_t i = n; i > 1; i--) {
        const uint32_t j = random_below(i);
        const committed_aborted_t moved = out[i - 1];
        out[i - 1] = out[j];
        out[j] = moved;
    }
    return n;
}

/* Without a filter: all data, and what no marker will come for. */
static void check_plain(const story_t *story, uint32_t lo, uint32_t hi, uint64_t from,
                        uint64_t upto) {
    const uint64_t start = story->entries[lo].position;
    const uint8_t *bytes = story->all.bytes + start;
    const entry_t *last = &story->entries[hi - 1];
    const size_t len = (size_t)(last->position + last->length - start);
    messages_span_t spans[MOST];
    committed_shown_t shown;
    for (int which = COMMITTED_ALL; which <= COMMITTED_DECIDED; which++) {
        uint32_t n = 0;
        EXPECT(committed_plain(bytes, len, (committed_which_t)which, from, upto, spans, hi - lo,
                               &shown) == STATUS_OK);
        for (uint32_t i = lo; i < hi; i++) {
            const batch_header_t *header = &story->entries[i].header;
            const unsigned flags = header->attributes;
            if ((flags & BATCH_CONTROL) != 0) continue;
            if (header->base_offset + header->rows <= from) continue;
            const bool decided = header->txn_id == 0 || (flags & BATCH_DECIDED) != 0;
            if (which == COMMITTED_DECIDED && !decided) continue;
            EXPECT(n < shown.n && spans[n].position == story->entries[i].position - start);
            n++;
        }
        EXPECT(n == shown.n && shown.next_offset == upto);
    }
}

/* One fetch of batches [lo, hi) from an offset in the first of them. */
static void check_fetch(const story_t *story, committed_t *filter, uint32_t lo, uint32_t hi) {
    const entry_t *first = &story->entries[lo], *last = &story->entries[hi - 1];
    const uint64_t from = first->header.base_offset + random_below(first->header.count);
    const uint8_t *bytes = story->all.bytes + first->position;
    const size_t len = (size_t)(last->position + last->length - first->position);
    committed_aborted_t aborted[2 * MOST];
    messages_span_t spans[MOST];
    committed_shown_t shown;
    uint32_t n;
    const uint64_t upto = last->header.base_offset + last->header.count;
    const uint32_t aborted_n = collect(story, from, upto, aborted);
    EXPECT(batch_count(bytes, len, &n) == STATUS_OK && n == hi - lo);
    EXPECT(committed_keep(filter, bytes, len, aborted, aborted_n, from, story->stable, spans, n,
                          &shown) == STATUS_OK);
    uint32_t at = 0;
    uint64_t next = from, rows = 0;
    for (uint32_t i = lo; i < hi; i++) {
        const entry_t *entry = &story->entries[i];
        const batch_header_t *header = &entry->header;
        if (header->base_offset + header->count > story->stable) break;
        next = header->base_offset + header->count;
        if (!entry->shown || header->base_offset + header->rows <= from) continue;
        EXPECT(at < shown.n);
        EXPECT(spans[at].position == entry->position - first->position);
        EXPECT(spans[at].length == entry->length && spans[at].rows == header->rows);
        rows += header->rows;
        at++;
    }
    EXPECT(at == shown.n && rows == shown.rows);
    EXPECT(shown.next_offset == (next > from ? next : from));
    check_plain(story, lo, hi, from, upto);
}

/* At the end of a log nothing is held, but of what no ABORT marker ended. */
static void check_end(const story_t *story) {
    committed_t *filter = committed_create();
    committed_aborted_t aborted[2 * MOST];
    messages_span_t spans[MOST];
    committed_shown_t shown;
    uint64_t waiting, inside, bytes;
    const uint32_t n = collect(story, 0, story->end, aborted);
    EXPECT(committed_keep(filter, story->all.bytes, story->all.len, aborted, n, 0, story->end,
                          spans, story->n, &shown) == STATUS_OK);
    committed_held(filter, &waiting, &inside, &bytes);
    EXPECT(waiting == 0 && inside == story->late_n);
    committed_destroy(filter);
}

/* Reads a log through in fetches; now and then it goes back a little, or elsewhere. */
static void check_story(void) {
    story_t *story = story_make();
    committed_t *filter = committed_create();
    EXPECT(filter != NULL);
    check_end(story);
    for (uint32_t lo = 0; lo < story->n;) {
        const uint32_t left = story->n - lo, take = 1 + random_below(30);
        const uint32_t hi = lo + (take < left ? take : left);
        check_fetch(story, filter, lo, hi);
        lo = hi;
        const uint32_t chance = random_below(20);
        if (chance == 0) {
            committed_reset(filter);
            lo = random_below(story->n);
        } else if (chance < 4) {
            lo -= random_below(20) % (lo + 1);
        }
    }
    committed_destroy(filter);
    free(story->all.bytes);
    free(story);
}

/* The same list again and again, for transactions far ahead: the heap stays small. */
static void check_held(void) {
    committed_t *filter = committed_create();
    committed_aborted_t list[100];
    committed_shown_t shown;
    uint64_t waiting, inside, bytes;
    for (uint32_t i = 0; i < 100; i++) {
        list[i] = (committed_aborted_t){1 + i, 1000 + random_below(5)};
    }
    for (uint32_t i = 0; i < 1000; i++) {
        EXPECT(committed_keep(filter, NULL, 0, list, 100, 0, 9, NULL, 0, &shown) == STATUS_OK);
        committed_held(filter, &waiting, &inside, &bytes);
        EXPECT(waiting <= 400 && inside == 0);
    }
    committed_reset(filter);
    committed_held(filter, &waiting, &inside, &bytes);
    EXPECT(waiting == 0 && inside == 0 && bytes == 0);
    committed_destroy(filter);
}

/* A long list, read through: its memory goes with it, and the filter works on. */
static void check_trimmed(void) {
    enum { LONG = 20000 };
    committed_t *filter = committed_create();
    committed_aborted_t *list = calloc(LONG, sizeof *list);
    committed_shown_t shown;
    messages_span_t span;
    uint64_t waiting, inside, bytes;
    EXPECT(list != NULL);
    log_bytes_t all = {NULL, 0};
    for (uint32_t i = 0; i < LONG; i++) {
        const batch_header_t head = {
            .base_offset = i, .txn_id = i + 1, .attributes = BATCH_TRANSACTIONAL};
        size_t len;
        uint8_t *batch = log_control_of(CONTROL_ABORT, head, &len);
        log_append(&all, batch, len);
        free(batch);
        list[i] = (committed_aborted_t){i + 1, i};
    }
    for (int round = 0; round < 3; round++) {
        alloc_fail_at(round == 1 ? 3 : 0); /* no memory for less: as well */
        EXPECT(committed_keep(filter, all.bytes, all.len, list, LONG, 0, LONG, &span, 0, &shown) ==
               STATUS_OK);
        alloc_fail_at(0);
        committed_held(filter, &waiting, &inside, &bytes);
        EXPECT(waiting == 0 && inside == 0 && (round == 1 || bytes < 65536));
    }
    free(all.bytes);
    free(list);
    committed_destroy(filter);
}

/* A control batch of a type that a later version may have. */
static void check_unknown(void) {
    const batch_header_t head = {.count = 1};
    messages_span_t span;
    committed_shown_t shown;
    for (int type = CONTROL_ABORT; type <= CONTROL_SIDE_LIST + 1; type++) {
        size_t len;
        uint8_t *batch = log_control_of((control_type_t)type, head, &len);
        const status_t want = type <= CONTROL_SIDE_LIST ? STATUS_OK : STATUS_CORRUPT;
        EXPECT(committed_plain(batch, len, COMMITTED_ALL, 0, 9, &span, 1, &shown) == want);
        free(batch);
    }
}

/* Without memory, or with damaged bytes, the state is as it was. */
static void check_refused(void) {
    story_t *story = story_make();
    committed_t *filter = committed_create();
    messages_span_t spans[MOST];
    const committed_aborted_t aborted = {5, 1};
    committed_shown_t shown;
    uint64_t waiting, inside, bytes;
    for (size_t fail = 1; fail < 3; fail++) {
        alloc_fail_at(fail);
        EXPECT(committed_keep(filter, story->all.bytes, story->all.len, &aborted, 1, 0, 1000, spans,
                              story->n, &shown) == STATUS_NO_MEMORY);
        alloc_fail_at(0);
        committed_held(filter, &waiting, &inside, &bytes);
        EXPECT(waiting == 0 && inside == 0);
    }
    alloc_fail_at(1);
    EXPECT(committed_create() == NULL);
    alloc_fail_at(0);
    /* A control batch with a flipped bit must not end, or fail to end, a transaction. */
    for (uint32_t i = 0; i < story->n; i++) {
        const entry_t *entry = &story->entries[i];
        if ((entry->header.attributes & BATCH_CONTROL) == 0) continue;
        uint8_t *type = story->all.bytes + entry->position + BATCH_HEADER_BYTES + 2;
        *type ^= 1;
        EXPECT(committed_keep(filter, story->all.bytes, story->all.len, &aborted, 1, 0, UINT64_MAX,
                              spans, story->n, &shown) == STATUS_CORRUPT);
        *type ^= 1;
    }
    /* Offsets that fall. */
    store_le64(story->all.bytes, 1u << 20);
    EXPECT(committed_plain(story->all.bytes, story->all.len, COMMITTED_ALL, 0, UINT64_MAX, spans,
                           story->n, &shown) == STATUS_CORRUPT);
    committed_held(filter, &waiting, &inside, &bytes);
    EXPECT(waiting == 0 && inside == 0);
    committed_destroy(filter);
    free(story->all.bytes);
    free(story);
}

void test_log_committed(void) {
    for (int i = 0; i < 60; i++) check_story();
    check_held();
    check_trimmed();
    check_refused();
    check_unknown();
}
