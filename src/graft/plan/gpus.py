"""GPUs by their public data sheets. `cost.py` has the efficiencies reached in practice."""

from __future__ import annotations

from dataclasses import dataclass

from graft.settings import require


@dataclass(frozen=True)
class Gpu:
    """A GPU by its data sheet."""

    name: str
    memory_bytes: float
    bandwidth: float  # of the memory, bytes per second
    flops: float  # dense bf16 operations per second
    link: float  # bytes per second to other GPUs, both directions together
    has_nvlink: bool  # otherwise PCIe

    @staticmethod
    def named(name: str) -> Gpu:
        require(name in GPUS, f"unknown GPU {name!r}; known: {', '.join(GPUS)}")
        return GPUS[name]


GPUS = {
    gpu.name: gpu
    for gpu in (
        Gpu("h200", 141e9, 4.8e12, 989e12, 900e9, True),
        Gpu("h100-sxm", 80e9, 3.35e12, 989e12, 900e9, True),
        Gpu("b200", 180e9, 8.0e12, 2250e12, 1800e9, True),
        Gpu("a100-80g", 80e9, 2.039e12, 312e12, 600e9, True),
        Gpu("l40s", 48e9, 0.864e12, 362e12, 64e9, False),
        Gpu("rtx4090", 24e9, 1.008e12, 165e12, 64e9, False),
    )
}
