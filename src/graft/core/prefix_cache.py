"""PageStore: keys and values of texts that were read before, by pages, so that the same beginning is not read again.

A page is named by all tokens up to its end. What it holds are the entries *before* its last token: a drafter's entry
of a token needs the token behind it, so the last one's cannot be known from the page alone.
"""

from __future__ import annotations

from array import array
from collections import OrderedDict
from collections.abc import Iterator, Sequence
from hashlib import blake2b

from torch import Tensor

from graft.model import TreeCache

PAGE = 64  # tokens

_Page = tuple[Tensor, ...]  # of each cache, what `TreeCache.read` gives


class PageStore:
    """Pages of all requests; those that were not used for longest go when there are too many."""

    def __init__(self, max_tokens: int) -> None:
        self._max_pages = max_tokens // PAGE
        self._pages: OrderedDict[bytes, _Page] = OrderedDict()  # the least recently used first
        self.num_asked = 0  # tokens that were looked for, ever
        self.num_found = 0  # of them, those that need not be read again

    @property
    def num_tokens(self) -> int:
        return PAGE * len(self._pages)

    def load(self, prompt: Sequence[int], salt: str, caches: Sequence[TreeCache], row: int) -> int:
        """Commits to an empty row what is known of the prompt's beginning. Returns how many entries those are."""
        # One token at least is left to read, whose features a drafter starts from.
        found: list[bytes] = []
        for name in _names(prompt[: len(prompt) - 1], salt):
            if name not in self._pages:
                break
            found.append(name)
        try:
            for place, cache in enumerate(caches):
                if found:
                    cache.append(row, [self._pages[name][place] for name in found])
        except Exception:
            for cache in caches:
                cache.lengths[row] = 0
            raise
        self._touch(found)
        num_entries = len(found) * PAGE - 1 if found else 0
        self.num_asked += len(prompt)
        self.num_found += num_entries
        return num_entries

    def save(self, text: Sequence[int], salt: str, caches: Sequence[TreeCache], row: int) -> None:
        """Keeps what a row has committed of a text, as far as whole pages go."""
        num_entries = min(cache.lengths[row] for cache in caches)
        names = list(_names(text[: num_entries + 1], salt))[: self._max_pages]
        try:
            for number, name in enumerate(names):
                if name not in self._pages:
                    start, end = max(number * PAGE - 1, 0), (number + 1) * PAGE - 1
                    self._pages[name] = tuple(cache.read(row, start, end) for cache in caches)
            self._touch(names)
        finally:  # there may be no memory for one more
            while len(self._pages) > self._max_pages:
                self._pages.popitem(last=False)

    def _touch(self, names: Sequence[bytes]) -> None:
        """Marks pages as used, a text's first page last: without it those behind it are of no use."""
        for name in reversed(names):
            self._pages.move_to_end(name)


def _names(text: Sequence[int], salt: str) -> Iterator[bytes]:
    """The names of a text's whole pages. salt: texts under different salts share none."""
    name = blake2b(salt.encode(), digest_size=16).digest()
    for end in range(PAGE, len(text) + 1, PAGE):
        name = blake2b(name + array("q", text[end - PAGE : end]).tobytes(), digest_size=16).digest()
        yield name
