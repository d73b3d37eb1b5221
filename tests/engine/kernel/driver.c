/* The kernel as a program, for the sanitizers: a small random model computed alone and in company, on one thread and on three, and
 * on a number of threads that changes all the time. */
#include "kernel.c"

#include <stdio.h>

enum { LAYERS = 2, HIDDEN = 40, HEADS = 6, KV_HEADS = 2, DIM = 10, MLP = 52, VOCAB = 35, CONTEXT = 64, BLOCKS = 9, LENGTH = 37 };

static unsigned state = 1;

static float drawn(void) {
    state = state * 1664525u + 1013904223u;
    return ((float)(state >> 8) / (1 << 24) - 0.5f) * 0.8f;
}

static void *kept[64]; /* so that what the kernel itself leaks is all that is reported */
static int kept_count;

static void *keep(int64_t bytes) { return kept[kept_count++] = malloc(bytes); }

static hr_linear linear(int outputs, int inputs) {
    uint16_t *weight = keep(sizeof *weight * outputs * inputs);
    for (int i = 0; i < outputs * inputs; i++) weight[i] = to_half(drawn());
    return (hr_linear){weight, NULL, outputs, inputs, HR_F16};
}

static const float *floats(int count) {
    float *made = keep(sizeof *made * count);
    for (int i = 0; i < count; i++) made[i] = drawn();
    return made;
}

static hr_layer layer(void) {
    return (hr_layer){
        .attention_norm = floats(HIDDEN), .query_norm = floats(DIM), .key_norm = floats(DIM), .mlp_norm = floats(HIDDEN),
        .query = linear(HEADS * DIM, HIDDEN), .key = linear(KV_HEADS * DIM, HIDDEN), .value = linear(KV_HEADS * DIM, HIDDEN),
        .output = linear(HIDDEN, HEADS * DIM), .gate = linear(MLP, HIDDEN), .up = linear(MLP, HIDDEN), .down = linear(HIDDEN, MLP)};
}

static atomic_int meddling;

static void *meddle(void *engine) {
    for (int i = 0; atomic_load(&meddling); i++) hr_invite(engine, 1 + i % 3);
    return NULL;
}

/* Rows of two sequences of LENGTH tokens, all sampled; returns 0 unless each row of both equals its row alone. */
static int check(const hr_model *model) {
    static float alone[LENGTH][64], both[2 * LENGTH][64];
    int32_t ids[2 * LENGTH], positions[2 * LENGTH], sampled[2 * LENGTH], tables[] = {5, 0, 7, 8, 2, 3}, stop = 0;
    for (int i = 0; i < 2 * LENGTH; i++) ids[i] = i % LENGTH * 7 % VOCAB, positions[i] = i % LENGTH, sampled[i] = i;
    hr_span spans[] = {{0, LENGTH, 0}, {LENGTH, LENGTH, 3}};
    hr_step step = {ids, positions, tables, spans, sampled, alone[0], &stop, 64, LENGTH, 6, 1, LENGTH};
    hr_engine *engine = hr_open(model, 2 * LENGTH, CONTEXT, 3);
    int good = engine && hr_compute(engine, &step, 1) == HR_DONE;
    step = (hr_step){ids, positions, tables, spans, sampled, both[0], &stop, 64, 2 * LENGTH, 6, 2, 2 * LENGTH};
    for (int threads = 3; good && threads > 0; threads--) {
        good = hr_compute(engine, &step, threads) == HR_DONE;
        for (int i = 0; i < 2 * LENGTH; i++) good &= !memcmp(both[i], alone[i % LENGTH], VOCAB * sizeof(float));
    }
    pthread_t meddler;
    atomic_store(&meddling, 1);
    good = good && pthread_create(&meddler, NULL, meddle, engine) == 0;
    for (int turn = 0; good && turn < 100; turn++) {
        memset(both, 0, sizeof both);
        good = hr_compute(engine, &step, 1 + turn % 3) == HR_DONE;
        for (int i = 0; i < 2 * LENGTH; i++) good &= !memcmp(both[i], alone[i % LENGTH], VOCAB * sizeof(float));
    }
    atomic_store(&meddling, 0);
    good = pthread_join(meddler, NULL) == 0 && good;
    stop = 1;
    good = good && hr_compute(engine, &step, 3) == HR_STOPPED;
    hr_close(engine);
    return good;
}

int main(void) {
    hr_layer layers[LAYERS] = {layer(), layer()};
    hr_model model = {.layers = layers, .norm = floats(HIDDEN), .rope_cos = floats(CONTEXT * DIM / 2),
                      .rope_sin = floats(CONTEXT * DIM / 2), .head = linear(VOCAB, HIDDEN), .layer_count = LAYERS, .hidden = HIDDEN,
                      .heads = HEADS, .kv_heads = KV_HEADS, .head_dim = DIM, .intermediate = MLP, .vocab = VOCAB,
                      .context = CONTEXT, .embed_dtype = HR_F16, .kv_dtype = HR_F16, .blocks = BLOCKS, .eps = 1e-5f};
    model.embed = model.head.weight;
    model.kv = keep(BLOCKS * hr_block_bytes(LAYERS, KV_HEADS, DIM, HR_F16));
    int good = check(&model);
    puts(good ? "equal" : "different");
    return !good;
}
