"""Suffix lookup: what followed the longest earlier occurrences of the text's own end.

It looks in the text itself and in texts that were finished before (all of them, or where texts are isolated their
owner's), at the root and under the likeliest drafted nodes: a drafted token may complete an occurrence that the text
alone does not have.
"""

from __future__ import annotations

import ctypes
from array import array
from bisect import bisect_left
from collections import OrderedDict, deque
from collections.abc import Mapping, Sequence
from ctypes import byref
from itertools import islice, pairwise
from typing import Any
from weakref import WeakKeyDictionary, finalize

import torch
from torch import Tensor

from graft.host_pool import HostPool
from graft.kernels import IndexStruct, available, kernels
from graft.pool import Pool
from graft.retrieve.base import History, Judged, JudgedTrees, named, part_of
from graft.retrieve.copies import MATCHES, MAX_MATCH, SCALE, Occurrences, copies
from graft.retrieve.rows import Row

_MIN_MATCH = 2
_MAX_OWNERS = 256  # whose finished texts are kept, where they are kept apart
_MAX_OCCURRENCES = 12  # the most recent ones of a pair of tokens are looked at, in `kernels.c` as well


class SuffixIndex:
    """Texts one behind the other, indexed by pairs of tokens; the oldest go when there are too many tokens."""

    def __init__(self, max_tokens: int | None = None) -> None:
        self._max_tokens = max_tokens
        self._tokens = array("i")
        self._starts: list[int] = []  # of each text, as places count since the first ever
        self._dropped = 0  # tokens that are gone
        self._ends: dict[tuple[int, int], deque[int]] = {}  # pair -> places just behind its occurrences

    def __len__(self) -> int:
        return len(self._tokens)

    @property
    def texts(self) -> list[list[int]]:
        places = [start - self._dropped for start in self._starts] + [len(self._tokens)]
        return [self._tokens[a:b].tolist() for a, b in pairwise(places)]

    def begin(self) -> None:
        """What comes from here on is another text: no match and no continuation reaches over its start."""
        self._starts.append(self._dropped + len(self._tokens))

    def extend(self, tokens: Sequence[int]) -> None:
        start = self._starts[-1] - self._dropped
        for token in tokens:
            self._tokens.append(token)
            if len(self._tokens) - start >= _MIN_MATCH:
                pair = (self._tokens[-2], token)
                ends = self._ends.get(pair)
                if ends is None:
                    ends = self._ends[pair] = deque(maxlen=_MAX_OCCURRENCES)
                ends.append(self._dropped + len(self._tokens))
        while self._max_tokens is not None and len(self._tokens) > self._max_tokens and len(self._starts) > 1:
            self._drop_oldest()

    def occurrences(self, pair: tuple[int, int]) -> Occurrences:
        """Those of a pair of tokens that are not at their text's end."""
        spans: list[int] = []
        ends = self._ends.get(pair, ())
        starts, dropped = self._starts, self._dropped
        for absolute in ends:
            following = bisect_left(starts, absolute)  # the text behind the occurrence's
            end = absolute - dropped
            stop = starts[following] - dropped if following < len(starts) else len(self._tokens)
            if end < stop:
                spans += (starts[following - 1] - dropped, end, stop)
        return Occurrences(self._tokens, spans)

    def _drop_oldest(self) -> None:
        del self._starts[0]
        count = self._starts[0] - self._dropped
        for pair in pairwise(self._tokens[:count]):
            ends = self._ends.get(pair)
            while ends and ends[0] <= self._dropped + count:
                ends.popleft()
            if ends is not None and not ends:
                del self._ends[pair]
        del self._tokens[:count]
        self._dropped += count


class HostIndex(SuffixIndex):
    """Does what `SuffixIndex` does, in memory of `kernels.c`."""

    def __init__(self, max_tokens: int | None = None) -> None:
        library: Any = kernels()
        self._kernels = library
        self._most = -1 if max_tokens is None else max_tokens
        self._struct = IndexStruct()
        self.address = ctypes.addressof(self._struct)
        finalize(self, library.graft_index_free, byref(self._struct)).atexit = False

    def __len__(self) -> int:
        return self._struct.num_tokens

    @property
    def texts(self) -> list[list[int]]:
        struct = self._struct
        tokens, starts = self._tokens_so_far(), array("q")
        starts.frombytes(ctypes.string_at(struct.starts, 8 * struct.num_texts) if struct.num_texts else b"")
        places = [start - struct.dropped for start in starts] + [len(tokens)]
        return [tokens[a:b].tolist() for a, b in pairwise(places)]

    def begin(self) -> None:
        self._kernels.graft_index_begin(self.address)

    def extend(self, tokens: Sequence[int]) -> None:
        extend_all([self], [tokens], self._most)

    def occurrences(self, pair: tuple[int, int]) -> Occurrences:
        spans, count = (ctypes.c_int64 * (3 * _MAX_OCCURRENCES))(), ctypes.c_int64()
        self._kernels.graft_index_find(self.address, *pair, spans, byref(count))
        return Occurrences(self._tokens_so_far(), spans[: 3 * count.value])

    def _tokens_so_far(self) -> array[int]:
        tokens = array("i")
        tokens.frombytes(ctypes.string_at(self._struct.tokens, 4 * len(self)) if len(self) else b"")
        return tokens


def extend_all(indices: Sequence[HostIndex], texts: Sequence[Sequence[int]], max_tokens: int = -1) -> None:
    """Adds to the last text of each index its own tokens, in one call."""
    library: Any = kernels()
    counts, tokens = array("q", map(len, texts)), array("i")
    for text in texts:
        tokens.extend(text)
    addresses = array("q", [index.address for index in indices])
    library.graft_index_extend(
        addresses.buffer_info()[0], len(addresses), counts.buffer_info()[0], tokens.buffer_info()[0], max_tokens
    )


def make_index(max_tokens: int | None = None) -> SuffixIndex:
    """An index of no text."""
    return HostIndex(max_tokens) if available() else SuffixIndex(max_tokens)


class SuffixLookup:
    """A tree of what followed the longest matches: first of the text itself, then of finished texts."""

    names: tuple[str, ...] = ("suffix", "past")
    # Longer matches are surer, and so are tokens that all occurrences agree on.
    prior = (
        (torch.linspace(0.35, 0.95, len(MATCHES))[:, None] * torch.tensor([0.25, 0.5, 0.75, 1.0]))
        .flatten()
        .expand(2, -1)
        .clone()
    )

    def __init__(
        self,
        depth: int = 32,
        num_nodes: int = 40,  # of the tree at one place
        num_drafted: int = 10,  # drafted nodes that are looked up beside the root
        max_past_tokens: int = 200_000,  # of all finished texts together
        keep_past: bool = True,  # finished texts help later ones
        isolated: bool = False,  # those of their owner alone
    ) -> None:
        self._depth, self._num_nodes, self._num_drafted = depth, num_nodes, num_drafted
        self._own: WeakKeyDictionary[History, SuffixIndex] = WeakKeyDictionary()
        self._max_past_tokens = max_past_tokens
        self._past = make_index(max_past_tokens)  # for all
        self._pasts: OrderedDict[int, SuffixIndex] = OrderedDict()  # by owner, who finished none for longest first
        self._keeps_past, self._is_isolated = keep_past, isolated
        self.common: tuple[str, ...] = ("past",) if keep_past and not isolated else ()

    def propose(self, pool: Pool, histories: Sequence[History], first: int, chances: Tensor, max_depth: int) -> None:
        own: list[Any] = [self._index(history) for history in histories]
        pasts: list[Any] = [self._past_for(history) for history in histories]
        if isinstance(pool, HostPool):  # then all indices are the kernels' too
            extend_all(own, [history.ids[len(index) :] for history, index in zip(histories, own, strict=True)])
            limits = (self._num_drafted, max_depth, self._depth, self._num_nodes)
            addresses = [[index.address for index in indices] for indices in (own, pasts)]
            pool.hang_copies(addresses[0], addresses[1], SCALE, first, chances, *limits)
            return
        rows = []
        places_of_rows = pool.places(self._num_drafted, max_depth)
        for history, index, past, places in zip(histories, own, pasts, places_of_rows, strict=True):
            index.extend(history.ids[len(index) :])
            row = Row(pool, first)
            end = history.ids[-MAX_MATCH:]
            for place in places:
                suffix = end + place.path
                if len(suffix) < _MIN_MATCH:
                    continue
                found = [each.occurrences((suffix[-2], suffix[-1])) for each in (index, past)]
                if any(each.spans for each in found):
                    row.hang(place, copies(found, suffix, min(self._depth, max_depth - place.depth), self._num_nodes))
            rows.append(row.columns)
        pool.add_rows(rows, chances)

    def learn(self, judged: Judged | JudgedTrees) -> None:
        """Nothing to do: texts are taken from their histories."""

    def finish(self, history: History) -> None:
        if not self._keeps_past or (self._is_isolated and history.owner is None):
            return
        past = self._past
        if self._is_isolated:
            assert history.owner is not None
            past = self._pasts.setdefault(history.owner, make_index(self._max_past_tokens))
            self._pasts.move_to_end(history.owner)
        past.begin()
        past.extend(history.ids)
        while len(self._pasts) > 1 and self._has_too_many_owners():
            self._pasts.popitem(last=False)

    def state(self) -> dict[str, Tensor]:
        """Of texts that serve all; what is one owner's alone is not handed on."""
        texts = self._past.texts
        tokens = torch.tensor([token for text in texts for token in text], dtype=torch.int32)
        lengths = torch.tensor([len(text) for text in texts], dtype=torch.int64)
        return named("past", {"tokens": tokens, "lengths": lengths})

    def restore(self, state: Mapping[str, Tensor]) -> None:
        self._past = make_index(self._max_past_tokens)
        self._pasts.clear()
        if past := part_of(state, "past"):
            tokens = iter(past["tokens"].tolist())
            for length in past["lengths"].tolist():
                self._past.begin()
                self._past.extend(list(islice(tokens, length)))

    def _past_for(self, history: History) -> SuffixIndex:
        """The finished texts that a text may see."""
        if not self._is_isolated or history.owner is None:
            return self._past  # of isolated texts only what was restored, which serves all
        return self._pasts.get(history.owner, self._past)

    def _has_too_many_owners(self) -> bool:
        return len(self._pasts) > _MAX_OWNERS or sum(map(len, self._pasts.values())) > self._max_past_tokens

    def _index(self, history: History) -> SuffixIndex:
        """Of a text's own tokens, as far as they were looked up."""
        index = self._own.get(history)
        if index is None:
            index = self._own[history] = make_index()
            index.begin()
        return index
