"""Captured rounds: draft, verify and accept run in CUDA graphs, and the host does not wait for them.

A round is three graphs: before the step, the step, and after it. Adjustments of logits, and the log-probabilities and
candidates that some rows ask for, are launched between them.
"""

from __future__ import annotations

import itertools
import warnings
import weakref
from collections.abc import Iterable, Sequence
from functools import partial
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from graft.drafters.drafter import Passes, num_setups_of
from graft.engine import device_learning
from graft.engine.adjustments import Adjustments
from graft.engine.device_rows import ChoiceRule, draws_of, load_chunks
from graft.engine.flight import Flight
from graft.engine.marks import new_mark
from graft.engine.round_reports import RoundReports
from graft.model import Chunk, VerifyOutput
from graft.model.captures import ROWS, Run, context_for, first_line, is_out_of_memory, padded
from graft.model.cuda_graphs import StepBuffers
from graft.model.kernels import draw as draw_kernels
from graft.progress import Report
from graft.request.batch import Batch
from graft.request.stats import Clock
from graft.spec_decode.planner import Plan
from graft.tree.device.round import DeviceRound, RoundShape

if TYPE_CHECKING:
    from graft.engine.device_rounds import DeviceRounds


class CapturedRounds:
    """Launches rounds as CUDA graphs over the memory of an engine's rounds."""

    contexts: tuple[int, ...] = (8192, 32768, 131072)  # few graphs suffice: a longer context costs a round little

    def __init__(self, rounds: DeviceRounds, adjustments: Adjustments) -> None:
        # A proxy, so that both are freed with the engine.
        self._rounds: DeviceRounds = weakref.proxy(rounds)
        self._target, self._policy = rounds.target, rounds.policy
        self._drafter, self._memory, self._staging = rounds.drafter, rounds.memory, rounds.staging
        self._adjustments = adjustments
        self._reports = RoundReports(rounds.target.device, rounds.staging)
        self.failure: str | None = None  # why rounds cannot be captured; None: they can

    def can_run(self, batch: Batch) -> bool:
        """Whether the batch's round can be launched."""
        if self.failure is not None or not self._target.is_captured or batch.chooser is not None:
            return False
        if self._drafter is not None and not self._drafter.is_captured:
            return False
        return not any(row.offset for row in batch.cache.rows)

    def warm_up(self, max_rows: int, choices: Iterable[ChoiceRule] = ChoiceRule, longest: int = 0) -> None:
        """Capture the graphs of all rounds and steps that the controller may plan for up to `max_rows` rows.

        choices: how their tokens may be chosen. longest: tokens of the longest text.
        """
        target, planner = self._target, self._rounds.planner
        if self._drafter is not None and not self._drafter.is_captured:
            return
        most = padded(max_rows, ROWS)
        lengths = [*(context for context in target.contexts if context < longest), longest]
        with target.launching(target.step_sizes[-1]) as (buffers, tables):
            round = self._memory.round()
            draft = self._drafter.prepare_pool(target.pool) if self._drafter is not None else 0
            all_rows = [rows for rows in ROWS if rows <= min(most, round.max_rows)]
            shapes = [RoundShape(rows, size) for rows in all_rows for size in (rows, *self._rounds.planned_sizes(rows))]
            limits = planner.pass_limits if planner is not None else [0]
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
                self._memory.load(round, [], [], [], shape, Plan(shape.tokens, 0, ()))
                self._propose(round, buffers, shape, self.contexts[0], 0, False)
                for length in lengths:
                    target.captured_step(buffers, tables, shape.tokens, length)
            device_learning.warm_up(round, self._staging)
            self._adjustments.warm_up(buffers)

    def _capture(
        self,
        round: DeviceRound,
        buffers: StepBuffers,
        tables: Tensor,
        shape: RoundShape,
        context: int,
        choice: ChoiceRule,
        learns: bool,
        num_passes: int,
        draft: int,
    ) -> tuple[Run, Run]:
        """The graphs before and after a step. draft: the number of the drafter's buffers."""
        target, key = self._target, (id(buffers), *shape, context, draft)
        owner = self._memory.number  # graphs are over this round's memory, and engines may share a target's graphs
        draws = choice is not ChoiceRule.GREEDY and self._policy.knows_draws
        propose = partial(self._propose, round, buffers, shape, context, num_passes, draws)
        propose_key = (owner, "propose", num_passes, draws, *key)
        finish = partial(self._finish, round, buffers, tables, shape, context, choice, learns)
        finish_key = (owner, "finish", choice, learns, *key)
        if not (target.has_captured(propose_key) and target.has_captured(finish_key)):
            # Warm-up runs before a capture would change texts and pages, so they must see only padding rows.
            self._memory.load(round, [], [], [], shape, Plan(shape.tokens, 0, ()))
            target.capture(propose_key, propose)()
            target.capture(finish_key, finish)
        return target.capture(propose_key, propose), target.capture(finish_key, finish)

    def launch(
        self, batch: Batch, chunks: Sequence[Chunk], clock: Clock
    ) -> tuple[Flight, list[VerifyOutput]] | tuple[None, None]:
        """Launch a round. Returns it, and the output of the prompt chunks.

        Returns nothing, and has changed nothing, if rounds cannot be captured here.
        """
        rounds, target, rows = self._rounds, self._target, batch.cache.rows
        num_rows, num_prefill = len(rows), sum(len(chunk.tokens) for chunk in chunks)
        padded_rows = padded(num_rows, ROWS)
        draws = draws_of(batch.sequences, self._policy.knows_draws)
        kinds = [own.kind for own in draws]
        plan = rounds.plan(batch, kinds, padded_rows, num_prefill)
        shape = RoundShape(padded_rows, plan.tokens)
        longest = rounds.make_room(batch, chunks, shape)
        longest_read = max([longest, *(chunk.row.length for chunk in chunks)])
        setups = num_setups_of(target, self._drafter)
        with target.launching(shape.tokens + num_prefill) as (buffers, tables):
            if rounds.is_in_flight and self._memory.must_move:
                # The pool has grown, so the texts on the device must move: take the round in flight first. Only here
                # can no other thread make it grow any more.
                rounds.flush(clock)
            round = self._memory.with_texts_of(batch)
            draft = self._drafter.prepare_pool(target.pool) if self._drafter is not None else 0
            choice = max(ChoiceRule.of(own.settings, own.constraint is not None) for own in batch.sequences)
            learns = rounds.learns(batch.sequences)
            context = context_for(longest, self.contexts)
            kind = (choice, learns, plan.max_passes, draft)
            try:
                propose, finish = self._capture(round, buffers, tables, shape, context, *kind)
            except Exception as error:  # compilers and drivers may raise any type
                if is_out_of_memory(error):
                    raise
                return self._give_up(first_line(error))
            marks = [new_mark(target.device) for _ in range(4)]
            self._memory.load(round, batch.sequences, rows, draws, shape, plan)
            marks[0].record()
            propose()
            size = target.size_for(shape.tokens + num_prefill)
            read = buffers.outputs_of(load_chunks(buffers, self._staging, shape.tokens, shape.rows, size, chunks))
            marks[1].record()
            step = target.captured_step(buffers, tables, target.size_for(shape.tokens + num_prefill), longest_read)
            if step is None:
                return self._give_up("its steps cannot be captured")
            trees = self._adjustments.fetch_trees(batch.sequences, buffers, shape)
            step()
            marks[2].record()
            # While the step runs, so that grammars know all tokens before it. Learning can wait until after the masks.
            learn = rounds.take(clock) if trees is not None else None
            logits = self._reports.logits_of(batch.sequences, buffers, shape)
            adjusted = self._adjustments.apply(batch.sequences, rows, buffers, shape, trees)
            finish()
            marks[3].record()
            self._adjustments.count(round, shape, adjusted)
            report = self._reports.make(batch.sequences, round, shape, logits)
            results = next(self._memory.results)
            results.numbers.copy_(round.results, non_blocking=True)
            results.event.record()
        if learn is not None:
            learn()
        for chunk in chunks:
            chunk.row.length += len(chunk.tokens)
        draft_rows = list(batch.draft.rows) if self._drafter is not None else [None] * num_rows
        is_usual = setups == num_setups_of(target, self._drafter)
        of_rows = (list(batch.sequences), list(rows), draft_rows, kinds)
        flight = Flight(
            *of_rows,
            shape,
            plan.max_passes,
            num_prefill,
            results.parts,
            marks,
            results.event,
            is_usual,
            adjusted,
            report,
        )
        return flight, read

    def _give_up(self, reason: str) -> tuple[None, None]:
        """Launch nothing from now on, with one warning."""
        warnings.warn(f"rounds cannot be captured in CUDA graphs, so the host runs them: {reason}", stacklevel=4)
        self.failure = reason
        return None, None

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
            draws = (round.inputs["seeds"], round.inputs["draft_temperatures"]) if has_draws else None
            asked = Passes(
                self._target.pool,
                num_passes,
                round.inputs["table_rows"][: shape.rows],
                round.texts.lengths,
                round.roots,
                context,
                round.made,
                draws,
                self._memory.kept_of_a_level,
            )
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
        choice: ChoiceRule,
        learns: bool,
    ) -> None:
        size, columns = shape.tokens, buffers.columns
        chosen: Tensor = buffers.best[:size]
        if choice is not ChoiceRule.GREEDY:
            inputs, rows = round.inputs, shape.rows + 1
            ends = round.texts.lengths.index_select(0, inputs["table_rows"][:rows]).long()
            chosen = torch.zeros(size, dtype=torch.int64, device=round.device)
            draw_kernels.draw(
                *(buffers.logits[:size], columns[4, :size], columns[3, :size], inputs["seeds"][:rows], ends),
                *(inputs["temperatures"][:rows], inputs["top_k"][:rows], inputs["top_p"][:rows]),
                *(inputs["min_p"][:rows], chosen),
                truncates=choice is ChoiceRule.TRUNCATED,
            )
        learned: tuple[Tensor, Tensor] | tuple[None, None] = (None, None)
        if learns and self._rounds.learns_successors:
            learned = (buffers.top_tokens[:size], buffers.top_logits[:size])
        round.finish(shape, columns, buffers.by_row, chosen, *learned)
        self._target.commit_moves(tables, round.moves(shape))
        if learns and self._drafter is not None:
            self._drafter.run_entries(self._target.pool, round.entries(shape), buffers.hidden, context)
