from __future__ import annotations

import random

import pytest

from zenlaunch.cpuset import EMPTY, MAX_ID, CpuSet, union


@pytest.mark.parametrize(
    ("text", "ids"),
    [
        ("", []),
        (" \n", []),
        ("0", [0]),
        ("0-3,8", [0, 1, 2, 3, 8]),
        ("8, 0-3 ,8\n", [0, 1, 2, 3, 8]),
        ("0-10:2/4", [0, 1, 4, 5, 8, 9]),
        ("0-5:1/2", [0, 2, 4]),
        ("4-4", [4]),
        (str(MAX_ID), [MAX_ID]),
    ],
)
def test_parse(text: str, ids: list[int]) -> None:
    assert list(CpuSet.parse(text)) == ids


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("a", "'a' is not a CPU number or range such as 0-3"),
        ("0,,1", "'' is not a CPU number"),
        ("0-", "'0-' is not"),
        ("-1", "'-1' is not"),
        ("0 1", "'0 1' is not"),
        ("0-3:1", "'0-3:1' is not"),
        ("٣", "'٣' is not"),
        ("0x3", "'0x3' is not"),
        ("3-0", "range '3-0' ends before it begins"),
        (f"0-{MAX_ID + 1}", "is outside 0-65535"),
        ("65536", "is outside 0-65535"),
        ("9" * 5000, "9\\.\\.\\.' is not"),
        ("0-3:0/2", "0 < used <= group"),
        ("0-3:3/2", "0 < used <= group"),
        ("0-3:1/" + "9" * 5000, "is not"),
    ],
)
def test_parse_refuses(text: str, message: str) -> None:
    with pytest.raises(ValueError, match="(?s)" + message.replace("(", r"\(")):
        CpuSet.parse(text)


@pytest.mark.parametrize(
    ("text", "ids"),
    [
        ("0", []),
        ("f", [0, 1, 2, 3]),
        ("0xF0", [4, 5, 6, 7]),
        ("1,00000001", [0, 32]),
        ("00000000,00000000,80000000\n", [31]),
        ("0x1,00000000", [32]),
        ("100000000", [32]),
    ],
)
def test_parse_mask(text: str, ids: list[int]) -> None:
    assert list(CpuSet.parse_mask(text)) == ids


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "is not a hex CPU mask"),
        ("g", "is not a hex CPU mask"),
        ("1,,1", "is not a hex CPU mask"),
        ("1,100000000", "longer than one 32-bit word"),
        ("f" * 20_000, "ids outside"),
    ],
)
def test_parse_mask_refuses(text: str, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        CpuSet.parse_mask(text)


def test_printing() -> None:
    assert str(CpuSet([8, 0, 1, 2, 3, 10, 11])) == "0-3,8,10-11"
    assert str(EMPTY) == ""
    assert CpuSet([4, 0, 2]).to_commas() == "0,2,4"
    assert repr(CpuSet([0, 1])) == "CpuSet('0-1')"


def test_algebra() -> None:
    a, b = CpuSet.parse("0-3"), CpuSet.parse("2-5")
    assert a | b == CpuSet.parse("0-5")
    assert a & b == CpuSet.parse("2-3")
    assert a - b == CpuSet.parse("0-1")
    assert CpuSet([2]) <= a
    assert not a <= b
    assert a.isdisjoint(CpuSet([7]))
    assert not a.isdisjoint(b)
    assert union([a, b, CpuSet([9])]) == CpuSet.parse("0-5,9")
    assert union([]) == EMPTY


def test_as_a_value() -> None:
    a = CpuSet.parse("0,63-64")
    assert (len(a), bool(a), bool(EMPTY)) == (3, True, False)
    assert (a.first, a.last) == (0, 64)
    assert (64 in a, 1 in a, -1 in a, "0" in a) == (True, False, False, False)
    assert a == CpuSet([64, 0, 63])
    assert a != "0,63-64"
    assert len({a, CpuSet([0, 63, 64]), EMPTY}) == 2
    assert a.bits == 1 | 1 << 63 | 1 << 64
    assert CpuSet.from_bits(a.bits) == a


def test_refusals() -> None:
    with pytest.raises(AttributeError, match="immutable"):
        EMPTY._bits = 1
    with pytest.raises(ValueError, match="no first id"):
        _ = EMPTY.first
    with pytest.raises(ValueError, match="no last id"):
        _ = EMPTY.last
    for wrong in (-1, MAX_ID + 1):
        with pytest.raises(ValueError, match="outside"):
            CpuSet([wrong])
    for bits in (-1, 1 << (MAX_ID + 1)):
        with pytest.raises(ValueError, match="outside"):
            CpuSet.from_bits(bits)


@pytest.mark.parametrize("seed", range(50))
def test_every_set_survives_printing(seed: int) -> None:
    rng = random.Random(seed)
    ids = rng.sample(range(rng.choice([8, 64, 2048])), k=rng.randint(0, 8))
    run = rng.randint(0, 500)
    made = CpuSet([*ids, *range(run, run + rng.randint(0, 40))])
    assert CpuSet.parse(str(made)) == made
    assert CpuSet.parse(made.to_commas()) == made
    assert CpuSet.parse_mask(hex(made.bits)) == made
    words = [f"{made.bits >> shift & 0xFFFFFFFF:08x}" for shift in range(0, 2560, 32)]
    assert CpuSet.parse_mask(",".join(reversed(words))) == made
    assert list(made) == sorted(set(made))
