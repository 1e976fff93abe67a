/* What a call into the core came to. */
#ifndef TXNKV_COMMON_STATUS_H
#define TXNKV_COMMON_STATUS_H

typedef enum {
    STATUS_OK = 0,
    STATUS_CORRUPT = 1,   /* bytes from disk make no sense; nothing usable was written */
    STATUS_NO_MEMORY = 2, /* the allocator said no; nothing was changed */
    STATUS_LIMIT = 3,     /* the result would pass a limit of the format (4 GiB of data) */
    STATUS_RANGE = 4,     /* a row number of the caller is outside of its array */
    STATUS_INPUT = 5      /* an Arrow array of the caller is not what its length says */
} status_t;

#endif
