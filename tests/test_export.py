"""What is exported is what others load: heads in the layouts of other engines, and transformers' custom generate."""

import json

import pytest
import torch

from graft.drafters import block, eagle3
from graft.errors import GraftError
from graft.hub.export import export_custom_generate, export_head
from tiny import target_config, tiny_model

TARGET = target_config(head_dim=8)
SHAPE = {
    "hidden_size": 32,
    "target_hidden_size": 32,
    "vocab_size": 61,
    "draft_vocab_size": 20,
    "intermediate_size": 48,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
}


def saved_head(folder, **changes):
    torch.manual_seed(0)
    head = eagle3.Eagle3Head(eagle3.Eagle3Config(**SHAPE, target_layers=(2, 5, 7), **changes))
    for parameter in head.parameters():
        torch.nn.init.normal_(parameter, std=0.1)
    head.t2d.zero_()[:20] = True
    head.d2t.zero_()
    eagle3.save_head(head, folder)
    return head


@pytest.mark.parametrize(
    ("engine", "architecture"),
    [("sglang", "LlamaForCausalLMEagle3"), ("vllm", "LlamaForCausalLM"), ("speculators", "Eagle3Speculator")],
)
def test_an_exported_head_has_the_engines_names_and_the_same_weights(engine, architecture, tmp_path):
    head = saved_head(tmp_path / "head")
    export_head(tmp_path / "head", tmp_path / "out", engine, "owner/target", TARGET)
    config = json.loads((tmp_path / "out" / "config.json").read_text())
    assert config["architectures"] == [architecture]
    if engine == "speculators":
        assert config["speculators_config"]["verifier"]["name_or_path"] == "owner/target"
    again = eagle3.load_head(tmp_path / "out", TARGET, torch.float32, "cpu")
    assert again.config == head.config
    for name, tensor in head.state_dict().items():
        assert torch.equal(again.state_dict()[name], tensor), name


def test_a_head_that_sglang_would_compute_differently_is_not_exported_to_it(tmp_path):
    saved_head(tmp_path / "head", norm_before_residual=True)
    with pytest.raises(GraftError, match="SGLang does not know the head's normed residual"):
        export_head(tmp_path / "head", tmp_path / "out", "sglang", "owner/target", TARGET)
    assert not (tmp_path / "out").exists()
    export_head(tmp_path / "head", tmp_path / "out", "vllm", "owner/target", TARGET)


def test_the_card_has_the_command_the_figures_and_how_the_head_was_trained(tmp_path):
    saved_head(tmp_path / "head")
    (tmp_path / "head" / "README.md").write_text("# A head\n\nTrained on 7 tokens.\n")
    (tmp_path / "head" / "training.json").write_text("{}")
    (tmp_path / "head" / "profile.safetensors").write_bytes(b"not for others")
    runs = [
        {"task": "gsm8k", "method": "off", "mean_accepted": 1.0, "speedup": 1.0},
        {"task": "gsm8k", "method": "graft", "mean_accepted": 5.25, "speedup": 3.5},
    ]
    averages = [{"task": "average", "method": "graft", "mean_accepted": 4.75, "speedup": 3.25}]
    results = {"runs": runs, "averages": averages, "environment": {"device": "a large GPU"}}
    (tmp_path / "results.json").write_text(json.dumps(results))
    rates = {"plain": {"tokens_per_second": 1000.4}, "graft": {"tokens_per_second": 2500.2}}
    (tmp_path / "load.json").write_text(json.dumps({"results": [{"concurrency": 16, **rates}]}))
    out = tmp_path / "out"
    export_head(
        tmp_path / "head", out, "vllm", "owner/target", TARGET, [tmp_path / "results.json"], [tmp_path / "load.json"]
    )
    card = (out / "README.md").read_text()
    assert card.startswith("---\nbase_model: owner/target\n")
    assert '"method": "eagle3", "model": "."' in card
    assert "| gsm8k | 5.25 (3.50) |" in card and "| average | 4.75 (3.25) |" in card and "a large GPU" in card
    assert "| 16 | 1,000 | 2,500 |" in card
    assert "Trained on 7 tokens." in card
    # vLLM takes every .safetensors file in the folder for weights.
    assert sorted(path.name for path in out.iterdir()) == [
        "README.md",
        "config.json",
        "model.safetensors",
        "training.json",
    ]


def test_a_block_head_goes_to_engines_that_know_its_layout(tmp_path):
    facts = {**SHAPE, "draft_vocab_size": 61, "block_size": 4, "mask_token_id": 3, "num_target_layers": 10}
    facts |= {"target_layers": (2, 5, 8), "causal": (False,), "windows": (None,), "shifted": False}
    head = block.BlockHead(block.BlockConfig.of(facts))
    block.save_head(head, tmp_path / "head")
    export_head(tmp_path / "head", tmp_path / "out", "sglang", "owner/target", TARGET)
    again = block.load_head(tmp_path / "out", TARGET, torch.float32, "cpu")
    assert torch.equal(again.fc.weight, head.fc.weight)
    assert "--speculative-algorithm DFLASH" in (tmp_path / "out" / "README.md").read_text()
    with pytest.raises(GraftError, match="speculators has no layout here for a block head"):
        export_head(tmp_path / "head", tmp_path / "other", "speculators", "owner/target", TARGET)


def test_wrong_arguments_are_one_line_and_overwrite_nothing(tmp_path):
    saved_head(tmp_path / "head")
    kept = tmp_path / "full"
    kept.mkdir()
    (kept / "mine.txt").write_text("mine")
    with pytest.raises(GraftError, match="full is not empty"):
        export_head(tmp_path / "head", kept, "vllm", "m", TARGET)
    with pytest.raises(GraftError, match="full is not empty"):
        export_custom_generate(kept)
    assert [path.name for path in kept.iterdir()] == ["mine.txt"]
    with pytest.raises(GraftError, match="no export for 'trtllm'"):
        export_head(tmp_path / "head", tmp_path / "out", "trtllm", "m", TARGET)
    with pytest.raises(GraftError, match=r"missing\.json cannot be read"):
        export_head(tmp_path / "head", tmp_path / "out", "vllm", "m", TARGET, [tmp_path / "missing.json"])
    (tmp_path / "list.json").write_text("[]")
    with pytest.raises(GraftError, match="is not what graft bench --out writes"):
        export_head(tmp_path / "head", tmp_path / "out", "vllm", "m", TARGET, [tmp_path / "list.json"])
    assert not (tmp_path / "out").exists()


def test_transformers_loads_the_exported_custom_generate_and_gives_generates_text(tmp_path, monkeypatch, graft):
    assert "trust_remote_code=True" in graft("export-hub", str(tmp_path / "custom")).out
    model = tiny_model()
    ids = torch.tensor([[5, 9, 13, 5, 9, 13, 5, 9]])
    plain = model.generate(ids, max_new_tokens=12, do_sample=False)
    monkeypatch.setattr("transformers.dynamic_module_utils.HF_MODULES_CACHE", str(tmp_path / "modules"))
    custom = model.generate(
        ids, max_new_tokens=12, do_sample=False, custom_generate=str(tmp_path / "custom"), trust_remote_code=True
    )
    assert torch.equal(plain, custom)
