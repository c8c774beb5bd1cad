"""Base of the drafters whose passes are CUDA graphs.

Entries of all rows are flat, as tokens are in a step of the target. Graphs write them to the head's KV store, either
from the target's hidden states (`read`, `ahead`) or from pending features (`gather`, then `refresh`). The passes of a
round follow, which are the subclass's own. Each pass's result is sent to the host while the device works on. Mostly the
device finds the accepted paths by itself and drafts ahead, before the host knows what was accepted. Without a GPU the
same code runs, and calls what would be replayed.
"""

from __future__ import annotations

import itertools
import warnings
import weakref
from abc import abstractmethod
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, Generic, TypeVar

import numpy as np
import torch
from torch import Tensor

from graft.model import KVCache, NoRoomError, PagePool, TargetRunner, VerifyOutput
from graft.model.captures import CONTEXTS, Captures, Run, context_for, first_line, is_out_of_memory, on_device
from graft.model.kv_cache import PAGE, KVStore
from graft.model.layout import Layout
from graft.model.verified import Step
from graft.progress import Report
from graft.spec_decode.proposers.captured_state import CapturedRow, CapturedState
from graft.spec_decode.proposers.draft_buffers import (
    CHUNKS,
    ENTRIES,
    PENDING,
    ROWS,
    ByEntry,
    ByRow,
    DraftBuffers,
    Numbers,
    Numeric,
    padded,
    ragged,
)
from graft.spec_decode.proposers.eager import EagerDrafter, R
from graft.tree.device import walk as walk_kernels
from graft.tree.device.round import Entries
from graft.tree.tree import DraftTree

_SMALL_TREE = 64  # tokens: smaller trees use the same kernel
_READERS = ("read", "ahead", "gather")  # graphs that read the target's hidden states

B = TypeVar("B", bound=DraftBuffers)


class CapturedDrafter(EagerDrafter[R], Generic[R, B]):
    """Drafts by CUDA graphs. Drafts the next round's first passes ahead if the last round used any.

    A subclass also inherits from the eager drafter of its head, which takes over if nothing can be captured.
    """

    knows_draws = False
    contexts: tuple[int, ...] = CONTEXTS
    max_ahead = 16  # most accepted tokens of a row that the device can process by itself

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
        """Run the head on entries with the target's features [E, taps * H_t], before tokens [E]; within a graph."""

    @abstractmethod
    def _shape_of(self, num_rows: int, keep: int | None) -> Any:
        """The shape of a round's passes, a part of their graphs' keys."""

    @abstractmethod
    def _num_slots(self, shape: Any) -> int:
        """Slots that a round's passes write after a row's entries."""

    @abstractmethod
    def _num_ahead(self, state: CapturedState) -> int:
        """How many passes to launch ahead."""

    @abstractmethod
    def _replay_pass(self, buffers: B, shape: Any, number: int, context: int) -> None:
        """Launch a pass of a round; number: from 0."""

    @abstractmethod
    def _send(self, buffers: B, shape: Any, number: int) -> None:
        """Start to send a pass's result to the host."""

    # The drafter contract

    @property
    def num_setups(self) -> int:
        return self._captures.num_setups

    def open(self, cache: KVCache, texts: Sequence[Sequence[int]] = ()) -> Any:
        captures = self._captures
        if captures.failure is not None:
            return super().open(cache)
        with captures.lock, cache.pool.lock:
            self.store_for(cache.pool)
            # Entries of a prefix from the prefix cache are in the shared pages.
            state = CapturedState(self, cache.pool, [CapturedRow(row, row.length) for row in cache.rows])
            buffers = self._buffers_of(cache.pool)
            for row in cache.rows:  # clear what the row's previous owner left
                for kept in buffers.by_table_row:
                    kept[row.block_table_row].zero_()
            if captures.num_captured == 0:
                try:
                    self._try(state)
                except Exception as error:  # compilers and drivers raise anything
                    if is_out_of_memory(error):
                        raise
                    captures.failure = first_line(error)
                    captures.forget()
                    self._buffers.clear()
                    warnings.warn(f"draft passes cannot be captured in CUDA graphs: {captures.failure}", stacklevel=2)
                    return super().open(cache)
        return state

    def copy_table_row(self, pool: PagePool, source: int, target: int) -> None:
        """Copy what the device keeps for one row of the block tables to another."""
        with self._captures.lock, pool.lock:
            for kept in self._buffers_of(pool).by_table_row:
                kept[target] = kept[source]

    def read(self, state: Any, row: int, verified: VerifyOutput, following: Sequence[int]) -> None:
        if not isinstance(state, CapturedState):
            return super().read(state, row, verified, following)
        own, first = state.rows[row], int(verified.index[0, 0])
        own.root = following[-1]
        with self._captures.lock, state.pool.lock:
            buffers = self._buffers_of(state.pool)
            sources = range(first, first + len(following))
            self._read(state.pool, buffers.chunk, [own], verified, [following], [sources], CHUNKS, CHUNKS[-1])
            state.num_prefetched = 0

    def learn(
        self, state: Any, verified: VerifyOutput, nodes: Sequence[Sequence[int]], tokens: Sequence[Sequence[int]]
    ) -> None:
        if not isinstance(state, CapturedState):
            return super().learn(state, verified, nodes, tokens)
        for row, new in zip(state.rows, tokens, strict=True):
            row.root = new[-1] if new else row.root
        if self._was_drafted_ahead(state, list(map(len, tokens))):
            return None
        if state.is_gathered:
            state.is_gathered = False
            _append(state.rows, tokens)
            return None
        num_ahead = self._num_ahead(state) if state.num_taken else 0
        state.num_prefetched = state.num_taken = 0
        with self._captures.lock, state.pool.lock:
            num_new = [len(row.following) + len(new) for row, new in zip(state.rows, tokens, strict=True)]
            if num_ahead and not self._has_room(state, num_new):
                num_ahead = 0
            if max(num_new) > PENDING:
                self._enter_pending(state)
            sources = _sources(verified, nodes, tokens)
            has_pending = any(row.following for row in state.rows)
            if not has_pending and (num_ahead or max(num_new) > PENDING):
                numbers = self._claim(state).round
                self._read(state.pool, numbers, state.rows, verified, tokens, sources, ENTRIES, PENDING)
            else:
                self._gather(state, verified, list(map(len, tokens)), sources)
                _append(state.rows, tokens)
                if num_ahead:
                    self._enter_pending(state)
            self._make_passes(state, num_ahead)
        return None

    def num_prefetched(self, state: Any) -> int:
        return self._num_made(state) if isinstance(state, CapturedState) else 0

    def gather_ahead(self, state: Any, verified: VerifyOutput) -> None:
        if not isinstance(state, CapturedState):
            return
        state.num_taken = 0  # so `learn` makes no pass ahead either
        self._gather_ahead(state, verified)

    def _gather_ahead(self, state: CapturedState, verified: VerifyOutput) -> None:
        """Keep the features of a plain step: every row accepts its root alone."""
        if verified.step is None or verified.tokens.shape[1] > 1:
            return  # a tree: accepted nodes are not known yet
        with self._captures.lock, state.pool.lock:
            if max(len(row.following) for row in state.rows) == PENDING:
                self._enter_pending(state)
            self._gather(state, verified, [1] * len(state.rows), verified.index.tolist())
            state.num_prefetched = state.num_taken = 0
            state.is_gathered = True

    def draft_ahead(self, state: Any, verified: VerifyOutput, chosen: Tensor) -> None:
        if not isinstance(state, CapturedState) or verified.step is None:
            return
        if not state.num_taken or any(row.following for row in state.rows):
            return self._gather_ahead(state, verified)
        with self._captures.lock, state.pool.lock:
            rooms = [min(depth + 1, self.max_ahead) for depth in verified.depths]
            if not self._has_room(state, rooms):
                return
            self._follow(state, verified, chosen, rooms)
            state.num_drafted_ahead = self.max_ahead
            self._make_passes(state, self._num_ahead(state))

    def warm_up(self, target: TargetRunner, max_rows: int, keep: int | None) -> None:
        cache = target.open(1, num_slots=PAGE)
        try:
            state = self.open(cache)
            verified = target.verify(cache, DraftTree.roots(torch.zeros(1, dtype=torch.int64)))
            if isinstance(state, CapturedState) and verified.step is not None:
                with self._captures.lock, state.pool.lock:
                    self._capture_all(state, verified, max_rows, keep, target.progress)
        finally:
            cache.release()

    # Rounds on the device

    def prepare_pool(self, pool: PagePool) -> int:
        """Make the buffers over a pool, before graphs that use them. Returns a number that changes with them."""
        buffers = self._buffers_of(pool)
        buffers.owner = lambda: None  # whatever the host has drafted is overwritten
        return buffers.number

    def run_entries(self, pool: PagePool, entries: Entries, hidden: Tensor, context: int) -> None:
        """Run the head on the new tokens of a round, within a graph. hidden: [T, F] of the step's tokens."""
        buffers = self._buffers[pool]
        by_row = ByRow(
            table_rows=entries.table_rows, starts=entries.lengths, begins=entries.begins, counts=entries.counts
        )
        by_entry = ByEntry(entries.rows, entries.places, entries.tokens, entries.nodes)
        self._run_entries(buffers, by_row, by_entry, context, hidden)

    # The parts of a round

    def _begin(self, state: CapturedState, keep: int | None, count: int) -> None:
        """Launch those of the first `count` passes that were not launched ahead."""
        if keep != state.kept:
            state.kept, state.shape, state.num_prefetched = keep, None, 0
        if self._num_made(state) == 0:
            state.num_prefetched = 0
            self._make_room(state, [len(row.following) for row in state.rows])
            self._enter_pending(state)
        self._make_passes(state, count)

    def _num_made(self, state: CapturedState) -> int:
        """Launched passes of the coming round; 0 if another state has used the buffers since."""
        buffers = self._buffers.get(state.pool)
        is_own = buffers is not None and buffers.owner() is state and buffers.num_resized == state.pool.num_resized
        return state.num_prefetched if is_own else 0

    def _make_room(self, state: CapturedState, num_new: Sequence[int]) -> None:
        """Allocate pages for new entries of each row and for the drafts after them."""
        drafted = self._num_slots(self._shape(state))
        most = state.pool.max_slots
        for row, count in zip(state.rows, num_new, strict=True):
            needed = row.length + count + drafted
            state.pool.ensure(row.row, needed if most is None else min(needed, most))

    def _has_room(self, state: CapturedState, num_new: Sequence[int]) -> bool:
        """Make room for drafting ahead. Without room nothing is lost: `_begin` raises if it is still missing."""
        try:
            self._make_room(state, num_new)
        except NoRoomError:
            return False
        return True

    def _make_passes(self, state: CapturedState, count: int) -> None:
        """Launch the passes up to `count` that are not launched yet. Entries must be up to date."""
        if state.num_prefetched >= count:
            return
        buffers, shape, context = self._buffers_of(state.pool), self._shape(state), self._context(state)
        while state.num_prefetched < count:
            number = state.num_prefetched
            self._replay_pass(buffers, shape, number, context)
            self._send(buffers, shape, number)
            buffers.was_sent[number].record()
            state.num_prefetched += 1

    def _was_drafted_ahead(self, state: CapturedState, counts: Sequence[int]) -> bool:
        """Whether drafting ahead is valid for these accepted counts. If so, updates the host's state."""
        most, state.num_drafted_ahead = state.num_drafted_ahead, 0
        if max(counts) > most:
            return False
        for row, count in zip(state.rows, counts, strict=True):
            row.length += count
        state.num_taken = 0
        return True

    def _shape(self, state: CapturedState) -> Any:
        if state.shape is None:
            state.shape = self._shape_of(len(state.rows), state.kept)
        return state.shape

    def _context(self, state: CapturedState, num_new: int = 0) -> int:
        return context_for(max(state.lengths, default=0) + max(num_new, state.num_drafted_ahead), self.contexts)

    # Entries

    def _claim(self, state: CapturedState) -> B:
        """The buffers, now owned by this state."""
        buffers = self._buffers_of(state.pool)
        buffers.owner = weakref.ref(state)
        return buffers

    def _enter_pending(self, state: CapturedState) -> None:
        """Send the rows to the device, and run the head on their pending entries."""
        buffers, rows = self._claim(state), state.rows
        following = [row.following for row in rows]
        sources = [
            range(row.row.block_table_row * PENDING, row.row.block_table_row * PENDING + len(row.following))
            for row in rows
        ]
        size = self._load(buffers.round, rows, following, sources, ENTRIES)
        if size == 0:
            return
        self._replay_refresh(buffers, size, self._context(state))
        for row in rows:
            row.length += len(row.following)
            row.following = []

    def _read(
        self,
        pool: PagePool,
        numbers: Numbers,
        rows: Sequence[CapturedRow],
        verified: VerifyOutput,
        tokens: Sequence[Sequence[int]],
        sources: Sequence[Sequence[int]],
        sizes: Sequence[int],
        most: int,
    ) -> None:
        """Run the head on entries from a step's hidden states, at most `most` of a row at once."""
        buffers = self._buffers_of(pool)
        hidden = self._hidden_of(buffers, verified)
        for first in range(0, max(map(len, tokens)), most):
            part, places = ([own[first : first + most] for own in all_rows] for all_rows in (tokens, sources))
            context = context_for(max(row.length for row in rows), self.contexts)
            size = self._load(numbers, rows, part, places, sizes)
            self._replay_read(buffers, numbers, size, context, hidden, verified.step is not None)
            for row, new in zip(rows, part, strict=True):
                row.length += len(new)

    def _gather(
        self,
        state: CapturedState,
        verified: VerifyOutput,
        counts: Sequence[int],
        sources: Sequence[Sequence[int]],
    ) -> None:
        """Store features of a round's nodes, `counts[row]` of each row, as pending."""
        buffers, rows = self._claim(state), state.rows
        hidden = self._hidden_of(buffers, verified)
        targets = [
            row.row.block_table_row * PENDING + len(row.following) + place
            for row, count in zip(rows, counts, strict=True)
            for place in range(count)
        ]
        size = padded(len(targets), ENTRIES)
        flat = list(itertools.chain.from_iterable(sources))
        buffers.round.load(ByRow(), ByEntry(sources=flat, targets=targets), size)
        self._replay_gather(buffers, size, hidden, verified.step is not None)

    def _follow(self, state: CapturedState, verified: VerifyOutput, chosen: Tensor, rooms: Sequence[int]) -> None:
        """Let the device find the accepted paths, and run the head on their tokens.

        rooms: the most accepted tokens of each row, for which places are reserved. Surplus entries are written after
        the real ones in the KV store, where later entries overwrite them.
        """
        step, num_rows = verified.step, len(state.rows)
        assert step is not None
        buffers = self._claim(state)
        entry_rows, places, begins = ragged(rooms)
        size = padded(len(entry_rows), ENTRIES)
        by_entry = ByEntry(entry_rows, places, sources=entry_rows * self.max_ahead + places)
        buffers.round.load(_by_row(state.rows, begins), by_entry, size)
        state.num_prefetched = 0
        self._walk(buffers, step, chosen, num_rows, max(_SMALL_TREE, *verified.counts))
        hidden, context = self._hidden_of(buffers, verified), self._context(state, max(rooms))
        self._replay_ahead(buffers, size, context, hidden)

    def _walk(self, buffers: B, step: Step, chosen: Tensor, num_rows: int, most: int) -> None:
        """Find the accepted paths of a step's first rows on the device. most: tokens of the largest tree."""
        there = ByRow(*(part[:num_rows] for part in buffers.round.by_row(num_rows)))
        with on_device(self._captures.device):
            walk_kernels.follow(
                step.tokens,
                step.parents,
                chosen,
                step.starts,
                step.counts,
                there.starts,
                there.counts,
                there.lengths,
                there.roots,
                buffers.walked[:num_rows],
                buffers.nodes[:num_rows],
                most,
            )

    def _load(
        self,
        numbers: Numbers,
        rows: Sequence[CapturedRow],
        tokens: Sequence[Sequence[int]],
        sources: Sequence[Sequence[int]],
        sizes: Sequence[int],
    ) -> int:
        """Send entries that the host knows. Returns their number with padding."""
        counts = np.array([len(own) for own in tokens])
        entry_rows, places, begins = ragged(counts)
        size = padded(len(places), sizes) if len(places) else 0
        by_row = _by_row(rows, begins)
        by_row = by_row._replace(counts=counts, lengths=np.array(by_row.starts) + counts)
        flat = (list(itertools.chain.from_iterable(parts)) for parts in (tokens, sources))
        numbers.load(by_row, ByEntry(entry_rows, places, *flat), size)
        return size

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

    def _drop(self, keys: Sequence[tuple[Any, ...]]) -> None:
        for key in keys:
            del self._captures.steps[key]
        if keys and not self._captures.steps:
            self._captures.forget()

    def _hidden_of(self, buffers: B, verified: VerifyOutput) -> Tensor:
        """The target's whole buffer of hidden states. Drops graphs that read another one."""
        hidden = verified.hidden
        if verified.step is None:
            return hidden
        whole_buffer = hidden._base
        if whole_buffer is not None and whole_buffer.dim() == 2 and whole_buffer.data_ptr() == hidden.data_ptr():
            hidden = whole_buffer
        readers = (hidden.data_ptr(), hidden.shape, hidden.stride())
        if readers != buffers.readers:
            self._drop([key for key in self._captures.steps if key[0] == buffers.number and key[1] in _READERS])
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
        """is_static: the inputs keep their addresses, so that a graph can be captured."""
        with on_device(self._captures.device):
            step = self._captures.captured((buffers.number, *kind), run, moving) if is_static else run
            step()

    def _replay_refresh(self, buffers: B, size: int, context: int) -> None:
        run = partial(self._run_known, buffers, buffers.round, size, context, None)
        self._replay(buffers, ("refresh", size, context), run)

    def _replay_read(
        self, buffers: B, numbers: Numbers, size: int, context: int, hidden: Tensor, is_static: bool = True
    ) -> None:
        run = partial(self._run_known, buffers, numbers, size, context, hidden)
        self._replay(buffers, ("read", numbers is buffers.chunk, size, context), run, is_static=is_static)

    def _replay_gather(self, buffers: B, size: int, hidden: Tensor, is_static: bool = True) -> None:
        run = partial(self._run_gather, buffers, size, hidden)
        self._replay(buffers, ("gather", size), run, is_static=is_static)

    def _replay_ahead(self, buffers: B, size: int, context: int, hidden: Tensor) -> None:
        run = partial(self._run_ahead, buffers, size, context, hidden)
        self._replay(buffers, ("ahead", size, context), run)

    @torch.no_grad()
    def _run_gather(self, buffers: B, size: int, hidden: Tensor) -> None:
        entries = buffers.round.by_entry(size)
        new = hidden.index_select(0, entries.sources).to(buffers.features.dtype)
        buffers.features.flatten(0, 1).index_copy_(0, entries.targets.long(), new)

    @torch.no_grad()
    def _run_ahead(self, buffers: B, size: int, context: int, hidden: Tensor) -> None:
        entries = buffers.round.by_entry(size)
        tokens, nodes = (table.view(-1).index_select(0, entries.sources) for table in (buffers.walked, buffers.nodes))
        sources = nodes.clamp(max=len(hidden) - 1)  # nodes after a row's last token may be left from an earlier step
        entries = entries._replace(tokens=tokens, sources=sources)
        self._run_entries(buffers, buffers.round.by_row(), entries, context, hidden)

    @torch.no_grad()
    def _run_known(self, buffers: B, numbers: Numbers, size: int, context: int, hidden: Tensor | None) -> None:
        self._run_entries(buffers, numbers.by_row(), numbers.by_entry(size), context, hidden)

    def _run_entries(self, buffers: B, by_row: ByRow, entries: ByEntry, context: int, hidden: Tensor | None) -> None:
        """Run the head on entries. hidden: where their features are; among the pending ones if None."""
        features = (buffers.features.flatten(0, 1) if hidden is None else hidden).index_select(0, entries.sources)
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
        self._enter(buffers, features.to(buffers.features.dtype), entries.tokens, by_row, layout)

    def _capture_passes(self, buffers: B, shape: Any, context: int) -> None:
        """Capture the first pass and the second, which all later ones are like."""
        for number in range(min(len(buffers.was_sent), 2)):
            self._replay_pass(buffers, shape, number, context)

    def _try(self, state: CapturedState) -> None:
        """Capture the graphs of most rounds, over padding, to see whether the head can be captured."""
        buffers, context = self._buffers_of(state.pool), self._context(state)
        for size in ENTRIES[:4]:
            buffers.round.load(ByRow(), ByEntry(), size)
            self._replay_refresh(buffers, size, context)
        self._capture_passes(buffers, self._shape(state), context)

    def _capture_all(
        self,
        state: CapturedState,
        verified: VerifyOutput,
        max_rows: int,
        keep: int | None,
        progress: Callable[[Report], None],
    ) -> None:
        """Capture the graphs of all rounds of short texts, over padding."""
        assert verified.step is not None
        buffers, context = self._claim(state), self._context(state)  # other states draft again
        hidden, chosen = self._hidden_of(buffers, verified), torch.zeros_like(verified.step.tokens, dtype=torch.int64)
        most_rows = min(padded(max_rows, ROWS), buffers.max_rows)
        all_rows = [*(rows for rows in ROWS if rows < most_rows), most_rows]
        most = min(most_rows * self.max_ahead, buffers.max_entries)
        sizes = [size for size in ENTRIES if size <= buffers.max_entries]
        sizes += range(2 * sizes[-1], most + 1, sizes[-1]) if sizes[-1] == ENTRIES[-1] else []
        total = len(sizes) + len(all_rows)
        for number, size in enumerate(sizes):
            progress(Report("graphs", number, total, f"drafter, {size} entries"))
            buffers.round.load(ByRow(), ByEntry(), size)
            self._replay_refresh(buffers, size, context)
            self._replay_gather(buffers, size, hidden)
            self._replay_read(buffers, buffers.round, size, context, hidden)
            self._replay_ahead(buffers, size, context, hidden)
        for size in CHUNKS:
            buffers.chunk.load(ByRow(), ByEntry(), size)
            self._replay_read(buffers, buffers.chunk, size, context, hidden)
        for most in (_SMALL_TREE, 2 * _SMALL_TREE):  # kernels outside of graphs
            self._walk(buffers, verified.step, chosen, 1, most)
        for number, rows in enumerate(all_rows, start=len(sizes)):
            progress(Report("graphs", number, total, f"drafter, {rows} rows"))
            self._capture_passes(buffers, self._shape_of(rows, keep), context)


def _by_row(rows: Sequence[CapturedRow], begins: Numeric) -> ByRow:
    return ByRow(
        [row.row.block_table_row for row in rows], [row.root for row in rows], [row.length for row in rows], begins
    )


def _append(rows: Sequence[CapturedRow], tokens: Sequence[Sequence[int]]) -> None:
    for row, new in zip(rows, tokens, strict=True):
        row.following.extend(new)


def _sources(
    verified: VerifyOutput, nodes: Sequence[Sequence[int]], tokens: Sequence[Sequence[int]]
) -> list[list[int]]:
    """By row, the step's tokens whose features the new entries take."""
    index = verified.index.numpy()
    return [
        index[row, [0, *path][: len(new)]].tolist() for row, (path, new) in enumerate(zip(nodes, tokens, strict=True))
    ]
