"""Find the pipeline component that a single-component file belongs to.

A pipeline may have two components of the same class and size (Wan 2.2's experts). Nothing in a file tells them apart,
and the wrong choice gives wrong images without an error, so there the user or the file's name has to decide.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from ..core import choices
from ..formats import model_families
from ..formats import text_encoders as text

if TYPE_CHECKING:
    from ..formats import Checkpoint
    from ..models import Detected

CHECKPOINT = "checkpoint"  # the component of a file that holds those of a whole pipeline


@dataclass(frozen=True)
class Hint:
    """A word in a file or folder name, and the component that it indicates in pipelines that also have `other`."""

    pattern: re.Pattern[str]
    component: str
    other: str


def _hint(pattern: str, component: str, other: str) -> Hint:
    return Hint(re.compile(pattern, re.IGNORECASE), component, other)


# "high" and "low" before one of these words do not refer to the noise level.
_OTHER = r"(?![-_. ]?(?:v?ram|mem|res|quality|cfg|step|bit|rank|speed|detail|freq))"
HINTS = (
    # Wan 2.2: diffusers' `transformer` runs above `boundary_ratio`, where there is much noise, `transformer_2` below.
    _hint(rf"(?<![a-z])high(?:[-_. ]?noise|(?![a-z]){_OTHER})", "transformer", "transformer_2"),
    _hint(rf"(?<![a-z])low(?:[-_. ]?noise|(?![a-z]){_OTHER})", "transformer_2", "transformer"),
    # Ideogram 4 has a second transformer for guidance.
    _hint(r"(?<![a-z])uncond(?:itional)?(?![a-z])", "unconditional_transformer", "transformer"),
    _hint(r"(?<![a-z])cond(?:itional)?(?![a-z])", "transformer", "unconditional_transformer"),
)
_KINDS = ("unet", "transformer", "prior", "decoder", "text_encoder", "image_encoder", "vae", "controlnet")


def hinted(path: str | Path, names: Sequence[str]) -> str | None:
    """Return the component that the file name indicates, else the folder name; None if unclear."""
    place = Path(path)
    for word in (place.name, place.parent.name):
        matches = {
            row.component for row in HINTS if {row.component, row.other} <= set(names) and row.pattern.search(word)
        }
        matches |= set(_named(word, names))
        if matches:
            return matches.pop() if len(matches) == 1 else None
    return None


def _named(word: str, names: Iterable[str]) -> Iterable[str]:
    """Yield the components whose names occur in a word: "text_encoder_2" anywhere, "transformer" only as all of it."""
    for name in sorted(names, key=len, reverse=True):
        pattern = r"[-_. ]?".join(map(re.escape, name.split("_")))
        if "_" not in name:
            pattern = rf"^{pattern}(?=$|\.)"
        if re.search(rf"(?<![a-z\d]){pattern}(?![a-z\d])(?![-_. ]?\d)", word, re.IGNORECASE):
            yield name
            word = re.sub(pattern, "", word, flags=re.IGNORECASE)


def places_for(detected: Detected, base: Detected) -> tuple[str, ...]:
    """Return the components of a pipeline that a single-component file may replace; () if there are none.

    A text encoder fits those of its kind and sizes; other files fit those of one class and one set of sizes, found by
    tensor names or by kind; an all-in-one checkpoint fits the main component.
    """
    if detected.family in text.KINDS:
        alike = text_encoders(detected, base)
        mine = text.sizes(detected.sources[choices.LONE].tensors)
        fitting = tuple(name for name, sizes in alike.items() if sizes == mine)
        # If there is only one, comparing the weights later shows what does not fit.
        return fitting or (tuple(alike) if len(alike) == 1 else ())
    first = _first(detected, base)
    if first is None:
        return ()
    owner = base.sources[first]
    kind = (owner.library, owner.class_name)
    peers = {name: src for name, src in base.sources.items() if (src.library, src.class_name) == kind}
    return _of_one_size(detected.sources[choices.LONE], peers) if owner.class_name else (first,)


def text_encoders(detected: Detected, base: Detected) -> dict[str, text.Sizes]:
    """Return the base's text encoders of the same kind as the file, with their sizes."""
    kind = text.KINDS[str(detected.family)]
    return {
        name: text.sizes_of(src.config)
        for name, src in base.sources.items()
        if kind.classes.search(str(src.class_name))
    }


def _first(detected: Detected, base: Detected) -> str | None:
    names, kind = detected.sources[choices.LONE].names, detected.component or ""
    shared = {name: len(src.names & names) / max(len(names), 1) for name, src in base.sources.items()}
    best = max(shared, key=lambda name: shared[name])
    # A ControlNet has most names of its model, and a model of another class may have some beside all of them.
    is_other = {name: src.class_name not in (None, detected.class_name) for name, src in base.sources.items()}
    is_other = is_other if detected.class_name is not None else {}
    if shared[best] > 0.9 and not _are_unlike(kind, best) and (shared[best] == 1 or not is_other.get(best)):
        return best
    if kind in base.sources and not is_other.get(kind):
        return kind
    if kind == CHECKPOINT:
        return next(name for name in (*choices.MAIN, *base.sources) if name in base.sources)
    mine = detected.class_name
    return next((name for name, src in base.sources.items() if mine and src.class_name == mine), None)


def _of_one_size(lone: Checkpoint, peers: Mapping[str, Checkpoint]) -> tuple[str, ...]:
    """Return those of several components of one class whose sizes the file has; all if their configs are equal."""
    configs = [{key: value for key, value in src.config.items() if key[:1] != "_"} for src in peers.values()]
    if all(config == configs[0] for config in configs):
        return tuple(peers)
    fitting = tuple(name for name, owner in peers.items() if _has_sizes(lone, name, owner))
    return fitting or tuple(peers)


def _has_sizes(lone: Checkpoint, name: str, owner: Checkpoint) -> bool:
    """Return whether all tensor shapes of a file match those of the component of this name."""
    from ..errors import SdquantError
    from ..models import components, convert

    row = model_families.recognise(lone.names)
    try:
        converted = convert.convert(lone, name, owner) if row is not None and row.foreign else None
        model = components.empty(owner.library, str(owner.class_name), owner.config)
    except SdquantError:  # its key map does not fit this one
        return False
    shapes = convert.shapes(lone)
    if converted is not None:
        cuts = {key: weight.cut.shape for key, weight in converted.prequantized.items() if weight.cut is not None}
        shapes = {key: info.shape for key, info in converted.plain.items()} | cuts
    expected = {key: tuple(tensor.shape) for key, tensor in model.state_dict().items()}
    return all(tuple(shape) == expected[key] for key, shape in shapes.items() if key in expected)


def misfit(detected: Detected, name: str, base: Detected) -> str | None:
    """Return why a file cannot be this component of a pipeline; None if nothing rules it out before loading."""
    owner = base.sources[name]
    has = str(owner.class_name or "a component without a class")
    if detected.family in text.KINDS:
        alike, mine = text_encoders(detected, base), text.sizes(detected.sources[choices.LONE].tensors)
        if name in alike and (name in places_for(detected, base) or None in (*alike[name], *mine)):
            return None
        if name in alike:
            has += f" of {text.describe_encoder(alike[name])}"
        ours = f"{text.KINDS[str(detected.family)].title} text encoder of {text.describe_encoder(mine)}"
        return f"it is a {ours}, but {name} is {has}"
    fitting, kind = places_for(detected, base), detected.component or ""
    if name in fitting:
        return None
    if fitting:
        return f"its tensors are those of {' or '.join(fitting)}, but {name} is {has}"
    mine_class = detected.class_name
    if (mine_class and mine_class != owner.class_name) or _are_unlike(kind, name):
        return f"it is {mine_class or kind}, but {name} is {has}"
    return None


def _are_unlike(one: str, other: str) -> bool:
    """Return whether the names of two components say that they are of different kinds."""
    return None not in (_kind(one), _kind(other)) and _kind(one) != _kind(other)


def _kind(name: str) -> str | None:
    """Return the kind of a component from its name: "unet" for "image_unet", "transformer" for "transformer_2"."""
    bare = re.sub(r"_\d+$", "", name)
    return next((kind for kind in _KINDS if bare == kind or bare.endswith(f"_{kind}")), None)
