"""SuccessorTable: the target's top-k successors of a token, or of an n-gram, when it last verified it.

Order 1 is the adjacency matrix, a row a token. Higher orders are hash tables: an n-gram's hash names its row, and is
kept there as a tag, so that another n-gram on the same row is told apart. Where texts must not learn from each other,
order 1 is hashed too, and the hashes include a salt of each text or owner; entries under salt 0 serve all. Memory is
fixed.
"""

from __future__ import annotations

from array import array
from collections.abc import Mapping, Sequence
from ctypes import Array, byref
from functools import cached_property
from typing import Any

import torch
from torch import Tensor

from graft.hashing import mix64
from graft.model.verified import NUM_SUCCESSORS
from graft.spec_decode.proposers.base import TargetTopK
from graft.tree.candidates import address_of
from graft.tree.native import TableStruct, native, plain

COLD = -1  # in place of a successor: the n-gram was never verified
ISOLATED_ROWS = 1 << 20  # rows of each table where texts are isolated
# Hash factors of the last token, the one before, the one before that, and the salt. A row is the high bits of the sum
# of products: cheap, and as good as random for such keys.
_FACTORS = mix64(torch.arange(4)) | 1


class SuccessorTable:
    """A table M[rows, k] of successors, likeliest first: token id and score bucket of its share in one number."""

    def __init__(self, order: int, num_rows: int, hashed: bool = True, isolated: bool = False) -> None:
        """num_rows: a power of two if `hashed`, else (of order 1 only) the vocabulary's size.

        isolated: of a hashed table, whether texts look up entries under their own salt before those of all.
        """
        self.order = order
        self._is_isolated = isolated
        self._is_hashed = hashed
        self._row_bits = num_rows.bit_length() - 1
        self._entries = torch.full((num_rows, NUM_SUCCESSORS), COLD, dtype=torch.int32)
        self._tags = torch.zeros(num_rows if hashed else 0, dtype=torch.int64)

    def struct(self) -> TableStruct:
        """The table for C."""
        return TableStruct(
            self._entries.data_ptr(),
            self._tags.data_ptr() if self._is_hashed else None,
            *self._entries.shape,
            self.order,
            self._row_bits,
            _FACTORS.data_ptr(),
            self._is_isolated,
        )

    def state(self) -> dict[str, Tensor]:
        """The rows that were written: a few thousand of many."""
        rows = (self._entries[:, 0] != COLD).nonzero().squeeze(1)
        held = {"rows": rows.int(), "entries": self._entries[rows]}
        return held | ({"tags": self._tags[rows]} if self._is_hashed else {})

    def restore(self, state: Mapping[str, Tensor]) -> None:
        self._entries.fill_(COLD)
        self._tags.zero_()
        if not state:
            return
        library: Any = native()
        rows, entries = plain(state["rows"].cpu()), plain(state["entries"].cpu(), torch.int32)
        tags = plain(state["tags"].cpu()) if "tags" in state else None  # none: a row was a token
        if entries.dim() != 2 or any(part.shape != entries.shape[:1] for part in (rows, tags) if part is not None):
            raise ValueError("a table's rows, tags and entries are not of one length")
        addresses = (rows.data_ptr(), None if tags is None else tags.data_ptr(), entries.data_ptr())
        library.graft_restore(byref(self.struct()), *entries.shape, *addresses)


class SuccessorTables:
    """Tables of several orders, the longest first: the first that has a node's n-gram gives its successors."""

    num_successors = NUM_SUCCESSORS

    def __init__(self, tables: Sequence[SuccessorTable]) -> None:
        self.tables = tables

    @cached_property
    def structs(self) -> Array[TableStruct]:
        """The tables for C."""
        return (TableStruct * len(self.tables))(*(table.struct() for table in self.tables))

    def learn(self, top_k: TargetTopK) -> None:
        """Writes the successors of every n-gram to all tables.

        Where an n-gram occurs several times, the likeliest node's stay, or in a chunk of text the last occurrence's.
        """
        library: Any = native()
        successors, logits = top_k.successors, top_k.logits
        assert (successors.dtype, logits.dtype) == (torch.int32, torch.float32)
        assert successors.stride()[1:] == logits.stride()[1:] == (successors.shape[2], 1)
        assert len(successors) == 1 or successors.stride(0) == logits.stride(0)
        columns = [plain(column) for column in (top_k.tokens, top_k.parents, top_k.sources)]
        before, earlier, salts = (array("q", column) for column in (top_k.before, top_k.earlier, top_k.salts))
        library.graft_learn(
            self.structs,
            len(self.structs),
            *top_k.tokens.shape,
            successors.shape[2],
            successors.stride(0),
            *(column.data_ptr() for column in (*columns, successors, logits)),
            *map(address_of, (before, earlier, salts)),
            top_k.is_text,
        )


def adjacency_table(vocab_size: int, isolated: bool) -> SuccessorTable:
    """The adjacency matrix: a row a token, or hashed where texts are isolated."""
    return SuccessorTable(1, ISOLATED_ROWS if isolated else vocab_size, hashed=isolated, isolated=isolated)
