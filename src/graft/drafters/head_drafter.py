"""HeadDrafter: the rows, the KV store, the buffers and, on a GPU, the graphs of a draft head.

The head's KV store has an entry for each token of the text, made from the target's features of it. Drafts are written
after these entries, and the next round overwrites them. A head's functions are `enter`, which makes entries, and those
of draft passes. Some heads have them in Triton (`fast`): then entries are made in the round that brings the tokens,
and device rounds include passes and entries in their own graphs. Other heads, and all on a CPU, are run directly: new
entries wait until the next draft pass. Without a GPU, `fast` heads run too, and call functions instead of replaying
graphs.
"""

from __future__ import annotations

import itertools
import warnings
import weakref
from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from graft.drafters.draft_buffers import ENTRIES, DraftBuffers
from graft.drafters.drafter import DraftState, Passes
from graft.model import KVCache, PagePool, Row, TargetRunner, VerifyOutput
from graft.model.attention import RowKeys, Visibility
from graft.model.captures import CONTEXTS, Captures, Run, context_for, first_line, is_out_of_memory, on_device, padded
from graft.model.kv_cache import PAGE, KVStore
from graft.model.layout import Layout
from graft.model.noise import ComingDraws
from graft.progress import Report
from graft.tree.device.buffers import DraftDraws, Entries
from graft.tree.device.round import AddLevel
from graft.tree.tree import DraftTree

_MAX_PENDING = 256  # entries of a row that may wait for the next draft pass


@dataclass(eq=False)
class HeadRow:
    """One row's draft state."""

    row: Row
    length: int  # entries in the head's KV store
    # Of a head that is run directly: features [n, taps * H] of tokens without an entry, and the token after each.
    pending: list[Tensor] = field(default_factory=list)
    following: list[int] = field(default_factory=list)
    hidden: Tensor | None = None  # [H] the head's output at the last entry, if passes begin with it


HeadState = DraftState[HeadRow]


@dataclass
class NewEntries:
    """Entries of some rows to make, T in all, side by side."""

    cache: KVCache  # the head's, whose `update` writes them
    rows: list[HeadRow]
    counts: list[int]  # by row
    tokens: Tensor  # [1, T] the token after each
    positions: Tensor  # [1, T]
    features: Tensor  # [1, T, taps * H]

    @property
    def last(self) -> Tensor:
        """[rows] each row's last entry."""
        return torch.tensor(self.counts, device=self.tokens.device).cumsum(0) - 1

    def seen(self, only_last: bool) -> Visibility:
        """Which keys the entries see, or each row's last one: those of the text up to themselves."""
        keys = []
        for row, count in zip(self.rows, self.counts, strict=True):
            own = 1 if only_last else count
            seen = torch.ones(own, own, dtype=torch.bool).tril()
            keys.append(RowKeys(row.row, row.length + count - own, torch.arange(own), seen, self.tokens.device))
        return Visibility(keys, self.features.dtype)


class HeadDrafter(ABC):
    """Base of the drafters of heads."""

    head: Any
    max_passes: int
    contexts: tuple[int, ...] = CONTEXTS
    # Factor on the logits when draws are guessed, for a head that is less certain than its target.
    sharpness = 1.0

    def __init__(
        self,
        hidden_layers: tuple[int, ...],
        weight: Tensor,
        num_layers: int,
        key_heads: tuple[int, int],
        value_heads: tuple[int, int] | None = None,
        fast: Any = None,
    ) -> None:
        """weight: a weight [H, any] of the head, for its dtype, device and width.

        num_layers, key_heads, value_heads: of the head's KV store, heads as (heads, head_dim). fast: the head in
        Triton, with `buffers`, `enter` and `run_passes`.
        """
        self.hidden_layers = hidden_layers
        self._weight, self._num_layers, self.fast = weight, num_layers, fast
        self._key_heads, self._value_heads = key_heads, value_heads or key_heads
        self._stores: weakref.WeakKeyDictionary[PagePool, KVStore] = weakref.WeakKeyDictionary()
        self._buffers: weakref.WeakKeyDictionary[PagePool, Any] = weakref.WeakKeyDictionary()
        self._numbers = itertools.count()  # of buffers
        self._captures = Captures(weight.device)

    # What subclasses define

    @abstractmethod
    def enter(self, new: NewEntries) -> None:
        """Make entries, directly."""

    @abstractmethod
    def draft(self, asked: Passes, add_level: AddLevel) -> None:
        """`run_passes`, directly."""

    # The drafter contract

    @property
    def device(self) -> torch.device:
        return self._weight.device

    @property
    def is_captured(self) -> bool:
        return self.fast is not None and self._captures.failure is None

    @property
    def num_setups(self) -> int:
        return self._captures.num_setups

    @property
    def bytes_per_token(self) -> int:
        sizes = (heads * head_dim for heads, head_dim in (self._key_heads, self._value_heads))
        return self._num_layers * sum(sizes) * self._weight.element_size()

    def knows(self, draws: ComingDraws) -> bool:
        return draws.is_keyed or not self.is_captured

    def open(self, cache: KVCache, texts: Sequence[Sequence[int]] = ()) -> HeadState:
        pool, captures = cache.pool, self._captures
        with captures.lock, pool.lock:
            self.store_for(pool)
            # If a prefix comes from the prefix cache, its entries are in the shared pages.
            state = HeadState(self, pool, [HeadRow(row, row.length) for row in cache.rows])
            if self.is_captured and captures.num_captured == 0:
                self._try(state)
            if self.is_captured:
                for row, kept in itertools.product(cache.rows, self.buffers_of(pool).by_table_row):
                    kept[row.block_table_row].zero_()  # what the row's previous owner left
        return state

    def copied(self, state: HeadState, known: HeadRow, row: Row) -> HeadRow:
        if self.is_captured:
            with self._captures.lock, state.pool.lock:
                for kept in self.buffers_of(state.pool).by_table_row:
                    kept[row.block_table_row] = kept[known.row.block_table_row]
        return replace(known, row=row, pending=list(known.pending), following=list(known.following))

    def read(self, chunks: Sequence[tuple[HeadState, int, VerifyOutput, Sequence[int]]]) -> None:
        firsts = [int(verified.index[0, 0]) for _, _, verified, _ in chunks]
        tokens = [list(following) for *_, following in chunks]
        sources = [range(first, first + len(own)) for first, own in zip(firsts, tokens, strict=True)]
        state, _, verified, _ = chunks[0]
        self._take(state.pool, [own.rows[row] for own, row, *_ in chunks], verified, tokens, sources, 0)

    def learn(
        self, state: HeadState, verified: VerifyOutput, nodes: Sequence[Sequence[int]], tokens: Sequence[Sequence[int]]
    ) -> None:
        index = verified.index.numpy()
        paths = enumerate(zip(nodes, tokens, strict=True))
        sources = [index[row, [0, *path][: len(new)]].tolist() for row, (path, new) in paths]
        self._take(state.pool, state.rows, verified, tokens, sources, _MAX_PENDING)

    @torch.no_grad()
    def run_passes(self, asked: Passes, add_level: AddLevel) -> None:
        if not self.is_captured:
            self.draft(asked, add_level)
            return
        buffers = self._buffers[asked.pool] if asked.state is None else self.buffers_of(asked.pool)
        lengths, given, draws = asked.lengths, asked.draws, None
        if given is not None:
            seeds, temperatures = given.keys() if isinstance(given, ComingDraws) else given
            # Of the rows of padding, the host knows none.
            seeds, temperatures = (
                nn.functional.pad(part, (0, max(asked.num_rows - len(part), 0)))[: asked.num_rows].to(lengths.device)
                for part in (seeds, temperatures)
            )
            draws = DraftDraws(seeds, temperatures / self.sharpness, lengths, self.head.d2t)
        self.fast.run_passes(buffers, asked, lengths, draws, add_level)

    def warm_up(self, target: TargetRunner, max_rows: int) -> None:
        """Capture the graphs that read prompts."""
        cache = target.open(1, num_slots=PAGE)
        try:
            state = self.open(cache)
            verified = target.verify(cache, DraftTree.roots(torch.zeros(1, dtype=torch.int64)))
            if not (self.is_captured and verified.is_captured):
                return
            with self._captures.lock, state.pool.lock:
                buffers = self.buffers_of(state.pool)
                hidden = self._hidden_of(buffers, verified)
                for number, size in enumerate(ENTRIES):
                    target.progress(Report("graphs", number, len(ENTRIES), f"drafter, {size} entries"))
                    buffers.new.load(size)
                    self._replay_read(buffers, size, self._context(state.rows), hidden)
        finally:
            cache.release()

    # In the graphs of device rounds

    def prepare_pool(self, pool: PagePool) -> int:
        """Make the buffers over a pool before graphs use them. Returns a number that changes if the buffers change."""
        number: int = self.buffers_of(pool).number
        return number

    def run_entries(self, pool: PagePool, entries: Entries, hidden: Tensor, context: int) -> None:
        """Run the head on the new tokens of a round, within a graph. hidden: [T, F] of the step's tokens."""
        self._run_entries(self._buffers[pool], entries, context, hidden)

    # The KV store

    def store_for(self, pool: PagePool) -> KVStore:
        """The head's KV store over a pool's pages."""
        store = self._stores.get(pool)
        if store is None:
            store = KVStore(self._num_layers)
            pool.add_store(store)
            store.shape(self._weight, self._key_heads, self._value_heads)
            self._stores[pool] = store  # last, so that a failed call can be repeated
        return store

    def cache_writing_at(self, pool: PagePool, places: Sequence[tuple[HeadRow, int]]) -> KVCache:
        """The head's KV cache, whose `update` writes at these positions of rows. Allocates their pages."""
        for row, position in places:
            pool.ensure(row.row, position + 1)
        cache = KVCache(pool, self.store_for(pool), [])
        cache.write_at(cache.slots_of([(row.row, position) for row, position in places]))
        return cache

    # New entries

    @torch.no_grad()
    def _take(
        self,
        pool: PagePool,
        rows: Sequence[HeadRow],
        verified: VerifyOutput,
        tokens: Sequence[Sequence[int]],
        sources: Sequence[Sequence[int]],
        may_wait: int,
    ) -> None:
        """Make new entries, or let them wait while no row has more than `may_wait`.

        By row: the token after each entry, and the index in the step of the token whose features it takes.
        """
        if self.is_captured:
            self._read(pool, rows, verified, tokens, sources)
            return
        for row, new, places in zip(rows, tokens, sources, strict=True):
            row.pending.append(verified.hidden[torch.tensor(places, device=verified.hidden.device)])
            row.following += new
        if max(len(row.following) for row in rows) > may_wait:
            self.refresh(pool, rows)

    def refresh(self, pool: PagePool, rows: Sequence[HeadRow]) -> None:
        """Make the entries that wait."""
        rows = [row for row in rows if row.following]  # a row that has just joined has none
        if not rows:
            return
        counts = [len(row.following) for row in rows]
        places = [(row, row.length + place) for row, count in zip(rows, counts, strict=True) for place in range(count)]
        columns = [[token for row in rows for token in row.following], [position for _, position in places]]
        tokens, positions = torch.tensor(columns, device=self.device)[:, None]
        features = torch.cat([part for row in rows for part in row.pending])[None]
        self.enter(NewEntries(self.cache_writing_at(pool, places), rows, counts, tokens, positions, features))
        for row, count in zip(rows, counts, strict=True):
            row.length += count
            row.pending, row.following = [], []

    def _read(
        self,
        pool: PagePool,
        rows: Sequence[HeadRow],
        verified: VerifyOutput,
        tokens: Sequence[Sequence[int]],
        sources: Sequence[Sequence[int]],
    ) -> None:
        """Make entries by graphs. Their pages exist, because the target has written the same tokens."""
        with self._captures.lock, pool.lock:
            buffers = self.buffers_of(pool)
            hidden = self._hidden_of(buffers, verified)
            is_one = sum(map(len, tokens)) <= buffers.max_entries
            most = buffers.max_entries // (1 if is_one else len(rows))
            for first in range(0, max(map(len, tokens)), most):
                part, places = ([own[first : first + most] for own in by_row] for by_row in (tokens, sources))
                counts = np.array([len(own) for own in part])
                begins = counts.cumsum() - counts
                entry_rows = np.repeat(np.arange(len(counts)), counts)
                entry_places = np.arange(len(entry_rows)) - begins[entry_rows]
                table_rows, starts = [row.row.block_table_row for row in rows], [row.length for row in rows]
                flat = (list(itertools.chain.from_iterable(parts)) for parts in (part, places))
                size = padded(len(entry_rows), ENTRIES)
                by_row = (begins, counts, starts, table_rows)
                buffers.new.load(size, (entry_rows, entry_places, *flat), by_row)
                self._replay_read(buffers, size, self._context(rows), hidden, verified.is_captured)
                for row, new in zip(rows, part, strict=True):
                    row.length += len(new)

    def _context(self, rows: Sequence[HeadRow]) -> int:
        return context_for(max((row.length for row in rows), default=0), self.contexts)

    # Graphs

    def buffers_of(self, pool: PagePool) -> Any:
        """The buffers over a pool, with its block tables on the device. Drops graphs over moved memory."""
        buffers: DraftBuffers | None = self._buffers.get(pool)
        if buffers is None or buffers.num_resized != pool.num_resized:
            new = self.fast.buffers(pool, self.store_for(pool), next(self._numbers))
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

    def _replay(self, buffers: DraftBuffers, kind: tuple[Any, ...], run: Run, is_static: bool = True) -> None:
        """Replay or run work. is_static: the inputs keep their addresses, so that a graph can be captured."""
        with on_device(self.device):
            step = self._captures.captured((buffers.number, *kind), run) if is_static else run
            step()

    def _replay_read(
        self, buffers: DraftBuffers, size: int, context: int, hidden: Tensor, is_static: bool = True
    ) -> None:
        run = partial(self._run_read, buffers, size, context, hidden)
        self._replay(buffers, ("read", size, context), run, is_static)

    @torch.no_grad()
    def _run_read(self, buffers: DraftBuffers, size: int, context: int, hidden: Tensor) -> None:
        self._run_entries(buffers, buffers.new.entries(size), context, hidden)

    def _run_entries(self, buffers: DraftBuffers, new: Entries, context: int, hidden: Tensor) -> None:
        """Run the head on entries. hidden: where their features are."""
        layout = Layout(
            rows=new.rows,
            places=new.places,
            depths=new.places,
            paths=buffers.paths[: len(new.rows)],
            starts=new.begins,
            counts=new.counts,
            lengths=new.lengths,
            table_rows=new.table_rows,
            tables=buffers.tables,
            max_context=context,
            only_chains=True,
        )
        features = hidden.index_select(0, new.nodes).to(self._weight.dtype)
        self.fast.enter(buffers, features, new.tokens, layout)

    def _try(self, state: HeadState) -> None:
        """Capture the head's functions on padding rows. If that fails, it is run directly from now on."""
        pool, captures = state.pool, self._captures
        context, size = self._context(state.rows), ENTRIES[0]
        try:
            buffers = self.buffers_of(pool)
            buffers.new.load(size)
            padding = [Row(0)] * max(len(state.rows), 1)
            asked = Passes.scratch(pool, None, padding, min(self.max_passes, 2))  # later ones are like the second
            hidden = self._weight.new_zeros(1, self._weight.shape[1])

            def work() -> None:
                self._run_read(buffers, size, context, hidden)
                self.run_passes(asked, lambda *level: None)

            self._replay(buffers, ("try",), work)
        except Exception as error:  # compilers and drivers may raise any type
            if is_out_of_memory(error):
                raise
            captures.failure = first_line(error)
            captures.forget()
            self._buffers.clear()
            warnings.warn(f"draft passes cannot be captured in CUDA graphs: {captures.failure}", stacklevel=3)
