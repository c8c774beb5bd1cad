"""Methods of the benchmark: decoding methods to compare. Graft's policies and ablations; transformers' are in `peers`.

A method answers prompts given as token ids. What it learned can be saved with `state` and put back with `restore`.
"""

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from torch import Tensor
from transformers import PreTrainedModel

from graft.bench.baselines.gate_calibration import calibrated_gates
from graft.engine import Engine
from graft.model import target_for
from graft.model.sampler import SamplingSettings
from graft.request.stats import Stats
from graft.spec_decode.policies import Policy, PolicySettings, policy_with
from graft.spec_decode.proposers.drafter import Drafter

PLAIN = "off"  # what speeds and texts are compared with
DENSE = "dense"  # what modelled speeds are compared with
_USUAL = PolicySettings()


@dataclass(frozen=True)
class Answer:
    """New tokens of one prompt, with counts and times; times are those of the whole batch."""

    ids: list[int]
    stats: Stats


class Method(ABC):
    """One decoding method: answers prompts, and may learn from them."""

    name: str
    is_batched = True  # can decode several prompts together

    @abstractmethod
    def answer(self, prompts: Sequence[Sequence[int]], settings: SamplingSettings) -> list[Answer]:
        """Decodes the prompts together."""

    @property
    def num_setups(self) -> int:
        """How many one-time set-ups were made so far, such as captures of CUDA graphs."""
        return 0

    def is_exact(self, settings: SamplingSettings) -> bool:
        """Whether it must give the text of plain decoding under these settings."""
        return True

    def warm_up(self, groups: Sequence[Sequence[Sequence[int]]], settings: SamplingSettings) -> Mapping[str, Tensor]:
        """Answers prompts, one batch per group, and returns the learned state."""
        for prompts in groups:
            self.answer(prompts, settings)
        return self.state()

    def state(self) -> dict[str, Tensor]:
        """The learned state; empty for a method that learns nothing."""
        return {}

    def restore(self, state: Mapping[str, Tensor]) -> None:  # noqa: B027 - most learn nothing
        """Puts back a state that `state` returned."""


class PolicyMethod(Method):
    """A policy in Graft's engine. Tokens are not detokenized: that is no part of decoding."""

    def __init__(
        self,
        name: str,
        model: PreTrainedModel,
        drafter: Drafter | None = None,
        settings: PolicySettings = _USUAL,
        exact: bool = False,
    ) -> None:
        self.name = name
        self._settings, self._exact = settings, exact
        self._policy = _make(name, model, drafter, settings, exact)
        if drafter is not None and self._policy.drafter is None:  # spare it the features that a drafter reads
            drafter = None
            self._policy = _make(name, model, None, settings, exact)
        self._engine = Engine(model, policy=self._policy, drafter=drafter, budget=settings.budget, exact=exact)

    def answer(self, prompts: Sequence[Sequence[int]], settings: SamplingSettings) -> list[Answer]:
        generations = self._engine.generate_batch([list(prompt) for prompt in prompts], **vars(settings))
        return [Answer(generation.ids, generation.stats) for generation in generations]

    @property
    def num_setups(self) -> int:
        return self._engine.num_setups

    def warm_up(self, groups: Sequence[Sequence[Sequence[int]]], settings: SamplingSettings) -> Mapping[str, Tensor]:
        """Calibrates gates too. Where texts are isolated, a copy of the method that shares texts learns for all."""
        model, drafter = self._engine.target.model, self._engine.drafter
        if self._settings.isolated:
            taught = PolicyMethod(self.name, model, drafter, replace(self._settings, isolated=False), self._exact)
            taught.restore(self.state())
            return taught.warm_up(groups, settings)
        state = dict(super().warm_up(groups, settings))
        return state | calibrated_gates(state, model, drafter, groups, settings)

    def state(self) -> dict[str, Tensor]:
        return self._policy.state()

    def restore(self, state: Mapping[str, Tensor]) -> None:
        self._policy.restore(state)


def _make(name: str, model: PreTrainedModel, drafter: Drafter | None, settings: PolicySettings, exact: bool) -> Policy:
    target = target_for(model, drafter.hidden_layers if drafter is not None else (), exact=exact)
    return policy_with(settings, name, target, drafter)
