"""How many tokens a second do SGLang (with and without Graft's plugin) and vLLM give, at so many requests at a time?

    python benchmarks/engine_closed_loop.py --engine sglang --model DIR/model --head DIR/head --ids DIR/ids.json \\
        --warmup DIR/warmup.json --method eagle3 --steps 3 --topk 1 --places 4

`benchmarks/widened_model.py --limit 32 --warmup FILE` writes DIR. Prompts are token ids. Every number of requests has
prompts of its own, 64 (48 for one request at a time), and no prompt is asked twice, since Graft knows an answer that it
has given before. All methods are asked the same. `--turns N` asks methods that learn nothing the first `--limit`
prompts at every number of requests, N times, as `batched_serving.py` does, and the medians count. `--method graft`
needs GRAFT_SGLANG=1, as the plugin does anywhere.

One process measures one setting. `--compare` says how many texts differ from those that another process wrote with
`--out`.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import time
import uuid
from collections.abc import Callable, Coroutine
from pathlib import Path
from statistics import median
from typing import Any

Answer = tuple[list[int], int]  # token ids, and in how many steps after the prefill (0: the engine does not say)


def arguments(description: str | None = __doc__) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--engine", choices=["sglang", "vllm"], required=True)
    parser.add_argument("--model", required=True)
    parser.add_argument("--head", help="an EAGLE-3 head, or with --method draft_model a model")
    parser.add_argument("--ids", required=True, help="a JSON list of prompts as token ids")
    parser.add_argument("--method", choices=["off", "eagle3", "draft_model", "graft"], default="off")
    parser.add_argument("--steps", type=int, default=3, help="draft passes of a round")
    parser.add_argument("--topk", type=int, default=1, help="SGLang: branches of its tree")
    parser.add_argument("--places", type=int, default=4, help="SGLang: places of the verify, the root among them")
    parser.add_argument("--warmup", help="a JSON list of other prompts, asked before")
    parser.add_argument("--concurrency", default="1,4,16,64", help="numbers of requests; each has prompts of its own")
    parser.add_argument("--only", help="only these of them")
    parser.add_argument("--max-new-tokens", type=int, default=96)
    parser.add_argument("--temperature", type=float, default=0.0)
    parser.add_argument("--dtype", default="bfloat16", help="of the model")
    parser.add_argument("--seed", type=int, help="requests draw by this seed plus their number")
    parser.add_argument("--stop-id", type=int, default=2)
    parser.add_argument("--limit", type=int, default=64, help="prompts of each number of requests")
    parser.add_argument("--turns", type=int, help="ask the same prompts at every number of requests, so many times")
    parser.add_argument("--no-graphs", action="store_true", help="SGLang: without CUDA graphs of a decode step")
    parser.add_argument(
        "--prefill-graphs", type=int, default=512, help="SGLang: prompts up to so many tokens are read by CUDA graphs"
    )
    parser.add_argument("--deterministic", action="store_true", help="SGLang's deterministic mode")
    parser.add_argument("--no-overlap", action="store_true", help="no overlapped scheduling")
    parser.add_argument("--prefix-cache", action="store_true")
    parser.add_argument("--context", type=int, default=4096)
    parser.add_argument("--cache-tokens", type=int, default=60000, help="SGLang's KV cache")
    parser.add_argument("--cache-gib", type=float, default=8.0, help="vLLM's KV cache")
    parser.add_argument("--memory", type=float, help="the engine's fraction of the GPU (0.85 SGLang, 0.25 vLLM)")
    parser.add_argument("--log", default="error")
    parser.add_argument("--compare", nargs="*", default=[], help="files that earlier runs have written by --out")
    parser.add_argument("--out", help="a JSON file for figures and answers")
    options = parser.parse_args()
    if options.engine == "vllm" and options.method == "graft":
        parser.error("Graft has a plugin for SGLang only")
    if (os.environ.get("GRAFT_SGLANG", "") == "1") != (options.method == "graft"):
        parser.error("GRAFT_SGLANG=1 belongs to --method graft, and to no other")
    if options.turns is not None and (options.turns < 1 or options.method == "graft" or options.prefix_cache):
        parser.error("--turns is at least 1, and for methods that keep nothing of a prompt asked before")
    if options.memory is None:
        options.memory = 0.85 if options.engine == "sglang" else 0.25
    return options


class SGLang:
    """SGLang's `Engine`, as its server has it."""

    def __init__(self, options: argparse.Namespace, most: int) -> None:
        import sglang

        self._options = options
        self._engine = sglang.Engine(**self._arguments(most))

    def _arguments(self, most: int) -> dict[str, Any]:
        options = self._options
        sizes = [size for size in (1, 2, 3, 4, 6, 8, 12, 16, 24, 32, 40, 48, 56, 64, 96, 128) if size <= most]
        flags: dict[str, Any] = dict(
            model_path=options.model,
            dtype=options.dtype,
            context_length=options.context,
            max_running_requests=most,
            mem_fraction_static=options.memory,
            max_total_tokens=options.cache_tokens,
            attention_backend="triton",
            sampling_backend="pytorch",
            grammar_backend="none",
            page_size=1,
            disable_radix_cache=not options.prefix_cache,
            disable_overlap_schedule=options.no_overlap,
            cuda_graph_bs_decode=sizes,
            cuda_graph_max_bs_decode=most,
            log_level=options.log,
            random_seed=0,
        )
        if options.no_graphs:
            flags |= dict(disable_decode_cuda_graph=True)
        if options.prefill_graphs:
            flags |= dict(cuda_graph_max_bs_prefill=options.prefill_graphs)
        else:
            flags |= dict(disable_prefill_cuda_graph=True)
        if options.deterministic:
            flags |= dict(enable_deterministic_inference=True)
        if options.method != "off":
            flags |= dict(
                speculative_algorithm="EAGLE3",
                speculative_draft_model_path=head_for_sglang(options.head),
                speculative_num_steps=options.steps,
                speculative_eagle_topk=options.topk,
                speculative_num_draft_tokens=options.places,
            )
        return flags

    def run(self, work: Coroutine[Any, Any, Any]) -> None:
        try:
            self._engine.loop.run_until_complete(work)
        finally:
            self._engine.shutdown()

    async def ask(self, prompt: list[int], number: int) -> Answer:
        answer = await self.generate(prompt, number)
        return list(answer["output_ids"]), answer["meta_info"].get("spec_verify_ct", 0)

    async def generate(self, prompt: list[int], number: int, num_likeliest: int = 0, **more: Any) -> Any:
        """SGLang's answer. num_likeliest: so many tokens with their log-probabilities at every place."""
        options = self._options
        settings = dict(
            temperature=options.temperature, max_new_tokens=options.max_new_tokens, stop_token_ids=[options.stop_id]
        )
        if options.seed is not None:
            settings["sampling_seed"] = options.seed + number
        extra: dict[str, Any] = dict(return_logprob=True, top_logprobs_num=num_likeliest) if num_likeliest else {}
        return await self._engine.async_generate(input_ids=prompt, sampling_params=settings | more, **extra)

    def name(self) -> str:
        options = self._options
        if options.method == "off":
            return "off"
        return f"{options.method} steps {options.steps} topk {options.topk} places {options.places}"

    def counters(self) -> tuple[float, float, float]:
        return 0.0, 0.0, 0.0


class VLLM:
    """vLLM's `AsyncLLM`, as its server has it."""

    def __init__(self, options: argparse.Namespace, most: int) -> None:
        from vllm.engine.arg_utils import AsyncEngineArgs
        from vllm.v1.engine.async_llm import AsyncLLM

        self._options = options
        speculation = dict(method=options.method, model=options.head, num_speculative_tokens=options.steps)
        self._flags: dict[str, Any] = dict(
            model=options.model,
            dtype=options.dtype,
            max_model_len=options.context,
            max_num_seqs=most,
            gpu_memory_utilization=options.memory,
            kv_cache_memory_bytes=int(options.cache_gib * 2**30),
            enable_prefix_caching=options.prefix_cache,
            disable_log_stats=False,
            speculative_config=None if options.method == "off" else speculation,
        )
        if options.no_overlap:
            self._flags |= dict(async_scheduling=False)
        self._make: Callable[[], Any] = lambda: AsyncLLM.from_engine_args(AsyncEngineArgs(**self._flags))
        self._engine: Any = None

    def run(self, work: Coroutine[Any, Any, Any]) -> None:
        async def run() -> None:
            self._engine = self._make()  # in the loop that it will be asked in
            try:
                await work
            finally:
                self._engine.shutdown()

        asyncio.run(run())

    async def ask(self, prompt: list[int], number: int) -> Answer:
        from vllm import SamplingParams, TokensPrompt

        options = self._options
        settings = SamplingParams(
            temperature=options.temperature,
            max_tokens=options.max_new_tokens,
            stop_token_ids=[options.stop_id],
            seed=None if options.seed is None else options.seed + number,
        )
        text = TokensPrompt(prompt_token_ids=prompt)
        async for output in self._engine.generate(text, settings, request_id=str(uuid.uuid4())):
            last = output
        return list(last.outputs[0].token_ids), 0

    def name(self) -> str:
        options = self._options
        return "off" if options.method == "off" else f"{options.method} {options.steps} drafts"

    def counters(self) -> tuple[float, float, float]:
        """vLLM's own counts of verified chains, of drafted and of accepted tokens."""
        from vllm.v1.metrics.reader import get_metrics_snapshot

        names = ["num_drafts", "num_draft_tokens", "num_accepted_tokens"]
        found = dict.fromkeys((f"vllm:spec_decode_{name}" for name in names), 0.0)
        for metric in get_metrics_snapshot():
            if metric.name in found:
                found[metric.name] += getattr(metric, "value", 0.0)
        chains, drafted, accepted = found.values()
        return chains, drafted, accepted


def head_for_sglang(head: str) -> str:
    """A copy of the head's folder whose config names the class that SGLang loads it with; weights are linked."""
    source = Path(head).resolve()
    config = json.loads((source / "config.json").read_text())
    if config.get("architectures") == ["LlamaForCausalLMEagle3"]:
        return str(source)
    copy = source.with_name(source.name + "-sglang")
    copy.mkdir(exist_ok=True)
    for file in source.glob("*.safetensors"):
        link = copy / f".{os.getpid()}.{file.name}"
        link.symlink_to(file)
        link.replace(copy / file.name)
    config["architectures"] = ["LlamaForCausalLMEagle3"]
    written = copy / f".{os.getpid()}.config.json"
    written.write_text(json.dumps(config, indent=2))
    written.replace(copy / "config.json")
    return str(copy)


def departures(ours: list[list[int]], theirs: list[list[int]]) -> str:
    """How many texts differ, and after how many equal tokens."""
    firsts = []
    for mine, other in zip(ours, theirs, strict=False):
        if mine != other:
            pairs = enumerate(zip(mine, other, strict=False))
            firsts.append(next((n for n, (a, b) in pairs if a != b), min(len(mine), len(other))))
    firsts.sort()
    return f"{len(firsts)} of {min(len(ours), len(theirs))} texts depart" + (f", first at {firsts}" if firsts else "")


async def measure(options: argparse.Namespace, engine: SGLang | VLLM, sizes: list[int], begun: float) -> None:
    print(f"engine started in {time.perf_counter() - begun:.1f} s", flush=True)
    prompts = json.loads(Path(options.ids).read_text())
    others = json.loads(Path(options.warmup).read_text()) if options.warmup else []
    every = [int(part) for part in options.concurrency.split(",")]
    if len(others) < max(sizes):
        raise SystemExit(f"{max(sizes)} prompts are needed to warm up, not {len(others)}: --warmup")
    needed = options.limit * (len(every) if options.turns is None else 1)
    if len(prompts) < needed:
        raise SystemExit(f"{options.ids} has {len(prompts)} prompts, and {needed} are needed")
    results: list[dict[str, Any]] = []

    async def turn(asked: list[list[int]], size: int) -> tuple[float, list[Answer]]:
        room = asyncio.Semaphore(size)

        async def ask(number: int, prompt: list[int]) -> Answer:
            async with room:
                return await engine.ask(prompt, number)

        started = time.perf_counter()
        answers = await asyncio.gather(*(ask(number, prompt) for number, prompt in enumerate(asked)))
        return time.perf_counter() - started, list(answers)

    await turn(others, min(max(sizes), 8))
    for size in sizes:
        first = every.index(size) * options.limit
        asked = prompts[first : first + (options.limit if size > 1 else 3 * options.limit // 4)]
        if options.turns is not None:
            asked = prompts[: options.limit]
        await turn(others[:size], size)
        rates = []
        for _ in range(options.turns or 1):
            before = engine.counters()
            seconds, answers = await turn(asked, size)
            rates.append(sum(len(ids) for ids, _ in answers) / seconds)
        # What follows but the rate is of the last turn.
        chains, drafted, accepted = (now - then for now, then in zip(engine.counters(), before, strict=True))
        texts, steps = [ids for ids, _ in answers], sum(steps for _, steps in answers)
        # The prefill gives the first token of each text, and every step one that was not drafted.
        num_decoded = sum(map(len, texts)) - len(texts)
        steps = steps or num_decoded - accepted
        a_step = num_decoded / steps if steps else 1.0
        words = f", {drafted / chains:.2f} drafts each" if chains else ""
        rate = median(rates)
        runs = f" ({', '.join(f'{each:.1f}' for each in rates)})" if len(rates) > 1 else ""
        print(
            f"{options.engine} {engine.name()}, {size} at once: {rate:.1f} tokens/s{runs}, "
            f"{a_step:.2f} tokens a step{words}",
            flush=True,
        )
        results.append({"concurrency": size, "rate": rate, "rates": rates, "accepted": a_step, "answers": texts})
        for path in map(Path, options.compare):
            for other in json.loads(path.read_text())["results"] if path.is_file() else ():
                if other["concurrency"] == size:
                    print(f"  against {path.stem}: {departures(texts, other['answers'])}", flush=True)
        if options.out:
            Path(options.out).write_text(json.dumps({"settings": vars(options), "results": results}))


def main() -> None:
    options = arguments()
    sizes = [int(part) for part in (options.only or options.concurrency).split(",")]
    begun = time.perf_counter()
    engine = (SGLang if options.engine == "sglang" else VLLM)(options, max(sizes))
    engine.run(measure(options, engine, sizes, begun))


if __name__ == "__main__":
    main()
