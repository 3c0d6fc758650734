"""Model files become sizes: architectures, dtypes, shards, damage."""

from __future__ import annotations

import json
import math
import os
import struct
import time
from pathlib import Path
from typing import Any

import pytest

from zenlaunch.errors import PlanError
from zenlaunch.probe.model import argument, find_model, read_sizes

LLAMA_8B: dict[str, Any] = {
    "architectures": ["LlamaForCausalLM"],
    "hidden_size": 4096,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "max_position_embeddings": 131072,
    "torch_dtype": "bfloat16",
    "rope_scaling": {"rope_type": "llama3", "factor": 8.0},
}


BITS = {"F32": 32, "I32": 32, "BF16": 16, "F16": 16, "I8": 8, "F8_E4M3": 8, "F4": 4, "F6_E3M2": 6}


def header_of(tensors: dict[str, tuple[str, list[int]]]) -> tuple[dict[str, Any], int]:
    """Return a true header and the number of bytes that it describes."""
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    end = 0
    for name, (dtype, shape) in tensors.items():
        begin, end = end, end + math.prod(shape) * BITS[dtype] // 8
        header[name] = {"dtype": dtype, "shape": shape, "data_offsets": [begin, end]}
    return header, end


def write_safetensors(path: Path, header: object, data: int, raw: bytes | None = None) -> None:
    """Write a file with this header and `data` zeros behind it, which take no room."""
    raw = json.dumps(header).encode() if raw is None else raw
    path.write_bytes(struct.pack("<Q", len(raw)) + raw)
    os.truncate(path, 8 + len(raw) + data)


def safetensors(path: Path, tensors: dict[str, tuple[str, list[int]]]) -> None:
    write_safetensors(path, *header_of(tensors))


def model(folder: Path, config: dict[str, Any], dtype: str = "BF16") -> Path:
    (folder / "config.json").write_text(json.dumps(config))
    safetensors(folder / "model.safetensors", {"a": (dtype, [1000, 2]), "b": (dtype, [48])})
    return folder


def test_llama(tmp_path: Path) -> None:
    sizes = read_sizes(model(tmp_path, LLAMA_8B), ())
    assert sizes.weights_bytes == 2048 * 2
    assert sizes.kv_bytes_per_token == 2 * 32 * 8 * 128 * 2 == 131072
    assert sizes.max_model_len == 131072
    assert sizes.dtype == "bfloat16"
    assert sizes.notes == ()


@pytest.mark.parametrize(
    ("stored", "args", "size"),
    [
        ("BF16", (), 2), ("F32", (), 2), ("F16", (), 2),
        ("F32", ("--dtype", "float32"), 4), ("BF16", ("--dtype=float",), 4),
        ("I8", (), 1), ("F8_E4M3", (), 1), ("I32", (), 4),
    ],
)  # fmt: skip
def test_weights_are_counted_as_the_engine_holds_them(
    tmp_path: Path, stored: str, args: tuple[str, ...], size: int
) -> None:
    assert read_sizes(model(tmp_path, LLAMA_8B, stored), args).weights_bytes == 2048 * size


@pytest.mark.parametrize(
    ("change", "args", "per_token"),
    [
        ({"num_key_value_heads": None}, (), 2 * 32 * 32 * 128 * 2),
        ({"head_dim": 64}, (), 2 * 32 * 8 * 64 * 2),
        ({}, ("--kv-cache-dtype", "fp8"), 2 * 32 * 8 * 128),
        ({}, ("--dtype", "float32"), 2 * 32 * 8 * 128 * 4),
        ({"kv_lora_rank": 512, "qk_rope_head_dim": 64}, (), 32 * 576 * 2),
        ({"multi_query": True, "num_key_value_heads": None}, (), 2 * 32 * 128 * 2),
        ({"layer_types": ["linear_attention", "full_attention"]}, (), None),
        ({"num_hidden_layers": None}, (), None),
    ],
)  # fmt: skip
def test_kv_per_token(
    tmp_path: Path, change: dict[str, Any], args: tuple[str, ...], per_token: int | None
) -> None:
    config = {k: v for k, v in {**LLAMA_8B, **change}.items() if v is not None}
    sizes = read_sizes(model(tmp_path, config), args)
    assert sizes.kv_bytes_per_token == per_token
    assert bool(sizes.notes) == (per_token is None)


def test_gpt_j_names(tmp_path: Path) -> None:
    config = {"n_layer": 28, "n_head": 16, "n_embd": 4096, "n_positions": 2048}
    sizes = read_sizes(model(tmp_path, config), ())
    assert sizes.kv_bytes_per_token == 2 * 28 * 16 * 256 * 2
    assert sizes.max_model_len == 2048


def test_text_part_of_a_multimodal_model(tmp_path: Path) -> None:
    sizes = read_sizes(model(tmp_path, {"text_config": LLAMA_8B, "vision_config": {}}), ())
    assert sizes.kv_bytes_per_token == 131072


@pytest.mark.parametrize(
    ("args", "length"),
    [
        (("--max-model-len", "8192"), 8192), (("--max-model-len=8k",), 8000),
        (("--max-model-len", "8K"), 8192), (("--max-model-len", "auto"), 131072),
        (("--max-model-len", "1", "--max-model-len", "2"), 2),
    ],
)  # fmt: skip
def test_max_model_len(tmp_path: Path, args: tuple[str, ...], length: int) -> None:
    assert read_sizes(model(tmp_path, LLAMA_8B), args).max_model_len == length


def test_max_model_len_that_is_none(tmp_path: Path) -> None:
    with pytest.raises(PlanError, match="--max-model-len 'x'"):
        read_sizes(model(tmp_path, LLAMA_8B), ("--max-model-len", "x"))


def test_yarn_stretches(tmp_path: Path) -> None:
    scaling = {"type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32768}
    config = {**LLAMA_8B, "max_position_embeddings": 32768, "rope_scaling": scaling}
    assert read_sizes(model(tmp_path, config), ()).max_model_len == 131072


def test_shards_and_doubles(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(LLAMA_8B))
    for name in ("model-1.safetensors", "model-2.safetensors", "consolidated.safetensors"):
        safetensors(tmp_path / name, {"a": ("BF16", [10])})
    assert read_sizes(tmp_path, ()).weights_bytes == 40
    index = tmp_path / "model.safetensors.index.json"
    index.write_text(json.dumps({"weight_map": {"a": "model-1.safetensors"}}))
    assert read_sizes(tmp_path, ()).weights_bytes == 20
    index.write_text(json.dumps({"weight_map": {"a": "gone.safetensors"}}))
    sizes = read_sizes(tmp_path, ())
    assert sizes.weights_bytes is None
    assert "lacks 1 of 1 weight files" in sizes.notes[0].text


def test_without_weights_or_config(tmp_path: Path) -> None:
    assert read_sizes(tmp_path, ()).weights_bytes is None
    (tmp_path / "config.json").write_text(json.dumps(LLAMA_8B))
    sizes = read_sizes(tmp_path, ())
    assert sizes.weights_bytes is None
    assert "no weight files" in sizes.notes[0].text
    (tmp_path / "pytorch_model.bin").write_bytes(b"x" * 100)
    assert read_sizes(tmp_path, ()).weights_bytes == 100


@pytest.mark.parametrize(
    "damage",
    [b"", b"1234", struct.pack("<Q", 1 << 60), struct.pack("<Q", 4) + b"nope",
     struct.pack("<Q", 2) + b"[]", struct.pack("<Q", 500) + b"{}", b"version https://git-lfs.github.com/spec/v1\n"],
)  # fmt: skip
def test_damaged_weights(tmp_path: Path, damage: bytes) -> None:
    model(tmp_path, LLAMA_8B)
    (tmp_path / "model.safetensors").write_bytes(damage)
    with pytest.raises(PlanError) as caught:
        read_sizes(tmp_path, ())
    assert "model.safetensors" in caught.value.message


def test_damaged_json(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text("{")
    with pytest.raises(PlanError, match="not JSON"):
        read_sizes(tmp_path, ())
    model(tmp_path, LLAMA_8B)
    (tmp_path / "model.safetensors.index.json").write_text("[]")
    with pytest.raises(PlanError, match="not JSON: it is not an object"):
        read_sizes(tmp_path, ())


def test_unknown_dtype_is_not_guessed(tmp_path: Path) -> None:
    sizes = read_sizes(model(tmp_path, LLAMA_8B, "F6_E3M2"), ())
    assert sizes.weights_bytes is None
    assert "F6_E3M2" in sizes.notes[0].text


def tensor(**change: Any) -> dict[str, Any]:
    return {"w": {"dtype": "BF16", "shape": [10, 10], "data_offsets": [0, 200], **change}}


# name: (header, bytes of data behind it, what the message says)
HEADERS: dict[str, tuple[object, int, str]] = {
    "truncated data": (tensor(), 120, "describes 200 bytes of data, 120 follow"),
    "no data at all": (tensor(), 0, "describes 200 bytes of data, 0 follow"),
    "data that no tensor has": (tensor(), 300, "describes 200 bytes of data, 300 follow"),
    "a hole": (
        {**tensor(), "v": {"dtype": "I8", "shape": [4], "data_offsets": [300, 304]}}, 304,
        "its tensors take 204 bytes together, its data has 304",
    ),
    "twice the same data": ({**tensor(), "v": tensor()["w"]}, 200, "take 400 bytes together"),
    "shape and offsets differ": (tensor(shape=[10, 11]), 200, "110 x BF16 is not the 200 bytes"),
    "offsets back to front": (tensor(data_offsets=[200, 0]), 200, "before it begins"),
    "negative extents": (tensor(shape=[-10, -10]), 200, "has -10 in its shape"),
    "half an extent": (tensor(shape=[1.5, 2]), 200, "has 1.5 in its shape"),
    "an extent that is true": (tensor(shape=[True, 100]), 200, "has True in its shape"),
    "text as extent": (tensor(shape=["ab"]), 200, "has 'ab' in its shape"),
    "text times number": (tensor(shape=[10000, "x" * 1000, 10**7]), 200, "'xxx"),
    "a list as extent": (tensor(shape=[[1]]), 200, "has a list in its shape"),
    "NaN": (tensor(shape=[math.nan]), 200, "has nan in its shape"),
    "infinity": (tensor(shape=[math.inf]), 200, "has inf in its shape"),
    "huge extent": (tensor(shape=[10**400]), 200, "a number of about 401 digits in its shape"),
    "huge product": (tensor(shape=[1 << 61, 1 << 61]), 200, "a shape beyond any file"),
    "negative offset": (tensor(data_offsets=[-200, 0]), 200, "has -200 in its data_offsets"),
    "one offset": (tensor(data_offsets=[0]), 200, "has no data_offsets"),
    "no offsets": (tensor(data_offsets=None), 200, "has no data_offsets"),
    "shape that is text": (tensor(shape="ab"), 200, "has no shape or dtype"),
    "no shape": (tensor(shape=None), 200, "has no shape or dtype"),
    "dtype in a list": (tensor(dtype=["x"]), 200, "has no shape or dtype"),
    "tensor that is a list": ({"w": [1]}, 0, "has no shape or dtype"),
    "long and odd name": ({"\x1b" * 5000: 1}, 0, "tensor '"),
}  # fmt: skip


@pytest.mark.parametrize("name", HEADERS)
def test_headers_that_cannot_be_true(tmp_path: Path, name: str) -> None:
    header, data, message = HEADERS[name]
    model(tmp_path, LLAMA_8B)
    write_safetensors(tmp_path / "model.safetensors", header, data)
    refused(tmp_path, "model.safetensors: not a whole safetensors file", message)


def refused(folder: Path, *parts: str, args: tuple[str, ...] = ()) -> None:
    """Expect a short PlanError on lines that a terminal can show, with all these parts."""
    with pytest.raises(PlanError) as caught:
        read_sizes(folder, args)
    message = caught.value.message.replace(str(folder), "")
    assert all(part in message for part in parts), message
    assert len(message) < 500
    assert message.isprintable()


DEEP = b'{"a":' * 100_000


@pytest.mark.parametrize(
    ("raw", "message"),
    [
        (DEEP, "nested too deep"),
        (b"[" * 100_000, "nested too deep"),
        (b'{"w": 1' + b"0" * 5000 + b"}", "digits"),
        (b'{"w": 1, "w": 2}', "the key 'w' is given twice"),
        (b"\xff{}", "not UTF-8"),
    ],
)
def test_no_json_is_a_traceback(tmp_path: Path, raw: bytes, message: str) -> None:
    index = tmp_path / "model.safetensors.index.json"
    model(tmp_path, LLAMA_8B)
    write_safetensors(tmp_path / "model.safetensors", None, 0, raw=raw)
    refused(tmp_path, "model.safetensors: ", message)
    index.write_bytes(raw)
    refused(tmp_path, "index.json: ", message)
    (tmp_path / "config.json").write_bytes(raw)
    refused(tmp_path, "config.json: ", message)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"num_hidden_layers": 10**400}, "num_hidden_layers is a number of about 401 digits"),
        ({"hidden_size": 10**300, "head_dim": 10**200}, "hidden_size is a number"),
        ({"max_position_embeddings": 10**400}, "max_position_embeddings is a number"),
        ({"num_hidden_layers": 10**9, "head_dim": 10**9}, "more than 1 TiB for a token"),
        ({"layer_types": 5}, "layer_types is 5, not a list"),
        ({"layer_types": {"a": 1}}, "layer_types is a mapping, not a list"),
        ({"layers_block_type": "abc"}, "layers_block_type is 'abc', not a list"),
        *(
            ({"rope_scaling": {"rope_type": "linear", "factor": factor}}, "rope_scaling.factor is ")
            for factor in (math.nan, math.inf, -math.inf, 10**400, -2, 0, "4", [4], True, 1e5)
        ),
    ],
)
def test_numbers_of_a_config_have_limits(
    tmp_path: Path, change: dict[str, Any], message: str
) -> None:
    refused(model(tmp_path, {**LLAMA_8B, **change}), "config.json: ", message)


@pytest.mark.parametrize(
    "change",
    [
        {"rope_scaling": [1]}, {"rope_scaling": {"rope_type": ["x"], "factor": 2}},
        {"rope_scaling": {"type": "linear"}}, {"torch_dtype": [[1]]}, {"text_config": [1]},
        {"layer_types": None}, {"layer_types": ["full_attention", 5, [[]]]},
        {"model_max_length": int(1e30)},
    ],
)  # fmt: skip
def test_what_a_config_may_hold_all_the_same(tmp_path: Path, change: dict[str, Any]) -> None:
    sizes = read_sizes(model(tmp_path, {**LLAMA_8B, **change}), ())
    assert (sizes.max_model_len, sizes.kv_bytes_per_token) == (131072, 131072)


def test_no_kv_cache_is_0(tmp_path: Path) -> None:
    for change in ({"hidden_size": 1}, {"hidden_size": None}):
        sizes = read_sizes(model(tmp_path, {**LLAMA_8B, **change}), ())
        assert sizes.kv_bytes_per_token is None
        assert [n.code for n in sizes.notes] == ["kv-size-unknown"]


@pytest.mark.parametrize(
    "text",
    ["infk", "nank", "1e308k", "1e3", "1e3k", "9" * 5000, "-7", "0", "0k", "100G", "1.5", "1_0",
     "８", "\x1b[2J", "k", " 8"],
)  # fmt: skip
def test_max_model_len_that_no_engine_takes(tmp_path: Path, text: str) -> None:
    refused(model(tmp_path, LLAMA_8B), "--max-model-len ", args=("--max-model-len", text))


@pytest.mark.parametrize(
    "name",
    [1, None, [1], "", ".", "..", "../../../../etc/passwd", "/etc/passwd", "a/b", "a\\b", "x\0y",
     "x" * 5000, "\ud800", "\x1b[2J"],
)  # fmt: skip
def test_an_index_names_files_of_its_folder(tmp_path: Path, name: object) -> None:
    model(tmp_path, LLAMA_8B)
    index = tmp_path / "model.safetensors.index.json"
    index.write_text(json.dumps({"weight_map": {"a": "model.safetensors", "b": name}}))
    refused(tmp_path, "index.json: weight_map gives 'b' the file ", "not the name of a file")


@pytest.mark.parametrize("listed", [None, [], ["model.safetensors"], "model.safetensors", 1])
def test_an_index_is_an_object(tmp_path: Path, listed: object) -> None:
    index = model(tmp_path, LLAMA_8B) / "model.safetensors.index.json"
    for whole in ({"weight_map": listed}, {}):
        index.write_text(json.dumps(whole))
        refused(tmp_path, "index.json: weight_map is not an object")


def test_nothing_is_ever_0_without_a_note(tmp_path: Path) -> None:
    model(tmp_path, LLAMA_8B)
    index = tmp_path / "model.safetensors.index.json"
    index.write_text('{"weight_map": {}}')
    sizes = read_sizes(tmp_path, ())
    assert sizes.weights_bytes is None
    assert "names no weight file" in sizes.notes[0].text
    index.unlink()
    for header in ({}, tensor(shape=[0, 10], data_offsets=[0, 0])):
        write_safetensors(tmp_path / "model.safetensors", header, 0)
        sizes = read_sizes(tmp_path, ())
        assert sizes.weights_bytes is None
        assert "are empty" in sizes.notes[0].text
    (tmp_path / "model.safetensors").unlink()
    (tmp_path / "model.gguf").touch()
    sizes = read_sizes(tmp_path, ())
    assert sizes.weights_bytes is None
    assert [n.code for n in sizes.notes] == ["weights-from-file-size", "weights-unknown"]


def test_scalars_and_half_bytes(tmp_path: Path) -> None:
    model(tmp_path, LLAMA_8B)
    safetensors(tmp_path / "model.safetensors", {"scale": ("F32", []), "w": ("F4", [3, 2])})
    assert read_sizes(tmp_path, ()).weights_bytes == 2 + 3


@pytest.mark.parametrize("name", ["a.safetensors", "a.bin", "config.json"])
@pytest.mark.parametrize("kind", ["pipe", "folder", "dangling", "loop"])
def test_only_regular_files_are_read(tmp_path: Path, name: str, kind: str) -> None:
    if name != "config.json":
        (tmp_path / "config.json").write_text(json.dumps(LLAMA_8B))
    path = tmp_path / name
    if kind == "pipe":
        os.mkfifo(path)
    elif kind == "folder":
        path.mkdir()
    else:
        path.symlink_to("nowhere" if kind == "dangling" else name)
    begun = time.monotonic()
    if (name, kind) == ("config.json", "dangling"):
        assert "has no config.json" in read_sizes(tmp_path, ()).notes[0].text
    else:
        refused(tmp_path, f"{name}: ")
    assert time.monotonic() - begun < 5


def test_names_that_are_no_model(tmp_path: Path) -> None:
    environ = {"HF_HOME": str(tmp_path)}
    for name in ("x" * 5000, "org/" + "x" * 5000, "/" + "x/" * 5000, "~nobody-of-this-name/x"):
        with pytest.raises(PlanError) as caught:
            find_model(name, environ)
        assert len(caught.value.message) < 200
    for name in ("org/x\0y", "org/" + "x" * 250, "\ud800"):
        assert find_model(name, environ) is None
    refs = tmp_path / "hub" / "models--org--name" / "refs"
    refs.mkdir(parents=True)
    (tmp_path / "hub" / "models--org--name" / "snapshots").mkdir()
    for commit in (b"", b".", b"../..", b"\xff", b"a\0b"):
        (refs / "main").write_bytes(commit)
        assert find_model("org/name", environ) is None
    (refs / "main").unlink()
    os.mkfifo(refs / "main")
    assert find_model("org/name", environ) is None


def test_hub_cache(tmp_path: Path) -> None:
    snapshot = tmp_path / "hub" / "models--org--name" / "snapshots" / "abc"
    snapshot.mkdir(parents=True)
    environ = {"HF_HOME": str(tmp_path)}
    assert find_model("org/name", environ) is None
    refs = tmp_path / "hub" / "models--org--name" / "refs"
    refs.mkdir()
    (refs / "main").write_text("abc\n")
    assert find_model("org/name", environ) == snapshot
    assert find_model("org/name", {"HF_HUB_CACHE": str(tmp_path / "hub")}) == snapshot
    assert find_model("org/other", environ) is None
    assert find_model("/no/where", environ) is None
    assert find_model(str(tmp_path), environ) == tmp_path


def test_digest_changes_with_the_files(tmp_path: Path) -> None:
    first = read_sizes(model(tmp_path, LLAMA_8B), ()).digest
    assert read_sizes(model(tmp_path, LLAMA_8B), ()).digest == first
    assert read_sizes(model(tmp_path, {**LLAMA_8B, "x": 1}), ()).digest != first


def test_argument() -> None:
    assert argument(("--a", "1", "--b=2", "--a=3"), "--a") == "3"
    assert argument(("--a",), "--a") is None
    assert argument((), "--a") is None
