"""`sdquant generate CONFIG.yml key=value` on the shipped models."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image

import sdquant
from sdquant import cli
from sdquant.models.generate import draw
from sdquant.training import config
from sdquant.training.config.loading import EXAMPLES

Capture = pytest.CaptureFixture[str]
TEXT = """
pretrained_model_name_or_path: digits-sd
prompt: a handwritten seven
num_inference_steps: 2
run_name: first
"""
KEYS = config.keys()
PROMPT = "a handwritten seven"


@pytest.fixture
def file(tmp_path: Path) -> Path:
    path = tmp_path / "config.yml"
    path.write_text(f"{TEXT}output_dir: {tmp_path / 'out'}\n", encoding="utf-8")
    return path


def run(capsys: Capture, *words: str | Path) -> tuple[int, str, str]:
    """Exit code, stdout and stderr of `sdquant generate`."""
    code = cli.main(["generate", *map(str, words)])
    out, err = capsys.readouterr()
    return code, out, err


def refused(capsys: Capture, *words: str | Path) -> str:
    """What argparse says before it stops."""
    with pytest.raises(SystemExit) as stopped:
        cli.main(["generate", *map(str, words)])
    assert stopped.value.code == 2
    return capsys.readouterr().err


def pixels(image: Any) -> Any:
    return np.asarray(image.convert("RGB"))


def plain(**asked: Any) -> Any:
    """The picture of seed 0 that `load_model` itself gives."""
    pipe = sdquant.load_model(sdquant.demo.path("digits-sd"), progress=False, **asked)
    (image,) = draw(pipe, [PROMPT], seeds=[0], steps=2)
    return pixels(image)


def test_no_quantization_changes_nothing(capsys: Capture, file: Path, tmp_path: Path) -> None:
    # All that is left of a config which quantized: the switch of the engine, and its methods.
    code, out, err = run(capsys, file, "use_qwix_quantization=true", "quantization=")
    picture = tmp_path / "out/first/0.png"
    assert (code, out, err) == (0, f"{picture}\n", "")
    assert np.array_equal(pixels(Image.open(picture)), plain())
    # Another type of weights is seen in the picture, so that this equality says something.
    assert not np.array_equal(plain(), plain(quant="nf4"))


def test_a_preset_is_its_rules(capsys: Capture, file: Path, tmp_path: Path) -> None:
    words = ["use_qwix_quantization=true", "quantization=nf4", "components=['unet']", "count=2"]
    code, out, _ = run(capsys, file, "--json", *words)
    made = json.loads(out)
    assert code == 0 and made["seeds"] == [0, 1]
    assert made["pictures"] == [str(tmp_path / f"out/first/{seed}.png") for seed in (0, 1)]
    assert made["shards"]["count"] >= 1
    rules = [
        {"op_names": ["linear"], "weight_qtype": "nf4", "tile_size": 32},
        {"op_names": ["conv2d"], "weight_qtype": "int8"},
    ]
    assert np.array_equal(pixels(Image.open(made["pictures"][0])), plain(rules=rules, components=["unet"]))
    # The config that was written says the same again.
    again = config.load(made["config"])
    assert again == config.load(file, words)
    shutil.move(made["config"], tmp_path / "again.yml")
    assert run(capsys, tmp_path / "again.yml", "run_name=second", "count=1")[0] == 0
    assert (tmp_path / "out/second/0.png").read_bytes() == (tmp_path / "out/first/0.png").read_bytes()


def test_a_negative_prompt_counts(capsys: Capture, file: Path, tmp_path: Path) -> None:
    assert run(capsys, file, "negative_prompt=a handwritten one", "run_name=negative")[0] == 0
    assert not np.array_equal(pixels(Image.open(tmp_path / "out/negative/0.png")), plain())
    _, _, err = run(capsys, file, "negative_prompt=one", "guidance_scale=1")
    assert "with a guidance of 1 it has no effect" in err
    _, _, err = run(capsys, file, "negative_prompt=one", "pretrained_model_name_or_path=digits-flux")
    assert "it does not support one" in err


@pytest.mark.parametrize(
    ("words", "why"),
    [
        (("seed=x",), "seed must be a whole number"),
        (("learning_rate=1",), "a key of train"),
        (("resolution=8", "width=8", "height=8"), "resolution sets both width and height"),
        (("pretrained_model_name_or_path=",), "it is the model"),
        (("budget=6GB",), "only balanced offload keeps to a budget"),
        (("device=fpu",), "the kinds of device are"),
    ],
)
def test_what_is_refused(capsys: Capture, file: Path, tmp_path: Path, words: tuple[str, ...], why: str) -> None:
    code, out, err = run(capsys, file, "--json", *words)
    assert code == 2 and why in err
    assert why in json.loads(out)["error"]["why"]
    assert not (tmp_path / "out").exists()


def test_a_folder_that_cannot_be(capsys: Capture, file: Path) -> None:
    code, _, err = run(capsys, file, f"output_dir={file}/in")
    assert code == 2 and f"{file} is not a folder that you can write to" in err


def test_a_config_without_a_prompt(capsys: Capture, file: Path) -> None:
    file.write_text("pretrained_model_name_or_path: digits-sd\n", encoding="utf-8")
    code, _, err = run(capsys, file)
    assert code == 2 and "prompt is not set" in err


@pytest.mark.parametrize(
    ("words", "why"),
    [
        (("--steps", "5"), "--steps cannot be used with a config file: write num_inference_steps=5"),
        (("-q", "nf4"), "write quantization=nf4"),
        (("--offload", "model"), "write offload=model"),
        (("--out", "x.png"), "write output_dir=x.png"),
        (("--allow-pickle",), "write allow_pickle=VALUE"),
    ],
)
def test_a_flag_of_the_other_form_names_its_key(capsys: Capture, file: Path, words: tuple[str, ...], why: str) -> None:
    assert why in refused(capsys, file, *words)
    assert why in refused(capsys, *words, file)
    assert why in refused(capsys, file, "seed=1", *words, "count=2")


def test_every_flag_of_the_other_form_has_a_key() -> None:
    form = next(sub.choices["generate"].form for sub in cli.parser()._actions if isinstance(sub.choices, dict))
    assert form is not None
    missing = [row.option_strings for row in form._actions if getattr(row, "key", None) == ""]
    # A secret has no place in a file.
    assert missing == [["--token"]]


def test_a_mix_of_a_size(file: Path) -> None:
    """With statistics, or as an option of auto; not beside rules."""
    words = ["size=2MB", "quant_stats=stats.safetensors"]
    request = config.request_of(config.load(file, words, command="generate"))
    assert (request.quant, request.size_bytes, request.quant_stats) == ("auto", 2_000_000, "stats.safetensors")
    made = config.request_of(config.load(file, ["quantization=auto", "quality=30"], command="generate"))
    assert (made.quant, made.quality) == ("auto", 30.0)
    with pytest.raises(sdquant.SettingsError, match="needs quant='auto'"):
        config.request_of(config.load(file, ["size=2MB", "quantization=nf4"], command="generate"))
    with pytest.raises(sdquant.SettingsError, match="size"):
        config.load(file, ["size=much"], command="generate")


def test_the_form_with_a_model_is_as_it_was(capsys: Capture, tmp_path: Path) -> None:
    assert "the following arguments are required: PROMPT" in refused(capsys, "digits-sd")
    assert "unrecognized arguments: seed=1" in refused(capsys, "digits-sd", PROMPT, "seed=1")
    out = tmp_path / "a.png"
    code, _, _ = run(capsys, "digits-sd", "--steps", "1", "write a.yml", "-o", out)
    assert code == 0 and out.exists()


def test_the_keys_are_listed(capsys: Capture) -> None:
    code, out, _ = run(capsys, "--keys")
    names = [row.name for row in KEYS if "generate" in row.commands]
    assert code == 0 and [line.split()[0] for line in out.splitlines()[2:]] == names
    code, out, _ = run(capsys, "--keys", "--json")
    rows = {row["name"]: row for row in json.loads(out)}
    assert code == 0 and list(rows) == names
    assert rows["offload"]["choices"] == ["none", "model", "sequential", "balanced", "group", "auto"]
    assert rows["quantization"]["origin"] == "MaxDiffusion"


def test_help_tells_of_the_other_form(capsys: Capture, file: Path) -> None:
    for words, told in (((), "CONFIG.yml [key=value ...]"), ((file,), "a key's value instead of the file's")):
        with pytest.raises(SystemExit) as stopped:
            cli.main(["generate", *map(str, words), "--help"])
        assert stopped.value.code == 0 and told in capsys.readouterr().out


# The examples.


@pytest.mark.parametrize("name", ["digits-sd", "digits-flux", "digits-train"])
def test_an_example(name: str) -> None:
    path = EXAMPLES / f"{name}.yml"
    made = config.load(path, command="train" if name == "digits-train" else "generate")
    assert Path(config.request_of(made).path).parent == sdquant.demo.path("digits-sd").parent
    lines = path.read_text(encoding="utf-8").splitlines()
    keyed = [number for number, line in enumerate(lines) if line and not line.startswith("#")]
    assert [lines[number].partition(":")[0] for number in keyed] == list(made.given)
    assert all(lines[number - 1].startswith("# ") and lines[number - 1].endswith(".") for number in keyed)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["digits-sd", "digits-flux"])
def test_an_example_draws(capsys: Capture, tmp_path: Path, name: str) -> None:
    code, out, _ = run(capsys, EXAMPLES / f"{name}.yml", f"output_dir={tmp_path}", "--json")
    made = json.loads(out)
    assert code == 0 and len(made["pictures"]) == (4 if name == "digits-sd" else 2)
    assert len({Path(picture).read_bytes() for picture in made["pictures"]}) == len(made["pictures"])
