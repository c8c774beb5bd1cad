/* Drafted nodes. */

int graft_add_level(
    const Pool *pool, int64_t num_rows, int64_t number, int64_t count, int64_t first_level, int64_t level_start,
    const int32_t *tokens, const int32_t *parents, const float *probabilities, const Probs *probs,
    const Draws *draws, const int32_t *caps, const float *thresholds, float *reaches,
    int32_t *made, int64_t source, int64_t num_beams) {
    float reached = 0.0f;
    for (int64_t r = 0; r < num_rows && made[number]; r++) {
        Row row = row_of(pool, r, draws, 0);
        float total = 0.0f;
        for (int64_t i = 0; i < count; i++) {
            int64_t at = r * count + i, node = level_start + i;
            int64_t parent = parents[at] > 0 ? first_level + parents[at] - 1 : 0, bucket = bucket_of(probabilities[at]);
            float prob = probabilities[at];
            if (!(prob > 0.0f) || caps[r] <= 0) continue; /* padding, as `begin` left it */
            if (parent >= node || node >= row.capacity) return OUT_OF_RANGE;
            if (!(row.paths[parent] > 0.0f)) continue;
            if ((probs->values != NULL && find_prob(probs, row.kind, ALONE, source, bucket, &prob)) ||
                write_node(&row, node, tokens[at], parent, prob, source, bucket, number + 1))
                return OUT_OF_RANGE;
            if (i < num_beams) total += row.paths[node];
        }
        reached += total < 1.0f ? total : 1.0f;
    }
    reaches[number + 1] = reached;
    made[number + 1] = made[number] && reached > thresholds[number + 1];
    return OK;
}

/* The beams of a draft pass, K in a row: see `Beams` in tree/device/buffers.py. */
typedef struct {
    int32_t *tokens, *origins;
    float *paths;
    int32_t *places, *entries, *depths, *cache_places, *num_passes;
    int64_t num_rows, num_beams, max_depth;
} Beams;

/* Write the `count` likeliest children of the F beams of each row as the next level, likeliest first, and make the first
   of them the new beams. Later levels have `later` nodes a row. num_parents: F; 1 in the first pass, else K. */
int graft_spread(
    int64_t num_parents, int64_t count, int64_t later, const int64_t *ids, const float *q, const int64_t *to_target,
    const Beams *beams, int32_t *out_tokens, int32_t *out_parents, float *out_q) {
    int64_t num_beams = beams->num_beams, depth = beams->max_depth, size = num_parents * num_beams;
    float *paths = malloc((size_t)size * sizeof(float));
    int32_t *old = malloc((size_t)(num_beams * (depth + 1)) * sizeof(int32_t)), *places = old + num_beams * depth;
    int failed = paths == NULL || old == NULL ? NO_MEMORY : count > size ? OUT_OF_RANGE : OK;
    for (int64_t r = 0; r < beams->num_rows && !failed; r++) {
        int is_first = num_parents < num_beams || beams->num_passes[r] == 0;
        int64_t number = is_first ? 0 : beams->num_passes[r] < depth ? beams->num_passes[r] : depth - 1;
        int64_t start = is_first ? 1 : 1 + num_beams + (number - 1) * later, first = r * num_beams;
        memcpy(old, beams->entries + first * depth, (size_t)(num_beams * depth) * sizeof(int32_t));
        memcpy(places, beams->places + first, (size_t)num_beams * sizeof(int32_t));
        for (int64_t i = 0; i < size; i++)
            paths[i] = (is_first ? 1.0f : beams->paths[first + i / num_beams]) * q[r * size + i];
        for (int64_t rank = 0; rank < count; rank++) {
            int64_t best = 0, at = r * count + rank;
            for (int64_t i = 1; i < size; i++)
                if (paths[i] > paths[best]) best = i;
            int64_t id = ids[r * size + best], beam = best / num_beams;
            out_tokens[at] = (int32_t)(to_target == NULL ? id : id + to_target[id]);
            out_parents[at] = is_first ? 0 : places[beam];
            out_q[at] = q[r * size + best];
            if (rank < num_beams) {
                int64_t own = first + rank;
                int32_t *entries = beams->entries + own * depth;
                beams->tokens[own] = out_tokens[at];
                beams->origins[own] = (int32_t)(first + beam);
                beams->paths[own] = paths[best];
                beams->places[own] = (int32_t)(start + rank);
                beams->depths[own] = (int32_t)number;
                beams->cache_places[own] = (int32_t)(number * num_beams + rank);
                memcpy(entries, old + beam * depth, (size_t)number * sizeof(int32_t));
                entries[number] = beams->cache_places[own];
            }
            paths[best] = -1.0f;
        }
        beams->num_passes[r] = (int32_t)number + 1;
    }
    free(paths);
    free(old);
    return failed;
}

int graft_grow(
    int64_t num_rows, int64_t num_entries, int64_t num_children, const int32_t *tokens, const float *probabilities,
    const int32_t *entries, int64_t num_levels, int64_t num_nodes, int32_t *out_tokens, int32_t *out_parents,
    int32_t *out_depths, float *out_probabilities, float *out_paths) {
    int64_t size = num_entries * num_children;
    BestFirst best = {0};
    int failed = make_best_first(&best, num_levels, num_nodes);
    for (int64_t r = 0; r < num_rows && !failed; r++) {
        const float *own = probabilities + r * size;
        failed = take_best(&best, num_entries, num_children, own, entries + r * size, num_levels, num_nodes);
        int64_t *starts = best.counts; /* from here on, where each level begins in the row's tree */
        for (int64_t level = 0, start = 0; level < num_levels && !failed; level++) {
            int64_t count = best.counts[level];
            starts[level] = start;
            start += count;
        }
        int64_t first = r * num_nodes;
        for (int64_t i = 0; i < num_nodes && !failed; i++) {
            if (i >= best.num_taken) {
                out_tokens[first + i] = out_parents[first + i] = out_depths[first + i] = 0;
                out_probabilities[first + i] = out_paths[first + i] = 0.0f;
                continue;
            }
            const Open *node = best.nodes + i;
            int64_t depth = best.depths[i], at = first + starts[depth] + node->order;
            out_tokens[at] = tokens[r * size + node->at];
            out_parents[at] =
                node->parent < 0 ? 0 : (int32_t)(1 + starts[depth - 1] + best.nodes[node->parent].order);
            out_depths[at] = (int32_t)depth + 1;
            out_probabilities[at] = own[node->at];
            out_paths[at] = node->path;
        }
    }
    free_best_first(&best);
    return failed;
}
