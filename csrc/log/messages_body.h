/* Where the parts of a body stand. */
#ifndef TXNKV_LOG_MESSAGES_BODY_H
#define TXNKV_LOG_MESSAGES_BODY_H

#include "common/bits.h"
#include "log/messages.h"

/* Places of the parts from the start of the body; of one that is absent, where it would be. */
typedef struct {
    uint64_t value_ends;
    uint64_t value_bits;
    uint64_t key_bits;
    uint64_t key_ends;
    uint64_t header_ends;
    uint64_t times;
    uint64_t places;
    uint64_t values; /* the arrays of numbers end here */
} messages_places_t;

static inline messages_places_t messages_places(uint32_t attributes, uint32_t rows) {
    const uint64_t ends = round_up_8(4 * ((uint64_t)rows + 1)), bits = round_up_8(bits_bytes(rows));
    messages_places_t places = {.value_ends = 0, .value_bits = ends};
    places.key_bits = places.value_bits + ((attributes & BATCH_NULL_VALUES) != 0 ? bits : 0);
    places.key_ends = places.key_bits + ((attributes & BATCH_KEYS) != 0 ? bits : 0);
    places.header_ends = places.key_ends + ((attributes & BATCH_KEYS) != 0 ? ends : 0);
    places.times = places.header_ends + ((attributes & BATCH_HEADERS) != 0 ? ends : 0);
    places.places = places.times + ((attributes & BATCH_TIMES) != 0 ? 8 * (uint64_t)rows : 0);
    places.values = places.places;
    if ((attributes & BATCH_PLACES) != 0) places.values += round_up_8(4 * (uint64_t)rows);
    return places;
}

#endif
