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

#include "native/threads.c"
#include "native/candidates.c"
#include "native/ranking.c"
#include "native/trees.c"
#include "native/tables.c"
#include "native/suffix.c"
