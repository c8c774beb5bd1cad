"""Places of models: folders under GRAFT_HOME, where Graft keeps models and profiles, and GGUF files."""

import os
from pathlib import Path


def graft_home() -> Path:
    """`GRAFT_HOME` if it is set, otherwise a folder in the user's cache."""
    if home := os.environ.get("GRAFT_HOME"):
        return Path(home).expanduser().absolute()
    cache = os.environ.get("XDG_CACHE_HOME") or "~/.cache"
    return Path(cache).expanduser() / "graft"


def is_gguf(name: str | Path) -> bool:
    """Whether the name is that of a GGUF file, which holds a whole model."""
    path = Path(name).expanduser()
    return path.suffix == ".gguf" and path.is_file()


def model_folder(name: str) -> Path:
    """The folder of a packaged model, which may not exist yet."""
    return graft_home() / "models" / name
