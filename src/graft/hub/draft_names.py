"""Names of drafters, without torch: those made from the target itself, and the packaged heads."""

from collections.abc import Collection
from pathlib import Path

from graft.errors import GraftError
from graft.home import check_no_adapter, is_gguf, is_hub_id, model_folder
from graft.hub.manifest import packaged_name
from graft.hub.registry import PACKAGED_MODELS, suggestion

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


def check_place(draft: str, own: Collection[str] = ()) -> None:
    """Raise a GraftError for a PEFT adapter, and for a name that is neither packaged, nor a folder, nor a hub id.

    own: names of drafters that are made from the target.
    """
    path = Path(draft).expanduser()
    if path.is_dir():
        check_no_adapter(path)
    elif not path.exists() and not is_hub_id(draft) and packaged_head(draft) is None:
        names = [" nor ".join(own)] if own else []
        kinds = ", nor ".join([*names, "packaged", "a local folder", "a hub id (owner/name)"])
        raise GraftError(f"no drafter at {draft!r}: it is neither {kinds}; {suggestion(draft, own)}")


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
