"""Names that users choose from, and names that appear in files."""

from __future__ import annotations

METHOD = "sdquant"  # `quant_method` in a config.json

# Offload modes, in the order of `offload.MODES`, which describes them.
OFFLOAD_MODES = ("none", "model", "sequential", "balanced", "group")


# The name of a component that is loaded alone, without a pipeline.
LONE = "model"

# The main component of a pipeline, whose quantization names the pipeline's.
MAIN = ("transformer", "unet", "transformer_2", "prior", "decoder")
