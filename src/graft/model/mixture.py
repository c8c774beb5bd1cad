"""`Mixture` runs a described mixture of experts by the kernels of `kernels/experts.py`. Needs Triton.

Weights stay the model's own parameters. Those that are stored transposed are stored anew, and the parameters become
views of them, since the kernels read a neuron's inputs side by side.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from graft.model.kernels import experts as kernels
from graft.model.network import Experts

_ALIGNED = 16  # bytes: rows that the device loads in blocks start at multiples


def why_no_mixture(experts: Experts) -> str | None:
    """The reason why the kernels cannot run these experts; None if they can."""
    inner, size = experts.down.shape[1:] if experts.transposed else experts.down.shape[:0:-1]
    if any(count * experts.down.itemsize % _ALIGNED for count in (inner, size)):
        return "its experts' sizes are no multiples of 8"
    if experts.activation != "silu":
        return f"its experts' activation is {experts.activation}"
    return None


class Mixture:
    """The experts of one layer."""

    def __init__(self, experts: Experts, shared: Callable[[Tensor], Tensor] | None = None) -> None:
        """shared: computes the shared expert, if there is one."""
        self._experts, self._shared = experts, shared
        router = experts.router
        gate = experts.shared_gate
        self._weight = router.weight if gate is None else torch.cat([router.weight, gate.weight.to(router.weight)])
        gate_up, down = (_by_output(weight, experts.transposed) for weight in (experts.gate_up, experts.down))
        self._gate_up, self._down = _in_parts(gate_up, experts.interleaved), down[:, None]
        self._gate_up_bias = self._down_bias = None
        if experts.gate_up_bias is not None and experts.down_bias is not None:
            self._gate_up_bias = _in_parts(experts.gate_up_bias.detach(), experts.interleaved).contiguous()
            self._down_bias = experts.down_bias.detach()
        self._clamp = (
            (experts.limit, experts.alpha) if experts.limit is not None and experts.alpha is not None else None
        )

    @torch.no_grad()
    def __call__(self, x: Tensor) -> Tensor:
        """The experts' weighted sum for tokens x [T, H]."""
        router = self._experts.router
        shared = self._shared(x) if self._shared is not None else None
        choice = kernels.choose(x, router, self._weight)
        tiles = kernels.tiles_for(len(x), router.num_experts, router.top_k, x.dtype)
        groups = kernels.group(choice, router.num_experts, tiles[0].tokens)
        active = kernels.multiply(x, self._gate_up, choice, groups, tiles[0], self._gate_up_bias, self._clamp)
        results = kernels.multiply(active, self._down, choice, groups, tiles[1], self._down_bias)
        return kernels.combine(results, choice, shared, router.wide_weights)


def _by_output(weight: Tensor, transposed: bool) -> Tensor:
    """A weight [E, outputs, inputs] with neighbouring inputs. A transposed parameter becomes a view of it."""
    if not transposed:
        return weight.detach()
    turned = weight.detach().transpose(1, 2)
    if not turned.is_contiguous():
        turned = turned.contiguous()
        weight.data = turned.transpose(1, 2)
    return turned


def _in_parts(values: Tensor, interleaved: bool) -> Tensor:
    """Gates and ups [E, 2 * neurons, ...] as [E, 2, neurons, ...]."""
    return values.unflatten(1, (-1, 2)).transpose(1, 2) if interleaved else values.unflatten(1, (2, -1))
