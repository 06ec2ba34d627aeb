"""Files of traces beside the settings, by a hash of the model's path, its files' sizes and times, and of versions.

They are convenience alone: one that cannot be read is made again, one that cannot be written at every start.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import logging
from collections import Counter
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from ..compat import hardware
from ..core import dtype_name, dtype_named
from ..errors import SdquantError
from ..models import Product, Trace, Work
from ..utils import strict_json
from ..utils.atomic_write import whole_file
from ..utils.version import __version__

if TYPE_CHECKING:
    from pathlib import Path

log = logging.getLogger(__name__)

_FORM = 1  # of the files; raise it when what is in them changes
_MOST = 32  # files
_LARGEST = 4 << 20  # bytes
_MAKERS = ("torch", "diffusers", "transformers")


def read_trace(folder: Path, key: object) -> dict[str, Trace | None] | None:
    """Return a trace that `write_trace` wrote for this key; None if there is none."""
    with contextlib.suppress(OSError, ValueError, TypeError, KeyError, AttributeError, SdquantError):
        path = _place(folder, key)
        if path.is_file() and path.stat().st_size <= _LARGEST:
            rows = strict_json.parse(strict_json.text(path.read_bytes()))
            return {str(name): None if one is None else _trace(one) for name, one in rows.items()}
    return None


def write_trace(folder: Path, key: object, traces: Mapping[str, Trace | None]) -> None:
    """Keep a trace for the next start, unless it is empty: why there is none may pass."""
    raw = json.dumps({name: None if one is None else _row(one) for name, one in traces.items()}).encode()
    if not traces or len(raw) > _LARGEST:
        return
    try:
        with whole_file(_place(folder, key), len(raw), mode=0o600) as file:
            file.write(raw)
        old = sorted(folder.glob("*.json"), key=lambda path: path.stat().st_mtime)[:-_MOST]
        for path in old:
            path.unlink(missing_ok=True)
    except (OSError, SdquantError) as error:
        log.info("a trace cannot be kept: %s", error)


def _place(folder: Path, key: object) -> Path:
    made_by = hardware.probe().versions
    text = repr((_FORM, __version__, *(made_by.get(name) for name in _MAKERS), key))
    return folder / f"{hashlib.sha256(text.encode('utf-8', 'backslashreplace')).hexdigest()[:32]}.json"


def _row(trace: Trace) -> dict[str, Any]:
    work = trace.work
    products = [
        [one.weight, one.kind, one.numbers, one.rows, dtype_name(one.dtype), times]
        for one, times in work.products.items()
    ]
    return {
        "peak": trace.peak,
        "kernels": trace.kernels,
        "others": work.others,
        "made": work.made,
        "products": products,
    }


def _trace(row: Mapping[str, Any]) -> Trace:
    products: Counter[Product] = Counter()
    for weight, kind, numbers, rows, dtype, times in row["products"]:
        if not (weight is None or isinstance(weight, str)) or kind not in ("linear", "conv"):
            raise ValueError("it is no product")
        one = Product(weight=weight, kind=kind, numbers=_count(numbers), rows=_count(rows), dtype=dtype_named(dtype))
        products[one] += _count(times)
    work = Work(products=products, others=_count(row["others"]), made=_count(row["made"]))
    return Trace(peak=_count(row["peak"]), work=work, kernels=_count(row["kernels"]))


def _count(value: object) -> int:
    if type(value) is not int or value < 0:
        raise ValueError("it is no count")
    return value
