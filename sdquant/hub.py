"""Repositories of the Hugging Face hub: of their files, those that will be loaded, and no others.

A repository often holds the same weights several times: in variants, as pickles, for ONNX, OpenVINO and Flax, and as
one checkpoint beside the folders. What a load would take of the whole is found out from the names of the files.
"""

from __future__ import annotations

import glob
from collections.abc import Collection, Iterable
from pathlib import Path
from typing import Any

from .errors import MissingComponentError, UnsupportedFileError
from .formats import folder as folders

_INDEX = "model_index.json"
_CONFIGS = (".json", ".txt", ".model")  # configs, schedulers, tokenizers
_SHARDS = ".index."  # in the names of lists of shards: those of weights that stay away would be missed
_NAMED = 4  # files that an error names


def hub_folder(name: str, *, progress: bool, weights: bool = True, variant: str | None = None) -> Path:
    """A hub repository's folder, with what a load needs downloaded if it is not in the cache. Without a connection: the
    folder as it is in the cache.

    Args:
        weights: False leaves them out. variant: see `folder.weights`.

    Raises:
        MissingComponentError: it cannot be had, or has no such variant. UnsupportedFileError: it is not told which of
            several weight files is meant.
    """
    from huggingface_hub import HfApi, hf_hub_download, snapshot_download
    from huggingface_hub.errors import HfHubHTTPError, HFValidationError, LocalEntryNotFoundError, OfflineModeIsEnabled

    try:
        try:
            files = [row.rfilename for row in HfApi().model_info(name).siblings or ()]
        except Exception:  # another for each way to be offline, and in each version of the library
            wanted = [_INDEX, "config.json"]  # enough for the library to look into its cache, or to say what is wrong
        else:
            index = folders.read_json(Path(hf_hub_download(name, _INDEX))) if _INDEX in files else None
            parts = None if index is None else folders.named_parts(index)
            wanted = needed(name, files, parts, weights=weights, variant=variant)
        patterns = [glob.escape(file) for file in wanted]
        return Path(snapshot_download(name, allow_patterns=patterns, tqdm_class=None if progress else _no_bar()))
    except (HfHubHTTPError, HFValidationError, LocalEntryNotFoundError, OfflineModeIsEnabled, OSError) as error:
        raise MissingComponentError(
            f"{name} was to be loaded",
            f"there is no such file or folder, and as a hub id it could not be had: {error}".splitlines()[0],
            "Check the path, or the name and the connection",
        ) from error


def needed(
    name: str,
    files: Iterable[str],
    parts: Collection[str] | None,
    *,
    weights: bool = True,
    variant: str | None = None,
) -> list[str]:
    """The files that a load needs, of all that a repository has.

    Args:
        files: their paths in the repository.
        parts: the folders of the pipeline's components; None where the repository is one component.
        weights, variant: see `hub_folder`.

    Raises:
        MissingComponentError, UnsupportedFileError: see `hub_folder`.
    """
    wanted: list[str] = []
    variants: set[str] = set()
    for place, inside in _by_folder(files).items():
        if place.partition("/")[0] not in ("", *(parts or ())):
            continue
        wanted += [_join(place, one) for one in inside if one.endswith(_CONFIGS) and _SHARDS not in one]
        holds = place == "" if parts is None else place in parts
        if not (weights and holds):
            continue
        mine = folders.usual(inside)
        variants |= set(mine)
        wanted += [_join(place, one) for one in _weights(_join(name, place), inside, mine, variant)]
    if variant is not None and weights and variant not in variants:
        raise folders.no_variant(name, variant, variants)
    return wanted


def _weights(place: str, inside: list[str], mine: folders.Named, variant: str | None) -> list[str]:
    """The weight files of one folder that `folder.weights` would take; none where there are none, as of a tokenizer."""
    if mine:
        return folders.of_variant(mine[folders.order(mine, variant)[0]])
    others = [one for one in inside if one.lower().endswith(folders.WEIGHTS)]
    if len(others) > 1:
        more = f" and {len(others) - _NAMED} more" if len(others) > _NAMED else ""
        raise UnsupportedFileError(
            f"{place} was to be loaded",
            f"it has several weight files: {', '.join(others[:_NAMED])}{more}",
            "Download the one that you want, and give its path",
        )
    pickles = [one for one in inside if one.lower().endswith(folders.PICKLES)]
    if not others and pickles and "config.json" in inside:
        raise MissingComponentError(
            f"{place} was to be loaded",
            f"its weights are pickles ({pickles[0]}), which are not downloaded",
            "Use a repository that has .safetensors",
        )
    return others


def _by_folder(files: Iterable[str]) -> dict[str, list[str]]:
    places: dict[str, list[str]] = {}
    for file in sorted(files):
        place, _, leaf = file.rpartition("/")
        if not leaf.startswith("."):
            places.setdefault(place, []).append(leaf)
    return places


def _join(place: str, leaf: str) -> str:
    return f"{place}/{leaf}" if place and leaf else place or leaf


def _no_bar() -> Any:
    from tqdm import tqdm

    class NoBar(tqdm):  # type: ignore[misc] # tqdm has no types
        def __init__(self, *args: Any, **kwargs: Any) -> None:
            super().__init__(*args, **{**kwargs, "disable": True})

    return NoBar
