/* Successor tables: the target's likeliest tokens after n-grams that it has verified. */

enum { NUM_TABLES = 3, NUM_SUCCESSORS = 8 };

/* Tables of n-grams, the longest first, one after the other in the same arrays. */
typedef struct {
    int32_t *entries;        /* [num_rows][NUM_SUCCESSORS] a token times NUM_BUCKETS plus its bucket; -1: none */
    int64_t *tags;           /* [num_rows] the full hash of each row's n-gram */
    const int64_t *starts;   /* [NUM_TABLES] each table's first row */
    const int32_t *row_bits; /* [NUM_TABLES] high bits of a hash that give the row; 0: no hash, the row is the token */
    const int64_t *factors;  /* [4] of the last token, the one before, the one before that, and the salt */
    int64_t num_rows, isolated;
    int64_t first_learned, end_learned; /* the tables that learn; others stay empty */
} Tables;

typedef struct {
    int32_t token, before, earlier;
    int64_t salt;
} Ngram;

/* The row of an n-gram in a table, or -1 if the token is out of range. tag: written, its hash. */
static int64_t table_row(const Tables *tables, int64_t number, const Ngram *ngram, int64_t *tag) {
    const int64_t *factors = tables->factors, bits = tables->row_bits[number];
    int64_t start = tables->starts[number], end = number + 1 < NUM_TABLES ? tables->starts[number + 1] : tables->num_rows;
    uint64_t key = (uint64_t)ngram->salt * (uint64_t)factors[3] + (uint64_t)ngram->token * (uint64_t)factors[0];
    if (number < 2) key += (uint64_t)ngram->before * (uint64_t)factors[1];
    if (number < 1) key += (uint64_t)ngram->earlier * (uint64_t)factors[2];
    *tag = (int64_t)key;
    int64_t row = bits > 0 ? (int64_t)(key >> (64 - bits)) : ngram->token;
    return row >= 0 && row < end - start ? start + row : -1;
}

/* The successors of the longest known n-gram, or NULL. number: of the first table to ask; written, that of the answer. */
static const int32_t *longest_known(const Tables *tables, const Ngram *ngram, int64_t *number) {
    for (; *number < NUM_TABLES; ++*number)
        for (int turn = 0; turn < (tables->isolated ? 2 : 1); turn++) { /* under the own salt, then the shared one */
            Ngram own = *ngram;
            int64_t tag;
            if (turn > 0) own.salt = 0;
            int64_t row = table_row(tables, *number, &own, &tag);
            if (row < 0 || (tables->row_bits[*number] > 0 && tables->tags[row] != tag)) continue;
            const int32_t *entries = tables->entries + row * NUM_SUCCESSORS;
            if (entries[0] >= 0) return entries;
        }
    return NULL;
}

/* The score buckets of successors. In a sampled row they are those of the probability that each is drawn, by its own
   probability and its noise; otherwise those of its probability alone. */
static void successor_buckets(const Row *row, int64_t depth, const int32_t *entries, int64_t *buckets) {
    double weights[NUM_SUCCESSORS], total = 0.0;
    for (int64_t s = 0; s < NUM_SUCCESSORS; s++) {
        weights[s] = 0.0;
        buckets[s] = entries[s] >= 0 ? entries[s] % NUM_BUCKETS : 0;
        int64_t below = buckets[s] - buckets[0];
        if (row->kind == 0 || entries[s] < 0 || below < 0) continue;
        int32_t token = entries[s] / NUM_BUCKETS;
        if (!can_be_drawn(row, depth, token)) continue;
        weights[s] = row->draws->powers[row->number * NUM_BUCKETS + below] / draw_time(row, depth, token);
        total += weights[s];
    }
    for (int64_t s = 0; s < NUM_SUCCESSORS && row->kind != 0 && total > 0; s++)
        buckets[s] = bucket_of(weights[s] / total);
}

int graft_follow(
    const Pool *pool, const Shape *shape, const Tables *tables, const int64_t *salts, const Probs *probs,
    const int32_t *max_depths, const Draws *draws, const Texts *texts, const int32_t *table_rows, int64_t source) {
    int64_t chosen[MAX_CHOSEN], buckets[NUM_SUCCESSORS];
    if (shape->beam > MAX_CHOSEN || shape->width > pool->capacity) return OUT_OF_RANGE;
    for (int64_t r = 0; r < shape->num_rows; r++) {
        int64_t end, max_depth = max_depths[r], width = shape->first_wave;
        if (text_of(texts, table_rows[r], &end) == NULL) return OUT_OF_RANGE;
        Row row = row_of(pool, r, draws, end);
        float *open = pool->open + r * pool->capacity; /* path probabilities of nodes not looked up yet */
        for (int64_t i = 0; i < width; i++) open[i] = row.paths[i];
        for (int64_t i = 0; i < width; i++)
            if (open[i] > 0 && row.depths[i] >= max_depth) open[i] = 0.0f;
        for (int64_t wave = 0; wave < least(shape->num_waves, max_depth); wave++) {
            int64_t count = likeliest(open, width, shape->beam, chosen), start = width;
            width += shape->beam * NUM_SUCCESSORS;
            memset(open + start, 0, (size_t)(width - start) * sizeof(float));
            for (int64_t b = 0; b < count; b++) {
                int64_t node = chosen[b], parent = row.parents[node], depth = row.depths[node] + 1, number = 0;
                Ngram ngram = {row.tokens[node], row.before, row.earlier, salts[r]};
                if (node > 0) {
                    ngram.before = row.tokens[parent];
                    ngram.earlier = parent > 0 ? row.tokens[row.parents[parent]] : row.before;
                }
                open[node] = 0.0f;
                const int32_t *entries = longest_known(tables, &ngram, &number);
                if (entries == NULL) continue;
                successor_buckets(&row, depth, entries, buckets);
                for (int64_t s = 0; s < NUM_SUCCESSORS; s++) {
                    int64_t new = start + b * NUM_SUCCESSORS + s;
                    float prob;
                    if (entries[s] < 0) continue;
                    if (find_prob(probs, row.kind, ALONE, source + number, buckets[s], &prob) ||
                        write_node(
                            &row, new, entries[s] / NUM_BUCKETS, node, prob, source + number, buckets[s],
                            row.needs[node]))
                        return OUT_OF_RANGE;
                    if (depth < max_depth) open[new] = row.paths[new];
                }
            }
        }
    }
    return OK;
}

int graft_learn(
    const Tables *tables, int64_t size, int64_t num_rows, const int32_t *tokens, const int32_t *parents,
    const int32_t *rows, const int32_t *starts, const int32_t *before, int64_t rows_room, const int64_t *salts,
    const int32_t *successors, const float *logits, int64_t is_text) {
    for (int64_t r = 0; r < num_rows; r++) {
        int64_t start = starts[r], count = 0;
        if (start < 0) return OUT_OF_RANGE;
        while (start + count < size && rows[start + count] == r) count++;
        const int32_t *own = tokens + start, *above = parents + start;
        for (int64_t n = 0; n < count; n++) {
            int64_t i = is_text ? n : count - 1 - n, parent = above[i]; /* the last write stays */
            if (parent < 0 || parent >= count || above[parent] < 0 || above[parent] >= count) return OUT_OF_RANGE;
            Ngram ngram = {own[i], before[r], before[rows_room + r], salts[r]};
            if (i > 0) {
                ngram.before = own[parent];
                ngram.earlier = parent > 0 ? own[above[parent]] : before[r];
            }
            int32_t entries[NUM_SUCCESSORS];
            int64_t at = (start + i) * NUM_SUCCESSORS;
            entries_of(NUM_SUCCESSORS, successors + at, logits + at, entries);
            for (int64_t number = tables->first_learned; number < tables->end_learned; number++) {
                int64_t tag, row = table_row(tables, number, &ngram, &tag);
                if (row < 0) return OUT_OF_RANGE;
                memcpy(tables->entries + row * NUM_SUCCESSORS, entries, sizeof entries);
                tables->tags[row] = tag;
            }
        }
    }
    return OK;
}
