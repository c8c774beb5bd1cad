"""Page allocator: how many pages of the KV cache requests need, get, and leave in the prefix cache.

The decode loop decides which request gives up its pages when none are free.
"""

from __future__ import annotations

import functools
import logging
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import NamedTuple

from graft.engine.jobs import Job
from graft.engine.memory import num_pages_for
from graft.engine.rounds import Rounds
from graft.engine.settings import SchedulerSettings
from graft.model import Row
from graft.model.kv_cache import PAGE, PagePool
from graft.request.batch import Batch
from graft.request.sequence import Sequence
from graft.settings import require
from graft.spec_decode.policies import MAX_BUDGET

log = logging.getLogger("graft.server")


class OpenedRows(NamedTuple):
    """The rows of a request."""

    batch: Batch
    unread: list[int]  # rows to prefill
    copies: list[tuple[int, int]]  # (source, target): rows to copy when the source is prefilled


class PageAllocator:
    """Gives pages of the KV cache to requests.

    In a library the cache grows on demand. In a server it has a fixed size (`fix_size`), so requests may have to wait.
    """

    def __init__(self, engine: Rounds, settings: SchedulerSettings) -> None:
        self.engine, self.settings = engine, settings
        # Slots that a round may write after a row's committed text: the verified tree, or drafts.
        self.slots_ahead = max(MAX_BUDGET + 1, engine.drafter.num_slots if engine.drafter is not None else 0)
        # The round in flight may have added tokens that the host does not know of.
        self.slots_ahead += engine.device_rounds.num_unknown
        self.max_rows = min(settings.max_rows, engine.device_rounds.max_rows)

    @property
    def pool(self) -> PagePool:
        return self.engine.target.pool

    def fix_size(self, max_batched_tokens: int) -> None:
        """Allocate as many pages as memory and settings allow. The number does not change afterwards."""
        num_pages = num_pages_for(self.engine, self.settings, max_batched_tokens)
        least = _pages(self.slots_ahead + 2)
        require(
            num_pages >= least,
            f"there is memory for {PAGE * num_pages} tokens of KV cache and {PAGE * least} are needed: raise memory, "
            "or max_cache_tokens if it is set",
        )
        self.engine.target.limit_pages(num_pages, self.settings.max_rows)

    def check(self, job: Job) -> None:
        """Raise a GraftError if the request needs more pages than there are."""
        needed = sum(map(self._num_pages, job.sequences))
        require(
            needed <= self.pool.num_pages,
            f"the request needs {PAGE * needed} tokens of cache and there are {PAGE * self.pool.num_pages}: ask for "
            "fewer or shorter answers",
        )

    def has_room_for(self, job: Job, num_rows: int) -> bool:
        """Whether a request can start beside `num_rows` other rows, each of which may need one more page."""
        answers = job.open_answers
        needed = _pages(len(answers[0].ids) + self.slots_ahead) + (len(answers) - 1) * _pages(self.slots_ahead)
        if job.is_preempted:  # each answer has a text of its own
            needed = sum(_pages(len(sequence.ids) + self.slots_ahead) for sequence in answers)
        return num_rows + len(answers) <= self.max_rows and needed + num_rows <= self.pool.num_free

    def open_rows(self, job: Job) -> OpenedRows:
        """A batch of the request's open answers. Answers with the same text so far share one prefill."""
        sequences = job.open_answers
        unread, copies = _unread_and_copies(sequences) if job.prefill is None else ([], [])
        rows: list[Row] = []
        try:
            for number, sequence in enumerate(sequences):
                rows.append(self._open_row(job, sequence, is_prefilled=number in unread))
            chooser = functools.reduce(lambda one, other: one.concat(other), job.choosers) if job.choosers else None
            batch = self.engine.batch_of(sequences, self.engine.target.cache_of(rows), chooser)
        except Exception:
            for row in rows:
                self.pool.release(row)
            raise
        if not job.is_preempted:
            source_of = {target: source for source, target in copies}
            for number, sequence in enumerate(sequences):
                sequence.stats.cached_tokens = rows[source_of.get(number, number)].length
        return OpenedRows(batch, unread, copies)

    def _open_row(self, job: Job, sequence: Sequence, is_prefilled: bool) -> Row:
        if is_prefilled and self._shares_prefixes(job):
            return self.pool.open_with_prefix(sequence.ids, self.salt(job, sequence), self._num_slots(sequence))
        # A row that will be a copy shares its source's pages, so in a cache of fixed size it gets none of its own.
        is_copy = not is_prefilled and job.prefill is None
        return self.pool.open_row(0 if is_copy and self.pool.is_fixed else self._num_slots(sequence))

    def _shares_prefixes(self, job: Job) -> bool:
        """Whether the request uses the prefix cache. Prompts with images do not: ids alone cannot key their pages."""
        return self.settings.prefix_cache_tokens != 0 and job.prefill is None

    def short_rows(self, batch: Batch) -> list[tuple[Sequence, Row]]:
        """Rows without enough pages for what the coming round writes."""
        return [
            (sequence, row)
            for sequence, row in zip(batch.sequences, batch.cache.rows, strict=True)
            if PAGE * len(row.pages) < self._clamped(row.length + self.slots_ahead)
        ]

    def extend(self, row: Row) -> None:
        """Give a row pages for what the coming round writes."""
        self.pool.ensure(row, self._clamped(row.length + self.slots_ahead))

    def trim(self, batches: Iterable[Batch]) -> bool:
        """Take back pages that rows do not need yet. Returns whether there were any."""
        before = self.pool.num_free
        for batch in batches:
            for sequence, row in zip(batch.sequences, batch.cache.rows, strict=True):
                self.pool.trim(row, len(sequence.ids) + self.slots_ahead)
        return self.pool.num_free > before

    def keep(self, job: Job, batch: Batch, row: int) -> None:
        """Put a row's pages into the prefix cache."""
        if self._shares_prefixes(job):
            with failures_logged("adding a text to the prefix cache failed"):
                self.engine.keep_pages(batch, row, job.salt)

    def release(self, rows: Iterable[Row]) -> None:
        for row in rows:
            with failures_logged("releasing pages failed: the garbage collector will free them"):
                self.pool.release(row)

    def shrink_prefix_cache(self) -> None:
        """Evict the oldest pages beyond the limit of the prefix cache."""
        if self.settings.prefix_cache_tokens:  # with 0, this engine keeps nothing, and all pages are another's
            with failures_logged("shrinking the prefix cache to its limit failed"):
                self.pool.evict(self.settings.prefix_cache_tokens)

    def salt(self, job: Job, sequence: Sequence) -> str:
        return self.engine.page_salt(sequence, job.salt)

    def _num_pages(self, sequence: Sequence) -> int:
        """Pages for the prompt and the longest possible answer."""
        whole = sequence.num_prompt_tokens + sequence.settings.most_new_tokens
        return _pages(self._clamped(whole + self.slots_ahead))

    def _num_slots(self, sequence: Sequence) -> int:
        """Slots to start with. If plenty is free, they suffice for the whole answer: adjacent pages are read faster.

        A cache that can grow must move its memory to do so, so it grows once, now.
        """
        whole = self._num_pages(sequence)
        if not self.pool.is_fixed or self.pool.num_free - whole > self.pool.num_pages // 2:
            return PAGE * whole
        return self._clamped(len(sequence.ids) + self.slots_ahead)

    def _clamped(self, num_slots: int) -> int:
        """Limit slots to what a row can hold. Near the end of the model's context, trees are smaller."""
        most = self.pool.max_slots
        return num_slots if most is None else min(num_slots, most)


@contextmanager
def failures_logged(what: str) -> Iterator[None]:
    """Log and ignore failures of optional work."""
    try:
        yield
    except Exception:
        log.warning("%s", what, exc_info=True)


def _unread_and_copies(sequences: list[Sequence]) -> tuple[list[int], list[tuple[int, int]]]:
    """The first row of every distinct text, and (first row, other row) for other rows with the same text."""
    row_of: dict[tuple[int, ...], int] = {}
    copies: list[tuple[int, int]] = []
    for row, sequence in enumerate(sequences):
        first = row_of.setdefault(tuple(sequence.ids), row)
        if first != row:
            copies.append((first, row))
    return list(row_of.values()), copies


def _pages(num_tokens: int) -> int:
    return -(-num_tokens // PAGE)
