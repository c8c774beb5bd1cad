"""Compiles what kernels are launched with, for a GPU that need not be there. Run without Triton's interpreter.

    python tests/compiled.py gemma2 olmo3    # all kernels of these families' fused layers

Triton's interpreter takes what its compiler refuses: a name that has two types, for instance.
"""

from __future__ import annotations

import sys
from typing import Any

import torch
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
from triton.runtime.jit import JITFunction
from triton.tools.tensor_descriptor import TensorDescriptor

from families import family_model
from graft.model.families import describe
from graft.model.llama import FastLayers

_TYPES = {torch.bfloat16: "bf16", torch.float32: "fp32", torch.int32: "i32", torch.int64: "i64"}
_OPTIONS = ("num_warps", "num_stages", "maxnreg", "launch_pdl")
_COMPILED: set[str] = set()


def compile_launch(function: Any, *args: Any, grid: Any, warmup: bool, **more: Any) -> None:
    """In place of a launch."""
    options = {name: more.pop(name) for name in _OPTIONS if more.get(name) is not None}
    given = dict(zip(function.arg_names, args, strict=False)) | more
    kinds, constants, attributes = {}, {}, {}
    for number, parameter in enumerate(function.params):
        value = given.get(parameter.name, parameter.default if parameter.has_default else None)
        if parameter.is_constexpr or value is None:
            kinds[parameter.name], constants[number,] = "constexpr", value
            continue
        kinds[parameter.name] = type_of(value)
        if isinstance(value, torch.Tensor):
            attributes[number,] = [["tt.divisibility", 16]]
    what = f"{function.fn.__name__} {kinds} {constants} {options}"
    if what not in _COMPILED:
        _COMPILED.add(what)
        source = ASTSource(fn=function, signature=kinds, constexprs=constants, attrs=attributes)
        assert triton.compile(source, target=GPUTarget("cuda", 90, 32), options=options).asm["cubin"]


def type_of(value: Any) -> str:
    if isinstance(value, torch.Tensor):
        return f"*{_TYPES[value.dtype]}"
    if isinstance(value, TensorDescriptor):
        return f"tensordesc<{_TYPES[value.base.dtype]}{list(value.block_shape)}>".replace(" ", "")
    return "fp32" if isinstance(value, float) else "i32"


def main() -> None:
    JITFunction.run = compile_launch  # type: ignore[method-assign, assignment]
    for name in sys.argv[1:]:
        what = describe(family_model(name).to(torch.bfloat16))
        layers = FastLayers(what, exact=True)
        for number, layer in enumerate(what.layers):
            past = torch.zeros(2, layer.mixer.kv_heads, 70, layer.mixer.head_dim, dtype=torch.bfloat16)
            stream = torch.zeros(4, what.hidden_size, dtype=torch.bfloat16)
            layers.run_layer(number, stream, (past[0], past[1]), torch.zeros(4, dtype=torch.long))
        layers.end(stream)
    print(f"{len(_COMPILED)} kernels")


if __name__ == "__main__":
    main()
