"""Settings of the SGLang plugin, from the environment: plugins cannot add flags; and what it asks of SGLang's own."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from graft.errors import GraftError
from graft.integrations.environment import is_on, settings_of, variable
from graft.settings import Settings, require
from graft.spec_decode.policy_settings import MAX_BUDGET

SWITCH = "GRAFT_SGLANG"
_BUDGET = variable(SWITCH, "budget")
VERSION = "0.5.15"  # of SGLang: hooks name its private functions
HEAD = "LlamaForCausalLMEagle3"  # the class that SGLang loads an EAGLE-3 head with


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
            require(value is None or value >= 1, f"{variable(SWITCH, name)} must be at least 1, not {value}")
        if self.budget is not None:
            require(
                self.budget <= MAX_BUDGET,
                f"{_BUDGET} must be at most {MAX_BUDGET}, not {self.budget}",
            )


def from_environment(environment: Mapping[str, str]) -> SGLangSettings | None:
    """The settings; None where the plugin is not switched on. Unknown names are errors."""
    settings = settings_of(SGLangSettings, SWITCH, environment)
    return settings if is_on(SWITCH, environment) else None


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
        f"{_BUDGET} ({settings.budget}) must be less than --speculative-num-draft-tokens ({num_places})",
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
