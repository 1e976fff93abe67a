#include "rowset/visible.h"

#include "common/bits.h"
#include "common/check.h"

#define UNDECIDED UINT64_C(0x8000000000000000)

/* Masks over up to 64 stamps: which are seen, and which are undecided of another. */
typedef struct {
    uint64_t seen;
    uint64_t foreign;
} masks_t;

/* An undecided stamp is above every snapshot as an unsigned number: one compare does both. */
static inline masks_t masks_portable(const uint8_t *stamps, unsigned n, uint64_t snapshot,
                                     uint64_t own) {
    masks_t masks = {0, 0};
    for (unsigned i = 0; i < n; i++) {
        const uint64_t stamp = load_le64(stamps + 8 * (size_t)i);
        masks.seen |= (uint64_t)(stamp <= snapshot || stamp == own) << i;
        masks.foreign |= (uint64_t)(stamp >= UNDECIDED && stamp != own) << i;
    }
    return masks;
}

#if defined(__x86_64__)

#include <immintrin.h>

/* Four stamps at a time. Top bits make undecided stamps negative: `snapshot` or lower and
 * not negative is seen, negative and not own is foreign. */
__attribute__((target("avx2"))) static inline masks_t masks_avx2(const uint8_t *stamps,
                                                                 uint64_t snapshot,
                                                                 uint64_t own) {
    const __m256i limit = _mm256_set1_epi64x((long long)snapshot);
    const __m256i mine = _mm256_set1_epi64x((long long)own);
    masks_t masks = {0, 0};
    for (unsigned i = 0; i < 64; i += 4) {
        const __m256i stamp = _mm256_loadu_si256((const __m256i *)(const void *)(stamps + 8 * i));
        const __m256i equal = _mm256_cmpeq_epi64(stamp, mine);
        const __m256i late = _mm256_or_si256(_mm256_cmpgt_epi64(stamp, limit), stamp);
        const __m256i unseen = _mm256_andnot_si256(equal, late);
        const __m256i foreign = _mm256_andnot_si256(equal, stamp);
        masks.seen |= (uint64_t)(~_mm256_movemask_pd(_mm256_castsi256_pd(unseen)) & 15) << i;
        masks.foreign |= (uint64_t)_mm256_movemask_pd(_mm256_castsi256_pd(foreign)) << i;
    }
    return masks;
}

#define VISIBLE_TARGET __attribute__((target("avx2,popcnt")))
#define VISIBLE_MASKS(stamps, count, snapshot, own)            \
    ((count) == 64 ? masks_avx2((stamps), (snapshot), (own))   \
                   : masks_portable((stamps), (count), (snapshot), (own)))

#endif

typedef struct {
    uint32_t visible;
    uint32_t undecided;
} counts_t;

#define VISIBLE_LOOP(masks_of)                                                               \
    counts_t counts = {0, 0};                                                                \
    for (uint32_t i = 0; i < n;) {                                                           \
        const unsigned count = n - i < 64 ? n - i : 64;                                      \
        masks_t in = masks_of(inserts + 8 * (size_t)i, count, snapshot, own);                \
        if (deletes != NULL) {                                                               \
            const masks_t out = masks_of(deletes + 8 * (size_t)i, count, snapshot, own);     \
            in.seen &= ~out.seen;                                                            \
            in.foreign |= out.foreign;                                                       \
        }                                                                                    \
        bits_store(bits, i, in.seen, count);                                                 \
        counts.visible += (uint32_t)__builtin_popcountll(in.seen);                           \
        counts.undecided += (uint32_t)__builtin_popcountll(in.foreign);                      \
        i += count;                                                                          \
    }                                                                                        \
    return counts;

static counts_t visible_loop(const uint8_t *inserts, const uint8_t *deletes, uint32_t n,
                             uint64_t snapshot, uint64_t own, uint8_t *bits) {
    VISIBLE_LOOP(masks_portable)
}

static void check_stamps(uint64_t snapshot, uint64_t own) {
    CHECK(snapshot < UNDECIDED);
    CHECK(own == 0 || own >= UNDECIDED);
}

void visible_bitmap_portable(const uint8_t *inserts, const uint8_t *deletes, uint32_t n,
                             uint64_t snapshot, uint64_t own, uint8_t *out_bits,
                             uint32_t *out_visible, uint32_t *out_undecided) {
    check_stamps(snapshot, own);
    const counts_t counts = visible_loop(inserts, deletes, n, snapshot, own, out_bits);
    *out_visible = counts.visible;
    *out_undecided = counts.undecided;
}

#ifdef VISIBLE_TARGET
VISIBLE_TARGET static counts_t visible_loop_simd(const uint8_t *inserts, const uint8_t *deletes,
                                                 uint32_t n, uint64_t snapshot, uint64_t own,
                                                 uint8_t *bits) {
    VISIBLE_LOOP(VISIBLE_MASKS)
}
#endif

void visible_bitmap(const uint8_t *inserts, const uint8_t *deletes, uint32_t n, uint64_t snapshot,
                    uint64_t own, uint8_t *out_bits, uint32_t *out_visible,
                    uint32_t *out_undecided) {
#ifdef VISIBLE_TARGET
    if (__builtin_cpu_supports("avx2")) {
        check_stamps(snapshot, own);
        const counts_t counts = visible_loop_simd(inserts, deletes, n, snapshot, own, out_bits);
        *out_visible = counts.visible;
        *out_undecided = counts.undecided;
        return;
    }
#endif
    visible_bitmap_portable(inserts, deletes, n, snapshot, own, out_bits, out_visible,
                            out_undecided);
}
