/* What is done to one row or one head: norm, rotation, exp, softmax. Plain C in a fixed order of operations.
 *
 * Sums run in sixteen partial sums (element i goes to i mod 16) that are added pairwise in the end, whatever the machine; what is
 * elementwise rounds the same way however a compiler vectorises it, because it may not contract (-ffp-contract=off).
 */
#ifndef HR_ROWS_H
#define HR_ROWS_H

#include "lanes.h"

static inline float add_up(float *partial) {
    for (int width = LANES / 2; width > 0; width /= 2)
        for (int i = 0; i < width; i++) partial[i] += partial[i + width];
    return partial[0];
}

/* RMSNorm (arXiv 1910.07467); `out` may be `x`. */
static void rms_norm(const float *x, const float *weight, int n, float eps, float *out) {
    float partial[LANES] = {0};
    int whole = n - n % LANES;
    for (int i = 0; i < whole; i += LANES)
        for (int l = 0; l < LANES; l++) partial[l] += x[i + l] * x[i + l];
    for (int i = whole; i < n; i++) partial[i - whole] += x[i] * x[i];
    float scale = 1.0f / sqrtf(add_up(partial) / (float)n + eps);
    for (int i = 0; i < n; i++) out[i] = x[i] * scale * weight[i];
}

/* RoPE (arXiv 2104.09864) over the two halves of a head, as in Hugging Face checkpoints. */
static void rotate(float *head, const float *cos, const float *sin, int half) {
    for (int i = 0; i < half; i++) {
        float a = head[i], b = head[i + half];
        head[i] = a * cos[i] - b * sin[i];
        head[i + half] = b * cos[i] + a * sin[i];
    }
}

/* e**x within 2 units in the last place; 0 below -87, e**88 above 88. Cody-Waite reduction, the polynomial of Cephes' expf. */
static inline float exp_of(float x) {
    float clamped = x > 88.0f ? 88.0f : x < -87.0f ? -87.0f : x;
    float n = (clamped * 1.44269504088896341f + 12582912.0f) - 12582912.0f; /* adding 1.5 * 2**23 rounds to an integer */
    float r = clamped - n * 0.693359375f + n * 2.12194440e-4f;
    float p = 1.9875691500e-4f;
    p = p * r + 1.3981999507e-3f;
    p = p * r + 8.3334519073e-3f;
    p = p * r + 4.1665795894e-2f;
    p = p * r + 1.6666665459e-1f;
    p = p * r + 5.0000001201e-1f;
    p = p * (r * r) + r + 1.0f;
    uint32_t bits = (uint32_t)((int32_t)n + 127) << 23; /* 2**n */
    float power;
    memcpy(&power, &bits, sizeof power);
    return x < -87.0f ? 0.0f : p * power;
}

/* exp(score - largest) of scores[0..count-1], in place, 0 from there to `padded` (a multiple of 16); returns 1 / their sum. */
static float softmax(float *scores, int count, int padded) {
    for (int t = count; t < padded; t++) scores[t] = -INFINITY;
    float most[LANES], partial[LANES] = {0};
    memcpy(most, scores, sizeof most);
    for (int t = LANES; t < padded; t += LANES)
        for (int l = 0; l < LANES; l++) most[l] = scores[t + l] > most[l] ? scores[t + l] : most[l];
    float largest = most[0];
    for (int l = 1; l < LANES; l++) largest = most[l] > largest ? most[l] : largest;
    for (int t = 0; t < padded; t += LANES)
        for (int l = 0; l < LANES; l++) {
            scores[t + l] = exp_of(scores[t + l] - largest);
            partial[l] += scores[t + l];
        }
    return 1.0f / add_up(partial);
}

/* SwiGLU (arXiv 2002.05202). */
static inline float gated(float gate, float up) { return gate / (1.0f + exp_of(-gate)) * up; }

#endif
