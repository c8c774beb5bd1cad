"""Base of the drafters whose passes are CUDA graphs.

An entry is one token in the head's KV store. Entries of all rows are flat, like the tokens of a target step. The graph
`read` runs the head on new entries, from the target's hidden states. Subclasses define the graphs of draft passes.
Device rounds include both in their own graphs. In host rounds each is a graph of its own, and the host waits for the
result of each pass. Without a GPU, the same code runs and calls the functions instead of replaying graphs.
"""

from __future__ import annotations

import itertools
import warnings
import weakref
from abc import abstractmethod
from collections.abc import Sequence
from functools import partial
from typing import Any, Generic, TypeVar

import numpy as np
import torch
from torch import Tensor

from graft.model import KVCache, PagePool, TargetRunner, VerifyOutput
from graft.model.captures import CONTEXTS, Captures, Run, context_for, first_line, is_out_of_memory, on_device, padded
from graft.model.kv_cache import PAGE, KVStore
from graft.model.layout import Layout
from graft.model.noise import ComingDraws
from graft.progress import Report
from graft.spec_decode.proposers.captured_state import CapturedRow, CapturedState
from graft.spec_decode.proposers.draft_buffers import ENTRIES, ByEntry, ByRow, DraftBuffers, ragged
from graft.spec_decode.proposers.eager import EagerDrafter, R
from graft.tree.device.buffers import Entries
from graft.tree.tree import DraftTree

B = TypeVar("B", bound=DraftBuffers)


class CapturedDrafter(EagerDrafter[R], Generic[R, B]):
    """Drafts by CUDA graphs.

    A subclass also inherits from the eager drafter of its head, which takes over if captures fail.
    """

    contexts: tuple[int, ...] = CONTEXTS

    def __init__(self, head: Any, settings: Any = None) -> None:
        """head: one for which `capturable.why_not` is None."""
        super().__init__(head, settings)  # type: ignore[call-arg]  # the eager drafter's
        self._captures = Captures(self.device)
        self._buffers: weakref.WeakKeyDictionary[PagePool, B] = weakref.WeakKeyDictionary()
        self._numbers = itertools.count()  # of buffers

    # What subclasses define

    @abstractmethod
    def _new_buffers(self, pool: PagePool, store: KVStore, number: int) -> B:
        """Buffers over a pool."""

    @abstractmethod
    def _enter(self, buffers: B, features: Tensor, tokens: Tensor, by_row: ByRow, layout: Layout) -> None:
        """Run the head, within a graph, on entries with the target's features [E, taps * H_t] and next tokens [E]."""

    @abstractmethod
    def _shape_of(self, num_rows: int, keep: int | None, knows_draws: bool = False) -> Any:
        """The shape of a round's passes, which is part of the keys of their graphs."""

    @abstractmethod
    def _replay_pass(self, buffers: B, shape: Any, number: int, context: int) -> None:
        """Launch a pass of a round; number: from 0."""

    # The drafter contract

    @property
    def num_setups(self) -> int:
        return self._captures.num_setups

    def knows(self, draws: ComingDraws) -> bool:
        return draws.is_keyed

    def open(self, cache: KVCache, texts: Sequence[Sequence[int]] = ()) -> Any:
        captures = self._captures
        if captures.failure is not None:
            return super().open(cache)
        with captures.lock, cache.pool.lock:
            self.store_for(cache.pool)
            # If a prefix comes from the prefix cache, its entries are in the shared pages.
            state = CapturedState(self, cache.pool, [CapturedRow(row, row.length) for row in cache.rows])
            buffers = self._buffers_of(cache.pool)
            for row in cache.rows:  # clear what the row's previous owner left
                for kept in buffers.by_table_row:
                    kept[row.block_table_row].zero_()
            if captures.num_captured == 0:
                try:
                    self._try(state)
                except Exception as error:  # compilers and drivers may raise any type
                    if is_out_of_memory(error):
                        raise
                    captures.failure = first_line(error)
                    captures.forget()
                    self._buffers.clear()
                    warnings.warn(f"draft passes cannot be captured in CUDA graphs: {captures.failure}", stacklevel=2)
                    return super().open(cache)
        return state

    def copy_table_row(self, pool: PagePool, source: int, target: int) -> None:
        """Copy the drafter's device state of one row of the block tables to another row."""
        with self._captures.lock, pool.lock:
            for kept in self._buffers_of(pool).by_table_row:
                kept[target] = kept[source]

    def read(self, state: Any, row: int, verified: VerifyOutput, following: Sequence[int]) -> None:
        if not isinstance(state, CapturedState):
            return super().read(state, row, verified, following)
        return self.read_chunks([(state, row, verified, following)])

    def read_chunks(self, chunks: Sequence[tuple[CapturedState, int, VerifyOutput, Sequence[int]]]) -> None:
        firsts = [int(verified.index[0, 0]) for _, _, verified, _ in chunks]
        followings = [following for *_, following in chunks]
        sources = [range(first, first + len(own)) for first, own in zip(firsts, followings, strict=True)]
        rows = [state.rows[row] for state, row, _, _ in chunks]
        state, _, verified, _ = chunks[0]
        self._read(state.pool, rows, verified, followings, sources)

    def learn(
        self, state: Any, verified: VerifyOutput, nodes: Sequence[Sequence[int]], tokens: Sequence[Sequence[int]]
    ) -> None:
        if not isinstance(state, CapturedState):
            return super().learn(state, verified, nodes, tokens)
        index = verified.index.numpy()
        paths = enumerate(zip(nodes, tokens, strict=True))
        sources = [index[row, [0, *path][: len(new)]].tolist() for row, (path, new) in paths]
        return self._read(state.pool, state.rows, verified, tokens, sources)

    def warm_up(self, target: TargetRunner, max_rows: int) -> None:
        """Capture the graphs that read prompts. Passes of host rounds are captured at first use."""
        cache = target.open(1, num_slots=PAGE)
        try:
            state = self.open(cache)
            verified = target.verify(cache, DraftTree.roots(torch.zeros(1, dtype=torch.int64)))
            if not isinstance(state, CapturedState) or not verified.is_captured:
                return
            with self._captures.lock, state.pool.lock:
                buffers = self._unowned(state.pool)
                hidden = self._hidden_of(buffers, verified)
                for number, size in enumerate(ENTRIES):
                    target.progress(Report("graphs", number, len(ENTRIES), f"drafter, {size} entries"))
                    buffers.round.load(ByRow(), ByEntry(), size)
                    self._replay_read(buffers, size, self._context(state.rows), hidden)
        finally:
            cache.release()

    # Rounds on the device

    def is_captured(self, state: Any) -> bool:
        return isinstance(state, CapturedState)

    def prepare_pool(self, pool: PagePool) -> int:
        """Make the buffers over a pool before graphs use them. Returns a number that changes if the buffers change."""
        return self._unowned(pool).number

    def run_entries(self, pool: PagePool, entries: Entries, hidden: Tensor, context: int) -> None:
        """Run the head on the new tokens of a round, within a graph. hidden: [T, F] of the step's tokens."""
        buffers = self._buffers[pool]
        by_row = ByRow(
            table_rows=entries.table_rows, starts=entries.lengths, begins=entries.begins, counts=entries.counts
        )
        by_entry = ByEntry(entries.rows, entries.places, entries.tokens, entries.nodes)
        self._run_entries(buffers, by_row, by_entry, context, hidden)

    # Host rounds

    def _make_pass(self, state: CapturedState, roots: Tensor, shape: Any, number: int, draws: ComingDraws | None) -> B:
        """Launch a pass of a round. If another state has used the buffers since the last pass, all are run again."""
        buffers = self._buffers.get(state.pool)
        is_own = buffers is not None and buffers.owner() is state and buffers.num_resized == state.pool.num_resized
        first = number
        if buffers is None or not is_own or number == 0:
            first, buffers = 0, self._begin(state, roots, draws)
        for each in range(first, number + 1):
            self._replay_pass(buffers, shape, each, self._context(state.rows))
        return buffers

    def _begin(self, state: CapturedState, roots: Tensor, draws: ComingDraws | None) -> B:
        """Make room for a round's drafts, and send its rows to the device."""
        most = state.pool.max_slots
        for row in state.rows:
            needed = row.length + self.num_slots
            state.pool.ensure(row.row, needed if most is None else min(needed, most))
        buffers = self._buffers_of(state.pool)
        buffers.owner = weakref.ref(state)
        by_row = ByRow(_table_rows(state.rows), roots=roots.tolist(), lengths=state.lengths)
        buffers.round.load(by_row, ByEntry(), 0)
        if draws is not None:
            self._load_draws(buffers, *draws.keys())
        return buffers

    def _load_draws(self, buffers: B, seeds: Tensor, temperatures: Tensor) -> None:
        """Set the coming draws of the first rows, for passes that use them."""
        buffers.seeds[: len(seeds)].copy_(seeds)
        buffers.temperatures[: len(seeds)].copy_(temperatures / self.sharpness)

    def _read(
        self,
        pool: PagePool,
        rows: Sequence[CapturedRow],
        verified: VerifyOutput,
        tokens: Sequence[Sequence[int]],
        sources: Sequence[Sequence[int]],
    ) -> None:
        """Run the head on new entries. Their pages exist, because the target has written the same tokens.

        By row: the token after each entry, and the index in the step of the token whose features it takes.
        """
        with self._captures.lock, pool.lock:
            buffers = self._unowned(pool)
            hidden = self._hidden_of(buffers, verified)
            is_one = sum(map(len, tokens)) <= buffers.max_entries
            most = buffers.max_entries // (1 if is_one else len(rows))
            for first in range(0, max(map(len, tokens)), most):
                part, places = ([own[first : first + most] for own in by_row] for by_row in (tokens, sources))
                size = self._load(buffers, rows, part, places)
                self._replay_read(buffers, size, self._context(rows), hidden, verified.is_captured)
                for row, new in zip(rows, part, strict=True):
                    row.length += len(new)

    def _load(
        self, buffers: B, rows: Sequence[CapturedRow], tokens: Sequence[Sequence[int]], sources: Sequence[Sequence[int]]
    ) -> int:
        """Send entries to the device. Returns their number with padding."""
        counts = np.array([len(own) for own in tokens])
        entry_rows, places, begins = ragged(counts)
        by_row = ByRow(_table_rows(rows), starts=[row.length for row in rows], begins=begins, counts=counts)
        flat = (list(itertools.chain.from_iterable(parts)) for parts in (tokens, sources))
        size = padded(len(places), ENTRIES)
        buffers.round.load(by_row, ByEntry(entry_rows, places, *flat), size)
        return size

    def _context(self, rows: Sequence[CapturedRow]) -> int:
        return context_for(max((row.length for row in rows), default=0), self.contexts)

    # Graphs

    def _buffers_of(self, pool: PagePool) -> B:
        """The buffers over a pool, with its block tables on the device. Drops graphs over moved memory."""
        buffers = self._buffers.get(pool)
        if buffers is None or buffers.num_resized != pool.num_resized:
            new = self._new_buffers(pool, self.store_for(pool), next(self._numbers))
            if buffers is not None:
                new.take(buffers)
            self._buffers[pool] = buffers = new
            alive = {known.number for known in self._buffers.values()}
            self._drop([key for key in self._captures.steps if key[0] not in alive])
        pool.sync()
        return buffers

    def _unowned(self, pool: PagePool) -> B:
        """The buffers over a pool, to be overwritten: a host round that uses them must run its passes again."""
        buffers = self._buffers_of(pool)
        buffers.owner = lambda: None
        return buffers

    def _drop(self, keys: Sequence[tuple[Any, ...]]) -> None:
        for key in keys:
            del self._captures.steps[key]
        if keys and not self._captures.steps:
            self._captures.forget()

    def _hidden_of(self, buffers: B, verified: VerifyOutput) -> Tensor:
        """The target's buffer of hidden states. Drops graphs that read another buffer."""
        hidden = verified.hidden
        if not verified.is_captured:
            return hidden
        whole_buffer = hidden._base
        if whole_buffer is not None and whole_buffer.dim() == 2 and whole_buffer.data_ptr() == hidden.data_ptr():
            hidden = whole_buffer
        readers = (hidden.data_ptr(), hidden.shape, hidden.stride())
        if readers != buffers.readers:
            self._drop([key for key in self._captures.steps if key[:2] == (buffers.number, "read")])
            buffers.readers = readers
        return hidden

    def _replay(
        self,
        buffers: B,
        kind: tuple[Any, ...],
        run: Run,
        moving: Sequence[Tensor] = (),
        is_static: bool = True,
    ) -> None:
        """Replay or run work. is_static: the inputs keep their addresses, so that a graph can be captured."""
        with on_device(self._captures.device):
            step = self._captures.captured((buffers.number, *kind), run, moving) if is_static else run
            step()

    def _replay_read(self, buffers: B, size: int, context: int, hidden: Tensor, is_static: bool = True) -> None:
        run = partial(self._run_read, buffers, size, context, hidden)
        self._replay(buffers, ("read", size, context), run, is_static=is_static)

    @torch.no_grad()
    def _run_read(self, buffers: B, size: int, context: int, hidden: Tensor) -> None:
        self._run_entries(buffers, buffers.round.by_row(), buffers.round.by_entry(size), context, hidden)

    def _run_entries(self, buffers: B, by_row: ByRow, entries: ByEntry, context: int, hidden: Tensor) -> None:
        """Run the head on entries. hidden: where their features are."""
        features = hidden.index_select(0, entries.sources)
        layout = Layout(
            rows=entries.rows,
            places=entries.places,
            depths=entries.places,
            paths=buffers.paths[: len(entries.rows)],
            starts=by_row.begins,
            counts=by_row.counts,
            lengths=by_row.starts,
            table_rows=by_row.table_rows,
            tables=buffers.tables,
            max_context=context,
            only_chains=True,
        )
        self._enter(buffers, features.to(self._weight.dtype), entries.tokens, by_row, layout)

    def _try(self, state: CapturedState) -> None:
        """Capture the graphs of a round on padding rows, to see whether the head can be captured."""
        buffers, context, size = self._buffers_of(state.pool), self._context(state.rows), ENTRIES[0]
        buffers.round.load(ByRow(), ByEntry(), size)
        hidden = self._weight.new_zeros(1, self._weight.shape[1])
        self._replay(buffers, ("try", size, context), partial(self._run_read, buffers, size, context, hidden))
        shape = self._shape_of(len(state.rows), None)
        for number in range(min(buffers.num_passes, 2)):  # all later passes are like the second
            self._replay_pass(buffers, shape, number, context)


def _table_rows(rows: Sequence[CapturedRow]) -> list[int]:
    return [row.row.block_table_row for row in rows]
