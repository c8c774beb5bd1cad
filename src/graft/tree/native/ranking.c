/* Ranking: the likeliest nodes of all rows, and the trees that they make. */

/* The likeliest nodes of all rows: at most caps[row] of a row, roots not counted, and at most `total` together. */
typedef struct {
    int64_t total, stride;
    int64_t most_needs;  /* nodes that need more draft passes are left out; -1: no limit */
    const int64_t *caps; /* [num_rows] at most stride */
    int64_t *nodes;      /* [num_rows][stride] each row's nodes, the likeliest first */
    int64_t *counts;     /* [num_rows] how many nodes each row has there */
} Ranking;

static int rank_rows(const Pool *pool, const Ranking *ranking) {
    float *had = NULL;
    if (ranking->most_needs >= 0) {
        had = malloc((size_t)pool->width * sizeof(float));
        if (had == NULL) return NO_MEMORY;
    }
    for (int64_t r = 0; r < pool->num_rows; r++) {
        Row row = row_of(pool, r);
        const float *paths = row.paths;
        int64_t *nodes = ranking->nodes + r * ranking->stride, num_nodes = 0;
        int64_t count = least(least(ranking->caps[r], ranking->total), pool->width - 1);
        for (int64_t i = 0; had != NULL && i < pool->width; i++)
            had[i] = row.fields[NEED][i] > ranking->most_needs ? 0.0f : paths[i];
        if (had != NULL) paths = had;
        highest(paths + 1, pool->width - 1, count, nodes);
        while (num_nodes < count && paths[nodes[num_nodes] + 1] > 0) nodes[num_nodes++]++;
        ranking->counts[r] = num_nodes;
    }
    free(had);
    return OK;
}

/* A heap of rows, ordered by the path probability of each row's next node; among equals, the first row wins. */
typedef struct {
    const Pool *pool;
    const Ranking *ranking;
    int64_t *rows, *taken;
    int64_t size;
} Heap;

static int comes_first(const Heap *heap, int64_t one, int64_t other) {
    const Ranking *ranking = heap->ranking;
    float a = heap->pool->paths[one * heap->pool->capacity + ranking->nodes[one * ranking->stride + heap->taken[one]]];
    float b =
        heap->pool->paths[other * heap->pool->capacity + ranking->nodes[other * ranking->stride + heap->taken[other]]];
    return a > b || (a == b && one < other);
}

static void sink(Heap *heap, int64_t place) {
    int64_t *rows = heap->rows, moved = rows[place];
    for (int64_t child = 2 * place + 1; child < heap->size; child = 2 * place + 1) {
        if (child + 1 < heap->size && comes_first(heap, rows[child + 1], rows[child])) child++;
        if (!comes_first(heap, rows[child], moved)) break;
        rows[place] = rows[child];
        place = child;
    }
    rows[place] = moved;
}

/* A node's calibrated path probability: the path probability times the ratio of its power of two. truths: the ratios of
   `PathCalibration`; NULL: no calibration. */
static double expected(float path, const double *truths) {
    uint32_t bits;
    if (truths == NULL) return path;
    memcpy(&bits, &path, sizeof bits);
    int64_t power = 126 - (int64_t)(bits >> 23 & 255); /* 0 from 0.5 on, then 1 from 0.25 on ... */
    return path * truths[power < 0 ? 0 : least(power, NUM_TRUTHS - 1)];
}

/* Merges the rows' likeliest nodes into one order: rows[i] is the row of the i-th node, gains[i] the expected number of
   accepted tokens of the first i + 1 nodes. A row's nodes keep their order. memory: 2 * num_rows. */
static int64_t rank_all(
    const Pool *pool, const Ranking *ranking, const double *truths, int64_t *rows, double *gains, int64_t *memory) {
    Heap heap = {pool, ranking, memory, memory + pool->num_rows, 0};
    int64_t num_ranked = 0;
    double sum = 0.0;
    for (int64_t r = 0; r < pool->num_rows; r++) {
        heap.taken[r] = 0;
        if (ranking->counts[r] > 0) heap.rows[heap.size++] = r;
    }
    for (int64_t place = heap.size / 2 - 1; place >= 0; place--) sink(&heap, place);
    while (num_ranked < ranking->total && heap.size > 0) {
        int64_t r = heap.rows[0];
        int64_t node = ranking->nodes[r * ranking->stride + heap.taken[r]++];
        const double *own = truths == NULL || pool->draws == NULL ? truths : truths + pool->draws->kinds[r] * NUM_TRUTHS;
        sum += expected(pool->paths[r * pool->capacity + node], own);
        if (rows != NULL) rows[num_ranked] = r;
        gains[num_ranked++] = sum;
        if (heap.taken[r] == ranking->counts[r]) heap.rows[0] = heap.rows[--heap.size];
        sink(&heap, 0);
    }
    return num_ranked;
}

/* Ranks the likeliest nodes of all rows together: see `Ranking` and `rank_all`. rows, gains: room for `total` entries.
   num_ranked: written, the number of entries. */
int graft_rank(
    Pool *pool, int64_t total, int64_t stride, const int64_t *caps, const double *truths, int64_t *nodes,
    int64_t *rows, double *gains, int64_t *num_ranked) {
    for (int64_t r = 0; r < pool->num_rows; r++)
        if (caps[r] > stride) return OUT_OF_RANGE;
    int64_t *memory = malloc((size_t)(3 * pool->num_rows) * sizeof(int64_t));
    if (memory == NULL) return NO_MEMORY;
    Ranking ranking = {total, stride, -1, caps, nodes, memory + 2 * pool->num_rows};
    int failed = rank_rows(pool, &ranking);
    if (!failed) *num_ranked = rank_all(pool, &ranking, truths, rows, gains, memory);
    free(memory);
    return failed;
}

/* The trees of the roots and the first `count` ranked nodes, each row's likeliest first, and their width.
   nodes, rows: from graft_rank. numbers: written, [4][num_rows][width]: tokens, parents, sources and score buckets.
   shares: written, [2][num_rows][width]: P(accepted | parent accepted) and path probabilities. room: the largest width
   that the outputs hold. */
int graft_tree(
    const Pool *pool, int64_t count, int64_t stride, const int64_t *nodes, const int64_t *rows, int64_t room,
    int64_t *numbers, float *shares, int64_t *width) {
    int64_t *memory = malloc((size_t)(pool->num_rows + pool->width) * sizeof(int64_t));
    if (memory == NULL) return NO_MEMORY;
    int64_t *counts = memory, *place = memory + pool->num_rows; /* node -> its index in the tree */
    for (int64_t r = 0; r < pool->num_rows; r++) counts[r] = 1;
    for (int64_t i = 0; i < count; i++) counts[rows[i]]++;
    *width = 1;
    for (int64_t r = 0; r < pool->num_rows; r++)
        if (counts[r] > *width) *width = counts[r];
    int64_t size = pool->num_rows * *width;
    if (*width > room) {
        free(memory);
        return OUT_OF_RANGE;
    }
    for (int64_t r = 0; r < pool->num_rows; r++) {
        Row row = row_of(pool, r);
        int64_t chosen = r * stride - 1; /* the row's i-th node is nodes[chosen + i], from 1 on */
        place[0] = 0;
        for (int64_t i = 1; i < counts[r]; i++) place[nodes[chosen + i]] = i; /* parents are likelier: chosen too */
        for (int64_t i = 0; i < *width; i++) {
            int64_t at = r * *width + i, node = i == 0 || i >= counts[r] ? 0 : nodes[chosen + i];
            int64_t parent = row.fields[PARENT][node];
            int is_node = i < counts[r];
            float path = is_node ? row.paths[node] : 0.0f, above = row.paths[parent];
            numbers[at] = row.fields[TOKEN][node]; /* padding has the root's */
            numbers[size + at] = is_node ? place[parent] : 0;
            numbers[2 * size + at] = is_node ? row.fields[SOURCE][node] : PADDING;
            numbers[3 * size + at] = is_node ? row.fields[SCORE_BUCKET][node] : 0;
            shares[at] = path / (above > LEAST ? above : LEAST);
            shares[size + at] = path;
        }
    }
    free(memory);
    return OK;
}

/* The value of the likeliest nodes of all rows with only 0, 1, 2 ... max_passes draft passes: the maximum over i of the
   expected accepted tokens of the first counts[i] nodes minus costs[i], and at least 0.
   counts: rising. values: written, [max_passes + 1] */
int graft_values_by_need(
    Pool *pool, int64_t max_passes, int64_t num_counts, const int64_t *counts, const double *costs, int64_t stride,
    const int64_t *caps, const double *truths, double *values) {
    int64_t total = num_counts ? counts[num_counts - 1] : 0;
    int64_t size = pool->num_rows * (stride + 3) + total;
    for (int64_t r = 0; r < pool->num_rows; r++)
        if (caps[r] > stride) return OUT_OF_RANGE;
    int64_t *memory = malloc((size_t)size * sizeof(int64_t));
    double *gains = malloc((size_t)(total + 1) * sizeof(double));
    int failed = memory == NULL || gains == NULL ? NO_MEMORY : OK;
    for (int64_t passes = 0; passes <= max_passes && !failed; passes++) {
        Ranking ranking = {total, stride, passes, caps, memory + 3 * pool->num_rows, memory + 2 * pool->num_rows};
        failed = rank_rows(pool, &ranking);
        int64_t count = failed ? 0 : rank_all(pool, &ranking, truths, NULL, gains, memory);
        values[passes] = 0.0;
        for (int64_t i = 0; i < num_counts && count; i++) {
            int64_t num_nodes = least(counts[i], count);
            double value = (num_nodes > 0 ? gains[num_nodes - 1] : 0.0) - costs[i];
            if (value > values[passes]) values[passes] = value;
        }
    }
    free(memory);
    free(gains);
    return failed;
}
