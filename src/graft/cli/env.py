"""`graft env`: describe this installation."""

import json
import platform
from importlib.metadata import version
from importlib.util import find_spec
from pathlib import Path
from typing import Annotated, Any

import typer

from graft.cli.terminal import print_facts


def env(
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON instead of a table.")] = False,
) -> None:
    """Show versions, devices, stored models, policies and tested architectures, for bug reports.

    [dim]Example:[/] graft env --json
    """
    facts = _facts()
    if as_json:
        print(json.dumps(facts, indent=2))
        return
    devices = {device.pop("device"): device for device in facts.pop("devices")}
    missing = [name for name, is_here in facts["packaged_models"].items() if not is_here]
    how = {"packaged_models": f"graft pull {missing[0]} fetches a missing one"} if missing else {}
    print_facts({**facts.pop("versions"), **devices, **facts}, how)


def _facts() -> dict[str, Any]:
    from graft.home import graft_home, model_folder
    from graft.hub.registry import PACKAGED_MODELS
    from graft.model.architectures import TESTED_ARCHITECTURES
    from graft.spec_decode.policy_settings import POLICY_NAMES

    home = graft_home()
    packages = {"graft": "graft-decoding", "torch": "torch", "transformers": "transformers"}
    return {
        "versions": {
            "python": platform.python_version(),
            **{label: version(distribution) for label, distribution in packages.items()},
        },
        "platform": platform.platform(),
        "devices": _devices(),
        "home": str(home),
        "stored_bytes": {
            str(path.relative_to(home)): _size(path) for path in sorted(home.glob("*/[!.]*")) if path.is_dir()
        },
        "packaged_models": {name: model_folder(name).is_dir() for name in PACKAGED_MODELS},
        "policies": list(POLICY_NAMES),
        "architectures": list(TESTED_ARCHITECTURES),
    }


def _devices() -> list[dict[str, Any]]:
    import torch

    from graft.machine import total_memory
    from graft.model.cpu_linear import library

    cpu = {"device": "cpu", "name": platform.machine(), "memory_bytes": total_memory()}
    steps = "fused in fp32 for models like Llama" if library() is not None else "eager: our C layers were not built"
    devices = [cpu | {"threads": torch.get_num_threads(), "steps": steps}]
    steps = "captured, if the model can be" if find_spec("triton") is not None else "eager: Triton is missing"
    for index in range(torch.cuda.device_count()):
        properties = torch.cuda.get_device_properties(index)
        about = {"device": f"cuda:{index}", "name": properties.name, "memory_bytes": properties.total_memory}
        devices.append(about | {"steps": steps})
    return devices


def _size(folder: Path) -> int:
    return sum(path.stat().st_size for path in folder.rglob("*") if path.is_file())
