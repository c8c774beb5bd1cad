"""Settings of plugins from the environment: engines' plugins can add no flags to them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import fields
from typing import Any, TypeVar

from graft.errors import GraftError
from graft.settings import Settings, require_known

S = TypeVar("S", bound=Settings)
_WORDS = {word: yes for yes, words in ((True, "1 true on yes"), (False, "0 false off no")) for word in words.split()}
_WANTED = {"bool": "1 or 0", "int": "a whole number", "float": "a number"}


def variable(switch: str, name: str) -> str:
    """The variable of a setting: `GRAFT_X_BUDGET` of `budget`, where `GRAFT_X` switches the plugin on."""
    return f"{switch}_{name.upper()}"


def is_on(switch: str, environment: Mapping[str, str]) -> bool:
    """Whether a plugin is switched on."""
    return bool(_read(switch, environment.get(switch) or "0", "bool"))


def settings_of(kind: type[S], switch: str, environment: Mapping[str, str]) -> S:
    """The settings that the environment has; a name that begins like one of them and is none is an error."""
    types = {variable(switch, field.name): (field.name, str(field.type)) for field in fields(kind)}  # type: ignore[arg-type]
    found: dict[str, Any] = {}
    for name in sorted(environment):
        if name.startswith(f"{switch}_"):
            require_known("environment variable", name, list(types))
            key, its_type = types[name]
            found[key] = _read(name, environment[name], its_type.partition(" ")[0])
    return kind.of(found)


def _read(name: str, text: str, its_type: str) -> bool | int | float | str:
    if its_type == "str":
        return text
    try:
        if its_type == "bool":
            return _WORDS[text.strip().lower()]
        return int(text) if its_type == "int" else float(text)
    except (KeyError, ValueError):
        raise GraftError(f"{name} must be {_WANTED[its_type]}, not {text!r}") from None
