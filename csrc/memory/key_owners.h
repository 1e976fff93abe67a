/* Keys, by their hashes, and who has them: which of thousands of row sets may have some of a few
 * keys, or a key in common, is one look, not thousands or millions.
 *
 * Owners are numbers from 0 on, of the caller's. Another key of the same 40 bits of hash is taken for
 * the same, so the answer is "maybe" or "no".
 *
 * Threads: one at a time. Memory: nothing is changed by a call that returns NO_MEMORY. */
#ifndef TXNKV_MEMORY_KEY_OWNERS_H
#define TXNKV_MEMORY_KEY_OWNERS_H

#include "codec/keys.h"
#include "common/status.h"

typedef struct key_owners key_owners_t;

/* No keys. NULL: no memory. */
key_owners_t *key_owners_create(void);
void key_owners_destroy(key_owners_t *owners);

/* The keys of all owners together. */
uint32_t key_owners_count(const key_owners_t *owners);

/* One more owner has these keys, of which those are kept whose hashes are in one of so many equal
 * shares. LIMIT: 2^31 keys together, 2^24 owners. */
status_t key_owners_add(key_owners_t *owners, const keys_t *keys, uint32_t owner, uint32_t share,
                        uint32_t shares);

/* Sets the bits of those who may have one of the keys, and of those keys; `out` has a bit for each
 * owner, `out_keys` for each key. 0: most keys have so many owners that to name them all would take
 * longer than to ask some; the bits say nothing then. */
uint32_t key_owners_find(const key_owners_t *owners, const keys_t *keys, uint8_t *out,
                         uint8_t *out_keys);

/* Pairs of owners, the earlier first, that may have a key in common while the later has not seen
 * the earlier; 2 * cap numbers at most, some pairs more than once.
 *
 * seen: for each owner the number below which it has seen all others.
 * writers: for each owner a number; those of the same know of each other. */
status_t key_owners_pairs(key_owners_t *owners, const uint32_t *seen, const uint32_t *writers,
                          uint32_t *out, uint32_t cap, uint32_t *n);

#endif
