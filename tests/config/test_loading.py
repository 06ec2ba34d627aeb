"""Defaults, the file over them, overrides over it."""

from __future__ import annotations

import copy
import dataclasses
import logging
import pickle
from pathlib import Path
from typing import Any

import pytest
import yaml

from sdquant.errors import SdquantError, SettingsError, UnknownOffloadError
from sdquant.planning.request import Request
from sdquant.training import config
from sdquant.training.config import loading, quantization
from sdquant.training.config.value_types import KINDS

KEYS = config.keys()


def write(folder: Path, text: str) -> Path:
    path = folder / "config.yml"
    path.write_text(text, encoding="utf-8")
    return path


# The table.


def test_every_row_is_sound() -> None:
    assert len({row.name for row in KEYS}) == len(KEYS)
    for row in KEYS:
        assert row.kind in KINDS and row.origin in ("MaxDiffusion", "sdquant")
        assert row.commands and set(row.commands) <= {"generate", "train"}
        assert row.help and not row.help.endswith(".")
        assert loading.checked(row, row.default, row.name) == row.default


def test_maxdiffusions_keys_are_there_with_its_defaults() -> None:
    # base_wan_14b.yml and base21.yml of MaxDiffusion.
    assert {row.name: row.default for row in KEYS if row.name in MAXDIFFUSION} == MAXDIFFUSION
    assert {row.name for row in KEYS if row.origin == "MaxDiffusion"} >= set(MAXDIFFUSION)


MAXDIFFUSION = {
    "quantization": "",
    "quantization_local_shard_count": -1,
    "use_qwix_quantization": False,
    "qwix_module_path": ".*",
    "weight_quantization_calibration_method": "absmax",
    "act_quantization_calibration_method": "absmax",
    "bwd_quantization_calibration_method": "absmax",
    "compile_topology_num_slices": -1,
}


def test_every_field_of_a_request_can_be_said() -> None:
    """But a token, which is nothing for a file, and what is to say of one model's file."""
    fields = {row.field for row in KEYS} | {"rules", "quant_stats", "progress", "token", "config"}
    assert {row.name for row in dataclasses.fields(Request)} == fields - {""}


# Values.


@pytest.mark.parametrize(
    ("text", "name", "value"),
    [
        ("prompt=a = b", "prompt", "a = b"),
        ("prompt=", "prompt", ""),
        ("prompt=7", "prompt", "7"),
        ("seed=7", "seed", 7),
        ("seed=007", "seed", 7),
        ("guidance_scale=7", "guidance_scale", 7.0),
        ("guidance_scale=1e1", "guidance_scale", 10.0),
        ("guidance_scale=", "guidance_scale", None),
        ("width=null", "width", None),
        ("allow_pickle=TrUe", "allow_pickle", True),
        ("allow_pickle=false", "allow_pickle", False),
        ("skip=['a', \"b\"]", "skip", ("a", "b")),
        ('skip=["a"]', "skip", ("a",)),
        ("skip=()", "skip", ()),
        ("offload= Balanced ", "offload", "balanced"),
        ("budget=6GB", "budget", "6GB"),
        ("cache=true", "cache", "on"),
        ("cache=/tmp/here", "cache", "/tmp/here"),
        (" seed =1", "seed", 1),
    ],
)
def test_an_override(text: str, name: str, value: Any) -> None:
    made = config.load(None, ["offload=balanced", text] if name == "budget" else [text])
    assert made[name] == value and type(made[name]) is type(value)
    assert made.given[name] == "override"


def test_rules_as_an_override() -> None:
    words = ["use_qwix_quantization=true"]
    python = config.load(
        None, [*words, r"rules=[{'module_path': r'.*\.attn', 'weight_qtype': 'int8', 'tile_size': 32}]"]
    )
    json = config.load(None, [*words, r'rules=[{"module_path": ".*\\.attn", "weight_qtype": "int8", "tile_size": 32}]'])
    assert python.rules == json.rules
    assert dict(python.rules[0]) == {"module_path": r".*\.attn", "weight_qtype": "int8", "tile_size": 32}


def test_file_over_default_and_override_over_file(tmp_path: Path) -> None:
    path = write(tmp_path, "seed: 3\nnum_inference_steps: 4\nguidance_scale: 5\nskip: [mid]\n")
    made = config.load(path, ["seed=8", "seed=9"])
    assert (made.seed, made.num_inference_steps, made.guidance_scale, made.skip) == (9, 4, 5.0, ("mid",))
    assert made.prompt == "" and "prompt" not in made.given
    assert dict(made.given) == {
        "seed": "override", "num_inference_steps": "file", "guidance_scale": "file", "skip": "file",
    }  # fmt: skip


def test_a_whole_number_may_be_written_with_a_point(tmp_path: Path) -> None:
    made = config.load(write(tmp_path, "per_device_batch_size: 1.0\n"), ["seed=2.0"])
    assert made.per_device_batch_size == 1 and type(made.per_device_batch_size) is int and made.seed == 2


@pytest.mark.parametrize(
    ("text", "why", "fix"),
    [
        ("quantization_local_shard_count=1000000", "from -1 to 4096", "Use a number in this range"),
        ("compile_topology_num_slices=1000000", "from -1 to 4096", "Use a number in this range"),
        ("seed", "an override has the form key=value", "seed=1"),
        ("seed=x", "it is the text 'x', but seed must be a whole number from 0 to 9223372036854775807", "seed=4"),
        ("seed=-1", "from 0 to", "Use a number in this range"),
        ("seed=1.5", "it is the number 1.5", "seed=4"),
        ("seed=", "it has no value", "seed=4"),
        ("width=0", "at least 1, or null", "Use a number in this range"),
        ("guidance_scale=nan", "the text 'nan'", "guidance_scale=0.5"),
        ("guidance_scale=1e999", "the number inf", "guidance_scale=0.5"),
        ("guidance_scale=true", "the boolean true", "guidance_scale=0.5"),
        ("allow_pickle=yes", "the text 'yes', but allow_pickle must be true or false", "allow_pickle=true"),
        ("allow_pickle=1", "the text '1'", "allow_pickle=true"),
        ("skip=mid", "neither a Python literal nor JSON", "skip=\"['name']\""),
        ("skip='mid'", "the text 'mid'", "['name']"),
        ("skip=[1]", "it contains the number 1", "['name']"),
        ("skip=__import__('os').system('ls')", "neither a Python literal", "['name']"),
        ("rules=" + "[" * 100_000, "neither a Python literal", "weight_qtype"),
        ("sed=1", "there is no such key: the keys are pretrained_model_name_or_path, ", "Did you mean seed?"),
        ("quant=nf4", "no such key", "Did you mean quantization?"),
        ("path=digits-sd", "no such key", "Did you mean pretrained_model_name_or_path?"),
        ("steps=3", "no such key", "Did you mean num_inference_steps?"),
        ("zzz=3", "no such key", "Remove it"),
        ("mode=pree", "mode must be one of auto, pre, post", "Did you mean pre?"),
        ("learning_rate=1e-4", "learning_rate is a key of train, and generate does not use it", "Leave it out"),
        ("qwix_module_path=(", "not a valid regular expression", "attn"),
        ("weight_quantization_calibration_method=absmin", "the methods are absmax, minmax, rms, fixed", "absmax"),
        ("run_name=../x", "the name of one folder", "first-try"),
        ("output_dir=", "results need a folder", "."),
        ("compile_topology_num_slices=-2", "from -1 to", "Use a number in this range"),
        ("budget=6XB", "", "6GB"),
        ("tile_size=1.5", "a fraction", "0.25"),
    ],
)  # fmt: skip
def test_a_wrong_override(text: str, why: str, fix: str) -> None:
    with pytest.raises(SettingsError) as error:
        config.load(None, [text])
    assert text[:40] in error.value.what
    assert why in error.value.why and fix in error.value.fix


@pytest.mark.parametrize(
    ("text", "why"),
    [
        ("prompt: 7", "it is the number 7; quote it to make it text"),
        ("prompt: true", "the boolean true; quote it to make it text"),
        ("prompt:", "it has no value"),
        ("prompt: [a]", "it is a list"),
        ("seed: '3'", "the text '3'"),
        ("seed: true", "the boolean true"),
        ("use_qwix_quantization: 1", "the number 1"),
        ("use_qwix_quantization: yes", "the text 'yes'"),
        ("components: unet", "the text 'unet'"),
        ("rules: {weight_qtype: int8}", "it is a mapping"),
        ("guidance_scale: .nan", "the text '.nan'"),
        ("sed: 1", "there is no such key"),
    ],
)
def test_a_wrong_value_in_a_file(tmp_path: Path, text: str, why: str) -> None:
    path = write(tmp_path, f"# a comment\n{text}\n")
    with pytest.raises(SettingsError) as error:
        config.load(path)
    assert f"{path}, line 2 sets " in error.value.what and why in error.value.why


def test_the_kind_of_an_error_stays() -> None:
    with pytest.raises(SettingsError):
        config.load(None, command="draw")
    with pytest.raises(UnknownOffloadError):  # Request's own error, where a Request is made by hand
        Request(path="x", offload="balancd")


# One file for both commands.


def test_a_key_of_another_command_is_named_in_the_log(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    path = write(tmp_path, "prompt: seven\nlearning_rate: 1e-4\nmax_train_steps: 1000\n")
    with caplog.at_level(logging.INFO, "sdquant"):
        made = config.load(path)
        assert caplog.messages == [f"generate does not use these keys of {path}: learning_rate"]
        caplog.clear()
        assert config.load(path, command="train").learning_rate == made.learning_rate == 1e-4
        assert caplog.messages == [f"train does not use these keys of {path}: prompt"]


@pytest.mark.parametrize(
    "line",
    ["offload: balanced", "budget: 6GB", "mode: post", "compute: int8", "cache: on", "cache_limit: 1GB"],
)
def test_a_key_of_loading_that_training_has_not_is_refused(tmp_path: Path, line: str) -> None:
    name = line.partition(":")[0]
    path = write(tmp_path, f"lora_rank: 2\n{line}\n")
    with pytest.raises(SettingsError, match=rf"^{path}, line 2 sets {name}: .*: {name} is a key of generate") as caught:
        config.load(path, command="train")
    assert f"add {name}=" in caught.value.fix
    if name != "budget":  # which is for balanced
        assert config.load(path)[name] == line.partition(": ")[2]
    default = next(row.default for row in KEYS if row.name == name)
    config.load(write(tmp_path, f"{name}: {loading.format_value(default)}\n"), command="train")  # which says nothing


def test_the_keys_of_loading_that_training_has_not() -> None:
    names = {row.name for row in KEYS if row.field and "train" not in row.commands}
    assert names == {"offload", "budget", "mode", "compute", "cache", "cache_limit", "size", "quality"}


@pytest.mark.parametrize(
    ("text", "beside", "why"),
    [
        ("lora_alpha: 8", [], "lora_rank is 0"),
        ("lora_dropout: 0.5", [], "lora_rank is 0"),
        ("lora_target_modules: [to_q]", [], "lora_rank is 0"),
        ("dtype: bfloat16", ["lora_rank=2"], "LoRA weights are always float32"),
        ("components: [unet]", [], "nothing is quantized"),
        ("skip: [mid]", [], "nothing is quantized"),
        ("runtime: plain", [], "nothing is quantized"),
        ("caption_column: said", ["dataset_name=digits"], "has its own captions"),
        ("warmup_steps_fraction: 0.5", ["lr_scheduler=constant"], "has no warmup"),
    ],
)
def test_a_key_of_training_without_effect(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, text: str, beside: list[str], why: str
) -> None:
    path, name = write(tmp_path, text), text.partition(":")[0]
    config.load(path, beside, command="train")
    (said,) = caplog.messages
    assert said.startswith(f"{name} of {path} has no effect here: ") and why in said
    value = text.partition(": ")[2].replace("[", "['").replace("]", "']")
    with pytest.raises(SettingsError, match=why):
        config.load(None, [*beside, f"{name}={value}"], command="train")


def test_a_wrong_value_of_another_commands_key_is_refused(tmp_path: Path) -> None:
    with pytest.raises(SettingsError, match="learning_rate must be a number"):
        config.load(write(tmp_path, "learning_rate: fast\n"))


def test_a_key_without_effect(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    words = ["use_qwix_quantization=true", "quantization=int8_wo"]
    path = write(tmp_path, "act_quantization_calibration_method: rms,7\n")
    config.load(path, words)
    assert caplog.messages == [
        f"act_quantization_calibration_method of {path} has no effect here: no rule quantizes activations"
    ]
    with pytest.raises(SettingsError, match="no rule quantizes activations"):
        config.load(None, [*words, "act_quantization_calibration_method=rms,7"])


# The result.


def test_it_cannot_be_changed() -> None:
    made = config.load(None, ["skip=['a']", "use_qwix_quantization=true", "rules=[{'weight_qtype': 'int8'}]"])
    with pytest.raises(AttributeError, match="cannot be set"):
        made.seed = 1
    with pytest.raises(AttributeError, match="cannot be deleted"):
        del made.seed
    with pytest.raises(TypeError):
        made.rules[0]["weight_qtype"] = "int4"
    with pytest.raises(AttributeError, match="did you mean 'seed'"):
        made.sed  # noqa: B018
    assert copy.deepcopy(made) == made == pickle.loads(pickle.dumps(made))
    assert hash(copy.deepcopy(made)) == hash(made)
    assert made != config.load(None)


@pytest.mark.parametrize("command", ["generate", "train"])
def test_what_is_written_is_read_back(tmp_path: Path, command: str) -> None:
    texts = [
        "",
        "1e5",
        "null",
        "on",
        "a: b # c",
        "\"'\\",
        "tab\tnew\nline",
        "äλ漢😀",
        "\x7f\x85\u2028\U000e0001",
        "- x",
        "!t",
        "&a",
    ]
    rows = [{"module_path": text, "weight_qtype": "int8", "tile_size": 0.5} for text in texts if "\\" not in text]
    for text in texts:
        rest = ["use_qwix_quantization=true", f"rules={rows!r}", "seed=12345678901234567"]
        mine = f"prompt={text}" if command == "generate" else "learning_rate=1e-7"
        made = config.load(None, [mine, *rest], command=command)
        written = made.to_yaml()
        again = config.load(write(tmp_path, written), command=command)
        assert again == made
        names = [row.name for row in KEYS if command in row.commands]
        # Another reader of YAML, of version 1.1.
        assert yaml.safe_load(written) == {name: made.to_dict()[name] for name in names}
        assert [line.partition(":")[0] for line in written.split("\n")[1::2]] == names


def test_the_order_of_errors_is_the_order_of_words() -> None:
    with pytest.raises(SdquantError, match="first"):
        config.load(None, ["first=1", "second=2"])


def test_quantization_is_checked_while_loading(tmp_path: Path) -> None:
    with pytest.raises(SdquantError, match="fp8_full is a preset of the rule engine"):
        config.load(write(tmp_path, "quantization: fp8_full\n"))
    assert quantization.quantization_of(config.load(None)) == quantization.Quantization()


def test_a_shipped_file_goes_by_its_name_unless_there_is_another(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    assert config.load("digits-flux.yml").pretrained_model_name_or_path == "digits-flux"
    (tmp_path / "digits-flux.yml").write_text("pretrained_model_name_or_path: mine\n")
    assert config.load("digits-flux.yml").pretrained_model_name_or_path == "mine"
    with pytest.raises(SettingsError):
        config.load("examples/digits-flux.yml")
