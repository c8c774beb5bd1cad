"""Block heads as the projects that publish them write them, and what they mean."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor

from block_oracle import Network
from tiny import target_config

VOCAB, HIDDEN, INNER, HEADS, KV_HEADS, HEAD_DIM, RANK, DRAFTED = 41, 16, 24, 4, 2, 6, 3, 12
TARGET = target_config(vocab_size=VOCAB, hidden_size=HIDDEN, intermediate_size=40, num_hidden_layers=9)
ROOT, LENGTH = 7, 5


def random(*shape, seed, mean=0.0):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)) * 0.3 + mean


EMBEDDING, LM_HEAD = random(VOCAB, HIDDEN, seed=1), random(VOCAB, HIDDEN, seed=2)
FEATURES = random(LENGTH, 9 * HIDDEN, seed=3).view(LENGTH, 9, HIDDEN)  # by the target's layers: what goes in


@dataclass
class Published:
    """A head as its project writes it, and what it means, told apart from how the package reads it."""

    config: dict[str, Any]
    tensors: dict[str, Tensor]  # by z-lab's and DeepSpec's names, which `names` turns into the file's
    reads: tuple[int, ...]  # layers whose inputs
    shifted: bool
    kind: str
    layout: str
    causal: tuple[bool, ...] = (False, False)
    windows: tuple[int | None, ...] = (None, None)
    names: Callable[[str], str] = str
    file: str = "model.safetensors"
    others: dict[str, Tensor] = field(default_factory=dict)
    mask_token_id: int = 5
    block_size: int = 4
    markov: str | None = None

    def write(self, folder):
        folder.mkdir(exist_ok=True)
        (folder / "config.json").write_text(json.dumps(self.config))
        tensors = {self.names(name): tensor.clone() for name, tensor in self.tensors.items()} | self.others
        if self.file.endswith(".bin"):
            torch.save(tensors, folder / self.file)
        else:
            save_file(tensors, folder / self.file)

    @property
    def network(self):
        embedding = self.tensors.get("embed_tokens.weight", EMBEDDING)
        return Network(
            state=self.tensors,
            embedding=embedding,
            lm_head=self.tensors.get("lm_head.weight", LM_HEAD),
            num_heads=HEADS,
            head_dim=HEAD_DIM,
            block_size=self.block_size,
            mask=embedding[self.mask_token_id],
            causal=self.causal,
            windows=self.windows,
            eps=1e-5,
            theta=1e6,
        )

    def hidden(self):
        slots = self.network.hidden(ROOT, FEATURES[:, list(self.reads)].flatten(1))
        return slots if self.shifted else slots[1:]


def backbone(taps, **more):
    shapes = {"fc.weight": (HIDDEN, taps * HIDDEN)}
    for layer in ("layers.0", "layers.1"):
        shapes |= {
            f"{layer}.self_attn.q_proj.weight": (HEADS * HEAD_DIM, HIDDEN),
            f"{layer}.self_attn.k_proj.weight": (KV_HEADS * HEAD_DIM, HIDDEN),
            f"{layer}.self_attn.v_proj.weight": (KV_HEADS * HEAD_DIM, HIDDEN),
            f"{layer}.self_attn.o_proj.weight": (HIDDEN, HEADS * HEAD_DIM),
            f"{layer}.self_attn.q_norm.weight": (HEAD_DIM,),
            f"{layer}.self_attn.k_norm.weight": (HEAD_DIM,),
            f"{layer}.mlp.gate_proj.weight": (INNER, HIDDEN),
            f"{layer}.mlp.up_proj.weight": (INNER, HIDDEN),
            f"{layer}.mlp.down_proj.weight": (HIDDEN, INNER),
            f"{layer}.input_layernorm.weight": (HIDDEN,),
            f"{layer}.post_attention_layernorm.weight": (HIDDEN,),
        }
    shapes |= {"hidden_norm.weight": (HIDDEN,), "norm.weight": (HIDDEN,)}
    made = {
        name: random(*shape, seed=10 + number, mean=float(len(shape) == 1))
        for number, (name, shape) in enumerate(shapes.items())
    }
    return made | more


def markov_head(kind="vanilla", drafted=VOCAB):
    made = {
        "markov_head.markov_w1.weight": random(VOCAB, RANK, seed=50),
        "markov_head.markov_w2.weight": random(drafted, RANK, seed=51),
    }
    if kind == "gated":
        made["markov_head.gate_proj.weight"] = random(RANK, HIDDEN + RANK, seed=52)
        made["markov_head.gate_proj.bias"] = random(RANK, seed=53)
    if kind == "rnn":
        made["markov_head.joint_proj.weight"] = random(3 * RANK, 2 * RANK + HIDDEN, seed=54)
        made["markov_head.joint_proj.bias"] = random(3 * RANK, seed=55)
    return made


def confidence_head(with_markov=True):
    width = HIDDEN + RANK if with_markov else HIDDEN
    return {"confidence_head.proj.weight": random(1, width, seed=56), "confidence_head.proj.bias": random(1, seed=57)}


SHAPE = {
    "model_type": "qwen3",
    "hidden_act": "silu",
    "hidden_size": HIDDEN,
    "intermediate_size": INNER,
    "num_attention_heads": HEADS,
    "num_key_value_heads": KV_HEADS,
    "head_dim": HEAD_DIM,
    "num_hidden_layers": 2,
    "max_position_embeddings": 64,
    "rms_norm_eps": 1e-5,
    "rope_theta": 1000000,
    "vocab_size": VOCAB,
    "attention_bias": False,
}


def zlab():
    """block_size at the top; layers by their outputs."""
    config = SHAPE | {"architectures": ["DFlashDraftModel"], "block_size": 4, "num_target_layers": 9}
    config |= {"layer_types": ["full_attention"] * 2, "dflash_config": {"target_layer_ids": [1, 3, 6]}}
    config["dflash_config"]["mask_token_id"] = 5
    return Published(config, backbone(3), (2, 4, 7), shifted=False, kind="DFlash", layout="zlab")


def zlab_with_windows():
    """Everything in dflash_config; a layer with a window is causal; in a pickle."""
    config = SHAPE | {"architectures": ["DFlashDraftModel"], "layer_types": ["sliding_attention", "full_attention"]}
    config |= {"sliding_window": 3, "dflash_config": {"block_size": 4, "mask_token_id": 5, "target_layer_ids": [0, 7]}}
    return Published(
        config, backbone(2), (1, 8), False, "DFlash", "zlab", (True, False), (3, None), file="pytorch_model.bin"
    )


def usual_layers():
    """No layer numbers: one for each of the head's own, spread over the target's nine."""
    config = SHAPE | {"architectures": ["DFlashDraftModel"], "block_size": 4, "dflash_config": {"mask_token_id": 5}}
    return Published(config, backbone(2), (2, 7), shifted=False, kind="DFlash", layout="zlab")


def jetspec():
    config = zlab().config
    config["dflash_config"]["causal_head"] = True
    return Published(config, backbone(3), (2, 4, 7), False, "JetSpec", "zlab", causal=(True, True))


def everywhere_a_window():
    """use_swa: all layers have a window, and none is causal."""
    config = zlab().config
    config["dflash_config"] |= {"use_swa": True, "swa_window_size": 3}
    return Published(config, backbone(3), (2, 4, 7), False, "DFlash", "zlab", windows=(3, 3))


def llama_layers():
    """No norms of queries and keys."""
    tensors = {name: tensor for name, tensor in backbone(3).items() if "q_norm" not in name and "k_norm" not in name}
    config = zlab().config | {"model_type": "llama"}
    return Published(config, tensors, (2, 4, 7), shifted=False, kind="DFlash", layout="zlab")


def deepspec():
    """Flat keys, -1 for the embeddings, frozen copies of the target's weights, shifted without saying so."""
    config = SHAPE | {"architectures": ["Qwen3DSparkModel"], "block_size": 4, "mask_token_id": 5, "num_anchors": 512}
    config |= {"num_target_layers": 9, "target_layer_ids": [-1, 3, 6], "layer_types": ["full_attention"] * 2}
    config |= {"markov_rank": RANK, "markov_head_type": "vanilla", "enable_confidence_head": True}
    config |= {"confidence_head_with_markov": True}
    own = {"embed_tokens.weight": random(VOCAB, HIDDEN, seed=60), "lm_head.weight": random(VOCAB, HIDDEN, seed=61)}
    tensors = backbone(3, **own, **markov_head(), **confidence_head())
    return Published(config, tensors, (0, 4, 7), True, "DSpark", "deepspec", markov="vanilla")


def deepspec_dflash():
    """DeepSpec's own DFlash: the same architecture without its heads, and shifted too."""
    published = deepspec()
    published.config |= {"markov_rank": 0, "enable_confidence_head": False}
    published.tensors = {n: t for n, t in published.tensors.items() if "markov" not in n and "confidence" not in n}
    published.kind, published.markov = "DFlash", None
    return published


def specforge_dspark():
    """Keys in dflash_config; no word on the confidence head but its tensors."""
    config = zlab().config | {"architectures": ["DSparkDraftModel"]}
    config["dflash_config"] |= {"projector_type": "dspark", "markov_rank": RANK, "markov_head_type": "gated"}
    tensors = backbone(3, **markov_head("gated"), **confidence_head())
    return Published(config, tensors, (2, 4, 7), True, "DSpark", "specforge", markov="gated")


def flat_tensors():
    """markov_w1 and confidence_proj at the top, as TensorRT-LLM reads them; slots said by shift_label."""
    config = zlab().config
    config["dflash_config"] |= {"shift_label": True, "markov_rank": RANK, "use_confidence_head": True}

    def flat(name):
        return name.replace("markov_head.", "").replace("confidence_head.proj.", "confidence_proj.")

    tensors = backbone(3, **markov_head(), **confidence_head())
    return Published(config, tensors, (2, 4, 7), True, "DSpark", "zlab", names=flat, markov="vanilla")


def recurrent():
    published = deepspec()
    published.config |= {"markov_head_type": "rnn", "confidence_head_with_markov": False}
    published.tensors |= markov_head("rnn") | confidence_head(with_markov=False)
    published.markov = "rnn"
    return published


def speculators(algorithm="dflash"):
    return {
        "architectures": ["DFlashDraftModel"],
        "speculators_model_type": algorithm,
        "aux_hidden_state_layer_ids": [2, 4, 7],
        "draft_vocab_size": DRAFTED,
        "block_size": 4,
        "mask_token_id": 5,
        "target_hidden_size": None,
        "speculators_config": {"algorithm": algorithm, "proposal_methods": [{"speculative_tokens": 3}]},
        "transformer_layer_config": {key: value for key, value in SHAPE.items() if key != "rope_theta"}
        | {"rope_parameters": {"rope_type": "default", "rope_theta": 1e6}},
    }


def speculators_tensors(**more):
    own = {"embed_tokens.weight": random(VOCAB, HIDDEN, seed=60), "lm_head.weight": random(DRAFTED, HIDDEN, seed=61)}
    return backbone(3, **own, **more)


def speculators_others():
    t2d = torch.zeros(VOCAB, dtype=torch.bool)
    t2d[torch.arange(DRAFTED) * 3] = True
    return {"d2t": torch.arange(DRAFTED) * 2, "t2d": t2d, "verifier_norm.weight": torch.ones(HIDDEN)}


def speculators_dflash():
    """A nested shape, layers by their inputs, a draft vocabulary, windows that are not causal."""
    config = speculators() | {"sliding_window_non_causal": True}
    config["transformer_layer_config"] |= {"layer_types": ["sliding_attention"] * 2, "sliding_window": 4}
    return Published(
        config,
        speculators_tensors(),
        (2, 4, 7),
        shifted=False,
        kind="DFlash",
        layout="speculators",
        windows=(4, 4),
        others=speculators_others(),
    )


def speculators_dspark():
    """Shifted, since that is what dspark means there; the first Markov table has all tokens, the second the drafted."""
    config = speculators("dspark") | {"architectures": ["DSparkDraftModel"], "markov_rank": RANK}
    config |= {"enable_confidence_head": False}
    tensors = speculators_tensors(**markov_head(drafted=DRAFTED))
    others = speculators_others()
    return Published(config, tensors, (2, 4, 7), True, "DSpark", "speculators", others=others, markov="vanilla")


def speculators_in_place():
    """sample_from_anchor speaks against what is usual."""
    published = speculators_dspark()
    published.config["sample_from_anchor"] = False
    published.shifted = False
    return published


def treeflash():
    """The backbone below model., the conditional head beside it."""
    config = zlab().config | {"architectures": ["TreeFlashDraftModel"]}
    config["treeflash_config"] = {"ar_approximation": "swiglu", "candidate_tokens": 16}
    own = {
        "ar_approximation.ug.weight": random(2 * INNER, 2 * HIDDEN, seed=70),
        "ar_approximation.ug.bias": random(2 * INNER, seed=71),
        "ar_approximation.d.weight": random(HIDDEN, INNER, seed=72),
        "ar_approximation.norm.weight": random(HIDDEN, seed=73, mean=1.0),
    }

    def below(name):
        return name if name.startswith("ar_") else f"model.{name}"

    return Published(config, backbone(3, **own), (2, 4, 7), False, "TreeFlash", "treeflash", names=below)


PUBLISHED = {
    make.__name__: make
    for make in (
        zlab,
        zlab_with_windows,
        usual_layers,
        jetspec,
        everywhere_a_window,
        llama_layers,
        deepspec,
        deepspec_dflash,
        specforge_dspark,
        flat_tensors,
        recurrent,
        speculators_dflash,
        speculators_dspark,
        speculators_in_place,
        treeflash,
    )
}
