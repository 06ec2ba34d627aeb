"""The rows of a benchmark before they are measured: sdquant's schemes, and the peers of each. No torch."""

from __future__ import annotations

import warnings
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

from ... import compat
from ...core import registry
from ...errors import ConflictError, SdquantError
from ...planning import prepare
from ..compare import AS_FOUND, allowed_for
from . import baselines
from .results import BenchmarkRow
from .specs import LoadSpec
from .target import is_float, request_for

if TYPE_CHECKING:
    from ...planning import Request
    from .specs import ModelUnderTest

# Schemes measured by default: those that quantize while they load and have a peer, and fp8.
DEFAULT = ("nf4", "fp8", "bnb-int8", "qint8", "int8", "sdnq-int8")
BF16 = "bfloat16"


@dataclass(frozen=True, kw_only=True)
class Variant:
    """A row to be measured.

    Attributes:
        row: the values known so far; it is not measured if it has an error.
        job: what its worker loads; None if there is an error.
        bytes: planned size of its weights in memory.
    """

    row: BenchmarkRow
    job: LoadSpec | None = None
    bytes: int = 0


def default_schemes(target: ModelUnderTest) -> tuple[str, ...]:
    """Return the schemes measured by default: those that the matrix allows; none if the model is already quantized."""
    return () if target.scheme is not None else allowed_for(target.asked, DEFAULT)


def make(
    target: ModelUnderTest,
    schemes: Iterable[str],
    work: Path,
    threads: int,
    versions: Mapping[str, str],
    *,
    with_peers: bool,
    with_bf16: bool,
) -> Iterator[Variant]:
    """Yield the reference, then each scheme followed by its peers.

    For a scheme that exists only in GGUF files, such a file is written to `work` first; the peers read it too.

    Args:
        with_bf16: add a row for the model in bfloat16 if that is not its own dtype.
    """
    common = LoadSpec(
        asked=target.asked, work=work, threads=threads, device=target.device, class_name=target.class_name,
        dtype=target.dtype, folder=target.folder,
    )  # fmt: skip
    name = f"{AS_FOUND} ({target.scheme})" if target.scheme else f"{AS_FOUND} ({target.dtype})"
    yield _ours(BenchmarkRow(name=name, by="sdquant", quant=target.scheme, dtype=target.dtype), common, None)
    if target.scheme is not None and with_peers:
        yield from _theirs(target.scheme, common, versions, target.bytes)
    if with_bf16 and target.dtype != BF16 and target.scheme is None:
        row = BenchmarkRow(name=BF16, by="sdquant", dtype=BF16)
        yield _ours(row, replace(common, dtype=BF16, asked=request_for(target, None, dtype=BF16)), None)
    for text in dict.fromkeys(schemes):
        yield from _of_scheme(target, text, common, versions if with_peers else {})


def _of_scheme(target: ModelUnderTest, text: str, common: LoadSpec, versions: Mapping[str, str]) -> Iterator[Variant]:
    row = BenchmarkRow(name=text, by="sdquant", quant=text, dtype=target.dtype)
    spec = None if is_float(text) else registry.parse(text)
    job = replace(common, asked=request_for(target, text))
    if spec is not None and spec.scheme.backend == "gguf":
        try:
            job = replace(common, asked=_written(target, text, common.work))
        except SdquantError as error:
            yield _refused(row, error)
            return
    yield _ours(row, job, text)
    if spec is not None and not spec.options:
        yield from _theirs(spec.scheme.name, job, versions, target.bytes)


def _written(target: ModelUnderTest, scheme: str, work: Path) -> Request:
    """Write a GGUF file of the component and return the request for it."""
    from ...saving import quantize_file

    if target.scheme is not None:
        raise ConflictError(
            f"Cannot measure {target.asked.path} as {scheme}",
            f"it is already quantized to {target.scheme}",
            "Use the model with float weights",
        )
    request = target.asked
    # Before anything is written: what the matrix says to loading such a file.
    compat.check(
        scheme, request.offload, mode="found", runtime=request.runtime, device=target.device,
        allow_incompatible=request.allow_incompatible,
    )  # fmt: skip
    file = quantize_file(
        request.path, scheme, work / f"{scheme.replace(':', '-')}.gguf", skip=request.skip, progress=False
    )
    return request_for(replace(target, asked=replace(request, path=str(file), skip=())), None)


def _ours(row: BenchmarkRow, job: LoadSpec, text: str | None) -> Variant:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", compat.SdquantWarning)
        try:
            plan = prepare(job.asked)
        except SdquantError as error:
            if text is None:
                raise
            return _refused(row, error)
    return Variant(row=row, job=job, bytes=plan.bytes)


def _refused(row: BenchmarkRow, error: SdquantError) -> Variant:
    return Variant(row=replace(row, error=str(error), kind=type(error).__name__))


def _note(note: str | None, offload: str) -> str | None:
    """Return the note for a peer's row, which also says that peers do not use sdquant's offload."""
    alone = None if offload == "none" else "without offload, all weights on the device"
    return "; ".join(filter(None, [note, alone])) or None


def _theirs(scheme: str, job: LoadSpec, versions: Mapping[str, str], nbytes: int) -> Iterator[Variant]:
    """Yield the peers that can read the files that sdquant reads for a scheme."""
    for peer in baselines.installed(scheme, versions):
        if baselines.can_read(peer, Path(job.asked.path)):
            row = BenchmarkRow(
                name=f"{peer.name} {peer.formats[scheme].lower()}", by=peer.name, quant=scheme, dtype=job.dtype,
                note=_note(peer.note(job.device), job.asked.offload),
            )  # fmt: skip
            # On the CPU they may hold the float model beside the quantized one for a while.
            yield Variant(row=row, job=replace(job, peer=peer.name, scheme=scheme), bytes=nbytes)
