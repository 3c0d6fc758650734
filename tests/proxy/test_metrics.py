"""Joining expositions, histograms, keys and peers: small tables."""

from __future__ import annotations

from pathlib import Path

import pytest
from prometheus_client.parser import text_string_to_metric_families

from zenlaunch.errors import ProxyError
from zenlaunch.proxy.http1 import parse_request_head
from zenlaunch.proxy.metrics import SECONDS, Aggregate, Histogram
from zenlaunch.proxy.trust import KeyRing, Peers, forwarded_fields, load_key, load_keys, parse_keys

ONE = """# HELP a_total A thing.
# TYPE a_total counter
a_total{engine="0"} 1.0
a_total 2.0
# HELP h H.
# TYPE h histogram
h_bucket{le="0.5"} 1
h_bucket{le="+Inf"} 2
h_sum 3
h_count 2
# TYPE g gauge
g{} 7 1700000000000
g{instance="x",text="instance=\\"y\\",} # TYPE"} 8
"""


def test_join_two_instances() -> None:
    joined = Aggregate()
    joined.add("i0", ONE)
    joined.add("i1", ONE + "untyped_one 5\n")
    text = joined.text()
    families = {f.name: f for f in text_string_to_metric_families(text)}
    assert [f.type for f in families.values()] == ["counter", "histogram", "gauge", "unknown"]
    assert text.count("# TYPE a_total") == text.count("# HELP h ") == 1
    for family in families.values():
        assert {s.labels["instance"] for s in family.samples} <= {"i0", "i1"}
    assert len(families["a"].samples) == 4
    assert len(families["h"].samples) == 8
    odd = [s for s in families["g"].samples if "exported_instance" in s.labels]
    assert [s.labels["exported_instance"] for s in odd] == ["x", "x"]
    assert odd[0].labels["text"] == 'instance="y",} # TYPE'


@pytest.mark.parametrize(
    "line",
    [
        "<html>", "foo bar baz", "{}", "x", "x{", "x{a=1} 1", 'x{a="1} 1', 'x{a="1"} one', "1x 1",
        "# HELP ", "# TYPE", "# TYPE x", "# TYPE x nonsense", "# HELP 1x y", "\x00", "x 1 2 3",
        "x 1_000", 'x{a="1""b="2"} 1', "x\u2028 1", "x 0x10", '{a="b"} 1', "x{a=\"\n\"} 1",
    ],
)  # fmt: skip
def test_lines_that_are_no_metrics_spoil_nothing(line: str) -> None:
    joined = Aggregate()
    joined.add("i0", f"# TYPE a gauge\na 1\n{line}\nb 2\n")
    families = list(text_string_to_metric_families(joined.text()))
    assert [s.name for f in families for s in f.samples if s.name in "ab"] == ["a", "b"]
    assert len(families) == 2


@pytest.mark.parametrize(
    "line",
    ["x 1", "x\t1", "x{} 1", 'x{a="b",} 1', 'x{a="b", c="d"} -1.5e+10 123', "x +Inf", "x NaN",
     "x .5", 'x{a="\\"},{\\n\\\\"} 1', "x:y_z 1", 'x{a="\u2028\xe9"} 1', "x -Inf -5"],
)  # fmt: skip
def test_lines_that_are(line: str) -> None:
    (sample,) = next(text_string_to_metric_families(line + "\n")).samples
    joined = Aggregate()
    joined.add("i0", line)
    (again,) = next(text_string_to_metric_families(joined.text())).samples
    assert again.labels == {**sample.labels, "instance": "i0"}
    assert repr(again.value) == repr(sample.value)


def test_a_proxy_behind_a_proxy() -> None:
    joined = Aggregate()
    own = '# TYPE up gauge\nup{instance="i0"} 1\n'
    joined.add(None, own)
    joined.add("u0", own)
    (family,) = text_string_to_metric_families(joined.text())
    assert [s.labels for s in family.samples] == [
        {"instance": "i0"}, {"instance": "u0", "exported_instance": "i0"}]  # fmt: skip


def test_nothing_joins_to_nothing() -> None:
    assert Aggregate().text() == ""


def test_histograms_are_cumulative() -> None:
    histogram = Histogram()
    for value in (0.0, 0.001, 0.0011, 1e9):
        histogram.observe(value)
    buckets = histogram.buckets()
    assert buckets[0] == ("0.001", 2)
    assert buckets[1] == ("0.0025", 3)
    assert buckets[-1] == ("+Inf", 4)
    assert len(buckets) == len(SECONDS) + 1


def test_keys() -> None:
    text = "# c\nalice: k1\n\n k2 , bob:k3\n"
    keys = parse_keys(text, source="f")
    assert keys == (("alice", "k1"), ("key2", "k2"), ("bob", "k3"))
    ring = KeyRing(keys)
    assert [ring.name_of(k) for k in (b"k1", b"k2", b"k3", b"k4", b"")] == [
        "alice", "key2", "bob", None, None]  # fmt: skip
    assert "k1" not in repr(ring)


@pytest.mark.parametrize(
    "text",
    ["alice: my key", "alice smith: k", "alice:", "a b", "a\tb", "\x00", "a\x1bb", "k1, b c", ":"],
)
def test_keys_that_nobody_meant(text: str) -> None:
    with pytest.raises(ProxyError, match=r"^f, line 2: ") as caught:
        parse_keys("ok: fine\n" + text, source="f")
    assert text == ":" or text not in caught.value.message


def test_odd_keys() -> None:
    assert parse_keys("\ufeffa: b\r\n", source="f") == (("a", "b"),)
    ring = KeyRing(parse_keys('schl\xfcssel\n!"\u00a7$%&/()=?:;~+', source="f"))
    assert ring.name_of("schl\xfcssel".encode()) == "key1"
    assert ring.name_of("schl\xfcssel".encode("latin-1")) is None
    assert ring.name_of(b"\xff\x00" * 1000) is None


def test_the_one_key_of_the_engines(tmp_path: Path) -> None:
    file = tmp_path / "key"
    file.write_text(" sk-1\n")
    assert load_key(file) == "sk-1"
    for text in ("", "a b", "a\nb", "a\r\nx-evil: 1", "\xfc"):
        file.write_text(text)
        with pytest.raises(ProxyError, match="does not hold one key"):
            load_key(file)


def test_a_key_file_that_everybody_can_read(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    file = tmp_path / "keys"
    file.write_text("a: b")
    file.chmod(0o640)
    load_keys(file, None)
    assert not caplog.records
    file.chmod(0o644)
    load_keys(file, None)
    assert f"{file} can be read by everybody" in caplog.text


def test_key_files(tmp_path: Path) -> None:
    file = tmp_path / "keys"
    file.write_text("a: b")
    assert len(load_keys(file, "c,d")) == 3
    assert len(load_keys(None, None)) == len(load_keys(None, "")) == 0
    with pytest.raises(ProxyError, match="holds none"):
        load_keys(None, " , ")
    file.write_text("# only a comment\n")
    with pytest.raises(ProxyError, match="holds no API key"):
        load_keys(file, None)
    file.write_bytes(b"\xff\xfe")
    with pytest.raises(ProxyError, match="not text"):
        load_keys(file, None)


@pytest.mark.parametrize(
    ("networks", "peer", "trusted"),
    [
        ((), "127.0.0.1", False),
        (("10.0.0.0/8",), "10.1.2.3", True),
        (("10.0.0.0/8",), "11.0.0.1", False),
        (("::1",), "::1", True),
        (("10.0.0.0/8",), "::ffff:10.1.2.3", True),
        (("10.0.0.0/8",), "::ffff:11.1.2.3", False),
        (("fe80::/10",), "fe80::1%eth0", True),
        (("10.0.0.0/8",), "local", False),
        (("10.0.0.1/8",), "::1", False),
    ],
)
def test_peers(networks: tuple[str, ...], peer: str, trusted: bool) -> None:
    assert Peers(networks).trusts(peer) is trusted


def test_forwarded_host_of_a_trusted_peer() -> None:
    head = parse_request_head(b"GET / HTTP/1.1\r\nHost: inner\r\nX-Forwarded-Host: outer")
    assert b"x-forwarded-host: outer\r\n" in forwarded_fields(head, peer="a", trusted=True)
    assert b"x-forwarded-host: inner\r\n" in forwarded_fields(head, peer="a", trusted=False)
