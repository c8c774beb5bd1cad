/* Mixtures of experts: a router chooses experts for each token, and each expert multiplies all its tokens together.
   `cpu_layers.c` includes this file. A token's choice and sums depend on no other token. */

static inline float sigmoid(float x) { return 1.0f / (1.0f + expf(-x)); }

/* The place of the highest number; the first of equal ones. */
static long best_of(const float *x, long count) {
    long best = 0;
    for (long i = 1; i < count; i++)
        if (x[i] > x[best]) best = i;
    return best;
}

/* Only experts of the best groups keep what they have: those whose two best experts have the highest sums. */
static void keep_groups(const Experts *experts, float *wanted) {
    const long groups = experts->groups, size = experts->num_experts / groups;
    float sums[MAX_EXPERTS];
    for (long g = 0; g < groups; g++) {
        const long best = best_of(wanted + g * size, size);
        float second = -INFINITY;
        for (long i = 0; i < size; i++)
            if (i != best && wanted[g * size + i] > second) second = wanted[g * size + i];
        sums[g] = wanted[g * size + best] + second;
    }
    for (long kept = 0; kept < experts->top_groups; kept++) sums[best_of(sums, groups)] = -INFINITY;
    for (long i = 0; i < groups * size; i++)
        if (sums[i / size] != -INFINITY) wanted[i] = -FLT_MAX;
}

/* A token's experts, best first, and their weights, by the router's logits. */
static void choose(const Experts *experts, const float *logits, int32_t *chosen, float *weights) {
    const long count = experts->num_experts, top_k = experts->top_k;
    const float highest = logits[best_of(logits, count)];
    float scores[MAX_EXPERTS], wanted[MAX_EXPERTS], total = 0;
    for (long e = 0; e < count; e++) {
        scores[e] = experts->scoring == SIGMOID ? sigmoid(logits[e]) : expf(logits[e] - highest);
        total += scores[e];
    }
    for (long e = 0; e < count; e++) {
        if (experts->scoring == SOFTMAX) scores[e] /= total;
        wanted[e] = (experts->scoring == SOFTMAX_OF_CHOSEN ? logits[e] : scores[e]) +
                    (experts->correction != NULL ? experts->correction[e] : 0);
    }
    if (experts->top_groups < experts->groups) keep_groups(experts, wanted);
    total = 0;
    for (long j = 0; j < top_k; j++) {
        chosen[j] = (int32_t)best_of(wanted, count);
        weights[j] = scores[chosen[j]], total += weights[j];
        wanted[chosen[j]] = -INFINITY;
    }
    for (long j = 0; j < top_k; j++) {
        if (experts->scoring == SOFTMAX_OF_CHOSEN) weights[j] /= total;
        else if (experts->normalise)
            weights[j] /= (total > (float)experts->least_sum ? total : (float)experts->least_sum) +
                          (float)experts->added_to_sum;
        weights[j] *= (float)experts->factor;
    }
}

/* Sort pairs of a token and one of its experts by expert: `places` of all pairs, and where each expert's start. */
static void sort_pairs(const State *state, const Experts *experts, long *starts) {
    const long count = state->num_tokens * experts->top_k;
    memset(starts, 0, (MAX_EXPERTS + 1) * sizeof(long));
    for (long i = 0; i < count; i++) starts[state->chosen[i] + 1]++;
    for (long e = 0; e < experts->num_experts; e++) starts[e + 1] += starts[e];
    for (long i = 0; i < count; i++) state->places[i] = (int32_t)starts[state->chosen[i]]++;
    for (long e = experts->num_experts; e > 0; e--) starts[e] = starts[e - 1];
    starts[0] = 0;
}

/* Add the experts' weighted sum to what the shared expert gave, if there is one. */
static void run_experts(State *state, const Layer *layer, const float *inputs) {
    const Experts *experts = layer->experts;
    const long m = state->num_tokens, hidden = state->model->hidden, top_k = experts->top_k;
    const long neurons = experts->downs[0].k;
    long starts[MAX_EXPERTS + 1];
    if (experts->shared_gate.n > 0) multiply(state, &experts->shared_gate, inputs, state->routed);
    for (long t = 0; t < m; t++)
        for (long i = 0; i < hidden; i++)
            if (layer->gate.n == 0) state->delta[t * hidden + i] = 0;
            else if (experts->shared_gate.n > 0) state->delta[t * hidden + i] *= sigmoid(state->routed[t]);
    multiply(state, &experts->router, inputs, state->routed);
    for (long t = 0; t < m; t++)
        choose(experts, state->routed + t * experts->num_experts, state->chosen + t * top_k, state->weights + t * top_k);
    sort_pairs(state, experts, starts);
    for (long i = 0; i < m * top_k; i++)
        memcpy(state->pairs + state->places[i] * hidden, inputs + i / top_k * hidden, (size_t)hidden * sizeof(float));
    state->num_jobs = 0;
    for (long e = 0; e < experts->num_experts; e++) {
        const long first = starts[e], count = starts[e + 1] - first;
        if (count == 0) continue;
        const float *x = state->pairs + first * hidden;
        state->jobs[state->num_jobs++] = job_of(&experts->gates[e], x, state->gate + first * neurons, count);
        state->jobs[state->num_jobs++] = job_of(&experts->ups[e], x, state->up + first * neurons, count);
    }
    state->experts = experts;
    multiply_all(state, experts->activation, 2);
    state->experts = NULL, state->num_jobs = 0;
    for (long e = 0; e < experts->num_experts; e++) {
        const long first = starts[e], count = starts[e + 1] - first;
        if (count == 0) continue;
        float *y = state->pairs + first * hidden;
        state->jobs[state->num_jobs++] = job_of(&experts->downs[e], state->gate + first * neurons, y, count);
    }
    multiply_all(state, NONE, 1);
    for (long i = 0; i < m * top_k; i++)
        add(state->delta + i / top_k * hidden, state->pairs + state->places[i] * hidden, state->weights[i], hidden);
}
