"""Random inputs of the right shapes for one step of a UNet or transformer without its pipeline.

The shapes are those that the pipelines of the class use for an image of a size and a prompt of full length. In place
of text encoder outputs the values are N(0, 1), which is about what those are.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any

import torch

from ..errors import SettingsError

if TYPE_CHECKING:
    from torch import Tensor

# Positional and named arguments of one call.
Inputs = tuple[tuple[Any, ...], dict[str, Any]]

PIXELS = 8  # of the image for one of a latent, in each direction: what the VAEs of all classes below do
CLIP_TOKENS, T5_TOKENS, SD3_TOKENS = 77, 512, 77 + 256
TIMESTEP = 500.0  # of 1000: the middle of the noise


@dataclass(frozen=True)
class _Kind:
    """The inputs of a model class.

    Attributes:
        make: returns the named inputs, from the config, the latents' height and width, the batch and a N(0, 1) sampler.
        step: the image's width and height are multiples of this number of pixels.
        rows: batch size for one image, as in its pipelines: two where guidance takes a second prompt.
        side: of the image in pixels, if the config gives none.
    """

    make: Callable[..., dict[str, Any]]
    step: int
    rows: int
    side: int


def knows(class_name: str) -> bool:
    """Return whether the inputs of a class are known here."""
    return class_name in _KINDS


def random(class_name: str, config: Mapping[str, Any], size: tuple[int, int], batch: int, seed: int) -> Inputs:
    """Return random inputs for the config, float32 on the CPU.

    Args:
        size: width and height of the image in pixels. batch: rows; guidance with a second prompt takes two an image.

    Raises:
        SettingsError: the inputs of this class are not known, or it cannot generate an image of that size.
    """
    noise = torch.Generator("cpu").manual_seed(seed)

    def draw(*shape: int) -> Tensor:
        return torch.randn(shape, generator=noise, dtype=torch.float32)

    with torch.device("cpu"):
        return _made(class_name, config, size, batch, draw)


def of_one_image(
    class_name: str, config: Mapping[str, Any], *, width: int | None = None, height: int | None = None
) -> Inputs:
    """Return the inputs of a step for one image with guidance, as in the pipelines of the class: float32 on the meta
    device.

    Args:
        width, height: in pixels; None for the size that the model was trained for.

    Raises:
        SettingsError: as `random`.
    """
    kind = _kind(class_name)
    side = side_of(config) or kind.side
    size = (width or side, height or side)
    with torch.device("meta"):
        return _made(class_name, config, size, kind.rows, partial(torch.empty, dtype=torch.float32))


def _made(
    class_name: str, config: Mapping[str, Any], size: tuple[int, int], rows: int, draw: Callable[..., Tensor]
) -> Inputs:
    kind, (width, height) = _kind(class_name), size
    step = kind.step
    if width % step or height % step:
        raise SettingsError(
            f"Cannot generate a {width}x{height} image",
            f"the width and height of {class_name} must be multiples of {step} pixels",
            f"Use {max(step, width // step * step)}x{max(step, height // step * step)}",
        )
    return (), kind.make(config, height // PIXELS, width // PIXELS, rows, draw)


def _kind(class_name: str) -> _Kind:
    if class_name not in _KINDS:
        raise SettingsError(
            f"Cannot run {class_name} without its pipeline",
            f"random inputs can only be made for {', '.join(_KINDS)}",
            "Use the pipeline's folder, or pass base=<pipeline folder>",
        )
    return _KINDS[class_name]


def side_of(config: Mapping[str, Any]) -> int | None:
    """Return the image size that the model was trained for, in pixels; None if its config does not give it."""
    sample = config.get("sample_size")
    return sample * PIXELS if isinstance(sample, int) and sample > 1 else None


def _unet(config: Mapping[str, Any], height: int, width: int, batch: int, draw: Callable[..., Tensor]) -> Any:
    """Inputs of Stable Diffusion and SDXL: latents [batch, channels, height, width], text [batch, 77, text width]."""
    crossed = config["cross_attention_dim"]
    values: dict[str, Any] = {
        "sample": draw(batch, config["in_channels"], height, width),
        "timestep": torch.tensor(TIMESTEP, dtype=torch.float32),
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
    """Inputs of FLUX.1: packed latents [batch, patches, 64], text [batch, 512, width], and each token's position."""
    tall, wide = height // 2, width // 2
    places = torch.zeros(tall, wide, 3, dtype=torch.float32)
    places[..., 1] += torch.arange(tall)[:, None]
    places[..., 2] += torch.arange(wide)[None, :]
    values = {
        "hidden_states": draw(batch, tall * wide, config["in_channels"]),
        "encoder_hidden_states": draw(batch, T5_TOKENS, config["joint_attention_dim"]),
        "pooled_projections": draw(batch, config["pooled_projection_dim"]),
        "timestep": torch.full((batch,), TIMESTEP / 1000, dtype=torch.float32),
        "img_ids": places.reshape(tall * wide, 3),
        "txt_ids": torch.zeros(T5_TOKENS, 3, dtype=torch.float32),
    }
    return values | (
        {"guidance": torch.full((batch,), 3.5, dtype=torch.float32)} if config.get("guidance_embeds") else {}
    )


def _sd3(config: Mapping[str, Any], height: int, width: int, batch: int, draw: Callable[..., Tensor]) -> Any:
    """Inputs of Stable Diffusion 3: latents [batch, 16, height, width], text of CLIP and T5, concatenated."""
    return {
        "hidden_states": draw(batch, config["in_channels"], height, width),
        "encoder_hidden_states": draw(batch, SD3_TOKENS, config["joint_attention_dim"]),
        "pooled_projections": draw(batch, config["pooled_projection_dim"]),
        "timestep": torch.full((batch,), TIMESTEP, dtype=torch.float32),
    }


_KINDS: dict[str, _Kind] = {
    "UNet2DConditionModel": _Kind(_unet, step=PIXELS, rows=2, side=512),
    "FluxTransformer2DModel": _Kind(_flux, step=2 * PIXELS, rows=1, side=1024),
    "SD3Transformer2DModel": _Kind(_sd3, step=2 * PIXELS, rows=2, side=1024),
}

# Named inputs that stay in float32 whatever the model's dtype: the pipelines give them so, as sizes and places have
# too many digits for 16 bits.
_EXACT = frozenset({"img_ids", "txt_ids"})


def moved(value: Any, device: torch.device, dtype: torch.dtype | None = None, name: str = "") -> Any:
    """Return inputs with their tensors copied to a device, float ones also to a dtype; other values are unchanged."""
    if isinstance(value, torch.Tensor):
        floats = dtype is not None and value.is_floating_point() and name not in _EXACT and value.ndim > 0
        return value.detach().to(device, dtype if floats else None, copy=True)
    if isinstance(value, Mapping):
        return {key: moved(one, device, dtype, str(key)) for key, one in value.items()}
    if isinstance(value, list | tuple):
        return type(value)(moved(one, device, dtype) for one in value)
    return value
