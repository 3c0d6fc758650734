"""Model files become sizes: config.json and the headers of the safetensors files, nothing else.

Reads a folder or the hub's cache on this machine; never the network, never a tensor. What the
files do not say is None, with a note. Follows the safetensors format (8 bytes of length, then JSON)
and the cache layout of huggingface_hub.
"""

from __future__ import annotations

import hashlib
import json
import struct
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from zenlaunch.errors import PlanError
from zenlaunch.memory import ModelSizes
from zenlaunch.topology import Note, Severity

_BITS = {
    "F64": 64, "F32": 32, "F16": 16, "BF16": 16, "I64": 64, "I32": 32, "I16": 16, "I8": 8, "U8": 8,
    "U16": 16, "U32": 32, "U64": 64, "BOOL": 8, "F8_E4M3": 8, "F8_E5M2": 8, "F8_E8M0": 8, "F4": 4,
}  # fmt: skip
_FLOATS = {"F64", "F32", "F16", "BF16"}
# A header larger than this is damage, not a header (the format's own limit).
_MAX_HEADER = 100_000_000


def find_model(model: str, environ: Mapping[str, str]) -> Path | None:
    """Return the folder with the model's files, or None when it is not on this machine.

    A name such as "org/name" is looked up in the hub's cache (HF_HUB_CACHE, HF_HOME,
    XDG_CACHE_HOME).
    """
    folder = Path(model).expanduser()
    if folder.is_dir():
        return folder
    if model.startswith(("/", "./", "../", "~")) or model.count("/") != 1:
        return None
    home = environ.get("HF_HOME") or str(
        Path(environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "huggingface"
    )
    cache = Path(environ.get("HF_HUB_CACHE") or Path(home) / "hub")
    repo = cache / f"models--{model.replace('/', '--')}"
    try:
        commit = (repo / "refs" / "main").read_text().strip()
    except OSError:
        return None
    snapshot = repo / "snapshots" / commit
    return snapshot if snapshot.is_dir() else None


def read_sizes(folder: Path, engine_args: Sequence[str]) -> ModelSizes:
    """Read a model folder; `engine_args` may change the dtype and the longest sequence.

    Raises PlanError for files that are there and cannot be read.
    """
    config_file = folder / "config.json"
    try:
        raw = config_file.read_bytes()
    except FileNotFoundError:
        return ModelSizes(notes=(_unknown(f"{folder} has no config.json"),))
    except OSError as e:
        raise PlanError(f"{config_file}: {e.strerror}") from None
    try:
        config = json.loads(raw)
        if not isinstance(config, dict):
            raise ValueError("is not an object")
    except ValueError as e:
        raise PlanError(f"{config_file}: not JSON: {e}", hint="copy the file again") from None
    text = config.get("text_config")
    shape: dict[str, Any] = {**config, **text} if isinstance(text, dict) else config
    notes: list[Note] = []
    dtype = _engine_dtype(shape, engine_args)
    files = _weight_files(folder, notes)
    weights = _weights_bytes(folder, files, dtype, notes) if files else None
    return ModelSizes(
        weights_bytes=weights,
        kv_bytes_per_token=_kv_bytes_per_token(shape, dtype, engine_args, notes),
        max_model_len=_max_model_len(shape, engine_args),
        dtype=dtype,
        digest=_digest(raw, files),
        notes=tuple(notes),
    )


def argument(engine_args: Sequence[str], *names: str) -> str | None:
    """Return the value of a flag given as "--flag value" or "--flag=value"; the last one counts."""
    found = None
    for i, arg in enumerate(engine_args):
        flag, sep, value = arg.partition("=")
        if flag in names:
            if sep:
                found = value
            elif i + 1 < len(engine_args):
                found = engine_args[i + 1]
    return found


def _engine_dtype(shape: Mapping[str, Any], engine_args: Sequence[str]) -> str:
    asked = argument(engine_args, "--dtype")
    if asked in ("float", "float32"):
        return "float32"
    if asked in ("half", "float16"):
        return "float16"
    if asked == "bfloat16":
        return "bfloat16"
    stored = str(shape.get("dtype") or shape.get("torch_dtype") or "bfloat16")
    # vLLM's `auto` serves a float32 checkpoint in 16 bits.
    return "float16" if stored == "float16" else "bfloat16"


def _weight_files(folder: Path, notes: list[Note]) -> list[Path]:
    index = folder / "model.safetensors.index.json"
    if index.is_file():
        try:
            shards = sorted(set(json.loads(index.read_bytes())["weight_map"].values()))
        except (ValueError, KeyError, TypeError, AttributeError, OSError) as e:
            raise PlanError(f"{index}: cannot be read: {e}", hint="copy the file again") from None
        missing = [s for s in shards if not (folder / s).is_file()]
        if missing:
            notes.append(_unknown(f"{folder} lacks {len(missing)} of {len(shards)} weight files"))
            return []
        return [folder / s for s in shards]
    files = sorted(folder.glob("*.safetensors"))
    # Some repositories carry the weights twice; vLLM reads the sharded set.
    plain = [f for f in files if not f.name.startswith("consolidated")]
    files = plain or files
    if not files:
        files = sorted([*folder.glob("*.bin"), *folder.glob("*.pt"), *folder.glob("*.gguf")])
        files = [f for f in files if f.name not in ("training_args.bin", "optimizer.bin")]
    if not files:
        notes.append(_unknown(f"{folder} has no weight files"))
    return files


def _weights_bytes(
    folder: Path, files: Sequence[Path], dtype: str, notes: list[Note]
) -> int | None:
    if files[0].suffix != ".safetensors":
        notes.append(
            Note(
                code="weights-from-file-size",
                severity=Severity.INFO,
                text=f"weights are taken as the size of the {files[0].suffix} files.",
            )
        )
        return sum(f.stat().st_size for f in files)
    float_bits = 32 if dtype == "float32" else 16
    total_bits = 0
    for file in files:
        for name, tensor in _header(file).items():
            if name == "__metadata__":
                continue
            try:
                stored, count = tensor["dtype"], 1
                for extent in tensor["shape"]:
                    count *= extent
            except (KeyError, TypeError) as e:
                raise PlanError(f"{file}: tensor {name!r} has no shape or dtype: {e}") from None
            # Unquantized weights are held in the engine's dtype, all others as they are stored.
            bits = float_bits if stored in _FLOATS else _BITS.get(stored)
            if bits is None:
                notes.append(_unknown(f"{file} holds the dtype {stored!r}"))
                return None
            total_bits += count * bits
    return total_bits // 8


def _header(file: Path) -> dict[str, Any]:
    try:
        with file.open("rb") as f:
            prefix = f.read(8)
            length = struct.unpack("<Q", prefix)[0] if len(prefix) == 8 else 0
            if not 2 <= length <= _MAX_HEADER:
                raise ValueError(f"header length {length}")
            header = json.loads(f.read(length))
        if not isinstance(header, dict):
            raise ValueError("header is not an object")
    except OSError as e:
        raise PlanError(f"{file}: {e.strerror}") from None
    except ValueError as e:
        raise PlanError(
            f"{file}: not a whole safetensors file: {e}",
            hint="copy or download it again (an interrupted download, or a Git LFS pointer?)",
        ) from None
    return header


def _kv_bytes_per_token(
    shape: Mapping[str, Any], dtype: str, engine_args: Sequence[str], notes: list[Note]
) -> int | None:
    layers = _number(shape, "num_hidden_layers", "n_layer", "num_layers")
    heads = _number(shape, "num_attention_heads", "n_head")
    hidden = _number(shape, "hidden_size", "n_embd", "d_model")
    other = {"linear_attention", "mamba", "recurrent"} & {
        str(kind) for kind in shape.get("layer_types") or shape.get("layers_block_type") or ()
    }
    if not layers or not heads or other or "mamba_d_state" in shape or "ssm_cfg" in shape:
        notes.append(
            Note(
                code="kv-size-unknown",
                severity=Severity.INFO,
                text="the KV cache per token of this architecture is not known here, so it is not "
                "checked that one sequence fits.",
            )
        )
        return None
    cache_dtype = argument(engine_args, "--kv-cache-dtype") or "auto"
    width = 1 if cache_dtype.startswith("fp8") else 4 if dtype == "float32" else 2
    latent = _number(shape, "kv_lora_rank")
    if latent:  # multi-head latent attention keeps one compressed vector per token and layer
        return layers * (latent + (_number(shape, "qk_rope_head_dim") or 0)) * width
    kv_heads = _number(shape, "num_key_value_heads", "num_kv_heads") or heads
    if shape.get("multi_query") is True:
        kv_heads = 1
    head_dim = _number(shape, "head_dim") or (hidden // heads if hidden else 0)
    return 2 * layers * kv_heads * head_dim * width or None


def _max_model_len(shape: Mapping[str, Any], engine_args: Sequence[str]) -> int | None:
    asked = argument(engine_args, "--max-model-len")
    if asked and asked not in ("auto", "-1"):
        return _human_int(asked)
    limit = _number(
        shape, "max_position_embeddings", "n_positions", "max_seq_len", "seq_length",
        "model_max_length", "max_sequence_length",
    )  # fmt: skip
    scaling = shape.get("rope_scaling") or shape.get("rope_parameters")
    if limit and isinstance(scaling, dict):
        kind = scaling.get("rope_type") or scaling.get("type")
        factor = scaling.get("factor")
        if kind in ("yarn", "linear", "dynamic") and isinstance(factor, int | float):
            base = _number(scaling, "original_max_position_embeddings") if kind == "yarn" else None
            limit = int((base or limit) * factor)
    return limit


def _human_int(text: str) -> int:
    """Read vLLM's "8192", "8k" (thousands) and "8K" (1,024s)."""
    units = {"k": 1000, "K": 1024, "m": 1000**2, "M": 1024**2, "g": 1000**3, "G": 1024**3}
    try:
        return int(float(text[:-1]) * units[text[-1]]) if text[-1:] in units else int(text)
    except ValueError:
        raise PlanError(
            f"--max-model-len {text!r} is not a number of tokens", hint="for example 8192 or 8k"
        ) from None


def _number(shape: Mapping[str, Any], *names: str) -> int | None:
    for name in names:
        value = shape.get(name)
        if isinstance(value, int) and not isinstance(value, bool) and value > 0:
            return value
    return None


def _digest(config: bytes, files: Sequence[Path]) -> str:
    """Return a short digest that changes with the architecture or the set of weight files."""
    h = hashlib.sha256(config)
    for file in files:
        h.update(f"{file.name}:{file.stat().st_size}\n".encode())
    return h.hexdigest()[:16]


def _unknown(what: str) -> Note:
    return Note(
        code="weights-unknown",
        severity=Severity.WARNING,
        text=f"{what}: the size of the weights is not known.",
    )
