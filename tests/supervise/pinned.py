"""A small stand-in for an engine's worker: pinned threads and memory, then silence.

`pinned.py MIB CPU...`: one thread for each CPU list ("0" or "0-1"), MIB of touched memory; prints
"core ids=[...]" and "pinned" when it is so.
"""

from __future__ import annotations

import os
import sys
import threading
import time

mib, *places = sys.argv[1:]
memory = bytearray(int(mib) << 20)
for i in range(0, len(memory), 4096):
    memory[i] = 1
ready = threading.Barrier(len(places) + 1)


def cpus(place: str) -> set[int]:
    first, _, last = place.partition("-")
    return set(range(int(first), int(last or first) + 1))


def work(place: str) -> None:
    os.sched_setaffinity(0, cpus(place))
    ready.wait()
    time.sleep(3600)


for place in places:
    threading.Thread(target=work, args=(place,), daemon=True).start()
ready.wait()
print(f"core ids=[{', '.join(places)}]", flush=True)
print("pinned", flush=True)
time.sleep(3600)
