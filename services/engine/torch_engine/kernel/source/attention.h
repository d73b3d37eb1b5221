/* Attention over a paged KV memory: writing this step's keys and values, and reading all of a sequence's.
 *
 * A query's scores, the sum of their exponentials and its output each run over the tokens 0..position in order, as products do
 * (product.h); tiles of queries share the loads and nothing else. So a query attends the same alone, in a chunk of any size, or
 * beside other sequences, wherever the blocks lie.
 */
#ifndef HR_ATTENTION_H
#define HR_ATTENTION_H

#include "engine.h"

/* Pointer to number `at` of the KV memory. */
static inline char *kv_at(const hr_engine *e, int64_t at) { return (char *)e->model.kv + at * size_of(e->model.kv_dtype); }

static inline int64_t kv_layer(const hr_engine *e, int32_t block, int layer) {
    return block * e->block_size + layer * e->layer_size;
}

static inline void kv_put(const hr_engine *e, int64_t at, float value) {
    uint16_t half;
    if (e->model.kv_dtype == HR_F32) {
        memcpy(kv_at(e, at), &value, sizeof value);
    } else {
        half = to_half(value);
        memcpy(kv_at(e, at), &half, sizeof half);
    }
}

/* Norms and rotates the heads of one row, and puts its keys and values where its position belongs. */
static void place_row(const hr_engine *e, const hr_layer *layer, int number, int r) {
    const hr_model *model = &e->model;
    const int dim = model->head_dim, position = e->step->positions[r], slot = position % HR_BLOCK_TOKENS;
    const float *cos = model->rope_cos + (int64_t)position * (dim / 2), *sin = model->rope_sin + (int64_t)position * (dim / 2);
    float *row = e->qkv + r * e->qkv_step, *key = row + e->key_at, *value = row + e->value_at;
    for (int h = 0; h < model->heads; h++) {
        if (layer->query_norm) rms_norm(row + h * dim, layer->query_norm, dim, model->eps, row + h * dim);
        rotate(row + h * dim, cos, sin, dim / 2);
    }
    const int64_t base = kv_layer(e, e->row_block[r], number);
    for (int h = 0; h < model->kv_heads; h++) {
        if (layer->key_norm) rms_norm(key + h * dim, layer->key_norm, dim, model->eps, key + h * dim);
        rotate(key + h * dim, cos, sin, dim / 2);
        int64_t keys = base + (int64_t)h * dim * HR_BLOCK_TOKENS + slot;
        int64_t values = base + e->value_offset + ((int64_t)h * HR_BLOCK_TOKENS + slot) * e->padded;
        for (int d = 0; d < dim; d++) kv_put(e, keys + d * HR_BLOCK_TOKENS, key[h * dim + d]);
        for (int d = 0; d < dim; d++) kv_put(e, values + d, value[h * dim + d]);
    }
}

static void place_phase(hr_engine *e, member *m, int number) {
    int first, end;
    while (team_take(m, e->step->rows, 4, &first, &end))
        for (int r = first; r < end; r++) place_row(e, &e->model.layers[number], number, r);
    team_finish(m, e->step->rows);
}

/* Asks for the keys or values of one head in a block that is wanted soon: blocks lie anywhere, and no hardware guesses where. */
static inline void ask_for(const hr_engine *e, int32_t block, int64_t head, int64_t numbers, int number) {
    const char *from = kv_at(e, kv_layer(e, block, number) + head);
    for (int64_t at = 0; at < numbers * size_of(e->model.kv_dtype); at += 64) __builtin_prefetch(from + at);
}

/* scores[rows][tokens] of the first `blocks` blocks in `table`, two blocks at a time. */
static void score(const hr_engine *e, scratch *own, const int32_t *table, int blocks, int64_t head, int rows, int number) {
    const int64_t numbers = (int64_t)e->model.head_dim * HR_BLOCK_TOKENS;
    for (int b = 0; b < blocks; b += 2) {
        for (int next = b + 2; next < b + 4 && next < blocks; next++) ask_for(e, table[next], head, numbers, number);
        int64_t left = kv_layer(e, table[b], number) + head;
        int64_t right = b + 1 < blocks ? kv_layer(e, table[b + 1], number) + head : left;
        strip keys = {kv_at(e, left), kv_at(e, right), HR_BLOCK_TOKENS};
        multiply(rows, e->model.kv_dtype, own->queries, e->model.head_dim, keys, e->model.head_dim,
                 own->scores + b * HR_BLOCK_TOKENS, e->score_step, 0);
    }
}

/* seen[rows][head_dim] = scores[rows][tokens] times the values of `tokens` tokens. */
static void gather(const hr_engine *e, scratch *own, const int32_t *table, int tokens, int64_t head, int rows, int number) {
    const int64_t numbers = (int64_t)e->padded * HR_BLOCK_TOKENS;
    for (int t = 0; t < tokens; t += HR_BLOCK_TOKENS) {
        if (t + HR_BLOCK_TOKENS < tokens) ask_for(e, table[t / HR_BLOCK_TOKENS + 1], head, numbers, number);
        int depth = tokens - t < HR_BLOCK_TOKENS ? tokens - t : HR_BLOCK_TOKENS; /* what lies behind may be anything */
        int64_t from = kv_layer(e, table[t / HR_BLOCK_TOKENS], number) + head;
        for (int d = 0; d < e->padded; d += STRIP) {
            strip values = {kv_at(e, from + d), kv_at(e, from + d + LANES), e->padded};
            multiply(rows, e->model.kv_dtype, own->scores + t, e->score_step, values, depth, own->seen + d, e->padded, t > 0);
        }
    }
}

/* The queries of one tile that share KV head `head`. A query later in the tile sees tokens that an earlier one must not: those
 * have weight 0 there, and adding 0 changes no sum; only the sign of a zero, which the last line settles. */
static void attend(const hr_engine *e, scratch *own, const tile_of_queries *tile, int head, int number) {
    const hr_model *model = &e->model;
    const int dim = model->head_dim, group = e->group, rows = tile->count * group;
    const int32_t *table = e->step->tables + e->step->spans[tile->span].table;
    const int tokens = e->step->positions[tile->first + tile->count - 1] + 1;
    const int blocks = (tokens + HR_BLOCK_TOKENS - 1) / HR_BLOCK_TOKENS;
    const float scale = 1.0f / sqrtf((float)dim);
    for (int r = 0; r < rows; r++) {
        const float *query = e->qkv + (tile->first + r / group) * e->qkv_step + (head * group + r % group) * dim;
        for (int d = 0; d < dim; d++) own->queries[r * dim + d] = query[d] * scale;
    }
    score(e, own, table, blocks, (int64_t)head * dim * HR_BLOCK_TOKENS, rows, number);
    float inverse[rows];
    for (int r = 0; r < rows; r++)
        inverse[r] = softmax(own->scores + r * e->score_step, e->step->positions[tile->first + r / group] + 1,
                             blocks * HR_BLOCK_TOKENS);
    gather(e, own, table, tokens, e->value_offset + (int64_t)head * HR_BLOCK_TOKENS * e->padded, rows, number);
    for (int r = 0; r < rows; r++) {
        float *out = e->attended + (tile->first + r / group) * e->attended_step + (head * group + r % group) * dim;
        for (int d = 0; d < dim; d++) out[d] = own->seen[r * e->padded + d] * inverse[r] + 0.0f;
    }
}

static void attention_phase(hr_engine *e, member *m, int number) {
    const int heads = e->model.kv_heads, total = e->tile_count * heads;
    int first, end;
    while (team_take(m, total, 1, &first, &end))
        attend(e, &e->scratch[m->number], &e->tiles[first / heads], first % heads, number);
    team_finish(m, total);
}

#endif
