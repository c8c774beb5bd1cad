/* Gates and templates of fixed trees, see `tree/device/fixed.py`. */

int graft_stop_rows(
    const Pool *pool, int64_t num_rows, int64_t number, int64_t count, int64_t level_start, int64_t first_gate,
    int64_t end_gate, int64_t num_gates, const int32_t *gates, const float *thresholds, int32_t *stops,
    float *confidences, int32_t *made) {
    int64_t num_going = 0;
    for (int64_t r = 0; r < num_rows; r++) {
        Row row = row_of(pool, r, NULL, 0);
        for (int64_t gate = first_gate; gate < end_gate && made[number] && stops[r] == num_gates; gate++) {
            float likeliest = 0.0f;
            for (int64_t node = level_start; node < level_start + count; node++)
                if (row.paths[node] > likeliest && row.depths[node] == gates[gate]) likeliest = row.paths[node];
            confidences[r * num_gates + gate] = likeliest;
            if (likeliest <= thresholds[gate]) stops[r] = (int32_t)gate;
        }
        num_going += stops[r] == num_gates;
    }
    if (num_going == 0) made[number + 1] = 0;
    return OK;
}

/* The place before first_wave of a node with this path, or 0. */
static int64_t twin_of(const Row *row, int64_t first_wave, int64_t key) {
    for (int64_t i = first_wave - 1; i > 0; i--)
        if (row->paths[i] > 0.0f && row->keys[i] == key) return i;
    return 0;
}

enum { MAX_KEPT = 127 };

/* Keeps the `count` likeliest nodes down to a depth. Returns the last place that stays; 0: none. */
static int64_t keep_likeliest(const Row *row, int64_t width, int64_t count, int64_t deepest) {
    int64_t chosen[MAX_KEPT], last = 0;
    float paths[MAX_KEPT];
    for (int64_t i = 1; i < width; i++)
        if (row->paths[i] > 0.0f && row->depths[i] > deepest) row->paths[i] = 0.0f;
    count = likeliest(row->paths + 1, width - 1, count, chosen);
    for (int64_t i = 0; i < count; i++) paths[i] = row->paths[chosen[i] + 1];
    memset(row->paths + 1, 0, (size_t)(width - 1) * sizeof(float));
    for (int64_t i = 0; i < count; i++) {
        row->paths[chosen[i] + 1] = paths[i];
        if (chosen[i] + 1 > last) last = chosen[i] + 1;
    }
    return last;
}

int graft_attach(
    const Pool *pool, const Shape *shape, const int32_t *stops, const int32_t *splits, int64_t num_splits,
    int64_t splits_room, int64_t at_leaf, const Tables *tables, const int64_t *salts, const int32_t *max_depths,
    const Draws *draws, int64_t source) {
    static const float ATTACHED = 0.5f; /* acceptance probability of every attached node */
    int64_t most = splits_room / 3 - 1, first_wave = shape->first_wave;
    if (shape->width > pool->capacity || first_wave + most > pool->capacity) return OUT_OF_RANGE;
    for (int64_t r = 0; r < shape->num_rows; r++) {
        if (stops[r] < 0 || stops[r] >= num_splits) return OUT_OF_RANGE;
        const int32_t *own = splits + stops[r] * splits_room, *parents = own + 3;
        const int32_t *ranks = parents + most, *depths = ranks + most;
        if (own[0] > MAX_KEPT || own[2] > most) return OUT_OF_RANGE;
        Row row = row_of(pool, r, draws, 0);
        int32_t *stands = pool->kept + r * pool->capacity;
        int64_t last = keep_likeliest(&row, shape->width, own[0], own[1]), base = at_leaf ? last : 0;
        for (int64_t i = 0; i < own[2] && depths[i] + row.depths[base] <= max_depths[r]; i++) {
            int64_t node = first_wave + i, number = NUM_TABLES - 1;
            if (parents[i] < 0 || parents[i] > i || ranks[i] < 0 || ranks[i] >= NUM_SUCCESSORS) return OUT_OF_RANGE;
            int64_t above = parents[i] > 0 ? stands[first_wave + parents[i] - 1] : base;
            stands[node] = (int32_t)node;
            if (!(row.paths[above] > 0.0f)) continue;
            Ngram ngram = {row.tokens[above], 0, 0, salts[r]};
            const int32_t *entries = longest_known(tables, &ngram, &number);
            if (entries == NULL || entries[ranks[i]] < 0) continue;
            int32_t token = entries[ranks[i]] / NUM_BUCKETS;
            int64_t depth = row.depths[above] + 1;
            if (depth >= row.num_factors) return OUT_OF_RANGE;
            if (!can_be_drawn(&row, depth, token)) continue;
            int64_t twin = twin_of(&row, first_wave, sum_keys(row.keys[above], step_key(token, row.factors[depth])));
            if (twin > 0) stands[node] = (int32_t)twin;
            else if (write_node(&row, node, token, above, ATTACHED, source, 0, row.needs[above])) return OUT_OF_RANGE;
        }
    }
    return OK;
}
