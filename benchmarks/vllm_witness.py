"""Compares vLLM's drafts of an EAGLE-3 head with Graft's: same prompts, chain drafts, greedy, fp32, round by round.

    vllm-venv/bin/python bench/vllm_witness.py --engine vllm --model MODEL --head HEAD --data gsm8k.jsonl --out v.json
    .venv/bin/python bench/vllm_witness.py --engine graft --model MODEL --head HEAD --data gsm8k.jsonl --out g.json
    python bench/vllm_witness.py --compare v.json g.json

Each engine is imported only in its own mode, so that each can live in its own environment. Both write down what
every round drafted and what came out of it; what was accepted is counted from that, in the same way for both.
`docs/witness.md` has the results.
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

# What vLLM drafts with: with GRAFT_VLLM=1, "eagle3" is grafted; "retrieval" is Graft without a head.
VLLM_METHODS = {
    "eagle3": {"method": "eagle3"},
    "retrieval": {"method": "custom_class", "model": "graft.integrations.vllm.retrieval.RetrievalProposer"},
}


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
    parser.add_argument("--method", choices=[*VLLM_METHODS, "off"], default="eagle3", help="vLLM's; see docs/engines")
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
                prompts.append({"task": path.stem, "prompt_ids": tokenizer.encode(text, add_special_tokens=False)})
    return prompts


def make_report(options: argparse.Namespace, answers: list[Json], counters: Json) -> Json:
    return {
        "engine": options.engine,
        "versions": {name: sys.modules[name].__version__ for name in (options.engine, "torch", "transformers")},
        "drafts": options.drafts,
        "max_new_tokens": options.max_new_tokens,
        "counters": counters,  # as the engine itself counts
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

    speculative = None
    if options.method != "off":
        drafts = {"model": options.head, "num_speculative_tokens": options.drafts}
        speculative = drafts | VLLM_METHODS[options.method]
    llm = LLM(
        model=options.model,
        dtype="float32",
        speculative_config=speculative,
        max_model_len=2048,
        max_num_seqs=1,
        enable_prefix_caching=False,
        enforce_eager=True,
        disable_log_stats=False,
    )
    prompts = read_prompts(options, llm.get_tokenizer())
    answers = []
    for number, prompt in enumerate(prompts):
        rounds = list(vllm_rounds(llm, str(number), prompt["prompt_ids"], options.max_new_tokens))
        answers.append(prompt | {"rounds": rounds})
        print(f"{number + 1}/{len(prompts)}", flush=True)
    return make_report(options, answers, vllm_counters(llm))


def vllm_rounds(llm: Any, name: str, prompt_ids: list[int], max_new_tokens: int) -> Iterator[Json]:
    from vllm import SamplingParams, TokensPrompt
    from vllm.sampling_params import RequestOutputKind

    engine = llm.llm_engine
    requests = engine.engine_core.engine_core.scheduler.requests
    settings = SamplingParams(temperature=0.0, max_tokens=max_new_tokens, output_kind=RequestOutputKind.DELTA)
    engine.add_request(name, TokensPrompt(prompt_token_ids=prompt_ids), settings)
    while engine.has_unfinished_requests():
        drafted = [token for request in requests.values() for token in request.spec_token_ids]
        before = vllm_counters(llm)
        new = [token for output in engine.step() for token in output.outputs[0].token_ids]
        if new:  # else a step that read a part of the prompt
            after = vllm_counters(llm)
            yield {"drafted": drafted, "new": new, "counted": after["accepted"] - before["accepted"]}


def vllm_counters(llm: Any) -> Json:
    if llm.llm_engine.vllm_config.speculative_config is None:
        return {"rounds": 0, "drafted": 0, "accepted": 0, "by_position": []}
    found = {metric.name: metric for metric in llm.get_metrics() if metric.name.startswith("vllm:spec_decode_num_")}
    values = {name.removeprefix("vllm:spec_decode_num_"): metric for name, metric in found.items()}
    return {
        "rounds": values["drafts"].value,
        "drafted": values["draft_tokens"].value,
        "accepted": values["accepted_tokens"].value,
        "by_position": list(values["accepted_tokens_per_pos"].values),
    }


# Graft


def run_graft(options: argparse.Namespace) -> Json:
    import torch

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
    counters = {"rounds": 0, "drafted": 0, "accepted": 0, "by_position": [0] * options.drafts}
    answers = []
    for number, prompt in enumerate(prompts):
        rounds = list(graft_rounds(engine, prompt["prompt_ids"], options.max_new_tokens, counters))
        answers.append(prompt | {"rounds": rounds})
        print(f"{number + 1}/{len(prompts)}", flush=True)
    return make_report(options, answers, counters)


def graft_rounds(engine: Any, prompt_ids: list[int], max_new_tokens: int, counters: Json) -> Iterator[Json]:
    """The first token alone, without a draft, as vLLM has it from reading the prompt; then rounds behind it."""
    from graft.model.sampler import SamplingSettings
    from graft.sequence import Sequence

    first = engine.generate(prompt_ids, max_new_tokens=1)
    yield {"drafted": [], "new": first.ids}
    if first.finish_reason == "stop" or max_new_tokens == 1:
        return
    settings = SamplingSettings(max_new_tokens=max_new_tokens - 1)
    sequence = Sequence(prompt_ids + first.ids, settings, engine.eos_token_ids)
    sequence.is_recorded = True
    for _ in engine.rounds([sequence]):
        yield {"drafted": sequence.last_round.tokens[1:], "new": sequence.last_round.new_tokens}
    counters["rounds"] += sequence.stats.rounds
    counters["drafted"] += sequence.stats.nodes
    counters["accepted"] += sequence.stats.accepted
    for depth, count in sequence.stats.accepted_by_depth.items():
        counters["by_position"][depth - 1] += count


# The comparison


def compare(a: Json, b: Json) -> int:
    """Prints what agrees; the exit status."""
    for name in ("drafts", "max_new_tokens"):
        if a[name] != b[name]:
            sys.exit(f"error: {name} is {a[name]} in one and {b[name]} in the other")
    if [x["prompt_ids"] for x in a["answers"]] != [x["prompt_ids"] for x in b["answers"]]:
        sys.exit("error: the prompts are not the same")
    for report in (a, b):
        print(", ".join(f"{name} {number}" for name, number in report["versions"].items()))
    pairs = list(zip(a["answers"], b["answers"], strict=True))
    names = f"{a['engine']} / {b['engine']}"
    print(f"\n| prompts | answers equal | rounds, {names} | accepted | by position | rounds with equal drafts |")
    print("|---|---|---|---|---|---|")
    for task in (*dict.fromkeys(x["task"] for x, _ in pairs), "all"):
        cells = table_row([(x, y) for x, y in pairs if task in (x["task"], "all")], a, b)
        print(f"| {task} | {' | '.join(cells)} |")
    print("\nThe engines' own counters")
    for report in (a, b):
        print(f"- {report['engine']}: {json.dumps(report['counters'])}")
        show_counted_beyond(report)
    show_first_difference(pairs, a, b)
    return int(any(ids(x) != ids(y) for x, y in pairs))


def table_row(pairs: list[tuple[Json, Json]], a: Json, b: Json) -> list[str]:
    equal = sum(ids(x) == ids(y) for x, y in pairs)
    rounds_of = [(useful(x, a), useful(y, b)) for x, y in pairs]
    accepted = [[num_accepted(r) for rounds in side for r in rounds] for side in zip(*rounds_of, strict=True)]
    by_position = [[sum(n > place for n in side) for place in range(a["drafts"])] for side in accepted]
    places = sum(len({r["start"] for r in x} | {r["start"] for r in y}) for x, y in rounds_of)
    same = sum(r in y for x, y in rounds_of for r in x)
    return [
        f"{equal} of {len(pairs)}",
        f"{len(accepted[0])} / {len(accepted[1])}",
        f"{sum(accepted[0])} / {sum(accepted[1])}",
        " / ".join(", ".join(map(str, counts)) for counts in by_position),
        f"{same} of {places}",
    ]


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


def show_counted_beyond(report: Json) -> None:
    """Where an engine says what it counted in each round: how it comes to another sum."""
    in_last, in_others = 0, 0
    for answer in report["answers"]:
        counted = [round["counted"] for round in answer["rounds"][1:] if "counted" in round]
        beyond = [own - num_accepted(round) for own, round in zip(counted, useful(answer, report), strict=False)]
        in_last += sum(beyond[-1:])
        in_others += sum(map(abs, beyond[:-1]))
    if in_last or in_others:
        print(f"  more than in the table: {in_last} in the last rounds of answers, {in_others} in others")


def show_first_difference(pairs: list[tuple[Json, Json]], a: Json, b: Json) -> None:
    for x, y in pairs:
        for mine, others in zip(useful(x, a), useful(y, b), strict=False):
            if mine != others:
                print(f"\nThe first difference, in {x['task']}, after a prompt of {len(x['prompt_ids'])} tokens")
                print(f"- {a['engine']}: {mine}\n- {b['engine']}: {others}")
                return


if __name__ == "__main__":
    main()
