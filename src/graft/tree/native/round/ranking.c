/* Merging equal paths, ranking, and laying out the best nodes as a step. */

int graft_merge(
    const Pool *pool, const Shape *shape, const Probs *probs, const int32_t *kinds, int64_t drafted) {
    int64_t width = shape->width, num_slots = 16, bits = 4;
    if (width > pool->capacity) return OUT_OF_RANGE;
    for (; num_slots < 2 * width; num_slots *= 2) bits++;
    /* A hash table of the likeliest node of each path so far, the nodes that are no padding, those that stay by depth,
       and where each depth begins there. */
    int32_t *memory = malloc((size_t)(num_slots + 2 * width + pool->num_factors + 1) * sizeof(int32_t));
    if (memory == NULL) return NO_MEMORY;
    int32_t *slots = memory, *nodes = slots + num_slots, *by_depth = nodes + width, *starts = by_depth + width;
    int failed = OK;
    for (int64_t r = 0; r < shape->num_rows && !failed; r++) {
        Row row = row_of(pool, r, NULL, 0);
        int32_t *kept = pool->kept + r * pool->capacity, *is_agreed = pool->is_agreed + r * pool->capacity;
        int32_t *spoke = pool->spoke + r * pool->capacity, *needs = row.needs;
        int64_t count = 0, deepest = 0, num_kept = 0;
        for (int64_t i = 0; i < width; i++) {
            nodes[count] = (int32_t)i;
            count += row.paths[i] > 0.0f;
        }
        for (int64_t s = 0; s < num_slots; s++) slots[s] = -1;
        for (int64_t n = 0; n < count; n++) {
            int32_t i = nodes[n];
            int64_t key = row.keys[i];
            uint64_t slot = ((uint64_t)key * UINT64_C(0x9E3779B97F4A7C15)) >> (64 - bits);
            while (slots[slot] >= 0 && row.keys[slots[slot]] != key) slot = (slot + 1) & (uint64_t)(num_slots - 1);
            if (slots[slot] < 0 || row.paths[i] > row.paths[slots[slot]]) slots[slot] = i;
            kept[i] = (int32_t)slot;
            is_agreed[i] = spoke[i] = 0;
            if (row.depths[i] > deepest) deepest = row.depths[i];
        }
        if (deepest >= pool->num_factors) {
            failed = OUT_OF_RANGE;
            break;
        }
        for (int64_t n = 0; n < count; n++) kept[nodes[n]] = slots[kept[nodes[n]]];
        memset(starts, 0, (size_t)(deepest + 2) * sizeof(int32_t));
        for (int64_t n = 0; n < count; n++) {
            int32_t i = nodes[n], k = kept[i];
            row.parents[i] = kept[row.parents[i]];
            if (row.sources[i] != row.sources[k]) is_agreed[k] = 1;
            if (needs[i] < needs[k]) needs[k] = needs[i];
            if (i > 0 && row.sources[i] == drafted) spoke[row.parents[i]] = 1;
            if (k == i) {
                starts[row.depths[i] + 1]++;
                num_kept++;
            }
        }
        for (int64_t d = 0; d <= deepest; d++) starts[d + 1] += starts[d];
        for (int64_t n = 0; n < count; n++) {
            int32_t i = nodes[n];
            if (kept[i] == i) by_depth[starts[row.depths[i]]++] = i;
            else row.paths[i] = 0.0f;
        }
        /* The kept copy of a parent may come after its child, so probabilities are recomputed depth by depth. */
        for (int64_t n = 0; n < num_kept && !failed; n++) {
            int32_t i = by_depth[n];
            float prob;
            row.agreement[i] = is_agreed[i] ? AGREED : ALONE;
            if (!is_agreed[i] && spoke[row.parents[i]] && row.sources[i] != drafted) row.agreement[i] = OPPOSED;
            if (i == 0) continue;
            failed = find_prob(probs, kinds[r], row.agreement[i], row.sources[i], row.buckets[i], &prob);
            if (!failed) row.paths[i] = path_of(row.paths[row.parents[i]], prob);
        }
    }
    free(memory);
    return failed;
}

/* Sorts the `count` likeliest nodes to the front of places [size], best first; among equals, the first. */
typedef struct {
    float path;
    int32_t node;
} Likely;

static int is_likelier(Likely a, Likely b) { return a.path > b.path || (a.path == b.path && a.node < b.node); }

static void sink(Likely *heap, int64_t size, int64_t place) {
    Likely moved = heap[place];
    for (int64_t child; (child = 2 * place + 1) < size; place = child) {
        if (child + 1 < size && is_likelier(heap[child + 1], heap[child])) child++;
        if (!is_likelier(heap[child], moved)) break;
        heap[place] = heap[child];
    }
    heap[place] = moved;
}

int graft_rank(
    const Pool *pool, const Shape *shape, const int32_t *caps, int64_t most, int32_t *ranked_nodes,
    float *ranked_paths, int32_t *ranked_needs) {
    if (shape->width > pool->capacity) return OUT_OF_RANGE;
    Likely *heap = malloc((size_t)shape->width * sizeof(Likely));
    if (heap == NULL) return NO_MEMORY;
    for (int64_t r = 0; r < shape->num_rows; r++) {
        const float *paths = pool->paths + r * pool->capacity;
        const int32_t *needs = pool->needs + r * pool->capacity;
        int64_t size = 0, count = least(caps[r], most);
        memset(ranked_paths + r * most, 0, (size_t)most * sizeof(float));
        if (count <= 0) continue;
        for (int64_t i = 1; i < shape->width; i++) {
            heap[size] = (Likely){paths[i], (int32_t)i};
            size += paths[i] > 0.0f;
        }
        for (int64_t place = size / 2 - 1; place >= 0; place--) sink(heap, size, place);
        for (int64_t rank = 0; rank < count && size > 0; rank++) {
            ranked_nodes[r * most + rank] = heap[0].node;
            ranked_paths[r * most + rank] = heap[0].path;
            ranked_needs[r * most + rank] = needs[heap[0].node];
            heap[0] = heap[--size];
            sink(heap, size, 0);
        }
    }
    free(heap);
    return OK;
}

/* How many of falling paths [most] are above a limit, or, if not `is_strict`, at it. */
static int64_t count_above(const float *paths, int64_t most, float limit, int is_strict) {
    int64_t low = 0, high = most;
    while (low < high) {
        int64_t middle = (low + high) / 2;
        if (paths[middle] > limit || (!is_strict && paths[middle] == limit)) low = middle + 1;
        else high = middle;
    }
    return low;
}

int graft_select(
    int64_t num_rows, int64_t most, const float *paths, const int32_t *caps, const int32_t *total, int32_t *counts) {
    int64_t num_above = 0;
    /* By bisection the path probability of the last node that is chosen. Positive floats are ordered as their bits. */
    uint32_t low = 1, high = 0x3F800000; /* the least positive number, and 1 */
    while (low < high) {
        uint32_t middle = low + (high - low + 1) / 2;
        float limit;
        int64_t count = 0;
        memcpy(&limit, &middle, sizeof limit);
        for (int64_t r = 0; r < num_rows; r++) count += count_above(paths + r * most, most, limit, 0);
        if (count >= total[0]) low = middle;
        else high = middle - 1;
    }
    float limit;
    memcpy(&limit, &low, sizeof limit);
    for (int64_t r = 0; r < num_rows; r++) {
        counts[r] = (int32_t)count_above(paths + r * most, most, limit, 1);
        num_above += counts[r];
    }
    for (int64_t r = 0; r < num_rows; r++) { /* of those at the limit, the first */
        int64_t at_limit = count_above(paths + r * most, most, limit, 0) - counts[r];
        at_limit = total[0] > num_above ? least(at_limit, total[0] - num_above) : 0;
        counts[r] += (int32_t)(at_limit + least(caps[r], 0));
        num_above += at_limit;
    }
    return OK;
}

enum { NUM_COLUMNS = 6 }; /* tokens, parents, places, depths, rows and strips */

static void write_padding(int32_t *columns, int64_t room, int64_t first, int64_t end, int64_t row) {
    for (int64_t column = 0; column < NUM_COLUMNS; column++)
        for (int64_t at = first; at < end; at++) columns[column * room + at] = column == 4 ? (int32_t)row : 0;
}

int graft_lay_out(
    const Pool *pool, int64_t num_rows, int64_t most, const int32_t *ranked, const int32_t *counts, const Texts *texts,
    const int32_t *table_rows, int32_t *columns, int64_t room, int32_t *by_row, int64_t rows_room, int32_t *origins,
    int64_t origins_room, int64_t size, int64_t stride) {
    int32_t *tokens = columns, *parents = columns + room, *places = columns + 2 * room, *depths = columns + 3 * room;
    int32_t *rows = columns + 4 * room, *strips = columns + 5 * room;
    int64_t start = 0;
    if (num_rows >= rows_room || size > room) return OUT_OF_RANGE;
    for (int64_t r = 0; r < num_rows; r++) {
        Row row = row_of(pool, r, NULL, 0);
        int32_t *place_of = pool->kept + r * pool->capacity; /* by node */
        int64_t count = counts[r], end;
        if (stride > 0) start = r * stride;
        if (text_of(texts, table_rows[r], &end) == NULL || count > most || start + count >= room ||
            start + count >= origins_room || (stride > 0 && count >= stride))
            return OUT_OF_RANGE;
        for (int64_t i = 0; i <= count; i++) {
            int64_t node = i > 0 ? ranked[r * most + i - 1] : 0, at = start + i;
            if (node < 0 || node >= pool->capacity) return OUT_OF_RANGE;
            int64_t parent = i > 0 ? place_of[row.parents[node]] : 0; /* parents are likelier, so they came before */
            if (parent < 0 || (i > 0 && (parent >= i || row.parents[node] != (parent ? ranked[r * most + parent - 1] : 0))))
                return OUT_OF_RANGE;
            place_of[node] = (int32_t)i;
            tokens[at] = row.tokens[node];
            parents[at] = (int32_t)parent;
            places[at] = (int32_t)i;
            depths[at] = row.depths[node];
            rows[at] = (int32_t)r;
            /* A strip is a run of nodes down one path: a node's first child continues the node's strip, and other
               children begin new ones. Numbers in a strip count from 1. That of the last node is negative. */
            strips[at] = -1;
            if (i > 0 && strips[start + parent] < 0) {
                strips[at] = strips[start + parent] - 1;
                strips[start + parent] *= -1;
            }
            origins[at] = row.sources[node];
        }
        if (stride > 0) write_padding(columns, room, start + count + 1, start + stride, num_rows);
        by_row[r] = (int32_t)start;
        by_row[rows_room + r] = (int32_t)(count + 1);
        by_row[2 * rows_room + r] = (int32_t)(end - 1);
        by_row[3 * rows_room + r] = table_rows[r];
        start += count + 1;
    }
    write_padding(columns, room, stride > 0 ? num_rows * stride : start, size, num_rows);
    for (int64_t part = 0; part < 4; part++) by_row[part * rows_room + num_rows] = 0;
    return OK;
}
