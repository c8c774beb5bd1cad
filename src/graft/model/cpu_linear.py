"""Linear layers for a CPU that take little longer for a few tokens than for one.

For more than one token, torch's BLAS copies the weights into an order of its own in every call, which takes three times
as long as reading them. The kernel in `cpu_linear.c` reads a packed copy, which is made once. Weights that are exact in
bfloat16, as those of most checkpoints, are packed in it: a product takes half the time and has the same bits. Every
plain float32 layer is replaced wherever the kernel was built, so that what is promised of a text depends on no timing.
"""

from __future__ import annotations

import ctypes
import re
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn.functional import linear, pad
from torch.utils.weak import WeakTensorKeyDictionary

from graft.errors import GraftError
from graft.model.plain_modules import is_plain_linear
from graft.tree.native import compiled

HERE = Path(__file__).parent
MAPS = Path("/proc/self/maps")  # files that this process has loaded
MAX_TOKENS = 64  # with more, torch's copy of the weights hardly matters
_PACKED = WeakTensorKeyDictionary()  # by weight: its version when it was packed, and its copy


class FewTokensLinear(nn.Linear):
    """A linear layer that uses the kernel for up to 64 tokens, and torch for more."""

    @classmethod
    def sharing(cls, layer: nn.Linear) -> FewTokensLinear:
        """A layer that shares the parameters of another one."""
        new = cls(layer.in_features, layer.out_features, bias=False, device="meta")
        new.weight, new.bias = layer.weight, layer.bias
        return new.train(layer.training)

    def forward(self, input: Tensor) -> Tensor:
        return quick_linear(input, self.weight, self.bias)


def quick_linear(input: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """`torch.nn.functional.linear`, by the kernel for up to 64 tokens if it can run."""
    num_inputs = weight.shape[1]
    is_few = 0 < input.numel() <= MAX_TOKENS * num_inputs and input.shape[-1] == num_inputs
    if is_few and can_run(input, weight):
        packed = pack(weight)
        # Torch is as fast with one token and float32 weights.
        if input.numel() > num_inputs or packed.dtype is torch.int16:
            return few_tokens_linear(input, weight, bias, packed)
    return linear(input, weight, bias)


def few_tokens_linear(
    input: Tensor, weight: Tensor, bias: Tensor | None = None, packed: Tensor | None = None
) -> Tensor:
    """`torch.nn.functional.linear` by the kernel, for float32 on a CPU and contiguous weights.

    packed: `pack(weight)`, if the caller has it.
    """
    kernel = library()
    assert kernel is not None
    x, packed = input.contiguous(), pack(weight) if packed is None else packed
    num_outputs, num_inputs = weight.shape
    out = x.new_empty((*x.shape[:-1], num_outputs))
    sizes = (num_outputs, num_inputs, x.numel() // num_inputs, packed.dtype is torch.int16)
    if kernel.multiply(weight.data_ptr(), packed.data_ptr(), x.data_ptr(), out.data_ptr(), *sizes, threads()):
        del _PACKED[weight]
        return few_tokens_linear(input, weight, bias)
    return out if bias is None else out.add_(bias)


def pack(weight: Tensor) -> Tensor:
    """The packed copy of a weight [outputs, inputs], as `cpu_linear.c` reads it: bfloat16 as int16, or float32.

    It is kept as long as the weight, and made anew if torch counted a change of the weight. Changes that torch does not
    count, as through `.data`, are seen by the kernel, which compares some numbers.
    """
    version, packed = _PACKED.get(weight, (None, None))
    if version != weight._version:
        version, packed = _PACKED[weight] = weight._version, pack_anew(weight)
    return packed


def pack_anew(weight: Tensor) -> Tensor:
    """A packed copy that is not kept."""
    kernel, weight = library(), weight.detach()
    assert kernel is not None
    num_inputs = weight.shape[1]
    panels = pad(weight, (0, 0, 0, -len(weight) % kernel.panel))
    short = panels.bfloat16()
    if not torch.equal(short.float(), panels):
        return panels.view(-1, kernel.panel, num_inputs).transpose(1, 2).contiguous()
    halves = short.view(torch.int16).view(-1, 2, kernel.panel // 2, num_inputs)
    return halves.permute(0, 3, 2, 1).contiguous()  # a word's low half comes first in memory


def speed_up(model: nn.Module) -> bool:
    """Replace a model's plain float32 linear layers on a CPU, if the kernel was built. Parameters stay the same.

    The packed copies take half the memory of the weights, or as much if the weights are not exact in bfloat16.
    """
    modules = model.named_modules()
    layers = {name: each for name, each in modules if is_plain_linear(each) and _is_readable(each.weight)}
    if not layers or library() is None:
        return False
    for name, layer in layers.items():
        model.set_submodule(name, FewTokensLinear.sharing(layer))
        pack(layer.weight)
    return True


@contextmanager
def torchs_linear(model: nn.Module) -> Iterator[None]:
    """Run the model's linear layers by torch alone, as they were before `speed_up`."""
    layers = [layer for layer in model.modules() if type(layer) is FewTokensLinear]
    for layer in layers:
        layer.__class__ = nn.Linear  # type: ignore[assignment]
    try:
        yield
    finally:
        for layer in layers:
            layer.__class__ = FewTokensLinear


def _is_readable(weight: Tensor) -> bool:
    is_usual = weight.dtype is torch.float32 and weight.device.type == "cpu" and weight.is_contiguous()
    return is_usual and weight.numel() > 0 and not weight.is_inference()  # of those, torch does not count changes


def can_run(input: Tensor, weight: Tensor) -> bool:
    """Whether the kernel can run: inference, no autocast, and weights still float32 on a CPU."""
    return (
        not torch.is_grad_enabled()
        and not torch.compiler.is_compiling()
        and not torch.is_autocast_enabled("cpu")
        and type(input) is Tensor
        and input.dtype is torch.float32
        and input.device.type == "cpu"
        and _is_readable(weight)
        and library() is not None  # a model may have been copied to a machine without the kernel
    )


class Library(NamedTuple):
    """Functions of the compiled library."""

    multiply: Callable[..., int]
    run_layers: Callable[..., int]
    scratch_size: Callable[..., int]
    highest: Callable[..., None]
    panel: int  # outputs of a panel
    page: int  # tokens of a page of the KV cache
    max_dim: int  # the largest head_dim of attention
    max_experts: int


@cache
def library() -> Library | None:
    """The library for this processor; None if it was not built."""
    # Torch detects the CPU. Only x86 has variants.
    variant = {"AVX2": "_avx2", "AVX512": "_avx512"}.get(torch.backends.cpu.get_cpu_capability(), "")
    try:
        loaded: Any = compiled(HERE, f"_cpu_linear{variant}")
        names = ("graft_panel", "graft_page", "graft_max_dim", "graft_max_experts")
        constants = [ctypes.c_long.in_dll(loaded, name).value for name in names]
        multiply, run_layers, scratch_size = loaded.graft_linear, loaded.graft_layers, loaded.graft_layers_scratch
        highest = loaded.graft_highest
    except (GraftError, ValueError, AttributeError):  # it was not built, or from older sources
        return None
    multiply.argtypes = [ctypes.c_void_p] * 4 + [ctypes.c_long] * 4 + [ctypes.c_void_p]
    run_layers.argtypes = [ctypes.c_void_p] * 3
    highest.argtypes = [ctypes.c_void_p, *[ctypes.c_long] * 3, *[ctypes.c_void_p] * 3]
    scratch_size.argtypes = [ctypes.c_void_p, ctypes.c_long]
    multiply.restype = run_layers.restype = ctypes.c_int
    scratch_size.restype, highest.restype = ctypes.c_long, None
    return Library(multiply, run_layers, scratch_size, highest, *constants)


class _Threads(ctypes.Structure):
    _fields_ = (("parallel", ctypes.c_void_p), ("thread_num", ctypes.c_void_p), ("num_threads", ctypes.c_void_p))


@cache
def threads() -> Any:
    """Thread functions of the OpenMP library that torch has loaded; None if there is none.

    All OpenMP libraries have them under these names.
    """
    for path in _openmp_libraries():
        try:
            loaded = ctypes.CDLL(path)  # already loaded: this returns the same library
            functions = (loaded.GOMP_parallel, loaded.omp_get_thread_num, loaded.omp_get_num_threads)
        except (OSError, AttributeError):
            continue
        return ctypes.byref(_Threads(*(ctypes.cast(function, ctypes.c_void_p) for function in functions)))
    return None


def _openmp_libraries() -> list[str]:
    """Paths of OpenMP libraries, torch's own first: it may be in torch's folder, beside it, or in a system folder."""
    if not MAPS.exists():
        return sorted(map(str, Path(torch.__file__).parent.glob("lib/lib*omp*")))
    # A path starts at a line's first slash. It may contain spaces, and bytes that are not UTF-8.
    maps = MAPS.read_text(encoding="utf-8", errors="surrogateescape")
    loaded = set(re.findall(r"^[^/\n]*(/.*/lib[gi]?omp[^/\s]*\.so\S*)", maps, re.MULTILINE))
    return sorted(loaded, key=lambda path: ("torch" not in path, path))
