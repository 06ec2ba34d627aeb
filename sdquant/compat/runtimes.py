"""Choose the default runtime of a scheme.

The choice does not affect which weights are quantized: if a scheme has library modules, those that these modules can
run, so that a call without runtime= writes the same files on every machine.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from ..core import QuantSpec
from .requirements import problem

if TYPE_CHECKING:
    from collections.abc import Mapping

    from ..core import Scheme

# Devices and C kernels for which sdquant's layers were measured to be at least as fast as the libraries' modules, for
# every scheme and number of rows (bench/results/linear-*.json; checked by tests/compat/test_runtimes.py). Elsewhere one
# of them was not measured, or the library is sometimes faster: without C kernels, bitsandbytes for nf4.
PLAIN_FIRST = "cpu"
MEASURED = frozenset({"amx", "avx512bf16", "avx2"})
# Schemes whose libraries' modules are slower on an NVIDIA card than sdquant's layers with Triton. A step of Flux on an
# H200, of bf16's (bench/results/gpu-h200.json): bnb-int8 2.71 against 1.04, qint8 1.32 against 1.06, qint4 12.0 against
# 1.04. qint2 and qfloat8 were measured on no card: they are here because quanto's modules run the same operators for
# them as for the others, and lose as much by them on CPUs (docs/speed.md). nf4 and fp4 stay with bitsandbytes: 1.09
# against 1.03, but its kernel is the faster one for a single row.
SLOW_ON_CARDS = frozenset({"bnb-int8", "qint8", "qint4", "qint2", "qfloat8"})


def default_runtime(
    spec: Scheme | QuantSpec,
    device: str,
    *,
    isa: str | None,
    triton: bool = False,
    found: bool = False,
    versions: Mapping[str, str] | None = None,
) -> str:
    """Return the runtime to use if the user names none: plain layers if they are faster, else the scheme's default.

    Args:
        spec: the scheme; options that only the library's modules have select the library.
        device: the compute device, by torch name or matrix kind: "cpu", "cuda:0".
        isa: the instruction set of the C kernels there, as in `Machine.native`.
        triton: whether Triton is installed there, as in `Machine.has_triton`.
        found: the weights are already quantized on disk; then plain layers also run them if the package is missing or
            too old, since they need it neither to read nor to dequantize.
        versions: installed packages; None: all are installed.
    """
    scheme, options = (spec.scheme, spec.options) if isinstance(spec, QuantSpec) else (spec, ())
    lacks = found and versions is not None and problem(scheme.codec, versions) is not None
    kind = device.partition(":")[0]
    faster = kind == PLAIN_FIRST and isa in MEASURED
    faster = faster or (kind == "cuda" and triton and scheme.name in SLOW_ON_CARDS)
    for_library = any(scheme.options[name].library for name, _ in options if name in scheme.options)
    if lacks or ("plain" in scheme.runtimes and faster and not for_library):
        return "plain"
    return scheme.runtimes[0]
