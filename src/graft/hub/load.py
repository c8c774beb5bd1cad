"""Loads a model and its tokenizer by name: a packaged model, a local folder, a GGUF file, or a hub id.

transformers does the loading. When a folder is incomplete, its exceptions become one line that names the file. Code
that comes with a model is never run.
"""

import copy
import json
import warnings
from contextlib import nullcontext
from pathlib import Path
from pickle import UnpicklingError
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    AutoTokenizer,
    PreTrainedConfig,
    PreTrainedModel,
    PreTrainedTokenizerBase,
)
from transformers.quantizers import AutoHfQuantizer

from graft.errors import GraftError, ModelError
from graft.folders import first_line, folder_of, missing_file
from graft.home import check_no_adapter, is_gguf
from graft.hub.manifest import version_of
from graft.hub.pull import convert_once, pull
from graft.hub.registry import PACKAGED_MODELS, check_model_name
from graft.model.cpu_linear import speed_up
from graft.model.support import check_decoder_only
from graft.model.unusual_layers import cast_plain_weights
from graft.quiet import quiet_transformers

# What transformers raises for a model that cannot be loaded. Anything else is a bug and keeps its traceback.
_LOADING_ERRORS = (OSError, ValueError, KeyError, RuntimeError, ImportError, SafetensorError, UnpicklingError)


def load_model(name: str, *, device: str, dtype: torch.dtype) -> tuple[PreTrainedModel, PreTrainedTokenizerBase]:
    """The model called `name` on `device`, ready to run, and its tokenizer."""
    source = _source(name)
    version = version_of(source) if isinstance(source, Path) else None
    try:
        # A hub id may need a long download, whose progress bars should show.
        with quiet_transformers() if isinstance(source, Path) else nullcontext():
            config = AutoConfig.from_pretrained(source, trust_remote_code=False)
            check_decoder_only(config, name)
            tokenizer = AutoTokenizer.from_pretrained(source, trust_remote_code=False)
            _announce_unpacking(config, name, source, dtype)
            has_soft_cap = getattr(config.get_text_config(), "attn_logit_softcapping", None)
            loaded: Any = AutoModelForCausalLM.from_pretrained(
                source,
                config=config,
                dtype=dtype,
                attn_implementation="eager" if has_soft_cap else None,  # the default ignores the cap
                trust_remote_code=False,
                output_loading_info=True,
                ignore_mismatched_sizes=True,  # an error below names them
            )
            model, report = loaded  # a pair, because of output_loading_info
            if model.device != torch.empty(0, device=device).device:  # some quantised models refuse `to`
                model.to(device)
    except GraftError:
        raise
    except _LOADING_ERRORS as error:
        raise ModelError(f"cannot load {name}: {_reason(source, error)}") from error
    if version is not None and version_of(Path(source)) != version:  # another process has converted a new file
        raise ModelError(f"{name} has changed while it was loaded: try again")
    if missing := sorted(report["missing_keys"]):  # transformers would continue with random weights
        raise ModelError(
            f"cannot load {name}: {len(missing)} weights such as {missing[0]} are not in its files; "
            "check that config.json belongs to these weights and that no file is missing"
        )
    if misfits := sorted(report["mismatched_keys"]):
        weight, its, expected = misfits[0]
        raise ModelError(
            f"cannot load {name}: the weights do not fit config.json: {weight} is {list(its)} in the files and "
            f"{list(expected)} by the config ({len(misfits)} such weights); one of the two is another model's"
        )
    cast_plain_weights(model, dtype)
    speed_up(model)
    return model, tokenizer


def _announce_unpacking(config: PreTrainedConfig, name: str, source: Path | str, dtype: torch.dtype) -> None:
    """Warn if transformers will unpack a quantised checkpoint here, before it takes the memory."""
    stored = getattr(config, "quantization_config", None)
    if not stored or not AutoHfQuantizer.supports_quant_method(stored):
        return
    quantizer = AutoHfQuantizer.from_config(copy.deepcopy(stored), pre_quantized=True)
    quantizer.validate_environment(device_map=None, weights_only=True)  # decides whether to unpack
    settings = quantizer.quantization_config
    # Compressed-tensors unpacks in the first forward.
    if not (getattr(settings, "dequantize", False) or getattr(settings, "is_quantization_compressed", False)):
        return
    with torch.device("meta"):
        size = AutoModelForCausalLM.from_config(config, dtype=dtype).num_parameters() * dtype.itemsize
    files = [file.stat().st_size for file in source.glob("*.safetensors")] if isinstance(source, Path) else []
    method = getattr(settings.quant_method, "value", settings.quant_method)
    warnings.warn(
        f"{name} is stored in {method} and unpacked to {str(dtype).removeprefix('torch.')} here: its weights take "
        f"{size / 1e9:.1f} GB of memory{f', {sum(files) / 1e9:.1f} GB on disk' if files else ''}",
        stacklevel=3,
    )


def load_config(name: str) -> PreTrainedConfig:
    """The config of the model called `name`; its weights are not read."""
    source = _source(name)
    try:
        with quiet_transformers():
            return AutoConfig.from_pretrained(source, trust_remote_code=False)
    except (OSError, ValueError) as error:
        raise ModelError(f"cannot read the config of {name}: {first_line(error)}") from error


def _source(name: str) -> Path | str:
    """Where transformers finds the model: a folder, or a hub id as it stands."""
    if name in PACKAGED_MODELS:
        return pull(name)
    check_model_name(name)
    path = Path(name).expanduser()
    if is_gguf(path):
        return convert_once(path)
    if path.is_dir():
        check_no_adapter(path)
        return path
    folder_of(name, ("config.json",), "model")  # if the hub cannot be reached, transformers would try for long
    return name


def _reason(source: Path | str, error: Exception) -> str:
    if "trust_remote_code" in str(error):
        return "it needs Python code of its own, which Graft does not run; choose one built into transformers"
    if isinstance(error, UnpicklingError):
        return "its .bin weights are damaged or hold more than tensors; use a copy in safetensors"
    if isinstance(source, Path):
        return _unreadable_part(source) or first_line(error)
    return f"there is no such folder, and as a hub id: {first_line(error)}"


def _unreadable_part(folder: Path) -> str | None:
    """The first fault in a model folder's files. Called only after loading has failed."""
    for path in sorted(folder.glob("*.json")):
        try:
            json.loads(path.read_bytes())
        except ValueError:
            return f"{path} is not valid JSON; copy it again"
    for path in sorted(folder.glob("*.safetensors")):
        try:
            with safe_open(path, framework="pt"):
                pass
        except SafetensorError as error:
            return f"{path} is damaged or cut off ({error}); copy it again"
    if (missing := missing_file(folder)) is not None:
        return missing
    if not any((folder / name).is_file() for name in ("tokenizer.json", "tokenizer.model", "vocab.json")):
        return f"{folder / 'tokenizer.json'} is missing; copy the tokenizer's files into the folder"
    return None
