"""Nunchaku's files under diffusers' names: which layers it has merged, cut, interleaved or shifted, by model, as rows.

Its runtime has blocks of its own: q, k and v are one layer, the rows of a modulation are interleaved with 1 added to
its scales, and activations behind a GELU are shifted. That cannot be seen in tensors, so only models with rows here are
read, and those whose config says `nunchaku_lite`: diffusers' own blocks, with layers of that packing and nothing else.
Imports no torch for other files.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

from ..backends import NUNCHAKU_ORDER, NUNCHAKU_SPLITS, is_nunchaku_text, nunchaku_picked, nunchaku_piece
from ..core import dtype_named
from ..errors import UnsupportedFileError
from ..utils import strict_json
from . import nunchaku_sana
from .nunchaku_rows import BlockLayer, is_unshifted, rows_of, shift_is_unknown
from .tensor_file import Recipe

if TYPE_CHECKING:
    from pathlib import Path

    from torch import Tensor

    from ..core import PrequantizedWeight, TensorInfo
    from .tensor_file import Get

_TILE = 128


def config_in(metadata: Mapping[str, Any]) -> dict[str, Any]:
    """Return the config.json that the metadata of Nunchaku's single files have, with its class; {} for none."""
    if not isinstance(metadata.get("model_class"), str) or not isinstance(metadata.get("config"), str):
        return {}
    try:
        config = strict_json.parse(metadata["config"])
    except ValueError:
        return {}
    if not isinstance(config, dict):
        return {}
    name = config.get("_class_name", metadata["model_class"])
    if not isinstance(name, str):
        return {}
    name = name.removeprefix("Nunchaku").replace("2dModel", "2DModel")
    if "_class_name" not in config and "model_type" in config:  # a text encoder, transformers' class
        return {**config, "architectures": [name]}
    return {**config, "_class_name": name}


@dataclass(kw_only=True)
class Tensors:
    """Fields of a `Checkpoint`, of the same names."""

    path: Path
    tensors: dict[str, TensorInfo]
    home: dict[str, Path]
    prequantized: dict[str, PrequantizedWeight]
    recipes: dict[str, Recipe] = field(default_factory=dict)
    keys: dict[str, str] = field(default_factory=dict)


def under_diffusers_names(src: Tensors, methods: Collection[tuple[str, str]], config: Mapping[str, Any]) -> Tensors:
    """Return a component with Nunchaku's layers under diffusers' names; others as they are.

    Args:
        methods: the places that name a method, and the methods. config: of the model, {} for none.

    Raises:
        UnsupportedFileError: nothing tells how its layers are to be read.
    """
    found = {name: one for name, one in src.prequantized.items() if NUNCHAKU_ORDER in one.details}
    if not found:
        return src
    parts = {key for one in src.prequantized.values() for key in (*one.keys.values(), *one.extra)}
    names = [*(key for key in src.tensors if key not in parts), *src.prequantized]
    every = frozenset(names)
    rows, sana = rows_of(every), nunchaku_sana.layers(src.tensors, every, config)
    known = bool(sana) or any(row is not None and row[1].is_sign for name, row in rows.items() if name in found)
    if not known:
        _refuse_unknown(src, found, methods)
        rows = dict.fromkeys(names)
    target = _Renaming(src, every)
    for name, row in rows.items():
        match = nunchaku_sana.LAYER.fullmatch(name) if sana and row is None else None
        layer = f"{match[2]}.{match[3]}" if match else ""
        if match and layer in sana:
            target.of_sana(name, match[1], sana[layer])
        elif match and layer == nunchaku_sana.DEPTH:
            target.depth(name, match[1], sana["ff.inverted_conv"].parts[0])
        elif row is None:
            target.same(name, known=known)
        else:
            target.of_row(name, *row)
    return target.result


def _refuse_unknown(
    src: Tensors, found: Mapping[str, PrequantizedWeight], methods: Collection[tuple[str, str]]
) -> None:
    if any(method.lower() == "nunchaku_lite" for _, method in methods) or all(map(is_nunchaku_text, found.values())):
        return
    raise UnsupportedFileError(
        f"Cannot load {src.path}",
        f"it has weights of Nunchaku ({min(found)!r}), and nothing tells whether its rows are interleaved and its "
        "activations shifted, as in Nunchaku's own files (of which sdquant knows FLUX.1 and 2, Qwen-Image, Z-Image, "
        "SANA and Stable Diffusion XL), or not, as in diffusers' nunchaku_lite",
        'If it is of nunchaku_lite, say so, with config={"quant_method": "nunchaku_lite"}; else use a file of the same '
        "model in a format that `sdquant matrix` lists",
    )


def _rows_of(name: str, first: int, last: int) -> Callable[[Get], Tensor]:
    return lambda get: get(name)[first:last]


def _zeros(size: int) -> Callable[[Get], Tensor]:
    def make(get: Get) -> Tensor:
        import torch

        return torch.zeros(size, dtype=torch.bfloat16, device="cpu")

    return make


def _channels(name: str, picks: nunchaku_sana.Picks, *, is_weight: bool) -> Callable[[Get], Tensor]:
    def make(get: Get) -> Tensor:
        from ..backends import nunchaku_rows

        stored = get(name)
        values = stored[nunchaku_rows(picks, stored.device)]
        return values.permute(0, 3, 1, 2).contiguous() if is_weight else values

    return make


class _Renaming:
    """A component, and what it is under the model's names so far. names: of its plain tensors and quantized weights."""

    def __init__(self, src: Tensors, names: frozenset[str]) -> None:
        self.src, self.names = src, names
        self.result = Tensors(path=src.path, tensors={}, home={}, prequantized={})

    def same(self, name: str, *, known: bool) -> None:
        """Take a tensor or weight under its own name. known: the model has rows."""
        weight = self._found(name.rpartition(".")[0])
        if known and weight is not None and weight.scheme == "awq_w4a16":
            raise self._unread(name, "whether its rows are interleaved is not known for this layer")
        if known and weight is not None and weight.scheme == "svdquant_w4a4" and not is_unshifted(name):
            raise self._unread(name, "whether its activations are shifted is not known for this layer")
        if name in self.src.prequantized:
            self._weight(name, self.src.prequantized[name])
        elif weight is not None and name.endswith(".bias") and not is_nunchaku_text(weight):
            self._bias(name, (weight,), (name,), (False,))
        else:
            self._plain(name, name)

    def of_row(self, name: str, block: str, row: BlockLayer) -> None:
        """Take what a row makes of a tensor or weight; of layers side by side, with the first."""
        last = name.rpartition(".")[2]
        if last not in ("weight", "bias") or (last == "bias" and row.is_stacked):  # of which diffusers' has none
            self._plain(name, name)
            return
        weights = [self._found(block + source) for source in row.sources]
        there = [f"{block}{source}.{last}" for source in row.sources]
        if not any(weights):
            self._floats(name, there, [f"{block}{output}.{last}" for output in row.outputs])
            return
        whole = [weight for weight in weights if weight is not None]
        if len(whole) < len(weights) or len({weight.scheme for weight in whole}) > 1:
            raise self._unread(name, f"{' and '.join(row.sources)} are not quantized alike")
        if name != next(key for key in there if key in self.names):
            return  # it came with the other
        shifted = tuple(source == row.shifted and whole[0].scheme == "svdquant_w4a4" for source in row.sources)
        if any(shifted) and shift_is_unknown(self.names):
            raise self._unread(
                name, "programs that make such files do not agree on whether its activations are shifted"
            )
        if any(shifted) and any(key not in self.names for key in self._biases(block, row)):
            raise self._unread(name, "its activations are shifted, and it has no bias that was made for that")
        for output, rows in zip(row.outputs, self._shares(name, whole[0], len(row.outputs)), strict=True):
            if last == "weight":
                piece = nunchaku_piece(whole, rows, row.splits, self.src.tensors, is_stacked=row.is_stacked)
                self._weight(f"{block}{output}.weight", piece)
            else:
                pieces = tuple(nunchaku_piece([one], rows, row.splits, self.src.tensors) for one in whole)
                keys = tuple(key if key in self.names else None for key in there)
                self._bias(f"{block}{output}.{last}", pieces, keys, shifted)

    def of_sana(self, name: str, block: str, stored: nunchaku_sana.Stored) -> None:
        """Take a layer of SANA's; the biases that it has in diffusers are zeros if the file has none."""
        layer, _, last = name.rpartition(".")
        weight = self._found(layer)
        if weight is None or weight.shape is None or weight.scheme == "awq_w4a16":
            raise self._unread(name, "it is not quantized as those of SANA are")
        if weight.shape[0] != stored.rows:
            raise self._unread(name, f"it has {weight.shape[0]} rows, but by the sizes of the model {stored.rows}")
        for part in stored.parts:
            piece, bias = nunchaku_picked(weight, part.picks, part.shape, self.src.tensors), f"{block}{part.layer}.bias"
            if last == "weight":
                self._weight(f"{block}{part.layer}.weight", piece)
            elif part.has_bias:
                self._bias(bias, (piece,), (name,), (False,))
            if last == "weight" and part.has_bias and f"{layer}.bias" not in self.names:
                self._recipe(bias, (piece.keys["scale"],), part.shape[:1], "bfloat16", _zeros(part.shape[0]))

    def depth(self, name: str, block: str, part: nunchaku_sana.Part) -> None:
        """Take SANA's convolution over each channel, whose channels are those of the layer before it, `part`."""
        last, info = name.rpartition(".")[2], self.src.tensors[name]
        channels, dimensions = part.shape[0], 4 if last == "weight" else 1
        if len(info.shape) != dimensions:
            raise self._unread(name, f"its shape is {list(info.shape)}, not one of {dimensions} dimensions")
        shape = (channels, 1, *info.shape[1:3]) if last == "weight" else (channels,)
        make = _channels(name, part.picks, is_weight=last == "weight")
        self._recipe(f"{block}ff.conv_depth.{last}", (name,), shape, info.dtype, make)

    def _biases(self, block: str, row: BlockLayer) -> list[str]:
        return [f"{block}{source}.bias" for source in row.sources if source == row.shifted]

    def _found(self, layer: str) -> PrequantizedWeight | None:
        weight = self.src.prequantized.get(f"{layer}.weight")
        return weight if weight is not None and NUNCHAKU_ORDER in weight.details else None

    def _shares(self, name: str, weight: PrequantizedWeight, number: int) -> list[tuple[int, int] | None]:
        """Return the rows of each of several outputs, which are equally many and whole tiles."""
        if number == 1:
            return [None]
        assert weight.shape is not None
        size = weight.shape[0] // number
        if size * number != weight.shape[0] or size % _TILE:
            raise self._unread(name, f"its {weight.shape[0]} rows are not {number} times whole tiles of {_TILE}")
        return [(at * size, (at + 1) * size) for at in range(number)]

    def _weight(self, name: str, weight: PrequantizedWeight) -> None:
        keys = (*weight.keys.values(), *weight.extra)
        self.result.tensors |= {key: self.src.tensors[key] for key in keys}
        self.result.home |= {key: self.src.home[key] for key in keys}
        self.result.prequantized[name] = replace(weight, name=name)

    def _bias(
        self,
        name: str,
        weights: Sequence[PrequantizedWeight],
        keys: Sequence[str | None],
        shifted: Sequence[bool],
    ) -> None:
        """Make the bias of a layer of the order of its rows, which its tensor in the file has too."""
        from ..backends import nunchaku_bias

        there = [key for key in keys if key is not None]
        is_computed = any(shifted) or len(there) > 1 or NUNCHAKU_SPLITS in weights[0].details
        dtype = "float32" if is_computed else self.src.tensors[there[0]].dtype
        of_weights = (key for one, is_one in zip(weights, shifted, strict=True) if is_one for key in one.keys.values())
        assert weights[0].shape is not None
        self._recipe(
            name, (*there, *of_weights), weights[0].shape[:1], dtype,
            lambda get: nunchaku_bias(weights, keys, shifted, get),
        )  # fmt: skip

    def _floats(self, name: str, there: list[str], outputs: list[str]) -> None:
        """Take an unquantized tensor of a layer that is merged, or under another name."""
        if len(there) > 1:  # cut by columns: diffusers' own name would have one tensor
            raise self._unread(name, "its layer is cut in two and not quantized")
        info = self.src.tensors[name]
        if len(outputs) == 1 or not info.shape:
            self._plain(outputs[0], name)
            return
        size = info.shape[0] // len(outputs)
        for at, output in enumerate(outputs):
            share = _rows_of(name, at * size, (at + 1) * size)
            self._recipe(output, (name,), (size, *info.shape[1:]), info.dtype, share)

    def _recipe(
        self, name: str, sources: tuple[str, ...], shape: tuple[int, ...], dtype: str, make: Callable[[Get], Tensor]
    ) -> None:
        recipe = Recipe(sources, None, shape, dtype_named(dtype), make)
        self.result.tensors[name], self.result.recipes[name], self.result.home[name] = (
            recipe.info,
            recipe,
            self.src.home[sources[0]],
        )

    def _plain(self, name: str, key: str) -> None:
        self.result.tensors[name], self.result.home[name] = self.src.tensors[key], self.src.home[key]
        if name != key:
            self.result.keys[name] = key

    def _unread(self, name: str, why: str) -> UnsupportedFileError:
        return UnsupportedFileError(
            f"Cannot load {self.src.path}",
            f"its {name!r} belongs to a layer of Nunchaku's, and {why}",
            "Use a file of the same model in a format that `sdquant matrix` lists",
        )
