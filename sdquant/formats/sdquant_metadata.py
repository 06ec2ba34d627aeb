"""Strict reader of the metadata that sdquant writes into its files (see `saving`): every field is checked. No torch."""

from __future__ import annotations

import importlib
import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from ..core import FLOATS, PackedSpec, PrequantizedWeight, TensorInfo, registry
from ..errors import BadFileError, UnknownQuantError, UnsupportedFileError
from ..utils import strict_json

METADATA_KEY = "sdquant"
FORMAT_VERSION = 1
RULES = "sdquant.rules.file_rules"  # reads the rules of a file, and refuses what is none


def read_own(file: Path, metadata: Mapping[str, Any]) -> dict[str, Any]:
    """Return the metadata that sdquant wrote into a file; {} for a file of another program."""
    text = metadata.get(METADATA_KEY)
    if not isinstance(text, str):
        return {}
    try:
        own = strict_json.parse(text)
        version = own["format"]
    except (ValueError, KeyError, TypeError) as error:
        raise damaged(file, repr(error)) from error
    if version != FORMAT_VERSION:
        raise UnsupportedFileError(
            f"Cannot read {file}",
            f"it is in sdquant format {version!s:.40}, but this version reads format {FORMAT_VERSION}",
            "Update sdquant",
        )
    weights, config = own.get("weights"), own.get("config")
    if not isinstance(weights, dict) or not isinstance(config, dict):
        raise damaged(file, "it has no tables of weights and config")
    for name, row in weights.items():
        if not _is_row(row):
            raise damaged(file, f"its entry for weight {name!r} is incomplete")
    return dict(own)


def rule_rows(file: Path, own: Mapping[str, Any]) -> tuple[Mapping[str, Any], ...]:
    """Return the rules that a model was quantized with, as the file has them; () if it has none.

    Raises:
        BadFileError: they are not a list of mappings.
    """
    rows = own.get("rules", ())
    if "rules" in own and (not isinstance(rows, list) or not rows or not all(isinstance(row, dict) for row in rows)):
        raise damaged(file, "its rules are not a list of rules")
    if rows:
        importlib.import_module(RULES).rules_in(file, tuple(rows))  # by name: that room is above this one
    return tuple(rows)


def merged_own(files: Mapping[Path, Mapping[str, Any]]) -> dict[str, Any]:
    """Return the metadata that sdquant wrote into a component's files, merged; {} for files of another program.

    A shard describes its own weights, or those of all shards (if diffusers wrote them).

    Args:
        files: metadata by file.

    Raises:
        BadFileError: it is damaged, or the files contradict each other. UnsupportedFileError: a newer format.
    """
    whole: dict[str, Any] = {}
    for file, metadata in files.items():
        own = read_own(file, metadata)
        if not own:
            continue
        whole = whole or {**own, "weights": {}}
        if own["config"] != whole["config"]:
            raise damaged(file, "its config differs from that of the files beside it")
        if own.get("rules") != whole.get("rules"):
            raise damaged(file, "its rules differ from those of the files beside it")
        for name, row in own["weights"].items():
            if whole["weights"].setdefault(name, row) != row:
                raise damaged(file, f"its entry for weight {name!r} differs from that in the files beside it")
    return whole


def _is_row(row: Any) -> bool:
    """Return whether a weight's entry has all fields that a PackedSpec and its parts need, with the right types."""
    if not isinstance(row, dict):
        return False
    shape = row.get("shape")
    return (
        isinstance(row.get("scheme"), str)
        and isinstance(shape, list)
        and len(shape) > 0
        and all(isinstance(n, int) and not isinstance(n, bool) and n > 0 for n in shape)
        and row.get("dtype") in FLOATS
        and isinstance(row.get("details"), dict)
        and all(isinstance(row.get(key), list) for key in ("parts", "extra"))
        and all(isinstance(name, str) for name in (*row["parts"], *row["extra"]))
    )


def damaged(file: Path, why: str) -> BadFileError:
    """Return the error for damaged sdquant metadata."""
    return BadFileError(f"Cannot read {file}", f"its sdquant metadata is damaged: {why}", "Quantize the model again")


def specs_in(file: Path, own: Mapping[str, Any]) -> dict[str, PackedSpec]:
    """Return the descriptions of the quantized weights in sdquant's metadata, by name.

    Raises:
        UnsupportedFileError: a scheme that no backend provides.
    """
    specs: dict[str, PackedSpec] = {}
    for name, row in own.get("weights", {}).items():
        try:
            specs[name] = registry.packed_spec(row)
        except UnknownQuantError as error:
            raise UnsupportedFileError(
                f"Cannot read {file}",
                f"its weight {name!r} is quantized to {row['scheme']!r}, which no installed backend provides",
                "Update sdquant, or install the package that provides this scheme",
            ) from error
    return specs


def found_in(
    file: Path, own: Mapping[str, Any], specs: Mapping[str, PackedSpec], tensors: Mapping[str, TensorInfo]
) -> dict[str, PrequantizedWeight]:
    """Return the quantized weights that sdquant's metadata describes, by name.

    Raises:
        BadFileError: the tensors contradict it.
    """
    weights: dict[str, PrequantizedWeight] = {}
    owner: dict[str, str] = {}
    for name, spec in specs.items():
        row, keys = own["weights"][name], _keys(file, name, own["weights"][name]["parts"], spec)
        missing = [key for key in (*keys.values(), *row["extra"]) if key not in tensors]
        if missing:
            raise BadFileError(
                f"Cannot read {file}",
                f"tensor {missing[0]!r}, which belongs to weight {name!r}, is missing",
                "Quantize the model again",
            )
        for key in (*keys.values(), *row["extra"]):
            if owner.setdefault(key, name) != name:
                raise damaged(file, f"tensor {key!r} is listed for both {owner[key]!r} and {name!r}")
        weights[name] = PrequantizedWeight(
            name=name,
            scheme=spec.scheme.name,
            keys=keys,
            extra=tuple(row["extra"]),
            evidence=f"sdquant's own metadata says {spec.scheme}",
            details=spec.details,
        )
        # Before anything of that size is allocated: the codes of so many weights cannot take less than their bits.
        size = sum(tensors[key].nbytes for key in keys.values())
        if size * 8 < math.prod(spec.shape) * (spec.scheme.least_bits or spec.scheme.bits):
            raise damaged(file, f"weight {name!r} has {size} bytes, too few for its shape {list(spec.shape)}")
    return weights


def _keys(file: Path, name: str, parts: list[str], spec: PackedSpec) -> dict[str, str]:
    """Return the file key of each part of a weight."""
    try:
        return {part: spec.scheme.codec.key(name, part, spec) for part in parts}
    except (KeyError, TypeError, ValueError) as error:
        raise damaged(file, f"its entry for weight {name!r} does not match {spec.scheme}: {error!r}") from error
