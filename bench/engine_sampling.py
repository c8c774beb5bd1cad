"""Chi-square of one token drawn 8,000 times through SGLang with Graft's plugin, against the target's own distribution.

    GRAFT_SGLANG=1 python bench/engine_sampling.py --engine sglang --model DIR/model --head DIR/head \
        --ids DIR/ids.json --method graft --steps 3 --topk 4 --places 16 --seed 1

A request's first token is the prefill's, so the token after it is judged: the one that the verify draws. A prompt is
taken whose first token is almost certain and whose second is not; what is expected comes from a prefill of prompt and
first token, with log-probabilities.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import math
import time
from pathlib import Path

import engine_closed_loop as closed_loop
import torch

CONCURRENCY = 64
NUM_DRAWS = 8000


def main() -> None:
    options = closed_loop.arguments()
    if options.engine != "sglang":
        raise SystemExit("only --engine sglang gives the log-probabilities that this compares with")
    options.prefix_cache, options.temperature, options.max_new_tokens = True, 1.0, 2
    engine = closed_loop.SGLang(options, CONCURRENCY)
    engine.run(draw_and_compare(options, engine))


async def draw_and_compare(options: argparse.Namespace, engine: closed_loop.SGLang) -> None:
    async def likeliest(ids: list[int]) -> list[tuple[int, float]]:
        answer = await engine.generate(ids, 0, return_logprob=True, temperature=0.0, max_new_tokens=1)
        return [(token, math.exp(value)) for value, token, _ in answer["meta_info"]["output_top_logprobs"][0]]

    best, chosen = -1.0, None
    for prompt in json.loads(Path(options.ids).read_text()):
        first, chance = (await likeliest(prompt))[0]
        if chance > 0.9:
            after = await likeliest([*prompt, first])
            entropy = -sum(p * math.log(p) for _, p in after if p > 0)
            if chance * entropy > best:
                best, chosen = chance * entropy, (prompt, first, after, chance)
    if chosen is None:
        raise SystemExit("no prompt has an almost certain first token")
    prompt, first, after, chance = chosen
    print(f"first token {first} has {chance:.3f}, the second's likeliest {[(t, round(p, 3)) for t, p in after[:5]]}")
    room, begun = asyncio.Semaphore(CONCURRENCY), time.perf_counter()

    async def draw(number: int) -> list[int]:
        async with room:
            return (await engine.ask(prompt, number, ignore_eos=True, stop_token_ids=None))[0]

    drawn = await asyncio.gather(*(draw(number) for number in range(NUM_DRAWS)))
    seconds = [ids[1] for ids in drawn if ids[0] == first and len(ids) > 1]
    bins = [(token, p) for token, p in after if p * len(seconds) >= 5]
    seen = [seconds.count(token) for token, _ in bins]
    expected = [p * len(seconds) for _, p in bins]
    rest = len(seconds) - sum(expected)
    if rest >= 5:
        seen.append(len(seconds) - sum(seen))
        expected.append(rest)
    chi = sum((s - e) ** 2 / e for s, e in zip(seen, expected, strict=True))
    freedom = torch.tensor((len(expected) - 1) / 2).double()
    p_value = float(torch.special.gammaincc(freedom, torch.tensor(chi / 2).double()))
    print(
        f"chi-square {chi:.1f} with {len(expected) - 1} degrees of freedom over {len(seconds)} draws of {len(drawn)} "
        f"({options.method}, seeds {'fresh' if options.seed is None else 'given'}): p = {p_value:.3f}; "
        f"{time.perf_counter() - begun:.0f} s; seen {seen[:8]}, expected {[round(e) for e in expected[:8]]}",
        flush=True,
    )


if __name__ == "__main__":
    main()
