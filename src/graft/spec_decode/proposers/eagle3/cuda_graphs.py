"""CUDA graphs of the EAGLE-3 drafter: `CapturedDrafter` runs every draft pass as one graph; beams stay on the device.

There are five kinds of graph. `read` prefills a chunk of a prompt. The others make a round: `gather` takes the features
of the accepted nodes, `refresh` runs the head on them, `root` proposes the first level of the tree, and `expand`,
repeatedly, the next level. A level is sent to the host while the device goes on. Mostly the device finds the accepted
path by itself and drafts ahead, so that it works on the next tree before the host knows the outcome of the last.
Without a GPU the same code runs, and calls what would be replayed.
"""

from __future__ import annotations

import warnings
import weakref
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, cast

import torch
from torch import Tensor

from graft.model import VerifyOutput
from graft.model.arena import (
    CONTEXTS,
    MAX_PATH,
    Arena,
    ArenaCache,
    Arenas,
    Event,
    Numbers,
    Run,
    first_line,
    is_shortage,
    new_pool,
    next_power,
    on_host,
)
from graft.model.attention import Paths
from graft.model.kernels import eagle3 as eagle3_kernels
from graft.model.kv_cache import kept_rows
from graft.spec_decode.candidates import Level
from graft.spec_decode.proposers.drafter import TreeSettings
from graft.spec_decode.proposers.eagle3.drafter import Eagle3Drafter
from graft.spec_decode.proposers.eagle3.fused_head import FastHead
from graft.spec_decode.proposers.eagle3.head import Eagle3Head

_PENDING = (1, 4, 8, 16, 32, MAX_PATH)  # entries that a refresh runs
_AHEAD = 4  # levels that are drafted ahead where drafting may stop after any of them
_MAX_DRAFTED_AHEAD = 16  # accepted tokens of a row that the device can process by itself in a round

# Columns and tables of an arena's numbers: entries committed before the refresh, entries that it runs, both together,
# and of those to be run the ones that were there before the last round; the token after each, and nodes of the round.
_STARTS, _COUNTS, _LENGTHS, _OLD = range(4)
_FOLLOWING, _NODES = range(2)
_LONGEST_CHUNK = 256  # of a prompt that a graph reads


@dataclass(eq=False, kw_only=True)
class DraftArena(Arena):
    """An arena of the head: its KV cache, and the static inputs and outputs of draft passes."""

    numbers: Numbers
    chunk: Numbers  # of a prompt: where it starts, how many tokens it has; the token after each
    features: Tensor  # [rows, pending + 1, layers * H_t] of entries that are yet to be run; the last is never read
    root: Tensor  # [rows, H] the head's output at each row's last entry
    hidden: Tensor  # [rows, topk, H] its outputs at the beams
    beams: eagle3_kernels.Beams
    levels: Tensor  # [passes, 3, rows * topk * topk] int64, see `eagle3_kernels.spread`
    sent: Tensor  # the same on the host
    was_sent: list[Event]  # of every pass
    read: dict[int, weakref.ref[Tensor]] = field(default_factory=dict)  # hidden states that steps read, by address

    def read_from(self, hidden: Tensor) -> None:
        """Registers the hidden states that graphs read in place: when that tensor is freed, they are dropped."""
        whole = hidden if hidden._base is None else hidden._base
        address = whole.data_ptr()
        known = self.read.get(address)
        if known is None or known() is not whole:
            itself = weakref.ref(self)  # else it would stay for as long as they do

            def forget(gone: weakref.ref[Tensor]) -> None:
                arena = itself()
                if arena is not None and arena.read.get(address) is gone:
                    arena.forget_readers(address)

            self.forget_readers(address)
            self.read[address] = weakref.ref(whole, forget)

    def forget_readers(self, address: int) -> None:
        self.read.pop(address, None)
        self.steps = {key: step for key, step in self.steps.items() if key[3:4] != (address,)}


class HeadArenas(Arenas):
    """All arenas of one head."""

    def __init__(self, head: Eagle3Head, settings: TreeSettings) -> None:
        super().__init__(head.fc.weight.device)
        self.fast = FastHead(head)
        self._settings = settings

    def make_arena(self, rows: int, slots: int, max_positions: int | None) -> DraftArena:
        config, weight, device = self.fast.config, self.fast.head.fc.weight, self.device
        topk, num_passes = self._settings.topk, self._settings.depth + 1
        shape = (1, rows, slots, config.num_key_value_heads, config.head_dim)
        level_shape = (num_passes, 3, rows * topk * topk)
        return DraftArena(
            keys=weight.new_zeros(shape),
            values=weight.new_zeros(shape),
            rotary=self.fast.rotary(slots),
            pool=new_pool(device),
            numbers=Numbers(4, 2, rows, _PENDING[-1], device),
            chunk=Numbers(2, 1, 1, _LONGEST_CHUNK, device),
            features=weight.new_zeros(rows, _PENDING[-1] + 1, weight.shape[1]),
            root=weight.new_zeros(rows, weight.shape[0]),
            hidden=weight.new_zeros(rows, topk, weight.shape[0]),
            beams=eagle3_kernels.Beams.make(rows, topk, num_passes, device),
            levels=torch.zeros(level_shape, dtype=torch.int64, device=device),
            sent=on_host(level_shape, torch.int64, device),
            was_sent=[Event(device) for _ in range(num_passes)],
        )


@dataclass
class CapturedState:
    """Draft state of one batch: its KV cache in an arena, and the host's bookkeeping."""

    cache: ArenaCache
    following: list[list[int]]  # by row: of entries that are yet to be run, the token after each
    kept: int | None = None  # how many nodes of a level were asked for last
    num_prefetched: int = 0  # levels of the coming round that are made or being made
    num_taken: int = 0  # levels of the last round that were asked for
    is_counted: bool = False  # whether the device knows how many entries of each row wait
    num_drafted_ahead: int = 0  # most accepted tokens of a row for which the drafts ahead are valid; 0: none

    @property
    def arena(self) -> DraftArena:
        return cast(DraftArena, self.cache.arena)

    def keeping(self, rows: Sequence[int]) -> CapturedState:
        for stored in (self.arena.features, self.arena.root):
            kept_rows(stored, rows)
        return self._started_anew(self.cache.keeping(rows), [self.following[row] for row in rows])

    def copy_row(self, source: int, target: int) -> None:
        self.cache.copy_row(source, target)
        for stored in (self.arena.features, self.arena.root):
            stored[target] = stored[source]
        self.following[target] = list(self.following[source])
        self.num_prefetched, self.is_counted = 0, False

    def reserving(self, num_rows: int) -> CapturedState:
        there = self._started_anew(self.cache.reserving(num_rows), self.following)
        there._take_from(self.arena, self.cache.num_rows)
        return there

    def joining(self, other: CapturedState) -> CapturedState:
        num_rows = self.cache.num_rows
        there = self._started_anew(self.cache.joining(other.cache), self.following + other.following)
        there._take_from(self.arena, num_rows)
        there._take_from(other.arena, other.cache.num_rows, num_rows)
        return there

    def _take_from(self, arena: DraftArena, count: int, first: int = 0) -> None:
        """Copies features and outputs of another arena's first rows to the rows from `first` on."""
        if arena is not self.arena:
            for own, new in ((self.arena.features, arena.features), (self.arena.root, arena.root)):
                own[first : first + count] = new[:count]

    def _started_anew(self, cache: ArenaCache, following: Sequence[Sequence[int]]) -> CapturedState:
        """A state whose rows have changed, so that drafts ahead are dropped."""
        copies = [list(tokens) for tokens in following]
        return replace(self, cache=cache, following=copies, num_prefetched=0, is_counted=False)


class CapturedDrafter(Eagle3Drafter):
    """EAGLE-3 drafter by CUDA graphs. Drafts the next round's first levels ahead if the last round used any."""

    contexts: tuple[int, ...] = CONTEXTS

    def __init__(self, head: Eagle3Head, settings: TreeSettings | None = None) -> None:
        """head: one for which `fused_head.why_not` is None."""
        super().__init__(head, settings)
        self._arenas = HeadArenas(head, self.settings)
        self._stops: Sequence[int] | None = None  # of the last levels

    @property
    def num_setups(self) -> int:
        return self._arenas.num_setups

    def open(self, num_rows: int, num_slots: int) -> Any:
        arenas = self._arenas
        if arenas.failure is not None:
            return super().open(num_rows, num_slots)
        room = self.settings.depth * self.settings.topk + _PENDING[-1]
        state = CapturedState(arenas.lease(num_rows, num_slots + room, None), [[] for _ in range(num_rows)])
        state.arena.root.zero_()  # who had the arena before is nothing to a text without a prompt to read
        if arenas.num_captured == 0:
            try:
                self._try(state)
            except Exception as error:  # whatever a compiler or a driver may raise
                if is_shortage(error):
                    raise
                arenas.failure = first_line(error)
                arenas.arenas.clear()
                warnings.warn(f"draft passes cannot be captured in CUDA graphs: {arenas.failure}", stacklevel=2)
                return super().open(num_rows, num_slots)
        return state

    @torch.no_grad()
    def read(self, state: Any, row: int, verified: VerifyOutput, following: Sequence[int]) -> None:
        if not isinstance(state, CapturedState):
            return super().read(state, row, verified, following)
        arena, cache, width = state.arena, state.cache, len(following)
        rows = slice(row, row + 1)
        if row == 0 and verified.step is not None:  # a captured step of the first row
            room = verified.step.tokens.shape[1]
            arena.chunk.load(([cache.lengths[0]], [width]), ([following],), room)
            self._replay(state, ("read", room), verified.hidden)
            cache.aim_at_first(1)
        else:
            start = cache.aim(rows, width, self.device).lengths.int()
            tokens = torch.tensor([following], dtype=torch.int32, device=self.device)
            with self._arenas.lock, torch.cuda.device_of(arena.keys):
                counts = torch.full_like(start, width)
                self._enter(arena, rows, verified.hidden, tokens, start, counts, cache.lengths[row])
        cache.advance([width])
        state.num_prefetched = 0

    @torch.no_grad()
    def learn(
        self, state: Any, verified: VerifyOutput, nodes: Sequence[Sequence[int]], tokens: Sequence[Sequence[int]]
    ) -> None:
        if not isinstance(state, CapturedState):
            return super().learn(state, verified, nodes, tokens)
        if self._was_drafted_ahead(state, list(map(len, tokens))):
            return None
        if max(map(len, state.following)) + max(map(len, tokens)) > _PENDING[-1]:
            self._load(state)
            self._refresh_entries(state)
        old = [len(following) for following in state.following]
        for following, new in zip(state.following, tokens, strict=True):
            following.extend(new)
        state.num_prefetched = 0
        width = _wide_enough(max(map(len, tokens)))
        if not (width == 1 and state.is_counted):  # one plain round after the other needs no word from the host
            state.arena.numbers.load(((), (), (), old), ((), [(0, *path) for path in nodes]), width)
        if verified.step is not None:  # its hidden states are always at the same place
            self._replay(state, ("gather", width), verified.hidden)
        else:
            self._gather(state.arena, verified.hidden, width)
        state.is_counted = width == 1
        if state.num_taken:
            self._begin(state, state.kept, self._num_ahead(state))
        state.num_taken = 0

    def num_prefetched(self, state: Any) -> int:
        return state.num_prefetched if isinstance(state, CapturedState) else 0

    @torch.no_grad()
    def draft_ahead(self, state: Any, verified: VerifyOutput, chosen: Tensor) -> None:
        step = verified.step
        if not isinstance(state, CapturedState) or step is None or not state.num_taken or any(state.following):
            return
        arena, num_rows = state.arena, len(chosen)
        width = _wide_enough(min(chosen.shape[1], _MAX_DRAFTED_AHEAD))
        arena.numbers.load((state.cache.lengths,), (), width)
        state.is_counted = False
        columns = (arena.numbers.column(column) for column in (_STARTS, _COUNTS, _LENGTHS))
        tables = (arena.numbers.table(table, num_rows, width) for table in (_FOLLOWING, _NODES))
        with torch.cuda.device_of(arena.keys):
            eagle3_kernels.follow(step.tokens, step.parents, chosen, *columns, *tables)
        state.num_drafted_ahead, state.num_prefetched = width, 0
        self._replay(state, ("gather", width), verified.hidden)
        self._replay(state, ("refresh", width))
        self._make_levels(state, state.kept, self._num_ahead(state))

    @torch.no_grad()
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
            self._begin(state, keep, ahead + 1)
            state.num_taken += 1
            yield self._sent(state, number, keep)

    # The parts of a round

    def _begin(self, state: CapturedState, keep: int | None, count: int) -> None:
        """Starts the first `count` levels, as far as they were not drafted ahead."""
        if state.num_prefetched and state.kept != keep:
            state.num_prefetched = 0
        if state.num_prefetched == 0:
            self._load(state)
            self._refresh_entries(state)
        self._make_levels(state, keep, count)

    def _make_levels(self, state: CapturedState, keep: int | None, count: int) -> None:
        """Launches the passes of the first `count` levels that are not launched yet; entries must be up to date."""
        while state.num_prefetched < count:
            self._replay(state, ("expand" if state.num_prefetched else "root", keep))
            self._send(state, state.num_prefetched)
            state.num_prefetched += 1
        state.kept = keep

    def _num_ahead(self, state: CapturedState) -> int:
        """How many levels to draft ahead."""
        return min(state.num_taken, _AHEAD) if self._stops is None or self._stops else self.settings.depth + 1

    def _was_drafted_ahead(self, state: CapturedState, counts: Sequence[int]) -> bool:
        """Whether draft-ahead covers a round with these accepted counts; then only the host's state is updated."""
        most, state.num_drafted_ahead = state.num_drafted_ahead, 0
        if max(counts) > most:
            return False
        state.cache.aim_at_first(len(counts))
        state.cache.advance(counts)
        state.num_taken = 0
        return True

    def _load(self, state: CapturedState) -> None:
        """Sends the device the rows' lengths and the entries to run."""
        starts, counts = state.cache.lengths, [len(following) for following in state.following]
        lengths = [start + count for start, count in zip(starts, counts, strict=True)]
        state.arena.numbers.load((starts, counts, lengths), (state.following,), _wide_enough(max(counts)))
        state.is_counted = False

    def _refresh_entries(self, state: CapturedState) -> None:
        """Runs the head on the entries whose true features have come in."""
        counts = [len(following) for following in state.following]
        if any(counts):
            self._replay(state, ("refresh", _wide_enough(max(counts))))
            state.cache.aim_at_first(len(counts))
            state.cache.advance(counts)
            state.following = [[] for _ in counts]

    def _send(self, state: CapturedState, number: int) -> None:
        arena = state.arena
        arena.sent[number].copy_(arena.levels[number], non_blocking=True)
        arena.was_sent[number].record()

    def _sent(self, state: CapturedState, number: int, keep: int | None) -> Level:
        arena, topk, num_rows = state.arena, self.settings.topk, state.cache.num_rows
        arena.was_sent[number].wait()
        most = topk if number == 0 else topk * topk
        count = most if keep is None else min(max(keep, topk), most)
        numbers = arena.sent[number].clone()  # the next round writes over it
        tokens, parents = (part[: num_rows * count].view(num_rows, count) for part in numbers[:2])
        chances = numbers[2].view(torch.float32).view(2, -1)
        q, paths = (part[: num_rows * count].view(num_rows, count) for part in chances)
        return Level(tokens, parents, q, paths)

    @staticmethod
    def _gather(arena: DraftArena, hidden: Tensor, width: int) -> None:
        """Appends the hidden states [B, W, layers * H] of a round's nodes to the waiting features."""
        rows, size = len(hidden), hidden.shape[2]
        nodes = arena.numbers.table(_NODES, rows, width).long()
        places = arena.numbers.column(_OLD)[:rows, None] + torch.arange(width, device=hidden.device)
        places = places.clamp(max=_PENDING[-1]).long()  # what is behind a row's last node is never read
        new = hidden.gather(1, nodes[:, :, None].expand(-1, -1, size))
        arena.features[:rows].scatter_(1, places[:, :, None].expand(-1, -1, size), new)
        if width == 1:
            arena.numbers.column(_OLD).add_(1)

    # Graphs

    def _replay(self, state: CapturedState, kind: tuple[str, int | None], hidden: Tensor | None = None) -> None:
        arena, cache = state.arena, state.cache
        longest = max(cache.lengths) + state.num_drafted_ahead
        rows = next_power(cache.num_rows)
        context = arena.context_for([longest], self.contexts) if kind[0] != "gather" else 0  # it attends to nothing
        key: tuple[Any, ...] = (kind, rows, context)
        if hidden is not None:
            arena.read_from(hidden)
            # The whole of it, whatever part the round was: rows that are not in use give features that nobody reads.
            shape = (1, kind[1] or 0) if kind[0] == "read" else (rows, MAX_PATH)
            size, stride, place = (*shape, hidden.shape[2]), hidden.stride(), hidden.storage_offset()
            # No view of it, which would keep it for as long as the step is there.
            hidden = hidden.new_empty(0).set_(hidden.untyped_storage(), place, size, stride)
            key = (*key, hidden.data_ptr(), hidden.shape, hidden.stride())
        with self._arenas.lock, torch.cuda.device_of(arena.keys):
            step = arena.steps.get(key)
            if step is None:
                # Trial runs before the capture move the beams on, and count.
                moving = (arena.hidden, arena.numbers.column(_OLD), *vars(arena.beams).values())
                run = self._make_run(arena, kind, rows, context, hidden)
                step = self._arenas.captured(arena, key, run, moving)
            step()

    def _make_run(
        self, arena: DraftArena, kind: tuple[str, int | None], rows: int, context: int, given: Tensor | None
    ) -> Run:
        """The function that a CUDA graph captures, over static inputs."""
        fast, rotary, topk = self._arenas.fast, arena.rotary, self.settings.topk
        assert rotary is not None
        name, number = kind
        keys, values, beams = arena.keys[0, :rows], arena.values[0, :rows], arena.beams.first(rows)
        starts, counts, lengths = (arena.numbers.column(column)[:rows] for column in (_STARTS, _COUNTS, _LENGTHS))
        root, hidden = arena.root[:rows], arena.hidden[:rows]

        def spread(outputs: Tensor, is_first: bool) -> None:
            best = fast.likeliest(outputs, topk)
            eagle3_kernels.spread(*best, self.head.d2t, beams, arena.levels, number, is_first)

        def gather() -> None:
            assert given is not None and number is not None
            self._gather(arena, given, number)

        def read() -> None:
            assert given is not None and number is not None
            tokens = arena.chunk.table(0, 1, number)
            self._enter(arena, slice(1), given, tokens, arena.chunk.column(0), arena.chunk.column(1), context)

        def refresh() -> None:
            assert number is not None
            tokens = arena.numbers.table(_FOLLOWING, rows, number)
            self._enter(arena, slice(rows), arena.features[:rows, :number], tokens, starts, counts, context)

        def first() -> None:
            hidden[:, 0] = root
            spread(root, is_first=True)

        def expand() -> None:
            seen = Paths(lengths, beams.depths, beams.entries, context)
            outputs = fast.run(beams.tokens, hidden, beams.origins, seen, keys, values, rotary, beams.before)
            hidden.copy_(outputs)
            spread(outputs.flatten(0, 1), is_first=False)

        work: Run = {"read": read, "gather": gather, "refresh": refresh, "root": first, "expand": expand}[name]
        return torch.no_grad()(work)

    def _enter(
        self,
        arena: DraftArena,
        rows: slice,
        features: Tensor,  # [B, W, layers * H_t]
        tokens: Tensor,  # [B, W] int32 the token after each entry's own
        starts: Tensor,  # [B] int32 entries before these
        counts: Tensor,  # [B] int32 those of the W that are real
        context: int,
    ) -> None:
        """Runs the head on entries with the target's features; keeps the output at each row's last entry, if any."""
        assert arena.rotary is not None
        num_rows, width = tokens.shape
        places = torch.arange(width, dtype=torch.int32, device=tokens.device)
        paths = places.expand(num_rows, width, width).contiguous()
        seen = Paths(starts, places.expand(num_rows, width).contiguous(), paths, context)
        keys, values, root = arena.keys[0, rows], arena.values[0, rows], arena.root[rows]
        outputs = self._arenas.fast.run(tokens, self.head.fuse(features), None, seen, keys, values, arena.rotary)
        last = (counts - 1).clamp(min=0).long()
        newest = outputs[torch.arange(num_rows, device=last.device), last]
        root.copy_(torch.where(counts[:, None] > 0, newest, root))

    def _try(self, state: CapturedState) -> None:
        """Captures the graphs of most rounds, to see whether the head can be captured."""
        for kind in (*(("refresh", width) for width in _PENDING[:4]), ("root", None), ("expand", None)):
            self._replay(state, kind)


def _wide_enough(count: int) -> int:
    return next(width for width in _PENDING if width >= count)
