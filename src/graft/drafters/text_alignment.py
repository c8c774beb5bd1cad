"""Text between two vocabularies: the target's text in draft tokens, and drafted text in target tokens.

Only tokenizers are used here; models, caches and rounds are in `other_tokenizer`. No text raises an error: drafts that
cannot be aligned are dropped.
"""

from __future__ import annotations

import copy
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from tokenizers import Tokenizer

from graft.settings import require

UNFINISHED = "\ufffd"  # decoders' replacement for bytes that are not (yet) a character
_MAX_PENDING = 4  # tokens at the end of a text that may be bytes of one character
_CONTEXT = 8  # tokens to decode before new ones, so that spaces between words come out right
# Numbers of last target tokens to tokenize again with drafted text. The first one that gives the same tokens is used.
_WINDOWS = (12, 6, 3, 1)
_MAX_OPEN = 96  # the most draft tokens to tokenize again with new text; above it, the first of them are settled
_KEPT_OPEN = 32  # about how many then stay open
_MIN_AGREED = 8  # tokens that must agree between two starts of tokenizing, to move on to the later start
_MAX_TEXTS = 16  # the likeliest drafted texts of a row to tokenize; more do not pay
_SAMPLES = ("Hello, world! It's 12 + 30 = 42.", "def f(x):\n    return x  # Two\n\nA b C")


class Vocabulary:
    """A private copy of a tokenizer that adds nothing to a text and cuts nothing off."""

    def __init__(self, tokenizer: Any, name: str) -> None:
        """name: the model's. Raises a GraftError unless it is a fast tokenizer whose decoding restores a text."""
        backend: Any = getattr(tokenizer, "backend_tokenizer", None)
        require(
            isinstance(backend, Tokenizer),
            f"{name} has another vocabulary, and no fast tokenizer (tokenizer.json) to convert texts with",
        )
        self._tokenizer = Tokenizer.from_str(backend.to_str())  # other threads may use the original
        self._tokenizer.no_truncation()
        self._tokenizer.no_padding()
        self._tokenizer.post_processor = None  # some cut spaces off the offsets
        for text in _SAMPLES:
            back = self.decode(self.encode(text))
            require(
                back == text,
                f"the tokenizer of {name} does not restore text ({text!r} becomes {back!r}), so a model with another "
                "vocabulary cannot be used",
            )
        self.size = self._tokenizer.get_vocab_size(with_added_tokens=True)
        self.specials = {
            number: str(token.content) for number, token in tokenizer.added_tokens_decoder.items() if token.special
        }
        self.bos, self.eos = tokenizer.bos_token_id, tokenizer.eos_token_id
        self.start = self._start(tokenizer)  # special tokens that begin a text

    def _start(self, tokenizer: Any) -> list[int]:
        plain, whole = self.encode("a"), list(tokenizer.encode("a"))
        places = [place for place in range(len(whole)) if whole[place : place + len(plain)] == plain]
        return whole[: places[0]] if places else []

    def encode(self, text: str) -> list[int]:
        return self._tokenizer.encode(text, add_special_tokens=False).ids

    def encode_with_ends(self, texts: Sequence[str]) -> list[tuple[list[int], list[int]]]:
        """For each text, its tokens and where in the text each token ends."""
        found = self._tokenizer.encode_batch(list(texts), add_special_tokens=False)
        return [(each.ids, [end for _, end in each.offsets]) for each in found]

    def context(self, ids: Sequence[int]) -> list[int]:
        """The last few tokens, from the start of a character. New tokens decode after them as after the whole text."""
        for count in range(_CONTEXT, _CONTEXT + _MAX_PENDING):
            context = list(ids[-count:])
            if not self.decode(context).startswith(UNFINISHED):
                break
        return context

    def decode(self, ids: Sequence[int]) -> str:
        return str(self._tokenizer.decode(list(ids), skip_special_tokens=False))


@dataclass(frozen=True)
class VocabularyPair:
    """The vocabularies of a draft model and of its target."""

    draft: Vocabulary
    target: Vocabulary
    textless: frozenset[int] = field(init=False)  # special draft tokens that the target does not have: drafts end there

    def __post_init__(self) -> None:
        common = set(self.target.specials.values())
        textless = frozenset(number for number, text in self.draft.specials.items() if text not in common)
        object.__setattr__(self, "textless", textless)


class TextRow:
    """One row's text, in the tokens of both vocabularies.

    The first draft tokens are settled: later text does not change them. The others are open, and are tokenized again
    with every new piece of text, from a window that begins some tokens before them.
    """

    def __init__(self, pair: VocabularyPair) -> None:
        self._pair = pair
        self.ids: list[int] = []  # target tokens
        self.drafts = list(pair.draft.start)  # draft tokens of the same text, without an unfinished character
        self.num_settled = len(self.drafts)
        self._first = 0  # 1 if the first target token is bos; `drafts` have their own start
        self._num_decoded = 0  # target tokens whose text is in the drafts
        self._window = ""  # the text to tokenize again
        self._skipped = 0  # settled tokens at the start of the window

    def copy(self) -> TextRow:
        other = copy.copy(self)
        other.ids, other.drafts = list(self.ids), list(self.drafts)
        return other

    def extend(self, tokens: Sequence[int]) -> int:
        """Add target tokens. Returns how many of the first draft tokens are unchanged."""
        if not self.ids and tokens and tokens[0] == self._pair.target.bos:
            self._first = self._num_decoded = 1
        self.ids += tokens
        self._window += self._take_text()
        return self._tokenize()

    def _take_text(self) -> str:
        """The text of new tokens, without an unfinished character at the end."""
        decode, ids = self._pair.target.decode, self.ids
        done, end = self._num_decoded, len(self.ids)
        context = self._pair.target.context(ids[max(self._first, done - _CONTEXT - _MAX_PENDING) : done])
        first = done - len(context)
        text = decode(ids[first:end])
        while text.endswith(UNFINISHED) and end > max(done, len(ids) - _MAX_PENDING):
            end -= 1
            text = decode(ids[first:end])
        if text.endswith(UNFINISHED) and end > done:  # longer than any character: it will never be complete
            end = len(ids)
            text = decode(ids[first:end])
        known = decode(context) if end > done else text
        self._num_decoded = end
        return text[len(known) :]

    def _tokenize(self) -> int:
        tokens = self._pair.draft.encode(self._window)
        opened = tokens[self._skipped :]
        unchanged = self.num_settled + _num_equal(self.drafts[self.num_settled :], opened)
        self.drafts[self.num_settled :] = opened
        if len(opened) > _MAX_OPEN:
            self._settle(tokens)
        return unchanged

    def _settle(self, tokens: Sequence[int]) -> None:
        """Advance the window to a start that gives the same tokens."""
        begin = len(self._window) - len(self._window) * _KEPT_OPEN // len(tokens)
        later = self._pair.draft.encode(self._window[begin:])
        agreed = _num_equal(tokens[self._skipped :][::-1], later[::-1])
        if agreed >= _MIN_AGREED:
            num_open = agreed - _MIN_AGREED // 2  # so that some agree before that place too
            self._window, self._skipped = self._window[begin:], len(later) - num_open
            self.num_settled = len(self.drafts) - num_open
        elif len(tokens) > 4 * _MAX_OPEN:  # the tokens agree nowhere: start again after them
            self._window, self._skipped, self.num_settled = "", 0, len(self.drafts)

    def end(self) -> tuple[str, list[int], list[int]] | None:
        """The last part of the text, its target tokens, and the tokens of an unfinished character after it.

        None if the target's tokenizer would tokenize that part differently.
        """
        decode, encode, ids = self._pair.target.decode, self._pair.target.encode, self.ids
        done, pending = self._num_decoded, self.ids[self._num_decoded :]
        if done == self._first:
            return "", [], pending
        for count in _WINDOWS:
            window = ids[max(done - count, self._first) : done]
            text = decode(window)
            tokens = encode(text)
            if _num_equal(tokens[::-1], window[::-1]) > len(window) // 2:  # the first ones may be cut characters
                return text, tokens, pending
        return None


@dataclass
class DraftedTree:
    """Tokens drafted after one row's text. Node 0 is the text's last token."""

    tokens: list[int] = field(default_factory=lambda: [0])
    parents: list[int] = field(default_factory=lambda: [0])
    paths: list[float] = field(default_factory=lambda: [1.0])  # path probability
    looked_ahead: list[int] = field(default_factory=list)  # the likeliest child of each expanded node

    def path(self, node: int) -> list[int]:
        path = []
        while node:
            path.append(node)
            node = self.parents[node]
        return path[::-1]

    def leaves(self) -> list[int]:
        """The ends of the likeliest texts: the likeliest children of the nodes expanded last.

        A child is included because it shows where its parent's text ends.
        """
        expanded = {self.parents[node] for node in self.looked_ahead}
        leaves = [node for node in self.looked_ahead if node not in expanded]
        return sorted(leaves, key=lambda node: -self.paths[self.parents[node]])[:_MAX_TEXTS]


@dataclass
class TargetTrie:
    """Drafted texts as a tree of target tokens below the root, node 0."""

    tokens: list[int] = field(default_factory=lambda: [0])
    parents: list[int] = field(default_factory=lambda: [0])
    depths: list[int] = field(default_factory=lambda: [0])
    paths: list[float] = field(default_factory=lambda: [1.0])  # path probability


def as_target_tokens(pair: VocabularyPair, row: TextRow, drafted: DraftedTree) -> TargetTrie:
    """The drafted texts in target tokens, as the target's tokenizer writes them after the text.

    A node's probability is the sum over the drafted nodes that complete it. The last token of a text is left out, since
    later text may change it, unless it is a special token or the draft ends there.
    """
    trie, end = TargetTrie(), row.end()
    if end is None:
        return trie
    text, tokens, pending = end
    texts = _Texts(pair, pair.draft.context(row.drafts), drafted)
    leaves = [leaf for leaf in drafted.leaves() if texts.of(leaf) is not None]
    children: dict[tuple[int, int], int] = {}
    needed: list[set[int]] = [set()]  # by node of the trie: drafted nodes that complete it
    found = pair.target.encode_with_ends([text + (texts.of(leaf) or "") for leaf in leaves])
    before, first = len(tokens), len(tokens) + len(pending)
    for leaf, (all_tokens, ends) in zip(leaves, found, strict=True):
        if all_tokens[:before] != tokens or all_tokens[before:first] != pending:
            continue
        path, closing = drafted.path(leaf), texts.closing(leaf)
        is_whole = closing is not None or (bool(all_tokens) and all_tokens[-1] in pair.target.specials)
        last = len(all_tokens) if is_whole else len(all_tokens) - 1
        own = list(zip(all_tokens[first:last], ends[first:last], strict=True))
        node, place = 0, 0
        steps: list[tuple[int, int]] = []  # target tokens, and the drafted node that completes each
        for token, token_end in own:
            while place < len(path) and len(texts.of(path[place]) or "") < token_end - len(text):
                place += 1
            if place == len(path):
                break
            steps.append((token, path[place]))
        if closing is not None and len(steps) == len(own) and drafted.tokens[closing] == pair.draft.eos:
            steps += [(pair.target.eos, closing)] if pair.target.eos is not None else []
        for token, completing in steps:
            child = children.setdefault((node, token), len(trie.tokens))
            if child == len(trie.tokens):
                trie.tokens.append(token)
                trie.parents.append(node)
                trie.depths.append(trie.depths[node] + 1)
                needed.append(set())
            needed[child].add(completing)
            node = child
    _weigh(trie, [sum(drafted.paths[node] for node in nodes) for nodes in needed])
    return trie


def _weigh(trie: TargetTrie, sums: Sequence[float]) -> None:
    """Set path probabilities to `sums`, scaled down where the children of a node together exceed the node's own.

    They may exceed it if one draft completes several of them.
    """
    totals = [0.0] * len(sums)
    for node in range(1, len(sums)):
        totals[trie.parents[node]] += sums[node]
    for node in range(1, len(sums)):
        parent = trie.parents[node]
        share = trie.paths[parent] / totals[parent] if totals[parent] > trie.paths[parent] else 1.0
        trie.paths.append(sums[node] * share)


class _Texts:
    """The texts of the paths from the root to each drafted node."""

    def __init__(self, pair: VocabularyPair, context: Sequence[int], drafted: DraftedTree) -> None:
        self._pair, self._context, self._drafted = pair, list(context), drafted
        self._known = pair.draft.decode(self._context)
        self._of: dict[int, str | None] = {0: ""}
        self._closing: dict[int, int | None] = {0: None}

    def of(self, node: int) -> str | None:
        """The complete characters of the path's text; None if it changes the text before the root."""
        if node not in self._of:
            self._of[node] = self._make(node)
        return self._of[node]

    def closing(self, node: int) -> int | None:
        """The first node on the path that has no text in the target's vocabulary. The draft ends there."""
        if node not in self._closing:
            drafted = self._drafted
            above = self.closing(drafted.parents[node])
            is_text = drafted.tokens[node] not in self._pair.textless
            self._closing[node] = above if above is not None or is_text else node
        return self._closing[node]

    def _make(self, node: int) -> str | None:
        if (closing := self.closing(node)) is not None:
            return self.of(self._drafted.parents[closing])
        tokens = [self._drafted.tokens[each] for each in self._drafted.path(node)]
        text = self._pair.draft.decode(self._context + tokens)
        if not text.startswith(self._known):
            return None
        text = text[len(self._known) :].rstrip(UNFINISHED)
        # Some decoders drop earlier bytes too if a character is incomplete.
        return max(text, self.of(self._drafted.parents[node]) or "", key=len)


def _num_equal(one: Sequence[int], other: Sequence[int]) -> int:
    """Length of the common prefix."""
    count = 0
    for own, its in zip(one, other, strict=False):
        if own != its:
            break
        count += 1
    return count
