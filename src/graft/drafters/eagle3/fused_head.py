"""The EAGLE-3 head in Triton: its three functions over flat buffers, for CUDA graphs.

`enter` runs it on new entries, `root` gives the first level of the trees, and `expand` each later one.

As in `model/llama.py`, weights that one product takes together are concatenated once, and the head's parameters become
views of them.

A draft pass takes about as long as reading the head's weights, and drafts change no text. So large weights are read in
8 bits, if the GPU multiplies in 8 bits. Their inputs have no scale of their own, so they should be larger than 0.01 on
average, below which 8 bits are coarse. Most are norms.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from graft.drafters.beam_drafter import Shape, num_beams
from graft.drafters.draft_buffers import DraftBuffers
from graft.drafters.drafter import Passes, TreeSettings
from graft.drafters.eagle3 import kernels as eagle3_kernels
from graft.drafters.eagle3.head import Eagle3Head
from graft.model import PagePool
from graft.model.attention import KernelStep
from graft.model.captures import ALIGNED, ROWS, round_up
from graft.model.kernels import attention as attention_kernels
from graft.model.kernels import eight_bits as eight_bit_kernels
from graft.model.kernels import gate, overlap
from graft.model.kernels import layer as layer_kernels
from graft.model.kernels import topk as topk_kernels
from graft.model.kernels.matmul import EightBits, Products
from graft.model.kv_cache import PAGE, KVStore
from graft.model.layout import Layout
from graft.model.llama import Rotary, attend_in_store, fuse_parameters
from graft.model.network import Attention, Norm
from graft.tree.device.buffers import Beams, DraftDraws
from graft.tree.device.round import AddLevel

_LARGE = 2**28  # weights of a head from which 8 bits are used: at 297 million they are faster, fewer were not measured


class Eagle3Buffers(DraftBuffers):
    """Static tensors, including those of beams and levels."""

    def __init__(self, fast: FastHead, pool: PagePool, store: KVStore, number: int) -> None:
        device, topk, num_passes = pool.device, fast.settings.topk, fast.settings.depth + 1
        super().__init__(pool, store, Rotary.of(fast.head.rotary, fast.weight, pool.tables.shape[1] * PAGE), number)
        max_rows = self.max_rows
        sizes = [(rows, num_beams(rows, topk)) for rows in (*ROWS, max_rows) if rows <= max_rows]
        most = max(rows * beams for rows, beams in sizes)
        width = len(fast.weight)
        # The head's output at the last entry, by row of the block tables.
        self.root = fast.weight.new_zeros(pool.num_table_rows, width)
        self.hidden = fast.weight.new_zeros(most, width)  # the head's outputs at beams
        self.beams = Beams.make(most, 1, num_passes, device)
        # By number of beams in a row: the row of each beam, each row's first beam, and its number of beams.
        self.rows_of = {
            beams: (
                torch.arange(max_rows, device=device).repeat_interleave(beams).int(),
                (torch.arange(max_rows, device=device) * beams).int(),
                torch.full((max_rows,), beams, dtype=torch.int32, device=device),
            )
            for beams in range(1, topk + 1)
        }
        room = round_up(max(rows * beams * beams for rows, beams in sizes), ALIGNED)
        self.levels = torch.zeros(num_passes, 3, room, dtype=torch.int32, device=device)  # tokens, parents, bits of q

    @property
    def by_table_row(self) -> tuple[Tensor, ...]:
        return (self.root,)


class FastHead:
    """The head's decoder layer and top-k output, in few kernels."""

    def __init__(self, head: Eagle3Head, settings: TreeSettings) -> None:
        """head: one for which `capturable.why_not` is None."""
        self.settings, eight_bits, self.weight = settings, settings.eight_bits, head.fc.weight
        layer: Any = head.midlayer
        attention, config = layer.self_attn, head.config
        self.head, self.config = head, config
        self._attention = Attention(
            (attention.q_proj, attention.k_proj, attention.v_proj),
            *(attention.o_proj, config.num_attention_heads, config.num_key_value_heads, config.head_dim),
            scale=config.head_dim**-0.5,
            q_norm=Norm(attention.q_norm, config.rms_norm_eps, rounds=True) if config.head_norms else None,
            k_norm=Norm(attention.k_norm, config.rms_norm_eps, rounds=True) if config.head_norms else None,
            window=config.sliding_window,
        )
        embedding = head.embed_tokens.weight if head.config.own_embedding else head.target_embedding
        assert embedding is not None
        self._embedding = embedding.detach()
        self._norms = (layer.input_layernorm.weight.detach(), layer.hidden_norm.weight.detach())
        self._mlp_norm, self._norm = layer.post_attention_layernorm.weight.detach(), head.norm.weight.detach()
        norms: Any = head.fc_norm if head.config.fc_norm else ()
        self._feature_norms = fuse_parameters([norm.weight for norm in norms]).view(len(norms), -1) if norms else None
        qkv = fuse_parameters([attention.q_proj.weight, attention.k_proj.weight, attention.v_proj.weight])
        gate_up = fuse_parameters([layer.mlp.gate_proj.weight, layer.mlp.up_proj.weight])
        weights = [qkv, attention.o_proj.weight.detach(), gate_up, layer.mlp.down_proj.weight.detach()]
        weights.append(head.lm_head.weight.detach())
        if self._feature_norms is not None:
            weights.append(head.fc.weight.detach())
        is_large = sum(weight.numel() for weight in weights) >= _LARGE
        self.has_eight_bits = eight_bits and is_large and all(EightBits.why_not(weight) is None for weight in weights)
        self._dtype = eight_bit_kernels.EIGHT_BITS if self.has_eight_bits else qkv.dtype  # of the products' inputs
        used: list[Any] = [EightBits.of(weight) for weight in weights] if self.has_eight_bits else weights
        self._qkv, self._o, self._gate_up, self._down, self._lm_head, *rest = used
        self._fc = rest[0] if rest else None
        self._multiply = Products(qkv.device)

    def buffers(self, pool: PagePool, store: KVStore, number: int) -> Eagle3Buffers:
        return Eagle3Buffers(self, pool, store, number)

    def enter(self, buffers: Eagle3Buffers, features: Tensor, tokens: Tensor, layout: Layout) -> None:
        """Run the head on entries with the target's features [E, taps * H_t] and next tokens [E].

        The output at each row's last entry is kept.
        """
        outputs = self._run_over(buffers, tokens, self.fuse(features), None, layout)
        eagle3_kernels.keep_last(outputs, layout.starts, layout.counts, layout.table_rows, buffers.root)

    def run_passes(
        self, buffers: Eagle3Buffers, asked: Passes, lengths: Tensor, draws: DraftDraws | None, add_level: AddLevel
    ) -> None:
        """See `Drafter.run_passes`. lengths, draws: of the rows."""
        for number in range(asked.num_passes):
            with gate.under(asked.made[number : number + 1]):
                level = self.run_pass(buffers, asked, lengths, draws, number)
            add_level(number, level[0], level[1], level[2].view(torch.float32))

    def run_pass(
        self, buffers: Eagle3Buffers, asked: Passes, lengths: Tensor, draws: DraftDraws | None, number: int
    ) -> Tensor:
        """Run a pass. Returns its level [3, nodes]: tokens, parents and the bits of q."""
        shape = Shape.of(asked.num_rows, self.settings.topk, asked.keep)
        beams = buffers.beams.first(shape.rows, shape.beams)
        if number == 0:
            outputs = self.root(buffers, asked.table_rows, shape)
        else:
            outputs = self.expand(buffers, asked, lengths, shape, beams)
        if draws is not None and number:
            draws = draws._replace(num_passes=beams.num_passes)
        level = buffers.levels[number, :, : shape.rows * shape.count(number)]
        best = self.likeliest(outputs, shape.beams, draws)
        eagle3_kernels.spread(*best, self.head.d2t, beams, level, shape.keep, number == 0)
        return level

    def root(self, buffers: Eagle3Buffers, table_rows: Tensor, shape: Shape) -> Tensor:
        """The head's outputs [R, H] at the last entries."""
        return eagle3_kernels.take_roots(buffers.root, table_rows, buffers.hidden, shape.beams)

    def expand(self, buffers: Eagle3Buffers, asked: Passes, lengths: Tensor, shape: Shape, beams: Beams) -> Tensor:
        """The head's outputs [R * beams, H] at the beams."""
        count = shape.rows * shape.beams
        rows, starts, counts = buffers.rows_of[shape.beams]
        layout = Layout(
            rows=rows[:count],
            places=beams.cache_places.flatten(),
            depths=beams.depths.flatten(),
            paths=beams.entries.flatten(0, 1),
            starts=starts[: shape.rows],
            counts=counts[: shape.rows],
            lengths=lengths,
            table_rows=asked.table_rows,
            tables=buffers.tables,
            max_context=asked.context,
        )
        hidden = buffers.hidden[:count]
        return self._run_over(buffers, beams.tokens.flatten(), hidden, beams.origins.flatten(), layout, out=hidden)

    def _run_over(
        self,
        buffers: Eagle3Buffers,
        tokens: Tensor,
        hidden: Tensor,
        origins: Tensor | None,
        layout: Layout,
        out: Tensor | None = None,
    ) -> Tensor:
        step, keys, values = KernelStep(layout), buffers.keys[0], buffers.values[0]
        return self.run(tokens, hidden, origins, step, keys, values, buffers.rotary, out)

    def fuse(self, features: Tensor) -> Tensor:
        """As `Eagle3Head.fuse`, with one kernel for the norms of all layers' features [T, layers * H_t]."""
        if self._feature_norms is None or self._fc is None:
            return self.head.fuse(features)
        each = features.view(-1, self.config.target_hidden_size)
        normed = self._normed(each, None, self._feature_norms)[1].view_as(features)
        return self._multiply(normed, self._fc)

    def run(
        self,
        tokens: Tensor,  # [T] int32 the token after each entry's own
        hidden: Tensor,  # [F, H] features
        origins: Tensor | None,  # [T] int32 whose features each entry takes; its own if None
        step: KernelStep,
        keys: Tensor,  # [slots, kv_heads, head_dim]
        values: Tensor,
        rotary: Rotary,
        out: Tensor | None = None,
    ) -> Tensor:
        """Outputs [T, H] of the entries: the features of the next ones. They are written to `out`, if given.

        `out` may be `hidden`.
        """
        config, eps, multiply = self.config, self.config.rms_norm_eps, self._multiply
        heads, (kv_heads, head_dim) = config.num_attention_heads, keys.shape[1:]
        step.plan(heads // kv_heads, attention_kernels.tiles_for(head_dim, hidden.dtype))  # before `enter`: `overlap`
        both, stream = eagle3_kernels.enter(
            tokens, self._embedding, hidden, origins, self._norms, eps, config.norm_before_residual, self._dtype
        )
        with overlap.launches(len(tokens) in overlap.FASTER):
            qkv = multiply(both, self._qkv)
            attended = attend_in_store(qkv, keys, values, step, rotary, self._attention, dtype=self._dtype)
            delta = multiply(attended, self._o)
            stream, normed = self._normed(stream, delta, self._mlp_norm)
            delta = multiply(multiply.activate(normed, self._gate_up), self._down)
            if config.norm_output:
                return layer_kernels.add_norm(stream, delta, self._norm, eps, normed=out)[1]
            return layer_kernels.add_norm(stream, delta, self._norm, eps, total=out)[0]

    def likeliest(self, hidden: Tensor, k: int, draws: DraftDraws | None) -> tuple[Tensor, Tensor, Tensor]:
        """Top-k draft ids after each output [R, H], their logits, and each row's logsumexp; see `topk.highest`."""
        if not self.config.norm_output:
            _, hidden = self._normed(hidden, None, self._norm)
        elif self.has_eight_bits:
            hidden = eight_bit_kernels.in_eight_bits(hidden)
        return topk_kernels.highest(self._multiply(hidden, self._lm_head), k, draws)

    def _normed(self, stream: Tensor, delta: Tensor | None, weight: Tensor) -> tuple[Tensor, Tensor]:
        """The sum, and its norm in the dtype of products' inputs; see `add_norm`."""
        normed = torch.empty_like(stream, dtype=self._dtype)
        return layer_kernels.add_norm(stream, delta, weight, self.config.rms_norm_eps, normed=normed)
