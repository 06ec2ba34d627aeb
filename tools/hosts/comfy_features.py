"""ControlNet, Control-LoRA, hypernetworks and textual inversion in ComfyUI, by its own nodes, on digits-sd.

    python -m tools.hosts.comfy_features CHECKOUT --python VENV/bin/python

ComfyUI knows a model by its sizes: its row of Stable Diffusion 1.5 gets those of digits-sd. ControlNet, Control-LoRA
and hypernetwork have random weights, as those of the other web UIs' scripts; the text encoder, a CLIP-L in its real
size, and the embedding have, too.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

from . import a1111, comfy, measure, neo_features, sd_checkpoint

MODEL, CONTROLNET, CONTROL_LORA = "digits.safetensors", "control.safetensors", "control_lora.safetensors"
HYPERNETWORK, WORD = "digits.pt", "glorp"
KINDS = ("controlnet", "hypernetworks", "embeddings", "diffusion_models", "text_encoders", "loras")


def write(folder: Path) -> None:
    """Write the UNet in its authors' names, and the files of the features."""
    import torch
    from safetensors.torch import save_file

    prefix = "model.diffusion_model."
    save_file(
        {
            key.removeprefix(prefix): one.float()
            for key, one in sd_checkpoint.tensors().items()
            if key.startswith(prefix)
        },
        folder / MODEL,
    )
    save_file(neo_features.controlnet_tensors(), folder / CONTROLNET)
    save_file(neo_features.control_lora_tensors(), folder / CONTROL_LORA)
    torch.manual_seed(0)
    pairs = {
        size: tuple(
            {"linear.0.weight": 0.1 * torch.randn(size, size), "linear.0.bias": 0.1 * torch.randn(size)} for _ in "kv"
        )
        for size in (32, 64, 128)
    }
    torch.save(pairs, folder / HYPERNETWORK)
    save_file({"emb_params": 0.1 * torch.randn(4, 768)}, folder / f"{WORD}.safetensors")


def inside(checkout: Path, work: Path, schemes: list[str]) -> list[dict[str, Any]]:
    """Measure, in ComfyUI's process."""
    host = _Host(checkout, work)
    floats, rows = host.effects("as found"), []
    for scheme in schemes:
        found = host.effects(scheme)
        rows += [measure.row(name, scheme, *pair(effect, floats[name])) for name, effect in found.items()]
        print(measure.table(rows[-len(found) :]), flush=True)
    return rows


def pair(found: Any, expected: Any) -> tuple[Any, Any]:
    """Two effects; one that failed, of which there is a text, is said and counts as none."""
    if isinstance(found, str):
        print(found, flush=True)
        return expected * 0, expected
    return found, expected


class _Host(comfy.Nodes):
    """ComfyUI with sdquant's nodes and the model digits-sd."""

    def __init__(self, checkout: Path, work: Path) -> None:
        super().__init__(checkout, work, KINDS)
        import shutil

        files = measure.loras()
        for name, kind in (
            (MODEL, "diffusion_models"), (CONTROLNET, "controlnet"), (CONTROL_LORA, "controlnet"),
            (HYPERNETWORK, "hypernetworks"), (f"{WORD}.safetensors", "embeddings"),
        ):  # fmt: skip
            shutil.copy(files / name, work / kind)
        comfy.write_clip(work)
        from comfy import supported_models  # type: ignore[import-not-found]

        a1111.set_groups()
        row = supported_models.SD15
        row.unet_config = row.unet_config | {"context_dim": 128, "model_channels": 32}
        row.unet_extra_config = row.unet_extra_config | {"num_heads": sd_checkpoint.HEADS}
        generator = self.torch.Generator().manual_seed(0)
        self.context = self.torch.randn(1, 77, 128, generator=generator)
        self.latent = self.torch.randn(1, 4, 8, 8, generator=generator)
        self.image = self.torch.rand(1, 64, 64, 3, generator=generator)

    def effects(self, scheme: str) -> dict[str, Any]:
        """What each feature changes, by its name; a text for one that cannot be used."""
        model = self.run("LoadDiffusionModel", model_name=MODEL, quantize=scheme)
        clip = self.run("LoadCLIP", clip_name="l.safetensors", type="stable_diffusion", quantize=scheme)
        before, plain = self.drawn(model), self.text(clip)
        ways: dict[str, Callable[[], Any]] = {
            "ControlNet": lambda: self.drawn(model, CONTROLNET) - before,
            "Control-LoRA": lambda: self.drawn(model, CONTROL_LORA) - before,
            "hypernetwork": lambda: self.drawn(self.with_hypernetwork(model)) - before,
            "textual inversion": lambda: self.text(clip, f"embedding:{WORD}") - plain,
        }
        found = {name: self._tried(way) for name, way in ways.items()}
        assert bool((self.drawn(model) == before).all()) and bool((self.text(clip) == plain).all())
        return found

    def _tried(self, way: Callable[[], Any]) -> Any:
        try:
            return way()
        except Exception as error:
            return f"{type(error).__name__}: {error}"

    def with_hypernetwork(self, model: Any) -> Any:
        """The model behind ComfyUI's node for hypernetworks."""
        from comfy_extras import nodes_hypernetwork  # type: ignore[import-not-found]

        return nodes_hypernetwork.HypernetworkLoader.execute(model, HYPERNETWORK, 1.0).args[0]

    def drawn(self, model: Any, control: str = "") -> Any:
        """A latent after one step of the sampler, with a ControlNet of this file."""
        cond: Any = [[self.context, {}]]
        other: Any = [[-self.context, {}]]
        if control:
            (net,) = self.nodes.ControlNetLoader().load_controlnet(control)
            apply = self.nodes.ControlNetApplyAdvanced().apply_controlnet
            cond, other = apply(cond, other, net, self.image, 1.0, 0.0, 1.0)
        latent = {"samples": self.latent}
        return self.nodes.common_ksampler(model, 3, 1, 3.0, "euler", "simple", cond, other, latent)[0]["samples"]


if __name__ == "__main__":
    measure.main("comfy_features", inside, write)
