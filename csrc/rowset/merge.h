/* Merges of ascending keys. Safe from any thread; merge_kway takes scratch of one entry a
 * source from the allocator. */
#ifndef TXNKV_ROWSET_MERGE_H
#define TXNKV_ROWSET_MERGE_H

#include "codec/keys.h"
#include "common/status.h"

/* Sets bit i for each key i of `a` that is in `b`; both strictly ascending. Writes
 * (a->n + 7) / 8 bytes. */
void merge_common(const keys_t *a, const keys_t *b, uint8_t *out_bits, uint32_t *out_count);

/* Merges ascending sources from their cursors on: output i is key out_index[i] of source
 * out_source[i], equal keys in the order of their sources. Stops when `cap` are out, or as
 * soon as a source that had keys left has none, and more of it may follow, as its byte of `ends`
 * is 0; sources at their end at the call take no part. Cursors are moved on. k is at most 65536. */
status_t merge_kway(const keys_t *sources, uint32_t k, const uint8_t *ends, uint32_t *cursors,
                    uint32_t cap, uint16_t *out_source, uint32_t *out_index, uint32_t *out_n);

#endif
