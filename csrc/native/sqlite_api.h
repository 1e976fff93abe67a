/* The functions of SQLite that are called from here: those of the library that apsw has inside, so
 * that its connections can be used.
 *
 * SQLite gives an extension a struct of pointers to functions. It only grows at its end, so that a
 * pointer's place in it (sqlite3ext.h) is part of SQLite's binary interface for good. */
#ifndef TXNKV_NATIVE_SQLITE_API_H
#define TXNKV_NATIVE_SQLITE_API_H

#include <stdint.h>

typedef struct sqlite3 sqlite3;
typedef struct sqlite3_stmt sqlite3_stmt;

enum { SQLITE_OK = 0, SQLITE_BUSY = 5, SQLITE_NOMEM = 7, SQLITE_ROW = 100, SQLITE_DONE = 101 };

typedef void (*sqlite_function_t)(void);

/* A struct sqlite3_api_routines. */
typedef struct {
    const sqlite_function_t *routines;
} sqlite_api_t;

enum {
    ROUTINE_BIND_BLOB = 2,
    ROUTINE_BIND_INT64 = 5,
    ROUTINE_BUSY_TIMEOUT = 14,
    ROUTINE_FINALIZE = 57,
    ROUTINE_RESET = 77,
    ROUTINE_STEP = 94,
    ROUTINE_PREPARE_V2 = 116,
    ROUTINE_WAL_HOOK = 175,
};

static inline int sqlite_bind_int64(sqlite_api_t api, sqlite3_stmt *stmt, int at, int64_t value) {
    return ((int (*)(sqlite3_stmt *, int, long long))api.routines[ROUTINE_BIND_INT64])(stmt, at,
                                                                                       value);
}

/* The bytes stay where they are until the statement is bound anew. */
static inline int sqlite_bind_blob(sqlite_api_t api, sqlite3_stmt *stmt, int at, const void *data,
                                   int len) {
    typedef int bind_t(sqlite3_stmt *, int, const void *, int, void (*)(void *));
    return ((bind_t *)api.routines[ROUTINE_BIND_BLOB])(stmt, at, data, len, NULL);
}

static inline int sqlite_busy_timeout(sqlite_api_t api, sqlite3 *db, int millis) {
    return ((int (*)(sqlite3 *, int))api.routines[ROUTINE_BUSY_TIMEOUT])(db, millis);
}

static inline int sqlite_finalize(sqlite_api_t api, sqlite3_stmt *stmt) {
    return ((int (*)(sqlite3_stmt *))api.routines[ROUTINE_FINALIZE])(stmt);
}

static inline int sqlite_prepare(sqlite_api_t api, sqlite3 *db, const char *sql, int len,
                                 sqlite3_stmt **out) {
    typedef int prepare_t(sqlite3 *, const char *, int, sqlite3_stmt **, const char **);
    return ((prepare_t *)api.routines[ROUTINE_PREPARE_V2])(db, sql, len, out, NULL);
}

static inline int sqlite_reset(sqlite_api_t api, sqlite3_stmt *stmt) {
    return ((int (*)(sqlite3_stmt *))api.routines[ROUTINE_RESET])(stmt);
}

static inline int sqlite_step(sqlite_api_t api, sqlite3_stmt *stmt) {
    return ((int (*)(sqlite3_stmt *))api.routines[ROUTINE_STEP])(stmt);
}

typedef int sqlite_wal_hook_t(void *given, sqlite3 *db, const char *name, int pages);

static inline void sqlite_wal_hook(sqlite_api_t api, sqlite3 *db, sqlite_wal_hook_t *hook,
                                   void *given) {
    typedef void *set_t(sqlite3 *, sqlite_wal_hook_t *, void *);
    ((set_t *)api.routines[ROUTINE_WAL_HOOK])(db, hook, given);
}

#endif
