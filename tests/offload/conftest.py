"""Small pipelines with random weights, the same ones in every test."""

from __future__ import annotations

import os
import tempfile
import warnings
from functools import lru_cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
import torch

from sdquant.models.pipelines import components_of
from tools.digits_models import nets, text

if TYPE_CHECKING:
    from collections.abc import Callable

# Where the slow tables and the training compute: SDQUANT_TEST_DEVICE=cuda runs them on a card.
DEVICE = os.environ.get("SDQUANT_TEST_DEVICE", "cpu")

# Attributes that hooks leave on module instances.
HOOKED = {
    "_hf_hook", "_old_forward", "forward", "encode", "decode", "generate", "_sdquant_offload", "_sdquant_part_of",
    "state_dict", "load_state_dict", "_apply", "apply", "to", "share_memory", "to_empty",
    "__deepcopy__", "__reduce_ex__", "save_pretrained", "set_attn_processor",
}  # fmt: skip


@lru_cache(maxsize=1)
def tokenizers() -> tuple[Any, Any]:
    with tempfile.TemporaryDirectory() as folder:
        return text.clip_tokenizer(Path(folder)), text.t5_tokenizer()


def stable_diffusion() -> Any:
    clip, _ = tokenizers()
    torch.manual_seed(0)
    return nets.sd_pipeline(
        vae=nets.vae(), unet=nets.unet(128), text_encoder=text.clip_encoder(clip, 0), tokenizer=clip
    )


def flux() -> Any:
    clip, t5 = tokenizers()
    torch.manual_seed(0)
    return nets.flux_pipeline(
        vae=nets.vae(),
        transformer=nets.flux(128),
        text_encoder=text.clip_encoder(clip, 0),
        tokenizer=clip,
        text_encoder_2=text.t5_encoder(t5, 1),
        tokenizer_2=t5,
    )


PIPELINES: dict[str, Callable[[], Any]] = {"sd": stable_diffusion, "flux": flux}


@pytest.fixture(params=PIPELINES)
def pipeline(request: pytest.FixtureRequest) -> Any:
    return made(request.param)


def made(name: str) -> Any:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # what third parties say while they are imported is not tested here
        pipe = PIPELINES[name]()
    pipe.set_progress_bar_config(disable=True)
    return pipe


def draw(pipe: Any) -> Any:
    """[1, 32, 32, 3] float32, two steps."""
    return pipe(
        "a handwritten seven",
        num_inference_steps=2,
        height=32,
        width=32,
        output_type="np",
        generator=torch.Generator().manual_seed(0),
    ).images


def state_of(model: Any) -> dict[str, torch.Tensor]:
    return {f"{n}.{k}": v.clone() for n, m in components_of(model).items() for k, v in m.state_dict().items()}


def same_state(model: Any, before: dict[str, torch.Tensor]) -> bool:
    now = state_of(model)
    return now.keys() == before.keys() and all(
        torch.equal(v, before[k]) and v.device.type == "cpu" and v.dtype == before[k].dtype for k, v in now.items()
    )


def hooked(model: Any) -> list[str]:
    """Everything that hooks have left on the modules of a model."""
    left = [
        f"{name}: {attribute}"
        for part in components_of(model).values()
        for name, module in part.named_modules()
        for attribute in HOOKED & set(module.__dict__)
    ]
    for part in components_of(model).values():
        for name, module in part.named_modules():
            registry = module.__dict__.get("_diffusers_hook")  # an empty one is the pipeline's own
            left += [f"{name}: {hook}" for hook in (registry.hooks if registry is not None else ())]
            for hook in (*module._forward_hooks.values(), *module._forward_pre_hooks.values()):
                left.append(f"{name}: torch hook of {hook.__module__}")
    return left
