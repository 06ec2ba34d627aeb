"""What sdquant loads, held against what diffusers loads from the same folder."""

from __future__ import annotations

import contextlib
import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

import sdquant
from sdquant.errors import BudgetError
from sdquant.nn.weights import plain, quantized

from .pipeline_factory import pipeline_class, rows, silent

LEAST_SNR = 40.0  # dB: layers on packed weights add up in another order than torch's on decoded ones


def reference(folder: Path, name: str, dtype: torch.dtype = torch.float32) -> Any:
    """What diffusers makes of the folder."""
    index = json.loads((folder / "model_index.json").read_text())
    left_out = {part: None for part, row in index.items() if row == [None, None]}  # diffusers wants it said again
    with silent():
        return pipeline_class(name).from_pretrained(str(folder), torch_dtype=dtype, local_files_only=True, **left_out)


def modules(pipe: Any) -> dict[str, nn.Module]:
    """A pipeline's components that are modules."""
    return {name: part for name, part in pipe.components.items() if isinstance(part, nn.Module)}


def same_pipeline(loaded: Any, known: Any) -> None:
    """Both have the same components, of the same classes."""
    assert type(loaded) is type(known)
    kinds = [{name: type(part) for name, part in pipe.components.items()} for pipe in (loaded, known)]
    different = _differences(*kinds)
    assert not different, different
    left_out = {"_name_or_path"}
    first, second = ({k: v for k, v in pipe.config.items() if k not in left_out} for pipe in (loaded, known))
    different = _differences(first, second)
    assert not different, different


def same_config(loaded: nn.Module, known: nn.Module) -> None:
    """Both have the same config."""
    configs = []
    for part in (loaded, known):
        config: Any = getattr(part, "config", {})
        values = config.to_dict() if hasattr(config, "to_dict") else dict(config)
        configs.append(_without_places(values))
    different = _differences(*configs)
    assert not different, different


def _without_places(values: dict[str, Any]) -> dict[str, Any]:
    """A config without what tells how it was loaded."""
    return {
        key: _without_places(value) if isinstance(value, dict) else value
        for key, value in values.items()
        if key not in ("_name_or_path", "dtype")
    }


def _differences(one: dict[str, Any], other: dict[str, Any]) -> dict[str, Any]:
    """What two tables have differently: key -> both values."""
    return {key: (one.get(key), other.get(key)) for key in {*one, *other} if one.get(key) != other.get(key)}


def same_tensors(loaded: nn.Module, known: nn.Module) -> None:
    """Both have the same parameters and buffers, those that no file holds too: names, dtypes, shapes and bits."""
    for mine, theirs in (
        (dict(loaded.state_dict()), dict(known.state_dict())),
        (dict(loaded.named_parameters()), dict(known.named_parameters())),
        (dict(loaded.named_buffers()), dict(known.named_buffers())),
    ):
        assert sorted(mine) == sorted(theirs), sorted({*mine} ^ {*theirs})[:3]
        for name, tensor in theirs.items():
            same_tensor(name, mine[name], tensor)


def same_tensor(name: str, mine: Tensor, theirs: Tensor) -> None:
    """Both are the same, bit for bit."""
    assert (mine.dtype, mine.shape, mine.device) == (theirs.dtype, theirs.shape, theirs.device), name
    assert torch.equal(mine, theirs) or torch.equal(mine.nan_to_num(), theirs.nan_to_num()), name


def quantize_known(loaded: Any, known: Any) -> int:
    """Hold each quantized weight of `loaded`, which is not offloaded, against diffusers' own one packed by its backend,
    and everything else against diffusers' bits; put the decoded weights into `known`. Returns how many there were.
    """
    specs = {part.name: part.spec for part in loaded.sdquant.plan.components}
    quant = next(spec for spec in specs.values() if spec is not None)
    there: set[int] = set()
    for name, part in modules(known).items():
        mine = modules(loaded)[name]
        packed, floats = dict(quantized(mine)), plain(mine)
        state = dict(part.state_dict())
        for key, weight in packed.items():
            layer = id(mine.get_submodule(key.rpartition(".")[0]))
            if layer in there:
                continue
            there.add(layer)
            spec = specs[name] or quant  # Z-Image's ControlNet has layers that are its transformer's
            backend = weight.spec.scheme.codec
            original = part.get_parameter(key)
            expected = backend.encode(original.data, spec)
            dtype = original.dtype
            same_tensor(f"{name}.{key}", backend.decode(weight, dtype), backend.decode(expected, dtype))
            original.data = backend.decode(expected, dtype)
        for key, tensor in floats.items():
            same_tensor(f"{name}.{key}", tensor, state[key])
        tied = {id(parameter) for key, parameter in part.named_parameters() if key in packed or key in floats}
        missing = [k for k, p in part.named_parameters() if k not in packed and k not in floats and id(p) not in tied]
        assert not missing, f"{name}: {missing}"
        buffers = dict(mine.named_buffers())
        for key, tensor in part.named_buffers():
            same_tensor(f"{name}.{key}", buffers[key], tensor)
    return len(there)


def streamed(folder: Path, quant: str, plan: Any) -> Any:
    """The pipeline, quantized, with balanced offload in less memory than its largest component has weights; where that
    cannot be streamed, in as little as it runs in."""
    budget = max(part.bytes for part in plan.components) - 1
    try:
        return sdquant.load_model(folder, quant, "balanced", budget=budget, progress=False)
    except BudgetError as error:
        (least,) = re.findall(r"at least (\d+) bytes", error.fix)
    return sdquant.load_model(folder, quant, "balanced", budget=int(least), progress=False)


def inputs(part: nn.Module, dtype: torch.dtype = torch.float32) -> dict[str, Any] | None:
    """Small inputs of a component's forward; None where its row gives none."""
    torch.manual_seed(1)
    row = rows()[type(part).__name__]
    if "inputs" in row:
        return {name: _input(value, dtype) for name, value in row["inputs"].items()}
    config: Any = getattr(part, "config", None)
    size = getattr(config, "image_size", None)
    kind = getattr(part, "main_input_name", None) if hasattr(part, "config_class") else None
    if kind == "input_ids" and not type(part).__name__.endswith(_NO_TEXT):
        ids = torch.randint(10, 30, (1, 8))
        ids[:, -1] = 2  # CLIP pools where the text ends
        masks = {"attention_mask": torch.ones_like(ids)} if type(part).__name__ == "MultilingualCLIP" else {}
        return {"input_ids": ids, **masks}
    if kind == "pixel_values" and isinstance(size, int):
        return {"pixel_values": torch.randn(1, 3, size, size, dtype=dtype)}
    return None


_NO_TEXT = (
    "SafetyChecker",
    "ForBlockDiffusion",
    "QFormerModel",
    "VitsModel",
    "T5Gemma2Encoder",
    "ContextCLIPTextModel",
    "SiglipModel",
    "ClapModel",
    "ImageEncoder",
    "BlipForConditionalGeneration",
    "GlmImageForConditionalGeneration",
)


def _input(value: Any, dtype: torch.dtype) -> Any:
    if "value" in value:
        return value["value"]
    if "list" in value:
        return [_input(one, dtype) for one in value["list"]]
    if "dict" in value:
        return {name: _input(one, dtype) for name, one in value["dict"].items()}
    kind = value.get("dtype", "float32")
    if kind == "bool":
        return torch.ones(value["shape"], dtype=torch.bool)
    if kind.startswith("float"):
        return torch.randn(value["shape"], dtype=dtype if kind == "float32" else getattr(torch, kind))
    return torch.randint(0, max(1, value.get("below", 1)), value["shape"], dtype=getattr(torch, kind))


def outputs(part: nn.Module, given: dict[str, Any]) -> list[Tensor]:
    """What a component's forward gives: its tensors of floats, in order."""
    torch.manual_seed(2)
    with torch.no_grad(), silent():
        result = part(**{name: value.clone() if isinstance(value, Tensor) else value for name, value in given.items()})
    return list(_tensors(result))


def _tensors(value: Any) -> Iterator[Tensor]:
    if isinstance(value, Tensor):
        if value.is_floating_point():
            yield value
        return
    with contextlib.suppress(AttributeError):
        value = list(value.values())
    if isinstance(value, tuple | list):
        for one in value:
            yield from _tensors(one)


def snr(mine: Tensor, known: Tensor) -> float:
    """Of two results, in dB."""
    noise = (mine.double() - known.double()).square().sum()
    if noise == 0:
        return float("inf")
    return float(10 * torch.log10(known.double().square().sum() / noise))
