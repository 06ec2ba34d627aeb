"""Forge's LoRAs on quantized layers, by its own processing of prompts such as "seven <lora:name:0.8>".

    python -m tools.hosts.forge CHECKOUT --python VENV/bin/python

CHECKOUT: with huggingface_guess in its folder `repositories`, as its launcher makes it. The environment: Forge's
requirements. Forge knows a model by its sizes: its row of Stable Diffusion 1.5 gets those of digits-sd.
"""

from __future__ import annotations

import json
import os
import shutil
import sys
from pathlib import Path
from typing import Any

from . import forge_host, measure, neo_features, sd_checkpoint

REPOSITORY = "runwayml/stable-diffusion-v1-5"  # of the configs that Forge ships for the models that it knows


def inside(checkout: Path, work: Path, schemes: list[str]) -> list[dict[str, Any]]:
    """Measure, in Forge's process."""
    return _Forge(checkout, work).measured(schemes)


class _Forge(forge_host.ForgeHost):
    def __init__(self, checkout: Path, work: Path) -> None:
        super().__init__(work)
        checkpoint = self.data / "models" / "Stable-diffusion" / "digits.safetensors"
        checkpoint.with_suffix(".yaml").write_text("model: {params: {parameterization: v}}\n")
        neo_features.embedding(self.data / "embeddings")
        sys.argv = ["launch.py", "--data-dir", str(self.data), "--always-cpu", "--skip-version-check"]
        sys.path[:0] = [str(checkout), str(checkout / "repositories" / "huggingface_guess")]
        os.chdir(checkout)
        from modules import initialize  # type: ignore[import-not-found]
        from modules_forge.initialization import initialize_forge  # type: ignore[import-not-found]

        initialize_forge()
        initialize.imports()
        _know_the_model(work)
        initialize.initialize()
        from modules import script_callbacks

        script_callbacks.before_ui_callback()
        script_callbacks.ui_settings_callback()

    def load(self) -> None:
        from modules import sd_models
        from modules_forge import main_entry

        self.set(sd_model_checkpoint="digits.safetensors", forge_unet_storage_dtype="Automatic")
        sd_models.model_data.forge_hash = ""
        main_entry.refresh_model_loading_parameters()
        sd_models.forge_model_reload()
        self.engine = sd_models.model_data.sd_model

    def unet(self) -> Any:
        return self.engine.forge_objects.unet.model.diffusion_model

    def encoder(self) -> Any:
        return self.engine.text_processing_engine.text_encoder.transformer


def _know_the_model(work: Path) -> None:
    """Give Forge's row of the model the sizes of digits-sd, and its configs."""
    from backend import loader, operations  # type: ignore[import-not-found]
    from huggingface_guess import model_list  # type: ignore[import-not-found]

    from sdquant import demo

    row = model_list.SD15
    row.unet_config = row.unet_config | {"context_dim": 128, "model_channels": 32}
    row.unet_extra_config = row.unet_extra_config | {"num_heads": sd_checkpoint.HEADS}
    shutil.copytree(demo.path("digits-sd"), work / "huggingface" / REPOSITORY)
    index = work / "huggingface" / REPOSITORY / "model_index.json"
    index.write_text(json.dumps(json.loads(index.read_text()) | {"tokenizer": ["transformers", "CLIPTokenizerFast"]}))
    loader.dir_path = str(work)
    norm = operations.ForgeOperations.GroupNorm
    make = norm.__init__

    def made(self: Any, num_groups: int, *args: Any, **kwargs: Any) -> None:
        make(self, sd_checkpoint.GROUPS, *args, **kwargs)

    norm.__init__ = made


if __name__ == "__main__":
    measure.main("forge", inside)
