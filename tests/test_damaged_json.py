"""JSON files that were cut off, or hold something else than they should: one line says so."""

import copy
import json

import pytest
import torch
from safetensors.torch import save_file

from graft import GraftError
from graft.drafters.eagle3.checkpoint import inspect_head
from graft.drafters.mtp.checkpoint import _files_by_name
from graft.files import read_json
from graft.hub.export import accepted_table, load_table
from graft.hub.manifest import MANIFEST, check_sizes, record_files, version_of
from graft.train.card import read_log
from graft.train.generate_data import read_answers
from graft.train.layer_pruning import read_order
from graft.tuning import profile

WRONG = (None, "x", -1, 1.5, True, [], {}, ["x"], {"x": 1})


def damages(content):
    """The content with each part, at any depth, left out or of another type."""
    yield from WRONG
    if not isinstance(content, dict | list):
        return
    for key in content if isinstance(content, dict) else range(len(content)):
        for part in damages(content[key]):
            damaged = copy.copy(content)
            damaged[key] = part
            yield damaged
        without = copy.copy(content)
        del without[key]
        yield without


def check(read, what):
    """Whether it is refused, by one line if it is."""
    try:
        read()
    except GraftError as error:
        assert str(error) and "\n" not in str(error), (what, str(error))
        return True
    except Exception as error:
        error.add_note(f"of {what!r}")
        raise
    return False


def check_all(path, content, read):
    path.write_text(json.dumps(content))
    assert not check(read, content), "what is whole is read"
    text = path.read_bytes()
    for part in (b"", text[:1], text[: len(text) // 2], text[:-1], b"\xff" + text):
        path.write_bytes(part)
        assert check(read, part)
    for damaged in damages(content):
        path.write_text(json.dumps(damaged))
        check(read, damaged)
    for damaged in WRONG[:-1]:
        path.write_text(json.dumps(damaged))
        assert check(read, damaged), "of another type altogether"


def test_a_damaged_manifest(tmp_path):
    (tmp_path / "config.json").write_text("{}")
    record_files(tmp_path, {"name": "x", "version": "1"})
    manifest = tmp_path / MANIFEST
    check_all(manifest, json.loads(manifest.read_text()), lambda: (check_sizes(tmp_path), version_of(tmp_path)))


def test_damaged_tables_of_an_export(tmp_path):
    path = tmp_path / "results.json"
    run = {"method": "graft", "task": "code", "mean_accepted": 3.0, "speedup": 2.0}
    facts = {"runs": [run], "averages": [run], "environment": {"gpu": "x"}}
    check_all(path, facts, lambda: accepted_table(read_json(path), path))
    load = {"concurrency": 1, "plain": {"tokens_per_second": 1.0}, "graft": {"tokens_per_second": 2.0}}
    check_all(path, {"results": [load]}, lambda: load_table(read_json(path), path))


def test_a_damaged_config_of_a_head(tmp_path):
    shape = {"hidden_size": 64, "intermediate_size": 128, "num_attention_heads": 4, "num_key_value_heads": 2}
    config = shape | {"vocab_size": 100, "draft_vocab_size": 50, "rms_norm_eps": 1e-5, "hidden_act": "silu"}
    config |= {"architectures": ["LlamaForCausalLM"], "head_dim": 16, "max_position_embeddings": 128}
    save_file({"x": torch.zeros(1)}, tmp_path / "model.safetensors")
    path = tmp_path / "config.json"
    for damaged in damages(config):
        path.write_text(json.dumps(damaged))
        check(lambda: inspect_head(tmp_path), damaged)


def test_a_damaged_index_of_weights(tmp_path):
    path = tmp_path / "model.safetensors.index.json"
    check_all(path, {"weight_map": {"a": "model-1.safetensors"}}, lambda: _files_by_name(tmp_path))


def test_a_damaged_order_of_layers(tmp_path):
    path = tmp_path / "order.json"
    order = {"facts": {"a": 1}, "num_layers": 3, "alone": [1.0], "costs": [1.0], "removed": [[1, 0.5]]}
    check_all(path, order, lambda: read_order(path, {"a": 1}))


def test_damaged_metadata_of_a_profile(tmp_path):
    path = tmp_path / "x.safetensors"
    about = {"format": profile.FORMAT, "model": "a", "head": None, "device": None, "dtype": None}
    for damaged in ("", "{", json.dumps(about)[:-1], *map(json.dumps, damages(about))):
        save_file({"a": torch.zeros(1)}, path, metadata={"about": damaged})
        check(lambda: profile.Profile.read(path), damaged)


def test_damaged_answers_to_train_on(tmp_path):
    shard = {"tokens": torch.arange(5), "lengths": torch.tensor([5]), "num_prompt_tokens": torch.tensor([2])}
    save_file(shard, tmp_path / "answers-000-0.safetensors")
    check_all(tmp_path / "answers.json", {"temperatures": [1.0]}, lambda: list(read_answers(tmp_path)))
    (tmp_path / "answers.json").write_text('{"temperatures": [1.0]}')
    for changes in ({"lengths": torch.tensor([4])}, {"num_prompt_tokens": torch.tensor([1, 1])}, {}):
        save_file(shard | changes if changes else {"x": torch.zeros(1)}, tmp_path / "answers-000-0.safetensors")
        assert check(lambda: list(read_answers(tmp_path)), changes)


@pytest.mark.parametrize("text", ['{"step": 1', "5\n", "x", "[1]"])
def test_a_damaged_log_of_a_training_run(tmp_path, text):
    path = tmp_path / "log.jsonl"
    path.write_text(text)
    assert check(lambda: read_log(path), text)
