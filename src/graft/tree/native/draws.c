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

static uint64_t mix64(uint64_t x) {
    x += UINT64_C(0x9E3779B97F4A7C15);
    x = (x ^ (x >> 30)) * UINT64_C(0xBF58476D1CE4E5B9);
    x = (x ^ (x >> 27)) * UINT64_C(0x94D049BB133111EB);
    return x ^ (x >> 31);
}

/* -log(u) for u between 0 and 1, correct to about 1e-15 of itself. */
static double minus_log(double u) {
    uint64_t bits;
    memcpy(&bits, &u, sizeof bits);
    int64_t exponent = (int64_t)(bits >> 52) - 1023;
    bits = (bits & UINT64_C(0x000FFFFFFFFFFFFF)) | UINT64_C(0x3FF0000000000000);
    double m;
    memcpy(&m, &bits, sizeof m); /* from 1 to 2 */
    if (m > 1.41421356237309505) {
        m *= 0.5;
        exponent++;
    }
    double z = (m - 1.0) / (m + 1.0), square = z * z, sum = 0.0; /* log(m) = 2 (z + z^3 / 3 + z^5 / 5 + ...) */
    for (int n = 25; n > 1; n -= 2) {
        sum += 1.0 / n;
        sum *= square;
    }
    sum += 1.0;
    double own = 2.0 * z * sum, whole = (double)exponent * 0.693147180559945309;
    return -(whole + own);
}

/* E = exp(-g) of a token in a row's draw at a depth, with its Gumbel noise g. E is exponentially distributed, and the
   token with the least E / p^(1/T) is drawn. */
static double draw_time(const Draws *draws, int64_t row, int64_t depth, int64_t token) {
    if (!draws->is_keyed[row]) {
        const float *times = depth <= draws->num_depths ? draws->times[row * draws->num_depths + depth - 1] : NULL;
        return times != NULL ? times[token] : 0.7; /* unknown: about the median */
    }
    uint64_t key = mix64(mix64((uint64_t)draws->seeds[row]) + (uint64_t)(draws->positions[row] + depth - 1));
    uint64_t bits = mix64(key + (uint64_t)token * UINT64_C(0x9E3779B97F4A7C15));
    return minus_log(((double)(bits >> 11) + 0.5) * (1.0 / 9007199254740992.0)); /* 2^-53 */
}

/* Buckets of E. A token of probability p is drawn with probability exp(-E (1 - p) / p). */
enum { NUM_NOISES = 8 };

static int64_t noise_bucket_of(double time) {
    static const double ENDS[NUM_NOISES - 1] = {0.05, 0.15, 0.35, 0.7, 1.3, 2.2, 3.5};
    int64_t bucket = 0;
    while (bucket < NUM_NOISES - 1 && time >= ENDS[bucket]) bucket++;
    return bucket;
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
