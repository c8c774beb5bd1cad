"""`graft env`: describe this installation."""

import json
import platform
from importlib.metadata import version
from importlib.util import find_spec
from pathlib import Path
from typing import Annotated, Any

import typer


def env(
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON instead of a table.")] = False,
) -> None:
    """Show versions, devices, stored models, policies and tested architectures, for bug reports.

    [dim]Example:[/] graft env --json
    """
    facts = _facts()
    if as_json:
        print(json.dumps(facts, indent=2))
    else:
        _print_table(facts)


def _facts() -> dict[str, Any]:
    from graft.home import graft_home, model_folder
    from graft.hub.registry import PACKAGED_MODELS
    from graft.model.support import TESTED_ARCHITECTURES
    from graft.spec_decode.policies import POLICIES

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
        "policies": list(POLICIES),
        "architectures": list(TESTED_ARCHITECTURES),
    }


def _devices() -> list[dict[str, Any]]:
    import torch

    from graft.machine import total_memory

    cpu = {"device": "cpu", "name": platform.machine(), "memory_bytes": total_memory()}
    devices = [cpu | {"threads": torch.get_num_threads(), "steps": "eager"}]
    steps = "captured" if find_spec("triton") is not None else "eager: Triton is missing"
    for index in range(torch.cuda.device_count()):
        properties = torch.cuda.get_device_properties(index)
        about = {"device": f"cuda:{index}", "name": properties.name, "memory_bytes": properties.total_memory}
        devices.append(about | {"steps": steps})
    return devices


def _size(folder: Path) -> int:
    return sum(path.stat().st_size for path in folder.rglob("*") if path.is_file())


def _print_table(facts: dict[str, Any]) -> None:
    from rich.console import Console
    from rich.filesize import decimal
    from rich.table import Table

    table = Table.grid(padding=(0, 2))
    for name, number in facts["versions"].items():
        table.add_row(name, number)
    table.add_row("platform", facts["platform"])
    for device in facts["devices"]:
        threads = f", {device['threads']} threads" if "threads" in device else ""
        words = f"{device['name']}, {decimal(device['memory_bytes'])}{threads}, steps {device['steps']}"
        table.add_row(device["device"], words)
    table.add_row("GRAFT_HOME", facts["home"])
    for path, size in facts["stored_bytes"].items():
        table.add_row("", f"{path}, {decimal(size)}")
    for name, present in facts["packaged_models"].items():
        table.add_row("packaged", f"{name}, {'present' if present else f'not fetched yet: graft pull {name}'}")
    table.add_row("policies", ", ".join(facts["policies"]))
    table.add_row("tested on", ", ".join(facts["architectures"]))
    Console(highlight=False).print(table)
