"""Settings of the SGLang plugin, from the environment: plugins cannot add flags; and what it asks of SGLang's own."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

from graft.errors import GraftError
from graft.settings import Settings, require, require_known
from graft.spec_decode.policy_settings import MAX_BUDGET

SWITCH = "GRAFT_SGLANG"
PREFIX = "GRAFT_SGLANG_"
VERSION = "0.5.15"  # of SGLang: hooks name its private functions
HEAD = "LlamaForCausalLMEagle3"  # the class that SGLang loads an EAGLE-3 head with
_YES, _NO = ("1", "true", "on", "yes"), ("0", "false", "off", "no", "")


@dataclass(frozen=True)
class SGLangSettings(Settings):
    """Settings of the plugin; `GRAFT_SGLANG_BUDGET=31` sets `budget`."""

    budget: int | None = None  # nodes that a row verifies beside the root; None: --speculative-num-draft-tokens less 1
    max_depth: int | None = None  # of a tree; None: its nodes alone bound it
    max_texts: int = 4096  # requests that were seen and neither run nor finished, whose texts are kept
    isolated: bool = False  # requests learn nothing from each other

    def __post_init__(self) -> None:
        for name in ("budget", "max_depth", "max_texts"):
            value = getattr(self, name)
            require(value is None or value >= 1, f"{_variable(name)} must be at least 1, not {value}")
        if self.budget is not None:
            require(self.budget <= MAX_BUDGET, f"{_variable('budget')} must be at most {MAX_BUDGET}, not {self.budget}")


def from_environment(environment: Mapping[str, str]) -> SGLangSettings | None:
    """The settings; None where the plugin is not switched on. Unknown names are errors."""
    options: dict[str, int | bool] = {}
    known = [_variable(field.name) for field in fields(SGLangSettings)]
    for name, value in environment.items():
        if name.startswith(PREFIX):
            require_known("variable", name, known)
            key = name.removeprefix(PREFIX).lower()
            options[key] = _yes_or_no(name, value) if key == "isolated" else _whole_number(name, value)
    settings = SGLangSettings.of(options)
    return settings if _yes_or_no(SWITCH, environment.get(SWITCH, "")) else None


def check_version(version: str) -> None:
    require(version == VERSION, f"the SGLang plugin is made for SGLang {VERSION}, not {version}: unset {SWITCH}")


def check_server(server_args: Any, settings: SGLangSettings) -> None:
    """Refuses flags of SGLang with which Graft cannot work. server_args: SGLang's `ServerArgs`, complete."""
    algorithm = str(server_args.speculative_algorithm)
    require(algorithm == "EAGLE3", f"{SWITCH}=1 needs --speculative-algorithm EAGLE3, not {algorithm}")
    topk, num_places = server_args.speculative_eagle_topk, server_args.speculative_num_draft_tokens
    require(
        topk is not None and topk >= 2, f"--speculative-eagle-topk must be 2 or more, not {topk}: Graft verifies trees"
    )
    require(
        num_places is not None and 2 <= num_places <= MAX_BUDGET + 1,
        f"--speculative-num-draft-tokens must be between 2 and {MAX_BUDGET + 1}, not {num_places}",
    )
    require(
        settings.budget is None or settings.budget < num_places,
        f"{_variable('budget')} ({settings.budget}) must be less than --speculative-num-draft-tokens ({num_places})",
    )
    require(
        server_args.disable_overlap_schedule,
        "Graft needs the whole text before it drafts: add --disable-overlap-schedule",
    )
    for name in ("speculative_adaptive", "speculative_use_rejection_sampling"):
        flag = "--" + name.replace("_", "-")
        require(not getattr(server_args, name, False), f"Graft replaces what {flag} does: leave it out")
    config = Path(str(server_args.speculative_draft_model_path)) / "config.json"
    if config.is_file():  # of a head on the hub, it is known once it is loaded
        try:
            architectures = json.loads(config.read_text(encoding="utf-8")).get("architectures")
        except (OSError, ValueError, AttributeError) as error:
            raise GraftError(f"cannot read {config}: {' '.join(str(error).split())}") from error
        check_head(architectures or ())


def check_head(architectures: Sequence[str]) -> None:
    """Refuses a head that SGLang would load as something else than an EAGLE-3 head."""
    named = ", ".join(architectures) or "nothing"
    require(
        list(architectures) == [HEAD],
        f'the head\'s config.json must say "architectures": ["{HEAD}"], by which SGLang knows an EAGLE-3 head; '
        f"it names {named}",
    )


def _variable(name: str) -> str:
    return PREFIX + name.upper()


def _whole_number(name: str, value: str) -> int:
    try:
        return int(value)
    except ValueError:
        raise GraftError(f"{name} must be a whole number, not {value!r}") from None


def _yes_or_no(name: str, value: str) -> bool:
    word = value.strip().lower()
    require(word in _YES + _NO, f"{name} must be 1 or 0, not {value!r}")
    return word in _YES
