#define _DEFAULT_SOURCE
#include "common/pages.h"

#include <sys/mman.h>
#include <unistd.h>

void pages_release(const uint8_t *memory, size_t len)
{
    const uintptr_t page = (uintptr_t)sysconf(_SC_PAGESIZE);
    const uintptr_t begin = ((uintptr_t)memory + page - 1) & ~(page - 1);
    const uintptr_t end = ((uintptr_t)memory + len) & ~(page - 1);
    if (begin < end) {
        /* A refusal costs memory, nothing else. */
        (void)madvise((void *)begin, end - begin, MADV_DONTNEED);
    }
}
