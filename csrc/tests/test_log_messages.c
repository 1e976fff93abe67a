/* Messages into batches and back, against the columns that they came from. */
#include "common/bits.h"
#include "tests/log_sample.h"

enum { BATCHES = 5 };

/* A buffer of batches, with the samples they were made of; gaps lie between their offsets. */
typedef struct {
    log_sample_t samples[BATCHES];
    batch_header_t headers[BATCHES];
    messages_span_t spans[BATCHES];
    log_bytes_t all;
    uint64_t end;
} stock_t;

static stock_t stock_make(uint32_t most) {
    stock_t stock = {.all = {NULL, 0}};
    uint64_t next = random_below(100);
    for (uint32_t i = 0; i < BATCHES; i++) {
        size_t len;
        const uint32_t rows = random_below(most), gap = random_below(3);
        stock.samples[i] = log_sample(rows, random_below(9));
        if (rows != 0 && random_below(3) == 0) log_sample_scatter(&stock.samples[i]);
        const uint32_t reach = rows == 0 ? 0 : log_sample_place(&stock.samples[i], rows - 1) + 1;
        batch_header_t head = {.base_offset = next, .count = reach + (rows == 0) + random_below(2)};
        if (random_below(2) == 0) {
            head.txn_id = 1 + random_below(9);
            head.attributes = BATCH_TRANSACTIONAL;
        }
        const bool scattered = stock.samples[i].places != NULL;
        if (!scattered && random_below(4) == 0) head.attributes |= BATCH_CHUNK;
        uint8_t *batch = log_batch_of(&stock.samples[i], head, &len);
        EXPECT(batch_parse(batch, len, &stock.headers[i]) == STATUS_OK);
        stock.spans[i] = (messages_span_t){stock.all.len, (uint32_t)len, rows};
        log_append(&stock.all, batch, len);
        free(batch);
        next += head.count + gap;
    }
    stock.end = next;
    return stock;
}

static void stock_drop(stock_t stock) {
    for (uint32_t i = 0; i < BATCHES; i++) log_sample_drop(stock.samples[i]);
    free(stock.all.bytes);
}

static messages_out_t out_make(const messages_sizes_t *sizes) {
    const size_t n = sizes->rows, bits = bits_bytes(n);
    messages_out_t out = {.null_values = 0};
    out.offset = (uint64_t *)(void *)exact(8 * n);
    out.timestamp = (int64_t *)(void *)exact(8 * n);
    out.txn_id = (uint64_t *)(void *)exact(8 * n);
    out.value_ends = (uint32_t *)(void *)exact(4 * (n + 1));
    out.values = exact(sizes->value_bytes);
    if ((sizes->attributes & BATCH_NULL_VALUES) != 0) out.value_validity = exact(bits);
    if ((sizes->attributes & BATCH_KEYS) != 0) {
        out.key_validity = exact(bits);
        out.key_ends = (uint32_t *)(void *)exact(4 * (n + 1));
        out.keys = exact(sizes->key_bytes);
    }
    if ((sizes->attributes & BATCH_HEADERS) != 0) {
        out.header_validity = exact(bits);
        out.header_ends = (uint32_t *)(void *)exact(4 * (n + 1));
        out.headers = exact(sizes->header_bytes);
    }
    return out;
}

static void out_drop(messages_out_t out) {
    void *parts[] = {out.offset,       out.timestamp, out.txn_id,   out.value_ends,
                     out.values,       out.keys,      out.key_ends, out.key_validity,
                     out.value_validity, out.headers, out.header_ends, out.header_validity};
    for (size_t i = 0; i < sizeof parts / sizeof *parts; i++) free(parts[i]);
}

static void expect_string(slice_t want, const uint8_t *validity, const uint32_t *ends,
                          const uint8_t *data, uint64_t row, uint64_t *nulls) {
    const bool null = want.data == NULL;
    *nulls += null;
    if (validity != NULL) EXPECT(bits_get(validity, row) == !null);
    if (validity == NULL) EXPECT(!null || ends == NULL); /* a part is left out: all are null */
    if (ends == NULL) return;
    EXPECT(ends[row + 1] - ends[row] == want.len);
    EXPECT(compare_bytes(data + ends[row], want.data, want.len) == 0);
}

static void check_row(const log_sample_t *sample, const batch_header_t *header, uint32_t i,
                      const messages_out_t *out, uint64_t row, uint64_t nulls[3]) {
    slice_t headers = log_sample_at(sample, 2, i);
    if (headers.len == 0) headers.data = NULL;
    EXPECT(out->offset[row] == header->base_offset + log_sample_place(sample, i));
    EXPECT(out->txn_id[row] == header->txn_id);
    EXPECT(out->timestamp[row] == log_sample_time(sample, i));
    expect_string(log_sample_at(sample, 0, i), out->value_validity, out->value_ends, out->values,
                  row, &nulls[0]);
    expect_string(log_sample_at(sample, 1, i), out->key_validity, out->key_ends, out->keys, row,
                  &nulls[1]);
    expect_string(headers, out->header_validity, out->header_ends, out->headers, row, &nulls[2]);
}

static void check_decode(const stock_t *stock, uint64_t from_offset, uint64_t limit) {
    uint32_t lo, n, packed[BATCHES], packed_n;
    const uint8_t *bytes = stock->all.bytes;
    const size_t len = stock->all.len;
    EXPECT(messages_select(bytes, len, stock->spans, BATCHES, from_offset, limit, &lo, &n) ==
           STATUS_OK);
    EXPECT(messages_check(bytes, stock->spans + lo, n, false, packed, &packed_n) == STATUS_OK);
    EXPECT(packed_n == 0);
    const messages_source_t source = {bytes, len, stock->spans + lo, n, NULL, from_offset, limit};
    messages_sizes_t sizes;
    EXPECT(messages_decode_size(&source, &sizes) == STATUS_OK);
    messages_out_t out = out_make(&sizes);
    messages_decode(&source, &sizes, &out);
    uint64_t row = 0, nulls[3] = {0, 0, 0};
    for (uint32_t b = 0; b < BATCHES; b++) {
        const batch_header_t *header = &stock->headers[b];
        for (uint32_t i = 0; i < header->rows; i++) {
            const uint32_t place = log_sample_place(&stock->samples[b], i);
            if (header->base_offset + place < from_offset || row == limit) continue;
            EXPECT(row < sizes.rows);
            check_row(&stock->samples[b], header, i, &out, row++, nulls);
        }
    }
    EXPECT(row == sizes.rows);
    EXPECT(out.null_values == nulls[0] || out.value_validity == NULL);
    EXPECT(out.null_keys == nulls[1] || out.key_validity == NULL);
    EXPECT(out.null_headers == nulls[2] || out.header_validity == NULL);
    out_drop(out);
}

static void check_plan(const stock_t *stock) {
    for (uint32_t b = 0; b < BATCHES; b++) {
        const log_sample_t *sample = &stock->samples[b];
        const batch_header_t *header = &stock->headers[b];
        int64_t least = INT64_MAX, most = INT64_MIN;
        for (uint32_t i = 0; i < header->rows; i++) {
            const int64_t time = log_sample_time(sample, i);
            least = time < least ? time : least;
            most = time > most ? time : most;
        }
        if (header->rows == 0) continue;
        EXPECT(header->base_timestamp == least && header->max_timestamp == most);
        EXPECT(((header->attributes & BATCH_TIMES) != 0) == (least != most));
    }
}

static void check_refused(void) {
    messages_plan_t plan;
    log_sample_t sample = log_sample(10, 2);
    while (sample.messages.times.values == NULL) {
        log_sample_drop(sample);
        sample = log_sample(10, 2);
    }
    messages_t broken = sample.messages;
    broken.value.offsets_len -= 4;
    EXPECT(messages_plan(&broken, &plan) == STATUS_INPUT);
    broken = sample.messages;
    broken.times.values_len -= 1;
    EXPECT(messages_plan(&broken, &plan) == STATUS_INPUT);
    broken = sample.messages;
    broken.value.values_len = 0;
    if (sample.strings[0].data_len != 0) EXPECT(messages_plan(&broken, &plan) == STATUS_INPUT);
    const uint32_t falling[] = {0, 5, 4}, wide[] = {0, UINT32_MAX / 2 + 1, UINT32_MAX / 2 + 2};
    broken = (messages_t){.rows = 2};
    broken.value = (messages_column_t){.offsets = (const uint8_t *)falling,
                                       .offsets_len = sizeof falling,
                                       .values = (const uint8_t *)falling,
                                       .values_len = sizeof falling};
    EXPECT(messages_plan(&broken, &plan) == STATUS_INPUT);
    broken.value.offsets = (const uint8_t *)wide;
    broken.value.values_len = UINT32_MAX;
    EXPECT(messages_plan(&broken, &plan) == STATUS_LIMIT);
    const uint32_t most[] = {0, INT32_MAX - 50, INT32_MAX - 40};
    broken.value.offsets = (const uint8_t *)most;
    EXPECT(messages_plan(&broken, &plan) == STATUS_LIMIT);
    broken = (messages_t){.rows = UINT32_MAX};
    EXPECT(messages_plan(&broken, &plan) == STATUS_LIMIT);
    log_sample_drop(sample);
}

/* Places that do not ascend, and one that is not among the offsets that the batch takes. */
static void check_places_refused(void) {
    for (int i = 0; i < 50; i++) {
        log_sample_t sample = log_sample(2 + random_below(9), 0);
        log_sample_scatter(&sample);
        const uint32_t rows = sample.messages.rows, row = 1 + random_below(rows - 1);
        const uint32_t last = log_sample_place(&sample, rows - 1);
        size_t len;
        uint8_t *batch = log_batch_of(&sample, (batch_header_t){.count = last + 1}, &len);
        const messages_span_t span = {0, (uint32_t)len, rows};
        const messages_source_t source = {batch, len, &span, 1, NULL, 0, UINT64_MAX};
        messages_sizes_t sizes;
        messages_plan_t plan;
        EXPECT(messages_decode_size(&source, &sizes) == STATUS_OK);
        store_le32(batch + offsetof(batch_header_t, count), last);
        EXPECT(messages_decode_size(&source, &sizes) == STATUS_CORRUPT);
        store_le32(sample.places + 4 * (size_t)row, log_sample_place(&sample, row - 1));
        EXPECT(messages_plan(&sample.messages, &plan) == STATUS_INPUT);
        free(batch);
        log_sample_drop(sample);
    }
}

static void check_spans(const stock_t *stock) {
    uint32_t lo, n;
    const uint8_t *bytes = stock->all.bytes;
    const size_t len = stock->all.len;
    const messages_span_t outside = {len + 1, 80, 1}, behind = {len, 80, 1};
    messages_span_t other = stock->spans[0];
    other.length--;
    EXPECT(messages_select(bytes, len, &outside, 1, 0, 1, &lo, &n) == STATUS_RANGE);
    EXPECT(messages_select(bytes, len, &behind, 1, 0, 1, &lo, &n) == STATUS_CORRUPT);
    EXPECT(messages_select(bytes, len, &other, 1, 0, 1, &lo, &n) == STATUS_CORRUPT);
}

void test_log_messages(void) {
    for (uint32_t most = 2; most < 300; most += 1 + random_below(30)) {
        const stock_t stock = stock_make(most);
        check_plan(&stock);
        check_spans(&stock);
        check_decode(&stock, 0, UINT64_MAX);
        check_decode(&stock, 0, 0);
        check_decode(&stock, UINT64_MAX, UINT64_MAX);
        for (int i = 0; i < 8; i++) {
            const uint64_t from_offset = random_u64() % (stock.end + 1);
            check_decode(&stock, from_offset, UINT64_MAX);
            check_decode(&stock, from_offset, random_below(2 * most));
        }
        stock_drop(stock);
    }
    check_refused();
    check_places_refused();
}
