/* Checks that the same proposals give the same trees everywhere: prints a checksum of a few hundred synthetic rounds that
   use everything `native.c` sums, multiplies and ranks. All machines, compilers and flags must print the same. Another processor can be emulated:

       cc -std=c99 -O2 bench/same_tree.c -o same_tree && ./same_tree
       python -m ziglang cc -target aarch64-linux-musl -std=c99 -O3 -ffp-contract=fast bench/same_tree.c -o same_tree
       qemu-aarch64-static ./same_tree */

#include <stdio.h>

#include "../src/graft/spec_decode/native.c"

enum { ROUNDS = 400, ROWS = 3, CAPACITY = 4096, SUCCESSORS = 8, SOURCES = 7, BUCKETS = 32, TOKENS = 8, BEST = 61 };

static uint64_t state = 12345, hash = UINT64_C(1469598103934665603);

static int64_t below(int64_t stop) {
    state = state * UINT64_C(6364136223846793005) + UINT64_C(1442695040888963407);
    return (int64_t)(state >> 33) % stop;
}

static float fraction(int64_t of) { return (float)below(of) / (float)of; }

static void take(const void *bytes, size_t count) {
    for (const unsigned char *at = bytes; count--; at++) hash = (hash ^ *at) * UINT64_C(1099511628211);
}

static int64_t fields[(AGREEMENT + 1) * ROWS * CAPACITY], factors[64], tags[256];
static float paths[ROWS * CAPACITY], values[3 * SOURCES * BUCKETS];
static float tried[3 * SOURCES * BUCKETS], fitted[3 * SOURCES * BUCKETS];
static int32_t trigrams[256 * SUCCESSORS], adjacency[TOKENS * SUCCESSORS];

/* Judges a small tree a row. */
static int learn(const Table *tables, const int64_t *before, const int64_t *earlier, const int64_t *salts, int is_text) {
    enum { WIDTH = 6 };
    int64_t tokens[ROWS * WIDTH], parents[ROWS * WIDTH], sources[ROWS * WIDTH];
    int32_t successors[ROWS * WIDTH * SUCCESSORS];
    float logits[ROWS * WIDTH * SUCCESSORS];
    for (int64_t i = 0; i < ROWS * WIDTH; i++) {
        int64_t node = i % WIDTH;
        tokens[i] = below(TOKENS);
        parents[i] = node ? below(node) : 0;
        sources[i] = node ? 1 : ROOT;
        float logit = 20.0f * fraction(4000);
        for (int64_t s = 0; s < SUCCESSORS; s++) {
            successors[i * SUCCESSORS + s] = (int32_t)below(TOKENS);
            logits[i * SUCCESSORS + s] = logit;
            logit -= 3.0f * fraction(977);
        }
    }
    return graft_learn(
        tables, 2, ROWS, WIDTH, SUCCESSORS, WIDTH * SUCCESSORS, tokens, parents, sources, successors, logits, before,
        earlier, salts, is_text);
}

/* Copies of a text of its own for each row, and of one for all. */
static int attach(Pool *pool, const Chances *chances) {
    static const int64_t MATCHES[] = {2, 3, 4, 6, 9, 13, 18, 24};
    static const double SHARES[] = {0.0, 0.3, 0.6, 0.9};
    const Scale scale = {24, 8, 4, MATCHES, SHARES};
    SuffixIndex indices[ROWS + 1];
    const SuffixIndex *own[ROWS], *past[ROWS];
    int64_t width, count = 80;
    int failed = OK;
    memset(indices, 0, sizeof indices);
    for (int64_t r = 0; r <= ROWS && !failed; r++) {
        SuffixIndex *index = indices + r;
        int32_t text[80];
        for (int64_t i = 0; i < count; i++) text[i] = (int32_t)below(3);
        failed = graft_index_begin(index) || graft_index_extend(&index, 1, &count, text, -1);
        if (r < ROWS) own[r] = index, past[r] = indices + ROWS;
    }
    const int64_t none[ROWS] = {0};
    if (!failed) failed = graft_attach_copies(pool, own, past, NULL, none, none, 2, chances, 10, 9, 32, 40, &scale, &width);
    for (int64_t r = 0; r <= ROWS; r++) graft_index_free(indices + r);
    return failed;
}

static int draft(Pool *pool, const Chances *chances, int64_t num_levels) {
    enum { COUNT = 10 };
    const uint8_t going[ROWS] = {1, 1, 1};
    int64_t first = pool->width - 1;
    for (int64_t level = 0; level < num_levels; level++) {
        int64_t tokens[ROWS * COUNT], parents[ROWS * COUNT];
        float q[ROWS * COUNT];
        double reached[ROWS];
        for (int64_t i = 0; i < ROWS * COUNT; i++) {
            tokens[i] = below(TOKENS);
            parents[i] = level ? 1 + (level - 1) * COUNT + below(COUNT) : 0;
            q[i] = fraction(99999);
        }
        if (graft_add_level(pool, COUNT, tokens, parents, q, chances, 1, level + 1, first, going, 5, reached)) return 1;
        take(reached, sizeof reached);
    }
    return OK;
}

int main(void) {
    for (int64_t i = 0; i < 64; i++) factors[i] = below(1 << 30) << 33 | below(1 << 30) << 3 | 1;
    for (int64_t round = 0; round < ROUNDS; round++) {
        int64_t roots[ROWS], before[ROWS], earlier[ROWS], emitted[ROWS * 4];
        const int64_t salts[ROWS] = {0, 1, 2}, lengths[ROWS] = {4, 4, 4};
        for (int64_t r = 0; r < ROWS; r++) roots[r] = below(TOKENS), before[r] = below(TOKENS), earlier[r] = below(TOKENS);
        for (int64_t i = 0; i < ROWS * 4; i++) emitted[i] = below(TOKENS);
        for (int64_t i = 0; i < 3 * SOURCES * BUCKETS; i++) values[i] = fraction(1001);
        if (round % 50 == 0) {
            memset(trigrams, 0xFF, sizeof trigrams);
            memset(adjacency, 0xFF, sizeof adjacency);
            memset(tags, 0, sizeof tags);
        }
        const Table tables[] = {
            {trigrams, tags, 256, SUCCESSORS, 3, 8, factors, 1}, {adjacency, NULL, TOKENS, SUCCESSORS, 1, 0, factors, 0}};
        const Chances chances = {values, SOURCES, BUCKETS};
        Pool pool = {ROWS, CAPACITY, 0, 0, fields, paths, salts, factors, 64};
        int64_t numbers[4 * ROWS * BEST];
        float shares[2 * ROWS * BEST];
        double gains[BEST - 1];
        int failed = learn(tables, before, earlier, salts, round & 1);
        if (!failed) failed = graft_begin(&pool, roots, before, earlier) || attach(&pool, &chances);
        if (!failed) failed = draft(&pool, &chances, 4) || graft_follow(&pool, tables, 2, &chances, 4, 5, 12, 9);
        if (!failed) failed = graft_merge(&pool, 1, &chances) || graft_best(&pool, BEST, numbers, shares);
        if (!failed) failed = graft_best_gains(&pool, BEST - 1, gains);
        if (!failed) failed = graft_count(&pool, emitted, lengths, tried, fitted, 3, SOURCES, BUCKETS, 100.0f);
        if (failed) return 1;
        take(trigrams, sizeof trigrams);
        take(adjacency, sizeof adjacency);
        take(numbers, sizeof numbers);
        take(shares, sizeof shares);
        take(gains, sizeof gains);
        take(tried, sizeof tried);
        take(fitted, sizeof fitted);
    }
    printf("%016llx\n", (unsigned long long)hash);
    return 0;
}
