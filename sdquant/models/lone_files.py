"""Find the tensor of a lone file without a config that cannot be right, as far as the file itself tells.

`load_model` holds such a file against the config of a pipeline. Without one there are three witnesses: the biases; the
blocks of a model, which are alike; and, of some families, the config that the shapes together give, whatever pipeline
the file is for. None of them accuses a file that fits some config, and a shard of a model is not incomplete.
"""

from __future__ import annotations

import re
from collections import Counter, defaultdict
from collections.abc import Collection, Mapping
from dataclasses import dataclass

from ..errors import BadFileError, UnsupportedFileError
from ..formats import known_configs, model_families
from .single_file import original_names
from .single_file.convert import prefix_of

Shapes = Mapping[str, tuple[int, ...]]
_MOST = 10  # one in so many tensors may be wrong; of more, the config is not that of the file
_FEWEST = 4  # blocks of which one is told to be unlike the others
_BLOCK = re.compile(r"^(.*?\.)(\d+)(\..*)$")
_SHARD = re.compile(r"-\d+-of-\d+\.")


@dataclass(frozen=True)
class Fault:
    """A tensor that cannot be right: its name in the file, and a reason."""

    name: str
    why: str


def is_shard(filename: str) -> bool:
    """Return whether the name of a file says that it is one of several."""
    return _SHARD.search(filename) is not None


def is_few(count: int, total: int) -> bool:
    """Return whether so many faults are a damage, and not a sign of another model, or of a part of one."""
    return count * _MOST <= total


def fault(
    shapes: Shapes, quantized: Collection[str], integers: Collection[str], *, family: str | None, filename: str
) -> Fault | None:
    """Return what cannot be right in a lone file; None if nothing shows.

    Args:
        shapes: of all plain tensors and, dequantized, the quantized weights of the file, as far as they are known, by
            the file's names.
        quantized: the names of all these weights. integers: plain tensors of integers. family: see `model_families`.
    """
    row = model_families.recognise(shapes.keys() | set(quantized))
    first = _unlike_bias(shapes, quantized)
    if first is None and row is not None and row.component in ("transformer", "unet"):
        first = _unlike_config(shapes, quantized, integers, row, family, complete=not is_shard(filename))
    if first is None and row is not None and row.component in ("transformer", "text_encoder"):
        first = _unlike_blocks(shapes)
    return first


def _unlike_bias(shapes: Shapes, quantized: Collection[str]) -> Fault | None:
    for name, shape in shapes.items():
        bias = shapes.get(f"{name.removesuffix('weight')}bias")
        if bias is None or not name.endswith(".weight") or len(shape) != 2:
            continue
        sides = (shape[:1],) if name in quantized else (shape[:1], shape[1:])  # GPT-2 has it the other way round
        if bias not in sides:
            return Fault(name, f"it has shape {list(shape)}, but its bias has {list(bias)}")
    return None


def _unlike_config(
    shapes: Shapes,
    quantized: Collection[str],
    integers: Collection[str],
    row: model_families.Family,
    family: str | None,
    *,
    complete: bool,
) -> Fault | None:
    prefix = prefix_of(shapes.keys())
    there = {name.removeprefix(prefix): shape for name, shape in shapes.items() if name.startswith(prefix)}
    expected = _expected(known_configs.sized(family, there), row.foreign)
    wrong = [name for name, shape in there.items() if expected.get(name, shape) != shape]
    absent = [name for name in expected if name not in there and prefix + name not in quantized]
    if not expected or not is_few(len(wrong) + len(absent), len(expected)):
        return None
    for name in wrong:
        return Fault(
            prefix + name,
            f"it has shape {list(there[name])}, but the sizes of the model's other tensors call for "
            f"{list(expected[name])}",
        )
    for name in integers:
        if name.removeprefix(prefix) in expected:
            return Fault(name, "it holds integers, and the model has floats there")
    if absent and complete:
        return Fault(prefix + absent[0], "the file lacks it, and has the rest of the model")
    return None


def _expected(config: Mapping[str, object], foreign: bool) -> Shapes:
    """Return the shapes of a model's tensors by the file's names without a prefix; {} if they are not known."""
    from . import components

    kind = config.get("_class_name")
    if not isinstance(kind, str):
        return {}
    try:
        model = components.empty("diffusers", kind, config)
    except (BadFileError, UnsupportedFileError):  # sizes that no model can have: the file is damaged, who knows where
        return {}
    ours = {name: tuple(tensor.shape) for name, tensor in model.state_dict(keep_vars=True).items()}
    if not foreign:
        return ours
    rows = original_names.written(kind, ours) or []
    return {row.name: original_names.shape_of(row, ours) for row in rows}


def _unlike_blocks(shapes: Shapes) -> Fault | None:
    """Return the one tensor of a model whose shape, or presence, is not that of its peers in all other blocks.

    A block that is meant to be another kind differs in several. The last block's modulation may have fewer rows.
    """
    lists: dict[str, dict[str, dict[int, tuple[int, ...]]]] = defaultdict(lambda: defaultdict(dict))
    for name, shape in shapes.items():
        match = _BLOCK.match(name)
        if match is not None:
            lists[match[1]][match[3]][int(match[2])] = shape
    faults: list[Fault] = []
    for path, leaves in lists.items():
        numbers = sorted({number for blocks in leaves.values() for number in blocks})
        if len(numbers) < _FEWEST or numbers != list(range(len(numbers))):
            continue
        for leaf, blocks in leaves.items():
            faults += _odd(path, leaf, blocks, numbers)
    return faults[0] if len(faults) == 1 else None


def _odd(path: str, leaf: str, blocks: Mapping[int, tuple[int, ...]], numbers: list[int]) -> list[Fault]:
    usual, count = Counter(blocks.values()).most_common(1)[0]
    if count < len(numbers) - 1:
        return [] if count == len(blocks) else [Fault(path, "")] * 2  # its blocks are of several kinds
    for number in numbers:
        shape, inner = blocks.get(number), number not in (0, numbers[-1])
        name = f"{path}{number}{leaf}"
        if shape is None and inner:
            return [Fault(name, "the file lacks it, and has it of every other block")]
        if shape is not None and shape != usual and (inner or shape[:1] == usual[:1]):
            return [Fault(name, f"it has shape {list(shape)}, but that of every other block has {list(usual)}")]
    return []
