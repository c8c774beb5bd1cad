/* The buffers of a round, and what all its kernels do with them: see `tree/device/buffers.py`. */

/* The candidates, [num_rows][capacity]. A place whose path probability is 0 is padding; its columns hold anything. */
typedef struct {
    int32_t *tokens, *parents, *depths, *needs, *sources, *buckets, *agreement;
    int64_t *keys;
    float *paths, *open;
    int32_t *before; /* [2][num_rows] the two tokens before the root */
    int32_t *kept, *is_agreed, *spoke; /* scratch memory of a merge */
    const int64_t *factors; /* [num_factors] hash factors by depth */
    int64_t num_factors, num_rows, capacity;
} Pool;

typedef struct {
    int64_t num_rows, copy_nodes, num_places, first_level, first_copy, first_wave, width, num_waves, beam;
} Shape;

typedef struct {
    const int32_t *own;      /* [num_table_rows][context] */
    const int32_t *lengths;  /* [num_table_rows] */
    const int32_t *past;     /* [ring], a power of two */
    const int64_t *owners;   /* [ring] */
    const int64_t *past_end; /* tokens ever written, and ever dropped */
    int64_t num_table_rows, context, ring;
} Texts;

/* What is known of the rows' next draws. A row of kind 0 is greedy, or its noise is unknown. */
typedef struct {
    const int32_t *kinds;
    const int64_t *seeds;
    const double *powers;  /* [rows][NUM_BUCKETS] */
    const int32_t *barred; /* [rows][num_barred] see `Draws.barred`; NULL: all tokens can be drawn */
    const float *const *times; /* [rows][num_depths] E of all tokens where the noise is not keyed; NULL: all is keyed */
    const int64_t *is_keyed;   /* [rows] read if there are times */
    int64_t num_barred, num_depths;
} Draws;

/* P(accepted | parent accepted), [kinds of rows][agreements][num_sources][num_buckets] */
typedef struct {
    const float *values;
    int64_t num_groups; /* kinds times agreements */
    int64_t num_sources, num_buckets;
} Probs;

/* One row of the candidates: pointers to its columns, and its draws. */
typedef struct {
    int32_t *tokens, *parents, *depths, *needs, *sources, *buckets, *agreement;
    int64_t *keys;
    float *paths;
    const int64_t *factors;
    int64_t num_factors, capacity;
    int32_t before, earlier; /* the two tokens before the root */
    const Draws *draws;
    int64_t number, kind, seed;
    int64_t end; /* tokens of the row's text, which is the position of its next draw */
} Row;

static Row row_of(const Pool *pool, int64_t row, const Draws *draws, int64_t end) {
    int64_t first = row * pool->capacity;
    Row found = {
        pool->tokens + first, pool->parents + first, pool->depths + first, pool->needs + first, pool->sources + first,
        pool->buckets + first, pool->agreement + first, pool->keys + first, pool->paths + first, pool->factors,
        pool->num_factors, pool->capacity, pool->before[row], pool->before[pool->num_rows + row], draws, row,
        draws != NULL ? draws->kinds[row] : 0, draws != NULL ? draws->seeds[row] : 0, end};
    return found;
}

/* Whether the row's draw at a depth may give the token. */
static int can_be_drawn(const Row *row, int64_t depth, int32_t token) {
    if (row->draws == NULL || row->draws->barred == NULL) return 1;
    const int32_t *barred = row->draws->barred + row->number * row->draws->num_barred, *tokens = barred + 3;
    int64_t num_banned = barred[0], most = least(num_banned + barred[1], row->draws->num_barred - 3);
    for (int64_t i = 0; i < most; i++)
        if (tokens[i] == token && (i < num_banned || depth <= barred[2])) return 0;
    return 1;
}

/* E of a token in the row's draw at a depth; see `keyed_time`. */
static double draw_time(const Row *row, int64_t depth, int32_t token) {
    const Draws *draws = row->draws;
    if (draws->times != NULL && !draws->is_keyed[row->number]) {
        const float *times = depth <= draws->num_depths ? draws->times[row->number * draws->num_depths + depth - 1] : NULL;
        return times != NULL ? times[token] : 0.7; /* unknown: about the median */
    }
    return keyed_time(row->seed, row->end + depth - 1, token);
}

static int find_prob(
    const Probs *probs, int64_t kind, int64_t agreement, int64_t source, int64_t bucket, float *prob) {
    int64_t group = kind * NUM_AGREEMENTS + agreement;
    if (source < 0 || source >= probs->num_sources || bucket < 0 || bucket >= probs->num_buckets || group < 0 ||
        group >= probs->num_groups)
        return OUT_OF_RANGE;
    *prob = probs->values[(group * probs->num_sources + source) * probs->num_buckets + bucket];
    return OK;
}

/* Writes a node whose parent is in the pool. prob: P(accepted | parent accepted) */
static int write_node(
    const Row *row, int64_t node, int32_t token, int64_t parent, float prob, int64_t source, int64_t bucket,
    int64_t need) {
    if (node < 0 || node >= row->capacity || parent < 0 || parent >= row->capacity) return OUT_OF_RANGE;
    int64_t depth = row->depths[parent] + 1;
    if (depth < 1 || depth >= row->num_factors) return OUT_OF_RANGE;
    row->tokens[node] = token;
    row->parents[node] = (int32_t)parent;
    row->depths[node] = (int32_t)depth;
    row->needs[node] = (int32_t)need;
    row->sources[node] = (int32_t)source;
    row->buckets[node] = (int32_t)bucket;
    row->keys[node] = sum_keys(row->keys[parent], step_key(token, row->factors[depth]));
    row->paths[node] = can_be_drawn(row, depth, token) ? path_of(row->paths[parent], prob) : 0.0f;
    return OK;
}

/* The row's text, or NULL if there is none of this number. end: written, its tokens. */
static const int32_t *text_of(const Texts *texts, int64_t table_row, int64_t *end) {
    if (table_row < 0 || table_row >= texts->num_table_rows) return NULL;
    *end = texts->lengths[table_row];
    if (*end < 0 || *end > texts->context) return NULL;
    return texts->own + table_row * texts->context;
}

int graft_begin(const Pool *pool, const Shape *shape, const Texts *texts, const int32_t *table_rows) {
    for (int64_t r = 0; r < shape->num_rows; r++) {
        Row row = row_of(pool, r, NULL, 0);
        int64_t end;
        const int32_t *text = text_of(texts, table_rows[r], &end);
        if (text == NULL) return OUT_OF_RANGE;
        memset(row.paths, 0, (size_t)pool->capacity * sizeof(float));
        row.paths[0] = 1.0f;
        row.keys[0] = 0;
        row.parents[0] = row.depths[0] = row.needs[0] = row.sources[0] = row.buckets[0] = 0;
        row.tokens[0] = end > 0 ? text[end - 1] : 0;
        pool->before[r] = end > 1 ? text[end - 2] : -1;
        pool->before[pool->num_rows + r] = end > 2 ? text[end - 3] : -1;
    }
    return OK;
}

/* The places of the `count` highest positive values, best first; among equals, the first. Returns how many there are. */
static int64_t likeliest(const float *values, int64_t num_values, int64_t count, int64_t *places) {
    int64_t found = 0;
    float limit = 0.0f; /* what a value must exceed */
    for (int64_t i = 0; i < num_values && count > 0; i++) {
        float value = values[i];
        if (!(value > limit)) continue;
        int64_t at = found < count ? found++ : count - 1;
        for (; at > 0 && values[places[at - 1]] < value; at--) places[at] = places[at - 1];
        places[at] = i;
        if (found == count) limit = values[places[count - 1]];
    }
    return found;
}

enum { MAX_CHOSEN = 64 }; /* of places or beams */

int graft_choose_places(
    const Pool *pool, const Shape *shape, const int32_t *made, int32_t *places, const int32_t *max_depths) {
    int64_t chosen[MAX_CHOSEN], most = shape->num_places;
    if (most > MAX_CHOSEN || shape->first_copy > pool->capacity) return OUT_OF_RANGE;
    for (int64_t r = 0; r < shape->num_rows; r++, places += most) {
        Row row = row_of(pool, r, NULL, 0);
        int64_t count = made[0] ? likeliest(row.paths + 1, shape->first_copy - 1, most, chosen) : 0, found = 0;
        for (int64_t i = 0; i < count; i++)
            if (row.depths[chosen[i] + 1] < max_depths[r]) places[found++] = (int32_t)chosen[i] + 1;
        while (found < most) places[found++] = -1;
    }
    return OK;
}
