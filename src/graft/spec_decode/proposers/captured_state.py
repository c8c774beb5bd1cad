"""Draft state of drafters by CUDA graphs: what the host knows of the rows and of passes launched ahead."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

from graft.model import PagePool, Row

if TYPE_CHECKING:
    from graft.spec_decode.proposers.captured import CapturedDrafter


@dataclass(eq=False)
class CapturedRow:
    """One row's draft state. The features of pending entries are on the device."""

    row: Row
    length: int  # entries in the head's KV store
    root: int = 0  # the last token of the text
    following: list[int] = field(default_factory=list)  # the token after each pending entry


@dataclass(eq=False)
class CapturedState:
    """Draft state of one batch."""

    drafter: CapturedDrafter[Any, Any]
    pool: PagePool
    rows: list[CapturedRow]
    kept: int | None = None  # `keep` of the last round
    num_prefetched: int = 0  # launched passes of the coming round
    num_taken: int = 0  # passes of the last round that were used
    num_drafted_ahead: int = 0  # most accepted tokens of a row for which drafting ahead is valid; 0: not drafted ahead
    is_gathered: bool = False  # whether the features of a plain step, one root a row, are pending already
    shape: Any = None  # of the last round's passes

    @property
    def lengths(self) -> list[int]:
        return [row.length for row in self.rows]

    def select(self, rows: Sequence[int]) -> CapturedState:
        return self._with_rows([self.rows[row] for row in rows])

    def concat(self, other: CapturedState) -> CapturedState:
        return self._with_rows(self.rows + other.rows)

    def copy_row(self, source: int, target: int, row: Row) -> None:
        own = self.rows[source]
        self.drafter.copy_table_row(self.pool, own.row.block_table_row, row.block_table_row)
        self.rows[target] = replace(own, row=row, following=list(own.following))
        self.num_prefetched = self.num_drafted_ahead = 0

    def _with_rows(self, rows: list[CapturedRow]) -> CapturedState:
        """A state of other rows, for which nothing is drafted yet."""
        return replace(self, rows=rows, num_prefetched=0, num_drafted_ahead=0, is_gathered=False, shape=None)
