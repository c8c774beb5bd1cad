"""CapturedDrafter: the EAGLE-3 drafter with every pass one CUDA graph, and beams that never leave the device.

Three kinds of graph make a round: `refresh` runs the entries whose true features came in, `root` gives the first level,
and `expand`, again and again, the next. What a pass proposes is sent to the host while the device goes on. Without a
GPU the same code runs, and what would be replayed is called.
"""

from __future__ import annotations

import warnings
from collections.abc import Hashable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, cast

import torch
from torch import Tensor

from graft.draft.base import Level, TreeSettings
from graft.draft.eagle3 import head_kernels
from graft.draft.eagle3.drafter import Eagle3Drafter
from graft.draft.eagle3.fast_head import FastHead
from graft.draft.eagle3.head import Eagle3Head
from graft.target import Verified
from graft.target.arena import (
    CONTEXTS,
    Arena,
    ArenaCache,
    Arenas,
    Run,
    first_line,
    new_pool,
    next_power,
    on_device,
    on_host,
    whole,
)
from graft.target.attention import Paths

_PENDING = (4, 8, 16, 32, 128)  # entries that a refresh runs; no round accepts more tokens than the last


class _Numbers:
    """What the host tells passes of the rows, in one tensor that one transfer takes to the device."""

    def __init__(self, numbers: Tensor, rows: int) -> None:
        self.all = numbers
        sizes = (*[whole(rows)] * 3, rows * _PENDING[-1])
        self.starts, self.counts, self.lengths, self.following = numbers[: sum(sizes)].split(sizes)

    @staticmethod
    def count(rows: int) -> int:
        return 3 * whole(rows) + rows * _PENDING[-1]


class Moment:
    """A point in what the device was given to do; without a GPU it is always past."""

    def __init__(self, device: torch.device) -> None:
        self._event = torch.cuda.Event() if device.type == "cuda" else None

    def record(self) -> None:
        if self._event is not None:
            self._event.record()

    def wait(self) -> None:
        if self._event is not None:
            self._event.synchronize()


@dataclass(eq=False, kw_only=True)
class DraftArena(Arena):
    """An arena, and what passes read and write beside its cache."""

    numbers: _Numbers  # int32: entries committed before the refresh, entries that it runs, both together; tokens
    staged: _Numbers  # the same on the host
    features: Tensor  # [rows, pending, layers * H_t] of entries that are yet to be run
    root: Tensor  # [rows, H] the head's output at each row's last entry
    hidden: Tensor  # [rows, topk, H] its outputs at the beams
    beams: head_kernels.Beams
    levels: Tensor  # [passes, 3, rows * topk * topk] int64, see `head_kernels.spread`
    sent: Tensor  # the same on the host
    loaded: Moment  # when the device has the numbers
    was_sent: list[Moment]  # of every pass


class HeadArenas(Arenas):
    """The arenas of one head."""

    def __init__(self, head: Eagle3Head, settings: TreeSettings) -> None:
        super().__init__(head.fc.weight.device)
        self.fast = FastHead(head)
        self._settings = settings

    def make_arena(self, rows: int, slots: int, max_positions: int | None) -> DraftArena:
        config, weight, device = self.fast.config, self.fast.head.fc.weight, self.device
        topk, num_passes = self._settings.topk, self._settings.depth + 1
        shape = (1, rows, slots, config.num_key_value_heads, config.head_dim)
        level_shape, count = (num_passes, 3, rows * topk * topk), _Numbers.count(rows)
        return DraftArena(
            keys=weight.new_zeros(shape),
            values=weight.new_zeros(shape),
            rotary=self.fast.rotary(slots),
            pool=new_pool(device),
            numbers=_Numbers(torch.zeros(count, dtype=torch.int32, device=device), rows),
            staged=_Numbers(on_host((count,), torch.int32, device), rows),
            features=weight.new_zeros(rows, _PENDING[-1], weight.shape[1]),
            root=weight.new_zeros(rows, weight.shape[0]),
            hidden=weight.new_zeros(rows, topk, weight.shape[0]),
            beams=head_kernels.Beams.make(rows, topk, num_passes, device),
            levels=torch.zeros(level_shape, dtype=torch.int64, device=device),
            sent=on_host(level_shape, torch.int64, device),
            loaded=Moment(device),
            was_sent=[Moment(device) for _ in range(num_passes)],
        )


@dataclass
class CapturedState:
    """What belongs to the rows of one batch: its cache, in whose arena the rest is, and what the host knows of it."""

    cache: ArenaCache
    following: list[list[int]]  # by row: of entries that are yet to be run, the token after each
    kept: int | None = None  # how many nodes of a level were asked for last
    is_begun: bool = False  # whether the first level of these rows is under way
    has_drafted: bool = False  # since the last round

    @property
    def arena(self) -> DraftArena:
        return cast(DraftArena, self.cache.arena)

    def keep(self, rows: Sequence[int]) -> None:
        self.cache.keep(rows)
        for stored in (self.arena.features, self.arena.root):
            stored[: len(rows)] = stored[list(rows)]
        self.following = [self.following[row] for row in rows]
        self.is_begun = False

    def copy_row(self, source: int, target: int) -> None:
        self.cache.copy_row(source, target)
        for stored in (self.arena.features, self.arena.root):
            stored[target] = stored[source]
        self.following[target] = list(self.following[source])
        self.is_begun = False

    def join(self, other: CapturedState) -> None:
        before, num_rows = self.arena, self.cache.num_rows
        self.cache.join(other.cache)
        end = self.cache.num_rows
        for name in ("features", "root"):
            own, new = getattr(self.arena, name), getattr(other.arena, name)
            own[:num_rows] = getattr(before, name)[:num_rows]
            own[num_rows:end] = new[: end - num_rows]
        self.following = self.following + other.following
        self.is_begun = False


class CapturedDrafter(Eagle3Drafter):
    """Starts on the next round's first level as soon as a round is over, if it was asked for levels in that one."""

    contexts: tuple[int, ...] = CONTEXTS

    def __init__(self, head: Eagle3Head, settings: TreeSettings | None = None) -> None:
        """head: one that `fast_head.why_not` has nothing against."""
        super().__init__(head, settings)
        self._arenas = HeadArenas(head, self.settings)

    def open(self, num_rows: int, num_slots: int) -> Any:
        arenas = self._arenas
        if arenas.failure is not None:
            return super().open(num_rows, num_slots)
        room = self.settings.depth * self.settings.topk + _PENDING[-1]
        state = CapturedState(arenas.lease(num_rows, num_slots + room, None), [[] for _ in range(num_rows)])
        if arenas.num_captured == 0:
            try:
                self._try(state)
            except Exception as error:  # whatever a compiler or a driver may raise
                arenas.failure = first_line(error)
                arenas.arenas.clear()
                warnings.warn(f"draft passes cannot be captured in CUDA graphs: {arenas.failure}", stacklevel=2)
                return super().open(num_rows, num_slots)
        return state

    @torch.no_grad()
    def read(self, state: Any, row: int, verified: Verified, following: Sequence[int]) -> None:
        if not isinstance(state, CapturedState):
            return super().read(state, row, verified, following)
        arena, cache, width = state.arena, state.cache, len(following)
        assert arena.rotary is not None
        rows = slice(row, row + 1)
        places = torch.arange(width, dtype=torch.int32, device=self.device)
        length = cache.aim(rows, width, self.device).lengths.int()
        seen = Paths(length, places[None], places.expand(1, width, width).contiguous(), cache.lengths[row])
        tokens = on_device(self.device, following)[0][None]
        features = self.head.fuse(torch.cat(verified.hidden, dim=-1))
        with torch.cuda.device_of(arena.keys):
            output = self._arenas.fast.run(
                tokens, features, None, seen, arena.keys[0, rows], arena.values[0, rows], arena.rotary
            )
        cache.advance([width])
        arena.root[row] = output[0, -1]
        state.is_begun = False

    @torch.no_grad()
    def learn(
        self, state: Any, verified: Verified, nodes: Sequence[Sequence[int]], tokens: Sequence[Sequence[int]]
    ) -> None:
        if not isinstance(state, CapturedState):
            return super().learn(state, verified, nodes, tokens)
        if max(map(len, state.following)) + max(map(len, tokens)) > _PENDING[-1]:
            self._run_pending(state)
        moves = [
            (row, node, len(state.following[row]) + step)
            for row, path in enumerate(nodes)
            for step, node in enumerate((0, *path))
        ]
        row, node, place = on_device(self.device, *zip(*moves, strict=True))
        state.arena.features[row, place] = torch.cat(verified.hidden, dim=-1)[row, node]
        for following, new in zip(state.following, tokens, strict=True):
            following.extend(new)
        state.is_begun = False
        if state.has_drafted:
            self._begin(state, state.kept)
        state.has_drafted = False

    @torch.no_grad()
    def levels(
        self, state: Any, roots: Tensor, keep: int | None = None, stops: Sequence[int] | None = None
    ) -> Iterator[Level]:
        if not isinstance(state, CapturedState):
            yield from super().levels(state, roots, keep, stops)
            return
        self._begin(state, keep)
        state.has_drafted = True
        last, num_launched = self.settings.depth, 1
        for number in range(last + 1):
            ahead = number if stops is None else next((stop for stop in stops if stop >= number), last)
            while num_launched <= min(ahead, last):
                self._replay(state, ("expand", keep))
                self._send(state, num_launched)
                num_launched += 1
            yield self._sent(state, number, keep)

    # One pass

    def _begin(self, state: CapturedState, keep: int | None) -> None:
        """Has the first level made, unless it is being made already."""
        if state.is_begun and state.kept == keep:
            return
        self._run_pending(state)
        self._replay(state, ("root", keep))
        self._send(state, 0)
        state.is_begun, state.kept = True, keep

    def _run_pending(self, state: CapturedState) -> None:
        """Tells the device where the rows stand, and runs the entries whose true features came in."""
        arena, cache, staged = state.arena, state.cache, state.arena.staged
        counts = [len(following) for following in state.following]
        longest, num_rows = max(counts), len(counts)
        width = next(width for width in _PENDING if width >= longest)
        padded = [token for following in state.following for token in (*following, *[0] * (width - len(following)))]
        arena.loaded.wait()
        staged.all.zero_()
        staged.starts[:num_rows] = torch.tensor(cache.lengths)
        staged.counts[:num_rows] = torch.tensor(counts)
        staged.lengths[:num_rows] = staged.starts[:num_rows] + staged.counts[:num_rows]
        staged.following[: len(padded)] = torch.tensor(padded)
        arena.numbers.all.copy_(staged.all, non_blocking=True)
        arena.loaded.record()
        if longest:
            self._replay(state, ("refresh", width))
            cache.aim_at_all()
            cache.advance(counts)
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

    # Graphs

    def _replay(self, state: CapturedState, kind: tuple[str, int | None]) -> None:
        arena, cache = state.arena, state.cache
        rows = next_power(cache.num_rows)
        longest = max(cache.lengths)
        context = min(next((c for c in self.contexts if c >= longest), arena.num_slots), arena.num_slots)
        key: Hashable = (kind, rows, None if kind[0] == "root" else context)
        with torch.cuda.device_of(arena.keys):
            if key not in arena.steps:
                # Trial runs before the capture move the beams on.
                before = [part.clone() for part in (arena.hidden, *vars(arena.beams).values())]
                arena.steps[key] = self._arenas.capture(self._make_run(arena, kind, rows, context), arena.pool)
                for part, old in zip((arena.hidden, *vars(arena.beams).values()), before, strict=True):
                    part.copy_(old)
            arena.steps[key]()

    def _make_run(self, arena: DraftArena, kind: tuple[str, int | None], rows: int, context: int) -> Run:
        """One pass over static inputs."""
        fast, rotary, topk = self._arenas.fast, arena.rotary, self.settings.topk
        assert rotary is not None
        name, number = kind
        keys, values, beams = arena.keys[0, :rows], arena.values[0, :rows], arena.beams.first(rows)
        numbers = arena.numbers
        starts, counts, lengths = numbers.starts[:rows], numbers.counts[:rows], numbers.lengths[:rows]
        root, hidden = arena.root[:rows], arena.hidden[:rows]

        def spread(outputs: Tensor, is_first: bool) -> tuple[Tensor, ...]:
            best = fast.likeliest(outputs, topk)
            head_kernels.spread(*best, self.head.d2t, beams, arena.levels, number, is_first)
            return ()

        @torch.no_grad()
        def refresh() -> tuple[Tensor, ...]:
            assert number is not None
            tokens = numbers.following[: rows * number].view(rows, number)
            places = torch.arange(number, dtype=torch.int32, device=tokens.device)
            paths = places.expand(rows, number, number).contiguous()
            seen = Paths(starts, places.expand(rows, number).contiguous(), paths, context)
            features = self.head.fuse(arena.features[:rows, :number])
            outputs = fast.run(tokens, features, None, seen, keys, values, rotary)
            last = (counts - 1).clamp(min=0).long()
            newest = outputs[torch.arange(rows, device=last.device), last]
            root.copy_(torch.where(counts[:, None] > 0, newest, root))
            return ()

        @torch.no_grad()
        def first() -> tuple[Tensor, ...]:
            hidden[:, 0] = root
            return spread(root, is_first=True)

        @torch.no_grad()
        def expand() -> tuple[Tensor, ...]:
            seen = Paths(lengths, beams.depths, beams.entries, context)
            outputs = fast.run(beams.tokens, hidden, beams.origins, seen, keys, values, rotary, beams.before)
            hidden.copy_(outputs)
            return spread(outputs.flatten(0, 1), is_first=False)

        return {"refresh": refresh, "root": first, "expand": expand}[name]

    def _try(self, state: CapturedState) -> None:
        """Captures one of each kind, to see whether it can be done."""
        for kind in (("refresh", _PENDING[0]), ("root", None), ("expand", None)):
            self._replay(state, kind)
