/* Functions of vectors of LANES numbers: exponentials, tanh, activations, sums, and a row's highest numbers.
   `cpu_linear.c` includes this file and says what a vector is. */

#include <float.h>
#include <math.h>

#define ALWAYS_INLINE inline __attribute__((always_inline))

/* Lanes of two vectors by their numbers; the second's begin at LANES. */
#if defined(__clang__)
static inline vec pick(vec a, vec b, words lanes) {
    vec picked;
    UNROLL for (int i = 0; i < LANES; i++) picked[i] = lanes[i] < LANES ? a[lanes[i]] : b[lanes[i] - LANES];
    return picked;
}
#else
#define pick __builtin_shuffle
#endif

/* e to the x, exact to the last bit or two; 0 below -87, and that of 88 above. */
static inline vec exp_of(vec x) {
    const vec zero = {0};
    const words too_small = (words)(x < zero - 87.0f);
    const words too_large = (words)(x > zero + 88.0f);
    x = (vec)(((words)x & ~too_small & ~too_large) | ((words)(zero - 87.0f) & too_small) |
              ((words)(zero + 88.0f) & too_large));
    const vec shifted = x * 1.44269504f + 12582912.0f; /* the low bits are those of the rounded sum */
    const vec n = shifted - 12582912.0f;
    const vec r = (x - n * 0.693359375f) + n * 2.12194440e-4f;
    vec p = r * 1.3888889e-3f + 8.3333333e-3f;
    p = p * r + 4.1666667e-2f;
    p = p * r + 1.6666667e-1f;
    p = p * r + 0.5f;
    p = p * r + 1.0f;
    p = p * r + 1.0f;
    const vec power = (vec)(((words)shifted << 23) + 0x3f800000u);
    return (vec)((words)(p * power) & ~too_small);
}

/* Swap lanes i and i ^ step. step is a literal. */
static ALWAYS_INLINE vec swapped(vec x, uint32_t step) {
    words lanes;
    UNROLL for (uint32_t i = 0; i < LANES; i++) lanes[i] = i ^ step;
    return pick(x, x, lanes);
}

static inline float sum_of(vec x) {
    x += swapped(x, 1);
    x += swapped(x, 2);
    if (LANES > 4) x += swapped(x, 4 % LANES);
    if (LANES > 8) x += swapped(x, 8 % LANES);
    return x[0];
}

static inline vec larger(vec x, vec y) {
    const words is_larger = (words)(x > y);
    return (vec)(((words)x & is_larger) | ((words)y & ~is_larger));
}

static inline float highest_of(vec x) {
    x = larger(x, swapped(x, 1));
    x = larger(x, swapped(x, 2));
    if (LANES > 4) x = larger(x, swapped(x, 4 % LANES));
    if (LANES > 8) x = larger(x, swapped(x, 8 % LANES));
    return x[0];
}

/* Vectors whose end may be past that of an array: of the `left` numbers that there are, and 0 after them. */
static inline vec load(const float *x, long left) {
    vec part = {0};
    if (left >= LANES) return *(const vec *)x;
    memcpy(&part, x, (size_t)left * sizeof(float));
    return part;
}

static inline void store(float *x, vec y, long left) {
    if (left >= LANES) *(vec *)x = y;
    else memcpy(x, &y, (size_t)left * sizeof(float));
}

/* Exact to some 1e-7, as are the functions after it. */
static inline vec tanh_of(vec x) {
    const vec one = (vec){0} + 1.0f;
    return one - 2.0f / (exp_of(x * 2.0f) + one);
}

static inline vec erf_of(vec x) { /* Abramowitz and Stegun, 7.1.26 */
    const words sign = (words)x & 0x80000000u;
    const vec size = (vec)((words)x ^ sign), t = 1.0f / (size * 0.3275911f + 1.0f);
    vec p = t * 1.061405429f - 1.453152027f;
    p = p * t + 1.421413741f;
    p = p * t - 0.284496736f;
    p = p * t + 0.254829592f;
    return (vec)((words)(1.0f - p * t * exp_of(-size * size)) ^ sign);
}

enum { NONE, SILU, GELU, GELU_TANH, RELU_SQUARED }; /* in the order of `network.Activation` */

static inline vec activated(vec x, long activation) {
    const vec zero = {0};
    if (activation == GELU) return x * 0.5f * (erf_of(x * 0.70710678f) + 1.0f);
    if (activation == RELU_SQUARED) {
        const vec positive = larger(x, zero);
        return positive * positive;
    }
    const vec y = activation == SILU ? x : (x + x * x * x * 0.044715f) * 1.5957691f; /* the tanh as a sigmoid */
    return x / (exp_of(zero - y) + 1.0f);
}
static int any_above(const float *x, float least) {
    words above = {0};
    uint64_t parts[LANES / 2], any = 0;
    UNROLL for (int v = 0; v < 4; v++) above |= (words)(*(const vec *)(x + v * LANES) > (vec){0} + least);
    memcpy(parts, &above, sizeof parts);
    for (int i = 0; i < LANES / 2; i++) any |= parts[i];
    return any != 0;
}

/* The k highest of each row of x [m][n], best first, the first of equal ones first. k is at most n.
   sums: [m] of e to the power of x minus the row's highest, or NULL. */
void graft_highest(const float *x, long m, long n, long k, int64_t *numbers, float *values, float *sums) {
    for (long row = 0; row < m; row++, x += n, numbers += k, values += k) {
        long count = 0;
        for (long i = 0; i < n; i += 4 * LANES) {
            const long end = i + 4 * LANES < n ? i + 4 * LANES : n;
            if (count == k && end == i + 4 * LANES && !any_above(x + i, values[k - 1])) continue;
            for (long j = i; j < end; j++) {
                if (count == k && !(x[j] > values[k - 1])) continue;
                long place = count < k ? count++ : k - 1;
                for (; place > 0 && values[place - 1] < x[j]; place--)
                    values[place] = values[place - 1], numbers[place] = numbers[place - 1];
                values[place] = x[j], numbers[place] = j;
            }
        }
        if (sums == NULL) continue;
        vec total = {0};
        long i = 0;
        for (; i + LANES <= n; i += LANES) total += exp_of(*(const vec *)(x + i) - values[0]);
        float rest = 0;
        for (; i < n; i++) rest += exp_of((vec){0} + (x[i] - values[0]))[0];
        sums[row] = sum_of(total) + rest;
    }
}
