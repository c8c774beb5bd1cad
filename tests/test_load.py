"""Loading a model by name: what works, and the error of each failure."""

import hashlib
import json
import shutil
from pathlib import Path

import pytest
import torch
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from transformers import (
    LlamaConfig,
    LlamaForCausalLM,
    PreTrainedTokenizerFast,
    T5Config,
    T5ForConditionalGeneration,
)

import graft
from graft.errors import GraftError, ModelError
from graft.hub.draft_names import packaged_head_of
from graft.hub.load import load_model
from graft.hub.manifest import write_manifest
from graft.hub.registry import DEFAULT_MODEL, PACKAGED_MODELS
from pickles import RunsCode


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    """A tiny random Llama as `save_pretrained` writes it; copy before changing anything."""
    folder = tmp_path_factory.mktemp("saved")
    config = LlamaConfig(
        vocab_size=8,
        hidden_size=16,
        intermediate_size=32,
        num_hidden_layers=1,
        num_attention_heads=2,
        num_key_value_heads=1,
    )
    LlamaForCausalLM(config).save_pretrained(folder)
    words = Tokenizer(WordLevel({"<unk>": 0, "a": 1}, unk_token="<unk>"))
    PreTrainedTokenizerFast(tokenizer_object=words, unk_token="<unk>").save_pretrained(folder)
    return folder


@pytest.fixture
def folder(saved, tmp_path):
    return shutil.copytree(saved, tmp_path / "model")


def load(name):
    return load_model(str(name), device="cpu", dtype=torch.float32)


def edit_config(folder, **changes):
    path = folder / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | changes))


def cut(path, by):
    path.write_bytes(path.read_bytes()[:-by])


def test_local_folder_loads_in_the_dtype_asked_for(folder):
    model, tokenizer = load_model(str(folder), device="cpu", dtype=torch.bfloat16)
    assert model.dtype == torch.bfloat16
    assert not model.training
    assert tokenizer("a").input_ids == [1]


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (lambda folder: (folder / "config.json").unlink(), r"config\.json is missing"),
        (lambda folder: cut(folder / "config.json", 9), r"config\.json is not valid JSON"),
        (lambda folder: cut(folder / "model.safetensors", 9), r"model\.safetensors is damaged or cut off"),
        (lambda folder: (folder / "model.safetensors").write_bytes(b""), r"model\.safetensors is damaged"),
        (lambda folder: (folder / "model.safetensors").unlink(), r"model\.safetensors is missing"),
        (lambda folder: (folder / "tokenizer.json").unlink(), r"tokenizer\.json is missing"),
        (lambda folder: cut(folder / "tokenizer.json", 9), r"tokenizer\.json is not valid JSON"),
        (lambda folder: edit_config(folder, model_type="nonsense"), "nonsense"),
        (lambda folder: edit_config(folder, hidden_size=32), r"the weights do not fit config\.json"),
    ],
)
def test_damaged_folder_is_one_line_that_names_the_fault(folder, damage, message):
    damage(folder)
    with pytest.raises(ModelError, match=message) as caught:
        load(folder)
    assert "\n" not in str(caught.value)


def test_a_folder_of_an_encoder_decoder_is_refused_in_the_words_for_one_in_memory(tmp_path):
    config = T5Config(vocab_size=8, d_model=8, d_kv=4, d_ff=8, num_layers=1, num_heads=2)
    T5ForConditionalGeneration(config).save_pretrained(tmp_path)
    with pytest.raises(GraftError, match=r"is an encoder-decoder; Graft decodes decoder-only models$"):
        load(tmp_path)


def test_a_folder_of_a_peft_adapter_says_to_merge_it_as_model_and_as_drafter(folder, tmp_path):
    adapter = tmp_path / "adapter"
    adapter.mkdir()
    (adapter / "adapter_config.json").write_text("{}")
    words = "holds a PEFT adapter, not a whole model: merge it into its base model"
    with pytest.raises(ModelError, match=words):
        load(adapter)
    with pytest.raises(ModelError, match=words):
        graft.load(str(folder), draft=str(adapter))


@pytest.mark.parametrize("name", ["gpu", "GPU:0", "warp"])
def test_a_device_that_torch_does_not_know_is_answered_with_those_to_say(folder, name):
    with pytest.raises(GraftError, match=rf"^device '{name}' cannot be used here: choose auto, cpu, cuda, or cuda:1"):
        graft.load(str(folder), device=name)


def test_an_unknown_drafter_is_answered_like_an_unknown_model(monkeypatch):
    monkeypatch.setattr("huggingface_hub.snapshot_download", lambda *args, **more: pytest.fail("the hub was asked"))
    with pytest.raises(GraftError, match="no drafter at 'nope': it is neither mtp nor early-exit, nor packaged, nor a"):
        graft.load("smollm2-135m", draft="nope")
    with pytest.raises(GraftError, match=r"did you mean early-exit\?"):
        graft.load("smollm2-135m", draft="early-exti")


def test_a_pulled_model_has_its_packaged_head_by_name_and_by_folder(tmp_path):
    pulled = tmp_path / "elsewhere"
    pulled.mkdir()
    write_manifest(pulled, PACKAGED_MODELS[DEFAULT_MODEL])
    assert packaged_head_of(DEFAULT_MODEL) == packaged_head_of(str(pulled)) == DEFAULT_MODEL
    facts = json.loads((pulled / "graft.json").read_text())
    (pulled / "graft.json").write_text(json.dumps(facts | {"gguf_sha256": "0" * 64}))
    assert packaged_head_of(str(pulled)) is None, "of another version"
    assert packaged_head_of(str(tmp_path)) is None


def test_weights_the_files_lack_are_refused_not_made_up(folder):
    edit_config(folder, num_hidden_layers=2)
    with pytest.raises(ModelError, match=r"9 weights such as model\.layers\.1\..* are not in its files"):
        load(folder)


def test_code_that_comes_with_a_model_is_not_run(folder):
    trace = folder / "ran"
    (folder / "own.py").write_text(f"open({str(trace)!r}, 'w')\nclass Config: pass\n")
    edit_config(folder, model_type="own", auto_map={"AutoConfig": "own.Config"})
    with pytest.raises(ModelError, match="Python code of its own, which Graft does not run"):
        load(folder)
    assert not trace.exists()


def test_code_inside_bin_weights_is_not_run(folder):
    trace = folder / "ran"
    (folder / "model.safetensors").unlink()
    torch.save({"weights": RunsCode(trace)}, folder / "pytorch_model.bin")
    with pytest.raises(ModelError, match="use a copy in safetensors"):
        load(folder)
    assert not trace.exists()


def test_a_hub_that_refuses_is_one_line(monkeypatch):
    def refused(*args, **kwargs):
        raise OSError("The hub says no.\nAsk again.")

    monkeypatch.setattr("huggingface_hub.snapshot_download", refused)
    with pytest.raises(ModelError, match=r"no model at owner/name: .*, and as a hub id: The hub says no$"):
        load("owner/name")


@pytest.fixture
def packaged(saved, tmp_path, monkeypatch):
    """The default model as if it had been pulled, with tiny weights."""
    monkeypatch.setenv("GRAFT_HOME", str(tmp_path))
    folder = shutil.copytree(saved, tmp_path / "models" / DEFAULT_MODEL)
    write_manifest(folder, PACKAGED_MODELS[DEFAULT_MODEL])
    return folder


def test_packaged_name_loads_from_graft_home(packaged):
    model, _ = load_model(DEFAULT_MODEL, device="cpu", dtype=torch.float32)
    assert model.config.hidden_size == 16


def test_truncated_packaged_model_says_to_pull_it_again(packaged):
    cut(packaged / "model.safetensors", 9)
    with pytest.raises(ModelError, match=rf"model\.safetensors has .* bytes instead of .*--force {DEFAULT_MODEL}"):
        load(DEFAULT_MODEL)


def test_the_packaged_head_changes_on_purpose_only():
    """CONTRIBUTING.md says when."""
    weights = Path(graft.__file__).parent / "heads" / DEFAULT_MODEL / "model.safetensors"
    assert (
        hashlib.sha256(weights.read_bytes()).hexdigest()
        == "f478dece4f917bc9d5b573481779413eb2229be8f4f5bbfe669c2a8a0a8b8067"
    )
