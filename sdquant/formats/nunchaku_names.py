"""Nunchaku's files under diffusers' names: which layers it has merged, cut, interleaved or shifted, by model, as rows.

Its runtime has blocks of its own: q, k and v are one layer, the rows of a modulation are interleaved with 1 added to
its scales, and activations behind a GELU are shifted. That cannot be seen in tensors, so only models with rows here are
read, and those whose config says `nunchaku_lite`: diffusers' own blocks, with layers of that packing and nothing else.
Imports no torch for other files.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

from ..backends import NUNCHAKU_ORDER, NUNCHAKU_SPLITS, is_nunchaku_text, nunchaku_piece
from ..core import dtype_named
from ..errors import UnsupportedFileError
from ..utils import strict_json
from .tensor_file import Recipe

if TYPE_CHECKING:
    from pathlib import Path

    from torch import Tensor

    from ..core import PrequantizedWeight, TensorInfo
    from .tensor_file import Get

_TILE = 128


@dataclass(frozen=True)
class BlockLayer:
    """A layer of a block.

    Attributes:
        blocks: what stands before its name, as a pattern. sources: in the file; several lie side by side.
        outputs: in diffusers; several share its rows equally. shifted: the source whose activations are.
        splits: chunks whose rows are interleaved.
    """

    blocks: str
    sources: tuple[str, ...]
    outputs: tuple[str, ...]
    shifted: str = ""
    splits: int = 1

    @property
    def is_sign(self) -> bool:
        """Whether no file of diffusers' own names has such a layer."""
        return len(self.outputs) > 1 or len(self.sources) > 1


def _same(blocks: str, name: str, *, shifted: bool = False, splits: int = 1) -> BlockLayer:
    return BlockLayer(blocks, (name,), (name,), shifted=name if shifted else "", splits=splits)


def _named(blocks: str, names: Mapping[str, str]) -> Iterator[BlockLayer]:
    for theirs, ours in names.items():
        yield BlockLayer(blocks, (theirs,), (ours,))


_DOUBLE, _SINGLE = r"transformer_blocks\.\d+\.", r"single_transformer_blocks\.\d+\."
_Z_IMAGE, _UNET = r"(?:layers|noise_refiner|context_refiner)\.\d+\.", r"\w+_blocks?\..*transformer_blocks\.\d+\."
_QKV = ("attn.to_q", "attn.to_k", "attn.to_v")
_ADDED = ("attn.add_q_proj", "attn.add_k_proj", "attn.add_v_proj")
_ROWS: tuple[BlockLayer, ...] = (
    # FLUX.1
    BlockLayer(_DOUBLE, ("qkv_proj",), _QKV),
    BlockLayer(_DOUBLE, ("qkv_proj_context",), _ADDED),
    BlockLayer(_DOUBLE, ("mlp_fc2",), ("ff.net.2",), shifted="mlp_fc2"),
    BlockLayer(_DOUBLE, ("mlp_context_fc2",), ("ff_context.net.2",), shifted="mlp_context_fc2"),
    *_named(_DOUBLE, {
        "out_proj": "attn.to_out.0", "out_proj_context": "attn.to_add_out", "mlp_fc1": "ff.net.0.proj",
        "mlp_context_fc1": "ff_context.net.0.proj", "norm_q": "attn.norm_q", "norm_k": "attn.norm_k",
        "norm_added_q": "attn.norm_added_q", "norm_added_k": "attn.norm_added_k",
    }),
    _same(_DOUBLE, "norm1.linear", splits=6),
    _same(_DOUBLE, "norm1_context.linear", splits=6),
    BlockLayer(_SINGLE, ("qkv_proj",), _QKV),
    BlockLayer(_SINGLE, ("out_proj", "mlp_fc2"), ("proj_out",), shifted="mlp_fc2"),
    *_named(_SINGLE, {"mlp_fc1": "proj_mlp", "norm_q": "attn.norm_q", "norm_k": "attn.norm_k"}),
    _same(_SINGLE, "norm.linear", splits=3),
    # FLUX.1 under the names of Nunchaku's second version, which are diffusers' but for the joined ones
    *(_same(_DOUBLE, f"{stream}.net.2", shifted=True) for stream in ("ff", "ff_context")),
    # Qwen-Image
    BlockLayer(_DOUBLE, ("attn.to_qkv",), _QKV),
    BlockLayer(_DOUBLE, ("attn.add_qkv_proj",), _ADDED),
    *(_same(_DOUBLE, f"{stream}_mlp.net.2", shifted=True) for stream in ("img", "txt")),
    *(_same(_DOUBLE, f"{stream}_mod.1", splits=6) for stream in ("img", "txt")),
    # Z-Image
    BlockLayer(_Z_IMAGE, ("attention.to_qkv",), ("attention.to_q", "attention.to_k", "attention.to_v")),
    BlockLayer(_Z_IMAGE, ("feed_forward.net.0.proj",), ("feed_forward.w3", "feed_forward.w1")),
    BlockLayer(_Z_IMAGE, ("feed_forward.net.2",), ("feed_forward.w2",)),
    # Stable Diffusion XL, whose feed-forward layers have no such GELU
    BlockLayer(_UNET, ("attn1.to_qkv",), ("attn1.to_q", "attn1.to_k", "attn1.to_v")),
)  # fmt: skip
# Layers without a row whose inputs no GELU makes: of attention, before the GELU, and of the UNet's gated ones.
_UNSHIFTED = re.compile(r"\.(attn\d?|attention)\.|\.net\.0\.proj\.|_blocks?\..*transformer_blocks\.\d+\.ff\.net\.2\.")
_PATTERNS = tuple((re.compile(rf"({row.blocks})({'|'.join(map(re.escape, row.sources))})"), row) for row in _ROWS)


def config_in(metadata: Mapping[str, Any]) -> dict[str, Any]:
    """Return the config.json that the metadata of Nunchaku's single files have, with diffusers' class; {} for none."""
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
    return {**config, "_class_name": name.removeprefix("Nunchaku").replace("2dModel", "2DModel")}


@dataclass(kw_only=True)
class Tensors:
    """Fields of a `Checkpoint`, of the same names."""

    path: Path
    tensors: dict[str, TensorInfo]
    home: dict[str, Path]
    prequantized: dict[str, PrequantizedWeight]
    recipes: dict[str, Recipe] = field(default_factory=dict)
    keys: dict[str, str] = field(default_factory=dict)


def under_diffusers_names(src: Tensors, methods: Collection[tuple[str, str]]) -> Tensors:
    """Return a component with Nunchaku's layers under diffusers' names; others as they are.

    Args:
        methods: the places that name a method, and the methods.

    Raises:
        UnsupportedFileError: nothing tells how its layers are to be read.
    """
    found = {name: one for name, one in src.prequantized.items() if NUNCHAKU_ORDER in one.details}
    if not found:
        return src
    parts = {key for one in src.prequantized.values() for key in (*one.keys.values(), *one.extra)}
    names = [*(key for key in src.tensors if key not in parts), *src.prequantized]
    rows = {name: _row(name) for name in names}
    known = any(row is not None and row[1].is_sign for name, row in rows.items() if name in found)
    if not known:
        _refuse_unknown(src, found, methods)
        rows = dict.fromkeys(names)
    target = _Renaming(src, frozenset(names))
    for name, row in rows.items():
        if row is None:
            target.same(name, known=known)
        else:
            target.of_row(name, *row)
    return target.result


def _row(name: str) -> tuple[str, BlockLayer] | None:
    """Return what stands before the layer of a tensor, and its row."""
    layer = name.rpartition(".")[0]
    for pattern, row in _PATTERNS:
        match = pattern.fullmatch(layer)
        if match is not None:
            return match[1], row
    return None


def _refuse_unknown(
    src: Tensors, found: Mapping[str, PrequantizedWeight], methods: Collection[tuple[str, str]]
) -> None:
    if any(method.lower() == "nunchaku_lite" for _, method in methods) or all(map(is_nunchaku_text, found.values())):
        return
    raise UnsupportedFileError(
        f"Cannot load {src.path}",
        f"it has weights of Nunchaku ({min(found)!r}), and nothing tells whether its rows are interleaved and its "
        "activations shifted, as in Nunchaku's own files (of which sdquant knows FLUX.1, Qwen-Image, Z-Image and "
        "Stable Diffusion XL), or not, as in diffusers' nunchaku_lite",
        'If it is of nunchaku_lite, put its config.json with "quant_method": "nunchaku_lite" beside it; otherwise use '
        "a file of the same model in a format that `sdquant matrix` lists",
    )


def _rows_of(name: str, first: int, last: int) -> Callable[[Get], Tensor]:
    return lambda get: get(name)[first:last]


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
        if known and weight is not None and weight.scheme == "svdquant_w4a4" and not _UNSHIFTED.search(name):
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
        if last not in ("weight", "bias"):
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
        if any(shifted) and any(key not in self.names for key in self._biases(block, row)):
            raise self._unread(name, "its activations are shifted, and it has no bias that was made for that")
        for output, rows in zip(row.outputs, self._shares(name, whole[0], len(row.outputs)), strict=True):
            if last == "weight":
                made = nunchaku_piece(whole, rows, row.splits, self.src.tensors)
                self._weight(f"{block}{output}.weight", made)
            else:
                pieces = tuple(nunchaku_piece([one], rows, row.splits, self.src.tensors) for one in whole)
                keys = tuple(key if key in self.names else None for key in there)
                self._bias(f"{block}{output}.{last}", pieces, keys, shifted)

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
