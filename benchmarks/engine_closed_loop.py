"""How many tokens a second do SGLang (with and without Graft's plugin) and vLLM give, by number of concurrent requests?

    python benchmarks/engine_closed_loop.py --engine sglang --model DIR/model --head DIR/head --ids DIR/ids.json \\
        --warmup DIR/warmup.json --method eagle3 --steps 3 --topk 1 --places 4

`benchmarks/widened_model.py --limit 40 --warmup FILE` writes DIR. Prompts are token ids. Each concurrency has its own
64 prompts (48 for one request at a time, 128 for 64), since Graft remembers answers that it has given. All methods are
asked the same prompts. `--turns N` asks the first `--limit` prompts N times at every concurrency instead, and the
medians count; before each turn the engine forgets its cache and what Graft has learned, and is asked the prompts of
`--warmup` again. Before the first one it is asked them four times more: engines compile some kernels when a new number
of requests or tokens comes up. `--method graft` needs GRAFT_SGLANG=1.

One process measures one setting. `--compare` counts the texts that differ from those that another process wrote with
`--out`. `--sampled` asks all prompts again at temperature 1 with top-p 0.95, with an empty cache and nothing learned.
`--gate FILE` lets engines start together and be measured one after the other: it writes FILE.ready once the engine has
started, and waits for FILE.go.

`--faults N` asks 1,000 requests, of which some are aborted and some retracted, for lack of memory (`--kv-tokens`), and
lets one of every N calls of the plugin's trees fail; 0 is the same without faults. SGLang's kernels have no fp32, and
in bf16 texts differ by chance: compare a run with faults, and a second one without, with a first one without.
`--pause LENGTH` says how long 16 running requests stand still when a prompt of so many tokens arrives.

`--trace SIZES` asks some prompts once more at these concurrencies, with an empty cache, when all else has been
measured, under SGLang's profiler. It prints what part of the time the GPU works, which kernels take it, and before
which kernels it waits. The second and the third quarter of the steps count, in which requests end and others join.

`--chi-square` tests whether tokens that SGLang samples with Graft's plugin are distributed as the target says. It takes
a prompt whose first answer token is almost certain and whose second is not, and draws two tokens 8,000 times. The
prefill draws the first token, so the second one is tested, which the verify draws. The expected probabilities are those
that SGLang returns for that verify, since a prefill's differ in bf16.
"""

import argparse
import asyncio
import gzip
import json
import math
import os
import tempfile
import time
import uuid
from collections import Counter
from collections.abc import AsyncIterator, Callable, Coroutine
from itertools import pairwise, takewhile
from pathlib import Path
from statistics import median
from typing import Any

Answer = tuple[list[int], int]  # token ids, and the number of decode steps (0: the engine does not report it)
CONTEXT = 4096
CAPTURED = (1, 2, 3, 4, 6, 8, 12, 16, 24, 32, 40, 48, 56, 64, 96, 128)  # batch sizes with CUDA graphs
PREFILLED = (*range(64, 1025, 64), *range(1280, 2049, 256))  # tokens of prompts with CUDA graphs; SGLang has 58 sizes
REHEARSALS = 4  # times that the prompts of `--warmup` are asked before the first turn
NUM_DRAWS, DRAWN_AT_ONCE = 8000, 8  # of the chi-square test; few enough at once for trees of full size
NUM_TRIED, TOP_K = 64, 50  # prompts to choose from, and probabilities of each token
EAGLE3 = "LlamaForCausalLMEagle3"  # the class that SGLang loads an EAGLE-3 head with
FAULTS = "ENGINE_CLOSED_LOOP_FAULTS"  # tells SGLang's processes, which import this file, that calls are to fail
NUM_DISTURBED = 1000
STEP_KERNELS = ("VerifyTreeGreedy", "TreeSpeculativeSampling", "get_num_kv_splits")  # one of them runs once a step
GAP = 20  # microseconds in which no kernel runs, from which they are listed
NUM_STREAMS, MOST_PAUSED = 16, 24  # running requests, and the next size with graphs


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--engine", choices=["sglang", "vllm"], required=True)
    parser.add_argument("--model", required=True)
    parser.add_argument("--head", help="an EAGLE-3 head, or a model with --method draft_model")
    parser.add_argument("--ids", required=True, help="a JSON list of prompts as token ids")
    parser.add_argument("--method", choices=["off", "eagle3", "draft_model", "graft"], default="off")
    parser.add_argument("--steps", type=int, default=3, help="draft passes of a round")
    parser.add_argument("--topk", type=int, default=1, help="SGLang: branches of its tree")
    parser.add_argument("--places", type=int, default=4, help="SGLang: tokens verified in a round, with the root")
    parser.add_argument("--warmup", help="a JSON list of other prompts, which are asked first")
    parser.add_argument("--concurrency", default="1,4,16,64", help="numbers of concurrent requests")
    parser.add_argument("--only", help="measure only these of them")
    parser.add_argument("--max-new-tokens", type=int, default=96)
    parser.add_argument("--temperature", type=float, default=0.0)
    parser.add_argument("--top-p", type=float, default=1.0)
    parser.add_argument("--attention", default="triton", help="SGLang's attention backend")
    parser.add_argument("--dtype", default="bfloat16", help="of the model")
    parser.add_argument("--head-quantization", metavar="KIND", help="SGLang: of the draft head, such as fp8")
    parser.add_argument("--seed", type=int, help="each request draws with this seed plus its number")
    parser.add_argument("--stop-id", type=int, default=2)
    parser.add_argument("--limit", type=int, default=64, help="prompts for each concurrency below 64")
    parser.add_argument("--turns", type=int, help="ask the same prompts at every concurrency, this many times")
    parser.add_argument("--deterministic", action="store_true", help="SGLang's deterministic mode")
    parser.add_argument("--no-overlap", action="store_true", help="no overlapped scheduling")
    parser.add_argument("--prefix-cache", action="store_true")
    parser.add_argument("--sampled", action="store_true", help="SGLang: again at temperature 1 with top-p 0.95")
    parser.add_argument("--alone", type=int, help="prompts for one request at a time; three quarters of --limit")
    parser.add_argument("--context", type=int, default=CONTEXT, help="tokens of the longest text")
    parser.add_argument("--kv-tokens", type=int, default=60_000, help="SGLang: tokens in its KV cache")
    parser.add_argument("--gate", type=Path, help="SGLang: a file name, see above")
    parser.add_argument("--log-level", default="error", help="SGLang's")
    parser.add_argument("--faults", type=int, help="SGLang: one of so many calls fails; 0: none")
    parser.add_argument("--pause", type=int, metavar="LENGTH", help="SGLang: the longest pause at such a prompt")
    parser.add_argument("--trace", metavar="SIZES", help="SGLang: which kernels take the time at these concurrencies")
    parser.add_argument("--chi-square", action="store_true", help="SGLang: test the distribution of sampled tokens")
    parser.add_argument("--compare", nargs="*", default=[], help="files that earlier runs wrote with --out")
    parser.add_argument("--out", help="a JSON file for figures and answers")
    options = parser.parse_args()
    if options.engine == "vllm" and options.method == "graft":
        parser.error("Graft has a plugin for SGLang only")
    if (os.environ.get("GRAFT_SGLANG", "") == "1") != (options.method == "graft"):
        parser.error("--method graft needs GRAFT_SGLANG=1, and the other methods must not have it")
    if options.chi_square and options.engine != "sglang":
        parser.error("--chi-square needs log-probabilities that only SGLang returns")
    if options.head_quantization and (options.engine != "sglang" or options.method == "off"):
        parser.error("--head-quantization needs SGLang and a method with a head")
    if options.trace and options.engine != "sglang":
        parser.error("--trace needs SGLang's profiler")
    if options.turns is not None and options.turns < 1:
        parser.error("--turns must be at least 1")
    return options


class SGLang:
    """SGLang's `Engine`, set up as in its server."""

    def __init__(self, options: argparse.Namespace, max_requests: int) -> None:
        import sglang

        self._options = options
        flags: dict[str, Any] = dict(
            model_path=options.model,
            dtype=options.dtype,
            context_length=options.context,
            max_running_requests=max_requests,
            mem_fraction_static=0.85,
            max_total_tokens=options.kv_tokens,
            attention_backend=options.attention,
            grammar_backend="none",
            page_size=1,
            disable_radix_cache=not options.prefix_cache,
            disable_overlap_schedule=options.no_overlap,
            cuda_graph_bs_decode=[size for size in CAPTURED if size <= max_requests],
            cuda_graph_max_bs_decode=max_requests,
            cuda_graph_bs_prefill=list(PREFILLED),
            cuda_graph_max_bs_prefill=PREFILLED[-1],
            enable_deterministic_inference=options.deterministic,
            log_level=options.log_level,
            random_seed=0,
        )
        self.name = options.method
        if options.method != "off":
            self.name += f" steps {options.steps} topk {options.topk} places {options.places}"
            flags |= dict(
                speculative_algorithm="EAGLE3",
                speculative_draft_model_path=head_for_sglang(options.head),
                speculative_num_steps=options.steps,
                speculative_eagle_topk=options.topk,
                speculative_num_draft_tokens=options.places,
            )
            if options.head_quantization is not None:
                flags["speculative_draft_model_quantization"] = options.head_quantization
                self.name += f" head in {options.head_quantization}"
        self._engine = sglang.Engine(**flags)

    def run(self, work: Coroutine[Any, Any, Any]) -> None:
        try:
            if self._options.gate is not None:
                pass_gate(self._options.gate)
            self._engine.loop.run_until_complete(work)
        finally:
            self._engine.shutdown()

    async def ask(self, prompt: list[int], number: int) -> Answer:
        answer = await self.generate(prompt, number)
        return list(answer["output_ids"]), answer["meta_info"].get("spec_verify_ct", 0)

    async def generate(
        self, prompt: list[int], number: int, top_k: int = 0, rid: str | None = None, **more: Any
    ) -> Any:
        """SGLang's answer. top_k: how many log-probabilities it returns at every position."""
        options = self._options
        settings = dict(
            temperature=options.temperature,
            top_p=options.top_p,
            max_new_tokens=options.max_new_tokens,
            stop_token_ids=[options.stop_id],
        )
        if options.seed is not None:
            settings["sampling_seed"] = options.seed + number
        extra: dict[str, Any] = dict(rid=rid)
        if top_k:
            extra |= dict(return_logprob=True, top_logprobs_num=top_k)
        return await self._engine.async_generate(input_ids=prompt, sampling_params=settings | more, **extra)

    async def stream(self, prompt: list[int], count: int) -> AsyncIterator[Any]:
        """SGLang's answer, part by part."""
        settings = dict(temperature=0.0, max_new_tokens=count, ignore_eos=True)
        async for part in await self._engine.async_generate(input_ids=prompt, sampling_params=settings, stream=True):
            yield part

    def abort(self, rid: str) -> None:
        self._engine.tokenizer_manager.abort_request(rid=rid)

    async def forget(self) -> None:
        """Empty the prefix cache, and forget what was learned."""
        while not (await self._engine.tokenizer_manager.flush_cache()).success:  # a batch is still under way
            await asyncio.sleep(0.1)

    async def trace(self, work: Coroutine[Any, Any, Any]) -> list[dict[str, Any]]:
        """What the GPU did during some work: the events of a Chrome trace."""
        from sglang.srt.managers.io_struct import ProfileReq

        with tempfile.TemporaryDirectory() as folder:
            settings = dict(output_dir=folder, activities=["GPU"], with_stack=False, record_shapes=False)
            await self._engine.tokenizer_manager.start_profile(ProfileReq(**settings))
            await work
            await self._engine.tokenizer_manager.stop_profile()  # it returns when the file has been written
            (path,) = Path(folder).glob("*TP-0.trace.json.gz")
            with gzip.open(path) as file:
                return list(json.load(file)["traceEvents"])

    def counters(self) -> tuple[float, float, float]:
        return 0.0, 0.0, 0.0


class VLLM:
    """vLLM's `AsyncLLM`, set up as in its server."""

    def __init__(self, options: argparse.Namespace, max_requests: int) -> None:
        self._options = options
        self.name = "off" if options.method == "off" else f"{options.method} {options.steps} drafts"
        speculation = dict(method=options.method, model=options.head, num_speculative_tokens=options.steps)
        self._flags: dict[str, Any] = dict(
            model=options.model,
            dtype=options.dtype,
            max_model_len=options.context,
            max_num_seqs=max_requests,
            gpu_memory_utilization=0.25,
            kv_cache_memory_bytes=8 * 2**30,
            enable_prefix_caching=options.prefix_cache,
            disable_log_stats=False,
            speculative_config=None if options.method == "off" else speculation,
        )
        if options.no_overlap:
            self._flags |= dict(async_scheduling=False)

    def run(self, work: Coroutine[Any, Any, Any]) -> None:
        from vllm.engine.arg_utils import AsyncEngineArgs
        from vllm.v1.engine.async_llm import AsyncLLM

        async def run() -> None:
            # The engine must be made in the event loop that will ask it.
            self._engine = AsyncLLM.from_engine_args(AsyncEngineArgs(**self._flags))
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
            top_p=options.top_p,
            max_tokens=options.max_new_tokens,
            stop_token_ids=[options.stop_id],
            seed=None if options.seed is None else options.seed + number,
        )
        text = TokensPrompt(prompt_token_ids=prompt)
        async for output in self._engine.generate(text, settings, request_id=str(uuid.uuid4())):
            last = output
        return list(last.outputs[0].token_ids), 0

    async def forget(self) -> None:
        await self._engine.reset_prefix_cache()

    def counters(self) -> tuple[float, float, float]:
        """vLLM's counts of verified chains, drafted tokens and accepted tokens."""
        from vllm.v1.metrics.reader import get_metrics_snapshot

        names = ["num_drafts", "num_draft_tokens", "num_accepted_tokens"]
        found = dict.fromkeys((f"vllm:spec_decode_{name}" for name in names), 0.0)
        for metric in get_metrics_snapshot():
            if metric.name in found:
                found[metric.name] += getattr(metric, "value", 0.0)
        chains, drafted, accepted = found.values()
        return chains, drafted, accepted


def head_for_sglang(head: str) -> str:
    """A copy of the head's folder whose config names the class that SGLang loads it with. Weights are linked."""
    source = Path(head).resolve()
    config = json.loads((source / "config.json").read_text())
    if config.get("architectures") == [EAGLE3]:
        return str(source)
    copy = source.with_name(source.name + "-sglang")
    copy.mkdir(exist_ok=True)
    for file in source.glob("*.safetensors"):
        link = copy / f".{os.getpid()}.{file.name}"
        link.symlink_to(file)
        link.replace(copy / file.name)
    written = copy / f".{os.getpid()}.config.json"
    written.write_text(json.dumps(config | {"architectures": [EAGLE3]}, indent=2))
    written.replace(copy / "config.json")
    return str(copy)


def differences(ours: list[list[int]], theirs: list[list[int]]) -> str:
    """How many texts differ, and after how many equal tokens."""
    pairs = list(zip(ours, theirs, strict=False))
    equal = [takewhile(lambda tokens: tokens[0] == tokens[1], zip(*p, strict=False)) for p in pairs if p[0] != p[1]]
    firsts = sorted(len(list(tokens)) for tokens in equal)
    return f"{len(firsts)} of {len(pairs)} texts differ" + (f", first at {firsts}" if firsts else "")


async def measure(options: argparse.Namespace, engine: SGLang | VLLM, sizes: list[int], begun: float) -> None:
    print(f"engine started in {time.perf_counter() - begun:.1f} s, with the wait at the gate", flush=True)
    prompts = json.loads(Path(options.ids).read_text())
    lessons = json.loads(Path(options.warmup).read_text()) if options.warmup else []
    all_sizes = numbers(options.concurrency)
    if len(lessons) < max(sizes):
        raise SystemExit(f"--warmup must have at least {max(sizes)} prompts, not {len(lessons)}")
    counts = [max(options.limit, 2 * size) if size >= 64 else options.limit for size in all_sizes]
    needed = sum(counts) if options.turns is None else options.limit
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

    async def start_over(size: int) -> None:
        await engine.forget()
        await turn(lessons, size)

    async def measure_sizes() -> None:
        await turn(lessons, min(max(sizes), 8))
        for size in sizes:
            await measure_size(size)

    async def measure_size(size: int) -> None:
        number = all_sizes.index(size)
        first, alone = sum(counts[:number]), 3 * options.limit // 4 if options.alone is None else options.alone
        if options.turns is None:
            asked = prompts[first : first + (counts[number] if size > 1 else alone)]
            await turn(lessons[:size], size)
        else:
            asked = prompts[: options.limit]
            for _ in range(REHEARSALS):
                await start_over(size)
        rates = []
        for _ in range(options.turns or 1):
            if options.turns is not None:
                await start_over(size)
            before = engine.counters()
            seconds, answers = await turn(asked, size)
            rates.append(sum(len(ids) for ids, _ in answers) / seconds)
        # All figures but the rate are those of the last turn.
        chains, drafted, accepted = (now - then for now, then in zip(engine.counters(), before, strict=True))
        texts, steps = [ids for ids, _ in answers], sum(steps for _, steps in answers)
        # The prefill gives the first token of each text, and every step gives one token that was not drafted.
        num_decoded = sum(map(len, texts)) - len(texts)
        steps = steps or num_decoded - accepted
        per_step = num_decoded / steps if steps else 1.0
        drafts = f", {drafted / chains:.2f} drafts each" if chains else ""
        rate = median(rates)
        runs = f" ({', '.join(f'{each:.1f}' for each in rates)})" if len(rates) > 1 else ""
        line = f"{options.engine} {engine.name}, temperature {options.temperature:g}, {size} at once: "
        print(line + f"{rate:.1f} tokens/s{runs}, {per_step:.2f} tokens a step{drafts}", flush=True)
        setting = {"concurrency": size, "temperature": options.temperature}
        results.append(setting | {"rate": rate, "rates": rates, "accepted": per_step, "answers": texts})
        for path in map(Path, options.compare):
            for other in json.loads(path.read_text())["results"] if path.is_file() else ():
                if setting.items() <= other.items():
                    print(f"  against {path.stem}: {differences(texts, other['answers'])}", flush=True)
        if options.out:
            Path(options.out).write_text(json.dumps({"settings": vars(options), "results": results}, default=str))

    await measure_sizes()
    distributions = [(options.temperature, options.top_p)]
    if options.sampled:
        assert isinstance(engine, SGLang)
        await engine.forget()
        distributions.append((1.0, 0.95))
        options.temperature, options.top_p = distributions[-1]
        await measure_sizes()
    traced = sorted(set(numbers(options.trace)) & set(sizes)) if options.trace else []
    # Last, since the profiler may slow down what follows it.
    for options.temperature, options.top_p in distributions:
        for size in traced:
            assert isinstance(engine, SGLang)
            await engine.forget()
            about, *lines = time_of_kernels(await engine.trace(turn(prompts[: 3 * size + 8], size)))
            line = f"{engine.name}, temperature {options.temperature:g}, trace of {size} requests: {about}"
            print("\n".join([line, *lines]), flush=True)


def time_of_kernels(events: list[dict[str, Any]], most: int = 25) -> list[str]:
    """Lines about the second and the third quarter of a trace's steps: how busy the GPU is, its kernels and gaps."""
    done = sorted(
        (event["ts"], event["ts"] + event["dur"], event["name"])
        for event in events
        if event.get("cat") in ("kernel", "gpu_memcpy", "gpu_memset")
    )
    marks = [[begin for begin, _, name in done if mark in name] for mark in STEP_KERNELS]
    starts = next((found for found in marks if len(found) >= 4), None)
    if starts is None:
        return [f"the trace of {len(done)} kernels has fewer than 4 steps"]
    first, last = len(starts) // 4, 3 * len(starts) // 4
    begun, ended, steps = starts[first], starts[last], last - first
    done = [(begin, end, name) for begin, end, name in done if begun <= begin < ended]
    busy, until = 0.0, begun
    gaps, num_gaps = Counter[str](), Counter[str]()
    for begin, end, name in done:
        if begin - until >= GAP:
            gaps[name] += begin - until
            num_gaps[name] += 1
        busy += max(end - max(begin, until), 0.0)
        until = max(until, end)
    times, counts = Counter[str](), Counter(name for *_, name in done)
    for begin, end, name in done:
        times[name] += end - begin
    step = f"{(ended - begun) / steps / 1e3:.2f} ms a step, {len(done) / steps:.0f} kernels a step"
    lines = [f"{steps} of {len(starts)} steps: {step}, the GPU works {busy / (ended - begun):.1%} of the time"]
    for name, spent in times.most_common(most):
        lines.append(f"  {spent / steps:8.1f} us a step, {counts[name] / steps:6.1f} times: {name[:120]}")
    for name, spent in gaps.most_common(most // 2):
        lines.append(f"  {spent / steps:8.1f} us a step, {num_gaps[name] / steps:6.1f} times, a gap before {name[:99]}")
    return lines


def pass_gate(path: Path) -> None:
    """Say that the engine has started, and wait until it may be measured."""
    Path(f"{path}.ready").touch()
    while not Path(f"{path}.go").exists():
        time.sleep(0.05)


async def disturb(options: argparse.Namespace, engine: SGLang) -> None:
    """1,000 requests that join, are aborted, are retracted and finish."""
    import torch

    prompts, room, last = json.loads(Path(options.ids).read_text()), asyncio.Semaphore(options.limit), {}

    async def ask(number: int) -> list[int]:
        async with room:
            rid, is_aborted = f"request {number}.", number % 10 == 3
            length = 8 + 7 * number % 41
            # A prompt that is asked again has another end, so that none is the same.
            prompt = [*prompts[number % len(prompts)], number // len(prompts) + 5]
            asked = asyncio.create_task(
                engine.generate(prompt, number, rid=rid, max_new_tokens=4 * length if is_aborted else length)
            )
            if is_aborted:
                await asyncio.sleep(0.01 * (number % 7))
                engine.abort(rid)
            answer = last[number] = await asked
            return list(answer.get("output_ids", ()))[:length]  # one that never ran has none

    await asyncio.gather(*(ask(number) for number in range(options.limit)))
    await engine.forget()
    free, _ = torch.cuda.mem_get_info()
    begun = time.perf_counter()
    texts = await asyncio.gather(*(ask(number) for number in range(NUM_DISTURBED)))
    seconds = time.perf_counter() - begun
    await engine.forget()
    lost = (free - torch.cuda.mem_get_info()[0]) / 2**20
    retracted = sum(answer["meta_info"].get("num_retractions", 0) for answer in last.values())
    reasons = Counter((answer["meta_info"]["finish_reason"] or {}).get("type") for answer in last.values())
    told = f"faults 1 in {options.faults}" if options.faults else "no faults"
    ends = f"{dict(reasons)}, {retracted} retractions, {lost:.0f} MB of GPU memory lost"
    print(f"{told}: {len(texts)} requests in {seconds:.0f} s, {ends}", flush=True)
    for path in map(Path, options.compare):
        pairs = list(zip(texts, json.loads(path.read_text())["texts"], strict=True))
        # An aborted text is compared as far as both have it.
        cut = [(ours[: len(other)], other[: len(ours)]) for ours, other in pairs]
        ended = [number for number in range(NUM_DISTURBED) if number % 10 != 3]
        lengths = sum(len(pairs[number][0]) != len(pairs[number][1]) for number in ended)
        found = differences(*map(list, zip(*cut, strict=True)))
        print(f"  against {path.stem}: {found}; {lengths} that were not aborted have another length", flush=True)
    if options.out:
        Path(options.out).write_text(json.dumps({"texts": texts}))


def let_calls_fail(every: int) -> None:
    """Let one of every so many calls of the plugin's trees fail, from the first request on."""
    from graft.integrations.sglang.trees import Trees

    calls = 0

    def failing(name: str, function: Callable[..., Any]) -> Callable[..., Any]:
        def called(self: Any, *args: Any, **more: Any) -> Any:
            nonlocal calls
            calls += bool(calls) or name == "see"
            if calls and calls % every == 0:
                raise RuntimeError(f"planted in {name}")
            return function(self, *args, **more)

        return called

    names = ("see", "load", "propose", "arrays", "likeliest", "rank_successors", "draw", "finish")
    for name in (*names, "find_head", "lose_head"):
        setattr(Trees, name, failing(name, getattr(Trees, name)))


async def measure_pause(options: argparse.Namespace, engine: SGLang) -> None:
    """The longest time between two parts of a text, over running requests, with and without a long prompt."""
    prompts = json.loads(Path(options.ids).read_text())
    long_prompt = [token for prompt in prompts for token in prompt]
    long_prompt = (long_prompt * (options.pause // len(long_prompt) + 1))[: options.pause]

    async def gaps_of(prompt: list[int], count: int) -> list[tuple[float, float]]:
        """When each part came, and how long after the one before."""
        times = [time.perf_counter() async for _ in engine.stream(prompt, count)]
        return [(now, now - before) for before, now in pairwise(times)]

    async def joins(after: float) -> tuple[float, float]:
        await asyncio.sleep(after)
        begun = time.perf_counter()
        async for _ in engine.stream(long_prompt, 8):
            pass
        return begun, time.perf_counter()

    await asyncio.gather(*(gaps_of(prompt, 32) for prompt in prompts[:NUM_STREAMS]), joins(0.1))  # compiles kernels
    await engine.forget()
    running = (gaps_of(prompt, 700) for prompt in prompts[:NUM_STREAMS])
    *found, (begun, ended) = await asyncio.gather(*running, joins(1.0))
    gaps = [(begun <= at <= ended + 0.1, 1e3 * gap) for all_of in found for at, gap in all_of]
    while_there = max((gap for is_there, gap in gaps if is_there), default=0.0)
    without = max((gap for is_there, gap in gaps if not is_there), default=0.0)
    print(
        f"{engine.name}: the longest pause of {NUM_STREAMS} requests is {while_there:.0f} ms while a prompt of "
        f"{options.pause} tokens is read in {ended - begun:.2f} s, else {without:.0f} ms",
        flush=True,
    )


async def draw_and_compare(options: argparse.Namespace, engine: SGLang) -> None:
    """The chi-square test of sampled tokens."""
    import torch

    prompt, first = await choose_prompt(options, engine)
    room, begun = asyncio.Semaphore(DRAWN_AT_ONCE), time.perf_counter()

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


async def choose_prompt(options: argparse.Namespace, engine: SGLang) -> tuple[list[int], int]:
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


def numbers(text: str) -> list[int]:
    return [int(part) for part in text.split(",")]


def main() -> None:
    options = parse()
    if options.chi_square:
        options.prefix_cache, options.temperature, options.max_new_tokens = True, 1.0, 2
        engine = SGLang(options, DRAWN_AT_ONCE)
        engine.run(draw_and_compare(options, engine))
        return
    if options.pause is not None:
        engine = SGLang(options, MOST_PAUSED)
        engine.run(measure_pause(options, engine))
        return
    if options.faults is not None:
        if options.faults:
            os.environ[FAULTS] = str(options.faults)
        engine = SGLang(options, options.limit)
        engine.run(disturb(options, engine))
        return
    sizes = numbers(options.only or options.concurrency)
    begun = time.perf_counter()
    engine = (SGLang if options.engine == "sglang" else VLLM)(options, max(sizes))
    engine.run(measure(options, engine, sizes, begun))


if __name__ == "__mp_main__" and FAULTS in os.environ:  # in a process of SGLang's
    let_calls_fail(int(os.environ[FAULTS]))

if __name__ == "__main__":
    main()
