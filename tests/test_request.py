"""Every argument of `load_model`: what it may be, and a clear error for what it may not."""

from __future__ import annotations

import copy
import pickle
from dataclasses import FrozenInstanceError, fields
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

import sdquant
from sdquant import offload
from sdquant.errors import SdquantError, SettingsError, UnknownOffloadError, UnknownQuantError
from sdquant.planning.preparation import prepare
from sdquant.planning.request import Request, make_request
from sdquant.utils import byte_sizes


def _all(kind: type[SdquantError], *values: Any) -> list[tuple[Any, type[SdquantError]]]:
    return [(value, kind) for value in values]


BAD: dict[str, list[tuple[Any, type[SdquantError]]]] = {
    "path": _all(SettingsError, None, "", "  ", 5, b"model", ["model"], 3.5),
    "quant": [
        ("nf5", UnknownQuantError), ("", UnknownQuantError), ("quanto:nf4", UnknownQuantError),
        ("nobody:nf4", UnknownQuantError), ("nf4,blocks=3", SettingsError), ("nf4,block_size=7", SettingsError),
        ("nf4,double_quant=maybe", SettingsError), (4, SettingsError), (True, SettingsError), (["nf4"], SettingsError),
        (b"nf4", SettingsError), ({"unet": "nf5"}, UnknownQuantError), ({"unet": 4}, SettingsError),
        ({4: "nf4"}, SettingsError), ({"": "nf4"}, SettingsError), ({None: "nf4"}, SettingsError),
    ],
    "offload": _all(UnknownOffloadError, "balance", "cpu", "", None, 3, True, ["none"]),
    "mode": _all(SettingsError, "before", "found", "", None, 1),
    "components": _all(SettingsError, 5, [5], ["unet", None], [""], {"unet": "nf4"}, True),
    "skip": _all(SettingsError, 5, [5], [None], [""], {"a": "b"}, True),
    "parts": _all(SettingsError, 5, [5], [None], [""], {"a": 5}, {"": "b"}, {5: "b"}, True),
    "variant": _all(SettingsError, "", 5, b"x", ["fp16"], True),
    "revision": _all(SettingsError, "", 5, b"x", ["main"], True),
    "subfolder": _all(SettingsError, "", 5, b"x", ["unet"], True),
    "token": _all(SettingsError, "", 5, b"x", ["hf"]),
    "rules": _all(SettingsError, {}, [], "rules.yaml", "[", 5, [5], [{"colour": "red"}], True, ""),
    "quant_stats": _all(SettingsError, "", 5, b"x", ["x"], "stats.safetensors"),
    "base": _all(SettingsError, "", 5, b"x", ["x"]),
    "runtime": _all(SettingsError, "fast", "", 1, "default"),
    "compute": _all(SettingsError, "int4", "", 8, "default"),
    "device": _all(SettingsError, "gpu", "cuda:x", "", 0, "tpu:0", ["cpu"]),
    "dtype": _all(SettingsError, "bf16", "int8", "", 16, torch.int8, torch.float64, "exec"),
    "size": _all(SettingsError, "much", 0, -5, True, "6GB"),  # the last: without quant=auto
    "config": _all(SettingsError, "", 5, b"x", ["x"], True, {}, "{"),
    "quality": _all(SettingsError, "much", 0, -5, True, 300, 30),
    "budget": _all(SettingsError, "much", "", "-1GB", "0", 0, -5, 1.5, True, "6 XB", ["6GB"]),
    "allow_incompatible": _all(SettingsError, "no", 1, 0, None, "true"),
    "allow_pickle": _all(SettingsError, "no", 1, 0, None, "true"),
    "cache": _all(SettingsError, "", 5, b"x", ["x"]),
    "cache_limit": _all(SettingsError, "much", "", "-1GB", "0", 0, -5, 1.5, True, None),
    "progress": _all(SettingsError, "no", 1, None),
}  # fmt: skip


def test_every_field_is_tried() -> None:
    assert set(BAD) == {row.name for row in fields(Request)}


@pytest.mark.parametrize(
    ("name", "value", "kind"), [(name, *row) for name, rows in BAD.items() for row in rows], ids=lambda v: repr(v)[:30]
)
def test_a_bad_value_is_refused_before_anything_happens(name: str, value: Any, kind: type[SdquantError]) -> None:
    values: dict[str, Any] = {"offload": "balanced"} if name == "budget" else {}
    path = value if name == "path" else "/no/such/model"
    if name != "path":
        values[name] = value
    for call in (make_request, sdquant.load_model):
        with pytest.raises(kind) as caught:
            call(path, **values)
        error = caught.value
        assert error.what and error.why and error.fix
        if isinstance(value, str) and value.strip() and name != "rules":
            assert value.strip().partition(",")[0] in str(error) or value in error.what


@pytest.mark.parametrize(
    ("values", "hint"),
    [
        ({"quant": "nf44"}, "'nf4'"),
        ({"quant": "qint5"}, "'qint"),
        ({"quant": "nf4,blocksize=64"}, "'block_size'"),
        ({"offload": "balnced"}, "'balanced'"),
        ({"offload": "modle"}, "'model'"),
        ({"mode": "prr"}, "'pre'"),
        ({"runtime": "libary"}, "'library'"),
        ({"dtype": "bfloat61"}, "'bfloat16'"),
        ({"offlod": "none"}, "offload="),
        ({"component": "unet"}, "components="),
    ],
)
def test_did_you_mean(values: dict[str, Any], hint: str) -> None:
    with pytest.raises(SdquantError) as caught:
        make_request("model", **values)
    assert "Did you mean" in caught.value.fix and hint in caught.value.fix


def test_an_argument_that_does_not_exist_is_not_ignored() -> None:
    with pytest.raises(SettingsError, match="colour"):
        sdquant.plan("/no/such/model", colour="red")
    with pytest.raises(SettingsError, match="colour"):
        sdquant.load_model("/no/such/model", colour="red")  # type: ignore[call-arg]


def test_defaults() -> None:
    made = make_request("model")
    assert made == Request(path="model")
    assert (made.quant, made.offload, made.mode, made.components, made.skip) == (None, "none", "auto", None, ())
    assert made.specs == {} and made.budget_bytes is None
    for row in fields(Request):
        assert row.metadata["help"], row.name
        if row.metadata["choices"] and row.default is not None:
            assert row.default in row.metadata["choices"]


def test_it_cannot_be_changed() -> None:
    with pytest.raises(FrozenInstanceError):
        make_request("model").quant = "nf4"  # type: ignore[misc]


class TestWhatCallersWrite:
    def test_paths(self, tmp_path: Path) -> None:
        assert make_request(tmp_path).path == str(tmp_path)
        assert make_request(tmp_path, base=tmp_path / "base").base == str(tmp_path / "base")
        assert make_request("~/model", base="a/b").base == "a/b"
        assert make_request("model", base="~/b").base == str(Path("~/b").expanduser())

    @pytest.mark.parametrize(
        ("dtype", "name"),
        [
            (torch.float16, "float16"), (torch.bfloat16, "bfloat16"), (torch.float32, "float32"), (None, None),
            ("bfloat16", "bfloat16"), ("torch.bfloat16", "bfloat16"), ("Float16", "float16"),
        ],
    )  # fmt: skip
    def test_dtypes(self, dtype: Any, name: str | None) -> None:
        assert make_request("model", dtype=dtype).dtype == name

    @pytest.mark.parametrize(
        ("device", "name"),
        [
            (torch.device("cpu"), "cpu"), (torch.device("cuda", 1), "cuda:1"), (torch.device("cuda"), "cuda"),
            ("cpu", "cpu"), ("CUDA:0", "cuda:0"), ("mps", "mps"), ("xpu:0", "xpu:0"), (None, None),
        ],
    )  # fmt: skip
    def test_devices(self, device: Any, name: str | None) -> None:
        assert make_request("model", device=device).device == name

    @pytest.mark.parametrize("names", ["unet", ["unet"], ("unet",), {"unet"}])
    def test_one_name_or_several(self, names: Any) -> None:
        assert make_request("model", quant="nf4", components=names, skip=names).components == ("unet",)
        assert make_request("model", skip=names).skip == ("unet",)

    def test_none_is_no_pattern(self) -> None:
        assert make_request("model", skip=None).skip == ()

    def test_case_and_spaces(self) -> None:
        made = make_request("model", offload=" Balanced ", mode="PRE", runtime="Plain", quant=" NF4 ")
        assert (made.offload, made.mode, made.runtime) == ("balanced", "pre", "plain")
        assert [str(spec) for spec in made.specs.values()] == ["nf4"]

    @pytest.mark.parametrize(
        ("budget", "size"),
        [
            (1, 1), (6_000_000_000, 6_000_000_000), ("6GB", 6_000_000_000), ("6 gb", 6_000_000_000),
            ("512MiB", 512 << 20), ("0.5g", 500_000_000), ("1024", 1024), (None, None),
        ],
    )  # fmt: skip
    def test_budgets(self, budget: Any, size: int | None) -> None:
        assert make_request("model", offload="balanced", budget=budget).budget_bytes == size

    def test_modes_and_sizes_are_parsed_once(self, monkeypatch: pytest.MonkeyPatch) -> None:
        """What comes after the request takes the mode and the sizes from it, and reads no text again."""
        values: dict[str, Any] = {"offload": "balanced", "budget": "1GB", "cache_limit": "2GB", "cache": "off"}
        path = sdquant.demo.path("digits-flux")
        made, automatic = make_request(path, **values), make_request(path, **(values | {"offload": "auto"}))
        monkeypatch.setattr(byte_sizes, "_SIZE", SimpleNamespace(fullmatch=pytest.fail))
        assert made.offload_mode is offload.mode_named("balanced") and automatic.offload_mode is None
        assert made.cache_bytes == 2 * 10**9
        assert automatic.budget_bytes == made.budget_bytes == 10**9
        plan = prepare(made)
        assert plan.offload_mode is made.offload_mode and (plan.offload, plan.budget) == ("balanced", 10**9)
        assert prepare(automatic).offload_mode is offload.mode_named("none")
        assert pickle.loads(pickle.dumps(plan)).offload_mode is copy.deepcopy(plan).offload_mode is made.offload_mode

    @pytest.mark.parametrize("mode", ["none", "model", "sequential", "group"])
    def test_a_budget_that_nobody_would_keep(self, mode: str) -> None:
        with pytest.raises(SettingsError, match="only balanced"):
            make_request("model", offload=mode, budget="6GB")


class TestQuant:
    def test_a_scheme_for_all(self) -> None:
        assert {
            name: str(spec) for name, spec in make_request("model", quant="bnb:nf4,double_quant").specs.items()
        } == {"*": "nf4,double_quant"}

    def test_one_for_each(self) -> None:
        specs = make_request("model", quant={"unet": "nf4", "*": "int8", "text_encoder": "none", "vae": None}).specs
        assert {name: spec and spec.scheme.name for name, spec in specs.items()} == {
            "unet": "nf4", "*": "int8", "text_encoder": None,
        }  # fmt: skip

    @pytest.mark.parametrize("none", ["none", "NONE", " none "])
    def test_none_is_not_to_quantize(self, none: str) -> None:
        assert make_request("model", quant=none).specs == {"*": None}

    @pytest.mark.parametrize("quant", [None, {}, {"unet": None}])
    def test_as_found(self, quant: Any) -> None:
        assert make_request("model", quant=quant).specs == {}
