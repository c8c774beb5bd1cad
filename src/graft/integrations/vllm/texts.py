"""Texts: the requests that vLLM decodes, as retrievers see them, from what a proposer is given in each step."""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from typing import Any

from graft.spec_decode.grafter import Text

_COMPARED = 32  # last tokens by which a text is found again where requests have no names


class Texts:
    """Texts of running requests by a name that stays the same while a request lives.

    vLLM has the truth; a text that does not fit it (a request that was stopped and began again) starts anew. A mistake
    here could cost a proposal, never a wrong token.
    """

    def __init__(self, finish: Callable[[Text], None]) -> None:
        """finish: told of every text that has ended."""
        self._texts: dict[Any, Text] = {}
        self._finish = finish

    def __len__(self) -> int:
        return len(self._texts)

    def grown(self, name: Any, known: Sequence[int], count: int, new: Sequence[int]) -> Text:
        """The request's text: the first `count` of `known` tokens, an array's or a list's, and `new` ones behind
        them."""
        text = self._texts.get(name)
        if text is not None and not _begins_with(text, known, count):
            self.end(name)
            text = None
        if text is None:
            text = self._texts[name] = Text(_plain(known[:count]), num_prompt_tokens=count)
        else:
            text.ids += _plain(known[len(text.ids) : count])
        text.ids += new
        return text

    def end(self, name: Any) -> None:
        """Ends a request's text."""
        self._finish(self._texts.pop(name))

    def keep(self, names: Collection[Any]) -> None:
        """Ends the texts of all requests but these."""
        for name in [name for name in self._texts if name not in names]:
            self.end(name)


class UnnamedTexts:
    """Texts where vLLM gives rows without names: each row is taken for the text that it goes on from."""

    def __init__(self, finish: Callable[[Text], None]) -> None:
        self._rows: dict[int, Text] = {}  # by row of the last step
        self._finish = finish

    def __len__(self) -> int:
        return len(self._rows)

    def grown(self, rows: Sequence[tuple[int, Sequence[int], int, int]]) -> list[Text]:
        """The texts of rows (number, tokens, how many of them are known, how many of these are new); texts that no row
        goes on from have ended."""
        before, self._rows = self._rows, {}
        for number, known, count, num_new in rows:
            start = count - num_new
            # A row mostly stays where it is; when others leave it may move.
            at = next(
                (at for at in (number, *before) if at in before and _is_at(before[at], known, start)),
                None,
            )
            text = before.pop(at) if at is not None else Text(_plain(known[:start]), num_prompt_tokens=start)
            text.ids += _plain(known[start:count])
            self._rows[number] = text
        for text in before.values():
            self._finish(text)
        return list(self._rows.values())


def _begins_with(text: Text, known: Sequence[int], count: int) -> bool:
    """Whether the first `count` tokens go on from the text, as its last tokens show."""
    return len(text.ids) <= count and _is_at(text, known, len(text.ids))


def _is_at(text: Text, known: Sequence[int], end: int) -> bool:
    """Whether the text is as long as `end`, and its last tokens are those before it."""
    start = max(end - _COMPARED, 0)
    return len(text.ids) == end and text.ids[start:] == _plain(known[start:end])


def _plain(tokens: Any) -> list[int]:
    return tokens.tolist() if hasattr(tokens, "tolist") else list(tokens)
