"""`sdquant schemes`: what a person reads of each scheme, and what is recommended to type next."""

from __future__ import annotations

import json
import shlex
from pathlib import Path

import pytest

from sdquant import cli, demo
from sdquant.cli._command_words import in_command_words
from sdquant.planning import GROUPS

from .sparse_pipelines import flux

Capture = pytest.CaptureFixture[str]


def run(capsys: Capture, *words: str) -> str:
    """What a command prints; it must succeed."""
    assert cli.main(["schemes", *words]) == 0
    return capsys.readouterr().out


def test_a_model_of_34_gb_on_a_card_of_8(capsys: Capture, tmp_path: Path) -> None:
    path = str(flux(tmp_path / "flux"))
    rows = {row["scheme"]: row for row in json.loads(run(capsys, path, "--memory", "8GB", "--json"))["rows"]}
    assert (rows["qint2"]["offload"], rows["qint2"]["moved"]) == ("none", 0)
    assert rows["w4a4"]["offload"] == "balanced" and rows["w4a4"]["moved"] == 0  # each part fits
    assert rows["qint4"]["offload"] == "model"  # balanced offload moves no layers of quanto's
    assert not rows["qint8"]["fits"] or rows["qint8"]["offload"] is None
    assert 3e8 < rows["nf4"]["moved"] < 4e8 < rows["fp8"]["moved"]
    assert rows["q4_k"]["verdict"] == "breaks" and "sdquant quantize" in rows["q4_k"]["fix"]

    text = run(capsys, path, "--memory", "8GB", "--sort", "size")
    assert "room for 6.39 GB of weights" in text and "309.6 MB a step" in text
    assert [text.index(f"\n{group.title}\n") for group in GROUPS if f"\n{group.title}\n" in text] == sorted(
        text.index(f"\n{group.title}\n") for group in GROUPS if f"\n{group.title}\n" in text
    )
    assert text.count("GGUF files can be loaded") == 1  # a reason once, with all that it refuses
    lines = [line.strip() for line in text.splitlines() if "sdquant generate" in line]
    assert f'sdquant generate {path} "a prompt" --quant w4a4 --offload balanced --budget 6.38GB' in lines
    for line in lines:  # what it says to type is understood
        words = shlex.split(line.replace("a prompt", "p"))[1:]
        assert cli.parser(words).parse_args(words).command == "generate"


def test_what_fits_needs_no_offload_and_what_does_not_is_told(capsys: Capture) -> None:
    text = run(capsys, "digits-sd", "--for", "text_encoder")
    assert "--offload" not in text and " a step:" not in text and "None of them fits" not in text
    assert 'sdquant generate digits-sd "a prompt" --quant' in text
    assert "None of them fits; the smallest, " in run(capsys, "digits-sd", "--memory", "1MB")


def test_fixes_are_flags() -> None:
    for said, typed in (
        (
            "Use offload=\"model\", or runtime='plain', or quant='nf4'",
            "Use --offload model, or --runtime plain, or --quant nf4",
        ),
        ("Give base=<pipeline folder of the same model>", "Give --base FOLDER"),
        ("Set allow_pickle=True, or quant=None", "Set --allow-pickle, or no --quant"),
        ("QBytesTensor.new() missing 5 required positional arguments: it moves layers", "it moves layers"),
        ("Add size='4GB', or quality=30", "Add --size 4GB, or --quality 30"),
        ("/data/mode=post/x and https://x/?cache=y stay", "/data/mode=post/x and https://x/?cache=y stay"),
        ("quant={'a': 'b'}, group_size=64, database=5", "quant={'a': 'b'}, group_size=64, database=5"),
    ):
        assert in_command_words(said) == typed


def test_a_quantized_model_says_so(capsys: Capture, tmp_path: Path) -> None:
    import sdquant

    sdquant.save(sdquant.load_model(demo.path("digits-sd"), "fp8", progress=False), tmp_path / "model")
    text = run(capsys, str(tmp_path / "model"))
    assert "is quantized already" in text
