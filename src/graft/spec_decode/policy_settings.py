"""Settings of the tree that every policy takes."""

from __future__ import annotations

from dataclasses import dataclass

from graft.settings import Settings, require

POLICY_NAMES = ("off", "graft")  # those that users choose between; `graft.bench` registers more
DEFAULT_POLICY = "graft"
MAX_BUDGET = 127  # the most nodes of a row in a round, without the root
USUAL_BUDGET = 60  # nodes of a row, for policies that do not choose their number
USUAL_PASS_COST = 0.03  # of a draft pass, in verify steps, until it is measured: about the published ratio


@dataclass(frozen=True)
class PolicySettings(Settings):
    """Settings of the tree that every policy takes."""

    budget: int | None = None  # nodes per row and round, without the root; None: what pays, or the usual 60
    pass_cost: float | None = None  # of a draft pass, in verify steps of the whole budget; None: measured
    isolated: bool = False  # texts of different owners learn nothing from each other; a restored state is shared
    passes: int | None = None  # draft passes of every round, for measurements; None: what pays

    def __post_init__(self) -> None:
        is_whole = isinstance(self.budget, int) and not isinstance(self.budget, bool)
        good = self.budget is None or (is_whole and 1 <= self.budget <= MAX_BUDGET)
        require(good, f"budget must be between 1 and {MAX_BUDGET}, not {self.budget!r}")
        require(self.passes is None or self.passes >= 0, f"passes must be 0 or more, not {self.passes}")
        require(self.pass_cost is None or self.pass_cost >= 0, f"pass_cost must be 0 or more, not {self.pass_cost}")
