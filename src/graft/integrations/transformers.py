"""`model.generate(**inputs, custom_generate=graft.decode)`: transformers' own arguments, Graft's rounds.

The logits processors and stopping criteria that `generate` prepared are called for every token in order, with exactly
the tokens before it, so they mean the same as in transformers. Tokens are sampled from torch's own generator in the
same way as `generate` does, and the generator ends in the same state.
"""

from __future__ import annotations

import itertools
import math
import sys
import warnings
from abc import ABC, abstractmethod
from collections.abc import Hashable
from collections.abc import Sequence as SequenceOf
from copy import copy
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

import torch
from torch import Tensor
from transformers import DynamicCache, GenerationConfig, LogitsProcessorList, PreTrainedModel, StoppingCriteriaList
from transformers.generation import GenerateDecoderOnlyOutput, GenerationMode, StopStringCriteria
from transformers.generation.logits_process import (
    EncoderNoRepeatNGramLogitsProcessor,
    EncoderRepetitionPenaltyLogitsProcessor,
    MinPLogitsWarper,
    PrefixConstrainedLogitsProcessor,
    SynthIDTextWatermarkLogitsProcessor,
    TemperatureLogitsWarper,
    UnbatchedClassifierFreeGuidanceLogitsProcessor,
)

from graft.engine import Engine
from graft.errors import GraftError
from graft.loading import load
from graft.model.noise import ComingDraws, RowDraws, draft_temperature, gumbel_noise
from graft.model.overrides import evaluating
from graft.model.sampler import SamplingSettings
from graft.model.support import check_supported
from graft.request.batch import Batch
from graft.request.sequence import FinishReason, Sequence
from graft.request.stats import Stats
from graft.settings import require, require_known
from graft.spec_decode.policies import DEFAULT_POLICY

_WHOLE_BATCH = (  # processors that know a row by its index in the batch, or keep state for all rows
    EncoderNoRepeatNGramLogitsProcessor,
    EncoderRepetitionPenaltyLogitsProcessor,
    MinPLogitsWarper,
    PrefixConstrainedLogitsProcessor,
    SynthIDTextWatermarkLogitsProcessor,
    UnbatchedClassifierFreeGuidanceLogitsProcessor,
)
# Inputs that `generate` adds, and that decoding computes itself.
_KNOWN_INPUTS = {"attention_mask", "position_ids", "past_key_values", "use_cache", "logits_to_keep", "cache_position"}
# Inputs of images and videos. Such a prompt is prefilled by the model's own forward.
_IMAGE_INPUTS = {
    *("mm_encoder_outputs", "pixel_values", "pixel_values_videos", "image_grid_thw", "video_grid_thw", "image_sizes"),
    *("token_type_ids", "mm_token_type_ids", "second_per_grid_ts"),
}
# transformers' own speculation does not change the text, so settings that ask for it are accepted.
_MODES = {GenerationMode.GREEDY_SEARCH, GenerationMode.SAMPLE, GenerationMode.ASSISTED_GENERATION}
_NUM_DRAWN_AHEAD = 16  # steps whose noise is drawn before they are reached


@dataclass
class GraftDecoderOnlyOutput(GenerateDecoderOnlyOutput):
    """What `generate` returns with `return_dict_in_generate=True`, with the statistics of each row."""

    stats: list[Stats] | None = None


def decode(
    model: PreTrainedModel,
    input_ids: Tensor,
    logits_processor: LogitsProcessorList,
    stopping_criteria: StoppingCriteriaList,
    generation_config: GenerationConfig,
    policy: str = DEFAULT_POLICY,
    draft: str | PreTrainedModel | None = "auto",
    budget: int | None = None,
    profile: str | Path | None = "auto",
    noise: str = "torch",
    stop: str | SequenceOf[str] = (),
    text_tokenizer: Any | None = None,
    **model_kwargs: Any,
) -> Tensor | GenerateDecoderOnlyOutput:
    """Decode for `model.generate`, which also takes these arguments. The text is that of `generate`.

    policy, draft, budget, profile: as in `graft.load`.
    noise: of sampling. "torch" draws from torch's generator as `generate` does, so `torch.manual_seed` gives the same
    text. "keyed" takes one seed for each row from there, and a row's text does not depend on the other rows.
    stop: like `stop_strings`, whose tokenizer transformers does not pass to a custom_generate.
    text_tokenizer: for `stop`, or a draft model with another vocabulary.
    """
    check_supported(model)
    # `generate` does not pass its assistant_model on to a custom_generate.
    if sys._getframe(1).f_locals.get("assistant_model") is not None:
        words = "graft.decode does not use assistant_model=: give the model as draft= to draft with it"
        warnings.warn(words, stacklevel=2)
    _check(input_ids, generation_config, logits_processor, model_kwargs)
    require_known("noise", noise, ("torch", "keyed"))
    if stop:
        if text_tokenizer is None:
            raise GraftError("stop needs the tokenizer: give text_tokenizer= too")
        criterion = StopStringCriteria(text_tokenizer, [stop] if isinstance(stop, str) else list(stop))
        stopping_criteria = StoppingCriteriaList([*stopping_criteria, criterion])
    has_images = any(
        not _says_nothing(name, value) for name, value in model_kwargs.items() if name not in _KNOWN_INPUTS
    )
    if has_images:
        require(draft in (None, "auto"), "a drafter reads tokens only, and the prompt has images: use draft=None")
        draft = None
    engine = _engine_of(model, policy, draft, budget, profile, text_tokenizer)
    max_new_tokens = generation_config.max_length - input_ids.shape[1]
    keep_scores = bool(generation_config.output_scores or generation_config.output_logits)
    shape = (len(input_ids), engine.target.vocab_size)
    picks = _picks(*shape, input_ids.device, noise if generation_config.do_sample else None)
    unpadded = _unpadded(input_ids, model_kwargs.get("attention_mask"))
    if has_images:  # their placeholders may be ids that are no tokens
        most = engine.target.vocab_size
        unpadded = [[token if token < most else 0 for token in row] for row in unpadded]
    batch = [
        _CriteriaSequence(padded, prompt, max_new_tokens, stopping_criteria, pick, keep_scores)
        for padded, prompt, pick in zip(input_ids, unpadded, picks, strict=True)
    ]
    for sequence in batch:
        engine.check_context(sequence)
    prefill = _Prefill(model, input_ids, model_kwargs) if has_images else None
    for _ in engine.rounds(list(batch), _ProcessorChooser(batch, logits_processor), prefill):
        pass

    longest = max(len(sequence.new_ids) for sequence in batch)
    pad = generation_config._pad_token_tensor
    answers = input_ids.new_full((len(batch), longest), 0 if pad is None else int(pad))
    for row, sequence in enumerate(batch):
        answers[row, : len(sequence.new_ids)] = torch.tensor(sequence.new_ids)
    sequences = torch.cat([input_ids, answers], dim=1)
    if not generation_config.return_dict_in_generate:
        return sequences
    return GraftDecoderOnlyOutput(
        sequences=cast(torch.LongTensor, sequences),
        scores=_by_step([s.scores for s in batch], longest) if generation_config.output_scores else None,
        logits=_by_step([s.logits for s in batch], longest) if generation_config.output_logits else None,
        stats=[sequence.stats for sequence in batch],
    )


class _Pick(ABC):
    """How a row's tokens are picked from their scores."""

    @abstractmethod
    def __call__(self, scores: Tensor, step: int) -> Tensor:
        """A token from its scores [V] and its number in the answer."""

    def coming_draws(self, step: int, temperature: float) -> RowDraws | None:
        """What is known of the draws from `step` on; None: they are no draws."""
        return None


def _picks(num_rows: int, vocab_size: int, device: torch.device, noise: str | None) -> list[_Pick]:
    """How each row's tokens are picked from their scores. noise: None picks the likeliest."""
    if noise is None:
        return [_Likeliest()] * num_rows
    if noise == "torch":
        draws = _TorchDraws(num_rows, vocab_size, device)
        return [_TorchDraw(draws, row) for row in range(num_rows)]
    return [_KeyedDraw(seed) for seed in torch.randint(2**62, (num_rows,)).tolist()]


class _Likeliest(_Pick):
    def __call__(self, scores: Tensor, step: int) -> Tensor:
        return scores.argmax()


class _KeyedDraw(_Pick):
    def __init__(self, seed: int) -> None:
        self._seed = seed

    def __call__(self, scores: Tensor, step: int) -> Tensor:
        own, position = (torch.tensor([key], device=scores.device) for key in (self._seed, step))
        return (scores + gumbel_noise(own, position, len(scores))[0]).argmax()

    def coming_draws(self, step: int, temperature: float) -> RowDraws:
        return RowDraws(self._seed, step, temperature)


class _TorchDraw(_Pick):
    def __init__(self, draws: _TorchDraws, row: int) -> None:
        self._draws, self._row = draws, row

    def __call__(self, scores: Tensor, step: int) -> Tensor:
        return (scores.softmax(dim=-1) / self._draws.noise(step, scores)[self._row]).argmax()

    def coming_draws(self, step: int, temperature: float) -> RowDraws:
        return RowDraws(0, step, temperature, times=self._draws.ahead(step, self._row))


class _TorchDraws:
    """`torch.multinomial`, called once per step for all rows as in `generate`, although rows reach a step one by one.

    torch draws a token as argmax(p / q), with exponential noise q for every row and token, whatever p is. The first row
    that reaches a step draws q for all rows. The generator's state before that is kept for the later rows. Drafts get
    the q of coming steps from a generator of the same state, so that torch's own advances as in `generate`.
    """

    def __init__(self, num_rows: int, vocab_size: int, device: torch.device) -> None:
        self._num_rows, self._vocab_size, self._device = num_rows, vocab_size, device
        index = device.index if device.index is not None else 0
        self._default = torch.cuda.default_generators[index] if device.type == "cuda" else torch.default_generator
        self._replay = torch.Generator(device)
        self._ahead = torch.Generator(device)
        self._states: list[Tensor] = []  # states of torch's generator before each step
        self._last: tuple[int, Tensor] | None = None  # a step and its q [rows, V]
        self._foreseen: dict[int, Tensor] = {}  # by step, q [rows, V] on the host
        self._num_foreseen: int | None = None  # the first step without known noise; None: no step has any

    def noise(self, step: int, scores: Tensor) -> Tensor:
        """q [rows, V] of a step."""
        if self._last is None or self._last[0] != step:
            generator = self._default
            if step == len(self._states):
                self._states.append(generator.get_state() if self._num_rows > 1 else torch.empty(0))
            else:
                generator = self._replay
                generator.set_state(self._states[step])
            q = scores.new_empty(self._num_rows, len(scores)).exponential_(1, generator=generator)
            self._last = (step, q)
        return self._last[1]

    def ahead(self, step: int, row: int) -> list[Tensor]:
        """A row's q [V] of the steps from `step` on, on the host."""
        if self._num_foreseen is None:
            self._ahead.set_state(self._default.get_state())
            self._num_foreseen = len(self._states)
        last = step + _NUM_DRAWN_AHEAD
        for new in range(self._num_foreseen, last):
            q = torch.empty(self._num_rows, self._vocab_size, device=self._device)
            self._foreseen[new] = q.exponential_(1, generator=self._ahead).cpu()
            self._foreseen.pop(new - 8 * _NUM_DRAWN_AHEAD, None)  # rows are seldom that far behind
        self._num_foreseen = max(self._num_foreseen, last)
        known = (self._foreseen.get(number) for number in range(step, last))
        return [q[row] for q in itertools.takewhile(lambda q: q is not None, known) if q is not None]


class _Prefill:
    """Prefills prompts with images by the model's own forward, as `generate` does, and copies the KV cache."""

    def __init__(self, model: Any, input_ids: Tensor, model_kwargs: dict[str, Any]) -> None:
        self._model, self._ids = model, input_ids
        # Not the prepared cache: its layers with a sliding window keep less than the last token sees.
        self._kwargs = model_kwargs | {"past_key_values": DynamicCache()}

    @torch.no_grad()
    def __call__(self, batch: Batch) -> None:
        model, kwargs, (num_rows, length) = self._model, self._kwargs, self._ids.shape
        inputs = model.prepare_inputs_for_generation(self._ids, is_first_iteration=True, **kwargs)
        with evaluating(model):
            model(**inputs, return_dict=True)
        for module in model.modules():
            if hasattr(module, "expand_kv"):  # the cache has latents, and ours has what is made of them
                cached = kwargs["past_key_values"].layers[module.layer_idx]
                cached.keys, cached.values = module.expand_kv(cached.keys, cached.values)
        mask, positions = kwargs.get("attention_mask"), kwargs.get("position_ids")
        for row in range(num_rows):
            first = 0 if mask is None else length - int(mask[row].sum())
            last = length - first - 1  # position of the last token, which is the first round's root
            # If a token has several positions, those for the rotary embedding come last.
            offset = 0 if positions is None else int(positions.view(-1, num_rows, length)[-1, row, -1]) - last
            batch.cache.fill(row, kwargs["past_key_values"], row, first, length - 1, offset)


class _CriteriaSequence(Sequence):
    """A sequence that ends when transformers' stopping criteria say so."""

    def __init__(
        self,
        padded: Tensor,
        prompt: list[int],
        max_new_tokens: int,
        criteria: StoppingCriteriaList,
        pick: _Pick,
        keep_scores: bool,
    ) -> None:
        super().__init__(prompt, SamplingSettings(max_new_tokens=max_new_tokens))
        self._padded = padded
        self._criteria = criteria
        self._pick = pick
        self._keep_scores = keep_scores
        self._drawn: list[int] = []  # chosen tokens, up to the end of the answer
        self._is_over = False  # whether the last of them ends the answer
        self._all_scores: list[Tensor] = []
        self._all_logits: list[Tensor] = []

    @property
    def scores(self) -> list[Tensor]:
        return self._all_scores[: len(self.new_ids)]

    @property
    def logits(self) -> list[Tensor]:
        return self._all_logits[: len(self.new_ids)]

    def choose(self, logits: Tensor, processors: LogitsProcessorList) -> int:
        if self._is_over:  # the walk continues until it leaves the tree, but nothing is drawn any more
            return int(logits.argmax())
        logits = logits.to(self._padded.device)
        scores = processors(self._so_far(self._drawn), cast(torch.FloatTensor, logits[None].clone()))[0]
        token = int(self._pick(scores, len(self._drawn)))
        self._drawn.append(token)
        if self._keep_scores:
            self._all_scores.append(scores)
            self._all_logits.append(logits)
        self._is_over = bool(self._criteria(self._so_far(self._drawn), cast(torch.FloatTensor, None)).item())
        return token

    def coming_draws(self, temperature: float) -> RowDraws | None:
        return self._pick.coming_draws(len(self._drawn), temperature)

    def _may_end_with(self, tokens: SequenceOf[int]) -> bool:
        return True

    def _ending(self, token: int) -> FinishReason | None:
        if self._is_over and self.num_new == len(self._drawn):
            return "stop"
        return "length" if self.num_remaining == 0 else None

    def _so_far(self, new: SequenceOf[int]) -> torch.LongTensor:
        """The padded prompt and the new tokens [1, length], as `generate` would have them."""
        return cast(torch.LongTensor, torch.cat([self._padded, self._padded.new_tensor(new)])[None])


class _ProcessorChooser:
    """Chooses tokens by transformers' logits processors, row by row, because the rows of a batch differ in length."""

    def __init__(self, batch: list[_CriteriaSequence], processors: LogitsProcessorList) -> None:
        self._rows = batch
        self._processors = processors

        def settings(kind: type, name: str) -> list[float]:
            return [getattr(each, name) for each in processors if isinstance(each, kind)]

        self._temperature = draft_temperature(
            math.prod(settings(TemperatureLogitsWarper, "temperature")),
            max(settings(MinPLogitsWarper, "min_p"), default=0.0),
        )

    def choose(self, logits: Tensor, walking: SequenceOf[bool]) -> Tensor:
        tokens = [
            sequence.choose(row, self._processors) if walks else 0
            for sequence, row, walks in zip(self._rows, logits, walking, strict=True)
        ]
        return torch.tensor(tokens)

    def coming_draws(self) -> ComingDraws | None:
        rows = [row.coming_draws(self._temperature) for row in self._rows]
        return ComingDraws(rows) if any(rows) else None

    def select(self, rows: SequenceOf[int]) -> _ProcessorChooser:
        return self._with([self._rows[row] for row in rows])

    def concat(self, other: _ProcessorChooser) -> _ProcessorChooser:
        return self._with(self._rows + other._rows)

    def _with(self, rows: list[_CriteriaSequence]) -> _ProcessorChooser:
        there = copy(self)
        there._rows = rows
        return there


class _EngineSlot:
    """A model's engines, with everything they have learned. They are kept on the model and live as long as it does.

    A copied or pickled model starts with an empty slot.
    """

    def __init__(self) -> None:
        self.engines: dict[Hashable, Engine] = {}

    def __reduce__(self) -> tuple[type[_EngineSlot], tuple[()]]:
        return (_EngineSlot, ())


def _engine_of(
    model: PreTrainedModel,
    policy: str,
    draft: str | PreTrainedModel | None,
    budget: int | None,
    profile: str | Path | None,
    tokenizer: Any | None,
) -> Engine:
    slot = model.__dict__.setdefault("_graft_engines", _EngineSlot())
    # The engine keeps the draft model and the tokenizer alive, so their ids stay unique.
    named = draft if draft is None or isinstance(draft, str) else id(draft)
    settings = (policy, named, budget, str(profile), None if tokenizer is None else id(tokenizer))
    # A model that has been moved, cast or resized since then gets a new engine.
    key = (*settings, model.device, model.dtype, model.get_input_embeddings().weight.shape)
    if key not in slot.engines:
        given: dict[str, Any] = {"draft": draft, "profile": profile, "keep_learned": False}
        # Loading must not draw from the generator that samples the text.
        with torch.random.fork_rng([model.device] if model.device.type == "cuda" else []):
            slot.engines[key] = load(model, tokenizer=tokenizer, policy=policy, budget=budget, **given)
    return slot.engines[key]


def _check(
    input_ids: Tensor, config: GenerationConfig, processors: LogitsProcessorList, model_kwargs: dict[str, Any]
) -> None:
    require(config.num_beams in (None, 1), "graft.decode decodes greedily or by sampling, not with beams: num_beams=1")
    mode = config.get_generation_mode()
    words = mode.value.replace("_", " ")
    require(mode in _MODES, f"graft.decode decodes greedily or by sampling, and these settings ask for {words}")
    for name in ("output_attentions", "output_hidden_states"):
        require(not getattr(config, name), f"graft.decode does not return {name.removeprefix('output_')}")
    for name, value in model_kwargs.items():
        known = name in _KNOWN_INPUTS or name in _IMAGE_INPUTS or _says_nothing(name, value)
        require(known, f"graft.decode does not take {name!r}")
    cache = model_kwargs.get("past_key_values")
    require(cache is None or cache.get_seq_length() == 0, "graft.decode starts from the whole prompt, not from a cache")
    for processor in processors:
        if len(input_ids) > 1 and isinstance(processor, _WHOLE_BATCH):
            raise GraftError(f"graft.decode takes {type(processor).__name__} for one prompt at a time only")


def _says_nothing(name: str, value: Any) -> bool:
    """Whether an input is what a multimodal model or its processor gives for text alone."""
    if name in ("token_type_ids", "mm_token_type_ids"):  # 0 is text
        return value is None or not bool(value.any())
    return value is None or value == {}


def _unpadded(input_ids: Tensor, attention_mask: Tensor | None) -> list[list[int]]:
    """Each row's prompt without the padding on the left."""
    if attention_mask is None:
        return input_ids.tolist()
    mask = attention_mask.bool()
    require(bool((mask[:, 1:] >= mask[:, :-1]).all() and mask[:, -1].all()), "prompts must be padded on the left")
    return [row[keep].tolist() for row, keep in zip(input_ids, mask, strict=True)]


def _by_step(rows: list[list[Tensor]], num_steps: int) -> Any:
    """One [B, V] tensor for each step. A row that has ended has minus infinity everywhere."""
    nothing = torch.full_like(rows[0][0], -torch.inf)
    return tuple(torch.stack([row[step] if step < len(row) else nothing for row in rows]) for step in range(num_steps))
