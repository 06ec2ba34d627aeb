"""What a UNet or transformer is given for one step: by its own pipeline, or random values of the right shapes.

The random ones have the shapes that the pipelines of the class make for an image of a size; where a pipeline asks its
text encoders they are N(0, 1), which is about what these give.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

import torch

from ..errors import SettingsError
from ..readable import size as readable

if TYPE_CHECKING:
    from torch import Tensor, nn

log = logging.getLogger(__name__)

# Positional and named arguments of one call.
Inputs = tuple[tuple[Any, ...], dict[str, Any]]

PIXELS = 8  # of the image for one of a latent, in each direction: what the VAEs of all classes below do
CLIP_TOKENS, T5_TOKENS, SD3_TOKENS = 77, 512, 77 + 256
TIMESTEP = 500.0  # of 1000: the middle of the noise


def random(class_name: str, config: Mapping[str, Any], size: tuple[int, int], batch: int, seed: int) -> Inputs:
    """Inputs made from the config, float32 on the CPU.

    Args:
        size: width and height of the image in pixels. batch: images; guidance by a second prompt takes two for each.

    Raises:
        SettingsError: nobody has written down what this class takes, or it cannot make an image of that size.
    """
    make = _MAKERS.get(class_name)
    if make is None:
        raise SettingsError(
            f"A {class_name} was to be run without its pipeline",
            f"what it takes is known here for {', '.join(_MAKERS)}",
            "Give the pipeline's folder, or base=<pipeline folder>",
        )
    width, height = size
    step = PIXELS * (1 if class_name == "UNet2DConditionModel" else 2)  # transformers take patches of 2 x 2 latents
    if width % step or height % step:
        raise SettingsError(
            f"An image of {width}x{height} was asked for",
            f"{class_name} draws multiples of {step} pixels",
            f"Use {max(step, width // step * step)}x{max(step, height // step * step)}",
        )
    noise = torch.Generator().manual_seed(seed)

    def draw(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=noise)

    return (), make(config, height // PIXELS, width // PIXELS, batch, draw)


def _unet(config: Mapping[str, Any], height: int, width: int, batch: int, draw: Callable[..., Tensor]) -> Any:
    """Stable Diffusion's and SDXL's: latents [batch, channels, height, width], text [batch, 77, width of the text]."""
    crossed = config["cross_attention_dim"]
    values: dict[str, Any] = {
        "sample": draw(batch, config["in_channels"], height, width),
        "timestep": torch.tensor(TIMESTEP),
        "encoder_hidden_states": draw(batch, CLIP_TOKENS, crossed[0] if isinstance(crossed, list) else crossed),
    }
    if config.get("addition_embed_type") == "text_time":
        # Six numbers of the image's sizes and crop go through an embedding each, and stand behind the text's.
        pooled = config["projection_class_embeddings_input_dim"] - 6 * config["addition_time_embed_dim"]
        tall, wide = height * PIXELS, width * PIXELS
        sizes = torch.tensor([[tall, wide, 0, 0, tall, wide]] * batch, dtype=torch.float32)
        values["added_cond_kwargs"] = {"text_embeds": draw(batch, pooled), "time_ids": sizes}
    return values


def _flux(config: Mapping[str, Any], height: int, width: int, batch: int, draw: Callable[..., Tensor]) -> Any:
    """FLUX.1's: packed latents [batch, patches, 64], text [batch, 512, width], and where each token stands."""
    tall, wide = height // 2, width // 2
    places = torch.zeros(tall, wide, 3)
    places[..., 1] += torch.arange(tall)[:, None]
    places[..., 2] += torch.arange(wide)[None, :]
    values = {
        "hidden_states": draw(batch, tall * wide, config["in_channels"]),
        "encoder_hidden_states": draw(batch, T5_TOKENS, config["joint_attention_dim"]),
        "pooled_projections": draw(batch, config["pooled_projection_dim"]),
        "timestep": torch.full((batch,), TIMESTEP / 1000),
        "img_ids": places.reshape(tall * wide, 3),
        "txt_ids": torch.zeros(T5_TOKENS, 3),
    }
    return values | ({"guidance": torch.full((batch,), 3.5)} if config.get("guidance_embeds") else {})


def _sd3(config: Mapping[str, Any], height: int, width: int, batch: int, draw: Callable[..., Tensor]) -> Any:
    """Stable Diffusion 3's: latents [batch, 16, height, width], text of CLIP and T5 one after the other."""
    return {
        "hidden_states": draw(batch, config["in_channels"], height, width),
        "encoder_hidden_states": draw(batch, SD3_TOKENS, config["joint_attention_dim"]),
        "pooled_projections": draw(batch, config["pooled_projection_dim"]),
        "timestep": torch.full((batch,), TIMESTEP),
    }


_MAKERS: dict[str, Callable[..., dict[str, Any]]] = {
    "UNet2DConditionModel": _unet,
    "FluxTransformer2DModel": _flux,
    "SD3Transformer2DModel": _sd3,
}

# Named inputs that stay in float32 whatever the model's dtype: the pipelines give them so, as sizes and places have
# too many digits for 16 bits.
_EXACT = frozenset({"img_ids", "txt_ids"})


class _Caught(Exception):
    """The inputs are there: the pipeline need not go on."""


def of_pipeline(pipe: Any, prompt: str, size: tuple[int, int] | None, seed: int) -> tuple[Inputs, tuple[int, int]]:
    """What the pipeline gives its UNet or transformer at the first step, on the CPU, and the image's size.

    Raises:
        SdquantError: as `drawing.draw`.
    """
    from ..components import main_part
    from ..drawing import draw, native_size

    caught: list[Inputs] = []

    def catch(_: nn.Module, args: tuple[Any, ...], values: dict[str, Any]) -> None:
        with torch.no_grad():
            caught.append((moved(args, torch.device("cpu")), moved(values, torch.device("cpu"))))
        raise _Caught

    width, height = size or (native_size(pipe), native_size(pipe))
    handle = main_part(pipe).register_forward_pre_hook(catch, with_kwargs=True)
    try:
        draw(pipe, [prompt], seeds=[seed], steps=1, width=width, height=height)
    except _Caught:
        pass
    finally:
        handle.remove()
    return caught[0], (width, height)


def moved(value: Any, device: torch.device, dtype: torch.dtype | None = None, name: str = "") -> Any:
    """Inputs, with their tensors copied to a device, and those of floats to a dtype; what is no tensor as it is."""
    if isinstance(value, torch.Tensor):
        floats = dtype is not None and value.is_floating_point() and name not in _EXACT and value.ndim > 0
        return value.detach().to(device, dtype if floats else None, copy=True)
    if isinstance(value, Mapping):
        return {key: moved(one, device, dtype, str(key)) for key, one in value.items()}
    if isinstance(value, list | tuple):
        return type(value)(moved(one, device, dtype) for one in value)
    return value


def batch_of(inputs: Inputs) -> int:
    """Rows of the first tensor that has any."""
    args, values = inputs
    first = next((one for one in (*args, *values.values()) if isinstance(one, torch.Tensor) and one.ndim > 1), None)
    return 1 if first is None else int(first.shape[0])


def output(result: Any) -> Tensor:
    """The tensor that a UNet or transformer puts out, float64 on the CPU."""
    made = result[0] if isinstance(result, tuple) else result.sample
    assert isinstance(made, torch.Tensor)
    log.debug("the output is %s, %s", list(made.shape), readable(made.numel() * made.element_size()))
    return made.detach().to("cpu", torch.float64)


def snr(made: Tensor, wanted: Tensor) -> float:
    """Signal-to-noise ratio of an output in dB: 10 log10(sum wanted^2 / sum (made - wanted)^2); infinite if equal."""
    noise = float(((made - wanted) ** 2).sum())
    if noise == 0:
        return float("inf")
    return float(10 * torch.log10((wanted**2).sum() / noise))
