"""Model files become sizes: architectures, dtypes, shards, damage."""

from __future__ import annotations

import json
import struct
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


def safetensors(path: Path, tensors: dict[str, tuple[str, list[int]]]) -> None:
    """Write a file whose header is true and whose tensors are not there."""
    header = {
        name: {"dtype": dtype, "shape": shape, "data_offsets": [0, 0]}
        for name, (dtype, shape) in tensors.items()
    }
    header["__metadata__"] = {"format": "pt"}  # type: ignore[assignment]
    raw = json.dumps(header).encode()
    path.write_bytes(struct.pack("<Q", len(raw)) + raw)


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
     struct.pack("<Q", 2) + b"[]", b"version https://git-lfs.github.com/spec/v1\n"],
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
    with pytest.raises(PlanError, match="cannot be read"):
        read_sizes(tmp_path, ())


def test_unknown_dtype_is_not_guessed(tmp_path: Path) -> None:
    sizes = read_sizes(model(tmp_path, LLAMA_8B, "F6_E3M2"), ())
    assert sizes.weights_bytes is None
    assert "F6_E3M2" in sizes.notes[0].text


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
