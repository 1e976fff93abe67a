#include "common/check.h"
#include "log/messages.h"
#include "log/messages_body.h"

#include <stdbool.h>

/* Strings of a body: those of rows [0, rows) stand at data + ends[i]. */
typedef struct {
    const uint8_t *ends;
    const uint8_t *bits; /* NULL: none is null */
    const uint8_t *data;
} strings_t;

/* A batch whose body was found sane, and which of its rows are wanted. */
typedef struct {
    batch_header_t header;
    strings_t value;
    strings_t key;
    strings_t headers;
    const uint8_t *times;
    const uint8_t *places; /* NULL: 0, 1, 2 */
    uint32_t lo;
    uint32_t n;
} view_t;

static bool has(const view_t *view, unsigned flag) {
    return (view->header.attributes & flag) != 0;
}

/* How many of the first rows are below an offset; without `places` of a batch that has some, as
 * many as surely are: all or none. */
static uint64_t rows_below(const batch_header_t *header, const uint8_t *places,
                           uint64_t from_offset) {
    if (header->base_offset >= from_offset) return 0;
    const uint64_t below = from_offset - header->base_offset;
    if ((header->attributes & BATCH_PLACES) == 0) {
        return below < header->rows ? below : header->rows;
    }
    if (below >= header->count) return header->rows;
    uint64_t lo = 0, hi = places == NULL ? 0 : header->rows;
    while (lo < hi) {
        const uint64_t middle = (lo + hi) / 2;
        if (load_le32(places + 4 * middle) < below) {
            lo = middle + 1;
        } else {
            hi = middle;
        }
    }
    return lo;
}

status_t messages_select(const uint8_t *bytes, size_t len, const messages_span_t *spans,
                         uint32_t n, uint64_t from_offset, uint64_t limit, uint32_t *out_lo,
                         uint32_t *out_n) {
    uint64_t rows = 0;
    *out_lo = *out_n = 0;
    for (uint32_t i = 0; i < n && rows < limit; i++) {
        batch_header_t header;
        if (spans[i].position > len) return STATUS_RANGE;
        const size_t at = (size_t)spans[i].position;
        const status_t status = batch_parse(bytes + at, len - at, &header);
        if (status != STATUS_OK) return status;
        if (header.length != spans[i].length) return STATUS_CORRUPT;
        const uint64_t wanted = header.rows - rows_below(&header, NULL, from_offset);
        if (wanted == 0 && *out_n == 0) {
            *out_lo = i + 1;
            continue;
        }
        const bool all = header.base_offset >= from_offset;
        if (all || (header.attributes & BATCH_PLACES) == 0) rows += wanted;
        *out_n = i + 1 - *out_lo;
    }
    return STATUS_OK;
}

status_t messages_check(const uint8_t *bytes, const messages_span_t *spans, uint32_t n,
                        bool intact, uint32_t *out, uint32_t *out_n) {
    *out_n = 0;
    for (uint32_t i = 0; i < n; i++) {
        const uint8_t *batch = bytes + spans[i].position;
        batch_header_t header;
        const status_t status = intact ? batch_parse(batch, spans[i].length, &header)
                                       : batch_check(batch, spans[i].length);
        if (status != STATUS_OK) return status;
        const uint16_t attributes = load_le16(batch + offsetof(batch_header_t, attributes));
        if ((attributes & BATCH_CODEC) != 0) out[(*out_n)++] = i;
    }
    return STATUS_OK;
}

/* Takes the bytes of a column of strings off the body; its ends must be in order. */
static bool take_strings(strings_t *strings, uint32_t rows, const uint8_t *body, uint64_t size,
                         uint64_t *at) {
    uint32_t bad = load_le32(strings->ends);
    for (size_t i = 0; i < rows; i++) {
        bad |= load_le32(strings->ends + 4 * i) > load_le32(strings->ends + 4 * i + 4);
    }
    const uint64_t len = round_up_8(load_le32(strings->ends + 4 * (size_t)rows));
    if (bad != 0 || len > size - *at) return false;
    strings->data = body + *at;
    *at += len;
    return true;
}

/* Places ascend, and are among the offsets that the batch takes. */
static bool places_sane(const uint8_t *places, const batch_header_t *header) {
    for (size_t i = 0; i < header->rows; i++) {
        const uint32_t place = load_le32(places + 4 * i);
        if (place >= header->count) return false;
        if (i > 0 && place <= load_le32(places + 4 * i - 4)) return false;
    }
    return true;
}

static bool parse_body(const uint8_t *body, view_t *view) {
    const uint32_t rows = view->header.rows;
    const uint64_t size = view->header.raw_bytes;
    const messages_places_t places = messages_places(view->header.attributes, rows);
    uint64_t at = places.values;
    if (at > size) return false;
    view->value = (strings_t){.ends = body + places.value_ends};
    if (has(view, BATCH_NULL_VALUES)) view->value.bits = body + places.value_bits;
    view->key = (strings_t){.ends = body + places.key_ends, .bits = body + places.key_bits};
    view->headers = (strings_t){.ends = body + places.header_ends};
    view->times = body + places.times;
    if (has(view, BATCH_PLACES)) {
        view->places = body + places.places;
        if (!places_sane(view->places, &view->header)) return false;
    }
    if (!take_strings(&view->value, rows, body, size, &at)) return false;
    if (has(view, BATCH_KEYS) && !take_strings(&view->key, rows, body, size, &at)) return false;
    if (has(view, BATCH_HEADERS) && !take_strings(&view->headers, rows, body, size, &at)) {
        return false;
    }
    return at == size;
}

/* View i of a source; `rows` were taken from those before it. */
static status_t view_make(const messages_source_t *source, uint32_t i, uint64_t rows,
                          view_t *out) {
    const uint8_t *batch = source->bytes + source->spans[i].position, *body = NULL;
    *out = (view_t){.n = 0};
    memcpy(&out->header, batch, sizeof out->header);
    if (has(out, BATCH_CONTROL)) return STATUS_OK;
    if (!has(out, BATCH_CODEC)) {
        body = batch + BATCH_HEADER_BYTES + (has(out, BATCH_CHUNK) ? BATCH_CHUNK_BYTES : 0);
    } else if (source->bodies != NULL) {
        body = source->bodies[i];
    }
    if (body == NULL || !parse_body(body, out)) return STATUS_CORRUPT;
    out->lo = (uint32_t)rows_below(&out->header, out->places, source->from_offset);
    out->n = out->header.rows - out->lo;
    if (out->n > source->limit - rows) out->n = (uint32_t)(source->limit - rows);
    return STATUS_OK;
}

static uint32_t bytes_of(const strings_t *strings, const view_t *view) {
    const uint8_t *ends = strings->ends + 4 * (size_t)view->lo;
    return load_le32(ends + 4 * (size_t)view->n) - load_le32(ends);
}

status_t messages_decode_size(const messages_source_t *source, messages_sizes_t *out) {
    messages_sizes_t sizes = {.rows = 0};
    view_t view;
    for (uint32_t i = 0; i < source->n; i++) {
        const status_t status = view_make(source, i, sizes.rows, &view);
        if (status != STATUS_OK) return status;
        if (view.n == 0) continue;
        sizes.rows += view.n;
        sizes.attributes |= view.header.attributes;
        sizes.value_bytes += bytes_of(&view.value, &view);
        if (has(&view, BATCH_KEYS)) sizes.key_bytes += bytes_of(&view.key, &view);
        if (has(&view, BATCH_HEADERS)) sizes.header_bytes += bytes_of(&view.headers, &view);
    }
    if (sizes.rows > INT32_MAX || sizes.value_bytes > INT32_MAX) return STATUS_LIMIT;
    if (sizes.key_bytes > INT32_MAX || sizes.header_bytes > INT32_MAX) return STATUS_LIMIT;
    *out = sizes;
    return STATUS_OK;
}

/* Copies the wanted strings behind the `bytes` that are there; row is the first to write. */
static void put_strings(const strings_t *strings, const view_t *view, uint64_t row,
                        uint32_t *ends, uint8_t *data) {
    const uint8_t *from = strings->ends + 4 * (size_t)view->lo;
    const uint32_t first = load_le32(from), at = ends[row];
    uint32_t *to = ends + row + 1;
    for (uint32_t i = 0; i < view->n; i++) to[i] = load_le32(from + 4 * (size_t)i + 4) - first + at;
    copy_bytes(data + at, strings->data + first, load_le32(from + 4 * (size_t)view->n) - first);
}

static void put_no_strings(uint32_t n, uint64_t row, uint32_t *ends) {
    for (uint32_t i = 0; i < n; i++) ends[row + 1 + i] = ends[row];
}

/* Appends n bits, all `bit` when there are none; returns how many are 0. */
static uint64_t put_bits(const uint8_t *bits, unsigned bit, const view_t *view, uint64_t row,
                         uint8_t *out) {
    uint64_t set = 0;
    for (uint32_t i = 0; i < view->n; i += 64) {
        const unsigned count = view->n - i < 64 ? view->n - i : 64;
        uint64_t word = bit != 0 ? UINT64_MAX >> (64 - count) : 0;
        if (bits != NULL) word = bits_load(bits, (uint64_t)view->lo + i, count);
        bits_append(out, row + i, word, count);
        set += (uint64_t)__builtin_popcountll(word);
    }
    return view->n - set;
}

static void put_headers(const view_t *view, uint64_t row, messages_out_t *out) {
    if (!has(view, BATCH_HEADERS)) {
        put_no_strings(view->n, row, out->header_ends);
        out->null_headers += put_bits(NULL, 0, view, row, out->header_validity);
        return;
    }
    put_strings(&view->headers, view, row, out->header_ends, out->headers);
    for (uint64_t i = row; i < row + view->n; i++) {
        const unsigned some = out->header_ends[i + 1] != out->header_ends[i];
        bits_or(out->header_validity, i, some);
        out->null_headers += 1 - some;
    }
}

static void put_keys(const view_t *view, uint64_t row, messages_out_t *out) {
    const bool keyed = has(view, BATCH_KEYS);
    if (keyed) put_strings(&view->key, view, row, out->key_ends, out->keys);
    if (!keyed) put_no_strings(view->n, row, out->key_ends);
    out->null_keys += put_bits(keyed ? view->key.bits : NULL, 0, view, row, out->key_validity);
}

static void put_numbers(const view_t *view, uint64_t row, messages_out_t *out) {
    const uint64_t base = view->header.base_offset, lo = view->lo;
    if (view->places == NULL) {
        for (uint32_t i = 0; i < view->n; i++) out->offset[row + i] = base + lo + i;
    } else {
        const uint8_t *places = view->places + 4 * lo;
        for (size_t i = 0; i < view->n; i++) out->offset[row + i] = base + load_le32(places + 4 * i);
    }
    for (uint32_t i = 0; i < view->n; i++) out->txn_id[row + i] = view->header.txn_id;
    if (has(view, BATCH_TIMES)) {
        copy_bytes(out->timestamp + row, view->times + 8 * (size_t)view->lo, 8 * (size_t)view->n);
        return;
    }
    for (uint32_t i = 0; i < view->n; i++) out->timestamp[row + i] = view->header.base_timestamp;
}

static void begin(const messages_sizes_t *sizes, messages_out_t *out) {
    const size_t bits = bits_bytes(sizes->rows);
    out->null_values = out->null_keys = out->null_headers = 0;
    out->value_ends[0] = 0;
    if ((sizes->attributes & BATCH_NULL_VALUES) != 0) memset(out->value_validity, 0, bits);
    if ((sizes->attributes & BATCH_KEYS) != 0) {
        out->key_ends[0] = 0;
        memset(out->key_validity, 0, bits);
    }
    if ((sizes->attributes & BATCH_HEADERS) != 0) {
        out->header_ends[0] = 0;
        memset(out->header_validity, 0, bits);
    }
}

void messages_decode(const messages_source_t *source, const messages_sizes_t *sizes,
                     messages_out_t *out) {
    uint64_t row = 0;
    view_t view;
    begin(sizes, out);
    for (uint32_t i = 0; i < source->n; i++) {
        CHECK(view_make(source, i, row, &view) == STATUS_OK);
        if (view.n == 0) continue;
        CHECK(view.n <= sizes->rows - row);
        put_numbers(&view, row, out);
        put_strings(&view.value, &view, row, out->value_ends, out->values);
        if ((sizes->attributes & BATCH_NULL_VALUES) != 0) {
            out->null_values += put_bits(view.value.bits, 1, &view, row, out->value_validity);
        }
        if ((sizes->attributes & BATCH_KEYS) != 0) put_keys(&view, row, out);
        if ((sizes->attributes & BATCH_HEADERS) != 0) put_headers(&view, row, out);
        row += view.n;
    }
    CHECK(row == sizes->rows);
}
