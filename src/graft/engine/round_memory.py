"""RoundMemory: the memory of an engine's rounds on the device, the texts in it, and the inputs of each round."""

from __future__ import annotations

import itertools
import weakref
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor

from graft.drafters.drafter import KEPT_OF_A_LEVEL
from graft.engine.staging import Staging
from graft.model import Row, TargetRunner
from graft.model.captures import ROWS, Event, padded, pinned_zeros
from graft.model.kv_cache import PAGE, PagePool
from graft.model.noise import NUM_KINDS, RowDraws, share_powers
from graft.request.batch import Batch
from graft.request.sequence import Sequence as TokenSequence
from graft.spec_decode.planner import Plan
from graft.spec_decode.policies import Policy
from graft.tree.device.buffers import NUM_BUCKETS, barred_numbers
from graft.tree.device.round import MAX_TOKENS, MAX_TREE_TOKENS, DeviceRound, RoundShape, Sources

MAX_ROWS = MAX_TREE_TOKENS  # of a round
_ROUND_IDS = itertools.count(1)  # one for each `DeviceRound`, to find the graphs captured over its memory
_RING = 3  # number of host buffers for inputs, and for results, used in turns


class HostBuffer:
    """Pinned memory for the inputs or the results of a round, with its parts as arrays."""

    def __init__(self, size: int, views: Callable[[Tensor], dict[str, Tensor]], device: torch.device) -> None:
        self.numbers = pinned_zeros((size,), torch.int32, device)
        self.parts = {name: part.numpy() for name, part in views(self.numbers).items()}
        self.event = Event(device)  # when it has been read, or written


class RoundMemory:
    """Holds a `DeviceRound` over the target's page pool, and makes it anew when the pool has moved."""

    def __init__(
        self,
        target: TargetRunner,
        policy: Policy,
        staging: Staging,
        adjustments: Any,
    ) -> None:
        """adjustments: see `Adjustments`; None where none are captured."""
        self._target: Any = target
        self._policy, planner = policy, policy.planner
        # None: the drafter's q is the acceptance probability.
        calibration = self._calibration = planner.calibration if planner is not None else None
        self._most_nodes = planner.fixed if planner is not None else None  # of a row; None: no limit
        self._staging, self._adjustments = staging, adjustments
        numbers = {name: number for number, name in enumerate(policy.sources)}
        self.sources = Sources(
            num_sources=len(numbers),
            num_buckets=calibration.acceptance_probs.shape[2] if calibration is not None else 1,
            num_kinds=NUM_KINDS,
            drafted=numbers.get("drafted"),
            copies=numbers.get("suffix"),
            tables=numbers.get("trigram"),
            attached=numbers.get("adjacency", 0),
            is_calibrated=calibration is not None,
        )
        fixed = policy.fixed
        self.kept_of_a_level = (
            1 if fixed is not None and fixed.is_chain else KEPT_OF_A_LEVEL
        )  # drafted nodes of a depth
        self.number = 0  # of the current `DeviceRound`
        self._round: DeviceRound | None = None
        self._pool_state: tuple[int, ...] = ()  # the pool's `_state_of` when `_round` was made
        self._known: weakref.WeakSet[Row] = weakref.WeakSet()  # rows whose texts are on the device
        self._inputs: Iterator[HostBuffer] = iter(())
        self.results: Iterator[HostBuffer] = iter(())

    @property
    def must_move(self) -> bool:
        """Whether the pool has moved, so that the next round needs new memory."""
        return self._round is not None and self._pool_state != _state_of(self._target.pool)

    def round(self) -> DeviceRound:
        """The memory over the current pool."""
        if self._round is None or self.must_move:
            self._round = self._new_round(self._target.pool)
        return self._round

    def _new_round(self, pool: PagePool) -> DeviceRound:
        drafter: Any = self._policy.drafter
        device, memory = pool.device, self._policy.memory
        self._known = weakref.WeakSet()
        if self._target.is_captured:
            self._target.drop_captures(self.number)
        self.number = next(_ROUND_IDS)
        made = DeviceRound(
            max_rows=min(padded(pool.num_table_rows, ROWS), MAX_ROWS),
            num_table_rows=pool.num_table_rows,
            context=pool.tables.shape[1] * PAGE,
            past_tokens=1,
            levels=partial(drafter.level_sizes, keep=self.kept_of_a_level) if drafter is not None else lambda rows: (),
            num_beams=partial(drafter.beams_of, keep=self.kept_of_a_level) if drafter is not None else lambda rows: 1,
            num_passes=drafter.max_passes if drafter is not None else 0,
            depths_of_pass=-(-drafter.max_depth // drafter.max_passes) if drafter is not None else 1,
            sources=self.sources,
            known=memory.tables if memory is not None else None,
            device=device,
            fixed=self._policy.fixed,
        )
        if memory is not None:
            texts, past = made.texts, memory.past
            texts.past, texts.owners, texts.past_end = past.tokens, past.owners, past.end
        self._inputs, self.results = (
            itertools.cycle([HostBuffer(*packed, device) for _ in range(_RING)])
            for packed in ((made.num_inputs, made.inputs_in), (made.num_results, made.results_in))
        )
        self._pool_state = _state_of(pool)
        return made

    def bytes(self) -> dict[str, int]:
        """Bytes on the device by purpose; see `DeviceRound.memory`."""
        return self._round.memory() if self._round is not None else {}

    # Texts

    def with_texts_of(self, batch: Batch) -> DeviceRound:
        """The memory, with the batch's texts in it."""
        round = self.round()
        for sequence, row in zip(batch.sequences, batch.cache.rows, strict=True):
            if row not in self._known:
                if self._adjustments is not None:
                    self._adjustments.add_row(row, sequence)
                self._send_text(round, row, sequence.ids)
        return round

    def _send_text(self, round: DeviceRound, row: Row, ids: Sequence[int]) -> None:
        texts, at = round.texts, row.block_table_row
        there = self._staging.send([*ids])
        texts.own[at, : len(ids)].copy_(there)
        texts.lengths[at : at + 1].fill_(len(ids))
        self._known.add(row)

    def forget(self, rows: Iterable[Row]) -> None:
        """Send these rows' texts again before their next round."""
        self._known.difference_update(rows)

    def finish_text(self, sequence: TokenSequence) -> None:
        """Add a finished text to those that rows may copy from."""
        is_alone = self._policy.isolated and sequence.owner is None
        memory = self._policy.memory
        if memory is not None and memory.keeps_past and not is_alone:
            memory.past.add(sequence.ids, self._owner_of(sequence), self._staging.send)

    def _owner_of(self, sequence: TokenSequence) -> int:
        """The owner whose finished texts the row copies; 0: texts without an owner."""
        return sequence.owner or 0 if self._policy.isolated else 0

    def _group_of(self, sequence: TokenSequence) -> int:
        """The number that is common to answers that may copy each other; 0: none."""
        is_alone = self._policy.isolated and sequence.owner is None
        return 0 if is_alone else sequence.group or 0

    # Inputs

    def load(
        self,
        round: DeviceRound,
        sequences: Sequence[TokenSequence],
        rows: Sequence[Row],
        draws: Sequence[RowDraws],
        shape: RoundShape,
        plan: Plan,
    ) -> None:
        """Send the round's inputs to the device; see `inputs_layout`."""
        here = next(self._inputs)
        here.event.wait()
        inputs = here.parts
        count, most = len(rows), shape.cap if self._most_nodes is None else min(shape.cap, self._most_nodes)
        settings = [sequence.settings for sequence in sequences]
        by_row = {
            "table_rows": [row.block_table_row for row in rows],
            "caps": [most if sequence.speculates else 0 for sequence in sequences],
            "max_depths": [min(sequence.num_remaining, MAX_TOKENS - 1) for sequence in sequences],
            "owners": [self._owner_of(sequence) for sequence in sequences],
            "groups": [self._group_of(sequence) for sequence in sequences],
            "num_prompt_tokens": [sequence.num_prompt_tokens for sequence in sequences],
            "salts": [self._policy.salt_of(sequence) for sequence in sequences],
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
        inputs["barred"][:] = 0
        for row, own in enumerate(draws):
            if own.bias or own.num_unending:
                inputs["barred"][row] = barred_numbers(own.banned, own.endings, own.num_unending)
        round.draws.times[:] = [own.times for own in draws] if any(own.times is not None for own in draws) else []
        inputs["total"][0] = max(shape.tokens - count, 0)
        inputs["drafts"][0] = plan.max_passes > 0
        inputs["thresholds"][: len(plan.thresholds)] = plan.thresholds
        inputs["gates"][:] = self._policy.thresholds
        if self._calibration is not None:
            inputs["acceptance_probs"][:] = self._calibration.acceptance_probs.numpy()
        round.numbers.copy_(here.numbers, non_blocking=True)
        here.event.record()


def _state_of(pool: PagePool) -> tuple[int, ...]:
    return (id(pool), pool.num_table_rows, *pool.tables.shape)
