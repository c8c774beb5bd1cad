"""Memory use over many generations. Run with `pytest -m slow`."""

import gc

import psutil
import pytest

from graft import Engine
from tiny import tiny_model


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_memory_is_flat_over_ten_thousand_rounds():
    engine = Engine(tiny_model(num_hidden_layers=1), budget=8)
    process, rounds, sizes = psutil.Process(), 0, []
    while rounds < 10_000:
        options = {"temperature": 1.0, "seed": rounds, "frequency_penalty": 0.1}
        rounds += engine.generate([3 + rounds % 50, 4, 5], max_new_tokens=200, **options).stats.rounds
        gc.collect()
        sizes.append((rounds, process.memory_info().rss / 2**20))
    warm = [size for at, size in sizes if at > 1_000]
    print(f"{rounds} rounds: {warm[0]:.1f} MiB after 1,000, {warm[-1]:.1f} MiB at the end, {max(warm):.1f} at most")
    assert max(warm) - warm[0] < 8
