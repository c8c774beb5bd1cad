"""Optional dependencies: the error for one that is missing."""

from __future__ import annotations

from graft.errors import GraftError


def missing_extra(module: str, extra: str) -> GraftError:
    """The error for a module of an optional group of dependencies.

    It does not name the package: until Graft is published, that name on the package index is not ours.
    """
    return GraftError(f"{module} is missing: run pip install '.[{extra}]' in a clone of Graft's repository")
