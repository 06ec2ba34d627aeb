"""The demo: its numbers, its picture, its missing packages; and the drawing beneath it."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from PIL import Image, ImageColor

import sdquant
from sdquant import cli
from sdquant.cli.commands import demo as command
from sdquant.compat import hardware
from sdquant.demo import figure as grid
from sdquant.demo import run
from sdquant.errors import DiskSpaceError, SettingsError
from sdquant.models.generate import draw, native_size
from sdquant.training import digits
from sdquant.utils import figure
from sdquant.utils.images import psnr
from sdquant.utils.install import install_extra

# One worker takes all of these: what they share takes seconds to make.
pytestmark = pytest.mark.xdist_group("demo")

CASES = (run.Case(quant=None), run.Case(quant="int8", offload="balanced", share=0.8))
SEED = 12


@pytest.fixture(scope="module")
def result() -> run.Result:
    """Two cases on digits-sd, two images each."""
    return run.run("digits-sd", steps=2, images=2, progress=False, cases=CASES)


def picture(level: int) -> Any:
    """A grey image of 32 x 32."""
    return Image.new("RGB", (32, 32), (level, level, level))


def test_every_case_is_a_known_scheme() -> None:
    schemes = {sdquant.backends.parse(case.quant).scheme.name for case in run.CASES if case.quant}
    made = {row.backend for row in sdquant.backends.schemes() if row.on_the_fly} | {"gguf"}
    assert {sdquant.backends.scheme(name).backend for name in schemes} == made
    assert any(case.offload == "balanced" for case in run.CASES)
    assert run.CASES[0].quant is None
    assert len({case.label for case in run.CASES}) == len(run.CASES)


def test_rows_are_measured(result: run.Result, sd: Path) -> None:
    plain, packed = result.rows
    made = sdquant.plan(sd, "int8")
    weights = [weight for part in made.components for weight in part.weights]
    assert (plain.bytes, packed.bytes) == (sdquant.detect(sd).bytes, made.bytes)
    assert (packed.packed, packed.packed_bf16) == (sum(w.bytes for w in weights), sum(w.bytes_bf16 for w in weights))
    assert (plain.packed, plain.packed_bf16, plain.psnr) == (0, 0, None)
    assert packed.psnr is not None and 20 < packed.psnr < 80
    assert (plain.backend, packed.backend) == ("not quantized", "NNCF")
    assert packed.label == "int8, balanced"
    assert all(row.wanted == (0, 1) and len(row.seen) == 2 and len(row.pictures) == 2 for row in result.rows)
    assert all(row.load_seconds > 0 and row.image_seconds > 0 for row in result.rows)


def test_to_dict_is_json(result: run.Result) -> None:
    values = json.loads(json.dumps(result.to_dict(), allow_nan=False))
    assert [row["label"] for row in values["rows"]] == ["bf16", "int8, balanced"]
    assert values["rows"][1]["right"] == result.rows[1].right
    assert "pictures" not in values["rows"][0]


def test_the_same_pixels_are_json_too(result: run.Result) -> None:
    row = run.DemoRow(**{**vars(result.rows[1]), "psnr": float("inf")})
    assert row.to_dict()["psnr"] is None and row.to_dict()["identical"]
    assert command._cells(row)[-1] == "same"


def missing(result: run.Result) -> run.Result:
    """The result with a line that could not run."""
    line = run.SkippedCase(
        label="qint8", backend="optimum-quanto", quant="qint8", why="it is not installed", fix="Run: pip"
    )
    return run.Result(model=result.model, steps=2, judge=result.judge, cases=(*result.cases, line))


def test_the_table(result: run.Result) -> None:
    lines = command.render_demo(missing(result)).splitlines()
    assert lines[1].split()[0] == "scheme"
    assert lines[3].startswith("bf16") and lines[4].startswith("int8, balanced")
    assert lines[5].split() == ["qint8", "optimum-quanto", "skipped"]
    assert lines[6] == "skipped: qint8: it is not installed. Run: pip"


def test_the_picture(result: run.Result, tmp_path: Path) -> None:
    target = tmp_path / "new" / "grid.png"
    wrong = run.DemoRow(**{**vars(result.rows[0]), "seen": (0, 7)})
    grid.write([run.Result(model="digits-sd", steps=2, judge=1.0, cases=(wrong, *missing(result).cases))] * 2, target)
    with Image.open(target) as image:
        image.load()
        assert image.format == "PNG"
        assert image.width > 2 * (grid.DIGITS + grid.FACTS) and image.height > 4 * grid.LINE
        counts = {colour: count for count, colour in image.convert("RGB").getcolors()}
        # Of two frames and the paper, with the palette of the file.
        assert counts[ImageColor.getrgb(figure.WRONG)] > 600 and counts[ImageColor.getrgb(figure.PAPER)] > 100_000
    assert [path.name for path in target.parent.iterdir()] == ["grid.png"]


def test_the_words_of_the_picture(result: run.Result, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(figure, "rendered", lambda drawn: drawn)
    drawn = grid.demo_sheet([missing(result)] * 2)
    digits, facts = drawn.axes[:2]
    assert len(drawn.axes) == 4
    labels = [label.get_text() for label in digits.get_yticklabels()]
    assert labels == ["bf16\nnot quantized", "int8, balanced\nNNCF", "qint8\noptimum-quanto"]
    assert digits.get_title("left").startswith("digits-sd: StableDiffusionPipeline, 4.2 MB in bf16, 2 steps")
    assert [text.get_text() for text in digits.texts] == ["skipped: Run: pip"]
    packed = result.rows[1]
    numbers = [text.get_text() for text in facts.texts]
    assert numbers[2].startswith(f"{packed.bytes / 1e6:.1f} MB") and numbers[3] == f"{packed.right} / 2"
    assert numbers[4] == f"PSNR {packed.psnr:.1f} dB" and len(numbers) == 5
    assert f"{result.judge:.1%}" in "".join(text.get_text() for text in drawn.texts)


def test_a_wrong_digit_is_framed(result: run.Result) -> None:
    def framed(seen: tuple[int, ...]) -> int:
        row = run.DemoRow(**{**vars(result.rows[0]), "seen": seen})
        image = grid.demo_sheet([run.Result(model="digits-sd", steps=2, judge=1.0, cases=(row,))])
        return sum(count for count, colour in image.getcolors(1 << 20) if colour == ImageColor.getrgb(figure.WRONG))

    assert framed((0, 1)) == 0
    assert framed((0, 7)) > 300


def test_a_failed_write_leaves_nothing(result: run.Result, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: Any, **__: Any) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(Image.Image, "save", fail)
    with pytest.raises(DiskSpaceError, match=r"grid\.png"):
        grid.write([result], tmp_path / "grid.png")
    assert not list(tmp_path.iterdir())


def test_a_missing_package_is_a_skipped_line(monkeypatch: pytest.MonkeyPatch) -> None:
    versions = hardware.versions()
    versions.pop("nncf")
    monkeypatch.setattr("sdquant.compat.hardware.versions", lambda: dict(versions))
    found = run.run(
        "digits-sd", steps=1, images=1, progress=False, cases=(run.Case(quant=None), run.Case(quant="int8"))
    )
    (line,) = found.skipped
    assert len(found.rows) == 1
    assert line.label == "int8" and "nncf" in line.why and install_extra("nncf") in line.fix
    assert line.to_dict()["skipped"]


def test_the_command(capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(run.run, "__kwdefaults__", {"cases": CASES[:1]})
    target = tmp_path / "grid.png"
    words = ["demo", "--model", "digits-sd", "--images", "1", "--steps", "1", "-o", str(target)]
    assert cli.main(words) == 0
    out, err = capsys.readouterr()
    assert out.splitlines()[-1] == f"picture: {target}" and err == ""
    assert cli.main([*words, "--json"]) == 0
    values = json.loads(capsys.readouterr().out)
    assert values["picture"] == str(target)
    assert [row["label"] for row in values["models"][0]["rows"]] == ["bf16"]


def test_psnr() -> None:
    assert psnr([picture(10)], [picture(10)]) == float("inf")
    assert psnr([picture(0)], [picture(255)]) == pytest.approx(0)
    assert psnr([picture(100)], [picture(101)]) == pytest.approx(48.13, abs=0.01)
    # Over all pixels of all images: one wrong image of two is 3 dB better than two.
    assert psnr([picture(100)] * 2, [picture(101), picture(100)]) == pytest.approx(51.14, abs=0.01)


# Drawing.


@pytest.fixture(scope="module")
def pipe(sd: Path) -> Any:
    """digits-sd as it is."""
    return sdquant.load_model(sd, progress=False)


def test_the_judge_reads_what_was_drawn(pipe: Any) -> None:
    images = draw(pipe, [digits.prompt(d) for d in range(10)], seeds=range(10), steps=10)
    assert sum(seen == asked for asked, seen in enumerate(digits.judge().read(images))) >= 9


def test_a_seed_is_an_image_whatever_the_batch(pipe: Any) -> None:
    prompts, seeds = [digits.prompt(d) for d in (3, 4, 5)], (7, SEED, 9)
    together = draw(pipe, prompts, seeds=seeds, steps=2, batch=3)
    one_by_one = draw(pipe, prompts, seeds=seeds, steps=2, batch=1)
    assert psnr(together, one_by_one) > 35
    assert psnr(together, draw(pipe, prompts, seeds=(8, 13, 10), steps=2, batch=3)) < 30


def test_the_size_is_the_models(pipe: Any, flux: Path) -> None:
    assert native_size(pipe) == 32
    assert native_size(sdquant.load_model(flux, progress=False)) == 32
    (image,) = draw(pipe, ["three"], seeds=[0], steps=1, width=48, height=40)
    assert image.size == (48, 40)


@pytest.mark.parametrize(
    ("prompts", "seeds", "values", "word"),
    [
        ([7], [0], {}, "prompts must be strings"),
        (["seven"], [0, 1], {}, "each image has its own"),
        (["seven"], [0], {"width": 36}, "divisible by 8"),
        (["seven"], [0], {"steps": 0}, "from 1 to"),
        (["seven"], [0], {"steps": True}, "from 1 to"),
        (["seven"], [-1], {}, "from 0 to"),
        (["seven"], [2**63], {}, "from 0 to"),
    ],
)
def test_faults(pipe: Any, prompts: Sequence[Any], seeds: Sequence[int], values: dict[str, Any], word: str) -> None:
    with pytest.raises(SettingsError, match=word):
        draw(pipe, prompts, seeds=seeds, **{"steps": 1, **values})


def test_a_size_that_the_model_rounds_is_told(flux: Path, caplog: pytest.LogCaptureFixture) -> None:
    (image,) = draw(sdquant.load_model(flux, progress=False), ["seven"], seeds=[0], steps=1, width=36)
    assert image.size == (32, 32)
    assert "the images are 32x32" in caplog.text


def test_a_component_cannot_draw(sd: Path) -> None:
    with pytest.raises(SettingsError, match="a single component, not a pipeline"):
        draw(sdquant.load_model(sd / "unet", progress=False), ["seven"], seeds=[0], steps=1)
