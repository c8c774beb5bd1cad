/* What is known of coming draws: the noise of single tokens, and tokens that cannot be drawn. See `model/noise.py`. */

/* The memory of Python's `ComingDraws`, by row. A row of kind 0 is greedy: only its bans count. */
typedef struct {
    const int64_t *kinds;        /* [num_rows] rows of a kind share their acceptance probabilities */
    const int64_t *seeds, *positions; /* [num_rows] of the next draw */
    const double *powers;        /* [num_rows][NUM_BUCKETS] 2^(-b / 2T): the factor for a token b buckets less likely */
    const int64_t *banned, *banned_ends;  /* tokens never drawn, row after row; a row's end at banned_ends[row] */
    const int64_t *endings, *ending_ends; /* tokens that the next num_unending[row] draws cannot give */
    const int64_t *num_unending;
    const float *const *times; /* [num_rows][num_depths] E of all tokens where the noise is not keyed; NULL: keyed */
    const int64_t *is_keyed;   /* [num_rows] */
    int64_t num_depths;
} Draws;

/* E of a token in a row's draw at a depth; see `keyed_time`. */
static double draw_time(const Draws *draws, int64_t row, int64_t depth, int64_t token) {
    if (!draws->is_keyed[row]) {
        const float *times = depth <= draws->num_depths ? draws->times[row * draws->num_depths + depth - 1] : NULL;
        return times != NULL ? times[token] : 0.7; /* unknown: about the median */
    }
    return keyed_time(draws->seeds[row], draws->positions[row] + depth - 1, token);
}

static int is_among(int64_t token, const int64_t *tokens, int64_t start, int64_t end) {
    for (int64_t i = start; i < end; i++)
        if (tokens[i] == token) return 1;
    return 0;
}

/* Whether the row's draw at a depth may give the token. */
static int can_be_drawn(const Draws *draws, int64_t row, int64_t depth, int64_t token) {
    if (draws == NULL) return 1;
    if (is_among(token, draws->banned, row ? draws->banned_ends[row - 1] : 0, draws->banned_ends[row])) return 0;
    return depth > draws->num_unending[row] ||
           !is_among(token, draws->endings, row ? draws->ending_ends[row - 1] : 0, draws->ending_ends[row]);
}

/* E of tokens in the draw of row 0 at a depth. times: written, [count] */
int graft_draw_times(const Draws *draws, int64_t depth, int64_t count, const int64_t *tokens, double *times) {
    for (int64_t i = 0; i < count; i++) times[i] = draw_time(draws, 0, depth, tokens[i]);
    return OK;
}
