"""Where models are: folders under GRAFT_HOME, in which Graft keeps models and profiles, and GGUF files."""

import os
from pathlib import Path


def graft_home() -> Path:
    """`GRAFT_HOME` if it is set, else the user's cache folder."""
    if home := os.environ.get("GRAFT_HOME"):
        return Path(home).expanduser().absolute()
    cache = os.environ.get("XDG_CACHE_HOME") or "~/.cache"
    return Path(cache).expanduser() / "graft"


def is_gguf(name: str | Path) -> bool:
    """Whether it is a GGUF file, which is a whole model."""
    path = Path(name).expanduser()
    return path.suffix == ".gguf" and path.is_file()


def model_folder(name: str) -> Path:
    """The folder of a packaged model, whether it is there yet or not."""
    return graft_home() / "models" / name
