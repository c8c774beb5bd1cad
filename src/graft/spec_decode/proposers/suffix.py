"""SuffixLookup: proposes what followed the longest earlier occurrences of the text's end.

It searches the text itself, finished texts (of all owners or, if texts are isolated, of the same owner), and other
answers to the same prompt in the batch. It looks up the root and the likeliest drafted nodes, because the text with a
drafted token may match where the text alone does not.
"""

from __future__ import annotations

import ctypes
from array import array
from collections import OrderedDict
from collections.abc import Mapping, Sequence
from ctypes import byref
from itertools import islice, pairwise
from typing import Any
from weakref import WeakKeyDictionary, finalize

import torch
from torch import Tensor

from graft.spec_decode.proposers.base import History, TargetTopK, named, part_of
from graft.tree.candidates import Beside, Candidates, address_of
from graft.tree.native import IndexStruct, ScaleStruct, native

_MAX_MATCH = 24
_MATCHES = (2, 3, 4, 6, 9, 13, 18, _MAX_MATCH)  # lower bounds of the score buckets' match lengths
_SHARES = (0.0, 0.3, 0.6, 0.9)  # and of the share of the parent's occurrences that continue with the token
_SCALE = ScaleStruct(
    _MAX_MATCH,
    len(_MATCHES),
    len(_SHARES),
    (ctypes.c_int64 * len(_MATCHES))(*_MATCHES),
    (ctypes.c_double * len(_SHARES))(*_SHARES),
)
MAX_PAST_TOKENS = 200_000  # tokens of all finished texts together
_MAX_OWNERS = 256  # the most owners whose finished texts are kept, if texts are isolated


class SuffixIndex:
    """Index of texts by pairs of tokens. The oldest texts are dropped above `max_tokens` tokens."""

    def __init__(self, max_tokens: int | None = None) -> None:
        library: Any = native()
        self._native = library
        self._most = -1 if max_tokens is None else max_tokens
        self._struct = IndexStruct()
        self.address = ctypes.addressof(self._struct)
        finalize(self, library.graft_index_free, byref(self._struct)).atexit = False

    def __len__(self) -> int:
        return self._struct.num_tokens

    @property
    def texts(self) -> list[list[int]]:
        struct = self._struct
        tokens, starts = array("i"), array("q")
        tokens.frombytes(ctypes.string_at(struct.tokens, 4 * len(self)) if len(self) else b"")
        starts.frombytes(ctypes.string_at(struct.starts, 8 * struct.num_texts) if struct.num_texts else b"")
        places = [start - struct.dropped for start in starts] + [len(tokens)]
        return [tokens[a:b].tolist() for a, b in pairwise(places)]

    def begin(self) -> None:
        """Start a new text. Matches and continuations do not cross its start."""
        self._native.graft_index_begin(self.address)

    def extend(self, tokens: Sequence[int]) -> None:
        extend_all([self], [tokens], self._most)


def extend_all(indices: Sequence[SuffixIndex], texts: Sequence[Sequence[int]], max_tokens: int = -1) -> None:
    """Extend the last text of each index, in one call."""
    library: Any = native()
    counts, tokens = array("q", map(len, texts)), array("i")
    for text in texts:
        tokens.extend(text)
    addresses = array("q", [index.address for index in indices])
    library.graft_index_extend(
        address_of(addresses), len(addresses), address_of(counts), address_of(tokens), max_tokens
    )


class _Rows:
    """The indices of the texts of a batch."""

    def __init__(self, histories: Sequence[History], indices: list[SuffixIndex], groups: Sequence[int | None]) -> None:
        """groups: texts of the same group see each other."""
        self.numbers, self._indices = [history.number for history in histories], indices
        self.beside = _beside(histories, indices, groups)
        self.addresses = array("q", [index.address for index in indices])
        self._lengths = [len(index) for index in indices]

    def extend(self, histories: Sequence[History]) -> None:
        """Add new tokens of the texts."""
        lengths = [len(history.ids) for history in histories]
        if lengths != self._lengths:
            texts = [history.ids[known:] for history, known in zip(histories, self._lengths, strict=True)]
            extend_all(self._indices, texts)
            self._lengths = list(map(max, lengths, self._lengths))  # a finished text may have been cut


def _beside(histories: Sequence[History], indices: Sequence[SuffixIndex], groups: Sequence[int | None]) -> Beside:
    members: dict[int, list[SuffixIndex]] = {}
    for group, index in zip(groups, indices, strict=True):
        if group is not None:
            members.setdefault(group, []).append(index)
    found = Beside(array("q"), array("q"), array("q", [history.num_prompt_tokens for history in histories]))
    for group, own in zip(groups, indices, strict=True):
        others = members[group] if group is not None else []
        found.indices.extend(index.address for index in others if index is not own)
        found.ends.append(len(found.indices))
    return found


class SuffixLookup:
    """Retriever of what followed the longest matches, first in the text itself, then in other texts."""

    names: tuple[str, ...] = ("suffix", "past")
    splits_by_noise = True
    # Longer matches are likelier to be accepted, and so are tokens that all occurrences agree on.
    prior = torch.tensor(
        [[(0.35 + 0.6 * i / 7) * agreed for i in range(len(_MATCHES)) for agreed in (0.25, 0.5, 0.75, 1.0)]] * 2
    )
    # Measured at temperatures 0.7 and 1: sampled text repeats itself as often as greedy text, but rarely other texts.
    sampled_prior = prior * torch.tensor([[1.0], [0.3]])

    def __init__(
        self,
        depth: int = 32,
        num_nodes: int = 40,  # of the subtree at one node
        num_drafted: int = 10,  # drafted nodes to look up, besides the root
        max_past_tokens: int = MAX_PAST_TOKENS,
        keep_past: bool = True,  # look up finished texts
        isolated: bool = False,  # look up only finished texts of the same owner
    ) -> None:
        self._depth, self._num_nodes, self._num_drafted = depth, num_nodes, num_drafted
        self._own: WeakKeyDictionary[History, SuffixIndex] = WeakKeyDictionary()
        self._last = _Rows([], [], [])  # of the last round
        self._max_past_tokens = max_past_tokens
        self._past = SuffixIndex(max_past_tokens)  # of all owners
        self._pasts: OrderedDict[int, SuffixIndex] = OrderedDict()  # by owner, the least recently extended first
        self._keeps_past, self._is_isolated = keep_past, isolated
        self.common: tuple[str, ...] = ("past",) if keep_past and not isolated else ()

    def propose(
        self, candidates: Candidates, histories: Sequence[History], first: int, acceptance_probs: Tensor, max_depth: int
    ) -> None:
        rows = self._rows_of(histories)
        rows.extend(histories)
        most = candidates.most_nodes
        num_places, num_nodes = min(self._num_drafted, max(most // 4, 1)), min(self._num_nodes, most)
        limits = (num_places, max_depth, self._depth, num_nodes)
        past = array("q", [self._past_for(history).address for history in histories])
        candidates.attach_copies(rows.addresses, past, rows.beside, _SCALE, first, acceptance_probs, *limits)

    def learn(self, top_k: TargetTopK) -> None:
        """Nothing to do: tokens come from the histories."""

    def finish(self, history: History) -> None:
        if not self._keeps_past or (self._is_isolated and history.owner is None):
            return
        past = self._past
        if self._is_isolated:
            assert history.owner is not None
            past = self._pasts.setdefault(history.owner, SuffixIndex(self._max_past_tokens))
            self._pasts.move_to_end(history.owner)
        past.begin()
        past.extend(history.ids)
        while len(self._pasts) > 1 and self._has_too_many_owners():
            self._pasts.popitem(last=False)

    def state(self) -> dict[str, Tensor]:
        """The finished texts that all may copy. Texts of isolated owners are not saved."""
        texts = self._past.texts
        tokens = torch.tensor([token for text in texts for token in text], dtype=torch.int32)
        lengths = torch.tensor([len(text) for text in texts], dtype=torch.int64)
        return named("past", {"tokens": tokens, "lengths": lengths})

    def restore(self, state: Mapping[str, Tensor]) -> None:
        self._past = SuffixIndex(self._max_past_tokens)
        self._pasts.clear()
        if past := part_of(state, "past"):
            tokens = iter(past["tokens"].tolist())
            for length in past["lengths"].tolist():
                self._past.begin()
                self._past.extend(list(islice(tokens, length)))

    def _past_for(self, history: History) -> SuffixIndex:
        """The index of the finished texts that a text may copy."""
        if not self._is_isolated or history.owner is None:
            return self._past  # if texts are isolated, these are restored ones, which all may copy
        return self._pasts.get(history.owner, self._past)

    def _has_too_many_owners(self) -> bool:
        return len(self._pasts) > _MAX_OWNERS or sum(map(len, self._pasts.values())) > self._max_past_tokens

    def _rows_of(self, histories: Sequence[History]) -> _Rows:
        numbers = [history.number for history in histories]
        if numbers != self._last.numbers:
            # If texts are isolated, answers of a group without an owner may not copy each other.
            groups = [None if self._is_isolated and each.owner is None else each.group for each in histories]
            self._last = _Rows(histories, [self._index(history) for history in histories], groups)
        return self._last

    def _index(self, history: History) -> SuffixIndex:
        """The index of a text's own tokens."""
        index = self._own.get(history)
        if index is None:
            index = self._own[history] = SuffixIndex()
            index.begin()
        return index
