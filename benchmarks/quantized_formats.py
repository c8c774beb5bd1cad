"""Which quantised checkpoints give, through Graft, the text of the same checkpoint in transformers? Makes a table.

    python benchmarks/quantized_formats.py                      # all formats whose libraries are installed
    python benchmarks/quantized_formats.py bnb-nf4 ct-w4a16     # of these
    python benchmarks/quantized_formats.py --write docs/quantised.md

Each format's own library makes a checkpoint from the model's real weights. Prompts are answered greedily and sampled,
by three decoders: transformers' `generate`, on a model that Graft never touched; Graft's plain decoding; and Graft with
a tree in every round. Where two texts differ, the gap is how far apart the logits of the two tokens are there.

*Moves among others* needs no text: how far the logits of a token move, in standard deviations of the logits, when 32
others follow it in its forward, by transformers alone. In fp32 without quantised activations this is rounding, below
0.0001. Where activations have 8 bits, rounding is amplified. Where all tokens share a scale, the model is refused.

A format takes about ten minutes of one core. With --folder and --out, an interrupted run continues where it was. A
format whose library is not installed is named and left out. The libraries: compressed-tensors, torchao, bitsandbytes,
gptqmodel (with GPTQMODEL_CPU_WORKERS=2), optimum, optimum-quanto, hqq.
"""

from __future__ import annotations

import argparse
import copy
import gc
import importlib.metadata
import json
import logging
import shutil
import sys
import tempfile
import time
import traceback
import warnings
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
import transformers
from common import command_line, mixed_questions, write_json
from torch import Tensor, nn
from transformers import AutoModelForCausalLM, AutoTokenizer

import graft
from graft.bench.tasks import BUILT_IN, PROMPTS_FOLDER
from graft.checking.compare import Decoded, find_difference, plain_twin
from graft.checking.reference import processors, transformers_answer
from graft.errors import GraftError
from graft.hub.pull import pull
from graft.hub.registry import DEFAULT_MODEL, PACKAGED_MODELS
from graft.model.sampler import SamplingSettings
from graft.model.unusual_layers import weights_in_words

START, END = "<!-- made by benchmarks/quantized_formats.py -->", "<!-- end -->"
DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}
BUDGET = 12  # nodes of a tree
TEMPERATURE = 0.7  # of the sampled texts
PLACES, NUM_OTHERS = (2, 5, 8, 11), 32  # where in a prompt the tokens are that run alone or among others
CALIBRATION = "A calibration text: the quick brown fox jumps over the lazy dog. def add(a, b):\n    return a + b\n" * 4


@dataclass(frozen=True)
class Format:
    """A way to make a quantised checkpoint."""

    title: str
    library: str  # whose presence and version count
    make: Callable[[Path, Path], None]  # from a folder into a folder
    note: str = ""
    dtype: str = "fp32"
    activations: str = ""  # how they are quantised, if they are
    on_loading: Callable[[], Any] | None = None  # the config of a format that transformers cannot save


def plain_model(source: Path, dtype: torch.dtype = torch.bfloat16, **options: Any) -> Any:
    return AutoModelForCausalLM.from_pretrained(source, dtype=dtype, **options).eval()


def save(model: Any, source: Path, folder: Path) -> None:
    model.save_pretrained(folder)
    AutoTokenizer.from_pretrained(source).save_pretrained(folder)


def on_loading(config: Callable[[], Any], dtype: torch.dtype = torch.bfloat16) -> Callable[[Path, Path], None]:
    """For formats that transformers makes while it loads a model."""

    def make(source: Path, folder: Path) -> None:
        save(plain_model(source, dtype, quantization_config=config()), source, folder)

    return make


def not_saved(source: Path, folder: Path) -> None:
    """For formats that transformers cannot save: they are quantised anew from the source each time."""


def fine_grained_fp8(source: Path, folder: Path) -> None:
    """transformers quantises on a GPU only, so its conversion is called for each weight, in blocks of 64 x 64."""
    from transformers import FineGrainedFP8Config
    from transformers.integrations.finegrained_fp8 import Fp8Quantize

    model = plain_model(source)
    config = FineGrainedFP8Config(weight_block_size=(64, 64))
    quantize = Fp8Quantize(SimpleNamespace(quantization_config=config))
    state = {}
    for name, value in model.state_dict().items():
        state |= quantize.convert({name: value}) if name.endswith("proj.weight") else {name: value}
    del state["lm_head.weight"]  # tied
    save(model, source, folder)
    rewrite(folder, state, config.to_dict() | {"modules_to_not_convert": ["lm_head"]})


def rewrite(folder: Path, state: dict[str, Tensor], quantization: dict[str, Any]) -> None:
    """Replace a saved model's weights by packed ones."""
    from safetensors.torch import save_file

    save_file(
        {name: value.contiguous() for name, value in state.items()}, folder / "model.safetensors", {"format": "pt"}
    )
    path = folder / "config.json"
    config = json.loads(path.read_text()) | {"quantization_config": quantization}
    path.write_text(json.dumps(config, indent=1, default=str))


def compressed(scheme: Callable[[], Any], ignore: Sequence[str] = ("lm_head",)) -> Callable[[Path, Path], None]:
    """By compressed-tensors: scales from the largest weights, and static ones of inputs from a short text."""

    def make(source: Path, folder: Path) -> None:
        from compressed_tensors.compressors import ModelCompressor
        from compressed_tensors.quantization import (
            QuantizationConfig,
            QuantizationStatus,
            apply_quantization_config,
        )

        model = plain_model(source)
        highest = inputs_of(model, AutoTokenizer.from_pretrained(source))
        if "lm_head" not in ignore:
            model.config.tie_word_embeddings = False
            model.lm_head.weight = nn.Parameter(model.lm_head.weight.detach().clone())
        config = QuantizationConfig(config_groups={"all": scheme()}, ignore=list(ignore))
        apply_quantization_config(model, config)
        for name, layer in model.named_modules():
            if getattr(layer, "quantization_scheme", None) is not None:
                set_scales(layer, highest[name])
                layer.quantization_status = QuantizationStatus.FROZEN
        compressor = ModelCompressor.from_pretrained_model(model)
        compressor.compress_model(model)
        save(model, source, folder)
        compressor.update_config(folder)

    return make


@torch.no_grad()
def inputs_of(model: Any, tokenizer: Any) -> dict[str, Tensor]:
    """The largest input of each linear layer on a short text."""
    highest: dict[str, Tensor] = {}
    layers = [(name, layer) for name, layer in model.named_modules() if isinstance(layer, nn.Linear)]

    def hook(name: str) -> Any:
        return lambda layer, given: highest.update({name: given[0].abs().max().float()})

    hooks = [layer.register_forward_pre_hook(hook(name)) for name, layer in layers]
    model(**tokenizer(CALIBRATION, return_tensors="pt"))
    for each in hooks:
        each.remove()
    return highest


@torch.no_grad()
def set_scales(layer: Any, highest_input: Tensor) -> None:
    """Give a layer of compressed-tensors the scales of its weight, and of its inputs if they are static."""
    from compressed_tensors.quantization.utils import calculate_qparams, generate_gparam

    scheme, weight = layer.quantization_scheme, layer.weight.float()
    args, overall = scheme.weights, None
    rows, columns = weight.shape
    height, width = {
        "tensor": (rows, columns),
        "channel": (1, columns),
        "group": (1, args.group_size),
        "tensor_group": (1, args.group_size),
        "block": tuple(args.block_structure or ()),
    }[str(args.strategy)]
    padded = nn.functional.pad(weight, (0, -columns % width, 0, -rows % height))
    blocks = padded.unflatten(1, (-1, width)).unflatten(0, (-1, height))
    if hasattr(layer, "weight_global_scale"):
        overall = generate_gparam(weight.amin(), weight.amax())
        layer.weight_global_scale.copy_(overall)
    fill(layer, "weight", calculate_qparams(blocks.amin((1, 3)), blocks.amax((1, 3)), args, global_scale=overall))
    if hasattr(layer, "input_global_scale"):
        layer.input_global_scale.copy_(generate_gparam(-highest_input, highest_input))
    elif hasattr(layer, "input_scale"):
        fill(layer, "input", calculate_qparams(-highest_input, highest_input, scheme.input_activations))


def fill(layer: Any, what: str, values: tuple[Tensor, Tensor]) -> None:
    for kind, value in zip(("scale", "zero_point"), values, strict=True):
        place = getattr(layer, f"{what}_{kind}", None)
        if place is not None:
            place.copy_(value.to(place.dtype).view_as(place))


def preset(name: str, **changes: Any) -> Callable[[], Any]:
    """A scheme of compressed-tensors for linear layers; changes are made to the arguments of its weights."""

    def scheme() -> Any:
        from compressed_tensors.quantization import preset_name_to_scheme

        made = preset_name_to_scheme(name, ["Linear"]).model_copy(deep=True)
        for key, value in changes.items():
            target = made.input_activations if key.startswith("input_") else made.weights
            setattr(target, key.removeprefix("input_"), value)
        return made

    return scheme


def dynamic_per_tensor(name: str) -> Callable[[], Any]:
    """A scheme whose activations have one scale in each forward, made from a preset with 8 bits."""

    def scheme() -> Any:
        made = preset(name)()
        made.input_activations.strategy, made.input_activations.dynamic = "tensor", True
        return made

    return scheme


def torchao(make_config: Callable[[Any], Any]) -> Callable[[Path, Path], None]:
    def config() -> Any:
        import torchao.quantization as library
        from transformers import TorchAoConfig

        made = make_config(library)
        library.quantize_(nn.Linear(64, 64, dtype=torch.bfloat16), made)  # transformers would hide the error
        return TorchAoConfig(quant_type=made)

    return on_loading(config)


def transformers_config(name: str, **options: Any) -> Callable[[], Any]:
    def config() -> Any:
        import transformers

        return getattr(transformers, name)(**options)

    return config


def by_gptqmodel(title: str, **options: Any) -> Format:
    """In bfloat16, because in float32 the library unpacks all weights in every forward."""

    def make(source: Path, folder: Path) -> None:
        from gptqmodel import GPTQModel, QuantizeConfig

        model = GPTQModel.load(str(source), QuantizeConfig(bits=4, group_size=64, **options), device="cpu")
        model.quantize([CALIBRATION[start:] for start in (0, 20, 50, 70)], batch_size=1)
        model.save(str(folder))

    return Format(title, "gptqmodel", make, dtype="bf16")


def by_compressed_tensors(title: str, scheme: Callable[[], Any], activations: str = "", dtype: str = "fp32") -> Format:
    return Format(title, "compressed-tensors", compressed(scheme), "", dtype, activations)


def by_torchao(title: str, config: Callable[[Any], Any], activations: str = "") -> Format:
    return Format(title, "torchao", torchao(config), activations=activations)


def by_bitsandbytes(title: str, activations: str = "", **options: Any) -> Format:
    make = on_loading(transformers_config("BitsAndBytesConfig", **options))
    return Format(title, "bitsandbytes", make, activations=activations)


BY_TOKEN, BY_GROUP = "activations of 8 bits by token", "activations of 8 bits by group"
FOUR_BITS = "activations of 4 bits by group"
FORMATS = {
    "gguf": Format(
        "GGUF Q4_1: the model as `graft pull` unpacked it",
        "gguf",
        lambda source, folder: save(plain_model(source), source, folder),
    ),
    "fp8-block": Format(
        "fine-grained FP8, blocks of 64 x 64", "transformers", fine_grained_fp8, "its own conversion, called on a CPU"
    ),
    "gptq": by_gptqmodel("GPTQ, groups of 64"),
    "awq": by_gptqmodel("AWQ, groups of 64", quant_method="awq", format="gemm"),
    "ct-w4a16": by_compressed_tensors("W4A16, groups of 64", preset("W4A16", group_size=64)),
    "ct-w4a16-head": Format(
        "W4A16 with lm_head",
        "compressed-tensors",
        compressed(preset("W4A16", group_size=64), ignore=()),
    ),
    "ct-w8a16": by_compressed_tensors("W8A16, groups of 64", preset("W8A16", group_size=64)),
    "ct-nvfp4a16": by_compressed_tensors("NVFP4A16", preset("NVFP4A16"), dtype="bf16"),
    "ct-mxfp4a16": by_compressed_tensors("MXFP4A16", preset("MXFP4A16"), dtype="bf16"),
    "bnb-nf4": by_bitsandbytes("nf4", load_in_4bit=True, bnb_4bit_quant_type="nf4"),
    "ao-int8": by_torchao("int8 weights", lambda ao: ao.Int8WeightOnlyConfig()),
    "ao-int4": by_torchao("int4 weights, groups of 32", lambda ao: ao.Int4WeightOnlyConfig(group_size=32)),
    "ao-intx4": by_torchao(
        "int4 weights (intx), groups of 32",
        lambda ao: ao.IntxWeightOnlyConfig(weight_dtype=torch.int4, granularity=ao.PerGroup(32)),
    ),
    "ao-fp8": by_torchao("float8 weights", lambda ao: ao.Float8WeightOnlyConfig()),
    "quanto-int8": Format(
        "int8 weights",
        "optimum-quanto",
        not_saved,
        "on loading: transformers cannot save it",
        on_loading=transformers_config("QuantoConfig", weights="int8"),
    ),
    "hqq": Format(
        "4 bits, groups of 64",
        "hqq",
        not_saved,
        on_loading=transformers_config("HqqConfig", nbits=4, group_size=64),
    ),
    "ct-w8a8": by_compressed_tensors("W8A8", preset("W8A8"), BY_TOKEN),
    "ct-fp8-dynamic": by_compressed_tensors("FP8_DYNAMIC", preset("FP8_DYNAMIC"), BY_TOKEN),
    "ct-fp8-block": by_compressed_tensors(
        "FP8_BLOCK, blocks of 64 x 64", preset("FP8_BLOCK", block_structure=[64, 64], input_group_size=64), BY_GROUP
    ),
    "ct-fp8-static": by_compressed_tensors("FP8", preset("FP8"), "activations of 8 bits, fixed scales"),
    "ct-nvfp4": by_compressed_tensors("NVFP4", preset("NVFP4"), FOUR_BITS, dtype="bf16"),
    "ct-mxfp4": by_compressed_tensors("MXFP4", preset("MXFP4"), FOUR_BITS, dtype="bf16"),
    "bnb-int8": by_bitsandbytes("int8, threshold 0", BY_TOKEN, load_in_8bit=True, llm_int8_threshold=0.0),
    "ao-int8-token": by_torchao("int8", lambda ao: ao.Int8DynamicActivationInt8WeightConfig(), BY_TOKEN),
    "bnb-int8-outliers": by_bitsandbytes("int8, threshold 6: outliers", load_in_8bit=True),
    "ao-int8-tensor": by_torchao(
        "int8, dynamic per tensor",
        lambda ao: ao.Int8DynamicActivationInt8WeightConfig(granularity=ao.PerTensor()),
    ),
    "ct-int8-tensor": by_compressed_tensors("int8, dynamic per tensor", dynamic_per_tensor("W8A8")),
    "ct-fp8-tensor": by_compressed_tensors("FP8, dynamic per tensor", dynamic_per_tensor("FP8_DYNAMIC")),
}


@torch.no_grad()
def moves_among_others(model: Any, prompts: Sequence[Sequence[int]]) -> float:
    """How far the logits of a token move when others follow it in its forward, in standard deviations.

    With quantised activations, many tokens do not move at all and some by much, so several are tried.
    """
    worst = 0.0
    for ids, place in ((ids, place) for ids in prompts for place in PLACES):
        cache = model(torch.tensor([ids[:place]]), use_cache=True).past_key_values
        alone, among = (
            model(torch.tensor([ids[place : place + count]]), past_key_values=copy.deepcopy(cache)).logits[0, 0].float()
            for count in (1, 1 + NUM_OTHERS)
        )
        worst = max(worst, float((among - alone).abs().max() / alone.std()))
    return worst


@dataclass
class Result:
    """What was found for a format. All gaps are in logits."""

    versions: str
    file_mb: float = 0.0
    memory_mb: float = 0.0
    steps: str = ""
    among: float = 0.0
    texts: int = 0
    tokens: int = 0
    accepted: int = 0
    trees: list[float] | None = None  # a gap for each text of Graft with trees that is not Graft's plain one
    generate: list[float] | None = None  # a gap for each plain text of Graft that is not that of `generate`
    refused: str = ""
    failed: str = ""


def examine(name: str, source: Path, folder: Path, prompts: list[list[int]], num_tokens: int) -> Result:
    """Make the checkpoint of a format, answer all prompts by the three decoders, and compare."""
    form = FORMATS[name]
    found, stage = Result(version_of(form.library)), "cannot be made here"
    try:
        if not folder.exists():
            unfinished = folder.with_suffix(".part")
            shutil.rmtree(unfinished, ignore_errors=True)
            unfinished.mkdir(parents=True)
            form.make(source, unfinished)
            unfinished.rename(folder)
        found.file_mb = sum(path.stat().st_size for path in folder.glob("*.safetensors")) / 1e6
        asked = [
            (ids, SamplingSettings(max_new_tokens=num_tokens, temperature=temperature, seed=number, ignore_eos=True))
            for number, ids in enumerate(prompts)
            for temperature in (0.0, TEMPERATURE)
        ]
        stage = "does not run in transformers"
        reference = fresh_model(form, source, folder)  # Graft never sees this one
        found.among = moves_among_others(reference, prompts[:4])
        stage = "fails"
        options: dict[str, Any] = {"draft": None, "profile": None, "budget": BUDGET}
        if form.on_loading is None:
            engine = graft.load(folder, dtype=form.dtype, **options)
        else:
            tokenizer = AutoTokenizer.from_pretrained(source)
            engine = graft.load(fresh_model(form, source, folder), tokenizer=tokenizer, **options)
        compare(engine, reference, asked, found)
    except GraftError as error:
        found.refused = str(error).replace(str(folder), "the checkpoint")
    except Exception as error:
        traceback.print_exc()
        found.failed = f"{stage}: {type(error).__name__}: {str(error).strip().partition(chr(10))[0]}"
    return found


def fresh_model(form: Format, source: Path, folder: Path) -> Any:
    """The quantised model, by transformers alone."""
    dtype = DTYPES[form.dtype]
    if form.on_loading is not None:
        return plain_model(source, dtype, quantization_config=form.on_loading())
    model = plain_model(folder, dtype)
    for layer in model.modules():  # transformers 5.23 leaves them in the dtype of the file
        if isinstance(layer, nn.Embedding) or type(layer).__name__.endswith("RMSNorm"):
            layer.to(dtype)
    return model


def compare(engine: Any, reference: Any, asked: list[tuple[list[int], SamplingSettings]], found: Result) -> None:
    """Compare Graft's texts with trees, its plain ones, and those of `generate` with the reference model."""
    model, plain = engine.target.model, plain_twin(engine)
    untouched: Any = SimpleNamespace(target=SimpleNamespace(model=reference, device=reference.device), eos_token_ids=())
    found.steps = f"{weights_in_words(model)}; {engine.target.mode}"
    found.trees, found.generate = [], []
    for ids, settings in asked:
        rule = processors(engine, settings, len(ids))
        ours = Decoded("plain", plain.generate(ids, **vars(settings)).ids)
        generation = engine.generate(ids, **vars(settings))
        theirs = Decoded("transformers", transformers_answer(untouched, ids, settings))
        found.texts += 1
        found.tokens += len(ours.ids)
        found.accepted += generation.stats.accepted
        for gaps, expected, other in (
            (found.trees, ours, Decoded("graft", generation.ids)),
            (found.generate, theirs, ours),
        ):
            difference = find_difference(model, ids, expected, other, rule)
            if difference is not None:
                one, two = difference.expected.score, difference.found.score
                assert one is not None and two is not None
                gaps.append(abs(one - two) * (settings.temperature or 1))
    tensors = {id(tensor): tensor for tensor in (*model.parameters(), *model.buffers())}
    found.memory_mb = sum(tensor.numel() * tensor.element_size() for tensor in tensors.values()) / 1e6


def version_of(library: str) -> str:
    return f"{library} {importlib.metadata.version(library)}"


def is_installed(library: str) -> bool:
    try:
        return bool(version_of(library))
    except importlib.metadata.PackageNotFoundError:
        return False


def table(results: dict[str, Result]) -> str:
    """The results as Markdown."""
    lines = [
        "| format | made by | in Graft | MB on disk, in memory | moves among others | promised | trees | `generate` |",
        "|---|---|---|---|---|---|---|---|",
    ]
    for name, found in results.items():
        form = FORMATS[name]
        made = f"{found.versions}{', ' + form.note if form.note else ''}"
        sizes = ", ".join(f"{size:.0f}" for size in (found.file_mb, found.memory_mb) if size)
        cells = [
            form.title,
            made,
            found.steps or found.failed or "refused",
            sizes,
            number(found.among) if found.among else "",
        ]
        cells += [promise(form, found)]
        cells += [differences(gaps, found.texts, found.tokens) for gaps in (found.trees, found.generate)]
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines)


def promise(form: Format, found: Result) -> str:
    """What docs/exactness.md promises of plain decoding and trees."""
    if found.refused or found.failed:
        return ""
    if "exact" in found.steps:
        return "same bits"
    if form.activations:
        return f"may diverge ({form.activations})"
    # Some libraries compute in bfloat16 inside a float32 model.
    return "same, but within a millionth" if found.among < 0.001 else "same, but at a near tie"


def differences(gaps: Sequence[float] | None, num_texts: int, num_tokens: int) -> str:
    """How many texts differ, and the gaps there."""
    if gaps is None:
        return ""
    if not gaps:
        return f"0 of {num_texts} differ ({num_tokens} tokens)"
    at = ", ".join(map(number, sorted(gaps)))
    return f"**{len(gaps)} of {num_texts} differ** ({num_tokens} tokens), at gaps of {at}"


def number(value: float) -> str:
    return f"{value:.1e}" if 0 < value < 0.01 else f"{value:.2g}"


def main() -> None:
    parser = command_line(__doc__)
    parser.add_argument("names", nargs="*", metavar="NAME", help=f"of {', '.join(FORMATS)}; all if not given")
    parser.add_argument("--model", default=DEFAULT_MODEL, help="a packaged model or a folder, of a Llama in bf16")
    parser.add_argument(
        "--data", type=Path, action="append", help="a prompt file, repeatable; the built-in ones if not given"
    )
    parser.add_argument("--prompts", type=int, default=8, help="how many prompts, of all files in turn")
    parser.add_argument("--max-new-tokens", type=int, default=64)
    parser.add_argument("--folder", type=Path, help="keep the checkpoints here, and use those that are there")
    parser.add_argument("--out", type=Path, help="a JSON file of results; formats that are in it are not run again")
    parser.add_argument("--write", type=Path, metavar="PAGE", help="write the table to this page")
    options = parser.parse_args()
    logging.disable(logging.WARNING)  # libraries write a line for each layer
    warnings.filterwarnings("ignore")
    transformers.logging.set_verbosity_error()
    transformers.logging.disable_progress_bar()
    if unknown := set(options.names) - set(FORMATS):
        parser.error(f"unknown: {', '.join(sorted(unknown))}")
    names = options.names or list(FORMATS)
    known = {}
    if options.out is not None and options.out.exists():
        known = {name: Result(**facts) for name, facts in json.loads(options.out.read_text()).items()}
    source = pull(options.model) if options.model in PACKAGED_MODELS else Path(options.model)
    missing = [name for name in names if name not in known]
    prompts = chosen_prompts(source, options) if missing else []
    with tempfile.TemporaryDirectory() as scratch:
        for name in missing:
            if not is_installed(FORMATS[name].library):
                print(f"{name}: left out, because {FORMATS[name].library} is not installed", file=sys.stderr)
                continue
            folder = (options.folder or Path(scratch)).absolute() / name
            start = time.perf_counter()
            known[name] = examine(name, source, folder, prompts, options.max_new_tokens)
            if options.folder is None:
                shutil.rmtree(folder, ignore_errors=True)
            print(f"{name}: {known[name]}, {time.perf_counter() - start:.0f} s", file=sys.stderr, flush=True)
            write_json(options.out, {each: asdict(found) for each, found in known.items()})
            gc.collect()
    versions = ", ".join(map(version_of, ("torch", "transformers")))
    made = (
        f"Half of the texts are greedy, half at temperature {TEMPERATURE}. On a CPU, {versions}.\n\n"
        f"{table({name: known[name] for name in FORMATS if name in known})}"
    )
    if options.write is None:
        print(made)
    else:
        before, _, rest = options.write.read_text().partition(START)
        _, _, after = rest.partition(END)
        options.write.write_text(f"{before}{START}\n\n{made}\n\n{END}{after}")


def chosen_prompts(source: Path, options: argparse.Namespace) -> list[list[int]]:
    """Token ids of the prompts, of all files in turn."""
    files = options.data or [PROMPTS_FOLDER / f"{name}.jsonl" for name in BUILT_IN]
    engine = graft.load(source, draft=None, policy="off", profile=None)
    asked = mixed_questions(files, engine, options.max_new_tokens, limit=-(-options.prompts // len(files)))
    return [question.ids for question in asked[: options.prompts]]


if __name__ == "__main__":
    main()
