"""Batches whose prompts are read, ready for their first round; and what their steps were captured in."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from graft import SamplingSettings
from graft.engine import Engine, PrefillChunk
from graft.model.decoder_layers import layers_of
from graft.request.batch import Batch
from graft.request.sequence import Sequence
from graft.spec_decode.planner import Plan
from graft.spec_decode.policies import MAX_BUDGET


def opened(engine: Engine, sequences: list[Sequence]) -> Batch:
    """A batch of these sequences, of which nothing is read yet."""
    num_slots = max(each.num_prompt_tokens + each.settings.most_new_tokens for each in sequences) + MAX_BUDGET + 1
    return engine.batch_of(sequences, engine.target.open(len(sequences), num_slots))


def prefill(engine: Engine, batch: Batch) -> None:
    """Reads every prompt but its last token, which is the first round's root."""
    for row in range(len(batch.sequences)):
        while (chunk := batch.next_chunk(row, engine.target.chunk_size)).tokens:
            engine.prefill([PrefillChunk(batch, row, chunk)])


def prefilled(engine: Engine, *prompts: list[int], max_new_tokens: int = 30) -> Batch:
    """A batch of these prompts, a row each, ready for its first round."""
    settings = SamplingSettings(max_new_tokens=max_new_tokens)
    batch = opened(engine, [each for prompt in prompts for each in engine.new_sequences(prompt, settings)])
    prefill(engine, batch)
    return batch


@contextmanager
def counting_tokens(model: Any) -> Iterator[list[int]]:
    """The number of tokens of every forward that a model makes meanwhile."""
    sizes: list[int] = []

    def count(layer: Any, args: Any, kwargs: Any) -> None:
        sizes.append(args[0].shape[1])

    hook = layers_of(model)[0].register_forward_pre_hook(count, with_kwargs=True)
    yield sizes
    hook.remove()


def graphs_of(target: Any) -> Any:
    """What a captured target has made, and what went wrong."""
    return target._graphs


@contextmanager
def plain_rounds(engine: Engine) -> Iterator[None]:
    """Rounds that propose nothing, although rows speculate."""
    rounds: Any = engine.device_rounds
    rounds.plan = lambda batch, kinds, padded_rows, num_prefill: Plan(padded_rows, 0, ())
    yield
    del rounds.plan
