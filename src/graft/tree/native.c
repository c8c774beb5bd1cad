/* A round's bookkeeping on the host: candidates, successor tables and suffix lookup. A round is about
   a thousand small operations, each far cheaper than a tensor operation.

   The same proposals give the same tree on every machine. Sums and products have a fixed order, no product is followed
   by a sum that a compiler could fuse with it, and no mathematical library is called: buckets are found by comparisons,
   and exponentials are computed in integers.

   Functions return OK, NO_MEMORY or OUT_OF_RANGE. The caller owns all memory, except that of a `SuffixIndex`, which
   `graft_index_free` frees. */

#include <stdint.h>
#include <stdlib.h>
#include <string.h>

#include "native/arithmetic.c"

enum { TOKEN, BEFORE, DEPTH, KEY, NEED, PARENT, EARLIER, SOURCE, SCORE_BUCKET, AGREEMENT };
enum { ROOT = 0, PADDING = -1, INHERITED = -1, NUM_TRUTHS = 12 };

#include "native/draws.c"

/* The memory of Python's `Candidates`: the nodes proposed for a round, `width` in each of num_rows rows. */
typedef struct {
    int64_t num_rows, capacity, width;
    int64_t deepest; /* greatest depth of a node so far */
    int64_t *fields; /* [fields][num_rows][capacity] */
    float *paths;    /* [num_rows][capacity] P(the target accepts the path down to the node); 0: padding */
    const int64_t *salts;   /* [num_rows] salt of the row's table entries */
    const int64_t *factors; /* [num_factors] hash factors by depth, for the key of a path */
    int64_t num_factors;
    const Draws *draws; /* NULL: nothing is known of coming draws */
} Pool;

#include "native/candidates.c"
#include "native/ranking.c"
#include "native/trees.c"
#include "native/tables.c"
#include "native/suffix.c"
