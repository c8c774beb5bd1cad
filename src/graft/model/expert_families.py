"""Readers of mixtures of experts: descriptions of the blocks of transformers' models that stand in place of an MLP."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal

from torch import nn

from graft.model.network import Activation, Experts, Mlp, Router


@dataclass(frozen=True)
class RouterFamily:
    """What the code of a family's routers does that no attribute tells."""

    scoring: Literal["softmax", "sigmoid", "softmax_of_chosen"] = "softmax"
    normalises: bool | None = None  # None: the router has the attribute `norm_topk_prob`
    wide: bool = False
    wide_weights: bool = False
    added_to_sum: float = 0.0


# By the first part of the names of a family's classes.
ROUTERS: dict[str, RouterFamily] = {
    **dict.fromkeys(("Qwen2Moe", "Qwen3Moe", "Olmoe"), RouterFamily()),
    "Mixtral": RouterFamily(normalises=True, wide_weights=True),
    "MiniMaxM2": RouterFamily("sigmoid", normalises=True, wide_weights=True),
    **dict.fromkeys(("Glm4Moe", "Dots1"), RouterFamily("sigmoid", wide=True, wide_weights=True, added_to_sum=1e-20)),
    "Ernie4_5_Moe": RouterFamily(normalises=True, wide=True),
    "GptOss": RouterFamily("softmax_of_chosen", normalises=False),
}
_ALIGNED = 16  # bytes: rows that a device loads in blocks start at multiples
_ROUTER_NAMES = ("gate", "router")
_SHARED_NAMES = ("shared_expert", "shared_experts")


def why_not(experts: Experts) -> str | None:
    """The reason why no kernel can run these experts; None if one can."""
    if any(size * experts.down.itemsize % _ALIGNED for size in experts.down.shape[1:]):
        return "its experts' sizes are no multiples of 8"
    return None


def read_experts(
    block: Any,
    family: RouterFamily,
    check_own: Callable[[nn.Module, str], None],
    activation_of: Callable[[nn.Module], Activation],
    mlp_of: Callable[[Any], Mlp],
) -> Experts:
    """Describe a block of experts. check_own: refuses modules that are not of the model's file and kind."""
    check_own(block, "")
    experts = block.experts
    router = next(getattr(block, name) for name in _ROUTER_NAMES if hasattr(block, name))
    for module, what in ((router, "Router"), (experts, "Experts")):
        check_own(module, what)
    # The bias of the choice is a buffer of the router or of the block, or a parameter of a module of the router's.
    owners = (router, block, getattr(router, "moe_statics", None))
    corrections = [getattr(owner, "e_score_correction_bias", None) for owner in owners]
    correction = next((each for each in corrections if each is not None), None)
    shared = next((each for name in _SHARED_NAMES if (each := getattr(block, name, None)) is not None), None)
    normalises = router.norm_topk_prob if family.normalises is None else family.normalises
    return Experts(
        router=Router(
            weight=router.weight,
            bias=getattr(router, "bias", None),
            correction=correction,
            scoring=family.scoring,
            top_k=router.top_k,
            groups=getattr(router, "num_group", 1),
            top_groups=getattr(router, "topk_group", 1),
            normalise=normalises,
            least_sum=getattr(router, "norm_min", 0.0),
            added_to_sum=family.added_to_sum,
            factor=getattr(router, "routed_scaling_factor", 1.0),
            wide=family.wide,
            wide_weights=family.wide_weights,
        ),
        gate_up=experts.gate_up_proj,
        down=experts.down_proj,
        activation="silu" if hasattr(experts, "alpha") else activation_of(experts.act_fn),
        gate_up_bias=getattr(experts, "gate_up_proj_bias", None),
        down_bias=getattr(experts, "down_proj_bias", None),
        transposed=experts.is_transposed,
        interleaved=not experts.is_concatenated,
        limit=getattr(experts, "limit", None),
        alpha=getattr(experts, "alpha", None),
        shared=mlp_of(shared) if shared is not None else None,
        shared_gate=getattr(block, "shared_expert_gate", None),
    )
