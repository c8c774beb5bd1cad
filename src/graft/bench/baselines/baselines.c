/* Trees of the published methods that the benchmark compares with: a template filled from a table, the successor of the
   likeliest leaf, and the likeliest nodes of a row. In C because the time of a method on the host counts in a
   comparison.

   It works on the candidates and tables of `tree/native.c`, and shares their structures and small functions by
   including that file. */

#include "../../tree/native.c"

/* Makes padding of all but the root and the counts[row] likeliest nodes of each row; equal paths count separately. */
int baselines_keep_best(Pool *pool, const int64_t *counts) {
    int64_t *memory = malloc((size_t)(2 * pool->width) * sizeof(int64_t));
    if (memory == NULL) return NO_MEMORY;
    int64_t *chosen = memory, *stays = memory + pool->width;
    for (int64_t r = 0; r < pool->num_rows; r++) {
        float *paths = row_of(pool, r).paths;
        int64_t count = least(counts[r] + 1, pool->width);
        memset(stays, 0, (size_t)pool->width * sizeof(int64_t));
        highest(paths, pool->width, count, chosen);
        for (int64_t i = 0; i < count; i++) stays[chosen[i]] = 1;
        for (int64_t i = 0; i < pool->width; i++)
            if (!stays[i]) paths[i] = 0.0f;
    }
    free(memory);
    return OK;
}

/* Adds the parent's successor of a rank, or padding where the table has none. */
static int add_successor(
    Pool *pool, const Row *row, const Table *table, int64_t node, int64_t parent, int64_t rank, int64_t salt,
    float chance, int64_t source) {
    int64_t number;
    const int32_t *entries = row->paths[parent] > 0 ? longest_known(table, 1, row, parent, salt, &number) : NULL;
    int32_t entry = entries != NULL ? entries[rank] : -1;
    return entry < 0 ? add_node(pool, row, node, 0, parent, 0.0f, source, 0, INHERITED)
                     : add_node(pool, row, node, entry / NUM_BUCKETS, parent, chance, source, 0, INHERITED);
}

/* A fixed tree of ranks: each node is its parent's successor of that rank. Nodes are numbered from 1, 0 is the root,
   and depths do not fall. */
typedef struct {
    int64_t count;
    const int64_t *parents, *ranks, *depths; /* [count] */
} Template;

/* Attaches each row's template at the root, down to max_depth; every node has the same chance. */
int baselines_fill(
    Pool *pool, const Table *table, const Template *const *templates, float chance, int64_t source,
    int64_t max_depth) {
    int64_t widest = 0;
    for (int64_t r = 0; r < pool->num_rows; r++) {
        const Template *template = templates[r];
        int64_t count = 0;
        while (count < template->count && template->depths[count] <= max_depth) count++;
        if (count > widest) widest = count;
    }
    for (int64_t r = 0; r < pool->num_rows; r++) {
        Row row = row_of(pool, r);
        const Template *template = templates[r];
        for (int64_t i = 0; i < widest; i++) {
            int is_real = i < template->count && template->depths[i] <= max_depth, failed;
            int64_t above = is_real ? template->parents[i] : 0, parent = above ? pool->width + above - 1 : 0;
            if (is_real && (template->ranks[i] < 0 || template->ranks[i] >= table->num_successors || above < 0 ||
                            above > i))
                return OUT_OF_RANGE;
            failed = is_real ? add_successor(
                                   pool, &row, table, pool->width + i, parent, template->ranks[i], pool->salts[r],
                                   chance, source)
                             : add_node(pool, &row, pool->width + i, 0, 0, 0.0f, source, 0, INHERITED);
            if (failed) return failed;
        }
    }
    pool->width += widest;
    return OK;
}

/* Adds to each row's likeliest leaf its first successor. */
int baselines_extend_leaf(Pool *pool, const Table *table, float chance, int64_t source, int64_t max_depth) {
    int64_t width = pool->width, failed = OK;
    float *reached = malloc((size_t)width * sizeof(float)); /* path probabilities of leaves, 0 for others */
    if (reached == NULL) return NO_MEMORY;
    for (int64_t r = 0; r < pool->num_rows && !failed; r++) {
        Row row = row_of(pool, r);
        for (int64_t i = 0; i < width; i++) reached[i] = row.fields[DEPTH][i] < max_depth ? row.paths[i] : 0.0f;
        for (int64_t i = 0; i < width; i++)
            if (row.paths[i] > 0) reached[row.fields[PARENT][i]] = 0.0f;
        int64_t leaf;
        highest(reached, width, 1, &leaf);
        int is_leaf = reached[leaf] > 0;
        failed = add_successor(
            pool, &row, table, width, is_leaf ? leaf : 0, 0, pool->salts[r], is_leaf ? chance : 0.0f, source);
    }
    free(reached);
    if (!failed) pool->width++;
    return (int)failed;
}
