"""What a mixture of experts adds to the cost of more tokens: their experts' weights are read too.

Only a guess until steps are timed (`step_times`).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from transformers import PreTrainedModel

_COUNTS = ("num_experts", "num_local_experts", "n_routed_experts", "moe_num_experts")
_CHOSEN = ("num_experts_per_tok", "moe_k")


@dataclass(frozen=True)
class ExpertShare:
    """The experts of a model, and their share of the bytes that a step of one token reads."""

    num_experts: int
    chosen: int  # by each token
    share: float

    @classmethod
    def of(cls, model: PreTrainedModel) -> ExpertShare | None:
        """None: the model has no experts."""
        config = model.config.get_text_config()
        count, chosen = (
            next((value for name in names if isinstance(value := getattr(config, name, None), int)), 0)
            for names in (_COUNTS, _CHOSEN)
        )
        embedding, output = (
            getattr(each(), "weight", None) for each in (model.get_input_embeddings, model.get_output_embeddings)
        )
        of_experts = of_others = 0.0
        for name, weight in model.named_parameters():
            if count and ".experts." in name:
                of_experts += weight.nbytes * chosen / count
            elif weight is not embedding or weight is output:  # of an embedding, few rows are read
                of_others += weight.nbytes
        return cls(count, chosen, of_experts / (of_experts + of_others)) if of_experts else None

    def touched(self, num_tokens: int) -> float:
        """Expected number of experts that tokens have together, if each chooses for itself."""
        return self.num_experts * (1 - (1 - self.chosen / self.num_experts) ** num_tokens)

    def shape(self, usual: Callable[[int], float]) -> Callable[[int], float]:
        """The cost of a step by its number of tokens, in plain steps. usual: of a model without experts."""
        return lambda num_tokens: (
            usual(num_tokens) * (1 - self.share + self.share * self.touched(num_tokens) / self.chosen)
        )


def shape_for(model: PreTrainedModel, usual: Callable[[int], float]) -> Callable[[int], float]:
    """A guess of the cost of a model's step by its number of tokens."""
    experts = ExpertShare.of(model)
    return usual if experts is None else experts.shape(usual)
