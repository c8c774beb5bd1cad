"""ctypes bindings of `native.c`: its structures, its functions' argument types, and errors as exceptions.

The C code is compiled into a shared library beside this file when the package is installed. Calls hold the GIL, because
they take only microseconds and read Python's memory, which must not move meanwhile.
"""

from __future__ import annotations

import ctypes
from ctypes import POINTER, c_double, c_float, c_int64, c_void_p
from functools import cache
from importlib.machinery import EXTENSION_SUFFIXES
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from graft.errors import GraftError

HERE = Path(__file__).parent


class PoolStruct(ctypes.Structure):
    """The memory of `Candidates`."""

    _fields_ = (
        ("num_rows", c_int64),
        ("capacity", c_int64),
        ("width", c_int64),
        ("deepest", c_int64),
        ("fields", c_void_p),
        ("paths", c_void_p),
        ("salts", c_void_p),
        ("factors", c_void_p),
        ("num_factors", c_int64),
        ("draws", c_void_p),
    )


class DrawsStruct(ctypes.Structure):
    """What is known of coming draws."""

    _fields_ = (
        ("kinds", c_void_p),
        ("seeds", c_void_p),
        ("positions", c_void_p),
        ("powers", c_void_p),
        ("banned", c_void_p),
        ("banned_ends", c_void_p),
        ("endings", c_void_p),
        ("ending_ends", c_void_p),
        ("num_unending", c_void_p),
        ("times", c_void_p),
        ("is_keyed", c_void_p),
        ("num_depths", c_int64),
    )


class AcceptanceProbsStruct(ctypes.Structure):
    _fields_ = (("values", c_void_p), ("num_groups", c_int64), ("num_sources", c_int64), ("num_buckets", c_int64))

    @classmethod
    def of(cls, probs: Tensor | None) -> AcceptanceProbsStruct:
        """probs [groups, sources, buckets]: contiguous float32, kept alive by the caller. None: a null pointer."""
        if probs is None:
            return cls()
        assert probs.is_contiguous() and probs.dtype is torch.float32
        return cls(probs.data_ptr(), *probs.shape)


class TableStruct(ctypes.Structure):
    _fields_ = (
        ("entries", c_void_p),
        ("tags", c_void_p),
        ("num_rows", c_int64),
        ("num_successors", c_int64),
        ("order", c_int64),
        ("row_bits", c_int64),
        ("factors", c_void_p),
        ("isolated", c_int64),
    )


class IndexStruct(ctypes.Structure):
    """The memory of a `SuffixIndex`. All zeros is an empty index. `graft_index_free` frees its memory."""

    _fields_ = (
        ("num_tokens", c_int64),
        ("num_texts", c_int64),
        ("dropped", c_int64),
        ("tokens", c_void_p),
        ("previous", c_void_p),
        ("starts", c_void_p),
        ("pairs", c_void_p),
        ("token_room", c_int64),
        ("text_room", c_int64),
        ("num_slots", c_int64),
        ("num_pairs", c_int64),
    )


class ScaleStruct(ctypes.Structure):
    _fields_ = (
        ("max_match", c_int64),
        ("num_matches", c_int64),
        ("num_shares", c_int64),
        ("matches", POINTER(c_int64)),
        ("shares", POINTER(c_double)),
    )


_ARGUMENTS: dict[str, list[Any]] = {  # argument types by function; structures are passed as pointers
    "graft_draw_times": [c_void_p, *[c_int64] * 2, *[c_void_p] * 2],
    "graft_begin": [c_void_p] * 4,
    "graft_add": [c_void_p, c_int64, *[c_void_p] * 5, c_int64],
    "graft_add_level": [c_void_p, c_int64, *[c_void_p] * 4, *[c_int64] * 3, c_void_p, c_int64, c_void_p],
    "graft_merge": [c_void_p, c_int64, c_void_p],
    "graft_rank": [c_void_p, *[c_int64] * 2, *[c_void_p] * 6],
    "graft_tree": [c_void_p, *[c_int64] * 2, *[c_void_p] * 2, c_int64, *[c_void_p] * 3],
    "graft_values_by_need": [c_void_p, *[c_int64] * 2, *[c_void_p] * 2, c_int64, *[c_void_p] * 3],
    "graft_count": [*[c_void_p] * 5, *[c_int64] * 3, c_float],
    "graft_flatten_trees": [*[c_int64] * 2, *[c_void_p] * 3, c_int64, *[c_void_p] * 5],
    "graft_best_first": [*[c_int64] * 3, *[c_void_p] * 3, *[c_int64] * 3, *[c_void_p] * 5],
    "graft_count_sources": [c_int64, c_int64, c_void_p, c_int64, c_void_p],
    "graft_follow": [c_void_p, c_void_p, c_int64, c_void_p, *[c_int64] * 4],
    "graft_learn": [c_void_p, *[c_int64] * 5, *[c_void_p] * 8, c_int64],
    "graft_restore": [c_void_p, *[c_int64] * 2, *[c_void_p] * 3],
    "graft_index_free": [c_void_p],
    "graft_index_begin": [c_void_p],
    "graft_index_extend": [c_void_p, c_int64, c_void_p, c_void_p, c_int64],
    "graft_attach_copies": [*[c_void_p] * 6, c_int64, c_void_p, *[c_int64] * 4, *[c_void_p] * 2],
}


@cache
def native() -> Any:
    """The compiled library, loaded once."""
    return load_library(HERE, "_native", _ARGUMENTS)


def load_library(folder: Path, name: str, arguments: dict[str, list[Any]]) -> Any:
    """Load a library whose functions hold the GIL, take these arguments, and raise an exception if they fail."""
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
