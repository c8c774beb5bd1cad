/* Decoder layers of Llama-like models and of EAGLE-3 heads. `cpu_linear.c` includes this file, which uses its products.

   Each operation rounds as transformers' modules do, up to the order of sums. A token's result does not depend on the
   other tokens of the step, except through the keys and values that it sees. */

#include <math.h>

#define PAGE 64     /* tokens of a page of the KV cache */
#define QUERIES 4   /* that read a key together */
#define TOGETHER 32 /* queries that read a page together: a multiple of QUERIES */
#define MAX_DIM 256

#define ALWAYS_INLINE inline __attribute__((always_inline))

/* Keys of which the products with all queries fit into the registers of a processor. */
#if LANES == 16 || defined(__aarch64__)
#define KEYS 4
#else
#define KEYS 2
#endif

/* Lanes of two vectors by their numbers; the second's begin at LANES. */
#if defined(__clang__)
static inline vec pick(vec a, vec b, words lanes) {
    vec picked;
    UNROLL for (int i = 0; i < LANES; i++) picked[i] = lanes[i] < LANES ? a[lanes[i]] : b[lanes[i] - LANES];
    return picked;
}
#else
#define pick __builtin_shuffle
#endif

const long graft_page = PAGE;
const long graft_max_dim = MAX_DIM;

typedef struct {
    const float *weight;  /* [n][k] */
    const void *w;        /* its packed copy */
    long n, k, is_bfloat16;
} Matrix;

typedef struct { /* the order is that of `cpu_layers.py`, as in the structures below */
    Matrix q, k, v, o, gate, up, down;
    const float *q_bias, *k_bias, *v_bias;      /* may be NULL */
    const float *input_norm, *attention_norm;   /* [hidden] */
    const float *q_norm, *k_norm;               /* [head_dim]; may be NULL */
    const float *stream_norm;                   /* [hidden] of a head's layer, else NULL: q, k and v read embeddings,
                                                   by input_norm, and beside them the stream, by this */
} Layer;

typedef struct {
    const Layer *layers;
    const float *norm; /* the last one */
    const float *const *feature_norms; /* of a head: of equal parts of the target's features, or of all; or none */
    Matrix fc;                         /* of a head, from these features to the stream */
    long num_feature_norms, num_layers, hidden, heads, kv_heads, head_dim, neurons;
    long adds_to_normed;               /* in a head's layer, attention is added to the normed stream */
    double eps, head_eps, scale;
    Matrix output;                     /* gives the logits; or none */
} Model;

typedef struct {
    long first, count;        /* the row's tokens in this step */
    long num_own, length;     /* keys of which each token sees some; before them, keys that all its tokens see */
    const int64_t *pages;     /* of all keys */
    const uint8_t *seen;      /* [count][num_own] */
} Row;

typedef struct {
    const Row *rows;
    long num_rows, num_tokens;
    const float *features;    /* [tokens][inputs of fc]: the stream is made from them; or NULL */
    const float *embeddings;  /* [tokens][hidden] of the tokens that a head reads beside the stream; or NULL */
    float *stream;            /* [tokens][hidden]: embeddings, or a head's hidden states; overwritten by the outputs */
    const float *cos, *sin;   /* [tokens][head_dim] */
    const int64_t *slots;     /* [tokens] */
    float *keys, *values;     /* [layers][slots][kv_heads][head_dim] */
    long layer_stride;        /* numbers of a layer in them */
    const int64_t *taps;      /* layers whose inputs are wanted; num_layers means the normed output */
    long num_taps;
    const int64_t *outputs;   /* ascending: tokens whose outputs are wanted, `rows` then lists only these; NULL: all */
    long num_outputs;
    float *tapped;            /* [tokens][taps][hidden] */
    float *out;               /* [outputs][hidden] normed output */
    float *logits;            /* [outputs][vocabulary] */
    float *scratch;           /* see graft_layers_scratch */
} Step;

typedef struct {
    const Model *model;
    const Step *step;
    const Threads *threads;
    long num_tokens; /* in the stream */
    float *normed, *q, *k, *v, *attended, *gate, *up;
    /* What the threads do now: */
    Job jobs[3];
    long num_jobs, is_gated;
    const float *keys, *values;
} State;

/* e to the x, exact to the last bit or two; 0 below -87, and that of 88 above. */
static inline vec exp_of(vec x) {
    const vec zero = {0};
    const words too_small = (words)(x < zero - 87.0f);
    const words too_large = (words)(x > zero + 88.0f);
    x = (vec)(((words)x & ~too_small & ~too_large) | ((words)(zero - 87.0f) & too_small) |
              ((words)(zero + 88.0f) & too_large));
    const vec shifted = x * 1.44269504f + 12582912.0f; /* the low bits are those of the rounded sum */
    const vec n = shifted - 12582912.0f;
    const vec r = (x - n * 0.693359375f) + n * 2.12194440e-4f;
    vec p = r * 1.3888889e-3f + 8.3333333e-3f;
    p = p * r + 4.1666667e-2f;
    p = p * r + 1.6666667e-1f;
    p = p * r + 0.5f;
    p = p * r + 1.0f;
    p = p * r + 1.0f;
    const vec power = (vec)(((words)shifted << 23) + 0x3f800000u);
    return (vec)((words)(p * power) & ~too_small);
}

/* Swap lanes i and i ^ step. step is a literal. */
static ALWAYS_INLINE vec swapped(vec x, uint32_t step) {
    words lanes;
    UNROLL for (uint32_t i = 0; i < LANES; i++) lanes[i] = i ^ step;
    return pick(x, x, lanes);
}

static inline float sum_of(vec x) {
    x += swapped(x, 1);
    x += swapped(x, 2);
    if (LANES > 4) x += swapped(x, 4 % LANES);
    if (LANES > 8) x += swapped(x, 8 % LANES);
    return x[0];
}

static inline vec larger(vec x, vec y) {
    const words is_larger = (words)(x > y);
    return (vec)(((words)x & is_larger) | ((words)y & ~is_larger));
}

static inline float highest_of(vec x) {
    x = larger(x, swapped(x, 1));
    x = larger(x, swapped(x, 2));
    if (LANES > 4) x = larger(x, swapped(x, 4 % LANES));
    if (LANES > 8) x = larger(x, swapped(x, 8 % LANES));
    return x[0];
}

static float inverse_norm(const float *x, long size, double eps) {
    vec sums = {0};
    long i = 0;
    float rest = 0;
    for (; i + LANES <= size; i += LANES) {
        const vec part = *(const vec *)(x + i);
        sums += part * part;
    }
    for (; i < size; i++) rest += x[i] * x[i];
    return 1.0f / sqrtf((sum_of(sums) + rest) / (float)size + (float)eps);
}

static void norm_into(float *out, const float *x, const float *weight, long size, double eps) {
    const float inverse = inverse_norm(x, size, eps);
    for (long i = 0; i < size; i++) out[i] = weight[i] * (x[i] * inverse);
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
    return (Job){matrix->w, x, y, matrix->n, matrix->k, m, matrix->is_bfloat16, NULL};
}

static long panels_of(const Job *job) { return (job->n + PANEL - 1) / PANEL; }

static void activate(const Job *gate, const Job *up, long first, long last) {
    const long begin = first * PANEL, end = last * PANEL < gate->n ? last * PANEL : gate->n;
    for (long t = 0; t < gate->m; t++) {
        float *g = gate->y + t * gate->n;
        const float *u = up->y + t * gate->n;
        long i = begin;
        for (; i + LANES <= end; i += LANES) {
            const vec x = *(vec *)(g + i), zero = {0};
            *(vec *)(g + i) = x / (exp_of(zero - x) + 1.0f) * *(const vec *)(u + i);
        }
        for (; i < end; i++) {
            vec x = {0};
            x[0] = g[i];
            const vec zero = {0};
            g[i] = (x / (exp_of(zero - x) + 1.0f))[0] * u[i];
        }
    }
}

static void multiply_share(void *data) {
    const State *state = data;
    long total = 0, first, last, before = 0;
    const long num_jobs = state->is_gated ? 1 : state->num_jobs;
    for (long j = 0; j < num_jobs; j++) total += panels_of(&state->jobs[j]);
    share_of(state, total, &first, &last);
    for (long j = 0; j < num_jobs; j++) {
        const long panels = panels_of(&state->jobs[j]);
        const long begin = first > before ? first - before : 0, end = last - before < panels ? last - before : panels;
        if (begin < end) {
            multiply_panels(&state->jobs[j], begin, end);
            if (state->is_gated) {
                multiply_panels(&state->jobs[1], begin, end);
                activate(&state->jobs[0], &state->jobs[1], begin, end);
            }
        }
        before += panels;
    }
}

static void multiply_all(State *state, long num_jobs, long is_gated) {
    long work = 0;
    state->num_jobs = num_jobs, state->is_gated = is_gated;
    for (long j = 0; j < num_jobs; j++) work += state->jobs[j].n * state->jobs[j].k * state->jobs[j].m;
    run(state, multiply_share, work >= SMALL);
}

/* A step of a transposition: swaps blocks of STEP lanes. A macro, because the lanes' numbers must be constants. */
#define SWAP_BLOCKS(STEP)                                          \
    if (STEP < LANES) {                                            \
        words low, high;                                           \
        UNROLL for (int i = 0; i < LANES; i++) {                   \
            low[i] = (uint32_t)(i & STEP ? LANES + i - STEP : i);  \
            high[i] = (uint32_t)(i & STEP ? LANES + i : i + STEP); \
        }                                                          \
        UNROLL for (int i = 0; i < LANES; i++) {                   \
            if (i & STEP) continue;                                \
            const vec a = x[i], b = x[(i + STEP) % LANES];         \
            x[i] = pick(a, b, low);                                \
            x[(i + STEP) % LANES] = pick(a, b, high);              \
        }                                                          \
    }

/* Transpose keys, so that a vector holds one number of LANES keys: turned[dim][PAGE]. */
static void turn(const float *const *keys, long count, long dim, float *turned) {
    for (long j = 0; j < count; j += LANES) {
        const float *key[LANES];
        UNROLL for (int i = 0; i < LANES; i++) key[i] = keys[j + i < count ? j + i : count - 1];
        long d = 0;
        for (; d + LANES <= dim; d += LANES) {
            vec x[LANES];
            UNROLL for (int i = 0; i < LANES; i++) x[i] = *(const vec *)(key[i] + d);
            SWAP_BLOCKS(1) SWAP_BLOCKS(2) SWAP_BLOCKS(4) SWAP_BLOCKS(8)
            UNROLL for (int i = 0; i < LANES; i++) *(vec *)(turned + (d + i) * PAGE + j) = x[i];
        }
        for (; d < dim; d++)
            for (int i = 0; i < LANES; i++) turned[d * PAGE + j + i] = key[i][d];
    }
}

/* A query of attention, and what it has summed so far. */
typedef struct {
    const float *query;
    const uint8_t *seen; /* which keys of the step it sees */
    float *out;
    float highest, total, sums[MAX_DIM]; /* of full pages: highest score, and sums of weights and weighted values */
    long num_keys;                       /* of the page that it fills */
    float scores[PAGE];
    const float *values[PAGE];
} Query;

/* Products of QUERIES queries and transposed keys. */
static void score(const Query *queries, const float *turned, long count, long dim, float scores[QUERIES][PAGE]) {
    for (long j = 0; j < count; j += LANES * KEYS) {
        vec products[QUERIES][KEYS];
        UNROLL for (int p = 0; p < QUERIES * KEYS; p++) products[p / KEYS][p % KEYS] = (vec){0};
        for (long d = 0; d < dim; d++) {
            vec parts[KEYS];
            UNROLL for (int n = 0; n < KEYS; n++) parts[n] = *(const vec *)(turned + d * PAGE + j + n * LANES);
            UNROLL for (int i = 0; i < QUERIES; i++) {
                UNROLL for (int n = 0; n < KEYS; n++) products[i][n] += parts[n] * queries[i].query[d];
            }
        }
        UNROLL for (int p = 0; p < QUERIES * KEYS; p++)
            *(vec *)(scores[p / KEYS] + j + p % KEYS * LANES) = products[p / KEYS][p % KEYS];
    }
}

/* Turn a page's scores into weights, and scale what was summed before to the new highest score. Never inlined, so that
   it rounds alike wherever it is called. */
static __attribute__((noinline)) void weigh(Query *query, float *scores, long count, float scale, long dim) {
    for (long j = count; j < PAGE; j++) scores[j] = -INFINITY;
    vec most = (vec){0} + query->highest;
    UNROLL for (long j = 0; j < PAGE; j += LANES) {
        vec *part = (vec *)(scores + j);
        *part *= scale;
        most = larger(*part, most);
    }
    const float highest = highest_of(most);
    vec change = {0}, added = {0};
    change[0] = query->highest - highest;
    const float factor = query->highest == -INFINITY ? 0 : exp_of(change)[0];
    UNROLL for (long j = 0; j < PAGE; j += LANES) {
        vec *part = (vec *)(scores + j);
        *part = exp_of(*part - highest);
        added += *part;
    }
    query->highest = highest, query->total = query->total * factor + sum_of(added);
    if (factor != 1)
        for (long d = 0; d < dim; d++) query->sums[d] *= factor;
}

/* Add weighted values to the sums of queries. num_queries is a literal, so that the sums stay in registers. */
static ALWAYS_INLINE void add_values(
    int num_queries, Query *queries, float (*weights)[PAGE], const float *const *values, long count, long dim) {
    long d = 0;
    for (; d + LANES * KEYS <= dim; d += LANES * KEYS) {
        vec parts[QUERIES][KEYS];
        UNROLL for (int p = 0; p < num_queries * KEYS; p++)
            parts[p / KEYS][p % KEYS] = *(const vec *)(queries[p / KEYS].sums + d + p % KEYS * LANES);
        for (long j = 0; j < count; j++) {
            vec value[KEYS];
            UNROLL for (int n = 0; n < KEYS; n++) value[n] = *(const vec *)(values[j] + d + n * LANES);
            UNROLL for (int i = 0; i < num_queries; i++) {
                UNROLL for (int n = 0; n < KEYS; n++) parts[i][n] += value[n] * weights[i][j];
            }
        }
        UNROLL for (int p = 0; p < num_queries * KEYS; p++)
            *(vec *)(queries[p / KEYS].sums + d + p % KEYS * LANES) = parts[p / KEYS][p % KEYS];
    }
    for (long j = 0; j < count; j++)
        for (int i = 0; i < num_queries; i++)
            for (long rest = d; rest < dim; rest++) queries[i].sums[rest] += values[j][rest] * weights[i][j];
}

/* Sum the page that a query has filled. */
static void finish_page(Query *query, float scale, long dim) {
    weigh(query, query->scores, query->num_keys, scale, dim);
    add_values(1, query, &query->scores, query->values, query->num_keys, dim);
    query->num_keys = 0;
}

/* Attention of up to TOGETHER queries of one row, which share a key head.

   A query sees the keys of the text, then those of its path in the step. Pages are filled with them in this order, so
   a token gets the same bits in a tree, and in a step that follows its path. */
static void attend(const State *state, const Row *row, long kv_head, long first, long num_queries) {
    const Model *model = state->model;
    const long dim = model->head_dim, group = model->heads / model->kv_heads, stride = model->kv_heads * dim;
    const float scale = (float)model->scale, *keys[PAGE], *values[PAGE];
    float turned[MAX_DIM * PAGE], scores[QUERIES][PAGE];
    Query queries[TOGETHER];
    for (long i = 0; i < TOGETHER; i++) { /* surplus ones repeat the last */
        const long number = first + (i < num_queries ? i : num_queries - 1), token = number / group;
        const long at = (row->first + token) * model->heads * dim + (kv_head * group + number % group) * dim;
        Query *query = &queries[i];
        query->query = state->q + at, query->out = state->attended + at, query->seen = row->seen + token * row->num_own;
        query->highest = -INFINITY, query->total = 0, query->num_keys = 0;
        memset(query->sums, 0, (size_t)dim * sizeof(float));
    }
    /* Keys of the step that all see count as text, up to the first that one does not see. */
    long length = row->length, end = row->length;
    for (long key = 0; key < row->num_own; key++) {
        long num_seen = 0;
        for (long i = 0; i < num_queries; i++) num_seen += queries[i].seen[key];
        if (num_seen == num_queries && length == row->length + key) length++;
        if (num_seen > 0) end = row->length + key + 1;
    }
    for (long start = 0; start < end; start += PAGE) {
        const long count = end - start < PAGE ? end - start : PAGE;
        for (long j = 0; j < count; j++) {
            const long at = (row->pages[start / PAGE] * PAGE + j) * stride + kv_head * dim;
            keys[j] = state->keys + at, values[j] = state->values + at;
        }
        turn(keys, count, dim, turned);
        for (long block = 0; block < num_queries; block += QUERIES) {
            Query *own = queries + block;
            const long num_own = num_queries - block < QUERIES ? num_queries - block : QUERIES;
            score(own, turned, count, dim, scores);
            if (start + PAGE <= length) { /* the same page for all */
                for (long i = 0; i < num_own; i++) weigh(&own[i], scores[i], PAGE, scale, dim);
                add_values(QUERIES, own, scores, values, PAGE, dim);
                continue;
            }
            for (long i = 0; i < num_own; i++)
                for (long j = 0; j < count; j++) {
                    if (start + j >= length && !own[i].seen[start + j - row->length]) continue;
                    if (own[i].num_keys == PAGE) finish_page(&own[i], scale, dim);
                    own[i].scores[own[i].num_keys] = scores[i][j];
                    own[i].values[own[i].num_keys++] = values[j];
                }
        }
    }
    for (Query *query = queries; query < queries + num_queries; query++) {
        if (query->num_keys > 0) finish_page(query, scale, dim);
        for (long d = 0; d < dim; d++) query->out[d] = query->sums[d] / query->total;
    }
}

static void attend_share(void *data) {
    const State *state = data;
    const Step *step = state->step;
    const long group = state->model->heads / state->model->kv_heads;
    long total = 0, first, last, before = 0;
    for (long r = 0; r < step->num_rows; r++)
        total += (step->rows[r].count * group + QUERIES - 1) / QUERIES * state->model->kv_heads;
    share_of(state, total, &first, &last);
    for (long r = 0; r < step->num_rows && before < last; r++) {
        const Row *row = &step->rows[r];
        const long num_queries = row->count * group, blocks = (num_queries + QUERIES - 1) / QUERIES;
        for (long head = 0; head < state->model->kv_heads; head++, before += blocks) {
            const long begin = first > before ? first - before : 0;
            const long end = (last - before < blocks ? last - before : blocks) * QUERIES;
            for (long query = begin * QUERIES; query < end && query < num_queries; query += TOGETHER) {
                const long stop = query + TOGETHER < end ? query + TOGETHER : end;
                attend(state, row, head, query, (stop < num_queries ? stop : num_queries) - query);
            }
        }
    }
}

/* Norm, if there is one, and rotate heads [heads][dim] of a token. */
static void rotate(float *x, long heads, long dim, const float *norm, double eps, const float *cos, const float *sin) {
    const long half = dim / 2;
    for (long head = 0; head < heads; head++, x += dim) {
        if (norm != NULL) norm_into(x, x, norm, dim, eps);
        for (long d = 0; d < half; d++) {
            const float a = x[d], b = x[d + half];
            x[d] = a * cos[d] - b * sin[d];
            x[d + half] = b * cos[d + half] + a * sin[d + half];
        }
    }
}

static void add(float *x, const float *y, long size) {
    for (long i = 0; i < size; i++) x[i] += y[i];
}

/* Make a head's stream from the target's features. */
static void fuse_features(State *state) {
    const Model *model = state->model;
    const long m = state->num_tokens, size = model->fc.k, count = model->num_feature_norms;
    const float *features = state->step->features;
    if (count > 0) {
        const long part = size / count;
        for (long i = 0; i < m * count; i++)
            norm_into(state->normed + i * part, features + i * part, model->feature_norms[i % count], part, model->eps);
        features = state->normed;
    }
    state->jobs[0] = job_of(&model->fc, features, state->step->stream, m);
    multiply_all(state, 1, 0);
}

/* Write what q, k and v read. */
static void norm_inputs(const State *state, const Layer *layer) {
    const Model *model = state->model;
    const Step *step = state->step;
    const long hidden = model->hidden;
    for (long t = 0; t < state->num_tokens; t++) {
        float *stream = step->stream + t * hidden, *inputs = state->normed + t * layer->q.k;
        if (layer->stream_norm == NULL) {
            norm_into(inputs, stream, layer->input_norm, hidden, model->eps);
            continue;
        }
        norm_into(inputs, step->embeddings + t * hidden, layer->input_norm, hidden, model->eps);
        norm_into(inputs + hidden, stream, layer->stream_norm, hidden, model->eps);
        if (model->adds_to_normed) memcpy(stream, inputs + hidden, (size_t)hidden * sizeof(float));
    }
}

/* Go on with only those tokens whose outputs are wanted. */
static void keep_outputs(State *state) {
    const Step *step = state->step;
    const long hidden = state->model->hidden, size = state->model->heads * state->model->head_dim;
    for (long i = 0; i < step->num_outputs; i++) {
        memmove(state->q + i * size, state->q + step->outputs[i] * size, (size_t)size * sizeof(float));
        memmove(step->stream + i * hidden, step->stream + step->outputs[i] * hidden, (size_t)hidden * sizeof(float));
    }
    state->num_tokens = step->num_outputs;
}

static void run_layer(State *state, long number) {
    const Model *model = state->model;
    const Step *step = state->step;
    const Layer *layer = &model->layers[number];
    long m = state->num_tokens;
    const long hidden = model->hidden, dim = model->head_dim;
    const long size = model->heads * dim, kv_size = model->kv_heads * dim;
    float *keys = step->keys + number * step->layer_stride, *values = step->values + number * step->layer_stride;

    norm_inputs(state, layer);
    state->jobs[0] = job_of(&layer->q, state->normed, state->q, m);
    state->jobs[1] = job_of(&layer->k, state->normed, state->k, m);
    state->jobs[2] = job_of(&layer->v, state->normed, state->v, m);
    multiply_all(state, 3, 0);
    for (long t = 0; t < m; t++) {
        float *q = state->q + t * size, *k = state->k + t * kv_size, *v = state->v + t * kv_size;
        const float *cos = step->cos + t * dim, *sin = step->sin + t * dim;
        if (layer->q_bias != NULL) add(q, layer->q_bias, size);
        if (layer->k_bias != NULL) add(k, layer->k_bias, kv_size);
        if (layer->v_bias != NULL) add(v, layer->v_bias, kv_size);
        rotate(q, model->heads, dim, layer->q_norm, model->head_eps, cos, sin);
        rotate(k, model->kv_heads, dim, layer->k_norm, model->head_eps, cos, sin);
        memcpy(keys + step->slots[t] * kv_size, k, (size_t)kv_size * sizeof(float));
        memcpy(values + step->slots[t] * kv_size, v, (size_t)kv_size * sizeof(float));
    }
    /* For the other tokens, the last layer's keys and values are enough. */
    if (step->outputs != NULL && number == model->num_layers - 1) keep_outputs(state);
    m = state->num_tokens;
    state->keys = keys, state->values = values;
    run(state, attend_share, 1);
    state->jobs[0] = job_of(&layer->o, state->attended, state->normed, m);
    multiply_all(state, 1, 0);
    for (long t = 0; t < m; t++) {
        float *stream = step->stream + t * hidden, *normed = state->normed + t * hidden;
        add(stream, normed, hidden);
        norm_into(normed, stream, layer->attention_norm, hidden, model->eps);
    }
    state->jobs[0] = job_of(&layer->gate, state->normed, state->gate, m);
    state->jobs[1] = job_of(&layer->up, state->normed, state->up, m);
    multiply_all(state, 2, 1);
    state->jobs[0] = job_of(&layer->down, state->gate, state->normed, m);
    multiply_all(state, 1, 0);
    add(step->stream, state->normed, m * hidden);
}

/* The most numbers of a token that norms write. */
static long width_of(const Model *model) {
    const long inputs = model->layers[0].q.k;
    return model->fc.k > inputs ? model->fc.k : inputs;
}

/* Numbers of scratch memory for a step of so many tokens. */
long graft_layers_scratch(const Model *model, long num_tokens) {
    const long size = model->heads * model->head_dim, kv_size = model->kv_heads * model->head_dim;
    return num_tokens * (width_of(model) + 2 * size + 2 * kv_size + 2 * model->neurons);
}

static int is_current(const Matrix *matrix) {
    return is_copy_of(matrix->weight, matrix->w, matrix->n, matrix->k, matrix->is_bfloat16);
}

/* Run all layers, the last norm, and the product that gives logits, if there is one. A head's stream is first made from
   features, if they are given. Returns 1, and does nothing, if a weight is seen to have changed since it was packed.
   threads may be NULL. */
int graft_layers(const Model *model, const Step *step, const Threads *threads) {
    for (long i = 0; i < model->num_layers; i++) {
        const Layer *layer = &model->layers[i];
        const Matrix *all[] = {&layer->q, &layer->k, &layer->v, &layer->o, &layer->gate, &layer->up, &layer->down};
        for (int j = 0; j < 7; j++)
            if (!is_current(all[j])) return 1;
    }
    if (step->features != NULL && !is_current(&model->fc)) return 1;
    if (model->output.n > 0 && !is_current(&model->output)) return 1;
    const long m = step->num_tokens, hidden = model->hidden;
    const long size = model->heads * model->head_dim, kv_size = model->kv_heads * model->head_dim;
    State state = {model, step, threads, m};
    state.normed = step->scratch;
    state.q = state.normed + m * width_of(model);
    state.attended = state.q + m * size;
    state.k = state.attended + m * size;
    state.v = state.k + m * kv_size;
    state.gate = state.v + m * kv_size;
    state.up = state.gate + m * model->neurons;
    if (step->features != NULL) fuse_features(&state);
    for (long number = 0; number <= model->num_layers; number++) {
        const float *source = step->stream;
        if (number == model->num_layers) {
            for (long t = 0; t < state.num_tokens; t++)
                norm_into(step->out + t * hidden, step->stream + t * hidden, model->norm, hidden, model->eps);
            source = step->out;
        }
        for (long i = 0; i < step->num_taps; i++)
            if (step->taps[i] == number)
                for (long t = 0; t < state.num_tokens; t++)
                    memcpy(step->tapped + (t * step->num_taps + i) * hidden, source + t * hidden,
                           (size_t)hidden * sizeof(float));
        if (number < model->num_layers) run_layer(&state, number);
    }
    if (model->output.n > 0) {
        state.jobs[0] = job_of(&model->output, step->out, step->logits, state.num_tokens);
        multiply_all(&state, 1, 0);
    }
    return 0;
}

static int any_above(const float *x, float least) {
    words above = {0};
    uint64_t parts[LANES / 2], any = 0;
    UNROLL for (int v = 0; v < 4; v++) above |= (words)(*(const vec *)(x + v * LANES) > (vec){0} + least);
    memcpy(parts, &above, sizeof parts);
    for (int i = 0; i < LANES / 2; i++) any |= parts[i];
    return any != 0;
}

/* The k highest of each row of x [m][n], best first, the first of equal ones first. k is at most n.
   sums: [m] of e to the power of x minus the row's highest, or NULL. */
void graft_highest(const float *x, long m, long n, long k, int64_t *numbers, float *values, float *sums) {
    for (long row = 0; row < m; row++, x += n, numbers += k, values += k) {
        long count = 0;
        for (long i = 0; i < n; i += 4 * LANES) {
            const long end = i + 4 * LANES < n ? i + 4 * LANES : n;
            if (count == k && end == i + 4 * LANES && !any_above(x + i, values[k - 1])) continue;
            for (long j = i; j < end; j++) {
                if (count == k && !(x[j] > values[k - 1])) continue;
                long place = count < k ? count++ : k - 1;
                for (; place > 0 && values[place - 1] < x[j]; place--)
                    values[place] = values[place - 1], numbers[place] = numbers[place - 1];
                values[place] = x[j], numbers[place] = j;
            }
        }
        if (sums == NULL) continue;
        vec total = {0};
        long i = 0;
        for (; i + LANES <= n; i += LANES) total += exp_of(*(const vec *)(x + i) - values[0]);
        float rest = 0;
        for (; i < n; i++) rest += exp_of((vec){0} + (x[i] - values[0]))[0];
        sums[row] = sum_of(total) + rest;
    }
}
