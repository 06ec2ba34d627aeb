"""The example backend in CONTRIBUTING.md is a real one: installed as a package would be, and held to the contract."""

from __future__ import annotations

import inspect
import re
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from sdquant import backends, demo
from sdquant.compat import UntestedWarning
from sdquant.core import registry
from sdquant.planning.settings_fields import fields
from sdquant.settings import Settings

from .backends import test_contract as contract

TEXT = (Path(__file__).parent.parent / "CONTRIBUTING.md").read_text(encoding="utf-8")


def _block(language: str) -> str:
    """The one fenced block in this language."""
    (block,) = re.findall(rf"^```{language}\n(.*?)^```$", TEXT, flags=re.MULTILINE | re.DOTALL)
    assert isinstance(block, str)
    return block


def _forget() -> None:
    fields.cache_clear()
    registry._registry.cache_clear()
    registry._schemes.cache_clear()


@pytest.fixture
def round8(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[backends.Scheme]:
    """The example as an installed package: its module and its metadata on the path, found by its entry point."""
    group, line = re.fullmatch(r'\[project\.entry-points\."(.*)"\]\n(.*)\n', _block("toml")).groups()  # type: ignore[union-attr]
    name, target = re.fullmatch(r'(\w+) = "(.*)"', line).groups()  # type: ignore[union-attr]
    assert group == registry.ENTRY_POINTS
    module = target.partition(":")[0]
    (tmp_path / f"{module}.py").write_text(_block("python"), encoding="utf-8")
    info = tmp_path / f"{module}-1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {module}\nVersion: 1.0\n", encoding="utf-8")
    (info / "entry_points.txt").write_text(f"[{group}]\n{name} = {target}\n", encoding="utf-8")
    monkeypatch.syspath_prepend(tmp_path)
    _forget()
    monkeypatch.setitem(contract.ROWS, name, backends.scheme(name))
    yield backends.scheme(name)
    sys.modules.pop(module, None)
    monkeypatch.undo()
    _forget()


def test_it_is_registered_and_gone_again(round8: backends.Scheme) -> None:
    assert backends.names()[-1] == round8.backend
    assert backends.parse("round8:round8").scheme is round8
    assert backends.get("round8").__class__.__module__ == "sdquant_round8"


def test_the_settings_page_has_it(round8: backends.Scheme) -> None:
    """A choice for every part of a model, with what the matrix says of it, and a plan: no page was touched."""
    from sdquant.ui.plan_preview import Target, review

    assert all(round8.name in row.choices for row in fields() if row.kind == "scheme")
    values = {**Settings().values, "quant.model": round8.name}
    with pytest.warns(UntestedWarning):
        seen = review(Target(path=str(demo.path("digits-sd"))), values)
    assert seen.marks["quant.model"][round8.name].verdict == "untested"
    assert seen.plan is not None and round8.name in [part.scheme for part in seen.plan.components]


CHECKS = [name for name, _ in inspect.getmembers(contract.TestCodec, inspect.isfunction) if name.startswith("test_")]


@pytest.mark.parametrize("kind", contract.SHAPES)
@pytest.mark.parametrize("check", CHECKS)
def test_its_codec_keeps_the_contract(round8: backends.Scheme, check: str, kind: str) -> None:
    method = getattr(contract.TestCodec(), check)
    if "value" in inspect.signature(method).parameters:
        for value in (0.0, 1e-30, 3.0):
            method(round8.name, kind, value)
    else:
        method(round8.name, kind)


@pytest.mark.parametrize("kind", ["linear", "conv"])
def test_its_layer_keeps_the_contract(round8: backends.Scheme, kind: str) -> None:
    contract.test_plain_layer_computes_with_the_decoded_weight(round8.name, kind)


def test_its_numbers_are_what_its_docstring_says(round8: backends.Scheme) -> None:
    backend = backends.of_scheme(round8.name)
    weight = torch.tensor([[127.0, -1.0, 0.4], [0.0, 0.0, 254.0]])
    packed = backend.encode(weight, backends.parse(round8.name))
    assert packed.parts["codes"].tolist() == [[127, -1, 0], [0, 0, 127]]
    assert packed.parts["scale"].tolist() == [[1.0], [2.0]]


def test_the_files_it_names_exist() -> None:
    root = Path(__file__).parent.parent
    named = re.findall(r"\]\(([\w/.]+)\)", TEXT) + re.findall(r"`((?:sdquant|tests)/[\w/]+\.py)`", TEXT)
    assert len(named) > 5
    assert not [path for path in named if not (root / path).exists()]
