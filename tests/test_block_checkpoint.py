"""Block checkpoints: heads in every published spelling compute what their projects do; every fault is one line."""

from __future__ import annotations

import json
import re

import pytest
import torch
from safetensors.torch import load_file
from transformers import LlamaConfig

from graft.drafters.block import BlockConfig, BlockHead, inspect_head, load_head, save_head
from graft.errors import GraftError
from pickles import RunsCode
from published_heads import (
    DRAFTED,
    EMBEDDING,
    FEATURES,
    HIDDEN,
    LENGTH,
    LM_HEAD,
    PUBLISHED,
    ROOT,
    TARGET,
    backbone,
    markov_head,
    random,
    specforge_dspark,
    speculators_in_place,
    zlab,
)


def load(folder, target=TARGET, slots=None):
    return load_head(folder, target, torch.float32, "cpu", EMBEDDING, LM_HEAD, slots)


@torch.no_grad()
def hidden_of(head):
    features = FEATURES[:, list(head.config.target_layers)].flatten(1)[None]
    past = head.context(features, torch.arange(LENGTH)[None])
    return head.block(torch.tensor([ROOT]), torch.tensor([LENGTH]), past)


def close(own, expected):
    torch.testing.assert_close(own, expected, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("name", PUBLISHED)
def test_a_head_in_a_published_spelling_computes_what_its_project_does(name, tmp_path):
    published = PUBLISHED[name]()
    published.write(tmp_path)
    head = load(tmp_path)
    hidden, expected = hidden_of(head), published.hidden()
    assert hidden.shape[1] == len(expected)
    close(hidden[0], torch.stack(expected))
    close(head.marginals(hidden)[0], torch.stack([published.network.logits(slot) for slot in expected]))
    chain = [ROOT, 12, 3, 40][: len(expected)]
    parents = torch.tensor(chain)[None, :, None]
    if published.kind == "TreeFlash":
        its = [published.network.treeflash(slot, parent) for slot, parent in zip(expected, chain, strict=True)]
        close(head.conditionals(hidden, parents)[0, :, 0], torch.stack(its))
    if published.markov is not None:
        its = published.network.markov(published.markov, expected, chain)
        close(head.conditionals(hidden, parents)[0, :, 0], torch.stack(its))
    if "d2t" in published.others:
        assert head.to_target(torch.tensor([0, 11])).tolist() == [0, 33]


@pytest.mark.parametrize(("slots", "shifted"), [("in-place", False), ("shifted", True), (None, False)])
def test_slots_may_be_chosen_where_the_config_does_not_say(slots, shifted, tmp_path):
    zlab().write(tmp_path)
    assert load(tmp_path, slots=slots).config.shifted is shifted


def test_slots_cannot_be_chosen_against_the_config(tmp_path):
    speculators_in_place().write(tmp_path)
    assert not load(tmp_path, slots="in-place").config.shifted
    with pytest.raises(GraftError, match="it says that the slots are not shifted: leave out the choice of slots"):
        load(tmp_path, slots="shifted")
    with pytest.raises(GraftError, match="slots must be in-place or shifted, not 'left'"):
        load(tmp_path, slots="left")


OWN = {
    "plain": {},
    "causal": {"causal": (True, True), "shifted": False},
    "windows": {"causal": (True, False), "windows": (6, None)},
    "windows that are not causal": {"windows": (6, 6)},
    "conditional": {"conditional": True, "own_mask": True},
    "smaller conditional": {"conditional": True, "conditional_size": 24},
    "markov": {"markov": "gated", "markov_rank": 3},
    "draft vocabulary": {"own_lm_head": True, "own_embedding": True, "draft_vocab_size": DRAFTED},
    "narrow": {"hidden_size": 12, "own_lm_head": True, "own_embedding": True, "head_norms": False},
    "rotary": {"rope": {"rope_type": "linear", "rope_theta": 5e5, "factor": 2.0}, "target_layers": (0, 8)},
}


def make_head(**changes):
    usual = {"block_size": 4, "mask_token_id": 5, "shifted": True}
    head = BlockHead(BlockConfig.for_target(TARGET, 2, **(usual | changes)))
    generator = torch.Generator().manual_seed(5)
    with torch.no_grad():
        for parameter in head.parameters():
            parameter.normal_(1.0 if parameter.dim() == 1 else 0.0, 0.3, generator=generator)
    if head.config.draft_vocab_size == DRAFTED:
        head.set_vocabulary(torch.arange(DRAFTED) * 3)
    return head


@pytest.mark.parametrize("changes", OWN.values(), ids=OWN)
def test_saving_and_loading_gives_the_same_head(changes, tmp_path):
    head = make_head(**changes)
    save_head(head, tmp_path / "new" / "folder")
    loaded = load(tmp_path / "new" / "folder")
    assert loaded.config == head.config
    assert inspect_head(tmp_path / "new" / "folder").slots_are_said
    state = loaded.state_dict()
    assert state.keys() == head.state_dict().keys()
    assert all(torch.equal(tensor, state[name]) for name, tensor in head.state_dict().items())


def test_own_files_are_those_of_zlab_with_the_conditional_head_and_the_mask_beside_them(tmp_path):
    """vLLM refuses tensors it does not know, so model.safetensors has DFlash's alone."""
    save_head(make_head(conditional=True, own_mask=True).to(torch.bfloat16), tmp_path, {"trained_on": "stories"})
    config = json.loads((tmp_path / "config.json").read_text())
    assert (config["architectures"], config["model_type"]) == (["DFlashDraftModel"], "qwen3")
    assert (config["torch_dtype"], config["trained_on"]) == ("bfloat16", "stories")
    assert config["dflash_config"]["target_layer_ids"] == config["target_layer_ids"] == [1, 6], "counted by outputs"
    assert config["eagle_aux_hidden_state_layer_ids"] == [2, 7], "counted by inputs, where vLLM looks first"
    assert (config["block_size"], config["dflash_config"]["mask_token_id"]) == (4, 5)
    backbone_file = load_file(tmp_path / "model.safetensors")
    assert set(backbone_file) == set(backbone(2))
    assert all(tensor.dtype == torch.bfloat16 for tensor in backbone_file.values())
    assert len(load_file(tmp_path / "conditional_head" / "model.safetensors")) == 4
    mask = torch.load(tmp_path / "mask_embedding.pt", weights_only=True)
    assert (mask["mask_token_id"], mask["embedding"].shape) == (5, (HIDDEN,))


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"windows": (3, 6), "causal": (True, True)}, r"no layout has layers with different windows \(3, 6\)"),
        ({"causal": (True, False)}, "no layout has both causal and non-causal layers"),
    ],
)
def test_a_head_that_no_layout_can_say_is_not_written(changes, message, tmp_path):
    with pytest.raises(GraftError, match=message):
        save_head(make_head(**changes), tmp_path / "head")
    assert not (tmp_path / "head").exists()


def nested(**changes):
    return {"dflash_config": zlab().config["dflash_config"] | changes}


BAD_CONFIGS = [
    ({"architectures": ["GPT2LMHeadModel"]}, "architecture GPT2LMHeadModel is not that of a block head; known are D"),
    ({"speculators_model_type": "medusa"}, "speculators_model_type medusa is not one of dflash, dspark"),
    ({"speculators_model_type": "dflash"}, "transformer_layer_config is missing"),
    ({"block_size": None}, "block_size, the number of slots of a block, is missing"),
    ({"block_size": "4"}, "block_size must be a positive whole number, not '4'"),
    ({"block_size": 1}, "a block of one slot has the root only: block_size must be at least 2"),
    (nested(block_size=8), "dflash_config.block_size is 8 but block_size is 4: delete the one that is wrong"),
    (nested(mask_token_id=None), "mask_token_id, the token of masked slots, is missing"),
    (nested(mask_token_id=41), "mask_token_id 41 is not one of the target's 41 tokens"),
    (nested(mask_token_id="<mask>"), "mask_token_id '<mask>' is not one of the target's 41 tokens"),
    ({"mask_token_id": 6}, "dflash_config.mask_token_id is 5 but mask_token_id is 6: delete the one that is wrong"),
    ({"num_target_layers": 36}, "is for a target with 36 layers, not 9: it belongs to another model"),
    (nested(target_layer_ids=[1, 3, 8]), "reads the target's layers 2, 4, 9, but the target has only 9"),
    (nested(target_layer_ids=[-2, 3, 6]), "none negative"),
    (nested(target_layer_ids="all"), "dflash_config.target_layer_ids must be a list of layer numbers, not 'all'"),
    (nested(target_layer_ids=[1, 3]), r"fc.weight is torch.float32 \[16, 48\], expected floats \[16, 32\]"),
    (
        {"aux_hidden_state_layer_ids": [1, 3, 6]},
        "target_layer_ids means the inputs of 2, 4, 7 but aux_hidden_state_layer_ids means the inputs of 1, 3, 6",
    ),
    ({"hidden_size": None}, "hidden_size must be a positive whole number, not None"),
    ({"vocab_size": 99}, "for a target with a vocabulary of 99, not 41: it belongs to another model"),
    ({"target_hidden_size": 32}, "needs an embedding of its own: the target's is 32 wide"),
    ({"num_hidden_layers": 3}, "must say full_attention or sliding_attention for each of 3 layers"),
    ({"num_hidden_layers": None}, "num_hidden_layers must be a positive whole number, not None"),
    ({"layer_types": ["linear_attention"] * 2}, "must say full_attention or sliding_attention for each of 2 layers"),
    ({"layer_types": 2}, "must say full_attention or sliding_attention for each of 2 layers, not 2"),
    ({"layer_types": [["full_attention"]] * 2}, "must say full_attention or sliding_attention for each of 2 layers"),
    ({"layer_types": ["sliding_attention"] * 2}, "sliding_attention without a sliding_window"),
    (nested(use_swa=True), "sliding_attention without a sliding_window"),
    ({"draft_vocab_size": 12}, "a head with a draft vocabulary or width of its own needs an lm_head of its own"),
    ({"hidden_act": "gelu"}, "hidden_act is gelu, and only silu is supported"),
    ({"attention_bias": True}, "attention_bias is True, and only False is supported"),
    (nested(attention_sink_bias=True), "attention_sink_bias is True, and only False is supported"),
    ({"is_neox_style": False}, "is_neox_style is False, and only True is supported"),
    (nested(projector_type="domino"), "projector_type is domino, and only dflash and dspark are known"),
    (nested(conv_kernel_size=2), "conv_kernel_size is 2, and only 0 is supported"),
    ({"rope_scaling": {"type": "spiral"}}, "rope_type 'spiral' is not one of"),
    ({"markov_rank": 3}, r"has no tensor markov_head.markov_w1.weight, expected as \[41, 3\]"),
    ({"markov_rank": "3"}, "markov_rank must be a whole number, not '3'"),
    ({"markov_rank": 3, "markov_head_type": "fir"}, "markov_head_type 'fir' is not one of vanilla, gated, rnn"),
    ({"ar_approximation": "swiglu"}, "has no tensor ar_approximation.d.weight"),
    ({"ar_approximation": "gru"}, "ar_approximation is gru, and only swiglu is known"),
    (
        {"speculators_config": {"proposal_methods": [{"speculative_tokens": 7}]}},
        "a block of 4 slots cannot draft the 7 tokens of speculators_config: one is another head's",
    ),
    ({"sample_from_anchor": True, "shift_label": False}, "sample_from_anchor is True but shift_label is False"),
]


@pytest.mark.parametrize(("changes", "message"), BAD_CONFIGS, ids=[message for _, message in BAD_CONFIGS])
def test_a_config_that_does_not_fit_is_named(changes, message, tmp_path):
    published = zlab()
    published.config |= changes
    published.write(tmp_path)
    with pytest.raises(GraftError, match=message) as caught:
        load(tmp_path)
    assert str(tmp_path) in str(caught.value)
    assert "\n" not in str(caught.value)


def spoil(tensors):
    tensors["layers.1.self_attn.k_norm.weight"].fill_(torch.nan)


BAD_TENSORS = [
    (lambda tensors: tensors.pop("fc.weight"), "is not a block head: it has no tensor fc.weight"),
    (lambda tensors: tensors.pop("layers.1.mlp.up_proj.weight"), "has no tensor layers.1.mlp.up_proj.weight"),
    (lambda tensors: tensors.pop("layers.0.self_attn.q_norm.weight"), "has no tensor layers.0.self_attn.q_norm.weight"),
    (lambda tensors: tensors.update(mask_hidden=torch.ones(2)), "has a tensor mask_hidden, which does not fit"),
    (lambda tensors: tensors.update({"model.fc.weight": torch.ones(2)}), "has the tensor fc.weight twice"),
    (lambda tensors: tensors.update(markov_head()), "has a tensor markov_head.markov_w1.weight, which does not fit"),
    (lambda tensors: tensors.update({"norm.weight": torch.ones(16).long()}), r"norm.weight is torch.int64 \[16\]"),
    (spoil, "k_norm.weight has values that are not finite"),
]


@pytest.mark.parametrize(("change", "message"), BAD_TENSORS, ids=[message for _, message in BAD_TENSORS])
def test_a_tensor_that_does_not_fit_is_named(change, message, tmp_path):
    published = zlab()
    change(published.tensors)
    published.write(tmp_path)
    with pytest.raises(GraftError, match=message) as caught:
        load(tmp_path)
    assert str(tmp_path) in str(caught.value)


@pytest.mark.parametrize("as_dict", [False, True])
def test_masked_slots_have_the_vector_of_the_mask_file(as_dict, tmp_path):
    published = zlab()
    published.write(tmp_path)
    vector = random(HIDDEN, seed=80)
    torch.save({"embedding": vector[None], "mask_token_id": 5} if as_dict else vector, tmp_path / "mask_embedding.pt")
    slots = load(tmp_path).slots(torch.tensor([ROOT]))
    assert torch.equal(slots[0], torch.stack([EMBEDDING[ROOT], vector, vector, vector]))
    assert inspect_head(tmp_path).files == ("model.safetensors", "mask_embedding.pt")


def test_a_mask_file_that_does_not_fit_is_named_and_runs_no_code(tmp_path):
    zlab().write(tmp_path)
    for content, message in (
        ({"embedding": torch.ones(HIDDEN), "mask_token_id": 9}, "is for mask token 9, but config.json has 5"),
        ({"vector": torch.ones(HIDDEN)}, "mask_embedding.pt holds no embedding"),
        (torch.ones(HIDDEN + 1), r"mask_embedding is torch.float32 \[17\], expected floats \[16\]"),
        (RunsCode(tmp_path / "run"), "mask_embedding.pt is damaged, or holds more than tensors"),
    ):
        torch.save(content, tmp_path / "mask_embedding.pt")
        with pytest.raises(GraftError, match=message):
            load(tmp_path)
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"vocab_size": 42}, "a vocabulary of 41, not 42"),
        ({"hidden_size": 64}, "hidden states of 16, not 64"),
        ({"num_hidden_layers": 4}, "is for a target with 9 layers, not 4: it belongs to another model"),
    ],
)
def test_another_models_head_is_refused(changes, message, tmp_path):
    zlab().write(tmp_path)
    with pytest.raises(GraftError, match=message):
        load(tmp_path, LlamaConfig(**(TARGET.to_dict() | changes)))


def test_borrowed_weights_are_not_copied_and_must_fit(tmp_path):
    zlab().write(tmp_path)
    head = load(tmp_path)
    assert head.target_embedding is not None and head.target_lm_head is not None
    assert head.target_embedding.data_ptr() == EMBEDDING.data_ptr()
    assert head.target_lm_head.data_ptr() == LM_HEAD.data_ptr()
    with pytest.raises(GraftError, match=r"the target's lm_head is \[40, 16\], not \[41, 16\]"):
        load_head(tmp_path, TARGET, torch.float32, "cpu", EMBEDDING, LM_HEAD[:40])


@pytest.fixture
def load_check(graft, tmp_path):
    """Runs `graft load-check` for the head in tmp_path/head and a target."""

    def run(*words, target=TARGET):
        target.save_pretrained(tmp_path / "target")
        return graft("load-check", str(tmp_path / "head"), "--model", str(tmp_path / "target"), *words)

    return run


@pytest.mark.parametrize("name", PUBLISHED)
def test_load_check_shows_a_head_that_fits(name, tmp_path, load_check):
    published = PUBLISHED[name]()
    published.write(tmp_path / "head")
    output = load_check().out
    facts = dict(re.split(r" {2,}", line.strip(), maxsplit=1) for line in output.splitlines()[:-1])
    assert (facts["kind"], facts["block size"]) == (published.kind, "4")
    assert facts["shifted"].startswith("yes" if published.shifted else "no")
    assert f"reads the inputs of layers {', '.join(map(str, published.reads))}." in output


def test_load_check_takes_slots_and_shows_what_a_head_has(tmp_path, load_check):
    specforge_dspark().write(tmp_path / "head")
    output = load_check("--slots", "in-place").out
    facts = dict(re.split(r" {2,}", line.strip(), maxsplit=1) for line in output.splitlines()[:-1])
    assert facts["shifted"] == "no (assumed, config.json does not say: see --slots)"
    assert (facts["markov"], facts["markov rank"], facts["mask token id"]) == ("gated", "3", "5")
    assert facts["causal"] == "no, no"


def test_load_check_of_neither_kind_names_the_known(tmp_path, load_check):
    published = zlab()
    published.config["architectures"] = ["BertModel"]
    published.write(tmp_path / "head")
    result = load_check()
    assert result.status == 2 and "DFlashDraftModel" in result.err
    assert "architecture BertModel is neither a known draft head (LlamaForCausalLM, " in result.err
