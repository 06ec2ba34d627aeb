"""The probe against this machine, and its readers against folders made for the purpose."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from types import SimpleNamespace
from typing import TYPE_CHECKING

import pytest
import torch
from packaging.version import Version

from sdquant.compat import hardware as machines
from sdquant.compat.hardware import KINDS, default_device, device_kind, probe, versions
from sdquant.errors import SettingsError

from .compat.machines import card, machine

if TYPE_CHECKING:
    from pathlib import Path


TORCH = (torch.__version__, Version(torch.__version__).public)  # metadata of a build for CUDA lack its "+cu132"


@pytest.fixture(scope="module")
def here() -> machines.Machine:
    return probe()


def test_the_devices_are_torch_s(here: machines.Machine) -> None:
    assert here.devices[-1].kind == "cpu"
    assert len(here.devices) == len({device.torch_name for device in here.devices})
    assert (bool({"cuda", "rocm"} & set(here.kinds))) is torch.cuda.is_available()
    for device in here.devices:
        if device.kind != "directml":
            torch.zeros(1, device=device.torch_name)
        if device.memory_total is not None and device.memory_free is not None:
            assert 0 <= device.memory_free <= device.memory_total


def test_the_default_device_computes(here: machines.Machine) -> None:
    name = default_device(here)
    assert device_kind(name, here) == here.kinds[0]
    assert torch.ones(2, device=name).sum() == 2


def test_memory_is_that_of_the_machine(here: machines.Machine) -> None:
    assert 2**28 < here.ram_available <= here.ram_total < 2**50
    assert here.ram_total <= os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")


def test_versions_are_those_of_the_packages(here: machines.Machine) -> None:
    assert here.versions["torch"] in TORCH
    assert here.versions == versions()
    assert here.python == ".".join(map(str, sys.version_info[:3]))


def test_a_machine_is_json(here: machines.Machine) -> None:
    values = json.loads(json.dumps(here.to_dict()))
    assert values["devices"][-1]["kind"] == "cpu" and values["versions"]["torch"] in TORCH
    assert set(values) == set(here.__dataclass_fields__)


def test_versions_import_no_library() -> None:
    code = (
        "import sys, sdquant.compat.hardware as m; found = m.versions(); assert 'torch' in found; "
        "print(sorted({'torch', 'numpy', 'psutil', 'bitsandbytes', 'nncf', 'gguf', 'diffusers'} & set(sys.modules)))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=True)
    assert done.stdout.strip() == "[]"


@pytest.mark.parametrize(
    ("name", "kinds", "kind"),
    [
        ("cuda:0", ("cuda",), "cuda"),
        ("cuda:1", ("rocm",), "rocm"),
        ("cuda", (), "cuda"),
        ("CUDA:0", ("cuda", "rocm"), "cuda"),
        ("rocm", (), "rocm"),
        ("xpu:3", (), "xpu"),
        ("mps", ("mps",), "mps"),
        ("privateuseone:0", ("directml",), "directml"),
        ("directml", (), "directml"),
        ("cpu", ("cuda",), "cpu"),
    ],
)
def test_kind_of_a_device(name: str, kinds: tuple[str, ...], kind: str) -> None:
    assert device_kind(name, machine(*(card(each) for each in kinds))) == kind


def test_a_torch_device_has_a_kind_too() -> None:
    assert device_kind(str(torch.device("cuda", 1))) == "cuda"


@pytest.mark.parametrize("name", ["", "gpu", "cuda:", "cuda:one", "cuda:-1", "tpu:0"])
def test_a_device_that_does_not_exist(name: str) -> None:
    with pytest.raises(SettingsError) as caught:
        device_kind(name)
    assert "cuda:0" in caught.value.fix


@pytest.mark.parametrize(
    ("kinds", "name"),
    [
        ((), "cpu"),
        (("mps",), "mps"),
        (("xpu", "cuda"), "cuda:0"),
        (("rocm",), "cuda:0"),
        (("directml",), "privateuseone:0"),
    ],
)
def test_the_default_is_the_best_kind(kinds: tuple[str, ...], name: str) -> None:
    assert default_device(machine(*(card(kind) for kind in kinds))) == name
    assert default_device(machine(card("cuda", index=1), card("cuda", index=0))) == "cuda:0"


def test_kinds_are_in_order_of_preference() -> None:
    assert machine(card("mps"), card("xpu")).kinds == ("xpu", "mps", "cpu")
    assert set(machine(*(card(kind) for kind in KINDS[:-1])).kinds) == set(KINDS)


def test_a_container_limits_the_memory(tmp_path: Path) -> None:
    assert machines._container(tmp_path) == (None, 0)
    (tmp_path / "memory.max").write_text("max\n")
    (tmp_path / "memory.current").write_text("3000\n")
    (tmp_path / "memory.stat").write_text("anon 2000\ninactive_file 800\n")
    assert machines._container(tmp_path) == (None, 0)
    (tmp_path / "memory.max").write_text("5000\n")
    assert machines._container(tmp_path) == (5000, 2200)


def test_vendors_are_read_from_the_bus(tmp_path: Path) -> None:
    for card_name, vendor in (("card0", "0x1002"), ("card1", "0x10de"), ("card2", "0x1002"), ("card3", "0x1234")):
        (tmp_path / card_name / "device").mkdir(parents=True)
        (tmp_path / card_name / "device" / "vendor").write_text(vendor + "\n")
    assert machines._gpu_vendors(tmp_path) == ("amd", "nvidia")
    assert machines._gpu_vendors(tmp_path / "nowhere") == ()


def test_locks_are_found_with_their_age(tmp_path: Path) -> None:
    assert list(machines._locks(tmp_path)) == list(machines._locks(None)) == []
    lock = tmp_path / "cpp" / "build" / "lock"
    lock.parent.mkdir(parents=True)
    lock.touch()
    os.utime(lock, (time.time() - 3600, time.time() - 3600))
    (found,) = machines._locks(tmp_path)
    assert found.path == str(lock) and 3590 < found.age_s < 3700


def test_quanto_s_extensions_are_where_the_probe_looks() -> None:
    pytest.importorskip("optimum.quanto", reason="optimum-quanto is not installed")
    from optimum.quanto.library import extensions

    folder = machines._quanto_extensions()
    assert folder is not None and os.path.samefile(folder, os.path.dirname(extensions.__file__))
    assert (folder / "cpp").is_dir()


class Card:
    """What a card says of its memory: `free` bytes, of 1000, while torch keeps some that no tensor has."""

    def __init__(self, free: int | None, reserved: int = 0, allocated: int = 0) -> None:
        self.free = free
        self.memory_reserved, self.memory_allocated = (lambda index: reserved), (lambda index: allocated)

    def mem_get_info(self, index: int) -> tuple[int, int]:
        if self.free is None:
            raise RuntimeError("not supported on this device")
        return self.free, 1000

    def get_device_properties(self, index: int) -> SimpleNamespace:
        return SimpleNamespace(total_memory=1000, name="a card", major=8, minor=9)


@pytest.mark.parametrize(("told", "free"), [(Card(300), 300), (Card(300, 400, 250), 450), (Card(None), None)])
def test_what_torch_keeps_of_a_cards_memory_is_free(told: Card, free: int | None) -> None:
    found = machines._card("cuda", 0, told)
    assert (found.memory_free, found.memory_total, found.capability) == (free, 1000, (8, 9))
