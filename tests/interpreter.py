"""Switches Triton to its interpreter where there is no GPU. Import it before Triton, which transformers imports."""

from __future__ import annotations

import os
from typing import Any

import torch


def use_interpreter() -> None:
    os.environ["TRITON_INTERPRET"] = "1"
    try:
        from triton.runtime import interpreter
    except ImportError:
        return
    patch_tensor, patch_language = interpreter._patch_lang_tensor, interpreter._patch_lang
    find_dtype = interpreter._get_np_dtype
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

    interpreter._patch_lang_tensor, interpreter._patch_lang = patch, patch_once
    interpreter._get_np_dtype = find_dtype_once
    # Every sum and product of integers is made in 64 bits as well, and the comparison thrown away unless debugging.
    interpreter.interpreter_builder.options = interpreter.InterpreterOptions(sanitize_overflow=False)


if not torch.cuda.is_available():
    use_interpreter()
