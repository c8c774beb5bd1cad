"""Adjustments: bias, penalties, min_tokens and grammars of rows in device rounds, applied between step and draw.

What rows have in their prompts and answers is counted on the device, in a slot of memory for each row that needs it. A
grammar's masks come from the host: while the step runs, it computes one for every node of the row's tree.
"""

from __future__ import annotations

import math
import weakref
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from graft.engine.staging import Landing, Staging
from graft.model import Row
from graft.model.captures import Event, pinned_zeros, round_up
from graft.model.cuda_graphs import StepBuffers
from graft.model.grammar import NOTHING_LEFT, GrammarTree
from graft.model.kernels import adjust as kernels
from graft.model.sampler import is_adjusted
from graft.request.sequence import Sequence as TokenSequence
from graft.tree.device.round import MAX_TREE_TOKENS, DeviceRound, RoundShape

_FIRST_SLOTS = 8


class Trees(NamedTuple):
    """The trees of a round on their way to the host, for the masks of its grammars."""

    numbers: np.ndarray  # tokens and parents of the step, then each row's first token and number of tokens
    shape: RoundShape
    arrived: Event

    def by_row(self) -> list[tuple[int, list[int], list[int]]]:
        """Each row's first token in the step, its tokens and its parents."""
        size, rows = self.shape.tokens, self.shape.rows
        numbers = self.numbers.tolist()
        spans = zip(numbers[2 * size : 2 * size + rows], numbers[2 * size + rows :], strict=True)
        return [(start, numbers[start : start + n], numbers[size + start : size + start + n]) for start, n in spans]


@dataclass(frozen=True)
class Adjusted:
    """What was adjusted in a round."""

    slots: Tensor | None = None  # [R] int32 by row; None: no row has a slot
    failures: Mapping[int, Mapping[int, str]] = field(
        default_factory=dict
    )  # by row and node: why its grammar fails after the node


class Adjustments:
    """The memory of adjustments, and the calls of their kernels. Nothing is allocated before a row needs it."""

    def __init__(self, device: torch.device, vocab_size: int, staging: Staging) -> None:
        self._device, self._vocab_size, self._staging = device, vocab_size, staging
        # In place of a state without slots, and of masks in a round without grammars.
        self._state = kernels.State.make(1, 1, device)
        none = torch.full((MAX_TREE_TOKENS,), -1, dtype=torch.int32, device=device)
        self._no_masks = kernels.Masks(none, none[None, :1])
        self._num_slots = 0
        self._slots: weakref.WeakKeyDictionary[Row, int] = weakref.WeakKeyDictionary()
        self._landing = Landing(device)

    @cached_property
    def _bits(self) -> tuple[Tensor, Tensor]:
        """Masks of all nodes of a step, on the host and on the device."""
        shape = (MAX_TREE_TOKENS, -(-self._vocab_size // kernels.MASK_BITS))
        host = pinned_zeros(shape, torch.int32, self._device)
        return host, host.to(self._device)

    def memory(self) -> int:
        """Bytes on the device."""
        bits = self._bits[1].nbytes if "_bits" in vars(self) else 0
        return sum(part.nbytes for part in self._state) + bits

    def warm_up(self, buffers: StepBuffers) -> None:
        """Compile the kernel."""
        buffers.columns[:, :1] = 0
        inputs = buffers.logits[:1], buffers.columns[:, :1], buffers.by_row
        kernels.adjust(*inputs, self._send_rows([], [], 1), self._state, self._no_masks)

    # Rows

    def add_row(self, row: Row, sequence: TokenSequence) -> None:
        """Count the tokens of a row whose text is being sent to the device."""
        settings = sequence.settings
        if not is_adjusted(settings):
            return
        slot, answer = self._slot_of(row), np.array(sequence.new_ids, dtype=np.int64)
        entries = np.bincount(answer, minlength=self._vocab_size) * kernels.ONE_TOKEN
        entries[sequence.ids[: sequence.num_prompt_tokens]] |= kernels.IS_IN_PROMPT
        entries[list(sequence.endings)] |= kernels.IS_ENDING
        tokens = np.flatnonzero(entries)
        self._fill(self._state.entries[slot], tokens, entries[tokens])
        self._fill(self._state.bias[slot], [*settings.logit_bias], [*settings.logit_bias.values()])

    def _fill(self, there: Tensor, tokens: Any, values: Any) -> None:
        """Write these tokens' values, and zeros elsewhere."""
        there.zero_()
        if len(tokens):
            there.index_copy_(0, self._staging.send(tokens).long(), self._staging.send(values, there.dtype))

    def _slot_of(self, row: Row) -> int:
        if row not in self._slots:
            used = {slot for other, slot in self._slots.items() if other.is_open}
            slot = next(slot for slot in range(len(used) + 1) if slot not in used)
            if slot >= (kept := self._num_slots):
                self._num_slots = max(2 * kept, _FIRST_SLOTS)
                old, self._state = self._state, kernels.State.make(self._num_slots, self._vocab_size, self._device)
                for part, own in zip(old, self._state, strict=True):
                    own[:kept].copy_(part[:kept])
            self._slots[row] = slot
        return self._slots[row]

    # A round

    def fetch_trees(self, sequences: Iterable[TokenSequence], buffers: StepBuffers, shape: RoundShape) -> Trees | None:
        """Start the copy of the trees to the host, before the step. None: no row has a grammar."""
        if not any(sequence.constraint is not None for sequence in sequences):
            return None
        parts = buffers.columns[:2, : shape.tokens].flatten(), buffers.by_row[:2, : shape.rows].flatten()
        numbers, arrived = self._landing.fetch(torch.cat(parts)), Event(self._device)
        arrived.record()
        return Trees(numbers, shape, arrived)

    def apply(
        self,
        sequences: Sequence[TokenSequence],
        rows: Sequence[Row],
        buffers: StepBuffers,
        shape: RoundShape,
        trees: Trees | None,
    ) -> Adjusted:
        """Adjust the step's logits in place. If there are trees, the results of earlier rounds have been taken."""
        slots = [self._slots[row] if is_adjusted(s.settings) else -1 for s, row in zip(sequences, rows, strict=True)]
        has_slots = any(slot >= 0 for slot in slots)
        if not has_slots and trees is None:
            return Adjusted()
        of_rows = self._send_rows(sequences, slots, shape.rows)
        masks, failures = self._masks(sequences, trees) if trees is not None else (self._no_masks, {})
        inputs = buffers.logits[: shape.tokens], buffers.columns[:, : shape.tokens], buffers.by_row
        kernels.adjust(*inputs, of_rows, self._state, masks)
        return Adjusted(of_rows.slots[: shape.rows] if has_slots else None, failures)

    def count(self, round: DeviceRound, shape: RoundShape, adjusted: Adjusted) -> None:
        """Count the tokens that the walk has added."""
        if adjusted.slots is not None:
            found, rows = round.found, shape.rows
            kernels.count_tokens(self._state, adjusted.slots, found["tokens"][:rows], found["counts"][:rows])

    def _send_rows(self, sequences: Sequence[TokenSequence], slots: Sequence[int], num_rows: int) -> kernels.Rows:
        settings = [sequence.settings for sequence in sequences]
        columns = np.zeros((5, round_up(num_rows + 1)), dtype=np.int32)
        columns[0] = -1
        columns[0, : len(slots)] = slots
        columns[1, : len(slots)] = [s.num_prompt_tokens + s.settings.min_tokens for s in sequences]
        penalties = columns[2:].view(np.float32)
        penalties[0, : len(slots)] = [s.repetition_penalty for s in settings]
        penalties[1, : len(slots)] = [s.presence_penalty for s in settings]
        penalties[2, : len(slots)] = [s.frequency_penalty for s in settings]
        sent = self._staging.send(columns.ravel()).view(columns.shape)
        return kernels.Rows(sent[0], sent[1], *(part.view(torch.float32) for part in sent[2:]))

    # Masks

    def _masks(
        self, sequences: Sequence[TokenSequence], trees: Trees
    ) -> tuple[kernels.Masks, dict[int, dict[int, str]]]:
        """The masks of all rows with grammars, and where grammars fail."""
        host, there = self._bits
        out = host.numpy()
        trees.arrived.wait()  # then the masks of the round before have been sent, too
        by_row = trees.by_row()
        asked = {
            row: GrammarTree(sequence.constraint, *by_row[row][1:])
            for row, sequence in enumerate(sequences)
            if sequence.constraint is not None and sequence.finish_reason is None
        }
        found = next(iter(asked.values())).constraint.masks([*asked.values()], out) if asked else []
        numbers, failures = np.full(trees.shape.tokens, -1, dtype=np.int32), {}
        for (row, tree), own in zip(asked.items(), found, strict=True):
            start = by_row[row][0]
            numbers[start : start + len(own.numbers)] = own.numbers
            failures[row] = _without_tokens(sequences[row], tree.parents, own.numbers, out) | own.failures
        end = int(numbers.max()) + 1
        there[:end].copy_(host[:end], non_blocking=True)
        return kernels.Masks(self._staging.send(numbers), there), failures


def _without_tokens(
    sequence: TokenSequence, parents: Sequence[int], numbers: Sequence[int], out: np.ndarray
) -> dict[int, str]:
    """The nodes after which the row's other settings forbid every token that its grammar allows."""
    settings, depths, failures = sequence.settings, [0] * len(parents), dict[int, str]()
    bans = [token for token, bias in settings.logit_bias.items() if bias == -math.inf]
    num_early = settings.min_tokens - sequence.num_new
    if not bans and num_early <= 0:
        return failures
    banned = _bits_of(bans, out.shape[1])
    without_ends = banned | _bits_of(sequence.endings, out.shape[1])
    for node, (parent, number) in enumerate(zip(parents, numbers, strict=True)):
        depths[node] = depths[parent] + 1 if node else 0
        if number >= 0 and not (out[number] & ~(without_ends if depths[node] < num_early else banned)).any():
            failures[node] = NOTHING_LEFT
    return failures


def _bits_of(tokens: Iterable[int], num_words: int) -> np.ndarray:
    """A mask of these tokens."""
    flags = np.zeros(num_words * kernels.MASK_BITS, dtype=np.uint8)
    flags[list(tokens)] = 1
    return np.packbits(flags, bitorder="little").view(np.int32)
