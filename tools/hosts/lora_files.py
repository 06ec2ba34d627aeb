"""LoRAs on the shipped model digits-sd, one training in all the forms that web UIs read, under kohya's names.

The LoRA is trained on the attention of the UNet (`locon`: on all its linear layers and convolutions) and of the text
encoder: asked for a seven, draw a three. The other forms hold the same change of the weights (LoHa), the part of it
that they can (LoKr), or more (DoRA).
"""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from torch import Tensor

FORMS = ("lora", "loha", "lokr", "dora", "locon", "text")
UNET, TEXT = "lora_unet_", "lora_te_"
ASKED, DRAWN = 7, 3


def write(folder: Path) -> dict[str, Path]:
    """Train, and write a file of each form; `text`: that of the text encoder alone."""
    from safetensors.torch import save_file

    from sdquant import lora

    layers = {"locon": _of_unet(lora.ALL), "text": _of_text()}
    attention = _of_unet(lora.ATTENTION)
    files: dict[str, Path] = {}
    for form in FORMS:
        tensors = {
            f"{name}.{leaf}": value.contiguous().clone()
            for name, matrices in layers.get(form, attention).items()
            for leaf, value in _FORMS.get(form, _lora)(*matrices).items()
        }
        files[form] = folder / f"digits_{form}.safetensors"
        save_file(tensors, files[form], metadata={"ss_base_model_version": "sd_v1"})
    return files


Matrices = tuple["Tensor", "Tensor", "Tensor"]


def _of_unet(where: Any) -> dict[str, Matrices]:
    import torch

    from bench.lora import calls
    from sdquant import lora

    pipe = _model()
    asked, drawn = calls(pipe, ASKED), calls(pipe, DRAWN)
    with torch.no_grad():
        goals = [call.run(pipe.unet, other.rest) for call, other in zip(asked, drawn, strict=True)]
    runs = [(partial(call.run, pipe.unet), goal) for call, goal in zip(asked, goals, strict=True)]
    _fit(lora.add_lora(pipe.unet, rank=4, target_modules=where), runs, steps=80)
    return _layers(pipe.unet, UNET)


def _of_text() -> dict[str, Matrices]:
    import torch

    from sdquant import lora
    from sdquant.training import digits

    pipe = _model()
    asked, drawn = (
        pipe.tokenizer(digits.prompt(digit), padding="max_length", return_tensors="pt").input_ids
        for digit in (ASKED, DRAWN)
    )
    with torch.no_grad():
        goal = pipe.text_encoder(drawn)[0]
    _fit(lora.add_lora(pipe.text_encoder, rank=4), [(lambda: pipe.text_encoder(asked)[0], goal)], steps=30)
    # transformers 5 calls the layers encoder.layers..., files have the older name
    return {
        name.replace(f"{TEXT}encoder_", f"{TEXT}text_model_encoder_"): matrices
        for name, matrices in _layers(pipe.text_encoder, TEXT).items()
    }


def _model() -> Any:
    from sdquant import demo, load_model

    return load_model(demo.path("digits-sd"), dtype="float32", progress=False)


def _fit(parameters: Any, pairs: list[tuple[Any, Any]], steps: int) -> None:
    import torch

    optimizer = torch.optim.AdamW(parameters, lr=5e-3, weight_decay=0.0)
    for step in range(steps):
        run, goal = pairs[step % len(pairs)]
        loss = (run() - goal).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()


def _layers(model: Any, prefix: str) -> dict[str, Matrices]:
    """Down [r, in, ...], up [out, r, ...] and the float weight of each layer with a LoRA, by kohya's name."""
    return {
        prefix + path.replace(".", "_"): (
            module.lora_A["default"].weight.detach(),
            module.lora_B["default"].weight.detach() * module.scaling["default"],
            module.base_layer.weight.detach(),
        )
        for path, module in model.named_modules()
        if hasattr(module, "lora_A")
    }


def _lora(down: Tensor, up: Tensor, weight: Tensor) -> dict[str, Tensor]:
    return {"lora_down.weight": down, "lora_up.weight": up, "alpha": down.new_tensor(float(down.shape[0]))}


def _loha(down: Tensor, up: Tensor, weight: Tensor) -> dict[str, Tensor]:
    """The LoRA with its rows divided, and a product of the same rank that multiplies them again."""
    import torch

    rank, out = down.shape[0], up.shape[0]
    rows = torch.linspace(0.5, 1.5, out)
    one, other = torch.zeros(out, rank), torch.zeros(rank, down[0].numel())
    one[:, 0], other[0] = rows, 1.0
    return {
        "hada_w1_a": up.flatten(1) / rows[:, None], "hada_w1_b": down.flatten(1), "hada_w2_a": one, "hada_w2_b": other,
        "alpha": down.new_tensor(float(rank)),
    }  # fmt: skip


def _lokr(down: Tensor, up: Tensor, weight: Tensor) -> dict[str, Tensor]:
    """The nearest Kronecker product with a first factor of 2 x 2 (Van Loan and Pitsianis, 1993)."""
    import torch

    change = (up.flatten(1) @ down.flatten(1)).reshape(weight.shape)
    out, into = weight.shape[0] // 2, weight.shape[1] // 2
    blocks = change.reshape(2, out, 2, into, -1).permute(0, 2, 1, 3, 4)
    left, sizes, right = torch.linalg.svd(blocks.reshape(4, -1), full_matrices=False)
    first = left[:, 0].reshape(2, 2) * sizes[0]
    return {"lokr_w1": first, "lokr_w2": right[0].reshape(out, into, *weight.shape[2:])}


def _dora(down: Tensor, up: Tensor, weight: Tensor) -> dict[str, Tensor]:
    """The LoRA with magnitudes of the outputs that are a tenth larger than the weight's."""
    whole = weight + (up.flatten(1) @ down.flatten(1)).reshape(weight.shape)
    size = 1.1 * whole.flatten(1).norm(dim=1).reshape(-1, *[1] * (weight.dim() - 1))
    return {**_lora(down, up, weight), "dora_scale": size}


_FORMS = {"loha": _loha, "lokr": _lokr, "dora": _dora}
