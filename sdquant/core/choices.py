"""Names that users choose from, and names that appear in files."""

from __future__ import annotations

from ..errors import UnknownOffloadError
from ..utils.suggestions import did_you_mean

METHOD = "sdquant"  # `quant_method` in a config.json

AUTO = "auto"  # for a scheme or an offload mode: the fastest that fits

# The name of a component that is loaded alone, without a pipeline.
LONE = "model"

# The main component of a pipeline, whose quantization names the pipeline's.
MAIN = ("transformer", "unet", "transformer_2", "prior", "decoder")

# The schemes whose weights compute="fp4" multiplies in 4 bits; it does not change the others.
NVFP4_SCHEMES = frozenset({"comfy:nvfp4", "svdquant_nvfp4"})

# Offload modes: for each there is a file of this name in `offload/`.
NO_OFFLOAD = "none"
OFFLOAD_MODES = (NO_OFFLOAD, "model", "sequential", "balanced", "group")


def check_offload_mode(name: object, *more: str) -> None:
    """Raise UnknownOffloadError if this is not the name of an offload mode, nor one of `more`."""
    known = (*OFFLOAD_MODES, *more)
    if name in known:
        return
    raise UnknownOffloadError(
        f"Unknown offload mode {name!r}",
        f"the modes are {', '.join(known)}",
        did_you_mean(str(name).lower(), known, f"Use one of {', '.join(known)}"),
    )
