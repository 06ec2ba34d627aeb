"""What the finders of the hub's integer formats share. Imports no torch."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from ..core import COMPUTE_DTYPES, PLAIN_ONLY, TensorInfo
from ..errors import BadFileError, UnsupportedFileError

# Keys in the details of weights in files. Those of packed weights are `_hub_codes`'.
PACKING, DTYPE, OFFSET, SYMMETRIC, BITS = "packing", "dtype", "zero_offset", "symmetric", "bits"
GROUP_SIZE = "group_size"
# The packings, which `_hub_read` unpacks.
GPTQ, AWQ, COMPRESSED, HQQ = "gptq", "awq", "compressed-tensors", "hqq"
# Those of signed codes, which `_hub_signed` unpacks.
BYTES = "bytes"  # a code in each byte, scales and zero points [rows, groups]
NIBBLES = "nibbles"  # the even column in the low half, scales [groups, rows]; the zero point is added after scaling
HIGH_FIRST = "high first"  # the even column in the high half, 8 added; the inverse of the scales, [rows * groups, 1]
PAIRS = "pairs of rows"  # the even row in the low half, scales [rows, groups]
MXFP6 = "mxfp6"  # 6-bit floats, which `_hub_mxfp6` unpacks
READABLE = (2, 3, 4, 8)  # bits of codes that are read
BIT_STREAMS = range(2, 9)  # the same where codes lie one after another, across words
# Details of MXFP4. It becomes blocks of GGUF's scheme, but no GGUF file has it, nor the limits of a GGUF file's model.
MXFP4: Mapping[str, Any] = {"type": "mxfp4", PLAIN_ONLY: True}


def told(config: Mapping[str, Any], methods: tuple[str, ...]) -> Iterator[tuple[str, str, Mapping[str, Any]]]:
    """Yield the place, the method and the settings of each table that names one of these methods."""
    words: dict[str, str] = {}
    for place, word in config.get("methods", ()):
        words.setdefault(place, word.lower())
    for place, table in config.get("tables", ()):
        word = str(table.get("quant_method", words.get(place, ""))).lower()
        if word in methods:
            yield place, word, table


def float_dtype(tensors: Mapping[str, TensorInfo], used: set[str]) -> str:
    """Return the dtype of most tensors that are no parts of quantized weights: what the model was quantized from."""
    floats = Counter(info.dtype for key, info in tensors.items() if key not in used and info.dtype in COMPUTE_DTYPES)
    return floats.most_common(1)[0][0] if floats else "bfloat16"


def unread(name: str, why: str) -> UnsupportedFileError:
    """Return the error for a weight in a form that is not read."""
    return UnsupportedFileError(
        f"Cannot read weight {name!r}",
        why,
        "Load the unquantized model and quantize it here (quant='int8' or 'nf4'), or use a file of it in a format that "
        "`sdquant matrix` lists",
    )


def require_readable(name: str, title: str, bits: object, readable: Sequence[int] = READABLE) -> None:
    """Raise UnsupportedFileError unless codes of so many bits are read."""
    if bits not in readable:
        those = f"{', '.join(map(str, readable[:-1]))} and {readable[-1]}"
        raise unread(name, f"it has {bits!r:.20}-bit codes of {title}, and sdquant reads those of {those} bits")


def untold(name: str, why: str, *examples: str) -> UnsupportedFileError:
    """Return the error for a weight of which nothing says something that its values depend on.

    Args:
        examples: configs that would say it, as Python writes them.
    """
    said = ", or ".join(f"config={example}" for example in examples)
    return UnsupportedFileError(
        f"Cannot read weight {name!r}",
        why,
        "Put the config.json that belongs to it beside the weights, with its quantization_config, or say what is in "
        f"it, such as {said}; or use a file in a format that `sdquant matrix` lists",
    )


def lacking(name: str, key: str) -> BadFileError:
    """Return the error for a weight without one of its parts."""
    return BadFileError(
        f"Cannot read weight {name!r}",
        f"it has no {key!r}, which belongs to its quantized weight",
        "Download the file again, or quantize the model again",
    )
