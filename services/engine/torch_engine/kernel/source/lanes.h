/* Sixteen float32 lanes, computed side by side: AVX-512, AVX2 or plain C.
 *
 * A lane never meets its neighbours, and each operation rounds once, as IEEE 754 says. So a program made of them gives the same
 * bits on each of the three; a machine without a fused multiply-add rounds twice there, and says so (HR_FUSED 0).
 */
#ifndef HR_LANES_H
#define HR_LANES_H

#include <math.h>
#include <stdint.h>
#include <string.h>

#define LANES 16

/* How weights and KV are stored. */
enum hr_dtype { HR_F16 = 0, HR_BF16 = 1, HR_F32 = 2 };

static inline int size_of(int dtype) { return dtype == HR_F32 ? 4 : 2; }

#if defined(__AVX512F__)
#include <immintrin.h>
#define HR_ISA "avx512"
#define HR_FUSED 1
#define HR_TRANSPOSE 1
#define TILE_ROWS 12 /* 2 x 12 sums, 2 weights: 26 of 32 registers */

typedef __m512 lanes;

static inline lanes lanes_zero(void) { return _mm512_setzero_ps(); }
static inline lanes lanes_all(float value) { return _mm512_set1_ps(value); }
static inline lanes lanes_load(const float *from) { return _mm512_loadu_ps(from); }
static inline void lanes_store(float *to, lanes value) { _mm512_storeu_ps(to, value); }
static inline lanes lanes_fma(lanes a, lanes b, lanes sum) { return _mm512_fmadd_ps(a, b, sum); }
static inline lanes lanes_f16(const uint16_t *from) { return _mm512_cvtph_ps(_mm256_loadu_si256((const __m256i *)from)); }
static inline lanes lanes_bf16(const uint16_t *from) {
    __m512i wide = _mm512_cvtepu16_epi32(_mm256_loadu_si256((const __m256i *)from));
    return _mm512_castsi512_ps(_mm512_slli_epi32(wide, 16));
}

#elif defined(__AVX2__) && defined(__FMA__) && defined(__F16C__)
#include <immintrin.h>
#define HR_ISA "avx2"
#define HR_FUSED 1
#define HR_TRANSPOSE 1
#define TILE_ROWS 6 /* 2 x 6 half sums, 2 half weights, 1 input: 15 of 16 registers */

typedef struct { __m256 low, high; } lanes;

static inline lanes lanes_zero(void) { return (lanes){_mm256_setzero_ps(), _mm256_setzero_ps()}; }
static inline lanes lanes_all(float value) { return (lanes){_mm256_set1_ps(value), _mm256_set1_ps(value)}; }
static inline lanes lanes_load(const float *from) { return (lanes){_mm256_loadu_ps(from), _mm256_loadu_ps(from + 8)}; }
static inline void lanes_store(float *to, lanes value) {
    _mm256_storeu_ps(to, value.low);
    _mm256_storeu_ps(to + 8, value.high);
}
static inline lanes lanes_fma(lanes a, lanes b, lanes sum) {
    return (lanes){_mm256_fmadd_ps(a.low, b.low, sum.low), _mm256_fmadd_ps(a.high, b.high, sum.high)};
}
static inline lanes lanes_f16(const uint16_t *from) {
    return (lanes){_mm256_cvtph_ps(_mm_loadu_si128((const __m128i *)from)),
                   _mm256_cvtph_ps(_mm_loadu_si128((const __m128i *)(from + 8)))};
}
static inline __m256 bf16_half(const uint16_t *from) {
    __m256i wide = _mm256_cvtepu16_epi32(_mm_loadu_si128((const __m128i *)from));
    return _mm256_castsi256_ps(_mm256_slli_epi32(wide, 16));
}
static inline lanes lanes_bf16(const uint16_t *from) { return (lanes){bf16_half(from), bf16_half(from + 8)}; }

#else
#define HR_ISA "plain"
#define HR_TRANSPOSE 0
#define TILE_ROWS 4
#if defined(FP_FAST_FMAF)
#define HR_FUSED 1
#else
#define HR_FUSED 0
#endif

typedef struct { float at[LANES]; } lanes;

static inline lanes lanes_all(float value) {
    lanes all;
    for (int i = 0; i < LANES; i++) all.at[i] = value;
    return all;
}
static inline lanes lanes_zero(void) { return lanes_all(0.0f); }
static inline lanes lanes_load(const float *from) {
    lanes loaded;
    memcpy(loaded.at, from, sizeof loaded.at);
    return loaded;
}
static inline void lanes_store(float *to, lanes value) { memcpy(to, value.at, sizeof value.at); }
static inline lanes lanes_fma(lanes a, lanes b, lanes sum) {
    for (int i = 0; i < LANES; i++) sum.at[i] = HR_FUSED ? fmaf(a.at[i], b.at[i], sum.at[i]) : a.at[i] * b.at[i] + sum.at[i];
    return sum;
}
static inline float half_of(const uint16_t *from) {
    _Float16 value;
    memcpy(&value, from, sizeof value);
    return (float)value;
}
static inline float bfloat_of(const uint16_t *from) {
    uint32_t bits = (uint32_t)*from << 16;
    float value;
    memcpy(&value, &bits, sizeof value);
    return value;
}
static inline lanes lanes_f16(const uint16_t *from) {
    lanes loaded;
    for (int i = 0; i < LANES; i++) loaded.at[i] = half_of(from + i);
    return loaded;
}
static inline lanes lanes_bf16(const uint16_t *from) {
    lanes loaded;
    for (int i = 0; i < LANES; i++) loaded.at[i] = bfloat_of(from + i);
    return loaded;
}
#endif

/* One stored number. `from` may lie at any address: a safetensors file promises no alignment. */
static inline float number_at(const void *from, int dtype) {
    if (dtype == HR_F16) {
        _Float16 value;
        memcpy(&value, from, sizeof value);
        return (float)value;
    }
    uint32_t bits = 0;
    if (dtype == HR_BF16)
        memcpy((char *)&bits, from, 2), bits <<= 16;
    else
        memcpy(&bits, from, 4);
    float value;
    memcpy(&value, &bits, sizeof value);
    return value;
}

/* float32 → float16, rounded to nearest even; what is too large becomes the largest, so that 0 x value stays 0. */
static inline uint16_t to_half(float value) {
    value = value > 65504.0f ? 65504.0f : value < -65504.0f ? -65504.0f : value;
    _Float16 half = (_Float16)value;
    uint16_t bits;
    memcpy(&bits, &half, sizeof bits);
    return bits;
}

#endif
