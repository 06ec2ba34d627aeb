"""The tables of ggml's IQ types, taken from the installed package `gguf` and written where sdquant reads them.

    python -m tools.gguf_grids

They are part of the format: every code of these types is an index into one of them.
"""

from __future__ import annotations

from pathlib import Path

import torch

TARGET = Path(__file__).parent.parent / "sdquant" / "core" / "gguf_grids.safetensors"
GRIDS = ("IQ2_XXS", "IQ2_XS", "IQ2_S", "IQ3_XXS", "IQ3_S", "IQ1_S")


def grids() -> dict[str, torch.Tensor]:
    """By type, int8 [codes, 8] (IQ3: [codes, 4])."""
    from gguf import quants

    made = {}
    for name in GRIDS:
        cls = getattr(quants, name)
        cls.init_grid()
        made[name.lower()] = torch.from_numpy(cls.grid.reshape(cls.grid_shape)).to(torch.int8)
    return made


def main() -> None:
    """Write the file."""
    from sdquant.formats import safetensors_writer

    safetensors_writer.write(TARGET, grids(), {"source": "ggml-common.h, by way of the package gguf"})


if __name__ == "__main__":
    main()
