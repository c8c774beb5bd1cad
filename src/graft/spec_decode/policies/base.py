"""The policy contract: what a round may propose, and what is kept of what rounds have learned."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from typing import Protocol

from torch import Tensor

from graft.drafters.drafter import Drafter
from graft.model import TargetRunner
from graft.spec_decode.memory import Memory
from graft.spec_decode.planner import Planner
from graft.spec_decode.policy_settings import PolicySettings
from graft.tree.device.fixed import FixedTree


class Owned(Protocol):
    """A text, as isolation tells texts apart."""

    number: int  # unique among all texts
    owner: int | None  # isolated texts of one owner learn from each other; None: no owner


class Policy(ABC):
    """Decides which candidates a round verifies, but never what is accepted."""

    drafts = False  # whether it needs a drafter
    sources: tuple[str, ...] = ("root",)  # names, by source number
    common_sources: frozenset[str] = frozenset()  # those that may propose other users' text
    drafter: Drafter | None = None
    memory: Memory | None = None  # what it retrieves from; None: it retrieves nothing
    planner: Planner | None = None  # of rounds with trees; None: rounds are plain
    isolated = False
    knows_draws = False  # whether its trees use the noise of coming draws
    num_texts = 0  # finished texts that it has learned from
    fixed: FixedTree | None = None  # rules for its trees; None: acceptance probabilities decide
    thresholds: Sequence[float] = ()  # of the gates in these rules

    @abstractmethod
    def __init__(self, target: TargetRunner, drafter: Drafter | None, settings: PolicySettings) -> None: ...

    def prepare(self) -> None:  # noqa: B027 - optional
        """Called before every run. Measures, once, costs that the policy needs from the start."""

    def measure(self) -> None:  # noqa: B027 - optional
        """Measure, once, costs that would otherwise be learned from rounds. A server does so at start-up."""

    def state(self) -> dict[str, Tensor]:
        """A copy of everything learned, by name; empty for a policy that learns nothing."""
        return {}

    def restore(self, state: Mapping[str, Tensor]) -> None:  # noqa: B027 - optional
        """Restore everything learned from `state`, made on any device; missing parts start anew."""

    def costs(self) -> dict[str, Tensor]:
        """Measured costs, by name; empty for a policy that needs none."""
        return {}

    def restore_costs(self, costs: Mapping[str, Tensor]) -> None:  # noqa: B027 - optional
        """Restore costs from `costs`, made on this machine, so that they need not be measured again."""

    def salt_of(self, text: Owned) -> int:
        """The salt of a text's table entries: 0 if all texts share them, else its owner or its own number."""
        if not self.isolated:
            return 0
        return text.number if text.owner is None else text.owner
