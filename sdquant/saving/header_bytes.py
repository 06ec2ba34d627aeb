"""Bytes that the header of a component's file has for one of its weights, by scheme: names, shapes, and what the scheme
says of it. A small weight's may be a tenth of its own bytes, and differ by scheme as much as its codes do.
"""

from __future__ import annotations

import json
from functools import lru_cache
from typing import TYPE_CHECKING

import torch

from ..core import Packed, PackedSpec, dtype_named, registry
from ..formats import METADATA_KEY, safetensors
from . import model_files

if TYPE_CHECKING:
    from collections.abc import Mapping

    from torch import Tensor

_SAMPLE = (256, 256)  # a weight that every scheme of a mix fits; what a scheme says of others is no longer
_DTYPE = "bfloat16"  # of floats, the longest name
_CONFIG = 12  # beside a name in a list of config.json: an indentation, quotes and a comma


def of_float(key: str, shape: tuple[int, ...], offset: int) -> int:
    """Return the bytes of a float tensor, at most.

    Args:
        key: in the file. offset: no smaller than any in the file.
    """
    entry = {key: {"dtype": safetensors.NAMES[_DTYPE], "shape": list(shape), "data_offsets": [offset, offset]}}
    return len(json.dumps(entry, separators=(",", ":"), ensure_ascii=False).encode()) - 1


def of_scheme(key: str, shape: tuple[int, ...], scheme: str, offset: int) -> int:
    """Return the bytes of a weight in a scheme, at most: in the header, in tensors that say what the scheme is, and in
    the list of a library's config that may name it. Arguments: as of `of_float`."""
    tensors, metadata = model_files.written([(key, _unfilled(scheme, shape))], {}, {})
    weights = json.loads(metadata[METADATA_KEY])["weights"]
    text = json.dumps(weights, sort_keys=True)
    header = len(json.dumps(text)) - 2  # JSON in a string: less its quotes and braces, and a comma and a space
    header += sum(of_float(name, tuple(tensor.shape), offset) for name, tensor in tensors.items())
    more = sum(tensors[name].numel() * tensors[name].element_size() for name in weights[key]["extra"])
    return header + more + (in_config(key) if _is_named(scheme) else 0)


def in_config(key: str) -> int:
    """Return the bytes of a name in a list of config.json."""
    return len(json.dumps(key)) + _CONFIG


def _is_named(scheme: str) -> bool:
    """Return whether a config may list the weights of a scheme by name."""
    spec = registry.parse(scheme)
    return spec.scheme.codec.config(spec, _DTYPE) is not None


@lru_cache(maxsize=64)
def _said(scheme: str) -> PackedSpec:
    spec = registry.parse(scheme)
    return spec.scheme.codec.encode(
        torch.linspace(-1, 1, _SAMPLE[0] * _SAMPLE[1], dtype=torch.float32, device="cpu").view(_SAMPLE).bfloat16(), spec
    ).spec


def _unfilled(scheme: str, shape: tuple[int, ...]) -> Packed:
    """Return a weight in a scheme on the meta device. Raises Unfit."""
    spec = registry.parse(scheme)
    layout = spec.scheme.codec.layout(spec, shape, _DTYPE)
    parts: Mapping[str, Tensor] = {
        name: torch.empty(part.shape, dtype=dtype_named(part.dtype), device="meta") for name, part in layout.items()
    }
    return Packed(
        spec=PackedSpec(scheme=spec.scheme, shape=shape, dtype=_DTYPE, details=_said(scheme).details), parts=parts
    )
