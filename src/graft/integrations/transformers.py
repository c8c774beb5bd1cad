"""`model.generate(**inputs, custom_generate=graft.decode)`: transformers' own arguments, Graft's rounds.

The logits processors and stopping criteria that `generate` prepared are called for every token in order, with
exactly the tokens before it, so all of them mean what they mean in transformers.
"""

from __future__ import annotations

from collections.abc import Hashable
from collections.abc import Sequence as SequenceOf
from copy import copy
from typing import Any, cast

import torch
from torch import Tensor
from transformers import GenerationConfig, LogitsProcessorList, PreTrainedModel, StoppingCriteriaList
from transformers.generation import GenerateDecoderOnlyOutput
from transformers.generation.logits_process import (
    EncoderNoRepeatNGramLogitsProcessor,
    EncoderRepetitionPenaltyLogitsProcessor,
    PrefixConstrainedLogitsProcessor,
    SynthIDTextWatermarkLogitsProcessor,
    UnbatchedClassifierFreeGuidanceLogitsProcessor,
)

from graft.engine import Engine
from graft.errors import GraftError
from graft.model.sampler import SamplingSettings, gumbel_noise
from graft.model.support import is_tensor_parallel
from graft.model.verified import Step
from graft.sequence import FinishReason, Sequence
from graft.settings import require
from graft.spec_decode.policies import DEFAULT_POLICY

_WHOLE_BATCH = (  # processors that identify a row by its index in the batch, or keep state for all rows
    EncoderNoRepeatNGramLogitsProcessor,
    EncoderRepetitionPenaltyLogitsProcessor,
    PrefixConstrainedLogitsProcessor,
    SynthIDTextWatermarkLogitsProcessor,
    UnbatchedClassifierFreeGuidanceLogitsProcessor,
)
# What `generate` passes beside its own arguments; decoding computes these by itself.
_KNOWN_INPUTS = {"attention_mask", "position_ids", "past_key_values", "use_cache", "logits_to_keep", "cache_position"}


def decode(
    model: PreTrainedModel,
    input_ids: Tensor,
    logits_processor: LogitsProcessorList,
    stopping_criteria: StoppingCriteriaList,
    generation_config: GenerationConfig,
    policy: str = DEFAULT_POLICY,
    **model_kwargs: Any,
) -> Tensor | GenerateDecoderOnlyOutput:
    """Decodes for `model.generate`; `policy=` may be given there too. Greedy text is that of `generate`.

    Sampling follows torch's seed (`torch.manual_seed`) and the same distribution, with draws of its own.
    """
    whole = not is_tensor_parallel(model)
    require(whole, "graft.decode runs in one process, and the model is tensor parallel: give the model to graft.load")
    _check(input_ids, generation_config, logits_processor, model_kwargs)
    engine = _engine_of(model, policy)
    max_new_tokens = generation_config.max_length - input_ids.shape[1]
    keep_scores = bool(generation_config.output_scores or generation_config.output_logits)
    batch = [
        _CriteriaSequence(padded, prompt, max_new_tokens, stopping_criteria, keep_scores)
        for padded, prompt in zip(input_ids, _unpadded(input_ids, model_kwargs.get("attention_mask")), strict=True)
    ]
    for sequence in batch:
        engine.check_room(sequence)
    chooser = _ProcessorChooser(batch, logits_processor, bool(generation_config.do_sample))
    for _ in engine.rounds(list(batch), chooser):
        pass

    longest = max(len(sequence.new_ids) for sequence in batch)
    pad = generation_config._pad_token_tensor
    answers = input_ids.new_full((len(batch), longest), 0 if pad is None else int(pad))
    for row, sequence in enumerate(batch):
        answers[row, : len(sequence.new_ids)] = torch.tensor(sequence.new_ids)
    sequences = torch.cat([input_ids, answers], dim=1)
    if not generation_config.return_dict_in_generate:
        return sequences
    return GenerateDecoderOnlyOutput(
        sequences=cast(torch.LongTensor, sequences),
        scores=_by_step([s.scores for s in batch], longest) if generation_config.output_scores else None,
        logits=_by_step([s.logits for s in batch], longest) if generation_config.output_logits else None,
    )


class _CriteriaSequence(Sequence):
    """A sequence that ends when transformers' stopping criteria say so."""

    def __init__(
        self,
        padded: Tensor,
        prompt: list[int],
        max_new_tokens: int,
        criteria: StoppingCriteriaList,
        keep_scores: bool,
    ) -> None:
        super().__init__(prompt, SamplingSettings(max_new_tokens=max_new_tokens))
        self._padded = padded
        self._criteria = criteria
        self._keep_scores = keep_scores
        self._drawn: list[int] = []  # tokens chosen; may run past the end of the answer by those of its last round
        self._all_scores: list[Tensor] = []
        self._all_logits: list[Tensor] = []

    @property
    def scores(self) -> list[Tensor]:
        return self._all_scores[: len(self.new_ids)]

    @property
    def logits(self) -> list[Tensor]:
        return self._all_logits[: len(self.new_ids)]

    def choose(self, logits: Tensor, processors: LogitsProcessorList, seed: int | None) -> int:
        scores = processors(self._so_far(self._drawn), cast(torch.FloatTensor, logits[None].clone()))[0]
        noise: Tensor | float = 0.0
        if seed is not None:
            position = torch.tensor([len(self._drawn)], device=scores.device)
            noise = gumbel_noise(torch.tensor([seed], device=scores.device), position, len(scores))[0]
        token = int((scores + noise).argmax())
        self._drawn.append(token)
        if self._keep_scores:
            self._all_scores.append(scores)
            self._all_logits.append(logits)
        return token

    def _may_end_with(self, tokens: SequenceOf[int]) -> bool:
        return True

    def _ending(self, token: int) -> FinishReason | None:
        ended = bool(self._criteria(self._so_far(self.new_ids), None).item())
        return "stop" if ended else "length" if self.num_remaining == 0 else None

    def _so_far(self, new: SequenceOf[int]) -> torch.LongTensor:
        """[1, length] as `generate` would hold it: the padded prompt, then the new tokens."""
        return cast(torch.LongTensor, torch.cat([self._padded, self._padded.new_tensor(new)])[None])


class _ProcessorChooser:
    """Chooses by transformers' logits processors, row by row: rows of one batch are not equally long here."""

    def __init__(self, batch: list[_CriteriaSequence], processors: LogitsProcessorList, do_sample: bool) -> None:
        self._rows = batch
        self._processors = processors
        self._seeds = torch.randint(2**62, (len(batch),)).tolist() if do_sample else [None] * len(batch)

    def choose(self, logits: Tensor, walking: SequenceOf[bool]) -> Tensor:
        tokens = [
            sequence.choose(row, self._processors, seed) if walks else 0
            for sequence, row, seed, walks in zip(self._rows, logits, self._seeds, walking, strict=True)
        ]
        return torch.tensor(tokens)

    def choose_everywhere(self, logits: Tensor, step: Step) -> None:
        """Does nothing: processors need the tokens before, which differ from node to node."""

    def move_on(self, counts: SequenceOf[int]) -> None:
        raise NotImplementedError("nothing is chosen everywhere")

    def keeping(self, rows: SequenceOf[int]) -> _ProcessorChooser:
        return self._with([self._rows[row] for row in rows], [self._seeds[row] for row in rows])

    def joining(self, other: _ProcessorChooser) -> _ProcessorChooser:
        return self._with(self._rows + other._rows, self._seeds + other._seeds)

    def _with(self, rows: list[_CriteriaSequence], seeds: list[int | None]) -> _ProcessorChooser:
        there = copy(self)
        there._rows, there._seeds = rows, seeds
        return there


class _EngineSlot:
    """Keeps a model's engines, and what they learned, with the model itself, for as long as it lives.

    A copied or pickled model starts with an empty slot.
    """

    def __init__(self) -> None:
        self.engines: dict[Hashable, Engine] = {}

    def __reduce__(self) -> tuple[type[_EngineSlot], tuple[()]]:
        return (_EngineSlot, ())


def _engine_of(model: PreTrainedModel, policy: str) -> Engine:
    slot = model.__dict__.setdefault("_graft_engines", _EngineSlot())
    # A model that has been moved, cast or resized since is another one to what was learned.
    key = (policy, model.device, model.dtype, model.get_input_embeddings().weight.shape)
    if key not in slot.engines:
        slot.engines[key] = Engine(model, policy=policy)
    return slot.engines[key]


def _check(
    input_ids: Tensor, config: GenerationConfig, processors: LogitsProcessorList, model_kwargs: dict[str, Any]
) -> None:
    require(config.num_beams in (None, 1), "graft.decode decodes greedily or by sampling, not with beams: num_beams=1")
    for name in ("output_attentions", "output_hidden_states"):
        require(not getattr(config, name), f"graft.decode does not return {name.removeprefix('output_')}")
    for name, value in model_kwargs.items():
        require(name in _KNOWN_INPUTS or value is None, f"graft.decode does not take {name!r}")
    cache = model_kwargs.get("past_key_values")
    require(cache is None or cache.get_seq_length() == 0, "graft.decode starts from the whole prompt, not from a cache")
    for processor in processors:
        if len(input_ids) > 1 and isinstance(processor, _WHOLE_BATCH):
            raise GraftError(f"graft.decode takes {type(processor).__name__} for one prompt at a time only")


def _unpadded(input_ids: Tensor, attention_mask: Tensor | None) -> list[list[int]]:
    """Each row's prompt without the padding on its left."""
    if attention_mask is None:
        return input_ids.tolist()
    mask = attention_mask.bool()
    require(bool((mask[:, 1:] >= mask[:, :-1]).all() and mask[:, -1].all()), "prompts must be padded on the left")
    return [row[keep].tolist() for row, keep in zip(input_ids, mask, strict=True)]


def _by_step(rows: list[list[Tensor]], num_steps: int) -> Any:
    """One [B, V] tensor per step; a row that has ended has minus infinity everywhere."""
    nothing = torch.full_like(rows[0][0], -torch.inf)
    return tuple(torch.stack([row[step] if step < len(row) else nothing for row in rows]) for step in range(num_steps))
