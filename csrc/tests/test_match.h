#ifndef TXNKV_TESTS_TEST_MATCH_H
#define TXNKV_TESTS_TEST_MATCH_H

#include "rowset/block.h"

/* A block of these keys matched with themselves and with others, and one of some of them with all. */
void check_match(const keys_t *keys, const block_t *block, const keys_t *any);

#endif
