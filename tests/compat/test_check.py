"""`check`: which error, what it says, and what it leaves alone."""

from __future__ import annotations

import subprocess
import sys
import warnings
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from sdquant import backends
from sdquant.compat import IncompatibleWarning, SdquantWarning, UntestedWarning, check, matrix
from sdquant.errors import (
    BackendUnavailableError,
    IncompatibleError,
    RefusedFileError,
    SdquantError,
    SettingsError,
    UnknownOffloadError,
    UnknownQuantError,
    UnsupportedFileError,
)
from sdquant.utils.install import install_extra

from .machines import EVERYTHING, card, machine

if TYPE_CHECKING:
    from sdquant.core.backend import Requirement

HERE = machine()
SCHEMES = tuple(row.name for row in backends.schemes())
PACKAGED = [name for name in backends.names() if backends.get(name).requires is not None]


def _needs(backend: str) -> Requirement:
    needs = backends.get(backend).requires
    assert needs is not None
    return needs


@pytest.mark.parametrize("scheme", SCHEMES)
@pytest.mark.parametrize("runtime", ["default", "library", "plain", "openvino"])
def test_check_says_what_the_matrix_says(scheme: str, runtime: str) -> None:
    if runtime not in ("default", *backends.scheme(scheme).runtimes):
        with pytest.raises(SettingsError, match=runtime):
            check(scheme, runtime=runtime, machine=HERE)
        return
    cells = [cell for cell in matrix("cpu", schemes=[scheme], machine=HERE) if cell.runtime == runtime]
    assert len(cells) == 15
    for cell in cells:
        asked = {"mode": cell.mode, "runtime": None if runtime == "default" else runtime, "machine": HERE}
        if cell.verdict == "breaks":
            with pytest.raises(IncompatibleError) as caught:
                check(scheme, cell.offload, **asked)  # type: ignore[arg-type]
            fix, _, _ = caught.value.fix.partition(". Another backend's scheme of the same name")
            assert (caught.value.why, fix) == (cell.why, cell.fix)
            assert scheme in caught.value.what and repr(cell.offload) in caught.value.what
        else:
            check(scheme, cell.offload, **asked)  # type: ignore[arg-type]


@pytest.mark.parametrize("name", ["NF4", "nf4,double_quant", "bnb:nf4", " BNB:Nf4 "])
def test_a_name_may_be_written_in_many_ways(name: str) -> None:
    check(name, "Balanced", machine=HERE, device="CPU")
    with pytest.raises(IncompatibleError, match="Blockwise"):
        check(name, "SEQUENTIAL", machine=HERE)


@pytest.mark.parametrize("quant", [None, "none", "None", {}, {"transformer": None, "text_encoder": "none"}])
def test_no_quantization_runs_in_every_mode(quant: str | None) -> None:
    for mode in ("none", "model", "sequential", "balanced", "group"):
        check(quant, mode, machine=HERE)
    with pytest.raises(UnknownOffloadError):
        check(quant, "sequental", machine=HERE)
    with pytest.raises(SettingsError):
        check(quant, "none", device="gpu", machine=HERE)


def test_each_entry_of_a_dict_is_checked() -> None:
    check({"transformer": "nf4", "text_encoder": "int8"}, "balanced", machine=HERE)
    with pytest.raises(IncompatibleError, match="QBytesTensor"):
        check({"transformer": "nf4", "text_encoder": "qint8"}, "balanced", machine=HERE)


def test_a_gguf_scheme_is_read_as_found() -> None:
    check("q8_0", "none", machine=HERE)
    check("q8_0", "balanced", mode="found", machine=HERE)
    check("q8_0", "model", runtime="plain", machine=HERE)
    with pytest.raises(IncompatibleError, match="trigger de-quantization"):
        check("q8_0", "model", machine=HERE)


def test_an_all_in_one_gguf_is_refused_as_a_file() -> None:
    with pytest.raises(RefusedFileError, match="only the UNet/transformer is supported in GGUF") as caught:
        check("q4_k", "none", source="all-in-one", machine=HERE)
    assert isinstance(caught.value, IncompatibleError) and isinstance(caught.value, UnsupportedFileError)
    check("nf4", "none", source="all-in-one", machine=HERE)


@pytest.mark.parametrize(
    ("quant", "axes", "error", "hint"),
    [
        ("nf5", {}, UnknownQuantError, "nf4"),
        ("quanto:nf4", {}, UnknownQuantError, "bnb:nf4"),
        ("nf4,blocksize=2", {}, SettingsError, "block_size"),
        (4, {}, SettingsError, "name"),
        ("nf4", {"offload": "balence"}, UnknownOffloadError, "balanced"),
        ("nf4", {"offload": ""}, UnknownOffloadError, "sequential"),
        ("nf4", {"mode": "posd"}, SettingsError, "'post'"),
        ("nf4", {"runtime": "plane"}, SettingsError, "'plain'"),
        ("nf4", {"source": "zip"}, SettingsError, "'weights'"),
        ("nf4", {"device": "cuda:x"}, SettingsError, "cuda:0"),
        ("nf4", {"device": "tpu"}, SettingsError, "cpu"),
        ("int8", {"runtime": "library"}, SettingsError, "'plain'"),
    ],
)
def test_wrong_values_are_told_apart(quant: object, axes: dict[str, str], error: type[SdquantError], hint: str) -> None:
    with pytest.raises(error) as caught:
        check(quant, machine=HERE, **axes)  # type: ignore[arg-type]
    assert hint in caught.value.fix
    assert caught.value.what and caught.value.why


@pytest.mark.parametrize("backend", PACKAGED)
def test_a_missing_package_names_the_pip_line(backend: str) -> None:
    needs = _needs(backend)
    scheme = next(row.name for row in backends.get(backend).schemes if row.on_the_fly)
    with pytest.raises(BackendUnavailableError) as caught:
        check(scheme, "none", machine=machine(without=(needs.package,)))
    assert needs.package in caught.value.why and needs.minimum in caught.value.why
    assert install_extra(needs.extra) in caught.value.fix
    *_, named = caught.value.fix.removesuffix(", which can be used here").partition("Or use ")
    rows = [backends.scheme(name) for name in named.replace(" or ", ", ").split(", ")]
    assert len(rows) == 3 and all(row.on_the_fly and row.backend != backend for row in rows), named


@pytest.mark.parametrize("backend", PACKAGED)
def test_a_package_that_is_too_old_is_refused(backend: str) -> None:
    needs = _needs(backend)
    scheme = next(row.name for row in backends.get(backend).schemes if row.on_the_fly)
    with pytest.raises(BackendUnavailableError, match=r"0\.0\.1 is installed") as caught:
        check(scheme, "none", machine=machine(newer={needs.package: "0.0.1"}))
    assert install_extra(needs.extra) in caught.value.fix
    with pytest.raises(BackendUnavailableError):  # insisting does not install it
        check(scheme, "none", machine=machine(newer={needs.package: "0.0.1"}), allow_incompatible=True)
    check(scheme, "none", machine=machine(newer={needs.package: needs.minimum}))
    check(scheme, "none", machine=machine(newer={needs.package: "built-from-source"}))


def test_fp8_has_a_packing_that_needs_no_package() -> None:
    check("fp8", "balanced", machine=machine(without=("bitsandbytes",)))


def test_a_combination_is_refused_even_where_its_package_is_missing() -> None:
    with pytest.raises(IncompatibleError, match="Blockwise"):
        check("nf4", "sequential", machine=machine(without=("bitsandbytes",)))


def test_a_device_without_support_names_the_backend_that_works() -> None:
    with pytest.raises(BackendUnavailableError, match="DirectML") as caught:
        check("nf4", "none", device="directml", machine=EVERYTHING)
    assert "int8" in caught.value.fix
    with pytest.raises(IncompatibleError):
        check("nf4", "sequential", device="privateuseone:0", machine=EVERYTHING)


def test_insisting_turns_a_refusal_into_a_warning() -> None:
    with pytest.warns(IncompatibleWarning, match="Blockwise") as caught:
        check("nf4", "sequential", machine=HERE, allow_incompatible=True)
    assert caught[0].filename == __file__
    with pytest.warns(IncompatibleWarning, match="DirectML"):
        check("nf4", device="directml", machine=EVERYTHING, allow_incompatible=True)


def test_untested_warns_and_goes_on() -> None:
    with pytest.warns(UntestedWarning, match="nf4 .* on xpu is untested") as caught:
        check("nf4", "none", device="xpu", machine=EVERYTHING)
    assert caught[0].filename == __file__
    assert issubclass(UntestedWarning, SdquantWarning) and issubclass(SdquantWarning, UserWarning)


def test_the_default_device_is_the_machine_s_best() -> None:
    with pytest.warns(UntestedWarning, match="on rocm"):
        check("nf4", machine=machine(card("rocm")))
    with pytest.warns(UntestedWarning, match="on rocm"):
        check("nf4", machine=machine(card("rocm")), device="cuda:0")
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        check("nf4", machine=machine(card("cuda")))


def test_without_a_machine_this_one_is_asked() -> None:
    check("int8", "sequential", device="cpu")
    check("int8", "none")


def test_check_imports_no_library_and_opens_no_file() -> None:
    """With the machine given and the device named, only sdquant and the standard library are touched."""
    code = """
import sys, builtins
from tests.compat.machines import machine
from sdquant import check
from sdquant.errors import IncompatibleError
here = machine()
check("nf4", "balanced", device="cpu", machine=here)
opened = []
sys.addaudithook(lambda event, args: opened.append(args[0]) if event == "open" else None)
check("nf4", "balanced", device="cpu", machine=here)
try:
    check("qint8", "balanced", device="cuda", machine=here)
except IncompatibleError as error:
    print(error.why[:24])
check("q8_0", "none", device="cpu", machine=here)
heavy = {"torch", "diffusers", "transformers", "accelerate", "numpy", "bitsandbytes", "optimum", "gguf", "nncf", "sdnq"}
print(sorted(heavy & set(sys.modules)), opened)
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120, check=True)
    assert done.stdout.splitlines() == ["QBytesTensor.new() missi", "[] []"]


def test_the_pip_line_names_an_extra_that_exists() -> None:
    text = (Path(__file__).parents[2] / "pyproject.toml").read_text(encoding="utf-8")
    extras = text.partition("[project.optional-dependencies]")[2].partition("\n[")[0]
    for name in PACKAGED:
        assert f"\n{_needs(name).extra} = [" in extras
