"""Weight files become bytes: which files a folder has, and what their tensors take in the engine.

Owns the index of shards and the headers of safetensors files; reads no tensor. A file that is not
whole is an error: the engine would find out only after it was started. Follows the safetensors
format (8 bytes of length, a JSON header, then data without holes) and its `data_offsets`.
"""

from __future__ import annotations

import struct
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from zenlaunch.errors import PlanError
from zenlaunch.probe.model_json import (
    COPY_AGAIN,
    open_regular,
    parse_object,
    read_object,
    size_of,
)
from zenlaunch.topology import Note, Severity
from zenlaunch.values import shown, unprintable

_BITS = {
    "F64": 64, "F32": 32, "F16": 16, "BF16": 16, "I64": 64, "I32": 32, "I16": 16, "I8": 8, "U8": 8,
    "U16": 16, "U32": 32, "U64": 64, "BOOL": 8, "F8_E4M3": 8, "F8_E5M2": 8, "F8_E8M0": 8, "F4": 4,
}  # fmt: skip
_FLOATS = {"F64", "F32", "F16", "BF16"}
# A header larger than this is damage, not a header (the format's own limit).
_MAX_HEADER = 100_000_000
_MOST_BYTES = 1 << 62
_AGAIN = "copy or download it again (an interrupted download, or a Git LFS pointer?)"


def weight_files(folder: Path, notes: list[Note]) -> list[Path]:
    """Return the files that the engine will load, all there and regular; [] with a note.

    Raises PlanError for an index that cannot be read and for what is no regular file.
    """
    index = folder / "model.safetensors.index.json"
    if index.is_file():
        names = _shards(index)
        missing = [name for name in names if not (folder / name).exists()]
        if missing:
            notes.append(unknown(f"{folder} lacks {len(missing)} of {len(names)} weight files"))
            return []
        if not names:
            notes.append(unknown(f"{index} names no weight file"))
        return _regular([folder / name for name in names])
    files = sorted(folder.glob("*.safetensors"))
    # Some repositories carry the weights twice; vLLM reads the sharded set.
    plain = [f for f in files if not f.name.startswith("consolidated")]
    files = plain or files
    if not files:
        files = sorted([*folder.glob("*.bin"), *folder.glob("*.pt"), *folder.glob("*.gguf")])
        files = [f for f in files if f.name not in ("training_args.bin", "optimizer.bin")]
    if not files:
        notes.append(unknown(f"{folder} has no weight files"))
    return _regular(files)


def _regular(files: list[Path]) -> list[Path]:
    for file in files:
        size_of(file)
    return files


def _shards(index: Path) -> list[str]:
    """Return the file names of an index, each once."""
    _, whole = read_object(index)
    listed = whole.get("weight_map")
    if not isinstance(listed, dict):
        raise PlanError(f"{index}: weight_map is not an object", hint=COPY_AGAIN)
    for tensor, name in listed.items():
        if not isinstance(name, str) or not _is_file_name(name):
            raise PlanError(
                f"{index}: weight_map gives {shown(tensor)} the file {shown(name)}, which is not "
                "the name of a file in its folder",
                hint=COPY_AGAIN,
            )
    return sorted(set(listed.values()))


def _is_file_name(name: str) -> bool:
    if name in ("", ".", "..") or "/" in name or "\\" in name or unprintable(name):
        return False
    return len(name.encode()) <= 255


def weights_bytes(files: Sequence[Path], dtype: str, notes: list[Note]) -> int | None:
    """Return the bytes of all weights as an engine of this dtype holds them; None with a note."""
    if files[0].suffix != ".safetensors":
        notes.append(
            Note(
                code="weights-from-file-size",
                severity=Severity.INFO,
                text=f"weights are taken as the size of the {files[0].suffix} files.",
            )
        )
        total = sum(size_of(f) for f in files)
    else:
        float_bits = 32 if dtype == "float32" else 16
        bits = 0
        for file in files:
            found = _bits_in(file, float_bits)
            if isinstance(found, Note):
                notes.append(found)
                return None
            bits += found
        total = bits // 8
    if total == 0:
        notes.append(unknown(f"the weight files of {files[0].parent} are empty"))
    return total or None


def _bits_in(file: Path, float_bits: int) -> int | Note:
    """Return the bits of a file's weights in the engine, or the note that says why not."""
    header, room = _header(file)
    total = end = held = 0
    strange: str | None = None
    for name, tensor in header.items():
        if name == "__metadata__":
            continue
        stored, count, first, last = _tensor(file, name, tensor)
        known = _BITS.get(stored)
        if known is None:
            strange = strange or stored
        elif count * known != (last - first) * 8:
            raise _broken(
                file,
                f"tensor {shown(name)} of {count} x {stored} is not the {last - first} bytes of "
                f"its data_offsets, {first} to {last}",
            )
        # Unquantized weights are held in the engine's dtype, all others as they are stored.
        total += count * (float_bits if stored in _FLOATS else known or 0)
        held += last - first
        end = max(end, last)
    if end != room:
        raise _broken(file, f"its header describes {end} bytes of data, {room} follow it")
    if held != end:
        raise _broken(file, f"its tensors take {held} bytes together, its data has {end}")
    return total if strange is None else unknown(f"{file} holds the dtype {shown(strange)}")


def _tensor(file: Path, name: str, tensor: Any) -> tuple[str, int, int, int]:
    """Return dtype, number of elements, and first and last offset of a tensor."""
    entry = tensor if isinstance(tensor, dict) else {}
    stored, shape, offsets = (entry.get(key) for key in ("dtype", "shape", "data_offsets"))
    if not isinstance(stored, str) or not isinstance(shape, list):
        raise _broken(file, f"tensor {shown(name)} has no shape or dtype")
    if not isinstance(offsets, list) or len(offsets) != 2:
        raise _broken(file, f"tensor {shown(name)} has no data_offsets")
    for what, values in (("shape", shape), ("data_offsets", offsets)):
        for value in values:
            if type(value) is not int or not 0 <= value <= _MOST_BYTES:
                raise _broken(file, f"tensor {shown(name)} has {shown(value)} in its {what}")
    count = 0 if 0 in shape else 1
    for extent in shape:
        count *= extent
        if count > _MOST_BYTES:
            raise _broken(file, f"tensor {shown(name)} has a shape beyond any file")
    first, last = offsets
    if first > last:
        raise _broken(file, f"tensor {shown(name)} ends ({last}) before it begins ({first})")
    return stored, count, first, last


def _header(file: Path) -> tuple[dict[str, Any], int]:
    """Return the header of a safetensors file and the number of bytes behind it."""
    try:
        with open_regular(file) as (f, size):
            prefix = f.read(8)
            length = struct.unpack("<Q", prefix)[0] if len(prefix) == 8 else 0
            if not 2 <= length <= _MAX_HEADER:
                raise _broken(file, f"header length {length}")
            raw = f.read(length)
    except FileNotFoundError as e:
        raise PlanError(f"{file}: {e.strerror}") from None
    if len(raw) < length:
        raise _broken(file, f"its header has {length} bytes, {len(raw)} are there")
    what = "not a whole safetensors file: its header"
    return parse_object(raw, file, what=what, hint=_AGAIN), size - 8 - length


def _broken(file: Path, why: str) -> PlanError:
    return PlanError(f"{file}: not a whole safetensors file: {why}", hint=_AGAIN)


def unknown(what: str) -> Note:
    """Make the note that says why the size of the weights is not known."""
    return Note(
        code="weights-unknown",
        severity=Severity.WARNING,
        text=f"{what}: the size of the weights is not known.",
    )
