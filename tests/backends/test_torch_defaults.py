"""torch's default dtype and device, which people and other loaders set, do not change what is encoded."""

from __future__ import annotations

import ast
import subprocess
import sys
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path

import pytest
import torch

import sdquant
from sdquant import backends
from sdquant.core import registry

TEXTS = [scheme.name for scheme in registry.schemes() if scheme.on_the_fly]
TEXTS += ["sdnq-uint4,svd,hadamard", "int4,range"]
CREATE = {
    "arange", "as_tensor", "asarray", "empty", "empty_strided", "eye", "full", "linspace", "logspace", "normal",
    "ones", "rand", "randint", "randn", "randperm", "scalar_tensor", "tensor", "tril_indices", "triu_indices", "zeros",
}  # fmt: skip
OF_INTEGERS = {"arange", "randint", "randperm", "tril_indices", "triu_indices"}
# Files that leave the device to torch, and why.
EXCEPTIONS = {
    "models/dummy_inputs.py": "each call is within `torch.device(...)`",
    "hosts/comfy_ops.py": "ComfyUI's layers get their memory where torch's would",
}


@contextmanager
def default_dtype(dtype: torch.dtype) -> Iterator[None]:
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        yield
    finally:
        torch.set_default_dtype(before)


def check(text: str, defaults: AbstractContextManager[object]) -> None:
    weight = torch.randn(64, 256, generator=torch.Generator().manual_seed(0), dtype=torch.float32)
    spec = backends.parse(text)
    before = weight.clone()
    with defaults:
        parts = backends.encode(weight, spec).parts
    assert torch.equal(weight, before)  # a float32 one is not copied for the encoder
    wanted = backends.encode(weight, spec).parts
    assert set(parts) == set(wanted)
    for name, part in parts.items():
        assert part.dtype is wanted[name].dtype
        assert part.device == weight.device
        bits, wanted_bits = (one.reshape(-1).view(torch.uint8) for one in (part, wanted[name]))
        assert torch.equal(bits, wanted_bits)


@pytest.mark.parametrize("default", [torch.bfloat16, torch.float64], ids=str)
@pytest.mark.parametrize("text", TEXTS)
def test_the_same_parts(text: str, default: torch.dtype) -> None:
    check(text, default_dtype(default))


def test_the_same_parts_beside_another_device() -> None:
    """On the meta device nothing has values. In a new process, so that what schemes compute once is not there yet."""
    code = "from tests.backends.test_torch_defaults import *\nfor one in TEXTS: check(one, torch.device('meta'))"
    result = subprocess.run([sys.executable, "-c", code], cwd=Path(__file__).parents[2], capture_output=True, text=True)
    assert result.returncode == 0, result.stderr


def test_each_new_tensor_names_its_dtype_and_device() -> None:
    root = Path(sdquant.__file__).parent
    unnamed, excepted = [], set()
    for path in sorted(root.rglob("*.py")):
        for call in ast.walk(ast.parse(path.read_text())):
            if not isinstance(call, ast.Call) or not isinstance(call.func, ast.Attribute):
                continue
            of, name = call.func.value, call.func.attr
            if not isinstance(of, ast.Name) or of.id != "torch" or name not in CREATE:
                continue
            names = {keyword.arg for keyword in call.keywords}
            missing = {"device"} if name in OF_INTEGERS else {"dtype", "device"}
            missing = set() if None in names else missing - names
            file = str(path.relative_to(root))
            if missing == {"device"} and file in EXCEPTIONS:
                excepted.add(file)
            elif missing:
                unnamed.append(f"{file}:{call.lineno}: {name} without {' and '.join(sorted(missing))}")
    assert unnamed == []
    assert excepted == set(EXCEPTIONS)
