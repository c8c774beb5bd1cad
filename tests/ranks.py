"""Several processes that run one function each, as `torchrun` would start them; and what the tests let them do."""

from __future__ import annotations

import atexit
import json
import multiprocessing
import os
import signal
import socket
import sys
import time
import traceback
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM, PreTrainedModel
from transformers.distributed import DistributedConfig

import graft
from graft.cli import main
from graft.engine import Engine
from proposers import Oracle, RandomTrees
from tiny import BYTE_VOCAB, byte_tokenizer, tiny_model

PROMPTS = [[5, 9, 14, 3, 9, 14, 3, 9], [33, 2, 40], list(range(3, 60)) * 3]


@dataclass(frozen=True)
class Ended:
    """How a rank ended. seconds: since all were started."""

    status: int
    out: str
    err: str
    seconds: float
    result: Any


def run_ranks(folder: Path, function: Callable[..., Any], *arguments: Any, size: int = 2) -> list[Ended]:
    """Runs `function(*arguments)` in so many processes, and waits for all: a test's timeout ends one that hangs."""
    context = multiprocessing.get_context("forkserver")  # which has imported everything: a rank starts at once
    context.set_forkserver_preload(["graft.loading", "graft.hub.load", "transformers.models.llama.modeling_llama"])
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    facts = {"WORLD_SIZE": size, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
    folder.mkdir(parents=True, exist_ok=True)
    ranks = [
        context.Process(
            target=_rank, args=(folder, {**facts, "RANK": rank, "LOCAL_RANK": rank}, function, arguments), daemon=True
        )
        for rank in range(size)
    ]
    for rank in ranks:
        rank.start()
    start, ended = time.monotonic(), {}
    while len(ended) < size:
        for number, rank in enumerate(ranks):
            if number not in ended and rank.exitcode is not None:
                ended[number] = time.monotonic() - start
        time.sleep(0.02)
    return [_ended(folder, number, rank.exitcode, ended[number]) for number, rank in enumerate(ranks)]


def _ended(folder: Path, number: int, status: int | None, seconds: float) -> Ended:
    out, err, result = (folder / f"{number}.{kind}" for kind in ("out", "err", "json"))
    assert status is not None
    found = json.loads(result.read_text()) if result.exists() else None
    return Ended(status, out.read_text(), err.read_text(), seconds, found)


def _rank(folder: Path, facts: dict[str, Any], function: Callable[..., Any], arguments: tuple[Any, ...]) -> None:
    """A process from its start to its exit, as Python runs a script."""
    os.environ.update({name: str(value) for name, value in facts.items()})
    number = facts["RANK"]
    for stream, kind in ((sys.stdout, "out"), (sys.stderr, "err")):
        os.dup2(os.open(folder / f"{number}.{kind}", os.O_CREAT | os.O_WRONLY), stream.fileno())
    torch.set_num_threads(1)
    status = 0
    try:
        (folder / f"{number}.json").write_text(json.dumps(function(*arguments)))
    except SystemExit as exit:
        status = int(exit.code or 0)
    except BaseException as error:
        sys.last_value = error
        traceback.print_exc()
        status = 1
    atexit._run_exitfuncs()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(status)


# What ranks do


def split_model(folder: str) -> PreTrainedModel:
    """As a user's script would load it."""
    config = DistributedConfig(tp_plan="auto")
    return AutoModelForCausalLM.from_pretrained(folder, distributed_config=config, dtype=torch.float32)


def expected_of(model: PreTrainedModel, num_tokens: int) -> list[list[int]]:
    """transformers' own greedy answers."""
    answers = []
    for prompt in PROMPTS:
        ids = torch.tensor([prompt])
        options = {"max_new_tokens": num_tokens, "do_sample": False, "attention_mask": torch.ones_like(ids)}
        answers.append(model.generate(ids, **options)[0, len(prompt) :].tolist())
    return answers


def texts_of(model: PreTrainedModel, expected: list[list[int]], num_tokens: int, draft: str | None) -> dict[str, Any]:
    """Answers under several policies. Rank 0's; the others do not come back."""
    policy = "graft" if draft is None else "dense"
    engine = graft.load(model, tokenizer=byte_tokenizer(), policy=policy, draft=draft, profile=None)
    oracle = Engine(model, policy=Oracle(expected[0], len(PROMPTS[0])))
    trees = Engine(model, policy=RandomTrees(vocab_size=BYTE_VOCAB))
    short = {"max_new_tokens": num_tokens, "ignore_eos": True}
    guided, greedy = oracle.generate(PROMPTS[0], **short), engine.generate_batch(PROMPTS, **short)
    return {
        "greedy": [answer.ids for answer in greedy],
        "accepted": sum(answer.stats.accepted for answer in greedy),
        "drafts": sum(answer.stats.draft_passes for answer in greedy),
        "oracle": guided.ids,
        "oracle_accepted": guided.stats.accepted,
        "sampled": sampled_of(engine, num_tokens),
        "sampled_random": sampled_of(trees, num_tokens),
        "mode": engine.target.mode,
    }


def sampled_of(engine: Engine, num_tokens: int) -> list[list[list[int]]]:
    """Two answers to each prompt, which share its reading."""
    options = {"temperature": 0.9, "top_p": 0.95, "seed": 11, "n": 2, "ignore_eos": True}
    answers = engine.generate_batch(PROMPTS, max_new_tokens=num_tokens, **options)
    return [[choice.ids for choice in answer.choices] for answer in answers]


def compare(folder: str, num_tokens: int, draft: str | None) -> dict[str, Any]:
    model = split_model(folder)
    expected = expected_of(model, num_tokens)
    return {"transformers": expected, **texts_of(model, expected, num_tokens, draft)}


def compare_trees(folder: str, num_tokens: int) -> dict[str, Any]:
    """Greedy answers of transformers and of random trees."""
    model = split_model(folder)
    expected = expected_of(model, num_tokens)
    graft.load(model, draft=None, profile=None)
    trees = Engine(model, policy=RandomTrees(vocab_size=BYTE_VOCAB))
    answers = trees.generate_batch(PROMPTS, max_new_tokens=num_tokens, ignore_eos=True)
    return {"transformers": expected, "trees": [answer.ids for answer in answers], "plan": model.tp_plan}


def command_line(*words: str) -> None:
    sys.argv = ["graft", *words]
    main()


def by_name(folder: str) -> None:
    graft.load(folder, draft=None, profile=None, tensor_parallel=True)


def fail_in_a_step(folder: str, failing: int, at_call: int, lingers: bool = False) -> str:
    """One rank raises inside a layer. lingers: rank 0 goes on living, as a program does that catches errors."""
    model = split_model(folder)
    if int(os.environ["RANK"]) == failing:
        layer, calls = model.model.layers[1].mlp, [0]
        forward = layer.forward

        def break_down(*args: Any, **kwargs: Any) -> Any:
            calls[0] += 1
            if calls[0] == at_call:
                raise MemoryError("no memory left here")
            return forward(*args, **kwargs)

        layer.forward = break_down
    engine = graft.load(model, draft=None, profile=None)
    try:
        engine.generate(PROMPTS[0], max_new_tokens=40)
    except Exception as error:
        if not lingers:
            raise
        time.sleep(6)
        try:
            engine.generate(PROMPTS[0], max_new_tokens=40)
        except graft.GraftError as again:
            return f"{type(error).__name__}, then {again}"
    raise AssertionError("nothing failed")


def vanish(folder: str, which: int) -> None:
    """One rank is killed, as by a machine without memory."""
    model = split_model(folder)
    if int(os.environ["RANK"]) == which:
        calls, layer = [0], model.model.layers[1].mlp
        forward = layer.forward

        def die(*args: Any, **kwargs: Any) -> Any:
            calls[0] += 1
            if calls[0] == 4:
                os.kill(os.getpid(), signal.SIGKILL)
            return forward(*args, **kwargs)

        layer.forward = die
    graft.load(model, draft=None, profile=None).generate(PROMPTS[0], max_new_tokens=40)


def fail_between_steps(folder: str) -> None:
    graft.load(folder, draft=None, profile=None, tensor_parallel=True)
    raise KeyError("of the user's own script")


def one_cannot_load(folder: str, other: str) -> None:
    by_name(other if int(os.environ["RANK"]) == 1 else folder)


def engine_on_every_rank(folder: str) -> None:
    Engine(split_model(folder))


def custom_generate(folder: str) -> None:
    split_model(folder).generate(torch.tensor([[5, 6]]), custom_generate=graft.decode, max_new_tokens=4)


def small_model_folder(folder: Path, name: str = "llama", **changes: object) -> str:
    """A model whose vocabulary is as large as its tokenizer's, and one more, so that two can share it."""
    tiny_model(name, **{"vocab_size": BYTE_VOCAB + 1, "max_position_embeddings": 512, **changes}).save_pretrained(
        folder
    )
    byte_tokenizer().save_pretrained(folder)
    return str(folder)
