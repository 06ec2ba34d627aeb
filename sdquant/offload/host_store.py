"""Where weights wait while they are not on the compute device: pinned RAM for a GPU, a file for the CPU.

Tensors that move together form a region: one run of bytes, so that fetching is one copy. Weights are constant: what is
put into a store is never written back, a slot that gives up its tensor is pointed at the stored one again.
"""

from __future__ import annotations

import ctypes
import logging
import mmap
import tempfile
import weakref
from abc import ABC, abstractmethod
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

import torch
from torch import Tensor

from ..compat.hardware import ram
from ..errors import BadFileError, SettingsError
from ..utils.buffers import ALIGN
from ..utils.temp_dirs import OwnFolder
from .tensor_refs import is_opaque, tensor_bytes

if TYPE_CHECKING:
    import os
    from collections.abc import Sequence

    from .pinned_memory import Pinning
    from .pinned_staging import Staging

log = logging.getLogger(__name__)
# What errors advise: `load_model` has no argument for it.
ANOTHER_FOLDER = "set TMPDIR in the environment, or give folder= to sdquant.offload.apply"

CHUNK = 1 << 24  # bytes read or written at a time
PINNED_SHARE = 0.5  # of the machine's RAM that a store may pin,
FREE_SHARE = 0.75  # and of what is free just then


@dataclass(frozen=True)
class Span:
    """Where in its region a tensor lies: offset in bytes, and how to see the bytes as the tensor."""

    offset: int
    nbytes: int
    dtype: torch.dtype
    shape: tuple[int, ...]  # of the dense, contiguous order
    order: tuple[int, ...]  # how to permute that back, so that channels_last stays channels_last

    def view(self, flat: Tensor) -> Tensor:
        """The tensor in `flat`, the region's bytes as uint8 [region bytes]."""
        run = flat[self.offset : self.offset + self.nbytes]
        return run.view(self.dtype).view(self.shape).permute(self.order)


class Region(ABC):
    """Tensors that wait together.

    Attributes:
        nbytes: bytes of one copy of the region, alignment included; opaque tensors, which are copied apart, excluded.
        waiting: the stored tensors, one per tensor given, in order; opaque ones whole.
        waits: whether `read` comes back only when the bytes are read.
    """

    waits = True

    def __init__(self, spans: Sequence[Span | None], nbytes: int, waiting: list[Tensor]) -> None:
        self._spans = spans
        self.nbytes = nbytes
        self.waiting = waiting

    @abstractmethod
    def read(self, into: Tensor) -> None:
        """Copy the region's bytes to the start of `into`, uint8 [at least nbytes] on the compute device."""

    def views(self, flat: Tensor) -> list[Tensor]:
        """The tensors in a copy of the region's bytes; opaque ones are copied to the device of `flat`."""
        return [
            tensor.to(flat.device) if span is None else span.view(flat)
            for span, tensor in zip(self._spans, self.waiting, strict=True)
        ]


class Store(ABC):
    """Keeps regions until it is closed."""

    @abstractmethod
    def add(self, tensors: Sequence[Tensor]) -> Region:
        """Store tensors, of any device, as one region."""

    @abstractmethod
    def close(self) -> None:
        """Give everything back. No slot may refer to a stored tensor any more."""


class _RamRegion(Region):
    """`staging`: for memory that is not pinned; None for the driver's ways."""

    def __init__(
        self,
        spans: Sequence[Span | None],
        flat: Tensor,
        waiting: list[Tensor],
        *,
        pinned: bool,
        staging: Staging | None,
    ) -> None:
        super().__init__(spans, flat.numel(), waiting)
        self._flat, self._staging = flat, None if pinned else staging
        self.waits = not pinned

    def read(self, into: Tensor) -> None:
        if self._staging is not None:
            self._staging.copy(self._flat, into[: self.nbytes])
        else:
            into[: self.nbytes].copy_(self._flat, non_blocking=True)


class PinnedStore(Store):
    """RAM that a GPU can read by itself while it computes, within a limit.

    The system cannot swap pinned pages, so that too many of them stop everything else. Regions beyond the limit, and
    those for which the system pins no memory, are in ordinary RAM.

    Args:
        pinning: how to pin; None for not at all.
        limit: bytes that may be pinned; None for `pinned_limit` of this machine's RAM.
        staging: what copies the rest; None for the driver.

    Attributes:
        pinned, pageable: bytes that are in each.
    """

    def __init__(
        self, pinning: Pinning | None = None, limit: int | None = None, staging: Staging | None = None
    ) -> None:
        self._pinning, self._staging = pinning, staging
        self._limit = pinned_limit(*ram()) if limit is None else limit
        self.pinned = self.pageable = 0

    def add(self, tensors: Sequence[Tensor]) -> Region:
        spans, nbytes = _lay_out(tensors)
        flat = self._pinned(nbytes)
        pinned = flat is not None
        if flat is None:
            flat = torch.empty(nbytes, dtype=torch.uint8)
            self.pageable += nbytes
        waiting = []
        for tensor, span in zip(tensors, spans, strict=True):
            if span is None:
                waiting.append(tensor.to("cpu"))
            else:
                waiting.append(span.view(flat))
                waiting[-1].copy_(tensor)
        return _RamRegion(spans, flat, waiting, pinned=pinned, staging=self._staging)

    def _pinned(self, nbytes: int) -> Tensor | None:
        """So many bytes that are pinned; None where they may not be, or cannot."""
        if not nbytes or self._pinning is None:
            return None
        takes = self._pinning.takes(nbytes)
        if takes > self._limit - self.pinned:
            return None
        try:
            flat = self._pinning.make(nbytes)
        except RuntimeError as error:  # a system that pins less than half its RAM, as Windows' for Linux programs
            log.warning(
                "Only %d bytes of the RAM for offloaded weights are pinned, no more can be: %s", self.pinned, error
            )
            self._limit = self.pinned
            return None
        self.pinned += takes
        weakref.finalize(flat.untyped_storage(), self._unpinned, takes)
        return flat

    def _unpinned(self, nbytes: int) -> None:
        """A region is gone, as one whose weights were repacked."""
        self.pinned -= nbytes

    def close(self) -> None:
        """Nothing to do: pinned memory goes with its last tensor."""


class _DiskRegion(Region):
    def __init__(self, spans: Sequence[Span | None], waiting: list[Tensor], path: Path, nbytes: int) -> None:
        super().__init__(spans, nbytes, waiting)
        self._path = path

    def read(self, into: Tensor) -> None:
        # Reading, not copying from the mapping: a fault is an exception here and would be a signal there, and what is
        # read this way does not count as memory of this process.
        try:
            with open(self._path, "rb", buffering=0) as file, memoryview(cast("Any", into.numpy())) as room:
                at = 0
                while at < self.nbytes:
                    count = file.readinto(room[at : min(at + CHUNK, self.nbytes)])
                    if not count:
                        raise self._gone(f"it ends after {at} of {self.nbytes} bytes")
                    at += count
        except OSError as error:
            raise self._gone(f"it cannot be read any more: {error.strerror or error}") from error

    def _gone(self, why: str) -> BadFileError:
        return BadFileError(
            f"Cannot read offloaded weights back from {self._path}",
            f"{why}; something changed the file while it was in use",
            "Load the model again, and keep other programs away from that folder",
        )


class DiskStore(Store):
    """One file per region in a folder of its own, mapped, so that the system can take its pages back at any time.

    The files go at `close()`, or when the interpreter ends.

    Raises:
        SettingsError: the folder cannot be written.
    """

    def __init__(self, folder: str | os.PathLike[str] | None = None) -> None:
        place = Path(folder) if folder is not None else Path(tempfile.gettempdir())
        try:
            self._folder = OwnFolder(".sdquant-", place)
        except OSError as error:
            raise SettingsError(
                f"Cannot store offloaded weights in {place}",
                f"no folder can be created there: {error.strerror or error}",
                f"Choose a folder on a disk that exists and is writable: {ANOTHER_FOLDER}",
            ) from error
        self._files = 0

    @property
    def folder(self) -> Path:
        return self._folder.path

    def add(self, tensors: Sequence[Tensor]) -> Region:
        """Write the tensors to a file and map it.

        Raises:
            SettingsError: the file cannot be written, as when the disk is full.
        """
        spans, nbytes = _lay_out(tensors, opaque=False)
        path = self.folder / f"{self._files:05d}"
        self._files += 1
        try:
            self._write(path, tensors, spans, nbytes)
        except OSError as error:
            path.unlink(missing_ok=True)
            raise SettingsError(
                f"Cannot store offloaded weights in {self.folder.parent}",
                f"{nbytes} bytes cannot be written: {error.strerror or error}",
                f"Free space there, or choose a folder on another disk: {ANOTHER_FOLDER}",
            ) from error
        flat = _mapped(path, nbytes)
        return _DiskRegion(spans, [span.view(flat) for span in spans if span is not None], path, nbytes)

    @staticmethod
    def _write(path: Path, tensors: Sequence[Tensor], spans: Sequence[Span | None], nbytes: int) -> None:
        with open(path, "wb", buffering=0) as file:
            file.truncate(nbytes)
            for tensor, span in zip(tensors, spans, strict=True):
                if span is None or not span.nbytes:
                    continue
                dense = _dense(tensor.detach().cpu(), span)
                start = int(dense.data_ptr())
                run = memoryview((ctypes.c_char * span.nbytes).from_address(start)).cast("B")
                file.seek(span.offset)
                at = 0
                while at < span.nbytes:
                    at += file.write(run[at : at + CHUNK])

    def close(self) -> None:
        self._folder.close()


def pinned_limit(total: int, free: int) -> int:
    """Bytes of RAM that may be pinned on a machine with `total` bytes, of which `free` can be had without swapping."""
    return int(min(PINNED_SHARE * total, FREE_SHARE * free))


def aligned(nbytes: int) -> int:
    """`nbytes` and what follows up to the next tensor."""
    return -(-nbytes // ALIGN) * ALIGN


def _mapped(path: Path, nbytes: int) -> Tensor:
    """The file as uint8 [nbytes]. Private: a write would stay in this process, and torch does not warn of reading."""
    if not nbytes:
        return torch.empty(0, dtype=torch.uint8)
    with open(path, "r+b") as file:
        return torch.frombuffer(mmap.mmap(file.fileno(), nbytes, access=mmap.ACCESS_COPY), dtype=torch.uint8)


def _lay_out(tensors: Sequence[Tensor], opaque: bool = True) -> tuple[list[Span | None], int]:
    """Spans of the tensors one after another, and the bytes of all. None for opaque tensors, if they are allowed.

    Where they are not, they are laid out like the rest, and fail with torch's own error when their memory is asked for.
    """
    spans: list[Span | None] = []
    offset = 0
    for tensor in tensors:
        if is_opaque(tensor):
            if opaque:
                spans.append(None)
                continue
            wrapper: Any = tensor
            wrapper.untyped_storage().data_ptr()
        # Dimensions from the slowest to the fastest in memory: of a dense tensor this order is contiguous.
        slowest_first = tuple(sorted(range(tensor.dim()), key=lambda d: (-tensor.stride()[d], d)))
        shape = tuple(tensor.shape[d] for d in slowest_first)
        back = tuple(slowest_first.index(d) for d in range(tensor.dim()))
        spans.append(Span(offset, tensor_bytes(tensor), tensor.dtype, shape, back))
        offset += aligned(tensor_bytes(tensor))
    return spans, offset


def _dense(tensor: Tensor, span: Span) -> Tensor:
    """The tensor's values in the order in which the span keeps them, contiguous."""
    forward = tuple(span.order.index(d) for d in range(tensor.dim()))
    return tensor.permute(forward).contiguous()
