"""`sdquant bench`, the models with random weights, and the comparison of results."""

from __future__ import annotations

import inspect
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import diffusers
import numpy as np
import psutil
import pytest
import torch
from PIL import Image
from safetensors.torch import load_file

import sdquant
from bench import _results, models
from bench import compare as comparing_results
from sdquant import cli
from sdquant.errors import SettingsError, UnknownQuantError
from sdquant.evaluation.benchmark import Benchmark, BenchmarkRow, baselines, bench, cases, runner
from sdquant.evaluation.benchmark.figure import sheet
from sdquant.evaluation.benchmark.inputs import snr
from sdquant.evaluation.benchmark.specs import LoadSpec, trace_path
from sdquant.evaluation.benchmark.worker import HeldModel
from sdquant.evaluation.benchmark.worker_pool import Failed, start, working
from sdquant.models import dummy_inputs
from sdquant.planning.request import make_request
from sdquant.utils import figure

ROOT = Path(__file__).parent.parent
UNET = sdquant.demo.path("digits-sd") / "unet"
ONE_THREAD = os.environ | {"OMP_NUM_THREADS": "1"}


def row(**values: Any) -> BenchmarkRow:
    """A row with numbers."""
    return BenchmarkRow(**({
        "name": "nf4", "by": "sdquant", "quant": "nf4", "bytes": 10, "load_seconds": 1.5, "load_cpu_seconds": 1.0,
        "peak": 20, "step_seconds": 0.5, "step_cpu_seconds": 0.5, "ratio": 1.25, "snr": 20.0,
    } | values))  # fmt: skip


def benchmark(*rows: BenchmarkRow, **values: Any) -> Benchmark:
    """A benchmark of these rows, behind a reference."""
    first = row(name="as found (bfloat16)", quant=None, ratio=1.0, snr=None)
    return Benchmark(**({
        "model": "/models/some", "class_name": "UNet2DConditionModel", "inputs": "random", "size": (64, 32),
        "batch": 1, "seed": 0, "steps": 1, "rounds": 3, "threads": 1, "clock": "cpu", "memory": "RssAnon",
        "device": "cpu", "rows": (first, *rows), "versions": {"torch": "2"},
        "machine": {"cpu": "a cpu", "devices": [{"torch_name": "cpu", "name": "a cpu"}]},
    } | values))  # fmt: skip


# The command, in processes.


def test_a_scheme_that_nobody_has(capsys: pytest.CaptureFixture[str]) -> None:
    """Refused by what the command calls, which takes all that it passes on."""
    assert cli.main(["bench", str(UNET), "-q", "int9", "--no-progress"]) == 2
    assert "int9" in capsys.readouterr().err


def test_a_mix_is_no_scheme_with_a_name(capsys: pytest.CaptureFixture[str]) -> None:
    """It was told that no backend has a scheme `auto`."""
    assert cli.main(["bench", str(UNET), "-q", "auto,size=1MB", "--no-progress"]) == 2
    assert "Cannot measure auto" in capsys.readouterr().err


@pytest.mark.slow
def test_a_component_alone(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """One scheme that runs, one that the matrix refuses, and all that is written."""
    code = cli.main([
        "bench", str(UNET), "-q", "int8", "-q", "nf4", "--offload", "sequential", "--no-peers", "--rounds", "2",
        "--threads", "1", "--size", "32x32", "--json", str(tmp_path / "a.json"), "--output", str(tmp_path / "a.png"),
        "--profile", str(tmp_path / "runs" / "step"), "--no-progress",
    ])  # fmt: skip
    out = capsys.readouterr().out
    assert code == 0
    values = json.loads((tmp_path / "a.json").read_text())
    first, int8, nf4 = values["rows"]
    assert [one["name"] for one in values["rows"]] == ["as found (bfloat16)", "int8", "nf4"]
    assert (values["inputs"], values["size"], values["batch"]) == ("random", [32, 32], 1)
    assert first["ratio"] == 1 and first["snr"] is None and not first["error"]
    assert nf4["kind"] == "IncompatibleError" and "Blockwise quantization" in nf4["error"]
    assert nf4["step_seconds"] is None
    # Bytes as the model loaded here has them, and the output of the same inputs held to the float model's.
    given = dummy_inputs.random("UNet2DConditionModel", json.loads((UNET / "config.json").read_text()), (32, 32), 1, 0)
    outs = {}
    for name in (None, "int8"):
        model = sdquant.load_model(UNET, name, progress=False)
        with torch.no_grad():
            made = model(**dummy_inputs.moved(given[1], torch.device("cpu"), torch.bfloat16)).sample
        outs[name] = made.float().numpy().astype(np.float64)
        assert (first if name is None else int8)["bytes"] == sdquant.offload.weight_bytes(model)
    noise = ((outs["int8"] - outs[None]) ** 2).sum()
    assert int8["snr"] == pytest.approx(10 * np.log10((outs[None] ** 2).sum() / noise), abs=1e-6)
    assert min(int8[name] for name in ("load_seconds", "peak", "step_seconds", "step_cpu_seconds", "ratio")) > 0
    assert "not measured: nf4: Cannot use nf4" in out and f"{int8['snr']:.1f} dB" in out
    with Image.open(tmp_path / "a.png") as picture:
        assert picture.width > 500
    traces = sorted(path.name for path in (tmp_path / "runs").iterdir())
    assert traces == ["step-as_found__bfloat16_.pt.trace.json", "step-int8.pt.trace.json"]
    assert int8["trace"] == str(tmp_path / "runs" / traces[1])
    events = json.loads((tmp_path / "runs" / traces[1]).read_text())["traceEvents"]
    assert {"sdquant int8 mid_block.resnets.0.conv1", "aten::group_norm"} <= {event.get("name") for event in events}
    # What was measured can be held against itself.
    assert comparing_results.main([str(tmp_path / "a.json")] * 2) == 0


@pytest.mark.slow
def test_a_pipeline_with_peers(flux: Path) -> None:
    """The pipeline's own inputs, a GGUF file that is written on the way, and a peer with the same bits."""
    told: list[tuple[int, int, str]] = []
    made = bench(
        flux, ["qint8", "q8_0", "int8"], rounds=2, threads=1, prompt="a handwritten seven", clock="cpu",
        on_progress=lambda *at: told.append(at),
    )  # fmt: skip
    rows = {one.name: one for one in made.rows}
    assert (made.inputs, made.size, made.class_name) == ("pipeline", (32, 32), "FluxTransformer2DModel")
    ours, theirs = rows["qint8"], rows["diffusers quanto int8"]
    # The same codes; sums in other orders round otherwise to bf16, which moves a single seed by up to 1.5 dB here:
    # bench.one_step has the mean of many.
    assert ours.snr == pytest.approx(theirs.snr, abs=2) and ours.bytes == pytest.approx(theirs.bytes, rel=1e-3)
    assert theirs.load_ratio is not None
    assert rows["int8"].snr == pytest.approx(rows["nncf int8_asym"].snr, abs=0.2)
    q8_0 = rows["q8_0"]
    assert q8_0.error is None and q8_0.snr is not None and q8_0.snr > 40
    assert rows["diffusers GGUF q8_0"].error is not None  # diffusers takes every FLUX.1 to be 3072 wide
    assert [done for done, _, _ in told] == sorted(done for done, _, _ in told)
    assert told[-1][0] == told[-1][1] and told[-1][2] == "done"


@pytest.mark.slow
def test_a_model_that_does_not_fit_with_all_others(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(runner, "_room", lambda *_: 0)
    made = bench(UNET, ["int8", "qint8"], rounds=1, threads=1, peers=False)
    assert [one.group for one in made.rows] == [0, 0, 1]
    assert all(one.error is None for one in made.rows)


@pytest.mark.skipif(os.name != "posix", reason="Ctrl-C reaches a child process otherwise on Windows")
def test_interrupted(tmp_path: Path) -> None:
    """The workers go with the one that measures, and so do its folder and what it would have written."""
    place = tmp_path / "tmp"
    place.mkdir()
    words = ["bench", str(UNET), "-q", "int8", "--no-peers", "--json", str(tmp_path / "a.json")]
    with subprocess.Popen(
        [sys.executable, "-m", "sdquant", *words], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
        env=ONE_THREAD | {"TMPDIR": str(place), "TORCHINDUCTOR_CACHE_DIR": str(tmp_path.parent / "torchinductor")},
    ) as child:  # fmt: skip
        workers: list[psutil.Process] = []
        until = time.monotonic() + 120
        while not workers and time.monotonic() < until:
            children = psutil.Process(child.pid).children()
            workers = [one for one in children if "sdquant.evaluation.benchmark.worker" in one.cmdline()]
            time.sleep(0.01)
        assert workers
        child.send_signal(signal.SIGINT)
        out, err = child.communicate(timeout=120)
    assert (child.returncode, out, err) == (130, "", "sdquant: interrupted\n")
    assert not any(one.is_running() and one.status() != psutil.STATUS_ZOMBIE for one in workers)
    assert [path.name for path in tmp_path.rglob("*")] == ["tmp"]


def test_a_worker_that_dies_says_how() -> None:
    job = LoadSpec(
        asked=make_request(UNET), work=Path(), threads=1, device="cpu", class_name="UNet2DConditionModel",
        dtype="bfloat16",
    )  # fmt: skip
    with working() as (folder, workers):
        worker = start(job, workers)
        os.kill(worker.pid, signal.SIGKILL)
        with pytest.raises(Failed, match="SIGKILL, usually because memory ran out"):
            worker.ask("prepare")
        assert folder.is_dir()
    assert not folder.exists()


# The parts, in this process.


def held(work: Path, **values: Any) -> HeldModel:
    """A worker's model of the shipped UNet, prepared, on random inputs."""
    config = json.loads((UNET / "config.json").read_text())
    torch.save(dummy_inputs.random("UNet2DConditionModel", config, (32, 32), 1, 0), work / "inputs.pt")
    asked = make_request(UNET, quant=values.pop("quant", None), progress=False)
    job = LoadSpec(**({
        "asked": asked, "work": work, "threads": torch.get_num_threads(), "device": "cpu",
        "class_name": "UNet2DConditionModel", "dtype": "bfloat16",
    } | values))  # fmt: skip
    made = HeldModel(job)
    made.prepare()
    return made


def test_a_workers_answers(tmp_path: Path) -> None:
    first, same, quanto, theirs = (
        held(tmp_path), held(tmp_path), held(tmp_path, quant="qint8"),
        held(tmp_path, peer="diffusers quanto", scheme="qint8"),
    )  # fmt: skip
    for one in (first, same, quanto, theirs):
        said = one.load()
        assert said["load_seconds"] > 0 and said["bytes"] > 0
    assert first.first(keep=True)["snr"] is None
    assert same.first(keep=False)["snr"] == "inf"
    assert 30 < quanto.first(keep=False)["snr"] < 60 and 30 < theirs.first(keep=False)["snr"] < 60
    assert set(first.turn(steps=2)) == {"wall", "cpu"}
    json.dumps([one.end() for one in (first, same, quanto, theirs)])


def test_an_output_that_is_not_finite(tmp_path: Path) -> None:
    made = held(tmp_path)
    made.load()
    with torch.no_grad():
        made._main.conv_out.bias[0] = float("nan")  # type: ignore[union-attr, index, operator]
    with pytest.raises(ArithmeticError, match="not finite"):
        made.first(keep=True)


@pytest.mark.parametrize("peer", baselines.PEERS, ids=lambda peer: peer.name)
def test_peers_are_of_our_schemes(peer: baselines.Peer) -> None:
    assert [sdquant.backends.parse(name).scheme.name for name in peer.formats] == [*peer.formats]
    everything = dict.fromkeys(peer.packages, "1")
    for scheme in peer.formats:
        assert peer in baselines.installed(scheme, everything)
        assert peer not in baselines.installed(scheme, {})


def test_bitsandbytes_on_the_cpu_says_what_was_done() -> None:
    assert "refuses" in str(baselines.peer("diffusers bitsandbytes").note("cpu"))
    assert baselines.peer("diffusers bitsandbytes").note("cuda:0") is None


@pytest.mark.parametrize("name", ["sd15", "sdxl", "flux-1.2b"])
def test_random_inputs_fit_the_models(name: str) -> None:
    """What is made from the config goes through the model, on the meta device, for a size that is not square."""
    config = dict(models.MODELS[name].config)
    cls = getattr(diffusers, config["_class_name"])
    with torch.device("meta"):
        model = cls.from_config(config)
    _, given = dummy_inputs.random(config["_class_name"], model.config, (256, 128), 2, 0)
    assert set(given) <= set(inspect.signature(model.forward).parameters)
    if name == "sd15":  # Flux's tables of places cannot be made there, and SDXL takes seconds
        made = model(**dummy_inputs.moved(given, torch.device("meta"))).sample
        assert made.shape == (2, 4, 16, 32)
    count = {"sd15": 859_520_964, "sdxl": 2_567_463_684, "flux-1.2b": None}[name]
    assert count is None or sum(p.numel() for p in model.parameters()) == count


def test_random_inputs_that_cannot_be() -> None:
    with pytest.raises(SettingsError, match=r"multiples of 16 pixels"):
        dummy_inputs.random("FluxTransformer2DModel", {}, (100, 128), 1, 0)
    with pytest.raises(SettingsError, match="without its pipeline"):
        dummy_inputs.random("AutoencoderKL", {}, (128, 128), 1, 0)


def test_snr_is_a_ratio_of_energies() -> None:
    wanted = torch.tensor([3.0, -4.0], dtype=torch.float64)
    assert snr(wanted + torch.tensor([0.3, 0.4]), wanted) == pytest.approx(20.0)  # 25 to 0.25
    assert snr(wanted.clone(), wanted) == float("inf")


def test_ratios_are_of_the_same_round(tmp_path: Path) -> None:
    """A machine that becomes three times slower on the way changes no ratio."""

    def one(name: str, *cpu: float) -> Any:
        return runner._Running(cases.Variant(row=row(name=name)), None, row(name=name), [9.0] * 3, [*cpu])  # type: ignore[arg-type]

    made = runner._measured(one("b", 2.0, 6.0, 2.2), one("a", 1.0, 3.0, 1.0), "cpu", 0)
    assert (made.ratio, made.step_cpu_seconds, made.step_spread) == (2.0, 2.2, (2.0, 6.0))
    assert runner._measured(one("b", 2, 2, 2), one("a", 1, 1, 1), "wall", 0).ratio == 1


def test_a_load_is_held_to_ours() -> None:
    theirs = row(name="x nf4", by="x", load_cpu_seconds=7.0)
    assert [one.load_ratio for one in runner._against_ours([row(), theirs])] == [None, 7.0]


def test_groups_that_fit() -> None:
    def one(name: str, nbytes: int) -> Any:
        job: Any = object()
        return cases.Variant(row=row(name=name), job=job, bytes=nbytes)

    gib = 1 << 30
    todo = [one("a", 2 * gib), one("b", gib), cases.Variant(row=row(name="refused")), one("c", gib), one("d", gib)]
    names = [[each.row.name for each in group] for group in runner._groups(todo, 6 * gib)]
    assert names == [["a", "b", "c"], ["a", "d"]]  # half a GiB each beside the weights
    assert [len(group) for group in runner._groups(todo, 0)] == [2, 2, 2]


@pytest.mark.parametrize("given", ["runs/step", "runs/step.json", "runs/step.pt.trace.json", "runs/step.json.gz"])
def test_names_of_traces(given: str) -> None:
    assert trace_path(given, "diffusers GGUF q8_0") == Path("runs/step-diffusers_GGUF_q8_0.pt.trace.json")


@pytest.mark.parametrize(
    ("error", "values"),
    [
        (SettingsError, {"rounds": 0}), (SettingsError, {"steps": 1.5}), (SettingsError, {"size": (0, 8)}),
        (SettingsError, {"clock": "sun"}), (SettingsError, {"inputs": "none"}), (SettingsError, {"threads": 0}),
        (SettingsError, {"quant": "nf4"}), (UnknownQuantError, {"schemes": ["nf5"]}),
        (SettingsError, {"inputs": "pipeline"}), (SettingsError, {"no_such": 1}),
    ],
)  # fmt: skip
def test_what_cannot_be_is_refused_at_once(error: type[Exception], values: dict[str, Any]) -> None:
    with pytest.raises(error):
        bench(UNET, **values)


def test_a_row_and_a_benchmark_are_json() -> None:
    made = benchmark(row(snr=float("inf"), step_spread=(0.4, 0.6)), settings={"offload": "model"})
    values = json.loads(json.dumps(made.to_dict(), allow_nan=False))
    assert values["bench"] == "sdquant bench" and values["size"] == [64, 32]
    assert values["rows"][1]["identical"] and values["rows"][1]["snr"] is None
    assert values["rows"][1]["case"] == "UNet2DConditionModel, 64x32, batch 1, cpu, offload model"
    assert values["rows"][1]["step_spread"] == [0.4, 0.6]


def test_the_picture_has_a_line_for_each_row(monkeypatch: pytest.MonkeyPatch) -> None:
    some = [sheet(benchmark(*rows)).size for rows in ((), (row(),), (row(), row(name="x", error="It fails.")))]
    assert [height - some[0][1] for _, height in some] == [0, 44, 88]
    assert len({width for width, _ in some}) == 1
    rows = (row(), row(name="theirs", by="peer", peak=None), row(name="x", error="It fails."))
    monkeypatch.setattr(figure, "rendered", lambda drawn: drawn.axes)
    step, weights, memory, load, accuracy = sheet(benchmark(*rows))
    assert [label.get_text() for label in step.get_yticklabels()] == ["as found (bfloat16)", "nf4", "theirs", "x"]
    words = [[text.get_text() for text in axes.texts] for axes in (step, weights, memory, load, accuracy)]
    assert words[0] == ["1.00 x    500 ms", "1.25 x    500 ms", "1.25 x    500 ms", "It fails."]
    assert words[1:] == [["10 B"] * 3, ["20 B", "20 B", ""], ["1.50 s"] * 3, ["-", "20.0 dB", "20.0 dB"]]
    lengths = [round(bar.get_width()) for bar in step.patches]
    assert lengths == [190, 152, 190, 190, 190, 190]  # tracks and bars, the longest of which fills its track
    assert memory.patches[1].get_facecolor() != step.patches[5].get_facecolor() and len(memory.patches) == 4


# Models with random weights.


def test_a_generated_model(tmp_path: Path) -> None:
    """In shards, with the spread that keeps what goes through at its size, and it loads."""
    config = json.loads((UNET / "config.json").read_text())
    models.generate(config, tmp_path / "unet", files=5)
    files = sorted((tmp_path / "unet").glob("*.safetensors"))
    assert len(files) == 5 and max(path.stat().st_size for path in files) < 1_200_000
    index = json.loads((tmp_path / "unet" / "diffusion_pytorch_model.safetensors.index.json").read_text())["weight_map"]
    for path in files:
        assert {name for name, file in index.items() if file == path.name} == set(load_file(path))
    model = sdquant.load_model(tmp_path / "unet", progress=False)
    wanted = diffusers.UNet2DConditionModel.from_config(config).state_dict()
    assert {name: p.shape for name, p in model.state_dict().items()} == {name: p.shape for name, p in wanted.items()}
    weight = model.state_dict()["mid_block.resnets.0.conv1.weight"].float()
    assert float(weight.std()) == pytest.approx((weight[0].numel()) ** -0.5, rel=0.03)
    assert float(model.conv_norm_out.weight.min()) == 1 and float(model.conv_out.bias.abs().max()) == 0
    _, given = dummy_inputs.random("UNet2DConditionModel", config, (32, 32), 1, 0)
    with torch.no_grad():
        out = model(**dummy_inputs.moved(given, torch.device("cpu"), torch.bfloat16)).sample.float()
    assert 0.2 < float(out.std()) < 5


# Comparing results.


def compared(tmp_path: Path, old: Sequence[dict[str, Any]], new: Sequence[dict[str, Any]], *words: str) -> int:
    """`bench.compare` on files of these rows, each of which gets the same name and case if it has none."""
    for name, rows in (("old", old), ("new", new)):
        filled = [{"name": "nf4", "case": "a"} | one for one in rows]
        _results.write(tmp_path / f"{name}.json", "some", filled, machine={})
    return comparing_results.main([str(tmp_path / "old.json"), str(tmp_path / "new.json"), *words])


@pytest.mark.parametrize(
    ("old", "new", "code"),
    [
        ({"ratio": 1.0}, {"ratio": 1.09}, 0), ({"ratio": 1.0}, {"ratio": 1.11}, 1), ({"ratio": 1.0}, {"ratio": 0.5}, 0),
        ({"snr": 40.0}, {"snr": 39.9}, 0), ({"snr": 40.0}, {"snr": 39.7}, 1), ({"snr": 40.0}, {"snr": 50.0}, 0),
        ({"snr": None, "identical": True}, {"snr": 70.0}, 1), ({"bytes": 1000}, {"bytes": 1011}, 1),
        ({"load_ratio": 8.0}, {"load_ratio": 5.0}, 1), ({"ratio": 1.0}, {"ratio": None, "error": "It fails."}, 1),
        ({"error": "It fails."}, {"ratio": 1.0}, 0),
        ({"ratio": 1.0, "seconds": 1.0}, {"ratio": 1.0, "seconds": 9.0}, 0),
    ],
)  # fmt: skip
def test_what_is_a_regression(old: dict[str, Any], new: dict[str, Any], code: int, tmp_path: Path) -> None:
    assert compared(tmp_path, [old], [new]) == code


def test_a_threshold_of_ones_own(tmp_path: Path) -> None:
    assert compared(tmp_path, [{"ratio": 1.0}], [{"ratio": 1.11}], "--threshold", "0.2") == 0
    assert compared(tmp_path, [{"ratio": 1.0}], [{"ratio": 1.05}], "--threshold", "0.01") == 1


def test_what_is_said(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    both = {"name": "int8", "ratio": 1.0}
    assert compared(tmp_path, [{"ratio": 1.0}, both, {"name": "gone"}], [{"ratio": 2.0}, both, {"name": "x"}]) == 1
    lines = capsys.readouterr().out.splitlines()
    assert lines[1].split() == ["nf4", "a", "ratio", "1", "2", "2.000", "WORSE"]
    assert any("gone" in line and "is not there any more" in line for line in lines)
    assert any(line.startswith("x ") and line.endswith("is new") for line in lines)
    assert not any(line.startswith("int8") for line in lines) and lines[-1] == "2 numbers compared: 1 worse, 0 better"


def test_files_that_cannot_be_compared(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert compared(tmp_path, [{"ratio": 1}], [{"name": "other", "ratio": 1}]) == 2
    (tmp_path / "bad.json").write_text("{")
    assert comparing_results.main([str(tmp_path / "bad.json")] * 2) == 2
    (tmp_path / "list.json").write_text("[]")
    assert comparing_results.main([str(tmp_path / "list.json")] * 2) == 2
    assert "bench.compare: " in capsys.readouterr().err
    with pytest.raises(ValueError, match="a name and a case of its own"):
        _results.write(tmp_path / "a.json", "some", [{"name": "a", "case": "b"}] * 2, machine={})
    with pytest.raises(ValueError, match="`error` is why a row has no numbers, a text"):
        _results.write(tmp_path / "a.json", "some", [{"name": "a", "case": "b", "error": 0.1}], machine={})


def test_a_number_is_compared_or_it_is_said(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """What fails in both files, and what nobody compares, is no "0 worse"."""
    for row in ({"error": "It fails."}, {"seconds": 1.0}):
        assert compared(tmp_path, [row], [row]) == 2
        assert "no number of theirs is compared" in capsys.readouterr().err


KEPT = sorted(
    path.stem
    for path in (ROOT / "bench" / "results").glob("*.json")
    # Counts of what was tried and of faults; seconds of one machine.
    if path.stem not in ("configurations", "mutations", "ui")
)


@pytest.mark.parametrize("name", KEPT)
def test_results_that_are_kept_can_be_compared(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    file = ROOT / "bench" / "results" / f"{name}.json"
    assert comparing_results.main([str(file), str(file), "--all"]) == 0
    measured = [row for row in _results.read(file) if not row.get("error")]
    assert int(capsys.readouterr().out.splitlines()[-1].split()[0]) >= len(measured) > 0
