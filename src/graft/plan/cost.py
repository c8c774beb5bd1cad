"""Cost of a round by roofline: seconds to read weights, keys and values, to multiply, to launch and to all-reduce.

What is reached of a data sheet was measured on one H200 (docs/benchmarks.md) and is taken for every GPU. The times of
an all-reduce are assumptions: nothing was measured on more than one GPU.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field

from graft.plan.gpus import Gpu
from graft.plan.models import BYTES, ModelShape
from graft.settings import Settings, require

_TILE_ROWS = 64  # query rows of an attention tile: a tree's nodes times the query heads that share keys, rounded up
_BEAMS = 10  # nodes that a draft pass expands, of every row


@dataclass(frozen=True)
class Efficiency(Settings):
    """What is reached of a data sheet, and fixed times in seconds."""

    bandwidth: float = 4.25 / 4.8  # a copy on an H200
    products: float = 0.80  # a layer of 8B at 512 to 2,048 tokens
    attention: float = 0.25  # a tree of 64 nodes at 16K
    launch: float = 3.3e-6  # of a kernel within a graph: 309 of smollm2-135m take 1.01 ms beside reading
    plain_host: float = 0.14e-3  # the host's part of a plain round of one row
    host: float = 1.3e-3  # of a round with a tree, and whatever else the roofline leaves out of one
    host_growth: float = 1 / 3  # both by this power of the rows, as benchmarks/host_time.py has it
    nvlink_latency: float = 10e-6  # of an all-reduce; assumed
    pcie_latency: float = 30e-6  # assumed


@dataclass(frozen=True)
class Costs:
    """Seconds of a model's steps and draft passes on some GPUs of a kind, split by tensor parallelism."""

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
        """GPUs over which keys and values are split: a key head is on several GPUs where there are fewer of them."""
        return math.gcd(self.num_gpus, self.model.shape.kv_heads)

    def step(self, rows: int, width: int, context: int) -> float:
        """Seconds of a target step: so many rows, each a tree of `width` tokens behind a text of `context`."""
        model, shape = self.model, self.model.shape
        num_tokens = rows * width
        products = self.products(model.weights_read(num_tokens), num_tokens * model.active_parameters)
        kernels = shape.layers * (14 if model.experts else 10) + 9
        reduced = (2 * shape.layers + 1) * self._all_reduce(num_tokens)
        return products + self.attention(rows, width, context) + kernels * self.efficiency.launch + reduced

    def draft_pass(self, rows: int) -> float:
        """Seconds of a pass of an EAGLE-3 head: a layer that reads two vectors a token, and its lm_head."""
        model, shape = self.model, self.model.shape
        inputs = shape.hidden * shape.head_dim * (shape.heads + 2 * shape.kv_heads)  # of the second vector
        weights = inputs + model.attention_weights + 3 * shape.hidden * model.head_intermediate
        weights += self.draft_vocab * shape.hidden
        products = self.products(weights, rows * _BEAMS * weights)
        return products + 19 * self.efficiency.launch + 3 * self._all_reduce(rows * _BEAMS)

    def round(self, rows: int, nodes: int, passes: float, context: int) -> float:
        """Seconds of a round of trees with so many nodes beside the root; plain with none."""
        host = self.efficiency.host if nodes else self.efficiency.plain_host
        host *= rows**self.efficiency.host_growth
        drafting = passes * self.draft_pass(rows) if passes else 0.0
        return self.step(rows, 1 + nodes, context) + drafting + host

    def prompt_token(self, context: int) -> float:
        """Seconds of reading one prompt token in a step of 2,048."""
        return self.step(1, 2048, context) / 2048

    def weight_bytes(self) -> float:
        """Weights on each GPU, the head's included."""
        shape = self.model.shape
        head = 2 * self.model.attention_weights + 3 * shape.hidden * self.model.head_intermediate
        head += self.draft_vocab * shape.hidden + 3 * shape.hidden**2  # which joins features of three layers
        return BYTES * (self.model.parameters + head) / self.num_gpus

    def cache_bytes(self, rows: int, context: int) -> float:
        """Keys and values on each GPU, the head's one layer included."""
        layers = self.model.shape.layers
        return BYTES * rows * context * self.model.cache_numbers * (layers + 1) / layers / self._cache_parts

    def products(self, weights: float, multiplied: float) -> float:
        """Seconds of matrix products: reading and multiplying overlap in part, hence the root of the squares."""
        reading = BYTES * weights / self.num_gpus / (self.gpu.bandwidth * self.efficiency.bandwidth)
        multiplying = 2 * multiplied / self.num_gpus / (self.gpu.flops * self.efficiency.products)
        return math.hypot(reading, multiplying)

    def attention(self, rows: int, width: int, context: int) -> float:
        """Seconds of all layers' attention over the committed text."""
        model, shape = self.model, self.model.shape
        numbers = rows * context * model.cache_numbers / self._cache_parts
        reading = BYTES * numbers / (self.gpu.bandwidth * self.efficiency.bandwidth)
        heads = shape.heads // self.num_gpus
        key_heads = shape.kv_heads // self._cache_parts
        query_rows = _TILE_ROWS * math.ceil(width * math.ceil(heads / key_heads) / _TILE_ROWS)
        operations = 4 * shape.layers * rows * query_rows * key_heads * shape.head_dim * context
        return math.hypot(reading, operations / (self.gpu.flops * self.efficiency.attention))

    def _all_reduce(self, num_tokens: int) -> float:
        """Seconds in which all GPUs add up a hidden state of every token: a ring, at half the link's two directions."""
        if self.num_gpus == 1:
            return 0.0
        latency = self.efficiency.nvlink_latency if self.gpu.has_nvlink else self.efficiency.pcie_latency
        sent = BYTES * num_tokens * self.model.shape.hidden * 2 * (self.num_gpus - 1) / self.num_gpus
        return latency + sent / (self.gpu.link / 2)
