"""Layers of Nunchaku's files by model, as rows: what diffusers calls them, and what its runtime has merged or shifted.

Read off its loaders and converters (nunchaku, deepcompressor) and, for FLUX.2, those of tonera's files. Activations
behind a GELU are shifted, but for a gated one's, and FLUX.2's.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass


@dataclass(frozen=True)
class BlockLayer:
    """A layer of a block.

    Attributes:
        blocks: what stands before its name, as a pattern. sources: in the file; several lie side by side.
        outputs: in diffusers; several share its rows equally. shifted: the source whose activations are.
        splits: chunks whose rows are interleaved. is_stacked: several sources lie under one another.
    """

    blocks: str
    sources: tuple[str, ...]
    outputs: tuple[str, ...]
    shifted: str = ""
    splits: int = 1
    is_stacked: bool = False

    @property
    def is_sign(self) -> bool:
        """Whether no file of diffusers' own names has such a layer."""
        return len(self.outputs) > 1 or len(self.sources) > 1


def _same(blocks: str, name: str, *, shifted: bool = False, splits: int = 1) -> BlockLayer:
    return BlockLayer(blocks, (name,), (name,), shifted=name if shifted else "", splits=splits)


def _named(blocks: str, names: Mapping[str, str]) -> Iterator[BlockLayer]:
    for theirs, ours in names.items():
        yield BlockLayer(blocks, (theirs,), (ours,))


def _patterns(*rows: BlockLayer) -> _Patterns:
    return tuple((re.compile(rf"({row.blocks})({'|'.join(map(re.escape, row.sources))})"), row) for row in rows)


_Patterns = tuple[tuple[re.Pattern[str], BlockLayer], ...]
_DOUBLE, _SINGLE = r"transformer_blocks\.\d+\.", r"single_transformer_blocks\.\d+\."
_Z_IMAGE, _UNET = r"(?:layers|noise_refiner|context_refiner)\.\d+\.", r"\w+_blocks?\..*transformer_blocks\.\d+\."
_QKV = ("attn.to_q", "attn.to_k", "attn.to_v")
_ADDED = ("attn.add_q_proj", "attn.add_k_proj", "attn.add_v_proj")
_NORMS = {f"norm_{name}": f"attn.norm_{name}" for name in ("q", "k", "added_q", "added_k")}
_PATTERNS = _patterns(
    # FLUX.1
    BlockLayer(_DOUBLE, ("qkv_proj",), _QKV),
    BlockLayer(_DOUBLE, ("qkv_proj_context",), _ADDED),
    BlockLayer(_DOUBLE, ("mlp_fc2",), ("ff.net.2",), shifted="mlp_fc2"),
    BlockLayer(_DOUBLE, ("mlp_context_fc2",), ("ff_context.net.2",), shifted="mlp_context_fc2"),
    *_named(_DOUBLE, {
        "out_proj": "attn.to_out.0", "out_proj_context": "attn.to_add_out", "mlp_fc1": "ff.net.0.proj",
        "mlp_context_fc1": "ff_context.net.0.proj", **_NORMS,
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
    # SANA, whose other layers `nunchaku_sana` has
    BlockLayer(_DOUBLE, ("cross_attn.kv_linear",), ("attn2.to_k", "attn2.to_v")),
    # Stable Diffusion XL, whose feed-forward layers have no such GELU
    BlockLayer(_UNET, ("attn1.to_qkv",), ("attn1.to_q", "attn1.to_k", "attn1.to_v")),
)  # fmt: skip
# FLUX.2: under names as diffusers', and as those of FLUX.1 above. The parts of a layer that diffusers has in one.
_FLUX2 = _patterns(
    *(BlockLayer(_DOUBLE, (name,), _QKV) for name in ("attn.to_qkv", "qkv_proj")),
    *(BlockLayer(_DOUBLE, (name,), _ADDED) for name in ("attn.to_added_qkv", "qkv_proj_context")),
    *_named(_DOUBLE, {
        "out_proj": "attn.to_out.0", "out_proj_context": "attn.to_add_out", "mlp_fc1": "ff.linear_in",
        "mlp_fc2": "ff.linear_out", "mlp_context_fc1": "ff_context.linear_in",
        "mlp_context_fc2": "ff_context.linear_out", **_NORMS,
    }),
    *_named(_SINGLE, {name: f"attn.{name}" for name in ("norm_q", "norm_k")}),
    *(
        BlockLayer(_SINGLE, (f"{at}qkv_proj", f"{at}mlp_fc1"), ("attn.to_qkv_mlp_proj",), is_stacked=True)
        for at in ("attn.", "")
    ),
    *(BlockLayer(_SINGLE, (f"{at}out_proj", f"{at}mlp_fc2"), ("attn.to_out",)) for at in ("attn.", "")),
)  # fmt: skip
_IS_FLUX2, _IS_CHROMA = "double_stream_modulation_img.linear.weight", "distilled_guidance_layer.in_proj.weight"
# Layers without a row whose inputs no GELU makes: of attention, before the GELU, and gated ones (the UNet's, FLUX.2's).
_UNSHIFTED = re.compile(
    r"\.(attn\d?|attention)\.|\.net\.0\.proj\.|\.linear_(in|out)\.|_blocks?\..*transformer_blocks\.\d+\.ff\.net\.2\."
)


def rows_of(names: Collection[str]) -> dict[str, tuple[str, BlockLayer] | None]:
    """Return for each tensor of a model what stands before its layer, and the layer's row; None for none."""
    patterns = _FLUX2 if _IS_FLUX2 in names else _PATTERNS
    return {name: _row(name, patterns) for name in names}


def _row(name: str, patterns: _Patterns) -> tuple[str, BlockLayer] | None:
    layer = name.rpartition(".")[0]
    for pattern, row in patterns:
        match = pattern.fullmatch(layer)
        if match is not None:
            return match[1], row
    return None


def is_unshifted(name: str) -> bool:
    """Return whether nothing is shifted in the activations of a layer without a row."""
    return bool(_UNSHIFTED.search(name))


def shift_is_unknown(names: Collection[str]) -> bool:
    """Return whether files of such a model are made by programs that do not agree on shifted activations."""
    return _IS_CHROMA in names
