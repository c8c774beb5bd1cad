"""Are tokens that SGLang samples with Graft's plugin distributed as the target says? A chi-square test.

    GRAFT_SGLANG=1 python benchmarks/engine_sampling.py --engine sglang --model DIR/model --head DIR/head \\
        --ids DIR/ids.json --method graft --steps 3 --topk 4 --places 16 --seed 1

The script takes a prompt whose first answer token is almost certain and whose second is not, and draws two tokens 8,000
times. The prefill draws the first token, so the second one is tested, which the verify draws. The expected
probabilities are those that SGLang returns for that verify, since a prefill's differ in bf16. Options are those of
`engine_closed_loop.py`.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import math
import time
from collections import Counter
from pathlib import Path
from typing import Any

import engine_closed_loop as closed_loop
import torch

CONCURRENCY = 8  # few enough for trees of full size
NUM_DRAWS = 8000
NUM_TRIED = 64  # prompts to choose from
TOP_K = 50


def main() -> None:
    options = closed_loop.parse(__doc__)
    if options.engine != "sglang":
        raise SystemExit("only --engine sglang returns the log-probabilities that this test needs")
    options.prefix_cache, options.temperature, options.max_new_tokens = True, 1.0, 2
    engine = closed_loop.SGLang(options, CONCURRENCY)
    engine.run(draw_and_compare(options, engine))


async def draw_and_compare(options: argparse.Namespace, engine: closed_loop.SGLang) -> None:
    prompt, first = await choose_prompt(options, engine)
    room, begun = asyncio.Semaphore(CONCURRENCY), time.perf_counter()

    async def draw(number: int) -> tuple[list[int], dict[int, float]]:
        async with room:
            answer = await engine.generate(prompt, number, TOP_K, ignore_eos=True, stop_token_ids=None)
            return list(answer["output_ids"]), probabilities(answer, 1)

    drawn = await asyncio.gather(*(draw(number) for number in range(NUM_DRAWS)))
    second = [(ids[1], expected) for ids, expected in drawn if ids[0] == first]
    expected_of: Counter[int] = Counter()
    for _, expected in second:
        expected_of.update(expected)
    seen_of = Counter(token for token, _ in second)
    bins = [token for token, count in expected_of.most_common() if count >= 5]
    seen, expected = [seen_of[token] for token in bins], [expected_of[token] for token in bins]
    rest = len(second) - sum(expected)
    if rest >= 5:
        seen.append(len(second) - sum(seen))
        expected.append(rest)
    chi = sum((s - e) ** 2 / e for s, e in zip(seen, expected, strict=True))
    freedom = torch.tensor((len(expected) - 1) / 2).double()
    p_value = float(torch.special.gammaincc(freedom, torch.tensor(chi / 2).double()))
    print(
        f"chi-square {chi:.1f} with {len(expected) - 1} degrees of freedom over {len(second)} draws of {len(drawn)} "
        f"({options.method}, seeds {'fresh' if options.seed is None else 'given'}): p = {p_value:.3f}; "
        f"{time.perf_counter() - begun:.0f} s; seen {seen[:8]}, expected {[round(e) for e in expected[:8]]}",
        flush=True,
    )


async def choose_prompt(options: argparse.Namespace, engine: closed_loop.SGLang) -> tuple[list[int], int]:
    """A prompt whose first token is almost certain and whose second is as open as possible, and that first token."""
    best, chosen = -1.0, None
    for prompt in json.loads(Path(options.ids).read_text())[:NUM_TRIED]:
        answer = await engine.generate(prompt, 0, TOP_K, temperature=0.0)
        first, probability = max(probabilities(answer, 0).items(), key=lambda each: each[1])
        entropy = -sum(p * math.log(p) for p in probabilities(answer, 1).values() if p > 0)
        if probability > 0.9 and probability * entropy > best:
            best, chosen = probability * entropy, (prompt, first)
    if chosen is None:
        raise SystemExit("no prompt has an almost certain first token")
    return chosen


def probabilities(answer: Any, position: int) -> dict[int, float]:
    return {token: math.exp(value) for value, token, _ in answer["meta_info"]["output_top_logprobs"][position]}


if __name__ == "__main__":
    main()
