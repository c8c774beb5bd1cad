"""How much processor time does a round of `graft` take outside the models, phase by phase?

    python benchmarks/tree_building.py

No model runs. Texts are made of repeated phrases; draft levels (9 of them, top-k 10) and logits are synthetic, made
around the tokens that really follow; every draft pass is made, so that all proposers are at work. For each phase it
prints the median over rounds, in processor time, so that other work on the machine does not count. Between rounds
logits are generated, which leaves as little in the processor's caches as a verify does.
"""

from __future__ import annotations

import random
import time
from collections import defaultdict
from collections.abc import Callable, Iterator
from itertools import pairwise
from statistics import median
from types import SimpleNamespace
from typing import Any, cast

import torch
from common import command_line
from torch import Tensor

import graft.model.verified
from graft.model import VerifyOutput
from graft.model.sampler import SamplingSettings
from graft.request.batch import Batch
from graft.request.sequence import Sequence, TreeRow
from graft.request.stats import Clock
from graft.spec_decode.acceptance import Accepted
from graft.spec_decode.policies import make_policy
from graft.spec_decode.proposers.base import TargetTopK
from graft.spec_decode.proposers.drafter import KEPT_OF_A_LEVEL, LevelByLevel, TreeSettings
from graft.tree.candidates import Level
from graft.tree.tree import ROOT, DraftTree

VOCAB = 49_152
BUDGET = 60
RIGHT = 0.75  # how often the drafter's first choice is what follows
SURE = 12.0  # a logit that stands out
LIKELIEST = "- likeliest of the logits"


class Phrases:
    """Texts of a few hundred phrases, the common ones more often."""

    def __init__(self, seed: int) -> None:
        self._random = random.Random(seed)
        self._phrases = [
            [self._random.randrange(VOCAB) for _ in range(self._random.randint(3, 12))] for _ in range(400)
        ]

    def text(self, length: int) -> list[int]:
        tokens: list[int] = []
        while len(tokens) < length:
            tokens += self._phrases[int(len(self._phrases) * self._random.random() ** 3)]
        return tokens[:length]


class SyntheticDrafter(LevelByLevel):
    """A drafter whose levels were made beforehand."""

    hidden_layers: tuple[int, ...] = ()
    num_setups = 0
    device = torch.device("cpu")
    settings = TreeSettings()

    def __init__(self, rng: random.Random) -> None:
        self._random = rng
        self._levels: list[Level] = []

    def make(self, following: list[int]) -> None:
        """Makes the levels at a position of a text: the tokens that follow may be among the likeliest."""
        rng, topk = self._random, self.settings.topk
        self._levels = []
        beams, width = [(0, 1.0, True)], 1  # (place, path probability, whether all of it is right)
        for depth in range(self.settings.depth + 1):
            nodes = []
            for place, path, is_right in beams:
                first = rng.choice((0.95, 0.8, 0.5, 0.3))
                for rank in range(topk):
                    q = first if rank == 0 else (1 - first) * 0.5**rank
                    good = is_right and rank == 0 and depth < len(following) and rng.random() < RIGHT
                    token = following[depth] if good else rng.randrange(VOCAB)
                    nodes.append((path * q, token, place, q, good))
            nodes = sorted(nodes, reverse=True)[:KEPT_OF_A_LEVEL]
            paths, tokens, parents, chances = ([node[i] for node in nodes] for i in range(4))
            self._levels.append(Level(*(torch.tensor([column]) for column in (tokens, parents, chances, paths))))
            beams = [(width + i, node[0], node[4]) for i, node in enumerate(nodes[:topk])]
            width += len(nodes)

    def levels(self, state: Any, roots: Any, keep: int | None = None) -> Iterator[Level]:
        return iter(self._levels)

    def learn(self, *round: Any) -> None: ...


class SyntheticTarget:
    """A target whose logits stand out for tokens that follow in some text."""

    def __init__(self) -> None:
        self._logits = torch.randn(BUDGET + 1, VOCAB, generator=torch.Generator().manual_seed(0))
        self._following: defaultdict[int, set[int]] = defaultdict(set)

    def learn(self, text: list[int]) -> None:
        for token, following in pairwise(text):
            self._following[token].add(following)

    def verified(self, tokens: Tensor) -> VerifyOutput:
        count = tokens.shape[1]
        logits = self._logits[:count].clone()
        for node, token in enumerate(tokens[0].tolist()):
            for rank, following in enumerate(self._following[token]):
                logits[node, following] = SURE - rank
        return VerifyOutput(tokens, torch.arange(count)[None], [count], logits, logits)


class Stopwatch:
    """Processor seconds of methods, call by call, summed over a round."""

    def __init__(self) -> None:
        self.rounds: list[defaultdict[str, float]] = []
        self.phases: list[str] = []
        self.now: defaultdict[str, float] = defaultdict(float)

    def begin(self) -> None:
        """A round."""
        self.now = defaultdict(float)
        self.rounds.append(self.now)

    def watch(self, owner: Any, method: str, phase: str) -> None:
        self.phases.append(phase)
        function: Callable[..., Any] = getattr(owner, method)

        def timed(*args: Any, **options: Any) -> Any:
            start = time.thread_time()
            result = function(*args, **options)
            self.now[phase] += time.thread_time() - start
            return result

        setattr(owner, method, timed)

    def median(self, *phases: str, less: str | None = None) -> float:
        """Milliseconds a round, of phases together, less one that is part of them."""
        return 1e3 * median(sum(each[p] for p in phases) - (each[less] if less else 0.0) for each in self.rounds)


def run(
    policy: Any, drafter: SyntheticDrafter, target_model: SyntheticTarget, text: list[int], watch: Stopwatch
) -> list[int]:
    """Decodes the second half of a text; the tokens of each round."""
    half = len(text) // 2
    sequence = Sequence(text[:half], SamplingSettings(max_new_tokens=half))
    batch = Batch([sequence], cast(Any, None), cast(Any, None))
    watch.now = defaultdict(float)  # of no round
    target_model.learn(text)
    prompt = torch.tensor([text[: half - 1]])
    for chunk in prompt.split(BUDGET, dim=1):
        policy.learn_top_k(TargetTopK.of_chunk(target_model.verified(chunk), []))
    counts = []
    while sequence.finish_reason is None:
        following = text[len(sequence.ids) :]
        drafter.make(following)
        watch.begin()
        batch.begin_round(0)
        tree = policy.grow(batch, batch.roots(), Clock()).tree
        nodes = accepted_nodes(tree, following)
        tokens = following[: len(nodes) + 1]
        verified = target_model.verified(tree.tokens)
        policy.learn(batch, tree, verified, Accepted([nodes], [tokens]), 1.0)
        sequence.extend(tokens, nodes, TreeRow(tree, verified, 0, policy.sources))
        counts.append(len(tokens))
    policy.finish(sequence)
    return counts


def accepted_nodes(tree: DraftTree, following: list[int]) -> list[int]:
    columns = (tree.parents, tree.tokens, tree.sources)
    rows = enumerate(zip(*(column[0].tolist() for column in columns), strict=True))
    children = {(parent, token): node for node, (parent, token, source) in rows if source > ROOT}
    path: list[int] = []
    for token in following[:-1]:  # the last is the target's own
        node = children.get((path[-1] if path else 0, token))
        if node is None:
            break
        path.append(node)
    return path


def main() -> None:
    parser = command_line(__doc__)
    parser.add_argument("--texts", type=int, default=10, help="of 400 tokens each, the second half decoded")
    options = parser.parse_args()
    torch.set_num_threads(1)

    phrases, target_model, watch = Phrases(0), SyntheticTarget(), Stopwatch()
    drafter = SyntheticDrafter(random.Random(1))
    target = cast(Any, SimpleNamespace(vocab_size=VOCAB, num_setups=0))
    policy: Any = make_policy("graft", target, cast(Any, drafter), BUDGET, pass_cost=0.0)
    policy.prepare()
    for _ in range(5):  # texts to remember
        run(policy, drafter, target_model, phrases.text(400), watch)

    watch.watch(policy, "grow", "grow")
    watch.watch(policy.grafter, "begin", "- candidates, with copies")
    watch.watch(policy.grafter, "draft", "- drafted levels")
    for retriever in policy.retrievers:
        watch.watch(retriever, "propose", f"- {', '.join(retriever.names)}")
    watch.watch(policy.grafter, "best_of", "- merge and best")
    watch.watch(policy.budget, "best", "- number of nodes")
    watch.watch(policy.grafter, "_learn_pass_gains", "- worth of passes")
    watch.watch(policy, "learn", "learn")
    watch.watch(graft.model.verified, "likeliest", LIKELIEST)
    watch.watch(policy, "learn_top_k", "- tables")
    watch.watch(policy, "learn_accepted", "- calibration")
    watch.rounds.clear()
    counts = [
        count for _ in range(options.texts) for count in run(policy, drafter, target_model, phrases.text(400), watch)
    ]

    for phase in watch.phases:
        print(f"{phase:36}{watch.median(phase):8.3f} ms")
    print(f"{'grow and learn, less the likeliest':36}{watch.median('grow', 'learn', less=LIKELIEST):8.3f} ms")
    print(f"median of {len(counts)} rounds; {sum(counts) / len(counts):.2f} tokens a round")


if __name__ == "__main__":
    main()
