"""Time of a round by phase, from the results of `graft bench`.

    graft bench --as-cost-of llama-8b --methods off,dense,paper,graft --data humaneval.jsonl --out results
    python bench/round_anatomy.py results/results.json

Milliseconds of a mean round by phase, and what share all but `draft` and `verify` have. `draft` and `verify` include
waiting for the device; `graft` is retrieval, merging and choosing nodes, `host` what lies between the phases. A phase
that the device works through while the host is in another one counts only as far as the host waits for it.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

PHASES = ("draft", "graft", "verify", "accept", "learn", "host")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("results", type=Path, nargs="+", help="results.json of a bench")
    for path in parser.parse_args().results:
        found = json.loads(path.read_text())
        settings = found["settings"]
        print(f"{settings['model']}, cost of {settings['as_cost_of'] or 'itself'}, {settings['dtype']}; ms a round")
        print(f"{'task':12s}{'method':20s}{''.join(f'{phase:>9s}' for phase in PHASES)}{'round':>9s}{'rest':>8s}")
        for run in [*found["runs"], *found["averages"]]:
            print(line(run))


def line(run: dict[str, Any]) -> str:
    total = run["decode_seconds"] / run["rounds"] * 1e3
    times = {phase: run["seconds_by_phase"].get(phase, 0.0) / run["rounds"] * 1e3 for phase in PHASES}
    rest = 1 - (times["draft"] + times["verify"]) / total
    columns = "".join(f"{times[phase]:9.3f}" for phase in PHASES)
    return f"{run['task']:12s}{run['method'] + ' ' + run['state']:20s}{columns}{total:9.3f}{rest:8.1%}"


if __name__ == "__main__":
    main()
