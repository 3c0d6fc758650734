"""Seeded damage to every tree and text: an answer or a TopologyError, nothing else, and soon.

An answer to a damaged source must still hold together: no contradiction, and the JSON of it reads
back as the same value. ZENLAUNCH_FUZZ_SEED=N tries other damage.
"""

from __future__ import annotations

import json
import os
import random
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path

import pytest
from machines.build import files_of, load, names, write

from probe import corpus
from probe.damage import Damage, damage_text
from probe.texts import TEXTS
from zenlaunch.errors import TopologyError
from zenlaunch.probe.read import read_source
from zenlaunch.probe.sysfs import read_sysfs
from zenlaunch.topology import Topology, contradictions

SEED = int(os.environ.get("ZENLAUNCH_FUZZ_SEED", "20260101"))
LONGEST_S = 20.0  # a hang, not a slow machine
SMALL = [name for name in names() if len(load(name).rows) <= 64]


def attempt(read: Callable[[], Topology], what: str, counts: Counter[str]) -> None:
    """Read once; anything but an answer that holds together or a refusal is a failure."""
    start = time.monotonic()
    try:
        topology = read()
    except TopologyError:
        counts["refusals"] += 1
        return
    except Exception as e:
        pytest.fail(f"{type(e).__name__}: {e}\n  after {what}")
    finally:
        assert time.monotonic() - start < LONGEST_S, f"slow after {what}"
    counts["answers"] += 1
    assert contradictions(topology) == [], what
    data = json.loads(json.dumps(topology.to_dict()))
    assert Topology.from_dict(data).to_dict() == data, what


def damaged_tree(root: Path, files: list[str], name: str, cases: int) -> Counter[str]:
    counts: Counter[str] = Counter()
    rng = random.Random(f"{SEED} {name}")
    damage = Damage(root, files)
    for case in range(cases):
        done = damage.hurt(rng)
        try:
            attempt(lambda: read_sysfs(root, live=False), f"case {case}: {done}", counts)
        finally:
            damage.heal()
    return counts


@pytest.mark.parametrize("name", SMALL)
def test_our_machines(name: str, tree: Path, fuzz: Counter[str]) -> None:
    files = files_of(load(name))
    before = read_sysfs(write(files, tree), live=False)
    fuzz.update(damaged_tree(tree, sorted(files), name, cases=30))
    assert read_sysfs(tree, live=False) == before, "the damage was not undone"


@pytest.mark.corpus
@pytest.mark.skipif(not corpus.present(), reason=corpus.ABSENT)
@pytest.mark.parametrize("entry", corpus.dumps(), ids=lambda e: e.name)
def test_dumps(entry: corpus.Entry, unpacked: Path, fuzz: Counter[str]) -> None:
    root = entry.unpack(unpacked)
    files = sorted(str(p.relative_to(root)) for p in root.rglob("*") if p.is_file())
    cases = 20 if len(files) < 1000 else 8
    fuzz.update(damaged_tree(root, files, entry.name, cases))


def damaged_text(text: str, name: str, cases: int) -> Counter[str]:
    counts: Counter[str] = Counter()
    rng = random.Random(f"{SEED} {name}")
    for case in range(cases):
        hurt = damage_text(rng, text)
        attempt(lambda t=hurt: read_source(t, source=name), f"{name} case {case}", counts)  # type: ignore[misc]
    return counts


@pytest.mark.parametrize("name", sorted(TEXTS))
def test_our_texts(name: str, fuzz: Counter[str]) -> None:
    fuzz.update(damaged_text(TEXTS[name], name, cases=100))


@pytest.mark.parametrize("name", ["epyc-9755-2s-nps2", "hybrid-core-and-atom", "nodes-overlap"])
def test_saved_probes(name: str, tree: Path, fuzz: Counter[str]) -> None:
    topology = read_sysfs(write(files_of(load(name)), tree), live=False)
    text = json.dumps(topology.to_dict(), indent=1)
    fuzz.update(damaged_text(text, name, cases=150))


@pytest.mark.corpus
@pytest.mark.skipif(not corpus.present(), reason=corpus.ABSENT)
def test_texts_of_the_corpus(fuzz: Counter[str]) -> None:
    for entry in corpus.texts():
        fuzz.update(damaged_text(entry.text, entry.file, cases=15))
    for entry in corpus.dumps():
        for path in corpus.lscpu_of(entry):
            fuzz.update(damaged_text(path.read_text(), path.name, cases=5))
