"""`model.generate(**inputs, custom_generate=graft.decode)`: transformers' own arguments, Graft's rounds.

The logits processors and stopping criteria that `generate` prepared are called for every token in order, with
exactly the tokens before it, so all of them mean what they mean in transformers. Sampled tokens are drawn as `generate`
draws them, from torch's own generator, and as often: its state afterwards is what `generate` would have left.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable
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
    PrefixConstrainedLogitsProcessor,
    SynthIDTextWatermarkLogitsProcessor,
    UnbatchedClassifierFreeGuidanceLogitsProcessor,
)

from graft.engine import Engine
from graft.errors import GraftError
from graft.loading import load
from graft.model.overrides import evaluating
from graft.model.sampler import SamplingSettings, gumbel_noise
from graft.model.support import check_supported
from graft.request.batch import Batch
from graft.request.sequence import FinishReason, Sequence
from graft.request.stats import Stats
from graft.settings import require, require_known
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
# What comes with images and videos: the prompt is then read by the model's own forward.
_IMAGE_INPUTS = {
    *("mm_encoder_outputs", "pixel_values", "pixel_values_videos", "image_grid_thw", "video_grid_thw", "image_sizes"),
    *("token_type_ids", "mm_token_type_ids", "second_per_grid_ts"),
}
# Speculation of transformers' own does not change the text, so what asks for it is no reason to refuse.
_MODES = {GenerationMode.GREEDY_SEARCH, GenerationMode.SAMPLE, GenerationMode.ASSISTED_GENERATION}
_Pick = Callable[[Tensor, int], Tensor]  # a token from its scores [V] and its number in the answer


@dataclass
class GraftDecoderOnlyOutput(GenerateDecoderOnlyOutput):
    """What `generate` returns with `return_dict_in_generate=True`, and what speculation did, by row."""

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
    datastore: str | Path | None = None,
    profile: str | Path | None = "auto",
    noise: str = "torch",
    stop: str | SequenceOf[str] = (),
    text_tokenizer: Any | None = None,
    **model_kwargs: Any,
) -> Tensor | GenerateDecoderOnlyOutput:
    """Decodes for `model.generate`, which takes these arguments too. The text is that of `generate`.

    policy, draft, budget, datastore, profile: as in `graft.load`.
    noise: of sampling. torch draws as `generate` does, from torch's generator: after `torch.manual_seed` the same text.
    keyed takes one number a row from there, and a row's text does not depend on the rows beside it.
    stop: as `stop_strings`, which need a tokenizer that transformers hands to no custom_generate.
    text_tokenizer: for `stop`, a datastore, or a draft model with another vocabulary.
    """
    check_supported(model)
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
        good = draft in (None, "auto")
        require(good, "a drafter reads tokens alone, and the prompt has more than these: draft=None")
        draft = None
    engine = _engine_of(model, policy, draft, budget, datastore, profile, text_tokenizer)
    max_new_tokens = generation_config.max_length - input_ids.shape[1]
    keep_scores = bool(generation_config.output_scores or generation_config.output_logits)
    picks = _picks(len(input_ids), input_ids.device, noise if generation_config.do_sample else None)
    unpadded = _unpadded(input_ids, model_kwargs.get("attention_mask"))
    if has_images:  # whose places may be held by an id that is no token's
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


def _picks(num_rows: int, device: torch.device, noise: str | None) -> list[_Pick]:
    """How each row's tokens are picked from their scores; noise: None picks the likeliest."""
    if noise is None:
        return [lambda scores, step: scores.argmax()] * num_rows
    if noise == "torch":
        draws = _TorchDraws(num_rows, device)
        return [draws.of_row(row) for row in range(num_rows)]
    return [_keyed(seed) for seed in torch.randint(2**62, (num_rows,)).tolist()]


def _keyed(seed: int) -> _Pick:
    def pick(scores: Tensor, step: int) -> Tensor:
        own, position = (torch.tensor([key], device=scores.device) for key in (seed, step))
        return (scores + gumbel_noise(own, position, len(scores))[0]).argmax()

    return pick


class _TorchDraws:
    """`torch.multinomial` of all rows, once a step, from torch's own generator; but rows come to a step one by one.

    torch draws a token as argmax(p / q), with q exponential noise for every row and token, whatever p is. The first row
    to come to a step draws its q for all; what the generator was then is kept, for those that come later.
    """

    def __init__(self, num_rows: int, device: torch.device) -> None:
        self._num_rows = num_rows
        index = device.index if device.index is not None else 0
        self._torchs = torch.cuda.default_generators[index] if device.type == "cuda" else torch.default_generator
        self._again = torch.Generator(device)
        self._states: list[Tensor] = []  # of torch's generator before each step
        self._last: tuple[int, Tensor] | None = None  # a step and its q [rows, V]

    def of_row(self, row: int) -> _Pick:
        def pick(scores: Tensor, step: int) -> Tensor:
            return (scores.softmax(dim=-1) / self._noise(step, scores)[row]).argmax()

        return pick

    def _noise(self, step: int, scores: Tensor) -> Tensor:
        if self._last is None or self._last[0] != step:
            generator = self._torchs
            if step == len(self._states):
                self._states.append(generator.get_state() if self._num_rows > 1 else torch.empty(0))
            else:
                generator = self._again
                generator.set_state(self._states[step])
            q = scores.new_empty(self._num_rows, len(scores)).exponential_(1, generator=generator)
            self._last = (step, q)
        return self._last[1]


class _Prefill:
    """Reads prompts with images as `generate` does, by the model's own forward, and takes over its KV cache."""

    def __init__(self, model: Any, input_ids: Tensor, model_kwargs: dict[str, Any]) -> None:
        self._model, self._ids = model, input_ids
        # Not the prepared one, of which layers with a window keep less than the last token sees.
        self._kwargs = model_kwargs | {"past_key_values": DynamicCache()}

    @torch.no_grad()
    def __call__(self, batch: Batch) -> None:
        model, kwargs, (num_rows, length) = self._model, self._kwargs, self._ids.shape
        inputs = model.prepare_inputs_for_generation(self._ids, is_first_iteration=True, **kwargs)
        with evaluating(model):
            model(**inputs, return_dict=True)
        mask, positions = kwargs.get("attention_mask"), kwargs.get("position_ids")
        for row in range(num_rows):
            first = 0 if mask is None else length - int(mask[row].sum())
            last = length - first - 1  # of the text's places; it is the first round's root
            # Of several positions of a token, those of its rotation come last.
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
        self._drawn: list[int] = []  # tokens chosen, up to the answer's end
        self._is_over = False  # whether the last of them ends it
        self._all_scores: list[Tensor] = []
        self._all_logits: list[Tensor] = []

    @property
    def scores(self) -> list[Tensor]:
        return self._all_scores[: len(self.new_ids)]

    @property
    def logits(self) -> list[Tensor]:
        return self._all_logits[: len(self.new_ids)]

    def choose(self, logits: Tensor, processors: LogitsProcessorList) -> int:
        if self._is_over:  # the walk goes on to where it leaves the tree; nothing is drawn for that
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

    def _may_end_with(self, tokens: SequenceOf[int]) -> bool:
        return True

    def _ending(self, token: int) -> FinishReason | None:
        if self._is_over and self.num_new == len(self._drawn):
            return "stop"
        return "length" if self.num_remaining == 0 else None

    def _so_far(self, new: SequenceOf[int]) -> torch.LongTensor:
        """[1, length] as `generate` would hold it: the padded prompt, then the new tokens."""
        return cast(torch.LongTensor, torch.cat([self._padded, self._padded.new_tensor(new)])[None])


class _ProcessorChooser:
    """Chooses by transformers' logits processors, row by row: rows of one batch are not equally long here."""

    def __init__(self, batch: list[_CriteriaSequence], processors: LogitsProcessorList) -> None:
        self._rows = batch
        self._processors = processors

    def choose(self, logits: Tensor, walking: SequenceOf[bool]) -> Tensor:
        tokens = [
            sequence.choose(row, self._processors) if walks else 0
            for sequence, row, walks in zip(self._rows, logits, walking, strict=True)
        ]
        return torch.tensor(tokens)

    def select(self, rows: SequenceOf[int]) -> _ProcessorChooser:
        return self._with([self._rows[row] for row in rows])

    def concat(self, other: _ProcessorChooser) -> _ProcessorChooser:
        return self._with(self._rows + other._rows)

    def _with(self, rows: list[_CriteriaSequence]) -> _ProcessorChooser:
        there = copy(self)
        there._rows = rows
        return there


class _EngineSlot:
    """Keeps a model's engines, and what they learned, with the model itself, for as long as it lives.

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
    datastore: str | Path | None,
    profile: str | Path | None,
    tokenizer: Any | None,
) -> Engine:
    slot = model.__dict__.setdefault("_graft_engines", _EngineSlot())
    # The engine keeps the draft model and the tokenizer alive, so that their ids stay theirs.
    named = draft if draft is None or isinstance(draft, str) else id(draft)
    settings = (policy, named, budget, str(datastore), str(profile), None if tokenizer is None else id(tokenizer))
    # A model that has been moved, cast or resized since is another one to what was learned.
    key = (*settings, model.device, model.dtype, model.get_input_embeddings().weight.shape)
    if key not in slot.engines:
        given: dict[str, Any] = {"draft": draft, "datastore": datastore, "profile": profile, "keep_learned": False}
        with torch.random.fork_rng([model.device] if model.device.type == "cuda" else []):  # draws are the text's
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
    """Whether an input is what a multimodal model or its processor gives with text alone."""
    if name in ("token_type_ids", "mm_token_type_ids"):  # 0 is text
        return value is None or not bool(value.any())
    return value is None or value == {}


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
