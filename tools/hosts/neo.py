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
from .classic import AS_FOUND, FEATURES, PROMPT
from .forge_host import ForgeHost

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
    floats = host.effects() | host.others()
    for scheme in schemes:
        same: dict[str, Any] = {}
        for way in measure.ways(WAYS):
            host.part = KEEP.get(way)
            host.loaded.clear()
            host.set(**WAYS[way])
            host.choose(scheme)
            before = host.draw(PROMPT)
            found = host.effects()
            if way != "online":
                found |= host.others()
            checks = {"changed": host.changes(), "removed": host.removed and bool((host.draw(PROMPT) == before).all())}
            if way == "whole":
                same = host.effects_of_decoded()
            for name, effect in found.items():
                more = {**checks, **({"decoded": measure.cosine(effect, same[name])} if name in same else {})}
                rows.append(measure.row(f"{name} ({way})", scheme, effect, floats[name], **more))
            print(measure.table(rows[-len(found) :]), flush=True)
            print(f"{way}: of quantized models {sorted(host.loaded)} were loaded", flush=True)
        print(f"Save Current Model: {host.saved()}", flush=True)
    return rows


class _Host(ForgeHost):
    """Neo with sdquant's extension and the model digits-sd."""

    def __init__(self, checkout: Path, work: Path) -> None:
        super().__init__(work)
        checkpoint = self.data / "models" / "Stable-diffusion" / "digits.safetensors"
        checkpoint.with_suffix(".yaml").write_text("model: {params: {parameterization: v}}\n")
        neo_features.embedding(self.data / "models" / "embeddings")
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
        self.removed = True
        from backend import memory_management  # type: ignore[import-not-found]

        self.limit_memory(memory_management.LoadedModel)

    def _know_the_model(self, work: Path) -> None:
        """Give Neo's row of the model the sizes of digits-sd, and its configs."""
        from backend import loader, operations

        from sdquant import demo

        for name in ("huggingface_guess", "modules_forge.packages.huggingface_guess"):  # Neo imports it by both
            known = importlib.import_module(f"{name}.model_list")
            row = known.SD15
            row.unet_config = row.unet_config | {"context_dim": 128, "model_channels": 32}
            row.unet_extra_config = row.unet_extra_config | {"num_heads": sd_checkpoint.HEADS}
            row.latent_format = sd_checkpoint.latents(known.latent.SD15)
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

    def load(self) -> None:
        """Load the model anew, with the options as they are."""
        from modules_forge import main_entry

        self.set(sd_model_checkpoint="digits.safetensors", sd_vae="Automatic")
        self.models.model_data.forge_hash = ""
        main_entry.refresh_model_loading_parameters()
        self.models.forge_model_reload()
        self.engine = self.shared.sd_model

    def unet(self) -> Any:
        """The network that draws."""
        return self.engine.forge_objects.unet.model.diffusion_model

    def encoder(self) -> Any:
        """The text encoder of transformers."""
        return self.engine.text_processing_engine.text_encoder.transformer

    def effects(self, features: Iterable[str] = FEATURES) -> dict[str, Any]:
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

    def effects_of_decoded(self) -> dict[str, Any]:
        """The effects on a float model with the weights that the packed ones of the loaded model stand for."""
        weights = self.decoded()
        self.choose(AS_FOUND)
        self.put(weights)
        return self.effects()

    def changes(self) -> bool:
        """Whether a picture is the same after another one with other LoRAs as after one without any."""
        one, other = (f"{PROMPT} {FEATURES[name]}" for name in ("LoRA, 0.5", "two"))
        self.draw(PROMPT)
        expected = self.draw(one)
        self.draw(other)
        return bool((self.draw(one) == expected).all())


if __name__ == "__main__":
    measure.main("neo", inside)
