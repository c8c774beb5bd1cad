"""The compiled parts of the package, built when it is installed; all else about it is in pyproject.toml.

They are C without Python's headers, called through ctypes, so that one build serves every Python of a platform. Where a
machine has no C compiler, one comes from the package index for the time of the build.
"""

import glob
import os
import platform
import shlex
import subprocess
import sys
import sysconfig
import tempfile
from functools import cache
from pathlib import Path

from setuptools import Extension, setup
from setuptools.command.bdist_wheel import bdist_wheel
from setuptools.command.build_ext import build_ext

COMPILER_PACKAGE = "ziglang>=0.13"
IS_X86 = platform.machine().lower() in ("x86_64", "amd64")
# The same on every machine: no product and sum in one step, which only some processors have, and no guessing which.
EXACT = ["-std=c99", "-O2", "-ffp-contract=off"]
# GCC's scheduler moves loads so far ahead that the sums no longer fit the registers.
FAST = ["-O2", "-ffp-contract=fast", "-fno-schedule-insns"]
# Variants for processors with wider vectors.
WIDER = {"avx2": ["-mavx2", "-mfma"], "avx512": ["-mavx512f", "-mfma"]} if IS_X86 else {}


@cache
def own_compiler() -> str | None:
    """The machine's C compiler, as a command, or None where none works. The user's own choice is taken as it is."""
    usual = sysconfig.get_config_var("CC") or "cc"
    return os.environ.get("CC") or next(filter(_works, (usual, "cc", "gcc", "clang")), None)


def _works(command: str) -> bool:
    """Whether a command such as `ccache gcc -pthread` makes a library: a compiler may lack the C library's headers."""
    with tempfile.TemporaryDirectory() as folder:
        source = Path(folder, "try.c")
        source.write_text("#include <stdlib.h>\nvoid *room(void) { return malloc(1); }\n")
        words = [*shlex.split(command), "-fPIC", "-shared", str(source), "-o", str(source.with_suffix(".so"))]
        try:
            return subprocess.run(words, capture_output=True).returncode == 0
        except OSError:
            return False


class BuildLibraries(build_ext):
    """Builds with what there is, each library's objects in a folder of their own: two are of the same source."""

    def build_extension(self, ext: Extension) -> None:
        # For any processor of the kind, and not only the one at hand.
        compiler = own_compiler() or f"{shlex.quote(sys.executable)} -m ziglang cc -mcpu=baseline"
        self.compiler.set_executables(
            compiler=compiler, compiler_so=f"{compiler} -fPIC", linker_so=f"{compiler} -shared"
        )
        shared, self.build_temp = self.build_temp, os.path.join(self.build_temp, ext.name)
        super().build_extension(ext)
        self.build_temp = shared


class PlatformWheel(bdist_wheel):
    """A wheel for every Python of the platform from 3.11 on."""

    def finalize_options(self) -> None:
        self.py_limited_api = "cp311"
        super().finalize_options()


def library(name: str, source: str, flags: list[str]) -> Extension:
    return Extension(
        f"graft.{name}",
        [f"src/graft/{source}"],
        extra_compile_args=flags,
        # Sources that others include: a source distribution has them, and a change of one builds the library anew.
        depends=sorted(glob.glob("src/graft/*/*.c") + glob.glob("src/graft/tree/native/**/*.c", recursive=True)),
        libraries=["m"] if os.name == "posix" else [],
        py_limited_api=True,
    )


setup(
    cmdclass={"build_ext": BuildLibraries, "bdist_wheel": PlatformWheel},
    setup_requires=[] if own_compiler() else [COMPILER_PACKAGE],
    ext_modules=[
        library("tree._round", "tree/round.c", [*EXACT, "-O3"]),  # vectors for the scans
        library("model._cpu_linear", "model/cpu_linear.c", FAST),
        *(library(f"model._cpu_linear_{name}", "model/cpu_linear.c", [*FAST, *flags]) for name, flags in WIDER.items()),
    ],
)
