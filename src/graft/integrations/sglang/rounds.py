"""The rounds of a server: the texts of requests, the trees that rank 0 proposes, and what it learns from them.

Nothing here imports SGLang or needs a GPU.
"""

import logging
import secrets
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor

from graft.integrations.sglang.settings import SGLangSettings
from graft.integrations.sglang.trees import Drafted, levels_of
from graft.spec_decode.acceptance import Accepted, paths
from graft.spec_decode.cost_model import StepCost
from graft.spec_decode.grafter import Grafter, Round, Text
from graft.spec_decode.policy_settings import PolicySettings
from graft.spec_decode.proposers import TargetTopK
from graft.tree.candidates import before_roots
from graft.tree.tree import DraftTree

_log = logging.getLogger(__name__)


class Request(Protocol):
    """The part of SGLang's `Req` that is used here."""

    rid: str
    origin_input_ids: Sequence[int]
    output_ids: Sequence[int]
    sampling_params: Any

    def finished(self) -> bool: ...


@dataclass(eq=False)
class _Known:
    """A request that was seen."""

    request: Request
    seed: int
    text: Text | None = None  # None: it had no tree yet
    has_head: bool = True  # whether the head has read all of its text, and so drafts for it


class Texts:
    """The texts of requests, by request id. A text is made when its request is first seen, and finished at its end.

    With overlapped scheduling a round begins before SGLang has processed the results of the last one. A request's own
    ids then lag behind, so `Rounds.learn` extends the texts itself.
    """

    def __init__(self, vocab_size: int, max_texts: int, finish: Callable[[Text], None]) -> None:
        self._vocab_size, self._max_texts, self._finish = vocab_size, max_texts, finish
        self._known: dict[str, _Known] = {}  # least recently seen first

    def __len__(self) -> int:
        return len(self._known)

    def of(self, requests: Sequence[Request], roots: Sequence[int], lengths: Sequence[int]) -> list[Text]:
        """The complete texts of a decode batch. Also finishes the texts of requests that have ended.

        roots: the requests' last tokens. lengths: of the texts, with the roots.
        """
        return [self._text_of(*each) for each in zip(self._see(requests), roots, lengths, strict=True)]

    def so_far(self, requests: Sequence[Request]) -> list[Text] | None:
        """The texts of these requests as they are known here, or None if one is not known."""
        known = [self._known.get(request.rid) for request in requests]
        texts = [each.text for each in known if each is not None and each.text is not None]
        return texts if len(texts) == len(known) else None

    def seeds(self, requests: Sequence[Request]) -> list[int]:
        """The sampling seeds of these requests: their own, or a random one for each."""
        return [known.seed for known in self._see(requests)]

    def lose_head(self, requests: Sequence[Request]) -> None:
        """Note that the head has not read these requests' last tokens, and no longer drafts for them."""
        for known in self._see(requests):
            known.has_head = False

    def find_head(self, requests: Sequence[Request]) -> None:
        """Note that the head reads the whole text of these requests, and drafts for them again."""
        for request in requests:
            known = self._known.get(request.rid)
            if known is not None and known.request is request:
                known.has_head = True

    def have_heads(self, requests: Sequence[Request]) -> list[bool]:
        """Whether the head drafts for each of these requests, which were all seen before."""
        return [self._known[request.rid].has_head for request in requests]

    def _see(self, requests: Sequence[Request]) -> list[_Known]:
        now = []
        for request in requests:
            known = self._known.pop(request.rid, None)
            if known is not None and known.request is not request:  # another request with the same id
                self._end(known)
                known = None
            if known is None:
                given = request.sampling_params.sampling_seed
                known = _Known(request, secrets.randbits(62) if given is None else int(given))
            now.append(known)
        here = {known.request.rid: known for known in now}
        num_too_many = len(self._known) + len(here) - max(self._max_texts, len(here))
        for number, (rid, known) in enumerate(list(self._known.items())):
            if known.request.finished() or number < num_too_many:  # others are preempted and may return
                del self._known[rid]
                self._end(known)
        self._known |= here
        return now

    def _text_of(self, known: _Known, root: int, length: int) -> Text:
        text, request = known.text, known.request
        if text is None or text.num_prompt_tokens != len(request.origin_input_ids):
            text = known.text = self._text(request)
        elif not _ends_in(text, root, length):  # it got tokens without a tree, or was restarted
            if len(text.ids) >= length:
                text = known.text = self._text(request)
            self._extend(text, request)
        if len(text.ids) == length - 1:
            text.ids.append(root)
        return text

    def _extend(self, text: Text, request: Request) -> None:
        """Add the request's tokens that the text does not have yet."""
        text.ids += request.output_ids[max(len(text.ids) - text.num_prompt_tokens, 0) :]

    def _end(self, known: _Known) -> None:
        if known.text is not None:
            self._extend(known.text, known.request)
            # With overlapped scheduling there is one more round after the end.
            del known.text.ids[known.text.num_prompt_tokens + len(known.request.output_ids) :]
            self._finish(known.text)

    def _text(self, request: Request) -> Text:
        prompt = request.origin_input_ids
        # Placeholders of images are not tokens, and must never be proposed.
        known = [token if 0 <= token < self._vocab_size else 0 for token in prompt]
        return Text([*known, *request.output_ids], num_prompt_tokens=len(prompt))


def _ends_in(text: Text, root: int, length: int) -> bool:
    return len(text.ids) == length and text.ids[-1] == root


class _Begun(NamedTuple):
    """A round that was begun before its drafts arrived."""

    texts: list[Text]
    lengths: list[int]
    num_places: int
    round: Round | None


@dataclass(eq=False)
class Proposal:
    """A round's tree, and what is needed to learn from it."""

    round: Round | None
    tree: DraftTree
    texts: list[Text]
    before: tuple[list[int], list[int]]  # for each row, the token before the root and the one before that
    salts: list[int]


class Rounds:
    """The decisions of rounds, made on rank 0 only, since all ranks must verify the same tree."""

    def __init__(self, vocab_size: int, topk: int, num_steps: int, num_places: int, settings: SGLangSettings) -> None:
        """num_steps, num_places: the most levels that the head drafts, and the most places of a row."""
        self._vocab_size, self._topk, self._num_steps = vocab_size, topk, num_steps
        self._budget = min(settings.budget or num_places - 1, num_places - 1)
        self._settings = settings
        self._has_warned = False
        self.reset()

    def reset(self) -> None:
        """Forget all texts and everything learned from them."""
        # All D places are verified and all levels are drafted in any case, so no decision depends on time.
        policy = PolicySettings(budget=self._budget, pass_cost=0.0, isolated=self._settings.isolated)
        self._undigested: Callable[[], None] | None = None  # of the last round
        self.grafter = Grafter(self._vocab_size, self._num_steps, policy, StepCost())
        self.texts = Texts(self._vocab_size, self._settings.max_texts, self.grafter.finish)
        self._begun: _Begun | None = None

    def begin(self, requests: Sequence[Request], num_places: int) -> None:
        """Retrieve copies of earlier text while the head drafts, if the texts are known after the last round."""
        texts = self.texts.so_far(requests)
        if texts is not None:
            roots = torch.tensor([text.ids[-1] for text in texts])
            lengths = [len(text.ids) for text in texts]
            self._begun = _Begun(texts, lengths, num_places, self._round(roots, texts, num_places))

    def _round(self, roots: Tensor, texts: list[Text], num_places: int) -> Round | None:
        budget = min(self._budget, num_places - 1)
        max_depth = min(self._settings.max_depth or budget, budget)
        return self.grafter.begin(roots, texts, [budget] * len(texts), max_depth, is_quick=True)

    def propose(
        self, requests: Sequence[Request], roots: Tensor, lengths: Sequence[int], drafted: Drafted, num_places: int
    ) -> Proposal:
        """The tree to verify in `num_places` places of every row.

        roots [B]: the requests' last tokens. lengths: of their texts, with the roots. All are on the host.
        """
        texts, grafter = self.texts.of(requests, roots.tolist(), lengths), self.grafter
        self._check(texts, roots.tolist(), lengths)
        begun, self._begun = self._begun, None
        if begun is not None and begun[:3] == (texts, [len(text.ids) for text in texts], num_places):
            round = begun.round
        else:  # the batch or a text has changed
            round = self._round(roots, texts, num_places)
        if round is None:
            tree = DraftTree.roots(roots)
        else:
            levels = levels_of(drafted, self._topk, round.candidates.most_nodes)
            passes, num = ([level] for level in levels), len(levels)
            rows = self.texts.have_heads(requests)
            grafter.draft(round, passes, self._topk, num_made=num, rows=rows)
            round.reaches.clear()  # all passes are made in any case, so their gains need not be learned
            tree = grafter.graft(round)
        before, earlier = before_roots([text.ids for text in texts])
        salts = [grafter.salt_of(text) for text in texts]
        return Proposal(round, tree, texts, (list(before), list(earlier)), salts)

    def _check(self, texts: Sequence[Text], roots: Sequence[int], lengths: Sequence[int]) -> None:
        whole = all(_ends_in(*each) for each in zip(texts, roots, lengths, strict=True))
        if not whole and not self._has_warned:
            # The text stays right, but little that is retrieved will be accepted.
            _log.warning("requests do not end with the token to be decoded next: Graft retrieves badly")
            self._has_warned = True

    def learn(self, proposal: Proposal, chosen: Tensor, successors: Tensor, logits: Tensor) -> Accepted:
        """Learn from a verified tree. All tensors are on the host.

        chosen [B, D]: the target's token after every place. successors, logits [B, D, k]: its top-k tokens there, int32
        and float32.
        """
        tree, width = proposal.tree, proposal.tree.width
        accepted = paths(tree, chosen[:, :width])
        columns = (tree.tokens, tree.parents, tree.sources)
        highest = (successors[:, :width].contiguous(), logits[:, :width].contiguous())
        self.grafter.learn_top_k(TargetTopK(*columns, *highest, *proposal.before, proposal.salts))
        self.digest()  # the round before, if nobody has
        self._undigested = partial(self.grafter.learn, proposal.round, tree, accepted, seconds=1.0)
        for text, tokens in zip(proposal.texts, accepted.tokens, strict=True):
            text.ids += tokens
        return accepted

    def digest(self) -> None:
        """Learns of the last round what need not be known before the next tree."""
        learn, self._undigested = self._undigested, None  # first, so that a failure does not repeat in every round
        if learn is not None:
            learn()


@dataclass
class _Totals:
    """Counts and seconds since the last line in the log."""

    began: float
    rounds: int = 0
    rows: int = 0
    tokens: int = 0
    waited: float = 0.0
    built: float = 0.0
    learned: float = 0.0


class RoundLog:
    """Logs tokens and times, in one line after every `every` rounds."""

    def __init__(self, every: int | None) -> None:
        self._every = every
        self._now = _Totals(time.perf_counter())

    def built(self, num_rows: int, waiting: float, started: float) -> None:
        """Count a tree that was sent. waiting: when waiting for drafts began. started: when building it began."""
        if self._every is None:
            return
        now, totals = time.perf_counter(), self._now
        totals.rounds, totals.rows = totals.rounds + 1, totals.rows + num_rows
        totals.waited, totals.built = totals.waited + started - waiting, totals.built + now - started
        if totals.rounds < self._every:
            return
        each = 1e3 / totals.rounds
        _log.info(
            "Graft: %d rounds of %.1f requests, %.2f tokens of each; a round %.2f ms: waited for drafts %.2f, "
            "built trees %.2f, learned %.2f",
            totals.rounds,
            totals.rows / totals.rounds,
            totals.tokens / totals.rows,
            each * (now - totals.began),
            each * totals.waited,
            each * totals.built,
            each * totals.learned,
        )
        self._now = _Totals(now)

    def learned(self, num_tokens: int, started: float) -> None:
        self._now.tokens += num_tokens
        self._now.learned += time.perf_counter() - started
