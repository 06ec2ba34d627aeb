"""Which runtime a scheme runs in where the call names none.

Which weights are quantized does not depend on it: where a scheme has modules of a library, those that these can run, so
that a call that names no runtime writes the same files on every machine.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from ..core import registry
from ..core.registry import QuantSpec
from ..kernels import cpu
from .requirements import problem

if TYPE_CHECKING:
    from collections.abc import Mapping

    from ..core.registry import Scheme

# Devices and C kernels with which sdquant's layers were measured to be at least as fast as the libraries' modules, for
# every scheme and number of rows (bench/results/linear-*.json; tests/compat/test_runtimes.py looks). Elsewhere nobody
# has measured both, or the library is the faster one for some: without C kernels, bitsandbytes for nf4.
PLAIN_FIRST = "cpu"
MEASURED = frozenset({"amx", "avx512bf16", "avx2"})


def default_runtime(
    asked: Scheme | QuantSpec, device: str, *, found: bool = False, versions: Mapping[str, str] | None = None
) -> str:
    """What runs the scheme if the user names no runtime: plain layers where they are the faster ones, else the scheme's
    own default.

    Args:
        asked: with options, of which those that only the library's modules have choose these.
        device: the compute device, as torch names it or as the kind that the matrix speaks of: "cpu", "cuda:0".
        found: whether the weights are quantized on disk already; then they run in plain layers too where the package is
            missing or too old: those need it neither to read nor to decode.
        versions: installed packages; None: all are there.
    """
    scheme, options = (asked.scheme, asked.options) if isinstance(asked, QuantSpec) else (asked, ())
    lacks = found and versions is not None and problem(registry.get(scheme.backend), versions) is not None
    faster = device.partition(":")[0] == PLAIN_FIRST and cpu.isa() in MEASURED
    for_library = any(scheme.options[name].library for name, _ in options if name in scheme.options)
    if lacks or ("plain" in scheme.runtimes and faster and not for_library):
        return "plain"
    return scheme.runtimes[0]
