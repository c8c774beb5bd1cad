"""Settings of the scheduler. They are checked without importing torch, before a server loads its model."""

from __future__ import annotations

from dataclasses import dataclass

from graft.settings import Settings, require

LEAST_CHUNK = 32  # prompt tokens that a step prefills at least, however many rows it decodes


@dataclass(frozen=True)
class SchedulerSettings(Settings):
    """Limits on what is decoded at once."""

    max_rows: int = 16  # answers decoded together
    max_waiting: int = 64  # requests in the queue; more are refused
    max_batched_tokens: int | None = None  # tokens per step, prefill and decode; None: `default_batched_tokens`
    # Share of the device's memory that weights, KV cache and CUDA graphs may take; on a CPU, of the machine's memory
    # for the KV cache alone. None: 0.85 of a GPU's, 0.25 of a machine's.
    memory: float | None = None
    max_cache_tokens: int | None = None  # limit on the KV cache's size; None: what memory allows
    prefix_cache_tokens: int | None = None  # limit on unused tokens kept for prompts that begin alike; None: no limit

    def __post_init__(self) -> None:
        for name, least in (
            ("max_rows", 1),
            ("max_waiting", 0),
            ("max_batched_tokens", LEAST_CHUNK),
            ("max_cache_tokens", 256),
            ("prefix_cache_tokens", 0),
        ):
            value = getattr(self, name)
            require(value is None or value >= least, f"{name} must be at least {least}, not {value}")
        good = self.memory is None or 0 < self.memory <= 1
        require(good, f"memory must be a share above 0 and at most 1, such as 0.85, not {self.memory}")
