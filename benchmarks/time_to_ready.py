"""How long N instances take to be ready beside one, with a filled compile cache, in one run.

    python benchmarks/time_to_ready.py [--rounds 3] [--instances 2] [--cores 1] MODEL [OPTION...]

Starts `zenlaunch up MODEL` with one instance and with N of the same size by turns, after a start of
N that fills vLLM's cache and is not counted. What follows MODEL goes to `up` (`--python ...`, and
the engine's own after `--`). Prints the median times until all are ready, and their ratio.
"""

from __future__ import annotations

import argparse
import os
import re
import signal
import statistics
import subprocess
import sys
import tempfile


def ready_s(folder: str, instances: int, cores: int, words: list[str]) -> float:
    """Start, wait until all is ready, stop; return what `up` says it took."""
    environ = os.environ | {
        "XDG_RUNTIME_DIR": folder, "XDG_STATE_HOME": folder, "XDG_CACHE_HOME": folder,
    }  # fmt: skip
    split = ["--instances", str(instances), "--cores-per-instance", str(cores)]
    up = subprocess.Popen(
        [sys.executable, "-m", "zenlaunch", "up", *split, *words],
        env=environ, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
    )  # fmt: skip
    seen = []
    try:
        assert up.stdout
        for line in up.stdout:
            seen.append(line)
            found = re.match(r"ready after (\d+\.\d+|\d+) s", line)
            if found:
                return float(found[1])
    finally:
        up.send_signal(signal.SIGINT)
        up.communicate(timeout=300)
    raise SystemExit("".join(seen))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--instances", type=int, default=2)
    parser.add_argument("--cores", type=int, default=1)
    parser.add_argument("words", nargs=argparse.REMAINDER, metavar="MODEL [OPTION...]")
    args = parser.parse_args()
    times: dict[int, list[float]] = {1: [], args.instances: []}
    with tempfile.TemporaryDirectory(prefix="ready-") as folder:
        first = ready_s(folder, args.instances, args.cores, args.words)
        print(f"{args.instances} instances, first start: {first:.0f} s", flush=True)
        for _ in range(args.rounds):
            for count, taken in times.items():
                taken.append(ready_s(folder, count, args.cores, args.words))
                print(f"{count} instance(s): {taken[-1]:.0f} s", flush=True)
    one, all_ = (statistics.median(taken) for taken in times.values())
    print(f"one {one:.0f} s, {args.instances} {all_:.0f} s: {all_ / one:.2f} times as long")


if __name__ == "__main__":
    main()
