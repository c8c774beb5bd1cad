/* Copies: what followed earlier occurrences of a text's last tokens. */

enum { MAX_OCCURRENCES = 12, MAX_MATCH = 24, MAX_LENGTH = 32, NUM_SHARES = 4 };

/* The latest occurrences of a pair of tokens in a text, the oldest first, and their branches of a tree. */
typedef struct {
    const int32_t *tokens;
    int64_t mask; /* of positions: all ones, or those of the ring */
    int64_t end;  /* of the text; in the ring, texts end by a token below 0 */
    int64_t count, positions[MAX_OCCURRENCES]; /* of the token after the pair */
    int64_t longest; /* the longest match */
    int is_active[MAX_OCCURRENCES];
    int64_t branches[MAX_OCCURRENCES], orders[MAX_OCCURRENCES], members[MAX_OCCURRENCES], nodes[MAX_OCCURRENCES];
} Occurrences;

static int32_t token_at(const Occurrences *found, int64_t position) {
    return position < found->end ? found->tokens[position & found->mask] : -1;
}

/* Finds a pair of tokens at the positions from `last` down to `first`. owners: of the tokens of a ring, or NULL. */
static void find_pair(
    Occurrences *found, int64_t first, int64_t last, int32_t prior, int32_t token, const int64_t *owners,
    int64_t owner) {
    int64_t latest[MAX_OCCURRENCES], count = 0;
    for (int64_t at = last; at >= first && count < MAX_OCCURRENCES; at--) {
        if (found->tokens[at & found->mask] != token || found->tokens[(at - 1) & found->mask] != prior) continue;
        if (owners == NULL || owners[at & found->mask] == owner) latest[count++] = at + 1;
    }
    for (int64_t i = 0; i < count; i++) found->positions[i] = latest[count - 1 - i];
    found->count = count;
}

/* Compares the occurrences with the end of the path, `suffix`, in reverse order. The branches of the longest matches
   begin at `node`. */
static void begin_branches(Occurrences *found, const int32_t *suffix, int64_t node) {
    int64_t matches[MAX_OCCURRENCES], members = 0;
    found->longest = 0;
    for (int64_t i = 0; i < found->count; i++) {
        int64_t at = found->positions[i], match = 0;
        matches[i] = 0;
        if (token_at(found, at) < 0) continue; /* nothing follows */
        while (match < MAX_MATCH && (found->mask != -1 || at - 1 - match >= 0) &&
               found->tokens[(at - 1 - match) & found->mask] == suffix[match])
            match++;
        matches[i] = match;
        if (match > found->longest) found->longest = match;
    }
    for (int64_t i = 0; i < found->count; i++) {
        /* Matches at most half as long as the longest are left out: they would only take nodes from it. */
        found->is_active[i] = 2 * matches[i] > found->longest;
        found->branches[i] = found->orders[i] = 0;
        found->nodes[i] = node;
        members += found->is_active[i];
    }
    for (int64_t i = 0; i < found->count; i++) found->members[i] = members;
}

/* The occurrences of each branch, by their next token. A group's leader is its first occurrence. */
typedef struct {
    int32_t tokens[MAX_OCCURRENCES];
    int64_t leaders[MAX_OCCURRENCES]; /* -1: no next token */
    int64_t sizes[MAX_OCCURRENCES];
    int64_t ranked[MAX_OCCURRENCES]; /* leaders by the order of their branches, then by size, then the first */
    int64_t num_groups;
} Groups;

static void group(const Occurrences *found, int64_t step, Groups *groups) {
    groups->num_groups = 0;
    for (int64_t i = 0; i < found->count; i++) {
        groups->leaders[i] = -1;
        groups->tokens[i] = found->is_active[i] ? token_at(found, found->positions[i] + step) : -1;
        if (groups->tokens[i] < 0) continue;
        int64_t leader = 0;
        while (leader < i && (groups->leaders[leader] != leader || found->branches[leader] != found->branches[i] ||
                              groups->tokens[leader] != groups->tokens[i]))
            leader++;
        groups->leaders[i] = leader;
        if (leader == i) {
            groups->sizes[i] = 0;
            groups->ranked[groups->num_groups++] = i;
        }
        groups->sizes[leader]++;
    }
    for (int64_t i = 1; i < groups->num_groups; i++) { /* a stable sort */
        int64_t own = groups->ranked[i], at = i;
        for (; at > 0; at--) {
            int64_t other = groups->ranked[at - 1];
            int64_t later = found->orders[other] - found->orders[own];
            if (later < 0 || (later == 0 && groups->sizes[other] >= groups->sizes[own])) break;
            groups->ranked[at] = other;
        }
        groups->ranked[at] = own;
    }
}

/* Goes down the made branches. nodes: of each leader that was made, in the order of `ranked`. */
static int64_t go_down(Occurrences *found, const Groups *groups, const int64_t *nodes, int64_t num_made) {
    int64_t num_active = 0;
    int64_t place[MAX_OCCURRENCES];
    for (int64_t g = 0; g < groups->num_groups; g++) place[groups->ranked[g]] = g;
    for (int64_t i = 0; i < found->count; i++) {
        int64_t leader = groups->leaders[i];
        found->is_active[i] = leader >= 0 && place[leader] < num_made;
        if (!found->is_active[i]) continue;
        found->branches[i] = leader;
        found->orders[i] = place[leader];
        found->members[i] = groups->sizes[leader];
        found->nodes[i] = nodes[place[leader]];
        num_active++;
    }
    return num_active;
}

/* The score bucket of a copied token: by match length, by the share of occurrences with this next token, and in a
   sampled row by the bucket of the token's E. */
static int64_t copied_bucket(
    const Row *row, int64_t depth, int32_t token, int64_t match, int64_t size, int64_t members) {
    static const int64_t MATCHES[] = {3, 4, 6, 9, 13, 18, 24}; /* where buckets begin; the first one has 2 */
    int64_t bucket = 0, share = (10 * size >= 3 * members) + (10 * size >= 6 * members) + (10 * size >= 9 * members);
    while (bucket < 7 && match >= MATCHES[bucket]) bucket++;
    bucket = bucket * NUM_SHARES + share;
    return row->kind > 0 ? bucket * NUM_NOISES + noise_bucket_of(draw_time(row, depth, token)) : bucket;
}

/* Adds the continuations of own[0] and past[0], which were found for `node`, from own_first and past_first on. */
static int attach(
    const Row *row, int64_t node, Occurrences *own, Occurrences *past, int64_t limit, int64_t own_first,
    int64_t past_first, int64_t most, int64_t source, const Probs *probs) {
    int64_t num_own = 0, num_past = 0, num_new = 0, top = row->depths[node], num_active = 1;
    for (int64_t step = 0; step < limit && num_active > 0; step++) {
        Groups groups;
        int64_t depth = top + step + 1, own_nodes[MAX_OCCURRENCES], past_nodes[MAX_OCCURRENCES], made, past_made;
        int32_t own_tokens[MAX_OCCURRENCES];
        int64_t own_parents[MAX_OCCURRENCES];
        group(own, step, &groups);
        made = least(groups.num_groups, most - num_own);
        for (int64_t g = 0; g < made; g++) {
            int64_t leader = groups.ranked[g];
            float prob;
            own_tokens[g] = groups.tokens[leader];
            own_parents[g] = own->nodes[leader];
            own_nodes[g] = own_first + num_own + g;
            int64_t bucket = copied_bucket(
                row, depth, own_tokens[g], own->longest + step, groups.sizes[leader], own->members[leader]);
            if (find_prob(probs, row->kind, ALONE, source, bucket, &prob) ||
                write_node(
                    row, own_nodes[g], own_tokens[g], own_parents[g], prob, source, bucket, row->needs[node]))
                return OUT_OF_RANGE;
        }
        num_active = go_down(own, &groups, own_nodes, made);
        num_own += made;
        group(past, step, &groups);
        past_made = least(groups.num_groups, most - num_past);
        for (int64_t g = 0; g < past_made; g++) {
            int64_t leader = groups.ranked[g], parent = past->nodes[leader], known = 0;
            int32_t token = groups.tokens[leader];
            float prob;
            /* If both texts propose a token, they share the node of the row's own text. */
            while (known < made && (own_parents[known] != parent || own_tokens[known] != token)) known++;
            if (known < made) {
                past_nodes[g] = own_nodes[known];
                continue;
            }
            past_nodes[g] = past_first + num_new++;
            int64_t bucket = copied_bucket(
                row, depth, token, past->longest + step, groups.sizes[leader], past->members[leader]);
            if (find_prob(probs, row->kind, ALONE, source + 1, bucket, &prob) ||
                write_node(row, past_nodes[g], token, parent, prob, source + 1, bucket, row->needs[node]))
                return OUT_OF_RANGE;
        }
        num_active += go_down(past, &groups, past_nodes, past_made);
        num_past += past_made;
    }
    return OK;
}

int graft_add_copies(
    const Pool *pool, const Shape *shape, const Texts *texts, const int32_t *table_rows, const int64_t *owners,
    const int32_t *places, int64_t num_places, const Probs *probs, const int32_t *max_depths, const Draws *draws,
    int64_t source, int64_t first) {
    int64_t written = texts->past_end[0], dropped = texts->past_end[1];
    for (int64_t r = 0; r < shape->num_rows; r++) {
        int64_t end;
        const int32_t *text = text_of(texts, table_rows[r], &end);
        if (text == NULL) return OUT_OF_RANGE;
        Row row = row_of(pool, r, draws, end);
        for (int64_t p = 0; p < num_places; p++) {
            int64_t node = places[r * num_places + p];
            if (node < 0) continue;
            if (node >= pool->capacity) return OUT_OF_RANGE;
            Occurrences own = {text, -1, end}, past = {texts->past, texts->ring - 1, INT64_MAX};
            int32_t token = row.tokens[node], prior = node > 0 ? row.tokens[row.parents[node]] : row.before;
            if (prior >= 0) {
                find_pair(&own, 1, end - 1, prior, token, NULL, 0);
                find_pair(&past, dropped + 1, written - 1, prior, token, texts->owners, owners[r]);
            }
            /* The last tokens of the text and the path down to the node, in reverse order. */
            int64_t top = row.depths[node], at = node;
            int32_t suffix[MAX_LENGTH];
            for (int64_t back = 0; back < MAX_LENGTH; back++) {
                if (back < top) {
                    suffix[back] = row.tokens[at];
                    at = row.parents[at];
                } else {
                    suffix[back] = back - top < end ? text[end - 1 - (back - top)] : -2;
                }
            }
            begin_branches(&own, suffix, node);
            begin_branches(&past, suffix, node);
            int64_t limit = least(MAX_LENGTH, max_depths[r] - top), own_first = first + 2 * shape->copy_nodes * p;
            if (attach(
                    &row, node, &own, &past, limit, own_first, own_first + shape->copy_nodes, shape->copy_nodes, source,
                    probs))
                return OUT_OF_RANGE;
        }
    }
    return OK;
}
