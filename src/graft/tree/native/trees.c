/* Trees: flat steps, best-first trees, and counts of nodes. */

/* Lays out trees [num_rows][width] one after the other, as a flat step has them, without each row's trailing padding.
   columns: written, [6][room]: tokens, parents (places in the row's own tree), places, depths, rows, numbers in strips.
   starts, counts: written, [num_rows]: each row's first token in the step and its number of tokens. index: written,
   [num_rows][width]: the step's token of each node; padding gets the root's. total: written, tokens of the step.
   A strip is a run of nodes down one path: a node's first child continues the node's strip, and other children begin
   new ones. Numbers in a strip count from 1. The number of the strip's last node, which has no child, is negative. */
int graft_flatten_trees(
    int64_t num_rows, int64_t width, const int64_t *tokens, const int64_t *parents, const int64_t *sources,
    int64_t room, int32_t *columns, int32_t *starts, int32_t *counts, int64_t *index, int64_t *total) {
    int32_t *flat_tokens = columns, *flat_parents = columns + room, *places = columns + 2 * room;
    int32_t *depths = columns + 3 * room, *rows = columns + 4 * room, *strips = columns + 5 * room;
    int64_t at = 0;
    for (int64_t r = 0; r < num_rows; r++) {
        int64_t first = r * width, start = at;
        for (int64_t i = 0; i < width; i++) {
            int64_t parent = parents[first + i];
            index[first + i] = start;
            if (i > 0 && sources[first + i] == PADDING) continue;
            if (at >= room || at - start != i || parent < 0 || (i > 0 && parent >= i)) return OUT_OF_RANGE;
            index[first + i] = at;
            flat_tokens[at] = (int32_t)tokens[first + i];
            flat_parents[at] = (int32_t)(i > 0 ? parent : 0);
            places[at] = (int32_t)i;
            depths[at] = i > 0 ? depths[start + parent] + 1 : 0;
            rows[at] = (int32_t)r;
            strips[at] = -1;
            if (i > 0 && strips[start + parent] < 0) {
                strips[at] = strips[start + parent] - 1;
                strips[start + parent] *= -1;
            }
            at++;
        }
        starts[r] = (int32_t)start;
        counts[r] = (int32_t)(at - start);
    }
    *total = at;
    return OK;
}

/* A node that has not been taken yet: the child of node `parent` at index `at` of the row's table. */
typedef struct {
    float path;          /* probability of the path down to it */
    int64_t order;       /* among equals, the first one found wins */
    int64_t at, parent;
} Open;

static int goes_before(const Open *a, const Open *b) {
    return a->path > b->path || (a->path == b->path && a->order < b->order);
}

static void push_open(Open *heap, int64_t *count, Open node) {
    int64_t i = (*count)++;
    for (; i > 0 && goes_before(&node, heap + (i - 1) / 2); i = (i - 1) / 2) heap[i] = heap[(i - 1) / 2];
    heap[i] = node;
}

static Open pop_open(Open *heap, int64_t *count) {
    Open first = heap[0], last = heap[--*count];
    int64_t i = 0, end = *count;
    for (int64_t child; (child = 2 * i + 1) < end; i = child) {
        if (child + 1 < end && goes_before(heap + child + 1, heap + child)) child++;
        if (!goes_before(heap + child, &last)) break;
        heap[i] = heap[child];
    }
    heap[i] = last;
    return first;
}

/* Makes the trees of the likeliest paths, with at most num_nodes nodes each. The tables are [num_rows][num_entries]
   [num_children]: tokens, their probabilities given the parent in falling order, and the entry with the token's own
   children (-1: none). The root's children are in entry 0. Outputs are level by level, each level [num_rows][width]:
   likeliest nodes first, then padding with probability 0. Parents are numbered in this order from 1; the root is 0.
   widths: written, [num_levels]: the most nodes of a row at each depth. room: size of the other outputs. */
int graft_best_first(
    int64_t num_rows, int64_t num_entries, int64_t num_children, const int32_t *tokens, const float *probabilities,
    const int32_t *entries, int64_t num_levels, int64_t num_nodes, int64_t room, int64_t *widths, int64_t *out_tokens,
    int64_t *out_parents, float *out_probabilities, float *out_paths) {
    size_t total = (size_t)(num_rows * num_nodes);
    Open *heap = malloc((size_t)(2 * num_nodes + 2) * sizeof(Open));
    Open *nodes = malloc(total * sizeof(Open)); /* nodes taken; `order` is now the place in the level */
    int64_t *depths = malloc((total + (size_t)(num_rows * (num_levels + 1))) * sizeof(int64_t));
    int failed = heap != NULL && nodes != NULL && depths != NULL ? OK : NO_MEMORY;
    int64_t *counts = NULL, *taken = NULL, size = num_entries * num_children;
    if (!failed) {
        counts = depths + total; /* [num_rows][num_levels] */
        taken = counts + num_rows * num_levels; /* [num_rows] of all levels */
        memset(counts, 0, (size_t)(num_rows * (num_levels + 1)) * sizeof(int64_t));
        for (int64_t k = 0; k < num_levels; k++) widths[k] = 0;
    }
    for (int64_t r = 0; r < num_rows && !failed; r++) {
        const float *own = probabilities + r * size;
        const int32_t *following = entries + r * size;
        Open *row = nodes + r * num_nodes;
        int64_t *deep = depths + r * num_nodes, *by_level = counts + r * num_levels, open = 0, found = 0, count = 0;
        if (num_levels > 0 && size > 0 && own[0] > 0) push_open(heap, &open, (Open){own[0], found++, 0, -1});
        while (open > 0 && count < num_nodes) {
            Open node = pop_open(heap, &open);
            int64_t depth = node.parent < 0 ? 0 : deep[node.parent] + 1, next = node.at + 1;
            float before = node.parent < 0 ? 1.0f : row[node.parent].path;
            if (next % num_children != 0) {
                float path = before * own[next];
                if (path > 0) push_open(heap, &open, (Open){path, found++, next, node.parent});
            }
            int64_t entry = following[node.at];
            if (entry >= num_entries) {
                failed = OUT_OF_RANGE;
                break;
            }
            if (entry >= 0 && depth + 1 < num_levels) {
                float path = node.path * own[entry * num_children];
                if (path > 0) push_open(heap, &open, (Open){path, found++, entry * num_children, count});
            }
            node.order = by_level[depth]++;
            if (by_level[depth] > widths[depth]) widths[depth] = by_level[depth];
            deep[count] = depth;
            row[count++] = node;
        }
        taken[r] = count;
    }
    int64_t needed = 0;
    for (int64_t k = 0; k < num_levels && !failed; k++) needed += num_rows * widths[k];
    if (!failed && needed > room) failed = OUT_OF_RANGE;
    if (!failed && needed > 0) { /* outputs without room may be NULL, which memset does not allow */
        memset(out_tokens, 0, (size_t)needed * sizeof(int64_t));
        memset(out_parents, 0, (size_t)needed * sizeof(int64_t));
        memset(out_probabilities, 0, (size_t)needed * sizeof(float));
        memset(out_paths, 0, (size_t)needed * sizeof(float));
    }
    for (int64_t r = 0; r < num_rows && !failed; r++)
        for (int64_t i = 0; i < taken[r]; i++) {
            const Open *node = nodes + r * num_nodes + i;
            int64_t depth = depths[r * num_nodes + i], before = 0, number = 1;
            for (int64_t k = 0; k < depth; k++) before += widths[k];
            for (int64_t k = 0; k + 1 < depth; k++) number += widths[k];
            int64_t at = num_rows * before + r * widths[depth] + node->order;
            out_tokens[at] = tokens[r * size + node->at];
            out_parents[at] = node->parent < 0 ? 0 : number + nodes[r * num_nodes + node->parent].order;
            out_probabilities[at] = probabilities[r * size + node->at];
            out_paths[at] = node->path;
        }
    free(heap);
    free(nodes);
    free(depths);
    return failed;
}

/* Counts nodes by source in trees [num_rows][width]. counts: written, [num_rows][num_sources] */
int graft_count_sources(
    int64_t num_rows, int64_t width, const int64_t *sources, int64_t num_sources, int64_t *counts) {
    for (int64_t r = 0; r < num_rows; r++, sources += width, counts += num_sources) {
        for (int64_t s = 0; s < num_sources; s++) counts[s] = 0;
        for (int64_t i = 0; i < width; i++) {
            if (sources[i] == PADDING) continue;
            if (sources[i] < 0 || sources[i] >= num_sources) return OUT_OF_RANGE;
            counts[sources[i]]++;
        }
    }
    return OK;
}
