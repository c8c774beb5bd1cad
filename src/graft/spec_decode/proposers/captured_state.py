"""The host's draft state for drafters by CUDA graphs."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from graft.model import PagePool, Row

if TYPE_CHECKING:
    from graft.spec_decode.proposers.captured import CapturedDrafter


@dataclass(eq=False)
class CapturedRow:
    """One row's draft state."""

    row: Row
    length: int  # entries in the head's KV store


@dataclass(eq=False)
class CapturedState:
    """Draft state of one batch."""

    drafter: CapturedDrafter[Any, Any]
    pool: PagePool
    rows: list[CapturedRow]

    @property
    def lengths(self) -> list[int]:
        return [row.length for row in self.rows]

    def select(self, rows: Sequence[int]) -> CapturedState:
        return replace(self, rows=[self.rows[row] for row in rows])

    def concat(self, other: CapturedState) -> CapturedState:
        return replace(self, rows=self.rows + other.rows)

    def copy_row(self, source: int, target: int, row: Row) -> None:
        own = self.rows[source]
        self.drafter.copy_table_row(self.pool, own.row.block_table_row, row.block_table_row)
        self.rows[target] = CapturedRow(row, own.length)
