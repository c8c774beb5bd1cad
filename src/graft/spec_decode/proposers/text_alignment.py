"""Text between two vocabularies: a target's text in a draft model's tokens, and drafted text in the target's tokens.

Tokenizers alone; models, caches and rounds are in `other_tokenizer`. Whatever the text, nothing here fails: what cannot
be aligned is not proposed.
"""

from __future__ import annotations

import copy
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from tokenizers import Tokenizer

from graft.settings import require

UNFINISHED = "\ufffd"  # what decoders put for bytes that are not (yet) a character
_MAX_PENDING = 4  # tokens at a text's end that may be bytes of one character
_CONTEXT = 8  # tokens decoded along, so that word-initial spaces come out as they would mid-text
_WINDOWS = (12, 6, 3, 1)  # target tokens that are tokenized again with what was drafted; the first that comes out alike
_MAX_OPEN = 96  # draft tokens that are tokenized again with new text; then the first of them are settled
_KEPT_OPEN = 32  # of them that stay open, about
_MIN_AGREED = 8  # tokens that the text gives alike from its last settled place and from a later one, at least
_MAX_TEXTS = 16  # drafted texts of a row that are tokenized, the likeliest: more would cost more than they bring
_SAMPLES = ("Hello, world! It's 12 + 30 = 42.", "def f(x):\n    return x  # Two\n\nA b C")


class Vocabulary:
    """A tokenizer that adds nothing to a text, cuts nothing off it, and belongs to nobody else."""

    def __init__(self, tokenizer: Any, name: str) -> None:
        """name: whose it is. A GraftError unless it can tell where in a text its tokens are and gives text back."""
        backend: Any = getattr(tokenizer, "backend_tokenizer", None)
        require(
            isinstance(backend, Tokenizer),
            f"{name} has another vocabulary, and no fast tokenizer (tokenizer.json) by which to compare texts",
        )
        self._tokenizer = Tokenizer.from_str(backend.to_str())  # the original may be encoding in another thread
        self._tokenizer.no_truncation()
        self._tokenizer.no_padding()
        self._tokenizer.post_processor = None  # some cut spaces off the tokens' places
        for text in _SAMPLES:
            back = self.decode(self.encode(text))
            require(
                back == text,
                f"the tokenizer of {name} does not give text back ({text!r} becomes {back!r}), so a model with another "
                "vocabulary cannot draft by text",
            )
        self.size = self._tokenizer.get_vocab_size(with_added_tokens=True)
        self.specials = {
            number: str(token.content) for number, token in tokenizer.added_tokens_decoder.items() if token.special
        }
        self.bos, self.eos = tokenizer.bos_token_id, tokenizer.eos_token_id
        self.start = self._start(tokenizer)  # tokens that a text begins with

    def _start(self, tokenizer: Any) -> list[int]:
        plain, whole = self.encode("a"), list(tokenizer.encode("a"))
        places = [place for place in range(len(whole)) if whole[place : place + len(plain)] == plain]
        return whole[: places[0]] if places else []

    def encode(self, text: str) -> list[int]:
        return self._tokenizer.encode(text, add_special_tokens=False).ids

    def encode_with_ends(self, texts: Sequence[str]) -> list[tuple[list[int], list[int]]]:
        """Of each text its tokens, and the place in the text where each of them ends."""
        found = self._tokenizer.encode_batch(list(texts), add_special_tokens=False)
        return [(each.ids, [end for _, end in each.offsets]) for each in found]

    def context(self, ids: Sequence[int]) -> list[int]:
        """The last few of these tokens, from the beginning of a character on: what is decoded with them comes out as it
        would behind all."""
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
    textless: frozenset[int] = field(init=False)  # draft tokens that are no text to the target: drafts end there

    def __post_init__(self) -> None:
        common = set(self.target.specials.values())
        textless = frozenset(number for number, text in self.draft.specials.items() if text not in common)
        object.__setattr__(self, "textless", textless)


class TextRow:
    """One row's text, in the tokens of both vocabularies.

    Of the draft tokens the first are settled: whatever follows, they stay. The others are made anew with every piece of
    text, from a window of it that begins some tokens before them.
    """

    def __init__(self, pair: VocabularyPair) -> None:
        self._pair = pair
        self.ids: list[int] = []  # target tokens
        self.drafts = list(pair.draft.start)  # draft tokens of the same text, but for an unfinished character
        self.num_settled = len(self.drafts)
        self._first = 0  # 1 where the first token begins any text, as the draft tokens do in their own way
        self._num_decoded = 0  # target tokens whose text is in them
        self._window = ""  # the text that is tokenized anew
        self._skipped = 0  # tokens that the window begins with and that are settled

    def copy(self) -> TextRow:
        other = copy.copy(self)
        other.ids, other.drafts = list(self.ids), list(self.drafts)
        return other

    def extend(self, tokens: Sequence[int]) -> int:
        """Adds target tokens; returns how many of the draft tokens, from the first on, are what they were."""
        if not self.ids and tokens and tokens[0] == self._pair.target.bos:
            self._first = self._num_decoded = 1
        self.ids += tokens
        self._window += self._take_text()
        return self._tokenize()

    def _take_text(self) -> str:
        """Text of the tokens since the last time, without a character at the end that is not whole yet."""
        decode, ids = self._pair.target.decode, self.ids
        done, end = self._num_decoded, len(self.ids)
        context = self._pair.target.context(ids[max(self._first, done - _CONTEXT - _MAX_PENDING) : done])
        first = done - len(context)
        text = decode(ids[first:end])
        while text.endswith(UNFINISHED) and end > max(done, len(ids) - _MAX_PENDING):
            end -= 1
            text = decode(ids[first:end])
        if text.endswith(UNFINISHED) and end > done:  # no character is so long: there is one that never will be whole
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
        """Moves the window on, to where its tokens are what they are from its present beginning."""
        begin = len(self._window) - len(self._window) * _KEPT_OPEN // len(tokens)
        later = self._pair.draft.encode(self._window[begin:])
        agreed = _num_equal(tokens[self._skipped :][::-1], later[::-1])
        if agreed >= _MIN_AGREED:
            num_open = agreed - _MIN_AGREED // 2  # so that they agree before that place too
            self._window, self._skipped = self._window[begin:], len(later) - num_open
            self.num_settled = len(self.drafts) - num_open
        elif len(tokens) > 4 * _MAX_OPEN:  # text like no other: nowhere do the tokens agree
            self._window, self._skipped, self.num_settled = "", 0, len(self.drafts)

    def end(self) -> tuple[str, list[int], list[int]] | None:
        """The end of the text, its target tokens, and those behind it that are an unfinished character.

        None if the target's tokenizer would not have written that end so.
        """
        decode, encode, ids = self._pair.target.decode, self._pair.target.encode, self.ids
        done, pending = self._num_decoded, self.ids[self._num_decoded :]
        if done == self._first:
            return "", [], pending
        for count in _WINDOWS:
            window = ids[max(done - count, self._first) : done]
            text = decode(window)
            tokens = encode(text)
            if _num_equal(tokens[::-1], window[::-1]) > len(window) // 2:  # the first ones may be cut
                return text, tokens, pending
        return None


@dataclass
class DraftedTree:
    """Tokens that a draft model has drafted behind one row's text. Node 0 is the text's last token."""

    tokens: list[int] = field(default_factory=lambda: [0])
    parents: list[int] = field(default_factory=lambda: [0])
    paths: list[float] = field(default_factory=lambda: [1.0])  # probability of the path down to the node
    looked_ahead: list[int] = field(default_factory=list)  # of each expanded node its likeliest child

    def path(self, node: int) -> list[int]:
        path = []
        while node:
            path.append(node)
            node = self.parents[node]
        return path[::-1]

    def leaves(self) -> list[int]:
        """The ends of the likeliest texts: nodes that were expanded last, each with what would follow it.

        What follows tells where the last token before it ends.
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
    paths: list[float] = field(default_factory=lambda: [1.0])  # probability of the path down to the node


def as_target_tokens(pair: VocabularyPair, row: TextRow, drafted: DraftedTree) -> TargetTrie:
    """What was drafted, in target tokens: those that the target's tokenizer makes of the text and the drafts behind it.

    A node's probability is that of the drafts which its text needs. The last token of a text is left out, as what
    follows may change it, unless it is a special token or the draft ends there.
    """
    trie, end = TargetTrie(), row.end()
    if end is None:
        return trie
    text, tokens, pending = end
    texts = _Texts(pair, pair.draft.context(row.drafts), drafted)
    leaves = [leaf for leaf in drafted.leaves() if texts.of(leaf) is not None]
    children: dict[tuple[int, int], int] = {}
    needed: list[set[int]] = [set()]  # by node of the trie: drafted nodes that complete its text
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
        steps: list[tuple[int, int]] = []  # target tokens and the drafted node that completes each
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
    """Sets path probabilities: the sums of drafts, but all children of a node together have no more than the node.

    More they would have where one draft completes two of them, by what follows it.
    """
    totals = [0.0] * len(sums)
    for node in range(1, len(sums)):
        totals[trie.parents[node]] += sums[node]
    for node in range(1, len(sums)):
        parent = trie.parents[node]
        share = trie.paths[parent] / totals[parent] if totals[parent] > trie.paths[parent] else 1.0
        trie.paths.append(sums[node] * share)


class _Texts:
    """Texts of drafted nodes: of all tokens from the root down to each."""

    def __init__(self, pair: VocabularyPair, context: Sequence[int], drafted: DraftedTree) -> None:
        self._pair, self._context, self._drafted = pair, list(context), drafted
        self._known = pair.draft.decode(self._context)
        self._of: dict[int, str | None] = {0: ""}
        self._closing: dict[int, int | None] = {0: None}

    def of(self, node: int) -> str | None:
        """The whole characters of the text; None if it does not go on from the text before it."""
        if node not in self._of:
            self._of[node] = self._make(node)
        return self._of[node]

    def closing(self, node: int) -> int | None:
        """The first node on the path that is no text, behind which there is nothing."""
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
        # One byte too few or too many, and some decoders show all bytes before it as none.
        return max(text, self.of(self._drafted.parents[node]) or "", key=len)


def _num_equal(one: Sequence[int], other: Sequence[int]) -> int:
    """Tokens that both begin with."""
    count = 0
    for own, its in zip(one, other, strict=False):
        if own != its:
            break
        count += 1
    return count
