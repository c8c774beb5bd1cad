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

/* A pair of tokens to find. */
typedef struct {
    int32_t prior, token;
    int64_t owner; /* of the finished texts where it counts; -1: everywhere */
    Occurrences *found;
    int32_t next; /* the next pair with the same hash, from 1 on; 0: none */
} Pair;

enum { NUM_HASHES = 1 << 13, BLOCK = 64 };

/* Pairs that are found in one pass over a text, from its end on. There is no index: a hash of two tokens tells whether
   they may be one of the pairs, and almost all text is passed over by that. */
typedef struct {
    uint16_t heads[NUM_HASHES]; /* the first pair with this hash, from 1 on; 0: none */
    Pair *pairs;
    int64_t num_pairs, num_open; /* pairs that have fewer than MAX_OCCURRENCES */
} Search;

static uint32_t hash_of(int32_t prior, int32_t token) {
    return ((uint32_t)token + 8 * (uint32_t)prior) & (NUM_HASHES - 1);
}

static void search_for(Search *search, int32_t prior, int32_t token, int64_t owner, Occurrences *found) {
    uint16_t *head = search->heads + hash_of(prior, token);
    search->pairs[search->num_pairs++] = (Pair){prior, token, owner, found, *head};
    *head = (uint16_t)search->num_pairs;
    search->num_open++;
}

/* Forgets all pairs, and turns their occurrences: the oldest comes first. */
static void end_search(Search *search) {
    for (int64_t p = 0; p < search->num_pairs; p++) {
        Occurrences *found = search->pairs[p].found;
        search->heads[hash_of(search->pairs[p].prior, search->pairs[p].token)] = 0;
        for (int64_t i = 0; i < found->count / 2; i++) {
            int64_t late = found->positions[i];
            found->positions[i] = found->positions[found->count - 1 - i];
            found->positions[found->count - 1 - i] = late;
        }
    }
    search->num_pairs = search->num_open = 0;
}

/* Whether two tokens are one of the pairs, the second one at a position. */
static void compare(Search *search, int32_t prior, int32_t token, int64_t owner, int64_t position) {
    uint16_t *head = search->heads + hash_of(prior, token);
    int is_open = 0;
    for (int32_t number = *head; number > 0;) {
        const Pair *pair = search->pairs + number - 1;
        int has_room = pair->found->count < MAX_OCCURRENCES;
        if (has_room && pair->prior == prior && pair->token == token && (pair->owner == -1 || pair->owner == owner)) {
            pair->found->positions[pair->found->count++] = position + 1;
            has_room = pair->found->count < MAX_OCCURRENCES;
            search->num_open -= !has_room;
        }
        is_open |= has_room;
        number = pair->next;
    }
    if (!is_open) *head = 0; /* none of these is looked for any longer */
}

/* Passes over `count` tokens, the latest first, each of which has one before it. position: of the first of them. */
static void scan(Search *search, const int32_t *tokens, const int64_t *owners, int64_t count, int64_t position) {
    while (count > 0 && search->num_open > 0) {
        int64_t size = least(count, BLOCK);
        const int32_t *block = tokens + count - size;
        uint32_t hits = 0;
        if (search->num_pairs == 1) { /* processors compare several tokens at once */
            int32_t prior = search->pairs[0].prior, token = search->pairs[0].token;
            for (int64_t i = 0; i < size; i++) hits |= (block[i - 1] == prior) & (block[i] == token);
        } else {
            for (int64_t i = 0; i < size; i++) hits |= search->heads[hash_of(block[i - 1], block[i])];
        }
        count -= size;
        for (int64_t i = size - 1; i >= 0 && hits; i--)
            if (search->heads[hash_of(block[i - 1], block[i])])
                compare(search, block[i - 1], block[i], owners != NULL ? owners[count + i] : 0, position + count + i);
    }
}

/* Passes over the ring of finished texts. Positions count from the first token ever written. */
static void scan_ring(Search *search, const Texts *texts) {
    int64_t first = texts->past_end[1] + 1, mask = texts->ring - 1;
    for (int64_t last = texts->past_end[0] - 1; last >= first && search->num_open > 0;) {
        int64_t at = last & mask, count = least(at, last - first + 1);
        if (at == 0) compare(search, texts->past[mask], texts->past[0], texts->owners[0], last--);
        scan(search, texts->past + at - count + 1, texts->owners + at - count + 1, count, last - count + 1);
        last -= count;
    }
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

/* The end of a node's path, with the text before it, in reverse order. */
static void suffix_of(const Row *row, const int32_t *text, int64_t node, int32_t *suffix) {
    int64_t depth = row->depths[node];
    for (int64_t back = 0; back < MAX_LENGTH; back++) {
        int64_t at = row->end - 1 - (back - depth); /* in the text */
        suffix[back] = back < depth ? row->tokens[node] : at >= 0 ? text[at] : -2;
        node = row->parents[node];
    }
}

/* Texts that a row may copy besides its own. */
typedef struct {
    const int64_t *owners;     /* [rows] whose finished texts */
    const int32_t *groups;     /* [rows] rows of a group see each other's texts after the prompt; 0: no group */
    const int32_t *num_prompt; /* [rows] tokens of the prompt */
} Others;

/* Searches a text for the ends of the paths of a row's places. found: by place, `stride` apart. */
static int seek(
    Search *search, const Row *row, const int32_t *places, int64_t num_places, int64_t owner, const int32_t *tokens,
    int64_t mask, int64_t end, Occurrences *found, int64_t stride) {
    for (int64_t p = 0; p < num_places; p++, found += stride) {
        int64_t node = places[p];
        if (node >= row->capacity) return OUT_OF_RANGE;
        *found = (Occurrences){.tokens = tokens, .mask = mask, .end = end};
        if (node < 0) continue;
        int32_t prior = node > 0 ? row->tokens[row->parents[node]] : row->before;
        if (prior >= 0) search_for(search, prior, row->tokens[node], owner, found);
    }
    return OK;
}

/* Ends the search, and compares what was found with the row's paths. */
static void weigh(
    Search *search, const Row *row, const int32_t *text, const int32_t *places, int64_t num_places,
    Occurrences *found, int64_t stride) {
    end_search(search);
    for (int64_t p = 0; p < num_places; p++, found += stride) {
        int32_t suffix[MAX_LENGTH];
        if (places[p] < 0) continue;
        suffix_of(row, text, places[p], suffix);
        begin_branches(found, suffix, places[p]);
    }
}

/* Everything for one row, but the search of finished texts: found is [places][2], for its own text and for those. */
static int add_to_row(
    const Row *row, const Shape *shape, const Texts *texts, const int32_t *table_rows, const Others *others,
    const int32_t *places, int64_t num_places, const Probs *probs, int64_t max_depth, int64_t source, int64_t first,
    Search *search, Occurrences *found, Occurrences *more) {
    int64_t end = row->end;
    const int32_t *text = text_of(texts, table_rows[row->number], &end);
    int failed = seek(search, row, places, num_places, -1, text, -1, end, found, 2);
    if (failed) return failed;
    if (end > 1) scan(search, text + 1, NULL, end - 1, 1);
    weigh(search, row, text, places, num_places, found, 2);
    weigh(search, row, text, places, num_places, found + 1, 2);
    int64_t group = others->groups[row->number], start = others->num_prompt[row->number];
    for (int64_t r = 0; r < shape->num_rows && group != 0; r++) {
        int64_t other_end, begin = start > 2 ? start - 1 : 1;
        if (r == row->number || others->groups[r] != group) continue;
        const int32_t *other = text_of(texts, table_rows[r], &other_end);
        if (other == NULL) return OUT_OF_RANGE;
        failed = seek(search, row, places, num_places, -1, other, -1, other_end, more, 1);
        if (failed) return failed;
        if (other_end > begin) scan(search, other + begin, NULL, other_end - begin, begin);
        weigh(search, row, text, places, num_places, more, 1);
        for (int64_t p = 0; p < num_places; p++) /* another answer takes the place of finished texts if it fits better */
            if (places[p] >= 0 && more[p].longest > found[2 * p + 1].longest) found[2 * p + 1] = more[p];
    }
    for (int64_t p = 0; p < num_places && !failed; p++) {
        int64_t own_first = first + 2 * shape->copy_nodes * p;
        if (places[p] < 0) continue;
        failed = attach(
            row, places[p], found + 2 * p, found + 2 * p + 1, least(MAX_LENGTH, max_depth - row->depths[places[p]]),
            own_first, own_first + shape->copy_nodes, shape->copy_nodes, source, probs);
    }
    return failed;
}

int graft_add_copies(
    const Pool *pool, const Shape *shape, const Texts *texts, const int32_t *table_rows, const Others *others,
    const int32_t *places, int64_t num_places, const Probs *probs, const int32_t *max_depths, const Draws *draws,
    int64_t source, int64_t first) {
    int64_t size = shape->num_rows * num_places;
    if (size >= UINT16_MAX) return OUT_OF_RANGE;
    Search *search = calloc(1, sizeof(Search));
    Pair *pairs = malloc((size_t)(size + 1) * sizeof(Pair));
    Occurrences *found = malloc((size_t)(2 * size + num_places + 1) * sizeof(Occurrences));
    int failed = search == NULL || pairs == NULL || found == NULL ? NO_MEMORY : OK;
    if (!failed) search->pairs = pairs;
    for (int turn = 0; turn < 2; turn++) { /* finished texts are searched for all rows at once */
        for (int64_t r = 0; r < shape->num_rows && !failed; r++) {
            int64_t end, at = r * num_places;
            if (text_of(texts, table_rows[r], &end) == NULL) {
                failed = OUT_OF_RANGE;
                break;
            }
            Row row = row_of(pool, r, draws, end);
            if (turn == 0)
                failed = seek(
                    search, &row, places + at, num_places, others->owners[r], texts->past, texts->ring - 1, INT64_MAX,
                    found + 2 * at + 1, 2);
            else
                failed = add_to_row(
                    &row, shape, texts, table_rows, others, places + at, num_places, probs, max_depths[r], source,
                    first, search, found + 2 * at, found + 2 * size);
        }
        if (turn == 0 && !failed) {
            scan_ring(search, texts);
            end_search(search);
        }
    }
    free(search);
    free(pairs);
    free(found);
    return failed;
}
