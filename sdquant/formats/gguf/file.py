"""GGUF files as containers: names and shapes from the header, tensors mapped from the file."""

from __future__ import annotations

import mmap
import os
import sys
from pathlib import Path
from typing import TYPE_CHECKING

from ...core import gguf_types
from ...errors import BadFileError
from ..tensor_file import TensorFile, refuse_shortened
from .header import GGUFHeader, GGUFTensor, Skipped, read_header
from .kind import classify
from .writer import write_gguf

if TYPE_CHECKING:
    from torch import Tensor

__all__ = ["GGUFFile", "GGUFHeader", "GGUFTensor", "Skipped", "classify", "read_header", "write_gguf"]


class GGUFFile(TensorFile):
    """An open GGUF file.

    Args:
        header: what `read_header` returned for it; read again if there is none or the file has changed since.
    """

    def __init__(self, path: str | os.PathLike[str], header: GGUFHeader | None = None) -> None:
        self.path = Path(path)
        self.header = header if header is not None and header.is_unchanged() else read_header(path)
        self.tensors = self.header.tensors
        self.metadata = self.header.metadata
        self._map: mmap.mmap | None = None
        self._inode = 0

    def get(self, key: str) -> Tensor:
        """Return the tensor: plain numbers in their logical shape, block types as uint8 [blocks, bytes per block].

        Writing to it changes this process's memory only, never the file.
        """
        import torch

        row = self.header.tensors.get(key)
        if row is None:
            raise BadFileError(
                f"Cannot read GGUF file {self.path}",
                f"it has no tensor {key!r}",
                "List its tensors with `sdquant inspect`",
            )
        dtype = getattr(torch, gguf_types.TYPES[row.type].dtype or "uint8")
        count = row.nbytes // dtype.itemsize
        flat = torch.frombuffer(self._mapped(), dtype=dtype, count=count, offset=row.offset)
        kind = gguf_types.TYPES[row.type]
        return flat.view(row.shape) if kind.dtype else flat.view(-1, kind.nbytes)

    def __enter__(self) -> GGUFFile:
        return self

    def close(self) -> None:
        """Release the file; the mapping itself is freed with the last tensor read from it."""
        self._map = None

    def _mapped(self) -> mmap.mmap:
        """Return the private memory map of the file: pages are copied on write, so tensors may be changed safely."""
        if self._map is None:
            with self.path.open("rb") as file:
                self._inode = os.fstat(file.fileno()).st_ino
                self._map = _private_map(file.fileno())
        refuse_shortened(self.path, self.header.size, self._inode)
        return self._map


def _private_map(file: int) -> mmap.mmap:
    if sys.platform == "win32":
        return mmap.mmap(file, 0, access=mmap.ACCESS_COPY)
    # Without NORESERVE Linux refuses to map a file larger than memory this way, although hardly a page gets copied.
    reserve = getattr(mmap, "MAP_NORESERVE", 0x4000) if sys.platform == "linux" else 0
    return mmap.mmap(file, 0, flags=mmap.MAP_PRIVATE | reserve, prot=mmap.PROT_READ | mmap.PROT_WRITE)
