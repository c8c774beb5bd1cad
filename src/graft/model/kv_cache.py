"""The KV cache: one pool of pages for all requests, and block tables that say which pages are whose.

A page holds the keys and values of `PAGE` tokens. A row takes pages as its text grows and gives them back when it
leaves; nothing moves when others come or go. A step writes its tokens behind a row's committed length, and `commit`
says which of them stay: the next step writes over the others. Pages of a text's beginning may be shared by several
rows; nobody writes to a shared page.
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
from hashlib import blake2b
from typing import Any

import numpy as np
import torch
from torch import Tensor
from transformers.cache_utils import Cache

from graft.errors import GraftError

PAGE = 64  # tokens of a page: a block of the attention's sums
_FIRST_PAGES = 64  # of a pool that grows


class NoRoomError(torch.OutOfMemoryError):
    """All pages are taken, whether or not there is memory."""


@dataclass(eq=False)
class Row:
    """One request's pages. Line: its line in the block tables."""

    line: int
    pages: list[int] = field(default_factory=list)  # in the order of the text; the same list as long as it lives
    length: int = 0  # committed tokens of the target
    offset: int = 0  # of its tokens' rotary positions from their places in the text: an image takes fewer than it has
    begun: Any = None  # a `runner.BegunStep`, left by a drafter that shares the target's layers

    def take_begun(self) -> Any:
        """What was begun behind the committed tokens, for the step that now writes there."""
        begun, self.begun = self.begun, None
        return begun if begun is not None and begun.length == self.length else None


Pair = tuple[Tensor, Tensor]  # keys and values


class KVStore:
    """Keys and values of one network in all pages: [layers, slots, heads, head_dim], slot = page * PAGE + place.

    Layers whose heads are others than the first layer's have tensors of their own.
    """

    def __init__(self, num_layers: int) -> None:
        self._num_layers = num_layers
        self._num_slots = 0
        self.keys: Tensor | None = None  # made when heads, dtype and device are known
        self.values: Tensor | None = None
        self._others: dict[int, Pair] = {}  # by layer, [1, slots, heads, head_dim]

    @property
    def num_slots(self) -> int:
        return self._num_slots

    @property
    def stored(self) -> tuple[Tensor, Tensor]:
        assert self.keys is not None and self.values is not None
        return self.keys, self.values

    def shape(self, like: Tensor, key_heads: tuple[int, int], value_heads: tuple[int, int] | None = None) -> None:
        """Allocates, as (heads, head_dim) of keys and of values, if other than the keys', say."""
        # Zeros, not empty memory: a masked slot may be read, and NaN times zero is NaN.
        self.keys = _zeros(like, (self._num_layers, self._num_slots, *key_heads))
        self.values = _zeros(like, (self._num_layers, self._num_slots, *(value_heads or key_heads)))

    @property
    def pairs(self) -> list[Pair]:
        """All keys and values, [layers, slots, heads, head_dim]: of layers that are alike, and of each other one."""
        alike = [(self.keys, self.values)] if self.keys is not None and self.values is not None else []
        return [*alike, *self._others.values()]

    def of_layer(self, layer: int, keys: Tensor, values: Tensor) -> Pair:
        """What is stored of a layer, [slots, heads, head_dim], which has keys and values [1, heads, T, head_dim]."""
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
        """`pairs` with room for so many slots, what is stored at its place; for `take`."""

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

    def move(self, source: Tensor, target: Tensor, num_layers: int | None = None) -> None:
        """Copies what is in some slots into others, in the first layers; None: in all."""
        for stored in self.stored:
            stored[:num_layers, target] = stored[:num_layers, source]
        for layer, pair in self._others.items():
            if num_layers is None or layer < num_layers:
                for stored in pair:
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
    """Free pages, reference counts, the pages of texts that are kept for others, and the block tables.

    Page 0 and line 0 are nobody's: what a step pads its tokens with goes there.
    """

    def __init__(
        self,
        device: torch.device,
        max_positions: int | None,
        num_pages: int | None = None,
        num_rows: int = 7,
        first_pages: int = _FIRST_PAGES,
    ) -> None:
        """num_pages: how many there are, once and for all; None lets the pool grow with what is asked for, from
        `first_pages` on.

        max_positions: of the model; no row is longer. num_rows: for as many the tables stay where they are.
        """
        self.device = device
        self.is_fixed = num_pages is not None
        self.stores: weakref.WeakSet[KVStore] = weakref.WeakSet()
        # Runners of other models over the same pages, by whose they are; they go with the pool.
        self.guests: weakref.WeakKeyDictionary[Any, Any] = weakref.WeakKeyDictionary()
        self.num_resized = 0  # addresses are others from each time on
        self.num_asked = self.num_found = 0  # tokens looked for among the kept, and found
        self._max_positions = max_positions
        self._longest = -(-(max_positions or 0) // PAGE) + 4  # pages of a row, if there is such a limit
        # Rows may be given back by any thread; and while it is held the pool does not grow, so nothing moves.
        self.lock = threading.RLock()
        self._uses = np.zeros(0, dtype=np.int32)  # rows that have a page
        self._kept: OrderedDict[bytes, int] = OrderedDict()  # pages by name, the least recently used first
        self._names: dict[int, bytes] = {}  # of the kept pages
        self._is_kept = np.zeros(0, dtype=bool)  # by page
        self._free_lines: list[int] = []
        self._here = np.zeros((0, 0), dtype=np.int32)  # block tables on the host, [lines, pages]
        self._staged: Tensor | None = None
        self._loaded: torch.cuda.Event | None = None
        self._is_changed = True
        self.tables = torch.zeros(0, 0, dtype=torch.int32, device=device)
        self._resize(num_pages + 1 if num_pages is not None else first_pages, num_rows + 1)

    # Size

    @property
    def num_pages(self) -> int:
        """Pages that rows can have."""
        return len(self._uses) - 1

    @property
    def num_free(self) -> int:
        """Pages that no row has; those kept for others among them."""
        return int((self._uses[1:] == 0).sum())

    @property
    def is_in_use(self) -> bool:
        """Whether any row has a page."""
        return self.num_free < self.num_pages

    @property
    def num_kept_tokens(self) -> int:
        return PAGE * len(self._kept)

    @property
    def num_lines(self) -> int:
        return len(self._here)

    @property
    def max_slots(self) -> int | None:
        """Tokens that a line of the block tables can name at most, some more than the model's positions; None: any."""
        return None if self._max_positions is None else PAGE * self._longest

    def add_store(self, store: KVStore) -> None:
        if store not in self.stores:
            num_slots = len(self._uses) * PAGE
            store.take(num_slots, store.grown(num_slots))
        self.stores.add(store)

    def _resize(self, num_pages: int, num_lines: int) -> None:
        """What fails has changed nothing."""
        longest = num_pages if self._max_positions is None else min(num_pages, self._longest)
        on_gpu, shape, num_slots = self.device.type == "cuda", (num_lines, longest), num_pages * PAGE
        uses, here = np.zeros(num_pages, dtype=np.int32), np.zeros(shape, dtype=np.int32)
        is_kept = np.zeros(num_pages, dtype=bool)
        staged = torch.zeros(shape, dtype=torch.int32, pin_memory=on_gpu)
        tables = torch.zeros(shape, dtype=torch.int32, device=self.device)
        loaded = torch.cuda.Event() if on_gpu else None
        stores = list(self.stores) if num_pages != len(self._uses) else []
        grown = [store.grown(num_slots) for store in stores]
        lines = range(max(len(self._here), 1), num_lines)
        # From here on nothing is allocated: a collector that ends rows meanwhile would give pages of the past back.
        uses[: len(self._uses)] = self._uses
        uses[0] = 1
        here[: len(self._here), : self._here.shape[1]] = self._here
        is_kept[: len(self._is_kept)] = self._is_kept
        self._uses, self._here, self._is_kept = uses, here, is_kept
        self._staged, self._loaded, self.tables = staged, loaded, tables
        self._is_changed = True
        self.num_resized += 1
        self._free_lines += lines
        for store, stored in zip(stores, grown, strict=True):
            store.take(num_slots, stored)

    def sync(self) -> Tensor:
        """The block tables on the device, as they are now."""
        with self.lock:
            if self._is_changed:
                assert self._staged is not None
                if self._loaded is not None:
                    self._loaded.synchronize()
                self._staged.numpy()[:] = self._here
                self.tables.copy_(self._staged, non_blocking=True)
                if self._loaded is not None:
                    self._loaded.record()
                self._is_changed = False
            return self.tables

    # Rows

    def open_row(self, num_slots: int) -> Row:
        """A row with pages for so many tokens; a NoRoomError, and no change, if there are too few."""
        with self.lock:
            row = self._new_row()
            try:
                self.ensure(row, num_slots)
            except Exception:
                self.release(row)
                raise
            return row

    def ensure(self, row: Row, num_slots: int) -> None:
        """Makes the row's pages hold so many tokens; a NoRoomError, and no change, if there are too few."""
        more = -(-num_slots // PAGE) - len(row.pages)
        if more > 0:
            with self.lock:
                start = len(row.pages)
                pages = self._take(more, row.pages[-1] + 1 if row.pages else 0)
                row.pages.extend(pages)
                if len(row.pages) > self._here.shape[1]:
                    self.trim(row, PAGE * start)
                    raise GraftError(f"a text of {num_slots} tokens is longer than the model's context")
                self._here[row.line, start : len(row.pages)] = row.pages[start:]
                self._is_changed = True

    def trim(self, row: Row, num_slots: int) -> None:
        """Gives back the pages behind so many tokens."""
        with self.lock:
            kept = -(-num_slots // PAGE)
            self._give_back(row.pages[kept:])
            del row.pages[kept:]

    def release(self, row: Row) -> None:
        """Gives back all that a row has; may be repeated."""
        finalizer = row.__dict__["_finalizer"]
        if finalizer.alive:
            self.end(row.line, row.pages)
            finalizer.detach()  # last: what has failed is done when nobody knows the row any more
        row.length = 0

    def copy(self, source: Row, target: Row) -> None:
        """Makes one row go on from another's committed text: whole pages are shared, the last is copied.

        The pages that it has behind them stay its own. A NoRoomError, and no change, if there are too few.
        """
        with self.lock:
            shared = source.length // PAGE
            own = target.pages[shared:]
            taken = [] if own else self._take(-(-source.length // PAGE) - shared)
            try:
                if source.length % PAGE:
                    for store in self.stores:
                        store.copy_page(source.pages[shared], [*own, *taken][0])
            except Exception:
                self._give_back(taken)
                raise
            self._uses[target.pages[:shared]] -= 1
            self._uses[source.pages[:shared]] += 1
            target.pages[:] = [*source.pages[:shared], *own, *taken]
            self._here[target.line, : len(target.pages)] = target.pages
            self._is_changed = True
            target.length = source.length

    # Kept texts

    def open_like(self, prompt: Sequence[int], salt: str, num_slots: int) -> Row:
        """A row for a prompt: what is known of its beginning is committed.

        One token at least is left to read, whose features a drafter starts from. And since a drafter's entry of a token
        depends on the token behind it, the last token of the last page found is read again: that page is copied.
        """
        with self.lock:
            names: list[bytes] = []
            for name in _names(prompt[: len(prompt) - 1], salt):
                if name not in self._kept:
                    break
                names.append(name)
            self._use(names)
            found = [self._kept[name] for name in names]
            self.num_asked += len(prompt)
            row = self._new_row()
            try:
                self._share(row, found[:-1], found[-1] if found else None, num_slots)
            except Exception:
                self.release(row)
                raise
            row.length = max(len(found) * PAGE - 1, 0)
            self.num_found += row.length
            return row

    def keep(self, row: Row, text: Sequence[int], salt: str, num_entries: int | None = None) -> None:
        """Keeps the whole pages of a row's committed text, for rows whose prompts begin alike.

        num_entries: tokens that the drafter's store has too; None: all that are committed.
        """
        with self.lock:
            count = min(row.length, len(text), row.length if num_entries is None else num_entries)
            names = list(_names(text[:count], salt))
            for name, page in zip(names, row.pages, strict=False):
                if name not in self._kept and page not in self._names:
                    self._kept[name] = page
                    self._names[page] = name
                    self._is_kept[page] = True
            self._use(names)

    def _use(self, names: Sequence[bytes]) -> None:
        """Its pages go last when others are needed; a text's end goes before its beginning, which it is found by."""
        for name in reversed(names):
            if name in self._kept:
                self._kept.move_to_end(name)

    def forget(self, max_tokens: int = 0) -> None:
        """Keeps at most so many tokens of texts that nobody uses."""
        with self.lock:
            idle = [name for name, page in self._kept.items() if self._uses[page] == 0]
            for name in idle[: max(len(idle) - max_tokens // PAGE, 0)]:
                self._keep_no_longer(self._kept[name])

    def _keep_no_longer(self, page: int) -> None:
        del self._kept[self._names.pop(page)]
        self._is_kept[page] = False

    # Pages

    def _new_row(self) -> Row:
        """A row without pages. Whatever it comes to have is given back when nobody knows it any more."""
        if not self._free_lines:
            self._resize(len(self._uses), 2 * len(self._here))
        row = Row(self._free_lines.pop(0))
        row.__dict__["_finalizer"] = weakref.finalize(row, _end, weakref.ref(self), row.line, row.pages)
        row.__dict__["_finalizer"].atexit = False
        self._here[row.line] = 0
        self._is_changed = True
        return row

    def _share(self, row: Row, shared: list[int], copied: int | None, num_slots: int) -> None:
        """Gives a new row others' pages, a copy of one and, behind it, pages of its own."""
        self._uses[shared] += 1
        row.pages.extend(shared)
        self._here[row.line, : len(shared)] = shared
        if copied is None:
            self.ensure(row, num_slots)
            return
        self._uses[copied] += 1  # it is not to go meanwhile
        try:
            self.ensure(row, max(num_slots, PAGE * (len(shared) + 1)))
            for store in self.stores:
                store.copy_page(copied, row.pages[len(shared)])
        finally:
            self._uses[copied] -= 1

    def _take(self, count: int, after: int = 0) -> list[int]:
        """So many free pages, one behind the other if there are such, from `after` on if that can be."""
        if count == 0:
            return []
        if not self.is_fixed and count > self.num_free:
            self._resize(max(2 * len(self._uses), len(self._uses) + count), len(self._here))
        end = after + count
        if 0 < after <= len(self._uses) - count and not (self._uses[after:end].any() or self._is_kept[after:end].any()):
            self._uses[after:end] = 1
            return list(range(after, end))
        # Kept pages go last, the least recently used first.
        free = np.flatnonzero((self._uses == 0) & ~self._is_kept)
        if len(free) < count:
            unused = [page for page in self._kept.values() if self._uses[page] == 0][: count - len(free)]
            if len(free) + len(unused) < count:
                raise NoRoomError(f"{len(free) + len(unused)} pages of {PAGE} tokens are free, and {count} are needed")
            for page in unused:
                self._keep_no_longer(page)
            free = np.sort(np.concatenate([free, np.array(unused, dtype=free.dtype)]))
        runs = np.flatnonzero(free[count - 1 :] - free[: len(free) - count + 1] == count - 1)
        behind = runs[free[runs] == after]
        first = behind[0] if len(behind) else runs[0] if len(runs) else 0
        pages = free[first : first + count].tolist()
        self._uses[pages] = 1
        return pages

    def _give_back(self, pages: Sequence[int]) -> None:
        for page in pages:
            self._uses[page] -= 1

    def end(self, line: int, pages: list[int]) -> None:
        with self.lock:
            self._give_back(pages)
            pages.clear()
            self._free_lines.append(line)


def _end(pool: weakref.ref[PagePool], line: int, pages: list[int]) -> None:
    there = pool()
    if there is not None:
        there.end(line, pages)


def _names(text: Sequence[int], salt: str) -> Iterator[bytes]:
    """The names of a text's whole pages: by all tokens up to its end. Texts under different salts share none."""
    name = blake2b(salt.encode(), digest_size=16).digest()
    for end in range(PAGE, len(text) + 1, PAGE):
        name = blake2b(name + array("q", text[end - PAGE : end]).tobytes(), digest_size=16).digest()
        yield name


class KVCache(Cache):
    """The rows of one batch: what transformers' own layers, and whoever decodes, know of the pool."""

    def __init__(self, pool: PagePool, store: KVStore, rows: list[Row]) -> None:
        super().__init__(layers=[])
        self.pool, self.store, self.rows = pool, store, rows
        self._slots: Tensor | None = None  # [T] that the current forward writes
        self._end: int | None = None  # of the slots that it may read; None: all
        self._positions: Tensor | None = None  # [T] of its tokens

    @property
    def num_rows(self) -> int:
        return len(self.rows)

    @property
    def lengths(self) -> list[int]:
        """Committed tokens of each row."""
        return [row.length for row in self.rows]

    def commit(self, paths: Sequence[Sequence[int]]) -> None:
        """Commits, in each row, token 0 of its last tree and the nodes of its path, moved together, in all layers.

        A path lists nodes of the row's tree, by their places in the step, in order, without the root.
        """
        moves = [
            (row, place, step)
            for row, path in zip(self.rows, paths, strict=True)
            for step, place in enumerate(path, start=1)
            if place != step
        ]
        self.move(moves)
        self.advance([1 + len(path) for path in paths])

    def move(self, moves: Sequence[tuple[Row, int, int]], num_layers: int | None = None) -> None:
        """Moves keys and values behind rows' committed tokens from places to others, all at once, in the first layers.

        num_layers: None: all of them.
        """
        if moves:
            source = self.slots_of([(row, row.length + place) for row, place, _ in moves])
            target = self.slots_of([(row, row.length + place) for row, _, place in moves])
            self.store.move(source, target, num_layers)

    def advance(self, counts: Sequence[int]) -> None:
        for row, count in zip(self.rows, counts, strict=True):
            row.length += count

    def fill(self, row: int, source: Cache, source_row: int, first: int, end: int, offset: int) -> None:
        """Commits to an empty row what the model's own forward has cached of a text, from one place to another.

        offset: of the rotary positions of what comes behind it.
        """
        own = self.rows[row]
        self.pool.ensure(own, end - first)
        slots = self.slots_of([(own, position) for position in range(end - first)])
        for layer, cached in enumerate(source.layers):
            states: Any = (getattr(cached, "keys", None), getattr(cached, "values", None))
            if states[0] is None:  # it shares those of another layer
                continue
            states = [part[source_row : source_row + 1, :, first:end] for part in states]
            for stored, part in zip(self.store.of_layer(layer, *states), states, strict=True):
                stored.index_copy_(0, slots, part[0].transpose(0, 1))
        own.length, own.offset = end - first, offset

    def with_rows(self, rows: list[Row]) -> KVCache:
        """The same pool's cache of other rows."""
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
        """Sets the slots [T] of the next forward's tokens."""
        self._slots = slots

    def read_until(self, end: int) -> None:
        """Gives layers no slots from this one on: latent attention expands whatever it is given."""
        self._end = end

    def update(
        self, key_states: Tensor, value_states: Tensor, layer_idx: int, *args: Any, **kwargs: Any
    ) -> tuple[Tensor, Tensor]:
        """Writes one layer's new keys and values [1, heads, T, head_dim]; returns what may be read, likewise."""
        assert self._slots is not None
        keys, values = self.store.of_layer(layer_idx, key_states, value_states)
        for stored, states in ((keys, key_states), (values, value_states)):
            stored.index_copy_(0, self._slots, states[0].transpose(0, 1))
        end = self._end
        return keys[:end].transpose(0, 1)[None], values[:end].transpose(0, 1)[None]

    def place_at(self, positions: Tensor) -> None:
        """Sets the positions [T] of the next forward's tokens."""
        self._positions = positions

    def get_seq_length(self, layer_idx: int = 0) -> Any:
        """What transformers adds 0, 1, 2, ... to where a layer asks for its tokens' positions: Llama 4 does, and trees
        have others. A number, the tokens of the longest row, until positions are set."""
        positions = self._positions
        if positions is None:
            return max(self.lengths, default=0)
        return positions - torch.arange(len(positions), device=positions.device)


def _zeros(like: Tensor, shape: tuple[int, ...]) -> Tensor:
    """On a CPU memory that is taken when it is first written to: a pool may be far larger than what is used of it."""
    if like.device.type != "cpu" or 0 in shape:
        return like.new_zeros(shape)
    memory = np.zeros(math.prod(shape) * like.element_size(), dtype=np.uint8)
    return torch.from_numpy(memory).view(like.dtype).view(shape)


def _heads_of(states: Tensor) -> tuple[int, int]:
    return states.shape[1], states.shape[3]
