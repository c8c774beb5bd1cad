/* Arithmetic of trees that gives the same bits on every machine: keys and probabilities of paths, buckets, the noise of
   single tokens, exponentials. The Triton kernels of `tree/device` compute the same, in the same order. */

enum { OK, NO_MEMORY, OUT_OF_RANGE };
enum { ALONE, OPPOSED, AGREED, NUM_AGREEMENTS };

static const float SURE = 0.999f, LEAST = 1e-30f;

static int64_t least(int64_t a, int64_t b) { return a < b ? a : b; }

enum { NUM_BUCKETS = 16 }; /* of probabilities, two per halving: see `bucket_of` */

static int64_t step_key(int64_t token, int64_t factor) {
    return (int64_t)(((uint64_t)token + 1) * (uint64_t)factor);
}

static int64_t sum_keys(int64_t a, int64_t b) { return (int64_t)((uint64_t)a + (uint64_t)b); }

static float path_of(float above, float prob) {
    float path = above * (prob < SURE ? prob : SURE);
    return path < LEAST ? 0.0f : path;
}

/* Buckets of probabilities, two per halving: bucket b starts at 2^(-b/2) and goes down to the start of the next one. */
static int64_t bucket_of(double probability) {
#define HALF 0.70710678118654752440 /* half a halving: 2^(-1/2) */
    static const double STARTS[NUM_BUCKETS] = {1.0,      HALF,      1.0 / 2,  HALF / 2,  1.0 / 4,  HALF / 4,
                                               1.0 / 8,  HALF / 8,  1.0 / 16, HALF / 16, 1.0 / 32, HALF / 32,
                                               1.0 / 64, HALF / 64, 1.0 / 128, HALF / 128};
    for (int64_t bucket = 1; bucket < NUM_BUCKETS; bucket++)
        if (!(probability <= STARTS[bucket])) return bucket - 1;
    return NUM_BUCKETS - 1;
}

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

/* E = exp(-g) of a token in the draw at a position, with its Gumbel noise g. E is exponentially distributed, and the
   token with the least E / p^(1/T) is drawn. */
static double keyed_time(int64_t seed, int64_t position, int64_t token) {
    uint64_t key = mix64(mix64((uint64_t)seed) + (uint64_t)position);
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

/* exp(x) for x <= 0 as an integer, in units of 2^-30. */
static int64_t exp_of(float x) {
    /* The Taylor series of 2^-f for f from 0 to 1: the sum of c_i (-f)^i. */
    static const int64_t COEFFICIENTS[] = {
        1073741824, 744261118, 257941248, 59597083, 10327387, 1431680, 165394, 16377, 1419, 109, 8};
    if (!(x > -20.0f)) return 0;
    int64_t halvings = x < 0.0f ? (int64_t)((double)x * -1549082004.679870) : 0; /* 2^30 / log(2) */
    int64_t fraction = halvings & 0x3FFFFFFF, sum = 0;
    for (int place = 10; place >= 0; place--) sum = COEFFICIENTS[place] - ((sum * fraction) >> 30);
    return sum >> (halvings >> 30);
}

enum { MAX_SUCCESSORS = 64 };

/* Table entries of the top-k tokens after a node, with the score buckets of their softmax over the top k. */
static void entries_of(int64_t num_successors, const int32_t *tokens, const float *logits, int32_t *entries) {
    int64_t weights[MAX_SUCCESSORS], total = 0;
    for (int64_t s = 0; s < num_successors; s++) total += weights[s] = exp_of(logits[s] - logits[0]);
    for (int64_t s = 0; s < num_successors; s++)
        entries[s] = (int32_t)(tokens[s] * NUM_BUCKETS + bucket_of((double)weights[s] / (double)total));
}
