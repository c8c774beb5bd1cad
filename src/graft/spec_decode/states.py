"""States: what was learned, as tensors by name. Names begin with the part that they belong to: "adjacency/rows"."""

from __future__ import annotations

from collections.abc import Mapping

from torch import Tensor


def part_of(state: Mapping[str, Tensor], name: str) -> dict[str, Tensor]:
    """The entries of a state whose names begin with `name`, without that prefix."""
    return {key.removeprefix(f"{name}/"): value for key, value in state.items() if key.startswith(f"{name}/")}


def named(name: str, part: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """The entries with `name` as a prefix, as part of a larger state."""
    return {f"{name}/{key}": value for key, value in part.items()}
