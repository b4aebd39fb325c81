/* Kernels of a residual block on one thread: products, linear transforms of maps, group norm and max-pooling with ReLU.

   Maps have channels last: picture i, pixel p, channel c lie at (i * pixels + p) * channels + c. This file includes
   itself, once for float and once for double. Every sum has a fixed order, whatever the width of the processor's
   vectors: its bits depend on nothing but whether the processor multiplies and adds in one operation.
   `compiled_kernels.py` calls these functions. They need GCC: its vector extensions, and clones of a function. */

#ifndef REAL

#include <math.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>

#if defined(__x86_64__) && defined(__gnu_linux__)
/* One function per kind of processor; the loader takes the best. */
#define EVERYWHERE __attribute__((target_clones("arch=x86-64-v4", "arch=x86-64-v3", "default")))
#else
#define EVERYWHERE
#endif
#define INLINE static inline __attribute__((always_inline))
#define UNROLL _Pragma("GCC unroll 16")

#define JOIN(a, b) a##b
#define NAMED(a, b) JOIN(a, b)

#if !defined(__GNUC__) || defined(__clang__)
#error "GCC is needed; the package is complete without these kernels"
#endif

/* The version of interface and arithmetic; a library with another number is not used. */
int kernels_version(void) { return 1; }

/* Whether vectors of 64 bytes are one register each, of which there are 32. */
static int wide_registers(void) {
#if defined(__x86_64__) && defined(__gnu_linux__)
    return __builtin_cpu_supports("avx512f");
#else
    return 0;
#endif
}

#define REAL float
#define WHOLE int32_t
#define LOW {0, 16, 1, 17, 2, 18, 3, 19, 4, 20, 5, 21, 6, 22, 7, 23}
#define F(name) NAMED(name, _f32)
#include "kernels.c"
#undef REAL
#undef WHOLE
#undef LOW
#undef F
#define REAL double
#define WHOLE int64_t
#define LOW {0, 8, 1, 9, 2, 10, 3, 11}
#define F(name) NAMED(name, _f64)
#include "kernels.c"

#else

typedef REAL F(vec) __attribute__((vector_size(64), aligned(sizeof(REAL)), may_alias));
typedef WHOLE F(places) __attribute__((vector_size(64)));
#define LANES ((int64_t)(64 / sizeof(REAL)))

/* c = a b for `high` rows of a and `wide` vectors of b's columns; both are constants where this is called, at most 6 and
   4, so that all sums stay in registers. Entry (i, q) of a lies at i * a_row + q * a_column. */
INLINE void F(tile)(const int high, const int wide, const REAL *a, int64_t a_row, int64_t a_column, const REAL *b,
                    int64_t b_row, REAL *c, int64_t c_row, int64_t depth) {
    F(vec) sum[6][4], row[4];
    UNROLL for (int i = 0; i < high; i++)
        UNROLL for (int j = 0; j < wide; j++) sum[i][j] = (F(vec)){0};
    for (int64_t q = 0; q < depth; q++) {
        UNROLL for (int j = 0; j < wide; j++) row[j] = *(const F(vec) *)(b + q * b_row + j * LANES);
        UNROLL for (int i = 0; i < high; i++) {
            const REAL w = a[i * a_row + q * a_column];
            UNROLL for (int j = 0; j < wide; j++) sum[i][j] += w * row[j];
        }
    }
    UNROLL for (int i = 0; i < high; i++)
        UNROLL for (int j = 0; j < wide; j++) *(F(vec) *)(c + i * c_row + j * LANES) = sum[i][j];
}

/* c = a b for all rows of a, in tiles of nearly equal height, and `wide` vectors of b's columns. */
INLINE void F(column)(const int wide, const REAL *a, int64_t a_row, int64_t a_column, const REAL *b, int64_t b_row,
                      REAL *c, int64_t c_row, int64_t rows, int64_t depth) {
    const int64_t tiles = (rows + 5) / 6;
    for (int64_t t = 0, high; t < tiles; t++, a += high * a_row, c += high * c_row, rows -= high) {
        high = (rows + tiles - t - 1) / (tiles - t);
        switch (high) {
        case 6: F(tile)(6, wide, a, a_row, a_column, b, b_row, c, c_row, depth); break;
        case 5: F(tile)(5, wide, a, a_row, a_column, b, b_row, c, c_row, depth); break;
        case 4: F(tile)(4, wide, a, a_row, a_column, b, b_row, c, c_row, depth); break;
        case 3: F(tile)(3, wide, a, a_row, a_column, b, b_row, c, c_row, depth); break;
        case 2: F(tile)(2, wide, a, a_row, a_column, b, b_row, c, c_row, depth); break;
        default: F(tile)(1, wide, a, a_row, a_column, b, b_row, c, c_row, depth);
        }
    }
}

/* y = the transpose of a square of x with as many rows as a vector has lanes: perfect shuffles of pairs of rows. */
INLINE void F(transpose)(const REAL *x, int64_t x_row, REAL *y, int64_t y_row) {
    const F(places) low = LOW, high = low + LANES / 2;
    F(vec) v[LANES], t[LANES];
    UNROLL for (int i = 0; i < LANES; i++) v[i] = *(const F(vec) *)(x + i * x_row);
    UNROLL for (int s = 1; s < LANES; s *= 2) {
        UNROLL for (int i = 0; i < LANES / 2; i++) {
            t[2 * i] = __builtin_shuffle(v[i], v[i + LANES / 2], low);
            t[2 * i + 1] = __builtin_shuffle(v[i], v[i + LANES / 2], high);
        }
        UNROLL for (int i = 0; i < LANES; i++) v[i] = t[i];
    }
    UNROLL for (int i = 0; i < LANES; i++) *(F(vec) *)(y + i * y_row) = v[i];
}

/* c = a b for every matrix of a batch; columns, and with `turned` the depth, are multiples of the lanes.

   Entry (i, q) of a lies at i * a_row + q * a_column, row i of c at i * c_row. Row q of b lies at q * b_row; with
   `turned`, b's transpose lies so, and is turned in `work`, which has room for 4 * LANES * depth numbers. */
EVERYWHERE void F(multiply)(const REAL *a, const REAL *b, REAL *c, REAL *work, int64_t batch, int64_t rows,
                            int64_t columns, int64_t depth, int64_t a_step, int64_t a_row, int64_t a_column,
                            int64_t b_step, int64_t b_row, int64_t c_step, int64_t c_row, int turned) {
    const int most = wide_registers() ? 4 : 1;
    for (int64_t p = 0; p < batch; p++, a += a_step, b += b_step, c += c_step) {
        for (int64_t j = 0, wide; j < columns; j += wide * LANES) {
            wide = columns - j >= most * LANES ? most : 1;
            const REAL *from = b + j;
            int64_t step = b_row;
            if (turned) {
                for (int64_t i = 0; i < wide * LANES; i += LANES)
                    for (int64_t q = 0; q < depth; q += LANES)
                        F(transpose)(b + (j + i) * b_row + q, b_row, work + q * wide * LANES + i, wide * LANES);
                from = work, step = wide * LANES;
            }
            if (wide == 4) F(column)(4, a, a_row, a_column, from, step, c + j, c_row, rows, depth);
            else F(column)(1, a, a_row, a_column, from, step, c + j, c_row, rows, depth);
        }
    }
}

/* y = add + sum over k of weight[k] * x[from[k]], for `wide` channels; `add` may be NULL. */
INLINE void F(row)(const REAL *x, REAL *y, const REAL *add, int64_t wide, int64_t entries, const int64_t *from,
                   const REAL *weight) {
    int64_t c = 0;
    for (; c + 4 * LANES <= wide; c += 4 * LANES) {
        F(vec) sum[4], *to = (F(vec) *)(y + c);
        UNROLL for (int j = 0; j < 4; j++) sum[j] = add ? ((const F(vec) *)(add + c))[j] : (F(vec)){0};
        for (int64_t k = 0; k < entries; k++) {
            const F(vec) *p = (const F(vec) *)(x + from[k] + c);
            UNROLL for (int j = 0; j < 4; j++) sum[j] += weight[k] * p[j];
        }
        UNROLL for (int j = 0; j < 4; j++) to[j] = sum[j];
    }
    for (; c < wide; c++) {
        REAL sum = add ? add[c] : 0;
        for (int64_t k = 0; k < entries; k++) sum += weight[k] * x[from[k] + c];
        y[c] = sum;
    }
}

/* y[i, r] = add[i, r] + sum over k in first[r] .. first[r + 1] of weight[k] * x[i, from k], for all channels.

   A row of x lies at i * x_step + from[k], one of y at i * y_step + to[r]; `add` is NULL or lies as y does. */
EVERYWHERE void F(transform)(const REAL *x, REAL *y, const REAL *add, int64_t n, int64_t x_step, int64_t y_step,
                             int64_t rows, int64_t channels, const int64_t *first, const int64_t *from,
                             const REAL *weight, const int64_t *to) {
    const int64_t most = 32 * LANES; /* channels at a time: all rows of x should stay in the first cache */
    for (int64_t i = 0; i < n; i++)
        for (int64_t c = 0; c < channels; c += most) {
            const int64_t wide = channels - c < most ? channels - c : most;
            for (int64_t r = 0; r < rows; r++)
                F(row)(x + i * x_step + c, y + i * y_step + to[r] + c, add ? add + i * y_step + to[r] + c : NULL, wide,
                       first[r + 1] - first[r], from + first[r], weight + first[r]);
        }
}

/* Group norm of y, plus `add` (or NULL), then ReLU if asked: out = relu(gamma (y - mean) rstd + beta + add).

   Per picture and group it keeps mean and rstd. `work` has room for 2 * channels numbers. */
EVERYWHERE void F(norm_forward)(const REAL *y, const REAL *gamma, const REAL *beta, const REAL *add, REAL *out,
                                REAL *mean, REAL *rstd, REAL *work, int64_t n, int64_t pixels, int64_t channels,
                                int64_t groups, double eps, int relu) {
    const int64_t wide = channels / groups;
    REAL *scale = work, *shift = work + channels;
    for (int64_t i = 0; i < n; i++) {
        const REAL *yi = y + i * pixels * channels;
        memset(scale, 0, sizeof(REAL) * channels);
        memset(shift, 0, sizeof(REAL) * channels);
        for (int64_t p = 0; p < pixels; p++)
            for (int64_t c = 0; c < channels; c++) scale[c] += yi[p * channels + c];
        for (int64_t g = 0; g < groups; g++) {
            double sum = 0;
            for (int64_t c = g * wide; c < (g + 1) * wide; c++) sum += scale[c];
            mean[i * groups + g] = sum / (double)(pixels * wide);
        }
        for (int64_t c = 0; c < channels; c++) scale[c] = mean[i * groups + c / wide];
        for (int64_t p = 0; p < pixels; p++)
            for (int64_t c = 0; c < channels; c++) {
                const REAL d = yi[p * channels + c] - scale[c];
                shift[c] += d * d;
            }
        for (int64_t g = 0; g < groups; g++) {
            double sum = 0;
            for (int64_t c = g * wide; c < (g + 1) * wide; c++) sum += shift[c];
            rstd[i * groups + g] = 1 / sqrt(sum / (double)(pixels * wide) + eps);
            for (int64_t c = g * wide; c < (g + 1) * wide; c++) {
                const REAL m = scale[c];
                scale[c] = gamma[c] * rstd[i * groups + g];
                shift[c] = beta[c] - m * scale[c];
            }
        }
        const REAL *ai = add ? add + i * pixels * channels : NULL;
        REAL *oi = out + i * pixels * channels;
        for (int64_t p = 0; p < pixels; p++) {
            const int64_t at = p * channels;
            if (ai)
                for (int64_t c = 0; c < channels; c++) oi[at + c] = yi[at + c] * scale[c] + shift[c] + ai[at + c];
            else
                for (int64_t c = 0; c < channels; c++) oi[at + c] = yi[at + c] * scale[c] + shift[c];
            if (relu) /* a NaN stays one */
                for (int64_t c = 0; c < channels; c++) oi[at + c] = oi[at + c] < 0 ? 0 : oi[at + c];
        }
    }
}

/* The gradient of `norm_forward` by y, gamma and beta; `out` (or NULL without ReLU) says where ReLU lets through.

   `masked` (or NULL) receives the gradient behind ReLU, which is that of `add`; it may be `g` itself. */
EVERYWHERE void F(norm_backward)(const REAL *g, const REAL *out, const REAL *y, const REAL *gamma, const REAL *mean,
                                 const REAL *rstd, REAL *gy, REAL *masked, REAL *ggamma, REAL *gbeta, REAL *work,
                                 int64_t n, int64_t pixels, int64_t channels, int64_t groups) {
    const int64_t wide = channels / groups;
    REAL *sums = work, *products = work + channels;
    memset(ggamma, 0, sizeof(REAL) * channels);
    memset(gbeta, 0, sizeof(REAL) * channels);
    for (int64_t i = 0; i < n; i++) {
        const int64_t begin = i * pixels * channels;
        const REAL *yi = y + begin, *si = g + begin;
        REAL *gi = gy + begin;
        if (out) {
            REAL *to = masked ? masked + begin : gi;
            const REAL *oi = out + begin, *from = g + begin;
            for (int64_t j = 0; j < pixels * channels; j++) to[j] = oi[j] > 0 ? from[j] : 0;
            si = to;
        }
        memset(sums, 0, sizeof(REAL) * channels);
        memset(products, 0, sizeof(REAL) * channels);
        for (int64_t p = 0; p < pixels; p++)
            for (int64_t c = 0; c < channels; c++) {
                sums[c] += si[p * channels + c];
                products[c] += si[p * channels + c] * yi[p * channels + c];
            }
        for (int64_t k = 0; k < groups; k++) {
            const double m = mean[i * groups + k], s = rstd[i * groups + k], many = (double)(pixels * wide);
            double by_sum = 0, by_product = 0;
            for (int64_t c = k * wide; c < (k + 1) * wide; c++) {
                by_sum += (double)gamma[c] * sums[c];
                by_product += (double)gamma[c] * products[c];
                ggamma[c] += (products[c] - (REAL)m * sums[c]) * (REAL)s;
                gbeta[c] += sums[c];
            }
            const double slope = (by_sum * m - by_product) * s * s * s / many;
            const REAL b = slope, constant = -slope * m - by_sum * s / many;
            for (int64_t c = k * wide; c < (k + 1) * wide; c++) {
                sums[c] = gamma[c] * (REAL)s;
                products[c] = b;
            }
            for (int64_t p = 0; p < pixels; p++)
                for (int64_t c = k * wide; c < (k + 1) * wide; c++) {
                    const int64_t at = p * channels + c;
                    gi[at] = sums[c] * si[at] + b * yi[at] + constant;
                }
        }
    }
}

/* Max-pooling of 3x3 windows with stride 2 and a border of 1, then ReLU; `place` has the pixel of each maximum. */
EVERYWHERE void F(pool_forward)(const REAL *x, REAL *out, int32_t *place, int64_t n, int64_t side, int64_t channels) {
    const int64_t half = (side - 1) / 2 + 1;
    for (int64_t i = 0; i < n; i++)
        for (int64_t r = 0; r < half; r++)
            for (int64_t q = 0; q < half; q++) {
                const int64_t to = ((i * half + r) * half + q) * channels;
                const REAL *xi = x + i * side * side * channels;
                int started = 0;
                for (int64_t a = 2 * r - 1; a <= 2 * r + 1; a++)
                    for (int64_t b = 2 * q - 1; b <= 2 * q + 1; b++) {
                        if (a < 0 || b < 0 || a >= side || b >= side) continue;
                        const int32_t pixel = a * side + b;
                        const REAL *row = xi + pixel * channels;
                        if (!started) {
                            for (int64_t c = 0; c < channels; c++) out[to + c] = row[c], place[to + c] = pixel;
                            started = 1;
                        } else
                            for (int64_t c = 0; c < channels; c++) { /* the first maximum counts; a NaN stays one */
                                const int more = !(row[c] <= out[to + c]) && out[to + c] == out[to + c];
                                out[to + c] = more ? row[c] : out[to + c];
                                place[to + c] = more ? pixel : place[to + c];
                            }
                    }
                for (int64_t c = 0; c < channels; c++) out[to + c] = out[to + c] < 0 ? 0 : out[to + c];
            }
}

/* The gradient of `pool_forward` by x. */
EVERYWHERE void F(pool_backward)(const REAL *g, const REAL *out, const int32_t *place, REAL *gx, int64_t n,
                                 int64_t side, int64_t channels) {
    const int64_t half = (side - 1) / 2 + 1;
    memset(gx, 0, sizeof(REAL) * n * side * side * channels);
    for (int64_t i = 0; i < n; i++) {
        REAL *to = gx + i * side * side * channels;
        for (int64_t p = 0; p < half * half; p++) {
            const int64_t at = (i * half * half + p) * channels;
            for (int64_t c = 0; c < channels; c++)
                if (out[at + c] > 0) to[(int64_t)place[at + c] * channels + c] += g[at + c];
        }
    }
}

#undef LANES
#endif
