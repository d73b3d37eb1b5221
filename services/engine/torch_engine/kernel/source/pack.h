/* Weights as a checkpoint stores them, one output after the other, → strips with one k after the other.
 *
 * Packing moves numbers and changes none. It is done for each product anew, so that all processes of a machine share one copy of
 * the weights, the file's own pages. It costs no time: weights packed beforehand came from memory no faster (measured on Zen 5,
 * one thread, 112 MB of weights: 1 row 26 GB/s packing, 22-27 packed; 8 rows 18.6 and 17.5; 32 rows 6.5 and 5.9).
 */
#ifndef HR_PACK_H
#define HR_PACK_H

#include "product.h"

#define PACK_DEPTH 512 /* k of one strip at a time: 32 KiB of packed weights, which stay in a near cache */
#define PACK_STEP 8    /* k of one transposition */
#define PACKING_ROWS (TILE_ROWS >= 12 ? 8 : 2) /* rows whose sums fit beside a transposition */

/* 16 rows of one matrix and 16 of the same or another one, `step` bytes from row to row; `then_left`, `then_right`: where what is
 * wanted next begins, 16 rows each that lie one behind the other. */
typedef struct {
    const char *left, *right, *then_left, *then_right;
    int64_t step;
} weight_rows;

static inline weight_rows skip(weight_rows rows, int64_t bytes) {
    const int64_t all = bytes * LANES;
    return (weight_rows){rows.left + bytes, rows.right + bytes, rows.then_left + all, rows.then_right + all, rows.step};
}

#if HR_TRANSPOSE

#if defined(__AVX512BW__)
typedef __m512i shuffled;
#define INTERLEAVE(half, bits, a, b) _mm512_unpack##half##_epi##bits(a, b)
#else
typedef __m256i shuffled;
#define INTERLEAVE(half, bits, a, b) _mm256_unpack##half##_epi##bits(a, b)
#endif

/* 8 x 8 numbers of 16 bits in each 128-bit lane, transposed in place: single numbers, then pairs, then fours change places. */
static inline __attribute__((always_inline)) void transpose_lanes(shuffled *v) {
    shuffled pair[8], four[8];
    for (int i = 0; i < 4; i++) {
        pair[i] = INTERLEAVE(lo, 16, v[2 * i], v[2 * i + 1]);
        pair[i + 4] = INTERLEAVE(hi, 16, v[2 * i], v[2 * i + 1]);
    }
    for (int i = 0; i < 4; i++) {
        four[2 * i] = INTERLEAVE(lo, 32, pair[2 * i], pair[2 * i + 1]);
        four[2 * i + 1] = INTERLEAVE(hi, 32, pair[2 * i], pair[2 * i + 1]);
    }
    for (int i = 0; i < 4; i++) {
        const shuffled top = four[i + i / 2 * 2], bottom = four[i + i / 2 * 2 + 2];
        v[2 * i] = INTERLEAVE(lo, 64, top, bottom);
        v[2 * i + 1] = INTERLEAVE(hi, 64, top, bottom);
    }
}

static inline __m128i eight(const char *from) { return _mm_loadu_si128((const __m128i *)from); }

/* 8 numbers of each of 32 rows, from byte `at` of each, → to[8][32]: `fetch` four rows into each of v[0..7], then `transpose`.
 * Who fetches the next ones between the sums of the present ones waits for no load (some 10 % of a step at 1 to 8 rows);
 * where registers are too few for that, `transpose` reads for itself. */
#if defined(__AVX512BW__)
typedef __m512i fetched;

static inline __attribute__((always_inline)) void fetch(weight_rows rows, int64_t at, int i, fetched *v) {
    const char *left = rows.left + at + i * rows.step, *right = rows.right + at + i * rows.step;
    v[i] = _mm512_castsi128_si512(eight(left));
    v[i] = _mm512_mask_broadcast_i32x4(v[i], 0x00f0, eight(left + 8 * rows.step));
    v[i] = _mm512_mask_broadcast_i32x4(v[i], 0x0f00, eight(right));
    v[i] = _mm512_mask_broadcast_i32x4(v[i], 0xf000, eight(right + 8 * rows.step));
}

static inline __attribute__((always_inline)) void transpose(weight_rows rows, int64_t at, fetched *v, uint16_t *to) {
    (void)rows, (void)at;
    transpose_lanes(v);
    for (int i = 0; i < 8; i++) _mm512_storeu_si512(to + i * STRIP, v[i]);
}
#else
typedef char fetched;

static inline void fetch(weight_rows rows, int64_t at, int i, fetched *v) { (void)rows, (void)at, (void)i, (void)v; }

static inline void transpose_half(const char *from, int64_t step, uint16_t *to) {
    __m256i v[8];
    for (int i = 0; i < 8; i++)
        v[i] = _mm256_inserti128_si256(_mm256_castsi128_si256(eight(from + i * step)), eight(from + (i + 8) * step), 1);
    transpose_lanes(v);
    for (int i = 0; i < 8; i++) _mm256_storeu_si256((__m256i *)(to + i * STRIP), v[i]);
}

static inline __attribute__((always_inline)) void transpose(weight_rows rows, int64_t at, fetched *v, uint16_t *to) {
    (void)v;
    transpose_half(rows.left + at, rows.step, to);
    transpose_half(rows.right + at, rows.step, to + LANES);
}
#endif

/* Asks for as much of what is wanted next as one transposition uses up, in the order in which it lies in memory. */
static inline void look_ahead(weight_rows rows, int64_t at) {
    for (int64_t line = at * LANES; line < (at + 2 * PACK_STEP) * LANES; line += 64) {
        __builtin_prefetch(rows.then_left + line, 0, 2);
        __builtin_prefetch(rows.then_right + line, 0, 2);
    }
}
#endif

/* The first `count` numbers of each row → to[count][32], of any size, one by one. */
static void pack_plainly(weight_rows rows, int count, int size, char *to) {
    for (int i = 0; i < count; i++)
        for (int r = 0; r < LANES; r++) {
            const int64_t at = r * rows.step + i * size;
            memcpy(to + (i * STRIP + r) * size, rows.left + at, size);
            memcpy(to + (i * STRIP + r + LANES) * size, rows.right + at, size);
        }
}

#if HR_TRANSPOSE
/* What `tile` does, packing as it goes: the loads and shuffles of one hide behind the sums of the other. `depth` is a multiple of
 * PACK_STEP; packed weights go to to[depth][32], or all to the same place when nobody needs them again. */
static inline __attribute__((always_inline)) void packing_tile(const int rows, const int dtype, const float *x, int64_t x_step,
                                                               weight_rows from, int depth, float *c, int add, uint16_t *to,
                                                               int keep) {
    lanes sum[PACKING_ROWS][2];
#pragma GCC unroll 8
    for (int r = 0; r < rows; r++) {
        sum[r][0] = add ? lanes_load(c + r * STRIP) : lanes_zero();
        sum[r][1] = add ? lanes_load(c + r * STRIP + LANES) : lanes_zero();
    }
    fetched v[PACK_STEP];
    for (int j = 0; j < PACK_STEP; j++) fetch(from, 0, j, v);
    for (int i = 0; i < depth; i += PACK_STEP) {
        const int next = i + PACK_STEP < depth ? i + PACK_STEP : i;
        look_ahead(from, i * 2);
        transpose(from, i * 2, v, to);
#pragma GCC unroll 8
        for (int j = 0; j < PACK_STEP; j++) {
            fetch(from, next * 2, j, v);
            lanes left = load_weights(to, j * STRIP, dtype), right = load_weights(to, j * STRIP + LANES, dtype);
#pragma GCC unroll 8
            for (int r = 0; r < rows; r++) {
                lanes value = lanes_all(x[r * x_step + i + j]);
                sum[r][0] = lanes_fma(value, left, sum[r][0]);
                sum[r][1] = lanes_fma(value, right, sum[r][1]);
            }
        }
        if (keep) to += PACK_STEP * STRIP;
    }
#pragma GCC unroll 8
    for (int r = 0; r < rows; r++) {
        lanes_store(c + r * STRIP, sum[r][0]);
        lanes_store(c + r * STRIP + LANES, sum[r][1]);
    }
}

/* How many of `rows` rows packing_multiply takes: up to 4, or 8. Each number is code of its own. */
static inline int rows_to_pack(int rows) { return rows >= PACKING_ROWS ? PACKING_ROWS : rows < 4 ? rows : 4; }

/* `rows` as rows_to_pack says. */
static void packing_multiply(int rows, int dtype, const float *x, int64_t x_step, weight_rows from, int depth, float *c, int add,
                             uint16_t *to, int keep) {
#define TILE(n, dtype) packing_tile(n <= PACKING_ROWS ? n : PACKING_ROWS, dtype, x, x_step, from, depth, c, add, to, keep)
#define CASE(n) \
    case n: \
        if (dtype == HR_F16) \
            TILE(n, HR_F16); \
        else \
            TILE(n, HR_BF16); \
        break;
    switch (rows) { CASE(1) CASE(2) CASE(3) CASE(4) CASE(8) }
#undef CASE
#undef TILE
}
#endif

#endif
