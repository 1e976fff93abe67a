/* 64-bit atomics in memory that processes share, as a mapped file. All are sequentially
 * consistent and safe from any thread and process; `offset` is in bytes, a multiple of 8,
 * and `memory` is 8-byte aligned. */
#ifndef TXNKV_COMMON_SHARED_H
#define TXNKV_COMMON_SHARED_H

#include <stddef.h>
#include <stdint.h>

uint64_t shared_load(const uint8_t *memory, size_t len, size_t offset);
void shared_store(uint8_t *memory, size_t len, size_t offset, uint64_t value);
/* Adds modulo 2^64; returns the value before. */
uint64_t shared_add(uint8_t *memory, size_t len, size_t offset, uint64_t delta);
/* 1 when the value was `expected` and is `desired` now, else 0 and nothing changed. */
int shared_cas(uint8_t *memory, size_t len, size_t offset, uint64_t expected, uint64_t desired);

#endif
