"""The settings file: it comes back as it was written, and nothing that is not one is taken for it or overwritten."""

from __future__ import annotations

import json
import os
import stat
import sys
import threading
from pathlib import Path
from typing import Any

import pytest

from sdquant import SettingsError
from sdquant.settings import Settings
from sdquant.settings.file import (
    LARGEST,
    VERSION,
    default_path,
    dumps,
    from_value,
    load,
    loads,
    migrated,
    save,
    set_aside,
)

GIVEN = Settings(
    {
        "quant.model": "nf4,double_quant",
        "quant.text_encoder": "none",
        "offload": "balanced",
        "budget": "6GB",
        "skip": ["mid_block", "proj_out"],
        "cache": "/tmp/ä",
        "allow_incompatible": True,
    }
)


def written(version: Any = VERSION, **settings: Any) -> str:
    return json.dumps({"format": "sdquant-settings", "version": version, "settings": settings})


class TestText:
    def test_comes_back(self) -> None:
        assert loads(dumps(GIVEN)) == GIVEN
        assert loads(dumps(Settings())) == Settings()

    def test_has_what_differs_from_the_defaults(self) -> None:
        whole = json.loads(dumps(Settings({"quant.vae": "int8", "mode": "auto"})))
        assert whole == {"format": "sdquant-settings", "version": 1, "settings": {"quant.vae": "int8"}}

    @pytest.mark.parametrize(
        ("text", "said"),
        [
            ("", "not JSON"),
            ("{", "not JSON"),
            ("NaN", "NaN is not valid JSON"),
            ("[" * 10_000, "not JSON"),
            ("9" * 5000, "not JSON"),
            (" " * (LARGEST + 1), f"has {LARGEST + 1} bytes"),
            ("[]", '"format"'),
            ('{"format": "other", "version": 1, "settings": {}}', '"format"'),
            ('{"version": 1, "version": 2}', "twice"),
            (written("1"), "its version is '1'"),
            (written(True), "its version is True"),
            (written(0), "its version is 0"),
            (written(VERSION + 1), "a newer sdquant wrote it"),
            ('{"format": "sdquant-settings", "version": 1, "settings": []}', "not a table of names and values"),
            ('{"format": "sdquant-settings", "version": 1}', "not a table of names and values"),
            (written(ofload="none"), "sets 'ofload'"),
            (written(**{"x" * 5000: 1}), "sets 'xxx"),
            (written(offload="balancd"), "Did you mean 'balanced'"),
            (written(offload=["none"]), "Invalid offload=['none']"),
            (written(**{"quant.model": "nf5"}), "nf4"),
            (written(**{"quant.model": 4}), "Invalid quant.model=4"),
            (written(budget="6GB"), "only balanced offload keeps to a budget"),
            (written(budget=True), "Invalid budget=True"),
            (written(skip={"a": 1}), "Invalid skip={'a': 1}"),
            (written(allow_incompatible="yes"), "on or off"),
            (written(device="toaster"), "toaster"),
            (written(path="model"), "sets 'path'"),
        ],
    )
    def test_refused(self, text: str, said: str) -> None:
        with pytest.raises(SettingsError) as caught:
            loads(text)
        assert said in str(caught.value)
        assert caught.value.what == "Cannot read the text as settings"
        assert caught.value.fix and len(str(caught.value)) < 1500


# What later versions might need, to see that the rows are applied.
ROWS = {
    1: lambda values: {"offload": values["mover"]},
    2: lambda values: values | {"mode": "pre"},
}


class TestMigrations:
    def test_each_version_in_turn(self) -> None:
        assert migrated({"mover": "model"}, 1, ROWS, 3) == {"offload": "model", "mode": "pre"}
        assert migrated({"offload": "none"}, 2, ROWS, 3) == {"offload": "none", "mode": "pre"}
        assert migrated({"offload": "none"}, 3, ROWS, 3) == {"offload": "none"}

    def test_there_is_a_row_for_every_version_before_this_one(self) -> None:
        for version in range(1, VERSION + 1):
            assert from_value({"format": "sdquant-settings", "version": version, "settings": {}}, "") == Settings()


class TestFile:
    def test_comes_back(self, tmp_path: Path) -> None:
        path = tmp_path / "new" / "folder" / "settings.json"
        save(path, GIVEN)
        assert load(path) == GIVEN
        save(path, Settings())
        assert load(path) == Settings()
        assert [one.name for one in path.parent.iterdir()] == ["settings.json"]

    def test_a_missing_one_is_the_defaults(self, tmp_path: Path) -> None:
        assert load(tmp_path / "no" / "settings.json") == Settings()
        assert list(tmp_path.iterdir()) == []

    @pytest.mark.skipif(os.name != "posix", reason="file modes are POSIX's")
    def test_is_the_owners_alone_and_keeps_its_permissions(self, tmp_path: Path) -> None:
        path = tmp_path / "settings.json"
        save(path, GIVEN)
        assert stat.S_IMODE(path.stat().st_mode) == 0o600
        path.chmod(0o640)
        save(path, Settings())
        assert stat.S_IMODE(path.stat().st_mode) == 0o640

    @pytest.mark.parametrize(
        "content", [b"", b"{}", b"\xff\xfe", b"[" * 9999, b" " * (LARGEST + 1), written(2).encode()]
    )
    def test_a_damaged_one_is_named_and_never_overwritten(self, content: bytes, tmp_path: Path) -> None:
        path = tmp_path / "settings.json"
        path.write_bytes(content)
        for call in (lambda: load(path), lambda: save(path, GIVEN)):
            with pytest.raises(SettingsError) as caught:
                call()
            assert str(path) in caught.value.what and caught.value.fix
        assert path.read_bytes() == content
        assert set_aside(path) == tmp_path / "settings.json.broken-1"
        save(path, GIVEN)
        assert load(path) == GIVEN
        assert (tmp_path / "settings.json.broken-1").read_bytes() == content

    def test_set_aside_overwrites_none_that_was_set_aside_before(self, tmp_path: Path) -> None:
        path = tmp_path / "settings.json"
        for number in (1, 2, 3):
            path.write_text(f"broken {number}")
            assert set_aside(path).name == f"settings.json.broken-{number}"
        assert [(tmp_path / f"settings.json.broken-{n}").read_text()[-1] for n in (1, 2, 3)] == ["1", "2", "3"]
        with pytest.raises(SettingsError, match="set aside"):
            set_aside(path)

    @pytest.mark.skipif(os.name != "posix", reason="links and pipes")
    def test_what_is_no_file_is_refused(self, tmp_path: Path) -> None:
        os.mkfifo(tmp_path / "pipe")
        for path in (tmp_path, tmp_path / "pipe", tmp_path / ("a" * 300), tmp_path / "a\0b"):
            with pytest.raises(SettingsError):
                load(path)
            with pytest.raises(SettingsError):
                save(path, GIVEN)

    @pytest.mark.skipif(os.name != "posix", reason="links")
    def test_a_link_stays_one(self, tmp_path: Path) -> None:
        (tmp_path / "dotfiles").mkdir()
        real, link = tmp_path / "dotfiles" / "sdquant.json", tmp_path / "settings.json"
        link.symlink_to(real)
        save(link, GIVEN)
        assert link.is_symlink() and load(real) == GIVEN
        real.write_text("broken")
        assert set_aside(link) == tmp_path / "dotfiles" / "sdquant.json.broken-1"
        assert link.is_symlink() and load(link) == Settings()

    def test_threads_save_one_after_the_other(self, tmp_path: Path) -> None:
        path, failures = tmp_path / "settings.json", []

        def work(number: int) -> None:
            try:
                for _ in range(5):
                    save(path, Settings({"cache_limit": f"{number}GB"}))
                    load(path)
            except Exception as error:
                failures.append(error)

        threads = [threading.Thread(target=work, args=(number,)) for number in range(1, 5)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert failures == []
        assert load(path)["cache_limit"] in {f"{number}GB" for number in range(1, 5)}


class TestPlace:
    def test_the_environment_decides(self, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
        monkeypatch.setenv("SDQUANT_SETTINGS", str(tmp_path / "mine.json"))
        assert default_path() == tmp_path / "mine.json"
        monkeypatch.setenv("SDQUANT_SETTINGS", "~/mine.json")
        assert default_path() == Path.home() / "mine.json"

    @pytest.mark.parametrize(
        ("system", "said", "place"),
        [
            ("linux", {"XDG_CONFIG_HOME": "/conf"}, "/conf/sdquant/settings.json"),
            ("linux", {"XDG_CONFIG_HOME": "conf"}, "/home/me/.config/sdquant/settings.json"),
            ("linux", {}, "/home/me/.config/sdquant/settings.json"),
            ("darwin", {}, "/home/me/Library/Application Support/sdquant/settings.json"),
            ("win32", {"APPDATA": "/roaming"}, "/roaming/sdquant/settings.json"),
            ("win32", {}, "/home/me/AppData/Roaming/sdquant/settings.json"),
        ],
    )
    @pytest.mark.skipif(os.name != "posix", reason="the paths are POSIX's")
    def test_by_platform(self, system: str, said: dict[str, str], place: str, monkeypatch: pytest.MonkeyPatch) -> None:
        for name in ("SDQUANT_SETTINGS", "XDG_CONFIG_HOME", "APPDATA"):
            monkeypatch.delenv(name, raising=False)
        monkeypatch.setenv("HOME", "/home/me")
        for name, value in said.items():
            monkeypatch.setenv(name, value)
        monkeypatch.setattr(sys, "platform", system)
        assert str(default_path()) == place
