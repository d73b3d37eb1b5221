/* What crosses from Python to C, mirrored in library.py: keep the two alike, field by field.
 *
 * A KV block holds, layer by layer, K and then V of 16 tokens:
 *     K [kv head][dimension][token]        so that a strip of scores needs no transposition
 *     V [kv head][token][padded dimension] so that a strip of outputs needs none either
 * where `padded` is head_dim rounded up to 32. Weights are [outputs][inputs], as a checkpoint stores them.
 */
#ifndef HR_KERNEL_H
#define HR_KERNEL_H

#include <stdint.h>

#define HR_PUBLIC __attribute__((visibility("default")))
#define HR_VERSION 1
#define HR_BLOCK_TOKENS 16

/* y = x W^T + bias. `bias` is float32, NULL when there is none. */
typedef struct {
    const void *weight;
    const float *bias;
    int32_t outputs, inputs, dtype;
} hr_linear;

/* Norm weights are float32; query_norm and key_norm (over one head, before RoPE) are NULL when there are none. */
typedef struct {
    const float *attention_norm, *query_norm, *key_norm, *mlp_norm;
    hr_linear query, key, value, output, gate, up, down;
} hr_layer;

typedef struct {
    const hr_layer *layers;
    const void *embed;            /* [vocab][hidden] of embed_dtype */
    const float *norm;            /* the last one */
    const float *rope_cos, *rope_sin; /* [context][head_dim / 2] */
    void *kv;
    hr_linear head;
    int32_t layer_count, hidden, heads, kv_heads, head_dim, intermediate, vocab, context;
    int32_t embed_dtype, kv_dtype, blocks;
    float eps;
} hr_model;

/* Rows first..first+count-1 are consecutive tokens of one sequence, whose blocks are tables[table], tables[table + 1], ... */
typedef struct {
    int32_t first, count, table;
} hr_span;

typedef struct {
    const int32_t *ids, *positions; /* [rows] */
    const int32_t *tables;          /* [table_length] */
    const hr_span *spans;           /* [span_count], which cover the rows in order */
    const int32_t *sampled;         /* [sampled_count]: the rows that yield logits */
    float *logits;                  /* [sampled_count][logits_step], logits_step >= vocab rounded up to 32 */
    const volatile int32_t *stop;   /* not 0: end before the next layer */
    int64_t logits_step;
    int32_t rows, table_length, span_count, sampled_count;
} hr_step;

enum hr_result { HR_DONE = 0, HR_STOPPED = 1, HR_REFUSED = 2 }; /* refused: an index is out of range; nothing was computed */

typedef struct hr_engine hr_engine;

/* Working memory for steps of `max_rows` rows in contexts of `max_tokens`, computed by up to `max_threads`. NULL: no memory.
 * `model` and all it points to must outlive the engine. */
HR_PUBLIC hr_engine *hr_open(const hr_model *model, int32_t max_rows, int32_t max_tokens, int32_t max_threads);
HR_PUBLIC int32_t hr_compute(hr_engine *engine, const hr_step *step, int32_t threads); /* one caller at a time */
HR_PUBLIC void hr_invite(hr_engine *engine, int32_t threads); /* of the step in progress, from now on; from any thread */
HR_PUBLIC void hr_close(hr_engine *engine);

HR_PUBLIC int64_t hr_block_bytes(int32_t layers, int32_t kv_heads, int32_t head_dim, int32_t kv_dtype);
HR_PUBLIC int32_t hr_version(void);
HR_PUBLIC const char *hr_isa(void);
HR_PUBLIC int32_t hr_fused(void); /* whether a multiply-add rounds once; machines that differ in this differ in bits */

enum hr_part { HR_EMBED, HR_NORMS, HR_QKV, HR_PLACE, HR_ATTENTION, HR_OUTPUT, HR_GATE_UP, HR_DOWN, HR_HEAD, HR_PARTS };
#ifdef HR_PROFILE /* a build for bench/step_times.py */
HR_PUBLIC const double *hr_profile(const hr_engine *engine); /* seconds of all steps so far [HR_PARTS] */
#endif

#endif
