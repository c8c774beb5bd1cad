/* Attention of a step's tokens over a paged KV cache. `cpu_layers.c` includes this file. */

/* Keys of which the products with all queries fit into the registers of a processor. */
#if LANES == 16 || defined(__aarch64__)
#define KEYS 4
#else
#define KEYS 2
#endif

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
    long start;                          /* position of the first key that it sees */
    float highest, total, sums[MAX_DIM]; /* of full pages: highest score, and sums of weights and weighted values */
    long place, num_keys;                /* of the page that it fills: position of the first key, and number of keys */
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

/* Turn a page's scores into weights, and scale what was summed before to the new highest score. The first `hidden` keys
   are not seen. Never inlined, so that it rounds alike wherever it is called. */
static __attribute__((noinline)) void weigh(
    const Layer *layer, Query *query, float *scores, long hidden, long count) {
    const float scale = (float)layer->scale, cap = (float)layer->softcap;
    vec most = (vec){0} + query->highest;
    for (long j = count; j < PAGE; j++) scores[j] = 0;
    UNROLL for (long j = 0; j < PAGE; j += LANES) *(vec *)(scores + j) *= scale;
    for (long j = 0; j < PAGE && cap > 0; j += LANES) *(vec *)(scores + j) = tanh_of(*(vec *)(scores + j) / cap) * cap;
    for (long j = 0; j < hidden; j++) scores[j] = -INFINITY;
    for (long j = count; j < PAGE; j++) scores[j] = -INFINITY;
    UNROLL for (long j = 0; j < PAGE; j += LANES) most = larger(*(vec *)(scores + j), most);
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
        for (long d = 0; d < layer->head_dim; d++) query->sums[d] *= factor;
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

/* Sum a page whose first key is at this position, for one query. */
static void sum_page(
    const Layer *layer, Query *query, float *scores, const float *const *values, long place, long count) {
    const long hidden = query->start > place ? query->start - place : 0;
    if (hidden >= count) return;
    weigh(layer, query, scores, hidden, count);
    add_values(1, query, (float(*)[PAGE])scores, values, count, layer->head_dim);
}

/* Sum the page that a query has filled. */
static void finish_page(const Layer *layer, Query *query) {
    sum_page(layer, query, query->scores, query->values, query->place, query->num_keys);
    query->place += query->num_keys, query->num_keys = 0;
}

/* The position of the first key that a query at this position sees. */
static long first_seen(const Layer *layer, long position) {
    if (layer->chunk > 0) return position / layer->chunk * layer->chunk;
    return layer->window > 0 && position >= layer->window ? position - layer->window + 1 : 0;
}

/* Attention of up to TOGETHER queries of one row, which share a key head.

   A query sees the keys of the text, then those of its path in the step, from its window's start on. Pages are filled
   with them in this order, so a token gets the same bits in a tree, and in a step that follows its path. */
static void attend(const State *state, const Row *row, long kv_head, long first, long num_queries) {
    const Layer *layer = state->layer;
    const long dim = layer->head_dim, group = layer->heads / layer->kv_heads, stride = layer->kv_heads * dim;
    const float *keys[PAGE], *values[PAGE];
    float turned[MAX_DIM * PAGE], scores[QUERIES][PAGE];
    Query queries[TOGETHER];
    for (long i = 0; i < TOGETHER; i++) { /* surplus ones repeat the last */
        const long number = first + (i < num_queries ? i : num_queries - 1), token = number / group;
        const long head = kv_head * group + number % group, at = ((row->first + token) * layer->heads + head) * dim;
        Query *query = &queries[i];
        query->query = state->q + at, query->out = state->attended + at, query->seen = row->seen + token * row->num_own;
        query->highest = -INFINITY, query->total = 0, query->num_keys = 0;
        if (layer->sinks != NULL) query->highest = layer->sinks[head], query->total = 1; /* a key whose value is 0 */
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
    const int is_local = layer->window > 0 || layer->chunk > 0;
    long begin = is_local ? length : 0; /* of what a query sees */
    for (long i = 0; i < TOGETHER; i++) {
        long position = row->length - 1;
        for (long key = 0; key < row->num_own && is_local; key++) position += queries[i].seen[key];
        queries[i].start = is_local ? first_seen(layer, position) : 0, queries[i].place = length / PAGE * PAGE;
        if (queries[i].start < begin) begin = queries[i].start;
    }
    for (long start = begin / PAGE * PAGE; start < end; start += PAGE) {
        const long count = end - start < PAGE ? end - start : PAGE;
        for (long j = 0; j < count; j++) {
            const long at = (row->pages[start / PAGE] * PAGE + j) * stride + kv_head * dim;
            keys[j] = state->keys + at, values[j] = state->values + at;
        }
        turn(keys, count, dim, turned);
        for (long block = 0; block < num_queries; block += QUERIES) {
            Query *own = queries + block;
            const long num_own = num_queries - block < QUERIES ? num_queries - block : QUERIES;
            long starts_later = 0;
            for (long i = 0; i < num_own; i++) starts_later |= own[i].start > start;
            score(own, turned, count, dim, scores);
            if (start + PAGE <= length) { /* the same page for all */
                for (long i = 0; i < num_own && starts_later; i++)
                    sum_page(layer, &own[i], scores[i], values, start, PAGE);
                if (starts_later) continue;
                for (long i = 0; i < num_own; i++) weigh(layer, &own[i], scores[i], 0, PAGE);
                add_values(QUERIES, own, scores, values, PAGE, dim);
                continue;
            }
            for (long i = 0; i < num_own; i++)
                for (long j = 0; j < count; j++) {
                    if (start + j >= length && !own[i].seen[start + j - row->length]) continue;
                    if (own[i].num_keys == PAGE) finish_page(layer, &own[i]);
                    own[i].scores[own[i].num_keys] = scores[i][j];
                    own[i].values[own[i].num_keys++] = values[j];
                }
        }
    }
    for (Query *query = queries; query < queries + num_queries; query++) {
        if (query->num_keys > 0) finish_page(layer, query);
        for (long d = 0; d < dim; d++) query->out[d] = query->sums[d] / query->total;
    }
}

static void attend_share(void *data) {
    const State *state = data;
    const Step *step = state->step;
    const long group = state->layer->heads / state->layer->kv_heads;
    long total = 0, first, last, before = 0;
    for (long r = 0; r < step->num_rows; r++)
        total += (step->rows[r].count * group + QUERIES - 1) / QUERIES * state->layer->kv_heads;
    share_of(state, total, &first, &last);
    for (long r = 0; r < step->num_rows && before < last; r++) {
        const Row *row = &step->rows[r];
        const long num_queries = row->count * group, blocks = (num_queries + QUERIES - 1) / QUERIES;
        for (long head = 0; head < state->layer->kv_heads; head++, before += blocks) {
            const long begin = first > before ? first - before : 0;
            const long end = (last - before < blocks ? last - before : blocks) * QUERIES;
            for (long query = begin * QUERIES; query < end && query < num_queries; query += TOGETHER) {
                const long stop = query + TOGETHER < end ? query + TOGETHER : end;
                attend(state, row, head, query, (stop < num_queries ? stop : num_queries) - query);
            }
        }
    }
}
