"""The header of a GGUF file: what it says about the file's own length and the number of its weights.

It is read before a file is converted, because a conversion takes long and its errors do not name the fault.
"""

from __future__ import annotations

import math
import struct
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO

from gguf import GGML_QUANT_SIZES

from graft.errors import ModelError
from graft.hub.registry import readable_size

_MAGIC = b"GGUF"
_VERSIONS = (2, 3)
_SIZES = {0: 1, 1: 1, 2: 2, 3: 2, 4: 4, 5: 4, 6: 4, 7: 1, 10: 8, 11: 8, 12: 8}  # bytes of a number, by its type
_STRING, _ARRAY, _UINT32 = 8, 9, 4
_ALIGNMENT = 32  # of tensors, unless the file names another
_MAX_DIMENSIONS = 8
# Weights and bytes of a block, by kind of quantization. The size of a kind that is not here is not checked.
_BLOCKS = {int(kind): sizes for kind, sizes in GGML_QUANT_SIZES.items()}


@dataclass(frozen=True)
class GgufHeader:
    """What the header says."""

    num_bytes: int  # up to the end of the last tensor
    num_weights: int


class _DamagedError(Exception):
    """The header makes no sense."""


def checked_header(path: Path) -> GgufHeader:
    """The header of a whole file. A ModelError for a file that is not GGUF, damaged or cut off."""
    size = path.stat().st_size
    with path.open("rb") as file:
        if file.read(4) != _MAGIC:
            raise ModelError(f"{path} is not a GGUF file: it does not begin with the letters GGUF")
        try:
            header = _Reader(file, size).header()
        except _DamagedError as error:
            raise ModelError(f"{path} is damaged or cut off: {error}; copy it again") from error
    if size < header.num_bytes:
        there, whole = readable_size(size), readable_size(header.num_bytes)
        raise ModelError(
            f"{path} is cut off: {there} of {whole} are here ({size:,} of {header.num_bytes:,} bytes); copy it again"
        )
    return header


class _Reader:
    """Reads the header field by field. No length in it is trusted."""

    def __init__(self, file: BinaryIO, size: int) -> None:
        self._file, self._size = file, size

    def header(self) -> GgufHeader:
        version = self._number("<I")
        if version not in _VERSIONS:
            raise _DamagedError(f"its format version is {version}")
        num_tensors, num_fields = self._number("<Q"), self._number("<Q")
        alignment = _ALIGNMENT
        for _ in range(num_fields):
            name, kind = self._string(), self._number("<I")
            if name == b"general.alignment" and kind == _UINT32:
                alignment = self._number("<I")
            else:
                self._skip_value(kind)
        if alignment < 1:
            raise _DamagedError("its tensors have no alignment")
        num_weights = end = 0
        for _ in range(num_tensors):
            self._string()
            num_dimensions = self._number("<I")
            if num_dimensions > _MAX_DIMENSIONS:
                raise _DamagedError(f"a tensor has {num_dimensions:,} dimensions")
            count = math.prod(self._number("<Q") for _ in range(num_dimensions))
            block_weights, block_bytes = _BLOCKS.get(self._number("<I"), (1, 0))
            end = max(end, self._number("<Q") + count // block_weights * block_bytes)
            num_weights += count
        start = -(-self._file.tell() // alignment) * alignment
        return GgufHeader(start + end, num_weights)

    def _skip_value(self, kind: int) -> None:
        if kind == _STRING:
            self._skip(self._number("<Q"))
        elif kind == _ARRAY:
            inner, count = self._number("<I"), self._number("<Q")
            if inner in _SIZES:
                self._skip(count * _SIZES[inner])
                return
            for _ in range(count):
                self._skip_value(inner)
        elif kind in _SIZES:
            self._skip(_SIZES[kind])
        else:
            raise _DamagedError(f"a field has the unknown type {kind}")

    def _string(self) -> bytes:
        return self._read(self._number("<Q"))

    def _number(self, form: str) -> int:
        return int(struct.unpack(form, self._read(struct.calcsize(form)))[0])

    def _read(self, count: int) -> bytes:
        self._check(count)
        return self._file.read(count)

    def _skip(self, count: int) -> None:
        self._check(count)
        self._file.seek(count, 1)

    def _check(self, count: int) -> None:
        if self._file.tell() + count > self._size:
            raise _DamagedError("it ends within its header")
