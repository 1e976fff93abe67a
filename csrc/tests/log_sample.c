#include "tests/log_sample.h"

#include "common/bits.h"

static uint8_t *some_bits(uint32_t n) {
    uint8_t *bits = exact(bits_bytes(n));
    memset(bits, 0, bits_bytes(n));
    for (uint32_t i = 0; i < n; i++) bits_or(bits, i, random_below(4) != 0);
    return bits;
}

static messages_column_t strings_column(log_sample_t *sample, unsigned i, uint32_t rows,
                                        uint32_t offset) {
    const uint32_t all = rows + offset;
    sample->strings[i] = keys_random(KEYS_VARIABLE, all, random_below(3) == 0);
    if (random_below(2) == 0) sample->validity[i] = some_bits(all);
    return (messages_column_t){.values = sample->strings[i].data,
                               .values_len = sample->strings[i].data_len,
                               .offsets = sample->strings[i].offsets,
                               .offsets_len = 4 * ((size_t)all + 1),
                               .validity = sample->validity[i],
                               .validity_len = bits_bytes(all),
                               .offset = offset};
}

log_sample_t log_sample(uint32_t rows, uint32_t offset) {
    log_sample_t sample = {.times = NULL};
    messages_t *messages = &sample.messages;
    messages->rows = rows;
    messages->timestamp = (int64_t)random_below(1000);
    messages->value = strings_column(&sample, 0, rows, offset);
    if (random_below(2) == 0) messages->key = strings_column(&sample, 1, rows, offset);
    if (random_below(2) == 0) messages->headers = strings_column(&sample, 2, rows, offset);
    if (random_below(2) != 0) return sample;
    const uint32_t all = rows + offset;
    sample.times = exact(8 * (size_t)all);
    for (uint32_t i = 0; i < all; i++) store_le64(sample.times + 8 * (size_t)i, random_below(9));
    if (random_below(2) == 0) sample.times_validity = some_bits(all);
    messages->times = (messages_column_t){.values = sample.times,
                                          .values_len = 8 * (size_t)all,
                                          .validity = sample.times_validity,
                                          .validity_len = bits_bytes(all),
                                          .offset = offset};
    return sample;
}

void log_sample_scatter(log_sample_t *sample) {
    uint32_t at = random_below(3);
    sample->places = exact(4 * (size_t)sample->messages.rows);
    for (uint32_t i = 0; i < sample->messages.rows; i++, at += 1 + random_below(3)) {
        store_le32(sample->places + 4 * (size_t)i, at);
    }
    sample->messages.places = sample->places;
}

void log_sample_drop(log_sample_t sample) {
    for (unsigned i = 0; i < 3; i++) {
        keys_drop(sample.strings[i]);
        free(sample.validity[i]);
    }
    free(sample.times);
    free(sample.times_validity);
    free(sample.places);
}

slice_t log_sample_at(const log_sample_t *sample, unsigned column, uint32_t row) {
    const messages_t *messages = &sample->messages;
    const messages_column_t *columns[] = {&messages->value, &messages->key, &messages->headers};
    const messages_column_t *c = columns[column];
    const slice_t none = {NULL, 0};
    if (c->offsets == NULL) return none;
    if (c->validity != NULL && !bits_get(c->validity, c->offset + row)) return none;
    return keys_at(&sample->strings[column], (uint32_t)c->offset + row);
}

int64_t log_sample_time(const log_sample_t *sample, uint32_t row) {
    const messages_column_t *times = &sample->messages.times;
    if (times->values == NULL) return sample->messages.timestamp;
    if (times->validity != NULL && !bits_get(times->validity, times->offset + row)) {
        return sample->messages.timestamp;
    }
    return (int64_t)load_le64(times->values + 8 * (times->offset + row));
}

uint32_t log_sample_place(const log_sample_t *sample, uint32_t row) {
    return sample->places == NULL ? row : load_le32(sample->places + 4 * (size_t)row);
}

uint8_t *log_batch_of(const log_sample_t *sample, batch_header_t head, size_t *out_len) {
    messages_plan_t plan;
    EXPECT(messages_plan(&sample->messages, &plan) == STATUS_OK);
    const size_t before =
        BATCH_HEADER_BYTES + ((head.attributes & BATCH_CHUNK) != 0 ? BATCH_CHUNK_BYTES : 0);
    *out_len = before + plan.raw_bytes;
    uint8_t *batch = exact(*out_len);
    random_bytes(batch, *out_len); /* all of it must be written */
    messages_encode(&sample->messages, &plan, batch + before, plan.raw_bytes);
    head.attributes = (uint16_t)(head.attributes | plan.attributes);
    if (head.count == 0) head.count = plan.rows;
    head.rows = plan.rows;
    head.raw_bytes = plan.raw_bytes;
    head.base_timestamp = plan.base_timestamp;
    head.max_timestamp = plan.max_timestamp;
    batch_seal(&head, batch, *out_len);
    return batch;
}

uint8_t *log_control_of(control_type_t type, batch_header_t head, size_t *out_len) {
    *out_len = BATCH_HEADER_BYTES + BATCH_CONTROL_BYTES;
    uint8_t *batch = exact(*out_len);
    memset(batch, 0, *out_len);
    store_le16(batch + BATCH_HEADER_BYTES + 2, (uint16_t)type);
    head.attributes |= BATCH_CONTROL;
    head.raw_bytes = BATCH_CONTROL_BYTES;
    if (head.count == 0) head.count = 1;
    batch_seal(&head, batch, *out_len);
    return batch;
}

void log_append(log_bytes_t *to, const uint8_t *bytes, size_t len) {
    to->bytes = realloc(to->bytes, to->len + len + 1);
    EXPECT(to->bytes != NULL);
    copy_bytes(to->bytes + to->len, bytes, len);
    to->len += len;
}
