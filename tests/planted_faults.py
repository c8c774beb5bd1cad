"""The faults that `mutants.py` plants, and the tests that should notice each."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Fault:
    """A change of one file that gives a wrong text, a leak or a wrong answer."""

    name: str  # area: what goes wrong
    file: str
    old: str  # occurs exactly once in the file
    new: str
    tests: tuple[str, ...]  # the quickest that should fail: FILE::NAME, in tests/
    survives: str = ""  # why no test can notice


_ACCEPTANCE = "src/graft/spec_decode/acceptance.py"
_ALLOCATOR = "src/graft/engine/page_allocator.py"
_ATTENTION = "src/graft/model/kernels/attention.py"
_BUDGET = "src/graft/spec_decode/budget.py"
_CALIBRATION = "src/graft/spec_decode/calibration.py"
_DECODE_LOOP = "src/graft/engine/decode_loop.py"
_DETOKENIZER = "src/graft/request/detokenizer.py"
_DEVICE_ROWS = "src/graft/engine/device_rows.py"
_ENGINE = "src/graft/engine/engine.py"
_GRAPHS = "src/graft/model/cuda_graphs.py"
_GUARD = "src/graft/server/guard.py"
_NATIVE = "src/graft/tree/native/"
_NOISE = "src/graft/model/noise.py"
_PAGES = "src/graft/model/kv_cache.py"
_ROUNDS = "src/graft/engine/rounds.py"
_SAMPLER = "src/graft/model/sampler.py"
_SEQUENCE = "src/graft/request/sequence.py"
_SERVING = "src/graft/server/serving.py"
_SUFFIX = "src/graft/spec_decode/proposers/suffix.py"
_TOOL_CALLS = "src/graft/server/tool_calls.py"
_TOOL_FORMATS = "src/graft/server/tool_formats.py"
_TOOL_PARSERS = "src/graft/server/tool_parsers.py"

# Tests that several faults name
_NEEDS_HOST = "test_device_rounds.py::test_rows_whose_choices_need_the_host_are_not_left_to_the_device"
_MEANING = "test_captured.py::test_each_setting_has_the_meaning_that_transformers_gives_it_in_captured_steps_too"
_NUMPY = "test_sampling.py::test_greedy_choices_with_bias_and_penalties_are_those_of_a_page_of_numpy"
_PROCESSORS = "test_sampling.py::test_truncation_and_penalties_mean_what_they_mean_in_transformers"
_TRUNCATION = "test_sampling.py::test_each_way_to_truncate_leaves_alone_what_it_leaves_in_transformers"
_CONSTRAINED = "test_scheduler.py::test_a_constrained_request_that_was_preempted_goes_on_in_its_grammar"
_CUT = "test_draw.py::test_the_last_token_that_a_truncation_keeps_can_be_drawn_and_the_next_cannot"
_CALLS = "test_server_tools.py::test_calls_are_read_however_the_text_is_cut"

FAULTS = (
    # Acceptance and the commit of accepted paths
    Fault(
        "commit: a path that begins at its place is not moved",
        _GRAPHS,
        "if path and path[-1] != len(path)]",
        "if path and path[0] != 1]",
        ("test_captured.py::test_whatever_path_is_committed_the_next_logits_are_those_of_the_models_own_forward",),
    ),
    # Drafts that know the noise of coming draws
    Fault(
        "noise: a draft is ranked by the noise of the position after its own",
        _NOISE,
        "noise_of_tokens(seeds, positions + depth - 1, tokens)",
        "noise_of_tokens(seeds, positions + depth, tokens)",
        ("test_known_draws.py::test_drafted_tokens_are_ranked_by_log_q_over_temperature_and_noise",),
    ),
    Fault(
        "noise: drafts do not divide by the temperature",
        _NOISE,
        "torch.addcmul(noise, logits, factors.view(",
        "torch.addcmul(noise, logits, torch.ones_like(factors).view(",
        ("test_known_draws.py::test_drafted_tokens_are_ranked_by_log_q_over_temperature_and_noise",),
    ),
    Fault(
        "noise: greedy rows beside sampled ones get noise",
        _NOISE,
        "torch.addcmul(noise, logits, factors.view(",
        "torch.addcmul(noise.roll(1, 0), logits, factors.view(",
        ("test_known_draws.py::test_greedy_rows_are_drafted_by_the_same_bits_beside_sampled_ones",),
    ),
    Fault(
        "noise: successors keep the order of their probability",
        _NATIVE + "tables.c",
        "weights[s] = power / draw_time(row->draws, row->number, depth, token);",
        "weights[s] = power;",
        ("test_known_draws.py::test_successors_are_ranked_again_by_their_probability_and_the_noise",),
    ),
    Fault(
        "noise: a copied token is judged by the noise of its parent's position",
        _NATIVE + "candidates.c",
        "row->fields[DEPTH][parent] + 1, token);",
        "row->fields[DEPTH][parent], token);",
        ("test_known_draws.py::test_copies_are_judged_by_the_noise_of_their_token",),
    ),
    Fault(
        "noise: what is never drawn is proposed",
        _NATIVE + "draws.c",
        "draws->banned_ends[row])) return 0;",
        "draws->banned_ends[row])) return 1;",
        ("test_known_draws.py::test_what_cannot_be_drawn_is_never_proposed",),
    ),
    Fault(
        "noise: an ending is proposed one token too early",
        _NATIVE + "draws.c",
        "return depth > draws->num_unending[row] ||",
        "return depth >= draws->num_unending[row] ||",
        ("test_known_draws.py::test_what_cannot_be_drawn_is_never_proposed",),
    ),
    Fault(
        "noise: sampled rows are calibrated with greedy ones",
        _NATIVE + "candidates.c",
        "int64_t group = row.kind * NUM_AGREEMENTS + row.fields[AGREEMENT][i];",
        "int64_t group = row.fields[AGREEMENT][i];",
        ("test_known_draws.py::test_sampled_rows_are_calibrated_apart_from_greedy_ones",),
    ),
    Fault(
        "noise: decode foresees the draws of one step later",
        "src/graft/integrations/transformers.py",
        "            self._num_foreseen = len(self._states)\n",
        "            self._num_foreseen = len(self._states) + 1\n",
        ("test_known_draws.py::test_decode_foresees_the_draws_of_torchs_own_generator",),
    ),
    Fault(
        "noise: draft passes on the device rank by the noise of the level before",
        "src/graft/model/kernels/topk.py",
        "position = tl.load(positions + text).to(tl.int64) + 1",
        "position = tl.load(positions + text).to(tl.int64)",
        ("test_kernels.py::test_sampled_rows_are_ranked_by_logits_over_temperature_and_the_noise_of_their_draws",),
    ),
    Fault(
        "noise: slots of a block on the device share the noise of the first",
        "src/graft/spec_decode/proposers/block/cuda_graphs.py",
        "DraftDraws(seeds, temperatures, positions + places, by_row.to_target)",
        "DraftDraws(seeds, temperatures, positions, by_row.to_target)",
        ("test_captured_block.py::test_drafts_are_those_of_the_eager_drafter",),
    ),
    # The sampler
    Fault(
        "sampler: tokens of the answer count once however often they come",
        _SAMPLER,
        "self._counts[rows, tokens[rows]] += 1",
        "self._counts[rows, tokens[rows]] = 1",
        (_NUMPY,),
    ),
    Fault(
        "rounds of the device: a bias does not keep the device from choosing",
        _DEVICE_ROWS,
        " or s.frequency_penalty or s.logit_bias\n",
        " or s.frequency_penalty\n",
        (_NEEDS_HOST + "[logit_bias]",),
    ),
    Fault(
        "rounds of the device: a presence penalty does not keep the device from choosing",
        _DEVICE_ROWS,
        "s.repetition_penalty != 1 or s.presence_penalty or",
        "s.repetition_penalty != 1 or",
        (_NEEDS_HOST + "[presence_penalty]",),
    ),
    Fault(
        "rounds of the device: a frequency penalty does not keep the device from choosing",
        _DEVICE_ROWS,
        "s.presence_penalty or s.frequency_penalty or s.logit_bias",
        "s.presence_penalty or s.logit_bias",
        (_NEEDS_HOST + "[frequency_penalty]",),
    ),
    # The KV cache
    Fault(
        "pages: the device's block table is stale when a row grows",
        _PAGES,
        "                self._host_tables[row.block_table_row, start : len(row.pages)] = row.pages[start:]\n"
        "                self._is_changed = True\n",
        "                self._host_tables[row.block_table_row, start : len(row.pages)] = row.pages[start:]\n",
        ("test_pages.py::test_the_block_tables_on_the_device_list_the_pages_of_a_row_that_has_grown",),
    ),
    Fault(
        "pages: more is kept than the drafter has entries of",
        _PAGES,
        "min(row.length, len(text), row.length if num_entries is None else num_entries)",
        "min(row.length, len(text))",
        ("test_pages.py::test_the_prefix_cache_keeps_no_more_of_a_text_than_the_drafter_has_entries_for",),
    ),
    Fault(
        "pages: those read without the drafter serve requests that draft",
        _ROUNDS,
        "{sequence.speculates and self.drafter is not None}/{salt}",
        "{self.drafter is not None}/{salt}",
        ("test_scheduler.py::test_pages_read_without_the_drafter_do_not_serve_requests_that_draft",),
    ),
    # The scheduler
    Fault(
        "scheduler: a request that was preempted waits behind all others",
        _DECODE_LOOP,
        '        log.info("the KV cache is full: a request is preempted")\n'
        "        with self._changed:\n"
        "            self._waiting.appendleft(job)\n",
        '        log.info("the KV cache is full: a request is preempted")\n'
        "        with self._changed:\n"
        "            self._waiting.append(job)\n",
        ("test_scheduler.py::test_a_request_that_was_preempted_goes_on_before_those_that_wait",),
    ),
    # The text and its stop strings
    Fault(
        "text: a stream shows the beginning of a stop string",
        _DETOKENIZER,
        "end = len(self.text) if final else len(self.text) - self._num_held()",
        "end = len(self.text)",
        ("test_text_stream.py::test_a_stream_never_shows_the_beginning_of_a_stop_string",),
    ),
    Fault(
        "text: the first stop string of the list ends it, not the earliest",
        _DETOKENIZER,
        "self.text = self.text[: min(found)]",
        "self.text = self.text[: found[0]]",
        ("test_text_stream.py::test_the_earliest_of_two_stop_strings_ends_the_text",),
    ),
    Fault(
        "text: a word loses its space behind markers",
        _DETOKENIZER,
        "_TAIL = 6  #",
        "_TAIL = 1  #",
        ("test_text_stream.py::test_an_answer_is_what_the_tokenizer_decodes_behind_the_prompt",),
    ),
    # Acceptance
    Fault(
        "acceptance: every child is looked for below the root",
        _ACCEPTANCE,
        "child = children[row].get((node[row], tokens[row]))",
        "child = children[row].get((0, tokens[row]))",
        ("test_sampling.py::test_penalties_and_bans_follow_the_nodes_own_path_inside_a_tree",),
    ),
    Fault(
        "acceptance: padding is accepted in a walk choice by choice",
        _ACCEPTANCE,
        "for node in range(tree.width - 1, 0, -1) if sources[node] > ROOT}",
        "for node in range(tree.width - 1, 0, -1)}",
        ("test_sampling.py::test_padding_is_never_accepted",),
    ),
    Fault(
        "sampler: the noise of the next token is that of this one",
        _SAMPLER,
        "            self._positions[row] += 1\n",
        "",
        (_MEANING + "[top_k]",),
    ),
    Fault(
        "step: a node's position is its place in the tree, not its depth",
        "src/graft/model/step.py",
        "return self._lengths_of_tokens() + self.columns[3, : self.num_tokens]",
        "return self._lengths_of_tokens() + self.columns[2, : self.num_tokens]",
        ("test_target.py::test_a_nodes_logits_are_those_of_its_path_alone[llama]",),
    ),
    Fault(
        "step: a node is one deeper than the node before it, not than its parent",
        _NATIVE + "trees.c",
        "depths[at] = i > 0 ? depths[start + parent] + 1 : 0;",
        "depths[at] = i > 0 ? depths[at - 1] + 1 : 0;",
        ("test_target.py::test_a_nodes_logits_are_those_of_its_path_alone[llama]",),
    ),
    Fault(
        "commit: a node one place too far is not moved",
        _PAGES,
        "            if place != step\n",
        "            if place > step + 1\n",
        ("test_target.py::test_accepted_paths_are_committed_as_plain_decoding_would_have_written_them[llama]",),
    ),
    Fault(
        "step: padding of a captured step goes to a row of an earlier step",
        _GRAPHS,
        "        self.host_by_row[:, num_rows : size + 1] = 0\n",
        "",
        ("test_captured.py::test_padding_of_a_step_is_written_to_no_text_of_an_earlier_step",),
    ),
    # The sampler
    Fault(
        "sampler: the noise is that of the position before",
        _SAMPLER,
        "self._positions = [len(h) for h in histories]",
        "self._positions = [len(h) - 1 for h in histories]",
        (_MEANING + "[top_k]",),
    ),
    Fault(
        "sampler: a temperature multiplies",
        _SAMPLER,
        "scores = scores / temperature.clamp(min=1e-6)[:, None]",
        "scores = scores * temperature.clamp(min=1e-6)[:, None]",
        (_MEANING + "[presence_penalty]",),
    ),
    Fault(
        "sampler: a repetition penalty raises what it should lower",
        _SAMPLER,
        "torch.where(logits > 0, logits / penalty, logits * penalty)",
        "torch.where(logits > 0, logits * penalty, logits / penalty)",
        (_NUMPY,),
    ),
    Fault(
        "sampler: a repetition penalty divides logits below zero",
        _SAMPLER,
        "torch.where(logits > 0, logits / penalty, logits * penalty)",
        "logits / penalty",
        (_NUMPY,),
    ),
    Fault(
        "sampler: a presence penalty is a bonus",
        _SAMPLER,
        "logits - presence * (self._counts > 0) - frequency * self._counts",
        "logits + presence * (self._counts > 0) - frequency * self._counts",
        (_NUMPY,),
    ),
    Fault(
        "sampler: a bias has the wrong sign",
        _SAMPLER,
        "            logits = logits + self._bias\n",
        "            logits = logits - self._bias\n",
        (_NUMPY,),
    ),
    Fault(
        "sampler: min_tokens forbids endings for one token too few",
        _SAMPLER,
        "number < s.min_tokens for number",
        "number + 1 < s.min_tokens for number",
        ("test_sampling.py::test_endings_are_forbidden_for_as_many_tokens_as_in_transformers",),
    ),
    Fault(
        "sampler: min_tokens forbids endings for one token too many",
        _SAMPLER,
        "number < s.min_tokens for number",
        "number <= s.min_tokens for number",
        ("test_sampling.py::test_endings_are_forbidden_for_as_many_tokens_as_in_transformers",),
    ),
    Fault(
        "sampler: rows that stay have the settings of rows that left",
        _SAMPLER,
        "        there = copy.copy(self)\n        there._columns = {}\n        for name, value in vars(self).items():\n"
        "            if isinstance(value, Tensor):",
        "        there = copy.copy(self)\n        for name, value in vars(self).items():\n"
        "            if isinstance(value, Tensor):",
        ("test_sampling.py::test_rows_that_stay_or_join_are_sampled_as_if_alone",),
    ),
    Fault(
        "sampler: rows that join have the settings of those before them",
        _SAMPLER,
        "        there = copy.copy(self)\n        there._columns = {}\n        for name, own in vars(self).items():",
        "        there = copy.copy(self)\n        for name, own in vars(self).items():",
        ("test_sampling.py::test_rows_that_stay_or_join_are_sampled_as_if_alone",),
    ),
    Fault(
        "sampler: rows that join have the bias of those before them",
        _SAMPLER,
        "own.new_zeros(num_new, self._vocab_size)",
        "own[:1].expand(num_new, -1)",
        ("test_sampling.py::test_rows_that_stay_or_join_are_sampled_as_if_alone",),
    ),
    Fault(
        "sampler: all answers of a request have one seed",
        _ENGINE,
        "replace(settings, seed=settings.seed + rank)",
        "replace(settings, seed=settings.seed)",
        ("test_sampling.py::test_answers_of_one_request_differ_and_each_can_be_had_again_by_its_seed",),
    ),
    # Truncation
    Fault(
        "truncation: top-k keeps one more",
        _SAMPLER,
        "keep = rank < top_k[:, None]",
        "keep = rank <= top_k[:, None]",
        (_TRUNCATION,),
    ),
    Fault(
        "truncation: top-p drops the token that reaches it",
        _SAMPLER,
        "(through - weight < share[:, None])",
        "(through < share[:, None])",
        (_TRUNCATION,),
    ),
    Fault(
        "truncation: min-p is no share of the likeliest token's",
        _SAMPLER,
        "min_p.double()[:, None] * 2.0**WEIGHT_BITS",
        "min_p.double()[:, None] * weight.sum(dim=1, keepdim=True)",
        (_TRUNCATION,),
    ),
    Fault(
        "truncation: top-p counts tokens that top-k has excluded",
        _SAMPLER,
        "through = (weight * keep).cumsum(dim=1)",
        "through = weight.cumsum(dim=1)",
        (_PROCESSORS,),
    ),
    # The prefix cache
    Fault(
        "prefix cache: one user's pages serve another",
        _PAGES,
        "page_hash = blake2b(salt.encode(), digest_size=16).digest()",
        'page_hash = blake2b(b"", digest_size=16).digest()',
        ("test_scheduler.py::test_kept_pages_are_never_read_under_another_salt",),
    ),
    Fault(
        "prefix cache: a page is known by its own tokens, not by all before it",
        _PAGES,
        'blake2b(page_hash + array("q"',
        'blake2b(salt.encode() + array("q"',
        ("test_pages.py::test_a_cached_page_is_found_only_after_the_same_prefix",),
    ),
    Fault(
        "prefix cache: the last token found is not read again for the drafter",
        _PAGES,
        "row.length = max(len(found) * PAGE - 1, 0)",
        "row.length = len(found) * PAGE",
        ("test_scheduler.py::test_a_beginning_that_was_read_before_is_not_read_again",),
    ),
    Fault(
        "prefix cache: pages are kept for everybody",
        _ALLOCATOR,
        "self.engine.keep_pages(batch, row, job.salt)",
        "self.engine.keep_pages(batch, row)",
        ("test_scheduler.py::test_kept_pages_are_never_read_under_another_salt",),
    ),
    Fault(
        "prefix cache: a prompt whose log-probabilities are wanted is not read from its beginning",
        _ROUNDS,
        'own = f"{sequence.number}/" if sequence.num_prompt_logprobs is not None else ""',
        'own = ""',
        ("test_scheduler.py::test_a_prompt_that_is_to_be_scored_is_scored_whole_though_it_was_read_before",),
    ),
    # Pages
    Fault(
        "pages: a copy writes to the last page of the row it was copied from",
        _PAGES,
        "            shared = source.length // PAGE\n",
        "            shared = -(-source.length // PAGE)\n",
        ("test_pages.py::test_a_copy_needs_no_more_pages_than_it_keeps",),
    ),
    Fault(
        "pages: a page that is in use in part is given back",
        _PAGES,
        "            kept = -(-num_slots // PAGE)\n",
        "            kept = num_slots // PAGE\n",
        ("test_pages.py::test_trimming_a_row_keeps_the_page_that_it_ends_in",),
    ),
    Fault(
        "pages: kept pages are handed out while they are still found by their text",
        _PAGES,
        "free = np.flatnonzero((self._ref_counts == 0) & ~self._is_kept)",
        "free = np.flatnonzero(self._ref_counts == 0)",
        ("test_pages.py::test_eviction_takes_the_end_of_a_cached_text_first",),
    ),
    Fault(
        "pages: a row grows into a page that is kept",
        _PAGES,
        "not (self._ref_counts[after:end].any() or self._is_kept[after:end].any())",
        "not self._ref_counts[after:end].any()",
        ("test_pages.py::test_a_row_grows_into_the_next_page_unless_it_is_used_or_cached",),
    ),
    Fault(
        "pages: pages shared from the prefix cache may be given to others",
        _PAGES,
        "        self._ref_counts[shared] += 1\n        row.pages.extend(shared)\n",
        "        row.pages.extend(shared)\n",
        ("test_pages.py::test_pages_that_a_row_shares_are_not_allocated_again",),
    ),
    # The scheduler
    Fault(
        "scheduler: the oldest gives its pages up",
        _DECODE_LOOP,
        "youngest = max(self._running, key=lambda other: other.number)",
        "youngest = min(self._running, key=lambda other: other.number)",
        ("test_scheduler.py::test_when_the_cache_is_full_the_youngest_wait_and_all_texts_are_the_same",),
    ),
    Fault(
        "scheduler: a request that was preempted forgets what it has drawn",
        _DECODE_LOOP,
        "                    job.choosers, job.is_preempted = [] if batch.is_on_device else choosers, True\n",
        "                    job.is_preempted = True\n",
        ("test_scheduler.py::test_a_request_that_was_preempted_and_read_again_has_the_same_text",),
    ),
    Fault(
        "scheduler: a listener hears of tokens behind a stop string",
        "src/graft/engine/jobs.py",
        "ids=sequence.ids[start + told : start + count],",
        "ids=sequence.ids[start + told :],",
        ("test_scheduler.py::test_a_listener_hears_of_no_token_behind_a_stop_string",),
    ),
    Fault(
        "scheduler: an update brings log-probabilities that were told before",
        "src/graft/engine/jobs.py",
        "logprobs=sequence.logprobs[told:count],",
        "logprobs=sequence.logprobs[:count],",
        ("test_scheduler.py::test_a_listener_hears_of_no_token_behind_a_stop_string",),
    ),
    Fault(
        "scheduler: more rows are decoded together than allowed",
        _ALLOCATOR,
        "return num_rows + len(answers) <= self.settings.max_rows and",
        "return num_rows <= self.settings.max_rows and",
        ("test_scheduler.py::test_a_request_that_was_preempted_goes_on_before_those_that_wait",),
    ),
    # The end of an answer, and log-probabilities
    Fault(
        "sequence: an answer goes on past its limit",
        _SEQUENCE,
        "return len(self.ids) + len(tokens) >= self._most_ids",
        "return len(self.ids) + len(tokens) > self._most_ids",
        ("test_engine.py::test_the_limit_cuts_exactly_there",),
    ),
    Fault(
        "sequence: a stop string ends an answer before min_tokens",
        _SEQUENCE,
        "may_stop=stats.tokens >= least",
        "may_stop=True",
        ("test_engine.py::test_a_stop_string_ends_no_answer_before_min_tokens",),
    ),
    Fault(
        "logprobs: a token's is taken at the root of its tree",
        _SEQUENCE,
        "parent = nodes[depth - 1] if depth else 0",
        "parent = 0",
        ("test_engine.py::test_log_probabilities_are_the_models_own_at_every_place",),
    ),
    Fault(
        "logprobs: those of tokens behind a stop string stay",
        _SEQUENCE,
        "        del self.logprobs[self.stats.tokens :]\n",
        "",
        ("test_engine.py::test_log_probabilities_end_at_the_stop_string",),
    ),
    Fault(
        "logprobs: those of a prompt belong to the tokens before",
        _SEQUENCE,
        "tokens = self.ids[first + 1 : end + 1]",
        "tokens = self.ids[first:end]",
        ("test_scheduler.py::test_a_prompt_that_is_to_be_scored_is_scored_whole_though_it_was_read_before",),
    ),
    Fault(
        "context: its last token cannot be used",
        _ENGINE,
        "if limit is None or prompt + new <= limit:",
        "if limit is None or prompt + new < limit:",
        ("test_engine.py::test_the_context_can_be_filled_to_its_last_token",),
    ),
    # The text and its stop strings
    Fault(
        "text: a stop string's first characters are shown when most of it has come",
        _DETOKENIZER,
        "place = max(len(self.text) - len(stop) + 1, 0)",
        "place = max(len(self.text) - len(stop) + 2, 0)",
        ("test_text_stream.py::test_a_stream_never_shows_the_beginning_of_a_stop_string",),
    ),
    Fault(
        "text: a stop string is not found across tokens",
        _DETOKENIZER,
        "self.text.find(s, max(0, before - len(s) + 1))",
        "self.text.find(s, before)",
        ("test_text_stream.py::test_a_stream_never_shows_the_beginning_of_a_stop_string",),
    ),
    Fault(
        "text: of several stop strings that may begin only the first is held back",
        _DETOKENIZER,
        "return max((self._num_begun(s) for s in self._stop), default=0)",
        "return next((self._num_begun(s) for s in self._stop), 0)",
        ("test_text_stream.py::test_a_held_back_beginning_is_shown_once_it_is_no_stop_string",),
    ),
    # Grammars
    Fault(
        "grammar: the bits of allowed tokens are read backwards",
        "src/graft/server/grammar.py",
        'bitorder="little"',
        'bitorder="big"',
        (_CONSTRAINED,),
    ),
    Fault(
        "grammar: nodes of a pruned tree hang on other parents",
        "src/graft/model/grammar.py",
        "parents = place.gather(1, tree.parents.gather(1, order))",
        "parents = tree.parents.gather(1, order)",
        ("test_tree.py::test_a_pruned_tree_has_the_paths_that_its_constraint_allows",),
    ),
    Fault(
        "grammar: of a forbidden path the beginning is dropped too",
        "src/graft/model/grammar.py",
        "path[: constraint.num_allowed([tokens[node] for node in path])]",
        "path[: constraint.num_allowed([tokens[node] for node in path]) - 1]",
        ("test_tree.py::test_a_pruned_tree_has_the_paths_that_its_constraint_allows",),
    ),
    Fault(
        "grammar: a row's grammar does not move on with its text",
        _SAMPLER,
        "                    constraint.take(int(tokens[row]))",
        "                    constraint.take(int(tokens[0]))",
        (_CONSTRAINED,),
    ),
    Fault(
        "grammar: a forced call may have arguments that its schema does not name",
        _TOOL_FORMATS,
        '        closed.setdefault("additionalProperties", False)\n',
        "",
        ("test_server_tools.py::test_whatever_a_forced_grammar_allows_is_read_as_calls_that_fit",),
    ),
    Fault(
        "grammar: a forced call may lack an argument that is required",
        _TOOL_FORMATS,
        'skipped = "" if name in required else',
        'skipped = "" if name not in required else',
        ("test_server_tools.py::test_whatever_a_forced_grammar_allows_is_read_as_calls_that_fit",),
    ),
    # Calibration
    Fault(
        "calibration: what came is divided the wrong way round",
        _CALIBRATION,
        "(self._accepted / self._expected)",
        "(self._expected / self._accepted)",
        ("test_learning.py::test_overestimated_paths_count_for_less",),
    ),
    Fault(
        "calibration: paths are counted with those twice as likely",
        _CALIBRATION,
        "powers = np.clip(-np.frexp(tree)[1], 0, _NUM_POWERS - 1)",
        "powers = np.clip(-np.frexp(tree)[1] - 1, 0, _NUM_POWERS - 1)",
        ("test_learning.py::test_overestimated_paths_count_for_less",),
    ),
    Fault(
        "calibration: it goes on with the probabilities of its first round",
        _CALIBRATION,
        "candidates.count(emitted, self._tried, self._fitted, _MEMORY)\n        self._probs = None\n",
        "candidates.count(emitted, self._tried, self._fitted, _MEMORY)\n",
        ("test_learning.py::test_calibration_follows_a_source_that_gets_better",),
    ),
    Fault(
        "calibration: a node counts as accepted if its parent was",
        _NATIVE + "candidates.c",
        "if (outcome[i] & FITTED) fitted[cell] += 1.0f;",
        "if (outcome[row.fields[PARENT][i]] & FOLLOWED) fitted[cell] += 1.0f;",
        ("test_native.py::test_calibration_counts_what_the_target_has_judged",),
    ),
    Fault(
        "calibration: only failures fade",
        _NATIVE + "candidates.c",
        "        fitted[cell] *= fade;\n",
        "",
        ("test_learning.py::test_calibration_follows_a_source_that_gets_better",),
    ),
    # Merging candidates
    Fault(
        "merge: of equal paths the unlikeliest stays",
        _NATIVE + "candidates.c",
        "paths[i] > paths[slots[slot]]) slots[slot] = i;",
        "paths[i] < paths[slots[slot]]) slots[slot] = i;",
        ("test_candidates.py::test_the_best_are_the_likeliest_paths_each_once_in_order_and_closed_under_ancestors",),
    ),
    Fault(
        "merge: what hangs under a copy is lost with it",
        _NATIVE + "candidates.c",
        "            parents[i] = kept[parents[i]];\n",
        "",
        ("test_candidates.py::test_the_children_of_a_duplicate_move_to_the_node_that_is_kept",),
    ),
    Fault(
        "merge: a proposal of one source counts as agreed on",
        _NATIVE + "candidates.c",
        "if (kept[i] == i && first_source[i] != last_source[i])",
        "if (kept[i] == i && first_source[i] == last_source[i])",
        (
            "test_candidates.py::test_a_node_is_weighed_by_whether_others_propose_it_too_and_whether_the_drafter_"
            "proposes_something_else",
        ),
    ),
    Fault(
        "merge: a copy that needs no pass does not count for a drafted node",
        _NATIVE + "candidates.c",
        "needs[k] = least(needs[k], row.fields[NEED][i]);",
        "needs[k] = -least(-needs[k], -row.fields[NEED][i]);",
        (
            "test_candidates.py::test_a_node_needs_the_pass_that_drafted_it_or_its_parent_and_a_copy_that_needs_none_"
            "counts_for_it",
        ),
    ),
    # Isolation
    Fault(
        "isolation: the tables of one user are read by another",
        _NATIVE + "tables.c",
        "uint64_t key = (uint64_t)salt * (uint64_t)factors[3] + (uint64_t)token",
        "uint64_t key = (uint64_t)token",
        ("test_learning.py::test_texts_under_different_salts_are_kept_apart",),
    ),
    Fault(
        "isolation: another n-gram's successors are taken for a text's own",
        _NATIVE + "tables.c",
        "if (place < 0 || (table->tags != NULL && table->tags[place] != tag)) return NULL;",
        "if (place < 0) return NULL;",
        ("test_learning.py::test_another_ngram_on_the_same_row_is_told_apart_and_takes_it_over",),
    ),
    Fault(
        "isolation: a copy goes on from the end of one text into the next",
        _NATIVE + "suffix.c",
        "if (place == stop || place - index->dropped < least_start) continue;",
        "if (place - index->dropped < least_start) continue;",
        ("test_native.py::test_copies_are_attached",),
    ),
    Fault(
        "isolation: texts without an owner share what they teach the tables",
        "src/graft/spec_decode/proposers/base.py",
        "return history.number if history.owner is None else history.owner",
        "return history.owner or 0",
        ("test_learning.py::test_isolated_texts_have_tables_of_their_own_or_those_of_their_owner",),
    ),
    Fault(
        "isolation: finished texts of one owner are looked up by another",
        _SUFFIX,
        "return self._pasts.get(history.owner, self._past)",
        "return next(iter(self._pasts.values()), self._past)",
        ("test_learning.py::test_finished_texts_of_isolated_owners_are_looked_up_by_their_owner_alone",),
    ),
    Fault(
        "isolation: answers of a group that is nobody's are looked up in each other",
        _SUFFIX,
        "[None if self._is_isolated and each.owner is None else each.group for each in histories]",
        "[each.group for each in histories]",
        ("test_learning.py::test_where_texts_are_isolated_a_group_needs_an_owner",),
    ),
    Fault(
        "isolation: a round shows other users' text that was not accepted",
        _SEQUENCE,
        "is_own = shows_all or node in accepted or self._names[sources[node]] not in self._common_sources",
        "is_own = True",
        ("test_rounds.py::test_a_round_shows_of_other_prompts_texts_what_was_accepted_and_no_more",),
    ),
    Fault(
        "isolation: finished texts do not count as other users'",
        _SUFFIX,
        '("past",) if keep_past and not isolated else ()',
        "()",
        ("test_rounds.py::test_a_round_shows_of_other_prompts_texts_what_was_accepted_and_no_more",),
    ),
    Fault(
        "isolation: users of one key share where they are to be kept apart",
        _SERVING,
        'None if sharing == "key" else body.user])',
        "None])",
        ("test_server.py::test_the_prefix_cache_is_shared_as_the_learning_setting_says[isolated-shared_with3]",),
    ),
    Fault(
        "isolation: two keys share unless told otherwise",
        "src/graft/server/settings.py",
        "len(set(self.api_keys)) > 1",
        "len(set(self.api_keys)) > 2",
        ("test_server.py::test_several_keys_keep_apart_unless_told_otherwise",),
    ),
    Fault(
        "isolation: what another user of the machine has learned is read",
        "src/graft/tuning/learned.py",
        "if path.stat().st_uid != os.geteuid():",
        "if path.stat().st_uid < 0:",
        ("test_learned.py::test_another_users_file_is_not_read",),
    ),
    # API keys and hosts
    Fault(
        "keys: any key opens the server",
        _GUARD,
        'scheme.lower() == "bearer" and any(matches)',
        'scheme.lower() == "bearer" and bool(matches)',
        ("test_server.py::test_keys_are_asked_for",),
    ),
    Fault(
        "keys: paths that begin like an open one need none",
        _GUARD,
        'if self._key_names and scope["path"] not in OPEN:',
        'if self._key_names and not scope["path"].startswith(tuple(OPEN)):',
        ("test_server.py::test_keys_are_asked_for",),
    ),
    Fault(
        "keys: a host whose name ends like an allowed one is allowed",
        _GUARD,
        "host.endswith(known[1:])",
        "host.endswith(known[2:])",
        ("test_server_limits.py::test_a_proxy_may_keep_its_own_host",),
    ),
    # Tool calls
    Fault(
        "tools: an escaped quote ends a string",
        _TOOL_CALLS,
        '            elif letter == "\\\\":\n                self._is_escaped = True\n',
        '            elif letter == "\\\\":\n                self._is_escaped = False\n',
        (_CALLS,),
    ),
    Fault(
        "tools: the beginning of a marker is shown as text",
        _TOOL_PARSERS,
        "for length in range(min(len(marker) - 1, len(text)), 0, -1):",
        "for length in range(min(len(marker) - 2, len(text)), 0, -1):",
        (_CALLS,),
    ),
    Fault(
        "tools: JSON that names no function is taken for a call",
        _TOOL_PARSERS,
        "return self._is_marked or name in self._names",
        "return True",
        (_CALLS,),
    ),
    Fault(
        "tools: a string argument becomes a number",
        _TOOL_CALLS,
        'return text if "string" in types and (kind == "string" or not is_other) else value',
        "return value",
        ("test_server_tools.py::test_a_value_without_quotes_has_the_type_that_its_schema_names",),
    ),
    Fault(
        "tools: the end marker of reasoning is shown",
        _TOOL_PARSERS,
        'safe = len(before) - _overlap(before, "</think>")',
        "safe = len(before)",
        ("test_server_tools.py::test_reasoning_is_told_apart",),
    ),
    # Kernels, in Triton's interpreter
    Fault(
        "kernels: of equal logits the last token is taken",
        "src/graft/model/kernels/topk.py",
        "token = tl.min(tl.where(ordered == value, ids, 0x7FFFFFFF), axis=0)",
        "token = tl.max(tl.where(ordered == value, ids, -1), axis=0)",
        ("test_kernels.py::test_top_k_is_ordered_and_the_first_of_equal_values_wins",),
    ),
    Fault(
        "kernels: draws have the same noise at every position",
        "src/graft/model/kernels/scores.py",
        "position = tl.load(positions + row) + tl.load(depths + token)",
        "position = tl.load(positions + row)",
        ("test_draw.py::test_draws_are_those_of_the_keyed_noise_at_every_token",),
    ),
    Fault(
        "kernels: of equal scores the last token is kept",
        "src/graft/model/kernels/scores.py",
        "| (ids ^ ID_MASK).to(tl.int64)",
        "| ids.to(tl.int64)",
        (_CUT + "[equal-512]",),
    ),
    Fault(
        "kernels: top-p takes its share of all tokens, not of those that top-k keeps",
        "src/graft/model/kernels/draw.py",
        "        total = weight_before + tl.sum(tl.where(order >= lowest, weight, 0), axis=0)\n",
        "",
        (_CUT + "[spread-512]",),
    ),
    Fault(
        "kernels: the tokens before the range of the cut are not counted",
        "src/graft/model/kernels/draw.py",
        "top_k - count_before, lowest, highest",
        "top_k, lowest, highest",
        (_CUT + "[coarse-16]",),
    ),
    Fault(
        "kernels: a rotation turns the other way",
        "src/graft/model/kernels/layer.py",
        "((x32 * c).to(first.dtype).to(tl.float32) - (y32 * s)",
        "((x32 * c).to(first.dtype).to(tl.float32) + (y32 * s)",
        ("test_kernels.py::test_rotated_keys_and_values_are_stored_like_pytorch_does",),
    ),
    Fault(
        "kernels: a norm divides by its padded size",
        "src/graft/model/kernels/layer.py",
        "tl.sum(wide * wide, axis=0) / SIZE + eps",
        "tl.sum(wide * wide, axis=0) / BLOCK + eps",
        ("test_kernels.py::test_residual_add_and_rms_norm_match_pytorch",),
    ),
    Fault(
        "kernels: a window is one key too wide",
        _ATTENTION,
        "return positions[None, :] > own[:, None] - window",
        "return positions[None, :] >= own[:, None] - window",
        ("test_kernels.py::test_keys_outside_the_window_are_not_seen",),
    ),
    Fault(
        "kernels: splits are combined without regard to their maxima",
        _ATTENTION,
        "acc = tl.fma(acc, rescale[:, None], tl.sum(part * weight[:, :, None], axis=0))",
        "acc = acc + tl.sum(part * weight[:, :, None], axis=0)",
        ("test_kernels.py::test_a_path_may_cross_several_splits_and_most_of_it_be_of_earlier_forwards",),
    ),
    Fault(
        "kernels: a sink takes no share",
        _ATTENTION,
        "total = tl.fma(total, rescale, tl.exp2(sink - base))",
        "total = total * rescale",
        ("test_kernels.py::test_a_sink_takes_its_share_of_whatever_is_seen",),
    ),
    Fault(
        "kernels: an accepted token is moved onto its root",
        _ATTENTION,
        "target = offset + slot_of(table, length + step + 1, place >= 0, max_pages) * slot",
        "target = offset + slot_of(table, length + step, place >= 0, max_pages) * slot",
        ("test_kernels.py::test_committing_moves_accepted_tokens_behind_their_root_and_nothing_else",),
    ),
    # The budget
    Fault(
        "budget: time that a plan takes counts in its favour",
        _BUDGET,
        "return self.num_rows + self.gain - rate * self.seconds",
        "return self.num_rows + self.gain + rate * self.seconds",
        ("test_budget.py::test_a_hopeless_text_costs_at_most_3_percent_of_its_first_400_rounds",),
    ),
    Fault(
        "budget: a draft pass costs nothing",
        _BUDGET,
        "return cost / gain if gain > 0 else math.inf",
        "return 0.0 if gain > 0 else math.inf",
        ("test_budget.py::test_a_pass_must_bring_its_cost_with_the_probability_that_its_beams_are_reached",),
    ),
    Fault(
        "budget: nodes fill the room that other tokens of the step need",
        _BUDGET,
        "return max(self.step.sizes[-1] - num_rows - num_prefill_tokens, 0)",
        "return max(self.step.sizes[-1] - num_rows, 0)",
        ("test_budget.py::test_nodes_and_all_other_tokens_fit_the_largest_step",),
    ),
    Fault(
        "budget: a step larger than any costs as much as the largest",
        "src/graft/spec_decode/cost_model.py",
        "return values[-1] * num_tokens / sizes[-1]",
        "return values[-1]",
        ("test_budget.py::test_steps_between_and_beyond_the_known_sizes_cost_in_proportion",),
    ),
    # What is kept for later processes
    Fault(
        "learned: of a table's row the older one is kept",
        "src/graft/tuning/learned.py",
        "torch.cat([known[name].cpu(), new[name].cpu()])[kept]",
        "torch.cat([new[name].cpu(), known[name].cpu()])[kept]",
        ("test_learned.py::test_merging_keeps_the_latest_texts_and_the_new_table_rows",),
    ),
)
