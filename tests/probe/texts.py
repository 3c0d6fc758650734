"""Texts in the form of each program, about made-up machines: TEXTS by name."""

from __future__ import annotations

import json

LSCPU_OLD = """\
Architecture:          x86_64
CPU op-mode(s):        32-bit, 64-bit
Byte Order:            Little Endian
CPU(s):                16
On-line CPU(s) list:   0-15
Thread(s) per core:    2
Core(s) per socket:    4
Socket(s):             2
NUMA node(s):          2
Vendor ID:             AuthenticAMD
Model:                 1
Model name:            AMD EPYC 0000 4-Core Processor
L3 cache:              16384K
NUMA node0 CPU(s):     0-3,8-11
NUMA node1 CPU(s):     4-7,12-15
Flags:                 fpu vme de pse tsc msr pae mce cx8 apic sep mtrr avx512f avx512bw
"""

LSCPU_NEW = """\
Architecture:                x86_64
  CPU op-mode(s):            32-bit, 64-bit
  Address sizes:             52 bits physical, 57 bits virtual
  Byte Order:                Little Endian
CPU(s):                      8
  On-line CPU(s) list:       0-7
Vendor ID:                   AuthenticAMD
  BIOS Vendor ID:            Advanced Micro Devices, Inc.
  Model name:                AMD EPYC 0000 8-Core Processor
    BIOS Model name:         another name
    CPU family:              26
    Thread(s) per core:      1
    Core(s) per socket:      8
    Socket(s):               1
    CPU(s) scaling MHz:      59%
    Flags:                   fpu vme de pse tsc msr pae mce cx8 apic sep mtrr avx2
Caches (sum of all):
  L3:                        32 MiB (1 instance)
NUMA:
  NUMA node(s):              2
  NUMA node0 CPU(s):         0-7
  NUMA node1 CPU(s):
"""

LSCPU_OFFLINE = """\
Architecture:         x86_64
CPU(s):               16
On-line CPU(s) list:  0-11
Off-line CPU(s) list: 12-15
Thread(s) per core:   1
Core(s) per socket:   4
Socket(s):            2
NUMA node(s):         2
NUMA node0 CPU(s):    0-3,8-11
NUMA node1 CPU(s):    4-7,12-15
"""

LSCPU_HYBRID = """\
Architecture:             riscv64
CPU(s):                   8
  On-line CPU(s) list:    0-7
Vendor ID:                0x710
  Model name:             the fast one
    Thread(s) per core:   1
    Core(s) per socket:   4
    Socket(s):            1
  Model name:             the slow one
    Thread(s) per core:   1
    Core(s) per socket:   4
    Socket(s):            1
"""

LSCPU_EXTENDED = """\
CPU NODE SOCKET CORE L1d:L1i:L2:L3 ONLINE    MAXMHZ   MINMHZ
  0    0      0    0 0:0:0:0          yes 3800.0000 400.0000
  1    0      0    1 1:1:1:0          yes 3800.0000 400.0000
  2    1      1    2 2:2:2:1          yes 3800.0000 400.0000
  3    1      1    3 3:3:3:1          yes 3800.0000 400.0000
  4    0      0    0 0:0:0:0          yes 3800.0000 400.0000
  5    0      0    1 1:1:1:0          yes 3800.0000 400.0000
  6    1      1    2 2:2:2:1          yes 3800.0000 400.0000
  7    -      -    - -                 no         -        -
"""

LSCPU_PARSE = """\
# The following is the parsable format, which can be fed to other
# programs. Each different item in every column has an unique ID
# starting usually from zero.
# CPU,Core,Socket,Node,,L1d,L1i,L2,L3
0,0,0,0,,0,0,0,0
1,1,0,0,,1,1,1,0
2,2,1,1,,2,2,2,1
3,3,1,1,,3,3,3,1
4,0,0,0,,0,0,0,0
5,1,0,0,,1,1,1,0
6,2,1,1,,2,2,2,1
7,3,1,1,,3,3,3,1
"""

NUMACTL = """\
available: 3 nodes (0-2)
node 0 cpus: 0 1 2 3 8 9 10 11
node 0 size: 64215 MB
node 0 free: 60000 MB
node 1 cpus: 4 5 6 7 12 13
 14 15
node 1 size: 0 MB
node 1 free: 0 MB
node 2 cpus:
node 2 size: 128000 MB
node 2 free: 127000 MB
node distances:
node   0   1   2
  0:  10  32  60
  1:  32  10  50
  2:  255  255  10
"""

NUMACTL_RANGES = """\
available: 2 nodes (0,8)
node 0 cpus: 0-127,256-383
node 0 size: 773727 MB
node 8 cpus: 128-255,384-511
node 8 size: <not available>
"""

COLLECT_ENV = f"""\
Collecting environment information...
PyTorch version: 2.10.0+cpu
Is debug build: False

OS: Ubuntu 24.04 LTS (x86_64)

CPU:
{LSCPU_OLD}
Versions of relevant libraries:
[pip3] numpy==2.2.6
vLLM Version: 0.15.1
CPU: none of this line's business
"""

COLLECT_ENV_SECTIONS = f"""\
==============================
        System Info
==============================
OS                           : Ubuntu 24.04 LTS (x86_64)

==============================
       PyTorch Info
==============================
PyTorch version              : 2.10.0+cpu

==============================
          CPU Info
==============================
{LSCPU_NEW}
==============================
Versions of relevant libraries
==============================
[pip3] numpy==2.2.6
"""


def as_json(text: str, *, nested: bool = False) -> str:
    """Print the fields of a text as `lscpu -J` does; nested as since util-linux 2.37."""
    top: list[dict[str, object]] = []
    for line in text.splitlines():
        name, _, value = line.partition(":")
        field: dict[str, object] = {"field": f"{name.strip()}:", "data": value.strip() or None}
        if nested and line.startswith(" ") and top:
            children = top[-1].setdefault("children", [])
            assert isinstance(children, list)
            children.append(field)
        else:
            top.append(field)
    return json.dumps({"lscpu": top}, indent=3)


def extended_json(text: str) -> str:
    """Print a table as `lscpu -e -J` does."""
    head, *rows = (line.split() for line in text.splitlines())
    cpus = []
    for row in rows:
        cells: dict[str, object] = dict(zip((h.lower() for h in head), row, strict=True))
        cpus.append(
            {
                key: None if value == "-" else value == "yes" if key == "online" else value
                for key, value in cells.items()
            }
        )
    return json.dumps({"cpus": cpus}, indent=3)


TEXTS = {
    "lscpu": LSCPU_OLD,
    "lscpu-new": LSCPU_NEW,
    "lscpu-offline": LSCPU_OFFLINE,
    "lscpu-hybrid": LSCPU_HYBRID,
    "lscpu-J": as_json(LSCPU_OLD),
    "lscpu-J-nested": as_json(LSCPU_NEW, nested=True),
    "lscpu-e": LSCPU_EXTENDED,
    "lscpu-e-J": extended_json(LSCPU_EXTENDED),
    "lscpu-p": LSCPU_PARSE,
    "numactl": NUMACTL,
    "numactl-ranges": NUMACTL_RANGES,
    "collect-env": COLLECT_ENV,
    "collect-env-sections": COLLECT_ENV_SECTIONS,
}
