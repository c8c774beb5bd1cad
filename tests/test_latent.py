"""Models whose keys and values differ in size, or are made of latents (MLA): captured and eager steps beside
transformers' own forward."""

import pytest
import torch

pytest.importorskip("triton", reason="Triton is not installed, and without it there are no kernels")

from captured_parts import DEVICE, SmallTarget
from families import varied
from graft.model import TargetRunner
from graft.model.families import NotDescribedError
from proposers import tree_of
from tiny import tiny_model

PROMPT = [3, 17, 42, 9, 9, 30, 5, 21, 17, 42, 9, 11]
_EXPERTS = {"n_routed_experts": 4, "num_experts_per_tok": 2, "n_shared_experts": 1, "moe_intermediate_size": 16}
_EXPERTS |= {"n_group": 2, "topk_group": 1, "first_k_dense_replace": 1}
_LATENT = {"q_lora_rank": 12, "kv_lora_rank": 8, "qk_rope_head_dim": 4, "qk_nope_head_dim": 6, "v_head_dim": 8}
_LATENT |= {"num_key_value_heads": 4, "head_dim": None}
MODELS = {
    "deepseek_v2": {**_LATENT, **_EXPERTS},
    "deepseek_v3": {},
    "glm4_moe_lite": {**_LATENT, **_EXPERTS},
    "mimo_v2_flash": {**_EXPERTS, "v_head_dim": 6, "sliding_window": 8},
    "diffllama": {},
}


def model_of(name):
    try:
        return varied(tiny_model(name, **MODELS[name])).to(DEVICE)
    except ValueError as error:
        pytest.skip(f"this release of transformers does not have it: {error}")


def their_logits(model, text):
    return model(torch.tensor([text], device=DEVICE)).logits[0]


def describe_nothing(model):
    raise NotDescribedError("in this test transformers' own layers run")


@pytest.mark.parametrize("kind", [TargetRunner, SmallTarget])
@pytest.mark.parametrize("name", MODELS)
@torch.no_grad()
def test_prompts_trees_and_texts_behind_moved_paths_have_transformers_logits(name, kind, monkeypatch):
    monkeypatch.setattr("graft.model.cuda_graphs.describe", describe_nothing)
    model = model_of(name)
    target = kind(model, chunk_size=7)
    cache = target.open(1, 64)
    chunks = [chunk.logits[chunk.index[0]].clone() for chunk in target.prefill(cache, 0, PROMPT)]
    close = {"atol": 1e-4, "rtol": 1e-4}
    torch.testing.assert_close(torch.cat(chunks), their_logits(model, PROMPT), **close)
    verified = target.verify(cache, tree_of([[7, 8, 9, 10, 11]], [[0, 0, 0, 1, 2]]))
    for node, path in enumerate(([7], [7, 8], [7, 9], [7, 8, 10], [7, 9, 11])):
        torch.testing.assert_close(verified.logits[node], their_logits(model, PROMPT + path)[-1], **close)
    target.commit(cache, [[2, 4]])
    verified = target.verify(cache, tree_of([[13, 14]], [[0, 0]]))
    torch.testing.assert_close(verified.logits[:2], their_logits(model, [*PROMPT, 7, 9, 11, 13, 14])[-2:], **close)
    assert target.mode.startswith("eager" if kind is TargetRunner else "captured")
