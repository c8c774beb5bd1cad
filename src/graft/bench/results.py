"""Results of a benchmark: rates, averages over tasks, confidence intervals over prompts and turns, and their files.

Rates are ratios of sums over a task's prompts. The average gives every task the same weight.
"""

import csv
import json
import platform
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from importlib.metadata import version
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from graft.bench.methods import DENSE, PLAIN
from graft.bench.runner import Sample, Samples
from graft.device_info import cpu_name
from graft.files import replacing
from graft.machine import num_cores
from graft.model.sampler import SamplingSettings
from graft.spec_decode.policy_settings import USUAL_PASS_COST

AVERAGE = "average"
PLAIN_NOISE = "plain_noise"  # key in a result's environment: how much plain decoding varied from turn to turn
TIMED = ("tokens_per_second", "speedup")  # rates that single prompts lack if they share a batch
_COUNTERS = ("tokens", "rounds", "accepted", "draft_passes", "nodes")
_NUM_DRAWS = 2000
_SEED = 0

Rates = dict[str, NDArray[np.float64]]  # by name, one value per draw
Picks = tuple[NDArray[np.int64], NDArray[np.int64]]  # prompts [draws, prompts, 1], turns [draws, prompts, turns]


@dataclass(frozen=True)
class Run:
    """Results of one method in one state, on one task or averaged over tasks."""

    task: str
    method: str
    state: str
    prompts: int
    tokens: int
    decode_seconds: float
    prefill_seconds: float
    tokens_per_second: float
    speedup: float | None  # over plain decoding
    mean_accepted: float
    rounds: int
    accepted: int
    draft_passes_per_round: float
    nodes_per_round: float
    modelled_speed: float  # mean accepted / (1 + 0.03 x draft passes)
    modelled_over_dense: float | None
    setups: int  # one-time set-ups, such as captures of CUDA graphs, while it was timed
    differ: int | None  # prompts whose text differs from plain decoding's; None if it may differ
    accepted_by_source: dict[str, int]
    accepted_by_depth: dict[int, int]
    proposed_by_source: dict[str, int]
    seconds_by_phase: dict[str, float]
    confidence: dict[str, tuple[float, float]]  # 95 % intervals over prompts and turns, by rate
    by_prompt: list[dict[str, Any]] = field(default_factory=list)

    @property
    def key(self) -> tuple[str, str]:
        return self.method, self.state


@dataclass(frozen=True)
class Results:
    """Content of results.json: all runs, averages, settings and environment."""

    runs: list[Run]
    averages: list[Run]
    settings: dict[str, Any]
    environment: dict[str, Any]

    def write(self, folder: Path) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        with replacing(folder / "results.json") as file:  # a long run may be stopped at any time
            file.write((json.dumps(asdict(self), indent=1) + "\n").encode())
        emulated = {"as_cost_of": cost} if (cost := self.settings.get("as_cost_of")) else {}
        rows = [emulated | _flat(run) for run in [*self.runs, *self.averages]]
        with open(folder / "results.csv", "w", newline="", encoding="utf-8") as table:
            writer = csv.DictWriter(table, list(dict.fromkeys(column for row in rows for column in row)))
            writer.writeheader()
            writer.writerows(rows)


class Summary:
    """Accumulates finished tasks into `Results`."""

    def __init__(self, sampling: SamplingSettings, rows: int = 1) -> None:
        self._sampling = sampling
        self._is_timed_by_prompt = rows == 1
        self._runs: list[Run] = []
        self._draws: list[Rates] = []  # bootstrap draws of each run
        self._plain_seconds: NDArray[np.float64] | None = None  # seconds of plain decoding, by turn

    def add(self, task: Sequence[Samples]) -> None:
        plain = next((s for s in task if s.variant.name == PLAIN), None)
        num_prompts, num_turns = _by_prompt(task[0])["seconds"].shape
        picks = _draw(num_prompts, num_turns, task=len({run.task for run in self._runs}))
        points, draws = self._rates(task, None), self._rates(task, picks)
        for samples, point, draw in zip(task, points, draws, strict=True):
            self._runs.append(self._run(samples, point, draw, plain))
            self._draws.append(draw)
        if plain is not None:
            seconds = _by_prompt(plain)["seconds"].sum(axis=0)
            self._plain_seconds = seconds if self._plain_seconds is None else self._plain_seconds + seconds

    def results(self, settings: dict[str, Any], environment: dict[str, Any]) -> Results:
        keys = list(dict.fromkeys(run.key for run in self._runs))
        environment = environment | {PLAIN_NOISE: self._plain_noise()}
        return Results(list(self._runs), [self._average(key) for key in keys], settings, environment)

    def _plain_noise(self) -> float | None:
        """Half the range of plain decoding's turns, relative to their middle; None if there was only one turn."""
        if self._plain_seconds is None or len(self._plain_seconds) < 2:
            return None
        low, high = self._plain_seconds.min(), self._plain_seconds.max()
        return float((high - low) / (high + low))

    def _rates(self, task: Sequence[Samples], picks: Picks | None) -> list[Rates]:
        """The task's rates of each variant. picks: bootstrap samples; None takes every answer once."""
        rates = [_own_rates(samples, picks) for samples in task]
        names = [samples.variant.name for samples in task]
        for one in rates:
            if PLAIN in names:
                one["speedup"] = one["tokens_per_second"] / rates[names.index(PLAIN)]["tokens_per_second"]
            if DENSE in names:
                one["modelled_over_dense"] = one["modelled_speed"] / rates[names.index(DENSE)]["modelled_speed"]
        return rates

    def _run(self, samples: Samples, point: Rates, draw: Rates, plain: Samples | None) -> Run:
        is_exact = samples.variant.method.is_exact(self._sampling)
        num_prompts = _num_prompts(samples)
        return Run(
            task=samples.task,
            method=samples.variant.name,
            state=samples.variant.state,
            prompts=num_prompts,
            setups=samples.num_setups,
            differ=len(_different(samples, plain)) if is_exact and plain is not None else None,
            confidence=self._intervals(draw) if len(samples.samples) > 1 else {},
            by_prompt=[_prompt_facts(sample) for sample in samples.samples],
            **_totals([sample.answer.stats for sample in samples.samples], samples.samples),
            **_points(point),
        )

    def _average(self, key: tuple[str, str]) -> Run:
        places = [place for place, run in enumerate(self._runs) if run.key == key]
        runs = [self._runs[place] for place in places]
        names = self._draws[places[0]]
        draw = {name: np.mean([self._draws[place][name] for place in places], axis=0) for name in names}
        point = {name: np.array([np.mean([getattr(run, name) for run in runs])]) for name in names}
        differ = [run.differ for run in runs if run.differ is not None]
        return Run(
            task=AVERAGE,
            method=key[0],
            state=key[1],
            prompts=sum(run.prompts for run in runs),
            setups=sum(run.setups for run in runs),
            differ=sum(differ) if len(differ) == len(runs) else None,
            confidence=self._intervals(draw) if all(run.confidence for run in runs) else {},
            **_totals(runs, runs),
            **_points(point),
        )

    def _intervals(self, draw: Rates) -> dict[str, tuple[float, float]]:
        """Percentiles of the draws. Timed rates are left out if prompts share a batch, and so its time."""
        names = [name for name in draw if self._is_timed_by_prompt or name not in TIMED]
        ends = {name: np.percentile(draw[name], [2.5, 97.5]) for name in names}
        return {name: (float(low), float(high)) for name, (low, high) in ends.items()}


def environment(device: torch.device) -> dict[str, Any]:
    """Versions and hardware of the measurement, without host name and paths."""
    packages = {"graft": "graft-decoding", "torch": "torch", "transformers": "transformers", "numpy": "numpy"}
    return {
        "versions": {
            "python": platform.python_version(),
            **{label: version(distribution) for label, distribution in packages.items()},
        },
        "device": torch.cuda.get_device_name(device) if device.type == "cuda" else device.type,
        "cpu": cpu_name(),
        "cores": num_cores(),
        "threads": torch.get_num_threads(),
        "system": f"{platform.system()} {platform.machine()}",
    }


def _totals(counts: Sequence[Any], times: Sequence[Any]) -> dict[str, Any]:
    """Sums of the fields of a `Run`. counts: objects with the counters; times: objects with the seconds."""
    added: dict[str, Any] = {
        name: sum(getattr(one, name) for one in counts) for name in ("tokens", "rounds", "accepted")
    }
    added |= {name: sum(getattr(one, name) for one in times) for name in ("decode_seconds", "prefill_seconds")}
    for name in ("accepted_by_source", "accepted_by_depth", "proposed_by_source"):
        added[name] = _added(getattr(one, name) for one in counts)
    return added | {"seconds_by_phase": _added(one.seconds_by_phase for one in times)}


def _own_rates(samples: Samples, picks: Picks | None) -> Rates:
    """Ratios of sums over the picked answers."""
    columns = _by_prompt(samples)
    sums = {
        name: column.sum().reshape(1) if picks is None else column[picks].sum(axis=(1, 2))
        for name, column in columns.items()
    }
    rounds = sums["rounds"]
    mean_accepted = 1 + sums["accepted"] / rounds
    passes = sums["draft_passes"] / rounds
    return {
        "tokens_per_second": sums["tokens"] / sums["seconds"],
        "mean_accepted": mean_accepted,
        "draft_passes_per_round": passes,
        "nodes_per_round": sums["nodes"] / rounds,
        "modelled_speed": mean_accepted / (1 + USUAL_PASS_COST * passes),
    }


def _by_prompt(samples: Samples) -> dict[str, NDArray[np.float64]]:
    """The columns to sum [prompts, turns]. A turn is one repetition of all prompts."""
    place = {prompt: row for row, prompt in enumerate(dict.fromkeys(s.prompt for s in samples.samples))}
    names = (*_COUNTERS, "seconds")
    table = np.zeros((len(names), len(place), len(samples.samples) // len(place)))
    turns: Counter[str] = Counter()
    for sample in samples.samples:
        counts = [getattr(sample.answer.stats, name) for name in _COUNTERS]
        table[:, place[sample.prompt], turns[sample.prompt]] = [*counts, sample.decode_seconds]
        turns[sample.prompt] += 1
    return dict(zip(names, table, strict=True))


def _draw(num_prompts: int, num_turns: int, task: int) -> Picks:
    """Bootstrap samples: prompts drawn with replacement, and for each of them turns.

    All methods get the same ones, so that ratios are fair: in a turn they answer a prompt one after the other.
    """
    rng = np.random.default_rng([_SEED, task])
    prompts = rng.integers(num_prompts, size=(_NUM_DRAWS, num_prompts, 1))
    return prompts, rng.integers(num_turns, size=(_NUM_DRAWS, num_prompts, num_turns))


def _points(rates: Rates) -> dict[str, Any]:
    missing = dict.fromkeys(("speedup", "modelled_over_dense"))
    return missing | {name: float(value[0]) for name, value in rates.items()}


def _different(samples: Samples, plain: Samples) -> set[str]:
    """Prompts with an answer that differs from the first one of plain decoding."""
    expected: dict[str, list[int]] = {}
    for sample in plain.samples:
        expected.setdefault(sample.prompt, sample.answer.ids)
    return {sample.prompt for sample in samples.samples if sample.answer.ids != expected[sample.prompt]}


def _prompt_facts(sample: Sample) -> dict[str, Any]:
    counts = {name: getattr(sample.answer.stats, name) for name in _COUNTERS}
    seconds = {"prefill_seconds": sample.prefill_seconds, "decode_seconds": sample.decode_seconds}
    return {"id": sample.prompt, **counts, **seconds}


def _num_prompts(samples: Samples) -> int:
    return len({sample.prompt for sample in samples.samples})


def _added(counts: Iterable[Mapping[Any, Any]]) -> dict[Any, Any]:
    total: Counter[Any] = Counter()
    for count in counts:
        total.update(count)
    ordered = sorted(total.items()) if all(isinstance(key, int) for key in total) else total.items()
    return dict(ordered)


def _flat(run: Run) -> dict[str, Any]:
    """A row of results.csv, with a column for each nested value."""
    row: dict[str, Any] = {}
    for name, value in vars(run).items():
        if name == "confidence":
            for rate, (low, high) in value.items():
                row |= {f"{rate}_low": low, f"{rate}_high": high}
        elif isinstance(value, dict):
            row |= {f"{name}.{key}": v for key, v in value.items()}
        elif name != "by_prompt":
            row[name] = value
    return row
