"""The histogram of types: numbers, bytes and bits are those of the loaded model."""

from __future__ import annotations

from pathlib import Path

import pytest

from sdquant import demo, save
from sdquant.loading.loader import load_model
from sdquant.models.detection import detect
from sdquant.saving.export_gguf import quantize_file


def parameters(path: Path) -> int:
    return sum(parameter.numel() for parameter in load_model(path, progress=False).parameters())


def test_of_a_mix(tmp_path: Path) -> None:
    source = demo.path("digits-flux") / "transformer"
    file = quantize_file(
        source, "q4_k_m", tmp_path / "m.gguf", skip=("transformer_blocks.0.attn.to_q",), progress=False
    )
    seen = detect(file)
    rows = {row.type: row for row in seen.histogram}
    assert set(rows) == {"q4_k", "q5_k", "q6_k", "bfloat16", "float32"}
    assert sum(row.weights for row in rows.values()) == parameters(source)
    assert sum(row.bytes for row in rows.values()) == seen.bytes
    assert (rows["q4_k"].bits_per_weight, rows["q6_k"].bits_per_weight) == (4.5, 6.5625)
    kept = seen.high_precision
    assert kept[0] == "double_blocks.*.img_attn.qkv.weight"  # q, k and v are one weight there
    assert {name.split(".")[0] for name in kept[1:]} == {
        "img_in",
        "txt_in",
        "time_in",
        "vector_in",
        "guidance_in",
        "final_layer",
    }
    assert seen.to_dict()["histogram"][0]["bits_per_weight"] == 4.5 and seen.to_dict()["high_precision"] == kept


@pytest.mark.parametrize(("quant", "bits"), [("nf4", 4.5), ("qint8", 8), ("int4", 4.3), ("sdnq-uint3", 3.5)])
def test_of_a_folder(quant: str, bits: float, tmp_path: Path) -> None:
    source = demo.path("digits-flux") / "transformer"
    save(load_model(source, quant, progress=False), tmp_path / "out")
    seen = detect(tmp_path / "out")
    rows = {row.type: row for row in seen.histogram}
    assert set(rows) == {quant, "bfloat16"}
    assert sum(row.weights for row in rows.values()) == parameters(source)
    assert sum(row.bytes for row in rows.values()) == seen.bytes
    assert rows[quant].bits_per_weight == pytest.approx(bits, abs=0.3)


def test_of_floats() -> None:
    seen = detect(demo.path("digits-sd"))
    assert {row.type for row in seen.histogram} == {"bfloat16"} and seen.high_precision == []
    assert {row.type for part in seen.parts.values() for row in part.histogram} == {"bfloat16"}
