/* Weights as a checkpoint stores them, one output after the other, → strips with one k after the other.
 *
 * Packing moves numbers and changes none. It is done for each product anew: the transposition costs less than the memory that the
 * weights come from, and so all processes of a machine share one copy of them, the file's own pages.
 */
#ifndef HR_PACK_H
#define HR_PACK_H

#include "product.h"

#define PACK_DEPTH 512 /* k of one strip: 32 KiB, which stay in the first or second cache */

#if HR_TRANSPOSE
static inline __m256i two_rows(const char *low, const char *high) {
    __m128i first = _mm_loadu_si128((const __m128i *)low);
    return _mm256_inserti128_si256(_mm256_castsi128_si256(first), _mm_loadu_si128((const __m128i *)high), 1);
}

/* 16 rows x 8 numbers of 16 bits → 8 x 16, `to` advancing by one strip: two 8 x 8 transpositions side by side. */
static inline void transpose(const char *const *row, int64_t at, uint16_t *to) {
    __m256i in[8], pair[8], quad[8];
    for (int i = 0; i < 8; i++) in[i] = two_rows(row[i] + at, row[i + 8] + at);
    for (int i = 0; i < 4; i++) {
        pair[i] = _mm256_unpacklo_epi16(in[2 * i], in[2 * i + 1]);
        pair[i + 4] = _mm256_unpackhi_epi16(in[2 * i], in[2 * i + 1]);
    }
    for (int i = 0; i < 4; i++) {
        quad[2 * i] = _mm256_unpacklo_epi32(pair[2 * i], pair[2 * i + 1]);
        quad[2 * i + 1] = _mm256_unpackhi_epi32(pair[2 * i], pair[2 * i + 1]);
    }
    for (int half = 0; half < 2; half++)
        for (int i = 0; i < 2; i++) {
            __m256i top = quad[4 * half + i], bottom = quad[4 * half + i + 2];
            uint16_t *here = to + (4 * half + 2 * i) * STRIP;
            _mm256_storeu_si256((__m256i *)here, _mm256_unpacklo_epi64(top, bottom));
            _mm256_storeu_si256((__m256i *)(here + STRIP), _mm256_unpackhi_epi64(top, bottom));
        }
}
#endif

/* `count` numbers of each of 16 rows, from byte `at`, → to[count][32] (its first or second half). */
static void pack_half(const char *const *row, int64_t at, int count, int dtype, char *to) {
    const int size = size_of(dtype);
    int k = 0;
#if HR_TRANSPOSE
    if (size == 2)
        for (; k + 8 <= count; k += 8) transpose(row, at + k * size, (uint16_t *)to + k * STRIP);
#endif
    for (; k < count; k++)
        for (int i = 0; i < LANES; i++) memcpy(to + ((int64_t)k * STRIP + i) * size, row[i] + at + (int64_t)k * size, size);
}

#endif
