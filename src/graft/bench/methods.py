"""Methods of the benchmark: Graft's policies, baselines and ablations. transformers' methods are in `peers`.

A method answers prompts given as token ids. `state` saves what it has learned, and `restore` puts it back.
"""

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from torch import Tensor
from transformers import PreTrainedModel

from graft.bench.baselines.gate_calibration import calibrated_gates
from graft.drafters.drafter import Drafter
from graft.engine import Engine
from graft.model import target_for
from graft.model.sampler import SamplingSettings
from graft.request.stats import Stats
from graft.spec_decode.policies import Policy, PolicySettings, policy_with

PLAIN = "off"  # the reference for speeds and texts
DENSE = "dense"  # the reference for modelled speeds
_USUAL = PolicySettings()


@dataclass(frozen=True)
class Answer:
    """The answer to one prompt, with counts and times. Times are those of the whole batch."""

    ids: list[int]
    stats: Stats


class Method(ABC):
    """One decoding method: answers prompts, and may learn from them."""

    name: str

    @abstractmethod
    def answer(self, prompts: Sequence[Sequence[int]], settings: SamplingSettings) -> list[Answer]:
        """Decode the prompts together."""

    @property
    def num_setups(self) -> int:
        """The number of one-time set-ups so far, such as captures of CUDA graphs."""
        return 0

    def capture(self, num_prompts: int, longest: int, settings: SamplingSettings) -> None:  # noqa: B027 - most have none
        """Capture the CUDA graphs that so many prompts together may need, with texts of up to `longest` tokens."""

    def is_exact(self, settings: SamplingSettings) -> bool:
        """Whether it must give the text of plain decoding under these settings."""
        return True

    def warm_up(self, groups: Sequence[Sequence[Sequence[int]]], settings: SamplingSettings) -> Mapping[str, Tensor]:
        """Answer prompts, one batch for each group, and return the learned state."""
        for prompts in groups:
            self.answer(prompts, settings)
        return self.state()

    def state(self) -> dict[str, Tensor]:
        """The learned state, which is empty for a method that learns nothing."""
        return {}

    def restore(self, state: Mapping[str, Tensor]) -> None:  # noqa: B027 - most methods learn nothing
        """Put back a state that `state` returned."""


class PolicyMethod(Method):
    """A policy in Graft's engine. Tokens are not detokenized, which is not part of decoding."""

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
        if drafter is not None and self._policy.drafter is None:  # the target need not keep features for a drafter
            drafter = None
            self._policy = _make(name, model, None, settings, exact)
        self._engine = Engine(model, policy=self._policy, drafter=drafter, budget=settings.budget, exact=exact)

    def answer(self, prompts: Sequence[Sequence[int]], settings: SamplingSettings) -> list[Answer]:
        generations = self._engine.generate_batch([list(prompt) for prompt in prompts], **vars(settings))
        return [Answer(generation.ids, generation.stats) for generation in generations]

    @property
    def num_setups(self) -> int:
        return self._engine.num_setups

    def capture(self, num_prompts: int, longest: int, settings: SamplingSettings) -> None:
        self._engine.capture_rounds(num_prompts, longest, settings)

    def warm_up(self, groups: Sequence[Sequence[Sequence[int]]], settings: SamplingSettings) -> Mapping[str, Tensor]:
        """Also calibrates gates. If texts are isolated, a copy of the method without isolation learns instead."""
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
