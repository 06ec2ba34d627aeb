"""Quantized weights that are kept for the next load: the same bits, from the right files, and never in the way."""

from __future__ import annotations

import json
import logging
import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

import sdquant
from sdquant.cli import main
from sdquant.compat import hardware
from sdquant.errors import DiskSpaceError
from sdquant.loading.quantized_cache import VARIABLE, cache_of, default_folder
from sdquant.planning.request import make_request
from sdquant.utils.atomic_write import whole_file

from . import layouts
from .foreign import WEIGHTS
from .test_load_modes import same_bits

# One of each kind of packing and of module; that every scheme is saved and loaded again is shown elsewhere.
SCHEMES = ("int8", "int4,group_size=32", "nf4,double_quant,compute_dtype=float32", "fp8", "bnb-int8", "qint4", "qint3",
           "sdnq-uint4")  # fmt: skip


def _load(path: Path, cache: Path, quant: Any = "int8", **values: Any) -> Any:
    return sdquant.load_model(path, quant, cache=cache, progress=False, **values)


def _files(folder: Path) -> list[Path]:
    return sorted(folder.glob("*.safetensors"))


@pytest.fixture
def unet(sd: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(sd / "unet", tmp_path / "unet"))


@pytest.mark.parametrize("scheme", SCHEMES)
def test_what_was_kept_is_what_was_made(scheme: str, sd: Path, tmp_path: Path) -> None:
    first, second = (_load(sd / "unet", tmp_path, scheme) for _ in range(2))
    assert (first.sdquant.cached, second.sdquant.cached) == ((), ("model",))
    assert first.sdquant.plan.to_dict() == second.sdquant.plan.to_dict()
    _same_layers(first, second)
    (file,) = _files(tmp_path)
    assert sdquant.verify(file).quant == scheme.partition(",")[0]


def _same_layers(one: torch.nn.Module, other: torch.nn.Module) -> None:
    a, b = dict(one.named_modules()), dict(other.named_modules())
    assert {name: type(module) for name, module in a.items()} == {name: type(module) for name, module in b.items()}
    for name, module in a.items():
        assert getattr(module, "compute_dtype", None) == getattr(b[name], "compute_dtype", None)
    same_bits(one, other)


def test_the_parts_of_a_pipeline(flux: Path, tmp_path: Path) -> None:
    quant = {"transformer": "int8", "text_encoder": "qint4", "vae": "none"}
    first = _load(flux, tmp_path, quant)
    assert len(_files(tmp_path)) == 2
    again = _load(flux, tmp_path, quant, mode="post")
    assert set(again.sdquant.cached) == {"transformer", "text_encoder"}
    same_bits(first, again)
    assert _load(flux, tmp_path, {"transformer": "int8"}, offload="sequential").sdquant.cached == ("transformer",)


def test_what_the_bits_depend_on(unet: Path, tmp_path: Path) -> None:
    cache = tmp_path / "cache"

    def is_kept(quant: str = "nf4", path: Path = unet, **values: Any) -> bool:
        return bool(_load(path, cache, quant, **values).sdquant.cached)

    assert not is_kept()
    assert is_kept() and is_kept("bnb:nf4") and is_kept(mode="post")
    for other in ("fp4", "nf4,block_size=128"):
        assert not is_kept(other)
    assert not is_kept(dtype="float32") and not is_kept(skip="mid_block")
    assert not is_kept(runtime="plain")  # which quantizes convolutions too
    # The same bytes elsewhere are the same model; other bytes in the same place are not.
    assert is_kept(path=Path(shutil.copytree(unet, tmp_path / "elsewhere")))
    tensors = load_file(unet / WEIGHTS)
    tensors["conv_in.bias"][0] += 1
    save_file(tensors, unet / WEIGHTS)
    assert not is_kept()
    assert is_kept()


def test_versions_of_packages_count(unet: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    _load(unet, tmp_path / "cache", "qint8")
    real = hardware.versions()
    monkeypatch.setattr(hardware, "versions", lambda: {**real, "optimum-quanto": "99"})
    assert not _load(unet, tmp_path / "cache", "qint8").sdquant.cached


def test_files_are_read_through_once(unet: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    cache, read = tmp_path / "cache", []
    monkeypatch.setattr("sdquant.loading.quantized_cache._SETTLED", 0)
    real = sdquant.loading.quantized_cache._sha256  # type: ignore[attr-defined]
    monkeypatch.setattr(
        "sdquant.loading.quantized_cache._sha256", lambda file, *a, **k: (read.append(file), real(file, *a, **k))[1]
    )
    for quant in ("int8", "nf4", "int8"):
        _load(unet, cache, quant)
    assert len(read) == 1
    os.utime(unet / WEIGHTS)  # it may be another one now
    assert _load(unet, cache).sdquant.cached and len(read) == 2
    (cache / "digests.json").write_text("[")
    assert _load(unet, cache).sdquant.cached and len(read) == 3


def test_another_file_of_the_same_size_and_time(unet: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As `cp -p` and `rsync -t` leave it, in the place of the old or in the old file itself."""
    monkeypatch.setattr("sdquant.loading.quantized_cache._SETTLED", 0)
    file = unet / WEIGHTS
    before, raw = file.stat(), file.read_bytes()
    _load(unet, tmp_path / "cache")
    assert _load(unet, tmp_path / "cache").sdquant.cached
    file.write_bytes(raw[:-1] + bytes([raw[-1] ^ 1]))
    os.utime(file, ns=(before.st_atime_ns, before.st_mtime_ns))
    after = file.stat()
    assert (after.st_size, after.st_mtime_ns, after.st_ino) == (before.st_size, before.st_mtime_ns, before.st_ino)
    assert not _load(unet, tmp_path / "cache").sdquant.cached


def test_of_a_file_that_is_just_written_nothing_is_remembered(unet: Path, tmp_path: Path) -> None:
    os.utime(unet / WEIGHTS)
    _load(unet, tmp_path / "cache")
    assert len(_files(tmp_path / "cache")) == 1 and not (tmp_path / "cache" / "digests.json").exists()
    assert _load(unet, tmp_path / "cache").sdquant.cached


def test_a_file_that_changes_while_it_is_loaded(
    unet: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: Any
) -> None:
    real, raw = sdquant.loading.loader.build, (unet / WEIGHTS).read_bytes()

    def build(*values: Any) -> Any:
        made = real(*values)
        (unet / "new").write_bytes(raw[:-1] + bytes([raw[-1] ^ 1]))
        os.replace(unet / "new", unet / WEIGHTS)
        return made

    monkeypatch.setattr(sdquant.loading.loader, "build", build)
    with caplog.at_level(logging.WARNING, "sdquant"):
        _load(unet, tmp_path / "cache")
    assert _files(tmp_path / "cache") == [] and "changed while it was being loaded" in caplog.text


@pytest.mark.parametrize("damage", ["short", "empty", "strange", "of another model"])
def test_a_damaged_file_is_made_again(damage: str, unet: Path, sd: Path, tmp_path: Path, caplog: Any) -> None:
    cache = tmp_path / "cache"
    first = _load(unet, cache)
    (file,) = _files(cache)
    raw = file.read_bytes()
    if damage == "of another model":
        sdquant.save(sdquant.load_model(sd / "text_encoder", "int8", progress=False), file, overwrite=True)
    else:
        file.write_bytes({"short": raw[:-9], "empty": b"", "strange": b"\x80" + raw[1:]}[damage])
    with caplog.at_level(logging.WARNING, "sdquant"):
        again = _load(unet, cache)
    assert not again.sdquant.cached and f"Removing {file.name} from the cache" in caplog.text
    _same_layers(first, again)
    assert _files(cache) == [file] and file.read_bytes() == raw


def test_the_limit(sd: Path, tmp_path: Path, caplog: Any) -> None:
    paths = [sd / "unet", sd / "text_encoder"]
    sizes = []
    for path in paths:
        _load(path, tmp_path / "all")
        sizes.append(sum(file.stat().st_size for file in _files(tmp_path / "all")) - sum(sizes))
    limit = max(sizes) + min(sizes) - 1
    for path in paths:
        _load(path, tmp_path / "some", cache_limit=limit)
    assert [_load(path, tmp_path / "some", cache_limit=limit).sdquant.cached for path in paths[::-1]] == [
        ("model",),
        (),
    ]
    assert sum(file.stat().st_size for file in _files(tmp_path / "some")) <= limit
    with caplog.at_level(logging.WARNING, "sdquant"):
        _load(paths[0], tmp_path / "none", cache_limit=1000)
    assert _files(tmp_path / "none") == [] and "limit of 1000" in caplog.text


def test_a_full_disk_fails_no_load(unet: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: Any) -> None:
    def full(*_: Any, **__: Any) -> None:
        raise DiskSpaceError("It was to be written", "the disk is full", "Make room")

    monkeypatch.setattr("sdquant.loading.quantized_cache.safetensors_writer.write", full)
    with caplog.at_level(logging.WARNING, "sdquant"):
        assert _load(unet, tmp_path / "cache").sdquant.cached == ()
    assert "not cached" in caplog.text and "the disk is full" in caplog.text


def test_a_folder_that_cannot_be_made(unet: Path, tmp_path: Path, caplog: Any) -> None:
    (tmp_path / "file").write_text("")
    with caplog.at_level(logging.WARNING, "sdquant"):
        assert _load(unet, tmp_path / "file" / "cache").sdquant.cached == ()
    assert "not cached" in caplog.text


def test_another_process_that_keeps_the_same(
    unet: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: Any
) -> None:
    monkeypatch.setattr("sdquant.loading.quantized_cache._SETTLED", 0)
    with whole_file(tmp_path / "digests.json"), caplog.at_level(logging.INFO, "sdquant"):  # as if it were that process
        assert _load(unet, tmp_path).sdquant.cached == ()
    rows = [row for row in caplog.records if "not cached" in row.message]
    assert {row.levelname for row in rows} == {"INFO"} and "another process" in rows[0].message
    assert _load(unet, tmp_path).sdquant.cached == ("model",)


def test_off_by_default(unet: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "home"))
    monkeypatch.delenv(VARIABLE, raising=False)
    sdquant.load_model(unet, "int8", progress=False)
    assert not (tmp_path / "home").exists()
    for word in ("", "off", "0", "False", "no"):
        monkeypatch.setenv(VARIABLE, word)
        assert cache_of(make_request("x")) is None
    assert cache_of(make_request("x", cache=False)) is None
    for word in ("on", "1", "TRUE"):
        monkeypatch.setenv(VARIABLE, word)
        cache = cache_of(make_request("x", cache_limit="2GB"))
        assert cache is not None and (cache.folder, cache.limit) == (default_folder(), 2_000_000_000)
        assert cache_of(make_request("x", cache="off")) is None
    sdquant.load_model(unet, "int8", cache=True, progress=False)
    assert _files(tmp_path / "home" / "sdquant")


def test_nothing_is_kept_of_what_is_not_quantized_here(sd: Path, saved: Callable[..., Path], tmp_path: Path) -> None:
    _load(sd, tmp_path / "cache", None)
    _load(saved("int8"), tmp_path / "cache", None)
    assert not (tmp_path / "cache").exists()


def test_from_the_command_line(unet: Path, sd: Path, tmp_path: Path, capsys: Any) -> None:
    cache = ["--cache", str(tmp_path / "cache"), "--cache-limit", "1GB"]
    assert main(["quantize", str(unet), str(tmp_path / "one"), "-q", "int8", *cache]) == 0
    assert main(["quantize", str(unet), str(tmp_path / "two"), "-q", "int8", *cache]) == 0
    assert len(_files(tmp_path / "cache")) == 1
    one, two = (load_file(tmp_path / name / WEIGHTS) for name in ("one", "two"))
    assert one.keys() == two.keys() and all(torch.equal(one[key], two[key]) for key in one)
    assert json.loads((tmp_path / "one" / "config.json").read_text()) == json.loads(
        (tmp_path / "two" / "config.json").read_text()
    )
    capsys.readouterr()


def test_the_parts_of_a_checkpoint(sd: Path, tmp_path: Path) -> None:
    checkpoint = layouts.checkpoint(sd, tmp_path / "digits-v1.safetensors")
    first, second = (_load(checkpoint, tmp_path / "cache", base=sd) for _ in range(2))
    assert set(second.sdquant.cached) == {"unet", "text_encoder"}
    same_bits(first, second)
