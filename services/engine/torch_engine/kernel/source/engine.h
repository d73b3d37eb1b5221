/* Working memory of one engine, and the phases of a step that are matrix products. */
#ifndef HR_ENGINE_H
#define HR_ENGINE_H

#include "kernel.h"
#include "pack.h"
#include "rows.h"
#include "team.h"

#include <time.h>

typedef struct {
    int32_t span, first, count; /* rows first..first+count-1 attend together */
} tile_of_queries;

/* One thread's own. */
typedef struct {
    char *weights;  /* [PACK_DEPTH][32] of any dtype */
    char *ragged;   /* [32][most inputs] */
    float *product; /* [max_rows][32] */
    float *queries, *scores, *seen; /* one attention tile: [tile rows][head_dim], [][score_step], [][padded] */
} scratch;

struct hr_engine {
    hr_model model;
    team team;
    scratch *scratch;
    int max_rows, max_tokens, max_threads;
    int group, padded, tile_queries;
    /* floats from row to row, padded to whole strips */
    int64_t hidden_step, qkv_step, attended_step, mlp_step, score_step, most_inputs;
    int64_t key_at, value_at; /* where K and V begin in a row of qkv */
    int64_t layer_size, block_size, value_offset; /* of the KV memory, in numbers */
    float *x, *normed, *qkv, *attended, *mlp;
    int32_t *row_block;
    tile_of_queries *tiles;
    /* the step being computed */
    const hr_step *step;
    int tile_count;
    atomic_int stopped;
#ifdef HR_PROFILE
    double spent[HR_PARTS], since;
#endif
};

/* The time since the last call was `part`'s, waiting for other members included; the caller's thread keeps the book. */
static inline void spent(hr_engine *e, const member *m, enum hr_part part) {
#ifdef HR_PROFILE
    struct timespec at;
    if (m->number) return;
    clock_gettime(CLOCK_MONOTONIC, &at);
    const double now = (double)at.tv_sec + 1e-9 * (double)at.tv_nsec;
    if (part < HR_PARTS) e->spent[part] += now - e->since;
    e->since = now;
#else
    (void)e, (void)m, (void)part;
#endif
}

static inline int64_t strips(int64_t n) { return (n + STRIP - 1) / STRIP; }
static inline int64_t whole_strips(int64_t n) { return strips(n) * STRIP; }

/* 16 rows of a matrix. At its ragged end they are copied, the last one standing in for those that are not there. */
static const char *sixteen_rows(const hr_linear *linear, int first, char *copy) {
    const int64_t bytes = (int64_t)linear->inputs * size_of(linear->dtype);
    const char *weight = linear->weight;
    if (first + LANES <= linear->outputs) return weight + first * bytes;
    for (int i = 0; i < LANES; i++) {
        int output = first + i < linear->outputs ? first + i : linear->outputs - 1;
        memcpy(copy + i * bytes, weight + output * bytes, bytes);
    }
    return copy;
}

/* own->product[rows][32] (+)= x[rows][depth] times the first `depth` weights of 32 rows. */
static void strip_piece(scratch *own, weight_rows from, int depth, int dtype, const float *x, int64_t x_step, int rows, int add) {
    const int size = size_of(dtype);
    const strip packed = {own->weights, own->weights + LANES * size, STRIP};
    int whole = 0; /* how many of k went the fast way */
#if HR_TRANSPOSE
    if (size == 2 && (whole = depth / PACK_STEP * PACK_STEP)) {
        const int first = rows_to_pack(rows);
        packing_multiply(first, dtype, x, x_step, from, whole, own->product, add, (uint16_t *)own->weights, first < rows);
        multiply(rows - first, dtype, x + first * x_step, x_step, packed, whole, own->product + first * STRIP, STRIP, add);
    }
#endif
    if (whole == depth) return;
    pack_plainly(skip(from, (int64_t)whole * size), depth - whole, size, own->weights);
    multiply(rows, dtype, x + whole, x_step, packed, depth - whole, own->product, STRIP, add || whole);
}

/* 16 outputs of a matrix. */
typedef struct {
    const hr_linear *linear;
    int first;
} outputs;

static inline int64_t row_bytes(const hr_linear *linear) { return (int64_t)linear->inputs * size_of(linear->dtype); }
static inline const char *where(outputs from) { return (const char *)from.linear->weight + from.first * row_bytes(from.linear); }

/* own->product[rows][32] = x times two times sixteen outputs, which have the same inputs and dtype; `then` is wanted next. */
static void strip_product(scratch *own, const outputs from[2], const outputs then[2], const float *x, int64_t x_step, int rows) {
    const hr_linear *left = from[0].linear;
    const int64_t bytes = row_bytes(left);
    const char *first = sixteen_rows(left, from[0].first, own->ragged);
    const char *second = sixteen_rows(from[1].linear, from[1].first, own->ragged + LANES * bytes);
    const weight_rows all = {first, second, where(then[0]), where(then[1]), bytes};
    for (int k = 0; k < left->inputs; k += PACK_DEPTH) {
        const int depth = left->inputs - k < PACK_DEPTH ? left->inputs - k : PACK_DEPTH;
        strip_piece(own, skip(all, (int64_t)k * size_of(left->dtype)), depth, left->dtype, x + k, x_step, rows, k > 0);
    }
}

static void add_bias(scratch *own, const hr_linear *linear, int first, int columns, int rows, int at) {
    if (!linear->bias) return;
    for (int i = 0; i < columns && first + i < linear->outputs; i++)
        for (int r = 0; r < rows; r++) own->product[r * STRIP + at + i] += linear->bias[first + i];
}

/* What one product is made of, and where it goes: y = or y += x W^T. */
typedef struct {
    const hr_linear *linear;
    float *y;
} part;

enum mode { STORE, ADD };

/* The task a member probably takes after `task`, of its piece [.., end) of `piece` tasks: all members are about as fast. */
static inline int next_task(hr_engine *e, int task, int end, int piece) {
    return task + 1 < end ? task + 1 : end + (team_size(&e->team) - 1) * piece;
}

/* Task `number` of a phase: 32 outputs of one of `parts`. Behind the last one those of `then`, the next phase's first matrix. */
static const part *strip_of(const part *parts, int count, const hr_linear *then, int number, outputs found[2]) {
    int i = 0;
    while (i < count && number >= strips(parts[i].linear->outputs)) number -= (int)strips(parts[i++].linear->outputs);
    const hr_linear *linear = i < count ? parts[i].linear : then;
    found[0] = (outputs){linear, number * STRIP};
    found[1] = (outputs){linear, number * STRIP + LANES};
    return &parts[i];
}

/* A phase: the products of the same x with up to three matrices. `y_step` holds whole strips. */
static void product_phase(hr_engine *e, member *m, const part *parts, int count, const float *x, int64_t x_step, int rows,
                          int64_t y_step, enum mode mode, const hr_linear *then) {
    scratch *own = &e->scratch[m->number];
    int total = 0, first, end;
    for (int i = 0; i < count; i++) total += (int)strips(parts[i].linear->outputs);
    int piece = total / (e->max_threads * 8);
    if (piece < 1) piece = 1;
    while (team_take(m, total, piece, &first, &end))
        for (int task = first; task < end; task++) {
            outputs from[2], next[2];
            const part *into = strip_of(parts, count, then, task, from);
            strip_of(parts, count, then, next_task(e, task, end, piece), next);
            strip_product(own, from, next, x, x_step, rows);
            add_bias(own, from[0].linear, from[0].first, STRIP, rows, 0);
            for (int r = 0; r < rows; r++) {
                float *y = into->y + r * y_step + from[0].first;
                const float *c = own->product + r * STRIP;
                for (int j = 0; j < STRIP; j++) y[j] = mode == ADD ? y[j] + c[j] : c[j];
            }
        }
    team_finish(m, total);
}

/* A phase: y = silu(gate x) * (up x), sixteen outputs of each side by side. */
static void gated_phase(hr_engine *e, member *m, const hr_layer *layer, const float *x, int64_t x_step, int rows) {
    scratch *own = &e->scratch[m->number];
    int total = (layer->gate.outputs + LANES - 1) / LANES, first, end;
    while (team_take(m, total, 1, &first, &end)) {
        const outputs from[2] = {{&layer->gate, first * LANES}, {&layer->up, first * LANES}};
        const int after = next_task(e, first, end, 1) * LANES, over = after - layer->gate.outputs;
        const outputs next[2] = {{over < 0 ? &layer->gate : &layer->down, over < 0 ? after : 2 * over},
                                 {over < 0 ? &layer->up : &layer->down, over < 0 ? after : 2 * over + LANES}};
        strip_product(own, from, next, x, x_step, rows);
        add_bias(own, &layer->gate, first * LANES, LANES, rows, 0);
        add_bias(own, &layer->up, first * LANES, LANES, rows, LANES);
        for (int r = 0; r < rows; r++) {
            const float *c = own->product + r * STRIP;
            for (int j = 0; j < LANES; j++) e->mlp[r * e->mlp_step + first * LANES + j] = gated(c[j], c[j + LANES]);
        }
    }
    team_finish(m, total);
}

#endif
