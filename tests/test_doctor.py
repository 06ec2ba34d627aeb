"""The doctor: what it reports of made-up machines, and that every rule can be brought about."""

from __future__ import annotations

import json
import re
from typing import Any

import pytest

from sdquant import backends
from sdquant.cli.doctor_hints import RULES, STALE_AFTER, advice
from sdquant.cli.doctor_report import examine
from sdquant.compat.hardware import Lock, Machine, probe
from sdquant.utils.install import install_extra

from .compat.machines import EVERYTHING, GIB, card, machine

# For each rule a machine to which it applies, and words of its text.
CASES: dict[str, tuple[Machine, str]] = {
    "python": (machine(python="3.14.0"), "3.10 to 3.13"),
    "stale-lock": (machine(locks=(Lock(path="/q/cpp/build/lock", age_s=STALE_AFTER + 1),)), "delete /q/cpp/build/lock"),
    "fresh-lock": (machine(locks=(Lock(path="/q/cpp/build/lock", age_s=5),)), "being compiled"),
    "nvidia-unused": (machine(gpu_vendors=("nvidia",)), "CUDA build of torch"),
    "amd-unused": (machine(gpu_vendors=("amd",)), "ROCm build of torch"),
    "intel-unused": (machine(gpu_vendors=("intel",)), "XPU build of torch"),
    "no-accelerator": (machine(), "sees no GPU"),
    "windows-wsl2": (machine(platform="windows"), "WSL2"),
    "wsl2-memory": (machine(wsl=True), ".wslconfig"),
    "triton-missing": (machine(card("cuda")), "Triton is missing"),
    "triton": (machine(card("cuda"), has_triton=True), "Triton is here"),
    "no-compiler": (machine(has_compiler=False), "no C++ compiler"),
    "libgguf-missing": (machine(without=("libgguf",)), install_extra("gguf")),
    "mps-float8": (machine(card("mps")), "qfloat8"),
    "directml": (machine(card("directml")), "DirectML"),
    "low-ram": (machine(ram_available=2 * GIB), "2.0 GiB of RAM"),
}


def test_a_runtime_that_needs_a_package_is_ready_or_says_how() -> None:
    ready, without = (examine(one) for one in (machine(), machine(without=("openvino",))))
    said = [{row.name: row.runtimes for row in report.backends}["nncf"]["openvino"] for report in (ready, without)]
    assert said[0] == "ready on the CPU (openvino 2026.4.1)"
    assert "not installed" in said[1] and install_extra("openvino") in said[1]
    assert all(line in report.render() for line, report in zip(said, (ready, without), strict=True))


def test_every_rule_has_a_case() -> None:
    assert [rule.name for rule in RULES] == list(CASES)


@pytest.mark.parametrize("name", CASES)
def test_a_rule_applies_and_says_so(name: str) -> None:
    found = {row.name: row for row in advice(CASES[name][0])}
    assert CASES[name][1] in found[name].text
    assert found[name].level in ("problem", "advice", "info")


def test_a_good_machine_has_no_problems() -> None:
    good = machine(card("cuda"), has_triton=True, gpu_vendors=("nvidia", "intel"))
    assert {row.name for row in advice(good)} == {"triton", "intel-unused"}
    assert not [row for row in advice(good) if row.level == "problem"]
    # Rules that exclude each other.
    assert "no-accelerator" not in {row.name for row in advice(machine(gpu_vendors=("amd",)))}
    assert "amd-unused" not in {row.name for row in advice(machine(card("rocm"), gpu_vendors=("amd",)))}
    both = machine(locks=(Lock(path="/a/lock", age_s=1e6), Lock(path="/b/lock", age_s=1)))
    assert {"stale-lock", "fresh-lock"} <= {row.name for row in advice(both)}
    assert "/b/lock" not in next(row.text for row in advice(both) if row.name == "stale-lock")


def test_no_text_holds_an_address() -> None:
    texts = [row.text for case, _ in CASES.values() for row in advice(case)]
    assert not [text for text in texts if re.search(r"://|www\.|\.(org|com|io)\b", text)]


@pytest.mark.parametrize("name", [name for name in backends.names() if backends.get(name).requires is not None])
def test_a_missing_package_is_reported_with_its_pip_line(name: str) -> None:
    needs = backends.get(name).requires
    assert needs is not None
    rows = {row.name: row for row in examine(machine(without=(needs.package,))).backends}
    assert rows[name].installed is None and rows[name].problem is not None
    assert rows[name].install == install_extra(needs.extra)
    assert set(rows[name].schemes) <= {"fp8"}  # which has a packing of torch's own
    others = [row for key, row in rows.items() if key != name]
    assert all(row.problem is None and row.install is None and row.schemes for row in others)


def test_verdicts_are_by_device() -> None:
    rows = {row.name: row.devices for row in examine(EVERYTHING).backends}
    assert rows["bnb"]["cpu"] == rows["bnb"]["cuda"] == "works"
    assert rows["bnb"]["directml"] == "breaks: nf4 fp4 bnb-int8; untested: fp8"
    assert rows["nncf"]["mps"] == "untested"
    assert all(set(devices) == set(EVERYTHING.kinds) for devices in rows.values())


@pytest.mark.parametrize(
    ("free", "ram", "wanted"),
    [
        (80 * GIB, 20 * GIB, "bf16 fits whole"),
        (20 * GIB, 20 * GIB, "8-bit fits whole"),
        (12 * GIB, 20 * GIB, "4-bit fits whole"),
        (6 * GIB, 40 * GIB, 'bf16 with offload="balanced"'),
        (6 * GIB, 6 * GIB, '4-bit with offload="balanced"'),
        (2 * GIB, 4 * GIB, '4-bit with offload="balanced" and part of it on disk'),
    ],
)
def test_a_model_fits_or_is_offloaded(free: int, ram: int, wanted: str) -> None:
    fits = {row.model: row for row in examine(machine(card("cuda", free), ram_available=ram)).fits}
    assert fits["FLUX.1"].advice == wanted
    assert fits["FLUX.1"].bytes[16] == pytest.approx(2 * 16.8e9)


def test_the_cpu_s_memory_is_not_counted_twice() -> None:
    fits = {row.model: row for row in examine(machine(ram_available=20 * GIB)).fits}  # all of it the CPU's own
    assert fits["FLUX.1"].advice == "8-bit fits whole"
    assert fits["SDXL"].advice == "bf16 fits whole"


def test_a_device_that_hides_its_memory() -> None:
    device: Any = card("directml")
    import dataclasses

    hidden = dataclasses.replace(device, memory_free=None, memory_total=None)
    report = examine(machine(hidden))
    assert "does not tell" in report.fits[0].advice
    assert "unknown free of unknown" in report.render()


def test_this_machine_is_reported_as_text_and_as_json() -> None:
    here = probe()
    report = examine(here)
    values = json.loads(json.dumps(report.to_dict()))
    assert [row["name"] for row in values["backends"]] == list(backends.names())
    assert values["machine"]["versions"]["torch"] == here.versions["torch"]
    text = report.render()
    assert here.versions["torch"] in text and "Backends" in text and "FLUX.1" in text
    for row in report.findings:
        assert row.text in text
    for name in backends.names():
        assert backends.get(name).title in text
