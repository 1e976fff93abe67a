/* Texts of JSON, checked as they are stored: RFC 8259, one value a text, nested at most JSON_DEPTH
 * deep. Bytes of 80 and above may stand inside of strings; that they are UTF-8 is Arrow's affair.
 *
 * All functions are pure and safe from any thread. */
#ifndef TXNKV_CODEC_JSON_H
#define TXNKV_CODEC_JSON_H

#include <stddef.h>
#include <stdint.h>

#include "codec/row.h"
#include "common/status.h"

enum { JSON_DEPTH = 512 };

/* Whether some bytes are one JSON text; where not, *out_at is the first byte that cannot stand
 * there, or the length. */
int json_text(const uint8_t *text, size_t len, size_t *out_at);

/* Finds the first text of a column that is no JSON, *out_row, and in it *out_at; nulls are passed
 * over. *out_row is the column's length where all are. INPUT: a buffer is too short, or offsets
 * fall. */
status_t json_column(const row_column_t *texts, uint32_t *out_row, uint64_t *out_at);

/* The names that members may have, one behind the other: i is names[ends[i - 1] .. ends[i]). */
typedef struct {
    const uint8_t *names;
    const uint32_t *ends;
    uint32_t n;
} json_names_t;

/* Member `wanted` of texts that are objects, as it is written there, in two steps: first validity
 * (n + 7) / 8 bytes and offsets [0 .. n] from 0, then that many bytes. Where there is none, or a
 * null, it is null. CORRUPT: text *out_row is no object, or has a name at *out_at that is none of
 * the names, is written with an escape, or is the wanted one for the second time. LIMIT: more than
 * Arrow's i32 offsets can say. INPUT: as json_column. */
status_t json_member_offsets(const row_column_t *texts, const json_names_t *names, uint32_t wanted,
                             uint8_t *out_validity, uint32_t *out_offsets, uint32_t *out_row,
                             uint64_t *out_at);
void json_member_bytes(const row_column_t *texts, const json_names_t *names, uint32_t wanted,
                       const uint32_t *offsets, uint8_t *out, size_t out_len);

#endif
