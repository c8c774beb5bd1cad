/* Candidates: adding, finding, merging and counting nodes. */

/* P(accepted | parent accepted), [kinds of rows][agreements][num_sources][num_buckets] */
typedef struct {
    const float *values;
    int64_t num_groups; /* kinds times agreements */
    int64_t num_sources, num_buckets;
} AcceptanceProbs;

/* One row of the candidates: pointers to its columns. */
typedef struct {
    int64_t *fields[AGREEMENT + 1];
    float *paths;
    int64_t number, kind;
    const Draws *draws; /* NULL: nothing is known of its coming draws */
} Row;

static Row row_of(const Pool *pool, int64_t row) {
    Row found;
    for (int field = 0; field <= AGREEMENT; field++)
        found.fields[field] = pool->fields + (field * pool->num_rows + row) * pool->capacity;
    found.paths = pool->paths + row * pool->capacity;
    found.number = row;
    found.draws = pool->draws;
    found.kind = pool->draws != NULL ? pool->draws->kinds[row] : 0;
    return found;
}

static int64_t step_key(int64_t token, int64_t factor) {
    return (int64_t)(((uint64_t)token + 1) * (uint64_t)factor);
}

static int64_t sum_keys(int64_t a, int64_t b) { return (int64_t)((uint64_t)a + (uint64_t)b); }

static int find_prob(
    const AcceptanceProbs *probs, const Row *row, int64_t agreement, int64_t source, int64_t score_bucket,
    float *prob) {
    int64_t group = row->kind * NUM_AGREEMENTS + agreement;
    if (source < 0 || source >= probs->num_sources || score_bucket < 0 || score_bucket >= probs->num_buckets ||
        group >= probs->num_groups)
        return OUT_OF_RANGE;
    *prob = probs->values[(group * probs->num_sources + source) * probs->num_buckets + score_bucket];
    return OK;
}

/* The score bucket of a copied token below `parent`. In a sampled row it is split by the bucket of the token's E. */
static int64_t copied_bucket(const Row *row, int64_t parent, int64_t token, int64_t score_bucket) {
    if (row->kind == 0) return score_bucket;
    double time = draw_time(row->draws, row->number, row->fields[DEPTH][parent] + 1, token);
    return score_bucket * NUM_NOISES + noise_bucket_of(time);
}

static float path_of(float above, float prob) {
    float path = above * (prob < SURE ? prob : SURE);
    return path < LEAST ? 0.0f : path;
}

/* Buckets of probabilities, two per halving: bucket b starts at 2^(-b/2) and goes down to the start of the next one. */
static int64_t bucket_of(double probability) {
#define HALF 0.70710678118654752440 /* half a halving: 2^(-1/2) */
    static const double STARTS[NUM_BUCKETS] = {1.0,      HALF,      1.0 / 2,  HALF / 2,  1.0 / 4,  HALF / 4,
                                               1.0 / 8,  HALF / 8,  1.0 / 16, HALF / 16, 1.0 / 32, HALF / 32,
                                               1.0 / 64, HALF / 64, 1.0 / 128, HALF / 128};
    for (int64_t bucket = 1; bucket < NUM_BUCKETS; bucket++)
        if (!(probability <= STARTS[bucket])) return bucket - 1;
    return NUM_BUCKETS - 1;
}

/* Top-k: indices of the `count` highest values, best first; among equals, the first index wins. */
static void highest(const float *values, int64_t num_values, int64_t count, int64_t *places) {
    int64_t found = 0;
    for (int64_t i = 0; i < num_values && count > 0; i++) {
        float value = values[i];
        if (found == count && !(value > values[places[count - 1]])) continue;
        int64_t at = found < count ? found++ : count - 1;
        for (; at > 0 && values[places[at - 1]] < value; at--) places[at] = places[at - 1];
        places[at] = i;
    }
}

static int add_node(
    Pool *pool, const Row *row, int64_t node, int64_t token, int64_t parent, float prob, int64_t source,
    int64_t score_bucket, int64_t needs) {
    int64_t *const *fields = row->fields;
    if (node >= pool->capacity || parent < 0 || parent >= node) return OUT_OF_RANGE;
    int64_t depth = fields[DEPTH][parent] + 1;
    if (depth >= pool->num_factors) return OUT_OF_RANGE;
    fields[TOKEN][node] = token;
    fields[BEFORE][node] = fields[TOKEN][parent];
    fields[DEPTH][node] = depth;
    fields[KEY][node] = sum_keys(fields[KEY][parent], step_key(token, pool->factors[depth]));
    fields[NEED][node] = needs == INHERITED ? fields[NEED][parent] : needs;
    fields[PARENT][node] = parent;
    fields[EARLIER][node] = fields[BEFORE][parent];
    fields[SOURCE][node] = source;
    fields[SCORE_BUCKET][node] = score_bucket;
    fields[AGREEMENT][node] = ALONE;
    row->paths[node] = can_be_drawn(row->draws, row->number, depth, token) ? path_of(row->paths[parent], prob) : 0.0f;
    if (depth > pool->deepest) pool->deepest = depth;
    return OK;
}

/* Resets the pool to the roots. roots, before, earlier: [num_rows] each text's last token, and the two before it. */
int graft_begin(Pool *pool, const int64_t *roots, const int64_t *before, const int64_t *earlier) {
    if (pool->capacity < 1) return OUT_OF_RANGE;
    for (int64_t r = 0; r < pool->num_rows; r++) {
        Row row = row_of(pool, r);
        for (int field = 0; field <= AGREEMENT; field++) row.fields[field][0] = 0;
        row.fields[TOKEN][0] = roots[r];
        row.fields[BEFORE][0] = before[r];
        row.fields[EARLIER][0] = earlier[r];
        row.fields[SOURCE][0] = ROOT;
        row.paths[0] = 1.0f;
    }
    pool->width = 1;
    pool->deepest = 0;
    return OK;
}

/* Adds nodes. All columns are [num_rows][count]. A node's parent may be an earlier new node. */
int graft_add(
    Pool *pool, int64_t count, const int64_t *tokens, const int64_t *parents, const float *probs,
    const int64_t *sources, const int64_t *score_bucket, int64_t needs) {
    for (int64_t r = 0; r < pool->num_rows; r++) {
        Row row = row_of(pool, r);
        for (int64_t i = 0; i < count; i++) {
            int64_t at = r * count + i;
            int failed = add_node(
                pool, &row, pool->width + i, tokens[at], parents[at], probs[at], sources[at], score_bucket[at],
                needs);
            if (failed) return failed;
        }
    }
    pool->width += count;
    return OK;
}

/* Adds a drafted level. tokens, parents, probabilities: [num_rows][count]. Parents are numbers in the drafted tree; add
   `first` for the candidate's number (the root is 0 in both). Without values in `probs`, the drafter's q is the
   acceptance probability; a q of 0 adds padding. reached: written, by row: P(the target accepts one of the first
   num_beams nodes), at most 1. */
int graft_add_level(
    Pool *pool, int64_t count, const int64_t *tokens, const int64_t *parents, const float *probabilities,
    const AcceptanceProbs *probs, int64_t source, int64_t needs, int64_t first, const uint8_t *going, int64_t num_beams,
    double *reached) {
    for (int64_t r = 0; r < pool->num_rows; r++) {
        Row row = row_of(pool, r);
        float sum = 0.0f;
        for (int64_t i = 0; i < count; i++) {
            int64_t at = r * count + i, node = pool->width + i, score_bucket = 0;
            int64_t parent = parents[at] > 0 ? parents[at] + first : 0;
            float prob = probabilities[at];
            int is_going = going[r] && prob > 0.0f, failed = OK;
            if (probs->values != NULL) {
                score_bucket = bucket_of(prob);
                failed = find_prob(probs, &row, ALONE, source, score_bucket, &prob);
            }
            if (!failed)
                failed = add_node(
                    pool, &row, node, tokens[at], parent, is_going ? prob : 0.0f, source, score_bucket, needs);
            if (failed) return failed;
            if (i < num_beams) sum += row.paths[node];
        }
        reached[r] = sum < 1.0f ? sum : 1.0f;
    }
    pool->width += count;
    return OK;
}

/* Merges equal paths into the likeliest copy; the other copies become padding. With values in `probs`, probabilities
   are recomputed by agreement between sources. */
int graft_merge(Pool *pool, int64_t drafted, const AcceptanceProbs *probs) {
    int64_t width = pool->width, num_slots = 16;
    int failed = OK;
    int bits = 4;
    for (; num_slots < 2 * width; num_slots *= 2) bits++;
    int64_t *memory = malloc((size_t)(num_slots + 6 * width + pool->deepest + 2) * sizeof(int64_t));
    if (memory == NULL) return NO_MEMORY;
    int64_t *slots = memory;                 /* hash table: the likeliest node of each path so far, or -1 */
    int64_t *kept = slots + num_slots;       /* node -> the likeliest copy of its path */
    int64_t *first_source = kept + width;    /* of a kept node: the lowest source of its copies */
    int64_t *last_source = first_source + width;
    int64_t *needs = last_source + width;
    int64_t *has_drafted_child = needs + width;          /* whether the drafter proposed a child */
    int64_t *order = has_drafted_child + width;          /* nodes sorted by depth */
    int64_t *starts = order + width;         /* where each depth starts in `order` */
    for (int64_t r = 0; r < pool->num_rows && !failed; r++) {
        Row row = row_of(pool, r);
        const int64_t *keys = row.fields[KEY], *sources = row.fields[SOURCE], *depths = row.fields[DEPTH];
        int64_t *parents = row.fields[PARENT], *agreement = row.fields[AGREEMENT];
        float *paths = row.paths;
        for (int64_t s = 0; s < num_slots; s++) slots[s] = -1;
        for (int64_t i = 0; i < width; i++) {
            uint64_t slot = ((uint64_t)keys[i] * UINT64_C(0x9E3779B97F4A7C15)) >> (64 - bits);
            while (slots[slot] >= 0 && keys[slots[slot]] != keys[i]) slot = (slot + 1) & (uint64_t)(num_slots - 1);
            if (slots[slot] < 0 || paths[i] > paths[slots[slot]]) slots[slot] = i;
            kept[i] = (int64_t)slot;
        }
        for (int64_t i = 0; i < width; i++) {
            kept[i] = slots[kept[i]];
            first_source[i] = last_source[i] = sources[i];
            needs[i] = row.fields[NEED][i];
            has_drafted_child[i] = 0;
        }
        for (int64_t i = 0; i < width; i++) {
            int64_t k = kept[i];
            parents[i] = kept[parents[i]];
            if (!(paths[i] > 0)) continue; /* padding */
            needs[k] = least(needs[k], row.fields[NEED][i]);
            first_source[k] = least(first_source[k], sources[i]);
            last_source[k] = -least(-last_source[k], -sources[i]);
            if (sources[i] == drafted) has_drafted_child[parents[i]] = 1;
        }
        for (int64_t i = 0; i < width; i++) {
            row.fields[NEED][i] = kept[i] == i ? needs[i] : 0;
            if (kept[i] != i) paths[i] = 0.0f;
            agreement[i] = ALONE;
        }
        if (probs->values == NULL) continue;
        /* The kept copy of a parent may come after its child, so probabilities are recomputed depth by depth. */
        memset(starts, 0, (size_t)(pool->deepest + 2) * sizeof(int64_t));
        for (int64_t i = 0; i < width; i++) starts[depths[i] + 1]++;
        for (int64_t d = 0; d <= pool->deepest; d++) starts[d + 1] += starts[d];
        for (int64_t i = 0; i < width; i++) order[starts[depths[i]]++] = i;
        for (int64_t o = 0; o < width && !failed; o++) {
            int64_t i = order[o];
            float prob;
            if (kept[i] == i && first_source[i] != last_source[i])
                agreement[i] = AGREED;
            else if (has_drafted_child[parents[i]] && sources[i] != drafted)
                agreement[i] = OPPOSED;
            if (i == 0 || !(paths[i] > 0)) continue;
            failed = find_prob(probs, &row, agreement[i], sources[i], row.fields[SCORE_BUCKET][i], &prob);
            if (!failed) paths[i] = path_of(paths[parents[i]], prob);
        }
    }
    free(memory);
    return failed;
}

/* Whether any candidate so far was drafted. */
static int is_drafted(const Pool *pool) {
    for (int64_t r = 0; r < pool->num_rows; r++) {
        const int64_t *needs = row_of(pool, r).fields[NEED];
        for (int64_t i = 0; i < pool->width; i++)
            if (needs[i]) return 1;
    }
    return 0;
}

/* Finds the nodes of a row to look up continuations for: before anything is drafted the root, afterwards the up to
   `count` likeliest nodes below it that may have children. Returns their number. */
static int64_t places_of(
    const Pool *pool, const Row *row, int drafted, int64_t count, int64_t max_depth, int64_t *nodes) {
    int64_t num_found = 0;
    if (!drafted) { /* the root alone */
        nodes[0] = 0;
        return 1;
    }
    count = least(count, pool->width - 1);
    highest(row->paths + 1, pool->width - 1, count, nodes);
    for (int64_t i = 0; i < count; i++) {
        int64_t node = nodes[i] + 1;
        if (row->paths[node] > 0 && row->fields[DEPTH][node] < max_depth) nodes[num_found++] = node;
    }
    return num_found;
}

/* Counts nodes by kind of row and agreement (num_groups in all), source and score bucket. tried: nodes whose parent's
   path was emitted with a token after it. fitted: those of them that are this token. emitted: the rows' new tokens, one
   row after the other. Counts above `memory` are scaled down to it, so that old observations fade. */
int graft_count(
    const Pool *pool, const int64_t *emitted, const int64_t *lengths, float *tried, float *fitted,
    int64_t num_groups, int64_t num_sources, int64_t num_buckets, float memory) {
    enum { FOLLOWED = 1, FITTED = 2 };
    uint8_t *outcome = malloc((size_t)pool->width); /* by node: FOLLOWED, FITTED */
    int64_t *keys = malloc((size_t)(pool->num_factors + 1) * sizeof(int64_t)); /* of the emitted path, by depth */
    int failed = outcome == NULL || keys == NULL ? NO_MEMORY : OK;
    for (int64_t r = 0; r < pool->num_rows && !failed; emitted += lengths[r++]) {
        Row row = row_of(pool, r);
        if (lengths[r] >= pool->num_factors) failed = OUT_OF_RANGE;
        keys[0] = 0;
        for (int64_t d = 1; d <= lengths[r] && !failed; d++)
            keys[d] = sum_keys(keys[d - 1], step_key(emitted[d - 1], pool->factors[d]));
        for (int64_t i = 0; i < pool->width && !failed; i++) {
            int64_t depth = row.fields[DEPTH][i];
            int is_true = depth <= lengths[r] && row.fields[KEY][i] == keys[depth];
            outcome[i] = (uint8_t)(is_true ? (depth < lengths[r] ? FOLLOWED : 0) | (depth > 0 ? FITTED : 0) : 0);
        }
        for (int64_t i = 1; i < pool->width && !failed; i++) {
            int64_t source = row.fields[SOURCE][i], score_bucket = row.fields[SCORE_BUCKET][i];
            int64_t group = row.kind * NUM_AGREEMENTS + row.fields[AGREEMENT][i];
            if (!(outcome[row.fields[PARENT][i]] & FOLLOWED) || source <= ROOT || !(row.paths[i] > 0)) continue;
            if (group >= num_groups || source >= num_sources || score_bucket < 0 ||
                score_bucket >= num_buckets) {
                failed = OUT_OF_RANGE;
                break;
            }
            int64_t cell = (group * num_sources + source) * num_buckets + score_bucket;
            tried[cell] += 1.0f;
            if (outcome[i] & FITTED) fitted[cell] += 1.0f;
        }
    }
    for (int64_t cell = 0; cell < num_groups * num_sources * num_buckets && !failed; cell++) {
        float fade = memory / tried[cell];
        if (!(fade < 1.0f)) continue;
        tried[cell] *= fade;
        fitted[cell] *= fade;
    }
    free(outcome);
    free(keys);
    return failed;
}
