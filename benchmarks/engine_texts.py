"""Does Graft draft and decode with an EAGLE-3 head as vLLM does? Round by round: chain drafts, greedy, fp32.

    vllm-venv/bin/python benchmarks/engine_texts.py --engine vllm --model DIR --head DIR --prompts gsm8k.jsonl \\
        --out v.json
    .venv/bin/python benchmarks/engine_texts.py --engine graft --model DIR --head DIR --prompts gsm8k.jsonl \\
        --out g.json
    python benchmarks/engine_texts.py --compare v.json g.json

Each engine is imported only in its own mode, so that each can have its own environment. Both write what every round
drafted and which tokens came out of it. Accepted tokens are counted from that in the same way for both. A comparison
ends with exit status 1 if an answer differs.
"""

import argparse
import json
import os
import sys
from collections.abc import Callable, Iterator
from itertools import islice, takewhile
from pathlib import Path
from typing import Any

Json = dict[str, Any]
Rounds = Callable[[list[int]], Iterator[Json]]  # from a prompt to its rounds: drafted and new tokens of each


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    mode = parser.add_mutually_exclusive_group(required=True)
    mode.add_argument("--engine", choices=["vllm", "graft"])
    mode.add_argument("--compare", nargs=2, type=Path, metavar=("A", "B"))
    parser.add_argument("--model", help="a folder")
    parser.add_argument("--head", help="a folder")
    parser.add_argument("--prompts", action="append", type=Path, help='rows {"turns": [...]} or {"prompt": ...}')
    parser.add_argument("--limit", type=int, default=8, help="rows of each file")
    parser.add_argument("--max-new-tokens", type=int, default=64)
    parser.add_argument("--drafts", type=int, default=3, help="length of the chain drafted in a round")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    if options.compare:
        sys.exit(compare(*(json.loads(path.read_text()) for path in options.compare)))
    if not (options.model and options.head and options.prompts and options.out):
        parser.error("--engine needs --model, --head, --prompts and --out")
    tokenizer, rounds_of = {"vllm": open_vllm, "graft": open_graft}[options.engine](options)
    answers = []
    for prompt_ids in read_prompts(options, tokenizer):
        answers.append({"prompt_ids": prompt_ids, "rounds": list(rounds_of(prompt_ids))})
        print(f"{len(answers)} answers", flush=True)
    report = {
        "engine": options.engine,
        "versions": {name: sys.modules[name].__version__ for name in (options.engine, "torch", "transformers")},
        "drafts": options.drafts,
        "max_new_tokens": options.max_new_tokens,
        "answers": answers,
    }
    options.out.write_text(json.dumps(report) + "\n")


def read_prompts(options: argparse.Namespace, tokenizer: Any) -> list[list[int]]:
    """The first rows of each file as the token ids of a chat with one message."""
    prompts = []
    for path in options.prompts:
        with path.open(encoding="utf-8") as file:
            for row in islice(map(json.loads, file), options.limit):
                message = {"role": "user", "content": row["turns"][0] if "turns" in row else row["prompt"]}
                text = tokenizer.apply_chat_template([message], tokenize=False, add_generation_prompt=True)
                prompts.append(tokenizer.encode(text, add_special_tokens=False))
    return prompts


def open_vllm(options: argparse.Namespace) -> tuple[Any, Rounds]:
    os.environ |= {
        "VLLM_ENABLE_V1_MULTIPROCESSING": "0",  # to reach its scheduler, which has the drafts
        "VLLM_CPU_KVCACHE_SPACE": "1",
        "OMP_NUM_THREADS": str(options.threads),
    }
    from vllm import LLM, SamplingParams, TokensPrompt
    from vllm.sampling_params import RequestOutputKind

    llm = LLM(
        model=options.model,
        dtype="float32",
        speculative_config={"method": "eagle3", "model": options.head, "num_speculative_tokens": options.drafts},
        max_model_len=2048,
        max_num_seqs=1,
        enable_prefix_caching=False,
        enforce_eager=True,
    )
    engine = llm.llm_engine
    requests = engine.engine_core.engine_core.scheduler.requests
    settings = SamplingParams(temperature=0.0, max_tokens=options.max_new_tokens, output_kind=RequestOutputKind.DELTA)

    def rounds_of(prompt_ids: list[int]) -> Iterator[Json]:
        engine.add_request("one", TokensPrompt(prompt_token_ids=prompt_ids), settings)
        while engine.has_unfinished_requests():
            drafted = [token for request in requests.values() for token in request.spec_token_ids]
            new = [token for output in engine.step() for token in output.outputs[0].token_ids]
            if new:  # a step that read a part of the prompt has none
                yield {"drafted": drafted, "new": new}

    return llm.get_tokenizer(), rounds_of


def open_graft(options: argparse.Namespace) -> tuple[Any, Rounds]:
    import torch

    import graft.bench.baselines  # noqa: F401 - registers `dense`
    from graft.drafters.drafter import TreeSettings
    from graft.engine import Engine
    from graft.loading import load, load_drafter
    from graft.model.sampler import SamplingSettings
    from graft.request.sequence import Sequence

    torch.set_num_threads(options.threads)
    plain = load(options.model, policy="off", dtype="fp32", device="cpu")
    chain = TreeSettings(depth=max(options.drafts - 1, 1), topk=1, total_token=options.drafts)
    drafter = load_drafter(options.head, plain.target.model, chain)
    engine = Engine(plain.target.model, plain.tokenizer, policy="dense", drafter=drafter)
    settings = SamplingSettings(max_new_tokens=max(options.max_new_tokens - 1, 1))

    def rounds_of(prompt_ids: list[int]) -> Iterator[Json]:
        """The first token without a draft, since vLLM's prefill gives it, and then the rounds after it."""
        first = engine.generate(prompt_ids, max_new_tokens=1)
        yield {"drafted": [], "new": first.ids}
        if first.finish_reason == "stop" or options.max_new_tokens == 1:
            return
        sequence = Sequence(prompt_ids + first.ids, settings, engine.eos_token_ids)
        sequence.is_recorded = True
        for _ in engine.rounds([sequence]):
            yield {"drafted": sequence.last_round.tokens[1:], "new": sequence.last_round.new_tokens}

    return plain.tokenizer, rounds_of


def compare(a: Json, b: Json) -> int:
    """Prints what agrees, and returns the exit status."""
    for name in ("drafts", "max_new_tokens"):
        if a[name] != b[name]:
            sys.exit(f"error: {name} is {a[name]} in one and {b[name]} in the other")
    pairs = list(zip(a["answers"], b["answers"], strict=True))
    if any(x["prompt_ids"] != y["prompt_ids"] for x, y in pairs):
        sys.exit("error: the prompts are not the same")
    rounds = [(drafting_rounds(x, a), drafting_rounds(y, b)) for x, y in pairs]
    for report, side in zip((a, b), zip(*rounds, strict=True), strict=True):
        own = [round for answer in side for round in answer]
        versions = ", ".join(f"{name} {number}" for name, number in report["versions"].items())
        print(f"{versions}: {len(own)} rounds, {sum(map(num_accepted, own))} drafted tokens accepted")
    num_starts = sum(len({r["start"] for r in x} | {r["start"] for r in y}) for x, y in rounds)
    num_same = sum(round in y for x, y in rounds for round in x)
    texts = [[[token for r in answer["rounds"] for token in r["new"]] for answer in pair] for pair in pairs]
    num_equal = sum(x == y for x, y in texts)
    print(f"{num_equal} of {len(pairs)} answers are equal, and {num_same} of {num_starts} rounds")
    different = (pair for x, y in rounds for pair in zip(x, y, strict=False) if pair[0] != pair[1])
    for first in islice(different, 1):
        print(f"The first difference\n- {a['engine']}: {first[0]}\n- {b['engine']}: {first[1]}")
    return int(num_equal < len(pairs))


def drafting_rounds(answer: Json, report: Json) -> list[Json]:
    """The rounds that draft, each with its start in the answer and the drafts that can be accepted.

    vLLM also drafts the last token that the limit allows, and beyond it. Graft leaves that token to the target, which
    gives one in any case.
    """
    start, rounds = len(answer["rounds"][0]["new"]), []
    for round in answer["rounds"][1:]:
        drafted = round["drafted"][: report["max_new_tokens"] - start - 1]
        rounds.append({"start": start, "drafted": drafted, "new": round["new"]})
        start += len(round["new"])
    return rounds


def num_accepted(round: Json) -> int:
    """Drafted tokens that the answer has too: decoding is greedy."""
    return sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], zip(round["drafted"], round["new"], strict=False)))


if __name__ == "__main__":
    main()
