"""SuccessorTable: the target's top-k successors of an n-gram, from when it was last verified.

Order 1 is the adjacency matrix, one row for each token. Higher orders are hash tables of fixed size: the hash of an
n-gram gives its row, and is stored there as a tag to detect collisions. If texts are isolated, order 1 is hashed too,
and hashes include a salt of the text or owner. All texts may use entries under salt 0.
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
# Hash factors of the last three tokens, latest first, and of the salt. The row is the high bits of the sum of products.
FACTORS = mix64(torch.arange(4)) | 1


class SuccessorTable:
    """Successors [rows, k], likeliest first. A number holds the token id and the score bucket of its probability."""

    def __init__(self, order: int, num_rows: int, hashed: bool = True, isolated: bool = False) -> None:
        """num_rows: a power of two if `hashed`, else the vocabulary size (order 1 only).

        isolated: look up entries under the text's own salt before those under salt 0 (hashed tables only).
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
            FACTORS.data_ptr(),
            self._is_isolated,
        )

    def state(self) -> dict[str, Tensor]:
        """The rows that were written."""
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
        tags = plain(state["tags"].cpu()) if "tags" in state else None  # None: the row number is the token
        if entries.dim() != 2 or any(part.shape != entries.shape[:1] for part in (rows, tags) if part is not None):
            raise ValueError("the rows, tags and entries of a table differ in length")
        addresses = (rows.data_ptr(), None if tags is None else tags.data_ptr(), entries.data_ptr())
        library.graft_restore(byref(self.struct()), *entries.shape, *addresses)


class SuccessorTables:
    """Tables of several orders, longest first. The first table that has a node's n-gram gives its successors."""

    num_successors = NUM_SUCCESSORS

    def __init__(self, tables: Sequence[SuccessorTable]) -> None:
        self.tables = tables

    @cached_property
    def structs(self) -> Array[TableStruct]:
        """The tables for C."""
        return (TableStruct * len(self.tables))(*(table.struct() for table in self.tables))

    def learn(self, top_k: TargetTopK) -> None:
        """Write the successors of every n-gram to all tables.

        If an n-gram occurs several times, the likeliest node's successors stay; in a prompt chunk, those of the last
        occurrence.
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
    """The adjacency matrix: one row for each token, or hashed if texts are isolated."""
    return SuccessorTable(1, ISOLATED_ROWS if isolated else vocab_size, hashed=isolated, isolated=isolated)
