"""The `vllm.general_plugins` entry point: with GRAFT_VLLM=1, vLLM's EAGLE proposer becomes Graft's.

vLLM calls `register` in each of its processes, perhaps several times.
"""

from __future__ import annotations

import os
from typing import Any

from graft.integrations.environment import is_on
from graft.integrations.vllm.settings import SWITCH, ChainSettings
from graft.settings import require

VERSIONS = ("0.20", "0.32")  # whose proposers were read; others may have changed what is overridden
METHODS = ("eagle", "eagle3")
_V2_RUNNER = "VLLM_USE_V2_MODEL_RUNNER"


def register() -> None:
    """Puts Graft's proposer where the first model runner looks for EAGLE's."""
    ChainSettings.from_environment(os.environ)  # a misspelt name is an error, whether or not the plugin is on
    if not is_on(SWITCH, os.environ):
        return
    import vllm

    check_version(vllm.__version__)
    require(
        os.environ.setdefault(_V2_RUNNER, "0") == "0",
        f"{SWITCH}=1 needs vLLM's first model runner: unset {_V2_RUNNER}, or set it to 0",
    )
    from vllm.v1.worker import gpu_model_runner

    from graft.integrations.vllm.eagle import GraftEagleProposer

    gpu_model_runner.EagleProposer = GraftEagleProposer


def check_version(version: str) -> None:
    """Raises an error for a vLLM that the plugin was not written for."""
    known = any(version == each or version.startswith(f"{each}.") for each in VERSIONS)
    require(known, f"{SWITCH}=1 works inside vLLM {' and '.join(VERSIONS)}, not {version}: unset it, or change vLLM")


def check_config(config: Any) -> None:
    """Raises an error for a vLLM configuration with which drafts cannot be grafted. config: a VllmConfig."""
    speculative, parallel = config.speculative_config, config.parallel_config
    require(
        not config.scheduler_config.async_scheduling,
        "Graft needs the last step's tokens before it drafts: switch asynchronous scheduling off "
        "(--no-async-scheduling, or async_scheduling=False)",
    )
    require(
        speculative.method in METHODS and not speculative.parallel_drafting,
        f"{SWITCH}=1 grafts onto {' and '.join(METHODS)} heads that draft token by token, not {speculative.method}",
    )
    sizes = [parallel.tensor_parallel_size, parallel.pipeline_parallel_size, parallel.data_parallel_size]
    require(
        sizes == [1, 1, 1],
        f"{SWITCH}=1 works on one GPU: ranks would have to agree on the number of draft passes "
        f"(tensor, pipeline and data parallel sizes are {', '.join(map(str, sizes))})",
    )
