/* Rows of Arrow columns as text: each row its values, with fixed texts before, between and behind
 * them; for lines of JSON these are names and braces:
 *
 *   before[0] value[0] before[1] value[1] ... behind          {"id": 7, "name": "x"}\n
 *
 * What is null is `null`, and so are NaN and infinities, which JSON has not. All functions are
 * pure and safe from any thread. */
#ifndef TXNKV_CODEC_JSON_LINES_H
#define TXNKV_CODEC_JSON_LINES_H

#include <stddef.h>
#include <stdint.h>

#include "codec/row.h"
#include "common/status.h"

typedef enum {
    JSON_LINE_BOOL = 1,     /* a bitmap */
    JSON_LINE_SIGNED = 2,   /* width bytes: 1, 2, 4 or 8 */
    JSON_LINE_UNSIGNED = 3, /* the same */
    JSON_LINE_FLOAT = 4,    /* width bytes: 4 or 8; as decimal_double writes them */
    JSON_LINE_DATE = 5,     /* i32 days since 1970: "2026-01-31" */
    JSON_LINE_TIME = 6,     /* i64 microseconds: "2026-01-31T12:00:00", .000001 where they are */
    JSON_LINE_INSTANT = 7,  /* the same, of UTC: "2026-01-31T12:00:00+00:00" */
    JSON_LINE_STRING = 8,   /* UTF-8, in quotes, escaped */
    JSON_LINE_BYTES = 9,    /* "base64" */
    JSON_LINE_EITHER = 10,  /* a string where it is UTF-8, else {"base64": "..."} */
    JSON_LINE_RAW = 11      /* text as it is; the ends of lines in it become a space */
} json_line_kind_t;

typedef struct {
    row_column_t values;
    const uint8_t *before;
    uint32_t before_len;
    json_line_kind_t kind;
    uint32_t width; /* of what lies in `values`, where more than one may */
} json_field_t;

/* In two steps: first how many bytes n rows take at most, which the second wants to have; it
 * returns how many it wrote, and where out_ends is not NULL, where each row begins, [0 .. n].
 * INPUT: a buffer is too short, or offsets fall; each column has n rows. LIMIT: more than Arrow's
 * i32 offsets can say, where `ends` are wanted. */
status_t json_lines_bound(const json_field_t *fields, uint32_t n_fields, uint64_t n,
                          size_t behind_len, int ends, uint64_t *out);
uint64_t json_lines_write(const json_field_t *fields, uint32_t n_fields, uint64_t n,
                          const uint8_t *behind, size_t behind_len, uint32_t *out_ends,
                          uint8_t *out, uint64_t out_len);

#endif
