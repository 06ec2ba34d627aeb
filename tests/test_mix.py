"""A scheme for each weight: chosen, explained, loaded, saved, and as good as foretold."""

from __future__ import annotations

import itertools
import json
from pathlib import Path
from typing import Any

import pytest
import torch

import sdquant
from sdquant.cli import main
from sdquant.core import registry
from sdquant.demo import path
from sdquant.errors import BudgetError, SdquantError, SettingsError
from sdquant.formats.gguf.conventions import FOLDED
from sdquant.kernels.triton import blocks
from sdquant.models import draw
from sdquant.nn.weights import quantized
from sdquant.planning import knapsack, make_request, mix, mix_errors, prepare
from sdquant.planning.knapsack import Cost
from sdquant.rules import ComponentStatistics, MixSpec, statistics_file
from sdquant.training import digits
from sdquant.training.calibration import Calibration, calibrate

FLUX = path("digits-flux")
SIZE = 4_000_000
PROMPT = digits.prompt(3)


@pytest.fixture(autouse=True)
def _own_folder(tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path_factory.getbasetemp() / "mixes"))


@pytest.fixture(scope="module")
def stats(tmp_path_factory: pytest.TempPathFactory) -> Path:
    file = tmp_path_factory.mktemp("mix") / "stats.safetensors"
    task = Calibration(model="", rules=(), prompts=(PROMPT, digits.prompt(8)), steps=2, width=digits.SIZE,
                       height=digits.SIZE, components=("transformer",))  # fmt: skip
    found = calibrate(sdquant.load_model(FLUX, progress=False), task)
    statistics_file.write_statistics(file, found, {})
    return file


def _plan(**values: Any) -> Any:
    return sdquant.plan(FLUX, progress=False, **{"quant": "auto", "size": SIZE, **values})


def test_knapsack() -> None:
    """Nearly the best that there is, never too large, whatever the options are."""
    generator = torch.Generator().manual_seed(0)
    for _ in range(20):
        sizes = torch.randint(1, 60, (6, 4), generator=generator).tolist()
        items = [[Cost(n, 10 ** (-n / 12) * (1 + i)) for n in row] for i, row in enumerate(sizes)]
        least = knapsack.fewest_bytes(items)
        limit = least + 60
        chosen = knapsack.within_bytes(items, limit)
        rows = [[items[i][k] for i, k in enumerate(each)] for each in itertools.product(range(4), repeat=6)]
        best = min(sum(one.noise for one in row) for row in rows if sum(one.bytes for one in row) <= limit)
        mine = [items[i][k] for i, k in enumerate(chosen)]
        assert sum(one.bytes for one in mine) <= limit
        assert sum(one.noise for one in mine) <= 1.35 * best
        again = knapsack.within_noise(items, 1.6 * best)
        assert sum(items[i][k].noise for i, k in enumerate(again)) <= 1.6 * best
        assert sum(items[i][k].bytes for i, k in enumerate(again)) <= limit + 60
        assert knapsack.within_bytes(items, least) is not None


def test_little_is_left_of_few_large_items() -> None:
    """As of convolutions in float32, whose floats are nearly four times the next best: one pays for another."""
    items = [[Cost(n // 4, n * 1e-3), Cost(n, 0)] for n in (900, 560, 300, 250, 200, 100)]
    whole = sum(row[1].bytes for row in items)
    for share in (0.5, 0.7, 0.9, 0.95):
        chosen = knapsack.within_bytes(items, int(share * whole))
        mine = [row[k] for row, k in zip(items, chosen, strict=True)]
        rows = [[row[k] for row, k in zip(items, each, strict=True)] for each in itertools.product(range(2), repeat=6)]
        fit = [row for row in rows if sum(one.bytes for one in row) <= share * whole]
        best = min(sum(one.noise for one in row) for row in fit)
        assert sum(one.bytes for one in mine) <= share * whole
        assert sum(one.noise for one in mine) <= 1.1 * best


@pytest.mark.parametrize("size", [3_300_000, "4MB", 6_500_000])
def test_within_two_percent_below(size: int | str) -> None:
    plan = _plan(size=size)
    asked = 4_000_000 if size == "4MB" else int(size)
    assert 0.98 * asked <= plan.bytes <= asked
    assert plan == _plan(size=size)
    row = next(part for part in plan.to_dict()["components"] if part["name"] == "transformer")
    part = next(part for part in plan.components if part.name == "transformer")
    told = {name: one["scheme"] for name, one in row["mix"]["weights"].items() if one["scheme"] is not None}
    assert {weight.name: weight.scheme for weight in part.weights} == told and len(set(told.values())) > 2
    assert "of its output, from the weights alone" in plan.why and row["scheme"].startswith("a mix of")


def test_options_of_auto_and_its_offload_mode() -> None:
    plan = sdquant.plan(FLUX, "auto,size=4MB", progress=False)
    assert plan == _plan()
    with pytest.raises(SettingsError, match="given twice"):
        _plan(quant="auto,size=5MB")
    chosen = _plan(offload="auto")
    assert [part.weights for part in chosen.components] == [part.weights for part in plan.components]
    assert chosen.offload == "none" and chosen.why.startswith(f"{plan.why}; quantized as requested, offload none")
    tight = _plan(offload="auto", budget="2.5MB")
    assert tight.offload != "none" and tight.bytes == plan.bytes


def test_curve() -> None:
    """More bytes, less noise; the chosen mix is on it, and no scheme alone is better."""
    plan = _plan()
    curve = plan.curve
    assert curve.how == "weights" and curve.pick.bytes == plan.bytes
    assert curve.mixes[0].bytes <= plan.bytes <= curve.mixes[-1].bytes and curve.mixes[-1].noise == 0
    for one, other in itertools.pairwise(curve.mixes):
        assert one.bytes < other.bytes and one.noise > other.noise
    noise = sum(part.spec.noise for part in plan.components if part.spec is not None)
    assert curve.pick.noise == pytest.approx(noise)
    for point in curve.schemes:
        assert min(mix.noise for mix in curve.mixes if mix.bytes <= point.bytes) < 1.3 * point.noise
    assert {"q4_k", "sdnq-uint4"} <= {point.label for point in curve.schemes}
    told = plan.to_dict()["curve"]
    assert told["chosen"]["bytes"] == plan.bytes and told["mixes"][-1]["db"] is None
    json.dumps(told)


def test_before_the_weights_are_read(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """As the page shows a plan: by typical errors, unless the weights were read before."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    request = make_request(FLUX, quant="auto", size=SIZE, progress=False)
    guess = prepare(request, read=False)
    assert guess.curve is not None and guess.curve.how == "names" and 0.98 * SIZE <= guess.bytes <= SIZE
    assert "a guess before the weights are read" in str(guess.why)
    measured = prepare(request)
    assert measured.curve is not None and measured.curve.how == "weights"
    assert prepare(request, read=False) == measured


def test_too_small_and_wrong_arguments() -> None:
    with pytest.raises(BudgetError, match=r"Use size=\d+") as error:
        _plan(size="1MB")
    least = int(error.value.fix.split("size=")[1].split()[0])
    assert _plan(size=least).bytes <= least
    with pytest.raises(BudgetError):
        _plan(size=least - 1)
    for values, words in (
        ({"quality": 30}, "follows from the other"), ({"quant": "auto,bits=4"}, "no option of auto"),
        ({"runtime": "library"}, "plain layers"), ({"size": None, "quality": -1}, "number of dB"),
        ({"size": "much"}, "not a size"), ({"size": 0}, "not a size"), ({"size": "9" * 400}, "so many bytes"),
        ({"quant": "auto size=3MB"}, "follows a comma"), ({"quant": "auto,size="}, "has no value"),
        ({"quant": {"transformer": "auto"}, "size": None}, "all components together"),
        ({"size": None, "quant_stats": "stats.safetensors"}, "with a size or quality"),
    ):  # fmt: skip
        with pytest.raises(SettingsError, match=words):
            _plan(**values)
    with pytest.raises(SettingsError, match="needs quant='auto'"):
        sdquant.plan(FLUX, "int8", size=SIZE)
    with pytest.raises(SettingsError, match="which size= or quality="):
        sdquant.quantize(torch.nn.Linear(2, 2), "auto")


def test_loaded_quantized_and_saved_are_the_same(tmp_path: Path) -> None:
    pipe = sdquant.load_model(FLUX, "auto", size=SIZE, progress=False, cache=tmp_path / "cache")
    other = sdquant.quantize(sdquant.load_model(FLUX, progress=False), "auto", size=SIZE, progress=False)
    cached = sdquant.load_model(FLUX, "auto", size=SIZE, progress=False, cache=tmp_path / "cache")
    assert "transformer" in cached.sdquant.cached
    sdquant.save(pipe, tmp_path / "saved")
    again = sdquant.load_model(tmp_path / "saved", progress=False, offload="balanced", budget="2MB")
    assert again.sdquant.plan.bytes == pipe.sdquant.plan.bytes <= SIZE
    mine = dict(quantized(pipe.transformer))
    assert len({packed.spec.scheme for packed in mine.values()}) > 2
    for one in (other, again, cached):
        packs = dict(quantized(one.transformer))
        assert packs.keys() == mine.keys()
        for name, packed in mine.items():
            assert packs[name].spec.scheme == packed.spec.scheme
            assert all(torch.equal(packs[name].parts[part], value) for part, value in packed.parts.items())


def _outputs(pipe: Any) -> list[torch.Tensor]:
    found: list[torch.Tensor] = []
    hook = pipe.transformer.register_forward_hook(lambda *values: found.append(values[-1][0].float()))
    draw(pipe, [PROMPT], seeds=[0], steps=1, width=digits.SIZE, height=digits.SIZE)
    hook.remove()
    return found


def test_as_good_as_foretold(stats: Path) -> None:
    """The SNR of the transformer's output in the first step, where it alone is quantized."""
    given: dict[str, Any] = {"components": ("transformer",), "progress": False}
    (y,) = _outputs(sdquant.load_model(FLUX, progress=False))
    found = {}
    for name, values in {"measured": {"quant_stats": stats}, "alone": {}}.items():
        pipe = sdquant.load_model(FLUX, "auto", size="4.6MB", **given, **values)
        (mine,) = _outputs(pipe)
        found[name] = float(10 * torch.log10(y.square().sum() / (mine - y).square().sum()))
        spec = next(part.spec for part in pipe.sdquant.plan.components if part.name == "transformer")
        assert isinstance(spec, MixSpec) and spec.measured == (name == "measured")
        if spec.measured:
            # Foretold is the noise of plain codes: those that statistics choose make less of it.
            assert found[name] + spec.to_dict()["noise_db"] > -4
    assert found["measured"] > found["alone"]


def test_quality_asked_for(stats: Path) -> None:
    plans = [
        sdquant.plan(FLUX, "auto", quality=dB, quant_stats=stats, components="transformer", progress=False)
        for dB in (20, 30.0, "40")
    ]
    specs = [next(part.spec for part in plan.components if part.spec is not None) for plan in plans]
    assert [plan.bytes for plan in plans] == sorted(plan.bytes for plan in plans)
    for spec, dB in zip(specs, (20, 30, 40), strict=True):
        assert isinstance(spec, MixSpec) and dB <= -spec.to_dict()["noise_db"] < dB + 2


def test_the_commands(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    words = [str(FLUX), "-q", "auto", "--size", "4MB", "--no-progress"]
    assert main(["plan", *words]) == 0
    said = capsys.readouterr().out
    assert "chosen: size 4.0 MB" in said and "most bits" in said and "fewest bits" in said
    assert main(["plan", *words, "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["components"][0]["mix"] is not None
    assert main(["quantize", *words, "-o", str(tmp_path / "out")]) == 0
    assert sdquant.load_model(tmp_path / "out", progress=False).sdquant.plan.bytes <= SIZE
    files = (path for path in (tmp_path / "out").rglob("*") if path.is_file())
    assert 0.98 * SIZE < sum(path.stat().st_size for path in files) <= SIZE  # all of the folder


def test_gguf(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """One file of several types, of the size that was asked for, which draws."""
    file, size, name = tmp_path / "mixed.gguf", 2_500_000, "digits-flux"
    assert main(["quantize", name, str(file), "-q", f"auto,size={size}", "--no-progress"]) == 0
    assert "mixed.gguf: a mix of q" in capsys.readouterr().out
    assert 0.98 * size <= file.stat().st_size <= size
    pipe = sdquant.load_model(file, base=path(name), progress=False)
    assert len({packed.spec.scheme for _, packed in quantized(pipe.transformer)}) > 2
    draw(pipe, [PROMPT], seeds=[0], steps=1, width=digits.SIZE, height=digits.SIZE)
    small = tmp_path / "small.gguf"  # whose rows fit few types: more of them, the fewer bytes there are
    assert main(["quantize", "digits-sd", str(small), "-q", "auto", "--size", "1MB", "--no-progress"]) == 0
    assert 950_000 <= small.stat().st_size <= 1_000_000
    assert len({packed.spec.scheme for _, packed in quantized(_unet(small))}) > 2
    for words in (["--size", "1MB"], []):
        assert main(["quantize", name, str(tmp_path / "no.gguf"), "-q", "auto", *words]) == 2
    assert sorted(one.name for one in tmp_path.iterdir()) == ["mixed.gguf", "small.gguf"]


def _unet(file: Path) -> Any:
    return sdquant.load_model(file, base=path("digits-sd"), progress=False).unet


def _partial(stats: Path, folder: Path, change: Any) -> Path:
    """Return other statistics: those that `change` makes of a name and a tensor, without those that it makes None."""
    found = {name: change(name, statistics_file.read_tensor(stats, name)) for name in statistics_file.names_in(stats)}
    file = folder / "other.safetensors"
    statistics_file.write_statistics(file, {name: one for name, one in found.items() if one is not None}, {})
    return file


def test_statistics_of_some_layers(stats: Path, tmp_path: Path) -> None:
    """Layers that calibration does not know are encoded without it, in memory and in GGUF files."""
    file = _partial(stats, tmp_path, lambda name, one: one if "transformer_blocks.0." in name else None)
    given: dict[str, Any] = {"size": "4.6MB", "components": ("transformer",), "quant_stats": file, "progress": False}
    pipe = sdquant.load_model(FLUX, "auto", **given)
    assert not any("no effect" in line for line in pipe.sdquant.plan.warnings)
    (spec,) = (part.spec for part in pipe.sdquant.plan.components if part.name == "transformer")
    assert isinstance(spec, MixSpec)
    refined = {row.name for row in spec.shares if row.spec is not None and row.spec.takes_statistics}
    assert refined and all("transformer_blocks.0." in name for name in refined)
    sizes = {}
    for name, words in {"partial": ["--quant-stats", str(file)], "whole": ["--quant-stats", str(stats)]}.items():
        out = tmp_path / f"{name}.gguf"
        mixed = ["-q", "auto", "--size", "2.5MB", "--no-progress", *words]
        assert main(["quantize", "digits-flux", str(out), *mixed]) == 0
        sizes[name] = out.stat().st_size
        sdquant.load_model(out, base=FLUX, progress=False)
    assert all(2_400_000 < size <= 2_500_000 for size in sizes.values())


def test_statistics_without_gradients(stats: Path, tmp_path: Path) -> None:
    """As of `--gradients 0`: how inputs go together counts, and codes are chosen by it; roles weigh the layers."""
    file = _partial(stats, tmp_path, lambda name, one: None if ".weight." in name else one)
    given: dict[str, Any] = {"size": "4.6MB", "components": ("transformer",), "progress": False}
    plan = sdquant.plan(FLUX, "auto", quant_stats=file, **given)
    (spec,) = (part.spec for part in plan.components if part.spec is not None)
    assert isinstance(spec, MixSpec) and not spec.measured and plan.curve is not None and plan.curve.how == "weights"
    assert any(row.spec is not None and row.spec.takes_statistics for row in spec.shares)
    (alone,) = (part.spec for part in sdquant.plan(FLUX, "auto", **given).components if part.spec is not None)
    assert isinstance(alone, MixSpec) and spec.noise < alone.noise


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (lambda name, one: torch.full_like(one, torch.inf) if name.endswith("moments") else one, "not finite"),
        (lambda name, one: one[0] if name.endswith("moments") else one, "damaged"),
        (lambda name, one: one[:-1] if name.endswith("gradient2") else one, "another size"),
        (lambda name, one: -one if name.endswith("moments") else one, "negative"),
        (lambda name, one: one.tril() if name.endswith("moments") else one, "contradict"),
        (
            lambda name, one: one + 9 * one.amax() * (1 - torch.eye(one.shape[1])) if "moments" in name else one,
            "contradict",
        ),
        (lambda name, one: -one if name.endswith("gradient2") else one, "negative"),
        (lambda name, one: -one if name.endswith(".weight.count") else one, "negative"),
        (lambda name, one: torch.stack([one, one]) if name.endswith(".rows") else one, "damaged"),
        (lambda name, one: torch.tensor(torch.nan) if name.endswith(".rows") else one, "damaged"),
    ],
)
def test_damaged_statistics(change: Any, words: str, stats: Path, tmp_path: Path) -> None:
    file = _partial(stats, tmp_path, change)
    with pytest.raises(SdquantError, match=words):
        sdquant.plan(FLUX, "auto", size="4.6MB", components="transformer", quant_stats=file, progress=False)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float64, torch.float8_e5m2])
def test_statistics_of_other_dtypes_are_read(dtype: torch.dtype, stats: Path, tmp_path: Path) -> None:
    file = _partial(stats, tmp_path, lambda _, one: one.to(dtype) if one.is_floating_point() else one)
    layers, exact = (ComponentStatistics(str(one), "transformer") for one in (file, stats))
    path = next(iter(layers))
    moments, sensitivity = layers[path].second_moments, layers[path].sensitivity
    before = exact[path].second_moments
    assert moments is not None and before is not None and moments.dtype == torch.float32 and sensitivity is not None
    assert torch.allclose(moments, before, rtol=0.2, atol=1e-3 * float(before.abs().max()))


def test_what_an_interrupt_leaves_is_gone_on_with(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """And what anything else made of the file of errors counts as nothing known."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    weights = {f"blocks.{number}.weight": torch.randn(64, 256).bfloat16() for number in range(9)}
    schemes, calls, last = dict.fromkeys(weights, ("q4_k", "q8_0")), list[str](), 5

    def read(name: str) -> torch.Tensor:
        if len(calls) == last:
            raise KeyboardInterrupt
        calls.append(name)
        return weights[name]

    def run(tick: Any, errors: dict[str, dict[str, float]]) -> None:
        mix_errors.measure_errors(list(weights), read, schemes, None, tick, errors)

    def measure() -> Any:
        calls.clear()
        return mix_errors.remembered({}, schemes, False, run)

    with pytest.raises(KeyboardInterrupt):
        measure()
    (file,) = (one for one in tmp_path.rglob("*") if one.is_file())
    before, last = json.loads(file.read_bytes()), 99
    assert list(before) == calls == list(weights)[:5] and mix_errors.remembered_errors({}, schemes) is None
    whole = measure()
    assert calls == list(weights)[5:] and list(whole) == list(weights) and whole.items() >= before.items()
    assert measure() == whole == mix_errors.remembered_errors({}, schemes) and not calls
    good = file.read_bytes()
    for damage in (b"", b"[" * 100_000, b"[1]", b'"x"', b"\xff", good[:-9], json.dumps({"x": {"q4_k": 1.0}}).encode()):
        file.write_bytes(damage)
        assert measure() == whole and calls == list(weights) and file.read_bytes() == good
    first = next(iter(weights))
    for wrong in ({"q4_k": torch.nan}, {"q4_k": -1.0}, {"q4_k": "1"}, {"q5_k": 1.0}, [1.0], None):
        file.write_text(json.dumps({**whole, first: wrong}))
        assert measure() == whole and calls == [first]


def test_models_of_few_layers() -> None:
    """One layer, one far wider than the others, none that fits: within the size, or the least is said."""
    torch.manual_seed(0)
    with pytest.raises(SdquantError, match="no float weights that a scheme here quantizes"):
        sdquant.quantize(torch.nn.Linear(2, 2), "auto", size=1000, progress=False)
    for widths in ((64, 64), (64, 2048, 64)):
        pairs = list(itertools.pairwise(widths))
        with pytest.raises(BudgetError, match="Use size=") as error:
            sdquant.quantize(_linears(pairs), "auto", size=100, progress=False)
        least = int(error.value.fix.split("size=")[1].split()[0])
        bf16 = sum(2 * (rows + 1) * columns for rows, columns in pairs)
        for size in (least, bf16):
            model = sdquant.quantize(_linears(pairs), "auto", size=size, progress=False)
            packs = dict(quantized(model))
            floats = (one for one in model.parameters() if one.dtype == torch.bfloat16 and one.ndim < 3)
            assert sum(packed.nbytes for packed in packs.values()) <= size and (size < bf16) == bool(packs)
            assert model(torch.randn(3, 64).bfloat16()).isfinite().all() and list(floats)
        with pytest.raises(BudgetError):
            sdquant.quantize(_linears(pairs), "auto", size=least - 1, progress=False)


def _linears(pairs: list[tuple[int, int]]) -> torch.nn.Module:
    return torch.nn.Sequential(*(torch.nn.Linear(*pair) for pair in pairs)).bfloat16()


@pytest.mark.parametrize("value", [torch.nan, torch.inf])
def test_not_a_number_in_a_row_that_is_not_measured(value: float) -> None:
    model = _linears([(64, 1024), (1024, 64)])
    model[0].weight.data[3, 3] = value
    with pytest.raises(SdquantError, match=r"Cannot quantize weight '0.weight'.*NaN, infinite"):
        sdquant.quantize(model, "auto", size=140_000, progress=False)


def test_statistics_of_another_model_are_refused(tmp_path: Path) -> None:
    file = tmp_path / "stats.safetensors"
    values = {"unet.conv_in.conv_general_dilated0_lhs.rows": torch.tensor(1)}
    statistics_file.write_statistics(file, values, {})
    with pytest.raises(SettingsError, match=r"(?s)another model.*Calibrate this model"):
        sdquant.plan(sdquant.demo.path("digits-flux"), quant="auto", size="4MB", quant_stats=file)


def test_schemes_to_choose_from_have_kernels_and_readers() -> None:
    """On a card each GGUF type is decoded by a kernel; and what a GGUF file mixes ComfyUI-GGUF decodes by itself."""
    types = [word for word in mix.FAMILIES[mix.OWN] if registry.parse(word).scheme.backend == "gguf"]
    assert set(types) <= set(blocks.GGUF) and set(mix.FAMILIES[mix.GGUF]) <= FOLDED
