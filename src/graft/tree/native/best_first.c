/* Best-first trees: the likeliest open node is taken, and opens its next sibling and its first child. */

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

/* One row's tree. */
typedef struct {
    Open *heap;      /* [2 * num_nodes + 2] */
    Open *nodes;     /* [num_nodes] those taken, in this order; their `order` is the place among those of their depth */
    int64_t *depths; /* [num_nodes] from 0 on */
    int64_t *counts; /* [num_levels] nodes of each depth */
    int64_t num_taken;
} BestFirst;

static int make_best_first(BestFirst *best, int64_t num_levels, int64_t num_nodes) {
    best->heap = malloc((size_t)(2 * num_nodes + 2) * sizeof(Open));
    best->nodes = malloc((size_t)(num_nodes + 1) * sizeof(Open));
    best->depths = malloc((size_t)(num_nodes + 1) * sizeof(int64_t));
    best->counts = malloc((size_t)(num_levels + 1) * sizeof(int64_t));
    return best->heap && best->nodes && best->depths && best->counts ? OK : NO_MEMORY;
}

static void free_best_first(BestFirst *best) {
    free(best->heap);
    free(best->nodes);
    free(best->depths);
    free(best->counts);
}

/* Takes the likeliest paths of a row's table [num_entries][num_children]: the tokens' probabilities given the parent in
   falling order, and the entry with each token's own children (-1: none). The root's children are in entry 0. */
static int take_best(
    BestFirst *best, int64_t num_entries, int64_t num_children, const float *probabilities, const int32_t *entries,
    int64_t num_levels, int64_t num_nodes) {
    int64_t open = 0, found = 0, *count = &best->num_taken;
    memset(best->counts, 0, (size_t)num_levels * sizeof(int64_t));
    *count = 0;
    if (num_levels > 0 && num_entries * num_children > 0 && probabilities[0] > 0)
        push_open(best->heap, &open, (Open){probabilities[0], found++, 0, -1});
    while (open > 0 && *count < num_nodes) {
        Open node = pop_open(best->heap, &open);
        int64_t depth = node.parent < 0 ? 0 : best->depths[node.parent] + 1, next = node.at + 1;
        float before = node.parent < 0 ? 1.0f : best->nodes[node.parent].path;
        if (next % num_children != 0) {
            float path = before * probabilities[next];
            if (path > 0) push_open(best->heap, &open, (Open){path, found++, next, node.parent});
        }
        int64_t entry = entries[node.at];
        if (entry >= num_entries) return OUT_OF_RANGE;
        if (entry >= 0 && depth + 1 < num_levels) {
            float path = node.path * probabilities[entry * num_children];
            if (path > 0) push_open(best->heap, &open, (Open){path, found++, entry * num_children, *count});
        }
        node.order = best->counts[depth]++;
        best->depths[*count] = depth;
        best->nodes[(*count)++] = node;
    }
    return OK;
}
