/* Successor tables: the target's likeliest tokens after an n-gram. */

/* The memory of Python's `SuccessorTable`: one row of top-k successors for each n-gram. */
typedef struct {
    int32_t *entries; /* [num_rows][num_successors]: a token times NUM_BUCKETS plus its score bucket, or -1 */
    int64_t *tags;    /* [num_rows] the full hash of the row's n-gram; NULL: not hashed, the row number is the token */
    int64_t num_rows, num_successors, order;
    int64_t row_bits;       /* the high bits of a hash that give the row number */
    const int64_t *factors; /* [4] hash factors of the last token, the one before, the one before that and the salt */
    int64_t isolated;       /* whether to look up a text's own salt first, then the common salt 0 */
} Table;

static int64_t row_of_key(const Table *table, uint64_t key) {
    return table->row_bits ? (int64_t)(key >> (64 - table->row_bits)) : 0;
}

/* The row of an n-gram, or -1 if the token is out of range. tag: written, its hash; 0 in a table without hashes. */
static int64_t table_row(
    const Table *table, int64_t token, int64_t before, int64_t earlier, int64_t salt, int64_t *tag) {
    *tag = 0;
    if (table->tags == NULL) return token >= 0 && token < table->num_rows ? token : -1;
    const int64_t *factors = table->factors;
    uint64_t key = (uint64_t)salt * (uint64_t)factors[3] + (uint64_t)token * (uint64_t)factors[0];
    if (table->order > 1) key += (uint64_t)before * (uint64_t)factors[1];
    if (table->order > 2) key += (uint64_t)earlier * (uint64_t)factors[2];
    *tag = (int64_t)key;
    return row_of_key(table, key);
}

/* The node at i of a row's tree, or the root if that is padding, and the two tokens before the node's token. */
static int context_of(
    int64_t i, int64_t width, const int64_t *tokens, const int64_t *parents, const int64_t *sources, int64_t before,
    int64_t earlier, int64_t *node, int64_t *last, int64_t *second) {
    *node = sources[i] == PADDING ? 0 : i;
    int64_t parent = parents[*node];
    if (parent < 0 || parent >= width || parents[parent] < 0 || parents[parent] >= width) return OUT_OF_RANGE;
    *last = *node ? tokens[parent] : before;
    *second = parent ? tokens[parents[parent]] : *node ? before : earlier;
    return OK;
}

/* Writes the successors of an n-gram to every table. */
static int write_entries(
    const Table *tables, int64_t num_tables, int64_t token, int64_t before, int64_t earlier, int64_t salt,
    const int32_t *entries, int64_t num_successors) {
    for (int64_t t = 0; t < num_tables; t++) {
        int64_t tag, row = table_row(tables + t, token, before, earlier, salt, &tag);
        if (row < 0) return OUT_OF_RANGE;
        memcpy(tables[t].entries + row * tables[t].num_successors, entries, (size_t)num_successors * sizeof(int32_t));
        if (tables[t].tags != NULL) tables[t].tags[row] = tag;
    }
    return OK;
}

/* Stores the target's top-k successors of every node of verified trees [num_rows][width]. successors, logits: best
   first, [num_rows][row_stride], each row [width][num_successors]. before, earlier, salts: [num_rows], of the roots.
   If an n-gram occurs several times, the last write stays: that of the likeliest node or, in a prompt chunk, of the
   last occurrence. */
int graft_learn(
    const Table *tables, int64_t num_tables, int64_t num_rows, int64_t width, int64_t num_successors,
    int64_t row_stride, const int64_t *tokens, const int64_t *parents, const int64_t *sources,
    const int32_t *successors, const float *logits, const int64_t *before, const int64_t *earlier,
    const int64_t *salts, int64_t is_text) {
    int32_t entries[MAX_SUCCESSORS];
    if (num_successors > MAX_SUCCESSORS) return OUT_OF_RANGE;
    for (int64_t t = 0; t < num_tables; t++)
        if (num_successors > tables[t].num_successors) return OUT_OF_RANGE;
    for (int64_t r = 0; r < num_rows; r++) {
        for (int64_t n = 0; n < width; n++) {
            int64_t i = is_text ? n : width - 1 - n, first = r * width, node, last, second;
            if (context_of(
                    i, width, tokens + first, parents + first, sources + first, before[r], earlier[r], &node, &last,
                    &second))
                return OUT_OF_RANGE;
            int64_t at = r * row_stride + i * num_successors;
            entries_of(num_successors, successors + at, logits + at, entries);
            if (write_entries(
                    tables, num_tables, tokens[first + node], last, second, salts[r], entries, num_successors))
                return OUT_OF_RANGE;
        }
    }
    return OK;
}

/* Writes saved rows [count][num_successors] to a table, each to the row of its tag. If tags is NULL, the rows come from
   a table of order 1 without hashes, and each goes to the row of its token. */
int graft_restore(
    const Table *table, int64_t count, int64_t num_successors, const int64_t *tokens, const int64_t *tags,
    const int32_t *entries) {
    if (num_successors > table->num_successors) return OUT_OF_RANGE;
    for (int64_t i = 0; i < count; i++) {
        int64_t tag, row = table_row(table, tokens[i], 0, 0, 0, &tag);
        if (table->tags != NULL && tags != NULL) row = row_of_key(table, (uint64_t)(tag = tags[i]));
        if (row < 0) return OUT_OF_RANGE;
        memcpy(
            table->entries + row * table->num_successors, entries + i * num_successors,
            (size_t)num_successors * sizeof(int32_t));
        if (table->tags != NULL) table->tags[row] = tag;
    }
    return OK;
}

/* A table's successors of a node's n-gram under a salt, or NULL. */
static const int32_t *known_after(const Table *table, const Row *row, int64_t node, int64_t salt) {
    int64_t tag, place = table_row(
        table, row->fields[TOKEN][node], row->fields[BEFORE][node], row->fields[EARLIER][node], salt, &tag);
    if (place < 0 || (table->tags != NULL && table->tags[place] != tag)) return NULL;
    const int32_t *entries = table->entries + place * table->num_successors;
    return entries[0] >= 0 ? entries : NULL;
}

/* The successors of the longest known n-gram that ends at a node, or NULL. number: written, the number of its table, or
   of the last table. */
static const int32_t *longest_known(
    const Table *tables, int64_t num_tables, const Row *row, int64_t node, int64_t salt, int64_t *number) {
    for (*number = 0; *number < num_tables; ++*number) {
        const int32_t *entries = known_after(tables + *number, row, node, salt);
        if (entries == NULL && tables[*number].isolated) entries = known_after(tables + *number, row, node, 0);
        if (entries != NULL) return entries;
    }
    --*number;
    return NULL;
}

/* The score buckets of a node's successors. In a sampled row they are those of the probability that each is drawn, by
   its own probability and its noise; otherwise those of its probability alone. */
static void successor_buckets(
    const Row *row, int64_t parent, int64_t num_successors, const int32_t *entries, int64_t *score_buckets) {
    double weights[MAX_SUCCESSORS], total = 0.0;
    int64_t depth = row->fields[DEPTH][parent] + 1;
    for (int64_t s = 0; s < num_successors; s++) {
        weights[s] = 0.0;
        score_buckets[s] = entries[s] >= 0 ? entries[s] % NUM_BUCKETS : NUM_BUCKETS - 1;
        if (row->kind == 0 || entries[s] < 0) continue;
        int64_t token = entries[s] / NUM_BUCKETS, below = score_buckets[s] - score_buckets[0];
        if (below < 0 || !can_be_drawn(row->draws, row->number, depth, token)) continue;
        double power = row->draws->powers[row->number * NUM_BUCKETS + below];
        weights[s] = power / draw_time(row->draws, row->number, depth, token);
        total += weights[s];
    }
    for (int64_t s = 0; s < num_successors && row->kind != 0 && total > 0; s++)
        if (entries[s] >= 0) score_buckets[s] = bucket_of(weights[s] / total);
}

/* Adds, wave by wave, the successors of the `beam` likeliest nodes not yet looked up, by the longest known n-gram. */
int graft_follow(
    Pool *pool, const Table *tables, int64_t num_tables, const AcceptanceProbs *probs, int64_t first, int64_t num_waves,
    int64_t beam, int64_t max_depth) {
    int64_t num_successors = tables[0].num_successors, width = pool->width, score_buckets[MAX_SUCCESSORS];
    if (num_successors > MAX_SUCCESSORS) return OUT_OF_RANGE;
    int64_t *best = malloc((size_t)(beam + 1) * sizeof(int64_t));
    float *open = malloc((size_t)pool->capacity * sizeof(float)); /* path probabilities of nodes not yet looked up */
    int failed = best == NULL || open == NULL ? NO_MEMORY : OK;
    for (int64_t r = 0; r < pool->num_rows && !failed; r++) {
        Row row = row_of(pool, r);
        int64_t num_open = 0;
        width = pool->width;
        for (int64_t wave = 0; wave < num_waves && !failed; wave++) {
            for (; num_open < width; num_open++)
                open[num_open] = row.fields[DEPTH][num_open] < max_depth ? row.paths[num_open] : 0.0f;
            int64_t count = least(beam, width);
            highest(open, width, count, best);
            for (int64_t b = 0; b < count && !failed; b++) {
                int64_t number;
                const int32_t *entries = longest_known(tables, num_tables, &row, best[b], pool->salts[r], &number);
                if (!(open[best[b]] > 0)) entries = NULL; /* fewer nodes than the beam were open */
                if (entries != NULL) successor_buckets(&row, best[b], num_successors, entries, score_buckets);
                for (int64_t s = 0; s < num_successors && !failed; s++, width++) {
                    int32_t entry = entries != NULL ? entries[s] : -1;
                    int64_t token = 0, score_bucket = NUM_BUCKETS - 1, source = number + first;
                    float prob = 0.0f;
                    if (entry >= 0) {
                        token = entry / NUM_BUCKETS;
                        score_bucket = score_buckets[s];
                        failed = find_prob(probs, &row, ALONE, source, score_bucket, &prob);
                    }
                    if (!failed)
                        failed = add_node(pool, &row, width, token, best[b], prob, source, score_bucket, INHERITED);
                }
                open[best[b]] = 0.0f;
            }
        }
    }
    free(best);
    free(open);
    if (!failed) pool->width = width; /* the same in all rows */
    return failed;
}
