"""SuccessorTable: what the target found likeliest after a token, or after an n-gram, when it last judged it.

Order 1 is the adjacency matrix, a row a token. Higher orders are hashed: a row is named by its n-gram's hash and
carries a tag, so that another n-gram on the same row is told apart. Where texts must not learn from each other, order
1 is hashed too, and every text has a salt that goes into its hashes; what stands under salt 0 serves all. Memory is
fixed.
"""

from __future__ import annotations

from array import array
from collections.abc import Mapping, Sequence
from ctypes import Array
from functools import cached_property
from typing import Any

import numpy as np
import torch
from torch import Tensor

from graft.buckets import NUM_BUCKETS, probability_bucket
from graft.hashing import mix64
from graft.kernels import TableStruct, available, kernels, plain
from graft.pool import last_before_roots
from graft.retrieve.base import Judged, JudgedTrees
from graft.target.verified import NUM_SUCCESSORS

COLD = -1  # stands for the successor of an n-gram that was never judged
_BUCKET_BITS = NUM_BUCKETS.bit_length() - 1
ISOLATED_ROWS = 1 << 20  # of each table when every text has its own
# A row is named by the high bits of a sum of products: cheap, and as good as random for such keys.
_FACTORS = mix64(torch.arange(4)) | 1
_TOKEN, _BEFORE, _EARLIER, _SALT = _FACTORS.tolist()


class SuccessorTable:
    """M[rows, k] of entries, likeliest first: a token id and the bucket of its share, in one number (see `unpack`)."""

    def __init__(self, order: int, num_rows: int, hashed: bool = True, isolated: bool = False) -> None:
        """num_rows: a power of two if `hashed`, else (of order 1 only) the vocabulary's size.

        isolated: of a table that is hashed, whether texts look up rows of their own before those of all.
        """
        self.order = order
        self._is_isolated = isolated
        self._is_hashed = hashed
        self._shift = 64 - (num_rows.bit_length() - 1)
        self._entries = torch.full((num_rows, NUM_SUCCESSORS), COLD, dtype=torch.int32)
        self._tags = torch.zeros(num_rows if hashed else 0, dtype=torch.int64)

    def lookup(self, tokens: Tensor, before: Tensor, earlier: Tensor, salts: Tensor) -> Tensor:
        """Entries [..., k] after n-grams whose last tokens are given; `COLD` where unknown."""
        own = self._lookup(tokens, before, earlier, salts)
        if not self._is_isolated:
            return own
        return torch.where(own[..., :1] == COLD, self._lookup(tokens, before, earlier, torch.zeros_like(salts)), own)

    def successors_of_tokens(self, tokens: np.ndarray, ranks: np.ndarray, salts: np.ndarray) -> np.ndarray:
        """The successor of each token, of its rank among them; `COLD` where unknown. For tables of order 1."""
        if self._is_hashed:
            given = torch.from_numpy(tokens)
            entries = self.lookup(given, given, given, torch.from_numpy(salts)).numpy()
            found = np.take_along_axis(entries, ranks[..., None], axis=-1)[..., 0]
        else:
            found = self._entries.numpy()[tokens, ranks]
        return found.astype(np.int64) >> _BUCKET_BITS

    def learn(self, judged: Judged) -> None:
        """Of several judgements of one row the last stays."""
        rows, tags = self._place(judged.tokens, judged.before, judged.earlier, judged.salts)
        # Every judgement of a row writes what the last one says, so the order of writing does not matter.
        index = torch.arange(1, len(rows) + 1)
        last = ((rows[:, None] == rows) * index).amax(dim=1) - 1
        entries = (judged.successors * NUM_BUCKETS + probability_bucket(judged.shares)).int()
        self._entries[rows, : entries.shape[1]] = entries[last]
        if tags is not None:
            self._tags[rows] = tags[last]

    def struct(self) -> TableStruct:
        """Where the kernels find it."""
        return TableStruct(
            self._entries.data_ptr(),
            self._tags.data_ptr() if self._is_hashed else None,
            *self._entries.shape,
            self.order,
            64 - self._shift,
            NUM_BUCKETS,
            _FACTORS.data_ptr(),
            self._is_isolated,
        )

    def state(self) -> dict[str, Tensor]:
        """The rows that were judged: a few thousand of many."""
        rows = (self._entries[:, 0] != COLD).nonzero().squeeze(1)
        held = {"rows": rows.int(), "entries": self._entries[rows]}
        return held | ({"tags": self._tags[rows]} if self._is_hashed else {})

    def restore(self, state: Mapping[str, Tensor]) -> None:
        self._entries.fill_(COLD)
        self._tags.zero_()
        if state:
            rows = state["rows"].cpu().long()
            if self._is_hashed:  # perhaps in a table of another size, or a row a token and not hashed at all
                tags = state["tags"].to(self._tags) if "tags" in state else rows * _TOKEN
                rows = self._row_of(tags)
                self._tags[rows] = tags
            self._entries[rows] = state["entries"].to(self._entries)

    def _lookup(self, tokens: Tensor, before: Tensor, earlier: Tensor, salts: Tensor) -> Tensor:
        rows, tags = self._place(tokens, before, earlier, salts)
        entries = self._entries[rows]
        return entries if tags is None else entries.masked_fill((self._tags[rows] != tags)[..., None], COLD)

    def _place(self, tokens: Tensor, before: Tensor, earlier: Tensor, salts: Tensor) -> tuple[Tensor, Tensor | None]:
        if not self._is_hashed:
            return tokens, None
        key = salts * _SALT + tokens * _TOKEN
        for part, factor in ((before, _BEFORE), (earlier, _EARLIER))[: self.order - 1]:
            key = key + part * factor
        return self._row_of(key), key

    def _row_of(self, key: Tensor) -> Tensor:
        return (key >> self._shift) & (len(self._entries) - 1)


class SuccessorTables:
    """Tables of several orders, the longest first: what follows is what the first that knows the n-gram says."""

    num_successors = NUM_SUCCESSORS

    def __init__(self, tables: Sequence[SuccessorTable]) -> None:
        self.tables = tables

    @cached_property
    def structs(self) -> Array[TableStruct]:
        """Where the kernels find them."""
        return (TableStruct * len(self.tables))(*(table.struct() for table in self.tables))

    def successors(
        self, tokens: Tensor, before: Tensor, earlier: Tensor, salts: Tensor
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Tokens, the number of their table and evidence [B, F, k] after n-grams [B, F]; token `COLD` if unknown."""
        entries = self.tables[-1].lookup(tokens, before, earlier, salts)
        numbers = torch.full_like(tokens, len(self.tables) - 1)[:, :, None]
        for number in range(len(self.tables) - 2, -1, -1):
            longer = self.tables[number].lookup(tokens, before, earlier, salts)
            known = longer[:, :, :1] != COLD
            entries, numbers = torch.where(known, longer, entries), numbers.masked_fill(known, number)
        found, evidence = unpack(entries.long())
        return found, numbers.expand_as(found), evidence

    def learn(self, judged: Judged | JudgedTrees) -> None:
        for table in self.tables:
            table.learn(judged.all if isinstance(judged, JudgedTrees) else judged)


class HostTables(SuccessorTables):
    """The same, learning by `kernels.c`."""

    def learn(self, judged: Judged | JudgedTrees) -> None:
        library: Any = kernels()
        if isinstance(judged, JudgedTrees):
            if judged.verified.highest is not None:
                return self._learn_trees(judged, *judged.verified.highest)
            judged = judged.all
        whole = (judged.tokens, judged.before, judged.earlier, judged.salts, judged.successors)
        columns = [*map(plain, whole), plain(judged.shares, torch.float32)]
        addresses = (column.data_ptr() for column in columns)
        library.graft_learn(self.structs, len(self.structs), *judged.successors.shape, *addresses)

    def _learn_trees(self, judged: JudgedTrees, successors: Tensor, logits: Tensor) -> None:
        """successors int32 and logits [B, W, k] in rows that may be longer."""
        library: Any = kernels()
        tree, salts = judged.tree, None if judged.salts is None else plain(judged.salts)
        num_successors = successors.shape[2]
        assert successors.stride()[1:] == logits.stride()[1:] == (num_successors, 1)
        assert len(successors) == 1 or successors.stride(0) == logits.stride(0)
        before, earlier = (array("q", column) for column in last_before_roots(judged.histories))
        columns = [plain(column) for column in (tree.tokens, tree.parents, tree.sources)]
        library.graft_learn_trees(
            self.structs,
            len(self.structs),
            *tree.tokens.shape,
            num_successors,
            successors.stride(0),
            *(column.data_ptr() for column in (*columns, successors, logits)),
            before.buffer_info()[0],
            earlier.buffer_info()[0],
            None if salts is None else salts.data_ptr(),
        )


def unpack(entries: Tensor) -> tuple[Tensor, Tensor]:
    """Tokens and buckets of entries; of cold ones token -1 and some bucket."""
    return entries >> _BUCKET_BITS, entries & (NUM_BUCKETS - 1)


def make_tables(tables: Sequence[SuccessorTable]) -> SuccessorTables:
    """The tables as one."""
    return HostTables(tables) if available() else SuccessorTables(tables)


def adjacency_table(vocab_size: int, isolated: bool) -> SuccessorTable:
    """The matrix of all texts, or rows of it for each."""
    return SuccessorTable(1, ISOLATED_ROWS if isolated else vocab_size, hashed=isolated, isolated=isolated)
