"""Whether work takes time in proportion to its size."""

from collections.abc import Callable

import pytest


def check_linear(seconds: Callable[[int], float], size: int) -> None:
    """Four times the size takes about four times as long; quadratic time would be sixteen times as long.

    Three tries: on a busy machine one may be unlucky. What takes less than a twentieth of a second says nothing.
    """
    ratios = []
    for _ in range(3):
        short, long = seconds(size), seconds(4 * size)
        ratios.append(long / short)
        if long < 0.05 or ratios[-1] < 8:
            return
    pytest.fail(f"a size of {size}, then four times as much: {ratios} times as long")
