/* The kernels of a round for a CPU: what the Triton kernels of `tree/device` do, over the same buffers, to the same bits.
   And the flat steps of trees that were made elsewhere.

   Sums and products have a fixed order, no product is followed by a sum that a compiler could fuse with it, and no
   mathematical library is called. Functions return OK, NO_MEMORY or OUT_OF_RANGE. The caller owns all memory. What each
   function does is said where Python calls it, in `tree/device/c_kernels.py`. */

#include <stdint.h>
#include <stdlib.h>
#include <string.h>

#include "native/arithmetic.c"
#include "native/best_first.c"
#include "native/round/pool.c"
#include "native/round/copies.c"
#include "native/round/drafts.c"
#include "native/round/tables.c"
#include "native/round/stops.c"
#include "native/round/ranking.c"
#include "native/round/outcome.c"
#include "native/trees.c"
