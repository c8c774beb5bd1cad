"""Names of drafters, without torch: those made from the target itself, and the packaged heads."""

from collections.abc import Callable
from pathlib import Path

from graft.errors import GraftError
from graft.folders import folder_of, read_config
from graft.home import check_no_adapter, is_gguf, is_hub_id, model_folder
from graft.hub.manifest import packaged_name
from graft.hub.registry import PACKAGED_MODELS, suggestion
from graft.settings import require

MTP, EARLY_EXIT, NONE = "mtp", "early-exit", "none"  # none: retrieval alone
_HEADS = Path(__file__).parents[1] / "heads"
_DESCRIPTIONS = {NONE: "retrieval only", MTP: "the MTP head in its checkpoint", EARLY_EXIT: "its first layers"}


def description(draft: str, model: str) -> str:
    """A drafter of a model in a few words."""
    if draft == packaged_head_of(model):
        return "the packaged head"
    if (own := draft.partition(":")[0]) in _DESCRIPTIONS:
        return _DESCRIPTIONS[own]
    if draft in PACKAGED_MODELS:
        return "a small model" if is_here(draft) else f"a small model: graft pull {draft}"
    return "a head or a model" if is_here(draft) else "no longer there"


def is_here(draft: str) -> bool:
    """Whether a drafter can be used without fetching it. Hub ids are assumed to be in the cache."""
    if draft in PACKAGED_MODELS:
        return packaged_head(draft) is not None or model_folder(draft).is_dir()
    return draft == NONE or Path(draft).is_dir() or is_gguf(draft) or not Path(draft).is_absolute()


def named_layer(draft: str) -> int | None:
    """The layer of early-exit:LAYER; None if it names none."""
    _, colon, word = draft.partition(":")
    if not colon:
        return None
    try:
        return int(word)
    except ValueError as error:
        raise GraftError(f"--draft {EARLY_EXIT}:LAYER takes a whole number, not {word!r}") from error


def check_exit_layer(layer: int | None, num_layers: int) -> None:
    """Raise a GraftError for a layer that early exit cannot end with. None: it is to be chosen."""
    require(num_layers > 1, "the model has one layer: early exit needs two layers or more")
    require(
        layer is None or 1 <= layer < num_layers,
        f"the exit layer is {layer}, and must be between 1 and {num_layers - 1}: the model has {num_layers} layers",
    )


# Drafters made from the target itself, called NAME or NAME:VARIANT: a check of such a name.
OWN: dict[str, Callable[[str], object]] = {MTP: lambda draft: None, EARLY_EXIT: named_layer}


def name_of(draft: str) -> str:
    """NAME of NAME:VARIANT. For drafters that are not made from the target this is no key of `OWN`."""
    return draft.partition(":")[0]


def check_draft(draft: str) -> None:
    """Raise a GraftError if there is no such drafter, without loading it."""
    if draft in (*PACKAGED_MODELS, *OWN):
        return
    if name_of(draft) in OWN:
        OWN[name_of(draft)](draft)
    elif draft.endswith(".gguf"):
        require(is_gguf(draft), f"no drafter at {draft}: there is no such file")
    else:
        check_head(draft, f"neither {' nor '.join(OWN)}, nor packaged")


def check_head(head: str, what_else: str = "neither packaged") -> None:
    """Raise a GraftError for a head or small model that is not there. what_else: it could be, for the error."""
    path = Path(head).expanduser()
    if packaged_head(head) is not None or is_gguf(head):
        return
    if path.is_dir():
        check_no_adapter(path)
    elif not path.exists() and not is_hub_id(head):
        kinds = f"{what_else}, nor a local folder, nor a hub id (owner/name)"
        raise GraftError(f"no drafter at {head!r}: it is {kinds}; {suggestion(head, OWN)}")
    read_config(folder_of(head, ("config.json",)))


def smaller_models(name: str, num_bytes: int) -> list[str]:
    """Packaged models that are smaller than a model of this many bytes."""
    return [other for other, each in PACKAGED_MODELS.items() if each.converted_bytes < num_bytes and other != name]


def packaged_head(name: str) -> Path | None:
    """The folder of the head for the packaged model of this name, if the package has one."""
    folder = _HEADS / name
    return folder if name in PACKAGED_MODELS and folder.is_dir() else None


def packaged_head_of(model: str) -> str | None:
    """The name of the packaged head for a model: a packaged one, by its name or by the folder that `pull` made."""
    name = model if model in PACKAGED_MODELS else packaged_name(Path(model).expanduser())
    return name if name is not None and packaged_head(name) is not None else None
