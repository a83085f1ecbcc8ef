/* Rounds the rows of a gradient and finds their largest magnitudes in one pass. See [Note: grid].

   Only additions, comparisons and a division a row, so that the bits are those of torch's kernels,
   whatever compiler has made it. */

#include <stdint.h>
#include <string.h>

#if defined(__x86_64__) && defined(__gnu_linux__)
#define FOR_SEVERAL_PROCESSORS __attribute__((target_clones("avx2", "default")))
#else
#define FOR_SEVERAL_PROCESSORS
#endif

/* The bits of |x|, which as integers have the order of magnitudes; NaN is above infinity. */
static inline int32_t magnitude(float x) {
    int32_t bits;
    memcpy(&bits, &x, sizeof bits);
    return bits & INT32_MAX;
}

static double share_of(int32_t largest, float limit) {
    float x;
    memcpy(&x, &largest, sizeof x);
    return (double)x / (double)limit;
}

FOR_SEVERAL_PROCESSORS
static int32_t largest_of(const float *x, int64_t width) {
    int32_t largest = 0;
    for (int64_t i = 0; i < width; i++) {
        int32_t own = magnitude(x[i]);
        largest = own > largest ? own : largest;
    }
    return largest;
}

FOR_SEVERAL_PROCESSORS
static int32_t round_row(const float *x, float *out, int64_t width, float shift) {
    int32_t largest = 0;
    for (int64_t i = 0; i < width; i++) {
        int32_t own = magnitude(x[i]);
        largest = own > largest ? own : largest;
        out[i] = (x[i] + shift) - shift;
    }
    return largest;
}

FOR_SEVERAL_PROCESSORS
static void add_row(const float *x, float *out, int64_t width, float shift) {
    for (int64_t i = 0; i < width; i++)
        out[i] += (x[i] + shift) - shift;
}

/* The largest share of its limit that a row of x takes, as far as it was looked for: beyond 1, or
   NaN, it ends the search. Out is x, rounded; or, to add, out + x, rounded, where the share is at
   most 1, and 0 or at least `smallest`. */
double round_rows(const float *x, float *out, int64_t size, int64_t rows, const float *shift,
                  const float *limit, double smallest, int adds) {
    int64_t width = size / rows;
    double share = 0;
    for (int64_t row = 0; row < rows; row++) {
        const float *from = x + row * width;
        int32_t largest = adds ? largest_of(from, width)
                               : round_row(from, out + row * width, width, shift[row]);
        double own = share_of(largest, limit[row]);
        if (!(own <= 1))
            return own;
        share = own > share ? own : share;
    }
    if (adds && (share == 0 || share >= smallest))
        for (int64_t row = 0; row < rows; row++)
            add_row(x + row * width, out + row * width, width, shift[row]);
    return share;
}
