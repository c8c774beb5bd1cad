"""`Mixture` runs a described mixture of experts by the kernels of `kernels/experts.py`. Needs Triton.

Weights stay the model's own parameters. Those that are stored transposed are stored anew, and the parameters become
views of them, since the kernels read a neuron's inputs side by side.
"""

from __future__ import annotations

from typing import Protocol

import torch
from torch import Tensor

from graft.model.kernels import experts as kernels
from graft.model.kernels import routing
from graft.model.kernels.matmul import Products
from graft.model.kernels.mixed import Mixed
from graft.model.network import Experts


class SharedExpert(Protocol):
    """An MLP that all tokens go through."""

    @property
    def weights(self) -> tuple[Tensor, ...]: ...

    def __call__(self, x: Tensor, multiply: Products) -> Tensor: ...


class Mixture:
    """The experts of one layer."""

    def __init__(self, experts: Experts, shared: SharedExpert | None = None, weight: Tensor | None = None) -> None:
        """weight: the router's with that of the shared expert's gate as the last row, if there is one."""
        self._experts, self._shared, self._weight = experts, shared, weight
        gate_up, down = (_by_output(weight, experts.transposed) for weight in (experts.gate_up, experts.down))
        self._gate_up, self._down = _in_parts(gate_up, experts.interleaved), down[:, None]
        self._gate_up_bias = self._down_bias = None
        if experts.gate_up_bias is not None and experts.down_bias is not None:
            self._gate_up_bias = _in_parts(experts.gate_up_bias.detach(), experts.interleaved)
            self._down_bias = experts.down_bias.detach()[:, None]
        self._clamp = (
            (experts.limit, experts.alpha) if experts.limit is not None and experts.alpha is not None else None
        )

    @property
    def weights(self) -> tuple[Tensor, ...]:
        """Those that `Products` multiplies by: the shared expert's."""
        return self._shared.weights if self._shared is not None else ()

    @torch.no_grad()
    def __call__(self, x: Tensor, multiply: Products) -> Mixed:
        """What the experts give for tokens x [T, H]."""
        router, activation = self._experts.router, self._experts.activation
        shared = self._shared(x, multiply) if self._shared is not None else None
        choice = routing.choose(x, router, self._weight)
        memory = kernels.shared_memory_of(x.device)
        tiles = kernels.tiles_for(len(x), router.num_experts, router.top_k, x.shape[1], x.dtype, memory)
        groups = routing.group(choice, router.num_experts, tiles[0].tokens)
        active = kernels.multiply(
            x, self._gate_up, choice, groups, tiles[0], self._gate_up_bias, activation, self._clamp
        )
        results = kernels.multiply(active, self._down, choice, groups, tiles[1], self._down_bias)
        return Mixed(results, choice.weights, router.wide_weights, shared, choice.gates)


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
