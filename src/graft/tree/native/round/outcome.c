/* After a verify: the walk, the texts, what was proposed in vain and what was not. */

int graft_walk(
    int64_t size, int64_t num_rows, int64_t room, const int32_t *tokens, const int32_t *parents, const int64_t *chosen,
    const int32_t *starts, const int32_t *sizes, int32_t *counts, int32_t *following, int32_t *nodes) {
    for (int64_t r = 0; r < num_rows; r++) {
        int64_t start = starts[r], count = 0;
        if (sizes[r] > 0 && (start < 0 || start + sizes[r] > size)) return OUT_OF_RANGE;
        for (int64_t at = 0; at < sizes[r]; count++) {
            int64_t next = 1;
            int32_t new = (int32_t)chosen[start + at];
            if (count < room) {
                following[r * room + count] = new;
                nodes[r * room + count] = (int32_t)(start + at);
            }
            while (next < sizes[r] && (parents[start + next] != at || tokens[start + next] != new)) next++;
            at = next;
        }
        counts[r] = (int32_t)least(count, room);
    }
    return OK;
}

int graft_advance(
    const Texts *texts, int32_t *own, int32_t *text_lengths, int64_t num_rows, int64_t width, int64_t places_room,
    const int32_t *table_rows, const int32_t *starts, const int32_t *counts, const int32_t *tokens,
    const int32_t *nodes, int32_t *places, int32_t *num_accepted, int32_t *lengths, const int64_t *factors,
    int64_t num_factors, int64_t *emitted) {
    if (width >= num_factors) return OUT_OF_RANGE;
    for (int64_t r = 0; r < num_rows; r++, tokens += width, nodes += width, emitted += width + 1) {
        int64_t count = counts[r], end;
        if (text_of(texts, table_rows[r], &end) == NULL || count > width || count - 1 > places_room)
            return OUT_OF_RANGE;
        emitted[0] = 0;
        for (int64_t i = 0; i < count; i++) {
            if (end + i < texts->context) own[table_rows[r] * texts->context + end + i] = tokens[i];
            if (i > 0) places[r * places_room + i - 1] = nodes[i] - starts[r];
            emitted[i + 1] = sum_keys(emitted[i], step_key(tokens[i], factors[i + 1]));
        }
        num_accepted[r] = count > 1 ? (int32_t)count - 1 : 0;
        lengths[r] = end > 1 ? (int32_t)end - 1 : 0;
        if (count > 0) text_lengths[table_rows[r]] = (int32_t)least(end + count, texts->context);
    }
    return OK;
}

int graft_line_up(
    int64_t num_rows, int64_t width, int64_t size, int32_t *counts, int32_t *lengths, const int32_t *tokens,
    const int32_t *nodes, int32_t *begins, int32_t *entry_rows, int32_t *entry_places, int32_t *entry_tokens,
    int32_t *entry_nodes) {
    int64_t begin = 0;
    for (int64_t r = 0; r < num_rows; r++) {
        if (counts[r] > width) return OUT_OF_RANGE;
        begins[r] = (int32_t)begin;
        for (int64_t i = 0; i < counts[r] && begin + i < size; i++) {
            entry_rows[begin + i] = (int32_t)r;
            entry_places[begin + i] = (int32_t)i;
            entry_tokens[begin + i] = tokens[r * width + i];
            entry_nodes[begin + i] = nodes[r * width + i];
        }
        begin += counts[r];
    }
    begins[num_rows] = counts[num_rows] = lengths[num_rows] = 0;
    for (; begin < size; begin++) {
        entry_rows[begin] = (int32_t)num_rows;
        entry_places[begin] = entry_tokens[begin] = entry_nodes[begin] = 0;
    }
    return OK;
}

int graft_count(
    const Pool *pool, const Shape *shape, const int32_t *counts, const int64_t *emitted, int64_t emitted_room,
    const int32_t *kinds, int64_t num_groups, int64_t num_sources, int64_t num_buckets, int32_t *tried,
    int32_t *fitted) {
    if (shape->width > pool->capacity) return OUT_OF_RANGE;
    for (int64_t r = 0; r < shape->num_rows; r++) {
        Row row = row_of(pool, r, NULL, 0);
        const int64_t *came = emitted + r * emitted_room;
        for (int64_t i = 1; i < shape->width; i++) {
            if (!(row.paths[i] > 0.0f)) continue;
            int64_t depth = row.depths[i], source = row.sources[i], bucket = row.buckets[i];
            if (depth > counts[r]) continue;
            if (depth < 1 || depth >= emitted_room) return OUT_OF_RANGE;
            int64_t above = sum_keys(row.keys[i], -step_key(row.tokens[i], row.factors[depth]));
            if (above != came[depth - 1]) continue;
            int64_t group = kinds[r] * NUM_AGREEMENTS + row.agreement[i];
            if (group < 0 || group >= num_groups || source < 0 || source >= num_sources || bucket < 0 ||
                bucket >= num_buckets)
                return OUT_OF_RANGE;
            int64_t cell = (group * num_sources + source) * num_buckets + bucket;
            tried[cell]++;
            fitted[cell] += row.keys[i] == came[depth];
        }
    }
    return OK;
}
