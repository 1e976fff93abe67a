#include "common/shared.h"

#include "common/check.h"

static uint64_t *word_at(const uint8_t *memory, size_t len, size_t offset) {
    CHECK(len >= 8 && offset <= len - 8);
    const uintptr_t address = (uintptr_t)memory + offset;
    CHECK(address % 8 == 0);
    return (uint64_t *)address;
}

uint64_t shared_load(const uint8_t *memory, size_t len, size_t offset) {
    return __atomic_load_n(word_at(memory, len, offset), __ATOMIC_SEQ_CST);
}

void shared_store(uint8_t *memory, size_t len, size_t offset, uint64_t value) {
    __atomic_store_n(word_at(memory, len, offset), value, __ATOMIC_SEQ_CST);
}

uint64_t shared_add(uint8_t *memory, size_t len, size_t offset, uint64_t delta) {
    return __atomic_fetch_add(word_at(memory, len, offset), delta, __ATOMIC_SEQ_CST);
}

int shared_cas(uint8_t *memory, size_t len, size_t offset, uint64_t expected, uint64_t desired) {
    return __atomic_compare_exchange_n(word_at(memory, len, offset), &expected, desired, 0,
                                       __ATOMIC_SEQ_CST, __ATOMIC_SEQ_CST);
}
