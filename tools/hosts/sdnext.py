"""SD.Next's LoRAs on quantized layers, by its own processing of prompts such as "seven <lora:name:0.8>".

    python -m tools.hosts.sdnext CHECKOUT --python VENV/bin/python

The environment: SD.Next's own, or the packages that its installer names.
"""

from __future__ import annotations

import os
import shutil
import sys
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from . import classic, measure, neo_features
from .classic import AS_FOUND, OF_TEXT, PROMPT, SEED

# SD.Next's options: how LoRAs are added to weights, and by whom, and where the weights are
WAYS = {
    "fused": {"lora_fuse_native": True, "lora_force_diffusers": False, "diffusers_offload_mode": "none"},
    "kept": {"lora_fuse_native": False},
    "diffusers": {"lora_force_diffusers": True},
    "balanced": {"diffusers_offload_mode": "balanced"},
}
FEATURES = {**classic.FEATURES, "textual inversion": neo_features.WORD}
OTHERS = ("LoRA", "LoRA, 0.5", "textual inversion")


def inside(checkout: Path, work: Path, schemes: list[str]) -> list[dict[str, Any]]:
    """Measure, in SD.Next's process."""
    host = _Host(checkout, work)
    rows = []
    # A LoRA on text encoders is an option there; an image's text is encoded once for all that ask for it.
    host.set(lora_apply_te=True, sd_textencoder_cache_size=0, diffusers_offload_mode="none")
    host.set(lora_fuse_native=False)  # fused and taken off again, a DoRA does not leave floats as they were
    host.load()
    host.record()
    floats = host.effects(FEATURES)
    for scheme in schemes:
        weights: list[dict[str, Any]] = []
        for way in measure.ways(WAYS):
            host.choose(scheme, **WAYS["fused"] | WAYS[way])
            weights = weights or measure.decoded([host.pipe.unet, host.pipe.text_encoder])
            before = host.draw(PROMPT)
            found, removed = {}, {}
            for name in FEATURES if way in ("fused", "kept") else OTHERS:
                found |= host.effects([name])
                removed[name] = bool((host.draw(PROMPT) == before).all())
            host.choose(AS_FOUND, **WAYS["fused"] | WAYS["kept"])
            measure.put([host.pipe.unet, host.pipe.text_encoder], weights)
            same = host.effects(found)
            for name, effect in found.items():
                decoded = measure.cosine(effect, same[name])
                label = f"{name} ({way})"
                rows.append(measure.row(label, scheme, effect, floats[name], decoded=decoded, removed=removed[name]))
                print(rows[-1], flush=True)
    return rows


class _Host:
    """SD.Next with sdquant's extension and the model digits-sd."""

    def __init__(self, checkout: Path, work: Path) -> None:
        data = work / "data"
        (data / "models" / "Lora").mkdir(parents=True)
        (data / "models" / "Diffusers").mkdir()
        neo_features.embedding(data / "models" / "embeddings")
        from sdquant import demo

        shutil.copytree(demo.path("digits-sd"), data / "models" / "Diffusers" / "digits-sd")
        for file in measure.loras().glob("*.safetensors"):
            shutil.copy(file, data / "models" / "Lora")
        sys.argv = ["launch.py", "--data-dir", str(data), "--use-cpu", "all"]
        sys.path.insert(0, str(checkout))
        os.chdir(checkout)
        import modules.loader  # type: ignore[import-not-found]
        from modules import shared  # type: ignore[import-not-found]

        self.shared = shared
        import modules.extra_networks  # type: ignore[import-not-found]
        from modules import modeldata, script_callbacks, sd_checkpoint, sd_models, sd_samplers
        from modules.lora import lora_load  # type: ignore[import-not-found]

        self.models = sd_models
        modeldata.model_data.locked = False
        sd_samplers.list_samplers()
        sd_checkpoint.setup_model()
        lora_load.list_available_networks()
        modules.extra_networks.initialize()
        modules.extra_networks.register_default_extra_networks()
        from sdquant.hosts import extension

        extension.register()
        script_callbacks.ui_settings_callback()
        self.calls: list[Any] = []

    def set(self, **options: Any) -> None:
        """Set options of SD.Next."""
        for name, value in options.items():
            self.shared.opts.data[name] = value

    def load(self, model: str = "digits-sd") -> None:
        """Load a model anew, with the options as they are."""
        from modules import sd_checkpoint

        sd_checkpoint.list_models()
        (info,) = [one for one in sd_checkpoint.checkpoints_list.values() if one.name.endswith(f"/{model}")]
        self.set(sd_model_checkpoint=info.title)
        self.models.unload_model_weights()
        self.models.reload_model_weights(info=info, force=True)
        self.pipe = self.shared.sd_model
        if hasattr(self.pipe, "embedding_db"):
            self.pipe.embedding_db.load_textual_inversion_embeddings(force_reload=True)

    def choose(self, scheme: str, model: str = "digits-sd", **options: Any) -> None:
        """Load a model anew with a scheme."""
        self.set(sdquant_quant_model=scheme, sdquant_quant_text_encoder=scheme, **options)
        self.load(model)

    def draw(self, prompt: str, **more: Any) -> Any:
        """The pixels of an image. more: what is set of the drawing."""
        import numpy as np
        from modules import processing

        p = processing.StableDiffusionProcessingTxt2Img(
            prompt=prompt, seed=SEED, steps=6, width=64, height=64, cfg_scale=3.0, do_not_save_samples=True,
            do_not_save_grid=True, sampler_name="Default",
        )  # fmt: skip
        for name, value in more.items():
            setattr(p, name, value)
        done = processing.process_images(p)
        return np.array(done.images[0])

    def record(self) -> None:
        """Keep the inputs of the UNet in a drawing."""

        def keep(module: Any, args: Any, kwargs: Any) -> None:
            self.calls.append((args, dict(kwargs)))

        handle = self.pipe.unet.register_forward_pre_hook(keep, with_kwargs=True)
        self.draw(PROMPT)
        handle.remove()

    def unet_after(self, prompt: str) -> Any:
        """What the UNet gives for the recorded inputs after a drawing, whose LoRAs stay on it."""
        import torch

        self.draw(prompt)
        with torch.no_grad():
            return torch.cat([self.pipe.unet(*args, **kwargs)[0].flatten() for args, kwargs in self.calls])

    def text_in(self, prompt: str) -> Any:
        """What the text encoder gives in a drawing, after which SD.Next takes the LoRAs off it."""
        import torch

        found: list[Any] = []
        handle = self.pipe.text_encoder.register_forward_hook(lambda _, __, out: found.append(out[0].flatten()))
        self.draw(prompt)
        handle.remove()
        return torch.cat(found)

    def effects(self, features: Iterable[str]) -> dict[str, Any]:
        """Output with the LoRA - output without, by feature."""
        found = {}
        for name in features:
            words = FEATURES[name]
            of = self.text_in if name in OF_TEXT else self.unet_after
            before = of(PROMPT)
            found[name] = of(f"{PROMPT} {words}") - before
        self.draw(PROMPT)
        return found


if __name__ == "__main__":
    measure.main("sdnext", inside)
