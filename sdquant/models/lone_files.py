"""Find the tensor of a lone file without a config that cannot be right, as far as the file itself tells.

`load_model` holds such a file against the config of a pipeline. Without one there are witnesses in the file: biases;
blocks, which are alike; the norms of a text encoder, which are as wide as its tables; and, of some families,
the config that the shapes together give, whatever pipeline the file is for. None of them accuses a file that fits some
config, and a shard of a model is not incomplete. What only a pipeline could tell is a doubt.
"""

from __future__ import annotations

import json
import re
from collections import Counter, defaultdict
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Any

from ..core import TensorInfo
from ..errors import BadFileError, UnsupportedFileError
from ..formats import model_families, resaved_names, sized_configs, text_encoders
from .single_file import original_names
from .single_file.convert import prefix_of

Shapes = Mapping[str, tuple[int, ...]]
_MOST = 10  # one in so many tensors may be wrong; of more, the config is not that of the file
_FEWEST = 4  # blocks of which one is told to be unlike the others
_FEWEST_LEAVES = 2  # of a block; what has fewer is a list of layers, each for another input
_BLOCK = re.compile(r"^(.*?\.)(\d+)(\..*)$")
_TABLE = re.compile(r"^(?!.*vis).*(?:^|\.)(shared|embed_tokens|token_embedding|position_embedding)\.weight$")
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


@dataclass(frozen=True, kw_only=True)
class LoneFile:
    """Facts about a file.

    Attributes:
        shapes: of all plain tensors and, dequantized, the quantized weights, as far as they are known, by the file's
            names; of weights whose shape nothing records, those of their parts.
        quantized: the names of all quantized weights. guessed: those with as many rows as their bias and as many
            columns as their values then make, which is not the shape of a convolution.
        integers: plain tensors of integers. family: see `model_families`. filename: without folders.
    """

    shapes: Shapes
    quantized: Collection[str] = ()
    guessed: Collection[str] = ()
    integers: Collection[str] = ()
    family: str | None
    filename: str

    @property
    def names(self) -> set[str]:
        """The names of the model's tensors."""
        return self.shapes.keys() | set(self.quantized)


def fault(file: LoneFile) -> Fault | None:
    """Return what cannot be right in a lone file; None if nothing shows."""
    row = model_families.recognise(file.names)
    first = _unlike_bias(file)
    if first is None and row is None and not is_shard(file.filename):
        first = next(filter(None, (_absent_mark(file, *near) for near in model_families.nearly(file.names))), None)
    if first is None and row is not None and row.component in ("transformer", "unet"):
        first = _unlike_config(file, row, complete=not is_shard(file.filename))
    if first is None and row is not None and row.component == "text_encoder":
        first = _unlike_width(file.shapes)
    if first is None and row is not None and row.component in ("transformer", "text_encoder"):
        first = _unlike_blocks(file.shapes)
    return first


def doubts(file: LoneFile) -> list[str]:
    """Return what is odd in a lone file, in sentences: it may be a model that nobody here knows."""
    row = model_families.recognise(file.names)
    if row is not None:
        return list(_strange_widths(file, row)) if row.component == "transformer" else []
    near = [
        (row, name)
        for row, name in model_families.nearly(file.names)
        if len(row.names) > 2 and _is_part_there(name, file.names)
    ]
    if not near or is_shard(file.filename):
        return []
    row, name = max(near, key=lambda pair: len(pair[0].names))
    return [
        f"nothing tells what model it is: it has {len(row.names) - 1} of the {len(row.names)} tensors by which sdquant "
        f"tells {row.family} ({row.component}), and lacks {name!r}; load_model refuses it unless parts= names its place"
    ]


def _is_part_there(name: str, names: Collection[str]) -> bool:
    """Return whether the rest of the block that a tensor would be in is there; True for one in no block."""
    match = _BLOCK.match(name)
    return match is None or any(other.startswith(f"{match[1]}{match[2]}.") for other in names)


def _absent_mark(file: LoneFile, row: model_families.Family, name: str) -> Fault | None:
    """Return the fault if the one tensor that a family would be told by is in all other blocks, or if the file has all
    the rest of the model."""
    match = _BLOCK.match(name)
    if match is not None:
        leaves: dict[str, set[str]] = defaultdict(set)  # by block
        for other in file.names:
            peer = _BLOCK.match(other)
            if peer is not None and peer[1] == match[1]:
                leaves[peer[2]].add(peer[3])
        others = [names for number, names in leaves.items() if number != match[2]]
        if match[2] in leaves and len(others) >= _FEWEST - 1 and all(match[3] in names for names in others):
            return Fault(name, "the file lacks it, and has it of every other block")
    if len(row.names) > 1 and row.component in ("transformer", "unet"):
        family = model_families.sd_version(file.shapes) if row.family == "sd" else row.family
        comparison = _compared(replace(file, family=family), row)
        if comparison.absent == [name] and not comparison.wrong:
            return Fault(name, "the file lacks it, and has the rest of the model")
    return None


def unfolded(shapes: Shapes) -> Shapes:
    """Return shapes with five dimensions for what stable-diffusion.cpp folds into ggml's four: the first two are one
    then, and a bias has the first."""
    whole = dict(shapes)
    for name, shape in shapes.items():
        bias = shapes.get(f"{name.removesuffix('weight')}bias", ())
        rows = bias[0] if len(bias) == 1 and name.endswith(".weight") and len(shape) == 4 else 0
        if 0 < rows < shape[0] and shape[0] % rows == 0 and shape[1] != rows:  # transposed ones have it second
            whole[name] = (rows, shape[0] // rows, *shape[1:])
    return whole


def _unlike_bias(file: LoneFile) -> Fault | None:
    for name, shape in file.shapes.items():
        bias = file.shapes.get(f"{name.removesuffix('weight')}bias")
        if bias is None or not name.endswith(".weight") or not shape:
            continue
        # GPT-2 has it the other way round, and so have transposed convolutions.
        sides = (shape[:1],) if name in file.quantized else (shape[:1], shape[1:2])
        if bias not in sides:
            return Fault(name, f"it has shape {list(shape)}, but its bias has {list(bias)}")
    return None


@dataclass(frozen=True)
class _Compared:
    """A file beside the model that its shapes call for: names in the file of tensors of other shapes, and of those that
    it lacks. expected: all shapes by the names without the prefix."""

    prefix: str
    expected: Shapes
    wrong: list[str]
    absent: list[str]


def _compared(file: LoneFile, row: model_families.Family) -> _Compared:
    prefix = prefix_of(file.shapes.keys())
    there = {name.removeprefix(prefix): shape for name, shape in file.shapes.items() if name.startswith(prefix)}
    published = resaved_names.published(there)
    now = dict(zip(published, there, strict=True))
    shapes = _expected(sized_configs.sized(file.family, published), row.foreign)
    expected = {now.get(name, name): shape for name, shape in shapes.items()}
    wrong = [
        prefix + name
        for name, shape in there.items()
        if _without_ones(expected.get(name, shape)) != _without_ones(shape)
        and (prefix + name not in file.guessed or len(expected[name]) == 2)
    ]
    absent = [prefix + name for name in expected if name not in there and prefix + name not in file.quantized]
    return _Compared(prefix, expected, wrong, absent)


def _without_ones(shape: tuple[int, ...]) -> list[int]:
    """Return the dimensions that loading compares: ggml drops those of 1."""
    return [size for size in shape if size != 1]


def _unlike_config(file: LoneFile, row: model_families.Family, *, complete: bool) -> Fault | None:
    comparison = _compared(file, row)
    if not comparison.expected or not is_few(len(comparison.wrong) + len(comparison.absent), len(comparison.expected)):
        return None
    for name in comparison.wrong:
        return Fault(
            name,
            f"it has shape {list(file.shapes[name])}, but the sizes of the model's other tensors call for "
            f"{list(comparison.expected[name.removeprefix(comparison.prefix)])}",
        )
    for name in file.integers:
        if name.removeprefix(comparison.prefix) in comparison.expected:
            return Fault(name, "it holds integers, and the model has floats there")
    if comparison.absent and complete:
        return Fault(comparison.absent[0], "the file lacks it, and has the rest of the model")
    return None


def _expected(config: Mapping[str, Any], foreign: bool) -> Shapes:
    """Return the shapes of a model's tensors by the file's names without a prefix; {} if they are not known."""
    return _shapes_of(json.dumps(config, sort_keys=True), foreign)


@lru_cache(maxsize=4)
def _shapes_of(text: str, foreign: bool) -> Shapes:
    """See `_expected`. text: the config as JSON."""
    from . import components

    config = json.loads(text)
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


def _unlike_width(shapes: Shapes) -> Fault | None:
    """Return the table of embeddings of a text encoder that is not as wide as its norms."""
    width, _ = text_encoders.sizes({name: TensorInfo(dtype="", shape=s, nbytes=0) for name, s in shapes.items()})
    for name, shape in shapes.items():
        if width is not None and _TABLE.search(name) and len(shape) == 2 and shape[1] != width:
            return Fault(name, f"it has shape {list(shape)}, but the model's norms have {width} values")
    return None


def _strange_widths(file: LoneFile, row: model_families.Family) -> Iterator[str]:
    """Yield a sentence for each input whose width no model of the family is known to have, which nothing else shows."""
    prefix = prefix_of(file.shapes.keys())
    there = {name.removeprefix(prefix): shape for name, shape in file.shapes.items() if name.startswith(prefix)}
    for name, widths in sized_configs.strange_widths(file.family, there):
        yield (
            f"{prefix + name!r} has shape {list(there[name])}, and is for {there[name][1]} channels; {row.family} has "
            f"{widths}: unless that is another variant, load_model refuses it with every pipeline"
        )


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
        if len(numbers) < _FEWEST or numbers != list(range(len(numbers))) or len(leaves) < _FEWEST_LEAVES:
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
