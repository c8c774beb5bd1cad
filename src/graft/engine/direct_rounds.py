"""Direct rounds: the host calls the kernels and the models of a round one after the other, and walks the trees.

So run all rounds on a CPU, and those on a GPU whose model or drafter cannot be captured, or whose tokens a caller
chooses. They are the rounds of `DeviceRounds` in the same memory; only here the host has the results at once.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Sequence
from functools import partial
from typing import TYPE_CHECKING

import numpy as np
import torch
from torch import Tensor

from graft.drafters.drafter import Passes, num_setups_of
from graft.engine.choosers import Choosers
from graft.engine.device_rows import ChoiceRule, load_chunks
from graft.engine.flight import Flight
from graft.engine.marks import new_mark
from graft.engine.round_reports import SHOWN, Report
from graft.model import Chunk, Row, VerifyOutput
from graft.model.captures import context_for
from graft.model.noise import NOT_SAMPLED, ComingDraws, RowDraws
from graft.model.runner import StepOutput
from graft.model.sampler import Chooser, Sampler
from graft.model.step import Part
from graft.request.batch import Batch
from graft.request.sequence import Sequence as TokenSequence
from graft.spec_decode.acceptance import walk_step
from graft.spec_decode.planner import Plan
from graft.tree.device.round import MAX_TOKENS, AddLevel, DeviceRound, RoundShape, Walked

if TYPE_CHECKING:
    from graft.engine.device_rounds import DeviceRounds

_UNKNOWN = RowDraws(0, 0, 0.0)


class DirectRounds:
    """Runs direct rounds in the memory of an engine's device rounds."""

    def __init__(self, rounds: DeviceRounds, new_sampler: Callable[[Sequence[TokenSequence]], Sampler]) -> None:
        # A proxy, so that both are freed with the engine.
        self._rounds: DeviceRounds = weakref.proxy(rounds)
        self._target = rounds.target
        self._choosers = Choosers(new_sampler)

    @torch.no_grad()
    def run(self, batch: Batch, chunks: Sequence[Chunk]) -> tuple[Flight, list[VerifyOutput]]:
        """Run a round down to the choice of its tokens. Returns it, and the output of the prompt chunks."""
        rounds, target, rows = self._rounds, self._target, batch.cache.rows
        num_rows, num_prefill = len(rows), sum(len(chunk.tokens) for chunk in chunks)
        is_padded = target.is_captured and not any(row.offset for row in rows)
        padded_rows = target.rows_for(num_rows) if is_padded else num_rows
        # None: the likeliest token is chosen everywhere.
        chooser = self._choosers.of(batch) if batch.chooser is not None or not _are_greedy(batch) else None
        draws = self._coming_draws(chooser) if chooser is not None else None
        kinds = draws.kinds if draws is not None else [NOT_SAMPLED] * num_rows
        max_depth = min(max(sequence.num_remaining for sequence in batch.sequences), MAX_TOKENS) - 1
        plan = rounds.plan(batch, kinds, padded_rows, num_prefill) if max_depth else Plan(padded_rows, 0, ())
        shape = RoundShape(padded_rows, plan.tokens)
        rounds.make_room(batch, chunks, shape)
        setups = num_setups_of(target, rounds.drafter)
        device = target.pool.device
        marks = [new_mark(device) for _ in range(4)]
        with target.launching(shape.tokens + num_prefill) as (inputs, tables):
            round = rounds.memory.with_texts_of(batch)
            known = [own or _UNKNOWN for own in draws.rows] if draws is not None else [_UNKNOWN] * num_rows
            rounds.memory.load(round, batch.sequences, rows, known, shape, plan)
            marks[0].record()
            passes = _Passes(rounds, batch, draws, shape, max_depth, plan.max_passes, round, kinds)
            longest = max(row.length for row in rows) + 1
            choose = None if is_padded else partial(rounds.choose_total, round, kinds, num_prefill)
            draft = passes if plan.max_passes else None
            round.propose(shape, inputs.columns, inputs.by_row, longest, draft, choose_total=choose)
            starts, sizes = (part[:num_rows].tolist() for part in inputs.by_row[:2].cpu())
            size = shape.tokens if is_padded else sum(sizes)
            whole = target.size_for(size + num_prefill) if is_padded else size + num_prefill
            reading = load_chunks(inputs, rounds.staging, size, padded_rows, whole, chunks)
            marks[1].record()
            padding = [Row(0)] * (padded_rows + 1 - num_rows) if is_padded or chunks else []
            all_rows = [*rows, *padding, *(chunk.row for chunk in chunks)]
            output = target.run_step(inputs, tables, all_rows, size + num_prefill)
            if output is None:
                return self.run(batch, chunks)
            if device.type == "cuda":
                target.synchronize()  # so that the time counts as the step's
            marks[2].record()
            columns = inputs.columns[:, :size].cpu().numpy()
            learned = (
                output.likeliest(size) if rounds.learns_successors and rounds.learns(batch.sequences) else (None, None)
            )
            if chooser is None:
                best = learned[0][:, 0] if learned[0] is not None else output.logits[:size].argmax(dim=1)
                chosen: Tensor | Walked = best.long()
            else:
                is_open = [sequence.finish_reason is None for sequence in batch.sequences]
                walk = walk_step(columns, starts, sizes, output.logits, chooser, is_open, MAX_TOKENS)
                chosen = _walked(walk, starts, size, shape.rows, device)
            round.finish(shape, inputs.columns, inputs.by_row, chosen, *learned)
            target.commit_moves(tables, round.moves(shape))
            marks[3].record()
        for chunk in chunks:
            chunk.row.length += len(chunk.tokens)
        results = next(rounds.memory.results)
        results.numbers.copy_(round.results)
        is_usual = setups == num_setups_of(target, rounds.drafter)
        of_rows = (list(batch.sequences), list(rows), [None] * num_rows, kinds)
        flight = Flight(*of_rows, shape, plan.max_passes, num_prefill, results.parts, marks, results.event, is_usual)
        flight.draft, flight.size, flight.reach = batch.draft, size, passes.reach
        if batch.draft is not None or any(sequence.settings.logprobs is not None for sequence in batch.sequences):
            flight.verified = _output_of(output, columns, starts, sizes)
        if not shape.is_plain and any(sequence.is_recorded for sequence in batch.sequences):
            flight.report = Report(candidates=round.candidates(shape, shape.cap + SHOWN).cpu().numpy())
        return flight, [output.of(part) for part in reading]

    def _coming_draws(self, chooser: Chooser) -> ComingDraws | None:
        """What the trees may use of the rows' coming draws; None: nothing."""
        policy, drafter = self._rounds.policy, self._rounds.drafter
        draws = chooser.coming_draws() if policy.knows_draws else None
        return draws if draws is not None and (drafter is None or drafter.knows(draws)) else None


class _Passes:
    """The draft passes of a round, whoever drafts."""

    def __init__(
        self,
        rounds: DeviceRounds,
        batch: Batch,
        draws: ComingDraws | None,
        shape: RoundShape,
        max_depth: int,
        max_passes: int,
        round: DeviceRound,
        kinds: Sequence[int],
    ) -> None:
        self._rounds, self._batch, self._draws = rounds, batch, draws
        self._shape, self._max_depth, self._max_passes = shape, max_depth, max_passes
        self._round, self._kinds = round, kinds
        self.reach: float | None = None  # before the first pass; None: not known

    def __call__(self, add_level: AddLevel) -> None:
        rounds, round, state = self._rounds, self._round, self._batch.draft
        drafter, pool = rounds.drafter, rounds.target.pool
        self._plan()
        # No pass gives nodes deeper than `max_depth`.
        num_passes = min(self._max_passes, -(-self._max_depth * drafter.max_passes // drafter.max_depth))
        asked = Passes(
            *(pool, num_passes, round.inputs["table_rows"][: self._shape.rows], round.texts.lengths, round.roots),
            *(context_for(max(row.length for row in self._batch.cache.rows)), round.made, self._draws),
            *(rounds.memory.kept_of_a_level, state, self._max_depth),
        )
        drafter.run_passes(asked, add_level)
        round.made[num_passes:] = 0

    def _plan(self) -> None:
        """Decide about the first pass, now that the copies below the roots are known.

        A pass adds little where a token or more is copied.
        """
        planner = self._rounds.planner
        if planner is not None and planner.sees_candidates:
            retrieved = self._round.retrieved(self._shape)[: len(self._kinds)]
            self.reach = float(np.maximum(1 - retrieved, 0).sum())
            self._round.made[0] = self.reach > float(self._round.inputs["thresholds"][0])


def _are_greedy(batch: Batch) -> bool:
    """Whether the likeliest token is chosen everywhere."""
    choices = (ChoiceRule.of(sequence.settings, sequence.constraint is not None) for sequence in batch.sequences)
    return max(choices) is ChoiceRule.GREEDY


def _walked(
    walk: tuple[list[list[int]], list[list[int]]], starts: Sequence[int], size: int, num_rows: int, device: torch.device
) -> Walked:
    counts = np.zeros(num_rows, dtype=np.int32)
    tokens, nodes = np.zeros((2, num_rows, MAX_TOKENS), dtype=np.int32)
    for row, (new, path, start) in enumerate(zip(*walk, starts, strict=True)):
        counts[row] = len(new)
        tokens[row, : len(new)] = new
        nodes[row, : len(new)] = start + np.array([0, *path])[: len(new)]
    return Walked(size, *(torch.from_numpy(part).to(device) for part in (counts, tokens, nodes)))


def _output_of(output: StepOutput, columns: np.ndarray, starts: Sequence[int], sizes: Sequence[int]) -> VerifyOutput:
    """The target's output for the trees."""
    places = np.arange(max(sizes))
    first, count = np.array(starts)[:, None], np.array(sizes)[:, None]
    index = torch.from_numpy(first + np.where(places < count, places, 0))
    tokens = torch.from_numpy(columns[0].astype(np.int64))[index]
    return output.of(Part(tokens, index, list(sizes)))
