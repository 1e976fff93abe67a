#include "log/headers.h"

#include "common/bytes.h"

/* Takes a length of `width` bytes and as many bytes off a row; NULL: it is too short. */
static const uint8_t *take(const uint8_t **at, const uint8_t *end, size_t width, uint32_t *out) {
    if ((size_t)(end - *at) < width) return NULL;
    *out = width == 2 ? load_le16(*at) : load_le32(*at);
    const uint8_t *bytes = *at + width;
    if ((size_t)(end - bytes) < *out) return NULL;
    *at = bytes + *out;
    return bytes;
}

static status_t size_row(const uint8_t *at, const uint8_t *end, headers_sizes_t *sizes) {
    if (at == end) return STATUS_OK;
    if (end - at < 2) return STATUS_CORRUPT;
    const uint16_t n = load_le16(at);
    at += 2;
    for (uint32_t i = 0; i < n; i++) {
        uint32_t name, value;
        if (take(&at, end, 2, &name) == NULL) return STATUS_CORRUPT;
        if (take(&at, end, 4, &value) == NULL) return STATUS_CORRUPT;
        sizes->name_bytes += name;
        sizes->value_bytes += value;
    }
    sizes->count += n;
    return at == end ? STATUS_OK : STATUS_CORRUPT;
}

status_t headers_size(const uint32_t *ends, uint32_t n, const uint8_t *data, size_t len,
                      headers_sizes_t *out) {
    headers_sizes_t sizes = {.count = 0};
    for (uint32_t i = 0; i < n; i++) {
        if (ends[i] > ends[i + 1] || ends[i + 1] > len) return STATUS_INPUT;
        if (ends[i] == ends[i + 1]) continue;
        const status_t status = size_row(data + ends[i], data + ends[i + 1], &sizes);
        if (status != STATUS_OK) return status;
    }
    if (sizes.count >= INT32_MAX || sizes.name_bytes > INT32_MAX) return STATUS_LIMIT;
    if (sizes.value_bytes > INT32_MAX) return STATUS_LIMIT;
    *out = sizes;
    return STATUS_OK;
}

/* Copies a string behind those that are there. */
static void put(const uint8_t **at, const uint8_t *end, size_t width, uint32_t *ends,
                uint8_t *bytes) {
    uint32_t len = 0;
    const uint8_t *from = take(at, end, width, &len);
    copy_bytes(bytes + ends[0], from, len);
    ends[1] = ends[0] + len;
}

void headers_split(const uint32_t *ends, uint32_t n, const uint8_t *data, uint32_t *out_lists,
                   uint32_t *out_name_ends, uint8_t *out_names, uint32_t *out_value_ends,
                   uint8_t *out_values) {
    uint32_t count = 0;
    out_lists[0] = out_name_ends[0] = out_value_ends[0] = 0;
    for (uint32_t i = 0; i < n; i++) {
        if (ends[i] < ends[i + 1]) {
            const uint8_t *at = data + ends[i] + 2, *end = data + ends[i + 1];
            const uint32_t last = count + load_le16(data + ends[i]);
            for (; count < last; count++) {
                put(&at, end, 2, out_name_ends + count, out_names);
                put(&at, end, 4, out_value_ends + count, out_values);
            }
        }
        out_lists[i + 1] = count;
    }
}
