"""Configs that have all shapes of a transformer right, from the shapes of some of its tensors, a row for each family.

They are for `models.lone_files`, which builds a model without weights of them and holds the other tensors against it.
The rows are in `sized_images` and `sized_videos`. What no shape depends on is left out.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from . import known_configs
from .sized_images import IMAGES
from .sized_videos import VIDEOS
from .tensor_sizes import ERRORS, IMAGE, LAST, TEXT, Row, Shapes

_NOTHING = object()
_MOST_LACKING = 3  # sizes that nothing tells, such as those of weights whose shape is not recorded
_ROWS: Mapping[str | None, Row] = {**IMAGES, **VIDEOS}
FAMILIES = frozenset(family for family in _ROWS if family is not None)


def sized(family: str | None, shapes: Shapes) -> dict[str, Any]:
    """Return a config that has all shapes of such a model right, perhaps nothing else; {} if its sizes are not known.

    Args:
        shapes: by name, without a prefix. Those of quantized weights are of the float weight.
    """
    config = {key: _found(size, shapes) for key, size in _ROWS.get(family, {}).items()}
    lacking = [key for key, size in config.items() if size is _NOTHING]
    if config:  # without the tensor that tells a size, that tensor is missing, and the others have theirs
        return {**config, **dict.fromkeys(lacking, 1)} if len(lacking) <= _MOST_LACKING else {}
    try:
        return known_configs.known(family, shapes)
    except ERRORS:
        return {}


def _found(size: Any, shapes: Shapes) -> Any:
    try:
        return size(shapes) if callable(size) else size
    except ERRORS:
        return _NOTHING


_LATENTS, _WORDS, _POOLED = (*IMAGE, "x_embedder.proj.weight", "pos_embed.proj.weight"), TEXT, (
    "vector_in.in_layer.weight", "time_text_embed.text_embedder.linear_1.weight", "y_embedder.mlp.0.weight"
)  # fmt: skip
# The channels that published models of a family, of these widths (rows of what embeds the latents), take as input: a
# tensor's names, and its columns. FLUX.1: dev, schnell, Kontext; Canny and Depth; Fill. FLUX.2: dev; klein 4B, 9B.
_PUBLISHED: Mapping[str | None, tuple[frozenset[int], tuple[tuple[tuple[str, ...], tuple[int, ...]], ...]]] = {
    "flux": (frozenset({3072}), ((_LATENTS, (64, 128, 384)), (_WORDS, (4096,)), (_POOLED, (768,)))),
    "chroma": (frozenset({3072}), ((_LATENTS, (64,)), (_WORDS, (4096,)))),
    "flux2": (frozenset({6144, 3072, 4096}), ((_LATENTS, (128,)), (_WORDS, (15360, 7680, 12288)))),
    "qwen-image": (frozenset({3072}), ((_LATENTS, (64,)), (_WORDS, (3584,)))),
    "sd3": (frozenset({1536, 2432}), ((_LATENTS, (16,)), (_WORDS, (4096,)), (_POOLED, (2048,)))),
    "z-image": (frozenset({3840}), ((_LATENTS, (64,)), (("cap_embedder.1.weight",), (2560,)))),
}
# What comes out is latents, and what goes in these alone (False) or with others beside them (True).
_WHOLE: Mapping[str | None, bool] = {"flux": True, "chroma": False, "flux2": False}


def strange_widths(family: str | None, shapes: Shapes) -> Iterator[tuple[str, str]]:
    """Yield the name of each embedder of an input that has other columns than any model of the family is known to have,
    and which those have. Nothing else in a file shows how many it should be.

    Args:
        shapes: see `sized`.
    """
    sizes, inputs = _PUBLISHED.get(family, (frozenset(), ()))
    image = next((name for name in _LATENTS if name in shapes), None)
    last = next((shapes[name] for name in LAST if name in shapes), (0,))[0]
    if image is None or len(shapes[image]) < 2:
        return
    if shapes[image][0] in sizes:
        for names, known in inputs:
            name = next((one for one in names if len(shapes.get(one, ())) > 1), None)
            if name is not None and shapes[name][1] not in known:
                yield name, " or ".join(map(str, known))
    elif family in _WHOLE and last and (shapes[image][1] % last if _WHOLE[family] else shapes[image][1] != last):
        yield image, f"{'a multiple of ' * _WHOLE[family]}the {last} that its last layer gives"
