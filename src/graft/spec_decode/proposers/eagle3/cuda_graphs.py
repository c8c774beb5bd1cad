"""CUDA graphs of the EAGLE-3 drafter: `CapturedDrafter` runs every draft pass as one graph; beams stay on the device.

Entries of all rows lie one behind the other, as tokens do in a step of the target. They enter the head's KV store by
graphs that read the target's hidden states (`read`, `ahead`) or features that wait (`gather`, then `refresh`). Then
`root` proposes the first level of the trees and `expand`, repeatedly, the next. A level is sent to the host while the
device goes on. Mostly the device finds the accepted paths by itself and drafts ahead, so that it works on the next
trees before the host knows the outcome of the last. Without a GPU the same code runs, and calls what would be replayed.
"""

from __future__ import annotations

import itertools
import warnings
import weakref
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from graft.model import KVCache, NoRoomError, PagePool, Row, TargetRunner, VerifyOutput
from graft.model.attention import KernelStep, Layout
from graft.model.captures import (
    CONTEXTS,
    Captures,
    Event,
    Run,
    context_for,
    first_line,
    is_shortage,
    on_device,
    on_host,
    whole,
)
from graft.model.kernels import eagle3 as eagle3_kernels
from graft.model.kv_cache import PAGE, KVStore
from graft.model.verified import Step
from graft.progress import Report
from graft.spec_decode.candidates import Level
from graft.spec_decode.proposers.drafter import TreeSettings
from graft.spec_decode.proposers.eagle3.drafter import Eagle3Drafter
from graft.spec_decode.proposers.eagle3.fused_head import FastHead
from graft.spec_decode.proposers.eagle3.head import Eagle3Head
from graft.spec_decode.tree import DraftTree

_ROWS = (1, 2, 4, 8, 16, 24, 32, 48, 64, 96, 128)  # that graphs are captured for
_ENTRIES = (1, 2, 4, 8, 16, 32, 64, 128, 256, 512)
_CHUNKS = (64, 128, 256, 512)  # entries of prompts
_FEW_ROWS, _MOST_BEAMS = 8, 128  # up to so many rows all beams are expanded; then so many in all
_PENDING = 32  # entries of a row that wait for a draft; then they are run without one
_AHEAD = 4  # levels that are drafted ahead where drafting may stop after any of them
_MAX_DRAFTED_AHEAD = 16  # accepted tokens of a row that the device can process by itself in a round
_SMALL_TREE = 64  # tokens: for smaller ones no kernel is compiled
_TRANSFERS = 8  # of numbers, that may be under way
_READERS = ("read", "ahead", "gather")  # graphs that read the target's hidden states

Numeric = np.ndarray | Sequence[int]


class ByRow(NamedTuple):
    """Inputs of a graph, [R + 1] int32; what is behind the rows in use is zero, and so belongs to line 0."""

    lines: Any
    starts: Any  # entries of each row before those to be run
    begins: Any  # which of the entries to be run is the row's first
    counts: Any = ()  # how many they are
    lengths: Any = ()  # entries with them


class ByEntry(NamedTuple):
    """Inputs of a graph, [E] int32."""

    rows: Any = ()
    places: Any = ()  # among the row's entries to be run
    tokens: Any = ()  # the token after each
    sources: Any = ()  # where its features are: among hidden states, in `features`, or by the walk's tables
    targets: Any = ()  # where in `features` they are to wait


class Numbers:
    """Static int32 inputs of CUDA graphs, taken from the host to the device in one transfer."""

    def __init__(self, max_rows: int, max_entries: int, device: torch.device) -> None:
        self._num_by_row = whole(max_rows + 1)
        size = len(ByRow._fields) * self._num_by_row + len(ByEntry._fields) * whole(max_entries)
        self._there = torch.zeros(size, dtype=torch.int32, device=device)
        # Several, so that the host need not wait for the transfer before.
        self._here = [(on_host((size,), torch.int32, device), Event(device)) for _ in range(_TRANSFERS)]
        self._turns = itertools.cycle(self._here)

    def by_row(self, rows: int | None = None) -> ByRow:
        """On the device, for so many rows, or for all there can be; and one more, which has nothing."""
        end = self._num_by_row if rows is None else rows + 1
        return ByRow(*(part[:end] for part in self._rows_of(self._there)))

    def by_entry(self, size: int) -> ByEntry:
        """On the device, where `load` puts so many entries."""
        return ByEntry(*(part[:size] for part in self._entries_of(self._there, size)))

    def load(self, by_row: ByRow, by_entry: ByEntry, size: int) -> None:
        """Sends rows and entries, which are padded to `size` with entries of the first row that is nobody's."""
        here, loaded = next(self._turns)
        loaded.wait()
        array = here.numpy()
        end = len(ByRow._fields) * self._num_by_row + len(ByEntry._fields) * whole(size)
        array[:end] = 0
        entries = self._entries_of(array, size)
        entries[0][len(by_entry.rows) :] = len(by_row.lines)
        for parts, given in ((self._rows_of(array), by_row), (entries, by_entry)):
            for part, numbers in zip(parts, given, strict=True):
                part[: len(numbers)] = numbers
        self._there[:end].copy_(here[:end], non_blocking=True)
        loaded.record()

    def _rows_of(self, numbers: Any) -> Any:
        return numbers[: len(ByRow._fields) * self._num_by_row].reshape(len(ByRow._fields), self._num_by_row)

    def _entries_of(self, numbers: Any, size: int) -> Any:
        start = len(ByRow._fields) * self._num_by_row
        return numbers[start : start + len(ByEntry._fields) * whole(size)].reshape(len(ByEntry._fields), whole(size))


class DraftBuffers:
    """All static tensors of a drafter's graphs over one pool of pages."""

    def __init__(self, fast: FastHead, settings: TreeSettings, pool: PagePool, store: KVStore, number: int) -> None:
        """number: its own, in the keys of its graphs."""
        weight, device = fast.head.fc.weight, pool.device
        num_lines, num_passes = pool.num_lines, settings.depth + 1
        max_rows = padded(num_lines, _ROWS)
        sizes = [(rows, num_beams(rows, settings.topk)) for rows in (*_ROWS, max_rows) if rows <= max_rows]
        most = max(rows * beams for rows, beams in sizes)
        self.number, self.num_resized = number, pool.num_resized
        self.tables = pool.tables
        keys, values = store.stored
        self.keys, self.values = keys[0], values[0]
        self.rotary = fast.rotary(pool.tables.shape[1] * PAGE)
        # By line of the block tables: features of entries that wait, and the head's output at the last entry.
        self.features = weight.new_zeros(num_lines, _PENDING, weight.shape[1])
        self.root = weight.new_zeros(num_lines, weight.shape[0])
        max_entries = padded(max_rows * _PENDING, _ENTRIES)
        self.max_rows, self.max_entries = max_rows, max_entries
        self.round = Numbers(max_rows, max_entries, device)
        self.chunk = Numbers(1, _CHUNKS[-1], device)
        walk_shape = (max_rows + 1, _MAX_DRAFTED_AHEAD)
        self.walked = torch.zeros(walk_shape, dtype=torch.int32, device=device)  # the tokens of each row's round
        self.nodes = torch.zeros(walk_shape, dtype=torch.int32, device=device)  # of the step, that they come after
        # Nobody's: entries with the target's features see all that stands before them.
        self.paths = torch.zeros(max(max_entries, _CHUNKS[-1]), 1, dtype=torch.int32, device=device)
        self.hidden = weight.new_zeros(most, weight.shape[0])  # the head's outputs at the beams
        self.beams = eagle3_kernels.Beams.make(most, 1, num_passes, device)
        # By beams of a row: the row of each beam, each row's first beam, and how many it has.
        self.rows_of = {
            beams: (
                torch.arange(max_rows, device=device).repeat_interleave(beams).int(),
                (torch.arange(max_rows, device=device) * beams).int(),
                torch.full((max_rows,), beams, dtype=torch.int32, device=device),
            )
            for beams in range(1, settings.topk + 1)
        }
        num_numbers = num_passes * 3 * max(rows * beams * beams for rows, beams in sizes)
        self._levels = torch.zeros(num_numbers, dtype=torch.int64, device=device)  # see `eagle3_kernels.spread`
        self._sent = on_host((num_numbers,), torch.int64, device)
        self.was_sent = [Event(device) for _ in range(num_passes)]
        self._shaped: dict[Shape, Levels] = {}
        # Whose rows `round` and the beams are; others draft anew.
        self.owner: Callable[[], CapturedState | None] = lambda: None
        self.readers: tuple[Any, ...] = ()  # the address and shape of the hidden states that graphs read

    def levels(self, shape: Shape) -> Levels:
        if shape not in self._shaped:
            num_passes = len(self.was_sent)
            size = 3 * num_passes * shape.rows * shape.count(1)
            there, here = (part[:size].view(num_passes, 3, -1) for part in (self._levels, self._sent))
            self._shaped[shape] = Levels(there, list(there.unbind()), list(here.unbind()))
        return self._shaped[shape]

    def take(self, other: DraftBuffers) -> None:
        """Goes on with what another has kept of the rows."""
        for own, old in ((self.features, other.features), (self.root, other.root)):
            own[: len(old)] = old


class Levels(NamedTuple):
    """The levels of a round, [passes, 3, nodes] on the device; and of each its part there, and on the host."""

    whole: Tensor
    there: list[Tensor]
    here: list[Tensor]


class Shape(NamedTuple):
    """What the levels of a round look like."""

    rows: int  # with padding
    beams: int  # of a row
    keep: int | None  # how many nodes of a level stay; all if None

    def count(self, number: int) -> int:
        """Nodes of a row's level: 0 is the first, all others are alike."""
        most = self.beams if number == 0 else self.beams * self.beams
        return most if self.keep is None else min(max(self.keep, self.beams), most)


@dataclass(eq=False)
class CapturedRow:
    """What the drafter keeps of one row; the features of entries that wait are on the device."""

    row: Row
    length: int  # entries in the head's KV store
    following: list[int] = field(default_factory=list)  # of entries that are yet to be run, the token after each


@dataclass(eq=False)
class CapturedState:
    """Draft state of one batch."""

    drafter: CapturedDrafter
    pool: PagePool
    rows: list[CapturedRow]
    kept: int | None = None  # how many nodes of a level were asked for last
    num_prefetched: int = 0  # levels of the coming round that are made or being made
    num_taken: int = 0  # levels of the last round that were asked for
    num_drafted_ahead: int = 0  # most accepted tokens of a row for which the drafts ahead are valid; 0: none
    is_gathered: bool = False  # whether the features of the step under way, of a root a row, wait already
    shape: Shape | None = None  # of the levels that were asked for last

    @property
    def lengths(self) -> list[int]:
        return [row.length for row in self.rows]

    def keeping(self, rows: Sequence[int]) -> CapturedState:
        return self._with_rows([self.rows[row] for row in rows])

    def joining(self, other: CapturedState) -> CapturedState:
        return self._with_rows(self.rows + other.rows)

    def copy_row(self, source: int, target: int, row: Row) -> None:
        own = self.rows[source]
        self.drafter.copy_line(self.pool, own.row.line, row.line)
        self.rows[target] = CapturedRow(row, own.length, list(own.following))
        self.num_prefetched = self.num_drafted_ahead = 0

    def _with_rows(self, rows: list[CapturedRow]) -> CapturedState:
        """A state of other rows, for which nothing is drafted yet."""
        return replace(self, rows=rows, num_prefetched=0, num_drafted_ahead=0, is_gathered=False, shape=None)


class CapturedDrafter(Eagle3Drafter):
    """EAGLE-3 drafter by CUDA graphs. Drafts the next round's first levels ahead if the last round used any."""

    contexts: tuple[int, ...] = CONTEXTS

    def __init__(self, head: Eagle3Head, settings: TreeSettings | None = None) -> None:
        """head: one for which `fused_head.why_not` is None."""
        super().__init__(head, settings)
        self.fast = FastHead(head)
        self._captures = Captures(head.fc.weight.device)
        self._buffers: weakref.WeakKeyDictionary[PagePool, DraftBuffers] = weakref.WeakKeyDictionary()
        self._numbers = itertools.count()  # of buffers
        self._stops: Sequence[int] | None = None  # of the last levels

    @property
    def num_setups(self) -> int:
        return self._captures.num_setups

    def open(self, cache: KVCache) -> Any:
        captures = self._captures
        if captures.failure is not None:
            return super().open(cache)
        with captures.lock, cache.pool.lock:
            self.share(cache.pool)
            # A row whose beginning was known to others has their entries.
            state = CapturedState(self, cache.pool, [CapturedRow(row, row.length) for row in cache.rows])
            buffers = self._buffers_of(cache.pool)
            for row in cache.rows:  # who had the line before is nothing to a text without a prompt to read
                buffers.root[row.line].zero_()
            if captures.num_captured == 0:
                try:
                    self._try(state)
                except Exception as error:  # whatever a compiler or a driver may raise
                    if is_shortage(error):
                        raise
                    captures.failure = first_line(error)
                    captures.forget()
                    self._buffers.clear()
                    warnings.warn(f"draft passes cannot be captured in CUDA graphs: {captures.failure}", stacklevel=2)
                    return super().open(cache)
        return state

    def copy_line(self, pool: PagePool, source: int, target: int) -> None:
        """Copies what is kept on the device for one line to another."""
        with self._captures.lock, pool.lock:
            buffers = self._buffers_of(pool)
            for kept in (buffers.features, buffers.root):
                kept[target] = kept[source]

    def read(self, state: Any, row: int, verified: VerifyOutput, following: Sequence[int]) -> None:
        if not isinstance(state, CapturedState):
            return super().read(state, row, verified, following)
        own, first = state.rows[row], int(verified.index[0, 0])
        with self._captures.lock, state.pool.lock:
            buffers = self._buffers_of(state.pool)
            sources = range(first, first + len(following))
            self._read(state.pool, buffers.chunk, [own], verified, [following], [sources], _CHUNKS, _CHUNKS[-1])
            state.num_prefetched = 0

    def learn(
        self, state: Any, verified: VerifyOutput, nodes: Sequence[Sequence[int]], tokens: Sequence[Sequence[int]]
    ) -> None:
        if not isinstance(state, CapturedState):
            return super().learn(state, verified, nodes, tokens)
        if self._was_drafted_ahead(state, list(map(len, tokens))):
            return None
        if state.is_gathered:
            state.is_gathered = False
            for row, new in zip(state.rows, tokens, strict=True):
                row.following.extend(new)
            return None
        num_ahead = self._num_ahead(state) if state.num_taken else 0
        state.num_prefetched = state.num_taken = 0
        with self._captures.lock, state.pool.lock:
            num_new = [len(row.following) + len(new) for row, new in zip(state.rows, tokens, strict=True)]
            if num_ahead and not self._has_room(state, num_new):
                num_ahead = 0
            if max(num_new) > _PENDING:
                self._enter_waiting(state)
            sources = _sources(verified, nodes, tokens)
            is_waiting = any(row.following for row in state.rows)
            if not is_waiting and (num_ahead or max(num_new) > _PENDING):
                numbers = self._claim(state).round
                self._read(state.pool, numbers, state.rows, verified, tokens, sources, _ENTRIES, _PENDING)
            else:
                self._gather(state, verified, list(map(len, tokens)), sources)
                for row, new in zip(state.rows, tokens, strict=True):
                    row.following.extend(new)
                if num_ahead:
                    self._enter_waiting(state)
            self._make_levels(state, state.kept, num_ahead)
        return None

    def num_prefetched(self, state: Any) -> int:
        return self._num_made(state) if isinstance(state, CapturedState) else 0

    def gather_ahead(self, state: Any, verified: VerifyOutput) -> None:
        if not isinstance(state, CapturedState) or verified.step is None or verified.tokens.shape[1] > 1:
            return  # which nodes are accepted is not known yet
        with self._captures.lock, state.pool.lock:
            if max(len(row.following) for row in state.rows) == _PENDING:
                self._enter_waiting(state)
            self._gather(state, verified, [1] * len(state.rows), verified.index.tolist())
            state.num_prefetched = state.num_taken = 0
            state.is_gathered = True

    def draft_ahead(self, state: Any, verified: VerifyOutput, chosen: Tensor) -> None:
        if not isinstance(state, CapturedState) or verified.step is None:
            return
        if not state.num_taken or any(row.following for row in state.rows):
            return self.gather_ahead(state, verified)
        with self._captures.lock, state.pool.lock:
            rooms = [min(depth + 1, _MAX_DRAFTED_AHEAD) for depth in verified.depths]
            if not self._has_room(state, rooms):
                return
            self._follow(state, verified, chosen, rooms)
            state.num_drafted_ahead = _MAX_DRAFTED_AHEAD
            self._make_levels(state, state.kept, self._num_ahead(state))

    def levels(
        self, state: Any, roots: Tensor, keep: int | None = None, stops: Sequence[int] | None = None
    ) -> Iterator[Level]:
        if not isinstance(state, CapturedState):
            yield from super().levels(state, roots, keep, stops)
            return
        self._stops = stops
        last = self.settings.depth
        for number in range(last + 1):
            # The device drafts the next level while the host adds this one to the candidates. If it is not wanted, it
            # is done by the time the tree is.
            ahead = min(number + 1, last) if stops is None else next((stop for stop in stops if stop >= number), last)
            with self._captures.lock, state.pool.lock:
                self._begin(state, keep, ahead + 1)
                state.num_taken += 1
                level = self._sent(state, number)
            yield level

    # The parts of a round

    def _begin(self, state: CapturedState, keep: int | None, count: int) -> None:
        """Starts the first `count` levels, as far as they were not drafted ahead."""
        if self._num_made(state) == 0 or state.kept != keep:
            state.num_prefetched = 0
            self._make_room(state, [len(row.following) for row in state.rows])
            self._enter_waiting(state)
        self._make_levels(state, keep, count)

    def _num_made(self, state: CapturedState) -> int:
        """Levels of the coming round that are made: none if others have used the buffers since."""
        buffers = self._buffers.get(state.pool)
        is_own = buffers is not None and buffers.owner() is state and buffers.num_resized == state.pool.num_resized
        return state.num_prefetched if is_own else 0

    def _make_room(self, state: CapturedState, num_new: Sequence[int]) -> None:
        """Pages for new entries of each row, and for those drafted behind them."""
        drafted = self.settings.depth * self._shape(state).beams
        most = state.pool.max_slots
        for row, count in zip(state.rows, num_new, strict=True):
            needed = row.length + count + drafted
            state.pool.ensure(row.row, needed if most is None else min(needed, most))

    def _has_room(self, state: CapturedState, num_new: Sequence[int]) -> bool:
        """Makes room for drafting ahead. Where there is none, nothing is lost: whoever asks for levels will see."""
        try:
            self._make_room(state, num_new)
        except NoRoomError:
            return False
        return True

    def _make_levels(self, state: CapturedState, keep: int | None, count: int) -> None:
        """Launches the passes of the first `count` levels that are not launched yet; entries must be up to date."""
        state.kept = keep
        if state.num_prefetched >= count:
            return
        buffers, shape, context = self._buffers_of(state.pool), self._shape(state), self._context(state)
        levels = buffers.levels(shape)
        while state.num_prefetched < count:
            number = state.num_prefetched
            if number == 0:
                self._replay_root(buffers, shape)
            else:
                self._expand(buffers, shape, context)
            levels.here[number].copy_(levels.there[number], non_blocking=True)
            buffers.was_sent[number].record()
            state.num_prefetched += 1

    def _num_ahead(self, state: CapturedState) -> int:
        """How many levels to draft ahead."""
        return min(state.num_taken, _AHEAD) if self._stops is None or self._stops else self.settings.depth + 1

    def _was_drafted_ahead(self, state: CapturedState, counts: Sequence[int]) -> bool:
        """Whether draft-ahead covers a round with these accepted counts; then only the host's state is updated."""
        most, state.num_drafted_ahead = state.num_drafted_ahead, 0
        if max(counts) > most:
            return False
        for row, count in zip(state.rows, counts, strict=True):
            row.length += count
        state.num_taken = 0
        return True

    def _sent(self, state: CapturedState, number: int) -> Level:
        buffers, shape = self._buffers[state.pool], self._shape(state)
        buffers.was_sent[number].wait()
        numbers = buffers.levels(shape).here[number].clone()  # the next round writes over it
        nodes, count = numbers.shape[1], shape.count(number)
        size, strides = (len(state.rows), count), (count, 1)
        chances = numbers.view(torch.float32)  # q and paths share the last part
        return Level(
            numbers.as_strided(size, strides, 0),
            numbers.as_strided(size, strides, nodes),
            chances.as_strided(size, strides, 4 * nodes),
            chances.as_strided(size, strides, 5 * nodes),
        )

    def _shape(self, state: CapturedState) -> Shape:
        if state.shape is None or state.shape.keep != state.kept:
            rows = padded(len(state.rows), _ROWS)
            state.shape = Shape(rows, num_beams(rows, self.settings.topk, state.kept), state.kept)
        return state.shape

    def _context(self, state: CapturedState, num_new: int = 0) -> int:
        return context_for(max(state.lengths, default=0) + max(num_new, state.num_drafted_ahead), self.contexts)

    # Entries

    def _claim(self, state: CapturedState) -> DraftBuffers:
        """The buffers, whose numbers and beams are the state's from now on."""
        buffers = self._buffers_of(state.pool)
        buffers.owner = weakref.ref(state)
        return buffers

    def _enter_waiting(self, state: CapturedState) -> None:
        """Sends the rows to the device, and runs the head on the entries whose true features have come in."""
        buffers, rows = self._claim(state), state.rows
        following = [row.following for row in rows]
        sources = [range(row.row.line * _PENDING, row.row.line * _PENDING + len(row.following)) for row in rows]
        size = self._load(buffers.round, rows, following, sources, _ENTRIES)
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
        """Runs the head on entries whose features are a step's hidden states; at most so many of a row at once."""
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
        """Lets the features of a round's nodes, `counts[row]` of each row, wait for the next draft."""
        buffers, rows = self._claim(state), state.rows
        hidden = self._hidden_of(buffers, verified)
        targets = [
            row.row.line * _PENDING + len(row.following) + place
            for row, count in zip(rows, counts, strict=True)
            for place in range(count)
        ]
        size = padded(len(targets), _ENTRIES)
        flat = list(itertools.chain.from_iterable(sources))
        buffers.round.load(ByRow((), (), ()), ByEntry(sources=flat, targets=targets), size)
        self._replay_gather(buffers, size, hidden, verified.step is not None)

    def _follow(self, state: CapturedState, verified: VerifyOutput, chosen: Tensor, rooms: Sequence[int]) -> None:
        """Lets the device find the accepted paths, and runs the head on their tokens.

        The host knows how many there can be, and so where each row's stand. What is behind the real ones is written
        behind them in the KV store, where later entries are written over it.
        """
        step, num_rows = verified.step, len(state.rows)
        assert step is not None
        buffers = self._claim(state)
        entry_rows, places, begins = ragged(rooms)
        size = padded(len(entry_rows), _ENTRIES)
        by_row = ByRow([row.row.line for row in state.rows], state.lengths, begins)
        by_entry = ByEntry(entry_rows, places, sources=entry_rows * _MAX_DRAFTED_AHEAD + places)
        buffers.round.load(by_row, by_entry, size)
        state.num_prefetched = 0
        self._walk(buffers, step, chosen, num_rows, max(_SMALL_TREE, *verified.counts))
        hidden, context = self._hidden_of(buffers, verified), self._context(state, max(rooms))
        self._replay_ahead(buffers, size, context, hidden)

    def _walk(self, buffers: DraftBuffers, step: Step, chosen: Tensor, num_rows: int, most: int) -> None:
        """The device finds the accepted paths of a step's first rows, whose trees have at most so many tokens."""
        there = buffers.round.by_row(num_rows)
        with on_device(self._captures.device):
            eagle3_kernels.follow(
                step.tokens,
                step.parents,
                chosen,
                step.starts,
                step.counts,
                there.starts[:num_rows],
                there.counts[:num_rows],
                there.lengths[:num_rows],
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
        """Sends entries that the host knows. Returns how many they are with padding."""
        counts, starts = np.array([len(own) for own in tokens]), np.array([row.length for row in rows])
        entry_rows, places, begins = ragged(counts)
        size = padded(len(places), sizes) if len(places) else 0
        by_row = ByRow([row.row.line for row in rows], starts, begins, counts, starts + counts)
        flat = (list(itertools.chain.from_iterable(parts)) for parts in (tokens, sources))
        numbers.load(by_row, ByEntry(entry_rows, places, *flat), size)
        return size

    # Graphs

    def _buffers_of(self, pool: PagePool) -> DraftBuffers:
        """The buffers over a pool, whose block tables the device has then; graphs over moved memory are dropped."""
        buffers = self._buffers.get(pool)
        if buffers is None or buffers.num_resized != pool.num_resized:
            new = DraftBuffers(self.fast, self.settings, pool, self.share(pool), next(self._numbers))
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

    def _hidden_of(self, buffers: DraftBuffers, verified: VerifyOutput) -> Tensor:
        """All of the target's hidden states, of which a step's may be a part; graphs that read others are dropped."""
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
        buffers: DraftBuffers,
        kind: tuple[Any, ...],
        run: Run,
        moving: Sequence[Tensor] = (),
        is_static: bool = True,
    ) -> None:
        """is_static: else what is read will not be at the same place another time."""
        with on_device(self._captures.device):
            step = self._captures.captured((buffers.number, *kind), run, moving) if is_static else run
            step()

    def _replay_refresh(self, buffers: DraftBuffers, size: int, context: int) -> None:
        run = partial(self._run_known, buffers, buffers.round, size, context, None)
        self._replay(buffers, ("refresh", size, context), run)

    def _replay_read(
        self, buffers: DraftBuffers, numbers: Numbers, size: int, context: int, hidden: Tensor, is_static: bool = True
    ) -> None:
        run = partial(self._run_known, buffers, numbers, size, context, hidden)
        self._replay(buffers, ("read", numbers is buffers.chunk, size, context), run, is_static=is_static)

    def _replay_gather(self, buffers: DraftBuffers, size: int, hidden: Tensor, is_static: bool = True) -> None:
        run = partial(self._run_gather, buffers, size, hidden)
        self._replay(buffers, ("gather", size), run, is_static=is_static)

    def _replay_ahead(self, buffers: DraftBuffers, size: int, context: int, hidden: Tensor) -> None:
        run = partial(self._run_ahead, buffers, size, context, hidden)
        self._replay(buffers, ("ahead", size, context), run)

    def _replay_root(self, buffers: DraftBuffers, shape: Shape) -> None:
        self._replay(buffers, ("root", shape), partial(self._run_root, buffers, shape))

    def _expand(self, buffers: DraftBuffers, shape: Shape, context: int) -> None:
        # Trial runs before the capture move the beams on.
        moving = (buffers.hidden, *vars(buffers.beams).values())
        self._replay(buffers, ("expand", shape, context), partial(self._run_expand, buffers, shape, context), moving)

    @torch.no_grad()
    def _run_gather(self, buffers: DraftBuffers, size: int, hidden: Tensor) -> None:
        entries = buffers.round.by_entry(size)
        new = hidden.index_select(0, entries.sources).to(buffers.features.dtype)
        buffers.features.flatten(0, 1).index_copy_(0, entries.targets.long(), new)

    @torch.no_grad()
    def _run_ahead(self, buffers: DraftBuffers, size: int, context: int, hidden: Tensor) -> None:
        entries = buffers.round.by_entry(size)
        tokens, nodes = (table.view(-1).index_select(0, entries.sources) for table in (buffers.walked, buffers.nodes))
        sources = nodes.clamp(max=len(hidden) - 1)  # what is behind a row's last token may be of an earlier step
        entries = entries._replace(tokens=tokens, sources=sources)
        self._run_entries(buffers, buffers.round.by_row(), entries, context, hidden)

    @torch.no_grad()
    def _run_known(
        self, buffers: DraftBuffers, numbers: Numbers, size: int, context: int, hidden: Tensor | None
    ) -> None:
        self._run_entries(buffers, numbers.by_row(), numbers.by_entry(size), context, hidden)

    def _run_entries(
        self, buffers: DraftBuffers, by_row: ByRow, entries: ByEntry, context: int, hidden: Tensor | None
    ) -> None:
        """Runs the head on entries with the target's features; keeps the output at each row's last entry, if any.

        hidden: that have the features; those that wait if None.
        """
        features = (buffers.features.flatten(0, 1) if hidden is None else hidden).index_select(0, entries.sources)
        layout = Layout(
            rows=entries.rows,
            places=entries.places,
            depths=entries.places,
            paths=buffers.paths[: len(entries.rows)],
            starts=by_row.begins,
            counts=by_row.counts,
            lengths=by_row.starts,
            lines=by_row.lines,
            tables=buffers.tables,
            max_context=context,
        )
        fused = self.head.fuse(features.to(buffers.features.dtype))
        outputs = self._run_head(buffers, entries.tokens, fused, None, layout)
        eagle3_kernels.keep_last(outputs, by_row.begins, by_row.counts, by_row.lines, buffers.root)

    @torch.no_grad()
    def _run_root(self, buffers: DraftBuffers, shape: Shape) -> None:
        lines = buffers.round.by_row(shape.rows).lines[: shape.rows]
        root = buffers.root.index_select(0, lines)
        buffers.hidden[: shape.rows * shape.beams].unflatten(0, (-1, shape.beams))[:, 0] = root
        self._spread(buffers, shape, root, is_first=True)

    @torch.no_grad()
    def _run_expand(self, buffers: DraftBuffers, shape: Shape, context: int) -> None:
        count, beams = shape.rows * shape.beams, buffers.beams.first(shape.rows, shape.beams)
        by_row = buffers.round.by_row(shape.rows)
        rows, starts, counts = buffers.rows_of[shape.beams]
        layout = Layout(
            rows=rows[:count],
            places=beams.cache_places.flatten(),
            depths=beams.depths.flatten(),
            paths=beams.entries.flatten(0, 1),
            starts=starts[: shape.rows],
            counts=counts[: shape.rows],
            lengths=by_row.lengths[: shape.rows],
            lines=by_row.lines[: shape.rows],
            tables=buffers.tables,
            max_context=context,
        )
        hidden = buffers.hidden[:count]
        outputs = self._run_head(buffers, beams.tokens.flatten(), hidden, beams.origins.flatten(), layout)
        hidden.copy_(outputs)
        self._spread(buffers, shape, outputs, is_first=False)

    def _run_head(
        self, buffers: DraftBuffers, tokens: Tensor, hidden: Tensor, origins: Tensor | None, layout: Layout
    ) -> Tensor:
        step = KernelStep(layout)
        return self.fast.run(tokens, hidden, origins, step, buffers.keys, buffers.values, buffers.rotary)

    def _spread(self, buffers: DraftBuffers, shape: Shape, outputs: Tensor, is_first: bool) -> None:
        best = self.fast.likeliest(outputs, shape.beams)
        beams = buffers.beams.first(shape.rows, shape.beams)
        eagle3_kernels.spread(*best, self.head.d2t, beams, buffers.levels(shape).whole, shape.keep, is_first)

    def _try(self, state: CapturedState) -> None:
        """Captures graphs of most rounds, to see whether the head can be captured; over entries that are nobody's."""
        buffers, shape, context = self._buffers_of(state.pool), self._shape(state), self._context(state)
        for size in _ENTRIES[:4]:
            buffers.round.load(ByRow((), (), ()), ByEntry(), size)
            self._replay_refresh(buffers, size, context)
        self._replay_root(buffers, shape)
        self._expand(buffers, shape, context)

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

    def _capture_all(
        self,
        state: CapturedState,
        verified: VerifyOutput,
        max_rows: int,
        keep: int | None,
        progress: Callable[[Report], None],
    ) -> None:
        """Captures the graphs of all rounds of short texts, over entries that are nobody's."""
        assert verified.step is not None
        buffers, context = self._claim(state), self._context(state)  # whoever had drafted, drafts anew
        hidden, chosen = self._hidden_of(buffers, verified), torch.zeros_like(verified.step.tokens, dtype=torch.int64)
        most_rows = min(padded(max_rows, _ROWS), buffers.max_rows)
        all_rows = [*(rows for rows in _ROWS if rows < most_rows), most_rows]
        most = min(most_rows * _MAX_DRAFTED_AHEAD, buffers.max_entries)
        sizes = [size for size in _ENTRIES if size <= buffers.max_entries]
        sizes += range(2 * sizes[-1], most + 1, sizes[-1]) if sizes[-1] == _ENTRIES[-1] else []
        total = len(sizes) + len(all_rows)
        for number, size in enumerate(sizes):
            progress(Report("graphs", number, total, f"drafter, {size} entries"))
            buffers.round.load(ByRow((), (), ()), ByEntry(), size)
            self._replay_refresh(buffers, size, context)
            self._replay_gather(buffers, size, hidden)
            self._replay_read(buffers, buffers.round, size, context, hidden)
            self._replay_ahead(buffers, size, context, hidden)
        for size in _CHUNKS:
            buffers.chunk.load(ByRow((), (), ()), ByEntry(), size)
            self._replay_read(buffers, buffers.chunk, size, context, hidden)
        for most in (_SMALL_TREE, 2 * _SMALL_TREE):  # kernels that no graph has
            self._walk(buffers, verified.step, chosen, 1, most)
        for number, rows in enumerate(all_rows, start=len(sizes)):
            progress(Report("graphs", number, total, f"drafter, {rows} rows"))
            shape = Shape(rows, num_beams(rows, self.settings.topk, keep), keep)
            self._replay_root(buffers, shape)
            self._expand(buffers, shape, context)


def padded(count: int, sizes: Sequence[int]) -> int:
    """The least of `sizes` that is no less; a multiple of the last if none is."""
    return next((size for size in sizes if size >= count), whole(count, sizes[-1]))


def num_beams(rows: int, topk: int, keep: int | None = None) -> int:
    """Nodes of a row that a pass expands: where there are many rows, few of each are verified."""
    topk = min(topk, keep or topk)
    if rows <= _FEW_ROWS:
        return topk
    each = max(_MOST_BEAMS // rows, 2)
    return min(topk, 1 << (each.bit_length() - 1))  # a power of two: kernels are compiled for each number


def ragged(counts: Numeric) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Of things that stand row by row: the row of each, its place in the row, and each row's first."""
    counts = np.asarray(counts, dtype=np.int64)
    begins = counts.cumsum() - counts
    rows = np.repeat(np.arange(len(counts)), counts)
    return rows, np.arange(len(rows)) - begins[rows], begins


def _sources(
    verified: VerifyOutput, nodes: Sequence[Sequence[int]], tokens: Sequence[Sequence[int]]
) -> list[list[int]]:
    """By row: of which of the step's tokens the features are that its new tokens come after."""
    index = verified.index.numpy()
    return [
        index[row, [0, *path][: len(new)]].tolist() for row, (path, new) in enumerate(zip(nodes, tokens, strict=True))
    ]
