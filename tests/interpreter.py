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
    patch_tensor = interpreter._patch_lang_tensor

    def patch(tensor: type, scope: Any) -> None:
        patch_tensor(tensor, scope)
        # Up to Triton 3.6 an array of one number is given to int(), which NumPy 2.4 refuses.
        scope.set_attr(tensor, "__index__", lambda self: self.handle.data.item())

    interpreter._patch_lang_tensor = patch


if not torch.cuda.is_available():
    use_interpreter()
