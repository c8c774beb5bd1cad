"""Incremental detokenizer: turns token ids into text of whole characters, and stops at stop strings."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Hashable, Sequence
from functools import cached_property, lru_cache
from typing import Any

from graft.errors import GraftError

_TAIL = 6  # prompt tokens decoded before the answer, so that the spaces of its first word are right
_SHORT = 4  # tokens whose text is cached
_LONGEST = 4  # tokens of one character: it has at most four bytes, and each may be a token
_DAMAGED = 3 * _LONGEST  # this many held tokens probably never become a character
_UNFINISHED = "\ufffd"  # decoders' replacement for bytes that are not (yet) a character


class TextStream:
    """Detokenizes an answer token by token, and finds stop strings."""

    def __init__(
        self, tokenizer: Any, prompt: Sequence[int], stop: Sequence[str] = (), kept: frozenset[int] = frozenset()
    ) -> None:
        """kept: special tokens that are part of the text; all others are left out."""
        self._tokenizer = tokenizer
        self.kept = kept
        self._dropped = _special_ids(tokenizer) - kept if kept else None  # None: those that the tokenizer itself drops
        self._decode_short = decoded_before if isinstance(tokenizer, Hashable) else _decoded
        self._ids = self._context(prompt)
        self._decoded_from, self._decoded_to = 0, len(self._ids)  # ids whose text is known
        self._whole_after = 0  # number of held ids from which on to decode all of them again
        self._stop = tuple(stop)
        self._stop_ids = _special_stops(tokenizer, stop, kept) if stop else frozenset()
        self._num_taken = 0
        self._lengths: list[int] = []  # of the text, after each token
        self._may_stop = True  # whether the last token may complete a stop string
        self.text = ""  # whole characters only; ends before a completed stop string

    def push(self, token: int, may_stop: bool = True) -> bool:
        """Add one token. Returns True if it completed a stop string; the text is then cut before it."""
        self._may_stop = may_stop
        is_stopped = self._push(token, may_stop)
        self._lengths.append(len(self.text))
        return is_stopped

    def num_tokens(self, num_characters: int) -> int:
        """The number of tokens that make up the first `num_characters` characters of the text."""
        return min(bisect_left(self._lengths, num_characters) + 1, len(self._lengths)) if num_characters else 0

    def _push(self, token: int, may_stop: bool) -> bool:
        if may_stop and token in self._stop_ids:
            return True
        if self._leaves_no_text(token):
            return False
        self._ids.append(token)
        if not self._may_be_whole():
            return False
        new = self._decode(self._ids[self._decoded_from :])
        if new.endswith(_UNFINISHED):
            self._whole_after = self._num_held_ids + self._num_held_ids // 8
            return False
        return self._add(new, may_stop)

    @property
    def _num_held_ids(self) -> int:
        return len(self._ids) - self._decoded_to

    def _may_be_whole(self) -> bool:
        """Whether the text may end with a whole character, judged by a few of the held ids.

        Decoding all held ids for every token of damaged text would take quadratic time. The last few ids tell how the
        text ends; they may begin within a character, so several lengths are tried. The first few ids are decoded with
        them, because in some decoders one invalid byte makes all bytes beside it invalid. If such a byte is elsewhere,
        all ids are decoded in vain, and again only when there are an eighth more.
        """
        if self._num_held_ids <= _DAMAGED:
            return True
        if self._num_held_ids < self._whole_after:
            return False
        first = self._ids[self._decoded_to : self._decoded_to + _LONGEST]
        ends = (self._ids[-length:] for length in range(_LONGEST, 2 * _LONGEST))
        return any(not self._decode(first + end).endswith(_UNFINISHED) for end in ends)

    def finish(self) -> None:
        """Add the held tokens to the text, if an answer ends inside a character. A stop string in them cuts it."""
        if self._num_held_ids:
            self._add(self._decode(self._ids[self._decoded_from :]), self._may_stop)

    def take(self, final: bool = False) -> str:
        """The new text since the last call. Unless `final`, it leaves out an end that may begin a stop string."""
        end = len(self.text) if final else len(self.text) - self._num_held()
        piece = self.text[self._num_taken : end]
        self._num_taken = max(end, self._num_taken)
        return piece

    def _add(self, new: str, may_stop: bool) -> bool:
        known = self._decode(self._ids[self._decoded_from : self._decoded_to])
        self._decoded_from, self._decoded_to, self._whole_after = self._decoded_to, len(self._ids), 0
        before = len(self.text)
        text, self.text = self.text, ""  # a string with one reference grows in place
        text += new[len(known) :]
        self.text = text
        if not (may_stop and self._stop):
            return False
        hits = [self.text.find(s, max(0, before - len(s) + 1)) for s in self._stop]
        found = [hit for hit in hits if hit >= 0]
        if found:
            self.text = self.text[: min(found)]
        return bool(found)

    def _num_held(self) -> int:
        """Characters at the end of the text that may begin a stop string."""
        return max((self._num_begun(s) for s in self._stop), default=0)

    def _num_begun(self, stop: str) -> int:
        place = max(len(self.text) - len(stop) + 1, 0)
        while (place := self.text.find(stop[0], place)) >= 0:
            if stop.startswith(self.text[place:]):
                return len(self.text) - place
            place += 1
        return 0

    def _context(self, prompt: Sequence[int]) -> list[int]:
        """The last tokens of the prompt, if possible from the beginning of a character."""
        ends = [list(prompt[-length:]) for length in range(_TAIL, _TAIL + _LONGEST)]
        return next((end for end in ends if _UNFINISHED not in self._decode(end)), ends[0])

    def _leaves_no_text(self, token: int) -> bool:
        """Whether a token is a dropped special token or outside the vocabulary, so that the text ignores it."""
        if self._decode([token]):
            return False
        # A space alone may decode to no text as well.
        return token in self._special or self._tokenizer.convert_ids_to_tokens(token) is None

    @cached_property
    def _special(self) -> frozenset[int]:
        return _special_ids(self._tokenizer)

    def _decode(self, ids: list[int]) -> str:
        dropped = self._dropped
        if dropped is not None:
            ids = [token for token in ids if token not in dropped]
        if len(ids) <= _SHORT:
            return self._decode_short(self._tokenizer, tuple(ids), dropped is None)
        return _decoded(self._tokenizer, ids, dropped is None)


def _decoded(tokenizer: Any, ids: Sequence[int], skips_special: bool) -> str:
    return str(tokenizer.decode(list(ids), skip_special_tokens=skips_special, clean_up_tokenization_spaces=False))


decoded_before = lru_cache(maxsize=1 << 14)(_decoded)  # the same one or two tokens come often


def _special_ids(tokenizer: Any) -> frozenset[int]:
    added = tokenizer.added_tokens_decoder.items()
    return frozenset(tokenizer.all_special_ids) | {number for number, token in added if token.special}


def _special_stops(tokenizer: Any, stop: Sequence[str], kept: frozenset[int]) -> frozenset[int]:
    """Special tokens named by stop strings. They end the answer by id, since their text is never part of the answer."""
    added = tokenizer.added_tokens_decoder.items()
    ids = {str(token.content): number for number, token in added if token.special and number not in kept}
    for text in stop:
        for name in ids:
            if name in text and text not in ids:
                raise GraftError(
                    f"stop string {text!r} holds the special token {name}, which is never part of the text: "
                    f"give {name!r} alone, or stop_token_ids=[{ids[name]}]"
                )
    return frozenset(ids[text] for text in stop if text in ids)
