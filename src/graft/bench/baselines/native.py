"""ctypes bindings of `baselines.c`: functions on candidates that only the benchmark's methods use."""

import ctypes
from array import array
from collections.abc import Sequence
from ctypes import POINTER, Array, c_float, c_int64, c_void_p
from functools import cache
from pathlib import Path
from typing import Any

from graft.tree.candidates import Candidates, address_of
from graft.tree.native import TableStruct, load_library

_ARGUMENTS: dict[str, list[Any]] = {  # argument types by function; structures are passed by reference
    "baselines_keep_best": [c_void_p] * 2,
    "baselines_fill": [*[c_void_p] * 3, c_float, *[c_int64] * 2],
    "baselines_extend_leaf": [*[c_void_p] * 2, c_float, *[c_int64] * 2],
}


class TemplateStruct(ctypes.Structure):
    """A fixed tree of successor ranks; see `template`."""

    _fields_ = (
        ("count", c_int64),
        ("parents", POINTER(c_int64)),
        ("ranks", POINTER(c_int64)),
        ("depths", POINTER(c_int64)),
    )


@cache
def _native() -> Any:
    return load_library(Path(__file__).parent, "_baselines", _ARGUMENTS)


def fill(
    candidates: Candidates,
    tables: Array[TableStruct],
    templates: Sequence[TemplateStruct],
    chance: float,
    source: int,
    max_depth: int,
) -> None:
    """Add each row's template below the root, with tokens from the only table, or padding where it has none."""
    candidates.reserve(max(template.count for template in templates))
    addresses = array("q", map(ctypes.addressof, templates))
    _native().baselines_fill(candidates.ref, tables, address_of(addresses), chance, source, max_depth)


def extend_leaf(candidates: Candidates, tables: Array[TableStruct], chance: float, source: int, max_depth: int) -> None:
    """Add to each row's likeliest leaf its first successor in the only table, or padding where there is none."""
    candidates.reserve(1)
    _native().baselines_extend_leaf(candidates.ref, tables, chance, source, max_depth)


def keep_best(candidates: Candidates, counts: Sequence[int]) -> None:
    """Drop all but the root and the `counts[row]` likeliest nodes of each row. Equal paths count separately."""
    numbers = array("q", counts)
    _native().baselines_keep_best(candidates.ref, address_of(numbers))
