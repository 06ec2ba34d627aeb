"""Products by Nunchaku's kernels in diffusers' own layers (`runtime="library"`): what they need, what they are given.

The kernels run on NVIDIA's cards alone, and are downloaded: `nunchaku_ops` stands here for them, and the last test runs
the real ones where there is such a card.
"""

from __future__ import annotations

import contextlib
import copy
import importlib
import io
import sys
import types
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import diffusers.utils
import numpy as np
import pytest
import torch
from peft import LoraConfig
from safetensors.torch import load_file
from torch import Tensor, nn

import sdquant
from sdquant import backends, compat
from sdquant.backends import _nunchaku_find, _nunchaku_library, _nunchaku_tiles
from sdquant.compat import library_kernels
from sdquant.core import Packed, TensorInfo, dtype_name
from sdquant.errors import BackendUnavailableError, IncompatibleError
from sdquant.nn import quantized, quantized_layer
from sdquant.nn.layer_factory import set_compute

from ..compat.machines import card, machine
from ..test_load_modes import images
from . import nunchaku_layers
from .nunchaku_ops import E2M1, Ops, residual, undone
from .test_nunchaku import COMFY, _golden

NAME = "diffusers.quantizers.nunchaku.utils"
HERE = {"kernels": "0.17.2", "diffusers": "0.42.1"}


@pytest.fixture
def ops(monkeypatch: pytest.MonkeyPatch) -> Iterator[Ops]:
    """diffusers' layers with the stand-in for their kernels, and this processor as a Blackwell card."""
    kernels, made = types.ModuleType("kernels"), Ops()
    kernels.get_kernel = lambda *names, **values: types.SimpleNamespace(ops=made)  # type: ignore[attr-defined]
    monkeypatch.setattr(diffusers.utils.constants, "DIFFUSERS_TRUST_REMOTE_KERNELS", True)
    monkeypatch.setattr(_nunchaku_library, "is_nvidia", lambda device: True)
    monkeypatch.setattr(_nunchaku_library, "capability_of", lambda device: (12, 0))
    monkeypatch.setattr(_nunchaku_library, "_versions", lambda: HERE)
    _nunchaku_library.layers.cache_clear()
    with monkeypatch.context() as during:  # other libraries would look for the package, too
        during.setitem(sys.modules, "kernels", kernels)
        during.setattr(diffusers.utils, "is_kernels_available", lambda: True)
        during.setattr(diffusers.utils, "is_kernels_version", lambda *words: True)
        sys.modules.pop(NAME, None)
        _nunchaku_library.layers()
    yield made
    sys.modules.pop(NAME, None)
    _nunchaku_library.layers.cache_clear()


def _layer(packed: Packed, bias: Tensor | None = None, dtype: torch.dtype = torch.bfloat16) -> Any:
    """A layer of the library's runtime, laid out for the card."""
    rows, columns = packed.spec.shape
    floats = nn.Linear(columns, rows, bias=bias is not None, dtype=dtype)
    if bias is not None:
        floats.bias.data = bias.to(dtype)
    layer = quantized_layer(floats, packed, dtype, "library").requires_grad_(False)
    layer.lay_out("cpu")
    return layer


def _read(name: str) -> tuple[dict[str, Tensor], Packed, Tensor]:
    file, found = _golden(name)
    packed = COMFY.read(found, None, file.__getitem__)
    bias = backends.nunchaku_bias([found], ["layer.bias"], ["unsigned" in name], file.__getitem__)
    return file, packed, bias


@pytest.mark.parametrize("name", ["svdq_int4", "svdq_int4_unsigned_fc2", "svdq_nvfp4_wcscales"])
def test_golden_layers(name: str, ops: Ops) -> None:
    """The product of 4-bit activations with what Nunchaku's packer packed, which the kernels get byte by byte."""
    file, packed, bias = _read(name)
    layer, is_nvfp4 = _layer(packed, bias), "nvfp4" in name
    held = layer.packed.parts
    assert torch.equal(held["qweight"], file["layer.qweight"]) and held["proj_up"].equal(file["layer.lora_up"])
    assert torch.equal(held["wscales"].view(torch.uint8), file["layer.wscales"].contiguous().view(torch.uint8))
    x = file["golden.input"].bfloat16()
    with torch.no_grad():
        y = layer(x)
        assert ops.seen == ["quantize", "gemm"] and y.dtype == torch.bfloat16
        assert torch.equal(layer(x[None, None]), y[None, None]) and layer(x[:0]).shape == (0, 128)
    groups = (x.float() / packed.parts["smooth"].float()).view(len(x), -1, 16 if is_nvfp4 else 64)
    steps = groups.abs().amax(-1, keepdim=True) / (6 if is_nvfp4 else 7)
    steps = steps.to(torch.float8_e4m3fn if is_nvfp4 else torch.bfloat16).float()
    scaled = groups / steps
    nearest = E2M1[(scaled.unsqueeze(-1) - E2M1).abs().argmin(-1)] if is_nvfp4 else scaled.round().clamp(-7, 7)
    left = COMFY.decode(packed, torch.float32) - packed.parts["up"].float() @ packed.parts["down"].float().T
    wanted = (nearest * steps).flatten(1) @ (left * packed.parts["smooth"].float()).T
    wanted = wanted + x.float() @ packed.parts["down"].float() @ packed.parts["up"].float().T + bias.float()
    assert (y.float() - wanted).norm() <= 5e-3 * wanted.norm()
    exact = x.float() @ COMFY.decode(packed, torch.float32).T + bias.float()
    assert 0.01 < (y.float() - exact).norm() / exact.norm() < 0.2
    if name == "svdq_int4":  # comfy-kitchen's own, of the same numbers in natural order; it rounds more to 16 bits
        theirs = file["golden.output_w4a4_bf16"].float()
        assert (y.float() - theirs).norm() <= 0.02 * theirs.norm()


def test_modulation(ops: Ops) -> None:
    """AWQ: few rows by one kernel, many by another; the product with the floats, and rows in the model's order."""
    generator = torch.Generator().manual_seed(1)
    weight, bias = torch.randn(768, 128, generator=generator), torch.randn(768, generator=generator)
    file, floats, stored = nunchaku_layers.awq(weight, bias, 6)
    file = {f"layer.{name}": tensor.contiguous() for name, tensor in file.items()}
    (found,) = _nunchaku_find.find({key: info_of(tensor) for key, tensor in file.items()})
    packed = COMFY.read(replace(found, details={**found.details, "splits": 6}), None, file.__getitem__)
    layer, x = _layer(packed, stored), torch.randn(19, 128, generator=generator).bfloat16()
    with torch.no_grad():
        for rows, kernel in ((1, "gemv_awq"), (9, "gemv_awq"), (19, "gemm_awq")):
            wanted = x[:rows].float() @ floats.T + stored
            assert (layer(x[:rows]).float() - wanted).norm() <= 5e-3 * wanted.norm()
            assert ops.seen[-1] == kernel
    assert torch.equal(layer.dequantize(torch.float32), floats)
    again = COMFY.for_files(layer.packed)
    assert all(again.parts[name].equal(part) and again.parts[name].dtype == part.dtype
               for name, part in packed.parts.items())  # fmt: skip


def info_of(tensor: Tensor) -> TensorInfo:
    return TensorInfo(dtype=dtype_name(tensor.dtype), shape=tuple(tensor.shape), nbytes=tensor.nbytes)


def _made(scheme: str, rows: int = 256, columns: int = 384, dtype: torch.dtype = torch.bfloat16) -> Packed:
    weight = torch.randn(rows, columns, generator=torch.Generator().manual_seed(rows)).to(dtype)
    return COMFY.encode(weight, backends.parse(scheme))


@pytest.mark.parametrize("scheme", ["svdq-int4", "svdq-nvfp4", "svdq-int4,rank=48"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_a_layer_is_copied_saved_and_learns_as_a_plain_one(scheme: str, dtype: torch.dtype, ops: Ops) -> None:
    packed, bias = _made(scheme, dtype=dtype), torch.randn(256).to(dtype)
    layer, plain = _layer(packed, bias, dtype), quantized_layer(_linear(bias, dtype), packed, dtype)
    assert layer.packed.nbytes == packed.nbytes and "qweight" in layer.part_names
    x = torch.randn(5, 384).to(dtype)
    with torch.no_grad():
        y, close = layer(x), plain(x)
        assert 0 < (y - close).norm() < 0.25 * close.norm()
        file = io.BytesIO()
        torch.save(layer, file)
        file.seek(0)
        for other in (copy.deepcopy(layer), torch.load(file, weights_only=False)):
            assert torch.equal(other(x), y)
        torch._dynamo.reset()
        assert torch.equal(torch.compile(layer, backend="aot_eager", fullgraph=True)(x), y)
    assert torch.equal(layer.dequantize(), plain.dequantize()) and torch.equal(layer.weight + 0, plain.weight + 0)
    natural = COMFY.for_files(layer.packed)
    assert natural.spec == packed.spec and natural.parts.keys() == packed.parts.keys()
    for name, part in packed.parts.items():
        assert torch.equal(natural.parts[name].view(torch.uint8), part.contiguous().view(torch.uint8)), name
    one, two = COMFY.write("a.weight", layer.packed), COMFY.write("a.weight", packed)
    assert one.keys() == two.keys()
    twin = copy.deepcopy(plain)
    twin.load_state_dict(layer.state_dict())  # in their order, and in that of files
    assert torch.equal(twin.dequantize(), plain.dequantize()) and "codes" in twin.part_names
    layer.load_state_dict(plain.state_dict())
    with torch.no_grad():
        assert torch.equal(layer(x), y)
    grads = []
    for one_of in (layer, plain):
        given = x.clone().requires_grad_()
        one_of(given).sum().backward()
        grads.append(given.grad)
    assert (grads[0] - grads[1]).norm() <= 0.02 * grads[1].norm()


def _linear(bias: Tensor, dtype: torch.dtype) -> nn.Linear:
    floats = nn.Linear(384, 256, dtype=dtype)
    floats.bias.data = bias
    return floats


def test_what_the_kernels_do_not_take_is_computed_by_the_layer(ops: Ops, monkeypatch: pytest.MonkeyPatch) -> None:
    """Sizes that are no whole tiles, floats of 32 bits, factors without room in 16, other products."""
    wide = _made("svdq-int4")
    coarse = Packed(spec=wide.spec, parts={**wide.parts, "scale": wide.parts["scale"].float() * 1.001})
    cases = [
        (_made("svdq-int4", 192), torch.bfloat16), (_made("svdq-nvfp4", 256, 320), torch.bfloat16),
        (wide, torch.float32), (coarse, torch.bfloat16),
    ]  # fmt: skip
    for packed, dtype in cases:
        monkeypatch.setattr("sdquant.backends._comfy_library.is_installed", lambda: False)
        layer, plain = _layer(packed, None, dtype), _layer(packed, None, dtype)
        set_compute(plain, "float")
        x = torch.randn(3, packed.spec.shape[1]).to(dtype)
        with torch.no_grad():
            assert "codes" in layer.part_names and torch.equal(layer(x), plain(x)) and not ops.seen
    layer = _layer(wide)
    with torch.no_grad():
        close = layer.float()(torch.ones(2, 384))
        assert not ops.seen and torch.allclose(close, torch.ones(2, 384) @ layer.dequantize(torch.float32).T, atol=1e-3)
        for compute in ("int8", "float"):
            set_compute(layer, compute)
            assert (layer(torch.ones(20, 384)) - close[0]).norm() < 0.05 * close[0].norm() * 20**0.5
    assert not ops.seen


def test_rows_and_columns_that_were_joined() -> None:
    """Branches of blocks; where the factors of two weights differ, scales have them in float32, and no kernel has."""
    one = _made("svdq-int4")
    assert _nunchaku_tiles.can_tile(one, torch.bfloat16) and not _nunchaku_tiles.can_tile(one, torch.float32)
    from sdquant.backends._nunchaku import _side_by_side, _stacked

    both = _stacked(one, Packed(spec=one.spec, parts={**one.parts, "codes": one.parts["codes"].flip(0)}))
    beside = _side_by_side(one, one)
    for packed in (both, beside):
        assert _nunchaku_tiles.can_tile(packed, torch.bfloat16) and packed.parts["down"].shape[1] == 64
        again = _nunchaku_tiles.natural(_nunchaku_tiles.tiled(packed))
        assert all(torch.equal(again.parts[name], part) for name, part in packed.parts.items())


class TestModels:
    @pytest.fixture
    def anywhere(self, ops: Ops, monkeypatch: pytest.MonkeyPatch) -> Ops:
        """The same of models: the processor has Nunchaku's kernels, as far as the checks go."""
        monkeypatch.setattr(library_kernels, "lack_of_nunchaku", lambda *of: None)
        monkeypatch.setattr(compat, "look_up", lambda query: compat.Row(verdict="works", why="", seen=""))
        return ops

    @pytest.mark.slow
    @pytest.mark.parametrize("kind", ["svdq-nvfp4", "int4"])
    def test_it_draws_in_every_offload_mode_and_is_saved_as_it_is(
        self, kind: str, anywhere: Ops, flux: Path, tmp_path: Path
    ) -> None:
        values: dict[str, Any] = {"dtype": "bfloat16", "progress": False, "components": ("transformer",)}
        path, quant = flux, kind
        if kind == "int4":  # Nunchaku's file
            weights = load_file(flux / "transformer" / "diffusion_pytorch_model.safetensors")
            path, quant = nunchaku_layers.flux(weights).save(tmp_path / "svdq-int4_r16-flux.safetensors", {}), None
            values = {"base": flux, "dtype": "bfloat16", "progress": False}
        plain = sdquant.load_model(path, quant, **values)
        pipe = sdquant.load_model(path, quant, runtime="library", **values)
        (line,) = (line for line in pipe.sdquant.plan.warnings if "Nunchaku's kernels" in line)
        assert "nobody has run this on a card" in line
        expected, exact = images(pipe, 1), images(plain, 1)
        assert {"quantize", "gemm"} <= set(anywhere.seen) and ("gemv_awq" in anywhere.seen) is (kind == "int4")
        assert not np.array_equal(expected, exact) and ((expected.astype(float) - exact) ** 2).mean() < 200
        held = dict(quantized(pipe.transformer))
        tiled = {name for name, packed in held.items() if "qweight" in packed.parts}
        assert len(tiled) > 10 and {name for name in held if name not in tiled} == {
            name for name, packed in held.items() if any(size % 128 for size in packed.spec.shape)
        }
        for mode in ("model", "sequential", "group", "balanced"):
            other = sdquant.load_model(path, quant, mode, runtime="library", **values)
            assert np.array_equal(images(other, 1), expected), mode
        for portable in (False, True) if quant else (False,):
            for name, model in (("one", pipe), ("two", plain)):
                sdquant.save(model, tmp_path / f"{name}{portable}", portable=portable)
            one, two = (_files(tmp_path / f"{name}{portable}") for name in ("one", "two"))
            assert one.keys() == two.keys() and all(one[key].equal(two[key]) for key in one), portable
        again = sdquant.load_model(tmp_path / "oneFalse", dtype="bfloat16", runtime="library", progress=False)
        assert np.array_equal(images(again, 1), expected)

    @pytest.mark.slow
    def test_it_takes_lora(self, anywhere: Ops, flux: Path) -> None:
        given: dict[str, Any] = {"dtype": "bfloat16", "runtime": "library", "components": ("transformer",)}
        pipe = sdquant.load_model(flux, "svdq-int4", progress=False, **given)
        before = images(pipe, 1)
        pipe.transformer.add_adapter(LoraConfig(r=4, target_modules=["to_q"], init_lora_weights=False))
        layer = next(module for module in pipe.transformer.modules() if hasattr(module, "base_layer"))
        layer(torch.randn(3, layer.base_layer.spec.shape[1]).bfloat16()).float().sum().backward()
        assert any(one.grad is not None for one in layer.parameters())
        assert not np.array_equal(images(pipe, 1), before)
        pipe.transformer.delete_adapters("default")
        assert np.array_equal(images(pipe, 1), before)

    def test_quantized_later(self, anywhere: Ops, flux: Path) -> None:
        pipe = sdquant.load_model(flux, "svdq-int4", mode="post", dtype="bfloat16", runtime="library", progress=False)
        assert any("qweight" in packed.parts for _, packed in quantized(pipe.transformer))
        images(pipe, 1)
        assert "gemm" in anywhere.seen


def _files(folder: Path) -> dict[str, Tensor]:
    return {
        f"{path.relative_to(folder)}:{key}": tensor.contiguous().view(torch.uint8)
        for path in sorted(folder.rglob("*.safetensors"))
        for key, tensor in load_file(path).items()
    }


BLACKWELL, HOPPER, ADA, PASCAL = (12, 0), (9, 0), (8, 9), (6, 1)


def _machine(capability: tuple[int, int], *, trusted: bool = True, **more: Any) -> compat.Machine:
    return machine(replace(card("cuda"), capability=capability), newer=HERE, remote_kernels=trusted, **more)


@pytest.mark.parametrize(
    ("here", "why", "fix"),
    [
        (_machine(HOPPER), r"do not run on Hopper cards.*9\.0", 'runtime="plain"'),
        (_machine(ADA), r"need a Blackwell card \(10\.0\) or newer.*8\.9", 'runtime="plain"'),
        (_machine(BLACKWELL), "kernels 0.14 or newer, which is not installed", "[nunchaku]"),
        (_machine(BLACKWELL, trusted=False), "whose publisher it does not know", "TRUST_REMOTE_KERNELS=true"),
    ],
    ids=["hopper", "ada", "no package", "not trusted"],
)
def test_what_is_missing_is_said_before_weights_are_read(here: compat.Machine, why: str, fix: str) -> None:
    """In four-bit floats, which nothing else multiplies; each with what to do. Nothing is imported for that."""
    if "which is not installed" in why:
        here = _without(here, "kernels")
    before = NAME in sys.modules
    with pytest.raises(BackendUnavailableError, match=why) as caught:
        compat.check("svdq-nvfp4", runtime="library", device="cuda:0", machine=here)
    assert fix in caught.value.fix and "svdquant_nvfp4 with runtime='library'" in caught.value.what
    compat.check("svdq-nvfp4", runtime="plain", device="cuda:0", machine=here)
    compat.check("svdq-int4", runtime="library", device="cuda:0", machine=here)  # by comfy-kitchen
    by = library_kernels.kernels_of("svdquant_w4a4", "library", "cuda:0", here)
    assert by is not None and ("with Nunchaku's" if here.devices[0].capability == ADA else "not with Nunchaku's") in by
    assert (NAME in sys.modules) is before


def _without(here: compat.Machine, name: str) -> compat.Machine:
    return replace(here, versions={key: value for key, value in here.versions.items() if key != name})


def test_where_it_can_run() -> None:
    for capability, scheme in ((BLACKWELL, "svdq-nvfp4"), (ADA, "svdq-int4"), ((7, 5), "awq_w4a16")):
        here = _without(_machine(capability), "comfy-kitchen")
        mode = "found" if scheme == "awq_w4a16" else "auto"
        with pytest.warns(compat.UntestedWarning) if "nvfp4" in scheme else contextlib.nullcontext():
            compat.check(scheme, runtime="library", mode=mode, device="cuda:0", machine=here)
    neither = _without(_machine(PASCAL), "comfy-kitchen")
    with pytest.raises(BackendUnavailableError, match=r"comfy-kitchen .* not installed, and Nunchaku's .* Turing"):
        compat.check("svdq-int4", runtime="library", device="cuda:0", machine=neither)
    with pytest.raises(IncompatibleError, match="Nunchaku's are for NVIDIA's cards"):
        compat.check("svdq-nvfp4", runtime="library", device="cpu", machine=_machine(BLACKWELL))


def test_kernels_that_cannot_be_downloaded(ops: Ops, monkeypatch: pytest.MonkeyPatch, flux: Path) -> None:
    """Said before a weight is read."""
    monkeypatch.setitem(sys.modules, NAME, None)  # type: ignore[arg-type]
    monkeypatch.setattr(library_kernels, "lack_of_nunchaku", lambda *of: None)
    monkeypatch.setattr("sdquant.loading.loader.build", lambda *of: pytest.fail("a weight was read"))
    _nunchaku_library.layers.cache_clear()
    with pytest.raises(BackendUnavailableError, match=r"layers for them say: import of .* halted") as caught:
        sdquant.load_model(flux, "svdq-int4", runtime="library", progress=False)
    assert "rootonchair/nunchaku-lite-kernels" in caught.value.fix and caught.value.what == (
        "Cannot load Nunchaku's kernels"
    )


def test_the_stand_in_reads_what_the_packer_packed() -> None:
    """Its product is with the golden weight, decoded by formulas that sdquant's code does not share."""
    for name in ("svdq_int4", "svdq_nvfp4_wcscales"):
        file, _ = _golden(name)
        fp4 = "nvfp4" in name
        left = residual(file["layer.qweight"], file["layer.wscales"], fp4=fp4)
        if fp4:
            left = left * undone(nunchaku_layers.vector, file["layer.wcscales"])[:, None]
        left = left / undone(nunchaku_layers.vector, file["layer.smooth"])
        up, down = (undone(getattr(nunchaku_layers, part), file[f"layer.lora_{part}"]) for part in ("up", "down"))
        wanted = file["golden.weight"].float()
        assert (left + up @ down.T - wanted).norm() <= 3e-4 * wanted.norm()


@pytest.mark.gpu
@pytest.mark.parametrize("scheme", ["svdq-int4", "svdq-nvfp4"])
def test_on_a_card(scheme: str) -> None:
    """The real kernels, where they can be downloaded: nobody has run this yet."""
    name = backends.scheme(scheme).name
    lack = _nunchaku_library.lack_on(name, torch.device("cuda:0"))
    if lack is not None:
        pytest.skip(lack.why)
    importlib.import_module(NAME)
    packed, bias = _made(scheme).to(torch.device("cuda")), torch.randn(256).bfloat16().cuda()
    layer, plain = _layer(packed, bias), quantized_layer(_linear(bias, torch.bfloat16), packed)
    layer.lay_out("cuda:0")
    x = torch.randn(300, 384, device="cuda").bfloat16()
    with torch.no_grad():
        y, close = layer(x), plain(x)
    assert "qweight" in layer.part_names and (y - close).norm() < 0.25 * close.norm()
