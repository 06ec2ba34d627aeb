"""Forge Neo's LoRAs on quantized layers, by its own processing of prompts such as "seven <lora:name:0.8>".

    python -m tools.hosts.neo CHECKOUT --python VENV/bin/python

CHECKOUT: the folder with Neo's webui.py. The environment: Neo's requirements.txt. Neo knows a model by its sizes: its
row of Stable Diffusion 1.5 gets those of digits-sd.
"""

from __future__ import annotations

import importlib
import json
import os
import shutil
import sys
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from . import measure, neo_features, sd_checkpoint

PROMPT, SEED = "a handwritten seven", 3
FEATURES = {
    "LoRA": "<lora:digits_lora:1>",
    "LoRA, 0.5": "<lora:digits_lora:0.5>",
    "LoHa": "<lora:digits_loha:1>",
    "LoKr": "<lora:digits_lokr:1>",
    "LoCon": "<lora:digits_locon:1>",
    "two": "<lora:digits_lora:0.6><lora:digits_lokr:0.7>",
    "DoRA": "<lora:digits_dora:1>",
    "text encoder": "<lora:digits_text:1>",
}
# "online": Neo's own option to add LoRAs each time; "partly": what its lowvram mode does, for 80 % of the model's bytes
WAYS = {
    "whole": {"forge_unet_storage_dtype": "Automatic"},
    "online": {"forge_unet_storage_dtype": "Automatic (fp16 LoRA)"},
    "partly": {"forge_unet_storage_dtype": "Automatic"},
}
KEEP = {"partly": 0.8}
REPOSITORY = "runwayml/stable-diffusion-v1-5"  # of the configs that Neo ships for the models that it knows


def inside(checkout: Path, work: Path, schemes: list[str]) -> list[dict[str, Any]]:
    """Measure, in Neo's process."""
    host = _Host(checkout, work)
    rows = []
    host.load()
    host.record()
    floats = host.effects(FEATURES) | host.others()
    for scheme in schemes:
        for way, options in WAYS.items():
            host.keep = KEEP.get(way)
            host.set(sdquant_quant_model=scheme, sdquant_quant_text_encoder=scheme, **options)
            host.load()
            before = host.draw(PROMPT)
            found = host.effects(FEATURES)
            if way != "online":
                found |= host.others()
            checks = {"changed": host.changes(), "removed": host.removed and bool((host.draw(PROMPT) == before).all())}
            rows += [
                measure.row(f"{name} ({way})", scheme, effect, floats[name], **checks) for name, effect in found.items()
            ]
            print(measure.table(rows[-len(found) :]), flush=True)
        print(f"Save Current Model: {host.saved()}", flush=True)
    return rows


class _Host:
    """Neo with sdquant's extension and the model digits-sd."""

    def __init__(self, checkout: Path, work: Path) -> None:
        self.data = work / "data"
        for folder in ("Lora", "Stable-diffusion"):
            (self.data / "models" / folder).mkdir(parents=True)
        checkpoint = self.data / "models" / "Stable-diffusion" / "digits.safetensors"
        sd_checkpoint.write(checkpoint)
        checkpoint.with_suffix(".yaml").write_text("model: {params: {parameterization: v}}\n")
        for file in measure.loras().glob("*.safetensors"):
            shutil.copy(file, self.data / "models" / "Lora")
        neo_features.embedding(self.data / "models" / "embeddings")
        from sdquant.hosts import extension

        shutil.copytree(Path(extension.__file__).parent / "webui", self.data / "extensions" / "sdquant")
        sys.argv = ["launch.py", "--data-dir", str(self.data), "--cpu", "--skip-version-check", "--loglevel", "INFO"]
        sys.path.insert(0, str(checkout))
        os.chdir(checkout)
        from modules import initialize  # type: ignore[import-not-found]
        from modules_forge.initialization import initialize_forge  # type: ignore[import-not-found]

        initialize_forge()
        initialize.imports()
        self._know_the_model(work)
        initialize.initialize()
        from modules import script_callbacks, sd_models, shared

        script_callbacks.before_ui_callback()
        script_callbacks.ui_settings_callback()
        self.shared, self.models = shared, sd_models
        self.calls: list[Any] = []
        self.keep: float | None = None
        self.removed = True
        from backend import memory_management  # type: ignore[import-not-found]

        patcher = memory_management.LoadedModel
        load = patcher.model_load

        def part(model: Any, lowvram_model_memory: float = 0, *args: Any, **kwargs: Any) -> Any:
            size = self.keep * model.model.model_size() if self.keep else lowvram_model_memory
            return load(model, size, *args, **kwargs)

        patcher.model_load = part

    def _know_the_model(self, work: Path) -> None:
        """Give Neo's row of the model the sizes of digits-sd, and its configs."""
        from backend import loader, operations  # type: ignore[import-not-found]

        from sdquant import demo

        for name in ("huggingface_guess", "modules_forge.packages.huggingface_guess"):  # Neo imports it by both
            known = importlib.import_module(f"{name}.model_list")
            row = known.SD15
            row.unet_config = row.unet_config | {"context_dim": 128, "model_channels": 32}
            row.unet_extra_config = row.unet_extra_config | {"num_heads": sd_checkpoint.HEADS}
            row.latent_format = _latents(known.latent.SD15)
        shutil.copytree(demo.path("digits-sd"), work / REPOSITORY)
        index = work / REPOSITORY / "model_index.json"
        parts = json.loads(index.read_text()) | {"tokenizer": ["transformers", "CLIPTokenizerFast"]}
        index.write_text(json.dumps(parts))
        loader.HF = str(work)
        norm = operations.ForgeOperations.GroupNorm
        make = norm.__init__

        def made(self: Any, num_groups: int, *args: Any, **kwargs: Any) -> None:
            make(self, sd_checkpoint.GROUPS, *args, **kwargs)

        def named(self: Any, *args: Any, num_groups: int = 0, **kwargs: Any) -> None:
            made(self, num_groups, *args, **kwargs)

        norm.__init__ = lambda self, *a, **k: made(self, *a, **k) if a else named(self, **k)

    def set(self, **options: Any) -> None:
        """Set options of Neo."""
        for name, value in options.items():
            self.shared.opts.set(name, value)

    def load(self) -> None:
        """Load the model anew, with the options as they are."""
        from modules_forge import main_entry

        self.set(sd_model_checkpoint="digits.safetensors", sd_vae="Automatic")
        self.models.model_data.forge_hash = ""
        main_entry.refresh_model_loading_parameters()
        self.models.forge_model_reload()
        self.engine = self.shared.sd_model

    def record(self) -> None:
        """Keep the inputs of the UNet in a drawing."""

        def keep(module: Any, args: Any, kwargs: Any) -> None:
            self.calls.append((args, dict(kwargs)))

        handle = self._unet().register_forward_pre_hook(keep, with_kwargs=True)
        self.draw(PROMPT)
        handle.remove()

    def _unet(self) -> Any:
        return self.engine.forge_objects.unet.model.diffusion_model

    def unet_after(self, prompt: str) -> Any:
        """What the UNet gives for the recorded inputs after a drawing, whose LoRAs stay on it."""
        import torch

        self.draw(prompt)
        with torch.inference_mode():
            return torch.cat([self._unet()(*args, **kwargs).flatten() for args, kwargs in self.calls])

    def text_in(self, prompt: str) -> Any:
        """What the text encoder gives in a drawing."""
        import torch

        found: list[Any] = []
        encoder = self.engine.text_processing_engine.text_encoder.transformer
        handle = encoder.register_forward_hook(lambda _, __, out: found.append(out.last_hidden_state.flatten()))
        self.draw(prompt)
        handle.remove()
        return torch.cat(found)

    def effects(self, features: Iterable[str]) -> dict[str, Any]:
        """Output with the LoRA - output without, by feature. Notes whether each is gone with the next picture."""
        import torch

        found: dict[str, Any] = {}
        first: dict[Any, Any] = {}
        for name in features:
            of = self.text_in if name == "text encoder" else self.unet_after
            before = of(PROMPT)
            self.removed = self.removed and torch.equal(before, first.setdefault(of, before))
            found[name] = of(f"{PROMPT} {FEATURES[name]}") - before
        self.draw(PROMPT)
        return found

    def changes(self) -> bool:
        """Whether a picture is the same after another one with other LoRAs as after one without any."""
        one, other = (f"{PROMPT} {FEATURES[name]}" for name in ("LoRA, 0.5", "two"))
        self.draw(PROMPT)
        expected = self.draw(one)
        self.draw(other)
        return bool((self.draw(one) == expected).all())

    def others(self) -> dict[str, Any]:
        """What ControlNet and the like do to the UNet's first output in a drawing, and an embedding to the text's."""
        before = self._first()
        found = {name: self._first(add) - before for name, add in neo_features.FEATURES.items()}
        embeddings = self.engine.text_processing_engine.embeddings
        embeddings.expected_shape = 128
        embeddings.load_textual_inversion_embeddings()
        plain = self.text_in(PROMPT)
        return found | {"textual inversion": self.text_in(f"{PROMPT} {neo_features.WORD}") - plain}

    def _first(self, add: Any = None) -> Any:
        """The UNet's first output in a drawing, with what `add` makes of its patcher in the place of it."""
        outputs: list[Any] = []
        original = self.engine.forge_objects_original
        kept = original.unet
        handle = self._unet().register_forward_hook(lambda _, __, out: outputs.append(out.flatten().clone()))
        try:
            original.unet = kept if add is None else add(kept)
            self.engine.current_lora_hash = ""  # so that Neo takes it
            self.draw(PROMPT)
        finally:
            original.unet = kept
            handle.remove()
        self.engine.current_lora_hash = ""
        return outputs[0]

    def saved(self) -> str:
        """What Neo's tab says to saving the model."""
        try:
            return str(self.engine.save_checkpoint(str(self.data / "saved.safetensors")))
        except Exception as error:
            return str(error)

    def draw(self, prompt: str) -> Any:
        """The pixels of an image."""
        import numpy as np
        from modules import processing

        p = processing.StableDiffusionProcessingTxt2Img(
            prompt=prompt, seed=SEED, steps=6, width=64, height=64, cfg_scale=3.0, do_not_save_samples=True,
            do_not_save_grid=True, sampler_name="Euler", scheduler="Automatic",
        )  # fmt: skip
        p.clear_prompt_cache()
        done = processing.process_images(p)
        return np.array(done.images[0])


def _latents(base: type) -> type:
    """Neo's class of latents, with the scale of digits-sd."""

    def made(self: Any) -> None:
        base.__init__(self)  # type: ignore[misc]
        self.scale_factor = sd_checkpoint.SCALE

    return type("Latents", (base,), {"__init__": made})


if __name__ == "__main__":
    measure.main("neo", inside)
