/* Memory of a mapped file that was read and is not needed again soon. */
#ifndef TXNKV_COMMON_PAGES_H
#define TXNKV_COMMON_PAGES_H

#include <stddef.h>
#include <stdint.h>

/* Gives the whole pages inside [memory, memory + len) out of this process's resident memory.
 * Only for a read-only mapping of a file: the bytes stay in the page cache, and are mapped again
 * when they are read. Of any other memory the content would be lost. Any thread; others may be
 * reading the same pages. */
void pages_release(const uint8_t *memory, size_t len);

#endif
