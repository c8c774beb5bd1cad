"""Graft: lossless acceleration of language-model decoding.

import graft
engine = graft.load("smollm2-135m")
print(engine.generate([{"role": "user", "content": "Write a haiku."}]).text)
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from graft.errors import GraftError
from graft.lazy import lazy_attributes
from graft.version import __version__

if TYPE_CHECKING:
    from graft.engine import Choice, Engine, Generation, Stream
    from graft.integrations.transformers import decode
    from graft.loading import load
    from graft.model.sampling_settings import SamplingSettings
    from graft.request.round_trace import RoundRecord

__all__ = [
    "Choice",
    "Engine",
    "Generation",
    "GraftError",
    "RoundRecord",
    "SamplingSettings",
    "Stream",
    "__version__",
    "decode",
    "load",
]

# Lazy imports: torch and transformers take seconds to import.
_HOMES = {
    "Choice": "graft.engine",
    "Engine": "graft.engine",
    "Generation": "graft.engine",
    "RoundRecord": "graft.request.round_trace",
    "SamplingSettings": "graft.model.sampling_settings",
    "Stream": "graft.engine",
    "decode": "graft.integrations.transformers",
    "load": "graft.loading",
}

__getattr__ = lazy_attributes(__name__, _HOMES)


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
