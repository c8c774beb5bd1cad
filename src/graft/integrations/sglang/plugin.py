"""The entry point `sglang.srt.plugins`: SGLang calls `register` in its launcher and in every scheduler process."""

import os
from typing import Any

from graft.errors import GraftError
from graft.integrations.sglang import release
from graft.integrations.sglang.settings import SGLangSettings, check_server, from_environment


def register() -> None:
    """Replace SGLang's EAGLE workers by Graft's, if `GRAFT_SGLANG=1` is set.

    SGLang would log a plugin's exception and continue without the plugin, so errors end the process instead.
    """
    try:
        settings = from_environment(os.environ)
        if settings is not None:
            _register(settings)
    except GraftError as error:
        raise SystemExit(f"error: {error}") from error
    except Exception as error:
        reason = " ".join(f"{type(error).__name__}: {error}".split())
        raise SystemExit(f"error: Graft's plugin cannot be loaded ({reason}): unset GRAFT_SGLANG") from error


def _register(settings: SGLangSettings) -> None:
    """Everything that can fail comes first: SGLang gets all hooks or none."""
    release.check_signatures(release.current())
    from sglang.srt.plugins.hook_registry import HookRegistry, HookType

    from graft.integrations.sglang import attention, hooks, worker

    def check(_: None, server_args: Any) -> None:
        try:
            check_server(server_args, settings)
        except GraftError as error:
            raise SystemExit(f"error: {error}") from error

    HookRegistry.register("sglang.srt.server_args.ServerArgs.check_server_args", check, HookType.AFTER)
    HookRegistry.register(release.OUTER, worker.GraftWorker, HookType.REPLACE)
    HookRegistry.register(release.DRAFT, worker.GraftDraftWorker, HookType.REPLACE)
    for name, hook in (hooks.HOOKS | attention.HOOKS).items():
        HookRegistry.register(name, hook, HookType.AROUND)
    hooks.rank_by_noise()
