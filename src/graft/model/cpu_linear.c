/* y = x w' for few rows of x: each weight is read from memory once and never copied.

   A vector holds one number for each of LANES tokens, so every output is summed over k in the same order, whatever the
   number of tokens.

   This file is built twice on x86: for every processor, and for those with wider vectors. The caller chooses, and
   passes the threads of the OpenMP library that torch has loaded, so that both share one set of threads. */

#include <stdint.h>
#include <stdlib.h>

#if defined(__AVX__)
#define LANES 8
#else
#define LANES 4
#endif
/* 8 vectors of sums hide the latency of an addition, and fit into 16 registers together with their operands. */
#define BLOCK_ROWS 8
#define WIDE_ROWS 4
#if defined(__clang__)
#define UNROLL _Pragma("unroll")
#else
#define UNROLL _Pragma("GCC unroll 8")
#endif

/* Addresses are integers, because the last rows prefetch past the end of the array, where a pointer is undefined. */
#define PREFETCH(ARRAY, PLACE) __builtin_prefetch((const float *)((uintptr_t)(ARRAY) + sizeof(float) * (PLACE)), 0, 2)

typedef float vec __attribute__((vector_size(4 * LANES), aligned(4)));
typedef float four __attribute__((vector_size(16), aligned(4)));

/* R rows of w times VECTORS * LANES tokens, of which m are wanted. xt: [k][VECTORS * LANES]. A macro, because the sums
   stay in registers only if R and VECTORS are literals. */
#define TILE(NAME, R, VECTORS)                                                                                        \
    static void NAME(const float *restrict w, const float *restrict xt, float *restrict y, long n, long k, long m) {  \
        enum { WIDTH = VECTORS * LANES };                                                                             \
        vec sums[R][VECTORS];                                                                                         \
        UNROLL for (int r = 0; r < R; r++) {                                                                          \
            UNROLL for (int v = 0; v < VECTORS; v++) sums[r][v] = (vec){0};                                           \
        }                                                                                                             \
        long i = 0;                                                                                                   \
        for (; i + 4 <= k; i += 4) {                                                                                  \
            four a[R];                                                                                                \
            UNROLL for (int r = 0; r < R; r++) a[r] = *(const four *)(w + r * k + i);                                 \
            /* Prefetch the next rows as one stream: the hardware does not recognize R parallel streams. */           \
            UNROLL for (int p = 0; p < R; p += 4) PREFETCH(w, R * k + R * i + 4 * p);                                 \
            UNROLL for (int l = 0; l < 4; l++) {                                                                      \
                UNROLL for (int v = 0; v < VECTORS; v++) {                                                            \
                    vec b = *(const vec *)(xt + (i + l) * WIDTH + v * LANES);                                         \
                    UNROLL for (int r = 0; r < R; r++) sums[r][v] += b * a[r][l];                                     \
                }                                                                                                     \
            }                                                                                                         \
        }                                                                                                             \
        for (; i < k; i++) {                                                                                          \
            UNROLL for (int v = 0; v < VECTORS; v++) {                                                                \
                vec b = *(const vec *)(xt + i * WIDTH + v * LANES);                                                   \
                UNROLL for (int r = 0; r < R; r++) sums[r][v] += b * w[r * k + i];                                    \
            }                                                                                                         \
        }                                                                                                             \
        float out[R][WIDTH];                                                                                          \
        UNROLL for (int r = 0; r < R; r++) {                                                                          \
            UNROLL for (int v = 0; v < VECTORS; v++) *(vec *)(out[r] + v * LANES) = sums[r][v];                       \
        }                                                                                                             \
        for (long t = 0; t < m; t++) {                                                                                \
            UNROLL for (int r = 0; r < R; r++) y[t * n + r] = out[r][t];                                              \
        }                                                                                                             \
    }

TILE(narrow_tile, BLOCK_ROWS, 1)
TILE(narrow_row, 1, 1)
TILE(wide_tile, WIDE_ROWS, 2)
TILE(wide_row, 1, 2)

/* Functions of an OpenMP library: run a function on every thread; the thread's number; the number of threads. */
typedef struct {
    void (*parallel)(void (*run)(void *), void *data, unsigned num_threads, unsigned flags);
    int (*thread_num)(void);
    int (*num_threads)(void);
} Threads;

typedef struct {
    const float *w, *xt; /* [n][k], [groups][k][width] */
    float *y;            /* [m][n] */
    long n, k, m, width;
    const Threads *threads;
} Job;

/* The rows from `first` to `last`, each a multiple of BLOCK_ROWS or the end. */
static void multiply_rows(const Job *job, long first, long last) {
    const long n = job->n, k = job->k, m = job->m, width = job->width;
    const int wide = width > LANES;
    const long step = wide ? WIDE_ROWS : BLOCK_ROWS;
    for (long block = first; block < last; block += BLOCK_ROWS) {
        const long end = block + BLOCK_ROWS < last ? block + BLOCK_ROWS : last;
        for (long done = 0; done < m; done += width) { /* these rows stay in the CPU cache for all tokens */
            const long wanted = m - done < width ? m - done : width;
            const float *in = job->xt + done * k;
            float *out = job->y + done * n;
            long r = block;
            for (; r + step <= end; r += step)
                (wide ? wide_tile : narrow_tile)(job->w + r * k, in, out + r, n, k, wanted);
            for (; r < end; r++) (wide ? wide_row : narrow_row)(job->w + r * k, in, out + r, n, k, wanted);
        }
    }
}

static void multiply_own_rows(void *data) {
    const Job *job = data;
    const long thread = job->threads->thread_num(), num_threads = job->threads->num_threads();
    const long blocks = (job->n + BLOCK_ROWS - 1) / BLOCK_ROWS;
    const long first = blocks * thread / num_threads * BLOCK_ROWS;
    const long last = blocks * (thread + 1) / num_threads * BLOCK_ROWS;
    multiply_rows(job, first, last < job->n ? last : job->n);
}

/* w: [n][k], x: [m][k], y: [m][n]. threads may be NULL: the caller's thread does all. Returns 1 if allocation failed,
   else 0. */
int graft_linear(const float *w, const float *x, float *y, long n, long k, long m, const Threads *threads) {
    const long width = m > LANES ? 2 * LANES : LANES;
    const long groups = (m + width - 1) / width;
    const long size = groups * width * k;
    /* [groups][k][width]; one cache line more than needed, because an allocation of 0 bytes may return NULL. */
    float *xt = aligned_alloc(64, (size_t)(size * (long)sizeof(float) / 64 * 64 + 64));
    if (xt == NULL) return 1;
    for (long g = 0; g < groups; g++) {
        const float *from = x + g * width * k;
        const long count = m - g * width < width ? m - g * width : width;
        for (long i = 0; i < k; i++) {
            float *to = xt + (g * k + i) * width;
            for (long t = 0; t < count; t++) to[t] = from[t * k + i];
            for (long t = count; t < width; t++) to[t] = 0;
        }
    }
    Job job = {w, xt, y, n, k, m, width, threads};
    if (threads == NULL) multiply_rows(&job, 0, n);
    else threads->parallel(multiply_own_rows, &job, 0, 0);
    free(xt);
    return 0;
}
