"""Model files become sizes: config.json and the headers of the weight files, nothing else.

Reads a folder or the hub's cache on this machine; never the network, never a tensor. What the
files do not say is None, with a note; what cannot be true is an error. Follows the cache layout of
huggingface_hub; the weight files are read by `weights`.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Mapping, Sequence
from pathlib import Path

from zenlaunch.errors import PlanError
from zenlaunch.memory import ModelSizes
from zenlaunch.probe.model_json import MOST, Fields, open_regular, read_object, size_of
from zenlaunch.probe.weights import unknown, weight_files, weights_bytes
from zenlaunch.topology import Note, Severity
from zenlaunch.values import shown

# No model comes near: the largest known takes some 5 MiB.
_MOST_KV_BYTES = 1 << 40
_LENGTH = re.compile(r"(\d{1,12})(\.\d{1,9})?([kKmMgG]?)", re.ASCII)


def find_model(model: str, environ: Mapping[str, str]) -> Path | None:
    """Return the folder with the model's files, or None when it is not on this machine.

    A name such as "org/name" is looked up in the hub's cache (HF_HUB_CACHE, HF_HOME,
    XDG_CACHE_HOME). Raises PlanError for what the filesystem takes as no name at all.
    """
    try:
        folder = Path(model).expanduser()
        if folder.is_dir():
            return folder
        if model.startswith(("/", "./", "../", "~")) or model.count("/") != 1:
            return None
        return _in_cache(model, environ)
    except (OSError, RuntimeError) as e:  # too long, not permitted; "~nobody" without a home
        reason = e.strerror if isinstance(e, OSError) else str(e)
        raise PlanError(
            f"model {shown(model)}: {reason}", hint="give a folder, or a hub name such as org/name"
        ) from None


def _in_cache(model: str, environ: Mapping[str, str]) -> Path | None:
    home = environ.get("HF_HOME") or str(
        Path(environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "huggingface"
    )
    cache = Path(environ.get("HF_HUB_CACHE") or Path(home) / "hub")
    repo = cache / f"models--{model.replace('/', '--')}"
    try:
        with open_regular(repo / "refs" / "main") as (f, _):
            commit = f.read(256).decode(errors="replace").strip()
    except (FileNotFoundError, PlanError, ValueError):  # ValueError: a NUL in the name
        return None
    if not re.fullmatch(r"[0-9A-Za-z]{1,128}", commit):
        return None
    snapshot = repo / "snapshots" / commit
    return snapshot if snapshot.is_dir() else None


def read_sizes(folder: Path, engine_args: Sequence[str]) -> ModelSizes:
    """Read a model folder; `engine_args` may change the dtype and the longest sequence.

    Raises PlanError for files that are there and cannot be read.
    """
    config_file = folder / "config.json"
    try:
        raw, config = read_object(config_file)
    except FileNotFoundError:
        return ModelSizes(notes=(unknown(f"{folder} has no config.json"),))
    text = config.get("text_config")
    shape = Fields({**config, **text} if isinstance(text, dict) else config, config_file)
    notes: list[Note] = []
    dtype = _engine_dtype(shape, engine_args)
    files = weight_files(folder, notes)
    weights = weights_bytes(files, dtype, notes) if files else None
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


def _engine_dtype(shape: Fields, engine_args: Sequence[str]) -> str:
    asked = argument(engine_args, "--dtype")
    if asked in ("float", "float32"):
        return "float32"
    if asked in ("half", "float16"):
        return "float16"
    if asked == "bfloat16":
        return "bfloat16"
    stored = shape.value.get("dtype") or shape.value.get("torch_dtype")
    # vLLM's `auto` serves a float32 checkpoint in 16 bits.
    return "float16" if stored == "float16" else "bfloat16"


def _kv_bytes_per_token(
    shape: Fields, dtype: str, engine_args: Sequence[str], notes: list[Note]
) -> int | None:
    per_token = _known_kv_bytes_per_token(shape, dtype, engine_args)
    if not per_token:
        notes.append(
            Note(
                code="kv-size-unknown",
                severity=Severity.INFO,
                text="the KV cache per token of this architecture is not known here, so it is not "
                "checked that one sequence fits.",
            )
        )
        return None
    if per_token > _MOST_KV_BYTES:
        raise PlanError(
            f"{shape.file}: its layers and heads give a KV cache of more than 1 TiB for a token",
            hint="copy the file again",
        )
    return per_token


def _known_kv_bytes_per_token(shape: Fields, dtype: str, engine_args: Sequence[str]) -> int | None:
    layers = shape.number("num_hidden_layers", "n_layer", "num_layers")
    heads = shape.number("num_attention_heads", "n_head")
    hidden = shape.number("hidden_size", "n_embd", "d_model")
    kinds = {*shape.words("layer_types"), *shape.words("layers_block_type")}
    other = {"linear_attention", "mamba", "recurrent"} & kinds
    if not layers or not heads or other or {"mamba_d_state", "ssm_cfg"} & shape.value.keys():
        return None
    cache_dtype = argument(engine_args, "--kv-cache-dtype") or "auto"
    width = 1 if cache_dtype.startswith("fp8") else 4 if dtype == "float32" else 2
    latent = shape.number("kv_lora_rank")
    if latent:  # multi-head latent attention keeps one compressed vector per token and layer
        return layers * (latent + (shape.number("qk_rope_head_dim") or 0)) * width
    kv_heads = shape.number("num_key_value_heads", "num_kv_heads") or heads
    if shape.value.get("multi_query") is True:
        kv_heads = 1
    head_dim = shape.number("head_dim") or (hidden // heads if hidden else 0)
    return 2 * layers * kv_heads * head_dim * width


def _max_model_len(shape: Fields, engine_args: Sequence[str]) -> int | None:
    asked = argument(engine_args, "--max-model-len")
    if asked and asked not in ("auto", "-1"):
        return _human_int(asked)
    limit = shape.number(
        "max_position_embeddings", "n_positions", "max_seq_len", "seq_length",
        "model_max_length", "max_sequence_length",
    )  # fmt: skip
    key = "rope_scaling" if shape.value.get("rope_scaling") else "rope_parameters"
    scaling = shape.value.get(key)
    if limit and isinstance(scaling, dict):
        rope = Fields(scaling, shape.file, f"{key}.")
        kind = scaling.get("rope_type") or scaling.get("type")
        factor = rope.factor("factor") if kind in ("yarn", "linear", "dynamic") else None
        if factor is not None:
            base = rope.number("original_max_position_embeddings") if kind == "yarn" else None
            limit = int((base or limit) * factor)
            if not 1 <= limit <= MOST:
                raise rope.wrong("factor", f"which makes a longest sequence of {limit} tokens")
    return limit


def _human_int(text: str) -> int:
    """Read vLLM's "8192", "8k" (thousands) and "8K" (1,024s)."""
    units = {"k": 1000, "K": 1024, "m": 1000**2, "M": 1024**2, "g": 1000**3, "G": 1024**3, "": 1}
    match = _LENGTH.fullmatch(text)
    length = 0
    if match is not None and (match[3] or not match[2]):
        unit = units[match[3]]
        length = int(match[1]) * unit + int(float(match[2] or 0) * unit)
    if not 1 <= length <= MOST:
        raise PlanError(
            f"--max-model-len {shown(text)} is not a number of tokens, 1 to {MOST}",
            hint="for example 8192 or 8k",
        )
    return length


def _digest(config: bytes, files: Sequence[Path]) -> str:
    """Return a short digest that changes with the architecture or the set of weight files."""
    h = hashlib.sha256(config)
    for file in files:
        h.update(f"{file.name}:{size_of(file)}\n".encode(errors="surrogateescape"))
    return h.hexdigest()[:16]
