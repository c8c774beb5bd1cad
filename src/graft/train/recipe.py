"""The training recipe of a draft head or draft model: generate answers, train, save, and write a model card.

Every stage writes to the head's folder, and is skipped if its output exists. `Eagle3Recipe`, `BlockRecipe` and
`DepthPrunedRecipe` hold the differences between kinds.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import asdict, dataclass, field, fields
from pathlib import Path
from typing import Any, Protocol

import torch
from torch import nn
from transformers import PreTrainedModel

from graft.drafters import block, eagle3
from graft.engine import Engine
from graft.model.unusual_layers import output_weight
from graft.progress import Report
from graft.prompt_files import user_message
from graft.settings import require
from graft.train import block as block_training
from graft.train import card
from graft.train import eagle3 as eagle3_training
from graft.train.block import BlockObjective, config_for, unused_token
from graft.train.depth_pruned import DepthPrunedModel, DepthPrunedObjective, measured_text
from graft.train.eagle3 import Eagle3Objective, count_tokens, draft_vocabulary
from graft.train.generate_data import Answered, read_answers, spread, write_answers
from graft.train.layer_pruning import RemovalOrder, find_removal_order
from graft.train.packing import PackedBatches, compiled_layers
from graft.train.settings import (
    AnswerSettings,
    BlockSettings,
    BlockShape,
    DepthPrunedSettings,
    Eagle3Settings,
    TrainSettings,
)
from graft.train.trainer import Objective, optimize

_NUM_TAPS = 5  # target layers that an EAGLE-3 head reads; they are read once per accepted token, not per draft pass
WORK = "work"  # subfolder for answers, log and state; can be deleted when the head is done


@dataclass(frozen=True)
class Outcome:
    """How far a call of `train_head` got."""

    stage: str  # answer, measure or train
    done: int
    total: int

    @property
    def is_finished(self) -> bool:
        return self.stage == "train" and self.done == self.total


class TimeIsUp(Exception):
    """Raised when a run reaches its deadline before there is anything to save."""

    def __init__(self, outcome: Outcome) -> None:
        super().__init__(outcome.stage)
        self.outcome = outcome


@dataclass(frozen=True)
class Run:
    """The inputs of a recipe."""

    engine: Engine
    answers: Sequence[Answered]
    work: Path  # folder for intermediate results, from which a later run resumes
    report: Callable[[Report], None]
    deadline: float  # in `time.perf_counter` seconds
    until_trained: ExitStack = field(default_factory=ExitStack)  # contexts to leave when training ends


class Recipe(Protocol):
    """Makes one kind of head or draft model."""

    @property
    def settings(self) -> TrainSettings: ...

    def prepare(self, run: Run) -> tuple[Objective, dict[str, Any]]:
        """A new head with its training objective, and facts for its card."""

    def save(self, run: Run, head: nn.Module, folder: Path) -> None: ...

    def describe(self, facts: dict[str, Any], log: card.Log) -> str:
        """The card's text."""


@dataclass(frozen=True)
class Eagle3Recipe:
    """An EAGLE-3 head."""

    describe = staticmethod(card.eagle3_text)
    settings: Eagle3Settings
    draft_vocab_size: int | None = None  # None: enough for almost all tokens of the answers
    is_normed: bool = True  # as in EAGLE-3.1: norms of features and output, so that accuracy hardly falls with depth
    start_from: Path | None = None  # a head to train further, instead of a new one

    def prepare(self, run: Run) -> tuple[Objective, dict[str, Any]]:
        model = run.engine.target.model
        counts = count_tokens(run.answers, run.engine.target.vocab_size)
        head = self._new_head(model, counts) if self.start_from is None else self._saved_head(model, self.start_from)
        coverage = float(counts[head.target_ids.cpu()].sum() / counts.sum())
        if self.settings.flex and model.device.type == "cuda":
            run.until_trained.enter_context(compiled_layers(model))
        return Eagle3Objective(head, model, run.answers, self.settings), {"vocabulary_coverage": coverage}

    def _new_head(self, model: PreTrainedModel, counts: torch.Tensor) -> eagle3.Eagle3Head:
        size, most = self.draft_vocab_size, len(counts)
        require(size is None or 1 <= size <= most, f"draft_vocab_size must be between 1 and {most}, not {size}")
        changes: dict[str, Any] = {"fc_norm": self.is_normed, "norm_output": self.is_normed}
        num_layers = model.config.get_text_config().num_hidden_layers
        if self.is_normed and num_layers >= 2 * _NUM_TAPS:  # smaller targets keep EAGLE-3's three layers
            changes["target_layers"] = block.default_target_layers(num_layers, _NUM_TAPS)
        return new_eagle3_head(model, draft_vocabulary(counts, size), **changes)

    def _saved_head(self, model: PreTrainedModel, path: Path) -> eagle3.Eagle3Head:
        fixed = self.draft_vocab_size is None and self.is_normed
        require(fixed, "a head that is trained further keeps its draft vocabulary and norms: drop their options")
        embedding: Any = model.get_input_embeddings().weight
        return eagle3.load_head(path, model.config, torch.float32, model.device, embedding.detach())

    def save(self, run: Run, head: nn.Module, folder: Path) -> None:
        assert isinstance(head, eagle3.Eagle3Head)
        eagle3.save_head(head.to(torch.bfloat16), folder)


@dataclass(frozen=True)
class BlockRecipe:
    """A block head: DFlash, or TreeFlash if `conditional`."""

    describe = staticmethod(card.block_text)
    settings: BlockSettings
    shape: BlockShape
    conditional: bool
    start_from: Path | None = None  # a head to take the initial weights from
    max_file_bytes: int | None = None

    def prepare(self, run: Run) -> tuple[Objective, dict[str, Any]]:
        engine, answers, model = run.engine, run.answers, run.engine.target.model
        special = [*engine.eos_token_ids, *(getattr(engine.tokenizer, "all_special_ids", None) or ())]
        mask = unused_token(answers, engine.target.vocab_size, special)
        head = new_block_head(model, self.shape, self.conditional, mask, answers, self.settings)
        if self.start_from is not None:
            _load_weights(head, self.start_from, model)
        return BlockObjective(head, model, answers, self.settings), {"head": asdict(head.config)}

    def save(self, run: Run, head: nn.Module, folder: Path) -> None:
        assert isinstance(head, block.BlockHead)
        block.save_head(head.to(torch.bfloat16), folder, max_file_bytes=self.max_file_bytes)


@dataclass(frozen=True)
class DepthPrunedRecipe:
    """A draft model: the target with some of its layers."""

    describe = staticmethod(card.depth_pruned_text)
    settings: DepthPrunedSettings
    num_layers: int | None = None  # layers to keep; None keeps a third

    def prepare(self, run: Run) -> tuple[Objective, dict[str, Any]]:
        model = run.engine.target.model
        total = model.config.get_text_config().num_hidden_layers
        count = max(1, round(total / 3)) if self.num_layers is None else self.num_layers
        require(1 <= count < total, f"layers must be from 1 to {total - 1}, not {count}: the model has {total}")
        text = measured_text(model, run.answers, self.settings)
        order = find_removal_order(
            model,
            count,
            lambda pruned: text.compare(pruned).divergence,
            run.work / "layers.json",
            {name: getattr(self.settings, name) for name in ("measured", "max_tokens", "held_back", "seed")}
            | {"answers": len(run.answers)},
            lambda order: run.report(_removal(order, total - count)),
            run.deadline,
        )
        kept = order.kept(count)
        if len(kept) > count:
            raise TimeIsUp(Outcome("measure", len(order.removed), total - count))
        objective = DepthPrunedObjective(DepthPrunedModel(model, kept), model, run.answers, self.settings)
        return objective, {
            "num_target_layers": total,
            "kept_layers": kept,
            "divergence_without": order.alone,
            "removed": [{"layer": layer, "divergence": value} for layer, value in order.removed[: total - count]],
            "before": objective.evaluate(),
        }

    def save(self, run: Run, head: nn.Module, folder: Path) -> None:
        assert isinstance(head, DepthPrunedModel)
        head.save(folder, run.engine.tokenizer)


def train_head(
    engine: Engine,
    prompts: Sequence[str],
    folder: Path,
    recipe: Recipe,
    answering: AnswerSettings,
    report: Callable[[Report], None] = lambda report: None,
    answers_from: Path | None = None,
    max_seconds: float = math.inf,
) -> Outcome:
    """Train a head or draft model on the engine's own answers to the prompts, and save it in `folder`.

    answers_from: a folder of earlier answers, instead of prompts. After `max_seconds` the call stops, and the next call
    resumes. A head that has had only some of its steps is saved too.
    """
    deadline, work = time.perf_counter() + max_seconds, folder / WORK
    source = answers_from
    if source is None:
        source = work / "answers"
        encoded = [engine.encode(user_message(text, engine.tokenizer)) for text in prompts]
        require(bool(encoded), "there are no prompts to answer")
        progress = _AnswerProgress(report)
        if not write_answers(engine.target, encoded, engine.eos_token_ids, answering, source, progress, deadline):
            return Outcome("answer", progress.done, progress.total)
    answers = list(read_answers(source))
    largest = max(int(answer.tokens.max()) for answer in answers)
    require(
        largest < engine.target.vocab_size,
        f"{source} holds answers of another model: token {largest} is outside this model's vocabulary",
    )
    run = Run(engine, answers, work, report, deadline)
    steps, training = recipe.settings.steps, work / "training"
    with run.until_trained:
        try:
            objective, facts = recipe.prepare(run)
        except TimeIsUp as stop:
            return stop.outcome
        done = optimize(objective, recipe.settings, training, len(answers), lambda r: report(_step(r, steps)), deadline)
    recipe.save(run, objective.head, folder)
    facts |= {
        "prompts": len({a.tokens[: a.num_prompt_tokens].numpy().tobytes() for a in answers}),
        "answers": len(answers),
        "answer_tokens": sum(len(a.tokens) - a.num_prompt_tokens for a in answers),
        "temperatures": sorted({a.temperature for a in answers}),
        "steps": done,
        "training": asdict(recipe.settings),
    }
    if answers_from is None:
        facts["answering"] = asdict(answering)
    log = card.read_log(training / "log.jsonl")
    card.write_card(folder, facts, log, recipe.describe(facts, log))
    return Outcome("train", done, steps)


class _AnswerProgress:
    """Reports the progress of generating answers."""

    def __init__(self, report: Callable[[Report], None]) -> None:
        self._report, self._start = report, time.perf_counter()
        self._num_tokens = self.done = self.total = 0

    def __call__(self, done: int, total: int, tokens: int) -> None:
        self.done, self.total, self._num_tokens = done, total, self._num_tokens + tokens
        rate = self._num_tokens / (time.perf_counter() - self._start)
        self._report(Report("answer", done, total, f"{self._num_tokens:,} tokens, {rate:,.0f} tokens/s"))


def _removal(order: RemovalOrder, total: int) -> Report:
    layer, divergence = order.removed[-1]
    return Report("measure", len(order.removed), total, f"layer {layer} removed, KL divergence {divergence:.3f}")


def _step(record: dict[str, float], steps: int) -> Report:
    words = [f"{name} {value:.3f}" for name, value in record.items() if name in card.SHOWN or "right" in name]
    return Report("train", int(record["step"]) + 1, steps, ", ".join(words))


def new_eagle3_head(model: PreTrainedModel, vocabulary: torch.Tensor, **changes: Any) -> eagle3.Eagle3Head:
    """An untrained head, initialized from the target's weights. changes: to the default config."""
    config = eagle3.Eagle3Config.for_target(
        model.config, draft_vocab_size=len(vocabulary), **_norms_and_rope(model), **changes
    )
    head = eagle3.Eagle3Head(config)
    head.set_vocabulary(vocabulary)
    embedding: Any = model.get_input_embeddings().weight
    head.borrow_embedding(embedding)
    head = head.to(device=model.device)
    torch.manual_seed(0)
    eagle3_training.start_from_target(head, model)
    return head


def new_block_head(
    model: PreTrainedModel,
    shape: BlockShape,
    conditional: bool,
    mask_token_id: int,
    answers: Sequence[Answered],
    settings: BlockSettings,
) -> block.BlockHead:
    """An untrained head, initialized from the target's weights and its hidden states on some answers."""
    config = config_for(shape, model, mask_token_id, conditional=conditional, **_norms_and_rope(model))
    torch.manual_seed(settings.seed)
    head = block.BlockHead(config)
    embedding: Any = model.get_input_embeddings().weight
    head.borrow_embedding(embedding)
    head.borrow_lm_head(output_weight(model))
    batch = PackedBatches(spread(answers, 256), settings, num_anchors=1).at(0)
    head = head.to(device=model.device)
    block_training.start_from_target(head, model, batch.to(model.device))
    return head


def _load_weights(head: block.BlockHead, path: Path, model: PreTrainedModel) -> None:
    """Copy the weights of a saved head, which may lack the new head's conditional head or mask."""
    other = block.load_head(path, model.config, head.fc.weight.dtype, head.fc.weight.device)
    for name in (each.name for each in fields(other.config)):
        own, saved = getattr(head.config, name), getattr(other.config, name)
        may_differ = name in ("conditional", "own_mask", "mask_token_id")
        require(may_differ or own == saved, f"cannot start from {path}: its {name} is {saved}, not {own}")
    head.load_state_dict(other.state_dict(), strict=False)


def _norms_and_rope(model: PreTrainedModel) -> dict[str, Any]:
    """The target's norm epsilon, and rotary parameters with its base but without its scaling."""
    text = model.config.get_text_config()
    own = getattr(text, "rope_parameters", None) or {}
    rope = {"rope_type": "default", "rope_theta": float(own.get("rope_theta", 10_000.0))}
    return {"rms_norm_eps": getattr(text, "rms_norm_eps", 1e-6), "rope": rope}
