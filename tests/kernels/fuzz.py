"""Every function of the C extension on random shapes, held against torch: what `sanitized` runs.

Tensors have memory of their own that ends with their last number, and often begin within a vector; memory that kernels
use again is new for each call. Threads share even the smallest work.
"""

from __future__ import annotations

import contextlib
import os
import random
import time
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from sdquant import backends
from sdquant.core import Geometry, hadamard
from sdquant.core.backend import Packed, Unfit
from sdquant.core.gguf_types import TYPES as BLOCKS
from sdquant.core.packed_layout import Activations
from sdquant.kernels import expand_rows, im2col, int8_linear, int8_reference, workspace
from sdquant.kernels import hadamard as rotations
from sdquant.kernels.cpu import extension, int8, int8_epilogue, int8_gemm, layout_descriptors, narrow, threads
from sdquant.kernels.cpu.cpu_kernels import Native
from sdquant.nn import quantized_layer

from .test_expansion import values_of
from .test_native import DTYPES, ISAS, multiplied
from .test_packed_layout import SPECS

BRANCHES = ("sdnq-uint4,svd", "sdnq-int8,svd", "sdnq-uint4,svd,hadamard")
SCHEMES = (*SPECS, *BRANCHES, *(one.name for one in backends.get("gguf").schemes if one.name in BLOCKS))
SECONDS = "SDQUANT_FUZZ_SECONDS"
ROWS = (1, 2, 3, 4, 5, 7, 8, 9, 12, 13, 31, 32, 33, 63, 64, 65, 77, 96, 97, 130, 255, 257, 512, 600)
FEATURES = (1, 2, 3, 4, 7, 8, 15, 16, 17, 31, 32, 33, 48, 63, 64, 65, 80, 96, 127, 128, 129, 192, 200, 255, 256, 257)
LARGER = (*FEATURES, 320, 384, 500, 512, 576, 768, 1000, 1024, 1280)


def own(x: Tensor) -> Tensor:
    """The same numbers in memory that ends with them, and begins somewhere."""
    before = random.choice((0, 0, 1, 3, 8))
    memory = torch.empty(before + x.numel(), dtype=x.dtype)
    memory[before:].view(x.shape).copy_(x)
    return memory[before:].view(x.shape)


def results(*shape: int, dtype: torch.dtype) -> Tensor:
    return own(torch.full(shape, 77 if dtype == torch.int8 else torch.nan, dtype=dtype))


def encoded(text: str, weight: Tensor) -> Packed | None:
    spec = backends.parse(text)
    with contextlib.suppress(Unfit):
        packed = backends.get(spec.scheme.backend).encode(weight, spec)
        return replace(packed, parts={name: part.clone() for name, part in packed.parts.items()})
    return None


def weight_of(shape: tuple[int, ...]) -> Tensor:
    return torch.randn(shape).mul_(random.choice((1e-4, 0.02, 1.0))).to(random.choice(DTYPES))


def near(got: Tensor, exact: Tensor, sizes: Tensor, dtype: torch.dtype) -> bool:
    """Within sums in float32 and one rounding; `sizes`: sums of magnitudes."""
    allowed = torch.finfo(dtype).eps * exact.abs() + 2e-5 * sizes + torch.finfo(dtype).smallest_normal * 2
    return bool(((got.double() - exact).abs() <= allowed).all())


def weights(rows: int) -> str:
    """decode, part, rounded, recode, product; of one weight, which takes longest to encode, in all dtypes."""
    text, shape = random.choice(SCHEMES), (random.choice(FEATURES), random.choice(LARGER))
    packed = encoded(text, weight_of(shape))
    form = None if packed is None else packed.spec.scheme.codec.form(packed)
    if packed is None or form is None:
        return ""
    for dtype in DTYPES:
        if Native().reads(form, packed.parts, dtype):
            decoded(packed, form, dtype, f"{text} {shape} {dtype}")
            for m in (rows, *random.sample(ROWS, 3)):
                multiplied_by(m, packed, form, dtype, f"{text} {shape} {dtype} {m}")
    if int8_epilogue.recodes(form, packed.parts):
        codes, scales = results(*shape, dtype=torch.int8), results(shape[0], dtype=torch.float32)
        int8_epilogue.recode(form, packed.parts, codes, scales)
        wanted, by = int8_reference.quantized_rows(packed.spec.scheme.codec.decode(packed, torch.float32))
        assert torch.equal(codes, wanted) and torch.equal(scales, by.view(-1)), f"recode {text} {shape}"
    return text


def decoded(packed: Packed, form: Any, dtype: torch.dtype, of: str) -> None:
    reader, wanted = Native(), packed.spec.scheme.codec.decode(packed, dtype)
    out = results(*wanted.shape, dtype=dtype)
    reader.decode_into(form, packed.parts, out)
    assert torch.equal(out, wanted), f"decode {of}"
    start = random.randrange(len(wanted))
    some = wanted[start : random.randint(start + 1, len(wanted))]
    out = results(*some.shape, dtype=dtype)
    if reader.rows_into(form, packed.parts, start, start + len(some), out):
        assert torch.equal(out, some), f"part {start} {len(some)} {of}"
        wide = results(*some.shape, dtype=torch.float32)
        assert reader.rounded(form, packed.parts, dtype, start, start + len(some), wide)
        assert torch.equal(wide, some.float()), f"rounded {start} {len(some)} {of}"


def multiplied_by(rows: int, packed: Packed, form: Any, dtype: torch.dtype, of: str) -> None:
    reader, backend = Native(), packed.spec.scheme.codec
    if not reader.few(form, packed.parts, dtype):
        return
    x = own(torch.randn(rows, form.columns).to(dtype))
    bias = own(torch.randn(form.rows).to(dtype)) if rows % 2 else None
    y = results(rows, form.rows, dtype=dtype)
    reader.product(form, packed.parts, x, bias, y)
    weight = multiplied(reader, backend, packed, dtype).double()
    exact = F.linear(x.double(), weight, None if bias is None else bias.double())
    sizes = F.linear(x.double().abs(), weight.abs(), None if bias is None else bias.double().abs())
    assert near(y, exact, sizes, dtype), f"product {of}"


def layers(rows: int) -> str:
    """Layers of one or more dimensions, some strided, in floats and in integers; twice, as the first call prepares."""
    text, compute = random.choice(SCHEMES), random.choice((None, "int8", "int8"))
    dtype, is_image = random.choice(DTYPES), random.random() < 0.3
    inputs, outputs = random.choice(LARGER), random.choice(FEATURES)
    if is_image:
        inputs, size = random.choice((3, 16, 32, 64)), random.choice((1, 3))
        how = {"stride": random.choice((1, 2)), "padding": random.choice((0, 1)), "dilation": random.choice((1, 2))}
        floats: Any = nn.Conv2d(inputs, outputs, size, **how)
        x = torch.randn(random.choice((1, 2)), inputs, random.choice((5, 8, 11)), random.choice((5, 9)))
        x = x.contiguous(memory_format=torch.channels_last) if random.random() < 0.5 else x
    else:
        floats, x = nn.Linear(inputs, outputs, bias=rows % 3 > 0), torch.randn(rows, inputs)
    floats = floats.to(dtype).requires_grad_(False)
    packed = encoded(text, floats.weight.data)
    if packed is None:
        return ""
    layer = quantized_layer(floats, packed, compute=compute)
    x = x.to(dtype)
    if not is_image:
        way = random.choice(("own", "columns", "turned", "rows"))
        x = {
            "own": own, "columns": lambda x: x.repeat_interleave(2, 1)[:, ::2], "turned": lambda x: x.T.contiguous().T,
            "rows": lambda x: F.pad(x, (0, 3))[:, :-3],
        }[way](x)  # fmt: skip
    with torch.no_grad():
        wanted = floats.double()
        wanted.weight.data = layer.dequantize(torch.float32).double()
        exact = wanted(x.double())
        for _ in range(2):
            y = layer(x)
            error = float((y.double() - exact).norm() / (exact.norm() + 1e-9))
            most = 0.03 if compute or "act" in text else 3 * torch.finfo(dtype).eps + 1e-5
            assert y.shape == exact.shape and error < most, (
                f"{text} {compute} {floats} {tuple(x.shape)} {dtype} {error}"
            )
        if not is_image:
            assert layer(x[:0]).shape == (0, outputs)
    return f"{text} {compute or 'float'}"


def activations(rows: int) -> str:
    """quantize, int8_codes, int8_numbers, int8_largest, int8_last, finish."""
    columns, dtype = random.choice(LARGER), random.choice(DTYPES)
    x = own(torch.randn(rows, columns).to(dtype))
    x[random.randrange(rows)] = 0
    codes, scales = results(rows, columns, dtype=torch.int8), results(rows, dtype=torch.float32)
    sums = own(torch.zeros(rows, dtype=torch.int32))
    int8_epilogue.quantize_rows(x, codes, scales, sums)
    wanted, by = int8_reference.quantized_rows(x)
    assert torch.equal(codes, wanted) and torch.equal(scales, by.view(-1)), f"quantize {rows} {columns} {dtype}"
    assert torch.equal(sums.long(), codes.long().sum(1))
    if int8.sizes(columns) is not None:
        how = Activations(bound=127.5, low=-128.0, high=127.0)
        by_c, step = int8.codes_of(x, rows, how)
        assert (by_c.float() * step[:, None] - x.float()).abs().le(step[:, None] * 0.51 + x.float().abs() * 0.01).all()
        for kind, limits in (("int", (127.5, -128.0, 127.0)), ("float8_e4m3fn", (448.0, -448.0, 448.0))):
            numbers, step = int8.numbers_of(x, rows, limits, kind, True)
            off = (numbers.float() - x.float()).abs().amax(1)
            assert bool((off <= x.float().abs().amax(1) * 0.07 + 1e-6).all()), (
                f"numbers {kind} {rows} {columns} {dtype}"
            )
        images = own(torch.randn(1, columns, 3, random.choice((1, 5, 17))).to(dtype))
        last = int8._channels_last(images)
        assert torch.equal(last, images) and last.is_contiguous(memory_format=torch.channels_last)
        assert torch.equal(int8._largest(last), last.abs().amax(1).float().view(-1)), f"largest {columns} {dtype}"
    n = random.choice(FEATURES)
    totals = own(torch.randint(-(2**24), 2**24, (rows, n), dtype=torch.int32))
    of_weight, bias = own(torch.rand(n)), own(torch.randn(n).to(dtype))
    added = own(torch.randint(-9, 9, (n,), dtype=torch.int32))
    out = results(rows, n, dtype=dtype)
    int8_epilogue.finish(totals, sums, added, scales, of_weight, bias, out)
    whole = (totals + sums[:, None] * added).float() * scales[:, None] * of_weight + bias.float()
    assert torch.equal(out, whole.to(dtype)), f"finish {rows} {n} {dtype}"
    return "activations"


def rotated(rows: int) -> str:
    """rotate, rotate_within, code_within."""
    group, dtype = random.choice((4, 16, 64, 256)), random.choice(DTYPES)
    x = own(torch.randn(rows, group * random.choice((1, 2, 3, 5))).to(dtype))
    exact = hadamard.rotate_by_matrix(x.double(), group)
    limit = 4 * torch.finfo(dtype).eps * exact.abs().max()
    assert bool((rotations.rotate(x, group).double() - exact).abs().max() <= limit), f"rotate {rows} {group} {dtype}"
    shape = rows, x.shape[1] // group
    y, largest, bounds = (
        results(*x.shape, dtype=torch.float32),
        results(*shape, dtype=torch.float32),
        torch.empty(shape),
    )
    from sdquant.kernels.cpu import rotation

    if rotation.rotate_within(x, group, y, largest, bounds):
        assert torch.allclose(y.double(), exact, rtol=1e-5, atol=1e-5)
        step = own(torch.full((rows, 1), float(y.abs().max()) / 127))
        codes, _ = rotation.code_within(y, group, step, bounds, -128, 127)
        assert bool((codes.float() * step - y).abs().max() <= step.max() * 0.501 + bounds.max()), (
            f"code_within {rows} {group} {dtype}"
        )
    return "rotated"


def patches(rows: int) -> str:
    """patches: of images of numbers of 2 and of 4 bytes."""
    how = Geometry(
        stride=(random.choice((1, 2)), 1), padding=(random.choice((0, 1, 2)), 1),
        dilation=(1, random.choice((1, 2))), groups=1,
    )  # fmt: skip
    x = own(torch.randn(2, random.choice((1, 3, 17)), 4 + rows % 7, 6).to(random.choice(DTYPES)))
    kernel = random.choice((1, 3)), random.choice((1, 2))
    places = im2col.outputs(x.shape[2:], kernel, how)
    got = im2col.copied(x, kernel, how, places)
    assert torch.equal(got, im2col.patches(x, kernel, how).reshape(got.shape)), f"patches {x.shape} {kernel} {how}"
    return "patches"


def expanded(rows: int) -> str:
    """expand: codes of 4 and 6 bits."""
    bits, group, groups = random.choice((4, 6)), random.choice((4, 8, 12, 16, 48)), random.choice((1, 2, 3, 9))
    columns = group * groups
    codes = own(torch.randint(0, 256, (rows, columns * bits // 8), dtype=torch.uint8))
    scale = own(torch.rand(rows, groups) * 60)
    table = own(torch.rand(random.choice(((16,), (rows, 16)))) * 8 - 4) if bits == 4 else None
    out = results(rows, columns, dtype=torch.int8)
    if not expand_rows(codes, bits, scale, table, out):
        return ""
    wanted = values_of(codes, bits, table).view(rows, groups, group) * scale[..., None]
    wanted = wanted.round_().clamp_(-127, 127).view(rows, columns).to(torch.int8)
    assert torch.equal(out, wanted), f"expand {bits} {group} {groups} {rows}"
    return "expanded"


def by_turns(rows: int) -> str:
    """by_turns: scales that go by turns."""
    from sdquant.kernels import decode_by_turns

    bits, width, dtype = random.choice((4, 8)), 2 * random.choice(FEATURES), random.choice(DTYPES)
    stored = torch.randint(0, 1 << bits, (rows, width), dtype=torch.uint8)
    codes = own(stored if bits == 8 else stored[:, ::2] | stored[:, 1::2] << 4)
    scale, shift = own(torch.rand(1, width)), own(torch.rand(1, width)) if rows % 2 else None
    out = results(rows, width, dtype=dtype)
    assert decode_by_turns(codes, bits, 0, scale, shift, out)
    wanted = stored.float() * scale if shift is None else stored.float() * scale - shift
    assert torch.equal(out, wanted.to(dtype)), f"by_turns {bits} {width} {rows} {dtype}"
    return "by turns"


def branches(rows: int) -> str:
    """branch_lay, branch."""
    dtype, inputs = random.choice((torch.float32, torch.bfloat16)), 2 * random.choice(FEATURES)
    outputs, rank = random.choice(FEATURES), 2 * random.choice((1, 2, 8, 15, 16, 17, 33))
    x, down, up = (own(torch.randn(shape).to(dtype)) for shape in ((rows, inputs), (inputs, rank), (outputs, rank)))
    y = own(torch.zeros(rows, outputs, dtype=dtype))
    if not narrow.add_product(y, x, down, up, is_turned=False):
        return ""
    exact = x.double() @ down.double() @ up.double().T
    assert float((y.double() - exact).norm() / exact.norm()) < 4 * torch.finfo(dtype).eps
    return "branches"


CASES: tuple[Callable[[int], str], ...] = (
    weights, weights, layers, layers, layers, activations, rotated, patches, expanded, by_turns, branches,
)  # fmt: skip


@contextlib.contextmanager
def smallest() -> Iterator[None]:
    """Integers at any size; threads for any work; memory that nobody used before."""
    kept: list[Tensor] = []

    def address(size: int) -> int:
        del kept[:-8]
        kept.append(torch.empty(size, dtype=torch.int8))
        return kept[-1].data_ptr()

    least = int8_linear.Least(rows=1, again=1, channels=1, columns=1)
    before = threads._LARGE, threads.ALONE, int8_gemm.address
    for name in ("BY_C", "BY_AMX", "BY_AVX2"):
        setattr(int8_linear, name, least)
    threads._LARGE, threads.ALONE, int8_gemm.address = 64, 128, address
    try:
        yield
    finally:
        threads._LARGE, threads.ALONE, int8_gemm.address = before


def main() -> int:
    """Run cases for so many seconds; each begins with a seed of its own, which an error names."""
    native: Any = extension()
    end, seed = time.monotonic() + float(os.environ.get(SECONDS, "600")), int(os.environ.get("SDQUANT_FUZZ_SEED", "0"))
    done: Counter[str] = Counter()
    wrong = 0
    with smallest():
        while time.monotonic() < end:
            random.seed(seed)
            torch.manual_seed(seed)
            case, name = random.choice(CASES), random.choice(ISAS)
            native.choose(name)
            layout_descriptors._plan.cache_clear()
            int8_gemm.sizes.cache_clear()
            torch.set_num_threads(random.choice((1, 2, 3)))
            try:
                done[f"{name}: {case(random.choice(ROWS))}"] += 1
                workspace.release()
            except Exception as error:
                wrong += 1
                print(f"seed {seed}, {name}, {case.__name__}: {type(error).__name__}: {error}", flush=True)
            seed += 1
    for what, count in sorted(done.items()):
        print(f"{count:6d}  {what}")
    print(f"{done.total() + wrong} cases, {wrong} wrong")
    return wrong > 0
