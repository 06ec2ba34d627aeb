"""Convert a model below the model folders to a folder or file beside it. No gradio here."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from ..core import registry
from ..errors import SettingsError
from ..planning import RULES, Settings
from . import mix_conversion
from .mix_conversion import MIX, MIX_NAME, NO_MIX, Mix

if TYPE_CHECKING:
    from ..core import Scheme
    from ..planning import Request
    from .plan_preview import Target

OnBytes = Callable[[int, int], None]
_NAME = re.compile(r"\w[\w .+-]{0,99}")
MOST_NAME_BYTES = 200  # bytes of a name; file systems take 255, with a suffix and what a file has while it is written
_DEVICE = re.compile(r"(con|prn|aux|nul|com\d|lpt\d)\s*(\.|$)", re.IGNORECASE)  # what Windows takes for one


@dataclass(frozen=True, kw_only=True)
class TargetKind:
    """A kind of target: its label, the suffix of its name, its usual scheme, and whether it can have a scheme."""

    name: str
    label: str
    suffix: str
    usual: str
    suits: Callable[[Scheme], bool]


def _is_gguf(scheme: Scheme) -> bool:
    return scheme.backend == "gguf"


def _is_made(scheme: Scheme) -> bool:
    return scheme.on_the_fly and scheme.name != RULES


KINDS = (
    TargetKind(
        name="folder",
        label="Folder for diffusers",
        suffix="",
        usual="nf4",
        suits=lambda one: _is_made(one) or _is_gguf(one),
    ),
    TargetKind(name="gguf", label="GGUF file", suffix=".gguf", usual="q8_0", suits=_is_gguf),
    TargetKind(
        name="file", label="ComfyUI file (.safetensors)", suffix=".safetensors", usual="int8_convrot", suits=_is_made
    ),
)


def schemes(kind: str) -> list[str]:
    """Return the names of the schemes that can be written as a kind of target."""
    row = _kind(kind)
    return [one.name for one in registry.schemes() if row.suits(one)]


def usual(kind: str) -> str:
    """Return the scheme that a kind of target usually has."""
    return _kind(kind).usual


def name_for(source: Path, scheme: str) -> str:
    """Return a name for the result, which `target_path` takes unless it is taken."""
    scheme = MIX_NAME if scheme == MIX else scheme
    name = source.stem if source.is_file() else source.name
    name = re.sub(r"[^\w .+-]", "-", name)
    while len(name.encode()) > MOST_NAME_BYTES // 3:
        name = name[:-1]
    return f"{name.lstrip(' .+-') or 'model'}-{scheme.replace(':', '-')}"


def target_path(folder: Path, name: object, kind: str) -> Path:
    """Return where to write.

    Raises:
        SettingsError: the name is no plain name of a file, or is taken.
    """
    what = "Cannot convert the model"
    if not isinstance(name, str) or not _NAME.fullmatch(name.strip()) or name.strip().endswith("."):
        why = "the name of the result must be letters, digits, spaces and . + - only"
        raise SettingsError(what, why, "Write such a name, without folders")
    if len(name.encode()) > MOST_NAME_BYTES or is_device_name(name.strip()):
        raise SettingsError(what, "not every system can have a file of this name", "Write another, shorter name")
    suffix = _kind(kind).suffix
    path = folder / (name.strip().removesuffix(suffix) + suffix if suffix else name.strip())
    if path.exists() or path.is_symlink():
        raise SettingsError(what, f"there is a {path.name} already", "Choose another name")
    return path


def is_device_name(name: str) -> bool:
    """Return whether Windows takes a name for one of its devices."""
    return _DEVICE.match(name) is not None


def request_for(target: Target, scheme: str, kind: str) -> Request:
    """Return the request whose plan says what is written; of a file, of the UNet or transformer alone."""
    if scheme not in schemes(kind):
        label = _kind(kind).label
        raise SettingsError(f"Cannot write {scheme!r}", f"a {label} cannot have it", "Choose a scheme from the list")
    return target.request(Settings({f"quant.{role}": scheme for role in _roles(kind)}))


def foreseen(target: Target, scheme: str, kind: str, mix: Mix = NO_MIX) -> tuple[int, int]:
    """Return the bytes of the weights before, and of what is written."""
    from ..compat import hardware
    from ..planning import open_model, prepare, role_of

    if scheme == MIX:
        return mix_conversion.foreseen_mix(target, kind, mix)
    request = request_for(target, scheme, kind)
    opened = open_model(target.path, Settings({}), hardware.probe(), target.companions | {"progress": False})
    if registry.scheme(scheme).backend == "gguf":  # which no request for a load can have
        plan = opened.plan(dict.fromkeys(_roles(kind), scheme), convert=True)
    else:
        plan = prepare(request, convert=True)
    parts = [
        part for part in plan.components if kind == "folder" or ((role := role_of(part.name)) and role.name == "model")
    ]
    found = opened.resolved.detected.sources  # in the plan, they are as if they were floats
    before = sum(info.nbytes for part in parts for info in found[part.name].tensors.values())
    return before, _written(target, scheme, kind) or sum(part.bytes for part in parts)


def _written(target: Target, scheme: str, kind: str) -> int | None:
    """Return the bytes of a file by its writer's own rows; None where the plan says them."""
    from ..saving import export_single_file, foreseen_size

    if registry.scheme(scheme).backend == "gguf":
        # A folder has components, too, that are copied as they are: the plan knows those.
        return (
            foreseen_size.gguf_bytes(target.path, scheme, single=True, config=target.config)
            if kind != "folder"
            else None
        )
    if kind == "file" and export_single_file.suits(scheme):
        return foreseen_size.file_bytes(target.path, scheme, config=target.config)
    return None


def notes(target: Target) -> tuple[str, ...]:
    """Return what a person should know before a model is converted: that it is quantized already."""
    from ..models import detect

    detected = detect(target.path, config=target.config)
    if not detected.prequantized:
        return ()
    return (
        f"The model is in {detected.quant} already, and is rounded a second time: the original gives a better file.",
    )


def _roles(kind: str) -> tuple[str, ...]:
    return ("model", "text_encoder") if kind == "folder" else ("model",)


def convert_model(
    target: Target,
    scheme: str,
    kind: str,
    out: Path,
    on_bytes: OnBytes,
    mix: Mix = NO_MIX,
    on_weights: OnBytes | None = None,
) -> None:
    """Write the model.

    Args:
        on_weights: called with the number of weights that were read for a mix, and of all.
        on_bytes: called with the bytes done and the total; what it raises ends the conversion, and nothing is left.

    Raises:
        SdquantError: it cannot be read, quantized or written.
    """
    from ..loading import load_planned
    from ..models import main_part
    from ..planning import prepare
    from ..saving import export_gguf, export_single_file, save
    from ..utils.atomic_write import require_space

    if scheme == MIX:
        mix_conversion.write_mix(target, kind, mix, out, on_bytes, on_weights)
        return
    request = request_for(target, scheme, kind)
    if registry.scheme(scheme).backend == "gguf":
        export_gguf.quantize_file(target.path, scheme, out, progress=False, on_bytes=on_bytes, config=target.config)
    elif kind == "file" and export_single_file.suits(scheme):
        export_single_file.quantize_file(
            target.path, scheme, out, progress=False, on_bytes=on_bytes, config=target.config
        )
    else:
        plan = prepare(request, convert=True)
        require_space(out, plan.bytes)  # before the work, not after it
        model = load_planned(request, plan, on_bytes)
        save(main_part(model) if kind == "file" else model, out)


def _kind(name: object) -> TargetKind:
    row = next((row for row in KINDS if row.name == name), None)
    if row is None:
        raise SettingsError("Cannot convert the model", "there is no such kind of target", "Choose one of the list")
    return row
