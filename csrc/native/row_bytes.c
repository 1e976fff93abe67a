#include "native/row_table.h"

#include <string.h>

void row_bytes_init(row_bytes_t *bytes) {
    bytes->data = bytes->first;
    bytes->len = 0;
    bytes->cap = sizeof bytes->first;
}

void row_bytes_free(row_bytes_t *bytes) {
    if (bytes->data != bytes->first) PyMem_Free(bytes->data);
}

static int grow(row_bytes_t *bytes, size_t len) {
    size_t cap = 2 * bytes->cap;
    if (len > PY_SSIZE_T_MAX - bytes->len) goto failed;
    if (cap < bytes->len + len) cap = bytes->len + len;
    uint8_t *data = bytes->data == bytes->first ? NULL : bytes->data;
    uint8_t *more = PyMem_Realloc(data, cap);
    if (more == NULL) goto failed;
    if (data == NULL) memcpy(more, bytes->first, bytes->len);
    bytes->data = more;
    bytes->cap = cap;
    return 0;
failed:
    PyErr_NoMemory();
    return -1;
}

uint8_t *row_bytes_more(row_bytes_t *bytes, size_t len) {
    if (len > bytes->cap - bytes->len && grow(bytes, len) < 0) return NULL;
    uint8_t *at = bytes->data + bytes->len;
    bytes->len += len;
    return at;
}
