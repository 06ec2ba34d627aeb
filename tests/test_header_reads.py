"""How often a load opens a weights file: its header is read once, by whatever way the request goes."""

from __future__ import annotations

import os
import shutil
import sys
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

import sdquant
from sdquant.formats import safetensors
from sdquant.formats.gguf import header as gguf_header
from sdquant.planning import auto
from sdquant.saving import export_gguf

WEIGHTS = (".safetensors", ".gguf")
_opens: Counter[str] = Counter()
_is_counting = False


def _count(event: str, args: tuple[Any, ...]) -> None:
    if _is_counting and event == "open" and isinstance(args[0], (str, os.PathLike)):
        path = os.path.realpath(args[0])
        if path.endswith(WEIGHTS):
            _opens[path] += 1


sys.addaudithook(_count)  # which cannot be taken away again


@pytest.fixture
def reads(monkeypatch: pytest.MonkeyPatch) -> Iterator[Counter[str]]:
    """How often the header of each file was read since the test began."""
    global _is_counting
    counts: Counter[str] = Counter()

    def counted(read: Callable[..., Any]) -> Callable[..., Any]:
        def count(path: Any, *args: Any, **values: Any) -> Any:
            counts[os.path.realpath(path)] += 1
            return read(path, *args, **values)

        return count

    monkeypatch.setattr(safetensors, "_raw_header", counted(safetensors._raw_header))
    monkeypatch.setattr(gguf_header, "_version", _versions(counts))
    _opens.clear()
    _is_counting = True
    yield counts
    _is_counting = False


def _versions(counts: Counter[str]) -> Callable[..., Any]:
    """`header._version`, which is called once for each header that is read."""
    real = gguf_header._version

    def count(cursor: Any) -> int:
        counts[os.path.realpath(cursor.path)] += 1
        return real(cursor)

    return count


@pytest.fixture(scope="module")
def gguf(sd: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The UNet as a GGUF file."""
    return export_gguf.quantize_file(sd, "q8_0", tmp_path_factory.mktemp("gguf") / "unet-q8_0.gguf")


@pytest.fixture(scope="module")
def lone(sd: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The UNet's file without its config."""
    file = tmp_path_factory.mktemp("lone") / "unet.safetensors"
    return Path(shutil.copy(sd / "unet" / "diffusion_pytorch_model.safetensors", file))


# Arguments of load_model for a pipeline's folder, its UNet in a file and in a GGUF file.
WAYS: dict[str, Callable[[Path, Path, Path], tuple[Path, dict[str, Any]]]] = {
    "folder": lambda sd, lone, gguf: (sd, {}),
    "on the fly": lambda sd, lone, gguf: (sd, {"quant": "nf4", "offload": "balanced"}),
    "auto": lambda sd, lone, gguf: (sd, {"quant": "auto", "offload": "auto"}),
    "auto, as found": lambda sd, lone, gguf: (gguf, {"base": sd, "offload": "auto"}),
    "with a base": lambda sd, lone, gguf: (lone, {"base": sd, "quant": "int8"}),
    "with parts": lambda sd, lone, gguf: (sd, {"parts": [lone], "quant": "int8"}),
    "named parts": lambda sd, lone, gguf: (sd, {"parts": {"unet": gguf}}),
    "gguf": lambda sd, lone, gguf: (gguf, {"base": sd}),
}


@pytest.mark.parametrize("way", WAYS)
def test_once(way: str, sd: Path, lone: Path, gguf: Path, reads: Counter[str]) -> None:
    path, values = WAYS[way](sd, lone, gguf)
    plan = sdquant.plan(path, **values)
    files = {os.path.realpath(file) for src in plan.detected.sources.values() for file in src.files}
    assert files <= reads.keys() and set(reads.values()) == {1}
    # For the first bytes, which tell what it is, and for the header; conversion may map tensors of a GGUF file.
    assert max(count for path, count in _opens.items() if path.endswith(".safetensors")) == 2
    assert max(_opens.values()) <= 3
    reads.clear()
    sdquant.load_model(path, progress=False, **values)
    assert files <= reads.keys() and set(reads.values()) == {1}


def test_a_file_that_changes_between_plan_and_load_is_read_anew(sd: Path, gguf: Path, reads: Counter[str]) -> None:
    src = sdquant.plan(gguf, base=sd).detected.sources["unet"]
    (file,) = src.files
    os.utime(file, ns=(1, 1))
    for opened in src.open().values():
        opened.close()
    assert reads[os.path.realpath(file)] == 2


def test_the_files_of_a_preset(sd: Path, reads: Counter[str]) -> None:
    from sdquant.planning import presets

    presets.choose("fits-8gb", sd)
    assert reads and set(reads.values()) == {1}


def test_auto_is_decided_without_another_look(sd: Path, reads: Counter[str]) -> None:
    from sdquant.compat import hardware
    from sdquant.planning.request import make_request

    auto.resolve(make_request(sd, quant="auto", offload="auto"), hardware.probe())
    assert reads and set(reads.values()) == {1}


@pytest.mark.parametrize("name", ["unet.safetensors", "unet.gguf"])
def test_a_file_that_is_gone_since_the_plan(name: str, sd: Path, lone: Path, gguf: Path, tmp_path: Path) -> None:
    from sdquant.errors import BadFileError
    from sdquant.loading.loader import load_planned
    from sdquant.planning.preparation import prepare
    from sdquant.planning.request import make_request

    file = Path(shutil.copy(gguf if name.endswith(".gguf") else lone, tmp_path / name))
    asked = make_request(file, base=sd, progress=False)
    plan = prepare(asked)
    file.unlink()
    with pytest.raises(BadFileError, match=f"Cannot read .*{name}"):
        load_planned(asked, plan)
