"""Detect the container, family, component and quantization of a file or folder, from its headers only."""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ..core import LONE, MAIN, gguf_mixes, registry
from ..errors import BadFileError, MissingComponentError
from ..formats import (
    TypeRow,
    checkpoint,
    component_configs,
    folders,
    model_families,
    quantization_methods,
    refused_files,
    suffix_hint,
    text_encoders,
    type_histogram,
)
from ..utils.arguments import answered
from ..utils.home_paths import with_home
from . import bundled_models, classes, file_tokenizers, gguf_encoders, partial_encoders
from .hub_references import reference
from .promised_schemes import name_warnings
from .refused_gguf import refuse_undecodable, refuse_unless_diffusion

if TYPE_CHECKING:
    from ..formats import Checkpoint, Given

__all__ = ["MAIN", "Detected", "detect", "suffix_hint"]


@dataclass(frozen=True, kw_only=True)
class Detected:
    """The detected contents of a file or folder, with the evidence for them.

    Attributes:
        path: as the caller wrote it.
        container: "pipeline", "component", "safetensors", "gguf" or "pickle".
        family: model family ("sd1", "sdxl", "flux", ...), None if unknown.
        component: "unet", "transformer", "prior", "decoder", "controlnet", "text_encoder", "vae", or "pipeline".
        quant, backend: scheme and backend of the quantization inside, None if there is none.
        prequantized: whether any weight is quantized already.
        evidence: what the headers show, in sentences.
        suffix_hint: the scheme that the file name promises.
        tensors: number of tensors in the files.
        bytes: of the weights: unquantized tensors and packed parts, without code tables and descriptions.
        types: number of tensors of each dtype (or GGUF type).
        warnings: contradictions, such as a file name that promises a scheme that the header does not show.
        parts: the same for each component of a pipeline.
    """

    path: str
    container: str
    family: str | None
    component: str | None
    quant: str | None
    backend: str | None
    prequantized: bool
    evidence: list[str]
    suffix_hint: str | None
    tensors: int
    bytes: int
    types: dict[str, int]
    warnings: list[str] = field(default_factory=list)
    parts: dict[str, Detected] = field(default_factory=dict)
    class_name: str | None = None
    sources: Mapping[str, Checkpoint] = field(default_factory=dict, repr=False, compare=False)

    @property
    def histogram(self) -> tuple[TypeRow, ...]:
        """Return the types of the weights, with bits per weight."""
        return type_histogram.histogram(self.sources.values())

    @property
    def high_precision(self) -> list[str]:
        """Return the layers that are not quantized while others are; empty for a pipeline, whose components have it."""
        return (
            [] if self.parts else [name for src in self.sources.values() for name in type_histogram.high_precision(src)]
        )

    def to_dict(self) -> dict[str, Any]:
        """Return it as JSON values."""
        values = {
            name: getattr(self, name)
            for name in (
                "path", "container", "family", "component", "quant", "backend", "prequantized", "evidence",
                "suffix_hint", "tensors", "bytes", "types", "warnings", "class_name",
            )
        }  # fmt: skip
        return values | {
            "histogram": [row.to_dict() for row in self.histogram],
            "high_precision": self.high_precision,
            "parts": {name: part.to_dict() for name, part in self.parts.items()},
        }


@answered
def detect(
    path: str | Path,
    *,
    complete: bool = True,
    allow_pickle: bool = False,
    variant: str | None = None,
    config: Given | None = None,
) -> Detected:
    """Inspect a pipeline folder, component folder, `.safetensors` or `.gguf` file. Reads headers and JSON only.

    A folder is refused where `load_model` would refuse it: its tensors are compared with the model of its config, which
    is built without weights. A single file that names no class imports neither torch nor diffusers.

    Args:
        complete: also check that the files are as long as their headers say, and that folders fit their models.
        allow_pickle: also look at torch's own files (.ckpt, .bin), which are pickles, with torch's weights_only.
        variant: the variant of the weights to read, if the folder has it; see `formats.folders.weights`.
        config: see `load_model`.

    Raises:
        MissingComponentError: the path does not exist. BadFileError: a damaged file. UnsupportedFileError: a kind of
            file that sdquant does not load.
    """
    detected = read_headers(path, complete=complete, allow_pickle=allow_pickle, variant=variant, config=config)
    if complete:
        from .fitting import fitted

        for src in detected.sources.values():
            if src.path.is_dir():  # a lone file may be some of a model
                fitted(text_encoders.tidied(src))
    return detected


@dataclass(frozen=True, kw_only=True)
class _Options:
    """Arguments of `read_headers`."""

    complete: bool
    allow_pickle: bool
    variant: str | None
    partial: bool
    is_component: bool
    find_classes: bool
    config: Given | None


def read_headers(
    path: str | Path,
    *,
    complete: bool = True,
    allow_pickle: bool = False,
    variant: str | None = None,
    partial: bool = False,
    is_component: bool = False,
    find_classes: bool = True,
    config: Given | None = None,
) -> Detected:
    """Detect the contents of a file or folder as `detect` does, but do not compare folders with their models.

    Args:
        complete, allow_pickle, variant, config: see `detect`, which raises the same errors.
        partial: it is a base pipeline, whose components may have a config and no weights.
        is_component: it is one component of a pipeline, and errors say so.
        find_classes: look the class of each config up. False for a program with models of its own, such as ComfyUI.
    """
    options = _Options(
        complete=complete, allow_pickle=allow_pickle, variant=variant, partial=partial, is_component=is_component,
        find_classes=find_classes, config=config,
    )  # fmt: skip
    try:
        detected = _detect(Path(with_home(path)), str(path), options)
    except OSError as error:  # no permission, a name that is too long, a disk that fails
        raise BadFileError(f"Cannot read {path}", str(error), "Check the path") from error
    in_folders = [src for src in detected.sources.values() if src.path.is_dir() and not src.is_empty]
    there = {name for src in in_folders for name in (src.variant, *src.variants)}
    if variant is not None and variant not in there:
        raise folders.no_variant(str(path), variant, there)
    return detected


def _detect(place: Path, path: str, options: _Options) -> Detected:
    if not (place.exists() or place.is_symlink()):  # a broken link is told apart when it is read
        raise MissingComponentError(f"Cannot load {path}", "there is no such file or folder", _check_path(path))
    if not place.is_dir():
        lone = checkpoint.single_file(
            place, complete=options.complete, allow_pickle=options.allow_pickle, given=options.config
        )
        return _component(lone, path, options)
    index = place / "model_index.json"
    if not os.path.lexists(index):
        return _component(_part(place, replace(options, partial=False)), path, options)
    component_configs.refuse_for_pipeline(place, options.config)
    contents = folders.read_json(folders.inside(index, place))
    quantization_methods.refuse_unread_index(place, contents)
    each = {
        name: checkpoint.as_named(_part(sub, options), contents[name])
        for name, sub in folders.pipeline_parts(place, contents).items()
    }
    if not each:
        raise MissingComponentError(
            f"Cannot load {path}",
            "its model_index.json names no component with weights",
            "Check that the folder is complete",
        )
    if options.find_classes:
        classes.check_pipeline(place, contents, each)
    parts = {name: _component(src, str(src.path), replace(options, is_component=False)) for name, src in each.items()}
    whole = _pipeline(path, parts)
    if options.partial:  # the files of its parts may have what it lacks
        return whole
    return replace(whole, warnings=[*whole.warnings, *file_tokenizers.require(place, whole.sources)])


def _check_path(path: str) -> str:
    """Return the fix for a path that does not exist."""
    try:
        there = reference(path)
    except MissingComponentError as error:
        return error.fix
    if path in bundled_models.MODELS:
        return f"Check the path, or pass sdquant.demo.path({path!r}) for the model that is bundled with sdquant"
    if there is None:
        return "Check the path"
    return f"Check the path, or download the repository from the hub first: `hf download {there.repository}`"


def joined(base: Detected, lone: Mapping[str, Detected], sources: Mapping[str, Checkpoint], *, path: str) -> Detected:
    """Return the base pipeline with some components replaced by single files.

    Args:
        base: the pipeline. lone: the files, by component; a checkpoint by its main one.
        sources: all components after the replacement.
    """
    parts = {**base.parts, **lone}
    gone = tuple(f"{name}: " for name in lone)
    warnings = [line for line in base.warnings if not line.startswith(gone)]
    return replace(
        _pipeline(path, parts),
        warnings=warnings + [line for part in lone.values() for line in part.warnings],
        tensors=sum(len(src.tensors) for src in sources.values()),
        bytes=sum(src.weight_bytes for src in sources.values()),
        types=dict(Counter(info.dtype for src in sources.values() for info in src.tensors.values())),
        sources=sources,
    )


def _part(folder_: Path, options: _Options) -> Checkpoint:
    if options.partial and not folders.visible_weights(folder_, folders.WEIGHTS + folders.PICKLES):
        return checkpoint.without_weights(folder_)
    return checkpoint.component_folder(
        folder_, complete=options.complete, allow_pickle=options.allow_pickle, variant=options.variant,
        given=options.config,
    )  # fmt: skip


def _pipeline(path: str, parts: dict[str, Detected]) -> Detected:
    main = next((parts[name] for name in MAIN if name in parts), next(iter(parts.values())))
    quantized = [part for part in parts.values() if part.prequantized]
    quant = main.quant or (quantized[0].quant if quantized else None)
    hint = suffix_hint(path)
    warnings = name_warnings(path, hint, quant)
    return Detected(
        path=path,
        container="pipeline",
        family=main.family,
        component="pipeline",
        quant=quant,
        backend=registry.scheme(quant).backend if quant else None,
        prequantized=bool(quantized),
        evidence=[f"{name}: {line}" for name, part in parts.items() for line in part.evidence],
        suffix_hint=hint,
        tensors=sum(part.tensors for part in parts.values()),
        bytes=sum(part.bytes for part in parts.values()),
        types=dict(sum((Counter(part.types) for part in parts.values()), Counter())),
        warnings=warnings + [f"{name}: {line}" for name, part in parts.items() for line in part.warnings],
        parts=parts,
        sources={name: part.sources[LONE] for name, part in parts.items()},
    )


def _component(src: Checkpoint, path: str, options: _Options) -> Detected:
    gguf = src.container == "gguf"
    if gguf:
        refuse_undecodable(src)
    text = gguf_encoders.text_encoder_in(src, complete=options.complete)
    vision = gguf_encoders.vision_in(src) if options.is_component else None
    src = text or vision or src
    if src.path.is_dir():
        src = partial_encoders.reduced(src)
    if options.find_classes:
        classes.check_component(src)
    row = model_families.recognise(src.names)
    refused_files.refuse_shard(src.path, is_known=row is not None)
    if gguf and text is None and vision is None:
        refuse_unless_diffusion(src, is_component=options.is_component)
    quant, evidence = _quantization(src)
    tokenizer = file_tokenizers.in_words(src)
    if tokenizer is not None and row is not None and row.component == "text_encoder":
        evidence.append(tokenizer)
    if text is not None and len(src.files) > 1:
        evidence.append(f"its vision is in {src.files[1].name}")
    if src.variant or src.variants:
        evidence.append(_variant(src))
    if src.class_name:
        evidence.insert(0, f"the config says {src.class_name}")
    lora = refused_files.lora_sign(src.names) if row is None else None
    if lora is not None:
        evidence.insert(0, f"it is a LoRA: it has {lora!r}")
    if row:
        evidence.insert(0, f"tensor names are those of {row.family} ({row.component}, {row.layout} layout)")
    # A folder's own name says more than the names that its library gives to all weight files.
    named = next((name for name in (path, *(file.name for file in src.files[:1])) if suffix_hint(name)), path)
    hint = suffix_hint(named)
    beside = [_variant(src)] if src.variant and src.variants and src.variant != options.variant else []
    return Detected(
        path=path,
        container="component" if src.path.is_dir() else src.container,
        family=model_families.sd_version(_shapes(src)) if row and row.family == "sd" else (row.family if row else None),
        component=row.component
        if row
        else ("lora" if lora is not None else gguf_encoders.VISION if vision is not None else None),
        quant=quant,
        backend=registry.scheme(quant).backend if quant else None,
        prequantized=bool(src.prequantized),
        evidence=evidence,
        suffix_hint=hint,
        tensors=len(src.tensors),
        bytes=src.weight_bytes,
        types=dict(Counter(info.dtype for info in src.tensors.values())),
        warnings=[*src.warnings, *name_warnings(named, hint, quant), *beside],
        class_name=src.class_name or (row.class_name if row else None),
        sources={LONE: src},
    )


def _variant(src: Checkpoint) -> str:
    """Describe which variant of the weights is used, and which others there are."""
    taken = f"the weights are those of variant {src.variant}" if src.variant else "the weights are those of no variant"
    beside = ", ".join(src.variants)
    return f"{taken}; other variants: {beside}" if beside else taken


def _shapes(src: Checkpoint) -> dict[str, tuple[int, ...]]:
    """Return the float weights' shapes that the headers show: not of weights whose codes are packed in bytes."""
    codes = {name: src.tensors[next(iter(match.keys.values()))] for name, match in src.prequantized.items()}
    shapes = {name: info.shape for name, info in (src.plain | codes).items() if info.dtype not in ("uint8", "int32")}
    shapes |= {name: match.shape for name, match in src.prequantized.items() if match.shape is not None}
    return shapes | {name: spec.shape for name, spec in src.specs.items()}


def _quantization(src: Checkpoint) -> tuple[str | None, list[str]]:
    """Return the scheme with the most bytes, and a line of evidence for each scheme in the file."""
    weight: Counter[str] = Counter()
    count: Counter[str] = Counter()
    evidence: dict[str, str] = {}
    for name, match in src.prequantized.items():
        weight[match.scheme] += src.prequantized_bytes(name)
        count[match.scheme] += 1
        evidence.setdefault(match.scheme, match.evidence)
    if not weight:
        types = ", ".join(sorted({info.dtype for info in src.tensors.values()}))
        if src.container == "gguf":  # a scheme of its own, though nothing in it is quantized
            sizes: Counter[str] = Counter()
            for info in src.tensors.values():
                sizes[info.dtype] += info.nbytes
            name = src.recorded_quant or gguf_mixes.dominant(sizes)
            return name, [f"a GGUF file of {types}, nothing in it is quantized"]
        return None, [f"none of its {len(src.tensors)} tensors ({types}) is in a format of quantized weights"]
    by_evidence: Counter[str] = Counter()  # several schemes may be shown by one and the same line
    for scheme, _ in weight.most_common():
        by_evidence[evidence[scheme]] += count[scheme]
    lines = [f"{line} ({number} weights)" for line, number in by_evidence.items()]
    return src.recorded_quant or weight.most_common(1)[0][0], lines
