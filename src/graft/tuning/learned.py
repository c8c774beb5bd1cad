"""Learned state, kept from one process to the next: n-gram tables, finished texts and acceptance, in a file per model.

The file holds pieces of the user's texts, so only the user can read it, and it is never used where texts are isolated.
Its size is bounded because tables and finished texts are. If several processes write it, they take turns, and each
merges what it has learned into the file.
"""

from __future__ import annotations

import logging
import os
import warnings
import weakref
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from filelock import FileLock
from torch import Tensor

from graft.errors import GraftError
from graft.files import remove_partial_files
from graft.home import graft_home
from graft.settings import require
from graft.spec_decode.proposers.suffix import MAX_PAST_TOKENS
from graft.tuning.profile import About, Profile, profile_path

if TYPE_CHECKING:
    from graft.engine import Engine
    from graft.spec_decode.policies import Policy

VARIABLE = "GRAFT_KEEP_LEARNED"
_PATIENCE = 5  # seconds that an ending process waits for another one that writes
_TABLES = ("adjacency", "bigram", "trigram")

log = logging.getLogger("graft.learned")


def is_wanted(keep: bool | None) -> bool:
    """Whether to keep learned state: the caller decides, then the environment; the default is yes."""
    if keep is not None:
        return keep
    word = os.environ.get(VARIABLE, "1")
    require(word in ("0", "1"), f"{VARIABLE} must be 0 or 1, not {word!r}")
    return word == "1"


def keep_learned(engine: Engine) -> None:
    """Restore what earlier processes learned about the engine's model, and store what it learns when it ends."""
    about = About.of(engine)
    path = learned_path(about)
    remove_partial_files(path.parent)  # they hold pieces of the user's texts
    state = _read(path, about)
    # A newer profile of the user's own takes precedence.
    tuned = profile_path(about)
    if state is not None and not _is_newer(tuned, path):
        before = engine.policy.state()
        try:
            engine.policy.restore(state)
        except (KeyError, IndexError, RuntimeError, ValueError) as error:
            engine.policy.restore(before)
            _ignore(path, f"{type(error).__name__}: {error}")
    weakref.finalize(engine, _add, engine.policy, about, path)


def _is_newer(one: Path, other: Path) -> bool:
    """Whether both files exist and the first is newer."""
    try:
        return one.stat().st_mtime > other.stat().st_mtime
    except OSError:
        return False


def learned_path(about: About) -> Path:
    # A folder for each user, because users may share a GRAFT_HOME but not learned text.
    return graft_home() / f"learned-{os.geteuid()}" / f"{about.model}-{about.head or 'no-head'}.safetensors"


def _add(policy: Policy, about: About, path: Path) -> None:
    """Merge a policy's state into the file, if it has learned from any text."""
    if not policy.num_texts:
        return
    try:
        write(policy.state(), about, path)
    except Exception as error:  # at the end of a process nobody could handle it
        log.warning("learned state is not stored: %s", str(error).partition("\n")[0] or type(error).__name__)


def write(state: Mapping[str, Tensor], about: About, path: Path) -> None:
    """Merge a state into the file."""
    path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
    with FileLock(path.with_suffix(".lock"), timeout=_PATIENCE, mode=0o600):
        try:
            both = merged(_read(path, about) or {}, state)
        except (KeyError, IndexError, RuntimeError, ValueError):  # the file's parts do not fit together
            both = dict(state)
        remove_partial_files(path.parent)
        Profile(About(about.model, about.head, None, None), both, {}).save(path)


def merged(known: Mapping[str, Tensor], new: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Both states merged: the new rows of tables, the latest texts, and the new acceptance."""
    both = {**known, **new}
    for table in _TABLES:
        if f"{table}/rows" not in known or f"{table}/rows" not in new:
            continue
        rows = torch.cat([known[f"{table}/rows"].cpu(), new[f"{table}/rows"].cpu()])
        last = {row: place for place, row in enumerate(rows.tolist())}
        kept = torch.tensor(list(last.values()), dtype=torch.int64)
        for name in (f"{table}/rows", f"{table}/entries", f"{table}/tags"):
            if name in known and name in new:
                both[name] = torch.cat([known[name].cpu(), new[name].cpu()])[kept]
    if "past/tokens" in known and "past/tokens" in new:
        both |= _texts(dict.fromkeys((*_split(known), *_split(new))))
    return both


def _split(state: Mapping[str, Tensor]) -> list[tuple[int, ...]]:
    parts = state["past/tokens"].split(state["past/lengths"].tolist())
    return [tuple(part.tolist()) for part in parts]


def _texts(texts: dict[tuple[int, ...], None]) -> dict[str, Tensor]:
    """The latest texts, as many as an index holds."""
    kept: list[tuple[int, ...]] = []
    room = MAX_PAST_TOKENS
    for text in reversed(texts):
        room -= len(text)
        if room < 0:
            break
        kept.append(text)
    kept.reverse()
    return {
        "past/tokens": torch.tensor([token for text in kept for token in text], dtype=torch.int32),
        "past/lengths": torch.tensor([len(text) for text in kept], dtype=torch.int64),
    }


def _read(path: Path, about: About) -> dict[str, Tensor] | None:
    """The file's state; None if it is missing, damaged or another user's."""
    try:
        if path.stat().st_uid != os.geteuid():
            raise GraftError("it belongs to another user")
        profile = Profile.read(path)
        require((profile.about.model, profile.about.head) == (about.model, about.head), "it is another model's")
        return profile.state
    except FileNotFoundError:
        return None
    except (OSError, GraftError) as error:
        _ignore(path, str(error))
        return None


def _ignore(path: Path, why: str) -> None:
    warnings.warn(f"earlier learned state is ignored, {path.name}: {why.splitlines()[0]}", stacklevel=4)
