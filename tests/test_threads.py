"""Threads of torch sleep when they wait, unless the user or the program has said otherwise."""

import os
import subprocess
import sys

import pytest

SHOW = "import os; print(os.environ.get('GOMP_SPINCOUNT'))"


@pytest.mark.parametrize(
    ("program", "variables", "expected"),
    [
        (f"import graft; {SHOW}", {}, "1000"),
        (f"import graft.settings; {SHOW}", {}, "1000"),
        (f"import graft; {SHOW}", {"GOMP_SPINCOUNT": "7"}, "7"),
        (f"import graft; {SHOW}", {"OMP_WAIT_POLICY": "active"}, "None"),
        (f"import sys; sys.modules['torch'] = None; import graft; {SHOW}", {}, "None"),  # it has read them already
    ],
)
def test_waiting_threads_sleep_soon(program, variables, expected):
    others = {name: value for name, value in os.environ.items() if name not in ("GOMP_SPINCOUNT", "OMP_WAIT_POLICY")}
    found = subprocess.run(
        [sys.executable, "-c", program], env=others | variables, capture_output=True, text=True, check=True
    )
    assert found.stdout.strip() == expected
