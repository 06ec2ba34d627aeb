"""The user options of schemes, the packages behind backends, and the names of layers that a scheme is for."""

from __future__ import annotations

from dataclasses import dataclass

# The option of every scheme that also quantizes embeddings.
EMBEDDINGS = "embeddings"
# The options of those whose codes can be chosen anew, and whose scales, by what calibration measured.
GPTQ, IMATRIX = "gptq", "imatrix"
# The option of those whose groups can have another range than that of their weights.
RANGE = "range"
# The option of those whose layers' biases may make up for errors of the weight.
BIAS = "bias"
# An option of some schemes, and what others do whatever is said: inputs and weight are rotated before it is quantized.
HADAMARD = "hadamard"


@dataclass(frozen=True, kw_only=True)
class Option:
    """A user option of a scheme, written as `nf4,block_size=128` or `nf4,double_quant`.

    Attributes:
        library: it applies only to the library's modules, and selects them if the call names no runtime.
        of: the option without which it has no effect; "" if it needs none.
        calibrated: with it, weights are quantized with what calibration found (`InputStatistics`).
        searched: the same if calibration found anything, and it does without.
        beside: it changes what is beside the weight in its layer.
    """

    default: bool | int | str | None
    help: str
    choices: tuple[bool | int | str | None, ...] = ()
    library: bool = False
    of: str = ""
    calibrated: bool = False
    searched: bool = False
    beside: bool = False

    @property
    def uses_statistics(self) -> bool:
        """Return whether it is another one with what calibration found."""
        return self.calibrated or self.searched

    @property
    def keeps_format(self) -> bool:
        """Return whether it changes the values of scales and codes alone: every reader of the format reads them."""
        return self.uses_statistics and not self.beside


# Of schemes whose codes kernels can unpack one by one; the same bytes, so that every reader profits.
GPTQ_OPTION = Option(
    default=False,
    help="choose codes that make up for each other's errors in the layer's output (GPTQ): often 2 to 5 dB at 4 bits",
    calibrated=True,
)
RANGE_OPTION = Option(
    default=False,
    help="search the range of each group that leaves the least error, in the layer's output if there are statistics",
    searched=True,
)
BIAS_OPTION = Option(
    default=False,
    help="take off the layer's bias what the weight's errors make of the mean input: up to 2 dB if there is no gptq",
    calibrated=True,
    beside=True,
)
IMATRIX_OPTION = Option(
    default=False, help="choose scales by how large each input of the layer is, as llama.cpp does", calibrated=True
)


@dataclass(frozen=True, kw_only=True)
class Requirement:
    """The package behind a backend: distribution name, least version that works, sdquant's extra that installs it."""

    package: str
    minimum: str
    extra: str


def layer_name(kind: str, shape: tuple[int, ...]) -> str:
    """Return the layer name of a layer type and weight shape: "conv" with a 5-dimensional weight is "Conv3d"."""
    return f"Conv{len(shape) - 2}d" if kind == "conv" else kind.capitalize()
