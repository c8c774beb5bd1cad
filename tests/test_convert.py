"""GGUF conversion: transformers loads the folder, and a turn ends with the token that the registry names."""

import errno
import struct

import gguf
import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from tokenizers import decoders
from transformers import AutoModelForCausalLM, AutoTokenizer

from graft.errors import ModelError
from graft.hub.convert import convert_gguf
from graft.hub.draft_names import is_here
from graft.hub.load import load_model
from graft.hub.pull import convert_once
from graft.hub.registry import DEFAULT_MODEL, PACKAGED_MODELS, readable_size
from graft.server.grammar import Grammars
from graft.tuning.drafters import full_name

TOKENS = ["<|endoftext|>", "<|im_start|>", "<|im_end|>", "a", "b", "c", "ab", "bc"]
HIDDEN = 8
EMPTY = b"GGUF" + struct.pack("<IQQQ", 3, 0, 0, 0)  # a header without fields and tensors, padded
TEMPLATE = "{% for message in messages %}<|im_start|>{{ message.content }}<|im_end|>{% endfor %}"


def write_gguf(path, architecture="llama", add_bos=None, tokens=TOKENS):
    """A one-layer Llama or Qwen2 that names <|im_start|> as its end of sequence, as some real files do."""
    writer = gguf.GGUFWriter(path, architecture)
    writer.add_context_length(64)
    writer.add_embedding_length(HIDDEN)
    writer.add_block_count(1)
    writer.add_feed_forward_length(2 * HIDDEN)
    writer.add_head_count(2)
    writer.add_head_count_kv(1)
    writer.add_layer_norm_rms_eps(1e-5)
    writer.add_rope_dimension_count(HIDDEN // 2)
    writer.add_rope_freq_base(10_000.0)
    writer.add_vocab_size(len(tokens))
    writer.add_tokenizer_model("gpt2")
    writer.add_token_list(tokens)
    writer.add_token_types([gguf.TokenType.CONTROL] * 3 + [gguf.TokenType.NORMAL] * (len(tokens) - 3))
    writer.add_token_merges(["a b", "b c"])
    writer.add_bos_token_id(1)
    writer.add_eos_token_id(1)
    if add_bos is not None:
        writer.add_add_bos_token(add_bos)
    shapes = {
        "token_embd": (len(tokens), HIDDEN),
        "output_norm": (HIDDEN,),
        "blk.0.attn_norm": (HIDDEN,),
        "blk.0.ffn_norm": (HIDDEN,),
        "blk.0.attn_q": (HIDDEN, HIDDEN),
        "blk.0.attn_k": (HIDDEN // 2, HIDDEN),
        "blk.0.attn_v": (HIDDEN // 2, HIDDEN),
        "blk.0.attn_output": (HIDDEN, HIDDEN),
        "blk.0.ffn_gate": (2 * HIDDEN, HIDDEN),
        "blk.0.ffn_up": (2 * HIDDEN, HIDDEN),
        "blk.0.ffn_down": (HIDDEN, 2 * HIDDEN),
    }
    rng = np.random.default_rng(0)
    for name, shape in shapes.items():
        writer.add_tensor(f"{name}.weight", rng.standard_normal(shape).astype(np.float32))
    if architecture == "qwen2":
        writer.add_tokenizer_pre("qwen2")
        writer.add_chat_template(TEMPLATE)
        writer.add_tensor("output.weight", rng.standard_normal(shapes["token_embd"]).astype(np.float32))
        for name, size in (("q", HIDDEN), ("k", HIDDEN // 2), ("v", HIDDEN // 2)):
            writer.add_tensor(f"blk.0.attn_{name}.bias", rng.standard_normal(size).astype(np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


@pytest.fixture(scope="module")
def converted(tmp_path_factory):
    """A Llama as the registry knows it, and a Qwen2 as its file says."""
    root = tmp_path_factory.mktemp("convert")
    for architecture, model in (("llama", PACKAGED_MODELS[DEFAULT_MODEL]), ("qwen2", None)):
        write_gguf(root / f"{architecture}.gguf", architecture)
        convert_gguf(root / f"{architecture}.gguf", root / architecture, model)
    return root


def test_qwen_keeps_its_template_output_layer_and_biases(converted):
    model = AutoModelForCausalLM.from_pretrained(converted / "qwen2")
    tokenizer = AutoTokenizer.from_pretrained(converted / "qwen2")
    assert not model.generation_config.do_sample
    chat = tokenizer.apply_chat_template([{"role": "user", "content": "abc"}], tokenize=True, return_dict=False)
    assert chat == [1, 6, 5, 2], "and no beginning of a text in front"
    assert tokenizer("abc").input_ids == [6, 5]
    assert model.lm_head.weight is not model.model.embed_tokens.weight
    assert not torch.equal(model.lm_head.weight, model.model.embed_tokens.weight)
    assert all(getattr(model.model.layers[0].self_attn, f"{name}_proj").bias.abs().sum() > 0 for name in "qkv")


def test_weights_are_dense_bf16_and_the_end_of_a_turn_is_the_registrys_whatever_the_gguf_says(converted):
    model = AutoModelForCausalLM.from_pretrained(converted / "llama")
    assert {parameter.dtype for parameter in model.parameters()} == {torch.bfloat16}
    assert getattr(model.config, "quantization_config", None) is None
    assert [path.name for path in (converted / "llama").glob("*.safetensors")] == ["model.safetensors"]
    tokenizer = AutoTokenizer.from_pretrained(converted / "llama")
    assert (tokenizer.bos_token, tokenizer.eos_token) == ("<|im_start|>", "<|im_end|>")
    assert model.generation_config.eos_token_id == model.config.eos_token_id == tokenizer.eos_token_id == 2
    assert model.generation_config.pad_token_id == tokenizer.pad_token_id == 2


def test_a_gguf_file_is_a_model_and_converted_once(tmp_path, monkeypatch, graft):
    monkeypatch.setenv("GRAFT_HOME", str(tmp_path / "home"))
    file = tmp_path / "tiny.gguf"
    write_gguf(file, "qwen2")
    words = ("generate", "ab", "--model", str(file), "--max-new-tokens", "4", "--ignore-eos", "--draft", "none")
    first = graft(*words)
    (folder,) = (tmp_path / "home" / "models").glob("tiny-*")
    size = sum(tensor.numel() * 2 for tensor in load_file(folder / "model.safetensors").values())
    assert first.status == 0 and size > 1000
    words_before = f"Converting tiny.gguf, once, to {readable_size(size)} of bf16 safetensors in {folder}\n"
    assert first.err == words_before
    again = graft(*words)
    assert (again.out, again.err) == (first.out, "")
    assert AutoTokenizer.from_pretrained(folder).eos_token == "<|im_start|>", "as the file says"

    (folder / "model.safetensors").write_bytes(b"")
    assert "and it is converted again" in graft(*words).err


def test_the_conversion_of_a_changed_file_replaces_the_older_one_and_no_other(tmp_path, monkeypatch):
    def convert(file, folder):
        folder.mkdir()
        (folder / "weights").write_bytes(file.read_bytes())

    monkeypatch.setenv("GRAFT_HOME", str(tmp_path / "home"))
    monkeypatch.setattr("graft.hub.convert.convert_gguf", convert)
    models = tmp_path / "home" / "models"

    def converted(file, content):
        file.parent.mkdir(exist_ok=True)
        file.write_bytes(EMPTY + content)
        return convert_once(file)

    mine = tmp_path / "mine" / "tiny.gguf"
    other = converted(tmp_path / "other" / "tiny.gguf", b"other")
    longer = converted(tmp_path / "mine" / "tiny-0123456789ab.gguf", b"longer name")
    older = converted(mine, b"older")
    monkeypatch.setattr("platform.node", lambda: "a new container")
    newer = converted(mine, b"newer one")
    assert newer == older and (newer / "weights").read_bytes() == EMPTY + b"newer one"
    assert {path for path in models.iterdir() if not path.name.startswith(".")} == {other, longer, newer}
    assert not list(models.glob(".*scratch*"))


def test_a_file_that_changes_during_its_conversion_is_not_recorded_as_what_it_was(tmp_path, monkeypatch):
    def convert(file, folder):
        file.write_bytes(EMPTY + b"newer one")
        folder.mkdir()
        (folder / "weights").write_bytes(file.read_bytes())

    monkeypatch.setenv("GRAFT_HOME", str(tmp_path / "home"))
    monkeypatch.setattr("graft.hub.convert.convert_gguf", convert)
    file = tmp_path / "tiny.gguf"
    file.write_bytes(EMPTY + b"older")
    with pytest.raises(ModelError, match=r"tiny\.gguf has changed while it was converted: try again"):
        convert_once(file)
    assert not list((tmp_path / "home" / "models").iterdir())


def test_a_model_that_another_process_replaces_while_it_is_loaded_is_refused(tmp_path, monkeypatch):
    """Its weights and its tokenizer could be of two versions."""
    monkeypatch.setenv("GRAFT_HOME", str(tmp_path / "home"))
    file = tmp_path / "tiny.gguf"
    write_gguf(file)
    load = AutoTokenizer.from_pretrained
    convert_once(file)

    def replaced(folder, **options):
        monkeypatch.setattr(AutoTokenizer, "from_pretrained", load)
        write_gguf(file, add_bos=True)
        return load(convert_once(file), **options)

    monkeypatch.setattr(AutoTokenizer, "from_pretrained", replaced)
    with pytest.raises(ModelError, match=r"tiny\.gguf has changed while it was loaded: try again"):
        load_model(str(file), device="cpu", dtype=torch.float32)


@pytest.mark.parametrize("add_bos", [None, False, True])
def test_texts_begin_with_bos_where_the_file_says_so(tmp_path, add_bos):
    write_gguf(tmp_path / "tiny.gguf", add_bos=add_bos)
    convert_gguf(tmp_path / "tiny.gguf", tmp_path / "new")
    tokenizer = AutoTokenizer.from_pretrained(tmp_path / "new")
    tokens = tokenizer.convert_ids_to_tokens(tokenizer("abc").input_ids)
    assert tokens == ["<|im_start|>"] * bool(add_bos) + ["ab", "c"]


def test_a_gguf_file_is_a_draft_model(tmp_path, monkeypatch, graft):
    monkeypatch.setenv("GRAFT_HOME", str(tmp_path / "home"))
    file = tmp_path / "tiny.gguf"
    write_gguf(file, "qwen2")
    words = ("generate", "ab", "--model", str(file), "--max-new-tokens", "8", "--ignore-eos")
    plain = graft(*words, "--policy", "off")
    drafted = graft(*words, "--draft", str(file))
    assert drafted.status == 0 and drafted.out == plain.out, drafted.err
    assert "is a whole model, not a head" in graft("load-check", str(file)).err

    monkeypatch.chdir(tmp_path)
    assert full_name("tiny.gguf") == str(file) and is_here(str(file))
    file.unlink()
    assert not is_here(str(file))
    gone = graft("generate", "ab", "--draft", str(file))
    assert (gone.status, gone.err) == (2, f"error: no drafter at {file}: there is no such file\n")


def _with_an_unknown_quantization(content):
    name = b"output_norm.weight"
    kind = content.index(name) + len(name) + 4 + 8  # behind the number of dimensions, which is 1, and its size
    return content[:kind] + struct.pack("<I", 999) + content[kind + 4 :]


@pytest.mark.parametrize(
    ("damage", "words"),
    [
        (lambda content: content[:200], "is damaged or cut off; copy it again"),
        (lambda content: content[:-4], "is damaged or cut off; copy it again"),
        (lambda content: b"text" + content, "is not a GGUF file: it does not begin with the letters GGUF"),
        (lambda content: content[:4] + b"\xff" * 4 + content[8:], "is damaged or cut off; copy it again"),
        (lambda content: content[:8] + b"\xff" * 8 + content[16:], "is damaged or cut off; copy it again"),
        (_with_an_unknown_quantization, "has a quantization that the gguf package does not know; update it"),
    ],
    ids=["header", "last tensor", "other file", "version", "number of tensors", "quantization"],
)
def test_a_cut_or_damaged_gguf_file_is_one_line_before_any_conversion_and_leaves_nothing(
    tmp_path, monkeypatch, graft, damage, words
):
    monkeypatch.setenv("GRAFT_HOME", str(tmp_path / "home"))
    monkeypatch.setattr("graft.hub.convert.convert_gguf", lambda *args: pytest.fail("it was converted"))
    file = tmp_path / "cut.gguf"
    write_gguf(file)
    file.write_bytes(damage(file.read_bytes()))
    result = graft("generate", "ab", "--model", str(file))
    assert result.status == 2 and result.err.startswith(f"error: {file} ") and words in result.err
    assert len(result.err.splitlines()) == 1
    assert not list((tmp_path / "home" / "models").iterdir())


def test_a_gguf_file_that_may_not_be_read_is_named(tmp_path, monkeypatch):
    monkeypatch.setenv("GRAFT_HOME", str(tmp_path / "home"))
    file = tmp_path / "secret.gguf"
    file.write_bytes(EMPTY)

    def refuse(*given):
        raise PermissionError(errno.EACCES, "Permission denied")

    monkeypatch.setattr("pathlib.Path.open", refuse)
    with pytest.raises(ModelError, match=r"^cannot read .*secret\.gguf: Permission denied$"):
        convert_once(file)


def test_a_grammar_reads_the_bytes_of_tokens_whatever_steps_transformers_adds_to_their_decoding(tmp_path, monkeypatch):
    real = AutoTokenizer.from_pretrained

    def as_in_5_17(*args, **options):
        tokenizer = real(*args, **options)
        steps = [decoders.ByteFallback(), decoders.Fuse(), decoders.Replace("\u2581", " "), decoders.ByteLevel()]
        tokenizer.backend_tokenizer.decoder = decoders.Sequence(steps)
        return tokenizer

    monkeypatch.setattr("graft.hub.convert.AutoTokenizer.from_pretrained", as_in_5_17)
    write_gguf(tmp_path / "model.gguf", tokens=[*TOKENS, "\u0120b"])
    convert_gguf(tmp_path / "model.gguf", tmp_path / "new")
    grammars = Grammars(real(tmp_path / "new"), len(TOKENS) + 1, [2])
    assert grammars.bytes_of(len(TOKENS)) == b" b"
