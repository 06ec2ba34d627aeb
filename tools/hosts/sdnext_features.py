"""ControlNet, IP-Adapter and quantized folders in SD.Next, by its own code, on files made here for digits-sd and -flux.

python -m tools.hosts.sdnext_features CHECKOUT --python VENV/bin/python
"""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

from . import measure, neo_features
from .classic import AS_FOUND, PROMPT
from .sdnext import _Host

IMAGE_WIDTH, TOKENS = 64, 4  # of what the image encoder gives, and of what an IP-Adapter makes of it
ENCODER = "h94/IP-Adapter/models/image_encoder"  # which SD.Next takes to be loaded
FOLDERS = {"digits-sd": ("int8", "nf4", "bnb-int8"), "digits-flux": ("int8", "nf4", "sdnq-uint4")}


def inside(checkout: Path, work: Path, schemes: list[str]) -> list[dict[str, Any]]:
    """Measure, in SD.Next's process."""
    host = _Features(checkout, work)
    host.set(sd_textencoder_cache_size=0, diffusers_offload_mode="none")
    host.choose(AS_FOUND)
    host.write()
    before, first = host.draw(PROMPT), host.plain()
    floats, rows = host.found(), []
    left = {"pixels": host.off(before), "first_output": host.plain_off(first)}
    print(f"how far the float model is from itself afterwards: {left}", flush=True)
    for scheme in schemes:
        host.choose(scheme)
        before, first = host.draw(PROMPT), host.plain()
        found = host.found()
        left = {"pixels": host.off(before), "first_output": host.plain_off(first)}
        weights = measure.decoded([host.pipe.unet, host.pipe.text_encoder])
        host.choose(AS_FOUND)
        measure.put([host.pipe.unet, host.pipe.text_encoder], weights)
        decoded = host.found()
        rows += [
            measure.row(name, scheme, effect, floats[name], decoded=measure.cosine(effect, decoded[name]), **left)
            for name, effect in found.items()
        ]
        print(measure.table(rows[-len(found) :]), flush=True)
    return rows + host.folders()


class _Features(_Host):
    """SD.Next with a ControlNet and an IP-Adapter of random weights."""

    def write(self) -> None:
        """Write both for the float model that is loaded."""
        import torch
        from diffusers import ControlNetModel
        from safetensors.torch import save_file
        from transformers import CLIPVisionConfig, CLIPVisionModelWithProjection

        unet = self.pipe.unet
        net = ControlNetModel.from_unet(unet, conditioning_embedding_out_channels=(8, 16, 16))
        torch.manual_seed(0)
        for name, value in net.named_parameters():
            if name.startswith(("controlnet_", "controlnet_cond")):
                torch.nn.init.normal_(value, std=0.0 if name.endswith("bias") else value[0].numel() ** -0.5)
        self.folder = Path(self.shared.opts.diffusers_dir).parent
        net.save_pretrained(self.folder / "control")
        width = unet.config.cross_attention_dim
        layers = [name for name in unet.attn_processors if "attn2" in name]
        tensors = {
            f"ip_adapter.{2 * at + 1}.to_{leaf}_ip.weight": neo_features._random(
                unet.get_submodule(name.removesuffix(".processor")).to_k.weight.shape[0], width
            )
            for at, name in enumerate(layers)
            for leaf in "kv"
        }
        tensors["image_proj.proj.weight"] = neo_features._random(TOKENS * width, IMAGE_WIDTH)
        tensors |= {"image_proj.proj.bias": torch.zeros(TOKENS * width), "image_proj.norm.weight": torch.ones(width)}
        tensors["image_proj.norm.bias"] = torch.zeros(width)
        (self.folder / "adapter").mkdir(exist_ok=True)
        save_file(tensors, self.folder / "adapter" / "digits.safetensors")
        config = CLIPVisionConfig(
            hidden_size=32, intermediate_size=64, projection_dim=IMAGE_WIDTH, num_hidden_layers=2,
            num_attention_heads=2, image_size=224, patch_size=32,
        )  # fmt: skip
        self.eyes = (
            {key: value.clone() for key, value in CLIPVisionModelWithProjection(config).state_dict().items()},
            config,
        )

    def found(self) -> dict[str, Any]:
        """What each does to the UNet's first output in a drawing."""
        before = self.plain()
        return {
            "ControlNet": self._first(self._controlled) - self._first(self._plain),
            "IP-Adapter": self._first(self._adapted) - before,
        }

    def plain(self) -> Any:
        """The UNet's first output in a drawing."""
        return self._first(lambda: self.draw(PROMPT))

    def off(self, before: Any) -> int:
        """How far the most different value of a picture is from that of one before."""
        return int(abs(self.draw(PROMPT).astype(int) - before.astype(int)).max())

    def plain_off(self, before: Any) -> float:
        """How far the UNet's first output is from one before, relative to it."""
        return float((self.plain() - before).norm() / before.norm())

    def _first(self, draw: Callable[[], Any]) -> Any:
        outputs: list[Any] = []
        handle = self.pipe.unet.register_forward_hook(lambda _, __, out: outputs.append(out[0].flatten().clone()))
        draw()
        handle.remove()
        return outputs[0]

    def _plain(self) -> None:
        self._drawn(self.pipe)

    def _controlled(self) -> None:
        from modules.control.units import controlnet  # type: ignore[import-not-found]

        controlnet.all_models["digits"] = str(self.folder / "control")
        net = controlnet.ControlNet(None, self.pipe.device, self.pipe.dtype)
        net.load("digits")
        made = controlnet.ControlNetPipeline(net.model, self.pipe)
        self._drawn(made.pipeline, image=[neo_features._random(1, 3, 64, 64).sigmoid()])
        made.restore()

    @staticmethod
    def _drawn(pipe: Any, **more: Any) -> None:
        import torch

        generator = torch.Generator().manual_seed(3)
        pipe(PROMPT, height=64, width=64, num_inference_steps=2, guidance_scale=3.0, generator=generator, **more)

    def _adapted(self) -> None:
        from modules import ipadapter  # type: ignore[import-not-found]
        from PIL import Image
        from transformers import CLIPVisionModelWithProjection

        ipadapter.ADAPTERS_ALL["digits"] = {
            "name": "digits.safetensors", "repo": str(self.folder / "adapter"), "subfolder": ""
        }  # fmt: skip
        state, config = self.eyes
        encoder = CLIPVisionModelWithProjection(config).eval()  # a new one: SD.Next empties those of a model that goes
        encoder.load_state_dict(state)
        self.pipe.register_modules(image_encoder=encoder)
        ipadapter.clip_loaded = ENCODER
        picture = Image.linear_gradient("L").convert("RGB")
        self.draw(
            PROMPT,
            ip_adapter_names=["digits"],
            ip_adapter_images=[picture],
            ip_adapter_scales=[1.0],
            ip_adapter_crops=[False],
        )
        ipadapter.unapply(self.pipe, unload=True)

    def folders(self) -> list[dict[str, Any]]:
        """Load folders that sdquant saved, as they are: what is packed in SD.Next, and in `load_model`."""
        import sdquant
        from sdquant.hosts import load_hooks

        rows: list[dict[str, Any]] = []
        for model, schemes in FOLDERS.items() if "SDQUANT_FOLDERS" not in os.environ else ():
            for scheme in schemes:
                name = f"{model}-{scheme}"
                home = self.folder / "Diffusers" / name
                sdquant.save(sdquant.load_model(sdquant.demo.path(model), scheme, progress=False), home)
                row: dict[str, Any] = {"folder": name}
                try:
                    self.choose(AS_FOUND, model=name)
                    parts = [
                        one
                        for one in ("unet", "transformer", "text_encoder", "text_encoder_2")
                        if hasattr(self.pipe, one)
                    ]
                    row |= {one: sorted(load_hooks.schemes_in(getattr(self.pipe, one))) for one in parts}
                    row["drawn"] = list(self.draw(PROMPT).shape)
                except Exception as error:
                    row["FAILED"] = f"{type(error).__name__}: {str(error)[:200]}"
                rows.append(row)
                print(row, flush=True)
        return rows


if __name__ == "__main__":
    measure.main("sdnext_features", inside)
