/* y = x w' for few rows of x: each weight is read from memory once, and no copy of the weights is made.

   A vector holds one number for each of LANES tokens, so every output is summed over k in the same order
   whatever the number of tokens. */

#include <stdlib.h>

#if defined(__AVX__)
#define LANES 8
#else
#define LANES 4
#endif
/* 8 vectors of sums hide the latency of an addition, and fit into 16 registers beside what they are made of. */
#define BLOCK_ROWS 8
#define WIDE_ROWS 4
#define UNROLL _Pragma("GCC unroll 8")

typedef float vec __attribute__((vector_size(4 * LANES), aligned(4)));
typedef float four __attribute__((vector_size(16), aligned(4)));

/* R rows of w times VECTORS * LANES tokens, of which m are wanted. xt: [k][VECTORS * LANES]. A macro, for the sums
   stay in registers only where R and VECTORS are literals. */
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
            /* The next rows lie behind these: fetched in one stream, which the hardware does not see in R. */        \
            UNROLL for (int p = 0; p < R; p += 4) __builtin_prefetch(w + R * k + R * i + 4 * p, 0, 2);                \
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

/* w: [n][k], x: [m][k], y: [m][n]. Returns 0, or 1 if there was no memory. */
int graft_linear(const float *w, const float *x, float *y, long n, long k, long m) {
    const int wide = m > LANES;
    const long width = wide ? 2 * LANES : LANES;
    const long groups = (m + width - 1) / width;
    const long size = groups * width * k;
    float *xt = aligned_alloc(64, (size * sizeof(float) + 63) / 64 * 64); /* [groups][k][width] */
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
    const long step = wide ? WIDE_ROWS : BLOCK_ROWS;
#pragma omp parallel for schedule(static)
    for (long first = 0; first < n; first += BLOCK_ROWS) {
        const long last = first + BLOCK_ROWS < n ? first + BLOCK_ROWS : n;
        for (long g = 0; g < groups; g++) { /* the rows stay in the cache for all tokens */
            const long wanted = m - g * width < width ? m - g * width : width;
            const float *in = xt + g * k * width;
            float *out = y + g * width * n;
            long r = first;
            for (; r + step <= last; r += step)
                (wide ? wide_tile : narrow_tile)(w + r * k, in, out + r, n, k, wanted);
            for (; r < last; r++) (wide ? wide_row : narrow_row)(w + r * k, in, out + r, n, k, wanted);
        }
    }
    free(xt);
    return 0;
}
