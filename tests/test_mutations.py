"""Valid files with a few bytes changed: they are read, or refused with a sentence; nothing else, and never a hang.

Some hundred every day, thousands with the slow run. `python -m bench.mutations` runs 100,000, from other seeds, and
writes what came of them: bench/results/mutations.json has a row of each format, of its last run.
"""

from __future__ import annotations

import json
import os
import random
import signal
import struct
from collections import Counter, defaultdict
from collections.abc import Iterator
from pathlib import Path
from types import FrameType
from typing import Any

import pytest
from safetensors import safe_open
from safetensors.torch import load_file, save_file

import sdquant
from sdquant import backends, demo
from sdquant.formats.gguf.writer import write_gguf
from sdquant.loading.loader import load_model
from sdquant.loading.verification import verify
from sdquant.models.detection import detect
from sdquant.saving.export_gguf import quantize_file
from sdquant.saving.model_files import save

from . import mutation_formats

COUNT = int(os.environ.get("SDQUANT_MUTATIONS", "4000"))
PARTS = 8
LIMIT = 20  # seconds of the process for one file; the slowest take some milliseconds
WAIT = 60 * LIMIT  # seconds of the clock: beside others, at idle priority, a process may wait for minutes
SCHEMES = ("nf4,double_quant", "fp8,packing=float8", "bnb-int8", "qint4", "int4", "sdnq-uint3", "q4_k")
# What other tools write: each format of ComfyUI, NVFP4 in both orders, fine-grained FP8, SDNQ with its extras, and
# those of the hub, torchao, ModelOpt and Nunchaku.
GOLDEN = (
    "comfy_asym_w4a8_g16", "comfy_convrot_w4a4_int4", "comfy_fp8_e4m3_tensor", "comfy_int8_convrot_g16",
    "comfy_int8_rowwise", "comfy_int8_tensorwise", "comfy_mxfp8", "comfy_nvfp4_padded",
    "comfy_svdquant_w4a4_tilepack", "comfy_w6a8_g16", "bfl_nvfp4", "sdnq_fp8_svd", "sdnq_int8_hadamard",
    "sdnq_uint4_codebook", "sdnq_uint4_scale_uint8", "sdnq_uint4_svd_hadamard", "transformers_fp8_block16x32",
    "awq_gemm_w4_g32", "ct_fp8_tensor", "ct_nvfp4", "ct_w4a16_g32_sym", "ct_w8a16_channel", "gptq_w4_asym_autoround",
    "gptq_w4_asym_v1", "hqq_4bit_g64_axis1", "modelopt_compress_fp8", "modelopt_compress_int4_awq",
    "modelopt_compress_int8", "modelopt_export_fp8", "modelopt_export_int8", "modelopt_nvfp4",
    "nunchaku_awq_w4a16_splits6", "nunchaku_svdq_int4", "nunchaku_svdq_nvfp4_wcscales", "torchao_fp8dq_row",
    "torchao_int8dq", "torchao_int8wo_tensor", "torchao_intx_int4", "torchao_mxfp4", "torchao_mxfp8",
)  # fmt: skip
FOLDER = Path(__file__).parent / "backends" / "golden"

pytestmark = pytest.mark.skipif(not hasattr(signal, "SIGALRM"), reason="a hang is seen by an alarm signal")


@pytest.fixture(scope="module")
def originals(tmp_path_factory: pytest.TempPathFactory) -> dict[str, bytes]:
    return sound(tmp_path_factory.mktemp("originals"), encoders=False)


@pytest.fixture(scope="module")
def encoders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, bytes]:
    folder = tmp_path_factory.mktemp("encoders")
    mutation_formats.write_encoders(folder)
    return {path.name: path.read_bytes() for path in sorted(folder.iterdir())}


def sound(folder: Path, *, encoders: bool) -> dict[str, bytes]:
    """One small file of each format, by name with suffix.

    Args:
        folder: to write them in. encoders: text encoders too, which take a tenth of a second each to look at.
    """
    from torch import nn

    source = demo.path("digits-sd") / "unet"
    keep = ["down_blocks", "mid_block", "up_blocks"]  # most layers stay floats
    for scheme in SCHEMES:
        name = scheme.replace(",", "-").replace("=", "-")
        if backends.parse(scheme).scheme.on_the_fly:
            model = load_model(source, scheme, skip=keep, progress=False)
            for child in keep:  # and the file small
                setattr(model, child, nn.Module())
            save(model, folder / f"{name}.safetensors")
        else:
            quantize_file(source, scheme, folder / f"{name}.gguf", progress=False)
    tiny = [("a.weight", (8, 32), "q8_0", bytes(8 * 34)), ("conv.weight", (4, 2, 4, 8), "q4_0", bytes(8 * 18)),
            ("norm.weight", (8,), "f32", bytes(32))]  # fmt: skip
    write_gguf(
        folder / "tiny.gguf", tiny, {"general.architecture": "flux", "words": ["a", "b"], "n": [1, 2], "b": True}
    )
    for name in GOLDEN:
        layer = {key: t for key, t in load_file(FOLDER / f"{name}.safetensors").items() if key.startswith("layer.")}
        words = () if config_of(name) is None else ("quantization_config", "resolved")  # those come from outside
        metadata = {key: text for key, text in _metadata(name).items() if key not in (*words, "golden")}
        save_file(layer, folder / f"{name}.safetensors", metadata)
    mutation_formats.write_layers(folder)
    if encoders:
        mutation_formats.write_encoders(folder)
    return {path.name: path.read_bytes() for path in sorted(folder.iterdir())}


def _metadata(name: str) -> dict[str, str]:
    with safe_open(str(FOLDER / f"{name}.safetensors"), framework="pt") as file:
        return dict(file.metadata())


def config_of(name: str) -> dict[str, Any] | None:
    """The config that is read beside a file; None for files that say themselves what they are."""
    name = name.removesuffix(".safetensors")
    for prefix, method in (("nunchaku_", "nunchaku_lite"), ("modelopt_export_", "modelopt")):
        if name.startswith(prefix):
            return {"quantization_config": {"quant_method": method}}
    if not name.startswith(("sdnq_", "transformers_")) or name not in GOLDEN:
        return None
    return {"quantization_config": {"quant_method": "sdnq", **json.loads(_metadata(name)["quantization_config"])}}


def look(path: Path, *, whole: bool) -> None:
    """What is tried with a file: its header, or all of it."""
    if path.name in mutation_formats.IN_PIPELINES:
        mutation_formats.look(path, whole=whole)
        return
    config = config_of(path.name)
    if config is not None:
        rows = sdquant.dequantize(path, config=config)
        for _ in rows if whole else ():
            pass
        return
    detect(path)
    if whole:
        verify(path, progress=False)


def header_end(name: str, raw: bytes) -> int:
    """Where the header ends: most of what can be wrong is in there."""
    return 8 + struct.unpack("<Q", raw[:8])[0] if name.endswith(".safetensors") else min(len(raw), 4096)


def mutated(name: str, raw: bytes, dice: random.Random) -> bytes:
    """One to four changes."""
    made = bytearray(raw)
    for _ in range(dice.choice((1, 1, 1, 2, 4))):
        if not made:
            break
        end = header_end(name, raw) if dice.random() < 0.85 else len(made)
        at = dice.randrange(max(1, min(end, len(made))))
        match dice.randrange(8):
            case 0:
                made[at] ^= 1 << dice.randrange(8)
            case 1:
                made[at] = dice.randrange(256)
            case 2:
                del made[at : at + dice.choice((1, 2, 8, 100))]
            case 3:
                made[at:at] = dice.randbytes(dice.choice((1, 2, 8)))
            case 4:
                made[at : at + 8] = struct.pack("<Q", dice.choice((0, 1, 2**31, 2**40, 2**63, 2**64 - 1, len(raw))))
            case 5:
                del made[at:]
            case 6:
                other = dice.randrange(len(made))
                made[at : at + 16] = made[other : other + 16]
            case 7:
                digits = [i for i in range(max(0, at - 200), min(at + 200, len(made))) if 48 <= made[i] <= 57]
                if digits:
                    made[dice.choice(digits)] = 48 + dice.randrange(10)
    return bytes(made)


def rang(number: int, frame: FrameType | None) -> None:
    what = f"{LIMIT} s of work" if number == signal.SIGPROF else f"{WAIT} s"
    raise TimeoutError(f"more than {what}")


def listen() -> list[Any]:
    """Let `rang` answer the timers of `outcomes`; return what did before."""
    return [signal.signal(number, rang) for number in (signal.SIGALRM, signal.SIGPROF)]


def _set_timers(work: float, wait: float) -> None:
    signal.setitimer(signal.ITIMER_PROF, work)
    signal.setitimer(signal.ITIMER_REAL, wait)


@pytest.fixture
def alarm() -> Iterator[None]:
    before = listen()
    yield
    _set_timers(0, 0)
    for number, handler in zip((signal.SIGALRM, signal.SIGPROF), before, strict=True):
        signal.signal(number, handler)


@pytest.mark.parametrize(("work", "wait", "text"), [(0.05, 60, "of work"), (60, 0.05, "s$")])
def test_both_timers_end_a_hang(alarm: None, work: float, wait: float, text: str) -> None:
    with pytest.raises(TimeoutError, match=text):
        _set_timers(work, wait)
        while True:
            pass


def test_the_originals_are_sound(originals: dict[str, bytes], tmp_path: Path) -> None:
    """The control: refusing everything would pass the other tests."""
    for name, raw in originals.items():
        (tmp_path / name).write_bytes(raw)
        config = config_of(name)
        if config is None:
            assert detect(tmp_path / name).prequantized
        else:
            weights = dict(sdquant.dequantize(tmp_path / name, config=config))
            assert weights.keys() <= {"layer.weight", "layer.bias"} and weights["layer.weight"].is_floating_point()
        if name != "tiny.gguf":
            look(tmp_path / name, whole=True)


@pytest.mark.parametrize("part", range(PARTS))
def test_no_other_error_and_no_hang(originals: dict[str, bytes], tmp_path: Path, alarm: None, part: int) -> None:
    seed = 0 if COUNT == 4000 else random.randrange(2**32)
    kept = Path(os.environ.get("SDQUANT_KEEP", tmp_path))
    seen = sum(outcomes(originals, tmp_path, f"{seed} {part}", COUNT // PARTS, kept).values(), Counter())
    assert seen["read"] > COUNT // PARTS // 25 and seen["BadFileError"] > COUNT // PARTS // 5, seen
    print(json.dumps(seen))


@pytest.mark.slow
def test_text_encoders(encoders: dict[str, bytes], tmp_path: Path, alarm: None) -> None:
    """With their tokenizers, and with a file of their vision."""
    for name, raw in encoders.items():
        (tmp_path / name).write_bytes(raw)
        look(tmp_path / name, whole=True)
    kept = Path(os.environ.get("SDQUANT_KEEP", tmp_path))
    seen = outcomes(encoders, tmp_path, "0 encoders", COUNT // PARTS, kept)
    for name, counts in seen.items():
        assert counts["read"] and counts["BadFileError"], (name, counts)


def outcomes(originals: dict[str, bytes], folder: Path, seed: str, count: int, kept: Path) -> dict[str, Counter[str]]:
    """Change `count` files in `folder` and look at each; how often those of a format were read, or refused by an error.

    Raises:
        AssertionError: another error, or a hang; the file is in `kept` then.
    """
    dice, seen = random.Random(seed), defaultdict[str, Counter[str]](Counter)
    for number in range(count):
        name = dice.choice(list(originals))
        raw = mutated(name, originals[name], dice)
        path = folder / name
        path.write_bytes(raw)
        _set_timers(LIMIT, WAIT)
        try:
            look(path, whole=number % 4 == 0)
            seen[name]["read"] += 1
        except sdquant.SdquantError as error:
            seen[name][type(error).__name__] += 1
            assert error.what and error.why and error.fix
        except BaseException as error:
            broken = kept / f"broken-{seed.replace(' ', '-')}-{number}-{name}"
            broken.write_bytes(raw)
            raise AssertionError(f"{broken}: {error!r}") from error
        finally:
            _set_timers(0, 0)
    return seen
