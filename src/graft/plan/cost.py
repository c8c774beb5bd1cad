"""Roofline model of a round's time: memory reads, matrix products, kernel launches and all-reduces.

The efficiencies were measured on one H200 (docs/benchmarks.md) and are used for every GPU. All-reduce times are
assumptions: nothing was measured on more than one GPU.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field

from graft.plan.gpus import Gpu
from graft.plan.models import BYTES, ModelShape
from graft.settings import Settings, require

_TILE_ROWS = 64  # query rows of an attention tile; nodes times query heads per key head are rounded up to it
_BEAMS = 10  # nodes that a draft pass expands in each row


@dataclass(frozen=True)
class Efficiency(Settings):
    """Shares of the data sheet's peaks that are reached, and fixed times in seconds."""

    bandwidth: float = 4.25 / 4.8  # measured with a copy on an H200
    products: float = 0.80  # measured with a layer of 8B at 512 to 2,048 tokens
    attention: float = 0.25  # measured with a tree of 64 nodes at a context of 16K
    launch: float = 3.3e-6  # per kernel of a CUDA graph: 309 kernels of smollm2-135m take 1.01 ms besides reading
    plain_host: float = 0.14e-3  # host time of a plain round of one row
    host: float = 1.3e-3  # host time of a round with a tree, and everything else that the roofline omits
    host_growth: float = 1 / 3  # host times grow with this power of the rows (docs/plan.md)
    nvlink_latency: float = 10e-6  # per all-reduce, assumed
    pcie_latency: float = 30e-6  # per all-reduce, assumed


@dataclass(frozen=True)
class Costs:
    """Seconds of a model's steps and draft passes on equal GPUs with tensor parallelism."""

    model: ModelShape
    gpu: Gpu
    num_gpus: int = 1
    draft_vocab: int = 32_000
    efficiency: Efficiency = field(default_factory=Efficiency)

    def __post_init__(self) -> None:
        heads = self.model.shape.heads
        require(self.num_gpus >= 1, f"gpus must be at least 1, not {self.num_gpus}")
        require(
            heads % self.num_gpus == 0,
            f"gpus must divide the {heads} query heads of {self.model.name}, and {self.num_gpus} does not",
        )

    @property
    def _cache_parts(self) -> int:
        """GPUs over which the KV cache is split. With fewer key heads than GPUs, several GPUs hold the same head."""
        return math.gcd(self.num_gpus, self.model.shape.kv_heads)

    def step(self, rows: int, width: int, context: int) -> float:
        """Seconds of a target step. width: tokens per row; context: tokens in the KV cache per row."""
        model, shape = self.model, self.model.shape
        num_tokens = rows * width
        products = self.products(model.weights_read(num_tokens), num_tokens * model.active_parameters)
        kernels = shape.layers * (14 if model.experts else 10) + 9
        reduced = (2 * shape.layers + 1) * self._all_reduce(num_tokens)
        return products + self.attention(rows, width, context) + kernels * self.efficiency.launch + reduced

    def draft_pass(self, rows: int) -> float:
        """Seconds of a draft pass of an EAGLE-3 head: a layer that reads two vectors per token, and the lm_head."""
        model, shape = self.model, self.model.shape
        inputs = shape.hidden * shape.head_dim * (shape.heads + 2 * shape.kv_heads)  # for the second vector
        weights = inputs + model.attention_weights + 3 * shape.hidden * model.head_intermediate
        weights += self.draft_vocab * shape.hidden
        products = self.products(weights, rows * _BEAMS * weights)
        return products + 19 * self.efficiency.launch + 3 * self._all_reduce(rows * _BEAMS)

    def round(self, rows: int, nodes: int, passes: float, context: int) -> float:
        """Seconds of a round. nodes: per tree, besides the root; 0 is plain decoding."""
        host = self.efficiency.host if nodes else self.efficiency.plain_host
        host *= rows**self.efficiency.host_growth
        drafting = passes * self.draft_pass(rows) if passes else 0.0
        return self.step(rows, 1 + nodes, context) + drafting + host

    def prompt_token(self, context: int) -> float:
        """Seconds of prefill per token, in steps of 2,048."""
        return self.step(1, 2048, context) / 2048

    def weight_bytes(self) -> float:
        """Bytes of weights on each GPU, including the head's."""
        shape = self.model.shape
        head = 2 * self.model.attention_weights + 3 * shape.hidden * self.model.head_intermediate
        head += self.draft_vocab * shape.hidden + 3 * shape.hidden**2  # lm_head, and fc over three layers' features
        return BYTES * (self.model.parameters + head) / self.num_gpus

    def cache_bytes(self, rows: int, context: int) -> float:
        """Bytes of the KV cache on each GPU, including the head's one layer."""
        layers = self.model.shape.layers
        return BYTES * rows * context * self.model.cache_numbers * (layers + 1) / layers / self._cache_parts

    def products(self, weights: float, multiplied: float) -> float:
        """Seconds of matrix products. Reading and multiplying overlap in part, hence the root of the squares."""
        reading = BYTES * weights / self.num_gpus / (self.gpu.bandwidth * self.efficiency.bandwidth)
        multiplying = 2 * multiplied / self.num_gpus / (self.gpu.flops * self.efficiency.products)
        return math.hypot(reading, multiplying)

    def attention(self, rows: int, width: int, context: int) -> float:
        """Seconds of attention over the KV cache, in all layers."""
        model, shape = self.model, self.model.shape
        numbers = rows * context * model.cache_numbers / self._cache_parts
        reading = BYTES * numbers / (self.gpu.bandwidth * self.efficiency.bandwidth)
        heads = shape.heads // self.num_gpus
        key_heads = shape.kv_heads // self._cache_parts
        query_rows = _TILE_ROWS * math.ceil(width * math.ceil(heads / key_heads) / _TILE_ROWS)
        operations = 4 * shape.layers * rows * query_rows * key_heads * shape.head_dim * context
        return math.hypot(reading, operations / (self.gpu.flops * self.efficiency.attention))

    def _all_reduce(self, num_tokens: int) -> float:
        """Seconds of a ring all-reduce of one hidden state per token, at half the link's two-way bandwidth."""
        if self.num_gpus == 1:
            return 0.0
        latency = self.efficiency.nvlink_latency if self.gpu.has_nvlink else self.efficiency.pcie_latency
        sent = BYTES * num_tokens * self.model.shape.hidden * 2 * (self.num_gpus - 1) / self.num_gpus
        return latency + sent / (self.gpu.link / 2)
