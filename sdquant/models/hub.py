"""Download from the Hugging Face hub: only the files of a repository that will be loaded.

A repository often holds the same weights several times: in variants, as pickles, for ONNX, OpenVINO and Flax, and as
one checkpoint beside the folders. The files that a load needs are selected by their names.
"""

from __future__ import annotations

import glob
from collections.abc import Collection, Iterable
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ..errors import MissingComponentError, UnsupportedFileError
from ..formats import folders as folders
from ..utils.suggestions import nearest
from .hub_references import page

if TYPE_CHECKING:
    from .hub_references import Reference

_INDEX = "model_index.json"
_FIRST = (_INDEX, "config.json")
_CONFIGS = (".json", ".txt", ".model")  # configs, schedulers, tokenizers
_SHARDS = ".index."  # in the names of lists of shards: those of weights that stay away would be missed
_NAMED = 4  # files that an error names


def fetch(
    what: Reference,
    *,
    progress: bool,
    weights: bool | Collection[str] = True,
    variant: str | None = None,
    token: str | bool | None = None,
) -> Path:
    """Return the local path of a file or folder of the hub; download what a load needs if it is not in the cache.

    Without a connection the cache is used as it is.

    Args:
        weights: False leaves them out; names of components leave out those of the others.
        variant: see `folders.weights`. token: as huggingface_hub takes it; None for that of the environment or login.

    Raises:
        MissingComponentError: it cannot be downloaded, or has no such variant. UnsupportedFileError: it has several
            weight files, and none is the usual one.
    """
    from huggingface_hub import HfApi, snapshot_download
    from huggingface_hub.errors import HfHubHTTPError, HFValidationError, LocalEntryNotFoundError, OfflineModeIsEnabled

    name = what.repository
    at: dict[str, Any] = {"revision": what.revision, "token": token}
    hub_error: Exception | None = None  # set if the hub answered
    try:
        try:
            files = [row.rfilename for row in HfApi().model_info(name, **at).siblings or ()]
        except Exception as error:  # another for each way to be offline, and in each version of the library
            hub_error = error if isinstance(error, HfHubHTTPError) else None
            # Enough for the library to look into its cache, or to say what is wrong.
            paths = [what.inside] if _is_file(what.inside) else [_join(what.inside, one) for one in _FIRST]
        else:
            paths = _wanted(what, files, weights, variant, at)
        patterns = [glob.escape(file) for file in paths]
        bar = None if progress else _no_bar()
        folder = Path(snapshot_download(name, allow_patterns=patterns, tqdm_class=bar, **at))
    except (HfHubHTTPError, HFValidationError, LocalEntryNotFoundError, OfflineModeIsEnabled, OSError) as error:
        raise _not_to_be_had(what, hub_error or error) from error
    place = folder / what.inside
    if not place.exists():
        raise MissingComponentError(
            f"Cannot load {what}", f"{what.inside} is not in the cache", "Check the path and the connection"
        )
    return place


def _wanted(
    what: Reference, files: list[str], weights: bool | Collection[str], variant: str | None, at: dict[str, Any]
) -> list[str]:
    """Return the paths in the repository of the files to download."""
    from huggingface_hub import hf_hub_download

    home = what.inside
    if home in files:  # the config beside it tells its class
        place = home.rpartition("/")[0]
        beside = [one for one in files if one.rpartition("/")[0] == place and one.endswith(".json")]
        return [home, *(one for one in beside if _SHARDS not in one)]
    mine = [file.removeprefix(f"{home}/") for file in files if not home or file.startswith(f"{home}/")]
    if not mine:
        near = nearest(home, files)
        raise MissingComponentError(
            f"Cannot load {what}",
            f"the repository {what.repository} has no {home}",
            f"Did you mean {near}?" if near else f"See the files on {page(what.repository)}/tree/main",
        )
    if folders.MODULAR in mine and not {*_FIRST} & {*mine}:
        raise folders.modular_pipeline(str(what))
    index = hf_hub_download(what.repository, _join(home, _INDEX), **at) if _INDEX in mine else None
    parts = None if index is None else folders.named_parts(folders.read_json(Path(index)))
    selected = needed(_join(what.repository, home), mine, parts, weights=weights, variant=variant)
    return [_join(home, file) for file in selected]


def _not_to_be_had(what: Reference, error: Exception) -> MissingComponentError:
    why, fix = f"it cannot be fetched from the hub: {error}", "Check the path, or the name and the connection"
    place = page(what.repository)
    match type(error).__name__:  # one is derived from the other
        case "GatedRepoError":
            why = f"the repository {what.repository} is gated"
            fix = f"Accept its terms on {place}; then run `hf auth login`, set HF_TOKEN, or pass token="
        case "RevisionNotFoundError":
            why = f"the repository {what.repository} has no revision {what.revision}"
            fix = f"See the branches on {place}/tree/main"
        case "RepositoryNotFoundError":
            fix = (
                "Check the path or the name. For a private repository run `hf auth login`, set HF_TOKEN, or pass token="
            )
    return MissingComponentError(
        f"Cannot load {what}", f"there is no such file or folder, and {why}".splitlines()[0], fix
    )


def _is_file(inside: str) -> bool:
    return inside.lower().endswith((*folders.WEIGHTS, *folders.PICKLES))


def needed(
    name: str,
    files: Iterable[str],
    parts: Collection[str] | None,
    *,
    weights: bool | Collection[str] = True,
    variant: str | None = None,
) -> list[str]:
    """Return the files of a repository that a load needs.

    Args:
        files: their paths in the repository.
        parts: the folders of the pipeline's components; None where the repository is one component.
        weights, variant: see `fetch`.

    Raises:
        MissingComponentError, UnsupportedFileError: see `fetch`.
    """
    paths: list[str] = []
    variants: set[str] = set()
    for place, inside in _by_folder(files).items():
        if place.partition("/")[0] not in ("", *(parts or ())):
            continue
        paths += [_join(place, one) for one in inside if one.endswith(_CONFIGS) and _SHARDS not in one]
        holds = place == "" if parts is None else place in parts
        if not holds or not (weights if isinstance(weights, bool) else place in weights):
            continue
        mine = folders.usual(inside)
        variants |= set(mine)
        paths += [_join(place, one) for one in _weights(_join(name, place), inside, mine, variant)]
    if variant is not None and weights is True and variant not in variants:
        raise folders.no_variant(name, variant, variants)
    return paths


def _weights(place: str, inside: list[str], mine: folders.Named, variant: str | None) -> list[str]:
    """Return the weight files of one folder that `folders.weights` would take; empty for a folder without weights."""
    if mine:
        return folders.of_variant(mine[folders.order(mine, variant)[0]])
    others = [one for one in inside if one.lower().endswith(folders.WEIGHTS)]
    if len(others) > 1:
        more = f" and {len(others) - _NAMED} more" if len(others) > _NAMED else ""
        raise UnsupportedFileError(
            f"Cannot load {place}",
            f"it has several weight files: {', '.join(others[:_NAMED])}{more}",
            "Download the one that you want, and load it by its path",
        )
    pickles = [one for one in inside if one.lower().endswith(folders.PICKLES)]
    if not others and pickles and "config.json" in inside:
        raise MissingComponentError(
            f"Cannot load {place}",
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
