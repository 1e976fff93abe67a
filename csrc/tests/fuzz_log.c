/* Everything that reads a log, on any bytes. */
#include "common/bits.h"
#include "common/bytes.h"
#include "log/committed.h"
#include "log/headers.h"
#include "log/last_keys.h"
#include "tests/fuzz_core.h"

#include <stdlib.h>

/* Key compaction of what was decoded. */
static void compact(const messages_out_t *out, const messages_sizes_t *sizes) {
    const size_t n = sizes->rows, bits = bits_bytes(n), ends = 4 * (n + 1);
    const messages_t messages = {
        .value = {out->values, sizes->value_bytes, (const uint8_t *)out->value_ends, ends,
                  out->value_validity, bits, 0},
        .key = {out->keys, sizes->key_bytes, (const uint8_t *)out->key_ends, ends,
                out->key_validity, bits, 0},
        .times = {(const uint8_t *)out->timestamp, 8 * n, NULL, 0, NULL, 0, 0},
        .rows = (uint32_t)n};
    uint32_t stay, *chosen = malloc(4 * (n + 1));
    last_keys_t *keys = last_keys_create();
    if (chosen != NULL && keys != NULL &&
        last_keys_note(keys, &messages, out->offset) == STATUS_OK) {
        last_keys_choose(keys, &messages, out->offset, 1000, chosen, &stay);
        if (n > 0) last_keys_find(keys, out->keys, out->key_ends[1]);
    }
    if (keys != NULL) last_keys_destroy(keys);
    free(chosen);
}

static void decode(const messages_source_t *source, const messages_sizes_t *sizes) {
    const size_t n = sizes->rows, bits = bits_bytes(n);
    if (sizes->rows > (1u << 20)) return;
    uint8_t *parts[12];
    const size_t lens[12] = {8 * n, 8 * n, 8 * n, bits, 4 * (n + 1), sizes->value_bytes,
                             bits,  4 * (n + 1), sizes->key_bytes,
                             bits,  4 * (n + 1), sizes->header_bytes};
    int whole = 1;
    for (int i = 0; i < 12; i++) whole &= (parts[i] = malloc(lens[i] + 1)) != NULL;
    messages_out_t out = {.offset = (uint64_t *)(void *)parts[0],
                          .timestamp = (int64_t *)(void *)parts[1],
                          .txn_id = (uint64_t *)(void *)parts[2],
                          .value_validity = parts[3],
                          .value_ends = (uint32_t *)(void *)parts[4],
                          .values = parts[5],
                          .key_validity = parts[6],
                          .key_ends = (uint32_t *)(void *)parts[7],
                          .keys = parts[8],
                          .header_validity = parts[9],
                          .header_ends = (uint32_t *)(void *)parts[10],
                          .headers = parts[11]};
    if (whole) {
        messages_decode(source, sizes, &out);
        compact(&out, sizes);
    }
    for (int i = 0; i < 12; i++) free(parts[i]);
}

static void read_spans(const uint8_t *data, size_t len, const messages_span_t *spans, uint32_t n) {
    uint32_t lo, some, packed_n;
    if (messages_select(data, len, spans, n, 1, 1000, &lo, &some) != STATUS_OK) return;
    uint32_t *packed = malloc(4 * ((size_t)n + 1));
    const uint8_t **bodies = malloc(sizeof *bodies * ((size_t)n + 1));
    if (packed != NULL && bodies != NULL) {
        messages_check(data, spans + lo, some, false, packed, &packed_n);
        /* Also without right checksums, and of compressed ones what they are as it is. */
        for (uint32_t i = 0; i < some; i++) {
            batch_header_t header;
            memcpy(&header, data + spans[lo + i].position, sizeof header);
            const int fits = header.raw_bytes <= header.length - BATCH_HEADER_BYTES;
            bodies[i] = fits ? data + spans[lo + i].position + BATCH_HEADER_BYTES : NULL;
        }
        const messages_source_t source = {data, len, spans + lo, some, bodies, 1, 1000};
        messages_sizes_t sizes;
        if (messages_decode_size(&source, &sizes) == STATUS_OK) decode(&source, &sizes);
    }
    free(packed);
    free((void *)bodies);
}

static void split_headers(const uint8_t *data, size_t len) {
    const uint32_t ends[2] = {0, (uint32_t)len};
    headers_sizes_t sizes;
    if (len > (1u << 20) || headers_size(ends, 1, data, len, &sizes) != STATUS_OK) return;
    uint32_t lists[2], *name_ends = malloc(4 * (sizes.count + 1));
    uint32_t *value_ends = malloc(4 * (sizes.count + 1));
    uint8_t *names = malloc(sizes.name_bytes + 1), *values = malloc(sizes.value_bytes + 1);
    if (name_ends != NULL && value_ends != NULL && names != NULL && values != NULL) {
        headers_split(ends, 1, data, lists, name_ends, names, value_ends, values);
    }
    free(name_ends);
    free(value_ends);
    free(names);
    free(values);
}

int fuzz_log(const uint8_t *data, size_t len) {
    static const committed_aborted_t aborted[] = {{1, 0}, {7, 3}, {7, 3}, {9, UINT64_MAX}};
    uint32_t n;
    committed_shown_t shown;
    split_headers(data, len);
    batch_check(data, len);
    if (batch_count(data, len, &n) != STATUS_OK) return 0;
    messages_span_t *spans = malloc(sizeof *spans * ((size_t)n + 1));
    committed_t *filter = committed_create();
    if (spans != NULL && filter != NULL) {
        committed_keep(filter, data, len, aborted, 4, 2, UINT64_MAX, spans, n, &shown);
        committed_plain(data, len, COMMITTED_DECIDED, 0, 9, spans, n, &shown);
        if (committed_plain(data, len, COMMITTED_ALL, 0, UINT64_MAX, spans, n, &shown) ==
            STATUS_OK) {
            read_spans(data, len, spans, shown.n);
        }
    }
    committed_destroy(filter);
    free(spans);
    uint8_t *copy = malloc(len + 1);
    if (copy != NULL) {
        copy_bytes(copy, data, len);
        batch_place(copy, len, 17, 3);
    }
    free(copy);
    return 1;
}
