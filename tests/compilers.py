"""C compilers that a machine may have, for tests that build a library with each."""

import subprocess
import sys

COMPILERS = {"cc": ["cc"], "zig": [sys.executable, "-m", "ziglang", "cc"]}


def works(command, folder):
    """Whether the compiler is there, with the headers of a C library."""
    source = folder / "try.c"
    source.write_text("#include <stdlib.h>\nvoid *room(void) { return malloc(1); }\n")
    try:
        words = [*command, "-fPIC", "-shared", str(source), "-o", str(folder / "try.so")]
        return subprocess.run(words, capture_output=True, timeout=100).returncode == 0
    except OSError:
        return False
