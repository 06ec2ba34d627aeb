"""Ways out of a refused choice: each one is accepted by the planner, and is near."""

from __future__ import annotations

from typing import Any

import pytest

import sdquant
from sdquant import demo
from sdquant.compat import ROWS
from sdquant.errors import SdquantError
from sdquant.planning.preparation import prepare
from sdquant.settings import Settings, field_named
from sdquant.settings.suggestions import fixes

COMPONENTS = ("unet", "text_encoder", "vae")


def accepts(settings: Settings) -> bool:
    try:
        prepare(settings.request(str(demo.path("digits-sd")), COMPONENTS))
    except SdquantError:
        return False
    return True


def near(**chosen: Any) -> dict[str, Any]:
    return {**Settings().values, **{name.replace("__", "."): value for name, value in chosen.items()}}


@pytest.mark.parametrize(
    "values",
    [
        near(quant__model="qint8", offload="balanced"),
        near(quant__model="qint8", quant__text_encoder="nf4", offload="sequential"),
        near(quant__model="nf4", offload="sequential", runtime="library"),
        near(quant__model="q4_k"),
        near(quant__model="int8", runtime="library"),
        near(budget="6GB"),
        near(quant__vae="nf5"),
        near(device="cuda:7"),
    ],
    ids=lambda values: " ".join(f"{n}={v}" for n, v in values.items() if v not in (None, False, (), "auto", "50GB")),
)
def test_every_fix_is_accepted(values: dict[str, Any]) -> None:
    found = fixes(values, accepts)
    assert 0 < len(found) <= 3
    for fix in found:
        assert fix.text
        assert any(values[name] != value for name, value in fix.changes.items())
        assert accepts(Settings({**values, **fix.changes}))


def test_the_first_fix_keeps_the_scheme() -> None:
    first = fixes(near(quant__model="qint8", offload="balanced"), accepts)[0]
    assert set(first.changes) == {"offload", "budget"}


@pytest.mark.parametrize(
    ("word", "name"), [("nf5", "nf4"), ("Q-int 8,embeddings", "qint8,embeddings"), ("4bit", "int4")]
)
def test_a_mistyped_scheme_is_what_it_was_meant_for(word: str, name: str) -> None:
    found = fixes(near(quant__model=word, quant__text_encoder=word), accepts)
    changes = [dict(fix.changes) for fix in found]
    assert {"quant.model": name, "quant.text_encoder": name} in changes
    assert found[0].text.endswith(f" instead of {word.partition(',')[0]}")


def test_another_scheme_takes_the_place_everywhere() -> None:
    values = near(quant__model="qint8", quant__text_encoder="qint8", offload="balanced", runtime="library")
    (swap,) = (fix for fix in fixes(values, accepts, most=9) if "instead of" in fix.text)
    assert swap.changes["quant.model"] == swap.changes["quant.text_encoder"] is not None


def test_a_quantized_file_is_taken_as_found(tmp_path: Any) -> None:
    sdquant.save(sdquant.load_model(demo.path("digits-sd") / "unet", "nf4", progress=False), tmp_path / "unet")

    def takes(settings: Settings) -> bool:
        try:
            prepare(settings.request(str(tmp_path / "unet"), ["model"]))
        except SdquantError:
            return False
        return True

    found = fixes(near(quant__model="int8"), takes)
    assert {"quant.model": None} in [dict(fix.changes) for fix in found]


def test_nothing_helps() -> None:
    assert fixes(near(quant__model="nf4"), lambda _: False) == ()


def test_there_is_a_way_out_of_every_combination_that_breaks_here() -> None:
    """On the CPU, without naming a runtime: for each scheme and offload mode that a row of the matrix refuses."""
    refused = 0
    for scheme in field_named("quant.model").choices[2:]:
        for offload in field_named("offload").choices:
            values = near(quant__model=scheme, offload=offload)
            try:
                sdquant.check(scheme, offload, device="cpu")
            except sdquant.IncompatibleError:
                refused += 1
                assert fixes(values, accepts, most=1), (scheme, offload)
    assert refused > 0 and any(row.verdict == "breaks" for row in ROWS)
