"""What is it worth to sample many answers to one prompt as a group, as reinforcement learning does?

    python benchmarks/group_rollouts.py --prompts gsm8k.jsonl --limit 4 --n 16

For each prompt it samples `n` answers at temperature 1 in three ways that must give the same texts: plainly in one
batch; one after the other with Graft, which learns from the earlier answers; and in one batch with Graft, whose answers
learn from each other while they are decoded. Nothing learned is kept between prompts. It prints tokens per second and
the mean accepted length: of all answers, and of those that ended first, fourth and so on.
"""

import argparse
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from statistics import mean

from common import add_model, add_prompts, command_line, load_pair, mixed_questions, write_json

from graft.bench.methods import PLAIN
from graft.bench.tasks import Question
from graft.engine import Engine
from graft.model.sampler import SamplingSettings
from graft.request.sequence import Sequence as TokenSequence

GROUP, ALONE = "group", "one by one"


@dataclass
class Way:
    """Totals of one way of answering, over all prompts."""

    seconds: float = 0.0
    num_tokens: int = 0
    texts: list[list[list[int]]] = field(default_factory=list)  # by prompt and answer
    accepted: list[list[float]] = field(default_factory=list)  # mean accepted lengths by prompt, first ended first

    def add(self, sequences: Sequence[TokenSequence], ended: Sequence[TokenSequence], seconds: float) -> None:
        self.seconds += seconds
        self.num_tokens += sum(sequence.num_new for sequence in sequences)
        self.texts.append([sequence.new_ids for sequence in sequences])
        self.accepted.append([sequence.stats.mean_accepted for sequence in ended])


def main() -> None:
    options = parse()
    plain, drafter = load_pair(options)
    graft = Engine(plain.target.model, plain.tokenizer, policy="graft", drafter=drafter)
    initial = graft.policy.state()
    sampling = SamplingSettings(
        max_new_tokens=options.max_new_tokens, temperature=options.temperature, n=options.n, seed=0
    )
    ways = {PLAIN: Way(), ALONE: Way(), GROUP: Way()}
    asked = mixed_questions(options.prompts, plain, options.max_new_tokens, options.limit)
    for engine, at_once in ((plain, True), (graft, False), (graft, True)):  # untimed: pays for one-time set-up
        answer(engine, asked[0], sampling, at_once)
    for question in asked:
        ways[PLAIN].add(*answer(plain, question, sampling, True))
        for way, at_once in ((ALONE, False), (GROUP, True)):
            graft.policy.restore(initial)
            ways[way].add(*answer(graft, question, sampling, at_once))
    places = [place for place in (1, 4, 16, 64) if place <= options.n]
    print(f"{options.n} answers to each of {len(asked)} prompts, temperature {options.temperature:g}")
    print(f"{'':12s}tokens/s  of plain  accepted: all  ended as {', '.join(map(str, places))}")
    for name, way in ways.items():
        rate, base = way.num_tokens / way.seconds, ways[PLAIN].num_tokens / ways[PLAIN].seconds
        all_accepted = mean(value for lengths in way.accepted for value in lengths)
        by_place = " ".join(f"{mean(lengths[place - 1] for lengths in way.accepted):.2f}" for place in places)
        print(f"{name:12s}{rate:8.1f}  {rate / base:8.2f}  {all_accepted:13.2f}  {by_place}")
    differ = sum(way.texts != ways[PLAIN].texts for way in ways.values())
    print("all texts are the same" if not differ else f"the texts of {differ} ways differ from plain decoding's")
    totals = {n: {"seconds": w.seconds, "tokens": w.num_tokens, "accepted": w.accepted} for n, w in ways.items()}
    write_json(options.out, totals)
    sys.exit(bool(differ))


def answer(
    engine: Engine, question: Question, sampling: SamplingSettings, at_once: bool
) -> tuple[list[TokenSequence], list[TokenSequence], float]:
    """The answers, the same answers in the order in which they ended, and the seconds."""
    sequences = engine.new_sequences(question.ids, sampling)
    ended: list[TokenSequence] = []
    start = time.perf_counter()
    for together in [sequences] if at_once else [[sequence] for sequence in sequences]:
        for round in engine.rounds(together):
            ended += [sequence for sequence in round if sequence.finish_reason is not None]
    return sequences, ended, time.perf_counter() - start


def parse() -> argparse.Namespace:
    parser = command_line(__doc__)
    add_model(parser)
    add_prompts(parser, limit=4, max_new_tokens=128)
    parser.add_argument("--n", type=int, default=16, help="answers to each prompt")
    parser.add_argument("--temperature", type=float, default=1.0)
    parser.add_argument("--out", type=Path, help="a JSON file for the figures")
    return parser.parse_args()


if __name__ == "__main__":
    main()
