"""Device rounds: draft, verify and accept run in CUDA graphs without the host, which stays one round behind.

`DeviceRounds.run` launches a round and then, while the device works, takes the results of the previous one. So the host
learns a row's tokens, its length and whether it has ended one round late. It allocates pages by an upper bound, and
throws away the surplus round of a row that has ended.
"""

from __future__ import annotations

import itertools
import logging
import warnings
import weakref
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor

from graft.engine.adjustments import Adjustments
from graft.engine.device_learning import DeviceLearning
from graft.engine.device_rows import Choice, ReadChunk, draws_of, load_chunks
from graft.engine.flight import Flight
from graft.engine.marks import new_mark, seconds_between
from graft.engine.round_reports import RoundReports
from graft.engine.staging import Staging
from graft.model import Chunk, Row, VerifyOutput
from graft.model.captures import (
    ROWS,
    Event,
    Run,
    context_for,
    first_line,
    is_out_of_memory,
    padded,
    pinned_zeros,
)
from graft.model.cuda_graphs import CapturedTarget, StepBuffers
from graft.model.grammar import advance
from graft.model.kernels import draw as draw_kernels
from graft.model.kv_cache import PAGE, PagePool
from graft.model.noise import NUM_KINDS, RowDraws, share_powers
from graft.progress import Report
from graft.request.batch import Batch
from graft.request.sequence import Sequence as TokenSequence
from graft.request.sequence import TreeRow
from graft.request.stats import Clock
from graft.spec_decode.controller import Controller, Outcome, Plan
from graft.spec_decode.policies import Policy
from graft.spec_decode.proposers.drafter import DrafterOnDevice, PassesOnDevice, num_setups_of
from graft.tree.device.pool import NUM_BUCKETS
from graft.tree.device.round import MAX_TOKENS, MAX_TREE_TOKENS, DeviceRound, RoundShape, Sources
from graft.tree.tree import DraftTree

_log = logging.getLogger(__name__)

_PAST_TOKENS = 1 << 18  # tokens of finished texts to search for copies
_LEAST_TREE = 8  # tokens of the smallest step with a tree
_ROUND_IDS = itertools.count(1)  # one for each `DeviceRound`, to find the graphs captured over its memory
_RING = 3  # number of host buffers for inputs, and for results, used in turns


class RoundError(RuntimeError):
    """Device rounds cannot be captured."""


class DeviceRounds:
    """The device rounds of one engine."""

    max_new_tokens = MAX_TOKENS  # of a row in a round
    max_rows = MAX_TREE_TOKENS  # decoded together
    contexts: tuple[int, ...] = (8192, 32768, 131072)  # few graphs suffice: a longer context costs a round little

    def __init__(self, target: CapturedTarget, policy: Policy, drafter: DrafterOnDevice | None) -> None:
        self._target, self.policy, self._drafter = target, policy, drafter
        self.controller: Controller | None = policy.controller(target.size_for)
        calibration = self._calibration = self.controller.calibration if self.controller is not None else None
        num_buckets = calibration.acceptance_probs.shape[2] if calibration is not None else 1
        numbers = {name: number for number, name in enumerate(policy.sources)}
        self._sources = Sources(
            num_sources=len(numbers),
            num_buckets=num_buckets,
            num_kinds=NUM_KINDS,
            drafted=numbers.get("drafted"),
            copies=numbers.get("suffix"),
            tables=numbers.get("trigram"),
            is_calibrated=calibration is not None,
        )
        self._round: DeviceRound | None = None
        self._pool_state: tuple[int, ...] = ()  # the pool's `_state_of` when `_round` was made
        self._known: weakref.WeakSet[Row] = weakref.WeakSet()  # rows whose texts are on the device
        self._flight: Flight | None = None
        self._ended: Any = None  # the mark at the end of the previous round
        self._round_number = 0
        self.failure: str | None = None  # why rounds cannot be captured; None: they can
        self._staging = Staging(target.device)
        self._learned = DeviceLearning(policy, self._sources, self._staging)
        self._adjustments = Adjustments(target.device, target.vocab_size, self._staging)
        self._reports = RoundReports(target.device, self._staging)

    @classmethod
    def of(cls, target: Any, policy: Policy, drafter: Any) -> DeviceRounds | None:
        """The device rounds of an engine; None if the host must run the rounds."""
        if not isinstance(target, CapturedTarget) or not policy.runs_on_device:
            return None
        used = drafter if policy.drafter is not None else None
        return cls(target, policy, used) if used is None or hasattr(used, "run_passes") else None

    def can_run(self, sequences: Sequence[TokenSequence], draft: Any) -> bool:
        """Whether rounds of these rows can run on the device. draft: the drafter's state of the rows."""
        is_captured = (
            self.failure is None
            and self._target.is_captured
            and (self._drafter is None or self._drafter.is_captured(draft))
        )
        return is_captured and len(sequences) <= self.max_rows

    # A round

    def run(
        self, batch: Batch, clock: Clock, chunks: Sequence[Chunk], meanwhile: Callable[[], None]
    ) -> list[VerifyOutput] | None:
        """Launch a round, and take the results of the previous one. Returns the output of the prompt chunks.

        Returns None if all answers have ended, so that nothing was launched. Raises a `RoundError`, and changes
        nothing, if rounds cannot be captured here.
        """
        if self._flight is not None and (self._is_last(batch) or self._must_move()):
            self.flush(clock)
        flight: Flight | None = None
        read: list[VerifyOutput] | None = None
        if any(sequence.finish_reason is None for sequence in batch.sequences):
            flight, read = self._launch(batch, chunks, clock)
        batch.settle()
        meanwhile()
        self.flush(clock)
        self._flight = flight
        return read

    @property
    def is_in_flight(self) -> bool:
        """Whether a launched round's results have not been taken yet."""
        return self._flight is not None

    def flush(self, clock: Clock) -> None:
        """Take the results of the round in flight, if there is one."""
        flight, self._flight = self._flight, None
        if flight is None:
            return
        try:
            self._take(flight, clock)
        except BaseException:
            # The device's texts may be ahead of the host's now, so they are sent again before their next round.
            self._known.difference_update(flight.rows)
            raise

    def _is_last(self, batch: Batch) -> bool:
        """Whether the round in flight probably ends all answers, so that another one would be thrown away."""
        flight = self._flight
        assert flight is not None
        own = {id(sequence) for sequence in flight.sequences}
        return all(
            id(sequence) in own and sequence.num_remaining <= 1.5 * sequence.stats.mean_accepted
            for sequence in batch.sequences
        )

    def warm_up(self, max_rows: int, choices: Iterable[Choice] = Choice, longest: int = 0) -> None:
        """Capture the graphs of all rounds and steps that the controller may plan for up to `max_rows` rows.

        choices: how their tokens may be chosen. longest: tokens of the longest text.
        """
        target = self._target
        if not target.is_captured:
            return
        most = padded(max_rows, ROWS)
        lengths = [*(context for context in target.contexts if context < longest), longest]
        with target.launching(target.step_sizes[-1]) as (buffers, tables):
            round = self._round_for(target.pool)
            draft = self._drafter.prepare_pool(target.pool) if self._drafter is not None else 0
            all_rows = [rows for rows in ROWS if rows <= min(most, round.max_rows)]
            shapes = [RoundShape(rows, size) for rows in all_rows for size in (rows, *self._planned_sizes(rows))]
            limits = self.controller.pass_limits if self.controller is not None else [0]
            for number, shape in enumerate(shapes):
                target.progress(
                    Report("graphs", number, len(shapes), f"rounds of {shape.rows} rows, {shape.tokens} tokens")
                )
                # Plain rounds also serve rows that do not speculate, and then learn nothing.
                kinds = [(True, passes) for passes in limits] if not shape.is_plain else [(True, 0), (False, 0)]
                contexts = {context_for(length, self.contexts) for length in lengths}
                for context, choice, (learns, passes) in itertools.product(sorted(contexts), choices, kinds):
                    self._capture(round, buffers, tables, shape, context, choice, learns, passes, draft)
                # A capture runs the step too, so it must see only padding rows.
                self._load(round, [], [], [], shape, Plan(shape.tokens, 0, ()))
                self._propose(round, buffers, shape, self.contexts[0], 0, False)
                for length in lengths:
                    target.captured_step(buffers, tables, shape.tokens, length)
            self._learned.warm_up(round, buffers)
            self._adjustments.warm_up(buffers)

    # Launching

    def _capture(
        self,
        round: DeviceRound,
        buffers: StepBuffers,
        tables: Tensor,
        shape: RoundShape,
        context: int,
        choice: Choice,
        learns: bool,
        num_passes: int,
        draft: int,
    ) -> tuple[Run, Run]:
        """The graphs before and after a step. draft: the number of the drafter's buffers."""
        target, key = self._target, (id(buffers), *shape, context, draft)
        owner = self._round_number  # graphs are over this round's memory, and engines may share a target's graphs
        draws = choice is not Choice.GREEDY and self.policy.knows_draws
        propose = partial(self._propose, round, buffers, shape, context, num_passes, draws)
        propose_key = (owner, "propose", num_passes, draws, *key)
        finish = partial(self._finish, round, buffers, tables, shape, context, choice, learns)
        finish_key = (owner, "finish", choice, learns, *key)
        if not (target.has_captured(propose_key) and target.has_captured(finish_key)):
            # Warm-up runs before a capture would change texts and pages, so they must see only padding rows.
            self._load(round, [], [], [], shape, Plan(shape.tokens, 0, ()))
            target.capture(propose_key, propose)()
            target.capture(finish_key, finish)
        return target.capture(propose_key, propose), target.capture(finish_key, finish)

    def _must_move(self) -> bool:
        return self._round is not None and self._pool_state != _state_of(self._target.pool)

    def _launch(self, batch: Batch, chunks: Sequence[Chunk], clock: Clock) -> tuple[Flight, list[VerifyOutput]]:
        if self.failure is not None:
            raise RoundError(self.failure)
        target, rows = self._target, batch.cache.rows
        num_rows, num_prefill = len(rows), sum(len(chunk.tokens) for chunk in chunks)
        padded_rows = padded(num_rows, ROWS)
        draws = draws_of(batch.sequences, self.policy.knows_draws)
        kinds = [own.kind for own in draws]
        plan = self._plan(batch, kinds, padded_rows, num_prefill)
        shape = RoundShape(padded_rows, plan.tokens)
        in_flight = set(map(id, self._flight.rows)) if self._flight is not None else set()
        longest = 0  # text of the decoded rows, in tokens
        for row in rows:
            known = row.length + (MAX_TOKENS if id(row) in in_flight else 0)
            longest = max(longest, known)
            self._ensure(row, known + self._slots_ahead(shape))
        for chunk in chunks:
            target.pool.ensure(chunk.row, chunk.row.length + len(chunk.tokens))
        longest_read = max([longest, *(chunk.row.length for chunk in chunks)])
        if self._flight is not None and self._must_move():
            # The pool has grown, so the texts on the device must move: take the round in flight first.
            self.flush(clock)
        setups = num_setups_of(target, self._drafter)
        with target.launching(shape.tokens + num_prefill) as (buffers, tables):
            round = self._round_for(target.pool)
            draft = self._drafter.prepare_pool(target.pool) if self._drafter is not None else 0
            for sequence, row in zip(batch.sequences, rows, strict=True):
                if row not in self._known:
                    self._adjustments.add_row(row, sequence)
                    self._send_text(round, row, sequence.ids)
            choice = max(Choice.of(own.settings, own.constraint is not None) for own in batch.sequences)
            learns = any(sequence.speculates for sequence in batch.sequences)
            context = context_for(longest, self.contexts)
            kind = (choice, learns, plan.max_passes, draft)
            try:
                propose, finish = self._capture(round, buffers, tables, shape, context, *kind)
            except Exception as error:  # compilers and drivers may raise any type
                if is_out_of_memory(error):
                    raise
                raise self._give_up(first_line(error)) from error
            marks = [new_mark(target.device) for _ in range(4)]
            self._load(round, batch.sequences, rows, draws, shape, plan)
            marks[0].record()
            propose()
            read = load_chunks(buffers, self._staging, shape, target.size_for(shape.tokens + num_prefill), chunks)
            marks[1].record()
            step = target.captured_step(buffers, tables, target.size_for(shape.tokens + num_prefill), longest_read)
            if step is None:
                raise self._give_up("its steps cannot be captured")
            trees = self._adjustments.fetch_trees(batch.sequences, buffers, shape)
            step()
            marks[2].record()
            if trees is not None:
                self.flush(clock)  # while the step runs, so that grammars know all tokens before it
            logits = self._reports.logits_of(batch.sequences, buffers, shape)
            adjusted = self._adjustments.apply(batch.sequences, rows, buffers, shape, trees)
            finish()
            marks[3].record()
            self._adjustments.count(round, shape, adjusted)
            report = self._reports.make(batch.sequences, round, shape, logits)
            here, done = next(self._results)
            here.copy_(round.results, non_blocking=True)
            done.record()
        for chunk in chunks:
            chunk.row.length += len(chunk.tokens)
        results = {name: part.numpy() for name, part in round.results_in(here).items()}
        draft_rows = list(batch.draft.rows) if self._drafter is not None else [None] * num_rows
        is_usual = setups == num_setups_of(target, self._drafter)
        of_rows = (list(batch.sequences), list(rows), draft_rows)
        flight = Flight(*of_rows, kinds, shape, num_prefill, results, marks, done, is_usual, adjusted, report)
        return flight, read

    def _give_up(self, reason: str) -> RoundError:
        """Let the host run all rounds from now on, with one warning. Returns the error to raise."""
        if self.failure is None:
            warnings.warn(f"rounds cannot be captured in CUDA graphs, so the host runs them: {reason}", stacklevel=4)
        self.failure = reason
        return RoundError(reason)

    def _plan(self, batch: Batch, kinds: Sequence[int], padded_rows: int, num_prefill: int) -> Plan:
        speculates = any(sequence.speculates for sequence in batch.sequences)
        if self.controller is None or not speculates:
            return Plan(padded_rows, 0, ())
        return self.controller.plan(kinds, padded_rows, self._sizes(len(kinds), padded_rows, num_prefill), num_prefill)

    def _sizes(self, num_rows: int, padded_rows: int, num_prefill: int) -> list[int]:
        """Sizes of steps with trees, prompt tokens not counted."""
        if self.controller is None:
            return []
        # Trees may enlarge a step up to MAX_TREE_TOKENS. If prompts fill more than that, trees only use its padding.
        room = max(self._target.size_for(padded_rows + num_prefill), MAX_TREE_TOKENS) - num_prefill
        most = min(room, num_rows * (1 + RoundShape(padded_rows, 0).cap))
        return [size for size in self._target.step_sizes if max(2 * padded_rows, _LEAST_TREE) <= size <= most]

    def _planned_sizes(self, padded_rows: int) -> list[int]:
        """Sizes of steps with trees that may be planned for `padded_rows` rows, which include padding."""
        sizes = self._sizes(padded_rows, padded_rows, 0)
        if self.controller is None or self.controller.fixed is None or not sizes:
            return sizes
        # With fewer rows or beside a prompt, rounds are smaller.
        return [size for size in sizes if size <= self.controller.fixed_size(padded_rows, sizes)]

    def _slots_ahead(self, shape: RoundShape) -> int:
        drafted = self._drafter.num_slots if self._drafter is not None else 0
        return max(shape.cap + 1, drafted, MAX_TOKENS)

    def _ensure(self, row: Row, num_slots: int) -> None:
        pool = self._target.pool
        most = pool.max_slots
        pool.ensure(row, num_slots if most is None else min(num_slots, most))

    def _round_for(self, pool: PagePool) -> DeviceRound:
        """The memory of rounds over a pool. If the pool has moved, it is made anew and texts are sent again."""
        if self._round is None or self._must_move():
            drafter, device = self._drafter, pool.device
            old, self._known = self._round, weakref.WeakSet()
            self._target.drop_captures(self._round_number)
            self._round_number = next(_ROUND_IDS)
            self._round = DeviceRound(
                max_rows=min(padded(pool.num_table_rows, ROWS), self.max_rows),
                num_table_rows=pool.num_table_rows,
                context=pool.tables.shape[1] * PAGE,
                past_tokens=_PAST_TOKENS if self._sources.copies is not None else 1,
                levels=drafter.level_sizes if drafter is not None else lambda rows: (),
                num_beams=drafter.beams_of if drafter is not None else lambda rows: 1,
                num_passes=drafter.max_passes if drafter is not None else 0,
                depths_of_pass=-(-drafter.max_depth // drafter.max_passes) if drafter is not None else 1,
                sources=self._sources,
                known=old.tables if old is not None else self._learned.new_tables(self._target.vocab_size, device),
                device=device,
            )
            if old is not None:
                texts = self._round.texts
                texts.past, texts.owners, texts.past_end = old.texts.past, old.texts.owners, old.texts.past_end
            else:
                self._learned.load(self._round)
            size = self._round.num_inputs
            self._staged = itertools.cycle(
                [(pinned_zeros((size,), torch.int32, device), Event(device)) for _ in range(_RING)]
            )
            self._results = itertools.cycle(
                [(pinned_zeros((self._round.num_results,), torch.int32, device), Event(device)) for _ in range(_RING)]
            )
            self._pool_state = _state_of(pool)
        return self._round

    def _send_text(self, round: DeviceRound, row: Row, ids: Sequence[int]) -> None:
        """Send a row's text to the device."""
        texts, at = round.texts, row.block_table_row
        there = self._staging.send([*ids])
        texts.own[at, : len(ids)].copy_(there)
        texts.lengths[at : at + 1].fill_(len(ids))
        self._known.add(row)

    def _load(
        self,
        round: DeviceRound,
        sequences: Sequence[TokenSequence],
        rows: Sequence[Row],
        draws: Sequence[RowDraws],
        shape: RoundShape,
        plan: Plan,
    ) -> None:
        """Send the round's inputs to the device; see `inputs_layout`."""
        here, loaded = next(self._staged)
        loaded.wait()
        inputs = {name: part.numpy() for name, part in round.inputs_in(here).items()}
        count, fixed = len(rows), self.controller.fixed if self.controller is not None else None
        most = min(shape.cap, fixed) if fixed is not None else shape.cap
        settings = [sequence.settings for sequence in sequences]
        by_row = {
            "table_rows": [row.block_table_row for row in rows],
            "caps": [most if sequence.speculates else 0 for sequence in sequences],
            "max_depths": [min(sequence.num_remaining, MAX_TOKENS - 1) for sequence in sequences],
            "owners": [self._learned.owner_of(sequence) for sequence in sequences],
            "salts": [self.policy.salt_of(sequence) for sequence in sequences],
            "kinds": [own.kind for own in draws],
            "powers": [share_powers(own.temperature, NUM_BUCKETS) for own in draws],
            "seeds": [own.seed for own in settings],
            "temperatures": [own.temperature for own in settings],
            "draft_temperatures": [own.temperature for own in draws],
            "top_k": [own.top_k for own in settings],
            "top_p": [own.top_p for own in settings],
            "min_p": [own.min_p for own in settings],
        }
        for name, values in by_row.items():
            inputs[name][:count] = values if count else 0
            inputs[name][count:] = -1 if name == "caps" else 0
        inputs["total"][0] = max(shape.tokens - count, 0)
        inputs["drafts"][0] = plan.max_passes > 0
        if self.controller is not None:
            inputs["thresholds"][: len(plan.thresholds)] = plan.thresholds
        if self._calibration is not None:
            inputs["acceptance_probs"][:] = self._calibration.acceptance_probs.numpy()
        round.numbers.copy_(here, non_blocking=True)
        loaded.record()

    # Inside graphs

    @torch.no_grad()
    def _propose(
        self,
        round: DeviceRound,
        buffers: StepBuffers,
        shape: RoundShape,
        context: int,
        num_passes: int,
        has_draws: bool,
    ) -> None:
        drafter, draft = self._drafter, None
        if drafter is not None and num_passes:
            table_rows = round.inputs["table_rows"][: shape.rows]
            lengths = (round.texts.lengths.index_select(0, table_rows) - 1).clamp(min=0)
            draws = (round.inputs["seeds"], round.inputs["draft_temperatures"]) if has_draws else None
            rows = (table_rows, lengths, round.roots, context)
            asked = PassesOnDevice(self._target.pool, num_passes, *rows, round.made, draws)
            draft = partial(drafter.run_passes, asked)
        round.propose(shape, buffers.columns, buffers.by_row, context, draft)

    @torch.no_grad()
    def _finish(
        self,
        round: DeviceRound,
        buffers: StepBuffers,
        tables: Tensor,
        shape: RoundShape,
        context: int,
        choice: Choice,
        learns: bool,
    ) -> None:
        size, columns = shape.tokens, buffers.columns
        chosen: Tensor = buffers.best[:size]
        if choice is not Choice.GREEDY:
            inputs, rows = round.inputs, shape.rows + 1
            ends = round.texts.lengths.index_select(0, inputs["table_rows"][:rows]).long()
            chosen = torch.zeros(size, dtype=torch.int64, device=round.device)
            draw_kernels.draw(
                *(buffers.logits[:size], columns[4, :size], columns[3, :size], inputs["seeds"][:rows], ends),
                *(inputs["temperatures"][:rows], inputs["top_k"][:rows], inputs["top_p"][:rows]),
                *(inputs["min_p"][:rows], chosen),
                truncates=choice is Choice.TRUNCATED,
            )
        learned: tuple[Tensor, Tensor] | tuple[None, None] = (None, None)
        if learns and self._calibration is not None:
            learned = (buffers.top_tokens[:size], buffers.top_logits[:size])
        round.finish(shape, columns, buffers.by_row, chosen, *learned)
        self._target.commit_moves(tables, round.moves(shape))
        if learns and self._drafter is not None:
            self._drafter.run_entries(self._target.pool, round.entries(shape), buffers.hidden, context)

    # Prompt chunks in the same step

    def learn_prompts(self, chunks: Sequence[ReadChunk]) -> None:
        """Let the drafter and the tables learn from the prompt chunks of the last step."""
        if self._drafter is not None:
            self._drafter.read_chunks([(chunk.draft, chunk.row, chunk.verified, chunk.following) for chunk in chunks])
        if self.failure is not None:
            return
        with self._target.launching(1) as (buffers, _):
            if self._round is None or not self._must_move():  # while the pool grows, tables skip this chunk
                self._learned.learn_prompts(self._round_for(self._target.pool), buffers, chunks)

    # What was learned

    def state(self) -> dict[str, Tensor]:
        """What was learned on the device, in the format of the retrievers' own states."""
        return self._learned.state(self._round) if self._round is not None else {}

    def memory(self) -> dict[str, int]:
        """Bytes on the device by purpose, without those of target and drafter; see `DeviceRound.memory`."""
        adjusted = {"adjustments": self._adjustments.memory()}
        return self._round.memory() | adjusted if self._round is not None else {}

    def reload(self) -> None:
        """Load the restored state of the host's retrievers."""
        if self._round is not None:
            self._learned.load(self._round)

    def finish_text(self, sequence: TokenSequence) -> None:
        """Add a finished text to those that rows may copy from."""
        is_alone = self.policy.isolated and sequence.owner is None
        if self._round is not None and self._sources.copies is not None and not is_alone:
            self._learned.add_text(self._round, sequence.ids, self._learned.owner_of(sequence))

    # Taking results

    def _take(self, flight: Flight, clock: Clock) -> None:
        """Extend the sequences that have not ended by a round's tokens, and learn from the round."""
        flight.done.wait()
        found, shape, num_rows = flight.results, flight.shape, len(flight.rows)
        counts = found["counts"][:num_rows].tolist()
        tokens = [own[:count] for own, count in zip(found["tokens"][:num_rows].tolist(), counts, strict=True)]
        nodes = [
            own[: max(count - 1, 0)] for own, count in zip(found["places"][:num_rows].tolist(), counts, strict=True)
        ]
        num_passes = int(found["made"].sum()) if not shape.is_plain else 0
        tree = flight.tree()
        considered, logprobs = flight.report.considered(tree), flight.logprobs()
        names, common = self.policy.sources, self.policy.common_sources
        by_row = zip(flight.sequences, flight.rows, flight.draft_rows, tokens, nodes, strict=True)
        for number, (sequence, row, draft_row, new, accepted) in enumerate(by_row):
            if not row.is_open or sequence.finish_reason is not None:
                continue
            row.length += len(new)
            if draft_row is not None:
                draft_row.length += len(new)
            sequence.stats.draft_passes += num_passes
            knew_noise = flight.kinds[number] > 0
            try:
                if sequence.constraint is not None:
                    failures = flight.adjusted.failures.get(number, {})
                    advance(sequence.constraint, new, [0, *accepted], failures)
                seen = TreeRow(tree, None, number, names, considered, common, knew_noise, logprobs)
                sequence.extend(new, accepted, seen)
            except Exception as error:  # ends only that sequence
                sequence.failure = error
        try:
            self._count(flight, clock, nodes, num_passes, tree)
        except Exception:  # learning affects only speed, so no answer may fail
            _log.exception("learning from a round failed")

    def _count(
        self,
        flight: Flight,
        clock: Clock,
        nodes: list[list[int]],
        num_passes: int,
        tree: DraftTree,
    ) -> None:
        """Learn from a round's times and outcome."""
        before, proposed, verified, finished = flight.marks
        ended, self._ended = self._ended, finished
        seconds = [seconds_between(*pair) for pair in ((before, proposed), (proposed, verified), (verified, finished))]
        for phase, own in zip(("propose", "verify", "accept"), seconds, strict=True):
            clock.seconds[phase] += own
        if self.controller is None:
            return
        pause = seconds_between(ended, before) if ended is not None else 0.0
        is_usual = flight.is_usual and 0 <= pause < seconds[1]
        found, num_rows, shape = flight.results, len(flight.rows), flight.shape
        cap = shape.cap
        paths = found["paths"][: shape.rows * cap].reshape(shape.rows, cap)[:num_rows]
        rest = seconds[2] + pause + (seconds[0] if shape.is_plain else 0.0)
        self.controller.learn(
            Outcome(
                num_rows=num_rows,
                is_plain=shape.is_plain,
                tokens=shape.tokens,
                num_prefill_tokens=flight.num_prefill_tokens,
                paths=paths.copy(),
                num_nodes=found["num_nodes"][:num_rows].copy(),
                nodes=nodes,
                needs=tree.score_bucket.numpy(),
                reaches=[float(num_rows), *found["reaches"][1 : max(num_passes, 1)].tolist()],
                num_passes=num_passes,
                kinds=flight.kinds,
                tried=found["tried"],
                fitted=found["fitted"],
                propose_seconds=seconds[0] if is_usual else 0.0,
                step_seconds=seconds[1] if is_usual else 0.0,
                rest_seconds=rest,
            )
        )


def _state_of(pool: PagePool) -> tuple[int, ...]:
    return (id(pool), pool.num_table_rows, *pool.tables.shape)
