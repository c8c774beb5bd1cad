"""Chains: what Graft proposes to an engine that verifies one path a request instead of a tree.

All proposals are candidates with calibrated acceptance probabilities, as in our own engine. A chain's expected number
of accepted tokens is the sum of its path probabilities, and the best of all chains is proposed: drafted, retrieved, or
drafted at first and retrieved from there on. Drafting stops when another pass is not worth its time.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import pairwise

import numpy as np
import torch
from numpy.typing import NDArray

from graft.integrations.vllm.settings import ChainSettings
from graft.spec_decode.acceptance import Accepted
from graft.spec_decode.budget import Plan
from graft.spec_decode.candidates import NO_TOKEN, OPPOSED, Candidates, Level
from graft.spec_decode.cost_model import UnitCost
from graft.spec_decode.grafter import Grafter, Round, Text
from graft.spec_decode.policy_settings import MAX_BUDGET, PolicySettings
from graft.spec_decode.proposers import TargetTopK
from graft.spec_decode.tree import DRAFTED, PADDING, ROOT, DraftTree

_BLEND = 0.05  # weight of a new time in a running mean
_BLEND_DOWN = 0.5  # and of a shorter one: what takes too long once is compiled, or busy
_TRIED_EVERY = 16  # rounds after which a second pass is timed again, though it seems too dear
_WORTH_AGAINST_DRAFTS = 0.3  # of what is retrieved against the drafter, over what is retrieved where it says nothing
_WORTH_OF_TABLES = {"trigram": 0.7, "bigram": 0.6, "adjacency": 0.5}  # that hold one successor, over those of a top-k
_USUAL_PASS_COST = 0.08  # of a draft pass, in steps without drafting, before one was timed


class ChainGrafter(Grafter):
    """A Grafter whose rows each get one path of a given length."""

    def __init__(self, vocab_size: int, num_passes: int, length: int, settings: ChainSettings) -> None:
        pass_cost = _USUAL_PASS_COST if settings.pass_cost is None else settings.pass_cost
        policy = PolicySettings(budget=min(length, MAX_BUDGET), pass_cost=pass_cost, isolated=settings.isolated)
        super().__init__(vocab_size, num_passes, policy, UnitCost())
        self._found: Paths | None = None  # of the last round
        self._start_with_doubt()

    def _start_with_doubt(self) -> None:
        """Lowers what is expected of retrieval before anything was counted.

        A tree has room for what the drafter and retrieval propose against each other; a chain takes one of them, and
        the head's likeliest token is right more often than not. And tables know the target's choices only, not its
        distribution: what followed once is taken for certain.
        """
        state = self._calibration.state()
        for number, name in enumerate(self.sources):
            if name not in ("root", "drafted"):
                state["fitted"][:, number] *= _WORTH_OF_TABLES.get(name, 1.0)
                if self.budget.max_passes:
                    state["fitted"][OPPOSED, number] *= _WORTH_AGAINST_DRAFTS
        self._calibration.restore(state)

    def goes_on(self, num_done: int, reach: list[float], going: list[bool]) -> list[bool]:
        """All rows or none: the engine makes a pass for all of them."""
        total = sum(reach)
        return [self.budget.num_passes(len(going), num_done, total) > 0] * len(going)

    def chains(self, round: Round) -> list[tuple[list[int], list[float]]]:
        """The best chain of every row, its tokens and their path probabilities, in place of the best tree."""
        self._retrieve(round, self._copies + self._tables if any(round.passes) else self._tables)
        round.candidates.merge(DRAFTED, self._calibration.chances)
        self._found = Paths(round.candidates, round.caps)
        chains = self._found.best()
        gain = sum(sum(paths) for _, paths in chains)
        round.plan = Plan(sum(len(tokens) for tokens, _ in chains), len(chains), gain, 1.0)
        return chains

    def _judge_passes(self, round: Round) -> None:
        if round.reaches and self._found is not None:
            values = self._found.values_by_need(len(round.reaches))
            self.budget.passes_of(len(round.passes)).observe(round.reaches, values)


class Paths:
    """The paths down to every one of merged candidates, as chains."""

    def __init__(self, candidates: Candidates, limits: Sequence[int]) -> None:
        """limits: by row, the most tokens of a chain."""
        nodes = candidates.nodes
        self._tokens, self._parents, depths = (part.numpy() for part in (nodes.tokens, nodes.parents, nodes.depths))
        self._paths = nodes.paths.numpy()
        self._needs = nodes.needs.numpy()
        # Expected accepted tokens of the chain down to each node, depth by depth: a node may stand before its parent.
        num_rows, width = depths.shape
        values, paths = np.full(num_rows * width, -1.0), self._paths.ravel()
        parents = (self._parents + np.arange(0, num_rows * width, width)[:, None]).ravel()
        valid = np.flatnonzero(paths > 0)
        valid = valid[np.argsort(depths.ravel()[valid], kind="stable")]
        values[valid[:num_rows]] = 0.0  # the roots
        starts = np.searchsorted(depths.ravel()[valid], np.arange(1, max(limits) + 2))
        for start, end in pairwise(starts):
            level = valid[start:end]
            values[level] = values[parents[level]] + paths[level]
        self._values: NDArray[np.float64] = values.reshape(num_rows, width)
        if min(limits) < max(limits):
            self._values[depths > np.asarray(limits)[:, None]] = -1.0

    def best(self) -> list[tuple[list[int], list[float]]]:
        """By row: the tokens of the chain with the most expected tokens, and their path probabilities."""
        return [self._down_to(row, int(node)) for row, node in enumerate(self._values.argmax(axis=1))]

    def values_by_need(self, max_passes: int) -> list[float]:
        """Expected accepted tokens of the best chains, had there been 0, 1, 2 ... `max_passes` draft passes."""
        return [
            float(np.where(self._needs <= count, self._values, 0.0).max(axis=1).sum())
            for count in range(max_passes + 1)
        ]

    def _down_to(self, row: int, node: int) -> tuple[list[int], list[float]]:
        tokens, paths = [], []
        while node:
            tokens.append(int(self._tokens[row, node]))
            paths.append(float(self._paths[row, node]))
            node = int(self._parents[row, node])
        return tokens[::-1], paths[::-1]


@dataclass(eq=False)
class ChainRound:
    """A round of some rows while it is drafted, and until it is known what came of it."""

    round: Round
    texts: Sequence[Text]
    lengths: list[int]  # of the texts, when it began
    first: int  # candidates between the root and the first drafted node
    reach: list[float]  # by row: P(all drafted tokens so far are accepted)
    began: float
    pass_times: list[float] = field(default_factory=list)  # when each pass had ended


@dataclass
class Counts:
    """What chains have brought so far."""

    steps: int = 0
    rows: int = 0  # in all steps together
    passes: int = 0
    proposed: int = 0
    tokens: int = 0  # that came out of them

    def __str__(self) -> str:
        steps, rows = max(self.steps, 1), max(self.rows, 1)
        return (
            f"{self.steps} steps of {self.rows / steps:.1f} requests, {self.passes / steps:.2f} draft passes, "
            f"{self.proposed / rows:.2f} tokens proposed and {self.tokens / rows:.2f} received by each"
        )


class Chains:
    """Proposes a chain for every text, and learns from how the texts go on.

    A round: `begin`, `drafted` for each pass while it says so, `end`. What was accepted is seen in the texts when the
    next round begins.
    """

    def __init__(self, vocab_size: int, length: int, settings: ChainSettings, has_drafter: bool) -> None:
        """length: tokens of the longest chain."""
        num_passes = min(settings.passes or length, length) if has_drafter else 0
        self.length, self.settings, self.num_passes = length, settings, num_passes
        self.grafter = ChainGrafter(vocab_size, num_passes, length, settings)
        self.counts = Counts()
        self._last: ChainRound | None = None
        self._seconds = [0.0, 0.0]  # of a draft pass behind the first, and of all else in a round; running means
        self._untimed = _TRIED_EVERY  # rounds since a pass behind the first was last timed

    def begin(self, texts: Sequence[Text], limits: Sequence[int]) -> ChainRound:
        """A round for texts whose last tokens are known but not yet read. limits: by text, the most tokens that its
        chain may have."""
        now = time.perf_counter()
        self._learn(now)
        caps = [min(limit, self.length) for limit in limits]
        round = self.grafter.begin(torch.tensor([text.ids[-1] for text in texts]), texts, caps, self.length)
        assert round is not None, "a text without room for a token"
        round.candidates.most_nodes = 4 * self.length  # retrievers look below a quarter as many nodes: all of a chain
        lengths = [len(text.ids) for text in texts]
        return ChainRound(round, texts, lengths, round.candidates.width - 1, [1.0] * len(texts), now)

    def drafted(self, chains: ChainRound, tokens: Sequence[int], probabilities: Sequence[float]) -> bool:
        """Takes a draft pass: each row's next token and the probability that the head gave it. Whether another pass is
        worth its time."""
        round, num_rows = chains.round, len(tokens)
        number = round.passes[0]
        column = torch.tensor(tokens).view(-1, 1)
        q = torch.tensor(probabilities, dtype=torch.float32).view(-1, 1)
        level = Level(column, torch.full_like(column, number), q, q)
        going = [True] * num_rows
        chances = self.grafter._calibration.chances
        round.reaches.append(sum(chains.reach))
        chains.reach = round.candidates.add_level(level, chances, DRAFTED, number + 1, chains.first, going, 1)
        round.passes = [number + 1] * num_rows
        chains.pass_times.append(time.perf_counter())
        if number + 1 >= self.num_passes:
            return False
        # What was once too dear is tried again: the first passes of a process may take long.
        is_tried = number == 0 and self.settings.pass_cost is None and self._untimed >= _TRIED_EVERY
        return is_tried or self.grafter.goes_on(number + 1, chains.reach, going)[0]

    def end(self, chains: ChainRound) -> list[list[int]]:
        """The chain of each row, perhaps empty."""
        chosen = []
        for tokens, paths in self.grafter.chains(chains.round):
            count = next((at for at, path in enumerate(paths) if path < self.settings.least), len(tokens))
            chosen.append(tokens[:count])
        # The first pass is made in any case, as it takes the accepted tokens into the head's KV cache.
        chains.round.num_ahead = min(1, max(chains.round.passes))
        self.counts.steps += 1
        self.counts.rows += len(chosen)
        self.counts.passes += max(chains.round.passes)
        self.counts.proposed += sum(map(len, chosen))
        self._last = chains
        return chosen

    def skip(self) -> None:
        """A step goes by without chains: nobody will know what came of the last ones."""
        self._last = None

    def _learn(self, now: float) -> None:
        """Takes in how the texts of the last round have gone on."""
        last, self._last = self._last, None
        if last is None:
            return
        rows = list(zip(last.texts, last.lengths, strict=True))
        roots = DraftTree.roots(torch.tensor([text.ids[length - 1] for text, length in rows]))
        accepted = Accepted([[] for _ in rows], [text.ids[length:] for text, length in rows])
        self.counts.tokens += sum(map(len, accepted.tokens))
        self.grafter.learn(last.round, roots, accepted, 1.0)
        self.grafter.catch_up()
        if grown := [(text, length) for text, length in rows if len(text.ids) > length]:
            salts = [self.grafter.salt_of(text) for text, _ in grown]
            self.grafter.learn_top_k(successors_in([(text.ids, length) for text, length in grown], salts))
        self._learn_times(last, now)

    def _learn_times(self, last: ChainRound, now: float) -> None:
        """Measures what a draft pass costs in rounds without drafting, unless the user has said so."""
        if self.settings.pass_cost is not None:
            return
        if len(last.pass_times) < 2:
            self._untimed += 1
            return
        self._untimed = 0
        drafting = last.pass_times[-1] - last.pass_times[0]  # the first pass is not to be decided on
        seen = [drafting / (len(last.pass_times) - 1), now - last.began - drafting]
        if not self._seconds[1]:
            self._seconds = seen
        # A pause between requests is no step.
        seen = [min(new, 4 * mean) for new, mean in zip(seen, self._seconds, strict=True)]
        self._seconds = [
            mean + (_BLEND if new > mean else _BLEND_DOWN) * (new - mean)
            for new, mean in zip(seen, self._seconds, strict=True)
        ]
        self.grafter.budget.pass_cost = self._seconds[0] / self._seconds[1]


def successors_in(texts: Sequence[tuple[Sequence[int], int]], salts: Sequence[int]) -> TargetTopK:
    """What followed what in texts, each from a place on at which it has a token: all that is seen of the target's
    distribution."""
    width = max(len(ids) - start for ids, start in texts)
    tokens, successors, sources = [], [], []
    for ids, start in texts:
        padding = width - (len(ids) - start)
        tokens.append([*ids[start - 1 : -1], *[0] * padding])
        # Padding stands for the first token once more.
        successors.append([*ids[start:], *[ids[start]] * padding])
        sources.append([ROOT] * (width - padding) + [PADDING] * padding)
    before = [ids[start - 2] if start > 1 else NO_TOKEN for ids, start in texts]
    earlier = [ids[start - 3] if start > 2 else NO_TOKEN for ids, start in texts]
    chain = DraftTree.chain(torch.tensor(tokens))
    follow = torch.tensor(successors, dtype=torch.int32).unsqueeze(2)
    columns = (chain.tokens, chain.parents, torch.tensor(sources), follow, torch.zeros(follow.shape))
    return TargetTopK(*columns, before, earlier, salts, is_text=True)
