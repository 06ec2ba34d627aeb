"""The table of schemes for a model: sizes as the plan has them, what fits, what is best for what, what is refused."""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING

import pytest

from sdquant import demo
from sdquant.compat import hardware
from sdquant.core import registry
from sdquant.errors import SdquantError
from sdquant.planning import SORTS, Settings, prepare, scheme_table
from sdquant.planning.estimate.image_quality import FILE, GRADES, grade, measured
from tools import quality

if TYPE_CHECKING:
    from sdquant.planning import SchemeTable


def made(
    path: object, memory: int | None = None, roles: tuple[str, ...] = ("model", "text_encoder"), **settings: object
) -> SchemeTable:
    """The table for a machine with this much memory, without tracing."""
    here = hardware.probe()
    if memory is not None:
        free = tuple(dataclasses.replace(one, memory_free=memory) for one in here.devices)
        here = dataclasses.replace(here, devices=free, ram_available=memory)
    return scheme_table(path, Settings(settings), here, roles=roles, trace=lambda plan: {}, progress=False)


def test_the_qualities_are_what_was_measured() -> None:
    assert FILE.read_text(encoding="utf-8") == quality.text(), "run python -m tools.quality"
    assert measured("nf4").snr == measured("nf4,anything").snr != measured("nf4,double_quant").snr
    assert [row.stars for row in GRADES] == [5, 4, 3, 2, 1] and grade(-3).stars == 1 and grade(40).stars == 5


def test_a_row_says_what_the_plan_says() -> None:
    path = demo.path("digits-sd")
    rows = {row.scheme: row for row in made(path).rows}
    assert rows.keys() == {row.name for row in registry.schemes() if row.name != "rules"} | {"none"}
    settings = Settings({"quant.model": "nf4", "quant.text_encoder": "nf4"})
    plan = prepare(settings.request(str(path), ["unet", "text_encoder"], progress=False))
    assert rows["nf4"].bytes == plan.bytes < (rows["none"].bytes or 0)
    assert rows["nf4"].fit == "whole" and not rows["nf4"].refused
    assert rows["q4_k"].refused and rows["q4_k"].group == "files" and rows["q4_k"].bytes
    alone = {row.scheme: row for row in made(path, roles=("text_encoder",)).rows}
    assert (rows["nf4"].bytes or 0) < (alone["nf4"].bytes or 0) < (rows["none"].bytes or 0)
    for _, key in SORTS.values():
        assert sorted(rows.values(), key=key)


def test_what_fits_is_what_is_praised() -> None:
    path = demo.path("digits-flux")
    all_of_it = made(path)
    allowance = all_of_it.rows[0].bytes or 0
    table = made(path, memory=allowance + 4_500_000)
    fits = {row.scheme: row.fit for row in table.rows}
    assert (fits["nf4"], fits["int8"], fits["none"]) == ("whole", "no", "no")
    assert {row.fit for row in table.recommended} == {"whole"}
    assert {row.fit for row in made(path, memory=allowance + 4_500_000, offload="balanced").rows} >= {"whole", "parts"}
    assert made(path, memory=1).recommended  # nothing fits: the best are named all the same


def test_what_other_settings_refuse_has_a_reason() -> None:
    rows = {row.scheme: row for row in made(demo.path("digits-sd"), offload="balanced").rows}
    assert rows["qint8"].refused and "QBytesTensor" in rows["qint8"].why and rows["qint8"].fix
    assert not rows["qint8"].praise
    with pytest.raises(SdquantError):
        made("/nowhere")
