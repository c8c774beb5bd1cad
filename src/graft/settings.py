"""Settings: the base of every settings object, which is frozen, validated and strict about unknown keys."""

from __future__ import annotations

import difflib
from collections.abc import Collection, Mapping
from dataclasses import fields, replace
from typing import Any, Self

from graft.errors import GraftError


class Settings:
    """Mixin for frozen dataclasses."""

    @classmethod
    def of(cls, options: Mapping[str, Any]) -> Self:
        """Make settings from keywords, and name a misspelt key. `settings`: a base that the other keywords change."""
        options = dict(options)
        given = options.pop("settings", None)
        known = [field.name for field in fields(cls)]  # type: ignore[arg-type]
        for key in options:
            require_known("setting", key, known)
        if given is None:
            return cls(**options)
        require(isinstance(given, cls), f"settings must be {cls.__name__}, not {type(given).__name__}")
        return replace(given, **options)

    def check_least(self, least: int, *names: str) -> None:
        """Raise a GraftError unless each of these settings is at least `least`."""
        for name in names:
            value = getattr(self, name)
            require(value >= least, f"{name} must be at least {least}, not {value}")


def require(condition: bool, message: str) -> None:
    """Raise a GraftError with `message` unless `condition` holds."""
    if not condition:
        raise GraftError(message)


def check_size(name: str, value: Any) -> None:
    """Raise a GraftError unless `value` is a positive whole number."""
    good = isinstance(value, int) and not isinstance(value, bool) and value > 0
    require(good, f"{name} must be a positive whole number, not {value!r}")


def require_known(what: str, name: str, known: Collection[str]) -> None:
    """Raise a GraftError with the closest known name unless `name` is `known`. what: setting, policy ..."""
    if not isinstance(name, str) or name not in known:
        close = difflib.get_close_matches(str(name), known, n=1)
        hint = f"did you mean {close[0]!r}?" if close else f"known: {', '.join(known)}"
        raise GraftError(f"unknown {what} {name!r}: {hint}")
