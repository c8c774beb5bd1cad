"""What device rounds learn: n-gram tables and finished texts, exchanged with the retrievers of the host."""

from __future__ import annotations

import itertools
from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from graft.engine.device_rows import ReadChunk
from graft.engine.staging import Staging
from graft.model.cuda_graphs import StepBuffers
from graft.request.sequence import Sequence as TokenSequence
from graft.spec_decode.policies import Policy
from graft.spec_decode.proposers.base import named, part_of
from graft.spec_decode.proposers.successor_table import FACTORS, ISOLATED_ROWS
from graft.tree.device.buffers import Tables
from graft.tree.device.round import DeviceRound, Sources

_TABLES = ("trigram", "bigram", "adjacency")
_ROWS = 1 << 18  # rows of a hashed table


class DeviceLearning:
    """Fills the tables and the ring of finished texts of a `DeviceRound`."""

    def __init__(self, policy: Policy, sources: Sources, staging: Staging) -> None:
        self._policy, self._sources, self._staging = policy, sources, staging
        self._num_past = 0  # tokens of finished texts ever written

    def owner_of(self, sequence: TokenSequence) -> int:
        """The owner whose finished texts the row copies; 0: texts without an owner."""
        return sequence.owner or 0 if self._policy.isolated else 0

    def new_tables(self, vocab_size: int, device: torch.device) -> Tables | None:
        if self._sources.tables is None:
            return None
        isolated = self._policy.isolated
        rows = ISOLATED_ROWS if isolated else _ROWS
        sizes = (rows, rows, rows if isolated else vocab_size)
        return Tables.make(sizes, (True, True, isolated), FACTORS, isolated, device)

    def load(self, round: DeviceRound) -> None:
        """Send the state of the host's retrievers to the device."""
        state = {key: value for each in self._policy.retrievers for key, value in each.state().items()}
        if round.tables is not None:
            round.tables.entries.fill_(-1)
            for number, name in enumerate(_TABLES):
                held = part_of(state, name)
                rows = held["rows"].long().to(round.device) + round.tables.starts[number]
                round.tables.entries[rows] = held["entries"].to(round.device)
                if "tags" in held:
                    round.tables.tags[rows] = held["tags"].to(round.device)
        past = part_of(state, "past")
        self._num_past = 0
        round.texts.past_end.zero_()
        if past and self._sources.copies is not None:
            for text in past["tokens"].split(past["lengths"].tolist()):
                self.add_text(round, text.tolist(), 0)

    def state(self, round: DeviceRound) -> dict[str, Tensor]:
        """What was learned on the device, in the format of the retrievers' own states."""
        if round.tables is None:
            return {}
        held: dict[str, Tensor] = {}
        ends = [*round.tables.starts.tolist(), len(round.tables.entries)]
        for number, (name, (first, end)) in enumerate(zip(_TABLES, itertools.pairwise(ends), strict=True)):
            entries, tags = round.tables.entries[first:end], round.tables.tags[first:end]
            rows = (entries[:, 0] >= 0).nonzero().squeeze(1)
            own = {"rows": rows.int().cpu(), "entries": entries[rows].cpu()}
            is_hashed = int(round.tables.row_bits[number]) > 0
            held |= named(name, own | ({"tags": tags[rows].cpu()} if is_hashed else {}))
        if not self._policy.isolated:
            held |= named("past", self._texts(round))
        return held

    def _texts(self, round: DeviceRound) -> dict[str, Tensor]:
        """The finished texts, without the oldest one if a part of it was overwritten."""
        size = len(round.texts.past)
        first = max(self._num_past - size, 0)
        places = torch.arange(first, self._num_past, device=round.device) % size
        tokens = round.texts.past[places].tolist()
        texts = [list(group) for is_text, group in itertools.groupby(tokens, lambda token: token >= 0) if is_text]
        texts = texts[1:] if first else texts
        flat = torch.tensor([token for text in texts for token in text], dtype=torch.int32)
        return {"tokens": flat, "lengths": torch.tensor([len(text) for text in texts], dtype=torch.int64)}

    def add_text(self, round: DeviceRound, text: Sequence[int], owner: int) -> None:
        """Write a finished text over the oldest ones."""
        texts = round.texts
        size = len(texts.past)
        ids = [*text[-size // 2 :], -1]
        tokens, at = self._staging.send(ids), self._num_past % size
        before_wrap = min(len(ids), size - at)
        for first, place, count in ((0, at, before_wrap), (before_wrap, 0, len(ids) - before_wrap)):
            if count > 0:
                texts.past[place : place + count].copy_(tokens[first : first + count])
                texts.owners[place : place + count].fill_(owner)
        self._num_past += len(ids)
        ends = self._staging.send([self._num_past, max(self._num_past - size, 0)], torch.int64)
        texts.past_end.copy_(ends)

    # Prompts

    def warm_up(self, round: DeviceRound, buffers: StepBuffers) -> None:
        """Compile the kernels of `learn_prompts`, by a token that belongs to no row and so changes nothing."""
        rows, salts = self._staging.send([1, 0, -1, -1]), self._staging.send([0], torch.int64)
        self._learn_texts(round, buffers, slice(0, 1), rows, salts)

    def learn_prompts(self, round: DeviceRound, buffers: StepBuffers, chunks: Sequence[ReadChunk]) -> None:
        """Let the tables learn from the prompt chunks of the last step."""
        firsts = np.array([int(chunk.verified.index[0, 0]) for chunk in chunks])
        counts = [len(chunk.following) for chunk in chunks]
        first, end = int(firsts.min()), int((firsts + counts).max())
        rows = np.full(end - first, len(chunks))  # tokens of other prompts belong to no row
        for row, (start, count) in enumerate(zip(firsts - first, counts, strict=True)):
            rows[start : start + count] = row
        before = np.array([[-1, -1, *chunk.preceding][-2:][::-1] for chunk in chunks]).T
        numbers = self._staging.send(np.concatenate([rows, firsts - first, before.ravel()]))
        salts = self._staging.send([chunk.salt for chunk in chunks], torch.int64)
        self._learn_texts(round, buffers, slice(first, end), numbers, salts)

    @staticmethod
    def _learn_texts(round: DeviceRound, buffers: StepBuffers, own: slice, numbers: Tensor, salts: Tensor) -> None:
        """own: the step's tokens. numbers: the row of each, and by row its first token and the two tokens before it."""
        num_rows = len(salts)
        rows, starts, before = numbers.split([own.stop - own.start, num_rows, 2 * num_rows])
        step = (*(column.contiguous() for column in buffers.columns[:3, own]), rows)
        top = (buffers.top_tokens[own], buffers.top_logits[own])
        round.learn(step, starts, before.view(2, -1), salts, *top, num_rows=num_rows, is_text=True)
