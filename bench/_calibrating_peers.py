"""What other libraries make of a model with ways of theirs to calibrate: NNCF's, and AutoRound.

AutoRound is measured where it can be imported (0.16 was; it is no dependency of the tests): PYTHONPATH=FOLDER after
`pip install --no-deps --target FOLDER auto-round datasets py-cpuinfo pyarrow dill multiprocess xxhash pandas fsspec`.
"""

from __future__ import annotations

import copy
import dataclasses
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from torch import nn

NNCF = {"AWQ": "awq", "scale estimation": "scale_estimation", "GPTQ": "gptq"}
GROUP = 32  # of AutoRound's int4, whose scales are float16: 4.5 bits


@dataclasses.dataclass(frozen=True, kw_only=True)
class Compressed:
    """What a library made of a network.

    Attributes:
        model: computes in float32. nbytes: of the weights that are quantized. values: the numbers in these.
        layers: how many they are. total: the numbers in the weights of all linear and convolution layers.
    """

    model: nn.Module
    nbytes: float
    values: int
    layers: int
    total: int

    @property
    def bits(self) -> float:
        """Return the bits of all layers' weights for each number, of those as well that are left as bfloat16."""
        return 8 * (self.nbytes + 2 * (self.total - self.values)) / self.total


def layers_of(model: nn.Module) -> dict[str, nn.Module]:
    """Return the layers whose weights are quantized, by path."""
    return {name: m for name, m in model.named_modules() if isinstance(m, (nn.Linear, nn.Conv2d))}


def nncf_ways(fresh: Any, calls: list[dict[str, Any]]) -> Iterator[tuple[str, Any]]:
    """Yield the name of each of NNCF's ways, and what compresses a model by it.

    Args:
        fresh: returns the float32 model. calls: of that model, to calibrate with.
    """
    for way, option in NNCF.items():
        yield f"NNCF int4, {way}", lambda option=option: _nncf(fresh(), calls, option)


def _nncf(model: nn.Module, calls: list[dict[str, Any]], option: str) -> Compressed:
    """Compress the linear and convolution layers of a copy of the model to int4 in groups of 64."""
    import nncf

    parameters = nncf.AdvancedCompressionParameters(group_size_fallback_mode=nncf.GroupSizeFallbackMode.IGNORE)
    compressed: nn.Module = nncf.compress_weights(
        copy.deepcopy(model), dataset=nncf.Dataset(calls), subset_size=len(calls),
        mode=nncf.CompressWeightsMode.INT4_ASYM, group_size=64, ratio=1.0, all_layers=True,
        advanced_parameters=parameters, ignored_scope=nncf.IgnoredScope(types=["embedding"], validate=False),
        **{option: True},
    )  # fmt: skip
    numbers = {f"{name}.weight": layer.weight.numel() for name, layer in layers_of(model).items()}
    plain = {name: tensor.shape for name, tensor in model.state_dict().items()}
    kept = {
        name
        for name, tensor in compressed.state_dict().items()
        if tensor.is_floating_point() and plain.get(name) == tensor.shape  # NNCF has left it as it is
    }
    nbytes = sum(t.numel() * t.element_size() for name, t in compressed.state_dict().items() if name not in kept)
    quantized = [count for name, count in numbers.items() if name not in kept]
    return Compressed(
        model=compressed, nbytes=nbytes, values=sum(quantized), layers=len(quantized), total=sum(numbers.values())
    )


def has_autoround() -> bool:
    """Return whether AutoRound can be imported."""
    try:
        import auto_round  # noqa: F401
    except ImportError:
        return False
    return True


def autoround(folder: Path, prompts: Sequence[str], steps: int, size: int) -> Compressed:
    """Return the model with the values of AutoRound's int4 (W4A16).

    Args:
        folder: of the pipeline. prompts: it calibrates with. size: of an image's sides, in pixels.
    """
    from auto_round import AutoRound

    with tempfile.TemporaryDirectory() as work:
        table = Path(work) / "prompts.tsv"
        lines = (f"{number}\t{prompt}\n" for number, prompt in enumerate(prompts))
        table.write_text("id\tcaption\n" + "".join(lines), encoding="utf-8")
        tuner = AutoRound(
            str(folder), scheme="W4A16", group_size=GROUP, iters=200, nsamples=len(prompts), batch_size=1,
            dataset=str(table), num_inference_steps=steps, calib_num_inference_steps=steps, guidance_scale=1.0,
            enable_torch_compile=False, device_map="cpu", pipeline_call_kwargs={"height": size, "width": size},
        )  # fmt: skip
        model, config = tuner.quantize()
    numbers = {name: layer.weight.numel() for name, layer in layers_of(model).items()}
    quantized = [count for name, count in numbers.items() if config.get(name, {}).get("bits", 16) < 16]
    return Compressed(
        model=model.float(), nbytes=sum(quantized) * (4 + 16 / GROUP) / 8, values=sum(quantized),
        layers=len(quantized), total=sum(numbers.values()),
    )  # fmt: skip
