"""Settings of training, which are checked without importing torch."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from graft.settings import Settings, require

WEIGHTINGS = ("decay", "pace")


@dataclass(frozen=True)
class AnswerSettings(Settings):
    """Settings of data generation."""

    max_new_tokens: int = 256
    temperatures: tuple[float, ...] = (0.0,)  # every prompt is answered once at each
    num_rows: int = 64  # batch size
    max_prompt_tokens: int = 1536  # longer prompts are skipped
    seed: int = 0

    def __post_init__(self) -> None:
        self.check_least(1, "max_new_tokens", "num_rows", "max_prompt_tokens")
        require(bool(self.temperatures), "temperatures must name at least one")
        require(all(t >= 0 for t in self.temperatures), f"temperatures must be 0 or more, not {self.temperatures}")


@dataclass(frozen=True)
class TrainSettings(Settings):
    """Settings of every training. The defaults suit a small head on one GPU."""

    least_steps: ClassVar[int] = 1

    steps: int = 2000
    batch_tokens: int = 32_768  # per step, padding included
    max_tokens: int = 2048  # most tokens of a prompt with its answer; the rest is cut off
    learning_rate: float = 1e-3
    warmup_steps: int = 100
    weight_decay: float = 0.01
    max_gradient_norm: float = 1.0
    ema_decay: float = 0.0  # decay of the averaged weights, which are evaluated and saved; 0: no average
    evaluate_every: int = 200
    held_back: float = 0.01  # share of the prompts held back for evaluation
    bf16: bool = True  # on a GPU; a CPU computes in fp32
    seed: int = 0

    def __post_init__(self) -> None:
        self.check_least(self.least_steps, "steps")
        self.check_least(1, "batch_tokens", "max_tokens", "evaluate_every")
        require(0 < self.held_back < 1, f"held_back must be between 0 and 1, not {self.held_back}")
        require(self.learning_rate > 0, f"learning_rate must be above 0, not {self.learning_rate}")
        self.check_least(0, "warmup_steps", "weight_decay")
        require(self.max_gradient_norm > 0, f"max_gradient_norm must be above 0, not {self.max_gradient_norm}")
        require(0 <= self.ema_decay < 1, f"ema_decay must be from 0 to below 1, not {self.ema_decay}")


@dataclass(frozen=True)
class Eagle3Settings(TrainSettings):
    """Training settings of EAGLE-3 heads."""

    unroll: int = 5  # draft depths to train
    step_weight: float = 0.8  # loss weight of each depth relative to the one before
    greedy_weight: float = 0.0  # share of the likeliest token in what is learned; the rest is the whole distribution
    chunk_tokens: int = 4096  # tokens whose logits are in memory at once
    flex: bool = True  # on a GPU, use FlexAttention: a dense mask takes far more memory and time

    def __post_init__(self) -> None:
        super().__post_init__()
        self.check_least(1, "unroll", "chunk_tokens")
        require(0 <= self.greedy_weight < 1, f"greedy_weight must be from 0 to below 1, not {self.greedy_weight}")


@dataclass(frozen=True)
class BlockShape(Settings):
    """The network of a new block head. Its layers have the shape of the target's."""

    num_layers: int = 4
    num_taps: int = 5  # number of target layers to read, evenly spread, unless `target_layers` is given
    target_layers: tuple[int, ...] = ()  # target layers whose inputs are read
    conditional_size: int | None = None  # inner size of treeflash's MLP; None is that of the target's layers
    num_drafts: int = 12  # tokens that a block predicts
    slots: str = "in-place"
    causal: bool = False  # slots do not attend to later slots
    learned_mask: bool = True  # fill masked slots with a learned vector, not with a token's embedding

    def __post_init__(self) -> None:
        self.check_least(1, "num_layers", "num_taps", "num_drafts")
        require(self.slots in ("in-place", "shifted"), f"slots must be in-place or shifted, not {self.slots!r}")
        require(self.num_drafts > 1 or self.slots == "in-place", "a block of one shifted slot holds only the root")


@dataclass(frozen=True)
class BlockSettings(TrainSettings):
    """Training settings of block heads."""

    ema_decay: float = 0.999
    anchors: int = 384  # blocks per packed row, drawn anew at every step
    weighting: str = "decay"  # weights of slots: "decay" with depth, or D-PACE's "pace", by the confidence of slots
    gamma: float = 5.0  # decay: slots until the weight falls to 1/e
    pace_floor: float = 0.5  # pace: smallest probability of a slot
    marginal_weight: float = 0.5  # loss weight without the token before a slot; with it the weight is 1
    chunk_slots: int = 4608  # slots whose logits are in memory at once
    flex: bool = True  # on a GPU, use FlexAttention: a dense mask takes far more memory and time
    simulated: int = 128  # held-back answers on which evaluations simulate the accepted length
    nodes: int = 60  # tree nodes in these simulations

    def __post_init__(self) -> None:
        super().__post_init__()
        self.check_least(1, "anchors", "chunk_slots", "nodes")
        require(self.weighting in WEIGHTINGS, f"weighting {self.weighting!r} is not one of {', '.join(WEIGHTINGS)}")
        require(self.gamma > 0, f"gamma must be above 0, not {self.gamma}")
        require(0 <= self.pace_floor < 1, f"pace_floor must be from 0 to below 1, not {self.pace_floor}")
        self.check_least(0, "marginal_weight", "simulated")


@dataclass(frozen=True)
class DepthPrunedSettings(TrainSettings):
    """Training settings of depth-pruned draft models."""

    least_steps: ClassVar[int] = 0  # 0 steps only remove layers

    learning_rate: float = 3e-4  # lower than for new weights
    measured: int = 4096  # tokens, prompts included, on which layers are compared

    def __post_init__(self) -> None:
        super().__post_init__()
        self.check_least(2, "measured")
