"""Names for what is below the folders of models, and no way to anything else."""

from __future__ import annotations

import os
import shutil
from pathlib import Path

import pytest

from sdquant import demo
from sdquant.errors import SettingsError
from sdquant.ui import model_folders as module
from sdquant.ui.html_components import escape
from sdquant.ui.model_folders import Roots

SD = demo.path("digits-sd")


@pytest.fixture
def place(tmp_path: Path) -> Path:
    """A folder of models, with folders beside it that are none of the page's business."""
    models = tmp_path / "models"
    (models / "by me" / "deep").mkdir(parents=True)
    for name in ("a.safetensors", "B.GGUF", "by me/c d.gguf", "by me/deep/é.safetensors", "notes.txt", ".hidden.gguf"):
        (models / name).write_bytes(b"x")
    (models / "pipe").symlink_to(SD)  # which lies below the shipped models
    shutil.copytree(SD / "unet", models / "unet-alone")
    outside = tmp_path / "models-private"
    outside.mkdir()
    (outside / "s.gguf").write_bytes(b"x")
    (models / "out.gguf").symlink_to(outside / "s.gguf")
    (models / "out").symlink_to(outside)
    (models / "loop").symlink_to(models)
    os.mkfifo(models / "pipe.gguf")
    (models / "dead.gguf").symlink_to(models / "nothing.gguf")
    (models / "line\nfeed.gguf").write_bytes(b"x")
    with open(os.fsencode(models / "bytes") + b"\xff.gguf", "wb") as file:
        file.write(b"x")
    return models


def _names(entries: tuple[module.Entry, ...]) -> dict[str, str]:
    return {entry.name: entry.kind for entry in entries}


def test_the_shipped_models_come_first() -> None:
    entries = Roots().models()
    assert _names(entries) == dict.fromkeys(("digits-flux", "digits-sd"), "pipeline")
    assert {entry.path for entry in entries} == {demo.path(name) for name in demo.MODELS}


def test_models_are_what_can_be_picked(place: Path) -> None:
    entries = _names(Roots([place]).models())
    assert list(entries)[:2] == ["digits-flux", "digits-sd"]
    assert {name: kind for name, kind in entries.items() if name.startswith("models/")} == {
        "models/B.GGUF": "gguf",
        "models/a.safetensors": "safetensors",
        "models/by me/c d.gguf": "gguf",
        "models/by me/deep/é.safetensors": "safetensors",
        "models/unet-alone": "component",
    }


def test_files_are_also_those_inside(place: Path) -> None:
    entries = _names(Roots([place]).files())
    assert entries["models/unet-alone/diffusion_pytorch_model.safetensors"] == "safetensors"
    assert entries["digits-sd/unet"] == "component"
    assert entries["digits-sd/vae/diffusion_pytorch_model.safetensors"] == "safetensors"


def test_every_entry_is_found_by_its_name(place: Path) -> None:
    roots = Roots([place])
    for entry in roots.files():
        assert roots.resolve(entry.name) == entry.path
        assert roots.shown(entry.path) == entry.name


@pytest.mark.parametrize("text", ["models/by me/c d.gguf", "by me/c d.gguf", "{place}/by me/c d.gguf"])
def test_other_ways_to_write_a_path_below(place: Path, text: str) -> None:
    assert Roots([place]).resolve(text.replace("{place}", str(place))) == place / "by me" / "c d.gguf"


def test_a_folder_may_end_in_a_slash(place: Path) -> None:
    assert Roots([place]).resolve("models/by me/") == place / "by me"


REFUSED = (
    "", "/", "//", ".", "..", "models/..", "models/.", "models/./a.safetensors", "models//a.safetensors", "/models",
    "models/../models-private/s.gguf", "../models-private/s.gguf", "{private}/s.gguf",
    "{place}/../models-private/s.gguf",
    "{place}-private/s.gguf", "models-private/s.gguf", "models/out/s.gguf", "models/out", "models/out.gguf", "out.gguf",
    "models/pipe.gguf", "models/dead.gguf", "models/nothing.gguf", "models/.hidden.gguf", "models/line\nfeed.gguf",
    "models/bytes\udcff.gguf", "models/A.SAFETENSORS", "MODELS/a.safetensors", "Digits-SD", "models\\a.safetensors",
    "models/a.safetensors::$DATA", "models/a.safetensors.", "models/a.safetensors ", "models/a.safetensors\x00", "\x00",
    "\x1b[31mmodels", "/etc/passwd", "etc/passwd", "\\\\host\\share\\x", "//host/share/x", "\\\\?\\C:\\x", "C:\\x",
    "C:x",
    "NUL", "CON", "aux.gguf", "COM1", "file:///etc/passwd", "http://host/x", "https://host/x", "~", "~root", "$HOME",
    "*",
    "models/" + "x" * 300, "x" * 100_000, "a/" * 400, "models/a.safetensors/x", "%2e%2e/x", "digits-sd/../digits-sd",
)  # fmt: skip


@pytest.mark.parametrize("text", REFUSED, ids=[repr(text)[:40] for text in REFUSED])
def test_everything_else_is_refused_in_the_same_words(place: Path, text: str) -> None:
    roots = Roots([place])
    text = text.replace("{place}", str(place)).replace("{private}", str(place.parent / "models-private"))
    with pytest.raises(SettingsError) as caught:
        roots.resolve(text)
    with pytest.raises(SettingsError) as other:
        roots.resolve("no such thing")
    assert (caught.value.why, caught.value.fix) == (other.value.why, other.value.fix)
    assert str(place) not in str(caught.value)
    assert len(caught.value.what) < 4 * module.SHOWN + 40
    assert caught.value.what.isprintable()


@pytest.mark.parametrize("value", [None, 3, b"digits-sd", ["digits-sd"], {"path": "digits-sd"}, True])
def test_what_is_no_text_is_refused(value: object) -> None:
    with pytest.raises(SettingsError, match="Cannot open"):
        Roots().resolve(value)


def test_two_folders_of_one_name_and_one_that_is_a_model(tmp_path: Path) -> None:
    for number in ("1", "2"):
        (tmp_path / number / "models").mkdir(parents=True)
        (tmp_path / number / "models" / "a.gguf").write_bytes(number.encode())
    mine = shutil.copytree(SD, tmp_path / "digits-sd")
    roots = Roots([tmp_path / "1" / "models", tmp_path / "2" / "models", mine, tmp_path / "1" / "models"])
    names = [entry.name for entry in roots.models()]
    assert names[2:] == ["models/a.gguf", "models 2/a.gguf", "digits-sd 2"]
    assert roots.resolve("models 2/a.gguf").read_bytes() == b"2"
    assert roots.resolve("digits-sd 2") == mine
    assert roots.resolve("digits-sd") == SD


def test_the_cache_of_the_hub_has_links_to_its_own_blobs(tmp_path: Path) -> None:
    repository = tmp_path / "models--a--b"
    shot = repository / "snapshots" / "0123"
    shot.mkdir(parents=True)
    (repository / "blobs").mkdir()
    (repository / "blobs" / "beef").write_bytes(b"x")
    (shot / "m.gguf").symlink_to("../../blobs/beef")
    for given in (tmp_path, repository, shot):
        roots = Roots([given])
        (entry,) = roots.models()[2:]
        assert roots.resolve(entry.name) == shot / "m.gguf"


def test_a_link_from_one_folder_to_another_is_no_way_out(tmp_path: Path) -> None:
    for name in ("one", "two"):
        (tmp_path / name).mkdir()
    (tmp_path / "two" / "m.gguf").write_bytes(b"x")
    (tmp_path / "one" / "there").symlink_to(tmp_path / "two")
    assert Roots([tmp_path / "one", tmp_path / "two"]).resolve("one/there/m.gguf").exists()
    with pytest.raises(SettingsError):
        Roots([tmp_path / "one"]).resolve("one/there/m.gguf")


def test_lists_end(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    deep = tmp_path / "a" / "b" / "c" / "d" / "e" / "f" / "g"
    deep.mkdir(parents=True)
    (deep / "m.gguf").write_bytes(b"x")
    (deep.parent / "n.gguf").write_bytes(b"x")
    names = [entry.name for entry in Roots([tmp_path]).models()[2:]]
    assert [Path(name).name for name in names] == ["n.gguf"]
    for number in range(20):
        (tmp_path / f"{number}.gguf").write_bytes(b"x")
    monkeypatch.setattr(module, "MAX_ENTRIES", 5)
    assert len(Roots([tmp_path]).models()) == 5
    monkeypatch.setattr(module, "MAX_LOOKED_AT", 4)
    assert len(Roots([tmp_path]).models()) == 2 + 2  # the two shipped folders are looked at first


@pytest.mark.parametrize("given", ["/", "nowhere", __file__])
def test_folders_that_are_none_are_refused(given: str) -> None:
    with pytest.raises(SettingsError, match=r"Cannot use .* as a folder of models"):
        Roots([given])


def test_sentences_are_cleaned_of_paths(place: Path) -> None:
    roots, private = Roots([place]), place.parent / "models-private"
    for before, after in (
        (f"{place}/by me/c d.gguf was to be read. No.", "models/by me/c d.gguf was to be read. No."),
        (f"it is a link to {private}/s.gguf, outside", "it is a link to s.gguf, outside"),
        (f"[Errno 2] No such file: '{private}/x y.gguf'", "[Errno 2] No such file: 'x y.gguf'"),
        (f"{SD}/unet: bad", "digits-sd/unet: bad"),
        ('File "/usr/lib/python3/site-packages/torch/nn.py", line 3', 'File "nn.py", line 3'),
        ("/home/me/my models/x.gguf was bad", "x.gguf was bad"),
        ("C:\\Users\\me\\x.gguf. And \\\\host\\share\\k", "x.gguf. And k"),
        ("file:///etc/passwd, and file:///home/me/x", "passwd, and x"),
        ("see https://example.org/a/b, and/or 1/2", "see https://example.org/a/b, and/or 1/2"),
        ("(/home/me/a.gguf) and [/home/me/b.gguf]", "(a.gguf) and [b.gguf]"),
        ("no path at all", "no path at all"),
    ):
        assert roots.clean(before) == after
    assert roots.shown(private / "s.gguf") == "s.gguf"


def test_text_from_files_stays_text(tmp_path: Path) -> None:
    import numpy as np
    from safetensors.numpy import save_file

    from sdquant.formats import safetensors
    from sdquant.models.detection import detect

    name = "<script>alert('1')<!-- \"x\" onload=y `${z}` \u202egpj.safetensors"
    said = "</p><img src=x onerror=alert(1)>\u2066\x1b[31m&amp;"
    path = tmp_path / name
    save_file({"x.weight": np.ones((2, 2), np.float32)}, path, metadata={"<b>": said})
    roots = Roots([tmp_path])
    (entry,) = roots.models()[2:]
    with safetensors.SafetensorsFile(roots.resolve(entry.name)) as file:
        metadata = dict(file.metadata)
    for value in (entry.name, detect(entry.path, complete=False).path, *metadata, *metadata.values()):
        shown = escape(value)
        assert not set("<>\"'`{}\u202e\u2066\x1b") & set(shown)
        assert "&amp;amp;" in shown or "&amp;" not in value
    assert "&lt;script&gt;" in escape(entry.name)
    assert escape("a" * 3000).endswith("aaa...")
    assert escape("é 五 a\nb") == "é 五 a\nb"


def test_lora_files_are_listed_apart_from_models(tmp_path: Path) -> None:
    from safetensors.torch import save_file
    from torch import zeros

    (tmp_path / "m").mkdir()
    notes = {"ss_tags": "lora_down " * 1000}  # kohya's scripts write a lot before the tensors
    save_file({"lora_unet_x.lora_down.weight": zeros(1)}, tmp_path / "m" / "kohya.safetensors", notes)
    save_file({"transformer.x.lora_A.weight": zeros(1)}, tmp_path / "m" / "peft.safetensors")
    save_file({"x.lokr_w1": zeros(1)}, tmp_path / "m" / "lokr.safetensors")
    save_file({"x.weight": zeros(1)}, tmp_path / "m" / "model.safetensors", {"note": '"a.lora_A.b": {'})
    roots = Roots([tmp_path / "m"])
    assert {one.name for one in roots.loras()} == {"m/kohya.safetensors", "m/peft.safetensors", "m/lokr.safetensors"}
    assert "m/model.safetensors" in {one.name for one in roots.models()}
    assert "m/peft.safetensors" in {one.name for one in roots.files()} - {one.name for one in roots.models()}
