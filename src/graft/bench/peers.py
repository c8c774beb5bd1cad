"""Peers: transformers' own decoding methods, counted and timed like Graft's.

In Graft, a prompt's last token belongs to the first round. So hooks on the model split the first forward before that
token: the first part is timed as prefill, and all later forwards as decoding.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from transformers import PreTrainedModel

from graft.bench.methods import Answer, Method
from graft.bench.settings import ASSISTED
from graft.model.sampler import SamplingSettings
from graft.quiet import quiet_transformers
from graft.request.stats import Stats
from graft.settings import require

NUM_LOOKUP_TOKENS = 10  # as in transformers' documentation of prompt lookup


class Peer(Method):
    """transformers' `generate` as a benchmark method."""

    def __init__(self, name: str, model: PreTrainedModel, source: str | None = None, **options: Any) -> None:
        """source: the name of the proposer, if there is one. options: for `generate`."""
        self.name = name
        self._model = model
        self._assistant: PreTrainedModel | None = options.get("assistant_model")
        self._source = source
        self._options = options

    def answer(self, prompts: Sequence[Sequence[int]], settings: SamplingSettings) -> list[Answer]:
        return [self._answer(prompt, settings) for prompt in prompts]

    def is_exact(self, settings: SamplingSettings) -> bool:
        return settings.temperature == 0  # it samples with other random numbers

    def _answer(self, prompt: Sequence[int], settings: SamplingSettings) -> Answer:
        inputs = torch.tensor([list(prompt)], device=self._model.device)
        assert settings.seed is not None
        torch.manual_seed(settings.seed)
        watched = partial(_watched, num_prefill=len(prompt) - 1)
        with quiet_transformers(), watched(self._model) as target, watched(self._assistant) as assistant:
            start = time.perf_counter()
            output: Any = self._model.generate(  # type: ignore[operator]
                inputs,
                attention_mask=torch.ones_like(inputs),
                max_new_tokens=settings.max_new_tokens,
                repetition_penalty=1.0,  # the model's generation config may set another
                eos_token_id=list(settings.stop_token_ids) or None,
                pad_token_id=settings.stop_token_ids[0] if settings.stop_token_ids else 0,
                **_sampling(settings),
                **self._options,
            )
            ids = output[0, len(prompt) :].tolist()
            seconds = time.perf_counter() - start
        return Answer(ids, self._stats(len(ids), seconds, target, assistant))

    def _stats(self, num_tokens: int, seconds: float, target: _Watch, assistant: _Watch) -> Stats:
        prefill = target.prefill_seconds + assistant.prefill_seconds
        decode = seconds - prefill
        phases = {"draft": assistant.seconds, "verify": target.seconds}
        phases = {phase: spent for phase, spent in phases.items() if spent}
        stats = Stats(
            rounds=target.num_forwards,
            tokens=num_tokens,
            accepted=max(0, num_tokens - target.num_forwards),  # each forward adds one token that was not proposed
            draft_passes=assistant.num_forwards,
            nodes=target.num_tokens - target.num_forwards,
            prefill_seconds=prefill,
            decode_seconds=decode,
            seconds_by_phase={**phases, "host": max(0.0, decode - sum(phases.values()))},
        )
        if self._source is not None:
            stats.accepted_by_source = Counter({self._source: stats.accepted})
            stats.proposed_by_source = Counter({self._source: stats.nodes})
        return stats


def make_peer(name: str, model: PreTrainedModel, assistant: PreTrainedModel | None = None) -> Peer:
    """The peer with this name. `hf-assisted` needs an assistant with the model's vocabulary."""
    if name == "hf":
        return Peer(name, model)
    if name == "hf-lookup":
        return Peer(name, model, "lookup", prompt_lookup_num_tokens=NUM_LOOKUP_TOKENS)
    assert name == ASSISTED and assistant is not None
    sizes = [m.config.get_text_config().vocab_size for m in (model, assistant)]
    require(
        sizes[0] == sizes[1],
        f"the assistant has {sizes[1]} tokens and the model {sizes[0]}: take one with the model's tokenizer",
    )
    return Peer(name, model, "assistant", assistant_model=assistant)


class _Watch:
    """Counts and times a model's forwards. Prefill, up to the prompt's last token, is timed separately."""

    def __init__(self, num_prefill: int) -> None:
        self.num_forwards = 0
        self.num_tokens = 0
        self.seconds = 0.0
        self.prefill_seconds = 0.0
        self._num_prefill = num_prefill  # prompt tokens still to prefill
        self._start = 0.0

    def before(self, model: Any, arguments: tuple[Any, ...], keywords: dict[str, Any]) -> Any:
        if self._num_prefill:
            keywords = self._prefill(model, keywords, self._num_prefill)
            self._num_prefill = 0
        self.num_forwards += 1
        self.num_tokens += keywords["input_ids"].shape[1]
        self._start = time.perf_counter()
        return arguments, keywords

    def after(self, model: Any, arguments: tuple[Any, ...], output: Any) -> None:
        _synchronize(model.device)  # costs nothing: the host reads the logits next
        self.seconds += time.perf_counter() - self._start

    def _prefill(self, model: Any, keywords: dict[str, Any], count: int) -> dict[str, Any]:
        """Prefill the first `count` tokens, and return the arguments of the remaining forward."""
        start = time.perf_counter()
        by_token = [k for k in ("input_ids", "position_ids") if keywords.get(k) is not None]
        first = {**keywords, **{key: keywords[key][..., :count] for key in by_token}}
        if keywords.get("attention_mask") is not None:  # the remaining forward needs all of it, for the cache too
            first["attention_mask"] = keywords["attention_mask"][:, :count]
        if "logits_to_keep" in keywords:
            first["logits_to_keep"] = 1
        model.forward(**first)
        _synchronize(model.device)
        self.prefill_seconds = time.perf_counter() - start
        return {**keywords, **{key: keywords[key][..., count:] for key in by_token}}


@contextmanager
def _watched(model: PreTrainedModel | None, num_prefill: int) -> Iterator[_Watch]:
    watch = _Watch(num_prefill)
    if model is None:
        yield watch
        return
    hooks = [
        model.register_forward_pre_hook(watch.before, with_kwargs=True),
        model.register_forward_hook(watch.after),
    ]
    try:
        yield watch
    finally:
        for hook in hooks:
            hook.remove()


def _sampling(settings: SamplingSettings) -> dict[str, Any]:
    if settings.temperature == 0:
        return {"do_sample": False}
    truncation = {"top_k": 0, "top_p": settings.top_p, "min_p": settings.min_p or None}
    return {"do_sample": True, "temperature": settings.temperature, **truncation}


def _synchronize(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)
