"""Which kernels a round runs: those in C on a CPU, those in Triton on a GPU. Both modules have the same functions."""

from __future__ import annotations

from typing import Any

import torch

# The steps of a round, in their order.
STEPS = (
    *(
        "begin",
        "choose_places",
        "add_copies",
        "add_level",
        "stop_rows",
        "follow",
        "attach",
        "merge",
        "rank",
        "select",
        "lay_out",
    ),
    *("walk", "advance", "line_up", "count", "learn"),
    "grow",  # the tree of a block head, which is added as one level
)


def kernels_for(device: torch.device) -> Any:
    """The module whose functions are `STEPS` and `lookup_bytes`. Importing the one for GPUs needs Triton."""
    if device.type == "cpu":
        from graft.tree.device import c_kernels

        return c_kernels
    from graft.tree.device import triton_kernels

    return triton_kernels
