"""ComfyUI's LoRAs, patches and memory accounts with quantized layers, by its own nodes and sampler.

    python -m tools.hosts.comfy CHECKOUT --python VENV/bin/python

The environment: the packages of requirements.txt. The model is digits-flux, trained; the text encoder a CLIP-L in
its real size, of random weights.
"""

from __future__ import annotations

import asyncio
import os
import shutil
import sys
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

from . import flux_files, measure

PROMPT = "a handwritten seven"
# What is done with a model, by file and strength of each LoRA node.
LORAS = {
    "LoRA": [("lora", 1.0)],
    "LoRA, 0.5": [("lora", 0.5)],
    "LoHa": [("loha", 1.0)],
    "LoKr": [("lokr", 1.0)],
    "DoRA": [("dora", 1.0)],
    "two": [("lora", 0.6), ("lokr", 0.7)],
}


def inside(checkout: Path, work: Path, schemes: list[str]) -> list[dict[str, Any]]:
    """Measure, in ComfyUI's process."""
    host = _Host(checkout, work)
    floats, found_floats = host.load("as found"), {}
    clip = host.load_clip("as found")
    for name, effect in host.features().items():
        found_floats[name] = effect(floats) - host.out(floats)
    text_floats = host.text(host.with_lora(floats, clip, "text")[1]) - host.text(clip)
    rows = []
    for scheme in schemes:
        model = host.load(scheme)
        before, drawn = host.out(model), host.sampled(model)
        for name, effect in host.features().items():
            found = effect(model) - before
            same = bool((host.out(model) == before).all())
            rows.append(measure.row(name, scheme, found, found_floats[name], removed=same))
            print(rows[-1], flush=True)
        clip = host.load_clip(scheme)
        plain = host.text(clip)
        found = host.text(host.with_lora(model, clip, "text")[1]) - plain
        same = bool((host.text(clip) == plain).all())
        rows.append(measure.row("LoRA of CLIP", scheme, found, text_floats, removed=same))
        print(rows[-1], flush=True)
        rows.append({"scheme": scheme, "feature": "memory", **host.memory(model)})
        again = bool((host.sampled(model) == drawn).all())
        rows.append({"scheme": scheme, "feature": "sampler", "removed": again, **host.compiled(model)})
        print(*rows[-2:], sep="\n", flush=True)
    return rows


class Nodes:
    """ComfyUI in this process, with sdquant's nodes.

    Args:
        kinds: of folders of models, which are made in `work`.
    """

    def __init__(self, checkout: Path, work: Path, kinds: Iterable[str]) -> None:
        sys.argv = ["main.py", "--cpu"]
        sys.path.insert(0, str(checkout))
        os.chdir(checkout)
        import comfy.options  # type: ignore[import-not-found]

        comfy.options.enable_args_parsing()
        import folder_paths  # type: ignore[import-not-found]
        import nodes  # type: ignore[import-not-found]
        import torch

        self.nodes, self.torch = nodes, torch
        for kind in kinds:
            (work / kind).mkdir()
            folder_paths.add_model_folder_path(kind, str(work / kind), is_default=True)
        from sdquant.hosts import comfyui

        # as ComfyUI loads nodes, through what the package gives it
        extension = asyncio.run(comfyui.comfy_entrypoint())
        self.own = {node.GET_SCHEMA().node_id: node for node in asyncio.run(extension.get_node_list())}

    def run(self, name: str, **inputs: Any) -> Any:
        """The output of one of sdquant's nodes."""
        return self.own[f"Sdquant{name}"].execute(**inputs).args[0]

    def text(self, clip: Any, prompt: str = PROMPT) -> Any:
        """What the text encoder gives."""
        ((cond, _),) = self.nodes.CLIPTextEncode().encode(clip, prompt)[0]
        return cond


def write_clip(work: Path) -> None:
    """A random CLIP-L, and a random LoRA of its attention under kohya's names."""
    import torch
    from safetensors.torch import save_file
    from transformers import CLIPTextConfig, CLIPTextModel

    torch.manual_seed(0)
    config = CLIPTextConfig(
        hidden_size=768, intermediate_size=3072, num_hidden_layers=12, num_attention_heads=12, eos_token_id=49407
    )
    state = {name: tensor.half() for name, tensor in CLIPTextModel(config).state_dict().items()}
    save_file(
        {name: one for name, one in state.items() if "_ids" not in name}, work / "text_encoders" / "l.safetensors"
    )
    lora = {}
    for layer in range(12):
        for part in ("q_proj", "v_proj"):
            key = f"lora_te1_text_model_encoder_layers_{layer}_self_attn_{part}"
            lora[f"{key}.lora_down.weight"] = torch.randn(4, 768) / 28
            lora[f"{key}.lora_up.weight"] = torch.randn(768, 4) / 28
            lora[f"{key}.alpha"] = torch.tensor(4.0)
    save_file(lora, work / "loras" / "digits_text.safetensors")


class _Host(Nodes):
    """With the model digits-flux."""

    def __init__(self, checkout: Path, work: Path) -> None:
        super().__init__(checkout, work, ("diffusion_models", "text_encoders", "loras"))
        from safetensors.torch import load_file

        _tell_sizes()
        files = measure.loras()
        shutil.copy(files / flux_files.MODEL, work / "diffusion_models")
        for file in files.glob("digits_*.safetensors"):
            shutil.copy(file, work / "loras")
        write_clip(work)
        self.inputs = load_file(files / flux_files.INPUTS)

    def load(self, scheme: str) -> Any:
        """The model in a scheme."""
        return self.run("LoadDiffusionModel", model_name=flux_files.MODEL, quantize=scheme)

    def load_clip(self, scheme: str) -> Any:
        """The text encoder in a scheme."""
        return self.run("LoadCLIP", clip_name="l.safetensors", type="stable_diffusion", quantize=scheme)

    def with_lora(self, model: Any, clip: Any, form: str, strength: float = 1.0) -> Any:
        """Model and text encoder behind a LoRA node."""
        return self.nodes.LoraLoader().load_lora(model, clip, f"digits_{form}.safetensors", strength, strength)

    def features(self) -> dict[str, Callable[[Any], Any]]:
        """What a model gives with each feature, by its name."""
        rows: dict[str, Callable[[Any], Any]] = {
            name: lambda model, files=files: self.out(self._lorad(model, files)) for name, files in LORAS.items()
        }
        rows["clone of a clone"] = lambda model: self.out(self._lorad(model.clone(), LORAS["LoRA"]).clone())
        rows["loaded in part"] = self._in_part
        rows["attention patch"] = lambda model: self.out(self._patched(model))
        rows["ControlNet's residuals"] = lambda model: self.out(model, control=self._control())
        return rows

    def _lorad(self, model: Any, files: list[tuple[str, float]]) -> Any:
        for form, strength in files:
            model, _ = self.with_lora(model, None, form, strength)
        return model

    def _in_part(self, model: Any) -> Any:
        """A LoRA with half of the model loaded."""
        changed = self._lorad(model, LORAS["LoRA"])
        self._unload()
        changed.partially_load(changed.load_device, changed.model_size() // 2)
        found = self._forward(changed)
        changed.detach()
        return found

    def _patched(self, model: Any) -> Any:
        """Attention replaced by a weaker one, as nodes for other attention kernels do."""
        changed = model.clone()

        def weaker(attention: Any, *args: Any, **kwargs: Any) -> Any:
            return 0.8 * attention(*args, **kwargs)

        changed.model_options["transformer_options"]["optimized_attention_override"] = weaker
        return changed

    def _control(self) -> dict[str, Any]:
        batch, width = len(self.inputs["x"]), 256
        words = self.inputs["x"].shape[-1] // 2
        generator = self.torch.Generator().manual_seed(0)
        return {"input": [self.torch.randn(batch, words * words, width, generator=generator)], "output": []}

    def _unload(self) -> None:
        import comfy.model_management as management  # type: ignore[import-not-found]

        management.unload_all_models()

    def out(self, model: Any, **more: Any) -> Any:
        """What the diffusion model gives for the recorded inputs, loaded as the sampler loads it."""
        import comfy.model_management as management

        management.load_models_gpu([model])
        return self._forward(model, **more)

    def _forward(self, model: Any, **more: Any) -> Any:
        with self.torch.no_grad():
            given = {name: tensor.clone() for name, tensor in self.inputs.items()}
            options = model.model_options["transformer_options"]
            return model.model.diffusion_model(**given, transformer_options=options, **more).float().clone()

    def sampled(self, model: Any) -> Any:
        """A latent after three steps of the sampler."""
        x = self.inputs
        cond = [[x["context"][:1], {"pooled_output": x["y"][:1], "guidance": 3.5}]]
        latent = {"samples": x["x"][:1] * 0.5}
        return self.nodes.common_ksampler(model, 3, 3, 1.0, "euler", "simple", cond, cond, latent)[0]["samples"]

    def memory(self, model: Any) -> dict[str, Any]:
        """What ComfyUI counts, and what it loads of a budget."""
        from sdquant.models.pipelines import weight_bytes

        self._unload()
        size, real = model.model_size(), weight_bytes(model.model)
        model.partially_load(model.load_device, size // 2)
        part = model.loaded_size()
        freed = model.partially_unload(model.offload_device, size // 8)
        rest = model.loaded_size()
        model.detach()
        return {"counted": size, "real": real, "half": round(part / size, 3), "freed": freed == part - rest > 0}

    def compiled(self, model: Any) -> dict[str, Any]:
        """The error of the compiled model, by the function behind the node TorchCompileModel."""
        from comfy_api.torch_helpers import set_torch_compile_wrapper  # type: ignore[import-not-found]

        plain, changed = self.sampled(model), model.clone()
        set_torch_compile_wrapper(model=changed, backend=os.environ.get("SDQUANT_COMPILE", "aot_eager"))
        error = (self.sampled(changed) - plain).norm() / plain.norm()
        return {"compiled": f"{error.item():.1e}"}


def _tell_sizes() -> None:
    """Tell ComfyUI what it does not read from a Flux's shapes, and takes to be as in the large ones."""
    from comfy import model_detection  # type: ignore[import-not-found]

    original = model_detection.detect_unet_config

    def told(*args: Any, **kwargs: Any) -> Any:
        found = original(*args, **kwargs)
        if found is not None and found.get("image_model") == "flux":
            found.update(axes_dim=[8, 28, 28], num_heads=4, out_channels=4)
        return found

    model_detection.detect_unet_config = told


if __name__ == "__main__":
    measure.main("comfy", inside, flux_files.write)
