"""Run in a process of its own, with NVIDIA ModelOpt: `python modelopt_writer.py SOURCE TARGET WAY...`.

Each way quantizes the component at SOURCE by ModelOpt's own code, and saves it as ModelOpt does, in TARGET/WAY;
TARGET/WAY.safetensors has the weights as ModelOpt itself makes floats of them. Prints the ways, each with the error
that stopped it, or null. On a CPU the search for scales of NVFP4 has no kernel: its own quantizer and dequantizer of
tensors stand in for that.
"""

from __future__ import annotations

import contextlib
import copy
import io
import json
import re
import sys
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

FLOAT = re.compile(r".*(x_embedder|context_embedder|time_text_embed|norm_out|^proj_out).*")


def load(source: Path) -> Any:
    """The component in bfloat16."""
    import diffusers
    import transformers

    config = json.loads((source / "config.json").read_text())
    if "_class_name" in config:
        return getattr(diffusers, config["_class_name"]).from_pretrained(source, torch_dtype=torch.bfloat16)
    return getattr(transformers, config["architectures"][0]).from_pretrained(source, dtype=torch.bfloat16)


def run(model: Any) -> None:
    """What ModelOpt looks at the activations of."""
    if hasattr(model, "get_input_embeddings"):
        model(input_ids=torch.arange(2, 18)[None])
        return
    config, seeded = model.config, torch.Generator().manual_seed(0)

    def noise(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=seeded).bfloat16()

    model(
        hidden_states=noise(1, 16, config.in_channels), encoder_hidden_states=noise(1, 8, config.joint_attention_dim),
        pooled_projections=noise(1, config.pooled_projection_dim), timestep=torch.tensor([0.5]).bfloat16(),
        img_ids=torch.zeros(16, 3), txt_ids=torch.zeros(8, 3), guidance=torch.ones(1),
    )  # fmt: skip


def fp4(inputs: Tensor, block_size: int, *_: Any) -> Tensor:
    """Values in NVFP4 and back."""
    from modelopt.torch.quantization.qtensor import NVFP4QTensor

    made, scale, factor = NVFP4QTensor.quantize(inputs, block_size)
    return made.dequantize(inputs.dtype, scale=scale, double_scale=factor, block_sizes={-1: block_size})


def floats_of(model: Any) -> dict[str, Tensor]:
    """The weights of a model just exported, by ModelOpt's own dequantizers where it has one."""
    from modelopt.torch.quantization import qtensor

    result = {}
    for name, layer in model.named_modules():
        weight, scale = getattr(layer, "weight", None), getattr(layer, "weight_scale", None)
        if scale is None or weight is None:
            continue
        width = weight.shape[-1]
        wanted = torch.Size((len(weight), width))
        if hasattr(layer, "weight_scale_2") and weight.dtype == torch.uint8:
            width *= 2
            made = qtensor.NVFP4QTensor(torch.Size((len(weight), width)), torch.float32, weight.data)
            size = {-1: width // scale.shape[-1]}
            values = made.dequantize(torch.float32, scale=scale, double_scale=layer.weight_scale_2, block_sizes=size)
        elif scale.dtype == torch.uint8 and weight.dtype == torch.uint8:
            wanted = torch.Size((len(weight), 2 * width))
            made = qtensor.MXFP4QTensor(wanted, torch.float32, weight.data)
            values = made.dequantize(torch.float32, scale=scale, block_sizes={-1: 32})
        elif scale.dtype == torch.uint8:
            made = qtensor.MXFP8QTensor(wanted, torch.float32, weight.data)
            values = made.dequantize(torch.float32, scale=scale)
        elif weight.dtype == torch.float8_e4m3fn:
            sizes = {-1: 128, -2: 128} if scale.ndim > 2 else None
            made = qtensor.FP8QTensor(wanted, torch.float32, weight.data)
            across = scale.squeeze() if sizes else scale if scale.ndim != 1 else scale[:, None]
            values = made.dequantize(torch.float32, scale=across, **({"block_sizes": sizes} if sizes else {}))
        elif weight.dtype == torch.int8:
            values = weight.float() * (scale if scale.ndim == 0 else scale[:, None])
        else:
            continue  # two rows in a byte: there is no reader
        smooth = getattr(getattr(layer, "input_quantizer", None), "_pre_quant_scale", None)
        values = values if smooth is None else values * smooth.float()
        low = getattr(layer.weight_quantizer, "svdquant_lora_b", None)
        if low is not None:
            branch = low.float() @ layer.weight_quantizer.svdquant_lora_a.float()
            values = values + (branch if smooth is None else branch * smooth.float())
        result[f"{name}.weight"] = values
    return result


def export(model: Any, preset: str, target: Path, late: bool = False, **options: Any) -> dict[str, Tensor]:
    """The unified export: what NVIDIA's checkpoints on the hub are."""
    import modelopt.torch.export as mte

    quantize(model, preset, late)
    mte.export_hf_checkpoint(model, export_dir=target, **options)
    return floats_of(model)


def compress(model: Any, preset: str, target: Path) -> dict[str, Tensor]:
    """Weights in codes under the names of its layers, and a pickle of its graph: what diffusers' quantizer saves."""
    import modelopt.torch.opt as mto
    import modelopt.torch.quantization as mtq

    quantize(model, preset)
    mtq.compress(model)
    mto.enable_huggingface_checkpointing()
    model.save_pretrained(target)
    layers = {name: layer for name, layer in model.named_modules() if hasattr(layer, "weight_quantizer")}
    result = {}
    for name, layer in layers.items():
        if layer.weight.element_size() == 1:
            smooth = getattr(layer.input_quantizer, "_pre_quant_scale", None)
            values, low = layer.weight_quantizer(layer.weight).float(), layer.weight_quantizer
            if hasattr(low, "_svdquant_lora_b"):
                values = values + low._svdquant_lora_b.float() @ low._svdquant_lora_a.float()
            result[f"{name}.weight"] = values if smooth is None else values * smooth.float()
    return result


def quantize(model: Any, preset: str, late: bool = False) -> None:
    """Quantize a model but for some layers. late: these are left out only after the calibration."""
    import modelopt.torch.quantization as mtq

    config = copy.deepcopy(getattr(mtq, preset))
    names = [name for name, layer in model.named_modules() if isinstance(layer, torch.nn.Linear) and FLOAT.match(name)]
    config["quant_cfg"] += [{"quantizer_name": f"*{name}.*", "enable": False} for name in names if not late]
    mtq.quantize(model, config, None if preset.startswith("MX") else run)
    mtq.disable_quantizer(model, lambda name: bool(FLOAT.match(name)))


@contextlib.contextmanager
def without_kernels() -> Iterator[None]:
    from modelopt.torch.quantization import tensor_quant

    old = tensor_quant.dynamic_block_quantize_op
    tensor_quant.dynamic_block_quantize_op = fp4
    try:
        yield
    finally:
        tensor_quant.dynamic_block_quantize_op = old


def main(source: Path, target: Path, ways: list[str]) -> None:
    from safetensors.torch import save_file

    done: dict[str, str | None] = {}
    for way in ways:
        place = target / way.replace(" ", "-")
        kind, preset, *more = way.split()
        try:
            with without_kernels(), contextlib.redirect_stdout(io.StringIO()), torch.no_grad():
                options = dict.fromkeys(more, True)
                made = {"export": export, "compress": compress}[kind](load(source), f"{preset}_CFG", place, **options)
        except Exception as error:  # whatever it is: the test reads it
            done[way] = f"{type(error).__name__}: {error}"
            continue
        save_file({key: part.contiguous() for key, part in made.items()}, f"{place}.safetensors")
        done[way] = None
    print(json.dumps(done))


if __name__ == "__main__":
    warnings.simplefilter("ignore")
    main(Path(sys.argv[1]), Path(sys.argv[2]), sys.argv[3:])
