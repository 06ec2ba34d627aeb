"""Arguments by other loaders' names, and misspelled ones: an answer, never a TypeError."""

from __future__ import annotations

import inspect
from dataclasses import fields
from pathlib import Path
from typing import Any

import pytest

import sdquant
from sdquant import offload
from sdquant.cli import main
from sdquant.core.choices import OFFLOAD_MODES
from sdquant.errors import SettingsError
from sdquant.planning.request import Request, make_request
from sdquant.training.config import load as load_config
from sdquant.utils.arguments import ANSWERS, LOAD_MODEL_ARGUMENTS

NAMES = ("load_model", "plan", "check", "quantize", "save", "detect", "verify", "dequantize", "Config")
CALLS: dict[str, Any] = {name: getattr(sdquant, name) for name in NAMES}
LOADING = {row.name for row in fields(Request)}


@pytest.mark.parametrize("name", CALLS)
def test_no_call_ends_in_a_type_error(name: str) -> None:
    mine = inspect.signature(CALLS[name]).parameters  # of quantize and save the first is `model`
    for argument in {*ANSWERS, "offlod", "colour", "QUANT"} - mine.keys():
        with pytest.raises(SettingsError) as error:
            CALLS[name]("nf4", **{argument: None})
        assert f"{argument}= is not an argument of" in error.value.what and error.value.why and error.value.fix


def test_answers_name_what_there_is() -> None:
    """What they say to use exists, by every name that they use it by."""
    public = LOADING | {"overwrite", "portable"}
    for name, row in ANSWERS.items():
        assert name not in LOADING, name
        assert row.use in public or not row.use, name
        said = {word.partition("=")[0] for word in row.fix.replace("(", " ").split() if "=" in word}
        assert {word.strip('",.') for word in said if "." not in word and word.islower()} <= public | {"controlnet"}, (
            name
        )


@pytest.mark.parametrize(
    ("argument", "fix"),
    [
        ("torch_dtype", "Use dtype="), ("quantization_config", 'Use quant="nf4"'), ("device_map", 'offload="balanced"'),
        ("low_cpu_mem_usage", "Leave it out"), ("load_in_4bit", 'quant="nf4"'), ("load_in_8bit", 'quant="bnb-int8"'),
        ("local_files_only", "HF_HUB_OFFLINE=1"), ("use_safetensors", "Leave it out"), ("cache_dir", "HF_HUB_CACHE"),
        ("safety_checker", "pipe.safety_checker = None"), ("offload_mode", "Use offload="),
        ("use_auth_token", "Use token="),
        ("offlaod", "Did you mean offload=?"), ("component", "Did you mean components=?"), ("Quant", "mean quant=?"),
    ],
)  # fmt: skip
def test_of_load_model(argument: str, fix: str) -> None:
    for call in (sdquant.load_model, sdquant.plan, make_request):
        with pytest.raises(SettingsError) as error:
            call("/no/such/model", **{argument: True})
        assert fix in error.value.fix


def test_of_calls_that_do_not_load() -> None:
    for call, argument, fix in (
        (sdquant.quantize, "offload", "Use load_model, which has offload="),
        (sdquant.quantize, "torch_dtype", "Use load_model, which has dtype="),
        (sdquant.quantize, "load_in_4bit", 'Use quant="nf4"'),
        (sdquant.save, "exist_ok", "Use overwrite="),
        (sdquant.save, "portabel", "Did you mean portable=?"),
        (sdquant.Config, "modules_to_not_convert", "Use skip="),
        (sdquant.detect, "base", "Use load_model, which has base="),
    ):
        with pytest.raises(SettingsError) as error:
            call("x", **{argument: True})
        assert error.value.fix == fix


def test_schemes_in_answers_exist() -> None:
    import re

    schemes = {name for row in ANSWERS.values() for name in re.findall(r'quant="([^"]+)"', row.fix)}
    assert schemes
    for name in schemes:
        sdquant.backends.parse(name)


def test_signatures_stay() -> None:
    """Tools that look at them see the function's own, and a call that is wrong in another way is Python's to refuse."""
    names = list(inspect.signature(sdquant.load_model).parameters)
    assert names[:3] == ["path", "quant", "offload"] and set(names) == LOADING
    assert all(kind.kind is not inspect.Parameter.VAR_KEYWORD
               for call in (sdquant.load_model, sdquant.quantize, sdquant.save, sdquant.detect, sdquant.Config)
               for kind in inspect.signature(call).parameters.values())  # fmt: skip
    for name, call in CALLS.items():
        assert call.__doc__ and call.__name__ == name and call.__module__.startswith("sdquant.")
    with pytest.raises(TypeError, match="path"):
        sdquant.load_model()  # type: ignore[call-arg]


def test_on_the_command_line_and_in_config_files(capsys: Any, tmp_path: Path) -> None:
    with pytest.raises(SystemExit):
        main(["plan", "digits-sd", "--torch-dtype", "float16", "--load-in-4bit", "--colour=red"])
    said = capsys.readouterr().err
    assert "did you mean --dtype for --torch-dtype?" in said and "did you mean --quant for --load-in-4bit?" in said
    assert "for --colour" not in said
    with pytest.raises(SystemExit):
        main(["plan", "digits-sd", "--ofload", "model"])
    assert "did you mean --offload for --ofload?" in capsys.readouterr().err
    file = tmp_path / "a.yml"
    file.write_text("torch_dtype: float16\n")
    with pytest.raises(SettingsError, match=r"Did you mean dtype\?"):
        load_config(file)


def test_the_arguments_of_load_model_are_those_of_a_request() -> None:
    """`utils` is below both and has their names once more, for calls that have fewer."""
    assert set(inspect.signature(sdquant.load_model).parameters) == LOAD_MODEL_ARGUMENTS
    assert {row.name for row in fields(Request)} == LOAD_MODEL_ARGUMENTS


def test_the_matrix_has_the_offload_modes_that_there_are() -> None:
    assert tuple(mode.name for mode in offload.MODES) == OFFLOAD_MODES
