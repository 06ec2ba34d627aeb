"""YAML files that may be anybody's: what is read, and what is refused with its line."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from sdquant.errors import BadFileError, SettingsError
from sdquant.rules.parse import rules_of
from sdquant.utils import strict_yaml


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("1e-5", 1e-5), ("1.0e-5", 1e-5), ("1.", 1.0), (".5", 0.5), ("-3", -3), ("+4", 4), ("010", 10),
        ("true", True), ("False", False), ("null", None), ("~", None), ("", None),
        # What YAML 1.1 makes something else of.
        ("on", "on"), ("no", "no"), ("yes", "yes"), ("1:30", "1:30"), ("1_000", "1_000"), ("0x10", "0x10"),
        ("2026-08-21", "2026-08-21"), (".nan", ".nan"), (".inf", ".inf"), ("=", "="), ("<<", "<<"),
        # Quotes make a text.
        ("'1'", "1"), ('"true"', "true"), ("''", ""), ("|-\n  a\n  b", "a\nb"),
        ("[1, a, [b]]", [1, "a", ["b"]]), ("{a: 1, b: {c: null}}", {"a": 1, "b": {"c": None}}),
    ],
)  # fmt: skip
def test_a_value(text: str, value: Any) -> None:
    got = strict_yaml.loads(f"key: {text}\n").values["key"]
    assert got == value and type(got) is type(value)


def test_lines_are_remembered() -> None:
    assert strict_yaml.loads("# first\na: 1\n\nb:\n  - c: 2\n").lines == {"a": 2, "b": 4}


@pytest.mark.parametrize("text", ["", "# only this\n", "---\n", "---\n...\n"])
def test_a_file_without_keys(text: str) -> None:
    assert strict_yaml.loads(text).values == {}


@pytest.mark.parametrize(
    ("text", "line", "why"),
    [
        ("a: 1\nb: 2\na: 3\n", 3, "'a' appears twice, first in line 1"),
        ("a:\n  b: 1\n  b: 2\n", 3, "'b' appears twice, first in line 2"),
        ("- a\n- b\n", 1, "not a mapping"),
        ("just words\n", 1, "not a mapping"),
        ("a: &x [1]\nb: *x\n", 1, "anchors (&) and aliases (*) are not supported"),
        ("a: *x\n", 1, "anchors (&) and aliases (*) are not supported"),
        ("&x\na: 1\n", 1, "anchors (&) and aliases (*) are not supported"),
        ("a: !!python/object/apply:os.system [ls]\n", 1, "tags such as "),
        ("a: !!str 1\n", 1, "tags such as "),
        ("a: 1\nb: [1, 2\nc: 3\n", 3, "not valid YAML"),
        ("a: 1\n\tb: 2\n", 2, "not valid YAML"),
        ("a: b: c\n", 1, "not valid YAML"),
        ("a: 1\nb: \x07\n", 2, "a character that YAML does not allow"),
        ("a: 1\n---\nb: 2\n", 2, "a second document"),
        ("? [a]\n: 1\n", 1, "a key there is not a plain name"),
        ("a: " + "[" * 21, 1, "nested deeper than 20"),
        ("a: " + "[" * 200_000, 1, "nested deeper than 20"),
        ("a: " + "{a: " * 50_000, 1, "nested deeper than 20"),
    ],
)  # fmt: skip
def test_a_bad_file_is_refused_with_its_line(tmp_path: Path, text: str, line: int, why: str) -> None:
    path = tmp_path / "config.yml"
    path.write_text(text, encoding="utf-8")
    with pytest.raises(BadFileError) as error:
        strict_yaml.read(path)
    assert str(path) in error.value.what and error.value.what.endswith(f"line {line}")
    assert why in error.value.why


def test_no_text(tmp_path: Path) -> None:
    path = tmp_path / "config.yml"
    path.write_bytes(b"a: 1\nb: \xff\xfe\n")
    with pytest.raises(BadFileError, match=r"line 2.*UTF-8"):
        strict_yaml.read(path)


def test_a_byte_order_mark_is_no_part_of_a_key(tmp_path: Path) -> None:
    path = tmp_path / "config.yml"
    path.write_bytes(b"\xef\xbb\xbfa: 1\n")
    assert strict_yaml.read(path).values == {"a": 1}


def test_too_large(tmp_path: Path) -> None:
    path = tmp_path / "config.yml"
    path.write_bytes(b"# " + b"x" * strict_yaml.LARGEST)
    with pytest.raises(BadFileError, match="more than 262144 bytes"):
        strict_yaml.read(path)


@pytest.mark.parametrize(("name", "why"), [("none.yml", "no such file"), (".", "a folder"), ("a\0b", "null")])
def test_what_is_no_file(tmp_path: Path, name: str, why: str) -> None:
    with pytest.raises(SettingsError, match=why):
        strict_yaml.read(f"{tmp_path}/{name}")


def test_the_module_needs_neither_torch_nor_yaml() -> None:
    code = (
        "import sys, sdquant.training.config as c; c.keys(); c.quantization_of(c.load(None, ['quantization=nf4']));"
        "print(sorted({'torch', 'yaml', 'numpy', 'peft', 'accelerate'} & set(sys.modules)))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


def test_a_file_of_rules_is_read_as_strictly(tmp_path: Path) -> None:
    path = tmp_path / "rules.yml"
    path.write_text(
        "- weight_qtype: int8\n  tile_size: 0.25\n- {module_path: 'on', op_names: [linear]}\n", encoding="utf-8"
    )
    first, second = rules_of(path) or ()
    assert (first.weight_qtype, first.tile_size, second.module_path, second.op_names) == (
        "int8",
        0.25,
        "on",
        ("linear",),
    )
    for text, why in (
        ("- &a {weight_qtype: int8}\n- *a\n", "anchors"),
        ("- {weight_qtype: int8, weight_qtype: int4}\n", "appears twice"),
        ("- a: [\n", "not valid YAML"),
        ("[]\n---\n[]\n", "a second document"),
    ):
        path.write_text(text, encoding="utf-8")
        with pytest.raises(BadFileError, match=why):
            rules_of(path)
    path.write_text("", encoding="utf-8")
    with pytest.raises(SettingsError, match="not empty"):
        rules_of(path)
    with pytest.raises(SettingsError, match="no such file"):
        rules_of(tmp_path / "none.yml")
