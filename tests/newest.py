"""`make test-newest`: style, types and tests with the newest release of every dependency, also beyond our upper bounds.

.venv-newest is made anew each time. torch alone stays at the tested version and comes from an index of builds for CPUs,
as elsewhere it brings gigabytes of CUDA. TORCH=torch takes the newest there; TORCH_INDEX names another index.
"""

from __future__ import annotations

import json
import os
import platform
import re
import subprocess
import sys
import tomllib
from pathlib import Path

ROOT = Path(__file__).parent.parent
FOLDER = ROOT / ".venv-newest"
PIP = [str(FOLDER / "bin/python"), "-m", "pip"]
INSTALL = [*PIP, "install", "--quiet"]
CPU_INDEX = "https://download.pytorch.org/whl/cpu"


def requirements() -> list[str]:
    """What Graft and all its extras need, torch aside, without upper bounds."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    needed = sum(project["optional-dependencies"].values(), project["dependencies"])
    return [re.sub(r",<[\d.]+", "", each) for each in needed if not re.match(r"(graft-decoding|torch)\b", each)]


def tested() -> dict[str, str]:
    """The tested version of each package."""
    lines = (ROOT / "constraints.txt").read_text().splitlines()
    return {_same(name): version for name, _, version in (line.partition("==") for line in lines) if version}


def differences(installed: dict[str, str]) -> list[str]:
    """A line for torch and for each package whose version is not the tested one."""
    known = tested()
    return [
        f"{name:24} {version:16} tested: {known.get(name, 'none')}"
        for name, version in sorted(installed.items())
        if name == "torch" or (name not in ("graft-decoding", "pip", "setuptools") and version != known.get(name))
    ]


def main() -> int:
    torch = os.environ.get("TORCH") or f"torch=={tested()['torch']}"
    index = os.environ.get("TORCH_INDEX") or CPU_INDEX
    print("Setting up .venv-newest; this takes a few minutes", flush=True)
    _run([sys.executable, "-m", "venv", "--clear", str(FOLDER)])
    _run([*INSTALL, "--no-deps", "--index-url", index, torch])
    _run([*INSTALL, f"torch=={_installed()['torch']}", *requirements()])
    _run([*INSTALL, "--no-deps", "-e", str(ROOT)])
    (FOLDER / ".installed").touch()
    paths = [f"BIN={FOLDER / 'bin'}", f"INSTALLED={FOLDER / '.installed'}"]
    # Each is tried: a new complaint about style is not to hide what the tests say.
    command = ["make", "--no-print-directory", "--keep-going", *paths, "lint", "model", "suite"]
    status = subprocess.run(command, cwd=ROOT).returncode
    print(f"\nRan on {platform.machine()} with Python {platform.python_version()}, as in constraints.txt but for:")
    print(*differences(_installed()), sep="\n")
    print("All passed" if status == 0 else "Not all passed: see above")
    return status


def _installed() -> dict[str, str]:
    listed = subprocess.run([*PIP, "list", "--format=json"], capture_output=True, check=True).stdout
    return {_same(each["name"]): each["version"] for each in json.loads(listed)}


def _same(name: str) -> str:
    """One spelling of a package's name."""
    return re.sub(r"[-_.]+", "-", name).lower()


def _run(command: list[str]) -> None:
    status = subprocess.run(command).returncode
    if status:
        sys.exit(status)


if __name__ == "__main__":
    sys.exit(main())
