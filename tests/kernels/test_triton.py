"""The Triton kernels: in its interpreter here, compiled for cards that are not here, and on a card where one is."""

from __future__ import annotations

import importlib.util
import os
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from sdquant import backends
from sdquant.core.backend import Unfit
from sdquant.core.packed_layout import PackedLayout
from sdquant.kernels import int8_reference
from sdquant.kernels import triton as package
from sdquant.kernels.row_codes import RowCodes
from sdquant.kernels.triton import imports
from sdquant.kernels.triton.blocks import GGUF
from sdquant.kernels.triton.triton_kernels import TritonReader

from .test_packed_layout import SHAPES, SPECS
from .triton_cases import DTYPES, Case, apart_of, blocks_of, cases, faults

ROOT = Path(__file__).parents[2]
needs_triton = pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="Triton is not installed")
# Types of which a thread reads single bytes or pairs of them in any order of fields: apart they are neither better nor
# worse.
ONE_BY_ONE = ("tq1_0", "iq2_s", "iq2_xs", "iq2_xxs", "iq1_m", "iq1_s")
SOME = ("nf4", "sdnq4 float32", "q4_k 33x512")
# Bytes of shared memory that a program may have, by capability; Triton asks for what is above 48 KB.
SHARED = {80: 163 << 10, 89: 99 << 10, 90: 227 << 10, 100: 227 << 10, 120: 99 << 10}


def interpreted(*words: str) -> str:
    """What a program of ours prints in Triton's interpreter, which is chosen before triton is imported."""
    command = [sys.executable, "-W", "error", "-m", *words]
    environment = {**os.environ, "TRITON_INTERPRET": "1", "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)}
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return done.stdout


@needs_triton
def test_some_forms_and_activations_in_the_interpreter() -> None:
    *wrong, last = interpreted("tests.kernels.triton_cases", "few").splitlines()
    assert wrong == []
    assert int(last.split()[0]) > 15


@needs_triton
@pytest.mark.slow
def test_every_form_and_activations_in_the_interpreter() -> None:
    *wrong, last = interpreted("tests.kernels.triton_cases").splitlines()
    assert wrong == []
    assert int(last.split()[0]) > 100


@needs_triton
@pytest.mark.slow
def test_every_form_in_every_dtype_in_the_interpreter() -> None:
    *wrong, last = interpreted("tests.kernels.triton_cases", "thorough").splitlines()
    assert wrong == []
    assert int(last.split()[0]) > 350


@needs_triton
@pytest.mark.slow
def test_what_the_backends_encode_in_the_interpreter() -> None:
    assert interpreted("tests.kernels.test_triton").splitlines() == ["234 looked at"]


@pytest.mark.slow
@needs_triton
def test_some_kernels_compile_for_a_card_that_is_not_here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    compiles([case for case in cases() if case.name in SOME], 90, monkeypatch, tmp_path)


@needs_triton
@pytest.mark.slow
@pytest.mark.parametrize("capability", [80, 90, 100])
def test_all_kernels_compile_for_cards_that_are_not_here(
    capability: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    compiles(list(cases()), capability, monkeypatch, tmp_path)


@needs_triton
@pytest.mark.slow
def test_with_fields_apart_a_card_loads_16_bytes_at_a_time(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """In blocks of 18, 34 or 210 bytes it cannot; blocks of 144 and 176 are as good as fields."""
    from .offline import compiled

    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))
    launcher = imports.launcher()
    assert launcher is not None

    def loads(case: Case) -> list[str]:
        out = torch.empty(case.form.rows, case.form.columns, dtype=torch.bfloat16)
        code = compiled(launcher.decode(case.form, case.parts, out), 90).asm["ptx"]
        return sorted(re.findall(r"ld\.global\.(?:v\d\.)?b\d+", code))

    for kind in GGUF:
        blocks = blocks_of(kind, 64, 1024)
        before, after = loads(blocks), loads(apart_of(blocks))
        if kind in ONE_BY_ONE:
            assert len(before) == len(after), kind
        elif TritonReader().wants_apart(blocks.form):
            assert any(".v" in load for load in after), kind  # several words at once
            assert len(after) < len(before), kind
        else:
            assert before == after, kind


def compiles(some: list[Case], capability: int, monkeypatch: pytest.MonkeyPatch, cache: Path) -> None:
    """Each compiles to code for the card that rounds twice where torch does, and fits into the card's memory."""
    from .offline import compiled

    monkeypatch.setenv("TRITON_CACHE_DIR", str(cache))
    from sdquant.kernels.triton import int8_gemm

    launcher = imports.launcher()
    assert launcher is not None and not launcher.INTERPRETED and some
    for case in some:
        form = case.form
        out = torch.empty(form.rows, form.columns, dtype=torch.bfloat16)
        code = compiled(launcher.decode(form, case.parts, out), capability).asm["ptx"]
        multiplied_and_added = len(re.findall(r"\bfma\.rn\.f32", code))
        assert (multiplied_and_added > 0) == form.fused, case.name
        if not launcher.multiplies(form):
            continue
        for m in (1, 16, 64):
            x = torch.empty(m, form.columns, dtype=torch.bfloat16)
            kernel = compiled(
                launcher.product(form, case.parts, x, x.new_empty(form.rows), x.new_empty(m, form.rows)), capability
            )
            assert kernel.metadata.shared <= SHARED[capability], (case.name, m)
            assert ("mma" in kernel.asm["ptx"]) == (m > 1), (case.name, m)
    compiled(int8_gemm.requantization(form, case.parts, out.to(torch.int8), out.float()), capability)  # of the last
    whole, scale = torch.empty(4, 3072, dtype=torch.int32), torch.empty(4, 1)
    compiled(int8_gemm.quantization(whole.bfloat16(), whole.to(torch.int8), scale, scale.int()), capability)
    codes = RowCodes(torch.empty(3072, 16, dtype=torch.uint8), whole[0].float())
    compiled(int8_gemm.finishing(whole, scale, codes, None, whole.bfloat16(), scale.int()), capability)


@needs_triton
@pytest.mark.slow
@pytest.mark.parametrize("capability", [80, 89, 90, 100, 120])
def test_products_of_codes_compile_for_cards_that_are_not_here(
    capability: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By each tile: with the card's tensor cores for bytes, nothing in a stack, and no rounding left out."""
    from sdquant.kernels.triton import int8_gemm, tiles

    from .offline import compiled, stack

    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))
    codes, weight = (torch.empty(rows, 1024, dtype=torch.int8) for rows in (256, 512))
    row_scale, scale, out = torch.empty(256, 1), torch.empty(512).bfloat16(), torch.empty(256, 512).bfloat16()
    for tile in tiles.tiles(divmod(capability, 10)).by_row:
        for of in (RowCodes(weight, scale), RowCodes(weight.view(torch.uint8), scale, 1.0, scale.to(torch.uint8))):
            kernel = compiled(int8_gemm.product(codes, row_scale, of, scale, out, row_scale.int(), tile), capability)
            text = kernel.asm["ptx"]
            own = r"wgmma\S*\.s8\.s8" if capability == 90 and tile.columns >= 64 else r"mma\S*\.s8|kind::i8"
            assert re.search(own, text) and not re.search(r"\bfma\.rn\.f32", text), tile
            assert kernel.metadata.shared <= SHARED[capability] and stack(kernel) == 0, tile
    for m, groups, each, taps in ((20, 4, 256, 1), (256, 4, 256, 1), (256, 16, 64, 1), (256, 4, 64, 4)):
        rows = torch.empty(m, 1024, dtype=torch.int8)
        launch = int8_gemm.product_by_run(rows, weight, torch.empty(512, groups, taps), row_scale[:m], None, out[:m])
        kernel = compiled(launch, capability)
        assert "mma" in kernel.asm["ptx"] and not re.search(r"\bfma\.rn\.f32", kernel.asm["ptx"])
        assert kernel.metadata.shared <= SHARED[capability] and stack(kernel) == 0, (m, groups, each, taps)


@needs_triton
@pytest.mark.slow
@pytest.mark.parametrize("capability", [80, 89, 90, 120])
def test_rotations_compile_for_cards_that_are_not_here(
    capability: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With nothing in a stack; what moves between threads of a warp does so by shuffles, not through shared memory."""
    from sdquant.kernels.triton import int8_gemm, rotation

    from .offline import compiled, stack

    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))
    scale = torch.empty(2, 1)
    sizes = ((3072, 256), (3072, 64), (12288, 256), (12288, 1024), (16384, 16), (3072, 128), (20480, 256))
    for columns, group in sizes:
        x = torch.empty(2, columns, dtype=torch.bfloat16)
        for codes in (x.to(torch.int8), x.to(torch.float8_e4m3fn)):
            launch = int8_gemm.quantization(x, codes, scale, None, group)
            launch.arguments["codes"] = launch.arguments["codes"].view(torch.uint8 if group == 16 else torch.int8)
            kernel = compiled(launch, capability)
            assert stack(kernel) == 0 and not re.search(r"\bfma\.rn\.f32", kernel.asm["ptx"]), (columns, group)
            assert kernel.metadata.shared <= 4096 or group > 256, (columns, group)
        kernel = compiled(rotation.rotation(x, group, x), capability)
        assert stack(kernel) == 0 and kernel.asm["ptx"].count("bar.sync") <= (0 if group <= 256 else 99), group


def test_without_triton_nothing_is_read(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "triton", None)  # an import of it raises ImportError
    for name in list(sys.modules):
        if name.startswith("sdquant.kernels.triton.") and not name.endswith((".reader", ".library", ".blocks")):
            monkeypatch.delitem(sys.modules, name)
            monkeypatch.delattr(package, name.rpartition(".")[2])
    imports.launcher.cache_clear()
    try:
        case = blocks_of("q8_0", 4, 64)
        assert not TritonReader().reads(case.form, case.parts, torch.float32)
        assert TritonReader().few(case.form, case.parts, torch.float32) == 0
    finally:
        imports.launcher.cache_clear()


def test_a_cpu_is_left_to_others_and_so_is_what_no_kernel_reads() -> None:
    case = blocks_of("q8_0", 4, 64)
    assert not TritonReader().reads(case.form, case.parts, torch.float32)  # not in the interpreter here
    assert not TritonReader().reads(case.form, case.parts, torch.float64)
    rare = PackedLayout(rows=4, columns=256, codes="codes", packing="iq1_s", group=256)
    assert not TritonReader().reads(rare, case.parts, torch.float32)


@needs_triton
@pytest.mark.parametrize(("capability", "few"), [((7, 5), 1), ((8, 0), 64), ((8, 9), 64), ((9, 0), 1), ((12, 0), 64)])
def test_products_of_a_few_rows_are_for_cards_where_they_are_faster(
    capability: tuple[int, int], few: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Turing has tensor cores, but not by Triton."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: capability)
    case = blocks_of("q8_0", 4, 64)
    parts: Any = {"codes": SimpleNamespace(device=torch.device("cuda:0"))}
    assert TritonReader().few(case.form, parts, torch.bfloat16) == few
    assert (
        TritonReader().few(case.form, parts, torch.float32) == TritonReader().most(case.form, parts, torch.float32) == 1
    )
    # Up to so many both ways are measured.
    assert TritonReader().most(case.form, parts, torch.bfloat16) == (1 if capability == (7, 5) else 64)


def test_importing_the_reader_imports_no_triton() -> None:
    code = "import sys, sdquant.kernels.triton.triton_kernels; print('triton' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "False"


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_on_a_card() -> None:
    *wrong, last = faults("cuda", thorough=True)
    assert wrong == []
    assert int(last.split()[0]) > 350


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_what_the_backends_encode_on_a_card() -> None:
    assert list(of_backends("cuda")) == ["234 looked at"]


def of_backends(device: str, index: int = 0, count: int = 1) -> Iterator[str]:
    """A line for every weight that is not read or decodes to other bits than its backend's, and a last one with their
    number; of part `index` of `count` of the formats."""
    seen, reader = 0, TritonReader()
    for text in (*SPECS, *GGUF)[index::count]:
        spec = backends.parse(text)
        backend = backends.get(spec.scheme.backend)
        for shape in SHAPES[:3]:
            weight = torch.randn(shape, generator=torch.Generator().manual_seed(0))
            try:
                packed = backend.encode(weight.bfloat16(), spec)
            except Unfit:
                continue
            other = backend.for_kernels(packed)
            for held in [packed] if other is packed else [packed, other]:
                form = backend.form(held)
                if form is None:
                    continue
                seen += 1
                on, name = held.to(torch.device(device)), f"{text} {shape}{' apart' * form.apart}"
                for dtype in DTYPES:
                    out = torch.full((form.rows, form.columns), torch.nan, dtype=dtype, device=device)
                    if not reader.reads(form, on.parts, dtype):
                        yield f"{name} is not read"
                        continue
                    reader.decode_into(form, on.parts, out)
                    if not torch.equal(out.cpu(), backend.decode(packed, dtype).view(form.rows, form.columns)):
                        yield f"{name} as {dtype} differs"
    yield f"{seen} looked at"


if __name__ == "__main__":
    for line in of_backends("cpu"):
        print(line)


@pytest.mark.parametrize("fault", ["raises", "is wrong"])
def test_a_kernel_that_does_not_quantize_weights_is_left_out(
    fault: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def launch(form: PackedLayout, parts: dict[str, torch.Tensor], codes: torch.Tensor, scale: torch.Tensor) -> object:
        if fault == "raises":
            raise RuntimeError("out of resource: shared memory")
        return lambda device: (codes.zero_(), scale.zero_())

    def by_rows(weight: torch.Tensor, codes: torch.Tensor, scale: torch.Tensor, sums: None) -> object:
        return lambda device: scale.copy_(int8_reference.quantized_rows(weight, codes)[1].view(-1))

    kernels = SimpleNamespace(quantizes=lambda form: True, requantization=launch, quantization=by_rows)
    monkeypatch.setattr(imports, "eight", lambda device: kernels)
    monkeypatch.setattr(int8_reference, "_quantize", {})
    backend, cpu = backends.get("gguf"), torch.device("cpu")
    packed = backend.encode(torch.randn(20, 512), backends.parse("q8_0"))
    codes, wanted = torch.empty(2, 20, 512, dtype=torch.int8)
    scale = int8_reference.InTriton(cpu).again(backend, packed, backend.form(packed), codes)
    by_torch = int8_reference.Steps(cpu).again(backend, packed, None, wanted)
    assert torch.equal(scale, by_torch.view(-1)) and torch.equal(codes, wanted)
    assert ("shared memory" if fault == "raises" else "its codes are wrong") in caplog.text
