"""Config of a block head, whichever project it comes from."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Self

from transformers import PreTrainedConfig

from graft.drafters.draft_head import HeadConfig, layer_shape
from graft.settings import check_size, require

MARKOV_HEADS = ("vanilla", "gated", "rnn")


@dataclass(frozen=True, kw_only=True)
class BlockConfig(HeadConfig):
    """Config of a block head. A block is the root followed by masked slots, at the positions from the root's on."""

    num_target_layers: int  # of the target it was trained for
    block_size: int  # slots, including the root's
    mask_token_id: int
    shifted: bool  # a slot predicts the token after its position; False: at its position (the root's slot: nothing)
    causal: tuple[bool, ...]  # by layer: True: slots do not see later slots
    windows: tuple[int | None, ...]  # by layer: number of positions seen, including the slot's own; None: all
    head_norms: bool = True  # queries and keys are normed
    own_lm_head: bool = False  # else the target's
    own_mask: bool = False  # masked slots have a learned vector; else the embedding of mask_token_id
    markov: str | None = None  # DSpark's dependence of logits on the token before: one of MARKOV_HEADS
    markov_rank: int = 0
    conditional: bool = False  # TreeFlash's MLP corrects hidden states by the token before
    conditional_size: int | None = None  # inner size of that MLP; the layers' if None

    def __post_init__(self) -> None:
        super().__post_init__()
        check_size("num_target_layers", self.num_target_layers)
        check_size("block_size", self.block_size)
        require(self.block_size >= 2, "a block of one slot has the root only: block_size must be at least 2")
        mask = self.mask_token_id
        require(
            isinstance(mask, int) and 0 <= mask < self.vocab_size,
            f"mask_token_id {mask!r} is not one of the target's {self.vocab_size:,} tokens",
        )
        require(len(self.causal) > 0, "a head has at least one layer")
        require(
            len(self.windows) == len(self.causal),
            f"{len(self.windows)} windows for {len(self.causal)} layers: there must be one for each",
        )
        for window in self.windows:
            if window is not None:
                check_size("sliding_window", window)
        require(
            self.own_lm_head or (self.draft_vocab_size, self.hidden_size) == (self.vocab_size, self.target_hidden_size),
            "a head with a draft vocabulary or width of its own needs an lm_head of its own",
        )
        self._check_dependencies()

    def _check_dependencies(self) -> None:
        if self.conditional_size is not None:
            check_size("the conditional head's intermediate_size", self.conditional_size)
        require(
            self.markov in (None, *MARKOV_HEADS),
            f"markov_head_type {self.markov!r} is not one of {', '.join(MARKOV_HEADS)}",
        )
        if self.markov is not None:
            check_size("markov_rank", self.markov_rank)
        require(
            self.markov is None or not self.conditional,
            "a head is Markov or conditional, not both: choose one",
        )

    @classmethod
    def for_target(cls, target: PreTrainedConfig, num_layers: int, **changes: Any) -> Self:
        """Config of a new head with the shape of the target's layers, bidirectional, without windows; and `changes`."""
        num_target_layers = target.get_text_config().num_hidden_layers
        usual = {
            "num_target_layers": num_target_layers,
            "target_layers": default_target_layers(num_target_layers, num_layers),
            "causal": (False,) * num_layers,
            "windows": (None,) * num_layers,
        }
        return cls.of({**layer_shape(target), **usual, **changes})

    @property
    def num_layers(self) -> int:
        return len(self.causal)

    @property
    def num_drafts(self) -> int:
        """Tokens that a block predicts."""
        return self.block_size if self.shifted else self.block_size - 1

    @property
    def has_conditionals(self) -> bool:
        """Whether a slot's logits depend on the token before it."""
        return self.conditional or self.markov is not None


def default_target_layers(num_target_layers: int, num_layers: int) -> tuple[int, ...]:
    """The target layers whose inputs DFlash reads by default: as many as the head has layers, evenly spread."""
    if num_layers == 1:
        return (num_target_layers // 2 + 1,)
    span = num_target_layers - 4  # outputs of layer 1 to the last but two
    require(span >= 0, f"a target of {num_target_layers} layers has no default layers to read: name them")
    return tuple(round(1 + number * span / (num_layers - 1)) + 1 for number in range(num_layers))
