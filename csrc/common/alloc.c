#include "common/alloc.h"

#include <stdint.h>
#include <stdlib.h>

#ifdef TXNKV_TEST
static size_t fail_at;

void alloc_fail_at(size_t n) { fail_at = n; }
#endif

void *alloc_array(size_t count, size_t size) {
#ifdef TXNKV_TEST
    if (fail_at != 0 && --fail_at == 0) return NULL;
#endif
    if (size != 0 && count > SIZE_MAX / size) return NULL;
    const size_t len = count * size;
    return malloc(len == 0 ? 1 : len);
}

void alloc_free(void *memory) { free(memory); }
