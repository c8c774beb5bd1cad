"""Converts a GGUF file into a folder that transformers loads: bf16 safetensors and a tokenizer."""

import io
from contextlib import redirect_stderr
from pathlib import Path

import torch
import transformers
from transformers import AutoModelForCausalLM, AutoTokenizer

from graft.hub.quiet import quiet_transformers
from graft.hub.registry import PackagedModel

# Newer ones keep the weights packed unless told otherwise; older ones always unpack, and have no such config.
_GGUF = getattr(transformers, "GgufConfig", None)
_DENSE = {"quantization_config": _GGUF(dequantize=True)} if _GGUF is not None else {}


def convert_gguf(gguf: Path, folder: Path, model: PackagedModel | None = None) -> None:
    """Write the weights and tokenizer in `gguf` to the new `folder`. model: whose special tokens they are to have;
    None: those that the file names."""
    # The bar that transformers draws while it unpacks GGUF tensors obeys no switch, hence the redirection.
    with quiet_transformers(), redirect_stderr(io.StringIO()):
        network = AutoModelForCausalLM.from_pretrained(
            gguf.parent,
            gguf_file=gguf.name,
            dtype=torch.bfloat16,
            **_DENSE,
        )
        tokenizer = AutoTokenizer.from_pretrained(gguf.parent, gguf_file=gguf.name)
        if model is not None:
            tokenizer.bos_token = model.bos_token
            tokenizer.eos_token = model.eos_tokens[0]
            tokenizer.pad_token = model.pad_token
            endings = [tokenizer.convert_tokens_to_ids(token) for token in model.eos_tokens]
        else:
            if end := _named_tokens(gguf, "eos"):  # which some versions of transformers pass over for some models
                tokenizer.eos_token = tokenizer.convert_ids_to_tokens(end[0])
            endings = list(dict.fromkeys([tokenizer.eos_token_id, *_named_tokens(gguf, "eot", "eom")]))
        tokenizer.model_max_length = network.config.max_position_embeddings
        for config in (network.config, network.generation_config):
            config.bos_token_id = tokenizer.bos_token_id
            config.eos_token_id = tokenizer.eos_token_id
            config.pad_token_id = tokenizer.pad_token_id
        if len(endings) > 1:
            network.generation_config.eos_token_id = endings
        network.save_pretrained(folder)
        tokenizer.save_pretrained(folder)
    # safetensors makes its files private to their owner; a shared GRAFT_HOME needs the umask's mode.
    mode = (folder / "config.json").stat().st_mode
    for weights in folder.glob("*.safetensors"):
        weights.chmod(mode)


def _named_tokens(gguf: Path, *names: str) -> list[int]:
    """Tokens that the file names: eos, the end of a text; eot and eom, those of a message. Those that it does."""
    from gguf import GGUFReader

    fields = GGUFReader(gguf).fields
    named = (fields.get(f"tokenizer.ggml.{name}_token_id") for name in names)
    return [int(field.parts[field.data[0]][0]) for field in named if field is not None]
