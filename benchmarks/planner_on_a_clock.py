"""Does the planner choose well? Real texts, drafts and acceptance, and times from a table instead of this machine.

    python benchmarks/planner_on_a_clock.py --prompts alpaca.jsonl --prompts gsm8k.jsonl
    python benchmarks/planner_on_a_clock.py --prompts alpaca.jsonl --from new --noise --ways chosen,nodes=7,passes=1
    python benchmarks/planner_on_a_clock.py --prompts alpaca.jsonl --rows 8 --from new --max-new-tokens 32

Every round runs on the CPU with the real models, but the planner is told the seconds of the table, and those seconds
are counted. So the result is the same on any machine, busy or not. `speed` is that of plain decoding times so much; a
budget that is as good as the best fixed one for every text has `chosen` at or above all other ways. `least` is the
slowest prompt, or batch of prompts.

`--noise` tells the planner times that vary, that are three times as long in bursts, and eight times as long when
something is done for the first time; without noise is counted. `--from session` lets all prompts teach one policy,
which starts from the packaged profile; `packaged` starts every prompt from it, and `new` from nothing.
`--taught-by FILE` answers other prompts first, and then starts every prompt from what they left, as a later process.

A way is `chosen`, `nodes=N` for a fixed number of nodes, or `passes=N` for a fixed number of draft passes.
"""

from __future__ import annotations

import math
import random
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np
import torch
from common import add_prompts, command_line, mixed_questions

from graft import Engine, load
from graft.spec_decode.planner import Outcome, Planner
from graft.spec_decode.policies import PolicySettings, policy_with
from graft.spec_decode.policies.graft import Graft

PLAIN = 0.02  # seconds of a plain step; any number gives the same result
# In plain steps, by number of tokens: measured on two quiet machines with two cores.
STEPS = {
    "flat": {1: 1.0, 2: 1.06, 4: 1.12, 8: 1.29, 16: 1.59, 32: 3.0, 64: 5.6, 128: 11.0, 512: 44.0},
    "steep": {1: 1.0, 2: 1.06, 4: 1.12, 8: 1.5, 16: 2.3, 32: 3.4, 64: 6.0, 128: 11.5, 512: 46.0},
}
HOST, PLAIN_HOST = 0.03, 0.005  # of one row, in plain steps; each further row takes half as much


def _host(num_rows: int, own: float) -> float:
    """Seconds of the host's work for so many rows. own: of one row, in plain steps."""
    return PLAIN * own * (1 + num_rows) / 2


class Clock:
    """The seconds of a table, told to a planner and counted."""

    def __init__(self, table: dict[int, float], pass_cost: float, is_noisy: bool) -> None:
        self._sizes, self._steps = list(table), list(table.values())
        self._is_noisy, self.pass_cost = is_noisy, pass_cost
        self._rng, self._burst = random.Random(0), 0
        self._done: set[str] = set()  # what was done before
        self.restart()

    def restart(self) -> None:
        self.seconds, self.plain_seconds, self.rounds, self.tokens, self.passes = 0.0, 0.0, 0, 0, 0

    def step(self, num_tokens: int) -> float:
        return PLAIN * float(np.interp(num_tokens, self._sizes, self._steps))

    def watch(self, planner: Planner) -> None:
        """Tell this planner the times of its rounds."""
        learn = planner.learn

        def learn_by_the_clock(outcome: Outcome) -> None:
            num_rows = outcome.num_rows
            plain, step = self.step(num_rows), self.step(outcome.tokens + outcome.num_prefill_tokens)
            passes = outcome.num_passes * self.pass_cost * plain
            host = _host(num_rows, PLAIN_HOST if outcome.is_plain else HOST)
            num_tokens = num_rows + sum(map(len, outcome.nodes))
            self.seconds += step + passes + host
            self.plain_seconds += num_tokens / num_rows * (plain + _host(num_rows, PLAIN_HOST))
            self.rounds, self.tokens = self.rounds + num_rows, self.tokens + num_tokens
            self.passes += num_rows * outcome.num_passes
            told = [self._told(what, own) for what, own in (("step", step), ("pass", passes), ("host", host))]
            learn(
                replace(
                    outcome,
                    step_seconds=told[0],
                    work_seconds=told[1] + told[2],
                )
            )

        planner.learn = learn_by_the_clock  # type: ignore[method-assign]

    def _told(self, what: str, seconds: float) -> float:
        if not self._is_noisy or not seconds:
            return seconds
        factor = math.exp(self._rng.gauss(0, 0.05))
        if self._burst == 0 and self._rng.random() < 0.01:
            self._burst = self._rng.randint(5, 50)
        if self._burst:
            self._burst, factor = self._burst - 1, 3 * factor
        if what not in self._done:
            self._done.add(what)
            factor *= 8
        return seconds * factor


def policies(engine: Engine, way: str, clock: Clock, state: dict[str, torch.Tensor], is_one: bool) -> Iterator[Graft]:
    """The policy of each prompt or batch: always the same one, or a new one that starts from `state`."""
    name, _, number = way.partition("=")
    settings = {"chosen": {}, "nodes": {"budget": int(number or 0)}, "passes": {"passes": int(number or 0)}}[name]
    if name == "nodes":
        settings |= {"pass_cost": clock.pass_cost * PLAIN / clock.step(1 + int(number))}
    while True:
        policy = policy_with(PolicySettings(**settings), "graft", engine.target, engine.drafter)
        assert isinstance(policy, Graft)
        policy.restore(state)
        clock.watch(policy.planner)
        yield policy
        while is_one:
            yield policy


def run(
    engine: Engine, prompts: Sequence[Sequence[list[int]]], given: Iterator[Graft], options: dict[str, object]
) -> None:
    """Answer the prompts, in batches, with a policy for each."""
    for batch in prompts:
        engine.policy = next(given)
        engine.generate_batch(list(batch), **options)


def main() -> None:
    parser = command_line(__doc__)
    add_prompts(parser, limit=7, max_new_tokens=48)
    parser.add_argument("--ways", default="chosen,nodes=3,nodes=7,nodes=15,passes=1", help="what is compared")
    parser.add_argument("--from", dest="start", choices=("session", "packaged", "new"), default="session")
    parser.add_argument("--taught-by", type=Path, action="append", help="prompts that are answered before")
    parser.add_argument("--rows", type=int, default=1, help="prompts that are answered at once")
    parser.add_argument("--steps", choices=STEPS, default="flat", help="the table of step times")
    parser.add_argument("--pass-cost", type=float, default=0.2, help="of a draft pass, in plain steps")
    parser.add_argument("--noise", action="store_true", help="tell the planner times that vary")
    parser.add_argument("--temperature", type=float, default=0.0)
    options = parser.parse_args()

    engine = load(device="cpu", keep_learned=False)
    packaged = {} if options.start == "new" else engine.policy.state()
    answers = {"max_new_tokens": options.max_new_tokens, "temperature": options.temperature}
    answers |= {"seed": 1} if options.temperature else {}

    def batches(paths: Sequence[Path]) -> list[list[list[int]]]:
        asked = [question.ids for question in mixed_questions(paths, engine, options.max_new_tokens, options.limit)]
        return [asked[place : place + options.rows] for place in range(0, len(asked), options.rows)]

    for way in options.ways.split(","):
        clock, state, speeds = Clock(STEPS[options.steps], options.pass_cost, options.noise), packaged, []
        if options.taught_by:
            given = policies(engine, way, clock, state, is_one=True)
            run(engine, batches(options.taught_by), given, answers)
            state = next(given).state()
        given = policies(engine, way, clock, state, is_one=options.start == "session")
        total, plain, rounds, tokens, passes = 0.0, 0.0, 0, 0, 0
        for batch in batches(options.prompts):
            clock.restart()
            run(engine, [batch], given, answers)
            speeds.append(clock.plain_seconds / clock.seconds)
            total, plain = total + clock.seconds, plain + clock.plain_seconds
            rounds, tokens, passes = rounds + clock.rounds, tokens + clock.tokens, passes + clock.passes
        print(
            f"{way:10} speed {plain / total:.3f}, least {min(speeds):.2f}; {tokens / rounds:.2f} tokens and "
            f"{passes / rounds:.2f} passes a round of a row",
            flush=True,
        )


if __name__ == "__main__":
    main()
