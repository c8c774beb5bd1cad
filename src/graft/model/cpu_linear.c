/* y = x w' for few rows of x, by packed weights: each weight is read from memory once, in the order of its use.

   A panel has the weights of PANEL outputs, input after input, so a vector holds one number for each of LANES outputs.
   Every output is one sum over the inputs, in their order, whatever the number of tokens and the width of vectors.

   Packed weights are float32, or bfloat16, which takes half the memory and so half the time. A 32-bit word then holds
   the weights of outputs j (low half) and j + PANEL / 2 (high half).

   This file is built several times on x86: for every processor, and for those with wider vectors. The caller chooses,
   and passes the threads of the OpenMP library that torch has loaded, so that both share one set of threads. */

#include <stdint.h>
#include <string.h>

/* PANEL / LANES * TOKENS sums fit into the registers of a processor, beside a panel's weights. */
#if defined(__AVX512F__)
#define LANES 16
#define PANEL 32
#define TOKENS 12
#elif defined(__AVX__)
#define LANES 8
#define PANEL 16
#define TOKENS 6
#elif defined(__aarch64__)
#define LANES 4
#define PANEL 16
#define TOKENS 6
#else
#define LANES 4
#define PANEL 8
#define TOKENS 6
#endif
#define VECTORS (PANEL / LANES)
#define SAMPLES 16
#define SMALL 32768 /* products up to which starting threads takes longer */
#if defined(__clang__)
#define UNROLL _Pragma("unroll")
#else
#define UNROLL _Pragma("GCC unroll 16")
#endif

typedef float vec __attribute__((vector_size(4 * LANES), aligned(4)));
typedef uint32_t words __attribute__((vector_size(4 * LANES), aligned(4)));

static inline void load_float32(const void *w, long i, vec *a) {
    UNROLL for (int v = 0; v < VECTORS; v++) a[v] = *(const vec *)((const float *)w + i * PANEL + v * LANES);
}

static inline void load_bfloat16(const void *w, long i, vec *a) {
    UNROLL for (int v = 0; v < VECTORS / 2; v++) {
        const words pair = *(const words *)((const uint32_t *)w + i * (PANEL / 2) + v * LANES);
        a[v] = (vec)(pair << 16);
        a[v + VECTORS / 2] = (vec)(pair & 0xffff0000u);
    }
}

/* One panel times T tokens. A macro, because the sums stay in registers only if T is a literal. */
#define TILE(NAME, LOAD, T)                                                                                           \
    static void NAME(const void *restrict w, const float *restrict x, float *restrict y, long n, long k, long rows) { \
        vec sums[T][VECTORS], a[VECTORS];                                                                             \
        UNROLL for (int t = 0; t < T; t++) {                                                                          \
            UNROLL for (int v = 0; v < VECTORS; v++) sums[t][v] = (vec){0};                                           \
        }                                                                                                             \
        for (long i = 0; i < k; i++) {                                                                                \
            LOAD(w, i, a);                                                                                            \
            UNROLL for (int t = 0; t < T; t++) {                                                                      \
                const float b = x[t * k + i];                                                                         \
                UNROLL for (int v = 0; v < VECTORS; v++) sums[t][v] += a[v] * b;                                      \
            }                                                                                                         \
        }                                                                                                             \
        UNROLL for (int t = 0; t < T; t++) memcpy(y + t * n, sums[t], (size_t)rows * sizeof(float));                  \
    }

#define TILES(T)                          \
    TILE(float32_##T, load_float32, T)    \
    TILE(bfloat16_##T, load_bfloat16, T)
#define BOTH(T) {float32_##T, bfloat16_##T}

typedef void Tile(const void *w, const float *x, float *y, long n, long k, long rows);

TILES(1) TILES(2) TILES(3) TILES(4) TILES(5) TILES(6)
#if TOKENS > 6
TILES(7) TILES(8) TILES(9) TILES(10) TILES(11) TILES(12)
#endif

static Tile *const tiles[TOKENS][2] = {
    BOTH(1), BOTH(2), BOTH(3), BOTH(4), BOTH(5), BOTH(6),
#if TOKENS > 6
    BOTH(7), BOTH(8), BOTH(9), BOTH(10), BOTH(11), BOTH(12),
#endif
};

const long graft_panel = PANEL;

/* Functions of an OpenMP library: run a function on every thread; the thread's number; the number of threads. */
typedef struct {
    void (*parallel)(void (*run)(void *), void *data, unsigned num_threads, unsigned flags);
    int (*thread_num)(void);
    int (*num_threads)(void);
} Threads;

typedef struct {
    const char *w;     /* [panels][k][PANEL] */
    const float *x;    /* [m][k] */
    float *y;          /* [m][n] */
    const float *bias; /* [n]; may be NULL */
    long n, k, m, is_bfloat16;
    const Threads *threads;
} Job;

static void multiply_panels(const Job *job, long first, long last) {
    const long n = job->n, k = job->k, m = job->m;
    const long bytes = PANEL * k * (job->is_bfloat16 ? 2 : 4);
    const long groups = (m + TOKENS - 1) / TOKENS;
    for (long panel = first; panel < last; panel++) {
        const long row = panel * PANEL, rows = n - row < PANEL ? n - row : PANEL;
        for (long group = 0; group < groups; group++) { /* of about equal size; the panel stays in the CPU cache */
            const long token = m * group / groups, count = m * (group + 1) / groups - token;
            tiles[count - 1][job->is_bfloat16](
                job->w + panel * bytes, job->x + token * k, job->y + token * n + row, n, k, rows);
        }
        for (long token = 0; token < m && job->bias != NULL; token++)
            for (long j = row; j < row + rows; j++) job->y[token * n + j] += job->bias[j];
    }
}

static void multiply_own_panels(void *data) {
    const Job *job = data;
    const long thread = job->threads->thread_num(), num_threads = job->threads->num_threads();
    const long panels = (job->n + PANEL - 1) / PANEL;
    multiply_panels(job, panels * thread / num_threads, panels * (thread + 1) / num_threads);
}

/* Whether some numbers of a weight [n][k], spread over it, are those of its packed copy. */
static int is_copy_of(const float *weight, const char *w, long n, long k, long is_bfloat16) {
    for (long sample = 0; sample < SAMPLES && n > 0; sample++) {
        const long place = (n * k - 1) * sample / (SAMPLES - 1), row = place / k;
        const long output = row % PANEL, block = (row / PANEL * k + place % k) * PANEL;
        uint32_t own, copied;
        memcpy(&own, weight + place, 4);
        if (is_bfloat16) {
            memcpy(&copied, w + 2 * block + 4 * (output % (PANEL / 2)), 4);
            copied = output < PANEL / 2 ? copied << 16 : copied & 0xffff0000u;
        } else memcpy(&copied, w + 4 * (block + output), 4);
        if (own != copied) return 0;
    }
    return 1;
}

/* weight: [n][k], w: its packed copy, x: [m][k], y: [m][n]. threads may be NULL: the caller's thread does all, as it
   does small products. Returns 1, and does nothing, if the weight is seen to have changed since it was packed. */
int graft_linear(const float *weight, const void *w, const float *x, float *y, long n, long k, long m,
                 long is_bfloat16, const Threads *threads) {
    if (!is_copy_of(weight, w, n, k, is_bfloat16)) return 1;
    Job job = {w, x, y, NULL, n, k, m, is_bfloat16, threads};
    if (threads == NULL || n * k * m < SMALL) multiply_panels(&job, 0, (n + PANEL - 1) / PANEL);
    else threads->parallel(multiply_own_panels, &job, 0, 0);
    return 0;
}

#include "cpu_vectors.c"
#include "cpu_layers.c"
