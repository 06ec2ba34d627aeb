"""Writes qwix.npz: what the real Qwix computes. Not run by the tests: it needs jax and a checkout of google/qwix.

    XLA_FLAGS="--xla_disable_hlo_passes=algsimp --xla_cpu_enable_fast_math=false" PYTHONPATH=QWIX python make.py

The flags keep XLA from turning divisions by constants into products with reciprocals, which TPUs do not do either. The
file in the repository is of aa623acb (2026-08) with jax 0.10.2.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import jax.numpy as jnp
import numpy as np
from qwix._src.core import einsum, qarray

TYPES = (
    ("mxfp8", 32, "absmax"), ("mxfp8_16", 16, "absmax"), ("mxfp4", 32, "absmax"), ("nvfp4", 16, "absmax"),
    ("nf4", 32, "absmax"), ("int8", None, "absmax"), ("int8", 16, "minmax"), ("int4", None, "minmax"),
    ("int16", None, "minmax"), ("float8_e4m3fn", None, "absmax"),
)  # fmt: skip
EQUATIONS = {
    "bqhd,bkhd->bhqk": ((1, 3, 2, 256), (1, 4, 2, 256)),
    "bhqk,bkhd->bqhd": ((1, 2, 3, 256), (1, 256, 2, 2)),
    "jk,ij->ik": ((256, 4), (3, 256)),
    "bij,jk->bki": ((2, 3, 256), (256, 2)),
}


def floats(x: Any) -> Any:
    return np.asarray(x.astype(jnp.float32))


def main() -> None:
    random = np.random.default_rng(36)
    out: dict[str, Any] = {}
    for name, tile, method in TYPES:
        for dtype in ("float32", "bfloat16"):
            # Rows of all sizes, one of zeros, one of powers of two, where a scale is as its neighbour or not.
            x = random.standard_normal((8, 64)) * np.exp2(random.integers(-12, 12, (8, 1)))
            x[0], x[1] = 0, np.exp2(random.integers(-4, 5, 64))
            given = jnp.asarray(x.astype(np.float32)).astype(dtype)
            how = qarray.HowToQuantize(
                qtype=name, channelwise_axes=(0,), tiled_axes={1: tile} if tile else {}, calibration_method=method
            )
            done = qarray.quantize(given, how)
            key = f"quantize|{name}|{tile or 0}|{method}|{dtype}"
            out |= {f"{key}|x": floats(given), f"{key}|scale": floats(done.scale)}
            out[f"{key}|dequantized"] = floats(qarray.dequantize(done))
    for text, shapes in EQUATIONS.items():
        for tile in (None, 128):
            a, b = (jnp.asarray(random.standard_normal(shape).astype(np.float32)) for shape in shapes)
            left, right = (
                qarray.quantize(
                    x,
                    einsum.get_how_to_quantize(
                        einsum_str=text, ndims=(a.ndim, b.ndim), for_lhs=x is a, tile_size=tile, qtype="int8"
                    ),
                )
                for x in (a, b)
            )
            key = f"einsum|{text}|{tile or 0}"
            out |= {
                f"{key}|a": floats(a),
                f"{key}|b": floats(b),
                f"{key}|product": floats(einsum.einsum(text, left, right)),
            }
    np.savez_compressed(Path(__file__).with_name("qwix.npz"), **out)


if __name__ == "__main__":
    main()
