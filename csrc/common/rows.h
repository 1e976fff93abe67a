/* Lists of row numbers. */
#ifndef TXNKV_COMMON_ROWS_H
#define TXNKV_COMMON_ROWS_H

#include <stdbool.h>
#include <stdint.h>

#define ROWS_NULL UINT32_MAX /* in a gather list: no row, give a null */

static inline bool rows_below(const uint32_t *rows, uint32_t m, uint32_t limit) {
    uint32_t over = 0;
    for (uint32_t i = 0; i < m; i++) over |= rows[i] >= limit;
    return over == 0;
}

static inline bool rows_below_or_null(const uint32_t *rows, uint32_t m, uint32_t limit) {
    uint32_t over = 0;
    for (uint32_t i = 0; i < m; i++) over |= (uint32_t)(rows[i] + 1) > limit;
    return over == 0;
}

/* Rows [lo, lo + n) but for some, `gone`, which are strictly ascending and all among them. */
typedef struct {
    const uint32_t *gone;
    uint32_t gone_n;
    uint32_t lo;
    uint32_t n;
} rows_but_t;

static inline bool rows_but_sane(rows_but_t rows, uint32_t limit) {
    if (rows.n > limit || rows.lo > limit - rows.n) return false;
    uint32_t bad = 0;
    for (uint32_t i = 0; i < rows.gone_n; i++) {
        bad |= (uint32_t)(rows.gone[i] - rows.lo >= rows.n);
        bad |= (uint32_t)(i != 0 && rows.gone[i - 1] >= rows.gone[i]);
    }
    return bad == 0;
}

/* Rows between those that are gone: run i of gone_n + 1, which may be empty. */
typedef struct {
    uint32_t lo;
    uint32_t n;
} rows_run_t;

static inline rows_run_t rows_run(rows_but_t rows, uint32_t i) {
    const uint32_t lo = i == 0 ? rows.lo : rows.gone[i - 1] + 1;
    const uint32_t end = i == rows.gone_n ? rows.lo + rows.n : rows.gone[i];
    const rows_run_t run = {lo, end - lo};
    return run;
}

#endif
