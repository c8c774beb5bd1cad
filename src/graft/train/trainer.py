"""The training loop of all drafters: optimizer, schedule, averaged weights, log, and exact resumption.

The objectives in `eagle3`, `block` and `depth_pruned` define the loss and the evaluation. Randomness depends only on
the seed and the step, so a step number determines the position in the data.
"""

from __future__ import annotations

import functools
import json
import math
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any, Generic, Protocol, TypeVar

import torch
from torch import Tensor, nn

from graft.errors import GraftError
from graft.files import replacing
from graft.settings import require
from graft.train.generate_data import Answered
from graft.train.settings import TrainSettings

Batch = TypeVar("Batch")
Plan = TypeVar("Plan")

_LOG_EVERY = 10  # steps, because logging waits for the device


class Objective(Protocol):
    """The loss and evaluation of a head."""

    @property
    def head(self) -> nn.Module:
        """The module to train. Its `config`, a dataclass, identifies it when a run is resumed."""

    def backward(self, step: int) -> Mapping[str, Tensor | float]:
        """Add the gradients of a step's batch to the head's parameters. Returns values to log, including `loss`."""

    def evaluate(self) -> dict[str, float]:
        """Figures of the current head on held-back answers."""


class Batches(ABC, Generic[Plan, Batch]):
    """Training batches: a plan for every epoch, in an order fixed by the seed."""

    def __init__(self, answers: Sequence[Answered], settings: TrainSettings) -> None:
        self._answers = [replace(a, tokens=a.tokens[: settings.max_tokens]) for a in answers]
        self._answers = [a for a in self._answers if len(a.tokens) >= max(a.num_prompt_tokens, 1) + 2]
        require(bool(self._answers), "no answer is long enough to train on")
        self._settings = settings
        self._epoch, self._plan = 0, self._planned(0)

    def at(self, step: int) -> Batch:
        """The batch of a step."""
        epoch, place = divmod(step, len(self))
        if epoch != self._epoch:
            # Epochs differ by a batch or two. All get the first one's count, so that a step determines its batch.
            plan, count = self._planned(epoch), len(self)
            self._plan, self._epoch = [plan[i % len(plan)] for i in range(count)], epoch
        return self._batch(self._plan[place], step)

    def __len__(self) -> int:
        return len(self._plan)

    def _planned(self, epoch: int) -> list[Plan]:
        return self._plan_epoch(torch.Generator().manual_seed(self._settings.seed * 1_000_003 + epoch))

    @abstractmethod
    def _plan_epoch(self, generator: torch.Generator) -> list[Plan]:
        """The contents of each batch of an epoch."""

    @abstractmethod
    def _batch(self, plan: Plan, step: int) -> Batch: ...


def split_by_prompt(answers: Sequence[Answered], share: float) -> tuple[list[Answered], list[Answered]]:
    """Held-back answers and training answers. All answers to a prompt are on the same side."""
    every = max(2, round(1 / share))
    prompts = [a.tokens[: a.num_prompt_tokens].numpy().tobytes() for a in answers]
    rank = {prompt: i for i, prompt in enumerate(dict.fromkeys(prompts))}
    parts: tuple[list[Answered], list[Answered]] = ([], [])
    for prompt, answer in zip(prompts, answers, strict=True):
        parts[rank[prompt] % every != 0].append(answer)
    return parts


@functools.cache
def compiled(function: Callable[..., Any]) -> Callable[..., Any]:
    """The function, compiled once for each shape of its inputs."""
    return torch.compile(function, dynamic=False)


def autocast(device: torch.device, settings: TrainSettings) -> torch.autocast:
    return torch.autocast(device.type, dtype=torch.bfloat16, enabled=settings.bf16 and device.type != "cpu")


def optimize(
    objective: Objective,
    settings: TrainSettings,
    folder: Path,
    num_answers: int,
    progress: Callable[[dict[str, float]], None] = lambda record: None,
    deadline: float = math.inf,
) -> int:
    """Train the objective's head in place, and return its number of steps so far.

    `folder` holds a log and a state, from which an interrupted run resumes to the same weights. At `deadline`, in
    `time.perf_counter` seconds, the run is evaluated, saved and stopped. It may resume with another number of steps,
    whose learning-rate schedule it then follows.
    """
    head = objective.head
    folder.mkdir(parents=True, exist_ok=True)
    head.float().train()
    state = _State(folder / "state.pt", head, settings, num_answers)
    log_path = folder / "log.jsonl"
    step = state.resume(log_path)
    with log_path.open("a", encoding="utf-8") as log:

        def write(record: dict[str, float]) -> None:
            log.write(json.dumps(record) + "\n")
            log.flush()
            progress(record)

        while step < settings.steps:
            for group in state.optimizer.param_groups:
                group["lr"] = settings.learning_rate * _schedule(step, settings)
            state.optimizer.zero_grad(set_to_none=True)
            facts = objective.backward(step)
            norm = nn.utils.clip_grad_norm_(head.parameters(), settings.max_gradient_norm)
            state.optimizer.step()
            state.average(step)
            is_last = step == settings.steps - 1
            if step % _LOG_EVERY == 0 or is_last:
                record = {"step": step, "norm": float(norm), **{name: float(value) for name, value in facts.items()}}
                if not math.isfinite(record["loss"]):
                    raise GraftError(f"the loss is no longer a number at step {step}: lower learning_rate")
                write(record)
            step += 1
            is_late = time.perf_counter() >= deadline
            if step % settings.evaluate_every == 0 or is_last or is_late:
                if is_late and not is_last:
                    state.save(step)  # the process may be killed during the evaluation
                with state.averaged():
                    write({"step": step - 1, **objective.evaluate()})
                state.save(step)
            if is_late:
                break
    state.use_average()
    head.eval()
    return step


class _State:
    """Everything that changes from step to step: the head's weights, their average, and the optimizer state."""

    def __init__(self, path: Path, head: nn.Module, settings: TrainSettings, num_answers: int) -> None:
        self._path, self._head, self._settings = path, head, settings
        self._parameters = dict(head.named_parameters())
        matrices = [p for p in self._parameters.values() if p.dim() > 1]
        others = [p for p in self._parameters.values() if p.dim() <= 1]
        self.optimizer = torch.optim.AdamW(
            [{"params": matrices, "weight_decay": settings.weight_decay}, {"params": others, "weight_decay": 0.0}],
            lr=settings.learning_rate,
            betas=(0.9, 0.95),
        )
        self._average = {}
        if settings.ema_decay > 0:
            self._average = {name: p.detach().clone() for name, p in self._parameters.items()}
        fixed = {name: value for name, value in asdict(settings).items() if name != "steps"}
        config: Any = head.config
        self._run = json.dumps({"settings": fixed, "head": asdict(config), "num_answers": num_answers})

    @torch.no_grad()
    def average(self, step: int) -> None:
        """Add the weights after a step to their running mean. Early steps decay faster."""
        decay = min(self._settings.ema_decay, (1 + step) / (10 + step))
        for name, mean in self._average.items():
            mean.lerp_(self._parameters[name], 1 - decay)

    @contextmanager
    def averaged(self) -> Iterator[None]:
        """Context in which the head has its averaged weights."""
        last = {name: self._parameters[name].data for name in self._average}
        for name, mean in self._average.items():
            self._parameters[name].data = mean
        try:
            yield
        finally:
            for name, weight in last.items():
                self._parameters[name].data = weight

    @torch.no_grad()
    def use_average(self) -> None:
        for name, mean in self._average.items():
            self._parameters[name].copy_(mean)

    def save(self, step: int) -> None:
        state = {
            "head": self._head.state_dict(),
            "average": self._average,
            "optimizer": self.optimizer.state_dict(),
            "step": step,
            "run": self._run,
        }
        with replacing(self._path) as file:
            torch.save(state, file)

    def resume(self, log_path: Path) -> int:
        """Load the state, drop later log lines, and return the step to resume from."""
        if not self._path.exists():
            log_path.unlink(missing_ok=True)
            return 0
        state = self._read()
        folder = self._path.parent
        own, its = self._head.state_dict().get("d2t"), state["head"].get("d2t")
        if own is not None and its is not None and not torch.equal(own, its):
            raise GraftError(
                f"{folder} holds a run with another draft vocabulary: use its size of {len(its)}, or choose another "
                "folder"
            )
        require(
            state["run"] == self._run,
            f"{folder} holds a run with other settings, answers or another head: choose another folder",
        )
        done, most = int(state["step"]), self._settings.steps
        require(done <= most, f"{folder} holds a run that already has {done} steps: set steps to at least as many")
        self._head.load_state_dict(state["head"])
        self._average = state["average"]
        self.optimizer.load_state_dict(state["optimizer"])
        require(log_path.exists(), f"{log_path} is missing: delete {self._path.name} too, to train anew")
        text = log_path.read_text(encoding="utf-8")
        lines = [line for line in text.splitlines() if line.endswith("}")]  # the last line may be incomplete
        try:
            lines = [line for line in lines if json.loads(line)["step"] < done]
        except (ValueError, KeyError, TypeError) as error:
            raise GraftError(f"{log_path} is damaged: delete it and {self._path.name} to train anew") from error
        log_path.write_text("".join(line + "\n" for line in lines), encoding="utf-8")
        return done

    def _read(self) -> dict[str, Any]:
        try:
            device = next(self._head.parameters()).device
            state: dict[str, Any] = torch.load(self._path, map_location=device, weights_only=True)
        except Exception as error:  # a damaged pickle can raise anything
            raise GraftError(f"{self._path} is damaged: delete it to train anew, or copy it again") from error
        return state


def _schedule(step: int, settings: TrainSettings) -> float:
    """Learning-rate factor: linear warm-up, then a cosine decay to 0.05."""
    if step < settings.warmup_steps:
        return (step + 1) / settings.warmup_steps
    done = (step - settings.warmup_steps) / max(1, settings.steps - settings.warmup_steps)
    return 0.05 + 0.95 * 0.5 * (1 + math.cos(math.pi * done))
