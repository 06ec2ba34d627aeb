"""Read single files in the original layouts of the models' authors under diffusers' names.

diffusers has converters for whole state dicts. Here they are traced (see `trace`), so that each tensor is built when it
is needed, and so that rows of a quantized weight (the q of a fused qkv) stay packed.
"""

from __future__ import annotations

import logging
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

from ...core import FLOATS, Cut, PrequantizedWeight, Unfit, dtype_named, read_weight
from ...errors import BadFileError, UnsupportedFileError
from ...formats import closing_files, main_dtype, model_families, over_files, resaved_names, text_encoders
from . import converters, original_names
from .converter_patches import completed

if TYPE_CHECKING:
    from pathlib import Path

    from ...core import PackedSpec, TensorInfo, packed_rows
    from ...formats import Checkpoint, Recipe, TensorFile

log = logging.getLogger(__name__)

LDM = "model.diffusion_model."
_VAE_PREFIXES = ("first_stage_model.", "vae.")
# Where checkpoints keep text encoders, by the name that a pipeline gives them: prefixes, the layout behind each.
_TEXT: Mapping[str, tuple[tuple[str, str], ...]] = {
    "text_encoder": (
        ("cond_stage_model.transformer.", "clip"),
        ("cond_stage_model.model.", "openclip"),
        ("conditioner.embedders.0.transformer.", "clip"),
        ("conditioner.embedders.0.model.", "openclip"),
        ("text_encoders.clip_l.transformer.", "clip"),
    ),
    "text_encoder_2": (
        ("conditioner.embedders.1.model.", "openclip"),
        ("conditioner.embedders.0.model.", "openclip"),  # of XL's refiner, which has no other
        ("text_encoders.clip_g.transformer.", "clip"),
        ("text_encoders.t5xxl.transformer.", "t5"),
    ),
    "text_encoder_3": (("text_encoders.t5xxl.transformer.", "t5"),),
}
# What a checkpoint holds beside the weights of a pipeline: training leftovers and constants that diffusers computes.
_IDLE = (
    "model_ema.", "alphas_cumprod", "betas", "log_one_minus", "posterior_", "sqrt_", "logvar", "denoiser.sigmas",
    "low_scale_model.",
    # The last layer of Stable Diffusion 2's text encoder, and what comes after it.
    "cond_stage_model.model.transformer.resblocks.23.", "cond_stage_model.model.text_projection",
    "visual.", "logit_scale", "attn_mask",  # of OpenCLIP's own files: the half that sees, and constants
)  # fmt: skip
# And what models hold besides what is used of them: CLIP's temperature, Lumina's last norm, Sana's positions and its
# empty caption.
_IDLE_ENDS = (
    ".logit_scale", "norm_final.weight", "pos_embed", "y_embedder.y_embedding", "logvar_linear.weight",
    "logvar_linear.bias",
)  # fmt: skip
# Constants inside modules: of CLIP, of AnimateDiff, of Wan Animate.
_COMPUTED = re.compile(r"position_ids$|\.pos_encoder\.pe$|(^|\.)motion_encoder\..*\.kernel$")


def convert(src: Checkpoint, name: str, owner: Checkpoint) -> Checkpoint | None:
    """Return a component of a file in an original layout; None if the file does not contain it.

    Args:
        src: the file. name: the component's name in its pipeline. owner: that component of a pipeline of the same
            model, which gives its class and config.

    Raises:
        UnsupportedFileError: a weight is quantized in a way in which it cannot be split.
    """
    layout = _text_layout(src.names, name)
    function = _converter(src.names, layout, name, owner)
    if function is None:
        return None
    from .trace import trace_conversion

    converters.refuse_class(src, owner.class_name or "")
    packs = _packs(src)
    inputs = {key: (info.shape, dtype_named(info.dtype)) for key, info in src.plain.items()}
    inputs |= {key: (pack.spec.shape, dtype_named(pack.spec.dtype)) for key, pack in packs.items()}
    try:
        recipes = trace_conversion(function, inputs)
    except (KeyError, IndexError, ValueError, RuntimeError, AttributeError, TypeError) as error:
        raise UnsupportedFileError(
            f"Cannot load {src.path} as a {owner.class_name}",
            f"its tensors do not fit the key map of that class: {error!r}",
            "Check that base= is a pipeline of the same model",
        ) from error
    recipes = {key: recipe for key, recipe in recipes.items() if _COMPUTED.search(key) is None}
    if not recipes:
        return None
    recipes |= _constants(src, owner, recipes)
    component = _converted(src, owner, recipes, packs)
    return with_projection(component) if layout is not None and layout[1] == "clip" else component


def with_projection(src: Checkpoint) -> Checkpoint:
    """Add the projection of the pooled output to a CLIP text encoder: without one in the file it is the identity.

    The CLIP-L files of Stable Diffusion 3 and of ComfyUI lack it; diffusers has an identity matrix there.
    """
    name = "text_projection.weight"
    if not str(src.class_name).endswith("TextModelWithProjection") or name in src.names:
        return src
    width, _ = text_encoders.sizes(src.tensors)
    if width is None or (src.config.get("hidden_size"), src.config.get("projection_dim")) != (width, width):
        return src  # then it is missing indeed
    import torch

    from ...formats import Recipe

    dtype = dtype_named(main_dtype(src, dtypes=FLOATS) or "bfloat16")
    recipe = Recipe((), None, (width, width), dtype, lambda get: torch.eye(width, dtype=dtype, device="cpu"))
    return replace(
        src,
        tensors={**src.tensors, name: recipe.info},
        home={**src.home, name: src.files[0]},
        recipes={**src.recipes, name: recipe},
    )


def _constants(src: Checkpoint, owner: Checkpoint, recipes: Mapping[str, Recipe]) -> dict[str, Recipe]:
    """Return tables that the model's class computes and files have in another form, in the weights' dtype."""
    if owner.class_name not in converters.TABLES:
        return {}
    from ..components import empty
    from .trace import constant_recipe as constant

    dtype = dtype_named(main_dtype(src, dtypes=FLOATS) or "bfloat16")
    model = empty(owner.library, owner.class_name, owner.config)
    tables = dict(model.named_buffers())
    return {name: constant(tables[name].to(dtype)) for name in model.state_dict() if name in tables.keys() - recipes}


def beside(name: str, owner: Checkpoint) -> bool:
    """Return whether a file may contain this component of a pipeline besides its main model."""
    return name in _TEXT or owner.class_name == "AutoencoderKL" or owner.class_name in converters.PARTS


def shapes(src: Checkpoint) -> dict[str, tuple[int, ...]]:
    """Return the shapes of the float weights of a UNet or transformer, by name without a prefix."""
    prefix = prefix_of(src.names)
    each = {key: info.shape for key, info in src.plain.items()}
    each |= {key: pack.spec.shape for key, pack in _packs(src).items()}
    return {key.removeprefix(prefix): shape for key, shape in each.items()}


def prefix_of(names: Iterable[str]) -> str:
    """Return the prefix of the names of a UNet or transformer in a file; "" if there is none."""
    names = tuple(names)
    return next((prefix for prefix in model_families.PREFIXES if any(key.startswith(prefix) for key in names)), "")


def idle(name: str) -> bool:
    """Return whether a tensor of a checkpoint is known to be unused in a diffusers pipeline."""
    return name.startswith(_IDLE) or name.endswith(_IDLE_ENDS) or _COMPUTED.search(name) is not None


def unused_keys(src: Checkpoint, parts: Iterable[Checkpoint]) -> list[str]:
    """Return the file's tensors that none of the components is built from."""
    used: set[str] = set()
    for part in parts:
        used |= {match.cut.of.name for match in part.prequantized.values() if match.cut is not None}
        used |= {name for recipe in part.recipes.values() for name in recipe.sources}
    of_files = (
        (key, src.recipes[key].sources if key in src.recipes else (src.keys.get(key, key),)) for key in src.names
    )
    return sorted(key for key, sources in of_files if key not in used and not used.issuperset(sources))


def _text_layout(names: frozenset[str], name: str) -> tuple[str, str] | None:
    """Return the prefix and the layout of the text encoder `name` in the file; None if the file has none."""
    row = model_families.recognise(names)
    if row is not None and row.layout == "openclip":  # nothing else is in it
        return row.names[0].removesuffix("token_embedding.weight"), "openclip"
    return next((row for row in _TEXT.get(name, ()) if any(key.startswith(row[0]) for key in names)), None)


def _converter(
    names: frozenset[str], layout: tuple[str, str] | None, name: str, owner: Checkpoint
) -> converters.Convert | None:
    """Return the function that converts a state dict of the file to the component's; None if the file lacks it."""
    from ..components import single_file

    classes, functions = single_file()
    kind = owner.class_name or ""
    if name in _TEXT:
        return None if layout is None or (layout[1] == "t5") != ("T5" in kind) else _text(*layout, owner)
    row = classes.get(kind)
    if row is None and not original_names.known(kind):
        return None
    if kind == "AutoencoderKL":
        prefix = next((p for p in _VAE_PREFIXES if any(key.startswith(p) for key in names)), None)
        bare = "encoder.down.0.block.0.conv1.weight" in names
        if prefix is None and not bare:
            return None
        return lambda state: functions.convert_ldm_vae_checkpoint(_within(state, prefix or ""), owner.config)
    prefix = converters.prefix_of(kind, names) if kind in converters.PARTS else prefix_of(names)
    if prefix is None:
        return None
    own = converters.ours(kind, names, owner, row is not None)
    if own is not None:
        return lambda state: own(resaved_names.published(_within(state, prefix)))
    assert row is not None  # else the converter is ours
    required, apply = converters.WANTED.get(kind, ""), completed(kind, row["checkpoint_mapping_fn"])
    return lambda state: apply(
        {required + key: value for key, value in resaved_names.published(_within(state, prefix)).items()},
        config=dict(owner.config),
    )


def _text(prefix: str, layout: str, owner: Checkpoint) -> converters.Convert:
    from ..components import single_file

    if layout != "openclip":
        return lambda state: _within(state, prefix)
    _, functions = single_file()
    model = SimpleNamespace(config=SimpleNamespace(hidden_size=owner.config.get("hidden_size")))
    return lambda state: functions.convert_open_clip_checkpoint(model, state, prefix=prefix)


def _within(state: Mapping[str, Any], prefix: str) -> dict[str, Any]:
    """Select the keys with a prefix, and remove it."""
    return {key.removeprefix(prefix): value for key, value in state.items() if key.startswith(prefix)}


@dataclass(frozen=True)
class _Pack:
    """Description of a quantized weight of the file, without its tensors."""

    spec: PackedSpec
    nbytes: int
    row_bytes: int | None  # None where rows cannot be taken from it
    constant: int  # bytes of what is one number for all rows


def _packs(src: Checkpoint) -> dict[str, _Pack]:
    """Describe each quantized weight. Some formats store shapes next to the codes, so the files are opened."""
    if not src.prequantized:
        return {}
    with closing_files(src.open()) as files:
        return {key: _pack(src, match, files) for key, match in src.prequantized.items()}


def _pack(src: Checkpoint, match: PrequantizedWeight, files: Mapping[Path, TensorFile]) -> _Pack:
    try:
        packed = read_weight(match, None, None, lambda key: src.read(files, key))
    except BadFileError as error:
        raise BadFileError(f"Cannot load {src.path}: {error.inner}", error.why, error.fix) from error
    except (Unfit, NotImplementedError) as error:
        raise UnsupportedFileError(
            f"Cannot load {src.path}",
            f"weight {match.name!r} is quantized to {match.scheme}, and the file does not give its shape: {error}",
            "Use the same model as a diffusers folder",
        ) from error
    codec = packed.spec.scheme.codec
    by_row = codec.cuttable(packed)
    # Of each part its share; what is for all rows is in every cut: see `packed_rows`.
    of_rows = codec.rows_by(by_row, lambda part: part.new_empty(0)) if codec.by_row(by_row) else {}
    shared = (part for name, part in by_row.parts.items() if part.numel() == 1 or of_rows.get(name) is part)
    constant = sum(part.numel() * part.element_size() for part in shared)
    each = (by_row.nbytes - constant) // packed.spec.shape[0] if codec.by_row(by_row) else None
    return _Pack(packed.spec, packed.nbytes, each, constant)


def _cut(
    src: Checkpoint, name: str, whole: PrequantizedWeight, pack: _Pack, rows: tuple[packed_rows.Range, ...]
) -> Cut:
    shape = pack.spec.shape
    if rows == ((0, shape[0]),):
        return Cut(of=whole, shape=shape, rows=(), nbytes=pack.nbytes)
    if pack.row_bytes is None:
        raise UnsupportedFileError(
            f"Cannot load {src.path}",
            f"{name!r} is a slice of the rows of its {whole.name!r}, which is quantized to {whole.scheme} in blocks "
            "that span several rows",
            "Use the same model as a diffusers folder, or start from float weights",
        )
    count = sum(end - begin for begin, end in rows)
    return Cut(of=whole, shape=shape, rows=rows, nbytes=pack.row_bytes * count + pack.constant)


def _converted(
    src: Checkpoint, owner: Checkpoint, recipes: Mapping[str, Recipe], packs: Mapping[str, _Pack]
) -> Checkpoint:
    tensors: dict[str, TensorInfo] = {}
    home = {}
    matches: dict[str, PrequantizedWeight] = {}
    plain_recipes: dict[str, Recipe] = {}
    for name, recipe in recipes.items():
        packed = [source for source in recipe.sources if source in src.prequantized]
        if not packed:
            tensors[name] = recipe.info
            home[name] = src.home[recipe.sources[0]] if recipe.sources else src.files[0]
            plain_recipes[name] = over_files(recipe, src.recipes, src.keys)
            continue
        whole = src.prequantized[packed[0]]
        if recipe.rows is None:
            raise UnsupportedFileError(
                f"Cannot load {src.path}",
                f"its weight {whole.name!r} is quantized to {whole.scheme}, and diffusers' {name!r} is not a slice of "
                "its rows",
                "Use the same model as a diffusers folder, or start from float weights",
            )
        cut = _cut(src, name, whole, packs[whole.name], recipe.rows)
        keys = (*whole.keys.values(), *whole.extra)
        tensors |= {key: src.tensors[key] for key in keys}
        home |= {key: src.home[key] for key in keys}
        matches[name] = replace(whole, name=name, cut=cut)
    return replace(
        src,
        tensors=tensors,
        home=home,
        prequantized=matches,
        specs={},
        recipes=plain_recipes,
        keys={},
        config=owner.config,
        library=owner.library,
        class_name=owner.class_name,
    )
