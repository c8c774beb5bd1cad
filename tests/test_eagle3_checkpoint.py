"""EAGLE-3 checkpoints: heads in every published layout load to the same weights; every fault is named in one line."""

import json
import re

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import LlamaConfig

from graft.drafters.eagle3 import Eagle3Config, Eagle3Head, inspect_head, load_head, save_head
from graft.drafters.eagle3.layouts import LAYOUTS
from graft.drafters.head_kinds import kind_of
from graft.errors import GraftError
from pickles import RunsCode
from tiny import target_config

VOCAB, DRAFT_VOCAB, HIDDEN = 61, 20, 32
TARGET = target_config()
EMBEDDING = torch.randn(VOCAB, HIDDEN, generator=torch.Generator().manual_seed(0))
TARGET_IDS = torch.arange(DRAFT_VOCAB) * 3  # what draft ids stand for
LAYER_SHAPE = {
    "model_type": "llama",
    "hidden_act": "silu",
    "hidden_size": HIDDEN,
    "intermediate_size": 40,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "num_hidden_layers": 1,
    "max_position_embeddings": 128,
    "rms_norm_eps": 1e-5,
    "vocab_size": VOCAB,
}


def make_head(**changes):
    torch.manual_seed(0)
    shape = {
        "draft_vocab_size": DRAFT_VOCAB,
        "intermediate_size": 40,
        "max_position_embeddings": 128,
        "rms_norm_eps": 1e-5,
    }
    head = Eagle3Head(Eagle3Config.for_target(TARGET, **(shape | changes)))
    for parameter in head.parameters():
        torch.nn.init.normal_(parameter, 1.0 if parameter.dim() == 1 else 0.0, 0.2)
    if head.config.draft_vocab_size == DRAFT_VOCAB:
        head.set_vocabulary(TARGET_IDS)
    return head


def drafts(head):
    """The head's scores and ids for some input, all of its numbers having had a say."""
    generator = torch.Generator().manual_seed(1)
    tokens = torch.randint(0, VOCAB, (2, 5), generator=generator)
    features = torch.randn(2, 5, head.fc.in_features, generator=generator)
    if not head.config.own_embedding:
        head.borrow_embedding(EMBEDDING)
    with torch.no_grad():
        hidden, _ = head(head.embed(tokens), head.fuse(features), torch.arange(5).expand(2, -1))
        scores = head.logits(hidden)
    return scores, head.to_target(scores.argmax(-1))


def assert_same(head, other):
    for mine, its in zip(drafts(head), drafts(other), strict=True):
        assert torch.equal(mine, its)


def write(folder, config, tensors, file="model.safetensors"):
    folder.mkdir(exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config))
    if file.endswith(".bin"):
        torch.save(tensors, folder / file)
    else:
        save_file(tensors, folder / file)


def write_as_safeailab(folder):
    """Names the `Eagle3Head` has; no rotary settings and no layers, which mean the usual ones."""
    head = make_head()
    config = LAYER_SHAPE | {"architectures": ["LlamaForCausalLM"], "draft_vocab_size": DRAFT_VOCAB}
    write(folder, config, dict(head.state_dict()), "pytorch_model.bin")
    return head


def write_as_angelslim(folder):
    """Another architecture, and heads of a width of their own."""
    head = make_head(head_dim=16, rope={"rope_type": "default", "rope_theta": 1e6}, target_layers=(3, 5, 6))
    config = LAYER_SHAPE | {"architectures": ["Eagle3LlamaForCausalLM"], "draft_vocab_size": DRAFT_VOCAB}
    config |= {"head_dim": 16, "rope_theta": 1000000, "rope_scaling": None, "aux_hidden_states_layer_ids": [2, 4, 5]}
    write(folder, config, dict(head.state_dict()), "pytorch_model.bin")
    return head


def write_as_specforge(folder):
    """Layers numbered by their outputs, and the norms of EAGLE-3.1."""
    head = make_head(target_layers=(2, 4, 9), fc_norm=True, norm_output=True)
    config = LAYER_SHAPE | {"architectures": ["LlamaForCausalLMEagle3"], "draft_vocab_size": DRAFT_VOCAB}
    config |= {"eagle_config": {"eagle_aux_hidden_state_layer_ids": [1, 3, 8], "use_aux_hidden_state": True}}
    write(folder, config | {"fc_norm": True, "norm_output": True}, dict(head.state_dict()))
    return head


def write_as_vllm_knows_it(folder):
    """Names of vision models' heads, whose rotary positions in texts are the usual ones."""
    head = make_head(head_dim=16, rope={"rope_type": "default", "rope_theta": 5e6}, target_layers=(3, 5, 6))
    config = LAYER_SHAPE | {"architectures": ["Eagle3Qwen2_5vlForCausalLM"], "draft_vocab_size": DRAFT_VOCAB}
    config |= {"head_dim": 16, "rope_theta": 5000000, "rope_scaling": {"type": "mrope", "mrope_section": [2, 3, 3]}}
    write(folder, config | {"eagle_aux_hidden_state_layer_ids": [3, 5, 6]}, dict(head.state_dict()))
    return head


def write_as_speculators(folder):
    """A nested shape, layers numbered by their inputs, an embedding and norms of its own, other tensor names."""
    scaling = {"factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 32}
    head = make_head(
        target_layers=(1, 4, 9),
        own_embedding=True,
        norm_before_residual=True,
        norm_before_fc=True,
        head_norms=True,
        rope={"rope_type": "llama3", "rope_theta": 5e5, **scaling},
    )
    config = {
        "architectures": ["Eagle3Speculator"],
        "draft_vocab_size": DRAFT_VOCAB,
        "eagle_aux_hidden_state_layer_ids": [1, 4, 9],
        "norm_before_residual": True,
        "norm_before_fc": True,
        "speculators_model_type": "eagle3",
        "speculators_config": {"algorithm": "eagle3", "verifier": {"name_or_path": "owner/target"}},
        "target_hidden_size": None,
        "transformer_layer_config": LAYER_SHAPE
        | {"model_type": "qwen3"}
        | {"rope_parameters": {"rope_type": "llama3", "rope_theta": 5e5, **scaling}},
    }
    names = {name: name.replace("midlayer.", "layers.0.") for name in head.state_dict()}
    tensors = {names[name]: tensor for name, tensor in head.state_dict().items()}
    write(folder, config, tensors | {"verifier_norm.weight": torch.ones(HIDDEN)})
    return head


WRITERS = {
    "safeailab": write_as_safeailab,
    "angelslim": write_as_angelslim,
    "specforge": write_as_specforge,
    "vllm": write_as_vllm_knows_it,
    "speculators": write_as_speculators,
}


def load(folder, target=TARGET):
    return load_head(folder, target, torch.float32, "cpu", EMBEDDING)


@pytest.mark.parametrize("layout", WRITERS)
def test_a_head_in_a_published_spelling_drafts_as_the_original(layout, tmp_path):
    head = WRITERS[layout](tmp_path)
    loaded = load(tmp_path)
    assert loaded.config == head.config
    assert torch.equal(loaded.t2d, head.t2d)
    assert_same(head, loaded)


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"target_layers": (0, 3, 9), "norm_before_fc": True, "norm_output": True, "sliding_window": 3},
        {"hidden_size": 16, "own_embedding": True, "norm_before_residual": True, "fc_norm": True},
        {
            "head_norms": True,
            "rope": {"rope_type": "linear", "rope_theta": 5e5, "factor": 2.0},
            "draft_vocab_size": VOCAB,
        },
    ],
    ids=["plain", "norms", "narrow", "rope"],
)
def test_saving_and_loading_gives_the_same_head(layout, changes, tmp_path):
    head = make_head(**changes)
    save_head(head, tmp_path / "new" / "folder", layout)
    loaded = load(tmp_path / "new" / "folder")
    assert loaded.config == head.config
    assert inspect_head(tmp_path / "new" / "folder").layout == layout
    assert_same(head, loaded)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_every_layout_also_says_the_layers_where_vllm_looks_first(layout, tmp_path):
    save_head(make_head(target_layers=(2, 4, 9)), tmp_path, layout)
    config = json.loads((tmp_path / "config.json").read_text())
    assert config["eagle_aux_hidden_state_layer_ids"] == [2, 4, 9], "counted by their inputs"
    assert config.get("eagle_config", {}).get("eagle_aux_hidden_state_layer_ids") in (None, [1, 3, 8])


def test_weights_may_come_in_several_files(tmp_path):
    save_head(make_head(), tmp_path)
    tensors = load_file(tmp_path / "model.safetensors")
    (tmp_path / "model.safetensors").unlink()
    for part, names in enumerate((list(tensors)[:5], list(tensors)[5:]), start=1):
        save_file({name: tensors[name] for name in names}, tmp_path / f"model-0000{part}-of-00002.safetensors")
    assert_same(make_head(), load(tmp_path))


def test_a_head_with_the_whole_vocabulary_needs_no_map(tmp_path):
    head = make_head(draft_vocab_size=VOCAB)
    save_head(head, tmp_path)
    edit_tensors(tmp_path, lambda tensors: (tensors.pop("d2t"), tensors.pop("t2d")))
    assert_same(head, load(tmp_path))


def test_the_head_borrows_the_targets_embedding_without_a_copy(tmp_path):
    save_head(make_head(), tmp_path)
    embedding = load(tmp_path).target_embedding
    assert embedding is not None
    assert embedding.data_ptr() == EMBEDDING.data_ptr()
    with pytest.raises(GraftError, match=r"the target's embedding is \[50, 32\], not \[61, 32\]"):
        load_head(tmp_path, TARGET, torch.float32, "cpu", EMBEDDING[:50])


def test_a_hub_id_is_fetched_without_its_other_files(tmp_path, monkeypatch):
    save_head(make_head(), tmp_path)
    asked = []

    def download(repository, allow_patterns):
        asked.append((repository, allow_patterns))
        return str(tmp_path)

    monkeypatch.setattr("huggingface_hub.snapshot_download", download)
    assert inspect_head("owner/head").folder == tmp_path
    assert asked == [("owner/head", ["config.json", "*.safetensors", "*.bin", "mask_embedding.pt"])]


def test_a_hub_that_cannot_be_reached_is_one_line(monkeypatch):
    def download(repository, allow_patterns):
        raise OSError("no network.\nmore about it")

    monkeypatch.setattr("huggingface_hub.snapshot_download", download)
    with pytest.raises(
        GraftError, match=r"no drafter at owner/head: there is no such folder, and as a hub id: no network$"
    ):
        inspect_head("owner/head")


def edit_tensors(folder, change):
    tensors = load_file(folder / "model.safetensors")
    change(tensors)
    save_file(tensors, folder / "model.safetensors")


def edit_config(folder, **changes):
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | changes))


def layers_by_output(*layers):
    return {
        "eagle_config": {"eagle_aux_hidden_state_layer_ids": list(layers)},
        "eagle_aux_hidden_state_layer_ids": None,
    }


BAD_CONFIGS = [
    ({"architectures": ["GPT2LMHeadModel"]}, "architecture GPT2LMHeadModel is not that of an EAGLE-3 head"),
    ({"architectures": None}, "architecture None is not"),
    ({"hidden_size": None}, "hidden_size must be a positive whole number, not None"),
    ({"num_attention_heads": 0}, "num_attention_heads must be a positive whole number, not 0"),
    ({"head_dim": "wide"}, "head_dim must be a positive whole number, not 'wide'"),
    ({"hidden_act": "gelu"}, "hidden_act is gelu, and only silu is supported"),
    ({"num_hidden_layers": 2}, "num_hidden_layers is 2, and only 1 is supported"),
    ({"attention_bias": True}, "attention_bias is True, and only False is supported"),
    ({"eagle_config": {"use_aux_hidden_state": False}}, "does not read the target's layers"),
    ({"eagle_config": {"eagle_aux_hidden_state_layer_ids": ["2"]}}, "must be a list of layer numbers"),
    (layers_by_output(1, 4, 9), "layers 2, 5, 10, but the target has only 10"),
    (layers_by_output(-2, 4, 8), "none negative"),
    (
        {"eagle_aux_hidden_state_layer_ids": [1, 4, 6]},
        "eagle_config.eagle_aux_hidden_state_layer_ids means the inputs of 2, 5, 7 "
        "but eagle_aux_hidden_state_layer_ids means the inputs of 1, 4, 6: delete the one that is wrong",
    ),
    ({"rope_scaling": [1]}, "rotary parameters must be settings by name"),
    ({"rope_scaling": {"type": "spiral"}}, "rope_type 'spiral' is not one of"),
    ({"rope_scaling": {"type": "yarn"}}, "are not usable"),
    ({"draft_vocab_size": 62}, r"the draft vocabulary \(62\) is larger than the target's \(61\)"),
    ({"vocab_size": 99}, "for a target with a vocabulary of 99, not 61: it belongs to another model"),
    ({"target_hidden_size": 64}, "needs an embedding of its own"),
    (
        {"intermediate_size": 41},
        r"midlayer.mlp.gate_proj.weight is torch.float32 \[40, 32\], expected floats \[41, 32\]",
    ),
    ({"fc_norm": True}, r"has no tensor fc_norm.0.weight, expected as \[32\]"),
    ({"draft_vocab_size": 19}, r"lm_head.weight is torch.float32 \[20, 32\], expected floats \[19, 32\]"),
]


@pytest.mark.parametrize(("changes", "message"), BAD_CONFIGS, ids=[message for _, message in BAD_CONFIGS])
def test_a_config_that_does_not_fit_is_named(changes, message, tmp_path):
    save_head(make_head(), tmp_path)
    edit_config(tmp_path, **changes)
    with pytest.raises(GraftError, match=message) as caught:
        load(tmp_path)
    assert str(tmp_path) in str(caught.value)
    assert "\n" not in str(caught.value)


BAD_TENSORS = [
    (lambda tensors: tensors.pop("fc.weight"), "is not an EAGLE-3 head: it has no tensor fc.weight"),
    (lambda tensors: tensors.pop("midlayer.mlp.up_proj.weight"), "has no tensor midlayer.mlp.up_proj.weight"),
    (lambda tensors: tensors.pop("d2t"), r"has no tensor d2t, expected as \[20\]"),
    (lambda tensors: tensors.update(bias=torch.ones(2)), "has a tensor bias, which does not fit its config.json"),
    (lambda tensors: tensors.update({"fc.weight": torch.ones(32, 64)}), r"fc.weight is .* \[32, 64\], expected"),
    (lambda tensors: tensors.update({"norm.weight": torch.ones(32).long()}), r"norm.weight is torch.int64 \[32\]"),
    (lambda tensors: tensors["norm.weight"].fill_(torch.nan), "norm.weight has values that are not finite"),
    (lambda tensors: tensors["fc.weight"][3].fill_(torch.inf), "fc.weight has values that are not finite"),
    (lambda tensors: tensors.update(d2t=torch.zeros(20)), r"d2t is torch.float32 \[20\], expected whole numbers"),
    (lambda tensors: tensors.update(d2t=torch.zeros(19).long()), r"d2t is torch.int64 \[19\], expected"),
    (lambda tensors: tensors["d2t"].add_(4), "d2t maps to 61, outside the 61 tokens"),
    (lambda tensors: tensors["d2t"].sub_(1), "d2t maps to -1, outside the 61 tokens"),
    (lambda tensors: tensors["d2t"][1].sub_(3), "d2t gives two draft tokens the same target token"),
    (lambda tensors: tensors["t2d"].fill_(True), "t2d does not mark the tokens that d2t maps to"),
    (lambda tensors: tensors.update(t2d=torch.ones(7)), "t2d does not mark the tokens that d2t maps to"),
]


@pytest.mark.parametrize(("change", "message"), BAD_TENSORS, ids=[message for _, message in BAD_TENSORS])
def test_a_tensor_that_does_not_fit_is_named(change, message, tmp_path):
    save_head(make_head(), tmp_path)
    edit_tensors(tmp_path, change)
    with pytest.raises(GraftError, match=message) as caught:
        load(tmp_path)
    assert str(tmp_path) in str(caught.value)


def test_a_missing_tensor_is_named_as_its_layout_spells_it(tmp_path):
    save_head(make_head(), tmp_path, "speculators")
    edit_tensors(tmp_path, lambda tensors: tensors.pop("layers.0.mlp.up_proj.weight"))
    with pytest.raises(GraftError, match=r"has no tensor layers.0.mlp.up_proj.weight, expected as \[40, 32\]"):
        load(tmp_path)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"vocab_size": 62}, "a vocabulary of 61, not 62"),
        ({"hidden_size": 64}, "hidden states of 32, not 64"),
        ({"num_hidden_layers": 4}, "reads the target's layers 2, 5, 7, but the target has only 4"),
    ],
)
def test_another_models_head_is_refused(changes, message, tmp_path):
    save_head(make_head(), tmp_path)
    with pytest.raises(GraftError, match=message):
        load(tmp_path, LlamaConfig(**(TARGET.to_dict() | changes)))


def test_a_pickle_that_would_run_code_is_refused_and_not_run(tmp_path):
    write_as_safeailab(tmp_path)
    torch.save({"fc.weight": RunsCode(tmp_path / "run")}, tmp_path / "pytorch_model.bin")
    with pytest.raises(GraftError, match=r"pytorch_model.bin is damaged, or holds more than tensors"):
        load(tmp_path)
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize("layout", ["safeailab", "specforge"])
@pytest.mark.parametrize("size", [0, 5, 2000])
def test_a_file_that_is_cut_off_is_named(layout, size, tmp_path):
    WRITERS[layout](tmp_path)
    (weights,) = (path for path in tmp_path.iterdir() if path.suffix != ".json")
    weights.write_bytes(weights.read_bytes()[:size])
    with pytest.raises(GraftError, match=rf"{weights.name} is damaged"):
        load(tmp_path)


def test_a_folder_without_weights_says_which(tmp_path):
    save_head(make_head(), tmp_path)
    (tmp_path / "model.safetensors").unlink()
    with pytest.raises(GraftError, match=r"has neither model.safetensors nor pytorch_model.bin"):
        load(tmp_path)
    with pytest.raises(GraftError, match="is a file: give the folder"):
        inspect_head(tmp_path / "config.json")


@pytest.mark.parametrize("layout", WRITERS)
def test_load_check_shows_a_head_that_fits(layout, tmp_path, graft):
    head = WRITERS[layout](tmp_path / "head")
    TARGET.save_pretrained(tmp_path / "target")
    output = graft("load-check", str(tmp_path / "head"), "--model", str(tmp_path / "target")).out
    facts = dict(re.split(r" {2,}", line.strip(), maxsplit=1) for line in output.splitlines()[:-1])
    assert (facts["kind"], facts["layout"]) == ("EAGLE-3", layout)
    assert (facts["draft vocab size"], facts["vocab size"]) == ("20", "61")
    assert f"reads the inputs of layers {', '.join(map(str, head.config.target_layers))}." in output


@pytest.mark.parametrize(
    ("architecture", "reason"),
    [("Eagle3DeepseekV2ForCausalLM", "latent attention"), ("DFlash2DraftModel", "convolutions and a selector")],
)
def test_a_known_head_that_is_not_run_is_refused_with_the_reason(architecture, reason, tmp_path):
    (tmp_path / "config.json").write_text(json.dumps({"architectures": [architecture], "draft_vocab_size": 20}))
    with pytest.raises(GraftError, match=f"{architecture} has {reason}.*: choose another drafter$"):
        kind_of(tmp_path)
