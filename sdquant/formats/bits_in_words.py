"""The bits of weights by what a `quantization_config` says of them, in numbers and in names of schemes. No torch.

What is read is decided by the tensors, or by one of these words; another word that says something else is told.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Set
from typing import Any

_NUMBERS = ("bits", "w_bit", "wbits", "nbits", "weight_bits", "num_bits")
_NAMES = ("scheme", "quant_algo", "weights_dtype", "weight_dtype", "weights", "quant_type", "format")
_FLAGS: Mapping[str, int] = {"load_in_4bit": 4, "load_in_8bit": 8}
# Tables in the table that are about all weights.
_INSIDE = ("quant_config", "weight_quant_params", "quantization")
# Settings by which some weights are quantized otherwise, where no number is of all.
_OF_SOME = frozenset({
    "extra_config", "dynamic", "modules_dtype_dict", "modules_quant_config", "overrides", "layer_config",
    "quantized_layers", "rules",
})  # fmt: skip
_BY_LETTERS = re.compile(r"(?:^|[^a-z])w(\d+)a\d+", re.IGNORECASE)
_BY_TYPE = re.compile(r"(?:^|[^a-z])(?:q?u?int|q?float|n?fp|nf|mxfp|nvfp)(\d+)", re.IGNORECASE)
_READABLE = range(1, 17)


def disagreements(table: Mapping[str, Any], bits_there: Set[float]) -> Iterator[str]:
    """Yield how the words of a table about bits disagree, with each other or with its weights, as ends of a sentence.

    Args:
        bits_there: the bits of the schemes of the weights.
    """
    if not bits_there or any(table.get(key) for key in _OF_SOME):
        return
    rows = [words for part in _of_groups(table) if (words := dict(_words_in(part)))]
    for words in rows:
        if len({*words.values()}) > 1:
            yield f"says two things, {' and '.join(f'{bits} bits ({word})' for word, bits in words.items())}"
            return
    everything = {word: bits for words in rows for word, bits in words.items()}
    if everything and not bits_there & {*everything.values()}:
        yield f"says that weights have {' or '.join(f'{bits} bits ({word})' for word, bits in everything.items())}"


def _of_groups(table: Mapping[str, Any]) -> Iterator[Mapping[str, Any]]:
    """Yield what compressed-tensors' settings say of each group of layers; the table itself if it has no groups."""
    groups = table.get("config_groups")
    if not isinstance(groups, Mapping):
        yield table
        return
    for group in groups.values():
        weights = group.get("weights") if isinstance(group, Mapping) else None
        if isinstance(weights, Mapping):
            yield {**weights, "format": group.get("format") or table.get("format")}


def _words_in(table: Mapping[str, Any], depth: int = 0) -> Iterator[tuple[str, int]]:
    """Yield each word of a table that says how many bits weights have, as it is written there, and how many."""
    for key, bits in _FLAGS.items():
        if table.get(key) is True:
            yield f"{key}=True", bits
    for key in _NUMBERS:
        value = table.get(key)
        if type(value) is int and value in _READABLE:
            yield f"{key}={value}", value
    for key in _NAMES:
        value = table.get(key)
        if isinstance(value, str) and (number := _in_name(value)) is not None:
            yield f"{key}={value[:40]!r}", number
    for key in _INSIDE if depth < len(_INSIDE) else ():
        if isinstance(inner := table.get(key), Mapping):
            yield from _words_in(inner, depth + 1)


def _in_name(name: str) -> int | None:
    """Return the bits of weights that the name of a scheme or dtype tells; None if it does not tell one number."""
    numbers = {int(digits) for digits in _BY_LETTERS.findall(name)[:1] or _BY_TYPE.findall(name)}
    return numbers.pop() if len(numbers) == 1 and numbers <= {*_READABLE} else None
