"""What is compiled of every kernel for cards that are not here, and what it asks of them at most."""

from __future__ import annotations

import re
from collections.abc import Iterator
from importlib import import_module
from pathlib import Path

import pytest
import yaml

triton = pytest.importorskip("triton")

from .configurations import KERNELS, Configuration, configurations, decoding, products, weights  # noqa: E402
from .offline import TARGETS, Code, Target, compiled, measured  # noqa: E402

LIMITS = yaml.safe_load(Path(__file__).with_name("limits.yaml").read_text())
DAILY = ("sm_80", "sm_89", "sm_90", "sm_120", "gfx942")
OTHERS = tuple(name for name in TARGETS if name not in DAILY and name != "sm_75")
MATRICES = re.compile(r"\d+ rows|by |branch")


def limit(of: Configuration, target: Target) -> float | None:
    """Instructions for a number, at most; None where threads have so few that the rest of the code is most of it."""
    case = re.split(r" as |, ", of.name)[0]
    found = LIMITS["instructions"].get(of.kernel, {})
    row = found.get(case, found.get("others")) if isinstance(found, dict) else found
    return None if row is None or of.each(target) < 1 else float(row[target.is_amd])


def instructions(of: Configuration, code: Code, target: Target) -> float:
    """Instructions for a number: of the loop, if there is one. Weights that are quantized again are read in two."""
    if not code.loops:
        return code.instructions / of.each(target)
    return (sum(code.loops) if of.kernel.startswith("again") else max(code.loops)) / of.each(target)


def faults(of: Configuration, target: Target) -> Iterator[str]:
    kernel = compiled(of.launch, target)
    code = measured(kernel)
    if code.shared > target.shared:
        yield f"{of.title}: {code.shared} bytes of shared memory, of {target.shared}"
    # 48 KB is what every card gives a program that does not ask for more.
    elif code.shared > (most := LIMITS["shared"].get(of.kernel, 48 << 10)):
        yield f"{of.title}: {code.shared} bytes of shared memory, and {most} were enough"
    if code.stack > (most := LIMITS["stack"].get(of.kernel, 0)) and not target.is_amd:
        yield f"{of.title}: {code.stack} bytes do not fit into registers, and {most} did not before"
    if code.stack and target.is_amd:
        yield f"{of.title}: {code.stack} registers are spilled"
    allowed, found = limit(of, target), instructions(of, code, target)
    if allowed is not None and found > allowed:
        yield f"{of.title}: {found:.1f} instructions for a number, and {allowed} were enough"
    is_needed = bool(MATRICES.match(of.kernel))
    # AMD's multiply float32, too, and as exactly as other instructions.
    if code.matrices != is_needed and (is_needed or not target.is_amd):
        yield f"{of.title}: {'no ' if not code.matrices else ''}tensor cores are used"


@pytest.mark.parametrize("name", DAILY)
def test_two_kernels_for_each_card(name: str, compiled_kernels: Path) -> None:
    target = TARGETS[name]
    some = [next(of for of in decoding(target) if of.name == "nf4 as torch.bfloat16")]
    some += [next(of for of in products(target) if of.name.startswith("q4_k 33") and of.kernel == "64 rows by 64")]
    assert [fault for of in some for fault in faults(of, target)] == []


@pytest.mark.slow
@pytest.mark.parametrize("name", DAILY)
def test_every_configuration(name: str, compiled_kernels: Path) -> None:
    target = TARGETS[name]
    assert [fault for of in configurations(target) for fault in faults(of, target)] == []


@pytest.mark.slow
@pytest.mark.parametrize("name", OTHERS)
def test_one_in_twelve_for_other_cards(name: str, compiled_kernels: Path) -> None:
    """Each of them compiles, and fits into the card's memory."""
    target = TARGETS[name]
    for of in [*configurations(target)][::12]:
        assert compiled(of.launch, target).metadata.shared <= target.shared, of.title


def test_every_kernel_has_configurations() -> None:
    found = set()
    for path in Path(import_module("sdquant.kernels.triton").__path__[0]).glob("*.py"):
        found |= set(re.findall(r"@triton\.jit\ndef (\w+_kernel)\(", path.read_text()))
    assert found == set(KERNELS)
    made = {of.launch.kernel.fn.__name__ for of in configurations(TARGETS["sm_80"])}
    assert made == set(KERNELS)


def test_every_packing_has_limits() -> None:
    limited = LIMITS["instructions"]["decode"]
    packings = {case.form.packing for case, _, _ in weights()}
    assert packings == {case.form.packing for case, _, _ in weights() if case.name in limited}
