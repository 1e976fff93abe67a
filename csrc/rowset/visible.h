/* Which rows a snapshot sees. Pure; safe from any thread.
 *
 * A stamp is a commit timestamp, or with its top bit set the id of an undecided transaction.
 * A row is seen when its insert is seen and its delete is not; a stamp is seen when it is at
 * or below the snapshot, or the reader's own. STAMP_NEVER as delete stamp: not deleted. */
#ifndef TXNKV_ROWSET_VISIBLE_H
#define TXNKV_ROWSET_VISIBLE_H

#include <stddef.h>
#include <stdint.h>

/* Writes (n + 7) / 8 bytes of bits, how many are set, and how many rows have a stamp that
 * is undecided and not the reader's: somebody must ask what became of those. Stamps are n
 * little-endian u64 at any alignment; deletes may be NULL (none); own is 0 or has its top
 * bit set; the top bit of `snapshot` is clear. */
void visible_bitmap(const uint8_t *inserts, const uint8_t *deletes, uint32_t n, uint64_t snapshot,
                    uint64_t own, uint8_t *out_bits, uint32_t *out_visible,
                    uint32_t *out_undecided);

/* The same without SIMD: what tests compare with, and the fallback. */
void visible_bitmap_portable(const uint8_t *inserts, const uint8_t *deletes, uint32_t n,
                             uint64_t snapshot, uint64_t own, uint8_t *out_bits,
                             uint32_t *out_visible, uint32_t *out_undecided);

#endif
