"""Where models are: GRAFT_HOME, where Graft keeps models and what it has learned; GGUF files; hub ids."""

import os
import re
from pathlib import Path

from graft.errors import ModelError

_HUB_ID = re.compile(r"[\w-][\w.-]*/[\w.-]+")


def graft_home() -> Path:
    """`GRAFT_HOME` if it is set, otherwise a folder in the user's cache."""
    if home := os.environ.get("GRAFT_HOME"):
        return Path(home).expanduser().absolute()
    cache = os.environ.get("XDG_CACHE_HOME") or "~/.cache"
    return Path(cache).expanduser() / "graft"


def learned_folder() -> Path:
    """The folder of what was learned: one for each user, because users may share a GRAFT_HOME but not their texts."""
    return graft_home() / f"learned-{os.geteuid()}"


def is_gguf(name: str | Path) -> bool:
    """Whether the name is that of a GGUF file, which holds a whole model."""
    path = Path(name).expanduser()
    return path.suffix == ".gguf" and path.is_file()


def is_hub_id(name: str) -> bool:
    """Whether the name can be a hub id, owner/name."""
    return _HUB_ID.fullmatch(name) is not None


def model_folder(name: str) -> Path:
    """The folder of a packaged model, which may not exist yet."""
    return graft_home() / "models" / name


def check_no_adapter(folder: Path) -> None:
    """Raise a ModelError for the folder of a PEFT adapter, which holds only changes to another model's weights."""
    if (folder / "adapter_config.json").is_file() and not (folder / "config.json").is_file():
        raise ModelError(
            f"{folder} holds a PEFT adapter, not a whole model: merge it into its base model (merge_and_unload, then "
            "save_pretrained), or load both with peft and pass the object to graft.load"
        )
