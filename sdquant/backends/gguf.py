"""GGUF: the block types of ggml, read with sdquant's own code and written with libgguf (ggml's kernels).

A packed weight is its raw blocks, flat over the row-major weight: any shape whose number of weights is a whole number
of blocks fits, convolutions included (files record that shape in `comfy.gguf.orig_shape`).
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any, ClassVar

from ..core import (
    GPTQ,
    GPTQ_OPTION,
    IMATRIX,
    IMATRIX_OPTION,
    PLAIN_ONLY,
    Backend,
    Packed,
    PackedLayout,
    PackedSpec,
    PrequantizedWeight,
    QuantSpec,
    Requirement,
    Scheme,
    TensorInfo,
    TensorSpec,
    Unfit,
    dtype_name,
    gguf_mixes,
    gguf_types,
    registry,
)
from ..errors import BackendUnavailableError, BadFileError
from ..utils.install import install_extra

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from torch import Tensor

__all__ = ["BACKEND", "BLOCKS", "FIELDS", "undecodable"]

EXTRA = "gguf"
# What packed weights read from a file are taken for: a GGUF file does not say what its weights were made from.
READ_DTYPE = "bfloat16"
# The part of a packed weight: blocks as files have them, or their bytes in the order of `core.gguf_fields`.
BLOCKS, FIELDS = "blocks", "fields"
_ENCODE_TILE = 1 << 22  # weights converted to float32 at a time


# Of the block types that `_gptq` knows, and of those whose encoders in libgguf weigh errors.
_GPTQ = (
    "q6_k", "q5_k", "q5_1", "q5_0", "q4_k", "q4_1", "q4_0", "q3_k", "q2_k", "iq4_nl", "iq4_xs", *gguf_mixes.BASES
)  # fmt: skip
_IMATRIX = (*_GPTQ, "iq3_s", "iq3_xxs", "iq2_s", "iq2_xs", "iq2_xxs", "iq1_m", "iq1_s")


def _row(name: str, bits: float, summary: str, group: int | None = None) -> Scheme:
    options = {GPTQ: GPTQ_OPTION} if name in _GPTQ else {}
    options |= {IMATRIX: IMATRIX_OPTION} if name in _IMATRIX else {}
    return Scheme(
        name=name, backend="gguf", bits=bits, summary=summary, group=group, options=options, on_the_fly=False
    )  # fmt: skip


_FLOATS = (
    _row("f32", 32, "single precision"),
    _row("f16", 16, "half precision"),
    _row("bf16", 16, "bfloat16"),
)
_BLOCKS = (
    _row("q8_0", 8, "8-bit, a scale per 32 weights", 32),
    _row("q6_k", 6, "6-bit, 8-bit scales of 16 weights in blocks of 256", 16),
    _row("q5_k", 5, "5-bit, 6-bit scales and minimums of 32 weights in blocks of 256", 32),
    _row("q5_1", 5, "5-bit, scale and minimum per 32 weights", 32),
    _row("q5_0", 5, "5-bit, a scale per 32 weights", 32),
    _row("q4_k", 4, "4-bit, 6-bit scales and minimums of 32 weights in blocks of 256", 32),
    _row("q4_1", 4, "4-bit, scale and minimum per 32 weights", 32),
    _row("q4_0", 4, "4-bit, a scale per 32 weights", 32),
    _row("q3_k", 3, "3-bit, 6-bit scales of 16 weights in blocks of 256", 16),
    _row("q2_k", 2, "2-bit, 4-bit scales and minimums of 16 weights in blocks of 256", 16),
    _row("iq4_nl", 4, "4-bit codes of 16 uneven values, a scale per 32 weights", 32),
    _row("iq4_xs", 4, "4-bit codes of 16 uneven values, 6-bit scales of 32 weights in blocks of 256", 32),
    _row("iq3_s", 3, "3.4-bit: groups of 4 weights from a table of 512", 32),
    _row("iq3_xxs", 3, "3.1-bit: groups of 4 weights from a table of 256", 32),
    _row("iq2_s", 2, "2.6-bit: groups of 8 weights from a table of 1024", 16),
    _row("iq2_xs", 2, "2.3-bit: groups of 8 weights from a table of 512", 16),
    _row("iq2_xxs", 2, "2.1-bit: groups of 8 weights from a table of 256", 32),
    _row("iq1_m", 1, "1.75-bit: groups of 8 weights from a table of 2048", 16),
    _row("iq1_s", 1, "1.6-bit: groups of 8 weights from a table of 2048", 32),
    _row("tq2_0", 2, "three values in 2 bits, a scale per 256 weights", 256),
    _row("tq1_0", 1.6, "three values, five of them in a byte, a scale per 256 weights", 256),
    _row("mxfp4", 4, "4-bit floats (E2M1), a power of two as scale of 32 weights", 32),
    _row("nvfp4", 4, "4-bit floats (E2M1), an 8-bit float as scale of 16 weights", 16),
)
_OF = {row.name: row for row in _BLOCKS}
_WORDS = {"s": "small", "m": "medium", "l": "large"}
_MIXES = tuple(
    _row(mix, _OF[base].bits, f"mix of types around {base}, {_WORDS[mix[-1]]}", _OF[base].group)
    for mix, base in gguf_mixes.BASES.items()
)


def undecodable(tensors: Mapping[str, TensorInfo]) -> dict[str, list[str]]:
    """Return the names of tensors in block types that `decode` does not support, by type: such a file cannot load."""
    known = {row.name for row in _BLOCKS}
    names: dict[str, list[str]] = {}
    for name, info in tensors.items():
        if info.dtype in gguf_types.TYPES and info.dtype not in known:
            names.setdefault(info.dtype, []).append(name)
    return names


class GGUF(Backend):
    """The GGUF backend; see the module."""

    name: ClassVar[str] = "gguf"
    title: ClassVar[str] = "GGUF"
    requires: ClassVar[Requirement | None] = None  # to read; `encode` needs the extra
    schemes: ClassVar[tuple[Scheme, ...]] = (*_FLOATS, *_BLOCKS, *_MIXES)

    def layout(self, spec: QuantSpec, shape: tuple[int, ...], dtype: str) -> dict[str, TensorSpec]:
        kind = gguf_types.TYPES[gguf_mixes.BASES.get(spec.scheme.name, spec.scheme.name)]
        if kind.dtype:
            return {BLOCKS: TensorSpec(dtype=kind.dtype, shape=shape)}
        numel = math.prod(shape)
        if numel == 0 or numel % kind.block:
            raise Unfit(f"{numel} weights are not a whole number of {kind.name} blocks of {kind.block}")
        return {BLOCKS: TensorSpec(dtype="uint8", shape=(numel // kind.block, kind.nbytes))}

    def encode(self, weight: Tensor, spec: QuantSpec) -> Packed:
        """Quantize. A mix is encoded as its base type: the writer gets each weight's type from `mix_type` first."""
        import torch

        from ..utils.tensors import is_finite
        from ._gguf_blocks import sound

        shape = tuple(weight.shape)
        dtype = dtype_name(weight.dtype)
        part = self.layout(spec, shape, dtype)[BLOCKS]
        kind = gguf_mixes.BASES.get(spec.scheme.name, spec.scheme.name)
        if gguf_types.TYPES[kind].dtype:
            blocks = weight.detach().to(getattr(torch, part.dtype), copy=True).contiguous()
        else:
            blocks = _encode(weight.detach(), kind, _importance(weight, kind, spec)).to(weight.device)
        if not (is_finite(blocks) if gguf_types.TYPES[kind].dtype else sound(kind, blocks)):
            raise Unfit(f"some of its weights are not finite in {kind} (NaN, or too large for half precision)")
        described = PackedSpec(scheme=registry.scheme(kind), shape=shape, dtype=dtype, details={"type": kind})
        return Packed(spec=described, parts={BLOCKS: blocks})

    def decode_into(self, packed: Packed, out: Tensor) -> None:
        from ._gguf_decode import decode_blocks

        kind, blocks = packed.spec.details["type"], self.for_files(packed).parts[BLOCKS]
        if gguf_types.TYPES[kind].dtype:
            out.copy_(blocks.view(out.shape))
        elif out.is_contiguous():
            decode_blocks(kind, blocks, out)
        else:
            out.copy_(self.decode(packed, out.dtype))

    def form(self, packed: Packed) -> PackedLayout | None:
        kind = gguf_types.TYPES[packed.spec.details["type"]]
        if kind.dtype:
            return None
        rows, columns = packed.spec.shape[0], math.prod(packed.spec.shape[1:])
        apart = FIELDS in packed.parts
        codes = FIELDS if apart else BLOCKS
        return PackedLayout(rows=rows, columns=columns, codes=codes, packing=kind.name, group=kind.block, apart=apart)

    def by_row(self, packed: Packed) -> bool:
        return math.prod(packed.spec.shape[1:]) % gguf_types.TYPES[packed.spec.details["type"]].block == 0

    def sound(self, packed: Packed) -> bool:
        from ._gguf_blocks import sound

        return sound(packed.spec.details["type"], self.for_files(packed).parts[BLOCKS])

    def rows_by(self, packed: Packed, chosen: Callable[[Tensor], Tensor]) -> dict[str, Tensor]:
        if FIELDS not in packed.parts:
            return super().rows_by(packed, chosen)
        import torch

        from ._gguf_blocks import views

        fields = views(packed.spec.details["type"], packed.parts[FIELDS])
        return {FIELDS: torch.cat([chosen(field).reshape(-1) for field in fields])}

    def for_kernels(self, packed: Packed) -> Packed:
        from ..core import gguf_fields
        from ._gguf_blocks import apart

        kind = packed.spec.details["type"]
        if FIELDS in packed.parts or kind not in gguf_fields.FIELDS:
            return packed
        return Packed(spec=packed.spec, parts={FIELDS: apart(kind, packed.parts[BLOCKS])})

    def for_files(self, packed: Packed) -> Packed:
        from ._gguf_blocks import together

        if FIELDS not in packed.parts:
            return packed
        return Packed(spec=packed.spec, parts={BLOCKS: together(packed.spec.details["type"], packed.parts[FIELDS])})

    def cuttable(self, packed: Packed) -> Packed:
        return self.for_files(packed)

    # Files: a GGUF file has one tensor per weight, under the weight's own name.

    def key(self, name: str, part: str, spec: PackedSpec) -> str:
        return name

    def write(self, name: str, packed: Packed) -> dict[str, Tensor]:
        return super().write(name, self.for_files(packed))

    def find(self, tensors: Mapping[str, TensorInfo], config: Mapping[str, Any]) -> list[PrequantizedWeight]:
        """Return every tensor of a supported block type. Floats load as floats; `undecodable` names the rest."""
        counts: dict[str, int] = {}
        for info in tensors.values():
            if info.dtype in _OF:
                counts[info.dtype] = counts.get(info.dtype, 0) + 1
        evidence = "GGUF types: " + ", ".join(f"{count} tensors {kind}" for kind, count in counts.items())
        return [
            PrequantizedWeight(
                name=name,
                scheme=info.dtype,
                keys={BLOCKS: name},
                evidence=evidence,
                details={"type": info.dtype, "shape": list(info.shape)},
            )
            for name, info in tensors.items()
            if info.dtype in _OF
        ]

    def read(self, found: PrequantizedWeight, shape: tuple[int, ...] | None, get: Callable[[str], Tensor]) -> Packed:
        """Read a weight. `shape` may differ from the file's in dimensions of 1, which ggml drops."""
        if "scale" in found.keys:  # MXFP4 of other tools, the same numbers in another order
            from ._gguf_mxfp4 import read

            return read(found, shape, get)
        kind = gguf_types.TYPES[found.details["type"]]
        blocks = get(found.keys[BLOCKS])
        stored = tuple(found.details.get("shape", shape or ()))  # a file of blocks alone, as `save` writes, has none
        shape = stored if shape is None else shape
        expected = (math.prod(shape) // kind.block, kind.nbytes)
        same = [n for n in stored if n > 1] == [n for n in shape if n > 1]
        if not same or tuple(blocks.shape) != expected or math.prod(shape) % kind.block:
            raise BadFileError(
                f"Cannot read weight {found.name!r} as {kind.name}",
                f"the file has shape {list(stored)} in {list(blocks.shape)} bytes, but the model needs {list(shape)}",
                "Check that the file and base= (or the config.json next to it) are for the same model",
            )
        details = {"type": kind.name} | ({PLAIN_ONLY: True} if found.plain_only else {})
        spec = PackedSpec(scheme=registry.scheme(kind.name), shape=shape, dtype=READ_DTYPE, details=details)
        return Packed(spec=spec, parts={BLOCKS: blocks})


def _encode(weight: Tensor, kind: str, importance: Tensor | None) -> Tensor:
    """Quantize to raw blocks on the CPU with ggml's kernels: uint8 [n, bytes per block].

    Args:
        importance: of each weight in a row of whole blocks, float32 [n]; None for equal ones.

    Raises:
        Unfit: the weights are not all finite.
    """
    import numpy as np
    import torch

    try:
        import libgguf
    except ImportError as error:
        raise BackendUnavailableError(
            f"Cannot write {kind}",
            f"the package libgguf cannot be imported ({error})",
            f"Run: {install_extra(EXTRA)}",
        ) from error
    row = gguf_types.TYPES[kind]
    flat = weight.reshape(-1)
    blocks = torch.empty((flat.numel() // row.block, row.nbytes), dtype=torch.uint8, device="cpu")
    width, weights = row.block, None
    if importance is not None:
        width, weights = len(importance), importance.numpy()
    elif libgguf.quantize_requires_imatrix(row.id):  # whose default is made of all rows of the call: blocks must not
        weights = np.ones(width, dtype=np.float32)  # depend on their neighbours
    step = max(1, _ENCODE_TILE // width) * width // row.block
    for start in range(0, len(blocks), step):
        part = flat[start * row.block : (start + step) * row.block].to("cpu", torch.float32).contiguous()
        low, high = torch.aminmax(part)  # ggml's kernels make numbers of NaN
        if not (low > -torch.inf and high < torch.inf):
            raise Unfit("some of its weights are NaN or infinite")
        encoded = libgguf.quantize_rows(part.view(-1, width).numpy(), row.id, imatrix=weights)
        blocks[start : start + step] = torch.from_numpy(encoded).view(-1, row.nbytes)
    return blocks


def _importance(weight: Tensor, kind: str, spec: QuantSpec) -> Tensor | None:
    """Return the mean squares of a weight's inputs, float32 [in], if its errors are to be weighed by them and can be:
    not where blocks go over the ends of rows.

    They are relative to their mean, for ggml's sums overflow, and a hundredth of it more, for what no input of
    calibration needed is to keep its value. All of them zero are None, too.
    """
    columns = weight[0].numel()
    if IMATRIX not in spec.scheme.options or not spec[IMATRIX] or columns % gguf_types.TYPES[kind].block:
        return None
    moments = spec.second_moments(columns)
    if moments is None:
        return None
    squares = moments.diagonal(dim1=1, dim2=2).reshape(-1)[:columns].double()
    mean = squares.mean()
    return (squares / mean + 0.01).float().contiguous() if mean > 0 else None


BACKEND = GGUF()
