"""Converts a GGUF file into a folder that transformers loads: bf16 safetensors and a tokenizer."""

import io
from contextlib import redirect_stderr
from pathlib import Path
from typing import Any

import torch
import transformers
from tokenizers import decoders
from tokenizers.processors import TemplateProcessing
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedTokenizerBase

from graft.hub.registry import PackagedModel
from graft.quiet import quiet_transformers

# Newer versions of transformers keep the weights packed by default. Older ones always unpack, and have no such config.
_GGUF = getattr(transformers, "GgufConfig", None)
_DENSE = {"quantization_config": _GGUF(dequantize=True)} if _GGUF is not None else {}


def convert_gguf(gguf: Path, folder: Path, model: PackagedModel | None = None) -> None:
    """Write the weights and tokenizer in `gguf` to the new `folder`.

    Special tokens are those of `model`, or those that the file names if it is None.
    """
    # The progress bar for unpacking GGUF tensors cannot be switched off, so stderr is redirected.
    with quiet_transformers(), redirect_stderr(io.StringIO()):
        network = AutoModelForCausalLM.from_pretrained(gguf.parent, gguf_file=gguf.name, dtype=torch.bfloat16, **_DENSE)
        tokenizer = AutoTokenizer.from_pretrained(gguf.parent, gguf_file=gguf.name)
        if "ByteLevel" in str(tokenizer.backend_tokenizer.pre_tokenizer):
            # transformers 5.17 adds steps for other tokenizers, by which grammars misread a token's bytes.
            tokenizer.backend_tokenizer.decoder = decoders.ByteLevel()
        if model is not None:
            tokenizer.bos_token = model.bos_token
            tokenizer.eos_token = model.eos_token
            tokenizer.pad_token = model.pad_token
            endings = [tokenizer.eos_token_id]
        else:
            facts = _tokenizer_facts(gguf)
            if "eos_token_id" in facts:  # some versions of transformers ignore it for some models
                tokenizer.eos_token = tokenizer.convert_ids_to_tokens(int(facts["eos_token_id"]))
            ends_of_turns = [int(facts[name]) for name in ("eot_token_id", "eom_token_id") if name in facts]
            endings = [end for end in dict.fromkeys([tokenizer.eos_token_id, *ends_of_turns]) if end is not None]
            # A sentencepiece tokenizer begins texts with the BOS token, unless the file says otherwise.
            if facts.get("add_bos_token", facts.get("model") == "llama"):
                _begin_with_bos(tokenizer)
        tokenizer.model_max_length = network.config.max_position_embeddings
        for config in (network.config, network.generation_config):
            config.bos_token_id = tokenizer.bos_token_id
            config.eos_token_id = tokenizer.eos_token_id
            config.pad_token_id = tokenizer.pad_token_id
        if len(endings) > 1:
            network.generation_config.eos_token_id = endings
        network.save_pretrained(folder)
        tokenizer.save_pretrained(folder)
    # safetensors makes files that only their owner can read; a shared GRAFT_HOME needs the mode of the umask.
    mode = (folder / "config.json").stat().st_mode
    for weights in folder.glob("*.safetensors"):
        weights.chmod(mode)


def _tokenizer_facts(gguf: Path) -> dict[str, Any]:
    """The tokenizer fields of the file that are single values, by name."""
    from gguf import GGUFReader, GGUFValueType

    prefix, found = "tokenizer.ggml.", {}
    for name, field in GGUFReader(gguf).fields.items():
        if name.startswith(prefix) and field.types[0] != GGUFValueType.ARRAY:
            found[name.removeprefix(prefix)] = field.contents()
    return found


def _begin_with_bos(tokenizer: PreTrainedTokenizerBase) -> None:
    """Make texts begin with the BOS token, which transformers leaves out of tokenizers made from GGUF files."""
    bos = tokenizer.bos_token
    if bos is None or tokenizer("a").input_ids[0] == tokenizer.bos_token_id:
        return
    tokenizer.backend_tokenizer.post_processor = TemplateProcessing(
        single=f"{bos} $A", pair=f"{bos} $A {bos} $B:1", special_tokens=[(bos, tokenizer.bos_token_id)]
    )
