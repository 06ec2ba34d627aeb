"""Table of the pipeline types that can be trained, with functions to encode prompts and to call the network."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from ..errors import SettingsError

# Text states by name, each [prompts, ...].
Conditions = Mapping[str, Tensor]


@dataclass(frozen=True, kw_only=True)
class PipelineType:
    """Training interface of one type of pipeline.

    Attributes:
        flow: whether it is trained by flow matching; otherwise by its scheduler's prediction type.
        shift: whether the pipeline subtracts the VAE's shift_factor from its latents.
        encode: pipeline, prompts, side of the pictures, further arguments of its `encode_prompt` -> conditions.
        call: network, noisy latents [b, c, h, w], time [b] (an integer of the scheduler, or 0 to 1 in flow matching),
            conditions of the batch, guidance [b] -> the prediction [b, c, h, w].
    """

    flow: bool
    shift: bool
    encode: Callable[[Any, list[str], int, dict[str, Any]], Conditions]
    call: Callable[[Any, Tensor, Tensor, Conditions, Tensor], Tensor]


def of(pipe: Any) -> PipelineType:
    """Return the row of a pipeline.

    Raises:
        SettingsError: there is none, or its VAE scales latents in an unsupported way.
    """
    name = type(pipe).__name__
    what = f"Cannot train a {name}"
    if name not in FAMILIES:
        raise SettingsError(what, f"only {', '.join(FAMILIES)} can be trained", "Choose a model of these kinds")
    if getattr(pipe.vae.config, "latents_mean", None) is not None:
        raise SettingsError(what, "its VAE has latents_mean, which is not supported", "Choose another model")
    return FAMILIES[name]


def encode(pipe: Any, prompts: list[str], length: int, side: int) -> Conditions:
    """Encode prompts to text states.

    Args:
        length: tokens of the long text encoder; 0 for the pipeline's default.
        side: of the pictures in pixels, an input of some networks.

    Raises:
        SettingsError: a length for a pipeline whose length is fixed.
    """
    values: dict[str, Any] = {}
    if length:
        if "max_sequence_length" not in inspect.signature(pipe.encode_prompt).parameters:
            raise SettingsError(
                f"Cannot use max_sequence_length={length}", f"a {type(pipe).__name__} has a fixed one", "Leave it out"
            )
        values["max_sequence_length"] = length
    with torch.no_grad():
        return FAMILIES[type(pipe).__name__].encode(pipe, prompts, side, values)


def _sd(pipe: Any, prompts: list[str], _: int, values: dict[str, Any]) -> Conditions:
    states, _ = pipe.encode_prompt(
        prompts, device=pipe.text_encoder.device, num_images_per_prompt=1, do_classifier_free_guidance=False, **values
    )
    return {"states": states}


def _call_sd(net: Any, noisy: Tensor, time: Tensor, conditions: Conditions, _: Tensor) -> Tensor:
    answer: Tensor = net(noisy, time, conditions["states"], return_dict=False)[0]
    return answer


def _sdxl(pipe: Any, prompts: list[str], side: int, values: dict[str, Any]) -> Conditions:
    """Encode for SDXL, size-conditioned on an uncropped picture of this size. If the pipeline uses zeros
    as the negative prompt, the states of the empty prompt are zeros too."""
    states, _, pooled, _ = pipe.encode_prompt(
        prompts, device=pipe.text_encoder_2.device, do_classifier_free_guidance=False, **values
    )
    if pipe.config.force_zeros_for_empty_prompt:
        nonempty = torch.tensor([bool(prompt) for prompt in prompts], dtype=torch.bool, device=states.device)
        states, pooled = states * nonempty[:, None, None], pooled * nonempty[:, None]
    ids = torch.tensor([side, side, 0, 0, side, side], dtype=states.dtype, device="cpu").expand(len(prompts), -1)
    return {"states": states, "pooled": pooled, "ids": ids}


def _call_sdxl(net: Any, noisy: Tensor, time: Tensor, conditions: Conditions, _: Tensor) -> Tensor:
    added = {"text_embeds": conditions["pooled"], "time_ids": conditions["ids"]}
    answer: Tensor = net(noisy, time, conditions["states"], added_cond_kwargs=added, return_dict=False)[0]
    return answer


def _flux(pipe: Any, prompts: list[str], _: int, values: dict[str, Any]) -> Conditions:
    states, pooled, _ = pipe.encode_prompt(prompts, device=pipe.text_encoder_2.device, **values)
    return {"states": states, "pooled": pooled}


def _call_flux(net: Any, noisy: Tensor, time: Tensor, conditions: Conditions, guidance: Tensor) -> Tensor:
    """Call Flux with 2x2 patches as tokens; the network itself multiplies the time by 1000."""
    from torch.nn.functional import pixel_shuffle, pixel_unshuffle

    patches = pixel_unshuffle(noisy, 2)
    rows, columns = patches.shape[-2:]
    ids = noisy.new_zeros(rows, columns, 3)
    ids[..., 1] += torch.arange(rows, device=noisy.device)[:, None]
    ids[..., 2] += torch.arange(columns, device=noisy.device)[None, :]
    states = conditions["states"]
    answer = net(
        hidden_states=patches.flatten(2).transpose(1, 2),
        timestep=time,
        guidance=guidance if net_config(net).guidance_embeds else None,
        pooled_projections=conditions["pooled"],
        encoder_hidden_states=states,
        txt_ids=states.new_zeros(states.shape[1], 3),
        img_ids=ids.reshape(-1, 3),
        return_dict=False,
    )[0]
    return pixel_shuffle(answer.transpose(1, 2).unflatten(2, (rows, columns)), 2)


def _sd3(pipe: Any, prompts: list[str], _: int, values: dict[str, Any]) -> Conditions:
    states, _, pooled, _ = pipe.encode_prompt(
        prompts, None, None, device=pipe.text_encoder.device, do_classifier_free_guidance=False, **values
    )
    return {"states": states, "pooled": pooled}


def _call_sd3(net: Any, noisy: Tensor, time: Tensor, conditions: Conditions, _: Tensor) -> Tensor:
    answer: Tensor = net(
        hidden_states=noisy,
        timestep=time * 1000,
        encoder_hidden_states=conditions["states"],
        pooled_projections=conditions["pooled"],
        return_dict=False,
    )[0]
    return answer


def net_config(net: Any) -> Any:
    """Return the network's config, also if accelerate has wrapped it."""
    return getattr(net, "module", net).config


FAMILIES: Mapping[str, PipelineType] = {
    "StableDiffusionPipeline": PipelineType(flow=False, shift=False, encode=_sd, call=_call_sd),
    "StableDiffusionXLPipeline": PipelineType(flow=False, shift=False, encode=_sdxl, call=_call_sdxl),
    "FluxPipeline": PipelineType(flow=True, shift=True, encode=_flux, call=_call_flux),
    "StableDiffusion3Pipeline": PipelineType(flow=True, shift=True, encode=_sd3, call=_call_sd3),
}
