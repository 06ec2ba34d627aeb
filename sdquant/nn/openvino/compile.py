"""Convert a trace to an OpenVINO model, compile it and run it."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor

from .library import core, library

if TYPE_CHECKING:
    from collections.abc import Sequence

    from .trace import GraphTrace


def convert(trace: GraphTrace) -> Any:
    """Convert a trace to an `openvino.Model` with compressed weights.

    Raises:
        Exception: OpenVINO cannot convert it; its errors have no other base in common.
    """
    frontend = library().FrontEndManager().load_by_framework("pytorch")
    frontend.add_extension(trace.layers.extension())
    decoder = library().Decoder(trace.module)  # which the frontend does not keep alive
    try:
        return frontend.convert(frontend.load(decoder))
    except Exception:
        if trace.layers.stopped:
            raise KeyboardInterrupt from None
        raise


def compiled(model: Any, dtype: torch.dtype) -> Any:
    """Compile a model for the CPU, as one stream for one caller, with as many threads as torch has.

    It computes as exactly as torch does: in bfloat16 if that is the model's dtype and the CPU supports it, else in
    float32; and activations are not quantized, which OpenVINO does by default for products with compressed weights.
    Threads are not pinned to cores, where they would compete with those of other programs.

    Args:
        dtype: the model's.
    """
    how = {
        "INFERENCE_PRECISION_HINT": "bf16" if dtype == torch.bfloat16 else "f32",
        "DYNAMIC_QUANTIZATION_GROUP_SIZE": "0",
        "PERFORMANCE_HINT": "LATENCY",
        "INFERENCE_NUM_THREADS": str(torch.get_num_threads()),
        "ENABLE_CPU_PINNING": "NO",
    }
    return core().compile_model(model, "CPU", how)


def run(request: Any, tensors: Sequence[Tensor]) -> list[Tensor]:
    """Run a compiled model and return its outputs: floats in float32, on the CPU."""
    ov = library().ov
    for place, tensor in enumerate(tensors):
        request.set_input_tensor(place, ov.Tensor(tensor.detach().contiguous().numpy(), True))
    request.infer()
    count = len(request.model_outputs)
    return [torch.from_numpy(np.array(request.get_output_tensor(place).data)) for place in range(count)]
