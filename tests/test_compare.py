"""The same picture through several schemes: the rows, what fails, stopping, the sheet, the command."""

from __future__ import annotations

import gc
import json
import sys
import weakref
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
from PIL import Image, ImageColor

import sdquant
from sdquant import backends, cli
from sdquant.cli.commands import compare as command
from sdquant.errors import IncompatibleError, SdquantError, SettingsError, UnknownOffloadError, UnknownQuantError
from sdquant.evaluation import compare as comparing
from sdquant.evaluation import compare_figure
from sdquant.evaluation.compare import allowed, compare, sheet
from sdquant.loading import loader
from sdquant.models.generate import Stopped, draw
from sdquant.utils import figure
from sdquant.utils.images import difference, largest_difference
from sdquant.utils.install import install_extra

if TYPE_CHECKING:
    from sdquant.evaluation.comparison import Comparison, ComparisonRow

# One worker takes all of these: what they share takes seconds to make.
pytestmark = pytest.mark.xdist_group("comparing")

PROMPT = "a handwritten seven"
RENDERED = figure.rendered
BOTH = {"unet": "int8", "text_encoder": "nf4"}


@pytest.fixture(scope="module")
def told() -> list[tuple[int, int, str]]:
    """What `made` told on its way."""
    return []


@pytest.fixture(scope="module")
def made(sd: Path, told: list[tuple[int, int, str]]) -> Comparison:
    """Schemes that run, that is asked twice, that changes nothing, and that the matrix refuses; balanced."""
    return compare(
        sd, ["NF4", "none", BOTH, "qint8", "bnb:nf4", None],
        prompt=PROMPT, seed=3, steps=3, offload="balanced", budget="3MB", on_progress=lambda *at: told.append(at),
    )  # fmt: skip


def test_rows_in_the_order_asked(made: Comparison) -> None:
    assert [row.label for row in made.rows] == ["as found", "nf4", "none", "unet=int8+text_encoder=nf4", "qint8"]
    assert [row.quant for row in made.rows] == [None, "NF4", "none", BOTH, "qint8"]
    assert [row.label for row in made.drawn] == ["nf4", "none", "unet=int8+text_encoder=nf4"]


def test_rows_are_what_load_and_draw_give(made: Comparison, sd: Path) -> None:
    for row in (made.reference, *made.drawn):
        plan = sdquant.plan(sd, row.quant)
        assert (row.bytes, row.bytes_bf16) == (plan.bytes, plan.to_dict()["bytes_bf16"])
        assert row.load_seconds is not None and row.load_seconds > 0
        assert row.draw_seconds is not None and row.draw_seconds > 0
        (expected,) = draw(sdquant.load_model(sd, row.quant, progress=False), [PROMPT], seeds=[3], steps=3)
        assert row.image.tobytes() == expected.tobytes()


def test_rows_are_held_to_the_first(made: Comparison) -> None:
    first = made.reference
    assert first.psnr is None and first.largest is None and first.difference is None and not first.identical
    same = made.rows[2]
    assert same.identical and same.largest == 0 and not np.asarray(same.difference).any()
    nf4, both = made.rows[1], made.rows[3]
    assert nf4.psnr is not None and both.psnr is not None and nf4.psnr < both.psnr < 70
    apart = np.abs(np.asarray(nf4.image, dtype=int) - np.asarray(first.image, dtype=int))
    assert nf4.largest == apart.max() > 0
    assert (np.asarray(nf4.difference) == np.minimum(4 * apart, 255)).all()


def test_a_refused_scheme_is_a_row_with_the_reason(made: Comparison) -> None:
    row = made.rows[4]
    assert row.kind == "IncompatibleError" and row.error is not None
    assert "QBytesTensor.new()" in row.error and 'runtime="plain"' in row.error
    assert row.image is None and row.bytes is None


def test_progress(made: Comparison, told: list[tuple[int, int, str]]) -> None:
    assert told[0] == (0, 20, "as found: loading")
    assert told[-1] == (20, 20, "done")
    assert [done for done, _, _ in told] == sorted(done for done, _, _ in told)
    assert [text for _, _, text in told if text.startswith("nf4")] == [
        "nf4: loading", "nf4: step 0 of 3", "nf4: step 1 of 3", "nf4: step 2 of 3", "nf4: step 3 of 3",
    ]  # fmt: skip
    assert [text for _, _, text in told if text.startswith("qint8")] == ["qint8: loading"]


def test_to_dict_is_json(made: Comparison) -> None:
    values = json.loads(json.dumps(made.to_dict(), allow_nan=False))
    assert values["settings"] == {"offload": "balanced", "budget": "3MB"}
    assert values["size"] == [32, 32] and values["steps"] == 3 and values["device"] == "cpu"
    assert values["versions"]["torch"] and values["machine"]["devices"][-1]["name"]
    assert [row["identical"] for row in values["rows"]] == [False, False, True, False, False]
    assert values["rows"][2]["psnr"] is None and values["rows"][3]["quant"] == BOTH
    assert not {"image", "difference"} & set(values["rows"][1])


def test_another_reference(sd: Path) -> None:
    found = compare(sd, ["int8", "none"], prompt=PROMPT, steps=1, reference="int8", amplify=9)
    assert [row.label for row in found.rows] == ["int8", "none"]
    assert found.reference.psnr is None and found.rows[1].psnr is not None
    assert found.rows[1].difference.tobytes() == difference(found.rows[1].image, found.reference.image, 9).tobytes()


def test_a_model_that_is_quantized_already(saved: Any) -> None:
    found = compare(saved("int8"), ["nf4"], prompt=PROMPT, steps=1)
    assert found.reference.label == "as found (int8)"
    assert found.rows[1].kind == "ConflictError"


# Failures and stops.


def test_a_scheme_that_fails_on_the_way(sd: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    backend = backends.of_scheme("int8")

    def full(*_: Any, **__: Any) -> Any:
        raise RuntimeError("out of memory")

    monkeypatch.setattr(type(backend), "encode", full)
    found = compare(sd, ["int8", "nf4"], prompt=PROMPT, steps=1)
    assert (found.rows[1].error, found.rows[1].kind) == ("RuntimeError: out of memory", "RuntimeError")
    assert found.rows[1].bytes == sdquant.plan(sd, "int8").bytes
    assert [row.label for row in found.drawn] == ["nf4"]


@pytest.mark.parametrize(
    ("quants", "values", "error"),
    [
        (["nf4", "nf5"], {}, UnknownQuantError),
        (["nf4"], {"offload": "balanze"}, UnknownOffloadError),
        (["nf4"], {"amplify": 0}, SettingsError),
        (["nf4"], {"ofload": "none"}, SettingsError),
    ],
)
def test_faults_before_anything_is_loaded(
    quants: list[str], values: dict[str, Any], error: type[SdquantError], sd: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(comparing, "prepare", None)
    with pytest.raises(error):
        compare(sd, quants, prompt=PROMPT, **values)


def test_a_curve_that_cannot_be_predicted_is_refused_before_anything_is_drawn(
    saved: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(comparing, "_row", lambda *_: pytest.fail("it drew first"))
    with pytest.raises(IncompatibleError, match="no float weights"):
        compare(saved("int8"), ["none"], prompt=PROMPT, steps=1, curve=True)


def test_a_reference_that_cannot_be_drawn(sd: Path, saved: Any) -> None:
    with pytest.raises(SettingsError, match="a single component, not a pipeline"):
        compare(sd / "unet", ["nf4"], prompt=PROMPT, steps=1)
    with pytest.raises(SettingsError, match="divisible"):
        compare(sd, ["nf4"], prompt=PROMPT, steps=1, width=33)
    with pytest.raises(sdquant.IncompatibleError, match="moving the model"):
        compare(saved("q8_0"), ["nf4"], prompt=PROMPT, steps=1, offload="model")


@pytest.mark.parametrize("at", ["as found: step 1 of 2", "int8: step 1 of 2"])
def test_a_stop_comes_out(at: str, sd: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    stop = Stopped()

    def on_progress(done: int, total: int, text: str) -> None:
        if text == at:
            raise stop

    with pytest.raises(Stopped) as caught:
        compare(sd, ["int8"], prompt=PROMPT, steps=2, offload="model", on_progress=on_progress)
    assert caught.value is stop
    assert not [place for place in tmp_path.iterdir() if not place.name.startswith("torchinductor")]  # torch's own


def test_an_interrupt_that_a_library_made_an_error_of(sd: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def half_imported(*_: Any, **__: Any) -> Any:
        try:
            raise KeyboardInterrupt
        except BaseException:
            raise ImportError("half a library") from None

    monkeypatch.setattr(type(backends.of_scheme("int8")), "encode", half_imported)
    with pytest.raises(ImportError):
        compare(sd, ["int8", "nf4"], prompt=PROMPT, steps=1)


@pytest.mark.slow
def test_one_model_at_a_time(sd: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    alive: list[weakref.ref[Any]] = []
    seen: list[int] = []
    load: Callable[..., Any] = loader.load_planned

    def watched(*args: Any) -> Any:
        gc.disable()  # what is not freed by then was not given back
        seen.append(sum(ref() is not None for ref in alive))
        pipe = load(*args)
        alive.append(weakref.ref(pipe.unet))
        return pipe

    monkeypatch.setattr(loader, "load_planned", watched)
    try:
        compare(sd, ["int8", "nf4"], prompt=PROMPT, steps=1)
    finally:
        gc.enable()
    assert seen == [0, 0, 0] and not any(ref() is not None for ref in alive)


def test_what_the_matrix_allows() -> None:
    assert allowed(device="cpu") == comparing.DEFAULT
    assert allowed("balanced", device="cpu") == ("nf4", "int8", "fp8")
    assert allowed("sequential", device="cpu") == ("int8", "fp8")
    assert allowed(runtime="library", device="cpu") == ("nf4", "qint8")
    with pytest.raises(UnknownOffloadError):
        allowed("balanze")


# The sheet.


def colours(image: Any) -> set[Any]:
    return {colour for _, colour in image.getcolors(1 << 24)}


@pytest.fixture
def drawn(made: Comparison, monkeypatch: pytest.MonkeyPatch) -> Callable[..., Any]:
    """drawn(columns, **values): the sheet of `made`, changed so, as a figure of matplotlib."""
    monkeypatch.setattr(figure, "rendered", lambda drawn: drawn)
    return lambda *columns, **values: sheet(replace(made, **values), *columns)


@pytest.mark.parametrize(("columns", "across", "lines"), [(1, 1, 5), (2, 2, 3), (4, 3, 2), (5, 5, 1), (9, 5, 1)])
def test_the_sheet_wraps(columns: int, across: int, lines: int, drawn: Callable[..., Any]) -> None:
    places = drawn(columns).axes
    assert len(places) == lines * max(across, 2)
    places = [axes.get_position() for axes in places if axes.get_title("left")]
    assert len(places) == 5
    assert len({round(place.x0, 6) for place in places}) == across
    assert len({round(place.y0, 6) for place in places}) == lines


def test_the_sheet_shows_the_pictures(made: Comparison, drawn: Callable[..., Any]) -> None:
    shown = drawn()
    image, places = RENDERED(shown), shown.axes
    for axes, row in zip(places[:4], made.rows, strict=False):
        left, top = round(axes.bbox.x0), round(image.height - axes.bbox.y1)
        shown = image.crop((left, top, left + 256, top + 256))
        assert shown == row.image.convert("RGB").resize((256, 256), Image.Resampling.NEAREST)
        if row.difference is not None:
            below = top + 256 + compare_figure.BETWEEN
            shown = image.crop((left, below, left + 256, below + 256))
            assert shown == row.difference.resize((256, 256), Image.Resampling.NEAREST)


def test_the_words_of_the_sheet(made: Comparison, drawn: Callable[..., Any]) -> None:
    words = drawn(prompt="it costs $5, \u4e03 and $6")
    RENDERED(words)  # a dollar is no formula, and a letter that the font lacks no warning
    assert words.get_suptitle() == "\u201cit costs $5, \u4e03 and $6\u201d"
    assert not any(text.get_parse_math() for text in (*words.texts, words.axes[0].xaxis.label))
    titles = ["as found", "nf4", "not quantized", "unet=int8+text_encoder=nf4", "qint8"]
    assert [axes.get_title("left") for axes in words.axes] == titles
    nf4, same, failed = (words.axes[number].get_xlabel() for number in (1, 2, 4))
    assert f"{made.rows[1].psnr:.1f} dB, largest difference {made.rows[1].largest} of 255" in nf4 and " of bf16" in nf4
    assert "the same pixels" in same and failed == "no image"
    assert "QBytesTensor.new()" in words.axes[4].texts[0].get_text()


def test_sheets_are_drawn_in_threads(made: Comparison) -> None:
    with ThreadPoolExecutor(2) as pool:
        one, other = pool.map(sheet, [made] * 2)
    assert one == other == sheet(made)


def test_no_image_is_red_and_nothing_else(made: Comparison) -> None:
    red = ImageColor.getrgb(figure.WRONG)
    assert red in colours(sheet(made))
    assert red not in colours(sheet(replace(made, rows=made.rows[:4])))


@pytest.mark.parametrize("size", [(1024, 576), (512, 1024), (300, 300), (1, 1)])
def test_the_sheet_of_other_sizes(size: tuple[int, int], made: Comparison) -> None:
    def resized(row: ComparisonRow) -> ComparisonRow:
        image, apart = (one and one.resize(size) for one in (row.image, row.difference))
        return replace(row, image=image, difference=apart)

    image = sheet(replace(made, size=size, rows=tuple(resized(row) for row in made.rows), prompt="a long prompt " * 40))
    assert image.width < 2200 and image.height < 1200
    # Nothing runs out of the margins.
    for edge in ((0, 0, figure.MARGIN - 2, image.height), (image.width - 30, 0, image.width, image.height)):
        assert colours(image.crop(edge)) == {ImageColor.getrgb(figure.PAPER)}


def test_words_are_cut_and_wrapped() -> None:
    assert figure.fit("short", 100) == "short" and figure.fit("", 100) == ""
    cut = figure.fit("much too long for this", 10 * figure.LETTER)
    assert len(cut) <= 10 and cut.endswith("\u2026")
    lines = figure.fit("one two three four five six seven", 10 * figure.LETTER, 3).split("\n")
    assert len(lines) == 3 and max(map(len, lines)) <= 10 and lines[-1].endswith("\u2026")
    assert figure.fit("one two", 100 * figure.LETTER, 3) == "one two"
    assert figure.fit("x" * 99, 10 * figure.LETTER) == "x" * 9 + "\u2026"


def test_difference_of_modes() -> None:
    grey, colour = Image.new("L", (4, 4), 10), Image.new("RGB", (4, 4), (10, 12, 200))
    assert largest_difference(grey, colour) == 190
    assert difference(grey, colour, 2).getpixel((0, 0)) == (0, 4, 255)


# The command.


def run(capsys: pytest.CaptureFixture[str], *words: str) -> tuple[int, str, str]:
    code = cli.main(["compare", "digits-sd", PROMPT, "--steps", "1", *words])
    out, err = capsys.readouterr()
    return code, out, err


def test_the_command(capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    code, out, err = run(capsys, "-q", "unet=nf4+text_encoder=int8", "-q", "q4_k")
    lines = out.splitlines()
    assert (code, err) == (0, "")
    assert lines[3].startswith("as found") and lines[4].startswith("unet=nf4+text_encoder=int8")
    assert lines[5].split()[0] == "q4_k" and lines[5].endswith("no image")
    assert lines[6].startswith("no image: q4_k: Cannot quantize the float weights")
    assert lines[-1] == "picture: sdquant-compare.png"
    with Image.open("sdquant-compare.png") as image:
        image.load()
    assert [path.name for path in tmp_path.iterdir()] == ["sdquant-compare.png"]


def test_the_command_as_json(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    code, out, _ = run(capsys, "--offload", "sequential", "--seed", "5", "--json")
    values = json.loads(out)
    assert code == 0 and values["picture"] is None and values["seed"] == 5
    assert [row["label"] for row in values["rows"]] == ["as found", "int8", "fp8"]
    assert not list(tmp_path.iterdir())
    code, out, _ = run(capsys, "-q", "int8", "--reference", "int8", "--json", "-o", "new/a.webp")
    values = json.loads(out)
    assert code == 0 and values["picture"] == str(Path("new/a.webp"))
    assert [row["label"] for row in values["rows"]] == ["int8"]
    with Image.open("new/a.webp") as image:
        assert image.format == "WEBP"


def test_a_size_that_no_scheme_takes(capsys: pytest.CaptureFixture[str]) -> None:
    code, _, err = run(capsys, "-q", "nf4", "--size", "4MB")
    assert code != 0 and "--size" in err and "Add -q auto" in err


def test_the_command_where_no_scheme_draws(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    code, out, _ = run(capsys, "-q", "qint8", "--offload", "sequential", "-o", str(tmp_path / "a.png"))
    assert code == 1 and "no image: qint8" in out


def test_the_command_without_matplotlib(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    assert run(capsys, "-q", "none", "--json")[0] == 0
    monkeypatch.setattr(comparing, "prepare", None)  # what is refused is refused before the work
    for words in (["compare", "digits-sd", PROMPT, "-q", "nf4"], ["bench", "digits-sd", "-o", "a.png"]):
        assert cli.main(words) == 2
        error = capsys.readouterr().err
        assert "it needs matplotlib" in error and install_extra("figures") in error
    assert not list(tmp_path.iterdir())


def test_one_quant_of_the_command() -> None:
    assert command.one("nf4,double_quant") == "nf4,double_quant"
    assert command.one("unet=nf4,double_quant+text_encoder=int8") == {
        "unet": "nf4,double_quant",
        "text_encoder": "int8",
    }
    assert command.one("int8+unet=nf4") == {"*": "int8", "unet": "nf4"}
