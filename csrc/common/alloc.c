#if defined(__linux__) && !defined(_DEFAULT_SOURCE)
#define _DEFAULT_SOURCE /* madvise */
#endif

#include "common/alloc.h"

#include <stdint.h>
#include <stdlib.h>

#if defined(__linux__)
#include <sys/mman.h>
#endif

#ifdef TXNKV_TEST
static size_t fail_at;

void alloc_fail_at(size_t n) { fail_at = n; }
#endif

#define HUGE_PAGE ((size_t)2 << 20)

/* Scratch for a large sort is new memory: in pages of 4 KiB, faulting it in costs as much
 * as the sort itself. Where huge pages are not to be had, this is plain memory. */
static void *alloc_huge(size_t len) {
    if (len > SIZE_MAX - HUGE_PAGE) return NULL;
    void *memory = aligned_alloc(HUGE_PAGE, (len + HUGE_PAGE - 1) / HUGE_PAGE * HUGE_PAGE);
#if defined(__linux__) && defined(MADV_HUGEPAGE)
    if (memory != NULL) (void)madvise(memory, len, MADV_HUGEPAGE);
#endif
    return memory;
}

void *alloc_array(size_t count, size_t size) {
#ifdef TXNKV_TEST
    if (fail_at != 0 && --fail_at == 0) return NULL;
#endif
    if (size != 0 && count > SIZE_MAX / size) return NULL;
    const size_t len = count * size;
    if (len >= 4 * HUGE_PAGE) return alloc_huge(len);
    return malloc(len == 0 ? 1 : len);
}

void alloc_free(void *memory) { free(memory); }
