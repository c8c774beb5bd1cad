"""Loads the shared libraries that are compiled when the package is installed; errors of their functions are exceptions.

What the functions take is said where they are called: `device/c_kernels.py`, `model/cpu_linear.py`.
"""

from __future__ import annotations

import ctypes
from importlib.machinery import EXTENSION_SUFFIXES
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from graft.errors import GraftError

HERE = Path(__file__).parent


def load_library(folder: Path, name: str, arguments: dict[str, list[Any]]) -> Any:
    """Load a library whose functions take these arguments, and raise an exception if they fail.

    Calls hold the GIL: they take only microseconds and read Python's memory, which must not move meanwhile.
    """
    library: Any = compiled(folder, name, ctypes.PyDLL)
    for function_name, types in arguments.items():
        try:
            function = getattr(library, function_name)
        except AttributeError as error:  # the library was built from an older source
            raise _unusable(name, error) from error
        function.argtypes, function.restype, function.errcheck = types, ctypes.c_int, _check
    return library


def compiled(folder: Path, name: str, loader: type[ctypes.CDLL] = ctypes.CDLL) -> ctypes.CDLL:
    """Load a shared library that was built with the package. Its file's suffix differs between machines."""
    built = [path for suffix in EXTENSION_SUFFIXES if (path := folder / (name + suffix)).exists()]
    try:
        if not built:
            raise OSError("it was not built")
        return loader(str(built[0]))
    except OSError as error:
        raise _unusable(name, error) from error


def _unusable(name: str, error: Exception) -> GraftError:
    return GraftError(
        f"Graft's compiled part {name} cannot be loaded ({error}): install the package again on this machine; in a "
        "source tree, run `make setup` or `pip install -e .`"
    )


def plain(column: Tensor, dtype: torch.dtype = torch.int64) -> Tensor:
    """Make a tensor contiguous, in the dtype that C reads. Keep the result alive until the call returns."""
    return column if column.dtype is dtype and column.is_contiguous() else column.to(dtype).contiguous()


def _check(failed: int, function: Any, arguments: tuple[Any, ...]) -> int:
    if failed == 1:
        raise MemoryError(f"{function.__name__} could not allocate memory")
    if failed:
        raise IndexError(f"{function.__name__} was given a place, source or bucket that is out of range")
    return failed
