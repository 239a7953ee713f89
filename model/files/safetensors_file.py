"""One .safetensors file, memory-mapped. The library's NumPy side has no bfloat16, and this one copies nothing."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
from numpy.typing import NDArray

from ..errors import ModelError
from ..weights import RawTensor

MAX_HEADER_BYTES = 100_000_000  # the format's own limit
DTYPES: dict[str, Any] = {"F32": np.float32, "F16": np.float16, "BF16": ml_dtypes.bfloat16}


class SafetensorsFile:
    """Tensors of one file by name. Layout: u64 header length, JSON header, data; offsets count from the data."""

    def __init__(self, path: Path) -> None:
        """Raises ModelError if the file is not a whole, well-formed safetensors file."""
        self.path = path
        try:
            self._bytes: NDArray[np.uint8] = np.memmap(path, dtype=np.uint8, mode="r").view(np.ndarray)
        except (OSError, ValueError) as error:
            raise ModelError(f"{path}: cannot be read ({error}); fetch the model again") from error
        self._entries, self._start = self._read_header()

    def names(self) -> list[str]:
        return list(self._entries)

    def shape(self, name: str) -> tuple[int, ...]:
        return tuple(self._entries[name]["shape"])

    def raw(self, name: str) -> RawTensor:
        entry = self._entries[name]
        if entry["dtype"] not in DTYPES:
            raise ModelError(
                f"{self.path}: tensor {name} is {entry['dtype']}; only {', '.join(DTYPES)} can be used here: "
                "take an unquantised copy of the model, or a GGUF file"
            )
        begin, end = (self._start + offset for offset in entry["data_offsets"])
        shape = self.shape(name)
        return RawTensor(entry["dtype"], shape, self._bytes[begin:end].view(DTYPES[entry["dtype"]]).reshape(shape))

    def _read_header(self) -> tuple[dict[str, Any], int]:
        size = self._bytes.size
        length = int(self._bytes[:8].view("<u8")[0]) if size >= 8 else 0
        start = 8 + length
        if not 2 <= length <= MAX_HEADER_BYTES or start > size:
            raise ModelError(f"{self.path}: not a safetensors file, or truncated; fetch the model again")
        try:
            entries = json.loads(self._bytes[8:start].tobytes())
            entries.pop("__metadata__", None)
            for name, entry in entries.items():
                self._check_entry(name, entry, size - start)
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            raise ModelError(f"{self.path}: damaged header ({error}); fetch the model again") from error
        return entries, start

    @staticmethod
    def _check_entry(name: str, entry: dict[str, Any], data_bytes: int) -> None:
        begin, end = entry["data_offsets"]
        if not all(isinstance(size, int) and size >= 0 for size in (begin, end, *entry["shape"])):
            raise ValueError(f"tensor {name} has a negative or fractional size")
        if not begin <= end <= data_bytes:
            raise ValueError(f"tensor {name} ends at byte {end} of {data_bytes}")
        dtype = DTYPES.get(entry["dtype"])
        if dtype is not None and math.prod(entry["shape"]) * np.dtype(dtype).itemsize != end - begin:
            raise ValueError(f"tensor {name} has {end - begin} bytes, which do not fit its shape")
