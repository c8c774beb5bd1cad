"""The benchmark's main loop: all methods answer each prompt in turn, each starting from its own learned state.

Only single answers are timed and counted here. `results` computes rates, averages and intervals.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TypeVar

import torch
from torch import Tensor

from graft.bench.methods import Answer, Method
from graft.bench.settings import BenchSettings
from graft.bench.tasks import Question
from graft.model.sampler import SamplingSettings

STATELESS = "none"  # the state of a method that learns nothing
_NUM_TRIAL_TOKENS = 16
T = TypeVar("T")


@dataclass(frozen=True)
class Sample:
    """One answer, and its prompt's share of the time of the batch."""

    prompt: str  # the prompt's id
    answer: Answer
    prefill_seconds: float
    decode_seconds: float
    seconds_by_phase: dict[str, float]


class Variant:
    """A method in one state: cold, warm, persistent or none. `memory` is the learned state before each prompt."""

    def __init__(self, method: Method, state: str, memory: Mapping[str, Tensor]) -> None:
        self.method = method
        self.state = state
        self.memory = memory

    @property
    def name(self) -> str:
        return self.method.name

    def rehearse(self, questions: Sequence[Question], settings: SamplingSettings) -> None:
        """Answer these prompts untimed, and capture CUDA graphs for texts of up to their length. Nothing is learned."""
        if self.method.num_setups:
            self.method.restore(self.memory)
            self.method.answer([question.ids for question in questions], settings)
            longest = max(len(question.ids) for question in questions) + (settings.max_new_tokens or 0)
            self.method.capture(len(questions), longest, settings)

    def answer(self, questions: Sequence[Question], settings: SamplingSettings) -> list[Sample]:
        self.method.restore(self.memory)
        answers = self.method.answer([question.ids for question in questions], settings)
        if self.state == "persistent":
            self.memory = self.method.state()
        return _samples(questions, answers)


@dataclass
class Samples:
    """All answers of one variant to one task. A repeated prompt has several."""

    task: str
    variant: Variant
    samples: list[Sample] = field(default_factory=list)
    num_setups: int = 0  # one-time set-ups while they were timed

    def add(self, questions: Sequence[Question], settings: SamplingSettings) -> None:
        before = self.variant.method.num_setups
        self.samples += self.variant.answer(questions, settings)
        self.num_setups += self.variant.method.num_setups - before


Watcher = Callable[[str, int, int], None]  # called with the task, prompts done and number of prompts


def variants(
    methods: Sequence[Method],
    states: Sequence[str],
    warm_up: Sequence[Question],
    trial: Question,
    settings: BenchSettings,
    eos_token_ids: Sequence[int] = (),
) -> list[Variant]:
    """Every method in every requested state. A method that learns nothing appears once, stateless.

    Each method first answers `trial`, so that one-time costs (set-up, measured step times) come before the clock runs,
    and then forgets it. Methods that must be warm also answer the prompts of `warm_up`.
    """
    result = []
    for method in methods:
        cold = method.state()
        method.answer([trial.ids], settings.sampling(eos_token_ids, _NUM_TRIAL_TOKENS))
        learns = not _is_same(method.state(), cold)
        warm: Mapping[str, Tensor] = cold
        if (learns or cold) and warm_up and any(state != "cold" for state in states):
            method.restore(cold)
            groups = [[question.ids for question in group] for group in _groups(warm_up, settings.rows)]
            warm = method.warm_up(groups, settings.sampling(eos_token_ids))
            learns = learns or not _is_same(warm, cold)
        if not learns:
            result.append(Variant(method, STATELESS, cold))
            continue
        result += [Variant(method, state, cold if state == "cold" else warm) for state in states]
    return result


def run(
    variants: Sequence[Variant],
    tasks: Mapping[str, Sequence[Question]],
    settings: BenchSettings,
    eos_token_ids: Sequence[int] = (),
    watch: Watcher = lambda task, done, total: None,
) -> Iterator[list[Samples]]:
    """Yield the samples of each variant, task by task. The order of variants rotates from prompt to prompt.

    Before a task with longer prompts than all earlier ones, its longest batch is answered once untimed. So CUDA graphs
    for that length, and for the fewer rows left when some answers have ended, are captured before the clock runs.
    """
    sampling = settings.sampling(eos_token_ids)
    longest = 0
    for task, questions in tasks.items():
        hardest = sorted(questions, key=lambda question: len(question.ids), reverse=True)[: settings.rows]
        if hardest and len(hardest[0].ids) > longest:
            longest = len(hardest[0].ids)
            for variant in variants:
                variant.rehearse(hardest, sampling)
        results = [Samples(task, variant) for variant in variants]
        memories = [variant.memory for variant in variants]
        done, total = 0, len(questions) * settings.repeat
        for repetition in range(settings.repeat):
            # What was learned from an answer must not help to repeat it.
            for variant, memory in zip(variants, memories, strict=True):
                variant.memory = memory
            for turn, group in enumerate(_groups(questions, settings.rows), start=repetition):
                for result in rotated(results, turn):
                    result.add(group, sampling)
                done += len(group)
                watch(task, done, total)
        yield results


def rotated(items: Sequence[T], turn: int) -> list[T]:
    """The items, rotated so that each turn begins with the next one."""
    start = turn % len(items)
    return [*items[start:], *items[:start]]


def _is_same(state: Mapping[str, Tensor], other: Mapping[str, Tensor]) -> bool:
    return set(state) == set(other) and all(torch.equal(value, other[name]) for name, value in state.items())


def _groups(questions: Sequence[Question], size: int) -> list[Sequence[Question]]:
    return [questions[i : i + size] for i in range(0, len(questions), size)]


def _samples(questions: Sequence[Question], answers: Sequence[Answer]) -> list[Sample]:
    """The samples of a batch. Its time is that of its longest answer, divided evenly among the prompts."""
    longest = max((answer.stats for answer in answers), key=lambda stats: stats.decode_seconds)
    share = 1 / len(answers)
    phases = {phase: seconds * share for phase, seconds in longest.seconds_by_phase.items()}
    return [
        Sample(question.id, answer, longest.prefill_seconds * share, longest.decode_seconds * share, phases)
        for question, answer in zip(questions, answers, strict=True)
    ]
