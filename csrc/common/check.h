/* CHECK: a mistake of the caller ends the program in every build, before memory is harmed.
 * Bytes from disk are never checked with it: they get a status. */
#ifndef TXNKV_COMMON_CHECK_H
#define TXNKV_COMMON_CHECK_H

#include <stdio.h>
#include <stdlib.h>

#define CHECK(condition)                                                                    \
    do {                                                                                    \
        if (!(condition)) {                                                                 \
            fprintf(stderr, "%s:%d: check failed: %s\n", __FILE__, __LINE__, #condition);   \
            abort();                                                                        \
        }                                                                                   \
    } while (0)

#endif
