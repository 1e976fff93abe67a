/* The headers of messages as columns, out of the bytes that stand in a batch for each of them:
 *
 *   u16 n | n x { u16 length | name | u32 length | value }        no bytes: no headers
 *
 * Rows come as an Arrow array of binaries and leave as lists of names and values. Any cut and
 * any flipped bit give CORRUPT or an answer, never a read outside. Safe from any thread. */
#ifndef TXNKV_LOG_HEADERS_H
#define TXNKV_LOG_HEADERS_H

#include <stddef.h>
#include <stdint.h>

#include "common/status.h"

typedef struct {
    uint64_t count;
    uint64_t name_bytes;
    uint64_t value_bytes;
} headers_sizes_t;

/* What the headers of n rows take; row i lies in `data` from ends[i] to ends[i + 1]. CORRUPT:
 * these are no headers; INPUT: the ends fall, or pass `len`; LIMIT: a column passes 2 GiB. */
status_t headers_size(const uint32_t *ends, uint32_t n, const uint8_t *data, size_t len,
                      headers_sizes_t *out);

/* Writes them, after headers_size said OK: n + 1 ends of lists, count + 1 ends of names and of
 * values, and the bytes of both. */
void headers_split(const uint32_t *ends, uint32_t n, const uint8_t *data, uint32_t *out_lists,
                   uint32_t *out_name_ends, uint8_t *out_names, uint32_t *out_value_ends,
                   uint8_t *out_values);

#endif
