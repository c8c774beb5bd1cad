"""Folders under GRAFT_HOME, where Graft keeps models and profiles."""

import os
from pathlib import Path


def graft_home() -> Path:
    """`GRAFT_HOME` if it is set, else the user's cache folder."""
    if home := os.environ.get("GRAFT_HOME"):
        return Path(home).expanduser().absolute()
    cache = os.environ.get("XDG_CACHE_HOME") or "~/.cache"
    return Path(cache).expanduser() / "graft"


def model_folder(name: str) -> Path:
    """The folder of a packaged model, whether it is there yet or not."""
    return graft_home() / "models" / name
