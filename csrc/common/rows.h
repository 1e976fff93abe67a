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

#endif
