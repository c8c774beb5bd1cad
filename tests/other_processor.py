"""Runs tests on the processor that this machine does not have: python tests/other_processor.py ROOT TESTS...

As root, on Debian, with the packages debootstrap, qemu-user-static, binfmt-support and gcc-x86-64-linux-gnu (or
gcc-aarch64-linux-gnu). ROOT gets a Debian of the other processor, once, and the packages of constraints.txt. QEMU
emulates the processor. This machine's own Python fetches the packages and compiles them to byte code, which is the same
on both and takes many times as long under emulation; for that it must be of the same version as Debian's.
"""

from __future__ import annotations

import os
import platform
import re
import subprocess
import sys
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path

REPOSITORY = Path(__file__).parents[1]
DEBIAN, PYTHON = "bookworm", "3.11"
X86, ARM = ("x86_64", "amd64"), ("aarch64", "arm64")  # as compilers and Debian call them
MACHINE, ARCHITECTURE = ARM if platform.machine() == "x86_64" else X86
COMPILER = f"{MACHINE}-linux-gnu-gcc"
UNUSED = {"playwright", "mypy", "ruff"}  # a browser and what reads sources need no second processor
GPU_LIBRARY = re.compile(r"lib(cu|nv|nccl)")
GPU_FUNCTION = re.compile(r"_*(cu|nv|nccl)", re.IGNORECASE)
NO_DEVICE = 100  # CUDA's error for a machine without a GPU
# The kernel's list is of this machine's processors. By it torch finds out whether it may use AVX2.
PROCESSOR = """processor\t: {0}
vendor_id\t: GenuineIntel
cpu family\t: 6
model\t\t: 6
model name\t: QEMU
stepping\t: 3
physical id\t: 0
core id\t\t: {0}
apicid\t\t: {0}

"""
MOUNT = """
mount -t proc proc "$0/proc"
mount -t sysfs sys "$0/sys"
if [ -e "$0/cpuinfo" ]; then mount --bind "$0/cpuinfo" "$0/proc/cpuinfo"; fi
exec chroot "$0" "$@"
"""


def main() -> None:
    root, tests = Path(sys.argv[1]).resolve(), sys.argv[2:]
    # Hypothesis reads the sources of all modules, but for those in a folder of this name.
    site, source = root / "opt/site-packages", root / "src/graft"
    if not (root / f"usr/bin/python{PYTHON}").exists():
        run("debootstrap", "--variant=minbase", f"--arch={ARCHITECTURE}", "--include=python3,openssl", DEBIAN, root)
    if not site.exists():
        install_packages(site)
    source.mkdir(parents=True, exist_ok=True)
    files = subprocess.run(["git", "ls-files", "-z"], cwd=REPOSITORY, capture_output=True, check=True).stdout
    packed = ["tar", "-c", "--null", "-T", "-"]
    archive = subprocess.run(packed, cwd=REPOSITORY, input=files, capture_output=True, check=True).stdout
    subprocess.run(["tar", "-x", "-C", source], input=archive, check=True)
    build(source)
    if MACHINE == "x86_64":
        (root / "cpuinfo").write_text("".join(map(PROCESSOR.format, range(os.cpu_count() or 1))))
    enter = ["unshare", "--mount", "sh", "-ec", MOUNT, root]
    command = f'cd /src/graft && exec python{PYTHON} -m pytest -p no:cacheprovider -o timeout=3600 "$@"'
    paths = "/src/graft/src:/src/graft/tests:/opt/site-packages"
    # QEMU's usual processor has no AVX2, without which a kernel of ours and most of torch's are not used. Its SVE gives
    # wrong products in the BLAS of torch's wheel for aarch64.
    emulation = {"QEMU_CPU": "max" if MACHINE == "x86_64" else "max,sve=off", "OMP_NUM_THREADS": "1"}
    settings = {"PYTHONPATH": paths, "HOME": "/root", "PATH": "/usr/sbin:/usr/bin:/sbin:/bin", **emulation}
    done = subprocess.run([*enter, "sh", "-c", command, "sh", *tests], env=settings)
    sys.exit(done.returncode)


def run(*command: object) -> None:
    subprocess.run([str(word) for word in command], check=True)


def install_packages(site: Path) -> None:
    lines = (REPOSITORY / "constraints.txt").read_text(encoding="utf-8").splitlines()
    wanted = [line for line in lines if line[:1] != "#" and line.partition("==")[0] not in UNUSED]
    # Debian 12 has glibc 2.36; a wheel names the oldest that it needs.
    platforms = [f"--platform=manylinux_2_{minor}_{MACHINE}" for minor in range(5, 37)]
    platforms += [f"--platform=manylinux{year}_{MACHINE}" for year in (1, 2010, 2014)]
    options = ["--only-binary=:all:", "--no-deps", "--no-compile", f"--python-version={PYTHON}", "--target", site]
    run(sys.executable, "-m", "pip", "install", "--quiet", *options, *platforms, *wanted, "setuptools")
    facts = next(Path(sys.prefix).glob("lib/python*/site-packages/graft_decoding-*.dist-info"))
    run("cp", "-r", facts, site)
    replace_gpu_libraries(site / "torch/lib")
    # Files for a newer Python cannot be compiled, and need not be.
    subprocess.run([sys.executable, "-m", "compileall", "-qq", "-s", site, "-p", "/opt/site-packages", site])


def replace_gpu_libraries(folder: Path) -> None:
    """Puts libraries that find no device in the place of NVIDIA's, 3 GB without which torch's wheel does not load."""
    own = list(folder.glob("*.so*"))
    there = {file.name for file in own}  # NVIDIA's libraries for its own CPUs among them
    needed = {name for file in own for name in needed_libraries(file) if GPU_LIBRARY.match(name)} - there
    defined = {name for file in own for name, _ in functions_of(file, "--defined-only")}
    functions = defaultdict(set)
    for file in own:
        for name, version in functions_of(file, "--undefined-only"):
            if name not in defined:
                functions[version].add(name)
    for library in needed:
        # Each version belongs to the library it is called after; whatever has none may be in any.
        versions = {
            version: names
            for version, names in functions.items()
            if version and library.lower().startswith(("lib" + version.removeprefix("lib")).lower())
        }
        write_library(folder / library, versions, functions[""])


def needed_libraries(file: Path) -> list[str]:
    said = subprocess.run(["readelf", "-dW", file], capture_output=True, text=True).stdout
    return re.findall(r"NEEDED.*\[(.*)\]", said)


def functions_of(file: Path, which: str) -> Iterator[tuple[str, str]]:
    """Names that a GPU's libraries may have, and versions where there are any, of functions in the file."""
    said = subprocess.run(["nm", "-D", which, file], capture_output=True, text=True).stdout
    for line in said.splitlines():
        name, _, version = line.split()[-1].partition("@")
        if GPU_FUNCTION.match(name) and not version.startswith(("GLIBC", "CXXABI", "GCC")):
            yield name, version


def write_library(file: Path, versions: dict[str, set[str]], plain: set[str]) -> None:
    names = sorted(plain.union(*versions.values()))
    texts = [name for name in names if re.search("String|Name", name)]
    lines = [f'const char *{name}(void) {{ return "no device"; }}' for name in texts]
    lines += [f"int {name}(void) {{ return {NO_DEVICE}; }}" for name in names if name not in texts]
    source, script = file.with_suffix(".c"), file.with_suffix(".map")
    source.write_text("\n".join(lines) + "\n", encoding="utf-8")
    script.write_text("".join(f"{version} {{ {'; '.join(own)}; }};\n" for version, own in versions.items()))
    options = [f"-Wl,--version-script={script}"] if versions else []
    run(COMPILER, "-w", "-fno-builtin", "-shared", "-fPIC", f"-Wl,-soname,{file.name}", *options, source, "-o", file)
    source.unlink()
    script.unlink()


def build(source: Path) -> None:
    """Graft's own libraries, as setup.py builds them on that processor."""
    settings = {**os.environ, "CC": COMPILER, "MACHINE": MACHINE}
    code = "import os, platform, runpy; platform.machine = lambda: os.environ['MACHINE']; runpy.run_path('setup.py')"
    command = [sys.executable, "-c", code, "--quiet", "build_ext", "--inplace", "--force"]
    subprocess.run(command, cwd=source, env=settings, check=True)


if __name__ == "__main__":
    main()
