/* The last offset of each key of a topic, and which messages that leaves: key compaction.
 *
 * A table of keys, by their bytes: those of messages without a key are none. It belongs to one
 * thread at a time that notes; several may ask meanwhile nobody does. */
#ifndef TXNKV_LOG_LAST_KEYS_H
#define TXNKV_LOG_LAST_KEYS_H

#include "log/messages.h"

typedef struct last_keys last_keys_t;

/* NULL: there is no memory. */
last_keys_t *last_keys_create(void);
void last_keys_destroy(last_keys_t *keys);

/* How many keys there are, and the bytes that they take. */
void last_keys_held(const last_keys_t *keys, uint64_t *out_count, uint64_t *out_bytes);

/* Notes the offset of each message that has a key, in place of one noted before. INPUT: as for
 * messages_plan, nothing was noted; NO_MEMORY: some may be. */
status_t last_keys_note(last_keys_t *keys, const messages_t *messages, const uint64_t *offsets);

/* The last offset of a key; UINT64_MAX: it has none. */
uint64_t last_keys_find(const last_keys_t *keys, const uint8_t *key, size_t len);

/* The messages that stay, ascending, into `out`, of room for all: those without a key, and of
 * the others those that no later offset is noted for; but no tombstone (a key, no value) of a
 * time before `oldest`. INPUT: as for messages_plan. */
status_t last_keys_choose(const last_keys_t *keys, const messages_t *messages,
                          const uint64_t *offsets, int64_t oldest, uint32_t *out,
                          uint32_t *out_n);

#endif
