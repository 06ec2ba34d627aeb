"""What other libraries make of a model with ways of theirs to calibrate: NNCF's, and AutoRound.

AutoRound is measured where it can be imported (0.16 was; it is no dependency of the tests): PYTHONPATH=FOLDER after
`pip install --no-deps --target FOLDER auto-round datasets py-cpuinfo pyarrow dill multiprocess xxhash pandas fsspec`.
"""

from __future__ import annotations

import copy
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from torch import nn

NNCF = {"AWQ": "awq", "scale estimation": "scale_estimation", "GPTQ": "gptq"}
GROUP = 32  # of AutoRound's int4, whose scales are float16: 4.5 bits


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


def _nncf(model: nn.Module, calls: list[dict[str, Any]], option: str) -> tuple[nn.Module, float]:
    """Return a copy of the model in int4 in groups of 64, and the bits of its layers' weights for each number."""
    import nncf

    parameters = nncf.AdvancedCompressionParameters(group_size_fallback_mode=nncf.GroupSizeFallbackMode.IGNORE)
    compressed: nn.Module = nncf.compress_weights(
        copy.deepcopy(model), dataset=nncf.Dataset(calls), subset_size=len(calls),
        mode=nncf.CompressWeightsMode.INT4_ASYM, group_size=64, ratio=1.0, all_layers=True,
        advanced_parameters=parameters, **{option: True},
    )  # fmt: skip
    weights = {f"{name}.weight" for name in layers_of(model)}
    plain = {name: tensor.shape for name, tensor in model.state_dict().items()}
    nbytes = 0
    for name, tensor in compressed.state_dict().items():
        if tensor.is_floating_point() and plain.get(name) == tensor.shape:  # NNCF has left it as it is
            nbytes += 2 * tensor.numel() if name in weights else 0
        else:
            nbytes += tensor.numel() * tensor.element_size()
    return compressed, 8 * nbytes / sum(layer.weight.numel() for layer in layers_of(model).values())


def has_autoround() -> bool:
    """Return whether AutoRound can be imported."""
    try:
        import auto_round  # noqa: F401
    except ImportError:
        return False
    return True


def autoround(folder: Path, prompts: Sequence[str], steps: int, size: int) -> tuple[nn.Module, float]:
    """Return the float32 model with the values of AutoRound's int4 (W4A16), and bits as above.

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
    bits = {name: 4 + 16 / GROUP if config.get(name, {}).get("bits", 16) < 16 else 16 for name in layers_of(model)}
    numbers = {name: layer.weight.numel() for name, layer in layers_of(model).items()}
    return model.float(), sum(bits[name] * numbers[name] for name in numbers) / sum(numbers.values())
