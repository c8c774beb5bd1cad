"""Does Graft draft and decode with an EAGLE-3 head as vLLM does? Round by round: chain drafts, greedy, fp32.

    vllm-venv/bin/python benchmarks/engine_texts.py --engine vllm --model DIR --head DIR --data gsm8k.jsonl --out v.json
    .venv/bin/python benchmarks/engine_texts.py --engine graft --model DIR --head DIR --data gsm8k.jsonl --out g.json
    python benchmarks/engine_texts.py --compare v.json g.json

Each engine is imported only in its own mode, so that each can live in its own environment. Both write down what every
round drafted and what came out of it, and accepted tokens are counted from that in the same way for both. The exit
status of a comparison is 1 if an answer differs.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
from collections.abc import Iterator
from itertools import islice, takewhile
from pathlib import Path
from typing import Any

Json = dict[str, Any]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    mode = parser.add_mutually_exclusive_group(required=True)
    mode.add_argument("--engine", choices=["vllm", "graft"])
    mode.add_argument("--compare", nargs=2, type=Path, metavar=("A", "B"))
    parser.add_argument("--model", help="a folder")
    parser.add_argument("--head", help="a folder")
    parser.add_argument("--data", action="append", type=Path, help='rows {"turns": [...]} or {"prompt": ...}')
    parser.add_argument("--limit", type=int, default=8, help="rows of each file")
    parser.add_argument("--max-new-tokens", type=int, default=64)
    parser.add_argument("--drafts", type=int, default=3, help="tokens drafted in a round, one after the other")
    parser.add_argument("--method", choices=["eagle3", "off"], default="eagle3", help="what vLLM drafts with")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    if options.compare:
        sys.exit(compare(*(json.loads(path.read_text()) for path in options.compare)))
    if not (options.model and options.head and options.data and options.out):
        parser.error("--engine needs --model, --head, --data and --out")
    report = {"vllm": run_vllm, "graft": run_graft}[options.engine](options)
    options.out.write_text(json.dumps(report) + "\n")
    print(f"{options.out}: {len(report['answers'])} answers")


# What both do


def read_prompts(options: argparse.Namespace, tokenizer: Any) -> list[Json]:
    """The first rows of each file as the token ids of a chat with one message."""
    prompts = []
    for path in options.data:
        with path.open(encoding="utf-8") as file:
            for row in islice(map(json.loads, file), options.limit):
                message = {"role": "user", "content": row["turns"][0] if "turns" in row else row["prompt"]}
                text = tokenizer.apply_chat_template([message], tokenize=False, add_generation_prompt=True)
                prompts.append({"prompt_ids": tokenizer.encode(text, add_special_tokens=False)})
    return prompts


def make_report(options: argparse.Namespace, answers: list[Json]) -> Json:
    return {
        "engine": options.engine,
        "versions": {name: sys.modules[name].__version__ for name in (options.engine, "torch", "transformers")},
        "drafts": options.drafts,
        "max_new_tokens": options.max_new_tokens,
        "answers": answers,  # each with its rounds: what was drafted, and the new tokens
    }


# vLLM


def run_vllm(options: argparse.Namespace) -> Json:
    os.environ |= {
        "VLLM_ENABLE_V1_MULTIPROCESSING": "0",  # else its scheduler, which knows the drafts, is out of reach
        "VLLM_CPU_KVCACHE_SPACE": "1",
        "OMP_NUM_THREADS": str(options.threads),
    }
    from vllm import LLM

    eagle3 = {"method": "eagle3", "model": options.head, "num_speculative_tokens": options.drafts}
    llm = LLM(
        model=options.model,
        dtype="float32",
        speculative_config=None if options.method == "off" else eagle3,
        max_model_len=2048,
        max_num_seqs=1,
        enable_prefix_caching=False,
        enforce_eager=True,
    )
    prompts = read_prompts(options, llm.get_tokenizer())
    answers = []
    for number, prompt in enumerate(prompts):
        rounds = list(vllm_rounds(llm, str(number), prompt["prompt_ids"], options.max_new_tokens))
        answers.append(prompt | {"rounds": rounds})
        print(f"{number + 1}/{len(prompts)}", flush=True)
    return make_report(options, answers)


def vllm_rounds(llm: Any, name: str, prompt_ids: list[int], max_new_tokens: int) -> Iterator[Json]:
    from vllm import SamplingParams, TokensPrompt
    from vllm.sampling_params import RequestOutputKind

    engine = llm.llm_engine
    requests = engine.engine_core.engine_core.scheduler.requests
    settings = SamplingParams(temperature=0.0, max_tokens=max_new_tokens, output_kind=RequestOutputKind.DELTA)
    engine.add_request(name, TokensPrompt(prompt_token_ids=prompt_ids), settings)
    while engine.has_unfinished_requests():
        drafted = [token for request in requests.values() for token in request.spec_token_ids]
        new = [token for output in engine.step() for token in output.outputs[0].token_ids]
        if new:  # else a step that read a part of the prompt
            yield {"drafted": drafted, "new": new}


# Graft


def run_graft(options: argparse.Namespace) -> Json:
    import torch

    import graft.bench.baselines  # noqa: F401 - which knows `dense`
    from graft.engine import Engine
    from graft.loading import load
    from graft.spec_decode.proposers.drafter import TreeSettings
    from graft.spec_decode.proposers.eagle3.checkpoint import load_head
    from graft.spec_decode.proposers.factory import drafter_for

    torch.set_num_threads(options.threads)
    plain = load(options.model, policy="off", dtype="fp32", device="cpu")
    model = plain.target.model
    embedding = model.get_input_embeddings().weight.detach()
    head = load_head(options.head, model.config, torch.float32, "cpu", embedding)
    chain = TreeSettings(depth=max(options.drafts - 1, 1), topk=1, total_token=options.drafts)
    engine = Engine(model, plain.tokenizer, policy="dense", drafter=drafter_for(head, chain))

    prompts = read_prompts(options, plain.tokenizer)
    answers = []
    for number, prompt in enumerate(prompts):
        rounds = list(graft_rounds(engine, prompt["prompt_ids"], options.max_new_tokens))
        answers.append(prompt | {"rounds": rounds})
        print(f"{number + 1}/{len(prompts)}", flush=True)
    return make_report(options, answers)


def graft_rounds(engine: Any, prompt_ids: list[int], max_new_tokens: int) -> Iterator[Json]:
    """The first token alone, without a draft, as vLLM has it from reading the prompt; then rounds behind it."""
    from graft.model.sampler import SamplingSettings
    from graft.request.sequence import Sequence

    first = engine.generate(prompt_ids, max_new_tokens=1)
    yield {"drafted": [], "new": first.ids}
    if first.finish_reason == "stop" or max_new_tokens == 1:
        return
    settings = SamplingSettings(max_new_tokens=max_new_tokens - 1)
    sequence = Sequence(prompt_ids + first.ids, settings, engine.eos_token_ids)
    sequence.is_recorded = True
    for _ in engine.rounds([sequence]):
        yield {"drafted": sequence.last_round.tokens[1:], "new": sequence.last_round.new_tokens}


# The comparison


def compare(a: Json, b: Json) -> int:
    """Prints what agrees; the exit status."""
    for name in ("drafts", "max_new_tokens"):
        if a[name] != b[name]:
            sys.exit(f"error: {name} is {a[name]} in one and {b[name]} in the other")
    pairs = list(zip(a["answers"], b["answers"], strict=True))
    if any(x["prompt_ids"] != y["prompt_ids"] for x, y in pairs):
        sys.exit("error: the prompts are not the same")
    rounds = [(useful(x, a), useful(y, b)) for x, y in pairs]
    for report, side in zip((a, b), zip(*rounds, strict=True), strict=True):
        own = [round for answer in side for round in answer]
        versions = ", ".join(f"{name} {number}" for name, number in report["versions"].items())
        print(f"{versions}: {len(own)} rounds, {sum(map(num_accepted, own))} drafted tokens accepted")
    num_places = sum(len({r["start"] for r in x} | {r["start"] for r in y}) for x, y in rounds)
    num_same = sum(round in y for x, y in rounds for round in x)
    num_equal = sum(ids(x) == ids(y) for x, y in pairs)
    print(f"{num_equal} of {len(pairs)} answers are equal, and {num_same} of {num_places} rounds")
    different = (pair for x, y in rounds for pair in zip(x, y, strict=False) if pair[0] != pair[1])
    for first in islice(different, 1):
        print(f"The first difference\n- {a['engine']}: {first[0]}\n- {b['engine']}: {first[1]}")
    return int(num_equal < len(pairs))


def ids(answer: Json) -> list[int]:
    return [token for round in answer["rounds"] for token in round["new"]]


def useful(answer: Json, report: Json) -> list[Json]:
    """The drafting rounds, each with how many new tokens it started from, and its drafts that could come to count.

    vLLM also drafts the last token that the limit allows, and beyond it; Graft leaves that one to the target,
    which gives a token in any case.
    """
    start, rounds = len(answer["rounds"][0]["new"]), []
    for round in answer["rounds"][1:]:
        drafted = round["drafted"][: report["max_new_tokens"] - start - 1]
        rounds.append({"start": start, "drafted": drafted, "new": round["new"]})
        start += len(round["new"])
    return rounds


def num_accepted(round: Json) -> int:
    """Greedily, the drafted tokens that were accepted are those that the answer has too."""
    return sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], zip(round["drafted"], round["new"], strict=False)))


if __name__ == "__main__":
    main()
