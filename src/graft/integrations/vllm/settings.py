"""Settings of Graft inside vLLM: environment variables, as plugins can add no flags."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from graft.integrations.environment import settings_of
from graft.settings import Settings, require

SWITCH = "GRAFT_VLLM"  # 1: the plugin is on


@dataclass(frozen=True)
class ChainSettings(Settings):
    """Settings of the chains that vLLM verifies; GRAFT_VLLM_PASSES is `passes`, and so on."""

    passes: int | None = None  # the most passes of the draft head; None: one for every token of a chain
    pass_cost: float | None = None  # of a draft pass, in steps without drafting; None: measured
    least: float = 0.0  # a chain ends before a token whose acceptance is less probable
    pad: bool | None = None  # whether all chains get the full length; None: where vLLM captures steps of that length
    isolated: bool = False  # requests learn nothing from each other
    log: int | None = None  # a line in vLLM's log after so many steps; None: none

    def __post_init__(self) -> None:
        require(self.passes is None or self.passes >= 1, f"passes must be 1 or more, not {self.passes}")
        require(self.pass_cost is None or self.pass_cost >= 0, f"pass_cost must be 0 or more, not {self.pass_cost}")
        require(self.log is None or self.log >= 1, f"log must be 1 or more steps, not {self.log}")
        require(0 <= self.least < 1, f"least must be a probability below 1, not {self.least}")

    @classmethod
    def from_environment(cls, environment: Mapping[str, str]) -> ChainSettings:
        return settings_of(cls, SWITCH, environment)
