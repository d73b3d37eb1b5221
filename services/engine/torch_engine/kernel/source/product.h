/* Matrix products: many rows x times two columns of sixteen weights.
 *
 * The contract of the whole kernel: each output is ONE chain of fused multiply-adds in the order of k, beginning at +0,
 *     sum = fma(x[0], w[0], 0);  sum = fma(x[1], w[1], sum);  ...
 * Outputs lie in lanes, so no sum is ever split and put together again. How many rows are computed at once, how k is cut into
 * pieces (a sum that is stored and loaded again is the same sum), which thread does it: none of it can change a bit.
 */
#ifndef HR_PRODUCT_H
#define HR_PRODUCT_H

#include "lanes.h"

#define STRIP (2 * LANES) /* outputs computed at once */

/* Weights w[k][0..15] at left + k * step and right + k * step, both stored as `dtype`. */
typedef struct {
    const void *left, *right;
    int64_t step;
} strip;

static inline __attribute__((always_inline)) lanes load_weights(const void *from, int64_t at, const int dtype) {
    if (dtype == HR_F16) return lanes_f16((const uint16_t *)from + at);
    if (dtype == HR_BF16) return lanes_bf16((const uint16_t *)from + at);
    return lanes_load((const float *)from + at);
}

/* c[rows][columns * 16] (+)= x[rows][depth] w[depth][columns * 16]; rows, columns and dtype are constants where it is inlined. */
static inline __attribute__((always_inline)) void tile(const int rows, const int columns, const int dtype, const float *x,
                                                       int64_t x_step, strip w, int depth, float *c, int64_t c_step, int add) {
    lanes sum[TILE_ROWS][2];
#pragma GCC unroll 16
    for (int r = 0; r < rows; r++) {
        sum[r][0] = add ? lanes_load(c + r * c_step) : lanes_zero();
        if (columns == 2) sum[r][1] = add ? lanes_load(c + r * c_step + LANES) : lanes_zero();
    }
    for (int k = 0; k < depth; k++) {
        lanes left = load_weights(w.left, k * w.step, dtype), right = left;
        if (columns == 2) right = load_weights(w.right, k * w.step, dtype);
#pragma GCC unroll 16
        for (int r = 0; r < rows; r++) {
            lanes value = lanes_all(x[r * x_step + k]);
            sum[r][0] = lanes_fma(value, left, sum[r][0]);
            if (columns == 2) sum[r][1] = lanes_fma(value, right, sum[r][1]);
        }
    }
#pragma GCC unroll 16
    for (int r = 0; r < rows; r++) {
        lanes_store(c + r * c_step, sum[r][0]);
        if (columns == 2) lanes_store(c + r * c_step + LANES, sum[r][1]);
    }
}

/* At most TILE_ROWS rows. */
static inline __attribute__((always_inline)) void few_rows(int rows, const int columns, const int dtype, const float *x,
                                                           int64_t x_step, strip w, int depth, float *c, int64_t c_step,
                                                           int add) {
#define CASE(n) \
    case n: tile(n <= TILE_ROWS ? n : TILE_ROWS, columns, dtype, x, x_step, w, depth, c, c_step, add); break;
    switch (rows) { CASE(1) CASE(2) CASE(3) CASE(4) CASE(5) CASE(6) CASE(7) CASE(8) CASE(9) CASE(10) CASE(11) CASE(12) }
#undef CASE
}

static inline __attribute__((always_inline)) void all_rows(int rows, const int dtype, const float *x, int64_t x_step, strip w,
                                                           int depth, float *c, int64_t c_step, int add) {
    for (int done = 0; done < rows; done += TILE_ROWS, x += TILE_ROWS * x_step, c += TILE_ROWS * c_step) {
        int count = rows - done < TILE_ROWS ? rows - done : TILE_ROWS;
#if TILE_ROWS >= 12
        few_rows(count, 2, dtype, x, x_step, w, depth, c, c_step, add);
#else /* registers for both columns of two rows, or for one column of more */
        if (count <= 2) {
            few_rows(count, 2, dtype, x, x_step, w, depth, c, c_step, add);
        } else {
            few_rows(count, 1, dtype, x, x_step, w, depth, c, c_step, add);
            few_rows(count, 1, dtype, x, x_step, (strip){w.right, w.right, w.step}, depth, c + LANES, c_step, add);
        }
#endif
    }
}

/* c[rows][32] = x[rows][depth] w[depth][32], or what is in c plus that. `x_step`, `c_step`: floats from row to row. */
static void multiply(int rows, int dtype, const float *x, int64_t x_step, strip w, int depth, float *c, int64_t c_step, int add) {
    if (dtype == HR_F16)
        all_rows(rows, HR_F16, x, x_step, w, depth, c, c_step, add);
    else if (dtype == HR_BF16)
        all_rows(rows, HR_BF16, x, x_step, w, depth, c, c_step, add);
    else
        all_rows(rows, HR_F32, x, x_step, w, depth, c, c_step, add);
}

#endif
