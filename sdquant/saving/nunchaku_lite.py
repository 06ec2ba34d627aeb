"""SVDQuant in the tensors of diffusers' `nunchaku_lite`, which are others than those of sdquant's own folders.

`portable=True` writes them, too: diffusers reads them by itself. All layers of a model have the same precision and
rank, and compute in the same dtype; those that differ from most are written as floats.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Mapping
from typing import TYPE_CHECKING, Any

from ..backends import NUNCHAKU_SCHEMES
from .library_format import LibraryFormat, StoredWeight

if TYPE_CHECKING:
    from torch import Tensor

    from ..core import Packed


def _svdquant(packed: Packed, dtype: str, bias: Tensor | None) -> StoredWeight | None:
    import torch

    from ..backends import nunchaku_lite, nunchaku_lite_kind
    from ..kernels import prepack

    kind = nunchaku_lite_kind(prepack.as_filed(packed), dtype)
    if kind is None:
        return None
    meta = torch.device("meta")
    return StoredWeight(
        tensors=nunchaku_lite(prepack.as_filed(packed.to(meta)), kind.dtype, None if bias is None else bias.to(meta)),
        metadata={"kind": kind},
        create=lambda: nunchaku_lite(prepack.as_filed(packed), kind.dtype, bias),
    )


def _choose(stored: Mapping[str, StoredWeight]) -> Mapping[str, StoredWeight]:
    if not stored:
        return stored
    most = Counter(one.metadata["kind"] for one in stored.values()).most_common(1)[0][0]
    return {name: one for name, one in stored.items() if one.metadata["kind"] == most}


def _config(stored: Mapping[str, StoredWeight], floats: list[str]) -> dict[str, Any]:
    kind = next(iter(stored.values())).metadata["kind"]
    targets = sorted(name.removesuffix(".weight") for name in stored)
    layers = {"precision": kind.precision, "group_size": kind.group, "rank": kind.rank, "targets": targets}
    return {"quant_method": "nunchaku_lite", "compute_dtype": kind.dtype, "svdq_w4a4": layers}


def _metadata(stored: Mapping[str, StoredWeight], floats: Collection[str]) -> dict[str, str]:
    return {}


FORMAT = LibraryFormat(
    name="nunchaku_lite",
    title="nunchaku_lite",
    file=False,
    encoders=False,
    schemes=dict.fromkeys(NUNCHAKU_SCHEMES, _svdquant),
    config=_config,
    metadata=_metadata,
    choose=_choose,
)
