"""sdquant's own layers: quantized Linear, Conv and Embedding over plain tensors (runtime "plain").

Each is a subclass of its `torch.nn` original, so that code which looks for `nn.Linear` finds it. The packed parts are
ordinary parameters (without gradient), so that moving, offloading, copying and saving just work.
"""

from __future__ import annotations

from .quantized_layers import QuantizedLayer, kind_of, packed_of, quantized_layer

__all__ = ["QuantizedLayer", "kind_of", "packed_of", "quantized_layer"]
