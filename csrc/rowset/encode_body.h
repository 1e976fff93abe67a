/* The parts of encode.c: values in, the sections of a block out. */
#ifndef TXNKV_ROWSET_ENCODE_BODY_H
#define TXNKV_ROWSET_ENCODE_BODY_H

#include <stdbool.h>

#include "common/bytes.h"
#include "rowset/block.h"

/* The values of a block to be, plain and without gaps. Nulls are filled. */
typedef struct {
    block_kind_t kind;
    uint32_t width;
    uint32_t n;
    uint32_t keys;
    const uint8_t *offsets;
    const uint8_t *data;
} values_t;

/* The sections of a block behind its validity bitmap, as they are written: `cap` is what would
 * not pay any more. */
typedef struct {
    uint8_t *out;
    uint64_t cap;
    uint64_t used;
    block_header_t header;
} body_t;

/* Fills up to a multiple of 8; rooms are multiples of 8 themselves. */
void body_align(body_t *body);

/* Whether so many bytes more still pay. */
bool body_room(const body_t *body, uint64_t len);
bool body_put(body_t *body, const void *bytes, uint64_t len);

/* Each writes a body; false: the values are none of its kind, or it does not pay, and what was
 * written is of no use. */
bool body_packed(const values_t *values, body_t *body);
bool body_decimal(const values_t *values, body_t *body);
bool body_list(const uint32_t *list, uint32_t n, body_t *body);  /* packed numbers alone */
bool body_offsets(const values_t *values, body_t *body); /* packed offsets, from 0, alone */

/* The same with *done for the answer. NO_MEMORY. */
status_t body_runs(const values_t *values, body_t *body, bool *done);
status_t body_dictionary(const values_t *values, body_t *body, bool *done);

#endif
