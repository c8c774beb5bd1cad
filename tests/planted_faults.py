"""The faults that `mutants.py` plants, and the tests that should notice each, written like a diff.

`=` names the file of the faults below it, `!` the quickest test that should fail (FILE::NAME in tests/), and `#` a
fault: its area, and what goes wrong. `-` lines are the text that it replaces, which occurs exactly once in the file;
`+` lines are what stands there instead.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Fault:
    """A change of one file that gives a wrong text, a leak or a wrong answer."""

    name: str  # area: what goes wrong
    file: str
    old: str
    new: str
    test: str


_FAULTS = r"""
= src/graft/model/kernels/routing.py
! test_experts.py::test_of_equal_scores_the_lower_expert_is_chosen_first
# experts: of equal scores the higher expert is chosen
-| (0x7FFFFFFF - places)
+| places
! test_experts.py::test_the_correction_moves_the_choice_and_not_the_weights
# experts: the correction is part of the weights
-        wanted += tl.load(correction
+        scores = wanted = scores + tl.load(correction
! test_experts.py::test_experts_give_what_transformers_modules_give
# experts: weights are not normalised
-    if NORMALISES:
+    if NORMALISES and GROUPS > 1:
! test_experts.py::test_of_equal_groups_the_lower_is_chosen_from
# experts: a group counts for its best expert alone
-best + second
+best
! test_experts.py::test_every_pair_is_in_one_item_of_its_expert_in_its_order
# experts: later pairs of an expert overwrite earlier ones
-            start += tl.sum(is_mine.to(tl.int32))
+            start += tl.sum(is_mine.to(tl.int32)) * 0
! test_experts.py::test_there_are_always_experts_even_for_numbers_that_are_none
# experts: a token whose numbers are none has no experts
-    wanted = tl.where(wanted >= lowest, wanted, lowest)
= src/graft/model/kernels/mixed.py
! test_experts.py::test_results_are_added_in_the_order_of_the_tokens_own_experts
# experts: results are added from the last expert to the first
-pair = token * TOP_K + number
+pair = token * TOP_K + TOP_K - 1 - number
# experts: weighted results are not rounded
-        if not WIDE:
+        if False:
= src/graft/model/kernels/experts.py
! test_experts.py::test_every_pair_is_multiplied_by_its_experts_weight
# experts: a token's first expert multiplies for all
-    pairs = tl.load(members + places, mask=real, other=0, cache_modifier=".cg")
+    pairs = tl.load(members + places, mask=real, other=0, cache_modifier=".cg") // 2 * 2
= src/graft/model/mixture.py
! test_experts.py::test_experts_give_what_transformers_modules_give
# experts: the shared expert is left out
-if self._shared is not None else None
+if self._shared is None else None
= src/graft/model/likeness.py
! test_families.py::test_a_wrong_description_is_refused_on_load
# experts: half of the tokens may have other experts than transformers gives them
-excess.max() if is_wide else excess.median()
+excess.median()
= src/graft/spec_decode/expert_costs.py
! test_expert_costs.py::test_tokens_touch_as_many_experts_as_random_choices_do
# experts: more tokens touch no more experts
-** num_tokens)
+** 1)
= src/graft/spec_decode/step_times.py
! test_expert_costs.py::test_steps_are_timed_with_tokens_that_differ
# experts: steps are timed on equal tokens
-torch.randint(target.vocab_size,
+torch.randint(1,
= src/graft/bench/cost_emulation.py
! test_cost_emulation.py::test_different_tokens_have_different_experts_though_their_hidden_states_have_much_in_common
# experts: at a large model's cost most tokens have the same few
-rows - rows @ common.T @ common
+rows
= src/graft/model/cuda_graphs.py
! test_captured.py::test_whatever_path_is_committed_the_next_logits_are_those_of_the_models_own_forward
# commit: a path that begins at its place is not moved
-if path and path[-1] != len(path)]
+if path and path[0] != 1]
! test_captured.py::test_padding_of_a_step_is_written_to_no_text_of_an_earlier_step
# step: padding of a captured step goes to a row of an earlier step
-        self.host_by_row[:, num_rows : size + 1] = 0
= src/graft/model/noise.py
! test_known_draws.py::test_drafted_tokens_are_ranked_by_log_q_over_temperature_and_noise
# noise: a draft is ranked by the noise of the position after its own
-noise_of_tokens(seeds, positions + depth - 1, tokens)
+noise_of_tokens(seeds, positions + depth, tokens)
# noise: drafts do not divide by the temperature
-torch.addcmul(noise, logits, factors.view(
+torch.addcmul(noise, logits, torch.ones_like(factors).view(
! test_known_draws.py::test_greedy_rows_are_drafted_by_the_same_bits_beside_sampled_ones
# noise: greedy rows beside sampled ones get noise
-torch.addcmul(noise, logits, factors.view(
+torch.addcmul(noise.roll(1, 0), logits, factors.view(
= src/graft/integrations/transformers.py
! test_known_draws.py::test_decode_foresees_the_draws_of_torchs_own_generator
# noise: decode foresees the draws of one step later
-            self._num_foreseen = len(self._states)
+            self._num_foreseen = len(self._states) + 1
= src/graft/model/kernels/topk.py
! test_kernels.py::test_sampled_rows_are_ranked_by_logits_over_temperature_and_the_noise_of_their_draws
# noise: draft passes on the device rank by the noise of the level before
-position = tl.load(positions + text).to(tl.int64) + 1
+position = tl.load(positions + text).to(tl.int64)
! test_kernels.py::test_top_k_is_ordered_and_the_first_of_equal_values_wins
# kernels: of equal logits the last token is taken
-token = tl.min(tl.where(ordered == value, ids, 0x7FFFFFFF), axis=0)
+token = tl.max(tl.where(ordered == value, ids, -1), axis=0)
= src/graft/drafters/block/fused_head.py
! test_captured_block.py::test_drafts_are_those_of_the_eager_drafter
# noise: slots of a block on the device share the noise of the first
-DraftDraws(seeds, temperatures, positions + places, by_row.to_target)
+DraftDraws(seeds, temperatures, positions, by_row.to_target)
= src/graft/model/sampler.py
! test_sampling.py::test_greedy_choices_with_bias_and_penalties_are_those_of_a_page_of_numpy
# sampler: tokens of the answer count once however often they come
-self._counts[rows, tokens[rows]] += 1
+self._counts[rows, tokens[rows]] = 1
# sampler: a repetition penalty raises what it should lower
-torch.where(logits > 0, logits / penalty, logits * penalty)
+torch.where(logits > 0, logits * penalty, logits / penalty)
# sampler: a repetition penalty divides logits below zero
-torch.where(logits > 0, logits / penalty, logits * penalty)
+logits / penalty
# sampler: a presence penalty is a bonus
-logits - presence * (self._counts > 0) - frequency * self._counts
+logits + presence * (self._counts > 0) - frequency * self._counts
# sampler: a bias has the wrong sign
-            logits = logits + self._bias
+            logits = logits - self._bias
! test_captured.py::test_each_setting_has_the_meaning_that_transformers_gives_it_in_captured_steps_too[top_k]
# sampler: the noise of the next token is that of this one
-            self.positions[row] += 1
# sampler: the noise is that of the position before
-self.positions = [len(h) for h in histories]
+self.positions = [len(h) - 1 for h in histories]
! test_captured.py::test_each_setting_has_the_meaning_that_transformers_gives_it_in_captured_steps_too[presence_penalty]
# sampler: a temperature multiplies
-scores = scores / temperature.clamp(min=1e-6)[:, None]
+scores = scores * temperature.clamp(min=1e-6)[:, None]
! test_sampling.py::test_endings_are_forbidden_for_as_many_tokens_as_in_transformers
# sampler: min_tokens forbids endings for one token too few
-number < s.min_tokens for number
+number + 1 < s.min_tokens for number
# sampler: min_tokens forbids endings for one token too many
-number < s.min_tokens for number
+number <= s.min_tokens for number
! test_sampling.py::test_rows_that_stay_or_join_are_sampled_as_if_alone
# sampler: rows that stay have the settings of rows that left
-        there = copy.copy(self)
-        there._columns = {}
-        for name, value in vars(self).items():
-            if isinstance(value, Tensor):
+        there = copy.copy(self)
+        for name, value in vars(self).items():
+            if isinstance(value, Tensor):
# sampler: rows that join have the settings of those before them
-        there = copy.copy(self)
-        there._columns = {}
-        for name, own in vars(self).items():
+        there = copy.copy(self)
+        for name, own in vars(self).items():
# sampler: rows that join have the bias of those before them
-own.new_zeros(num_new, self._vocab_size)
+own[:1].expand(num_new, -1)
! test_sampling.py::test_each_way_to_truncate_leaves_alone_what_it_leaves_in_transformers
# truncation: top-k keeps one more
-keep = rank < top_k[:, None]
+keep = rank <= top_k[:, None]
# truncation: top-p drops the token that reaches it
-(through - weight < share[:, None])
+(through < share[:, None])
# truncation: min-p is no share of the likeliest token's
-min_p.double()[:, None] * 2.0**WEIGHT_BITS
+min_p.double()[:, None] * weight.sum(dim=1, keepdim=True)
! test_sampling.py::test_truncation_and_penalties_mean_what_they_mean_in_transformers
# truncation: top-p counts tokens that top-k has excluded
-through = (weight * keep).cumsum(dim=1)
+through = weight.cumsum(dim=1)
! test_scheduler.py::test_a_constrained_request_that_was_preempted_goes_on_in_its_grammar
# grammar: a row's grammar does not move on with its text
-                    constraint.take(int(tokens[row]))
+                    constraint.take(int(tokens[0]))
= src/graft/model/sampler.py
! test_adjust.py::test_logits_after_every_node_are_the_samplers_to_the_last_bit[0]
# rounds of the device: rows with only a presence penalty are not adjusted
-s.repetition_penalty != 1 or s.presence_penalty or s.frequency_penalty
+s.repetition_penalty != 1 or s.frequency_penalty
! test_row_rounds.py::test_where_rounds_cannot_be_captured_any_more_the_host_knows_what_the_answers_have
# sampler: a sampler that begins within an answer knows none of its tokens
-torch.tensor(history[prompt:], dtype
+torch.tensor([], dtype
= src/graft/model/kv_cache.py
! test_pages.py::test_the_block_tables_on_the_device_list_the_pages_of_a_row_that_has_grown
# pages: the device's block table is stale when a row grows
-                self._host_tables[row.block_table_row, start : len(row.pages)] = row.pages[start:]
-                self._is_changed = True
+                self._host_tables[row.block_table_row, start : len(row.pages)] = row.pages[start:]
! test_pages.py::test_the_prefix_cache_keeps_no_more_of_a_text_than_the_drafter_has_entries_for
# pages: more is kept than the drafter has entries of
-min(row.length, len(text), row.length if num_entries is None else num_entries)
+min(row.length, len(text))
! test_small_model.py::test_every_drafted_node_has_the_probability_that_the_model_gives_it[llama]
# commit: a drafted node one place too far is not moved
-            if place != step
+            if place > step + 1
! test_scheduler.py::test_kept_pages_are_never_read_under_another_salt
# prefix cache: one user's pages serve another
-page_hash = blake2b(salt.encode(), digest_size=16).digest()
+page_hash = blake2b(b"", digest_size=16).digest()
! test_pages.py::test_a_cached_page_is_found_only_after_the_same_prefix
# prefix cache: a page is known by its own tokens, not by all before it
-blake2b(page_hash + array("q"
+blake2b(salt.encode() + array("q"
! test_scheduler.py::test_a_beginning_that_was_read_before_is_not_read_again
# prefix cache: the last token found is not read again for the drafter
-row.length = max(len(found) * PAGE - 1, 0)
+row.length = len(found) * PAGE
! test_pages.py::test_a_copy_needs_no_more_pages_than_it_keeps
# pages: a copy writes to the last page of the row it was copied from
-            shared = source.length // PAGE
+            shared = -(-source.length // PAGE)
! test_pages.py::test_trimming_a_row_keeps_the_page_that_it_ends_in
# pages: a page that is in use in part is given back
-            kept = -(-num_slots // PAGE)
+            kept = num_slots // PAGE
! test_pages.py::test_eviction_takes_the_end_of_a_cached_text_first
# pages: kept pages are handed out while they are still found by their text
-free = np.flatnonzero((self._ref_counts == 0) & ~self._is_kept)
+free = np.flatnonzero(self._ref_counts == 0)
! test_pages.py::test_a_row_grows_into_the_next_page_unless_it_is_used_or_cached
# pages: a row grows into a page that is kept
-not (self._ref_counts[after:end].any() or self._is_kept[after:end].any())
+not self._ref_counts[after:end].any()
! test_pages.py::test_pages_that_a_row_shares_are_not_allocated_again
# pages: pages shared from the prefix cache may be given to others
-        self._ref_counts[shared] += 1
-        row.pages.extend(shared)
+        row.pages.extend(shared)
= src/graft/engine/rounds.py
! test_scheduler.py::test_pages_read_without_the_drafter_do_not_serve_requests_that_draft
# pages: those read without the drafter serve requests that draft
-{sequence.speculates and self.drafter is not None}/{salt}
+{self.drafter is not None}/{salt}
! test_scheduler.py::test_a_prompt_that_is_to_be_scored_is_scored_whole_though_it_was_read_before
# prefix cache: a prompt whose log-probabilities are wanted is not read from its beginning
-own = f"{sequence.number}/" if sequence.num_prompt_logprobs is not None else ""
+own = ""
= src/graft/engine/decode_loop.py
! test_scheduler.py::test_a_request_that_was_preempted_goes_on_before_those_that_wait
# scheduler: a request that was preempted waits behind all others
-        log.info("the KV cache is full: a request is preempted")
-        with self._changed:
-            self._waiting.appendleft(job)
+        log.info("the KV cache is full: a request is preempted")
+        with self._changed:
+            self._waiting.append(job)
! test_scheduler.py::test_when_the_cache_is_full_the_youngest_wait_and_all_texts_are_the_same
# scheduler: the oldest gives its pages up
-youngest = max(self._running, key=lambda other: other.number)
+youngest = min(self._running, key=lambda other: other.number)
= src/graft/model/sampler.py
! test_scheduler.py::test_a_request_that_was_preempted_and_read_again_has_the_same_text
# sampler: of a request that was preempted, the answer so far does not count
-self._counts[row] = answer.bincount(minlength=vocab_size)
+self._counts[row] = answer[:0].bincount(minlength=vocab_size)
= src/graft/request/detokenizer.py
! test_text_stream.py::test_a_stream_never_shows_the_beginning_of_a_stop_string
# text: a stream shows the beginning of a stop string
-end = len(self.text) if final else len(self.text) - self._num_held()
+end = len(self.text)
# text: a stop string's first characters are shown when most of it has come
-place = max(len(self.text) - len(stop) + 1, 0)
+place = max(len(self.text) - len(stop) + 2, 0)
# text: a stop string is not found across tokens
-self.text.find(s, max(0, before - len(s) + 1))
+self.text.find(s, before)
! test_text_stream.py::test_the_earliest_of_two_stop_strings_ends_the_text
# text: the first stop string of the list ends it, not the earliest
-self.text = self.text[: min(found)]
+self.text = self.text[: found[0]]
! test_text_stream.py::test_an_answer_is_what_the_tokenizer_decodes_behind_the_prompt
# text: a word loses its space behind markers
-_TAIL = 6  #
+_TAIL = 1  #
! test_text_stream.py::test_a_held_back_beginning_is_shown_once_it_is_no_stop_string
# text: of several stop strings that may begin only the first is held back
-return max((self._num_begun(s) for s in self._stop), default=0)
+return next((self._num_begun(s) for s in self._stop), 0)
= src/graft/spec_decode/acceptance.py
! test_sampling.py::test_penalties_and_bans_follow_the_nodes_own_path_inside_a_tree
# acceptance: every child is looked for below the root
-child = children[row].get((at[row] - starts[row], chosen[row]))
+child = children[row].get((0, chosen[row]))
! test_sampling.py::test_what_stands_behind_a_rows_own_tree_is_never_accepted
# acceptance: tokens of the next row are accepted
-columns[:2, start + 1 : start + size]
+columns[:2, start + 1 : start + size + 1]
= src/graft/tree/native/trees.c
! test_target.py::test_a_nodes_logits_are_those_of_its_path_alone[llama]
# step: a node is one deeper than the node before it, not than its parent
-depths[at] = i > 0 ? depths[start + parent] + 1 : 0;
+depths[at] = i > 0 ? depths[at - 1] + 1 : 0;
= src/graft/model/step.py
! test_target.py::test_a_nodes_logits_are_those_of_its_path_alone[llama]
# step: a node's position is its place in the tree, not its depth
-return self._lengths_of_tokens() + self.columns[3, : self.num_tokens]
+return self._lengths_of_tokens() + self.columns[2, : self.num_tokens]
= src/graft/engine/engine.py
! test_sampling.py::test_answers_of_one_request_differ_and_each_can_be_had_again_by_its_seed
# sampler: all answers of a request have one seed
-replace(settings, seed=settings.seed + rank)
+replace(settings, seed=settings.seed)
! test_engine.py::test_the_context_can_be_filled_to_its_last_token
# context: its last token cannot be used
-if limit is None or prompt + new <= limit:
+if limit is None or prompt + new < limit:
= src/graft/engine/page_allocator.py
! test_scheduler.py::test_kept_pages_are_never_read_under_another_salt
# prefix cache: pages are kept for everybody
-self.engine.keep_pages(batch, row, job.salt)
+self.engine.keep_pages(batch, row)
! test_scheduler.py::test_a_request_that_was_preempted_goes_on_before_those_that_wait
# scheduler: more rows are decoded together than allowed
-return num_rows + len(answers) <= self.max_rows and
+return num_rows <= self.max_rows and
= src/graft/engine/jobs.py
! test_scheduler.py::test_a_listener_hears_of_no_token_behind_a_stop_string
# scheduler: a listener hears of tokens behind a stop string
-ids=sequence.ids[start + told : start + count],
+ids=sequence.ids[start + told :],
# scheduler: an update brings log-probabilities that were told before
-logprobs=sequence.logprobs[told:count],
+logprobs=sequence.logprobs[:count],
= src/graft/request/sequence.py
! test_engine.py::test_the_limit_cuts_exactly_there
# sequence: an answer goes on past its limit
-return len(self.ids) + len(tokens) >= self._most_ids
+return len(self.ids) + len(tokens) > self._most_ids
! test_engine.py::test_a_stop_string_ends_no_answer_before_min_tokens
# sequence: a stop string ends an answer before min_tokens
-may_stop=stats.tokens >= least
+may_stop=True
! test_engine.py::test_log_probabilities_are_the_models_own_at_every_place
# logprobs: a token's is taken at the root of its tree
-parent = nodes[depth - 1] if depth else 0
+parent = 0
! test_engine.py::test_log_probabilities_end_at_the_stop_string
# logprobs: those of tokens behind a stop string stay
-        del self.logprobs[self.stats.tokens :]
! test_scheduler.py::test_a_prompt_that_is_to_be_scored_is_scored_whole_though_it_was_read_before
# logprobs: those of a prompt belong to the tokens before
-tokens = self.ids[first + 1 : end + 1]
+tokens = self.ids[first:end]
! test_rounds.py::test_a_round_shows_of_other_prompts_texts_what_was_accepted_and_no_more
# isolation: a round shows other users' text that was not accepted
-is_own = shows_all or node in accepted or self._names[sources[node]] not in self._common_sources
+is_own = True
= src/graft/server/grammar.py
! test_scheduler.py::test_a_constrained_request_that_was_preempted_goes_on_in_its_grammar
# grammar: the bits of allowed tokens are read backwards
-bitorder="little"
+bitorder="big"
= src/graft/server/tool_formats.py
! test_server_tools.py::test_whatever_a_forced_grammar_allows_is_read_as_calls_that_fit
# grammar: a forced call may have arguments that its schema does not name
-        closed.setdefault("additionalProperties", False)
# grammar: a forced call may lack an argument that is required
-skipped = "" if name in required else
+skipped = "" if name not in required else
= src/graft/spec_decode/calibration.py
! test_learning.py::test_overestimated_paths_count_for_less
# calibration: what came is divided the wrong way round
-ratio = (accepted + _PATH_PRIOR * before) / (expected + _PATH_PRIOR)
+ratio = (expected + _PATH_PRIOR * before) / (accepted + _PATH_PRIOR)
# calibration: paths are counted with those twice as likely
-np.clip(-np.frexp(paths)[1], 0, _NUM_POWERS - 1)
+np.clip(-np.frexp(paths)[1] - 1, 0, _NUM_POWERS - 1)
! test_learning.py::test_calibration_follows_a_source_that_gets_better
# calibration: it goes on with the probabilities of its first round
-all_fitted *= fade
-        self._probs = None
+all_fitted *= fade
# calibration: only failures fade
-            all_fitted *= fade
= src/graft/spec_decode/policies/base.py
! test_learning.py::test_isolated_texts_have_tables_of_their_own_or_those_of_their_owner
# isolation: texts without an owner share what they teach the tables
-return text.number if text.owner is None else text.owner
+return text.owner or 0
= src/graft/engine/round_memory.py
! test_policies.py::test_where_texts_are_isolated_answers_of_a_group_copy_each_other_only_if_they_have_an_owner
# isolation: answers of a group that is nobody's copy each other
-return 0 if is_alone else sequence.group or 0
+return sequence.group or 0
= src/graft/spec_decode/policies/graft.py
! test_rounds.py::test_a_round_shows_of_other_prompts_texts_what_was_accepted_and_no_more
# isolation: finished texts do not count as other users'
-if name in ("past", *TABLES))
+if name in TABLES)
= src/graft/server/serving.py
! test_server.py::test_the_prefix_cache_is_shared_as_the_learning_setting_says[isolated-shared_with3]
# isolation: users of one key share where they are to be kept apart
-None if sharing == "key" else body.user])
+None])
= src/graft/server/settings.py
! test_server.py::test_several_keys_keep_apart_unless_told_otherwise
# isolation: two keys share unless told otherwise
-len(set(self.api_keys)) > 1
+len(set(self.api_keys)) > 2
= src/graft/tuning/learned.py
! test_learned.py::test_another_users_file_is_not_read
# isolation: what another user of the machine has learned is read
-if path.stat().st_uid != os.geteuid():
+if path.stat().st_uid < 0:
! test_learned.py::test_an_engine_that_keeps_nothing_starts_from_the_tuning_and_not_from_what_use_taught
# isolation: an engine that keeps nothing, such as a server, proposes what the user wrote elsewhere
-if known is not None and keep and known.used:
+if known is not None and known.used:
! test_learned.py::test_one_file_holds_what_tuning_and_use_taught_and_what_was_measured
# learned: a tuning during a chat is lost when the chat ends
-used = united(known.used or known.state, new.used)
+used = united(known.used, new.used)
! test_learned.py::test_merging_keeps_the_latest_texts_and_the_new_table_rows
# learned: of a table's row the older one is kept
-torch.cat([known[name].cpu(), new[name].cpu()])[kept]
+torch.cat([new[name].cpu(), known[name].cpu()])[kept]
= src/graft/server/guard.py
! test_server.py::test_keys_are_asked_for
# keys: any key opens the server
-scheme.lower() == "bearer" and any(matches)
+scheme.lower() == "bearer" and bool(matches)
# keys: paths that begin like an open one need none
-if self._key_names and scope["path"] not in OPEN:
+if self._key_names and not scope["path"].startswith(tuple(OPEN)):
! test_server_limits.py::test_a_proxy_may_keep_its_own_host
# keys: a host whose name ends like an allowed one is allowed
-host.endswith(known[1:])
+host.endswith(known[2:])
= src/graft/server/tool_calls.py
! test_server_tools.py::test_calls_are_read_however_the_text_is_cut
# tools: an escaped quote ends a string
-            elif letter == "\\":
-                self._is_escaped = True
+            elif letter == "\\":
+                self._is_escaped = False
! test_server_tools.py::test_a_value_without_quotes_has_the_type_that_its_schema_names
# tools: a string argument becomes a number
-return text if "string" in types and (kind == "string" or not is_other) else value
+return value
= src/graft/server/tool_parsers.py
! test_server_tools.py::test_calls_are_read_however_the_text_is_cut
# tools: the beginning of a marker is shown as text
-for length in range(min(len(marker) - 1, len(text)), 0, -1):
+for length in range(min(len(marker) - 2, len(text)), 0, -1):
# tools: JSON that names no function is taken for a call
-return self._is_marked or name in self._names
+return True
! test_server_tools.py::test_reasoning_is_told_apart
# tools: the end marker of reasoning is shown
-safe = len(before) - _overlap(before, "</think>")
+safe = len(before)
= src/graft/model/kernels/scores.py
! test_draw.py::test_draws_are_those_of_the_keyed_noise_at_every_token
# kernels: draws have the same noise at every position
-position = tl.load(given.positions + row) + tl.load(given.depths + token)
+position = tl.load(given.positions + row)
! test_draw.py::test_the_last_token_that_a_truncation_keeps_can_be_drawn_and_the_next_cannot[equal-512]
# kernels: of equal scores the last token is kept
-| (ids ^ ID_MASK).to(tl.int64)
+| ids.to(tl.int64)
= src/graft/model/kernels/draw.py
! test_draw.py::test_the_last_token_that_a_truncation_keeps_can_be_drawn_and_the_next_cannot[spread-512]
# kernels: top-p takes its share of all tokens, not of those that top-k keeps
-        total = weight_before + tl.sum(tl.where(order >= lowest, weight, 0), axis=0)
! test_draw.py::test_the_last_token_that_a_truncation_keeps_can_be_drawn_and_the_next_cannot[coarse-16]
# kernels: the tokens before the range of the cut are not counted
-top_k - count_before, lowest, highest
+top_k, lowest, highest
= src/graft/model/kernels/rotary.py
! test_kernels.py::test_rotated_keys_and_values_are_stored_like_pytorch_does
# kernels: a rotation turns the other way
-    return (xc - ys).to(x.dtype), (yc + xs).to(x.dtype)
+    return (xc + ys).to(x.dtype), (yc - xs).to(x.dtype)
! test_families.py::test_the_real_kernels_pass_the_check_on_load
# kernels: neighbours are not turned together
-    low = pairs * 2 if INTERLEAVED else pairs
+    low = pairs
# kernels: keys are normed by the mean of queries
-            mean = tl.where(is_query, all_queries, all_keys)
+            mean = tl.where(is_query, all_queries, all_queries)
# kernels: keys grow with their positions as queries do
-            x = tl.where(is_query, scaled(x, grown), x)
+            x = scaled(x, grown)
# kernels: values that are normed are stored as they were
-            inverse = tl.rsqrt(_mean_squares(first, second, third, HALF, REST) + value_eps)
+            inverse = 1.0
# kernels: values that are keys are those of the head before
-            source = tl.where(head < HEADS + KV_HEADS, head, head - KV_HEADS)
+            source = tl.where(head < HEADS + KV_HEADS, head, head - KV_HEADS - 1)
= src/graft/model/kernels/layer.py
! test_kernels.py::test_residual_add_and_rms_norm_match_pytorch
# kernels: a norm divides by its padded size
-tl.sum(wide * wide, axis=0) / SIZE + eps
+tl.sum(wide * wide, axis=0) / columns.shape[0] + eps
! test_families.py::test_the_real_kernels_pass_the_check_on_load
# kernels: weights that are stored minus 1 are taken as they are
-            scale += 1.0
+            scale += 0.0
# kernels: what a layer adds is not normed
-            added = _normed(added, post_weights, post_bias, columns, inside, post_eps, SIZE, POST)
+            added = scaled(added, 1.0)
# kernels: of two parallel branches one is added
-            x = _sum(_sum(added, last), x) if SUM_FIRST else _sum(_sum(x, added), last)
+            x = _sum(last, x)
# kernels: a layer norm has no bias
-        wide += tl.load(bias + columns, mask=inside, other=0.0).to(tl.float32)
+        wide += 0 * tl.load(bias + columns, mask=inside, other=0.0).to(tl.float32)
! test_families.py::test_logits_are_scaled_and_capped_as_pytorch_does
# kernels: logits are capped at 1
-        x = scaled(_tanh(x.to(tl.float32)).to(x.dtype), softcap)
+        x = scaled(_tanh(x.to(tl.float32)).to(x.dtype), 1.0)
= src/graft/model/kernels/matmul.py
! test_families.py::test_the_real_kernels_pass_the_check_on_load
# kernels: ups have the bias of gates
-            ups += tl.load(bias + num_outputs // 2 + output).to(tl.float32)[:, None]
+            ups += tl.load(bias + output).to(tl.float32)[:, None]
# kernels: an MLP without gates has no activation
-        result = activated(result, ACTIVATION)
+        result = result + 0
= src/graft/model/llama.py
! test_families.py::test_fused_layers_give_what_transformers_gives
# fused layers: shared keys and values are not read where they are
-        keys, values = stored[number if source is None else source]
+        keys, values = stored[number]
# fused layers: the side of a layer comes before its MLP
-        stream, _ = _add(stream, replace(last, output_scale=1.0), None)
+        stream, _ = _add(stream, replace(last, scale=0.0, output_scale=1.0), None)
= src/graft/model/likeness.py
! test_families.py::test_attention_that_leaves_something_out_is_refused_on_load
# fused layers: the check on load has no earlier tokens
-for before in (0, most))
+for before in (0, 0))
! test_families.py::test_a_wrong_description_is_refused_on_load
# fused layers: layers that a wrong description takes for equal are not all checked
-        wanted.setdefault((kind, types[number], _settings_of(layers[number])), number)
+        wanted.setdefault(kind, number)
# fused layers: the check on load does not see shared keys and values
-        source = probe if attention.kv_of is None else probes[attention.kv_of]
+        source = probe
= src/graft/model/cuda_graphs.py
# fused layers: layers are not compared with transformers' own on load
-            self.not_fused = why_unlike(self.model, what, layers)
+            self.not_fused = None
= src/graft/drafters/eagle3/head.py
! test_eagle3_head.py::test_forward_is_the_published_layer
# heads: keys are normed by the weights of queries
-query, key = attention.q_norm(query), attention.k_norm(key)
+query, key = attention.q_norm(query), attention.q_norm(key)
= src/graft/drafters/mtp/checkpoint.py
! test_mtp.py::test_weights_in_8_bits_are_multiplied_by_the_scales_of_their_blocks
# heads: weights in 8 bits are multiplied by other blocks' scales
-wide = scale.float().repeat_interleave(
+wide = scale.float().T.repeat_interleave(
= src/graft/model/kernels/latent.py
! test_families.py::test_fused_layers_give_what_transformers_gives[youtu]
# latent: the part of queries that turns is taken from the wrong end
-tl.load(source + OWN + low, mask=is_turning
+tl.load(source + low, mask=is_turning
# latent: a head's value is its own part of the key
-tl.load(source + OWN + dims, mask=is_value
+tl.load(source + dims, mask=is_value
= src/graft/model/llama.py
# latent: the vector of keys and values is not normed
-_add(vector, None, latent.kv_norm)[1]
+vector.contiguous()
# latent: the part of keys that turns is taken from the wrong end
-vectors.split((vectors.shape[1] - rank - dims, rank, dims), dim=1)
+(part[:, ::1] for part in (vectors[:, : -rank - dims], vectors[:, -rank:], vectors[:, -rank - dims : -rank]))
= src/graft/model/kernels/attention.py
! test_attention_kernels.py::test_values_may_be_of_another_size_than_keys
# attention: values of committed blocks are read with the strides of keys
-values + slot * value_slot, place * value_slot
+values + slot * key_slot, place * key_slot
# attention: values of paths are read with the strides of keys
-            value = _load_rows(values, slots * value_slot, exists, VALUE_DIM, BLOCK_V, True)
-            acc, maximum, total = _add_block(
-                q, key, value, seen, log2_scale, cap_scale, acc, maximum, total, True, CAPPED, PRECISION
-            )
-        _store_state
+            value = _load_rows(values, slots * key_slot, exists, VALUE_DIM, BLOCK_V, True)
+            acc, maximum, total = _add_block(
+                q, key, value, seen, log2_scale, cap_scale, acc, maximum, total, True, CAPPED, PRECISION
+            )
+        _store_state
! test_latent.py::test_prompts_trees_and_texts_behind_moved_paths_have_transformers_logits
# attention: values of accepted paths are moved as if they were keys
-values + source * VALUE,
+values + source * KEY,
! test_attention_kernels.py::test_keys_outside_the_window_are_not_seen
# kernels: a window is one key too wide
-return positions[None, :] > own[:, None] - window
+return positions[None, :] >= own[:, None] - window
! test_attention_kernels.py::test_a_path_may_cross_several_splits_and_most_of_it_be_of_earlier_forwards
# kernels: splits are combined without regard to their maxima
-acc = tl.fma(acc, rescale[:, None], tl.sum(part * weight[:, :, None], axis=0))
+acc = acc + tl.sum(part * weight[:, :, None], axis=0)
! test_attention_kernels.py::test_a_sink_takes_its_share_of_whatever_is_seen
# kernels: a sink takes no share
-total = tl.fma(total, rescale, tl.exp2(sink - base))
+total = total * rescale
! test_attention_kernels.py::test_committing_moves_accepted_tokens_behind_their_root_and_nothing_else
# kernels: an accepted token is moved onto its root
-target = slot_of(table, length + step + 1, place >= 0, max_pages)
+target = slot_of(table, length + step, place >= 0, max_pages)
= src/graft/spec_decode/planner.py
! test_planner.py::test_without_prompts_the_round_with_the_most_tokens_per_second_is_chosen
# planner: the time of a round counts in its favour
-np.argmax(num_rows * tokens - price * seconds)
+np.argmax(num_rows * tokens + price * seconds)
! test_planner.py::test_a_pass_must_bring_its_cost_with_the_probability_that_its_beams_are_reached
# planner: a draft pass costs nothing
-rest / gain if gain > 0
+0.0 if gain > 0
! test_planner.py::test_nodes_and_all_other_tokens_fit_the_largest_step
# planner: nodes fill the room that other tokens of the step need
-return np.array([0, *(size - base for size in sizes)])
+return np.array([0, *(size - len(kinds) for size in sizes)])
! test_planner.py::test_trees_that_do_not_pay_are_tried_again_for_one_percent_of_the_time
# planner: trees that do not pay are tried ten times as often
-if loss > WASTE * self._since_trees * num_rows:
+if loss > 10 * WASTE * self._since_trees * num_rows:
= src/graft/model/cpu_linear.py
! test_cpu_linear.py::test_a_changed_weight_is_packed_anew
# CPU kernel: a changed weight is read as it was
-    if version != weight._version:
+    if packed is None:
! test_cpu_linear.py::test_weights_that_are_exact_in_bfloat16_take_half_the_memory_and_give_the_same_bits
# CPU kernel: weights are rounded to bfloat16
-    if not torch.equal(short.float(), panels):
+    if len(panels) == 0:
= src/graft/model/cpu_layers.py
! test_cpu_layers.py::test_weights_that_change_while_a_text_is_decoded_are_used_at_once
# CPU layers: a weight that has moved is read where it was
-        return list(map(_VERSION, self._weights)), list(map(Tensor.data_ptr, self._weights))
+        return list(map(_VERSION, self._weights)), []
! test_cpu_layers.py::test_fused_layers_give_what_transformers_gives
# CPU layers: a row's tokens are taken for those of the first row
-        before += own.count
+        before += 0
! test_cpu_families.py::test_a_wrong_description_is_refused_on_load
# CPU layers: layers are not compared with transformers' own on load
-        if (reason := why_unlike(model, what, self)) is not None:
+        if (reason := None) is not None:
! test_cpu_families.py::test_odd_sizes_on_every_processor
# CPU layers: a packed product's second part is read where the first begins
-        before = first * num_inputs * packed.element_size() if is_aligned else 0
+        before = 0
= src/graft/model/cpu_attention.c
! test_cpu_layers.py::test_odd_sizes_on_every_processor_with_and_without_threads
# CPU layers: a key that one query sees counts as seen by all
-        if (num_seen == num_queries && length == row->length + key) length++;
+        if (num_seen > 0 && length == row->length + key) length++;
! test_cpu_layers.py::test_a_token_gets_the_same_bits_in_any_step
# CPU layers: a query's own page ends one key early
-                    if (own[i].num_keys == PAGE) finish_page(layer, &own[i]);
+                    if (own[i].num_keys == PAGE - 1) finish_page(layer, &own[i]);
! test_cpu_families.py::test_families_give_what_transformers_gives
# CPU layers: sinks are left out
-        if (layer->sinks != NULL) query->highest
+        if (layer->sinks == query->query) query->highest
! test_cpu_families.py::test_odd_sizes_on_every_processor
# CPU layers: a window is one key longer
-    return layer->window > 0 && position >= layer->window ? position - layer->window + 1 : 0;
+    return layer->window > 0 && position >= layer->window ? position - layer->window : 0;
# CPU layers: scores are not capped
-    for (long j = 0; j < PAGE && cap > 0; j += LANES)
+    for (long j = 0; j < PAGE && cap < 0; j += LANES)
! test_cpu_families.py::test_a_token_gets_the_same_bits_in_any_step_behind_a_window
# CPU layers: pages before the first window of a tree are left out of the paths in it
-    long begin = is_local ? length : 0; /* of what a query sees */
+    long begin = is_local ? end : 0; /* of what a query sees */
! test_cpu_families.py::test_attention_in_chunks_of_positions
# CPU layers: chunks begin at the first position of the page
-    if (layer->chunk > 0) return position / layer->chunk * layer->chunk;
+    if (layer->chunk > 0) return position / PAGE * PAGE;
= src/graft/model/cpu_layers.c
! test_cpu_families.py::test_families_give_what_transformers_gives
# CPU layers: gates of experts are not clamped
-            if (limit > 0) {
+            if (limit < 0) {
# CPU layers: weights that are stored minus 1 are taken as they are
-y *= load(norm->weight + turn + i, size - i) + (float)norm->plus_one;
+y *= load(norm->weight + turn + i, size - i);
# CPU layers: what a layer adds is not normed
-    if (post->size > 0) norm_into(state->delta, state->delta, post, size);
+    if (post->size < 0) norm_into(state->delta, state->delta, post, size);
# CPU layers: what a layer adds is not scaled
-    add(state->step->stream, state->delta, (float)layer->residual_scale, size);
+    add(state->step->stream, state->delta, 1.0f, size);
# CPU layers: a global layer has the table of local ones
-    const Rotary *rotary = &rotaries[layer->rotary];
+    const Rotary *rotary = &rotaries[0];
# CPU layers: neighbours are not turned together
-        for (long d = 0; d < half && !layer->is_interleaved; d += LANES) {
+        for (long d = 0; d < half; d += LANES) {
# CPU layers: logits are not scaled
-            const vec y = load(at, end - i) * scale;
+            const vec y = load(at, end - i);
# CPU layers: values that are keys are normed as keys and turned
-        if (layer->v_norm.size > 0) norm_into(value, value, &layer->v_norm, kv_size);
+        if (layer->v_norm.size > 0) norm_into(value, value, &layer->k_norm, kv_size);
= src/graft/model/cpu_experts.c
! test_cpu_families.py::test_families_give_what_transformers_gives
# CPU experts: groups are ranked by their best expert alone
-        sums[g] = wanted[g * size + best] + second;
+        sums[g] = wanted[g * size + best];
# CPU experts: weights have the correction of the choice
-        weights[j] = scores[chosen[j]], total += weights[j];
+        weights[j] = wanted[chosen[j]], total += weights[j];
# CPU experts: the shared expert is not scaled
-else if (experts->shared_gate.n > 0) state->delta[t * hidden + i] *=
+else if (experts->shared_gate.n < 0) state->delta[t * hidden + i] *=
! test_cpu_families.py::test_odd_sizes_on_every_processor
# CPU experts: of each expert only one token is multiplied
-        state->jobs[state->num_jobs++] = job_of(&experts->downs[e], state->gate + first * neurons, y, count);
+        state->jobs[state->num_jobs++] = job_of(&experts->downs[e], state->gate + first * neurons, y, 1);
= src/graft/model/cpu_vectors.c
! test_cpu_families.py::test_activations_are_those_of_float64
# CPU layers: the exact gelu is the other one
-    if (activation == GELU) return x * 0.5f * (erf_of(x * 0.70710678f) + 1.0f);
+    if (activation == NONE) return x * 0.5f * (erf_of(x * 0.70710678f) + 1.0f);
= src/graft/drafters/eagle3/cpu_head.py
! test_cpu_head.py::test_a_fused_head_drafts_what_its_modules_draft
# CPU head: attention is added to the hidden state where the head adds it to the normed one
-adds_to_normed=config.norm_before_residual,
+adds_to_normed=False,
! test_cpu_head.py::test_heads_that_are_not_as_usual_are_left_to_their_modules
# CPU head: a hook on a module is left out
-(touched := changed_module(head)) is not None
+(touched := None) is not None
! test_cpu_head.py::test_a_fused_head_drafts_what_its_modules_draft
# CPU head: the output that is fed back is not normed
-(normed if head.config.norm_output else stream[: len(normed)])[None]
+stream[: len(normed)][None]
= src/graft/spec_decode/step_times.py
! test_step_times.py::test_steps_between_and_beyond_the_known_sizes_cost_in_proportion
# step times: a step larger than any costs as much as the largest
-return values[-1] * num_tokens / sizes[-1]
+return values[-1]
! test_step_times.py::test_a_slow_first_step_of_a_size_does_not_replace_the_guess
# step times: the first observation replaces the guess
-[guess, *self.values]
+self.values
= src/graft/integrations/sglang/slots.py
! test_sglang.py::test_a_retracted_request_is_kept_once_when_it_has_ended
# sglang: the text of a retracted request is kept like a finished one
-[slot for slot in gone if self._held[slot].request.finished()]
+gone
! test_sglang.py::test_after_a_failed_launch_nothing_is_lost
# sglang: texts that end in a failed call are not kept
-            self._write(new, kept)
+            self._held = {slot: self._held[slot] for slot in self._held if slot not in gone}; self._write(new, kept)
= src/graft/integrations/sglang/kernels.py
! test_sglang.py::test_texts_that_end_and_requests_that_take_their_slots_are_one_launch
# sglang: finished texts run into each other
-tl.store(past + ((place + at) & (ring - 1)), token, mask=at <= count)
+tl.store(past + ((place + at) & (ring - 1)), token, mask=at < count)
= src/graft/tree/native/round/copies.c
! test_round.py::test_rounds_in_c_are_those_of_the_reference[1]
# isolation: a row copies the finished texts of every owner
-pair->token == token && (pair->owner == -1 || pair->owner == owner)
+pair->token == token
# copies: where the ring of finished texts ends, a pair is overlooked
-if (at == 0) compare(search, texts->past[mask], texts->past[0], texts->owners[0], last--);
+if (at == 0) last--;
! test_round.py::test_rounds_in_c_are_those_of_the_reference[0]
# copies: short matches take nodes from the longest
-found->is_active[i] = 2 * matches[i] > found->longest;
+found->is_active[i] = 2 * matches[i] >= found->longest;
! test_round.py::test_rounds_in_c_are_those_of_the_reference[10]
# copies: answers of a group copy each other's prompts
-int64_t other_end, begin = start > 2 ? start - 1 : 1;
+int64_t other_end, begin = 1;
# copies: another answer is copied though finished texts fit as well
-more[p].longest > found[2 * p + 1].longest) found
+more[p].longest >= found[2 * p + 1].longest) found
= src/graft/tree/native/round/pool.c
! test_round.py::test_rounds_in_c_are_those_of_the_reference[1]
# noise: an ending is proposed one draw too early
-(i < num_banned || depth <= barred[2])
+(i < num_banned || depth < barred[2])
# noise: what is never drawn is proposed once endings may be drawn
-(i < num_banned || depth <= barred[2])
+(depth <= barred[2])
# noise: noise that is not keyed is taken for keyed noise
-if (draws->times != NULL && !draws->is_keyed[row->number]) {
+if (0) {
# noise: candidates are weighed by the noise of the position after their own
-return keyed_time(row->seed, row->end + depth - 1, token);
+return keyed_time(row->seed, row->end + depth, token);
= src/graft/tree/native/round/ranking.c
! test_round.py::test_rounds_in_c_are_those_of_the_reference[0]
# merge: of equal paths the unlikeliest stays
-row.paths[i] > row.paths[slots[slot]]) slots
+row.paths[i] < row.paths[slots[slot]]) slots
# merge: what hangs under a copy is lost with it
-            row.parents[i] = kept[row.parents[i]];
# merge: a copy that needs no draft pass does not count for a drafted node
-            if (needs[i] < needs[k]) needs[k] = needs[i];
# merge: a proposal of several sources does not count as agreed on
-if (row.sources[i] != row.sources[k]) is_agreed[k] = 1;
+if (row.sources[i] == row.sources[k]) is_agreed[k] = 1;
# ranking: of nodes that are equally likely the last ones are verified
-at_limit = total[0] > num_above ? least(at_limit, total[0] - num_above) : 0;
+at_limit = 0;
= src/graft/tree/native/round/outcome.c
! test_round.py::test_rounds_in_c_are_those_of_the_reference[0]
# noise: sampled rows are calibrated with greedy ones
-kinds[r] * NUM_AGREEMENTS + row.agreement[i];
+row.agreement[i];
# calibration: what was tried counts as right
-fitted[cell] += row.keys[i] == came[depth];
+fitted[cell] += 1;
! test_round.py::test_rounds_in_c_are_those_of_the_reference[1]
# walk: it goes to a child of another node
-(parents[start + next] != at || tokens
+(parents[start + next] < at || tokens
= src/graft/tree/native/round/tables.c
! test_round.py::test_rounds_in_c_are_those_of_the_reference[0]
# noise: successors keep the order of their probability
- / draw_time(row, depth, token);
+;
# isolation: another n-gram's successors are taken for a text's own
-if (row < 0 || (tables->row_bits[*number] > 0 && tables->tags[row] != tag)) continue;
+if (row < 0) continue;
# isolation: texts learn from each other though they are isolated
-uint64_t key = (uint64_t)ngram->salt * (uint64_t)factors[3] + (uint64_t)ngram->token
+uint64_t key = (uint64_t)ngram->token
# tables: the unlikeliest node's successors stay
-int64_t i = is_text ? n : count - 1 - n,
+int64_t i = n,
= src/graft/tree/device/pool.py
! test_round.py::test_rounds_in_triton_are_the_same_to_the_last_bit[5]
# noise: kernels propose an ending one draw too early
-is_barred = (number < num_banned) | (depth <= num_unending)
+is_barred = (number < num_banned) | (depth < num_unending)
= src/graft/tree/device/noise.py
! test_device_tree.py::test_the_bucket_of_a_noise_is_that_of_its_logarithm
# noise: a copied token at the limit of two buckets is in the wrong one
-noise += (random <= _ENDS[number]).to(tl.int32)
+noise += (random < _ENDS[number]).to(tl.int32)
= src/graft/model/kernels/scores.py
! test_draw.py::test_kernels_weigh_every_score_as_the_sampler_does
# draws: tokens out of reach are in a bin of those within reach
-tl.where(halvings < _HALVINGS_OF_REACH, 
+tl.where(halvings <= _HALVINGS_OF_REACH, 
= src/graft/model/kernels/adjust.py
! test_adjust.py::test_presence_and_frequency_count_the_answer_and_the_nodes_own_path
# adjustments: a node's own token is not penalized after it
-        for _ in range(depth):
+        for _ in range(depth - 1):
! test_adjust.py::test_logits_are_those_of_transformers_processors
# adjustments: the bias comes after the repetition penalty
-        x += tl.load(biases + own, mask=inside, other=0.0)
-        penalty = tl.load(repetition + row)
-        is_seen = (count > 0) | ((entry & _IS_IN_PROMPT) != 0)
-        x = tl.where(is_seen, tl.where(x > 0, tl.div_rn(x, penalty), x * penalty), x)
+        penalty = tl.load(repetition + row)
+        is_seen = (count > 0) | ((entry & _IS_IN_PROMPT) != 0)
+        x = tl.where(is_seen, tl.where(x > 0, tl.div_rn(x, penalty), x * penalty), x)
+        x += tl.load(biases + own, mask=inside, other=0.0)
# adjustments: min_tokens ends one token early
-tl.load(lengths + row) + 1 + depth < 
+tl.load(lengths + row) + 2 + depth < 
! test_adjust.py::test_tokens_that_a_walk_adds_are_counted_as_if_the_row_had_come_with_them
# adjustments: what stands behind a round's new tokens is counted too
-    is_new = (number < counts[:, None]) & (slots[:, None] >= 0)
+    is_new = (number <= counts[:, None]) & (slots[:, None] >= 0)
= src/graft/engine/adjustments.py
! test_adjust.py::test_grammars_leave_the_tokens_that_they_allow_after_each_node[0]
# adjustments: nodes have each other's masks
-] = own.numbers
+] = own.numbers[::-1]
! test_row_rounds.py::test_penalties_of_preempted_and_joining_rows_count_the_whole_answer
# adjustments: the answer so far of a preempted row is forgotten
-np.bincount(answer, minlength
+np.bincount(answer[:0], minlength
! test_adjust.py::test_slots_are_used_again_and_grow_in_number_without_loss
# adjustments: when slots grow in number, what they hold is lost
-                    own[:kept].copy_(part[:kept])
+                    own[: kept - 1].copy_(part[: kept - 1])
= src/graft/engine/direct_rounds.py
! test_every_drafter.py::test_the_text_is_that_of_plain_decoding_whoever_drafts[small model-llama-dense]
# direct rounds: features and keys of the accepted path are those of the places before
-nodes[row, : len(new)] = start + np.array([0, *path])[: len(new)]
+nodes[row, : len(new)] = start + np.array([0, *path])[: len(new)] // 2
! test_scheduler.py::test_a_prompt_that_is_read_while_others_are_decoded_changes_no_text
# direct rounds: prompts are read over the last tokens of the trees
-reading = load_chunks(inputs, rounds.staging, size, padded_rows, whole, chunks)
+reading = load_chunks(inputs, rounds.staging, size - 1, padded_rows, whole, chunks)
= src/graft/engine/choosers.py
! test_engine.py::test_a_batch_may_mix_prompts_that_end_at_different_times
# choosers: rows keep the sampler of those that were decoded before
-self._sampler is None or numbers != self._numbers or self._sampler.positions != lengths
+self._sampler is None
= src/graft/spec_decode/acceptance.py
! test_sampling.py::test_same_seed_same_text_with_any_tree_and_with_none
# walk: the walk goes on at a sibling
-                at[row] = starts[row] + child
+                at[row] = starts[row] + child - 1
= src/graft/tree/native/round/drafts.c
! test_kernels.py::test_beams_spread_as_in_pytorch_pass_by_pass
# beams: nodes of later levels hang below the places of the first
-            out_parents[at] = is_first ? 0 : places[beam];
+            out_parents[at] = is_first ? 0 : (int32_t)beam + 1;
# beams: a beam forgets the path of its parent
-                memcpy(entries, old + beam * depth, (size_t)number * sizeof(int32_t));
+                memcpy(entries, old, (size_t)number * sizeof(int32_t));
= src/graft/drafters/recurrent.py
! test_drafter.py::test_every_drafted_node_has_the_probability_that_plain_drafting_gives_it
# heads: every beam goes on from the features of the likeliest
-        hidden = features.flatten(0, 1)[origins.flatten().to(device)][None]
+        hidden = features.flatten(0, 1)[origins.flatten().to(device) * 0][None]
= src/graft/model/runner.py
! test_target.py::test_sequences_verified_together_give_what_they_give_alone
# commit: only keys and values that lie one place too far are moved
-rows, steps = np.nonzero((places != wanted) & (wanted <= counts[:, None]))
+rows, steps = np.nonzero((places == wanted + 1) & (wanted <= counts[:, None]))
= src/graft/engine/captured_rounds.py
! test_row_rounds.py::test_a_grammar_alone_in_plain_rounds
# adjustments: masks are computed before the grammar knows the round before
-rounds.take(clock) if trees is not None else None
+rounds.take(clock) if trees is None else None
= src/graft/engine/round_reports.py
! test_row_rounds.py::test_rows_of_several_kinds_share_rounds_and_have_their_own_texts[rows]
# logprobs: they are those of adjusted logits
-        return logits.clone() if is_changed else logits
+        return logits
! test_row_rounds.py::test_scores_of_walked_places_are_torchs_log_softmax[9]
# logprobs: each token has the number of the one after its node's
-    own = logits.gather(1, chosen[:num_tokens, None].long())
+    own = logits.gather(1, chosen[1 : num_tokens + 1, None].long())
! test_rounds.py::test_a_pruned_candidate_is_as_likely_as_its_path_given_its_parent
# records: a pruned candidate has the probability of its whole path
-by_place[1:] / by_place[parents[row, own]]
+by_place[1:]
= src/graft/spec_decode/planner.py
! test_planner.py::test_kinds_of_rows_learn_apart
# planner: a node needs one draft pass fewer than it does
-needs <= number
+needs <= number + 1
= src/graft/server/grammar.py
! test_row_rounds.py::test_the_masks_of_trees_are_those_of_each_path_by_itself
# grammar: a node has the mask of its sibling's child
-            self._matcher.rollback(1)
-            path.pop()
+            path.pop()
"""


def _parsed(text: str) -> tuple[Fault, ...]:
    found: list[tuple[str, str, str]] = []  # name, file and test
    changes: list[dict[str, list[str]]] = []  # of each fault, the lines of its old and its new text
    file = test = ""
    for mark, rest in ((line[0], line[1:]) for line in text.splitlines() if line):
        if mark == "=":
            file = rest.strip()
        elif mark == "!":
            test = rest.strip()
        elif mark == "#":
            found.append((rest.strip(), file, test))
            changes.append({"-": [], "+": []})
        else:
            changes[-1][mark].append(rest)
    return tuple(
        Fault(name, file, "\n".join(lines["-"]), "\n".join(lines["+"]), test)
        for (name, file, test), lines in zip(found, changes, strict=True)
    )


FAULTS = _parsed(_FAULTS)
