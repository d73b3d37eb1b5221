/* One step of a Llama-family model (arXiv 2302.13971) over a paged KV memory, for any mix of prompts and decoding rows.
 *
 * Owns working memory and threads; the weights, the KV memory and the step belong to the caller. Invariant: a row's logits are
 * bitwise the same whatever else the step computes, however a prompt is cut, on however many threads (product.h says why).
 */
#include "attention.h"

static void embed_phase(hr_engine *e, member *m) {
    const hr_model *model = &e->model;
    const int size = size_of(model->embed_dtype);
    int first, end;
    while (team_take(m, e->step->rows, 8, &first, &end))
        for (int r = first; r < end; r++) {
            const char *from = (const char *)model->embed + (int64_t)e->step->ids[r] * model->hidden * size;
            for (int i = 0; i < model->hidden; i++) e->x[r * e->hidden_step + i] = number_at(from + i * size, model->embed_dtype);
        }
    team_finish(m, e->step->rows);
}

/* normed[i] = the norm of row rows[i], or of row i without `rows`. */
static void norm_phase(hr_engine *e, member *m, const float *weight, const int32_t *rows, int count) {
    int first, end;
    while (team_take(m, count, 4, &first, &end))
        for (int i = first; i < end; i++)
            rms_norm(e->x + (rows ? rows[i] : i) * e->hidden_step, weight, e->model.hidden, e->model.eps,
                     e->normed + i * e->hidden_step);
    team_finish(m, count);
}

#define PHASES_OF_LAYER 9 /* with the look at the flag */
#define PHASES_AROUND 3

static void compute_layer(hr_engine *e, member *m, int number) {
    const hr_layer *layer = &e->model.layers[number];
    const int rows = e->step->rows;
    norm_phase(e, m, layer->attention_norm, NULL, rows);
    const part qkv[] = {{&layer->query, e->qkv}, {&layer->key, e->qkv + e->key_at}, {&layer->value, e->qkv + e->value_at}};
    spent(e, m, HR_NORMS);
    product_phase(e, m, qkv, 3, e->normed, e->hidden_step, rows, e->qkv_step, STORE, &layer->output);
    spent(e, m, HR_QKV);
    place_phase(e, m, number);
    spent(e, m, HR_PLACE);
    attention_phase(e, m, number);
    spent(e, m, HR_ATTENTION);
    const part output = {&layer->output, e->x};
    product_phase(e, m, &output, 1, e->attended, e->attended_step, rows, e->hidden_step, ADD, &layer->gate);
    spent(e, m, HR_OUTPUT);
    norm_phase(e, m, layer->mlp_norm, NULL, rows);
    spent(e, m, HR_NORMS);
    gated_phase(e, m, layer, e->normed, e->hidden_step, rows);
    spent(e, m, HR_GATE_UP);
    const part down = {&layer->down, e->x};
    product_phase(e, m, &down, 1, e->mlp, e->mlp_step, rows, e->hidden_step, ADD, number + 1 < e->model.layer_count ? &layer[1].query : &e->model.head);
    spent(e, m, HR_DOWN);
}

/* One member looks at the caller's flag for all, who must see the same. */
static int stopped(hr_engine *e, member *m) {
    int first, end;
    while (team_take(m, 1, 1, &first, &end)) atomic_store(&e->stopped, *e->step->stop != 0);
    team_finish(m, 1);
    return atomic_load(&e->stopped);
}

static void compute(member *m, void *argument) {
    hr_engine *e = argument;
    spent(e, m, HR_PARTS); /* what was before this step is nobody's */
    embed_phase(e, m);
    spent(e, m, HR_EMBED);
    for (int number = 0; number < e->model.layer_count; number++) {
        if (stopped(e, m) || team_leaves(m)) return;
        compute_layer(e, m, number);
    }
    norm_phase(e, m, e->model.norm, e->step->sampled, e->step->sampled_count);
    const part head = {&e->model.head, e->step->logits};
    spent(e, m, HR_NORMS);
    product_phase(e, m, &head, 1, e->normed, e->hidden_step, e->step->sampled_count, e->step->logits_step, STORE, &e->model.layers->query);
    spent(e, m, HR_HEAD);
}

/* Row → block, span → tiles of queries. 0 when an index points outside the model, the KV memory or the step. */
static int plan(hr_engine *e, const hr_step *step) {
    int row = 0;
    e->tile_count = 0;
    for (int s = 0; s < step->span_count; s++) {
        const hr_span *span = &step->spans[s];
        if (span->first != row || span->count < 1 || span->count > step->rows - row || span->table < 0) return 0;
        for (int i = 0; i < span->count; i++, row++) {
            int position = step->positions[row], at = span->table + position / HR_BLOCK_TOKENS;
            if (position < 0 || position >= e->max_tokens || at >= step->table_length) return 0;
            if (i > 0 && position != step->positions[row - 1] + 1) return 0;
            if (step->ids[row] < 0 || step->ids[row] >= e->model.vocab) return 0;
            e->row_block[row] = step->tables[at];
        }
        for (int i = 0; i < span->count; i += e->tile_queries) {
            int count = span->count - i < e->tile_queries ? span->count - i : e->tile_queries;
            e->tiles[e->tile_count++] = (tile_of_queries){s, span->first + i, count};
        }
    }
    for (int i = 0; i < step->table_length; i++)
        if (step->tables[i] < 0 || step->tables[i] >= e->model.blocks) return 0;
    for (int i = 0; i < step->sampled_count; i++)
        if (step->sampled[i] < 0 || step->sampled[i] >= step->rows) return 0;
    return row == step->rows;
}

int32_t hr_compute(hr_engine *e, const hr_step *step, int32_t threads) {
    if (step->rows < 1 || step->rows > e->max_rows || step->sampled_count > step->rows) return HR_REFUSED;
    if (step->logits_step < whole_strips(e->model.vocab) || threads < 1 || !plan(e, step)) return HR_REFUSED;
    e->step = step;
    e->stopped = 0;
    team_run(&e->team, threads < e->max_threads ? threads : e->max_threads, compute, e);
    return e->stopped ? HR_STOPPED : HR_DONE;
}

void hr_invite(hr_engine *e, int32_t threads) {
    team_invite(&e->team, threads < 1 ? 1 : threads < e->max_threads ? threads : e->max_threads);
}

/* 64 bytes aligned, zeroed; NULL when there is no memory. */
static void *reserve(int64_t count, int64_t size) {
    size_t bytes = (size_t)(count * size + 63) / 64 * 64 + 64;
    void *memory = aligned_alloc(64, bytes);
    if (memory) memset(memory, 0, bytes);
    return memory;
}

static void release(hr_engine *e) {
    for (int i = 0; e->scratch && i < e->max_threads; i++) {
        scratch *own = &e->scratch[i];
        free(own->weights), free(own->ragged), free(own->product), free(own->queries), free(own->scores), free(own->seen);
    }
    free(e->scratch), free(e->x), free(e->normed), free(e->qkv), free(e->attended), free(e->mlp);
    free(e->row_block), free(e->tiles), free(e);
}

static int reserve_all(hr_engine *e) {
    const int64_t rows = e->max_rows, size = sizeof(float), tile_rows = (int64_t)e->tile_queries * e->group;
    e->x = reserve(rows * e->hidden_step, size);
    e->normed = reserve(rows * e->hidden_step, size);
    e->qkv = reserve(rows * e->qkv_step, size);
    e->attended = reserve(rows * e->attended_step, size);
    e->mlp = reserve(rows * e->mlp_step, size);
    e->row_block = reserve(rows, sizeof *e->row_block);
    e->tiles = reserve(rows, sizeof *e->tiles);
    e->scratch = reserve(e->max_threads, sizeof *e->scratch);
    if (!e->x || !e->normed || !e->qkv || !e->attended || !e->mlp || !e->row_block || !e->tiles || !e->scratch) return 0;
    for (int i = 0; i < e->max_threads; i++) {
        scratch *own = &e->scratch[i];
        own->weights = reserve(PACK_DEPTH * STRIP, size);
        own->ragged = reserve(e->most_inputs * STRIP, size);
        own->product = reserve(rows * STRIP, size);
        own->queries = reserve(tile_rows * e->model.head_dim, size);
        own->scores = reserve(tile_rows * e->score_step, size);
        own->seen = reserve(tile_rows * e->padded, size);
        if (!own->weights || !own->ragged || !own->product || !own->queries || !own->scores || !own->seen) return 0;
    }
    return 1;
}

static void measure(hr_engine *e) {
    const hr_model *model = &e->model;
    const int64_t query = (int64_t)model->heads * model->head_dim, key = (int64_t)model->kv_heads * model->head_dim;
    const int tile_rows = 2 * TILE_ROWS;
    e->group = model->heads / model->kv_heads;
    e->padded = (int)whole_strips(model->head_dim);
    e->tile_queries = e->group < tile_rows ? tile_rows / e->group : 1;
    e->hidden_step = whole_strips(model->hidden);
    e->key_at = whole_strips(query);
    e->value_at = e->key_at + whole_strips(key);
    e->qkv_step = e->value_at + whole_strips(key);
    e->attended_step = whole_strips(query);
    e->mlp_step = whole_strips(model->intermediate);
    e->most_inputs = e->mlp_step > e->hidden_step ? e->mlp_step : e->hidden_step;
    if (e->attended_step > e->most_inputs) e->most_inputs = e->attended_step;
    e->score_step = whole_strips(e->max_tokens) + LANES; /* not a power of two: rows would share cache sets */
    e->value_offset = key * HR_BLOCK_TOKENS;
    e->layer_size = e->value_offset + (int64_t)model->kv_heads * e->padded * HR_BLOCK_TOKENS;
    e->block_size = e->layer_size * model->layer_count;
}

hr_engine *hr_open(const hr_model *model, int32_t max_rows, int32_t max_tokens, int32_t max_threads) {
    hr_engine *e = calloc(1, sizeof *e);
    if (!e) return NULL;
    e->model = *model;
    e->max_rows = max_rows;
    e->max_tokens = max_tokens < model->context ? max_tokens : model->context;
    e->max_threads = max_threads;
    measure(e);
    if (!reserve_all(e) || !team_open(&e->team, max_threads, PHASES_OF_LAYER * model->layer_count + PHASES_AROUND)) {
        release(e);
        return NULL;
    }
    return e;
}

void hr_close(hr_engine *e) {
    team_close(&e->team);
    release(e);
}

int64_t hr_block_bytes(int32_t layers, int32_t kv_heads, int32_t head_dim, int32_t kv_dtype) {
    int64_t numbers = (int64_t)kv_heads * HR_BLOCK_TOKENS * (head_dim + whole_strips(head_dim));
    return layers * numbers * size_of(kv_dtype);
}

#ifdef HR_PROFILE
const double *hr_profile(const hr_engine *e) { return e->spent; }
#endif

int32_t hr_version(void) { return HR_VERSION; }
const char *hr_isa(void) { return HR_ISA; }
int32_t hr_fused(void) { return HR_FUSED; }
