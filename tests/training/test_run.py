"""Whole trainings of the shipped model: a few steps each."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
import torch
from PIL import Image
from safetensors.torch import load_file

import sdquant
from sdquant import cli
from sdquant.errors import BadFileError, DiskSpaceError, IncompatibleError, SettingsError, TrainingError
from sdquant.training import checkpoints, config, metrics_log, samples
from sdquant.training.config.generate import draw_config
from sdquant.training.config.loading import EXAMPLES
from sdquant.training.metrics_log import Line, read
from sdquant.training.run import train
from sdquant.utils import atomic_write, figure

if TYPE_CHECKING:
    from sdquant.training.settings import TrainingSettings

    from .conftest import Short

UNET = "model/unet/diffusion_pytorch_model.safetensors"


def _lines(folder: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (folder / "log.jsonl").read_text().splitlines()]


def _same(one: Path, other: Path) -> bool:
    a, b = load_file(one), load_file(other)
    return a.keys() == b.keys() and all(torch.equal(a[name], b[name]) for name in a)


def test_what_is_written(short: Short, tmp_path: Path, sd: Path) -> None:
    done = short(checkpoint_every=1, sample_every=2)
    run = tmp_path / "run"
    assert sorted(path.name for path in run.iterdir()) == [
        "checkpoints", "config.yml", "log.jsonl", "loss.png", "model", "samples"
    ]  # fmt: skip
    assert [line["step"] for line in _lines(run)] == [1, 2, 3, 4]
    assert [row.step for row in checkpoints.found(run / "checkpoints")] == [3, 4]
    assert sorted(path.name for path in (run / "samples").iterdir()) == ["step-2.png", "step-4.png"]
    assert (done.steps, done.begun, done.examples) == (4, 0, 4)
    before, after = load_file(sd / "unet/diffusion_pytorch_model.safetensors"), load_file(run / UNET)
    assert {name: (row.shape, row.dtype) for name, row in before.items()} == {
        name: (row.shape, row.dtype) for name, row in after.items()
    }
    assert sum(not torch.equal(before[name], after[name]) for name in before) > len(before) // 2
    assert done.weights == sum(row.numel() for row in before.values())
    image = sdquant.load_model(run / "model", progress=False)("a handwritten seven", num_inference_steps=1).images[0]
    assert image.size == (32, 32)


@pytest.mark.parametrize("steps", [1, 2, 300])
def test_the_curve_shows_the_loss(steps: int, monkeypatch: pytest.MonkeyPatch) -> None:
    lines = [Line(step=step, loss=1 / step, lr=1e-4, grad_norm=1.0) for step in range(1, steps + 1)]
    assert metrics_log.curve(lines, "Loss of $run").width == 960
    monkeypatch.setattr(figure, "rendered", lambda drawn: drawn)
    drawn = metrics_log.curve(lines, "Loss of $run")
    (axes,) = drawn.axes
    each, means = axes.lines
    assert list(each.get_xdata()) == list(range(1, steps + 1)) and each.get_ydata()[-1] == 1 / steps
    assert list(means.get_ydata()) == metrics_log.smoothed([line.loss for line in lines])
    assert (axes.get_xlabel(), axes.get_ylabel(), drawn.get_suptitle()) == ("step", "loss", "Loss of $run")
    assert axes.get_xlim() == (1, max(steps, 2)) and axes.get_ylim()[0] == 0
    assert all(tick.is_integer() for tick in axes.get_xticks())


def test_a_sheet_of_samples_shows_the_pictures(monkeypatch: pytest.MonkeyPatch) -> None:
    pictures = [Image.effect_noise((32, 32), 50) for _ in range(7)]
    render = figure.rendered
    monkeypatch.setattr(figure, "rendered", lambda drawn: drawn)
    drawn = samples.sample_sheet(pictures, ["a long prompt " * 9, "", *["seven"] * 5], "run, step 2", "2 steps")
    image, prompts = render(drawn), [axes.get_xlabel() for axes in drawn.axes]
    assert prompts[0].count("\n") == 1 and prompts[0].endswith("\u2026")
    assert prompts[1:] == ["(empty prompt)", *["seven"] * 5, *[""] * 5]
    for axes, picture in zip(drawn.axes, pictures, strict=False):
        left, top = round(axes.bbox.x0), round(image.height - axes.bbox.y1)
        shown = image.crop((left, top, left + 128, top + 128))
        assert shown == picture.convert("RGB").resize((128, 128), Image.Resampling.NEAREST)


def test_resumed_is_bit_identical(short: Short, tmp_path: Path) -> None:
    same: dict[str, Any] = {"ema": 0.9, "gradient_accumulation_steps": 2, "lr_scheduler": "linear"}
    short(run_name="whole", checkpoint_every=0, **same)
    short(run_name="broken", checkpoint_every=2, **same)
    broken = tmp_path / "broken"
    log = (broken / "log.jsonl").read_text()
    for name in ("model", "checkpoints/step-4", "loss.png"):
        atomic_write.remove(broken / name)  # as if it had been killed after step 3
    (broken / "log.jsonl").write_text(log[: log.index('{"step": 4')] + '{"step": 4, "lo')
    done = short(run_name="broken", checkpoint_every=2, resume="latest", **same)
    assert (done.begun, done.steps) == (2, 4)
    assert (broken / "log.jsonl").read_bytes() == (tmp_path / "whole/log.jsonl").read_bytes()
    for name in (UNET, "checkpoints/step-4/trained.safetensors"):
        assert _same(broken / name, tmp_path / "whole" / name)
    pictures = [(tmp_path / run / "samples/step-4.png").stat().st_size for run in ("whole", "broken")]
    assert min(pictures) > 500


def test_resume_is_told_where_from(short: Short, settings: Callable[..., TrainingSettings], tmp_path: Path) -> None:
    with pytest.raises(SettingsError, match="there is no checkpoint"):
        short(resume="latest")
    short(max_train_steps=2, checkpoint_every=1)
    with pytest.raises(SettingsError, match=r"up to step 2.*resume=latest"):
        short()
    with pytest.raises(SettingsError, match="the checkpoints are step-1, step-2"):
        short(resume="step-7")
    with pytest.raises(SettingsError, match=r"learning_rate=0.5.*began with 0.0001"):
        short(resume="latest", learning_rate=0.5)
    weights = tmp_path / "run/checkpoints/step-2/trained.safetensors"
    weights.write_bytes(weights.read_bytes()[:1000])
    with pytest.raises(BadFileError, match=r"step-2.*damaged"):
        short(resume="latest")
    assert short(resume="step-1", max_train_steps=3, checkpoint_every=0).steps == 3
    assert [row.step for row in checkpoints.found(tmp_path / "run/checkpoints")] == [1, 3]  # step 2 was left behind


@pytest.mark.slow
def test_the_loss_goes_down(short: Short, tmp_path: Path) -> None:
    """Four pictures, learnt by heart: from a network that is far off at first."""
    short(
        max_train_steps=20, learning_rate=2.0e-3, cond_dropout=0.0, warmup_steps_fraction=0.0, lr_scheduler="constant"
    )
    losses = [line.loss for line in read(tmp_path / "run/log.jsonl")]
    assert sum(losses[-10:]) < 0.8 * sum(losses[:10])


def test_a_loss_that_is_not_finite_names_the_step(short: Short, tmp_path: Path) -> None:
    with pytest.raises(TrainingError, match=r"diverged at step [2-4].*last checkpoint is from step"):
        short(learning_rate=1.0e30, max_grad_norm=0, warmup_steps_fraction=0.0, checkpoint_every=1)
    assert not (tmp_path / "run/model").exists()


def test_no_room_is_said_before_the_first_step(short: Short, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(atomic_write, "_free", lambda _: 1 << 20)
    with pytest.raises(DiskSpaceError, match="checkpoints"):
        short()
    assert not (tmp_path / "run").exists()


@pytest.mark.slow
def test_precision_and_distillation(short: Short, tmp_path: Path) -> None:
    """The teacher is the network as it was: the first answers are its own, up to bfloat16's rounding."""
    done = short(mixed_precision="bf16", distillation=True, learning_rate=1e-6, max_train_steps=2)
    assert 0 < done.first_loss < 1e-3
    exact = short(run_name="exact", distillation=True, max_train_steps=1)
    assert exact.first_loss == 0


@pytest.mark.parametrize(
    ("number", "code"),
    [(signal.SIGINT, 130), pytest.param(signal.SIGTERM, 143, marks=pytest.mark.slow)],
)
def test_interrupted_after_a_step(
    number: signal.Signals, code: int, written: Callable[..., Path], tmp_path: Path
) -> None:
    log = tmp_path / "run/log.jsonl"
    made = subprocess.Popen(
        [sys.executable, "-m", "sdquant", "train", str(written(max_train_steps=10_000))],
        stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=os.environ | {"OMP_NUM_THREADS": "1"},
    )  # fmt: skip
    while made.poll() is None and not (log.exists() and len(read(log)) > 2):
        time.sleep(0.02)
    made.send_signal(number)
    out, err = made.communicate(timeout=60)
    assert (made.returncode, out) == (code, ""), err
    assert "continue with resume=latest" in err and "Traceback" not in err
    (kept,) = checkpoints.found(tmp_path / "run/checkpoints")
    assert kept.step == read(log)[-1].step >= 3
    assert sorted(path.name for path in (tmp_path / "run").iterdir()) == [
        "checkpoints", "config.yml", "log.jsonl", "loss.png"
    ]  # fmt: skip


def test_the_command(capsys: pytest.CaptureFixture[str], written: Callable[..., Path], tmp_path: Path) -> None:
    file = str(written(run_name="one"))
    assert cli.main(["train", file, "max_train_steps=1", "--json"]) == 0
    done = json.loads(capsys.readouterr().out)
    assert (done["steps"], done["examples"], done["folder"]) == (1, 4, str(tmp_path / "one"))
    assert config.load(tmp_path / "one/config.yml", command="train").max_train_steps == 1
    assert cli.main(["train", file, "max_train_steps=2", "resume=latest"]) == 0
    table = capsys.readouterr().out
    assert "2, the first 1 before" in table and "one/loss.png" in table
    assert cli.main(["train", file]) == 2
    assert "resume=latest" in capsys.readouterr().err


@pytest.mark.parametrize("offload", ["balanced", "model"])
def test_an_offload_mode_is_refused_before_anything_is_written(
    offload: str, capsys: pytest.CaptureFixture[str], written: Callable[..., Path], short: Short, tmp_path: Path
) -> None:
    """Whether the file asks for it, or the command line, or a config that was read for another command."""
    lora = {"lora_rank": 2, "offload": offload}
    file = str(written(**lora))
    assert cli.main(["train", file]) == 2
    said = capsys.readouterr().err
    assert f'sets offload: "{offload}"' in said and "offload is a key of generate" in said
    assert cli.main(["train", str(written(lora_rank=2)), f"offload={offload}"]) == 2
    assert "offload is a key of generate" in capsys.readouterr().err
    with pytest.raises(SettingsError, match=f'sets offload: "{offload}"'):
        short(**lora)
    with pytest.raises(SettingsError, match="loaded for generate to train"):
        train(config.load(file))
    assert not (tmp_path / "run").exists()


def test_a_config_for_training_draws_nothing(asked: Callable[..., config.RunConfig], tmp_path: Path) -> None:
    with pytest.raises(SettingsError, match="loaded for train to generate"):
        draw_config(asked(), tmp_path)


def test_a_guidance_that_the_network_has_no_input_for_is_told(short: Short, caplog: pytest.LogCaptureFixture) -> None:
    short(max_train_steps=1, guidance_max=4.0)
    assert "guidance_max has no effect here: a UNet2DConditionModel has no guidance input" in caplog.messages


RULES = {"use_qwix_quantization": True, "rules": [{"weight_qtype": "int4", "act_qtype": "int8"}]}


def test_quantized_training(short: Short, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """The network is trained with its weights in int4; what is written are floats, for the same rules."""
    done = short(distillation=True, max_train_steps=2, checkpoint_every=0, **RULES)
    assert not caplog.records  # no rule is said to match nothing
    assert done.first_loss > 1e-3  # how far int4 is off, which the teacher is not
    state = load_file(tmp_path / "run" / UNET)
    assert {row.dtype for row in state.values()} == {torch.bfloat16}
    model = sdquant.load_model(tmp_path / "run/model", rules=RULES["rules"], progress=False)
    assert {weight.scheme for part in model.sdquant.plan.components for weight in part.weights} == {"rules"}


@pytest.mark.slow
def test_stochastic_rounding_is_resumed_bit_for_bit(short: Short, tmp_path: Path) -> None:
    rule = {"weight_qtype": "int8", "act_qtype": "int8", "bwd_qtype": "int8", "bwd_stochastic_rounding": "uniform"}
    rules = {
        "use_qwix_quantization": True,
        "rules": [{"module_path": r"mid_block.*attn1\.to_q", **rule}],
        "components": ["unet"],
    }
    short(run_name="whole", max_train_steps=3, checkpoint_every=0, **rules)
    short(run_name="broken", max_train_steps=3, checkpoint_every=2, **rules)
    atomic_write.remove(tmp_path / "broken/checkpoints/step-3")
    assert short(run_name="broken", max_train_steps=3, resume="latest", **rules).begun == 2
    assert _same(*(tmp_path / run / "checkpoints/step-3/trained.safetensors" for run in ("whole", "broken")))


@pytest.mark.slow
def test_the_example(tmp_path: Path) -> None:
    """Three bits for everything: after 20 steps the network is nearer to what it was."""
    words = ["max_train_steps=20", "warmup_steps_fraction=0", "lr_scheduler=constant_with_warmup", "sample_every=0"]
    file = EXAMPLES / "digits-train.yml"
    done = train(config.load(file, [*words, f"output_dir={tmp_path}"], command="train"))
    losses = [line.loss for line in read(tmp_path / "digits-w3a3/log.jsonl")]
    assert done.steps == 20 and sum(losses[-5:]) < 0.8 * sum(losses[:5])


def test_a_lora(short: Short, tmp_path: Path, sd: Path) -> None:
    """Its file is small, changes the pipeline that it is loaded into, and only its weights are in checkpoints."""
    done = short(lora_rank=2, lora_dropout=0.1, checkpoint_every=2, learning_rate=1e-2)
    (file,) = (tmp_path / "run/lora").iterdir()
    assert done.model == str(tmp_path / "run/lora") and file.name == "pytorch_lora_weights.safetensors"
    rows = load_file(file)
    assert sum(row.numel() for row in rows.values()) == done.weights and all("lora" in name for name in rows)
    kept = load_file(tmp_path / "run/checkpoints/step-4/trained.safetensors")
    assert sum(row.numel() for row in kept.values()) == done.weights
    pipe = sdquant.load_model(sd, dtype="float32", progress=False)
    x, t, states = torch.randn(1, 4, 8, 8), 3, torch.randn(1, 16, pipe.unet.config.cross_attention_dim)
    with torch.no_grad():
        before = pipe.unet(x, t, states).sample
        pipe.load_lora_weights(tmp_path / "run/lora")
        assert not torch.equal(pipe.unet(x, t, states).sample, before)
    atomic_write.remove(tmp_path / "run/checkpoints/step-4")
    atomic_write.remove(tmp_path / "run/lora")
    again = short(lora_rank=2, lora_dropout=0.1, checkpoint_every=2, learning_rate=1e-2, resume="latest")
    assert again.begun == 2
    assert all(torch.equal(rows[name], row) for name, row in load_file(file).items())


@pytest.mark.slow
def test_a_lora_on_quantized_weights(short: Short, sd: Path, tmp_path: Path) -> None:
    """It is trained on packed weights, towards the answers of the unquantized network, and goes onto packed ones."""
    done = short(lora_rank=2, lora_alpha=4, quantization="nf4", distillation=True, learning_rate=1.0e-2)
    assert done.first_loss > 1e-4  # how far nf4 is off its teacher
    pipe = sdquant.load_model(sd, "nf4", dtype="float32", progress=False)
    x, t, states = torch.randn(1, 4, 8, 8), 3, torch.randn(1, 16, pipe.unet.config.cross_attention_dim)
    with torch.no_grad():
        before = pipe.unet(x, t, states).sample
        pipe.load_lora_weights(tmp_path / "run/lora")
        assert not torch.equal(pipe.unet(x, t, states).sample, before)


@pytest.mark.parametrize(
    "values",
    [
        {"quantization": "int8", "qwix_module_path": "nothing"},
        {"quantization": "int8", "qwix_module_path": "encoder.*"},  # of the text encoder, which is not trained
        {"rules": [{"module_path": "nothing", "op_names": ["einsum"], "act_qtype": "int8"}]},
    ],
)
def test_rules_that_reach_nothing_in_the_network_are_refused(
    values: dict[str, Any], short: Short, tmp_path: Path
) -> None:
    with pytest.raises(IncompatibleError, match="no weight that would be quantized"):
        short(run_name="none", use_qwix_quantization=True, distillation=True, **values)
    assert not (tmp_path / "none").exists()


def test_rules_for_products_alone_train(short: Short) -> None:
    rules = [{"module_path": ".*attn.*", "op_names": ["einsum"], "act_qtype": "int4"}]
    floats = short(run_name="floats", max_train_steps=1)
    done = short(run_name="products", max_train_steps=1, use_qwix_quantization=True, rules=rules)
    assert done.first_loss != floats.first_loss


@pytest.mark.parametrize("preset", ["int8", "fp8_full"])
def test_shards_that_do_not_divide_the_batch_are_refused_first(preset: str, short: Short, tmp_path: Path) -> None:
    values = {"use_qwix_quantization": True, "quantization": preset, "quantization_local_shard_count": 4}
    if preset == "int8":
        values = {"use_qwix_quantization": True, "rules": [
            {"weight_qtype": "int8", "act_qtype": "int8", "bwd_qtype": "int8", "bwd_weight_grad_shards": 4}
        ]}  # fmt: skip
    with pytest.raises(SettingsError, match="each shard is an equal part of the batch"):
        short(run_name="shards", per_device_batch_size=6, **values)
    assert not (tmp_path / "shards").exists()
