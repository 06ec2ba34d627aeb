"""What `sdquant calibrate` finds for quality: as one's own hooks see it, resumed, bounded, true of the output."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.nn import functional as F

import sdquant
from sdquant.cli import main
from sdquant.core import registry
from sdquant.demo import path
from sdquant.errors import ConflictError, SettingsError
from sdquant.rules import calibrated_spec, statistics_file, weight_samples, with_statistics
from sdquant.rules.layer_statistics import ComponentStatistics
from sdquant.saving import comfy_mix, export_single_file, quantize_file
from sdquant.training import digits, input_moments, partial_statistics, quality_statistics
from sdquant.training.calibration import Calibration, calibrate, prepare_models
from sdquant.training.partial_statistics import PartialStatistics
from sdquant.utils.distributed import Processes

from ..test_distributed import torchrun

PROMPTS = tuple(digits.prompt(digit) for digit in (3, 7, 1, 8))
LINEAR, CONV = "mid_block.attentions.0.proj_in", "down_blocks.0.downsamplers.0.conv"


def _task(**values: Any) -> Calibration:
    return Calibration(
        **{"model": "digits-sd", "rules": (), "prompts": PROMPTS, "steps": 3, "components": ("unet",), **values}
    )


def _float() -> Any:
    return sdquant.load_model(path("digits-sd"), progress=False)


@pytest.fixture(scope="module")
def found() -> dict[str, torch.Tensor]:
    return calibrate(_float(), _task())


@pytest.fixture(scope="module")
def file(found: dict[str, torch.Tensor], tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("quality") / "stats.safetensors"
    statistics_file.write_statistics(out, found, {})
    return out


def test_moments_are_those_of_the_inputs(tmp_path: Path) -> None:
    """A convolution's are of its patches, in the order of the columns of its weight. Without gradients all count."""
    file, pipe = tmp_path / "stats.safetensors", _float()
    statistics_file.write_statistics(file, calibrate(_float(), _task(gradients=0)), {})
    seen: dict[str, list[torch.Tensor]] = {LINEAR: [], CONV: []}
    for name, rows in seen.items():
        layer = pipe.unet.get_submodule(name)
        layer.register_forward_pre_hook(lambda _, args, rows=rows: rows.append(args[0].float()))
    from sdquant.models import draw

    for seed, prompt in enumerate(PROMPTS):
        draw(pipe, [prompt], seeds=[seed], steps=3)
    layers = ComponentStatistics(str(file), "")
    assert len(layers) == sum(isinstance(one, (torch.nn.Linear, torch.nn.Conv2d)) for one in pipe.unet.modules())
    x = torch.cat(seen[LINEAR])
    x = x.movedim(1, -1).flatten(0, -2) if x.ndim == 4 else x.flatten(0, -2)
    conv = pipe.unet.get_submodule(CONV)
    patches = F.unfold(torch.cat(seen[CONV]), conv.kernel_size, padding=conv.padding, stride=conv.stride)
    for name, rows in ((LINEAR, x), (CONV, patches.transpose(1, 2).flatten(0, 1))):
        moments = layers[name].second_moments
        assert moments is not None and moments.shape == (1, rows.shape[1], rows.shape[1])
        expected = rows.double().T @ rows.double() / len(rows)
        assert torch.allclose(moments[0].double(), expected, rtol=1e-4, atol=1e-4 * float(expected.amax()))
        mean = layers[name].mean_input
        assert mean is not None and torch.allclose(mean, rows.mean(0), rtol=1e-4, atol=1e-4 * float(rows.abs().amax()))


@pytest.mark.parametrize("name", ["conv_out", LINEAR, CONV, "time_embedding.linear_1"])
def test_noise_is_foretold(file: Path, name: str) -> None:
    pipe = sdquant.load_model(path("digits-sd"), dtype="float32", progress=False)
    unet, layers = pipe.unet, ComponentStatistics(str(file), "unet")
    inputs: list[tuple[Any, Any]] = []
    hook = unet.register_forward_pre_hook(lambda _, a, k: inputs.append((a, k)), with_kwargs=True)
    from sdquant.models import draw

    for seed, prompt in enumerate(PROMPTS, start=5):  # of one image it is a fifth to five times that of another
        draw(pipe, [prompt], seeds=[seed], steps=3)
    hook.remove()
    weight = unet.get_submodule(name).weight
    noise = torch.randn(weight.shape, generator=torch.Generator().manual_seed(1)) * weight.std() * 0.02
    moments, sensitivity = layers[name].second_moments, layers[name].sensitivity
    assert moments is not None and sensitivity is not None
    rows = noise.flatten(1)
    foretold = float((sensitivity * ((rows @ moments[0]) * rows).sum(1)).sum())
    ratios = []
    with torch.no_grad():
        before = [unet(*args, **kwargs)[0] for args, kwargs in inputs]
        weight += noise
        for (args, kwargs), y in zip(inputs, before, strict=True):
            ratios.append(float((unet(*args, **kwargs)[0] - y).square().sum() / y.square().sum()))
    assert 0.5 < foretold / (sum(ratios) / len(ratios)) < 2


def test_inputs_count_by_what_noise_there_does_to_the_output() -> None:
    """Tokens, and groups of a convolution, that do not reach the output hardly count, however large they are."""

    class Model(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer, self.conv = torch.nn.Linear(8, 6), torch.nn.Conv2d(4, 8, 3, padding=1, groups=2)

        def forward(self, x: torch.Tensor, picture: torch.Tensor) -> torch.Tensor:
            return torch.cat([self.layer(x)[:, :3].flatten(), self.conv(picture)[:, :4].flatten()])

    torch.manual_seed(0)
    model, x, picture = Model(), torch.randn(1, 40, 8), torch.randn(1, 4, 5, 5)
    x[:, :3, 4:], x[:, 3:, :4] = 0, 0
    picture[:, 2:] = 3
    collector = quality_statistics.QualityCollector({"transformer": model}, 10**6, 1, 1)
    with torch.no_grad(), collector.running():
        collector.begin(lambda: model(x, picture), None)
        collector.image("", 0, 0)
        model(x, picture)
    found = collector.statistics(exact=False)

    def squares(name: str) -> tuple[int, torch.Tensor]:
        rows, total = (found[f"transformer.{name}.{what}"] for what in ("rows", "sum_of_moments"))
        return int(rows), total[0].diagonal() / rows

    rows, each = squares("layer.dot_general0_lhs")
    assert 1 <= rows <= 4 and float(each[4:].sum()) < 0.1 * float(each[:4].sum())
    rows, each = squares("conv.conv_general_dilated0_lhs")
    assert 10 < rows <= 26 and float(each.mean()) < 2  # of those of the other group, 9 but at borders


def test_stopped_and_gone_on_with(found: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    partial, kept = tmp_path / "stats.partial", PartialStatistics.write

    def stop_after(*values: Any) -> None:
        kept(*values)
        raise KeyboardInterrupt

    monkeypatch.setattr(PartialStatistics, "write", stop_after)
    pipe = _float()
    with pytest.raises(KeyboardInterrupt):
        calibrate(pipe, _task(), partial=partial)
    monkeypatch.setattr(PartialStatistics, "write", kept)
    with pytest.raises(SettingsError, match="limit differ"):
        calibrate(pipe, _task(limit="1MB"), partial=partial)
    again = calibrate(pipe, _task(), partial=partial)
    assert again.keys() == found.keys() and all(torch.equal(again[name], value) for name, value in found.items())
    assert not any(one.requires_grad and one.grad is not None for one in pipe.unet.parameters())


def test_what_another_calibration_left_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever the sums depend on: what is drawn, the model that is watched and those beside it, and what collects."""
    pipe, file = _float(), tmp_path / "stats.partial"

    def of(processes: Processes | None = None, **values: Any) -> PartialStatistics:
        return PartialStatistics.of(file, pipe, _task(**values).to_dict(), processes)

    of().write(1, {"x": torch.ones(1)})
    assert of().read(4)[0] == 1
    for values in ({"model": "other"}, {"prompts": PROMPTS[1:]}, {"limit": "1MB"}, {"gradients": 1}, {"seed": 1},
                   {"width": 64}, {"count": 2}, {"components": ()}):  # fmt: skip
        with pytest.raises(SettingsError, match=f"another calibration: {next(iter(values))} differ") as refused:
            of(**values).read(8)
        assert "Delete it to start again" in refused.value.fix
    with pytest.raises(SettingsError, match="the number of processes differ"):
        of(Processes(rank=0, count=2)).read(2)
    with pytest.raises(SettingsError, match="the number of images differ"):
        of().read(0)
    with monkeypatch.context() as patch:
        patch.setattr(partial_statistics.hardware, "versions", lambda: {"torch": "1.0"})
        with pytest.raises(SettingsError, match="the version of torch, the version of diffusers"):
            of().read(4)
    with monkeypatch.context() as patch:
        patch.setattr(partial_statistics, "_code", lambda: "older")
        with pytest.raises(SettingsError, match="the code of sdquant differ"):
            of().read(4)
    pipe.scheduler.register_to_config(num_train_timesteps=999)
    with pytest.raises(SettingsError, match="the scheduler or the tokenizers differ"):
        of().read(4)
    pipe = _float()
    pipe.text_encoder.half()
    with pytest.raises(SettingsError, match="the weights differ"):
        of().read(4)
    pipe = _float()
    pipe.vae.get_parameter("decoder.conv_in.weight").data.mul_(1.5)
    with pytest.raises(SettingsError, match="the weights differ"):
        of().read(4)
    pipe = _float()
    assert of().read(4)[0] == 1
    statistics_file.write_statistics(file, {"x": torch.ones(1)}, {"task": of().task, "done": 1})
    with pytest.raises(SettingsError, match="an earlier version of sdquant wrote it"):
        of().read(4)
    file.write_bytes(file.read_bytes()[:-3])
    with pytest.raises(SettingsError, match="Cannot resume"):
        of().read(4)


def test_bounded(found: dict[str, torch.Tensor]) -> None:
    """Smaller blocks are the same numbers, where they lie along the diagonal."""
    least = calibrate(_float(), _task(limit="1.5MB", prompts=PROMPTS[:1], steps=1, gradients=0))
    whole = calibrate(_float(), _task(prompts=PROMPTS[:1], steps=1, gradients=0))
    assert sum(one.numel() * 4 for name, one in least.items() if name.endswith("moments")) <= 1_500_000
    key = f"unet.{CONV}.conv_general_dilated0_lhs.sum_of_moments"
    size = least[key].shape[1]
    assert 1 <= size < whole[key].shape[1] and not any("gradient2" in name for name in least)
    assert torch.allclose(least[key][0], whole[key][0, :size, :size], rtol=1e-5, atol=1e-3)
    with pytest.raises(SettingsError, match="mean squares of all inputs alone take"):
        calibrate(_float(), _task(limit=100))
    assert input_moments.block_size([4096, 64], 4 * (4 * 1024**2 + 64**2)) == 1024
    flux = [3072] * 418 + [12288] * 38 + [15360] * 38  # of 12 billion weights: more than the mean squares alone
    assert input_moments.block_size(flux, 10**9) == 64


@pytest.mark.parametrize("groups", [1, 4])
def test_rows_of_convolutions(groups: int) -> None:
    torch.manual_seed(0)
    layer = torch.nn.Conv2d(8, 8, 3, padding="same", padding_mode="reflect", groups=groups, dilation=2)
    x = torch.randn(2, 8, 7, 5)
    rows = input_moments.input_rows(layer, x)
    assert rows.shape == (2 * 7 * 5 * groups, 8 // groups * 9)
    assert len(input_moments.input_rows(layer, x, 10)) == 10 * groups
    first = (rows[::groups] @ layer.weight.flatten(1)[: 8 // groups].T).T
    assert torch.allclose(first.reshape(8 // groups, 2, 7, 5).transpose(0, 1), layer(x)[:, : 8 // groups] -
                          layer.bias[None, : 8 // groups, None, None], atol=1e-5)  # fmt: skip


def test_specs_read_them(file: Path) -> None:
    spec = with_statistics(registry.parse("int8"), str(file)).of_component("unet")
    one = spec.of(f"{CONV}.weight", (32, 32, 3, 3))
    moments = one.second_moments(32 * 9)
    assert moments is not None and moments.shape == (1, 288, 288) and one.magnitudes is not None
    with pytest.raises(SettingsError, match="is about 288 inputs, but it has 100"):
        one.second_moments(100)
    with pytest.raises(SettingsError, match="knows no such layer of the unet"):
        spec.of("nowhere.weight", (8, 8)).second_moments(8)
    with pytest.raises(SettingsError, match="knows no such layer"):
        calibrated_spec.require_magnitudes(spec, [("nowhere.weight", (8, 8))])
    with pytest.raises(SettingsError, match="use what calibration found"):
        sdquant.plan(path("digits-sd"), "int8", quant_stats=file)
    # SVDQuant takes the magnitudes from it, too.
    assert sdquant.plan(path("digits-sd"), "svdq-int4", quant_stats=file, components="unet").components


OTHER = "calibrated with other weights: the values that it keeps of 12 layers"


def test_statistics_of_other_weights_are_refused(file: Path, others: Path) -> None:
    with pytest.raises(SettingsError, match=OTHER) as error:
        sdquant.plan(others / "unet", "int4,gptq", quant_stats=file)
    assert "sdquant calibrate" in error.value.fix


@pytest.mark.slow  # the same check at each place where weights are quantized
def test_statistics_of_other_weights_are_refused_everywhere(file: Path, others: Path, tmp_path: Path) -> None:
    pipe, out = sdquant.load_model(others, progress=False), tmp_path / "x.safetensors"
    values: dict[str, Any] = {"components": ["unet"], "quant_stats": file}
    for use in (
        lambda: sdquant.plan(others, "auto", size="3MB", quant_stats=file),
        lambda: sdquant.plan(others, "svdq-int4", **values),
        lambda: sdquant.load_model(others, "int4,gptq", progress=False, **values),
        lambda: sdquant.quantize(pipe, "int4,gptq", progress=False, **values),
        lambda: sdquant.quantize(pipe, "auto", size="3MB", progress=False, quant_stats=file),
        lambda: quantize_file(others, "q4_k,imatrix", tmp_path / "x.gguf", **values),
        lambda: quantize_file(others, "auto", tmp_path / "x.gguf", size="2MB", **values),
        lambda: export_single_file.quantize_file(others, "comfy:nvfp4,gptq", out, **values),
        lambda: comfy_mix.write_comfy_mix(others, "auto", out, size="2MB", **values),
    ):
        with pytest.raises(SettingsError, match=OTHER):
            use()
    assert type(pipe.unet.conv_in) is torch.nn.Conv2d and not list(tmp_path.iterdir())


def test_statistics_of_a_near_copy_are_used(found: Any, file: Path, tmp_path: Path) -> None:
    """In another dtype, of a copy that was quantized, and of an older version, whose files do not say."""
    layers = [name.removesuffix(".weight") for name in ComponentStatistics(str(file), "unet")]
    unet = _float().unet
    weights = {f"{layer}.weight": unet.get_submodule(layer).weight.data for layer in layers}

    def check(change: Any) -> tuple[str, ...]:
        return weight_samples.refuse_other_weights(str(file), "unet", weights, lambda name: change(weights[name]))

    def through(scheme: str) -> Any:
        spec = registry.parse(scheme)
        return lambda weight: spec.scheme.codec.decode(spec.scheme.codec.encode(weight, spec), torch.float32)

    for near in (torch.Tensor.float, torch.Tensor.half, through("nf4")):
        assert check(near) == ()
    (line,) = check(through("qint2"))
    assert "away from those of the unet" in line
    with pytest.raises(SettingsError, match=OTHER):
        check(torch.Tensor.neg)
    older = tmp_path / "older.safetensors"
    statistics_file.write_statistics(
        older, {name: row for name, row in found.items() if not name.endswith(statistics_file.SAMPLE)}, {}
    )
    assert weight_samples.refuse_other_weights(str(older), "unet", weights, lambda name: -weights[name]) == ()


def test_a_quantized_model_is_not_calibrated() -> None:
    pipe = _float()
    sdquant.quantize(pipe, "nf4", components=["unet"], progress=False)
    for task in (_task(), _task(quant="svdq-int4")):
        with pytest.raises(ConflictError, match=r"(?s)quantized already \(nf4\).*sdquant dequantize"):
            prepare_models(pipe, task)


def test_the_command(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "stats.safetensors"
    words = ["calibrate", "digits-sd", "--prompt", PROMPTS[0], "--steps", "1", "--limit", "40MB", "-o", str(out)]
    assert main([*words, "--json"]) == 0
    said = json.loads(capsys.readouterr().out)
    assert said["components"] == ["text_encoder", "unet"] and said["layers"] > 100
    layers = ComponentStatistics(str(out), "text_encoder")
    assert layers.has_gradients and all(layers[name].sensitivity is not None for name in layers)
    assert out.stat().st_size < 40_000_000
    with pytest.raises(SystemExit):
        main([*words, "--overwrite", "--gradients", "-1"])


@pytest.mark.slow
def test_shared_out_over_processes(tmp_path: Path) -> None:
    one, several = tmp_path / "one.safetensors", tmp_path / "several.safetensors"
    words = ["calibrate", "digits-sd", "--steps", "2", "--components", "unet"]
    words += [word for digit in (1, 4, 9) for word in ("--prompt", digits.prompt(digit))]
    assert main([*words, "-o", str(one)]) == 0
    done = torchrun(2, *words, "-o", several, module=True)
    assert done.returncode == 0, done.stderr
    assert several.read_bytes() == one.read_bytes()
    assert sorted(file.name for file in tmp_path.iterdir()) == ["one.safetensors", "several.safetensors"]
