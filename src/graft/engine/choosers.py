"""Choosers: who chooses the tokens of a batch's rows on the host."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from graft.model.sampler import Chooser, Sampler
from graft.request.batch import Batch
from graft.request.sequence import Sequence as TokenSequence


class Choosers:
    """Gives the caller's own chooser, or a sampler of the rows' settings, whose state follows from their texts."""

    def __init__(self, new_sampler: Callable[[Sequence[TokenSequence]], Sampler]) -> None:
        self._new_sampler = new_sampler
        self._sampler: Sampler | None = None  # of the last rows
        self._numbers: list[int] = []  # of their sequences

    def of(self, batch: Batch) -> Chooser:
        if batch.chooser is not None:
            return batch.chooser
        numbers = [sequence.number for sequence in batch.sequences]
        lengths = [len(sequence.ids) for sequence in batch.sequences]
        if self._sampler is None or numbers != self._numbers or self._sampler.positions != lengths:
            self._sampler, self._numbers = self._new_sampler(batch.sequences), numbers
        return self._sampler
