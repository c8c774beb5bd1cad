"""The entry point `sglang.srt.plugins`: SGLang calls `register` in its launcher and in every scheduler process."""

import os
from typing import Any

from graft.errors import GraftError
from graft.integrations.sglang.settings import SGLangSettings, check_server, check_version, from_environment

_WORKERS = "sglang.srt.speculative.eagle_worker_v2"


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


def _register(settings: SGLangSettings) -> None:
    import sglang

    check_version(sglang.__version__)
    from sglang.srt.plugins.hook_registry import HookRegistry, HookType

    from graft.integrations.sglang import attention, hooks, worker

    def check(_: None, server_args: Any) -> None:
        check_server(server_args, settings)

    HookRegistry.register("sglang.srt.server_args.ServerArgs.check_server_args", check, HookType.AFTER)
    HookRegistry.register(f"{_WORKERS}.EAGLEWorkerV2", worker.GraftWorker, HookType.REPLACE)
    HookRegistry.register(f"{_WORKERS}.EagleDraftWorker", worker.GraftDraftWorker, HookType.REPLACE)
    for name, hook in (hooks.HOOKS | attention.HOOKS).items():
        HookRegistry.register(name, hook, HookType.AROUND)
