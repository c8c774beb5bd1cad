"""The rounds of a server: texts of requests that come and go, the tree that rank 0 proposes, what it learns of it.

Nothing here imports SGLang or needs a GPU.
"""

from __future__ import annotations

import logging
import secrets
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from torch import Tensor

from graft.integrations.sglang.settings import SGLangSettings
from graft.integrations.sglang.trees import Drafted, levels_of, packed, unpacked
from graft.spec_decode.acceptance import Accepted, paths
from graft.spec_decode.candidates import before_roots
from graft.spec_decode.cost_model import StepCost
from graft.spec_decode.grafter import Grafter, Round, Text
from graft.spec_decode.policy_settings import PolicySettings
from graft.spec_decode.proposers import TargetTopK
from graft.spec_decode.tree import DraftTree

_log = logging.getLogger(__name__)


class Request(Protocol):
    """SGLang's `Req`, as far as it is used."""

    rid: str
    origin_input_ids: Sequence[int]
    output_ids: Sequence[int]
    sampling_params: Any

    def finished(self) -> bool: ...


@dataclass(eq=False)
class _Known:
    """A request that was seen."""

    request: Request
    text: Text
    seed: int


class Texts:
    """The texts of requests, by request id: made when one is first seen, finished when it has left."""

    def __init__(self, vocab_size: int, max_texts: int, finish: Callable[[Text], None]) -> None:
        self._vocab_size, self._max_texts, self._finish = vocab_size, max_texts, finish
        self._known: dict[str, _Known] = {}  # the longest unseen first

    def __len__(self) -> int:
        return len(self._known)

    def of(self, requests: Sequence[Request]) -> list[Text]:
        """The texts of a decode batch, complete. Requests that are not in it and have ended are finished."""
        now = [self._update(request) for request in requests]
        here = {request.rid for request in requests}
        gone = [rid for rid in self._known if rid not in here]
        num_too_many = len(self._known) - max(self._max_texts, len(here))
        for number, rid in enumerate(gone):
            known = self._known[rid]
            if known.request.finished() or number < num_too_many:  # else it waits for memory, and may come back
                self._extend(known)
                self._finish(self._known.pop(rid).text)
        return [known.text for known in now]

    def seeds(self, requests: Sequence[Request]) -> list[int]:
        """The seeds of their draws: those that requests gave, else one drawn for each."""
        return [self._known[request.rid].seed for request in requests]

    def _update(self, request: Request) -> _Known:
        known = self._known.pop(request.rid, None)
        if known is not None and known.request is not request:  # another request with its id
            self._finish(known.text)
            known = None
        if known is None:
            given = request.sampling_params.sampling_seed
            known = _Known(request, self._text(request), secrets.randbits(62) if given is None else int(given))
        elif not self._extend(known):  # begun anew
            known.text = self._text(request)
        self._known[request.rid] = known
        return known

    def _extend(self, known: _Known) -> bool:
        """Adds what the request has got since; False if that does not continue the text."""
        text, request = known.text, known.request
        num_known = len(text.ids) - text.num_prompt_tokens
        if text.num_prompt_tokens != len(request.origin_input_ids) or num_known > len(request.output_ids):
            return False
        text.ids += request.output_ids[num_known:]
        return True

    def _text(self, request: Request) -> Text:
        prompt = request.origin_input_ids
        # Places of an image hold numbers that are no tokens, and must never be proposed.
        known = [token if 0 <= token < self._vocab_size else 0 for token in prompt]
        return Text([*known, *request.output_ids], num_prompt_tokens=len(prompt))


@dataclass(eq=False)
class Proposal:
    """A round's tree, and what is needed to learn from it."""

    round: Round | None
    tree: DraftTree
    before: tuple[list[int], list[int]]  # by row, the token before the root and the one before that
    salts: list[int]


class Rounds:
    """What is decided about rounds: on rank 0 alone, since all ranks must verify the same tree."""

    def __init__(self, vocab_size: int, topk: int, num_steps: int, num_places: int, settings: SGLangSettings) -> None:
        """num_steps: levels that the head drafts in every round. num_places: D."""
        self._vocab_size, self._topk, self._num_steps = vocab_size, topk, num_steps
        self.num_places = num_places
        self._settings = settings
        self._has_warned = False
        self._budget = min(settings.budget or num_places - 1, num_places - 1)
        self._max_depth = min(settings.max_depth or self._budget, self._budget)
        self.reset()

    def reset(self) -> None:
        """Forgets all texts and all that was learned of them."""
        # All D places are verified whatever they hold, and all levels are there: nothing is decided by time.
        policy = PolicySettings(budget=self._budget, pass_cost=0.0, isolated=self._settings.isolated)
        self.grafter = Grafter(self._vocab_size, self._num_steps, policy, StepCost())
        self.texts = Texts(self._vocab_size, self._settings.max_texts, self.grafter.finish)

    def propose(self, requests: Sequence[Request], roots: Tensor, drafted: Drafted) -> Proposal:
        """The tree to verify. roots [B]: the requests' last tokens; all on the host."""
        texts, grafter = self.texts.of(requests), self.grafter
        if not self._has_warned and [text.ids[-1] for text in texts] != roots.tolist():
            # What is verified is right all the same, but little of what is looked up will be.
            _log.warning("requests do not end in the token that is decoded next: Graft retrieves badly")
            self._has_warned = True
        round = grafter.begin(roots, texts, [self._budget] * len(texts), self._max_depth)
        if round is None:
            tree = DraftTree.roots(roots)
        else:
            levels = ([level] for level in levels_of(drafted, self._topk))
            grafter.draft(round, levels, self._topk, num_ahead=self._num_steps, is_decided=True)
            tree = grafter.graft(round)
        before, earlier = before_roots([text.ids for text in texts])
        return Proposal(round, tree, (list(before), list(earlier)), [grafter.salt_of(text) for text in texts])

    def learn(self, proposal: Proposal, chosen: Tensor, successors: Tensor, logits: Tensor) -> Accepted:
        """Learns from a verified tree. chosen [B, D]: the target's token after every place; successors, logits
        [B, D, k]: its likeliest tokens there, int32 and float32; all on the host."""
        tree, width = proposal.tree, proposal.tree.width
        accepted = paths(tree, chosen[:, :width])
        columns = (tree.tokens, tree.parents, tree.sources)
        highest = (successors[:, :width].contiguous(), logits[:, :width].contiguous())
        self.grafter.learn_top_k(TargetTopK(*columns, *highest, *proposal.before, proposal.salts))
        self.grafter.learn(proposal.round, tree, accepted, seconds=1.0)
        self.grafter.catch_up()  # now: the head is drafting meanwhile
        return accepted


def agreed_tree(decide: Callable[[], tuple[DraftTree, int]] | None, broadcast: Callable[[Any], Any]) -> DraftTree:
    """The tree that rank 0 decides on, of D places, the same on all ranks.

    decide: gives the tree and D; None on all other ranks. broadcast: gives rank 0's argument on every rank.
    """
    return unpacked(broadcast(packed(*decide()) if decide is not None else None))
