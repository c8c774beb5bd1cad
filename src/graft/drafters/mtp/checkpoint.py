"""MTP weights in a model's own checkpoint: their names, and the head made of them.

transformers skips them when it loads the model, so they are read here, from safetensors only. Nothing is guessed or
skipped: the head is complete, or an error says in one line what is wrong.
"""

from __future__ import annotations

import copy
import json
import re
from collections.abc import Collection, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor
from transformers import PreTrainedConfig, PreTrainedModel

from graft.drafters.checkpoints import said_of, value_at
from graft.drafters.mtp.head import MtpHead
from graft.errors import GraftError
from graft.folders import folder_of, read_config
from graft.quiet import quiet_transformers
from graft.settings import require

_INDEX = "model.safetensors.index.json"
_SCALE = "_scale_inv"  # behind the name of a weight in 8 bits: the scales of its blocks
_LAYER, _NORM = "model.layers.0.", "model.norm."  # in a one-layer model: the decoder layer and the final norm
_EXPERT = re.compile(r"(.*\.experts\.)(\d+)(\..*)")
# Per-layer settings of a one-layer model, with a plain MLP and with experts.
_ONE_LAYER: Mapping[str, tuple[Any, Any]] = {
    "num_hidden_layers": (1, 1),
    "layer_types": (["full_attention"], ["full_attention"]),
    "mlp_layer_types": (["dense"], ["sparse"]),
    "first_k_dense_replace": (1, 0),
    "mlp_only_layers": ([0], []),
    "decoder_sparse_step": (1, 1),
}


@dataclass(frozen=True)
class Layout:
    """Names of the tensors in the files."""

    prefix: str  # of all of them; {layer} is the number after the target's last layer
    parts: Mapping[str, str]  # prefix of the rest: name here; the first match counts
    copies: tuple[str, ...]  # copies of the target's embedding and output layer, not used

    def prefix_for(self, config: PreTrainedConfig) -> str:
        return self.prefix.format(layer=config.num_hidden_layers)

    def is_in(self, names: Collection[str], config: PreTrainedConfig) -> bool:
        """Whether there is a head of this layout, complete or not."""
        # A decoder layer alone may be one of the target's that config.json does not count.
        marks = [self.prefix_for(config) + part for part, own in self.parts.items() if own != _LAYER]
        return any(name.startswith(tuple(marks)) for name in names)

    def is_used(self, name: str, config: PreTrainedConfig) -> bool:
        """Whether a tensor is the first MTP layer's. Later ones, which predict further tokens, are not used."""
        prefix = self.prefix_for(config)
        rest = name.removeprefix(prefix)
        return name.startswith(prefix) and not rest.startswith(self.copies) and not re.match(r"layers\.[1-9]", rest)

    def own_name(self, rest: str) -> str | None:
        """The name here of a tensor, from its name without the prefix; None if unknown."""
        for part, own in self.parts.items():
            if rest.startswith(part):
                return own + rest.removeprefix(part)
        return None

    def spell(self, own_name: str, config: PreTrainedConfig) -> str:
        """The files' name of a tensor; its name here if the files have none."""
        for part, own in self.parts.items():
            if own_name.startswith(own):
                return self.prefix_for(config) + part + own_name.removeprefix(own)
        return own_name


LAYOUTS = (
    Layout(  # DeepSeek-V3, GLM-4.5 and later
        "model.layers.{layer}.",
        {
            "enorm.": "embedding_norm.",
            "hnorm.": "hidden_norm.",
            "eh_proj.": "fc.",
            "shared_head.norm.": _NORM,
            "": _LAYER,
        },
        ("shared_head.head.", "embed_tokens."),
    ),
    Layout(  # Qwen3-Next, Qwen3.5
        "mtp.",
        {
            "pre_fc_norm_embedding.": "embedding_norm.",
            "pre_fc_norm_hidden.": "hidden_norm.",
            "fc.": "fc.",
            "norm.": _NORM,
            "layers.0.": _LAYER,
        },
        ("lm_head.", "embed_tokens."),
    ),
)


def has_head(model: PreTrainedModel) -> bool:
    """Whether the files of a model have MTP weights, complete or not."""
    if not model.name_or_path:
        return False
    try:
        return _layout_of(_files_by_name(_folder(model.name_or_path)), model.config) is not None
    except GraftError:
        return False


def load_head(model: PreTrainedModel) -> MtpHead:
    """Load the MTP head from a model's own files, on its device and in its dtype."""
    if not model.name_or_path:
        raise GraftError("an MTP head is read from the target's own files, and this model has none: load it by name")
    folder, config = _folder(model.name_or_path), model.config
    files = _files_by_name(folder)
    layout = _layout_of(files, config)
    if layout is None:
        prefixes = " or ".join(f"{layout.prefix_for(config)}*" for layout in LAYOUTS)
        raise GraftError(f"{folder} has no MTP weights (no such tensors as {prefixes}): choose another drafter")
    own = {name: file for name, file in files.items() if layout.is_used(name, config)}
    folder_of(model.name_or_path, tuple(set(own.values())))  # fetches those of a hub id
    with said_of(folder):
        return _make(_read(folder, own, layout, config), layout, model)


def _folder(name: str) -> Path:
    """The folder of a model's files. Of a hub id, only its config, and the index or a single file, are fetched."""
    return folder_of(name, ("config.json", _INDEX, "model.safetensors"))


def _layout_of(names: Collection[str], config: PreTrainedConfig) -> Layout | None:
    return next((layout for layout in LAYOUTS if layout.is_in(names, config)), None)


def _files_by_name(folder: Path) -> dict[str, str]:
    """The file of each tensor of a model."""
    index = folder / _INDEX
    if not index.is_file():
        files: dict[str, str] = {}
        for path in sorted(folder.glob("model*.safetensors")):
            with _opened(path) as file:
                files |= dict.fromkeys(file.keys(), path.name)
        return files
    try:
        listed: dict[str, str] = json.loads(index.read_bytes())["weight_map"]
        return {name: Path(file).name for name, file in listed.items()}
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise GraftError(f"{index} does not say which file a tensor is in; copy it again") from error


def _read(folder: Path, files: Mapping[str, str], layout: Layout, config: PreTrainedConfig) -> dict[str, Tensor]:
    """Read these tensors, by the names here. files: the file of each."""
    tensors: dict[str, Tensor] = {}
    for path in sorted({folder / file for file in files.values()}):
        with _opened(path) as file:
            for name in (name for name, its in files.items() if its == path.name):
                own = layout.own_name(name.removeprefix(layout.prefix_for(config)))
                if own is None:
                    raise GraftError(f"it has a tensor {name}, which is not part of an MTP head")
                tensors[own] = file.get_tensor(name)
    scales = {own: tensors.pop(own + _SCALE) for own in list(tensors) if own + _SCALE in tensors}
    sides = value_at(read_config(folder), ("quantization_config", "weight_block_size")) if scales else None
    for own in tensors:
        name = layout.spell(own, config)
        if own in scales and sides is not None:
            tensors[own] = _unpacked(tensors[own], scales[own], sides, name)
        tensor = tensors[own]
        is_quantised = not tensor.is_floating_point() or tensor.element_size() < 2
        kind = str(tensor.dtype).removeprefix("torch.")
        require(not is_quantised, f"its MTP weights are quantised ({name} is {kind}): use a copy in bf16")
        require(bool(tensor.isfinite().all()), f"{name} has values that are not finite")
    return tensors


def _unpacked(weight: Tensor, scale: Tensor, sides: list[int], name: str) -> Tensor:
    """Weights in 8 bits times the scale of their block, in float32. scale: [rows, columns] of blocks of these sides."""
    expected = [-(-size // side) for size, side in zip(weight.shape, sides, strict=False)]
    fits = (
        weight.dim() == len(sides) == 2
        and weight.dtype is torch.float8_e4m3fn
        and list(scale.shape) == expected
        and scale.is_floating_point()
    )
    require(
        fits, f"{name} is {weight.dtype} {list(weight.shape)}, and its scales are {scale.dtype} {list(scale.shape)}"
    )
    rows, columns = weight.shape
    wide = scale.float().repeat_interleave(sides[0], 0)[:rows].repeat_interleave(sides[1], 1)[:, :columns]
    return weight.float() * wide


def _make(tensors: dict[str, Tensor], layout: Layout, target: PreTrainedModel) -> MtpHead:
    """Make the head from these tensors."""
    kind, config = type(target), target.config
    require(config.get_text_config() is config, f"{kind.__name__} is not a text-only model: its MTP head is not read")
    width = config.hidden_size
    own = {"embedding_norm.weight": [width], "hidden_norm.weight": [width], "fc.weight": [width, 2 * width]}
    for name, shape in own.items():
        spelt = layout.spell(name, config)
        require(name in tensors, f"it has no tensor {spelt}, expected as {shape}")
        found = list(tensors[name].shape)
        require(found == shape, f"{spelt} is {found}, expected as {shape}")
    of_block = {name: tensor for name, tensor in tensors.items() if name not in own}
    num_experts = _check_experts(of_block, layout, config)
    try:
        with quiet_transformers():
            # The model's class converts names and shapes of its checkpoints, such as experts that it joins.
            loaded: Any = kind.from_pretrained(
                None,
                config=_block_config(config, has_experts=num_experts > 0),
                state_dict=of_block | _borrowed(target),
                dtype=target.dtype,
                ignore_mismatched_sizes=True,  # reported below
                output_loading_info=True,
            )
    except (RuntimeError, ValueError, KeyError, TypeError) as error:
        reason = str(error).strip().partition("\n")[0].rstrip(". ")
        raise GraftError(f"its MTP layer does not fit {kind.__name__}: {reason}") from error
    block, report = loaded
    for name in sorted(report["missing_keys"]):
        raise GraftError(f"it has no tensor {layout.spell(name, config)}, which its MTP layer needs")
    for name in sorted(report["unexpected_keys"]):
        raise GraftError(f"it has a tensor {layout.spell(name, config)}, which is not part of its MTP layer")
    for name, its, expected in sorted(report["mismatched_keys"]):
        raise GraftError(f"{layout.spell(name, config)} is {list(its)}, expected as {list(expected)}")
    head = MtpHead(block.to(target.device), target)
    for name in own:
        head.get_parameter(name).data.copy_(tensors[name])
    return head


def _check_experts(tensors: Mapping[str, Tensor], layout: Layout, config: PreTrainedConfig) -> int:
    """The number of experts. A GraftError if their shapes differ, which transformers does not check."""
    shapes: dict[str, dict[int, list[int]]] = {}  # by name without the expert's number
    for name, tensor in tensors.items():
        if (match := _EXPERT.fullmatch(name)) is not None:
            before, number, behind = match.groups()
            shapes.setdefault(f"{before}{{}}{behind}", {})[int(number)] = list(tensor.shape)
    if not shapes:
        return sum(".experts." in name for name in tensors)
    count = max(max(found) for found in shapes.values()) + 1
    for name, found in shapes.items():
        for number in range(count):
            spelt = layout.spell(name.format(number), config)
            require(number in found, f"it has no tensor {spelt}, which its MTP layer needs")
            shape, usual = found[number], next(iter(found.values()))
            require(shape == usual, f"{spelt} is {shape}, and other experts' are {usual}")
    return count


def _block_config(config: PreTrainedConfig, has_experts: bool) -> PreTrainedConfig:
    """The config of a model whose only layer is the MTP layer, with full attention."""
    own = copy.deepcopy(config)
    for name, values in _ONE_LAYER.items():
        if getattr(own, name, None) is not None:
            setattr(own, name, values[has_experts])
    if hasattr(own, "quantization_config"):
        del own.quantization_config  # the MTP weights are not quantised
    return own


def _borrowed(target: PreTrainedModel) -> dict[str, Tensor]:
    """The target's embedding and output weights, by name, so that none are made for the head."""
    parts = (target.get_input_embeddings(), target.get_output_embeddings())
    weights = [weight for part in parts for weight in part.parameters()]
    named = target.named_parameters(remove_duplicate=False)
    return {name: weight.detach() for name, weight in named if any(weight is each for each in weights)}


@contextmanager
def _opened(path: Path) -> Iterator[Any]:
    try:
        with safe_open(path, framework="pt") as file:
            yield file
    except (OSError, SafetensorError) as error:
        raise GraftError(f"{path} is damaged or cut off; copy it again") from error
