/* A round's bookkeeping beside the models, always on the host: candidates, successor tables, suffix lookup and the
   acceptance walk. A round is a thousand small steps, and a tensor operation costs more than such a step.

   The same proposals give the same tree on every machine. Sums and products are taken in the order that stands here,
   none is followed by another operation that a compiler could contract with it, and nothing is asked of a machine's
   mathematical library: logarithms are comparisons, exponentials whole numbers.

   Rows are independent of each other: where there are many, threads share them, and the results are the same however
   many threads there are.

   Functions return OK, NO_MEMORY or OUT_OF_RANGE. Memory is the caller's, but for that of a `SuffixIndex`, which
   `graft_index_free` frees. */

#define _POSIX_C_SOURCE 200809L

#include <pthread.h>
#include <signal.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>
#include <unistd.h>

enum { OK, NO_MEMORY, OUT_OF_RANGE };
enum { TOKEN, BEFORE, DEPTH, KEY, NEED, PARENT, EARLIER, SOURCE, SCORE_BUCKET, AGREEMENT };
enum { ALONE, OPPOSED, AGREED };
enum { ROOT = 0, PADDING = -1, INHERITED = -1, NUM_TRUTHS = 12 };

static const float SURE = 0.999f, LEAST = 1e-30f;

static int64_t least(int64_t a, int64_t b) { return a < b ? a : b; }

/* Candidates */

/* The memory of Python's `Candidates`: the nodes proposed for a round, in num_rows rows of `width` each. */
typedef struct {
    int64_t num_rows, capacity, width;
    int64_t deepest; /* the greatest depth of a node so far */
    int64_t *fields; /* [fields][num_rows][capacity] */
    float *paths;    /* [num_rows][capacity] P(the target accepts the path down to the node); 0 is padding */
    const int64_t *salts;   /* [num_rows] whose table entries each row uses */
    const int64_t *factors; /* [num_factors] by depth, of the hash of a path, its key */
    int64_t num_factors;
} Pool;

/* Threads */

enum { MOST_THREADS = 8, ROWS_A_THREAD = 4 };

/* Some of the rows, for one thread: it works on a pool of its own, with the same memory. */
typedef struct {
    Pool pool;
    int64_t start, stop; /* rows */
    const void *arguments;
    int64_t most; /* the most nodes that one of its rows got, where they differ */
    int failed;
} Part;

typedef void Work(Part *part);

/* Threads wait for work for ever; they are started when they are first needed, and again in a forked process, which
   has none. One caller at a time: they hold Python's lock. Whoever is free takes the next part, the caller too, so that
   it does not wait for a thread that is slow to wake.

   A round's calls come one soon after the other, and to wake a thread may take longer than a part of the work. So where
   there are cores to spare, a thread that has nothing to do looks out for work for a while before it sleeps, and the
   caller for the end of the others' parts. */
enum { CORES_TO_SPARE = 2 * MOST_THREADS, LOOKS = 64 };
static const int64_t LOOKING_OUT = 200000; /* nanoseconds */

static struct {
    pthread_mutex_t lock;
    pthread_cond_t begun, done;
    pid_t process;
    int64_t limit, num_started;
    int64_t num_parts, next; /* of the work under way: how many there are, and the first that nobody has taken */
    int64_t num_left;        /* those not done yet */
    int64_t round;           /* grows with every work */
    int looks_out;
    Work *work;
    Part *parts;
} team = {.lock = PTHREAD_MUTEX_INITIALIZER, .begun = PTHREAD_COND_INITIALIZER, .done = PTHREAD_COND_INITIALIZER,
          .limit = 1};

/* How many cores there are for threads, the caller's included. */
int graft_use_threads(int64_t count) {
    team.limit = count < 1 ? 1 : count < MOST_THREADS ? count : MOST_THREADS;
    __atomic_store_n(&team.looks_out, count >= CORES_TO_SPARE, __ATOMIC_RELAXED);
    return OK;
}

/* Looks at a number for a while, until it is `value` or, if not `until`, until it is no longer. */
static void look_out(const int64_t *number, int64_t value, int until) {
    struct timespec start, now;
    if (!__atomic_load_n(&team.looks_out, __ATOMIC_RELAXED)) return;
    clock_gettime(CLOCK_MONOTONIC, &start);
    do {
        for (int i = 0; i < LOOKS; i++) {
            if ((__atomic_load_n(number, __ATOMIC_ACQUIRE) == value) == until) return;
#if defined(__x86_64__) || defined(__i386__)
            __builtin_ia32_pause();
#endif
        }
        clock_gettime(CLOCK_MONOTONIC, &now);
    } while ((now.tv_sec - start.tv_sec) * INT64_C(1000000000) + now.tv_nsec - start.tv_nsec < LOOKING_OUT);
}

/* Does the next part. The lock is held before and after. */
static void do_part(void) {
    Work *work = team.work;
    Part *part = team.parts + team.next++;
    pthread_mutex_unlock(&team.lock);
    work(part);
    pthread_mutex_lock(&team.lock);
    if (__atomic_sub_fetch(&team.num_left, 1, __ATOMIC_RELEASE) == 0) pthread_cond_signal(&team.done);
}

static void *wait_for_work(void *nothing) {
    (void)nothing;
    pthread_mutex_lock(&team.lock);
    for (;;) {
        while (team.next == team.num_parts) {
            int64_t round = team.round;
            pthread_mutex_unlock(&team.lock);
            look_out(&team.round, round, 0);
            pthread_mutex_lock(&team.lock);
            if (team.round == round) pthread_cond_wait(&team.begun, &team.lock);
        }
        do_part();
    }
    return NULL;
}

/* Starts threads until there are `count`, the caller's included, and returns how many there are. */
static int64_t start_threads(int64_t count) {
    sigset_t all, before;
    if (team.process != getpid()) {
        pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;
        pthread_cond_t waiting = PTHREAD_COND_INITIALIZER;
        team.lock = lock;
        team.begun = team.done = waiting;
        team.process = getpid();
        team.num_started = team.num_parts = team.next = team.round = 0;
    }
    if (team.num_started + 1 >= count) return count;
    sigfillset(&all); /* signals are for the threads that Python knows */
    pthread_sigmask(SIG_SETMASK, &all, &before);
    while (team.num_started + 1 < count) {
        pthread_t thread;
        if (pthread_create(&thread, NULL, wait_for_work, NULL)) break;
        pthread_detach(thread);
        team.num_started++;
    }
    pthread_sigmask(SIG_SETMASK, &before, NULL);
    return team.num_started + 1;
}

/* Does the work for all rows, in parts. The pool's deepest node is then that of all parts, and `most`, unless NULL, the
   most of all. Of several failures the first row's counts. */
static int share_work(Pool *pool, Work *work, const void *arguments, int64_t *most) {
    Part parts[MOST_THREADS];
    int64_t count = least(team.limit, pool->num_rows / (team.looks_out ? 1 : ROWS_A_THREAD));
    count = count < 2 ? 1 : start_threads(count);
    for (int64_t p = 0; p < count; p++)
        parts[p] = (Part){*pool, pool->num_rows * p / count, pool->num_rows * (p + 1) / count, arguments, 0, OK};
    if (count > 1) {
        pthread_mutex_lock(&team.lock);
        team.work = work;
        team.parts = parts;
        team.num_parts = count;
        team.next = 0;
        __atomic_store_n(&team.num_left, count, __ATOMIC_RELAXED);
        __atomic_add_fetch(&team.round, 1, __ATOMIC_RELEASE);
        pthread_cond_broadcast(&team.begun);
        while (team.next < team.num_parts) do_part();
        pthread_mutex_unlock(&team.lock);
        look_out(&team.num_left, 0, 1);
        pthread_mutex_lock(&team.lock);
        while (team.num_left > 0) pthread_cond_wait(&team.done, &team.lock);
        team.num_parts = team.next = 0;
        pthread_mutex_unlock(&team.lock);
    } else
        work(parts);
    int failed = OK;
    for (int64_t p = 0; p < count; p++) {
        if (!failed) failed = parts[p].failed;
        if (parts[p].pool.deepest > pool->deepest) pool->deepest = parts[p].pool.deepest;
        if (most != NULL && parts[p].most > *most) *most = parts[p].most;
    }
    return failed;
}

/* P(accepted | parent accepted), [agreements][num_sources][num_buckets] */
typedef struct {
    const float *values;
    int64_t num_sources, num_buckets;
} Chances;

/* One row of the candidates: where its columns begin. */
typedef struct {
    int64_t *fields[AGREEMENT + 1];
    float *paths;
} Row;

static Row row_of(const Pool *pool, int64_t row) {
    Row found;
    for (int field = 0; field <= AGREEMENT; field++)
        found.fields[field] = pool->fields + (field * pool->num_rows + row) * pool->capacity;
    found.paths = pool->paths + row * pool->capacity;
    return found;
}

static int64_t step_key(int64_t token, int64_t factor) {
    return (int64_t)(((uint64_t)token + 1) * (uint64_t)factor);
}

static int64_t sum_keys(int64_t a, int64_t b) { return (int64_t)((uint64_t)a + (uint64_t)b); }

static int chance_of(const Chances *chances, int64_t agreement, int64_t source, int64_t score_bucket, float *chance) {
    if (source < 0 || source >= chances->num_sources || score_bucket < 0 || score_bucket >= chances->num_buckets)
        return OUT_OF_RANGE;
    *chance = chances->values[(agreement * chances->num_sources + source) * chances->num_buckets + score_bucket];
    return OK;
}

static float path_of(float above, float chance) {
    float path = above * (chance < SURE ? chance : SURE);
    return path < LEAST ? 0.0f : path;
}

/* Buckets of probabilities, two a halving: bucket b is from 2^(-b/2) down to the start of the next. */
enum { NUM_BUCKETS = 16 };

static int64_t bucket_of(double probability) {
#define HALF 0.70710678118654752440 /* of a halving */
    static const double STARTS[NUM_BUCKETS] = {1.0,      HALF,      1.0 / 2,  HALF / 2,  1.0 / 4,  HALF / 4,
                                               1.0 / 8,  HALF / 8,  1.0 / 16, HALF / 16, 1.0 / 32, HALF / 32,
                                               1.0 / 64, HALF / 64, 1.0 / 128, HALF / 128};
    for (int64_t bucket = 1; bucket < NUM_BUCKETS; bucket++)
        if (!(probability <= STARTS[bucket])) return bucket - 1;
    return NUM_BUCKETS - 1;
}

/* Top-k: indices of the `count` highest values, best first, of equal values the first. */
static void highest(const float *values, int64_t num_values, int64_t count, int64_t *places) {
    int64_t found = 0;
    for (int64_t i = 0; i < num_values && count > 0; i++) {
        float value = values[i];
        if (found == count && !(value > values[places[count - 1]])) continue;
        int64_t at = found < count ? found++ : count - 1;
        for (; at > 0 && values[places[at - 1]] < value; at--) places[at] = places[at - 1];
        places[at] = i;
    }
}

static int add_node(
    Pool *pool, const Row *row, int64_t node, int64_t token, int64_t parent, float chance, int64_t source,
    int64_t score_bucket, int64_t needs) {
    int64_t *const *fields = row->fields;
    if (node >= pool->capacity || parent < 0 || parent >= node) return OUT_OF_RANGE;
    int64_t depth = fields[DEPTH][parent] + 1;
    if (depth >= pool->num_factors) return OUT_OF_RANGE;
    fields[TOKEN][node] = token;
    fields[BEFORE][node] = fields[TOKEN][parent];
    fields[DEPTH][node] = depth;
    fields[KEY][node] = sum_keys(fields[KEY][parent], step_key(token, pool->factors[depth]));
    fields[NEED][node] = needs == INHERITED ? fields[NEED][parent] : needs;
    fields[PARENT][node] = parent;
    fields[EARLIER][node] = fields[BEFORE][parent];
    fields[SOURCE][node] = source;
    fields[SCORE_BUCKET][node] = score_bucket;
    fields[AGREEMENT][node] = ALONE;
    row->paths[node] = path_of(row->paths[parent], chance);
    if (depth > pool->deepest) pool->deepest = depth;
    return OK;
}

/* Starts with the roots alone. roots, before, earlier: [num_rows] the last token and the two before. */
int graft_begin(Pool *pool, const int64_t *roots, const int64_t *before, const int64_t *earlier) {
    if (pool->capacity < 1) return OUT_OF_RANGE;
    for (int64_t r = 0; r < pool->num_rows; r++) {
        Row row = row_of(pool, r);
        for (int field = 0; field <= AGREEMENT; field++) row.fields[field][0] = 0;
        row.fields[TOKEN][0] = roots[r];
        row.fields[BEFORE][0] = before[r];
        row.fields[EARLIER][0] = earlier[r];
        row.fields[SOURCE][0] = ROOT;
        row.paths[0] = 1.0f;
    }
    pool->width = 1;
    pool->deepest = 0;
    return OK;
}

/* Adds nodes. All columns are [num_rows][count]; a node's parent may be a new one before it. */
int graft_add(
    Pool *pool, int64_t count, const int64_t *tokens, const int64_t *parents, const float *chances,
    const int64_t *sources, const int64_t *score_bucket, int64_t needs) {
    for (int64_t r = 0; r < pool->num_rows; r++) {
        Row row = row_of(pool, r);
        for (int64_t i = 0; i < count; i++) {
            int64_t at = r * count + i;
            int failed = add_node(
                pool, &row, pool->width + i, tokens[at], parents[at], chances[at], sources[at], score_bucket[at],
                needs);
            if (failed) return failed;
        }
    }
    pool->width += count;
    return OK;
}

/* Adds nodes made in Python. columns: [4][num_rows][count] of tokens, parents, sources and score buckets; the first
   counts[row] of each row are nodes, the others padding. */
int graft_add_rows(
    Pool *pool, int64_t count, const int64_t *columns, const int64_t *counts, const Chances *chances) {
    int64_t size = pool->num_rows * count;
    for (int64_t r = 0; r < pool->num_rows; r++) {
        Row row = row_of(pool, r);
        for (int64_t i = 0; i < count; i++) {
            const int64_t *at = columns + r * count + i;
            int64_t source = at[2 * size], score_bucket = at[3 * size];
            float chance = 0.0f;
            int failed = i < counts[r] ? chance_of(chances, ALONE, source, score_bucket, &chance) : OK;
            if (!failed)
                failed = add_node(
                    pool, &row, pool->width + i, at[0], at[size], chance, source, score_bucket, INHERITED);
            if (failed) return failed;
        }
    }
    pool->width += count;
    return OK;
}

typedef struct {
    int64_t count;
    const int64_t *tokens, *parents;
    const float *probabilities;
    const Chances *chances;
    int64_t source, needs, first;
    const uint8_t *going;
    int64_t num_beams;
    double *reached;
} DraftedLevel;

static void add_level(Part *part) {
    const DraftedLevel *level = part->arguments;
    const Chances *chances = level->chances;
    Pool *pool = &part->pool;
    for (int64_t r = part->start; r < part->stop; r++) {
        Row row = row_of(pool, r);
        float sum = 0.0f;
        for (int64_t i = 0; i < level->count; i++) {
            int64_t at = r * level->count + i, node = pool->width + i;
            int64_t parent = level->parents[at] > 0 ? level->parents[at] + level->first : 0;
            float chance = level->probabilities[at];
            int going = level->going[r] && chance > 0.0f;
            int64_t score_bucket = chances->values == NULL ? 0 : bucket_of(chance);
            if (chances->values != NULL)
                part->failed = chance_of(chances, ALONE, level->source, score_bucket, &chance);
            if (!part->failed)
                part->failed = add_node(
                    pool, &row, node, level->tokens[at], parent, going ? chance : 0.0f, level->source,
                    score_bucket, level->needs);
            if (part->failed) return;
            if (i < level->num_beams) sum += row.paths[node];
        }
        level->reached[r] = sum < 1.0f ? sum : 1.0f;
    }
}

/* Adds a drafted level. tokens, parents, probabilities: [num_rows][count]; parents are numbers in the drafted tree,
   whose nodes but the root are `first` further on among the candidates. Without values in `chances` the drafter's q is
   the acceptance probability; q of 0 adds padding. reached: by row, P(the target accepts one of the first num_beams), at most 1. */
int graft_add_level(
    Pool *pool, int64_t count, const int64_t *tokens, const int64_t *parents, const float *probabilities,
    const Chances *chances, int64_t source, int64_t needs, int64_t first, const uint8_t *going, int64_t num_beams,
    double *reached) {
    DraftedLevel level = {count, tokens, parents, probabilities, chances, source, needs, first, going, num_beams,
                          reached};
    int failed = share_work(pool, add_level, &level, NULL);
    if (!failed) pool->width += count;
    return failed;
}

typedef struct {
    int64_t drafted;
    const Chances *chances;
} Merging;

static void merge(Part *part) {
    const Pool *pool = &part->pool;
    const Chances *chances = ((const Merging *)part->arguments)->chances;
    int64_t width = pool->width, num_slots = 16, drafted = ((const Merging *)part->arguments)->drafted;
    int bits = 4;
    for (; num_slots < 2 * width; num_slots *= 2) bits++;
    int64_t *memory = malloc((size_t)(num_slots + 6 * width + pool->deepest + 2) * sizeof(int64_t));
    if (memory == NULL) {
        part->failed = NO_MEMORY;
        return;
    }
    int64_t *slots = memory;                 /* hash table: the likeliest node of each path so far, or -1 */
    int64_t *kept = slots + num_slots;       /* node -> the likeliest copy of its path */
    int64_t *first_source = kept + width;    /* at a node that is kept: the lowest source of all its copies */
    int64_t *last_source = first_source + width;
    int64_t *needs = last_source + width;
    int64_t *spoke = needs + width;          /* whether the drafter proposed a child */
    int64_t *order = spoke + width;          /* nodes sorted by depth */
    int64_t *starts = order + width;         /* where each depth starts in `order` */
    for (int64_t r = part->start; r < part->stop && !part->failed; r++) {
        Row row = row_of(pool, r);
        const int64_t *keys = row.fields[KEY], *sources = row.fields[SOURCE], *depths = row.fields[DEPTH];
        int64_t *parents = row.fields[PARENT], *agreement = row.fields[AGREEMENT];
        float *paths = row.paths;
        for (int64_t s = 0; s < num_slots; s++) slots[s] = -1;
        for (int64_t i = 0; i < width; i++) {
            uint64_t slot = ((uint64_t)keys[i] * UINT64_C(0x9E3779B97F4A7C15)) >> (64 - bits);
            while (slots[slot] >= 0 && keys[slots[slot]] != keys[i]) slot = (slot + 1) & (uint64_t)(num_slots - 1);
            if (slots[slot] < 0 || paths[i] > paths[slots[slot]]) slots[slot] = i;
            kept[i] = (int64_t)slot;
        }
        for (int64_t i = 0; i < width; i++) {
            kept[i] = slots[kept[i]];
            first_source[i] = last_source[i] = sources[i];
            needs[i] = row.fields[NEED][i];
            spoke[i] = 0;
        }
        for (int64_t i = 0; i < width; i++) {
            int64_t k = kept[i];
            parents[i] = kept[parents[i]];
            if (!(paths[i] > 0)) continue; /* padding */
            needs[k] = least(needs[k], row.fields[NEED][i]);
            first_source[k] = least(first_source[k], sources[i]);
            last_source[k] = -least(-last_source[k], -sources[i]);
            if (sources[i] == drafted) spoke[parents[i]] = 1;
        }
        for (int64_t i = 0; i < width; i++) {
            row.fields[NEED][i] = kept[i] == i ? needs[i] : 0;
            if (kept[i] != i) paths[i] = 0.0f;
            agreement[i] = ALONE;
        }
        if (chances->values == NULL) continue;
        /* The kept copy of a parent may come after its child: probabilities are computed again depth by depth. */
        memset(starts, 0, (size_t)(pool->deepest + 2) * sizeof(int64_t));
        for (int64_t i = 0; i < width; i++) starts[depths[i] + 1]++;
        for (int64_t d = 0; d <= pool->deepest; d++) starts[d + 1] += starts[d];
        for (int64_t i = 0; i < width; i++) order[starts[depths[i]]++] = i;
        for (int64_t o = 0; o < width && !part->failed; o++) {
            int64_t i = order[o];
            float chance;
            if (kept[i] == i && first_source[i] != last_source[i])
                agreement[i] = AGREED;
            else if (spoke[parents[i]] && sources[i] != drafted)
                agreement[i] = OPPOSED;
            if (i == 0 || !(paths[i] > 0)) continue;
            part->failed = chance_of(chances, agreement[i], sources[i], row.fields[SCORE_BUCKET][i], &chance);
            if (!part->failed) paths[i] = path_of(paths[parents[i]], chance);
        }
    }
    free(memory);
}

/* Merges equal paths into the likeliest copy; the others become padding. Without values in `chances`, probabilities are
   not computed again by agreement. */
int graft_merge(Pool *pool, int64_t drafted, const Chances *chances) {
    Merging merging = {drafted, chances};
    return share_work(pool, merge, &merging, NULL);
}

/* The likeliest nodes of all rows together: of each row at most caps[row], the root not counted, and of all `total`. */
typedef struct {
    int64_t total, stride;
    int64_t most_needs;  /* nodes that need more draft passes are left out; -1: none is */
    const int64_t *caps; /* [num_rows] at most stride */
    int64_t *nodes;      /* [num_rows][stride] each row's own likeliest first */
    int64_t *counts;     /* [num_rows] how many of them there are */
} Ranking;

static void rank_rows(Part *part) {
    const Ranking *ranking = part->arguments;
    const Pool *pool = &part->pool;
    float *had = NULL;
    if (ranking->most_needs >= 0) {
        had = malloc((size_t)pool->width * sizeof(float));
        if (had == NULL) {
            part->failed = NO_MEMORY;
            return;
        }
    }
    for (int64_t r = part->start; r < part->stop; r++) {
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
}

/* A heap of rows by the path probability of each one's next node; of equal ones the first row. */
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

/* What of a node's path probability comes true: truths, NULL for all of it, are by its power of two (see
   `PathCalibration`). */
static double expected(float path, const double *truths) {
    uint32_t bits;
    if (truths == NULL) return path;
    memcpy(&bits, &path, sizeof bits);
    int64_t power = 126 - (int64_t)(bits >> 23 & 255); /* 0 from 0.5 on, then 1 from 0.25 on ... */
    return path * truths[power < 0 ? 0 : least(power, NUM_TRUTHS - 1)];
}

/* Puts the rows' likeliest in one order: rows[i] is the row of the i-th node, gains[i] the expected accepted of the
   first i + 1. The j-th node of a row in that order is its own j-th. memory: 2 * num_rows. */
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
        sum += expected(pool->paths[r * pool->capacity + node], truths);
        if (rows != NULL) rows[num_ranked] = r;
        gains[num_ranked++] = sum;
        if (heap.taken[r] == ranking->counts[r]) heap.rows[0] = heap.rows[--heap.size];
        sink(&heap, 0);
    }
    return num_ranked;
}

/* Ranks the likeliest nodes of all rows together: see `Ranking` and `rank_all`. rows, gains: room for `total`;
   num_ranked: how many there are. */
int graft_rank(
    Pool *pool, int64_t total, int64_t stride, const int64_t *caps, const double *truths, int64_t *nodes,
    int64_t *rows, double *gains, int64_t *num_ranked) {
    for (int64_t r = 0; r < pool->num_rows; r++)
        if (caps[r] > stride) return OUT_OF_RANGE;
    int64_t *memory = malloc((size_t)(3 * pool->num_rows) * sizeof(int64_t));
    if (memory == NULL) return NO_MEMORY;
    Ranking ranking = {total, stride, -1, caps, nodes, memory + 2 * pool->num_rows};
    int failed = share_work(pool, rank_rows, &ranking, NULL);
    if (!failed) *num_ranked = rank_all(pool, &ranking, truths, rows, gains, memory);
    free(memory);
    return failed;
}

/* The tree of the roots and the first `count` of what was ranked, each row's likeliest first, and how wide it is.
   nodes, rows: as graft_rank gave them. numbers: room for [4][num_rows][width] of tokens, parents, sources and score
   buckets; shares: for [2][num_rows][width] of P(accepted | parent accepted) and path probabilities. No row is wider
   than `room`. */
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
        for (int64_t i = 1; i < counts[r]; i++) place[nodes[chosen + i]] = i; /* parents are likelier: they are there */
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

/* What the likeliest nodes of all rows together would have been worth, had there been 0, 1, 2 ... max_passes draft
   passes: expected accepted tokens of the first counts[i] less costs[i], for the i that is worth most, and at least 0.
   counts: rising. values: [max_passes + 1] */
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
        failed = share_work(pool, rank_rows, &ranking, NULL);
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

/* Whether any candidate was drafted so far. */
static int is_drafted(const Pool *pool) {
    for (int64_t r = 0; r < pool->num_rows; r++) {
        const int64_t *needs = row_of(pool, r).fields[NEED];
        for (int64_t i = 0; i < pool->width; i++)
            if (needs[i]) return 1;
    }
    return 0;
}

/* The nodes of a row to look up continuations for, at most max(count, 1), and their number: see `Candidates.places`. */
static int64_t places_of(
    const Pool *pool, const Row *row, int drafted, int64_t count, int64_t max_depth, int64_t *nodes) {
    int64_t num_found = 0;
    if (!drafted) { /* the root alone */
        nodes[0] = 0;
        return 1;
    }
    count = least(count, pool->width - 1);
    highest(row->paths + 1, pool->width - 1, count, nodes);
    for (int64_t i = 0; i < count; i++) {
        int64_t node = nodes[i] + 1;
        if (row->paths[node] > 0 && row->fields[DEPTH][node] < max_depth) nodes[num_found++] = node;
    }
    return num_found;
}

/* found: for each row the number of places, and of each its node, its depth and the tokens of its path. It needs room
   for num_rows * (1 + max(count, 1) * (2 + depth)) numbers, with the lesser of max_depth and the deepest node's depth.
   */
int graft_places(const Pool *pool, int64_t count, int64_t max_depth, int64_t *found) {
    int64_t *nodes = malloc((size_t)(count + 1) * sizeof(int64_t));
    if (nodes == NULL) return NO_MEMORY;
    int drafted = is_drafted(pool);
    for (int64_t r = 0; r < pool->num_rows; r++) {
        Row row = row_of(pool, r);
        int64_t num_places = places_of(pool, &row, drafted, count, max_depth, nodes);
        *found++ = num_places;
        for (int64_t i = 0; i < num_places; i++) {
            int64_t depth = row.fields[DEPTH][nodes[i]];
            *found++ = nodes[i];
            *found++ = depth;
            for (int64_t d = depth, at = nodes[i]; d > 0; at = row.fields[PARENT][at])
                found[--d] = row.fields[TOKEN][at];
            found += depth;
        }
    }
    free(nodes);
    return OK;
}

/* Adds to the counts, by agreement, source and score bucket, the nodes whose parent's path was emitted with a token
   behind it (tried), and those that are this token (fitted). emitted: the rows' new tokens, one row after the other.
   Counts above `memory` are scaled down to it, so that old ones fade. */
int graft_count(
    const Pool *pool, const int64_t *emitted, const int64_t *lengths, float *tried, float *fitted,
    int64_t num_agreements, int64_t num_sources, int64_t num_buckets, float memory) {
    enum { FOLLOWED = 1, FITTED = 2 };
    uint8_t *came = malloc((size_t)pool->width); /* by node: FOLLOWED, FITTED */
    int64_t *keys = malloc((size_t)(pool->num_factors + 1) * sizeof(int64_t)); /* of the emitted path, by depth */
    int failed = came == NULL || keys == NULL ? NO_MEMORY : OK;
    for (int64_t r = 0; r < pool->num_rows && !failed; emitted += lengths[r++]) {
        Row row = row_of(pool, r);
        if (lengths[r] >= pool->num_factors) failed = OUT_OF_RANGE;
        keys[0] = 0;
        for (int64_t d = 1; d <= lengths[r] && !failed; d++)
            keys[d] = sum_keys(keys[d - 1], step_key(emitted[d - 1], pool->factors[d]));
        for (int64_t i = 0; i < pool->width && !failed; i++) {
            int64_t depth = row.fields[DEPTH][i];
            int is_true = depth <= lengths[r] && row.fields[KEY][i] == keys[depth];
            came[i] = (uint8_t)(is_true ? (depth < lengths[r] ? FOLLOWED : 0) | (depth > 0 ? FITTED : 0) : 0);
        }
        for (int64_t i = 1; i < pool->width && !failed; i++) {
            int64_t source = row.fields[SOURCE][i], score_bucket = row.fields[SCORE_BUCKET][i];
            int64_t agreement = row.fields[AGREEMENT][i];
            if (!(came[row.fields[PARENT][i]] & FOLLOWED) || source <= ROOT || !(row.paths[i] > 0)) continue;
            if (agreement >= num_agreements || source >= num_sources || score_bucket < 0 ||
                score_bucket >= num_buckets) {
                failed = OUT_OF_RANGE;
                break;
            }
            int64_t cell = (agreement * num_sources + source) * num_buckets + score_bucket;
            tried[cell] += 1.0f;
            if (came[i] & FITTED) fitted[cell] += 1.0f;
        }
    }
    for (int64_t cell = 0; cell < num_agreements * num_sources * num_buckets && !failed; cell++) {
        float fade = memory / tried[cell];
        if (!(fade < 1.0f)) continue;
        tried[cell] *= fade;
        fitted[cell] *= fade;
    }
    free(came);
    free(keys);
    return failed;
}

/* Acceptance */

/* The walk down trees [num_rows][width] by the token chosen after each node, to the first token that is no child.
   nodes, came: [num_rows][width], the accepted nodes and the new tokens; counts[row] tokens, and one node less. Of
   equal children the first is taken. */
int graft_walk(
    int64_t num_rows, int64_t width, const int64_t *tokens, const int64_t *parents, const int64_t *sources,
    const int64_t *chosen, int64_t *nodes, int64_t *came, int64_t *counts) {
    for (int64_t r = 0; r < num_rows; r++) {
        int64_t first = r * width, count = 0, node = 0;
        came[first] = chosen[first];
        for (int64_t i = 1; i < width; i++) { /* a child comes after its parent */
            int64_t at = first + i;
            if (parents[at] != node || tokens[at] != came[first + count] || sources[at] <= ROOT) continue;
            node = i;
            nodes[first + count++] = node;
            came[first + count] = chosen[at];
        }
        counts[r] = count + 1;
    }
    return OK;
}

/* Trees [num_rows][width] one behind the other, as a flat step has them: a row's padding comes last and is left out.
   columns: [6][room] of tokens, parents (places in the row's own tree), places, depths, rows and numbers in strips;
   starts, counts: [num_rows] each row's first token in the step and its number of tokens; index: [num_rows][width] the
   token of each node, the root's for padding. total: tokens of the step.
   A strip is a run of nodes down one path: a node's first child goes on with the node's own, any other begins one. A
   node's number in its strip counts from 1, and is negative for the last, which has no child. */
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

/* Best-first trees */

/* A node that has not been taken yet: the child at `at` in a row's table, of the node `parent`. */
typedef struct {
    float path;          /* probability of the path down to it */
    int64_t order;       /* of equals the one that was found first goes first */
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

/* The trees of the likeliest paths, at most num_nodes nodes each, by tables [num_rows][num_entries][num_children] of
   tokens, of their probabilities after the node before, in falling order, and of the entry that has a token's own
   children, -1 for none. The root's children are in entry 0. Nodes come out level by level, a level [num_rows][width]
   behind the one before, likeliest first and then padding, whose probability is 0; parents are numbered so, from 1 on,
   and the root is 0. widths: [num_levels] the most nodes that a row has at each depth; room: of the other outputs. */
int graft_best_first(
    int64_t num_rows, int64_t num_entries, int64_t num_children, const int32_t *tokens, const float *probabilities,
    const int32_t *entries, int64_t num_levels, int64_t num_nodes, int64_t room, int64_t *widths, int64_t *out_tokens,
    int64_t *out_parents, float *out_probabilities, float *out_paths) {
    size_t total = (size_t)(num_rows * num_nodes);
    Open *heap = malloc((size_t)(2 * num_nodes + 2) * sizeof(Open));
    Open *nodes = malloc(total * sizeof(Open)); /* those taken; `order` is then the place in the level */
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
    if (!failed && needed > 0) { /* outputs without room may be NULL, which memset must not be given */
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

/* Numbers of nodes by source in trees [num_rows][width]. counts: [num_rows][num_sources] */
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

/* Drafted nodes of engines that number them flat, as levels: the first has `topk` nodes, every further one topk * topk,
   of which its best `width` are kept, the likeliest first, of equals the first.

   tokens, scores: [num_rows][total], scores being q multiplied along the path. beams: [num_rows][num_beams], whose
   entry f / topk is the parent of a node f beyond the first level. Results: level after level, each [num_rows][kept];
   parents are numbers among the kept nodes of a row from 1, 0 is the root; a node whose parent was left out has
   probability 0. */
int graft_flat_levels(
    int64_t num_rows, int64_t total, int64_t topk, int64_t width, const int64_t *tokens, const float *scores,
    const int64_t *beams, int64_t num_beams, int64_t *out_tokens, int64_t *out_parents, float *out_probabilities,
    float *out_paths) {
    if (topk < 1) return OUT_OF_RANGE; /* levels without nodes would never end */
    int64_t *numbers = malloc((size_t)total * sizeof(int64_t));
    if (numbers == NULL) return NO_MEMORY;
    int failed = OK;
    for (int64_t r = 0; r < num_rows && !failed; r++, tokens += total, scores += total, beams += num_beams) {
        memset(numbers, 0, (size_t)total * sizeof(int64_t)); /* 0: left out */
        int64_t start = 0, count = topk, next = 1, before = 0;
        while (start < total && !failed) {
            if (start + count > total) { failed = OUT_OF_RANGE; break; }
            int64_t kept = count < width ? count : width, at = num_rows * before + r * kept;
            for (int64_t k = 0; k < kept && !failed; k++, at++) {
                int64_t best = -1;
                for (int64_t f = start; f < start + count; f++)
                    if (!numbers[f] && (best < 0 || scores[f] > scores[best])) best = f;
                int64_t parent = 0;
                float above = 1.0f;
                int has_parent = scores[best] > 0;
                if (start) {
                    int64_t beam = best / topk, upper = beam < num_beams ? beams[beam] : -1;
                    if (upper < 0 || upper >= start) { failed = OUT_OF_RANGE; break; }
                    parent = numbers[upper];
                    above = scores[upper];
                    has_parent = parent > 0 && above > 0;
                }
                float probability = has_parent ? scores[best] / above : 0.0f;
                out_tokens[at] = tokens[best];
                out_parents[at] = parent;
                out_probabilities[at] = probability > 1.0f ? 1.0f : probability;
                out_paths[at] = scores[best];
                numbers[best] = next + k;
            }
            next += kept, before += kept, start += count;
            count = topk * topk;
        }
    }
    free(numbers);
    return failed;
}

/* What the kernels of other engines want of trees [num_rows][width], a root being its own parent and padding's source
   being -1, in num_places >= width places of each row, padding last. numbers: [4][num_rows][num_places] tokens (padding:
   0); depths; first children and next siblings, -1 where there is none. mask: [num_rows][num_places][num_places] which
   places a place sees, itself and its ancestors (padding: itself alone). */
int graft_tree_links(
    int64_t num_rows, int64_t width, int64_t num_places, const int64_t *tokens, const int64_t *parents,
    const int64_t *sources, int64_t *numbers, uint8_t *mask) {
    int64_t size = num_rows * num_places;
    if (num_places < width) return OUT_OF_RANGE;
    for (int64_t r = 0; r < num_rows; r++) {
        int64_t *depths = numbers + size, *children = depths + size, *siblings = children + size;
        for (int64_t i = 0; i < num_places; i++) {
            uint8_t *seen = mask + i * num_places;
            int is_node = i < width && sources[i] >= 0;
            int64_t parent = is_node && i ? parents[i] : -1;
            if (parent >= i || (is_node && i && parent < 0)) return OUT_OF_RANGE;
            numbers[i] = is_node ? tokens[i] : 0;
            children[i] = siblings[i] = -1;
            depths[i] = parent < 0 ? 0 : depths[parent] + 1;
            if (parent < 0) memset(seen, 0, (size_t)num_places);
            else memcpy(seen, mask + parent * num_places, (size_t)num_places);
            seen[i] = 1;
        }
        for (int64_t i = width - 1; i > 0; i--)
            if (sources[i] >= 0) {
                siblings[i] = children[parents[i]];
                children[parents[i]] = i;
            }
        tokens += width, parents += width, sources += width;
        numbers += num_places, mask += num_places * num_places;
    }
    return OK;
}

/* Successor tables */

/* The target's top-k successors by n-gram, a row each: Python's `SuccessorTable`. */
typedef struct {
    int32_t *entries; /* [num_rows][num_successors]: a token times NUM_BUCKETS plus its score bucket, or -1 */
    int64_t *tags;    /* [num_rows] the whole hash of the row's n-gram; NULL if not hashed: then a row is a token */
    int64_t num_rows, num_successors, order;
    int64_t row_bits;       /* high bits of a hash that are the row's number */
    const int64_t *factors; /* [4] hash factors of the last token, the one before, the one before that and the salt */
    int64_t isolated;       /* whether entries under a text's own salt are looked up before those of all, under 0 */
} Table;

static int64_t row_of_key(const Table *table, uint64_t key) {
    return table->row_bits ? (int64_t)(key >> (64 - table->row_bits)) : 0;
}

/* The row of an n-gram, or -1 if the token is out of range; tag: its hash, 0 in a table that is not hashed. */
static int64_t table_row(
    const Table *table, int64_t token, int64_t before, int64_t earlier, int64_t salt, int64_t *tag) {
    *tag = 0;
    if (table->tags == NULL) return token >= 0 && token < table->num_rows ? token : -1;
    const int64_t *factors = table->factors;
    uint64_t key = (uint64_t)salt * (uint64_t)factors[3] + (uint64_t)token * (uint64_t)factors[0];
    if (table->order > 1) key += (uint64_t)before * (uint64_t)factors[1];
    if (table->order > 2) key += (uint64_t)earlier * (uint64_t)factors[2];
    *tag = (int64_t)key;
    return row_of_key(table, key);
}

/* The node at i of a row's tree, or the root where that is padding, and the two tokens before the node's. */
static int context_of(
    int64_t i, int64_t width, const int64_t *tokens, const int64_t *parents, const int64_t *sources, int64_t before,
    int64_t earlier, int64_t *node, int64_t *last, int64_t *second) {
    *node = sources[i] == PADDING ? 0 : i;
    int64_t parent = parents[*node];
    if (parent < 0 || parent >= width || parents[parent] < 0 || parents[parent] >= width) return OUT_OF_RANGE;
    *last = *node ? tokens[parent] : before;
    *second = parent ? tokens[parents[parent]] : *node ? before : earlier;
    return OK;
}

/* Writes the successors of an n-gram to every table. */
static int write_entries(
    const Table *tables, int64_t num_tables, int64_t token, int64_t before, int64_t earlier, int64_t salt,
    const int32_t *entries, int64_t num_successors) {
    for (int64_t t = 0; t < num_tables; t++) {
        int64_t tag, row = table_row(tables + t, token, before, earlier, salt, &tag);
        if (row < 0) return OUT_OF_RANGE;
        memcpy(tables[t].entries + row * tables[t].num_successors, entries, (size_t)num_successors * sizeof(int32_t));
        if (tables[t].tags != NULL) tables[t].tags[row] = tag;
    }
    return OK;
}

/* exp(x) for x <= 0 as a whole number, in parts of 2^30. */
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

/* Entries of the top-k tokens after a node: each with the score bucket of its softmax share among them. */
static void entries_of(int64_t num_successors, const int32_t *tokens, const float *logits, int32_t *entries) {
    int64_t weights[MAX_SUCCESSORS], total = 0;
    for (int64_t s = 0; s < num_successors; s++) total += weights[s] = exp_of(logits[s] - logits[0]);
    for (int64_t s = 0; s < num_successors; s++)
        entries[s] = (int32_t)(tokens[s] * NUM_BUCKETS + bucket_of((double)weights[s] / (double)total));
}

/* Learns the target's top-k successors of every node of verified trees [num_rows][width]: tokens and logits, best
   first, [num_rows][row_stride] of [width][num_successors] each. before, earlier, salts: [num_rows], of the roots.
   Where an n-gram occurs several times the last write stays: that of the likeliest node or, in a chunk of text, of the
   last occurrence. */
int graft_learn(
    const Table *tables, int64_t num_tables, int64_t num_rows, int64_t width, int64_t num_successors,
    int64_t row_stride, const int64_t *tokens, const int64_t *parents, const int64_t *sources,
    const int32_t *successors, const float *logits, const int64_t *before, const int64_t *earlier,
    const int64_t *salts, int64_t is_text) {
    int32_t entries[MAX_SUCCESSORS];
    if (num_successors > MAX_SUCCESSORS) return OUT_OF_RANGE;
    for (int64_t t = 0; t < num_tables; t++)
        if (num_successors > tables[t].num_successors) return OUT_OF_RANGE;
    for (int64_t r = 0; r < num_rows; r++) {
        for (int64_t n = 0; n < width; n++) {
            int64_t i = is_text ? n : width - 1 - n, first = r * width, node, last, second;
            if (context_of(
                    i, width, tokens + first, parents + first, sources + first, before[r], earlier[r], &node, &last,
                    &second))
                return OUT_OF_RANGE;
            int64_t at = r * row_stride + i * num_successors;
            entries_of(num_successors, successors + at, logits + at, entries);
            if (write_entries(
                    tables, num_tables, tokens[first + node], last, second, salts[r], entries, num_successors))
                return OUT_OF_RANGE;
        }
    }
    return OK;
}

/* Writes saved rows [count][num_successors] to a table, each where its tag belongs; or, if tags is NULL, where its
   token does: then they are of a table of order 1 that was not hashed. */
int graft_restore(
    const Table *table, int64_t count, int64_t num_successors, const int64_t *tokens, const int64_t *tags,
    const int32_t *entries) {
    if (num_successors > table->num_successors) return OUT_OF_RANGE;
    for (int64_t i = 0; i < count; i++) {
        int64_t tag, row = table_row(table, tokens[i], 0, 0, 0, &tag);
        if (table->tags != NULL && tags != NULL) row = row_of_key(table, (uint64_t)(tag = tags[i]));
        if (row < 0) return OUT_OF_RANGE;
        memcpy(
            table->entries + row * table->num_successors, entries + i * num_successors,
            (size_t)num_successors * sizeof(int32_t));
        if (table->tags != NULL) table->tags[row] = tag;
    }
    return OK;
}

/* A table's successors of a node's n-gram under a salt, or NULL. */
static const int32_t *known_after(const Table *table, const Row *row, int64_t node, int64_t salt) {
    int64_t tag, place = table_row(
        table, row->fields[TOKEN][node], row->fields[BEFORE][node], row->fields[EARLIER][node], salt, &tag);
    if (place < 0 || (table->tags != NULL && table->tags[place] != tag)) return NULL;
    const int32_t *entries = table->entries + place * table->num_successors;
    return entries[0] >= 0 ? entries : NULL;
}

/* The successors of a node's longest n-gram that a table has, or NULL; number: that table's, or the last one's. */
static const int32_t *longest_known(
    const Table *tables, int64_t num_tables, const Row *row, int64_t node, int64_t salt, int64_t *number) {
    for (*number = 0; *number < num_tables; ++*number) {
        const int32_t *entries = known_after(tables + *number, row, node, salt);
        if (entries == NULL && tables[*number].isolated) entries = known_after(tables + *number, row, node, 0);
        if (entries != NULL) return entries;
    }
    --*number;
    return NULL;
}

typedef struct {
    const Table *tables;
    int64_t num_tables;
    const Chances *chances;
    int64_t first, num_waves, beam, max_depth;
} Following;

static void follow(Part *part) {
    const Following *given = part->arguments;
    Pool *pool = &part->pool;
    int64_t width, num_successors = given->tables[0].num_successors;
    int64_t *best = malloc((size_t)(given->beam + 1) * sizeof(int64_t));
    float *open = malloc((size_t)pool->capacity * sizeof(float)); /* paths of nodes that may be looked up */
    if (best == NULL || open == NULL) part->failed = NO_MEMORY;
    for (int64_t r = part->start; r < part->stop && !part->failed; r++) {
        Row row = row_of(pool, r);
        int64_t num_open = 0;
        width = pool->width;
        for (int64_t wave = 0; wave < given->num_waves && !part->failed; wave++) {
            for (; num_open < width; num_open++)
                open[num_open] = row.fields[DEPTH][num_open] < given->max_depth ? row.paths[num_open] : 0.0f;
            int64_t count = least(given->beam, width);
            highest(open, width, count, best);
            for (int64_t b = 0; b < count && !part->failed; b++) {
                int64_t number;
                const int32_t *entries =
                    longest_known(given->tables, given->num_tables, &row, best[b], pool->salts[r], &number);
                if (!(open[best[b]] > 0)) entries = NULL; /* fewer than the beam were open */
                for (int64_t s = 0; s < num_successors && !part->failed; s++, width++) {
                    int32_t entry = entries != NULL ? entries[s] : -1;
                    int64_t token = 0, score_bucket = NUM_BUCKETS - 1, source = number + given->first;
                    float chance = 0.0f;
                    if (entry >= 0) {
                        token = entry / NUM_BUCKETS;
                        score_bucket = entry % NUM_BUCKETS;
                        part->failed = chance_of(given->chances, ALONE, source, score_bucket, &chance);
                    }
                    if (!part->failed)
                        part->failed =
                            add_node(pool, &row, width, token, best[b], chance, source, score_bucket, INHERITED);
                }
                open[best[b]] = 0.0f;
            }
        }
        part->most = width - pool->width; /* the same in all rows */
    }
    free(best);
    free(open);
}

/* Adds, wave by wave, successors of the `beam` likeliest nodes not yet looked up, by the longest n-gram in a table. */
int graft_follow(
    Pool *pool, const Table *tables, int64_t num_tables, const Chances *chances, int64_t first, int64_t num_waves,
    int64_t beam, int64_t max_depth) {
    Following given = {tables, num_tables, chances, first, num_waves, beam, max_depth};
    int64_t num_added = 0;
    int failed = share_work(pool, follow, &given, &num_added);
    if (!failed) pool->width += num_added;
    return failed;
}

/* Suffix lookup */

enum { MAX_OCCURRENCES = 12 }; /* of a pair of tokens, the most recent, that are compared */

/* A pair of tokens, and the position behind its last occurrence; 0 marks an empty slot. */
typedef struct {
    int32_t before, token;
    int64_t last;
} Pair;

/* An index of texts by pairs of tokens. Positions count from the first token ever added; occurrences of a pair are a
   linked list from the last back to the first. All zeros is an empty index. */
typedef struct {
    int64_t num_tokens, num_texts;
    int64_t dropped;    /* tokens of texts that were dropped */
    int32_t *tokens;    /* [num_tokens] texts one after the other */
    int64_t *previous;  /* [num_tokens] of the pair that ends there: the position behind the one before, or 0 */
    int64_t *starts;    /* [num_texts] positions where texts start */
    Pair *pairs;        /* [num_slots] hash table; some pairs may be of dropped texts */
    int64_t token_room, text_room, num_slots, num_pairs;
} SuffixIndex;

int graft_index_free(SuffixIndex *index) {
    free(index->tokens);
    free(index->previous);
    free(index->starts);
    free(index->pairs);
    memset(index, 0, sizeof *index);
    return OK;
}

/* Room for at least `count` values, from what there is. */
static int64_t grown(int64_t room, int64_t count) {
    return count <= room ? room : count > 2 * room ? count : 2 * room;
}

/* The slot of a pair of tokens, empty if there is none. */
static Pair *pair_at(Pair *pairs, int64_t num_slots, int32_t before, int32_t token) {
    uint64_t key = ((uint64_t)(uint32_t)before << 32 | (uint32_t)token) * UINT64_C(0x9E3779B97F4A7C15);
    uint64_t slot = (key >> 32) & (uint64_t)(num_slots - 1);
    while (pairs[slot].last && (pairs[slot].before != before || pairs[slot].token != token))
        slot = (slot + 1) & (uint64_t)(num_slots - 1);
    return pairs + slot;
}

/* Makes room for one more pair; where the table has to grow, pairs of dropped texts are left out. */
static int make_room_for_pair(SuffixIndex *index) {
    int64_t num_pairs = 0, num_slots = 16;
    if (2 * (index->num_pairs + 1) <= index->num_slots) return OK;
    for (int64_t s = 0; s < index->num_slots; s++) num_pairs += index->pairs[s].last > index->dropped;
    while (num_slots < 4 * (num_pairs + 1)) num_slots *= 2;
    Pair *pairs = calloc((size_t)num_slots, sizeof(Pair));
    if (pairs == NULL) return NO_MEMORY;
    for (int64_t s = 0; s < index->num_slots; s++) {
        Pair pair = index->pairs[s];
        if (pair.last > index->dropped) *pair_at(pairs, num_slots, pair.before, pair.token) = pair;
    }
    free(index->pairs);
    index->pairs = pairs;
    index->num_slots = num_slots;
    index->num_pairs = num_pairs;
    return OK;
}

/* Drops the oldest texts, but never the last, until there are at most `max_tokens`. */
static void drop_oldest(SuffixIndex *index, int64_t max_tokens) {
    int64_t num_texts = 0, count = 0;
    while (index->num_tokens - count > max_tokens && num_texts < index->num_texts - 1)
        count = index->starts[++num_texts] - index->dropped;
    if (num_texts == 0) return;
    index->num_texts -= num_texts;
    index->num_tokens -= count;
    index->dropped += count;
    memmove(index->starts, index->starts + num_texts, (size_t)index->num_texts * sizeof(int64_t));
    memmove(index->tokens, index->tokens + count, (size_t)index->num_tokens * sizeof(int32_t));
    memmove(index->previous, index->previous + count, (size_t)index->num_tokens * sizeof(int64_t));
}

/* Starts a new text. */
int graft_index_begin(SuffixIndex *index) {
    int64_t room = grown(index->text_room, index->num_texts + 1);
    if (room > index->text_room) {
        int64_t *starts = realloc(index->starts, (size_t)room * sizeof(int64_t));
        if (starts == NULL) return NO_MEMORY;
        index->starts = starts;
        index->text_room = room;
    }
    index->starts[index->num_texts++] = index->dropped + index->num_tokens;
    return OK;
}

static int extend(SuffixIndex *index, int64_t count, const int32_t *tokens) {
    int64_t room = grown(index->token_room, index->num_tokens + count);
    if (index->num_texts == 0) return OUT_OF_RANGE;
    if (room > index->token_room) {
        int64_t *previous = realloc(index->previous, (size_t)room * sizeof(int64_t));
        if (previous == NULL) return NO_MEMORY;
        index->previous = previous;
        int32_t *own = realloc(index->tokens, (size_t)room * sizeof(int32_t));
        if (own == NULL) return NO_MEMORY;
        index->tokens = own;
        index->token_room = room;
    }
    int64_t start = index->starts[index->num_texts - 1] - index->dropped;
    for (int64_t i = 0; i < count; i++) {
        int64_t at = index->num_tokens, place = index->dropped + at + 1;
        index->previous[at] = 0;
        if (at > start) {
            if (make_room_for_pair(index)) return NO_MEMORY;
            Pair *pair = pair_at(index->pairs, index->num_slots, index->tokens[at - 1], tokens[i]);
            if (pair->last == 0) index->num_pairs++;
            index->previous[at] = pair->last;
            *pair = (Pair){index->tokens[at - 1], tokens[i], place};
        }
        index->tokens[index->num_tokens++] = tokens[i];
    }
    return OK;
}

/* Extends the last text of index i by counts[i] tokens; `tokens` are those of all, one index after the other.
   max_tokens: above it the oldest texts are dropped; -1 for no limit. */
int graft_index_extend(
    SuffixIndex *const *indices, int64_t num_indices, const int64_t *counts, const int32_t *tokens,
    int64_t max_tokens) {
    for (int64_t i = 0; i < num_indices; tokens += counts[i++]) {
        int failed = extend(indices[i], counts[i], tokens);
        if (failed) return failed;
        if (max_tokens >= 0) drop_oldest(indices[i], max_tokens);
    }
    return OK;
}

/* Occurrences of a pair of tokens that something follows, the oldest first. */
typedef struct {
    const int32_t *tokens; /* texts one after the other */
    int64_t num_spans;
    int64_t spans[MAX_OCCURRENCES][3]; /* start of its text, end of the occurrence, end of its text */
} Occurrences;

/* least_start: only occurrences whose next token is there in the first text, or further on. */
static void find_occurrences(
    const SuffixIndex *index, int32_t before, int32_t token, int64_t least_start, Occurrences *found) {
    int64_t places[MAX_OCCURRENCES], num_places = 0;
    found->tokens = index->tokens;
    found->num_spans = 0;
    if (index->num_slots == 0) return;
    int64_t place = pair_at(index->pairs, index->num_slots, before, token)->last;
    for (; place > index->dropped && num_places < MAX_OCCURRENCES; place = index->previous[place - index->dropped - 1])
        places[num_places++] = place;
    while (num_places > 0) {
        int64_t low = 0, high = index->num_texts; /* bisection: the first text that starts at the position or later */
        place = places[--num_places];
        while (low < high) {
            int64_t middle = (low + high) / 2;
            if (index->starts[middle] < place) low = middle + 1;
            else high = middle;
        }
        int64_t stop = low < index->num_texts ? index->starts[low] : index->dropped + index->num_tokens;
        if (place == stop || place - index->dropped < least_start) continue;
        int64_t *span = found->spans[found->num_spans++];
        span[0] = index->starts[low - 1] - index->dropped;
        span[1] = place - index->dropped;
        span[2] = stop - index->dropped;
    }
}

/* A tree to attach below a candidate node: its nodes are numbered from 1, and 0 is that node. */
typedef struct {
    int64_t *tokens, *parents, *sources, *score_bucket;
    int64_t count;
} Subtree;

/* Score buckets of a match: lower bounds of its length and of the share of its occurrences, in rising order. */
typedef struct {
    int64_t max_match, num_matches, num_shares;
    const int64_t *matches;
    const double *shares;
} Scale;

static int64_t score_bucket_of(const Scale *scale, int64_t match, double share) {
    int64_t m = 0, s = 0;
    while (m < scale->num_matches && scale->matches[m] <= match) m++;
    while (s < scale->num_shares && scale->shares[s] <= share) s++;
    return (m - 1) * scale->num_shares + s - 1;
}

/* The subtree's node for a token below a parent; a new one if it is not among the first num_known. */
static int64_t subtree_node(
    Subtree *subtree, int64_t num_known, int64_t parent, int64_t token, int64_t source, int64_t score_bucket) {
    for (int64_t i = parent; i < num_known; i++) /* a child comes after its parent */
        if (subtree->parents[i] == parent && subtree->tokens[i] == token) return i + 1;
    subtree->tokens[subtree->count] = token;
    subtree->parents[subtree->count] = parent;
    subtree->sources[subtree->count] = source;
    subtree->score_bucket[subtree->count] = score_bucket;
    return ++subtree->count;
}

/* A node of the subtree to continue, and the occurrences (members start to start + count) that lead to it. */
typedef struct {
    int64_t node, depth, start, count;
} Branch;

static int64_t match_of(
    const Occurrences *found, const int64_t *span, const int32_t *suffix, int64_t length, int64_t most) {
    int64_t match = 0;
    most = least(most, least(length, span[1] - span[0]));
    while (match < most && found->tokens[span[1] - match - 1] == suffix[length - match - 1]) match++;
    return match;
}

static int64_t longest_match(
    const Occurrences *found, const int32_t *suffix, int64_t length, int64_t most) {
    int64_t longest = 0;
    for (int64_t s = 0; s < found->num_spans; s++) {
        int64_t match = match_of(found, found->spans[s], suffix, length, most);
        if (match > longest) longest = match;
    }
    return longest;
}

static int grow_subtree(
    Subtree *subtree, const Occurrences *found, int64_t source, const int32_t *suffix, int64_t suffix_length,
    int64_t length, int64_t num_nodes, const Scale *scale) {
    int64_t most = found->num_spans, longest = 0, num_chains = 0, left = num_nodes, num_branches = 1;
    int64_t num_known = subtree->count; /* nodes of other sources: its own are distinct anyway */
    if (most == 0 || num_nodes < 1) return OK;
    /* Occurrences of each branch. */
    int64_t *members = malloc((size_t)((num_nodes + 1) * most + 3 * most) * sizeof(int64_t));
    Branch *branches = malloc((size_t)(num_nodes + 1) * sizeof(Branch));
    if (members == NULL || branches == NULL) {
        free(members);
        free(branches);
        return NO_MEMORY;
    }
    int64_t *group_of = members + (num_nodes + 1) * most, *heads = group_of + most, *sizes = heads + most;
    for (int64_t s = 0; s < most; s++) {
        group_of[s] = match_of(found, found->spans[s], suffix, suffix_length, scale->max_match);
        if (group_of[s] > longest) longest = group_of[s];
    }
    /* Matches at most half as long as the longest are left out: they would only take up its nodes. */
    for (int64_t s = 0; s < most; s++)
        if (2 * group_of[s] > longest) members[num_chains++] = s;
    branches[0] = (Branch){0, 0, 0, num_chains};
    int64_t end = num_chains; /* number of members so far */
    for (int64_t b = 0; b < num_branches && left > 0; b++) {
        Branch branch = branches[b];
        int64_t num_groups = 0;
        for (int64_t m = 0; m < branch.count; m++) { /* grouped by next token, in the order of first appearance */
            const int64_t *span = found->spans[members[branch.start + m]];
            int64_t at = span[1] + branch.depth, group = 0;
            group_of[m] = -1;
            if (branch.depth >= length || at >= span[2]) continue;
            while (group < num_groups && found->tokens[heads[group]] != found->tokens[at]) group++;
            if (group == num_groups) {
                heads[group] = at;
                sizes[group] = 0;
                num_groups++;
            }
            group_of[m] = group;
            sizes[group]++;
        }
        for (int64_t g = 0; g < num_groups && left > 0; g++, left--) { /* the largest first */
            int64_t largest = 0;
            for (int64_t other = 1; other < num_groups; other++)
                if (sizes[other] > sizes[largest]) largest = other;
            /* A token further down matters only if those before it were accepted: by then the match is longer. */
            int64_t score_bucket =
                score_bucket_of(scale, longest + branch.depth, (double)sizes[largest] / (double)branch.count);
            int64_t depth = branch.depth + 1;
            int64_t node = subtree_node(
                subtree, num_known, branch.node, found->tokens[heads[largest]], source, score_bucket);
            branches[num_branches++] = (Branch){node, depth, end, sizes[largest]};
            for (int64_t m = 0; m < branch.count; m++)
                if (group_of[m] == largest) members[end++] = members[branch.start + m];
            sizes[largest] = 0;
        }
    }
    free(members);
    free(branches);
    return OK;
}

/* Attaches at a candidate node, `place`, what followed the occurrences of the suffix that ends there: in the row's own
   text (found[0], source `first`) and in others (found[1], source first + 1); a token of both has the former's source
   and score bucket. Nodes are numbered from `node` on; none is added if there is no room for all of them.
   subtree: scratch memory for 2 * num_nodes of each column. */
static int attach_copies(
    Pool *pool, const Row *row, int64_t place, int64_t node, const Occurrences *found, const int32_t *suffix,
    int64_t suffix_length, int64_t length, int64_t num_nodes, const Scale *scale, int64_t first,
    const Chances *chances, Subtree *subtree) {
    int failed = OK;
    subtree->count = 0;
    for (int64_t t = 0; t < 2 && !failed; t++)
        failed = grow_subtree(subtree, found + t, first + t, suffix, suffix_length, length, num_nodes, scale);
    if (node + subtree->count > pool->capacity) return failed;
    for (int64_t i = 0; i < subtree->count && !failed; i++) {
        int64_t parent = subtree->parents[i] ? node + subtree->parents[i] - 1 : place;
        float chance;
        failed = chance_of(chances, ALONE, subtree->sources[i], subtree->score_bucket[i], &chance);
        if (!failed)
            failed = add_node(
                pool, row, node + i, subtree->tokens[i], parent, chance, subtree->sources[i], subtree->score_bucket[i],
                INHERITED);
    }
    return failed;
}

typedef struct {
    const SuffixIndex *const *own, *const *past, *const *beside;
    const int64_t *beside_ends, *num_prompt;
    int64_t first;
    const Chances *chances;
    int64_t num_places, max_depth, length, num_nodes;
    const Scale *scale;
    int drafted;
    int64_t *counts; /* [num_rows] nodes that each row gets */
} Copying;

static void copy_rows(Part *part) {
    const Copying *given = part->arguments;
    Pool *pool = &part->pool;
    int64_t room = 2 * given->num_nodes, end = given->scale->max_match, max_depth = given->max_depth;
    int64_t *memory = malloc((size_t)(given->num_places + 1 + 4 * room) * sizeof(int64_t));
    int32_t *text = malloc((size_t)(end + pool->deepest + 1) * sizeof(int32_t)); /* a text's end, and a node's path */
    int64_t *places = memory;
    Subtree subtree = {0};
    if (memory == NULL || text == NULL)
        part->failed = NO_MEMORY;
    else {
        int64_t *columns = places + given->num_places + 1;
        subtree = (Subtree){columns, columns + room, columns + 2 * room, columns + 3 * room, 0};
    }
    Occurrences found[2], more;
    for (int64_t r = part->start; r < part->stop && !part->failed; r++) {
        Row row = row_of(pool, r);
        const SuffixIndex *own = given->own[r];
        int64_t count = places_of(pool, &row, given->drafted, given->num_places, max_depth, places), num_added = 0;
        int64_t known = least(end, own->num_tokens);
        if (known) memcpy(text, own->tokens + own->num_tokens - known, (size_t)known * sizeof(int32_t));
        for (int64_t i = 0; i < count && !part->failed; i++) {
            int64_t depth = row.fields[DEPTH][places[i]], size = known + depth;
            for (int64_t d = size, at = places[i]; at > 0; at = row.fields[PARENT][at])
                text[--d] = (int32_t)row.fields[TOKEN][at];
            if (size < 2) continue;
            find_occurrences(own, text[size - 2], text[size - 1], 0, found);
            find_occurrences(given->past[r], text[size - 2], text[size - 1], 0, found + 1);
            int64_t longest = longest_match(found + 1, text, size, end);
            for (int64_t b = r ? given->beside_ends[r - 1] : 0; b < given->beside_ends[r]; b++) {
                find_occurrences(given->beside[b], text[size - 2], text[size - 1], given->num_prompt[r], &more);
                int64_t match = longest_match(&more, text, size, end);
                if (match <= longest) continue;
                longest = match;
                found[1] = more;
            }
            part->failed = attach_copies(
                pool, &row, places[i], pool->width + num_added, found, text, size,
                least(given->length, max_depth - depth), given->num_nodes, given->scale, given->first, given->chances,
                &subtree);
            num_added += subtree.count;
        }
        given->counts[r] = num_added;
        if (num_added > part->most) part->most = num_added;
    }
    free(memory);
    free(text);
}

/* Attaches continuations from each row's own text, own[row], whose last token is the root, and from finished texts,
   past[row], or from another answer to the same prompt where that has a longer match, at up to num_places nodes of every
   row. beside: the indices of those answers, row after row, those of a row up to beside_ends[row]; of them what follows
   the first num_prompt[row] tokens counts. width: the most nodes that a row gets; they are candidates only if
   there was room for as many, so the caller makes room and calls again. */
int graft_attach_copies(
    Pool *pool, const SuffixIndex *const *own, const SuffixIndex *const *past, const SuffixIndex *const *beside,
    const int64_t *beside_ends, const int64_t *num_prompt, int64_t first, const Chances *chances, int64_t num_places,
    int64_t max_depth, int64_t length, int64_t num_nodes, const Scale *scale, int64_t *width) {
    int64_t *counts = malloc((size_t)pool->num_rows * sizeof(int64_t));
    if (counts == NULL) return NO_MEMORY;
    Copying given = {own, past, beside, beside_ends, num_prompt, first, chances, num_places, max_depth, length,
                     num_nodes, scale, is_drafted(pool), counts};
    *width = 0;
    int failed = share_work(pool, copy_rows, &given, width);
    int has_room = !failed && pool->width + *width <= pool->capacity;
    for (int64_t r = 0; r < pool->num_rows && has_room && !failed; r++) {
        Row row = row_of(pool, r);
        for (int64_t i = counts[r]; i < *width && !failed; i++) /* padding */
            failed = add_node(pool, &row, pool->width + i, 0, 0, 0.0f, ROOT, 0, INHERITED);
    }
    if (has_room && !failed) pool->width += *width;
    free(counts);
    return failed;
}
