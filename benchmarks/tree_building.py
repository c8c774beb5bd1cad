"""How much processor time does a round of `graft` take outside the models, phase by phase?

    python benchmarks/tree_building.py

Texts are decoded by `DeviceRound` with its kernels in C. No model runs. Texts consist of repeated phrases. Draft levels
(9 of them, top-k 10) and logits are synthetic, made around the tokens that really follow. Every draft pass is made, so
that all proposers work. For each phase it prints the median over rounds, in processor time, so that other work on the
machine does not count. Making logits between rounds clears the processor's caches, as a verify step does. Choosing the
number of nodes and updating the calibration are not part of it.
"""

import random
import time
from collections import defaultdict
from collections.abc import Callable, Iterator
from itertools import pairwise
from statistics import median
from typing import Any

import torch
from common import command_line
from torch import Tensor

import graft.model.verified
from graft.drafters.drafter import KEPT_OF_A_LEVEL, TreeSettings
from graft.model import VerifyOutput
from graft.model.noise import NUM_KINDS
from graft.spec_decode.memory import FACTORS
from graft.spec_decode.sources import calibrated
from graft.tree.device import c_kernels
from graft.tree.device.buffers import NUM_SUCCESSORS, Tables
from graft.tree.device.round import MAX_TREE_TOKENS, DeviceRound, RoundShape, Sources

VOCAB = 49_152
BUDGET = 60
RIGHT = 0.75  # how often the drafter's first choice is the token that follows
HIGH_LOGIT = 12.0


class SyntheticDrafter:
    """A drafter whose levels are made before each round."""

    settings = TreeSettings()

    def __init__(self) -> None:
        self._random = random.Random(1)
        self.levels: list[tuple[Tensor, Tensor, Tensor]] = []  # tokens, parents and q

    def make(self, following: list[int]) -> None:
        """Makes the levels at a position of a text. The tokens that follow may be among the likeliest."""
        rng, topk = self._random, self.settings.topk
        self.levels = []
        beams, width = [(0, 1.0, True)], 1  # (node, path probability, whether the whole path is right)
        for depth in range(self.settings.depth + 1):
            nodes = []
            for parent, path, is_right in beams:
                first = rng.choice((0.95, 0.8, 0.5, 0.3))
                for rank in range(topk):
                    q = first if rank == 0 else (1 - first) * 0.5**rank
                    good = is_right and rank == 0 and depth < len(following) and rng.random() < RIGHT
                    token = following[depth] if good else rng.randrange(VOCAB)
                    nodes.append((path * q, token, parent, q, good))
            nodes = sorted(nodes, reverse=True)[:KEPT_OF_A_LEVEL]
            _, tokens, parents, q = ([node[i] for node in nodes] for i in range(4))
            self.levels.append((torch.tensor(tokens), torch.tensor(parents), torch.tensor(q)))
            beams = [(width + i, node[0], node[4]) for i, node in enumerate(nodes[:topk])]
            width += len(nodes)


class SyntheticTarget:
    """A target whose logits are high for tokens that follow in some text."""

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
                logits[node, following] = HIGH_LOGIT - rank
        return VerifyOutput(tokens, torch.arange(count)[None], [count], logits, logits)


class Stopwatch:
    """Processor seconds of methods, summed over the calls of each round."""

    def __init__(self) -> None:
        self.rounds: list[defaultdict[str, float]] = []
        self.phases: list[str] = []
        self.now: defaultdict[str, float] = defaultdict(float)

    def begin_round(self) -> None:
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

    def print_median(self, name: str, seconds: Callable[[defaultdict[str, float]], float]) -> None:
        print(f"{name:36}{1e3 * median(map(seconds, self.rounds)):8.3f} ms")


def make_texts() -> Iterator[list[int]]:
    """Texts of 400 tokens, made of a few hundred phrases, some more common than others."""
    rng = random.Random(0)
    phrases = [[rng.randrange(VOCAB) for _ in range(rng.randint(3, 12))] for _ in range(400)]
    while True:
        tokens: list[int] = []
        while len(tokens) < 400:
            tokens += phrases[int(len(phrases) * rng.random() ** 3)]
        yield tokens[:400]


class FlatRounds:
    """Rounds of one text by a `DeviceRound`."""

    shape = RoundShape(1, BUDGET + 1)
    table_row = 1

    def __init__(self, drafter: SyntheticDrafter, target: SyntheticTarget) -> None:
        self._drafter, self._target = drafter, target
        topk, depth = drafter.settings.topk, drafter.settings.depth
        (sources, calibration), rows, device = calibrated(has_drafter=True), 1 << 18, torch.device("cpu")
        numbers = [sources.index(name) for name in ("drafted", "suffix", "trigram")]
        probs = calibration.acceptance_probs
        self.round = DeviceRound(
            max_rows=1,
            num_table_rows=2,
            context=512,
            past_tokens=1 << 18,
            levels=lambda rows: (topk, *[KEPT_OF_A_LEVEL] * depth),
            num_beams=lambda rows: topk,
            num_passes=depth + 1,
            depths_of_pass=1,
            sources=Sources(len(sources), probs.shape[2], NUM_KINDS, *numbers),
            known=Tables.make((rows, rows, VOCAB), (True, True, False), FACTORS, False, device),
            device=device,
        )
        inputs = self.round.inputs
        inputs["acceptance_probs"].copy_(probs)
        for name, number in (("table_rows", self.table_row), ("caps", BUDGET), ("total", BUDGET), ("max_depths", 31)):
            inputs[name][0] = number
        inputs["drafts"].fill_(1)
        inputs["thresholds"].fill_(-1.0)
        self._columns = torch.zeros(6, MAX_TREE_TOKENS, dtype=torch.int32)
        self._by_row = torch.zeros(4, 2, dtype=torch.int32)

    def propose(self) -> None:
        self.round.propose(self.shape, self._columns, self._by_row, 512, self._draft)

    def _draft(self, add_level: Callable[..., None]) -> None:
        for number, level in enumerate(self._drafter.levels):
            add_level(number, *level)

    def finish(self, chosen: Tensor, successors: Tensor, logits: Tensor) -> None:
        self.round.finish(self.shape, self._columns, self._by_row, chosen, successors, logits)

    def run(self, text: list[int], watch: Stopwatch) -> int:
        """Decodes the second half of a text, and returns the number of rounds."""
        texts, count, num_rounds = self.round.texts, len(text) // 2, 0
        watch.now = defaultdict(float)  # the prompt belongs to no round
        self._target.learn(text)
        texts.own[self.table_row, :count] = torch.tensor(text[:count], dtype=torch.int32)
        texts.lengths[self.table_row] = count
        self._learn_prompt(torch.tensor(text[: count - 1], dtype=torch.int32))
        while (count := int(texts.lengths[self.table_row])) < len(text):
            following = torch.tensor([*text[count:], *[0] * 40])
            self._drafter.make(text[count:])
            watch.begin_round()
            self.propose()
            top = self._successors(self._columns[0, : self.shape.tokens])
            # The last token is the target's own.
            chosen = torch.where(self._columns[3] < len(text) - count, following[self._columns[3].long()], -1)
            self.finish(chosen[: self.shape.tokens], *top)
            num_rounds += 1
        self._end(text)
        return num_rounds

    def _successors(self, tokens: Tensor) -> tuple[Tensor, Tensor]:
        return graft.model.verified.top_logits(self._target.verified(tokens[None].long()).logits, NUM_SUCCESSORS)

    def _learn_prompt(self, tokens: Tensor) -> None:
        nobody, salts = torch.tensor([[-1], [-1]], dtype=torch.int32), torch.zeros(1, dtype=torch.int64)
        for chunk in tokens.split(BUDGET):
            places, rows = torch.arange(len(chunk), dtype=torch.int32), torch.zeros_like(chunk)
            step = (chunk, (places - 1).clamp(min=0), places, rows)
            self.round.learn(step, rows[:1], nobody, salts, *self._successors(chunk), num_rows=1, is_text=True)

    def _end(self, text: list[int]) -> None:
        """Keep the finished text."""
        texts = self.round.texts
        written = int(texts.past_end[0])
        texts.past[written : written + len(text)] = torch.tensor(text, dtype=torch.int32)
        texts.past_end[0] = written + len(text) + 1


def main() -> None:
    parser = command_line(__doc__)
    parser.add_argument("--texts", type=int, default=10, help="texts of 400 tokens, whose second halves are decoded")
    options = parser.parse_args()
    torch.set_num_threads(1)

    texts, target, watch = make_texts(), SyntheticTarget(), Stopwatch()
    rounds = FlatRounds(SyntheticDrafter(), target)
    for _ in range(5):  # texts to copy from
        rounds.run(next(texts), watch)

    watch.watch(rounds, "propose", "propose")
    for phase in ("add_copies", "add_level", "follow", "merge", "rank"):
        watch.watch(c_kernels, phase, f"- {phase}")
    watch.watch(rounds, "finish", "finish")
    for phase in ("advance", "count", "learn"):
        watch.watch(c_kernels, phase, f"- {phase}")
    watch.rounds.clear()
    num_rounds = sum(rounds.run(next(texts), watch) for _ in range(options.texts))

    for phase in watch.phases:
        watch.print_median(phase, lambda spent, phase=phase: spent[phase])
    watch.print_median("propose and finish", lambda spent: spent["propose"] + spent["finish"])
    print(f"median of {num_rounds} rounds; {200 * options.texts / num_rounds:.2f} tokens a round")


if __name__ == "__main__":
    main()
