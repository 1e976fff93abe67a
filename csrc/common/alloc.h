/* The one allocator of the core. Only scratch space comes from it: results are written to
 * buffers of the caller. Safe from any thread. */
#ifndef TXNKV_COMMON_ALLOC_H
#define TXNKV_COMMON_ALLOC_H

#include <stddef.h>

/* Room for `count` items of `size` bytes, not cleared; NULL when there is none. */
void *alloc_array(size_t count, size_t size);
void alloc_free(void *memory);

#ifdef TXNKV_TEST
/* Makes the n-th call from now on fail, once; 0 makes none fail. Tests are one thread. */
void alloc_fail_at(size_t n);
#endif

#endif
