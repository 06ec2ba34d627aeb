"""AUTOMATIC1111's LoRAs on quantized layers, by its own processing of prompts such as "seven <lora:name:0.8>".

    python -m tools.hosts.a1111 CHECKOUT --python VENV/bin/python

CHECKOUT: with Stable Diffusion's own code, generative-models and k-diffusion in its folder `repositories`, as its
launcher makes it. The environment: A1111's requirements. Its text encoder stays as it is, and what a LoRA does to that
is measured as a change of the float one.
"""

from __future__ import annotations

import json
import os
import shutil
import sys
from pathlib import Path
from typing import Any

from . import classic, measure, neo_features, sd_checkpoint

_CONFIG = """
model:
  target: ldm.models.diffusion.ddpm.LatentDiffusion
  params:
    parameterization: v
    linear_start: 0.00085
    linear_end: 0.0120
    num_timesteps_cond: 1
    timesteps: 1000
    first_stage_key: jpg
    cond_stage_key: txt
    image_size: 8
    channels: 4
    cond_stage_trainable: false
    conditioning_key: crossattn
    scale_factor: {scale}
    use_ema: false
    unet_config:
      target: ldm.modules.diffusionmodules.openaimodel.UNetModel
      params: {{image_size: 8, in_channels: 4, out_channels: 4, model_channels: {width}, attention_resolutions: [1, 2],
        num_res_blocks: 1, channel_mult: [1, 2], num_heads: {heads}, use_spatial_transformer: true,
        transformer_depth: 1, context_dim: {context}, use_checkpoint: false, legacy: false}}
    first_stage_config:
      target: ldm.models.autoencoder.AutoencoderKL
      params:
        embed_dim: 4
        ddconfig: {{double_z: true, z_channels: 4, resolution: 64, in_channels: 3, out_ch: 3, ch: {vae},
          ch_mult: {multipliers}, num_res_blocks: 1, attn_resolutions: [], dropout: 0.0}}
        lossconfig: {{target: torch.nn.Identity}}
    cond_stage_config:
      target: ldm.modules.encoders.modules.FrozenCLIPEmbedder
      params: {{version: {encoder}, device: cpu}}
"""


def inside(checkout: Path, work: Path, schemes: list[str]) -> list[dict[str, Any]]:
    """Measure, in A1111's process."""
    return _A1111(checkout, work).rows(schemes, text=False)


class _A1111(classic.Host):
    def __init__(self, checkout: Path, work: Path) -> None:
        super().__init__(work)
        write_config(self.data / "models" / "Stable-diffusion" / "digits.yaml", work / "encoder")
        neo_features.embedding(self.data / "embeddings")
        self.features["textual inversion"] = neo_features.WORD
        for file in (self.data / "models" / "Lora").glob("*.safetensors"):
            _rename(file)
        sys.argv = ["launch.py", "--data-dir", str(self.data), "--use-cpu", "all", "--no-half", "--skip-version-check"]
        sys.argv.append("--skip-load-model-at-start")  # by a thread beside this one
        sys.argv.append("--disable-safe-unpickle")  # A1111 refuses what a new torch writes
        sys.path.insert(0, str(checkout))
        os.chdir(checkout)
        from modules import initialize  # type: ignore[import-not-found]

        initialize.imports()
        set_groups()
        initialize.initialize()
        from modules import script_callbacks

        script_callbacks.before_ui_callback()
        script_callbacks.ui_settings_callback()
        self._add_hypernetwork()

    def _add_hypernetwork(self) -> None:
        """Make one for the sizes of digits-sd, which changes what the layers of keys and values get."""
        import torch
        from modules import shared_items
        from modules.hypernetworks import hypernetwork  # type: ignore[import-not-found]

        torch.manual_seed(0)
        made = hypernetwork.Hypernetwork(
            "digits", enable_sizes=[32, 64, 128], layer_structure=[1, 2, 1], weight_init="Normal"
        )
        for layer in (one for pair in made.layers.values() for one in pair):
            for parameter in layer.parameters():
                torch.nn.init.normal_(parameter, std=0.1)
        folder = self.data / "models" / "hypernetworks"
        folder.mkdir(exist_ok=True)
        made.save(str(folder / "digits.pt"))
        shared_items.reload_hypernetworks()
        self.features["hypernetwork"] = "<hypernet:digits:1>"

    def load(self) -> None:
        from modules import sd_models

        self.set(sd_model_checkpoint="digits.safetensors")
        self.model = sd_models.reload_model_weights()

    def unet(self) -> Any:
        return self.model.model.diffusion_model

    def encoder(self) -> Any:
        return self.model.cond_stage_model.wrapped.transformer

    def text_in(self, prompt: str) -> Any:
        """What the UNet first gives in a drawing, of a text encoder that is not quantized."""
        outputs: list[Any] = []
        handle = self.unet().register_forward_hook(lambda _, __, out: outputs.append(out.flatten().clone()))
        self.draw(prompt)
        handle.remove()
        return outputs[0]


def write_config(file: Path, encoder: Path) -> None:
    """Describe digits-sd in LDM's words in `file`, and put its text encoder's config and tokenizer into a folder."""
    from sdquant import demo

    source = Path(demo.path("digits-sd"))
    unet = json.loads((source / "unet" / "config.json").read_text())
    vae = vae_sizes()
    file.write_text(
        _CONFIG.format(
            scale=sd_checkpoint.SCALE, heads=sd_checkpoint.HEADS, width=unet["block_out_channels"][0],
            context=unet["cross_attention_dim"], vae=vae["ch"], multipliers=vae["ch_mult"], encoder=encoder,
        )
    )  # fmt: skip
    shutil.copytree(source / "tokenizer", encoder)
    shutil.copy(source / "text_encoder" / "config.json", encoder)
    model = json.loads((encoder / "tokenizer.json").read_text())["model"]
    (encoder / "vocab.json").write_text(json.dumps(model["vocab"]))
    pairs = (pair if isinstance(pair, str) else " ".join(pair) for pair in model["merges"])
    (encoder / "merges.txt").write_text("#version: 0.2\n" + "\n".join(pairs) + "\n")


def vae_sizes() -> dict[str, Any]:
    """Return those of the VAE of digits-sd in LDM's words."""
    from sdquant import demo

    config = json.loads((Path(demo.path("digits-sd")) / "vae" / "config.json").read_text())
    width, *_ = widths = config["block_out_channels"]
    return {"ch": width, "ch_mult": [size // width for size in widths], "num_res_blocks": 1}


def _rename(file: Path) -> None:
    """Give a LoRA LDM's names: A1111 takes diffusers' ones for those of a network with two blocks per level."""
    from safetensors.torch import load_file, save_file

    from sdquant import demo

    (weights,) = (Path(demo.path("digits-sd")) / "unet").glob("*.safetensors")
    prefix = "model.diffusion_model."
    theirs = [key.removeprefix(prefix) for key in sd_checkpoint.tensors() if key.startswith(prefix)]
    names = {_flat(one): _flat(other) for one, other in zip(load_file(weights), theirs, strict=True)}
    tensors = {}
    for key, value in load_file(file).items():
        name, _, leaf = key.partition(".")
        tensors[f"lora_unet_{names[name[10:]]}.{leaf}" if name.startswith("lora_unet_") else key] = value
    save_file(tensors, file, metadata={"ss_base_model_version": "sd_v1"})


def _flat(key: str) -> str:
    return key.rpartition(".")[0].replace(".", "_")


def set_groups() -> None:
    """Make all group norms have the groups of digits-sd: LDM has 32 everywhere."""
    import torch

    make = torch.nn.GroupNorm.__init__

    def made(self: Any, num_groups: int, *args: Any, **kwargs: Any) -> None:
        make(self, sd_checkpoint.GROUPS, *args, **kwargs)

    torch.nn.GroupNorm.__init__ = made  # type: ignore[method-assign]


if __name__ == "__main__":
    measure.main("a1111", inside)
