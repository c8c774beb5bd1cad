"""Linear layers for a CPU that take little longer for 16 tokens than for one.

For more than one token, torch's BLAS copies the weights into an order of its own in every call, which takes three times
as long as reading them. The kernel in `cpu_linear.c` reads them once. If it is not faster, or was not built, the model
stays as it is.
"""

from __future__ import annotations

import ctypes
import re
import time
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import linear

from graft.errors import GraftError
from graft.tree.native import compiled

HERE = Path(__file__).parent
MAPS = Path("/proc/self/maps")  # files that this process has loaded
_MAX_TOKENS = 32  # with more, the copy of the weights hardly matters
_WORTH_IT = 0.9  # the kernel is used if it takes at most this share of torch's time


class FewTokensLinear(nn.Linear):
    """A linear layer that uses the kernel for 2 to 32 tokens, and torch otherwise."""

    @classmethod
    def sharing(cls, layer: nn.Linear) -> FewTokensLinear:
        """A layer that shares the parameters of another one."""
        new = cls(layer.in_features, layer.out_features, bias=False, device="meta")
        new.weight, new.bias = layer.weight, layer.bias
        return new.train(layer.training)

    def forward(self, input: Tensor) -> Tensor:
        return quick_linear(input, self.weight, self.bias)


def quick_linear(input: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """`torch.nn.functional.linear`, by the kernel for 2 to 32 tokens if it can run."""
    if 1 < input.numel() // weight.shape[1] <= _MAX_TOKENS and _can_run(input, weight):
        return few_tokens_linear(input, weight, bias)
    return linear(input, weight, bias)


def few_tokens_linear(input: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """`torch.nn.functional.linear` by the kernel, for float32 on a CPU and contiguous weights."""
    kernel = _kernel()
    assert kernel is not None
    x = input.contiguous()
    num_outputs, num_inputs = weight.shape
    out = x.new_empty((*x.shape[:-1], num_outputs))
    num_tokens = x.numel() // num_inputs
    addresses = (weight.data_ptr(), x.data_ptr(), out.data_ptr())
    if kernel(*addresses, num_outputs, num_inputs, num_tokens, _threads()):
        raise MemoryError(f"not enough memory for {num_tokens} tokens of {num_inputs} numbers")
    return out if bias is None else out.add_(bias)


def speed_up(model: nn.Module) -> bool:
    """Replace a model's float32 linear layers on a CPU if the kernel is faster there. Parameters stay the same."""
    layers = {name: layer for name, layer in model.named_modules() if type(layer) is nn.Linear and _suits(layer)}
    if not layers or _kernel() is None or not _is_faster(list(layers.values())):
        return False
    for name, layer in layers.items():
        model.set_submodule(name, FewTokensLinear.sharing(layer))
    return True


def _suits(layer: nn.Linear) -> bool:
    weight = layer.weight
    # A hook may rely on the layer, so a layer with hooks is left alone.
    hooked = layer._forward_hooks or layer._forward_pre_hooks
    return type(weight) is nn.Parameter and weight.numel() > 0 and _is_plain(weight) and not hooked


def _is_plain(tensor: Tensor) -> bool:
    return tensor.dtype is torch.float32 and tensor.device.type == "cpu" and tensor.is_contiguous()


def _can_run(input: Tensor, weight: Tensor) -> bool:
    """Whether the kernel can run: inference, no autocast, and weights still float32 on a CPU."""
    return (
        not torch.is_grad_enabled()
        and not torch.compiler.is_compiling()
        and not torch.is_autocast_enabled("cpu")
        and type(input) is Tensor
        and input.dtype is torch.float32
        and input.device.type == "cpu"
        and _is_plain(weight)
        and _kernel() is not None  # a model may have been copied to a machine without the kernel
    )


@torch.no_grad()
def _is_faster(layers: list[nn.Linear]) -> bool:
    """Time the kernel and torch in turn over a few layers. The best times count, since the machine may be busy."""
    weights = [layer.weight for layer in layers[:16]]
    generator = torch.Generator().manual_seed(0)  # the global one is the user's
    inputs = [torch.randn(8, weight.shape[1], generator=generator) for weight in weights]

    def seconds(function: Callable[[Tensor, Tensor], Tensor]) -> float:
        start = time.perf_counter()
        for input, weight in zip(inputs, weights, strict=True):
            function(input, weight)
        return time.perf_counter() - start

    rounds = [(seconds(few_tokens_linear), seconds(linear)) for _ in range(4)]
    ours, theirs = (min(times) for times in zip(*rounds, strict=True))
    return ours < _WORTH_IT * theirs


@cache
def _kernel() -> Callable[..., int] | None:
    """The kernel for this processor; None if it was not built."""
    # Torch detects the CPU. Only x86 has two variants.
    is_wide = torch.backends.cpu.get_cpu_capability() in ("AVX2", "AVX512")
    try:
        library = compiled(HERE, "_cpu_linear_avx2" if is_wide else "_cpu_linear")
    except GraftError:
        return None
    function: Any = library.graft_linear
    function.argtypes = [ctypes.c_void_p] * 3 + [ctypes.c_long] * 3 + [ctypes.c_void_p]
    function.restype = ctypes.c_int
    return function


class _Threads(ctypes.Structure):
    _fields_ = (("parallel", ctypes.c_void_p), ("thread_num", ctypes.c_void_p), ("num_threads", ctypes.c_void_p))


@cache
def _threads() -> Any:
    """Thread functions of the OpenMP library that torch has loaded; None if there is none.

    All OpenMP libraries have them under these names.
    """
    for path in _openmp_libraries():
        try:
            library = ctypes.CDLL(path)  # already loaded: this returns the same library
            functions = (library.GOMP_parallel, library.omp_get_thread_num, library.omp_get_num_threads)
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
