"""Cost emulation: widens a small model and its draft head to a large model's shape without changing their output.

Text, drafts and accepted lengths stay the small model's. Memory traffic and arithmetic become the large shape's. Added
weights are zero where they would change the small model's output, and random elsewhere. So experts add nothing. Which
ones a token has depends on its own hidden state, so a tree touches about as many as different tokens do.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from copy import deepcopy
from dataclasses import fields, replace
from typing import Any

import torch
from torch import Tensor, nn
from transformers import Glm4MoeConfig, Glm4MoeForCausalLM, LlamaForCausalLM, PreTrainedModel

from graft.bench.shapes import ModelShape
from graft.device_info import free_memory
from graft.drafters.block.head import BlockHead
from graft.drafters.eagle3.head import Eagle3Head
from graft.errors import GraftError
from graft.model.cpu_linear import speed_up
from graft.settings import require

_NOISE = 0.02  # standard deviation of random weights, small enough that no product overflows in any dtype
_SEED = 0
_NUM_COMMON = 8  # directions of the hidden states that no router sees
_SAMPLED = (8, 64)  # texts and tokens that show these directions
_ROPE_BY_FREQUENCY = ("default", "linear", "llama3")  # types that change each frequency by its own value only


@torch.no_grad()
def widen(model: PreTrainedModel, shape: ModelShape) -> LlamaForCausalLM | Glm4MoeForCausalLM:
    """A model of this shape that computes what `model` computes, on the same device and in the same dtype.

    It is a Llama, or, if there are experts, a GLM-4-MoE, which has an MLP for all tokens beside them.

    Added layers come after the model's own, so a head reads its features from the same layers.
    """
    if not isinstance(model, LlamaForCausalLM):
        raise GraftError(f"{type(model).__name__} cannot be widened: only a Llama can, such as the default model")
    config = model.config
    require(not config.attention_bias and not config.mlp_bias, "a model with biases cannot be widened")
    small = ModelShape.of_config(config)
    _check_fits("model", small, shape, dict(config.rope_parameters or {}))
    wide_config = deepcopy(config)
    wide_config.update({**shape.attention_and_mlp, "num_hidden_layers": shape.layers})
    wide_config.rms_norm_eps = config.rms_norm_eps * small.hidden / shape.hidden
    with torch.device("meta"):  # no memory yet: `_Widener` makes each weight once
        wide = _with_experts(wide_config, shape) if shape.experts else LlamaForCausalLM(wide_config)
    _check_room(wide, model)

    widener = _Widener(small, shape, like=model.lm_head.weight)
    common = _common_directions(model) if shape.experts else []
    for place, layer in enumerate(wide.model.layers):
        widener.layer(layer, model.model.layers[place] if place < small.layers else None, widener.channels)
        if shape.experts:
            widener.experts(layer.mlp, common[min(place, small.layers)])
    tokens = torch.arange(config.vocab_size)
    widener.norm(wide.model.norm, model.model.norm, widener.channels)
    widener.fill(wide.model.embed_tokens, model.model.embed_tokens, tokens, widener.channels, noise=False)
    if config.tie_word_embeddings:
        wide.lm_head.weight = wide.model.embed_tokens.weight
    else:
        widener.fill(wide.lm_head, model.lm_head, tokens, widener.channels)
    wide.model.rotary_emb = type(wide.model.rotary_emb)(wide.config).to(model.device)
    wide.generation_config = model.generation_config
    speed_up(wide)
    return wide.eval()


def _with_experts(config: Any, shape: ModelShape) -> Glm4MoeForCausalLM:
    own = {key: value for key, value in config.to_dict().items() if key not in ("model_type", "architectures")}
    own["rope_parameters"] = {**config.rope_parameters, "partial_rotary_factor": 1.0}
    return Glm4MoeForCausalLM(
        Glm4MoeConfig(
            **own,
            n_routed_experts=shape.experts,
            num_experts_per_tok=shape.experts_per_token,
            moe_intermediate_size=shape.neurons,
            n_shared_experts=shape.intermediate // shape.neurons,
            first_k_dense_replace=0,
        )
    )


def _common_directions(model: Any) -> list[Tensor]:
    """The strongest directions [n, H] of what each layer's MLP reads, and of the last hidden state, in sampled texts.

    By them a router would send most tokens to the same few experts, which no trained router does.
    """
    inputs: list[Tensor] = []
    norms = [*(layer.post_attention_layernorm for layer in model.model.layers), model.model.norm]
    with torch.random.fork_rng(devices=[model.device] if model.device.type == "cuda" else []):
        torch.manual_seed(_SEED)
        starts = torch.randint(model.config.vocab_size, (_SAMPLED[0], 1)).to(model.device)
        mask = torch.ones_like(starts)
        texts = model.generate(starts, attention_mask=mask, do_sample=True, top_k=0, max_new_tokens=_SAMPLED[1])
    hooks = [norm.register_forward_hook(lambda _, __, output: inputs.append(output.flatten(0, 1))) for norm in norms]
    model(texts)
    for hook in hooks:
        hook.remove()
    return [torch.linalg.svd(each.float().cpu(), full_matrices=False).Vh[:_NUM_COMMON] for each in inputs]


@torch.no_grad()
def widen_head(
    head: Eagle3Head | BlockHead,
    target: PreTrainedModel,
    shape: ModelShape,
    model: LlamaForCausalLM | Glm4MoeForCausalLM,
) -> Eagle3Head | BlockHead:
    """A head for `model`, the widened target, that drafts what `head` drafts, with as many layers.

    An MLP that is larger or smaller than the target's stays so by the same factor.
    """
    config = head.config
    small = ModelShape.of_config(config)
    _check_fits("head", small, shape, config.rope)
    require(config.target_hidden_size == small.hidden, "a head that is not as wide as its target cannot be widened")
    sizes = shape.attention_and_mlp | {"target_hidden_size": shape.hidden}
    sizes["rms_norm_eps"] = config.rms_norm_eps * small.hidden / shape.hidden
    usual = target.config.intermediate_size
    if small.intermediate != usual:
        sizes["intermediate_size"] = 64 * math.ceil(shape.intermediate * small.intermediate / usual / 64)
    widener = _Widener(small, shape, like=head.fc.weight)
    wide: Eagle3Head | BlockHead
    if isinstance(head, BlockHead):
        wide = _wide_block(head, sizes | {"num_target_layers": shape.layers}, widener)
    else:
        wide = _wide_eagle3(head, sizes, widener)

    channels = widener.channels
    widener.fill(wide.fc, head.fc, channels, widener.side_by_side(len(config.target_layers)), noise=False)
    widener.norm(wide.norm, head.norm, channels)
    if hasattr(head, "lm_head"):
        widener.fill(wide.lm_head, head.lm_head, torch.arange(config.draft_vocab_size), channels)
    elif isinstance(wide, BlockHead):
        wide.borrow_lm_head(model.lm_head.weight)
    wide.d2t, wide.t2d = head.d2t, head.t2d
    if config.own_embedding:
        widener.fill(wide.embed_tokens, head.embed_tokens, torch.arange(config.vocab_size), channels, noise=False)
    else:
        wide.borrow_embedding(model.model.embed_tokens.weight)
    wide.to(head.fc.weight.device)
    speed_up(wide)
    return wide.eval()


def _wide_eagle3(head: Eagle3Head, sizes: dict[str, Any], widener: _Widener) -> Eagle3Head:
    """A wide head with the parts that only EAGLE-3 heads have."""
    config = head.config
    with torch.device("meta"):
        wide = Eagle3Head(replace(config, **sizes))
    if config.norm_before_fc:
        widener.norm(wide.input_norm, head.input_norm, widener.side_by_side(len(config.target_layers)))
    if config.fc_norm:
        for wide_norm, own_norm in zip(wide.fc_norm, head.fc_norm, strict=True):
            widener.norm(wide_norm, own_norm, widener.channels)
    widener.layer(wide.midlayer, head.midlayer, widener.side_by_side(2))
    return wide


def _wide_block(head: BlockHead, sizes: dict[str, Any], widener: _Widener) -> BlockHead:
    """A wide head with the parts that only block heads have."""
    config, channels = head.config, widener.channels
    inner = config.conditional_size or config.intermediate_size
    wide_inner = sizes["intermediate_size"]
    if config.conditional_size is not None:  # grows like the layers' size, to a multiple of 64 for fast products
        wide_inner = 64 * math.ceil(inner * wide_inner / config.intermediate_size / 64)
        sizes = sizes | {"conditional_size": wide_inner}
    with torch.device("meta"):
        wide = BlockHead(replace(config, **sizes))
    widener.norm(wide.hidden_norm, head.hidden_norm, channels)
    for wide_layer, own_layer in zip(wide.layers, head.layers, strict=True):
        widener.layer(wide_layer, own_layer, channels)
    if config.own_mask:
        mask = head.fc.weight.new_zeros(sizes["hidden_size"])
        mask[channels] = head.mask_embedding.to(mask)
        wide.mask_embedding = nn.Parameter(mask, requires_grad=False)
    if config.conditional:
        own, its = head.ar_approximation, wide.ar_approximation
        neurons = torch.arange(inner)
        widener.fill(its.ug, own.ug, torch.cat([neurons, wide_inner + neurons]), widener.side_by_side(2))
        widener.fill(its.d, own.d, channels, neurons, noise=False)
        widener.norm(its.norm, own.norm, channels)
    rank = torch.arange(config.markov_rank)
    if config.markov is not None:  # these tables do not depend on the hidden size
        wide.markov_head.markov_w1, wide.markov_head.markov_w2 = head.markov_head.markov_w1, head.markov_head.markov_w2
    if config.markov == "gated":
        columns = torch.cat([channels, sizes["hidden_size"] + rank])
        widener.fill(wide.markov_head.gate_proj, head.markov_head.gate_proj, rank, columns)
    if config.markov == "rnn":
        before = torch.arange(2 * config.markov_rank)
        columns = torch.cat([before, len(before) + channels])
        widener.fill(wide.markov_head.joint_proj, head.markov_head.joint_proj, torch.arange(3 * len(rank)), columns)
    return wide


class _Widener:
    """Copies small weights into wide ones. Index tensors hold the wide row or column of each small one."""

    def __init__(self, small: ModelShape, wide: ModelShape, like: Tensor) -> None:
        """like: a tensor with the device and dtype of all new weights."""
        self._small, self._wide, self._like = small, wide, like
        self._random = torch.Generator(like.device).manual_seed(_SEED)
        self._routers = torch.Generator().manual_seed(_SEED)
        self.channels = torch.arange(small.hidden)
        self._neurons = torch.arange(small.intermediate)
        kv_heads = torch.arange(small.kv_heads)
        heads = (wide.group * kv_heads[:, None] + torch.arange(small.group)).flatten()
        # Rotary positions rotate dimension i with i + head_dim / 2, at a frequency that depends on i / head_dim.
        half = torch.arange(small.head_dim // 2) * (wide.head_dim // small.head_dim)
        self._within = torch.cat([half, half + wide.head_dim // 2])
        self._queries, self._keys = ((wide.head_dim * h[:, None] + self._within).flatten() for h in (heads, kv_heads))
        self._whole_queries, self._whole_keys = (
            (wide.head_dim * h[:, None] + torch.arange(wide.head_dim)).flatten() for h in (heads, kv_heads)
        )

    def side_by_side(self, count: int) -> Tensor:
        """The indices of the small channels in `count` concatenated wide vectors."""
        return (self._wide.hidden * torch.arange(count)[:, None] + self.channels).flatten()

    def layer(self, wide: nn.Module, small: nn.Module | None, inputs: Tensor) -> None:
        """Fill a decoder layer so that it computes what `small` does, or adds nothing. inputs: attention's columns."""

        def project(name: str, rows: Tensor, columns: Tensor, scale: float = 1.0, **options: Any) -> None:
            own = small.get_submodule(name.replace("shared_experts.", "")) if small is not None else None
            self.fill(wide.get_submodule(name), own, rows, columns, scale=scale, **options)

        # Scores are divided by sqrt(head_dim), so queries are scaled. Queries of the small model are zero in the added
        # dimensions, so keys may be random there. If keys are normed they may not, and the norms are scaled instead.
        scale, normed = math.sqrt(self._wide.head_dim / self._small.head_dim), _head_norms(wide)
        project("self_attn.q_proj", self._queries, inputs, 1.0 if normed else scale, silent=self._whole_queries)
        project("self_attn.k_proj", self._keys, inputs, silent=self._whole_keys if normed else None)
        for wide_norm, own_norm, factor in zip(normed, _head_norms(small), (scale, 1.0), strict=False):
            self.norm(wide_norm, own_norm, self._within, factor)
        project("self_attn.v_proj", self._keys, inputs)
        project("self_attn.o_proj", self.channels, self._queries, noise=False)
        mlp = "mlp.shared_experts" if self._wide.experts else "mlp"
        project(f"{mlp}.gate_proj", self._neurons, self.channels)
        project(f"{mlp}.up_proj", self._neurons, self.channels)
        project(f"{mlp}.down_proj", self.channels, self._neurons, noise=False)
        for name, norm in wide.named_children():
            if "norm" in name:
                self.norm(norm, getattr(small, name, None), self.channels)

    def experts(self, wide: nn.Module, common: Tensor) -> None:
        """Fill experts that add nothing, and a random router that does not see the common directions [n, H]."""
        router, experts = wide.get_submodule("gate"), wide.get_submodule("experts")
        self.fill(router, None, self.channels, self.channels)
        rows = torch.randn(self._wide.experts, self._small.hidden, generator=self._routers) / self._small.hidden**0.5
        router.get_parameter("weight")[:, self.channels] = (rows - rows @ common.T @ common).to(self._like)
        router.register_buffer("e_score_correction_bias", self._like.new_zeros(self._wide.experts, dtype=torch.float32))
        for name, noise in (("gate_up_proj", True), ("down_proj", False)):
            weight = self._like.new_zeros(experts.get_parameter(name).shape)
            if noise:
                weight.normal_(0, _NOISE, generator=self._random)
            setattr(experts, name, nn.Parameter(weight, requires_grad=False))

    def norm(self, wide: nn.Module, small: nn.Module | None, places: Tensor, scale: float = 1.0) -> None:
        """Fill an RMS norm. Added zeros lower the mean square; smaller weights and a smaller eps make up for that."""
        weight = torch.ones(wide.get_parameter("weight").shape)
        share = self._small.hidden / self._wide.hidden
        if small is not None:
            own = small.get_parameter("weight").float().cpu()
            weight[places] = own
            share = len(own) / len(weight)
            if isinstance(wide, nn.RMSNorm) and isinstance(small, nn.RMSNorm) and small.eps is not None:
                # Norms of queries and keys do not use the scaled eps of the config. Files do not store this eps, so a
                # saved model has the config's again, which matters for short vectors.
                wide.eps = small.eps * share
        weight *= scale * math.sqrt(share)
        wide.weight = nn.Parameter(weight.to(self._like), requires_grad=False)

    def fill(
        self,
        wide: nn.Module,
        small: nn.Module | None,
        rows: Tensor,
        columns: Tensor,
        noise: bool = True,
        scale: float = 1.0,
        silent: Tensor | None = None,
    ) -> None:
        """Fill a weight and its bias, if there is one, with `scale` times those of `small`.

        Other entries are noise, or zeros if there is no `noise` or in `silent` rows.
        """
        weight = self._like.new_empty(wide.get_parameter("weight").shape)
        if noise:
            weight.normal_(0, _NOISE, generator=self._random)
            weight.copy_(weight.bfloat16())  # as exact in bfloat16 as the weights of most checkpoints
        else:
            weight.zero_()
        if small is not None:
            device = weight.device
            if silent is not None:
                weight[silent.to(device)] = 0
            values = scale * small.get_parameter("weight").float()
            weight[rows.to(device)[:, None], columns.to(device)] = values.to(weight.dtype)
        wide.weight = nn.Parameter(weight, requires_grad=False)
        if small is not None and getattr(small, "bias", None) is not None:
            bias = self._like.new_zeros(len(weight))
            bias[rows.to(bias.device)] = small.get_parameter("bias").to(bias)
            wide.bias = nn.Parameter(bias, requires_grad=False)


def _head_norms(layer: nn.Module | None) -> list[nn.Module]:
    """The norms of a layer's queries and keys, if it has them."""
    norms = [getattr(getattr(layer, "self_attn", None), name, None) for name in ("q_norm", "k_norm")]
    return [norm for norm in norms if isinstance(norm, nn.RMSNorm)]


def _check_fits(what: str, small: ModelShape, wide: ModelShape, rope: Mapping[str, Any]) -> None:
    for field in fields(ModelShape):
        own, its = getattr(small, field.name), getattr(wide, field.name)
        require(own <= its, f"{field.name}={its} is too small a shape: the {what} itself has {own}")
    require(
        small.group <= wide.group,
        f"the {what} has {small.group} query heads to a key head, the shape only {wide.group}: ask for fewer kv_heads",
    )
    require(
        wide.head_dim % small.head_dim == 0,
        f"head_dim={wide.head_dim} must be a multiple of the {what}'s {small.head_dim}: rotary positions need that",
    )
    kind = rope.get("rope_type")
    require(
        kind in _ROPE_BY_FREQUENCY or wide.head_dim == small.head_dim,
        f"the {what}'s rotary positions of type {kind} allow no other head_dim than {small.head_dim}",
    )


def _check_room(wide: nn.Module, model: PreTrainedModel) -> None:
    """Raise an error before the process can be killed for lack of memory."""
    needed = sum(parameter.numel() for parameter in wide.parameters()) * model.dtype.itemsize
    if model.device.type == "cpu" and model.dtype is torch.float32:
        needed *= 2  # linear layers keep packed copies
    free = free_memory(model.device)
    if free is not None and needed > free:
        raise GraftError(f"a model of that shape takes {needed / 1e9:.1f} GB, and only {free / 1e9:.1f} GB are free")
