"""Switches Triton to its interpreter where there is no GPU. Import it before Triton, which transformers imports."""

from __future__ import annotations

import os
from operator import index
from typing import Any

import numpy as np
import torch


def use_interpreter() -> None:
    os.environ["TRITON_INTERPRET"] = "1"
    try:
        from triton.runtime import interpreter
    except ImportError:
        return
    patch_tensor, patch_language = interpreter._patch_lang_tensor, interpreter._patch_lang
    find_dtype, calculate = interpreter._get_np_dtype, interpreter.InterpreterBuilder.binary_op
    patched: set[str] = set()
    dtypes: dict[str, Any] = {}

    def patch(tensor: type, scope: Any) -> None:
        patch_tensor(tensor, scope)
        # Up to Triton 3.6 an array of one number is given to int(), which NumPy 2.4 refuses.
        scope.set_attr(tensor, "__index__", lambda self: self.handle.data.item())

    def patch_once(function: Any) -> Any:
        """Triton replaces its whole language at every call inside a kernel, which takes longer than what is called.
        Here nothing is compiled, so it may stay replaced."""
        if function.__module__ not in patched:
            patch_language(function)
            patched.add(function.__module__)
        return interpreter._LangPatchScope()  # with nothing to restore

    def find_dtype_once(kind: Any) -> Any:
        """Triton makes a table of all types each time."""
        name = kind.scalar.name
        if name not in dtypes:
            dtypes[name] = find_dtype(kind)
        return dtypes[name]

    def calculate_typed(self: Any, lhs: Any, rhs: Any, op: Any) -> Any:
        """A comparison keeps the type of the numbers compared, and Triton 3.9 refuses a mask that is made of such."""
        made = calculate(self, lhs, rhs, op)
        if made.data.dtype == np.bool_:
            made.dtype = interpreter.tl.int1
        return made

    interpreter._patch_lang_tensor, interpreter._patch_lang = patch, patch_once
    interpreter._get_np_dtype = find_dtype_once
    interpreter.InterpreterBuilder.binary_op = calculate_typed
    _make_types_once()
    # Every sum and product of integers is made in 64 bits as well, and the comparison thrown away unless debugging.
    interpreter.interpreter_builder.options = interpreter.InterpreterOptions(sanitize_overflow=False)


def _make_types_once() -> None:
    """Of every result Triton makes the type anew, with its name, and broadcasts what has the same shape: most of the
    time that a kernel of small tiles takes. Types and shapes are never changed, so those of one shape are shared."""
    from triton.language import core, semantic

    make_block, make_tensor = core.block_type.__init__, core.tensor.__init__
    broadcast = semantic.TritonSemantic.broadcast_impl_value
    blocks: dict[tuple[Any, ...], dict[str, Any]] = {}
    tensors: dict[tuple[int, ...], tuple[Any, Any]] = {}

    def init_block(self: Any, element_ty: Any, shape: Any) -> None:
        key = (element_ty.name, tuple([index(size) for size in shape]))
        made = blocks.get(key)
        if made is None:
            make_block(self, element_ty, shape)
            self.sizes = key[1]
            blocks[key] = vars(self).copy()
        else:
            vars(self).update(made)
            self.element_ty = element_ty

    def init_tensor(self: Any, handle: Any, type: Any) -> None:
        sizes = type.sizes if type.is_block() else ()
        made = tensors.get(sizes)
        if made is None:
            make_tensor(self, handle, type)
            tensors[sizes] = (self.numel, self.shape)
        else:
            self.handle, self.type, self.dtype = handle, type, type.scalar
            self.numel, self.shape = made

    def broadcast_others(self: Any, lhs: Any, rhs: Any) -> tuple[Any, Any]:
        is_same = lhs.type.is_block() and rhs.type.is_block() and lhs.type.sizes == rhs.type.sizes
        return (lhs, rhs) if is_same else broadcast(self, lhs, rhs)

    core.block_type.__init__, core.tensor.__init__ = init_block, init_tensor
    semantic.TritonSemantic.broadcast_impl_value = broadcast_others


if not torch.cuda.is_available():
    use_interpreter()
