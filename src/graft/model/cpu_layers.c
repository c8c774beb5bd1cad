/* Decoder layers that a description tells (`network.py`), and those of EAGLE-3 heads. `cpu_linear.c` includes this file,
   which uses its products.

   Each operation rounds as transformers' modules do, up to the order of sums. A token's result does not depend on the
   other tokens of the step, except through the keys and values that it sees. */

#define PAGE 64     /* tokens of a page of the KV cache */
#define QUERIES 4   /* that read a key together */
#define TOGETHER 32 /* queries that read a page together: a multiple of QUERIES */
#define MAX_DIM 512
#define MAX_EXPERTS 512

const long graft_page = PAGE;
const long graft_max_dim = MAX_DIM;
const long graft_max_experts = MAX_EXPERTS;

typedef struct { /* the order is that of `cpu_layers.py`, as in the structures below */
    const float *weight;  /* [n][k]; NULL if it is stored in another order */
    const void *w;        /* its packed copy */
    const float *bias;    /* [n]; may be NULL */
    long n, k, is_bfloat16;
} Matrix;

typedef struct {
    const float *weight, *bias; /* [repeats][size]; may be NULL */
    double eps;
    long size, repeats;         /* so many numbers are normed together; 0: there is no norm */
    long is_layer, plus_one;    /* a layer norm, else an RMS norm; the weight is stored minus 1 */
} Norm;

enum { SOFTMAX, SIGMOID, SOFTMAX_OF_CHOSEN }; /* in the order of `network.Router.scoring` */

typedef struct { /* see `network.Experts` */
    Matrix router, shared_gate;
    const float *correction;             /* [num_experts]; may be NULL */
    const Matrix *gates, *ups, *downs;   /* [num_experts] */
    double least_sum, added_to_sum, factor, limit, alpha;
    long num_experts, top_k, groups, top_groups, scoring, normalise, activation;
} Experts;

typedef struct {
    Matrix q, k, v, o;               /* no v: values are the keys before norm and rotation; no k: those of `kv_of` */
    Matrix gate, up, down;           /* no up: the activation is not gated. Of a shared expert, if there are experts */
    const Experts *experts;          /* may be NULL */
    Matrix side_up, side_down;       /* of the layer's side, which reads `sides`; or none */
    Norm pre, post, pre_mlp, post_mlp, side_post, q_norm, k_norm, v_norm;
    Norm stream_norm;                /* of a head's layer: q, k and v read embeddings, normed by `pre`, and beside them
                                        the stream, normed by this */
    const float *sinks;              /* [heads] scores of an extra key whose value is 0; or NULL */
    double scale, softcap;           /* of scores; no cap: 0 */
    double growth;                   /* queries grow by this times log(1 + position / growth_length) */
    double residual_scale, output_scale;
    long heads, kv_heads, head_dim, window, chunk, growth_length;
    long kv_of;                      /* the layer whose keys and values are read */
    long rotary, rotary_dims, is_interleaved, norms_turned;  /* rotary: its table, or -1 */
    long activation, side_activation, is_parallel;
} Layer;

typedef struct {
    const Layer *layers;
    Norm norm;                   /* the last one */
    const Norm *feature_norms;   /* of a head: of equal parts of the target's features, or of all; or none */
    Matrix fc;                   /* of a head, from these features to the stream */
    long num_feature_norms, num_layers, hidden;
    long adds_to_normed;         /* in a head's layer, attention is added to the normed stream */
    Matrix output;               /* gives the logits; or none */
    double logit_scale, logit_softcap;
    Matrix side_projection;      /* of embeddings, to all layers' sides; or none */
    Norm side_norm;
    double side_projection_scale, side_factor;
} Model;

typedef struct {
    const float *cos, *sin; /* [positions][dims / 2] */
    long num_positions;
} Rotary;

typedef struct {
    long first, count;        /* the row's tokens in this step */
    long num_own, length;     /* num_own: keys of the step, masked by `seen`; length: keys before them, seen by all */
    const int64_t *pages;     /* of all keys */
    const uint8_t *seen;      /* [count][num_own] */
} Row;

typedef struct {
    const Row *rows;
    long num_rows, num_tokens;
    long first_layer, end_layer;
    const float *features;    /* [tokens][inputs of fc]: the stream is made from them; or NULL */
    const float *embeddings;  /* [tokens][hidden] that a head, or layers' sides, read beside the stream; or NULL */
    float *sides;             /* [tokens][layers][size] of the tokens, overwritten by the inputs of sides; or NULL */
    float *stream;            /* [tokens][hidden]: embeddings, or a head's hidden states; overwritten by the outputs */
    const Rotary *rotaries;
    const int64_t *positions, *slots; /* [tokens] */
    float *const *keys, *const *values; /* of each layer, [slots][kv_heads][head_dim] */
    const int64_t *taps;      /* layers whose inputs are wanted; num_layers means the normed output */
    long num_taps;
    const int64_t *outputs;   /* ascending: tokens whose outputs are wanted, `rows` then lists only these; NULL: all */
    long num_outputs;
    float *tapped;            /* [tokens][taps][hidden] */
    float *out;               /* [outputs][hidden] normed output */
    float *logits;            /* [outputs][vocabulary]; or NULL */
    float *scratch;           /* see graft_layers_scratch */
} Step;

typedef struct {
    const Model *model;
    const Step *step;
    const Threads *threads;
    long num_tokens; /* in the stream */
    float *normed, *delta, *q, *k, *v, *attended, *gate, *up, *sided;
    float *routed, *weights, *pairs; /* of experts: logits, weights of the chosen, inputs and results by expert */
    int32_t *chosen, *places;        /* a token's experts, and where their pairs are */
    /* What the threads do now: */
    Job *jobs;
    long num_jobs, activation, together; /* so many jobs have the same panels done by the same thread */
    const Experts *experts;
    const Layer *layer;
    const float *keys, *values;
} State;

/* Norm parts of `count` numbers. `out` may be `x`. */
static void norm_into(float *out, const float *x, const Norm *norm, long count) {
    const long size = norm->size;
    for (long part = 0; part < count / size; part++, x += size, out += size) {
        const long turn = part % norm->repeats * size;
        const float *source = x;
        vec sums = {0};
        if (norm->is_layer) {
            for (long i = 0; i < size; i += LANES) sums += load(x + i, size - i);
            const float mean = sum_of(sums) / (float)size;
            for (long i = 0; i < size; i += LANES) store(out + i, load(x + i, size - i) - mean, size - i);
            source = out, sums = (vec){0};
        }
        for (long i = 0; i < size; i += LANES) {
            const vec y = load(source + i, size - i);
            sums += y * y;
        }
        const float inverse = 1.0f / sqrtf(sum_of(sums) / (float)size + (float)norm->eps);
        for (long i = 0; i < size; i += LANES) {
            vec y = load(source + i, size - i) * inverse;
            if (norm->weight != NULL) y *= load(norm->weight + turn + i, size - i) + (float)norm->plus_one;
            if (norm->bias != NULL) y += load(norm->bias + turn + i, size - i);
            store(out + i, y, size - i);
        }
    }
}

static void run(const State *state, void (*stage)(void *), long is_large) {
    if (is_large && state->threads != NULL) state->threads->parallel(stage, (void *)state, 0, 0);
    else {
        State alone = *state;
        alone.threads = NULL;
        stage(&alone);
    }
}

/* This thread's part of `count` things. */
static void share_of(const State *state, long count, long *first, long *last) {
    const long thread = state->threads ? state->threads->thread_num() : 0;
    const long num_threads = state->threads ? state->threads->num_threads() : 1;
    *first = count * thread / num_threads;
    *last = count * (thread + 1) / num_threads;
}

static Job job_of(const Matrix *matrix, const float *x, float *y, long m) {
    return (Job){matrix->w, x, y, matrix->bias, matrix->n, matrix->k, m, matrix->is_bfloat16, NULL};
}

static long panels_of(const Job *job) { return (job->n + PANEL - 1) / PANEL; }

static inline vec smaller(vec x, float most) { return -larger(-x, (vec){0} - most); }

/* activation(gate) * up of some panels, in the place of gate. up may be NULL. */
static void activate(const State *state, const Job *gate, const Job *up, long first, long last) {
    const Experts *experts = state->experts;
    const float limit = experts != NULL ? (float)experts->limit : 0, alpha = experts != NULL ? (float)experts->alpha : 0;
    const long begin = first * PANEL, end = last * PANEL < gate->n ? last * PANEL : gate->n;
    for (long t = 0; t < gate->m; t++) {
        float *g = gate->y + t * gate->n;
        const float *u = up != NULL ? up->y + t * up->n : NULL;
        for (long i = begin; i < end; i += LANES) {
            vec y = load(g + i, end - i), z = u != NULL ? load(u + i, end - i) : (vec){0} + 1.0f;
            if (limit > 0) {
                y = smaller(y, limit), z = larger(smaller(z, limit), (vec){0} - limit) + 1.0f;
                y = y / (exp_of(y * -alpha) + 1.0f);
            } else y = activated(y, state->activation);
            store(g + i, y * z, end - i);
        }
    }
}

/* Scale and cap logits of some panels. */
static void finish_logits(const Model *model, const Job *job, long first, long last) {
    const long begin = first * PANEL, end = last * PANEL < job->n ? last * PANEL : job->n;
    const float scale = (float)model->logit_scale, cap = (float)model->logit_softcap;
    for (long t = 0; t < job->m; t++)
        for (long i = begin; i < end; i += LANES) {
            float *at = job->y + t * job->n + i;
            const vec y = load(at, end - i) * scale;
            store(at, cap > 0 ? tanh_of(y / cap) * cap : y, end - i);
        }
}

/* The panels of all jobs are shared out among the threads. Gates and ups are done together, then their activation. */
static void multiply_share(void *data) {
    const State *state = data;
    const Model *model = state->model;
    const long together = state->together;
    long total = 0, first, last, before = 0;
    for (long j = 0; j < state->num_jobs; j += together) total += panels_of(&state->jobs[j]);
    share_of(state, total, &first, &last);
    for (long j = 0; j < state->num_jobs && before < last; j += together) {
        const Job *job = &state->jobs[j];
        const long panels = panels_of(job);
        const long begin = first > before ? first - before : 0, end = last - before < panels ? last - before : panels;
        before += panels;
        if (begin >= end) continue;
        for (long i = 0; i < together; i++) multiply_panels(job + i, begin, end);
        if (state->activation != NONE) activate(state, job, together > 1 ? job + 1 : NULL, begin, end);
        if (job->y == state->step->logits && (model->logit_scale != 1 || model->logit_softcap > 0))
            finish_logits(model, job, begin, end);
    }
}

/* Start the list of products with another one, or add to it. A matrix without outputs is left out. */
static void plan(State *state, long is_first, const Matrix *matrix, const float *x, float *y) {
    if (is_first) state->num_jobs = 0;
    if (matrix->n > 0) state->jobs[state->num_jobs++] = job_of(matrix, x, y, state->num_tokens);
}

static void multiply_all(State *state, long activation, long together) {
    long work = 0;
    state->activation = activation, state->together = together;
    for (long j = 0; j < state->num_jobs; j++) work += state->jobs[j].n * state->jobs[j].k * state->jobs[j].m;
    run(state, multiply_share, work >= SMALL);
}

static void multiply(State *state, const Matrix *matrix, const float *x, float *y) {
    plan(state, 1, matrix, x, y);
    multiply_all(state, NONE, 1);
}

#include "cpu_attention.c"

/* Rotate heads [heads][dim] of a token. */
static void rotate(float *x, const Layer *layer, long heads, const Rotary *rotaries, int64_t position) {
    if (layer->rotary < 0) return;
    const Rotary *rotary = &rotaries[layer->rotary];
    const long half = layer->rotary_dims / 2, last = rotary->num_positions - 1;
    const float *cos = rotary->cos + (position < last ? position : last) * half;
    const float *sin = rotary->sin + (position < last ? position : last) * half;
    for (long head = 0; head < heads; head++, x += layer->head_dim) {
        for (long d = 0; d < half && layer->is_interleaved; d++) {
            const float a = x[2 * d], b = x[2 * d + 1];
            x[2 * d] = a * cos[d] - b * sin[d], x[2 * d + 1] = b * cos[d] + a * sin[d];
        }
        for (long d = 0; d < half && !layer->is_interleaved; d += LANES) {
            const vec a = load(x + d, half - d), b = load(x + half + d, half - d);
            const vec c = load(cos + d, half - d), s = load(sin + d, half - d);
            store(x + d, a * c - b * s, half - d), store(x + half + d, b * c + a * s, half - d);
        }
    }
}

/* Norm and rotate heads of a token, in the layer's order. */
static void place_heads(
    float *x, const Layer *layer, const Norm *norm, long heads, const Rotary *rotaries, int64_t position) {
    const long size = heads * layer->head_dim;
    if (layer->norms_turned) rotate(x, layer, heads, rotaries, position);
    if (norm->size > 0) norm_into(x, x, norm, size);
    if (!layer->norms_turned) rotate(x, layer, heads, rotaries, position);
}

static void add(float *x, const float *y, float scale, long size) {
    for (long i = 0; i < size; i += LANES) store(x + i, load(x + i, size - i) + load(y + i, size - i) * scale, size - i);
}

#include "cpu_experts.c"

/* Make a head's stream from the target's features. */
static void fuse_features(State *state) {
    const Model *model = state->model;
    const long m = state->num_tokens, size = model->fc.k, count = model->num_feature_norms;
    const float *features = state->step->features;
    if (count > 0) {
        const long part = size / count;
        for (long i = 0; i < m * count; i++)
            norm_into(state->normed + i * part, features + i * part, &model->feature_norms[i % count], part);
        features = state->normed;
    }
    multiply(state, &model->fc, features, state->step->stream);
}

/* Make the inputs of the layers' sides. */
static void make_sides(State *state) {
    const Model *model = state->model;
    const Step *step = state->step;
    const long size = state->num_tokens * model->side_projection.n;
    multiply(state, &model->side_projection, step->embeddings ? step->embeddings : step->stream, state->sided);
    for (long i = 0; i < size; i++) state->sided[i] *= (float)model->side_projection_scale;
    norm_into(state->sided, state->sided, &model->side_norm, size);
    for (long i = 0; i < size; i++) step->sides[i] = (state->sided[i] + step->sides[i]) * (float)model->side_factor;
}

/* The stream, normed if there is a norm. */
static const float *normed_stream(const State *state, const Norm *norm) {
    if (norm->size == 0) return state->step->stream;
    norm_into(state->normed, state->step->stream, norm, state->num_tokens * norm->size);
    return state->normed;
}

/* What q, k and v read. */
static const float *inputs_of(const State *state, const Layer *layer) {
    const Step *step = state->step;
    const long hidden = state->model->hidden;
    if (layer->stream_norm.size == 0) return normed_stream(state, &layer->pre);
    for (long t = 0; t < state->num_tokens; t++) {
        float *stream = step->stream + t * hidden, *inputs = state->normed + t * layer->q.k;
        norm_into(inputs, step->embeddings + t * hidden, &layer->pre, hidden);
        norm_into(inputs + hidden, stream, &layer->stream_norm, hidden);
        if (state->model->adds_to_normed) memcpy(stream, inputs + hidden, (size_t)hidden * sizeof(float));
    }
    return state->normed;
}

/* Add what attention or the MLP gave to the stream. */
static void add_delta(const State *state, const Layer *layer, const Norm *post) {
    const long size = state->num_tokens * state->model->hidden;
    if (post->size > 0) norm_into(state->delta, state->delta, post, size);
    add(state->step->stream, state->delta, (float)layer->residual_scale, size);
}

/* Go on with only those tokens whose outputs are wanted. */
static void keep_outputs(State *state, const Layer *layer) {
    const Step *step = state->step;
    const long hidden = state->model->hidden;
    float *kept[] = {state->q, step->stream, state->normed};
    const long sizes[] = {layer->heads * layer->head_dim, hidden, layer->q.k};
    for (int part = 0; part < 3; part++)
        for (long i = 0; i < step->num_outputs; i++)
            memmove(kept[part] + i * sizes[part], kept[part] + step->outputs[i] * sizes[part],
                    (size_t)sizes[part] * sizeof(float));
    state->num_tokens = step->num_outputs;
}

/* Write queries, keys and values of the layer's tokens, the last two to the KV cache. */
static void make_heads(State *state, const Layer *layer, const float *inputs) {
    const Step *step = state->step;
    const long size = layer->heads * layer->head_dim, kv_size = layer->kv_heads * layer->head_dim;
    plan(state, 1, &layer->q, inputs, state->q);
    plan(state, 0, &layer->k, inputs, state->k);
    plan(state, 0, &layer->v, inputs, state->v);
    multiply_all(state, NONE, 1);
    for (long t = 0; t < state->num_tokens; t++) {
        float *q = state->q + t * size, *k = state->k + t * kv_size;
        const int64_t position = step->positions[t];
        place_heads(q, layer, &layer->q_norm, layer->heads, step->rotaries, position);
        if (layer->growth_length > 0) {
            const float grown = logf(1.0f + (float)(position / layer->growth_length));
            for (long i = 0; i < size; i++) q[i] *= 1.0f + (float)layer->growth * grown;
        }
        if (layer->k.n == 0) continue;
        float *key = state->step->keys[layer->kv_of] + step->slots[t] * kv_size;
        float *value = state->step->values[layer->kv_of] + step->slots[t] * kv_size;
        memcpy(value, layer->v.n > 0 ? state->v + t * kv_size : k, (size_t)kv_size * sizeof(float));
        memcpy(key, k, (size_t)kv_size * sizeof(float));
        if (layer->v_norm.size > 0) norm_into(value, value, &layer->v_norm, kv_size);
        place_heads(key, layer, &layer->k_norm, layer->kv_heads, step->rotaries, position);
    }
}

/* A layer's last part: down(activation(up(stream)) * its own input). */
static void run_side(State *state, const Layer *layer, long number) {
    const long size = layer->side_up.n, num_layers = state->model->num_layers;
    multiply(state, &layer->side_up, state->step->stream, state->gate);
    for (long t = 0; t < state->num_tokens; t++) {
        const float *side = state->step->sides + (t * num_layers + number) * size;
        float *gate = state->gate + t * size;
        for (long i = 0; i < size; i += LANES)
            store(gate + i, activated(load(gate + i, size - i), layer->side_activation) * load(side + i, size - i), size - i);
    }
    multiply(state, &layer->side_down, state->gate, state->delta);
    add_delta(state, layer, &layer->side_post);
}

static void run_layer(State *state, long number) {
    const Model *model = state->model;
    const Step *step = state->step;
    const Layer *layer = &model->layers[number];
    const float *inputs = inputs_of(state, layer);
    make_heads(state, layer, inputs);
    /* For the other tokens, the last layer's keys and values are enough. */
    if (step->outputs != NULL && number == model->num_layers - 1) keep_outputs(state, layer);
    state->layer = layer, state->keys = step->keys[layer->kv_of], state->values = step->values[layer->kv_of];
    run(state, attend_share, 1);
    multiply(state, &layer->o, state->attended, state->delta);
    add_delta(state, layer, &layer->post);
    if (!layer->is_parallel) inputs = normed_stream(state, &layer->pre_mlp);
    if (layer->gate.n > 0) {
        plan(state, 1, &layer->gate, inputs, state->gate);
        plan(state, 0, &layer->up, inputs, state->up);
        multiply_all(state, layer->activation, state->num_jobs);
        multiply(state, &layer->down, state->gate, state->delta);
    }
    if (layer->experts != NULL) run_experts(state, layer, inputs);
    add_delta(state, layer, &layer->post_mlp);
    if (layer->side_up.n > 0) run_side(state, layer, number);
    for (long i = 0; i < state->num_tokens * model->hidden && layer->output_scale != 1; i++)
        step->stream[i] *= (float)layer->output_scale;
}

static long largest(long a, long b) { return a > b ? a : b; }

/* Divide scratch memory: for each part, the most numbers of a token that a layer has there. Returns its whole size. */
static long divide(const Model *model, long num_tokens, State *state, float *scratch) {
    long sizes[14] = {model->fc.k, model->hidden, 0, 0, 0, 0, 0, 0, model->side_projection.n}, total = 0;
    for (long i = 0; i < model->num_layers; i++) {
        const Layer *layer = &model->layers[i];
        const Experts *experts = layer->experts;
        const long size = layer->heads * layer->head_dim, kv_size = layer->kv_heads * layer->head_dim;
        const long top_k = experts != NULL ? experts->top_k : 0;
        const long neurons = experts != NULL ? top_k * experts->downs[0].k : 0;
        const long own[14] = {layer->q.k, 0, size, size, kv_size, kv_size,
                              largest(neurons, largest(layer->gate.n, layer->side_up.n)), largest(neurons, layer->up.n), 0,
                              experts != NULL ? experts->num_experts : 0, top_k, top_k * model->hidden, top_k, top_k};
        for (int part = 0; part < 14; part++) sizes[part] = largest(sizes[part], own[part]);
    }
    float *found[14];
    for (int part = 0; part < 14; total += num_tokens * sizes[part++]) found[part] = scratch ? scratch + total : NULL;
    state->normed = found[0], state->delta = found[1], state->q = found[2], state->attended = found[3];
    state->k = found[4], state->v = found[5], state->gate = found[6], state->up = found[7], state->sided = found[8];
    state->routed = found[9], state->weights = found[10], state->pairs = found[11];
    state->chosen = (int32_t *)found[12], state->places = (int32_t *)found[13];
    return total;
}

/* Numbers of scratch memory for a step of so many tokens. */
long graft_layers_scratch(const Model *model, long num_tokens) {
    State state;
    return divide(model, num_tokens, &state, NULL);
}

static int is_current(const Matrix *matrix) {
    return matrix->weight == NULL || is_copy_of(matrix->weight, matrix->w, matrix->n, matrix->k, matrix->is_bfloat16);
}

/* Run layers, the last norm, and the product that gives logits, if they are wanted. A head's stream is first made from
   features, if they are given. Returns 1, and does nothing, if a weight is seen to have changed since it was packed.
   threads may be NULL. */
int graft_layers(const Model *model, const Step *step, const Threads *threads) {
    for (long i = step->first_layer; i < step->end_layer; i++) {
        const Layer *layer = &model->layers[i];
        const Matrix *all[] = {&layer->q, &layer->k, &layer->v, &layer->o, &layer->gate, &layer->up, &layer->down,
                               &layer->side_up, &layer->side_down};
        for (int j = 0; j < 9; j++)
            if (!is_current(all[j])) return 1;
        const Experts *experts = layer->experts; /* of which the first stands for all */
        if (experts == NULL) continue;
        const Matrix *some[] = {&experts->router, experts->gates, experts->ups, experts->downs};
        for (int j = 0; j < 4; j++)
            if (!is_current(some[j])) return 1;
    }
    if (step->features != NULL && !is_current(&model->fc)) return 1;
    if (step->sides != NULL && !is_current(&model->side_projection)) return 1;
    if (step->logits != NULL && !is_current(&model->output)) return 1;
    const long hidden = model->hidden;
    Job jobs[2 * MAX_EXPERTS];
    State state = {model, step, threads, step->num_tokens};
    state.jobs = jobs;
    divide(model, step->num_tokens, &state, step->scratch);
    if (step->features != NULL) fuse_features(&state);
    if (step->sides != NULL) make_sides(&state);
    for (long number = step->first_layer; number <= step->end_layer; number++) {
        const float *source = step->stream;
        if (number == step->end_layer) {
            norm_into(step->out, step->stream, &model->norm, state.num_tokens * hidden);
            source = step->out;
        }
        for (long i = 0; i < step->num_taps; i++)
            if (step->taps[i] == number)
                for (long t = 0; t < state.num_tokens; t++)
                    memcpy(step->tapped + (t * step->num_taps + i) * hidden, source + t * hidden,
                           (size_t)hidden * sizeof(float));
        if (number < step->end_layer) run_layer(&state, number);
    }
    if (step->logits != NULL) multiply(&state, &model->output, step->out, step->logits);
    return 0;
}
