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
