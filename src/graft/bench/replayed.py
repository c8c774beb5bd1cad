"""Replayed methods: policies that run on recorded answers, and trace files as benchmark tasks."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torch import Tensor

from graft.bench.methods import Answer, Method
from graft.bench.replay import ReplayedDrafter, Trace, read_traces, replay, replayed_target
from graft.bench.tasks import Question
from graft.model.sampler import SamplingSettings
from graft.settings import require
from graft.spec_decode.policies import PolicySettings, policy_with
from graft.spec_decode.proposers.drafter import TreeSettings

# All files of a replay must agree in these.
_SHARED = ("vocab_size", "depth", "topk", "model", "draft", "max_new_tokens")


@dataclass(frozen=True)
class Recorded:
    """Recorded tasks, their traces by prompt, and the files' metadata."""

    tasks: dict[str, list[Question]]
    traces: dict[tuple[int, ...], Trace]
    about: dict[str, Any]

    def and_traces_of(self, other: Recorded) -> Recorded:
        """The same tasks, with the traces of `other` added."""
        _check_alike(self.about, other.about)
        return Recorded(self.tasks, self.traces | other.traces, self.about)


def read_recorded(paths: Sequence[Path], limit: int | None = None) -> Recorded:
    """Reads all traces of the given files and folders."""
    require(limit is None or limit >= 1, f"limit must be at least 1, not {limit}")
    files = [file for path in paths for file in (sorted(path.glob("*.safetensors")) if path.is_dir() else [path])]
    require(bool(files), f"no traces are in {', '.join(map(str, paths))}: record some with graft bench --record")
    tasks: dict[str, list[Question]] = {}
    traces: dict[tuple[int, ...], Trace] = {}
    about: dict[str, Any] = {}
    for file in files:
        read, its = read_traces(file)
        about = about or its
        _check_alike(about, its)
        name = its["task"]
        require(name not in tasks, f"two files hold traces of {name!r}: results go by that name, so give one of them")
        tasks[name] = [Question(str(n), trace.prompt.tolist()) for n, trace in enumerate(read[:limit], start=1)]
        traces |= {tuple(trace.prompt.tolist()): trace for trace in read}
    return Recorded(tasks, traces, about)


class ReplayMethod(Method):
    """A policy as a benchmark method, which replays recorded answers without a target."""

    def __init__(self, name: str, recorded: Recorded, budget: int, pass_cost: float) -> None:
        self.name = name
        self._traces = recorded.traces
        about = recorded.about
        self._max_new_tokens: int | None = about.get("max_new_tokens")
        drafter = ReplayedDrafter(TreeSettings(depth=about["depth"], topk=about["topk"]))
        settings = PolicySettings(budget, pass_cost)
        self._policy = policy_with(settings, name, replayed_target(about), drafter)

    def answer(self, prompts: Sequence[Sequence[int]], settings: SamplingSettings) -> list[Answer]:
        traces = [self._traces[tuple(prompt)] for prompt in prompts]
        return [Answer(t.answer.tolist(), replay(self._policy, t, self._max_new_tokens)) for t in traces]

    def is_exact(self, settings: SamplingSettings) -> bool:
        return False  # the text is the recorded one, so there is nothing to compare

    def state(self) -> dict[str, Tensor]:
        return self._policy.state()

    def restore(self, state: Mapping[str, Tensor]) -> None:
        self._policy.restore(state)


def _check_alike(one: Mapping[str, Any], other: Mapping[str, Any]) -> None:
    for fact in _SHARED:
        require(
            one.get(fact) == other.get(fact),
            f"traces of {one['task']!r} and {other['task']!r} do not belong together: "
            f"{fact} is {one.get(fact)} and {other.get(fact)}",
        )
