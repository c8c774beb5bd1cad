"""The KV cache: one pool of pages for all requests, and block tables that list each row's pages.

A page holds the keys and values of `PAGE` tokens. A row gets pages as its text grows and frees them when it is
released; other rows do not move. A step writes its tokens after a row's committed length. `commit` keeps the accepted
ones, and the next step overwrites the others. Rows may share the pages of a common prefix, which are then read-only.
"""

from __future__ import annotations

import itertools
import math
import threading
import weakref
from array import array
from collections import OrderedDict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial
from hashlib import blake2b
from typing import Any

import numpy as np
import torch
from torch import Tensor
from transformers.cache_utils import Cache

from graft.errors import GraftError
from graft.model import overrides

PAGE = 64  # tokens per page; the attention kernels sum in blocks of this size
_FIRST_PAGES = 64  # initial size of a pool that grows


class NoRoomError(torch.OutOfMemoryError):
    """No page is free, though the device may have free memory."""


@dataclass(eq=False)
class Row:
    """The pages of one sequence."""

    block_table_row: int
    pages: list[int] = field(default_factory=list)  # in the order of the text; always the same list object
    length: int = 0  # committed tokens of the target
    offset: int = 0  # rotary position minus place in the text: an image takes fewer positions than places

    @property
    def is_open(self) -> bool:
        """Whether the row has not been released."""
        finalizer = self.__dict__.get("_finalizer")
        return finalizer is None or finalizer.alive


Pair = tuple[Tensor, Tensor]  # keys and values


class KVStore:
    """Keys and values of one network in all pages: [layers, slots, heads, head_dim], slot = page * PAGE + offset.

    Layers with other head sizes than the first layer have tensors of their own.
    """

    def __init__(self, num_layers: int) -> None:
        self._num_layers = num_layers
        self._num_slots = 0
        self.keys: Tensor | None = None  # allocated when heads, dtype and device are known
        self.values: Tensor | None = None
        self._others: dict[int, Pair] = {}  # by layer, [1, slots, heads, head_dim]

    @property
    def stored(self) -> tuple[Tensor, Tensor]:
        assert self.keys is not None and self.values is not None
        return self.keys, self.values

    def shape(self, like: Tensor, key_heads: tuple[int, int], value_heads: tuple[int, int] | None = None) -> None:
        """Allocate keys and values of these (heads, head_dim). value_heads: None: the same as key_heads."""
        # Zeros, not uninitialized memory: a masked slot may be read, and NaN times zero is NaN.
        self.keys = _zeros(like, (self._num_layers, self._num_slots, *key_heads))
        self.values = _zeros(like, (self._num_layers, self._num_slots, *(value_heads or key_heads)))

    def shape_layers(self, like: Tensor, heads: Sequence[tuple[int, int, int]]) -> None:
        """Allocate keys and values of these (heads, head_dim, value_dim) by layer."""
        count, *dims = heads[0]
        self.shape(like, (count, dims[0]), (count, dims[1]))
        for layer, (count, *dims) in enumerate(heads):
            if heads[layer] != heads[0]:
                keys, values = (_zeros(like, (1, self._num_slots, count, size)) for size in dims)
                self._others[layer] = keys, values

    @property
    def by_layer(self) -> list[Pair]:
        """Keys and values of each layer, [slots, heads, head_dim]."""
        alike = zip(*self.stored, strict=True)
        others = {layer: (keys[0], values[0]) for layer, (keys, values) in self._others.items()}
        return [others.get(layer, pair) for layer, pair in enumerate(alike)]

    @property
    def pairs(self) -> list[Pair]:
        """All keys and values, [layers, slots, heads, head_dim]: those of equal layers, then of each other layer."""
        alike = [(self.keys, self.values)] if self.keys is not None and self.values is not None else []
        return [*alike, *self._others.values()]

    def of_layer(self, layer: int, keys: Tensor, values: Tensor) -> Pair:
        """A layer's store [slots, heads, head_dim], allocated to fit these keys and values [1, heads, T, head_dim]."""
        heads = _heads_of(keys), _heads_of(values)
        if self.keys is None:
            self.shape(keys, *heads)
        stored = self._others.get(layer, self.stored)
        if heads == (stored[0].shape[2:], stored[1].shape[2:]):
            place = 0 if layer in self._others else layer
            return stored[0][place], stored[1][place]
        own = tuple(_zeros(keys, (1, self._num_slots, *shape)) for shape in heads)
        self._others[layer] = own[0], own[1]
        return own[0][0], own[1][0]

    def grown(self, num_slots: int) -> list[Pair]:
        """Copies of `pairs` with room for `num_slots`, to be passed to `take`."""

        def larger(stored: Tensor) -> Tensor:
            new = _zeros(stored, (len(stored), num_slots, *stored.shape[2:]))
            new[:, : self._num_slots] = stored[:, :num_slots]
            return new

        return [(larger(keys), larger(values)) for keys, values in self.pairs]

    def take(self, num_slots: int, grown: list[Pair]) -> None:
        self._num_slots = num_slots
        if grown:
            self.keys, self.values = grown[0]
            self._others = dict(zip(self._others, grown[1:], strict=True))

    def move(self, source: Tensor, target: Tensor) -> None:
        """Copy slots into others, in all layers."""
        for stored in itertools.chain(*self.pairs):
            stored[:, target] = stored[:, source]

    def copy_page(self, source: int, target: int) -> None:
        for stored in itertools.chain(*self.pairs):
            stored[:, target * PAGE : (target + 1) * PAGE] = stored[:, source * PAGE : (source + 1) * PAGE]

    @property
    def bytes_per_token(self) -> int:
        return sum(stored[:, :1].numel() * stored.element_size() for stored in itertools.chain(*self.pairs))

    @property
    def nbytes(self) -> int:
        return sum(stored.nbytes for stored in itertools.chain(*self.pairs))


class PagePool:
    """Free pages, reference counts, the prefix cache and the block tables.

    Page 0 and row 0 of the block tables are reserved: padding tokens are written there.
    """

    def __init__(
        self,
        device: torch.device,
        max_positions: int | None,
        num_pages: int | None = None,
        num_rows: int = 7,
        first_pages: int = _FIRST_PAGES,
    ) -> None:
        """num_pages: a fixed number of pages; None: the pool starts with `first_pages` and grows on demand.

        max_positions: the model's context, which limits a row. num_rows: rows for which the block tables need not grow.
        """
        self.device = device
        self.is_fixed = num_pages is not None
        self.stores: weakref.WeakSet[KVStore] = weakref.WeakSet()
        # Runners of draft models over the same pages, by drafter. They live as long as the pool.
        self.guests: weakref.WeakKeyDictionary[Any, Any] = weakref.WeakKeyDictionary()
        self.num_resized = 0  # memory addresses change with each resize
        self.num_prefix_queries = self.num_prefix_hits = 0  # tokens looked up in the prefix cache, and found
        self._max_positions = max_positions
        self._longest = -(-(max_positions or 0) // PAGE) + 4  # pages of a row, if the model's context is limited
        # Any thread may release rows. While the lock is held, the pool does not grow, so nothing moves.
        self.lock = threading.RLock()
        self._ref_counts = np.zeros(0, dtype=np.int32)  # [pages] rows that use each page
        self._page_by_hash: OrderedDict[bytes, int] = OrderedDict()  # prefix cache, the least recently used first
        self._hash_of_page: dict[int, bytes] = {}
        self._is_kept = np.zeros(0, dtype=bool)  # [pages] whether the prefix cache has it
        self._free_table_rows: list[int] = []
        self._host_tables = np.zeros((0, 0), dtype=np.int32)  # block tables, [table rows, pages]
        self._staged: Tensor | None = None
        self._loaded: torch.cuda.Event | None = None
        self._is_changed = True
        self.tables = torch.zeros(0, 0, dtype=torch.int32, device=device)
        self._resize(num_pages + 1 if num_pages is not None else first_pages, num_rows + 1)

    # Size

    @property
    def num_pages(self) -> int:
        """Pages that rows can use."""
        return len(self._ref_counts) - 1

    @property
    def num_free(self) -> int:
        """Pages that no row uses, including those of the prefix cache."""
        return int((self._ref_counts[1:] == 0).sum())

    @property
    def is_in_use(self) -> bool:
        """Whether any row uses a page."""
        return self.num_free < self.num_pages

    @property
    def num_prefix_tokens(self) -> int:
        return PAGE * len(self._page_by_hash)

    @property
    def num_table_rows(self) -> int:
        return len(self._host_tables)

    @property
    def max_slots(self) -> int | None:
        """The most tokens that a block table row can hold, slightly more than the model's context; None: no limit."""
        return None if self._max_positions is None else PAGE * self._longest

    def add_store(self, store: KVStore) -> None:
        if store not in self.stores:
            num_slots = len(self._ref_counts) * PAGE
            store.take(num_slots, store.grown(num_slots))
        self.stores.add(store)

    def _resize(self, num_pages: int, num_table_rows: int) -> None:
        """Change the number of pages and table rows. If it fails, nothing has changed."""
        longest = num_pages if self._max_positions is None else min(num_pages, self._longest)
        on_gpu, shape, num_slots = self.device.type == "cuda", (num_table_rows, longest), num_pages * PAGE
        uses, here = np.zeros(num_pages, dtype=np.int32), np.zeros(shape, dtype=np.int32)
        is_kept = np.zeros(num_pages, dtype=bool)
        staged = torch.zeros(shape, dtype=torch.int32, pin_memory=on_gpu)
        tables = torch.zeros(shape, dtype=torch.int32, device=self.device)
        loaded = torch.cuda.Event() if on_gpu else None
        stores = list(self.stores) if num_pages != len(self._ref_counts) else []
        grown = [store.grown(num_slots) for store in stores]
        new_rows = range(max(len(self._host_tables), 1), num_table_rows)
        # Allocate nothing from here on: it may start the garbage collector, which could release rows into old arrays.
        uses[: len(self._ref_counts)] = self._ref_counts
        uses[0] = 1
        here[: len(self._host_tables), : self._host_tables.shape[1]] = self._host_tables
        is_kept[: len(self._is_kept)] = self._is_kept
        self._ref_counts, self._host_tables, self._is_kept = uses, here, is_kept
        self._staged, self._loaded, self.tables = staged, loaded, tables
        self._is_changed = True
        self.num_resized += 1
        self._free_table_rows += new_rows
        for store, stored in zip(stores, grown, strict=True):
            store.take(num_slots, stored)

    def sync(self) -> Tensor:
        """Bring the block tables on the device up to date, and return them."""
        with self.lock:
            if self._is_changed:
                assert self._staged is not None
                if self._loaded is not None:
                    self._loaded.synchronize()
                self._staged.numpy()[:] = self._host_tables
                self.tables.copy_(self._staged, non_blocking=True)
                if self._loaded is not None:
                    self._loaded.record()
                self._is_changed = False
            return self.tables

    # Rows

    def open_row(self, num_slots: int) -> Row:
        """Open a row with pages for `num_slots` tokens; see `ensure`."""
        with self.lock:
            row = self._new_row()
            try:
                self.ensure(row, num_slots)
            except Exception:
                self.release(row)
                raise
            return row

    def ensure(self, row: Row, num_slots: int) -> None:
        """Give a row pages for `num_slots` tokens. Raises a NoRoomError, and changes nothing, if too few are free."""
        more = -(-num_slots // PAGE) - len(row.pages)
        if more > 0:
            with self.lock:
                start = len(row.pages)
                pages = self._allocate(more, row.pages[-1] + 1 if row.pages else 0)
                row.pages.extend(pages)
                if len(row.pages) > self._host_tables.shape[1]:
                    self.trim(row, PAGE * start)
                    raise GraftError(f"a text of {num_slots} tokens is longer than the model's context")
                self._host_tables[row.block_table_row, start : len(row.pages)] = row.pages[start:]
                self._is_changed = True

    def trim(self, row: Row, num_slots: int) -> None:
        """Free the pages after the first `num_slots` tokens."""
        with self.lock:
            kept = -(-num_slots // PAGE)
            self._free(row.pages[kept:])
            del row.pages[kept:]

    def release(self, row: Row) -> None:
        """Free a row and its pages; may be repeated."""
        finalizer = row.__dict__["_finalizer"]
        if finalizer.alive:
            self.end(row.block_table_row, row.pages)
            finalizer.detach()  # last: if the line before fails, the garbage collector still frees the row
        row.length = 0

    def copy(self, source: Row, target: Row) -> None:
        """Let `target` continue `source`'s committed text: full pages are shared, a partly filled last page is copied.

        The target keeps its further pages. Raises a NoRoomError, and changes nothing, if too few are free.
        """
        with self.lock:
            shared = source.length // PAGE
            own = target.pages[shared:]
            taken = [] if own else self._allocate(-(-source.length // PAGE) - shared)
            try:
                if source.length % PAGE:
                    for store in self.stores:
                        store.copy_page(source.pages[shared], [*own, *taken][0])
            except Exception:
                self._free(taken)
                raise
            self._ref_counts[target.pages[:shared]] -= 1
            self._ref_counts[source.pages[:shared]] += 1
            target.pages[:] = [*source.pages[:shared], *own, *taken]
            self._host_tables[target.block_table_row, : len(target.pages)] = target.pages
            self._is_changed = True
            target.length = source.length

    # Prefix cache

    def open_with_prefix(self, prompt: Sequence[int], salt: str, num_slots: int) -> Row:
        """Open a row for a prompt, with the pages of its longest cached prefix committed.

        At least one token is left to prefill, because a drafter starts from its features. A drafter's entry for a token
        also depends on the next token, which may differ after the last cached page. So that page is copied, and its
        last token is prefilled again.
        """
        with self.lock:
            hashes = _page_hashes(prompt[: len(prompt) - 1], salt)
            known = list(itertools.takewhile(self._page_by_hash.__contains__, hashes))
            self._mark_used(known)
            found = [self._page_by_hash[page_hash] for page_hash in known]
            self.num_prefix_queries += len(prompt)
            row = self._new_row()
            try:
                self._share(row, found[:-1], found[-1] if found else None, num_slots)
            except Exception:
                self.release(row)
                raise
            row.length = max(len(found) * PAGE - 1, 0)
            self.num_prefix_hits += row.length
            return row

    def keep_prefix(self, row: Row, text: Sequence[int], salt: str, num_entries: int | None = None) -> None:
        """Add the full pages of a row's committed text to the prefix cache.

        num_entries: tokens that the drafter's store has too; None: all committed ones.
        """
        with self.lock:
            count = min(row.length, len(text), row.length if num_entries is None else num_entries)
            hashes = list(_page_hashes(text[:count], salt))
            for page_hash, page in zip(hashes, row.pages, strict=False):
                if page_hash not in self._page_by_hash and page not in self._hash_of_page:
                    self._page_by_hash[page_hash] = page
                    self._hash_of_page[page] = page_hash
                    self._is_kept[page] = True
            self._mark_used(hashes)

    def _mark_used(self, hashes: Sequence[bytes]) -> None:
        """Move pages to the end of the eviction order. A text's first page goes last: without it none is found."""
        for page_hash in reversed(hashes):
            if page_hash in self._page_by_hash:
                self._page_by_hash.move_to_end(page_hash)

    def evict(self, max_tokens: int = 0) -> None:
        """Shrink the prefix cache to at most `max_tokens` tokens in pages that no row uses."""
        with self.lock:
            idle = [page for page in self._page_by_hash.values() if self._ref_counts[page] == 0]
            for page in idle[: max(len(idle) - max_tokens // PAGE, 0)]:
                self._evict_page(page)

    def _evict_page(self, page: int) -> None:
        del self._page_by_hash[self._hash_of_page.pop(page)]
        self._is_kept[page] = False

    # Pages

    def _new_row(self) -> Row:
        """Open a row without pages. Its pages are freed when the row is garbage-collected."""
        if not self._free_table_rows:
            self._resize(len(self._ref_counts), 2 * len(self._host_tables))
        row = Row(self._free_table_rows.pop(0))
        row.__dict__["_finalizer"] = weakref.finalize(row, _end, weakref.ref(self), row.block_table_row, row.pages)
        row.__dict__["_finalizer"].atexit = False
        self._host_tables[row.block_table_row] = 0
        self._is_changed = True
        return row

    def _share(self, row: Row, shared: list[int], copied: int | None, num_slots: int) -> None:
        """Give a new row shared pages, then a copy of one page, then pages of its own up to `num_slots`."""
        self._ref_counts[shared] += 1
        row.pages.extend(shared)
        self._host_tables[row.block_table_row, : len(shared)] = shared
        if copied is None:
            self.ensure(row, num_slots)
            return
        self._ref_counts[copied] += 1  # so that it is not evicted meanwhile
        try:
            self.ensure(row, max(num_slots, PAGE * (len(shared) + 1)))
            for store in self.stores:
                store.copy_page(copied, row.pages[len(shared)])
        finally:
            self._ref_counts[copied] -= 1

    def _allocate(self, count: int, after: int = 0) -> list[int]:
        """Allocate `count` pages. They are consecutive if possible, and start with page `after` if possible."""
        if count == 0:
            return []
        if not self.is_fixed and count > self.num_free:
            self._resize(max(2 * len(self._ref_counts), len(self._ref_counts) + count), len(self._host_tables))
        end = after + count
        is_inside = after > 0 and end <= len(self._ref_counts)
        if is_inside and not (self._ref_counts[after:end].any() or self._is_kept[after:end].any()):
            self._ref_counts[after:end] = 1
            return list(range(after, end))
        # Pages of the prefix cache are taken last, the least recently used first.
        free = np.flatnonzero((self._ref_counts == 0) & ~self._is_kept)
        if len(free) < count:
            unused = [page for page in self._page_by_hash.values() if self._ref_counts[page] == 0][: count - len(free)]
            if len(free) + len(unused) < count:
                raise NoRoomError(f"{len(free) + len(unused)} pages of {PAGE} tokens are free, and {count} are needed")
            for page in unused:
                self._evict_page(page)
            free = np.sort(np.concatenate([free, np.array(unused, dtype=free.dtype)]))
        runs = np.flatnonzero(free[count - 1 :] - free[: len(free) - count + 1] == count - 1)
        behind = runs[free[runs] == after]
        first = behind[0] if len(behind) else runs[0] if len(runs) else 0
        pages = free[first : first + count].tolist()
        self._ref_counts[pages] = 1
        return pages

    def _free(self, pages: Sequence[int]) -> None:
        for page in pages:
            self._ref_counts[page] -= 1

    def end(self, block_table_row: int, pages: list[int]) -> None:
        with self.lock:
            self._free(pages)
            pages.clear()
            self._free_table_rows.append(block_table_row)


def _end(pool: weakref.ref[PagePool], block_table_row: int, pages: list[int]) -> None:
    alive = pool()
    if alive is not None:
        alive.end(block_table_row, pages)


def _page_hashes(text: Sequence[int], salt: str) -> Iterator[bytes]:
    """Hashes of a text's full pages, each over the salt and all tokens up to the page's end."""
    page_hash = blake2b(salt.encode(), digest_size=16).digest()
    for end in range(PAGE, len(text) + 1, PAGE):
        page_hash = blake2b(page_hash + array("q", text[end - PAGE : end]).tobytes(), digest_size=16).digest()
        yield page_hash


class KVCache(Cache):
    """The rows of one batch, as transformers' layers and the engine see them."""

    def __init__(self, pool: PagePool, store: KVStore, rows: list[Row]) -> None:
        super().__init__(layers=[])
        self.pool, self.store, self.rows = pool, store, rows
        self._slots: Tensor | None = None  # [T] slots that the current forward writes
        self._end: int | None = None  # end of the slots that it may read; None: all
        self._positions: Tensor | None = None  # [T] positions of its tokens

    @property
    def num_rows(self) -> int:
        return len(self.rows)

    @property
    def lengths(self) -> list[int]:
        """Committed tokens of each row."""
        return [row.length for row in self.rows]

    def commit(self, paths: Sequence[Sequence[int]]) -> None:
        """Commit the root and the accepted path of each row's last tree, and move them to consecutive places.

        A path lists places of the row's nodes in the step, in order, without the root.
        """
        moves = [
            (row, place, step)
            for row, path in zip(self.rows, paths, strict=True)
            for step, place in enumerate(path, start=1)
            if place != step
        ]
        if moves:
            source = self.slots_of([(row, row.length + place) for row, place, _ in moves])
            target = self.slots_of([(row, row.length + place) for row, _, place in moves])
            self.store.move(source, target)
        self.advance([1 + len(path) for path in paths])

    def advance(self, counts: Sequence[int]) -> None:
        for row, count in zip(self.rows, counts, strict=True):
            row.length += count

    def fill(self, row: int, source: Cache, source_row: int, first: int, end: int, offset: int) -> None:
        """Copy the entries [first, end) of a cache that the model's own forward has filled to an empty row, and commit.

        offset: `Row.offset` of the tokens that follow.
        """
        own = self.rows[row]
        self.pool.ensure(own, end - first)
        slots = self.slots_of([(own, position) for position in range(end - first)])
        for layer, cached in enumerate(source.layers):
            states: Any = (getattr(cached, "keys", None), getattr(cached, "values", None))
            if states[0] is None:  # the layer shares another layer's keys and values
                continue
            states = [part[source_row : source_row + 1, :, first:end] for part in states]
            for stored, part in zip(self.store.of_layer(layer, *states), states, strict=True):
                stored.index_copy_(0, slots, part[0].transpose(0, 1))
        own.length, own.offset = end - first, offset

    def with_rows(self, rows: list[Row]) -> KVCache:
        """A cache of other rows of the same pool."""
        return KVCache(self.pool, self.store, rows)

    def release(self) -> None:
        for row in self.rows:
            self.pool.release(row)

    def slots_of(self, places: Sequence[tuple[Row, int]]) -> Tensor:
        """Slots of positions in rows."""
        slots = [row.pages[position // PAGE] * PAGE + position % PAGE for row, position in places]
        return torch.tensor(slots, device=self.pool.device)

    # What transformers' layers call

    def write_at(self, slots: Tensor) -> None:
        """Set the slots [T] of the next forward's tokens."""
        self._slots = slots

    @property
    def written(self) -> Tensor:
        """The slots [T] that the next forward writes."""
        assert self._slots is not None
        return self._slots

    def read_until(self, end: int) -> None:
        """Hide slots from `end` on, because some models copy all values that they get."""
        self._end = end

    def update(
        self, key_states: Tensor, value_states: Tensor, layer_idx: int, *args: Any, **kwargs: Any
    ) -> tuple[Tensor, Tensor]:
        """Write a layer's new keys and values [1, heads, T, head_dim]; return those to read, in the same form.

        Latents are returned as they are; see `overrides.expands_latents`.
        """
        if overrides.expands_latents():
            overrides.write_later(partial(self._write, layer_idx))
            return key_states, value_states
        return self._write(layer_idx, key_states, value_states)

    def _write(self, layer_idx: int, key_states: Tensor, value_states: Tensor) -> Pair:
        assert self._slots is not None
        keys, values = self.store.of_layer(layer_idx, key_states, value_states)
        for stored, states in ((keys, key_states), (values, value_states)):
            stored.index_copy_(0, self._slots, states[0].transpose(0, 1))
        end = self._end
        return keys[:end].transpose(0, 1)[None], values[:end].transpose(0, 1)[None]

    def place_at(self, positions: Tensor) -> None:
        """Set the positions [T] of the next forward's tokens."""
        self._positions = positions

    def get_seq_length(self, layer_idx: int = 0) -> Any:
        """The offset to which Llama 4's layers add 0, 1, 2, ... to get their tokens' positions.

        Positions in a tree are not consecutive, so this is a tensor that gives the right sums. Until positions are set,
        it is the length of the longest row.
        """
        positions = self._positions
        if positions is None:
            return max(self.lengths, default=0)
        return positions - torch.arange(len(positions), device=positions.device)


def _zeros(like: Tensor, shape: tuple[int, ...]) -> Tensor:
    """Zeros. On a CPU, memory is only committed when first written, since most of a large pool may never be used."""
    if like.device.type != "cpu" or 0 in shape:
        return like.new_zeros(shape)
    memory = np.zeros(math.prod(shape) * like.element_size(), dtype=np.uint8)
    return torch.from_numpy(memory).view(like.dtype).view(shape)


def _heads_of(states: Tensor) -> tuple[int, int]:
    return states.shape[1], states.shape[3]
