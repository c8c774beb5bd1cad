"""Settings of a benchmark, and checks of its names. Nothing here imports torch."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from graft.model.sampling_settings import SamplingSettings
from graft.settings import Settings, require, require_known
from graft.spec_decode.policy_settings import DEFAULT_POLICY

PEERS = ("hf", "hf-lookup", "hf-assisted")  # transformers' own methods
ASSISTED = "hf-assisted"
_BASELINES = ("dense", "prune", "paper", "dense-with-noise", "paper-with-noise", "block", "block-paper")
_LEFT_OUT = (
    "suffix", "past", "ngrams", "adjacency", "recall", "calibration", "pruning", "merging", "noise", "8-bits",
)  # fmt: skip
# Policies that the benchmark can run, in the order in which lists show them. `baselines` has their classes.
POLICY_METHODS = ("off", *_BASELINES, DEFAULT_POLICY, *(f"{DEFAULT_POLICY}-without-{part}" for part in _LEFT_OUT))
STATES = ("cold", "warm", "persistent")


@dataclass(frozen=True)
class BenchSettings(Settings):
    """How the prompts are decoded."""

    max_new_tokens: int = 128
    temperature: float = 0.0
    top_p: float = 1.0
    min_p: float = 0.0
    seed: int = 0
    repeat: int = 1  # times each prompt is answered by each method
    rows: int = 1  # prompts of a task that decode together

    def __post_init__(self) -> None:
        for name in ("repeat", "rows"):
            require(getattr(self, name) >= 1, f"{name} must be at least 1, not {getattr(self, name)}")
        self.sampling(())  # checks the other fields

    def sampling(self, eos_token_ids: Sequence[int], max_new_tokens: int | None = None) -> SamplingSettings:
        return SamplingSettings(
            max_new_tokens=max_new_tokens or self.max_new_tokens,
            temperature=self.temperature,
            top_p=self.top_p,
            min_p=self.min_p,
            seed=self.seed,
            stop_token_ids=tuple(eos_token_ids),
        )


def check_names(
    names: Sequence[str],
    rows: int = 1,
    has_assistant: bool = True,
    known: Sequence[str] = (*POLICY_METHODS, *PEERS),
) -> None:
    """Raise unless every method is known, given once, and can decode `rows` prompts together."""
    require(bool(names), f"no method is named; known: {', '.join(known)}")
    for name in names:
        require_known("method", name, known)
        require(names.count(name) == 1, f"method {name!r} is named twice; once is enough")
        one_by_one = f"method {name!r} decodes one prompt at a time: leave out --rows, or the method"
        require(rows == 1 or name not in PEERS, one_by_one)
        needs = f"method {name!r} drafts with a small model: name one with --assistant"
        require(has_assistant or name != ASSISTED, needs)


def check_states(states: Sequence[str], has_warm_up: bool, rows: int = 1) -> None:
    for state in states:
        require(state in STATES, f"unknown state {state!r}: known are {', '.join(STATES)}")
        require(states.count(state) == 1, f"state {state!r} is named twice; once is enough")
    alone = rows == 1 or "persistent" not in states
    require(alone, "state 'persistent' learns from prompt to prompt, and --rows decodes them together: leave one out")
    require(has_warm_up or "warm" not in states, "state 'warm' needs --warmup FILE: name the file")
