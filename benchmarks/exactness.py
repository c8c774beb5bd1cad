"""On a GPU, how often does decoding with trees depart from plain decoding, with and without exact steps?

    python benchmarks/exactness.py --tokens 50000 --rows 16 --out exactness.json

Answers the benchmark's prompts plainly, then once more with trees along the same text: whatever a round would choose,
it goes on with the token of the plain answer. So every place is compared, not only those before a first departure.

A departure is a place whose likeliest token is another. `bits` counts places whose highest logit has other bits. A gap
is how far the plain token's logit lies below the highest, in a round that departs. Trees are those of `--policy graft`,
or with `known` as wide as the budget, with some of the tokens that really follow and random ones around them.

Without exact steps, large batches have matrix products that round by their size. That shows in wide models: `--shape`
makes one of random weights, whose text means nothing and whose logits lie closer together than a trained model's.
"""

from __future__ import annotations

import argparse
import json
import random
import time
from collections.abc import Sequence
from copy import copy
from dataclasses import dataclass, field
from pathlib import Path

import torch
from common import MODELS, TINY, add_dry_run, command_line, make_model, require_gpu
from torch import Tensor

from graft.bench.tasks import built_in_tasks, questions, read_tasks
from graft.engine import Engine
from graft.loading import load
from graft.model.cuda_graphs import CapturedTarget
from graft.model.sampler import Sampler, SamplingSettings
from graft.request.batch import Batch
from graft.request.sequence import Sequence as TokenSequence
from graft.request.stats import Clock
from graft.spec_decode.policies import DraftResult, Policy, make_policy
from graft.tree.tree import DraftTree


@dataclass
class Place:
    """What a forward said after one token of an answer."""

    token: int  # the likeliest
    logit: float


@dataclass
class Tally:
    places: int = 0
    rounds: int = 0
    nodes: int = 0
    bits: int = 0
    gaps: list[float] = field(default_factory=list)  # one a departure
    seconds: float = 0.0

    def __str__(self) -> str:
        share = len(self.gaps) / self.places
        gaps = sorted(self.gaps)
        tail = f", gaps median {gaps[len(gaps) // 2]:.4f}, greatest {gaps[-1]:.4f}" if gaps else ""
        return (
            f"{self.places} places in {self.rounds} rounds of {self.nodes / self.rounds:.0f} nodes and "
            f"{self.seconds:.0f} s: {len(gaps)} departures "
            f"({share:.2e}), {self.bits} places with other bits ({self.bits / self.places:.2e}){tail}"
        )


class Plain:
    """Chooses as ever, and notes what every place of each answer was like."""

    def __init__(self, sampler: Sampler, count: int) -> None:
        self._sampler = sampler
        self.rows: list[list[Place]] = [[] for _ in range(count)]
        self._notes = list(self.rows)

    def choose(self, logits: Tensor, walking: Sequence[bool]) -> Tensor:
        best = logits.max(dim=1)
        for row, token, logit, goes in zip(
            self._notes, best.indices.tolist(), best.values.tolist(), walking, strict=True
        ):
            if goes:
                row.append(Place(token, logit))
        return self._sampler.choose(logits, walking)

    def select(self, rows: Sequence[int]) -> Plain:
        there = copy(self)
        there._sampler, there._notes = self._sampler.select(rows), [self._notes[row] for row in rows]
        return there


class Forced:
    """Chooses the tokens of given answers, and compares what it would have chosen with what was noted."""

    def __init__(self, answers: list[list[int]], notes: list[list[Place]], tally: Tally) -> None:
        self._rows = list(zip(answers, notes, [[0] for _ in answers], strict=True))
        self._tally = tally

    def choose(self, logits: Tensor, walking: Sequence[bool]) -> Tensor:
        best = logits.max(dim=1)
        chosen = []
        found = zip(self._rows, best.indices.tolist(), best.values.tolist(), walking, strict=True)
        for row, ((answer, notes, done), token, logit, goes) in enumerate(found):
            place = done[0]
            if not goes or place >= len(answer):  # a round may look past the answer's end
                chosen.append(0)
                continue
            done[0] += 1
            chosen.append(answer[place])
            self._tally.places += 1
            self._tally.bits += logit != notes[place].logit
            if token != notes[place].token:
                self._tally.gaps.append(logit - float(logits[row, notes[place].token]))
        return torch.tensor(chosen, device=logits.device)

    def select(self, rows: Sequence[int]) -> Forced:
        there = copy(self)
        there._rows = [self._rows[row] for row in rows]
        return there


class Known(Policy):
    """Trees of `budget` nodes: some of the tokens that follow in given answers, and random ones around them."""

    sources = ("root", "known")

    def __init__(self, answers: dict[TokenSequence, list[int]], budget: int, vocab_size: int) -> None:
        self._answers, self._budget, self._vocab_size = answers, budget, vocab_size
        self._random = random.Random(0)

    def grow(self, batch: Batch, roots: Tensor, clock: Clock) -> DraftResult:
        rows = [self._tree(sequence, root) for sequence, root in zip(batch.sequences, roots.tolist(), strict=True)]
        tokens, parents = (torch.tensor(column) for column in zip(*rows, strict=True))
        sources, zeros = torch.ones_like(tokens), torch.zeros_like(tokens)
        sources[:, 0] = 0
        return DraftResult.without_drafts(DraftTree(self._budget, tokens, parents, sources.float(), sources, zeros))

    def _tree(self, sequence: TokenSequence, root: int) -> tuple[list[int], list[int]]:
        place = sequence.stats.tokens
        following = self._answers[sequence][place : place + self._random.randrange(8)]
        tokens, parents, last = [root], [0], 0
        for node in range(1, self._budget + 1):
            if following and self._random.random() < 0.25:
                tokens.append(following.pop(0))
                parents.append(last)
                last = node
            else:
                tokens.append(self._random.randrange(self._vocab_size))
                parents.append(self._random.randrange(node))
        return tokens, parents


def main() -> None:
    parser = command_line(__doc__)
    parser.add_argument("--model", default="smollm2-135m", help="whose answers are compared")
    parser.add_argument("--shape", choices=MODELS, help="a model of random weights of that shape instead")
    parser.add_argument("--data", action="append", type=Path, help="prompt files; the built-in tasks if none")
    parser.add_argument("--tokens", type=int, default=50_000, help="places to compare")
    parser.add_argument("--answer", type=int, default=512, help="tokens of an answer")
    parser.add_argument("--rows", type=int, default=16, help="answers decoded together")
    parser.add_argument(
        "--temperature", type=float, default=0.7, help="of the plain answers; greedy ones go in circles"
    )
    parser.add_argument("--policy", default="known", help="whose trees; known: wide ones along the text")
    parser.add_argument("--budget", type=int, default=60, help="nodes of a tree")
    parser.add_argument("--out", type=Path, help="a JSON file for the results")
    add_dry_run(parser)
    options = parser.parse_args()
    require_gpu(parser, options.dry_run)
    if options.dry_run:
        CapturedTarget.widths = (1, 2)
        options.tokens, options.answer, options.rows, options.budget = 8, 4, 2, 1
        engine, prompts = Engine(make_model(TINY, 64, max_positions=256), policy="off"), [[5, 6, 7], [8, 9]]
    elif options.shape is not None:
        shape, vocab = MODELS[options.shape]
        rng = random.Random(0)
        engine = Engine(make_model(shape, vocab, max_positions=2048), policy="off")
        prompts = [[rng.randrange(vocab) for _ in range(64)] for _ in range(options.rows)]
    else:
        engine = load(options.model, draft=None, policy="off", profile=None)
        tasks = read_tasks(options.data) if options.data else built_in_tasks()
        prompts = [q.ids for task in tasks for q in questions(task, engine, options.answer)]

    tallies = {}
    for is_exact in (False, True):
        tallies["exact" if is_exact else "not exact"] = tally = compare(engine, prompts, options, is_exact)
        print(f"{'exact' if is_exact else 'not exact'}: {tally}", flush=True)
    if options.out is not None:
        facts = {
            "model": options.shape or options.model,
            "policy": options.policy,
            "budget": options.budget,
            "rows": options.rows,
        }
        options.out.write_text(json.dumps(facts | {name: vars(tally) for name, tally in tallies.items()}) + "\n")


def compare(engine: Engine, prompts: list[list[int]], options: argparse.Namespace, is_exact: bool) -> Tally:
    """Answers until enough places are compared: all prompts, then all with the next seed."""
    target = CapturedTarget(engine.target.model, exact=is_exact)
    engine.target = target
    plain = engine.policy
    tally = Tally()
    start = time.perf_counter()
    seed = 0
    while tally.places < options.tokens:
        for first in range(0, len(prompts), options.rows):
            if tally.places >= options.tokens:
                break
            settings = SamplingSettings(
                max_new_tokens=options.answer, temperature=options.temperature, seed=seed, ignore_eos=True
            )
            group = prompts[first : first + options.rows]
            batch = [TokenSequence(prompt, settings) for prompt in group]
            chooser = Plain(engine._sampler(batch), len(batch))
            run(engine, batch, chooser)
            again = [TokenSequence(prompt, settings) for prompt in group]
            answers = {new: old.new_ids for new, old in zip(again, batch, strict=True)}
            engine.policy = (
                Known(answers, options.budget, target.vocab_size)
                if options.policy == "known"
                else make_policy(options.policy, target, budget=options.budget)
            )
            run(engine, again, Forced([s.new_ids for s in batch], chooser.rows, tally))
            engine.policy = plain
            assert [s.new_ids for s in again] == [s.new_ids for s in batch]
            tally.rounds += sum(s.stats.rounds for s in again)
            tally.nodes += sum(s.stats.nodes for s in again)
        seed += 1
    tally.seconds = time.perf_counter() - start
    return tally


def run(engine: Engine, batch: list[TokenSequence], chooser: Plain | Forced) -> None:
    for _ in engine.rounds(batch, chooser):
        pass


if __name__ == "__main__":
    main()
