/* Trees of a host as a flat step. */

/* Lays out trees [num_rows][width] one after the other, as a flat step has them, without each row's trailing padding.
   columns: written, [6][room]: tokens, parents (places in the row's own tree), places, depths, rows, numbers in strips.
   starts, counts: written, [num_rows]: each row's first token in the step and its number of tokens. index: written,
   [num_rows][width]: the step's token of each node; padding gets the root's. total: written, tokens of the step.
   A strip is a run of nodes down one path: a node's first child continues the node's strip, and other children begin
   new ones. Numbers in a strip count from 1. The number of the strip's last node, which has no child, is negative. */
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
            if (i > 0 && sources[first + i] < 0) continue;
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
