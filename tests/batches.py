"""Batches whose prompts are read, ready for their first round; and what their steps were captured in."""

from __future__ import annotations

from typing import Any

from graft.engine import Engine, PrefillChunk
from graft.request.batch import Batch


def prefill(engine: Engine, batch: Batch) -> None:
    """Reads every prompt but its last token, which is the first round's root."""
    for row in range(len(batch.sequences)):
        while (chunk := batch.next_chunk(row, engine.target.chunk_size)).tokens:
            engine.prefill([PrefillChunk(batch, row, chunk)])


def graphs_of(target: Any) -> Any:
    """What a captured target has made, and what went wrong."""
    return target._graphs
