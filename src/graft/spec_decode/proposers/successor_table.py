"""SuccessorTable: what the target found likeliest after a token, or after an n-gram, when it last judged it.

Order 1 is the adjacency matrix, a row a token. Higher orders are hashed: a row is named by its n-gram's hash and
carries a tag, so that another n-gram on the same row is told apart. Where texts must not learn from each other, order
1 is hashed too, and every text has a salt that goes into its hashes; what stands under salt 0 serves all. Memory is
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
from graft.spec_decode.candidates import address_of
from graft.spec_decode.native import TableStruct, native, plain
from graft.spec_decode.proposers.base import TargetTopK

COLD = -1  # stands for the successor of an n-gram that was never judged
ISOLATED_ROWS = 1 << 20  # of each table when every text has its own
# Of the last token, the one before, the one before that and the salt. A row is named by the high bits of a sum of
# products: cheap, and as good as random for such keys.
_FACTORS = mix64(torch.arange(4)) | 1


class SuccessorTable:
    """M[rows, k] of entries, likeliest first: a token id and the bucket of its share, in one number."""

    def __init__(self, order: int, num_rows: int, hashed: bool = True, isolated: bool = False) -> None:
        """num_rows: a power of two if `hashed`, else (of order 1 only) the vocabulary's size.

        isolated: of a table that is hashed, whether texts look up rows of their own before those of all.
        """
        self.order = order
        self._is_isolated = isolated
        self._is_hashed = hashed
        self._row_bits = num_rows.bit_length() - 1
        self._entries = torch.full((num_rows, NUM_SUCCESSORS), COLD, dtype=torch.int32)
        self._tags = torch.zeros(num_rows if hashed else 0, dtype=torch.int64)

    def struct(self) -> TableStruct:
        """Where the kernels find it."""
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
        """The rows that were judged: a few thousand of many."""
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
    """Tables of several orders, the longest first: what follows is what the first that knows the n-gram says."""

    num_successors = NUM_SUCCESSORS

    def __init__(self, tables: Sequence[SuccessorTable]) -> None:
        self.tables = tables

    @cached_property
    def structs(self) -> Array[TableStruct]:
        """Where the kernels find them."""
        return (TableStruct * len(self.tables))(*(table.struct() for table in self.tables))

    def learn(self, judged: TargetTopK) -> None:
        """Of several judgements of an n-gram the last stays (see `TargetTopK.is_text`)."""
        library: Any = native()
        successors, logits = judged.successors, judged.logits
        assert (successors.dtype, logits.dtype) == (torch.int32, torch.float32)
        assert successors.stride()[1:] == logits.stride()[1:] == (successors.shape[2], 1)
        assert len(successors) == 1 or successors.stride(0) == logits.stride(0)
        columns = [plain(column) for column in (judged.tokens, judged.parents, judged.sources)]
        before, earlier, salts = (array("q", column) for column in (judged.before, judged.earlier, judged.salts))
        library.graft_learn(
            self.structs,
            len(self.structs),
            *judged.tokens.shape,
            successors.shape[2],
            successors.stride(0),
            *(column.data_ptr() for column in (*columns, successors, logits)),
            *map(address_of, (before, earlier, salts)),
            judged.is_text,
        )


def adjacency_table(vocab_size: int, isolated: bool) -> SuccessorTable:
    """The matrix of all texts, or rows of it for each."""
    return SuccessorTable(1, ISOLATED_ROWS if isolated else vocab_size, hashed=isolated, isolated=isolated)
