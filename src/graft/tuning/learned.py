"""What Graft has learned: one file for each user, model, head and machine. It is found, read, merged and written here.

It holds what `graft tune` found (a policy's state, its costs, speeds of drafters) and the state that later use left.
What wins, where there are several:
- An engine starts from what use left, otherwise from tuning, otherwise from the profile that comes with its head.
- What is written wins, part by part, over what the file held. Rows of tables and texts are united.

What use left are pieces of the user's texts. So only the user can read the file, and an engine reads that part only if
it also adds to it. If several processes write, they take turns.
"""

from __future__ import annotations

import logging
import os
import warnings
import weakref
from collections.abc import Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from filelock import FileLock
from torch import Tensor

from graft.errors import GraftError
from graft.files import remove_partial_files
from graft.home import graft_home, learned_folder
from graft.settings import require
from graft.tuning.profile import About, Profile
from graft.tuning.profile_header import ANEW, OtherFormatError, read_header

if TYPE_CHECKING:
    from graft.engine import Engine
    from graft.spec_decode.policies import Policy

HEADS = Path(__file__).parents[1] / "heads"
VARIABLE = "GRAFT_KEEP_LEARNED"
MAX_TEXT_TOKENS = 200_000  # the latest are kept
_PATIENCE = 5  # seconds that an ending process waits for another one that writes
_TABLES = ("adjacency", "bigram", "trigram")
_WITHOUT_TEXTS = ("calibration/", "paths/")  # parts of a state that hold no tokens
_MISFIT = (KeyError, IndexError, RuntimeError, ValueError)  # of parts of a state that do not belong together

log = logging.getLogger("graft.learned")


# What an engine starts from


def is_kept(keep: bool | None) -> bool:
    """Whether to keep what use teaches: the caller decides, then the environment; the default is yes."""
    if keep is not None:
        return keep
    word = os.environ.get(VARIABLE, "1")
    require(word in ("0", "1"), f"{VARIABLE} must be 0 or 1, not {word!r}")
    return word == "1"


def equip(engine: Engine, profile: str | Path | None, keep: bool = False) -> None:
    """Restore the engine's policy from what was learned before; it continues to learn from there.

    profile: a file, which must belong to this model and head; auto takes the user's own for this machine, or one that
    comes with the package, or none; None takes none.
    keep: with auto, start from what earlier use taught, and add what this engine learns when it ends.
    """
    if profile is None:
        return
    about = About.of(engine)
    if profile != "auto":
        path = Path(profile).expanduser()
        _restore(engine, _fitting(path, about), path)
        return
    if keep:
        _mention_older_files()
        remove_partial_files(learned_folder())  # they hold pieces of the user's texts
    for path, start in _starts(about, keep):
        try:
            _restore(engine, start, path)
            break
        except GraftError as error:
            ignore(error)
    if keep:
        weakref.finalize(engine, _add_use, engine.policy, about)


def _starts(about: About, keep: bool) -> Iterator[tuple[Path, Profile]]:
    """What an engine can start from, the best first."""
    path, known = path_of(about), read(about)
    if known is not None and keep and known.used:
        yield path, replace(known, state=known.used)
    if known is not None and known.state:
        yield path, known
    for packaged in sorted(HEADS.glob("*/profile*.safetensors")):
        try:
            its = read_header(packaged)
            if (its["model"], its["head"]) == (about.model, about.head):
                yield packaged, Profile.read(packaged)
        except OtherFormatError:
            continue
        except GraftError as error:
            ignore(error)


def _fitting(path: Path, about: About) -> Profile:
    """The profile at a path that the user gave; a GraftError if it belongs to another model or head."""
    profile = Profile.read(path)
    its = profile.about
    require(its.model == about.model, f"{path} is the profile of another model: {ANEW} for this one")
    if its.head != about.head:
        words, own = ("no head" if head is None else "another head" for head in (its.head, about.head))
        own = own if about.head is None else "this one"
        raise GraftError(f"{path} was made with {words}, and the engine has {own}: {ANEW} for this head")
    require(bool(profile.state), f"{path} holds nothing that graft tune learned: {ANEW}")
    return profile if its.machine == about.machine else replace(profile, costs={})


def _restore(engine: Engine, profile: Profile, path: Path) -> None:
    policy = engine.policy
    try:
        # Tables hold pieces of texts, so a policy with isolated texts starts without them.
        takes_texts = not policy.isolated
        policy.restore({k: v for k, v in profile.state.items() if takes_texts or k.startswith(_WITHOUT_TEXTS)})
        if profile.costs:
            policy.restore_costs(profile.costs)
    except _MISFIT as error:
        policy.restore({})  # undo a part that was restored before the error
        raise GraftError(f"{path} is an incomplete profile ({type(error).__name__}: {error}): {ANEW}") from error


# The file


def path_of(about: About) -> Path:
    return learned_folder() / f"{about.model}-{about.machine}-{about.head or 'none'}.safetensors"


def files_of_model(about: About) -> list[Path]:
    """The user's files of a model on a machine, with any head."""
    name = path_of(replace(about, head="*")).name
    return [path for path in learned_folder().glob(name) if path.stat().st_uid == os.geteuid()]


def read(about: About) -> Profile | None:
    """What the user's file holds; None if it is missing, of another version, damaged or another user's."""
    path = path_of(about)
    try:
        if path.stat().st_uid != os.geteuid():
            raise GraftError(f"{path} belongs to another user")
        profile = Profile.read(path)
        require(profile.about == about, f"{path} is of another model: {ANEW}")
        return profile
    except (FileNotFoundError, OtherFormatError):
        return None
    except (OSError, GraftError) as error:
        ignore(error)
        return None


def add(new: Profile) -> Path:
    """Merge something new into the user's file, and return its path."""
    path = path_of(new.about)
    path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
    with FileLock(path.with_suffix(".lock"), timeout=_PATIENCE, mode=0o600):
        known = read(new.about)
        remove_partial_files(path.parent)
        (merged(known, new) if known is not None else new).save(path)
    return path


def merged(known: Profile, new: Profile) -> Profile:
    """What a file holds once something new is added."""
    used = known.used
    if new.used:  # of an engine that may have started before the last tuning
        used = united(known.used or known.state, new.used)
    elif known.used and new.state:
        used = united(known.used, new.state)
    speeds = {**known.speeds, **new.speeds}
    return Profile(new.about, new.state or known.state, new.costs or known.costs, used, speeds)


def united(known: Mapping[str, Tensor], new: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Two states of a policy in one: the rows of both tables, the latest texts, and all else from the new one."""
    both = {**known, **new}
    try:
        for table in _TABLES:
            names = [name for part in ("rows", "entries", "tags") if (name := f"{table}/{part}") in known]
            if names and all(name in new for name in names):
                rows = torch.cat([known[names[0]].cpu(), new[names[0]].cpu()])
                last = {row: place for place, row in enumerate(rows.tolist())}
                kept = torch.tensor(list(last.values()), dtype=torch.int64)
                both |= {name: torch.cat([known[name].cpu(), new[name].cpu()])[kept] for name in names}
        if "past/tokens" in known and "past/tokens" in new:
            both |= _texts(dict.fromkeys((*_split(known), *_split(new))))
    except _MISFIT:  # the known parts do not fit together
        return dict(new)
    return both


def _split(state: Mapping[str, Tensor]) -> list[tuple[int, ...]]:
    parts = state["past/tokens"].split(state["past/lengths"].tolist())
    return [tuple(part.tolist()) for part in parts]


def _texts(texts: dict[tuple[int, ...], None]) -> dict[str, Tensor]:
    """The latest texts, as many as are kept."""
    kept: list[tuple[int, ...]] = []
    room = MAX_TEXT_TOKENS
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


def _add_use(policy: Policy, about: About) -> None:
    """Add a policy's state to the file, if it has learned from any text."""
    if not policy.num_texts:
        return
    try:
        add(Profile(about, {}, used=policy.state()))
    except Exception as error:  # at the end of a process nobody could handle it
        log.warning("learned state is not stored: %s", str(error).partition("\n")[0] or type(error).__name__)


def ignore(error: Exception) -> None:
    """Say what is wrong with a file without which Graft works too."""
    warnings.warn(f"{str(error).splitlines()[0]}; it is ignored", stacklevel=1)  # one place: once in a process


def _mention_older_files() -> None:
    """Say that files of earlier versions, which hold texts, are not read."""
    older = [folder for name in ("profiles", "drafters") if (folder := graft_home() / name).is_dir()]
    older += [path for path in learned_folder().glob("*.safetensors") if _is_older(path)]
    if older:
        what = "files of an earlier version are not read: run graft tune again, and delete"
        warnings.warn(f"{what} {', '.join(map(str, older))}", stacklevel=1)


def _is_older(path: Path) -> bool:
    """Whether a file is named only after its model and head."""
    return path.stem.count("-") < 2 or path.stem.endswith("-no-head")
