"""Keys in `PackedSpec.details` that several backends use."""

from __future__ import annotations

# Key in the details of weights with doubly quantized scales: a float32 number that is added to every scale.
OFFSET = "offset"
# Key in the details of weights whose scales have a common factor: a float32 number that multiplies every scale.
FACTOR = "factor"
# The keys of numbers that belong to a weight's values, as its parts do: state dicts have them as tensors.
NUMBERS = (OFFSET, FACTOR)
# Key in the details of rotated weights: the group size of `core.hadamard`.
ROTATION = "rotation"
# Key in the details of the weights of transposed convolutions, True: they are [in, out, kernel...]. A file does not say
# it, the model does: see `models.fitting.Shell.described`.
INPUT_FIRST = "input_first"
