"""Stores for weights that are not on the compute device: pinned RAM for a GPU, a file for the CPU.

Tensors that move together form a region: one run of bytes, so that fetching is one copy. Weights are constant, so
nothing is ever written back: a slot whose tensor is evicted is pointed at the stored one again.
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

from ..compat import hardware
from ..errors import BadFileError, SettingsError
from ..utils.buffers import ALIGN
from ..utils.temp_dirs import OwnFolder
from .tensor_refs import is_opaque, tensor_bytes

if TYPE_CHECKING:
    import os
    from collections.abc import Sequence

    from .pinned_memory import Pinning, Staging

log = logging.getLogger(__name__)
# Advice in errors: `load_model` has no argument for it.
ANOTHER_FOLDER = "set TMPDIR in the environment, or give folder= to sdquant.offload.apply"

CHUNK = 1 << 24  # bytes read or written at a time
PINNED_SHARE = 0.5  # of the machine's RAM that a store may pin,
FREE_SHARE = 0.75  # and of what is free just then


@dataclass(frozen=True)
class Span:
    """Position of a tensor in its region: offset in bytes, and how to view the bytes as the tensor."""

    offset: int
    nbytes: int
    dtype: torch.dtype
    shape: tuple[int, ...]  # of the dense, contiguous order
    order: tuple[int, ...]  # how to permute that back, so that channels_last stays channels_last

    def view(self, flat: Tensor) -> Tensor:
        """Return the tensor as a view of `flat`, the region's bytes as uint8 [region bytes]."""
        run = flat[self.offset : self.offset + self.nbytes]
        return run.view(self.dtype).view(self.shape).permute(self.order)


class Region(ABC):
    """Tensors that are stored and fetched together.

    Attributes:
        nbytes: bytes of the region, with alignment, without opaque tensors, which are copied separately.
        waiting: the stored tensors, in the order of `Store.add`; opaque ones whole.
        waits: whether `read` blocks until the bytes are read.
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
        """Return the tensors as views of `flat`, a copy of the region's bytes; opaque ones are copied to its device."""
        return [
            tensor.to(flat.device) if span is None else span.view(flat)
            for span, tensor in zip(self._spans, self.waiting, strict=True)
        ]


class Store(ABC):
    """A container of regions until it is closed."""

    @abstractmethod
    def add(self, tensors: Sequence[Tensor]) -> Region:
        """Store tensors, of any device, as one region."""

    @abstractmethod
    def close(self) -> None:
        """Free everything. No slot may refer to a stored tensor any more."""


class _RamRegion(Region):
    """A region in RAM. `staging`: copies memory that is not pinned; None to leave that to the driver."""

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
    """Pinned RAM, which a GPU can read by itself while it computes, up to a limit.

    The system cannot swap pinned pages, so too many of them starve other programs. Regions beyond the limit, and those
    for which the system pins no memory, are in ordinary (pageable) RAM.

    Args:
        pinning: how to pin; None to pin nothing.
        limit: maximum pinned bytes; None for `pinned_limit` of this machine's RAM.
        staging: copies the rest; None to leave that to the driver.

    Attributes:
        pinned, pageable: bytes in each kind of memory.
    """

    def __init__(
        self, pinning: Pinning | None = None, limit: int | None = None, staging: Staging | None = None
    ) -> None:
        self._pinning, self._staging = pinning, staging
        self._limit = pinned_limit(*hardware.ram()) if limit is None else limit
        self.pinned = self.pageable = 0

    def add(self, tensors: Sequence[Tensor]) -> Region:
        spans, nbytes = _lay_out(tensors)
        flat = self._pinned(nbytes)
        pinned = flat is not None
        if flat is None:
            flat = torch.empty(nbytes, dtype=torch.uint8, device="cpu")
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
        """Return `nbytes` of pinned memory, uint8; None beyond the limit, or if the system cannot pin it."""
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
        """Count the memory of a region that is freed, as after its weights were repacked."""
        self.pinned -= nbytes

    def close(self) -> None:
        """Do nothing: pinned memory is freed with its last tensor."""


class _DiskRegion(Region):
    def __init__(self, spans: Sequence[Span | None], waiting: list[Tensor], path: Path, nbytes: int) -> None:
        super().__init__(spans, nbytes, waiting)
        self._path = path

    def read(self, into: Tensor) -> None:
        # Read instead of copying from the mapping: an I/O error is an exception here and would be a signal there, and
        # pages that are read this way do not count as memory of this process.
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
    """One memory-mapped file per region in a folder of its own, so that the system can reclaim its pages at any time.

    The files are deleted by `close()`, or when the interpreter ends.

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
    """Return the bytes of RAM that may be pinned on a machine with `total` bytes, `free` of them without swapping."""
    return int(min(PINNED_SHARE * total, FREE_SHARE * free))


def aligned(nbytes: int) -> int:
    """Return `nbytes` rounded up to the alignment of the next tensor."""
    return -(-nbytes // ALIGN) * ALIGN


def _mapped(path: Path, nbytes: int) -> Tensor:
    """Map the file as uint8 [nbytes]. Copy-on-write, since torch warns about read-only memory."""
    if not nbytes:
        return torch.empty(0, dtype=torch.uint8, device="cpu")
    with open(path, "r+b") as file:
        return torch.frombuffer(mmap.mmap(file.fileno(), nbytes, access=mmap.ACCESS_COPY), dtype=torch.uint8)


def _lay_out(tensors: Sequence[Tensor], opaque: bool = True) -> tuple[list[Span | None], int]:
    """Return the spans of the tensors one after another, and their total bytes. None for opaque tensors, if allowed.

    Otherwise opaque tensors fail with torch's own error, since they have no memory of their own.
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
    """Return the tensor permuted to the order of the span, contiguous."""
    forward = tuple(span.order.index(d) for d in range(tensor.dim()))
    return tensor.permute(forward).contiguous()
