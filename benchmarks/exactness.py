"""How often does decoding with trees diverge from plain decoding? On a GPU with and without exact steps.

    python benchmarks/exactness.py --tokens 50000 --rows 16 --out exactness.json
    python benchmarks/exactness.py --tokens 4000 --rows 8 --answer 128 --budget 15    # on a CPU

Each prompt is answered plainly, and then once more with trees. The second time, every round continues with the token
of the plain answer, whatever it would choose itself. So every position is compared, not only those before the first
divergence.

A divergence is a position with another likeliest token. `bits` counts positions whose highest logit has other bits. A
gap is how far the plain token's logit lies below the highest one at a divergence. Trees are those of `--policy`.
`known` makes trees as wide as the budget, from some of the tokens that really follow and random ones.

Without exact steps, matrix products round differently in steps of another size. That shows in wide models: `--shape`
makes one with random weights, whose logits lie closer together than a trained model's.
"""

from __future__ import annotations

import argparse
import random
import time
from collections.abc import Sequence
from copy import copy
from dataclasses import dataclass, field
from itertools import count
from pathlib import Path
from typing import Any

import torch
from common import DEVICE, MODELS, TINY, all_prompts, command_line, make_model, parse_with_dry_run, write_json
from torch import Tensor

from graft.bench.baselines.dense import Dense
from graft.drafters.drafter import Passes
from graft.engine import Engine
from graft.loading import load
from graft.model.cuda_graphs import CapturedTarget
from graft.model.sampler import Sampler, SamplingSettings
from graft.request.sequence import Sequence as TokenSequence
from graft.spec_decode.policies import PolicySettings, make_policy
from graft.tree.device.round import AddLevel

Best = tuple[int, float]  # the likeliest token at a position and its logit


@dataclass
class Tally:
    """Counts over all compared positions."""

    positions: int = 0
    rounds: int = 0
    nodes: int = 0
    bits: int = 0
    gaps: list[float] = field(default_factory=list)  # one for each divergence
    seconds: float = 0.0

    def __str__(self) -> str:
        gaps = sorted(self.gaps)
        tail = f", gaps median {gaps[len(gaps) // 2]:.4f}, greatest {gaps[-1]:.4f}" if gaps else ""
        return (
            f"{self.positions} positions in {self.rounds} rounds of {self.nodes / self.rounds:.0f} nodes and "
            f"{self.seconds:.0f} s: {len(gaps)} divergences ({len(gaps) / self.positions:.2e}), "
            f"{self.bits} positions with other bits ({self.bits / self.positions:.2e}){tail}"
        )


def best_of(logits: Tensor) -> list[Best]:
    best = logits.max(dim=1)
    return list(zip(best.indices.tolist(), best.values.tolist(), strict=True))


class Plain:
    """Chooses by the usual sampler, and records the likeliest token of every position."""

    def __init__(self, sampler: Sampler, count: int) -> None:
        self._sampler = sampler
        self.recorded: list[list[Best]] = [[] for _ in range(count)]
        self._rows = list(self.recorded)

    def choose(self, logits: Tensor, walking: Sequence[bool]) -> Tensor:
        for row, best, walks in zip(self._rows, best_of(logits), walking, strict=True):
            if walks:
                row.append(best)
        return self._sampler.choose(logits, walking)

    def select(self, rows: Sequence[int]) -> Plain:
        there = copy(self)
        there._sampler, there._rows = self._sampler.select(rows), [self._rows[row] for row in rows]
        return there


class Forced:
    """Chooses the tokens of given answers, and compares each position with what `Plain` recorded there."""

    def __init__(self, answers: list[list[int]], recorded: list[list[Best]], tally: Tally) -> None:
        self._rows = [zip(*row, strict=False) for row in zip(answers, recorded, strict=True)]
        self._tally = tally

    def choose(self, logits: Tensor, walking: Sequence[bool]) -> Tensor:
        chosen = [0] * len(self._rows)
        for row, ((token, logit), walks) in enumerate(zip(best_of(logits), walking, strict=True)):
            expected = next(self._rows[row], None) if walks else None
            if expected is None:  # a round may look past the end of the answer
                continue
            chosen[row], (plain_token, plain_logit) = expected
            self._tally.positions += 1
            self._tally.bits += logit != plain_logit
            if token != plain_token:
                self._tally.gaps.append(logit - float(logits[row, plain_token]))
        return torch.tensor(chosen, device=logits.device)

    def select(self, rows: Sequence[int]) -> Forced:
        there = copy(self)
        there._rows = [self._rows[row] for row in rows]
        return there


class Texts:
    """The draft state of rows: their texts, which grow in place."""

    def __init__(self, texts: list[list[int]]) -> None:
        self.texts = texts

    @property
    def lengths(self) -> list[int]:
        return [len(text) - 1 for text in self.texts]

    def select(self, rows: Sequence[int]) -> Texts:
        return Texts([self.texts[row] for row in rows])

    def concat(self, other: Texts) -> Texts:
        return Texts(self.texts + other.texts)


class KnownTokens:
    """A drafter of trees with `budget` nodes: some of the tokens that follow in given answers, and random tokens."""

    hidden_layers: tuple[int, ...] = ()
    max_passes = 1
    num_slots = bytes_per_token = num_setups = 0
    is_captured = False

    def __init__(self, answers: dict[TokenSequence, list[int]], budget: int, vocab_size: int) -> None:
        self._answers = {id(each.ids): (each.num_prompt_tokens, answer) for each, answer in answers.items()}
        self.num_nodes = self.max_depth = budget
        self._vocab_size, self._random = vocab_size, random.Random(0)

    def level_sizes(self, num_rows: int, keep: int = 0) -> tuple[int, ...]:
        return (self.num_nodes,)

    def beams_of(self, num_rows: int, keep: int = 0) -> int:
        return 0

    def knows(self, draws: Any) -> bool:
        return False

    def open(self, cache: Any, texts: list[list[int]]) -> Texts:
        return Texts(list(texts))

    def read(self, *of_a_round: Any) -> None:
        """Learn nothing."""

    learn = warm_up = read

    def run_passes(self, asked: Passes, add_level: AddLevel) -> None:
        trees = [self._tree(text) for text in asked.state.texts]
        tokens, parents = torch.zeros(2, len(trees), self.num_nodes, dtype=torch.int32)
        q = torch.zeros(tokens.shape)
        for row, nodes in enumerate(trees):
            order = sorted(range(len(nodes)), key=lambda node: nodes[node][2])  # depth by depth
            numbers = {0: 0} | {node + 1: number for number, node in enumerate(order, start=1)}
            kept = [nodes[node] for node in order if nodes[node][2] <= asked.max_depth]
            for place, (token, parent, _) in enumerate(kept):
                tokens[row, place], parents[row, place], q[row, place] = token, numbers[parent], 1.0
        add_level(0, *map(asked.flat, (tokens, parents, q)))

    def _tree(self, text: list[int]) -> list[tuple[int, int, int]]:
        """Nodes: tokens, parents (0 is the root) and depths."""
        num_prompt_tokens, answer = self._answers[id(text)]
        place = len(text) - num_prompt_tokens
        following = answer[place : place + self._random.randrange(8)]
        nodes, last = [(0, 0, 0)], 0
        for node in range(1, self.num_nodes + 1):
            if following and self._random.random() < 0.25:
                token, parent, last = following.pop(0), last, node
            else:
                token, parent = self._random.randrange(self._vocab_size), self._random.randrange(node)
            nodes.append((token, parent, nodes[parent][2] + 1))
        return nodes[1:]


def main() -> None:
    parser = command_line(__doc__)
    parser.add_argument("--model", default="smollm2-135m", help="whose answers are compared")
    parser.add_argument("--shape", choices=MODELS, help="use a model of this shape with random weights instead")
    parser.add_argument("--prompts", action="append", type=Path, help="prompt files; the built-in tasks if not given")
    parser.add_argument("--tokens", type=int, default=50_000, help="positions to compare")
    parser.add_argument("--answer", type=int, default=512, help="tokens of an answer")
    parser.add_argument("--rows", type=int, default=16, help="answers decoded together")
    parser.add_argument("--temperature", type=float, default=0.7, help="greedy answers would repeat themselves")
    parser.add_argument("--policy", default="known", help="whose trees are used; known: wide trees along the text")
    parser.add_argument("--budget", type=int, default=60, help="nodes of a tree")
    parser.add_argument("--out", type=Path, help="a JSON file for the results")
    options = parse_with_dry_run(parser, needs_gpu=False)
    if options.shape is not None and DEVICE.type == "cpu":
        parser.error("--shape needs a GPU")
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
        prompts = all_prompts(options.prompts, engine, options.answer)

    facts = {"model": options.shape or options.model} | {n: getattr(options, n) for n in ("policy", "budget", "rows")}
    on_a_gpu = (("not exact", False), ("exact", True))
    is_on_a_cpu = engine.target.device.type == "cpu" and not options.dry_run
    for name, is_exact in ((f"on a CPU in {engine.target.model.dtype}", None),) if is_on_a_cpu else on_a_gpu:
        tally = compare(engine, prompts, options, is_exact)
        print(f"{name}: {tally}", flush=True)
        facts[name] = vars(tally)
    write_json(options.out, facts)


def compare(engine: Engine, prompts: list[list[int]], options: argparse.Namespace, is_exact: bool | None) -> Tally:
    """Answers until enough positions are compared: all prompts, then all of them with the next seed.

    is_exact: None: the engine's own steps.
    """
    if is_exact is not None:
        engine.target = CapturedTarget(engine.target.model, exact=is_exact)
    target = engine.target
    plain, tally, start = engine.policy, Tally(), time.perf_counter()
    groups = [prompts[first : first + options.rows] for first in range(0, len(prompts), options.rows)]
    for seed, group in ((seed, group) for seed in count() for group in groups):
        if tally.positions >= options.tokens:
            break
        settings = SamplingSettings(
            max_new_tokens=options.answer, temperature=options.temperature, seed=seed, ignore_eos=True
        )
        batch, again = ([TokenSequence(prompt, settings) for prompt in group] for _ in range(2))
        chooser = Plain(engine.new_sampler(batch), len(batch))
        list(engine.rounds(batch, chooser))
        answers = [sequence.new_ids for sequence in batch]
        if options.policy == "known":
            known: Any = KnownTokens(dict(zip(again, answers, strict=True)), options.budget, target.vocab_size)
            engine.policy = Dense(target, known, PolicySettings(options.budget))
        else:
            engine.policy = make_policy(options.policy, target, budget=options.budget)
        list(engine.rounds(again, Forced(answers, chooser.recorded, tally)))
        engine.policy = plain
        assert [sequence.new_ids for sequence in again] == answers
        tally.rounds += sum(sequence.stats.rounds for sequence in again)
        tally.nodes += sum(sequence.stats.nodes for sequence in again)
    tally.seconds = time.perf_counter() - start
    return tally


if __name__ == "__main__":
    main()
