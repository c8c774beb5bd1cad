/* Suffix lookup: continuations of earlier occurrences of a text's end. */

enum { MAX_OCCURRENCES = 12 }; /* the most recent occurrences of a pair of tokens that are compared */

/* A pair of tokens, and the position after its last occurrence; 0 marks an empty slot. */
typedef struct {
    int32_t before, token;
    int64_t last;
} Pair;

/* An index of texts by pairs of tokens. Positions count from the first token ever added. Occurrences of a pair are a
   linked list from the last to the first. All zeros is an empty index. */
typedef struct {
    int64_t num_tokens, num_texts;
    int64_t dropped;    /* number of tokens dropped so far */
    int32_t *tokens;    /* [num_tokens] texts one after the other */
    int64_t *previous;  /* [num_tokens] the position after the previous occurrence of the pair that ends here, or 0 */
    int64_t *starts;    /* [num_texts] positions where texts start */
    Pair *pairs;        /* [num_slots] hash table; may have pairs of dropped texts */
    int64_t token_room, text_room, num_slots, num_pairs;
} SuffixIndex;

int graft_index_free(SuffixIndex *index) {
    free(index->tokens);
    free(index->previous);
    free(index->starts);
    free(index->pairs);
    memset(index, 0, sizeof *index);
    return OK;
}

/* The new size of an array that has to hold `count` values. */
static int64_t grown(int64_t room, int64_t count) {
    return count <= room ? room : count > 2 * room ? count : 2 * room;
}

/* The slot of a pair of tokens; an empty one if the pair is unknown. */
static Pair *pair_at(Pair *pairs, int64_t num_slots, int32_t before, int32_t token) {
    uint64_t key = ((uint64_t)(uint32_t)before << 32 | (uint32_t)token) * UINT64_C(0x9E3779B97F4A7C15);
    uint64_t slot = (key >> 32) & (uint64_t)(num_slots - 1);
    while (pairs[slot].last && (pairs[slot].before != before || pairs[slot].token != token))
        slot = (slot + 1) & (uint64_t)(num_slots - 1);
    return pairs + slot;
}

/* Makes room for one more pair. When the table grows, pairs of dropped texts are removed. */
static int make_room_for_pair(SuffixIndex *index) {
    int64_t num_pairs = 0, num_slots = 16;
    if (2 * (index->num_pairs + 1) <= index->num_slots) return OK;
    for (int64_t s = 0; s < index->num_slots; s++) num_pairs += index->pairs[s].last > index->dropped;
    while (num_slots < 4 * (num_pairs + 1)) num_slots *= 2;
    Pair *pairs = calloc((size_t)num_slots, sizeof(Pair));
    if (pairs == NULL) return NO_MEMORY;
    for (int64_t s = 0; s < index->num_slots; s++) {
        Pair pair = index->pairs[s];
        if (pair.last > index->dropped) *pair_at(pairs, num_slots, pair.before, pair.token) = pair;
    }
    free(index->pairs);
    index->pairs = pairs;
    index->num_slots = num_slots;
    index->num_pairs = num_pairs;
    return OK;
}

/* Drops the oldest texts, but never the last one, until at most `max_tokens` are left. */
static void drop_oldest(SuffixIndex *index, int64_t max_tokens) {
    int64_t num_texts = 0, count = 0;
    while (index->num_tokens - count > max_tokens && num_texts < index->num_texts - 1)
        count = index->starts[++num_texts] - index->dropped;
    if (num_texts == 0) return;
    index->num_texts -= num_texts;
    index->num_tokens -= count;
    index->dropped += count;
    memmove(index->starts, index->starts + num_texts, (size_t)index->num_texts * sizeof(int64_t));
    memmove(index->tokens, index->tokens + count, (size_t)index->num_tokens * sizeof(int32_t));
    memmove(index->previous, index->previous + count, (size_t)index->num_tokens * sizeof(int64_t));
}

/* Starts a new text. */
int graft_index_begin(SuffixIndex *index) {
    int64_t room = grown(index->text_room, index->num_texts + 1);
    if (room > index->text_room) {
        int64_t *starts = realloc(index->starts, (size_t)room * sizeof(int64_t));
        if (starts == NULL) return NO_MEMORY;
        index->starts = starts;
        index->text_room = room;
    }
    index->starts[index->num_texts++] = index->dropped + index->num_tokens;
    return OK;
}

static int extend(SuffixIndex *index, int64_t count, const int32_t *tokens) {
    int64_t room = grown(index->token_room, index->num_tokens + count);
    if (index->num_texts == 0) return OUT_OF_RANGE;
    if (room > index->token_room) {
        int64_t *previous = realloc(index->previous, (size_t)room * sizeof(int64_t));
        if (previous == NULL) return NO_MEMORY;
        index->previous = previous;
        int32_t *own = realloc(index->tokens, (size_t)room * sizeof(int32_t));
        if (own == NULL) return NO_MEMORY;
        index->tokens = own;
        index->token_room = room;
    }
    int64_t start = index->starts[index->num_texts - 1] - index->dropped;
    for (int64_t i = 0; i < count; i++) {
        int64_t at = index->num_tokens, place = index->dropped + at + 1;
        index->previous[at] = 0;
        if (at > start) {
            if (make_room_for_pair(index)) return NO_MEMORY;
            Pair *pair = pair_at(index->pairs, index->num_slots, index->tokens[at - 1], tokens[i]);
            if (pair->last == 0) index->num_pairs++;
            index->previous[at] = pair->last;
            *pair = (Pair){index->tokens[at - 1], tokens[i], place};
        }
        index->tokens[index->num_tokens++] = tokens[i];
    }
    return OK;
}

/* Extends the last text of index i by counts[i] tokens. tokens: those of all indices, one after the other. max_tokens:
   above it, the oldest texts are dropped; -1: no limit. */
int graft_index_extend(
    SuffixIndex *const *indices, int64_t num_indices, const int64_t *counts, const int32_t *tokens,
    int64_t max_tokens) {
    for (int64_t i = 0; i < num_indices; tokens += counts[i++]) {
        int failed = extend(indices[i], counts[i], tokens);
        if (failed) return failed;
        if (max_tokens >= 0) drop_oldest(indices[i], max_tokens);
    }
    return OK;
}

/* Occurrences of a pair of tokens that are not at the end of a text, the oldest first. */
typedef struct {
    const int32_t *tokens; /* texts one after the other */
    int64_t num_spans;
    int64_t spans[MAX_OCCURRENCES][3]; /* start of its text, end of the occurrence, end of its text */
} Occurrences;

/* least_start: occurrences whose next token is before this position in the index are left out. */
static void find_occurrences(
    const SuffixIndex *index, int32_t before, int32_t token, int64_t least_start, Occurrences *found) {
    int64_t places[MAX_OCCURRENCES], num_places = 0;
    found->tokens = index->tokens;
    found->num_spans = 0;
    if (index->num_slots == 0) return;
    int64_t place = pair_at(index->pairs, index->num_slots, before, token)->last;
    for (; place > index->dropped && num_places < MAX_OCCURRENCES; place = index->previous[place - index->dropped - 1])
        places[num_places++] = place;
    while (num_places > 0) {
        int64_t low = 0, high = index->num_texts; /* bisection: the first text that starts at the position or later */
        place = places[--num_places];
        while (low < high) {
            int64_t middle = (low + high) / 2;
            if (index->starts[middle] < place) low = middle + 1;
            else high = middle;
        }
        int64_t stop = low < index->num_texts ? index->starts[low] : index->dropped + index->num_tokens;
        if (place == stop || place - index->dropped < least_start) continue;
        int64_t *span = found->spans[found->num_spans++];
        span[0] = index->starts[low - 1] - index->dropped;
        span[1] = place - index->dropped;
        span[2] = stop - index->dropped;
    }
}

/* A tree to attach below a candidate node. Its nodes are numbered from 1; 0 is the candidate node. */
typedef struct {
    int64_t *tokens, *parents, *sources, *score_bucket;
    int64_t count;
} Subtree;

/* Score buckets of a match: rising lower bounds of the match length, and of the share of occurrences that agree. */
typedef struct {
    int64_t max_match, num_matches, num_shares;
    const int64_t *matches;
    const double *shares;
} Scale;

static int64_t score_bucket_of(const Scale *scale, int64_t match, double share) {
    int64_t m = 0, s = 0;
    while (m < scale->num_matches && scale->matches[m] <= match) m++;
    while (s < scale->num_shares && scale->shares[s] <= share) s++;
    return (m - 1) * scale->num_shares + s - 1;
}

/* The subtree's node for a token below a parent. A new node is made if it is not among the first num_known. */
static int64_t subtree_node(
    Subtree *subtree, int64_t num_known, int64_t parent, int64_t token, int64_t source, int64_t score_bucket) {
    for (int64_t i = parent; i < num_known; i++) /* a child comes after its parent */
        if (subtree->parents[i] == parent && subtree->tokens[i] == token) return i + 1;
    subtree->tokens[subtree->count] = token;
    subtree->parents[subtree->count] = parent;
    subtree->sources[subtree->count] = source;
    subtree->score_bucket[subtree->count] = score_bucket;
    return ++subtree->count;
}

/* A subtree node to continue, and the occurrences that lead to it: `count` members from `start` on. */
typedef struct {
    int64_t node, depth, start, count;
} Branch;

static int64_t match_of(
    const Occurrences *found, const int64_t *span, const int32_t *suffix, int64_t length, int64_t most) {
    int64_t match = 0;
    most = least(most, least(length, span[1] - span[0]));
    while (match < most && found->tokens[span[1] - match - 1] == suffix[length - match - 1]) match++;
    return match;
}

static int64_t longest_match(
    const Occurrences *found, const int32_t *suffix, int64_t length, int64_t most) {
    int64_t longest = 0;
    for (int64_t s = 0; s < found->num_spans; s++) {
        int64_t match = match_of(found, found->spans[s], suffix, length, most);
        if (match > longest) longest = match;
    }
    return longest;
}

static int grow_subtree(
    Subtree *subtree, const Occurrences *found, int64_t source, const int32_t *suffix, int64_t suffix_length,
    int64_t length, int64_t num_nodes, const Scale *scale) {
    int64_t most = found->num_spans, longest = 0, num_chains = 0, left = num_nodes, num_branches = 1;
    int64_t num_known = subtree->count; /* nodes of the other source; this source's own nodes are distinct anyway */
    if (most == 0 || num_nodes < 1) return OK;
    /* Occurrences of each branch. */
    int64_t *members = malloc((size_t)((num_nodes + 1) * most + 3 * most) * sizeof(int64_t));
    Branch *branches = malloc((size_t)(num_nodes + 1) * sizeof(Branch));
    if (members == NULL || branches == NULL) {
        free(members);
        free(branches);
        return NO_MEMORY;
    }
    int64_t *group_of = members + (num_nodes + 1) * most, *heads = group_of + most, *sizes = heads + most;
    for (int64_t s = 0; s < most; s++) {
        group_of[s] = match_of(found, found->spans[s], suffix, suffix_length, scale->max_match);
        if (group_of[s] > longest) longest = group_of[s];
    }
    /* Matches at most half as long as the longest are left out: they would only take nodes from it. */
    for (int64_t s = 0; s < most; s++)
        if (2 * group_of[s] > longest) members[num_chains++] = s;
    branches[0] = (Branch){0, 0, 0, num_chains};
    int64_t end = num_chains; /* number of members so far */
    for (int64_t b = 0; b < num_branches && left > 0; b++) {
        Branch branch = branches[b];
        int64_t num_groups = 0;
        for (int64_t m = 0; m < branch.count; m++) { /* group by next token, in the order of first appearance */
            const int64_t *span = found->spans[members[branch.start + m]];
            int64_t at = span[1] + branch.depth, group = 0;
            group_of[m] = -1;
            if (branch.depth >= length || at >= span[2]) continue;
            while (group < num_groups && found->tokens[heads[group]] != found->tokens[at]) group++;
            if (group == num_groups) {
                heads[group] = at;
                sizes[group] = 0;
                num_groups++;
            }
            group_of[m] = group;
            sizes[group]++;
        }
        for (int64_t g = 0; g < num_groups && left > 0; g++, left--) { /* the largest first */
            int64_t largest = 0;
            for (int64_t other = 1; other < num_groups; other++)
                if (sizes[other] > sizes[largest]) largest = other;
            /* A deeper token only matters if those above it are accepted, and then the match is longer. */
            int64_t score_bucket =
                score_bucket_of(scale, longest + branch.depth, (double)sizes[largest] / (double)branch.count);
            int64_t depth = branch.depth + 1;
            int64_t node = subtree_node(
                subtree, num_known, branch.node, found->tokens[heads[largest]], source, score_bucket);
            branches[num_branches++] = (Branch){node, depth, end, sizes[largest]};
            for (int64_t m = 0; m < branch.count; m++)
                if (group_of[m] == largest) members[end++] = members[branch.start + m];
            sizes[largest] = 0;
        }
    }
    free(members);
    free(branches);
    return OK;
}

/* Attaches to the candidate node `place` the continuations of the suffix that ends there: from the row's own text
   (found[0], source `first`) and from others (found[1], source first + 1). A token of both gets the former's source and
   score bucket. Nodes are numbered from `node` on. If they do not all fit, none is added.
   subtree: scratch memory for 2 * num_nodes entries in each column. */
static int attach_copies(
    Pool *pool, const Row *row, int64_t place, int64_t node, const Occurrences *found, const int32_t *suffix,
    int64_t suffix_length, int64_t length, int64_t num_nodes, const Scale *scale, int64_t first,
    const AcceptanceProbs *probs, Subtree *subtree) {
    int failed = OK;
    subtree->count = 0;
    for (int64_t t = 0; t < 2 && !failed; t++)
        failed = grow_subtree(subtree, found + t, first + t, suffix, suffix_length, length, num_nodes, scale);
    if (node + subtree->count > pool->capacity) return failed;
    for (int64_t i = 0; i < subtree->count && !failed; i++) {
        int64_t parent = subtree->parents[i] ? node + subtree->parents[i] - 1 : place;
        int64_t source = subtree->sources[i], token = subtree->tokens[i];
        int64_t score_bucket = copied_bucket(row, parent, token, subtree->score_bucket[i]);
        float prob;
        failed = find_prob(probs, row, ALONE, source, score_bucket, &prob);
        if (!failed)
            failed = add_node(pool, row, node + i, token, parent, prob, source, score_bucket, INHERITED);
    }
    return failed;
}

/* Attaches continuations to up to num_places nodes of every row. They come from the row's own text, own[row], whose
   last token is the root, and from finished texts, past[row], or from another answer to the same prompt if its match
   is longer. beside: the indices of those answers, row after row; a row's end at beside_ends[row]. In them, only
   continuations after the first num_prompt[row] tokens count. width: written, the most nodes that a row gets. If the
   pool has no room for so many, its width stays, and the caller makes room and calls again. */
int graft_attach_copies(
    Pool *pool, const SuffixIndex *const *own, const SuffixIndex *const *past, const SuffixIndex *const *beside,
    const int64_t *beside_ends, const int64_t *num_prompt, int64_t first, const AcceptanceProbs *probs,
    int64_t num_places, int64_t max_depth, int64_t length, int64_t num_nodes, const Scale *scale, int64_t *width) {
    int64_t *counts = malloc((size_t)pool->num_rows * sizeof(int64_t));
    int drafted = is_drafted(pool);
    *width = 0;
    int64_t room = 2 * num_nodes, end = scale->max_match;
    int64_t *memory = malloc((size_t)(num_places + 1 + 4 * room) * sizeof(int64_t));
    int32_t *text = malloc((size_t)(end + pool->deepest + 1) * sizeof(int32_t)); /* a text's end, then a node's path */
    int64_t *places = memory;
    Subtree subtree = {0};
    int failed = counts == NULL || memory == NULL || text == NULL ? NO_MEMORY : OK;
    if (!failed) {
        int64_t *columns = places + num_places + 1;
        subtree = (Subtree){columns, columns + room, columns + 2 * room, columns + 3 * room, 0};
    }
    Occurrences found[2], more;
    for (int64_t r = 0; r < pool->num_rows && !failed; r++) {
        Row row = row_of(pool, r);
        const SuffixIndex *text_index = own[r];
        int64_t count = places_of(pool, &row, drafted, num_places, max_depth, places), num_added = 0;
        int64_t known = least(end, text_index->num_tokens);
        if (known) memcpy(text, text_index->tokens + text_index->num_tokens - known, (size_t)known * sizeof(int32_t));
        for (int64_t i = 0; i < count && !failed; i++) {
            int64_t depth = row.fields[DEPTH][places[i]], size = known + depth;
            for (int64_t d = size, at = places[i]; at > 0; at = row.fields[PARENT][at])
                text[--d] = (int32_t)row.fields[TOKEN][at];
            if (size < 2) continue;
            find_occurrences(text_index, text[size - 2], text[size - 1], 0, found);
            find_occurrences(past[r], text[size - 2], text[size - 1], 0, found + 1);
            int64_t longest = longest_match(found + 1, text, size, end);
            for (int64_t b = r ? beside_ends[r - 1] : 0; b < beside_ends[r]; b++) {
                find_occurrences(beside[b], text[size - 2], text[size - 1], num_prompt[r], &more);
                int64_t match = longest_match(&more, text, size, end);
                if (match <= longest) continue;
                longest = match;
                found[1] = more;
            }
            failed = attach_copies(
                pool, &row, places[i], pool->width + num_added, found, text, size, least(length, max_depth - depth),
                num_nodes, scale, first, probs, &subtree);
            num_added += subtree.count;
        }
        counts[r] = num_added;
        if (num_added > *width) *width = num_added;
    }
    int has_room = !failed && pool->width + *width <= pool->capacity;
    for (int64_t r = 0; r < pool->num_rows && has_room && !failed; r++) {
        Row row = row_of(pool, r);
        for (int64_t i = counts[r]; i < *width && !failed; i++) /* padding */
            failed = add_node(pool, &row, pool->width + i, 0, 0, 0.0f, ROOT, 0, INHERITED);
    }
    if (has_room && !failed) pool->width += *width;
    free(counts);
    free(memory);
    free(text);
    return failed;
}
