/* Kafka's batches against the messages that they are made of, there and back, and on damage. */
#include "codec/crc32c.h"
#include "common/bits.h"
#include "log/kafka.h"
#include "tests/fuzz_core.h"
#include "tests/log_sample.h"

enum { MOST = 40 };

/* Columns that kafka_records_decode writes to, in exact memory. */
static kafka_columns_t columns_make(const kafka_sizes_t *sizes, uint32_t n) {
    const size_t bits = bits_bytes(n), ends = 4 * ((size_t)n + 1);
    return (kafka_columns_t){.timestamp = (int64_t *)(void *)exact(8 * (size_t)n),
                             .value_validity = exact(bits),
                             .value_ends = (uint32_t *)(void *)exact(ends),
                             .values = exact(sizes->value_bytes),
                             .key_validity = exact(bits),
                             .key_ends = (uint32_t *)(void *)exact(ends),
                             .keys = exact(sizes->key_bytes),
                             .header_validity = exact(bits),
                             .header_ends = (uint32_t *)(void *)exact(ends),
                             .headers = exact(sizes->header_bytes)};
}

static void columns_drop(kafka_columns_t c) {
    void *parts[] = {c.timestamp, c.value_validity, c.value_ends, c.values,     c.key_validity,
                     c.key_ends,  c.keys,           c.header_validity, c.header_ends, c.headers};
    for (size_t i = 0; i < sizeof parts / sizeof *parts; i++) free(parts[i]);
}

/* One record with the time delta -1, a key "k", no value, and the headers "h" = null, "" = "xy". */
static void check_known(void) {
    static const uint8_t record[] = {2 * 14, 0, 1, 0, 2, 'k', 1, 4, 2, 'h', 1, 0, 4, 'x', 'y'};
    static const uint8_t headers[] = {2, 0, 1, 0, 'h', 0, 0, 0, 0, 0, 0, 2, 0, 0, 0, 'x', 'y'};
    kafka_sizes_t sizes;
    EXPECT(kafka_records_size(record, sizeof record, 1, 5, &sizes) == STATUS_OK);
    EXPECT(sizes.value_bytes == 0 && sizes.key_bytes == 1 && sizes.null_values == 1);
    EXPECT(sizes.header_bytes == sizeof headers && sizes.null_headers == 0);
    kafka_columns_t out = columns_make(&sizes, 1);
    kafka_records_decode(record, sizeof record, 1, 5, &out);
    EXPECT(out.timestamp[0] == 4000 && out.keys[0] == 'k' && out.key_ends[1] == 1);
    EXPECT(out.value_validity[0] == 0 && out.key_validity[0] == 1);
    EXPECT(compare_bytes(out.headers, headers, sizeof headers) == 0);
    columns_drop(out);
    /* what is wrong with it */
    EXPECT(kafka_records_size(record, sizeof record, 2, 5, &sizes) == STATUS_CORRUPT);
    EXPECT(kafka_records_size(record, sizeof record, 1, INT64_MIN, &sizes) == STATUS_LIMIT);
    for (size_t cut = 0; cut < sizeof record; cut++) {
        uint8_t *part = exact_copy(record, cut);
        EXPECT(kafka_records_size(part, cut, 1, 5, &sizes) == STATUS_CORRUPT);
        free(part);
    }
}

/* A log and the columns of its messages; headers are sane or none. */
typedef struct {
    log_bytes_t log;
    uint64_t base, next, rows;
    uint64_t offset[MOST * 4];
    int64_t timestamp[MOST * 4];
    uint64_t producer[MOST * 4]; /* 0: nobody's */
    uint32_t value_ends[MOST * 4 + 1];
    uint8_t values[MOST * 4 * 9];
    uint8_t validity[MOST];
    uint32_t header_ends[MOST * 4 + 1];
    uint8_t headers[MOST * 4 * 12];
    uint32_t markers;
} story_t;

static void add_batch(story_t *s, uint32_t rows, uint64_t txn_id, uint16_t attributes) {
    size_t len;
    const log_sample_t sample = log_sample(rows, 0);
    const batch_header_t head = {
        .base_offset = s->next, .count = rows, .txn_id = txn_id, .attributes = attributes};
    uint8_t *batch = log_batch_of(&sample, head, &len);
    log_append(&s->log, batch, len);
    free(batch);
    log_sample_drop(sample);
    for (uint32_t i = 0; i < rows; i++) {
        static const uint8_t header[] = {1, 0, 1, 0, 'n', 2, 0, 0, 0, 'v', 'w'};
        const uint64_t row = s->rows++;
        const uint32_t value = random_below(9), has = random_below(2) * (uint32_t)sizeof header;
        s->offset[row] = s->next + i;
        s->timestamp[row] = (int64_t)random_below(10000) - 5000;
        s->producer[row] = (attributes & BATCH_DECIDED) != 0 ? 0 : txn_id;
        random_bytes(s->values + s->value_ends[row], value);
        s->value_ends[row + 1] = s->value_ends[row] + value;
        copy_bytes(s->headers + s->header_ends[row], header, has);
        s->header_ends[row + 1] = s->header_ends[row] + has;
        if (random_below(3) != 0) bits_set(s->validity, row);
    }
    s->next += rows;
}

static void add_control(story_t *s, control_type_t type, uint64_t txn_id, uint32_t count) {
    size_t len;
    const batch_header_t head = {.base_offset = s->next,
                                 .count = count,
                                 .txn_id = txn_id,
                                 .attributes = txn_id == 0 ? 0 : BATCH_TRANSACTIONAL};
    uint8_t *batch = log_control_of(type, head, &len);
    log_append(&s->log, batch, len);
    free(batch);
    s->next += count;
    s->markers += type == CONTROL_COMMIT || type == CONTROL_ABORT;
}

static void story(story_t *s) {
    *s = (story_t){.base = random_below(1000)};
    s->next = s->base;
    while (s->rows < MOST * 3 && random_below(30) != 0) {
        const uint64_t txn_id = 1 + random_below(3);
        switch (random_below(6)) {
        case 0: add_batch(s, 1 + random_below(9), txn_id, BATCH_TRANSACTIONAL); break;
        case 1:
            add_batch(s, 1 + random_below(9), txn_id, BATCH_TRANSACTIONAL | BATCH_DECIDED);
            break;
        case 2: add_batch(s, 1 + random_below(9), 0, 0); break;
        case 3: add_control(s, CONTROL_FILLER, 0, 1 + random_below(5)); break;
        case 4: add_control(s, CONTROL_COMMIT, txn_id, 1); break;
        default: add_control(s, CONTROL_ABORT, txn_id, 1);
        }
    }
}

static kafka_source_t source_of(const story_t *s) {
    return (kafka_source_t){.log = s->log.bytes,
                            .log_len = s->log.len,
                            .upto = UINT64_MAX,
                            .rows = s->rows,
                            .offset = s->offset,
                            .timestamp = s->timestamp,
                            .value_validity = s->validity,
                            .value_ends = s->value_ends,
                            .values = s->values,
                            .header_ends = s->header_ends,
                            .headers = s->headers};
}

static int64_t floor_millis(int64_t micros) {
    const int64_t down = micros / 1000;
    return down * 1000 > micros ? down - 1 : down;
}

/* The records of one of our batches are rows [row, ...) of the story; returns the next row. */
static uint64_t check_batch(const story_t *s, const uint8_t *batch, size_t len, uint64_t row) {
    const uint64_t base = load_be64(batch);
    const uint32_t count = load_be32(batch + 57);
    kafka_sizes_t sizes;
    /* Numbers have gaps where a log has fillers, so records are looked at one by one. */
    uint64_t found = row;
    for (; found < s->rows && s->offset[found] <= base + load_be32(batch + 23); found++) {
        const uint64_t producer = s->producer[found] == 0 ? UINT64_MAX : s->producer[found];
        EXPECT(s->offset[found] >= base && producer == load_be64(batch + 43));
    }
    EXPECT(found - row == count);
    if (count == 0) return found;
    EXPECT((int64_t)load_be64(batch + 27) == floor_millis(s->timestamp[row]));
    const uint8_t *records = batch + KAFKA_HEADER_BYTES;
    const size_t records_len = len - KAFKA_HEADER_BYTES;
    if (s->offset[found - 1] - base != count - 1) return found;
    EXPECT(kafka_records_size(records, records_len, count, floor_millis(s->timestamp[row]),
                              &sizes) == STATUS_OK);
    EXPECT(sizes.null_keys == count);
    kafka_columns_t out = columns_make(&sizes, count);
    kafka_records_decode(records, records_len, count, floor_millis(s->timestamp[row]), &out);
    for (uint32_t i = 0; i < count; i++) {
        const uint64_t at = row + i;
        const uint32_t value = s->value_ends[at + 1] - s->value_ends[at];
        const uint32_t headers = s->header_ends[at + 1] - s->header_ends[at];
        EXPECT(out.timestamp[i] == floor_millis(s->timestamp[at]) * 1000);
        EXPECT(bits_get(out.value_validity, i) == bits_get(s->validity, at));
        EXPECT(bits_get(out.header_validity, i) == (headers != 0));
        EXPECT(out.header_ends[i + 1] - out.header_ends[i] == headers);
        EXPECT(compare_bytes(out.headers + out.header_ends[i], s->headers + s->header_ends[at],
                             headers) == 0);
        if (!bits_get(s->validity, at)) continue;
        EXPECT(out.value_ends[i + 1] - out.value_ends[i] == value);
        EXPECT(compare_bytes(out.values + out.value_ends[i], s->values + s->value_ends[at],
                             value) == 0);
    }
    columns_drop(out);
    return found;
}

static void check_story(const story_t *s) {
    const kafka_source_t source = source_of(s);
    uint64_t size;
    EXPECT(kafka_batches_size(&source, &size) == STATUS_OK);
    uint8_t *out = exact(size);
    kafka_batches_encode(&source, out, size);
    uint64_t next = s->base, row = 0;
    uint32_t markers = 0;
    for (uint64_t at = 0; at < size;) {
        EXPECT(size - at >= KAFKA_HEADER_BYTES);
        const size_t len = load_be32(out + at + 8) + 12;
        const uint8_t *batch = out + at;
        EXPECT(len <= size - at && batch[16] == 2 && load_be64(batch) == next);
        EXPECT(crc32c(0, batch + 21, len - 21) == load_be32(batch + 17));
        if ((load_be16(batch + 21) & 0x20) != 0) {
            markers++;
        } else {
            row = check_batch(s, batch, len, row);
        }
        next = load_be64(batch) + load_be32(batch + 23) + 1;
        at += len;
    }
    EXPECT(next == s->next && row == s->rows && markers == s->markers);
    for (int i = 0; size > KAFKA_HEADER_BYTES && i < 50; i++) {
        out[random_u64() % size] ^= (uint8_t)(1u << random_below(8));
        fuzz_kafka(out + KAFKA_HEADER_BYTES, size - KAFKA_HEADER_BYTES);
    }
    free(out);
    for (int i = 0; s->log.len != 0 && i < 20; i++) {
        uint8_t *log = exact_copy(s->log.bytes, s->log.len);
        if (i != 0) log[random_u64() % s->log.len] ^= (uint8_t)(1u << random_below(8));
        fuzz_kafka(log, s->log.len);
        free(log);
    }
}

/* Rows that are in no batch, headers that are none, a log that is cut. */
static void check_refused(story_t *s) {
    kafka_source_t source = source_of(s);
    uint64_t size;
    if (s->rows == 0) return;
    const uint64_t last = s->offset[s->rows - 1];
    s->offset[s->rows - 1] = s->next + 5; /* in no batch */
    EXPECT(kafka_batches_size(&source, &size) == STATUS_CORRUPT);
    s->offset[s->rows - 1] = last;
    source = source_of(s);
    source.log_len--;
    EXPECT(kafka_batches_size(&source, &size) == STATUS_CORRUPT);
    source = source_of(s);
    if (s->header_ends[s->rows] != 0) {
        s->headers[0] = 9;
        EXPECT(kafka_batches_size(&source, &size) == STATUS_CORRUPT);
        s->headers[0] = 1;
    }
    source.upto = s->base;
    source.rows = 0;
    EXPECT(kafka_batches_size(&source, &size) == STATUS_OK && size == 0);
}

void test_log_kafka(void) {
    check_known();
    for (int i = 0; i < 300; i++) {
        story_t s;
        story(&s);
        check_story(&s);
        check_refused(&s);
        free(s.log.bytes);
    }
}
