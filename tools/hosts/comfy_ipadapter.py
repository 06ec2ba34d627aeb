"""IP-Adapter in ComfyUI by cubiq's ComfyUI_IPAdapter_plus, on digits-sd: patches of attention on quantized layers.

    python -m tools.hosts.comfy_ipadapter CHECKOUT --extension COMFYUI_IPADAPTER_PLUS --python VENV/bin/python

By its nodes *IPAdapter Model Loader* and *IPAdapter Embeds*, which gets what an image encoder would give, and one step
of ComfyUI's sampler. The adapter has random weights for Stable Diffusion's 16 places, of which digits-sd has three.
"""

from __future__ import annotations

import asyncio
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

from . import comfy_features, measure, neo_features

FILE, LORA, KIND = "ip_adapter.safetensors", "digits_lora.safetensors", "ipadapter"
SCALINGS = ("V only", "K+V w/ C penalty")  # of the adapter's keys and values, two of the node's four


def write(folder: Path) -> None:
    """Write the model, the adapter, and a random LoRA of attention under ComfyUI's own names."""
    from safetensors.torch import load_file, save_file

    comfy_features.write(folder)
    parts = neo_features.ip_adapter_tensors()
    save_file({f"{part}.{key}": one for part, of in parts.items() for key, one in of.items()}, folder / FILE)
    lora = {}
    for key, weight in load_file(folder / comfy_features.MODEL).items():
        if "attn" in key and key.endswith((".to_q.weight", ".to_k.weight", ".to_v.weight")):
            name = f"diffusion_model.{key.removesuffix('.weight')}"
            out, into = weight.shape
            size = 0.5 * weight.norm() / into**0.5
            lora |= {
                f"{name}.lora_up.weight": neo_features._random(out, 4),
                f"{name}.lora_down.weight": size * neo_features._random(4, into),
            }
    save_file(lora, folder / LORA)


def inside(checkout: Path, work: Path, schemes: list[str]) -> list[dict[str, Any]]:
    """Measure, in ComfyUI's process."""
    host = _Adapted(checkout, work)
    floats, rows = host.found("as found"), []
    for scheme in schemes:
        found = host.found(scheme)
        rows += [measure.row(name, scheme, effect, floats[name]) for name, effect in found.items()]
        print(measure.table(rows[-len(found) :]), flush=True)
    return rows


class _Adapted(comfy_features._Host):
    """ComfyUI with both packages of nodes."""

    def __init__(self, checkout: Path, work: Path) -> None:
        super().__init__(checkout, work)
        import folder_paths  # type: ignore[import-not-found]

        (work / KIND).mkdir()
        folder_paths.add_model_folder_path(KIND, str(work / KIND), is_default=True)
        shutil.copy(measure.loras() / FILE, work / KIND)
        shutil.copy(measure.loras() / LORA, work / "loras")
        package = work / "custom_nodes" / measure.extension().name
        shutil.copytree(measure.extension(), package)
        assert asyncio.run(self.nodes.load_custom_node(str(package))), "the package of nodes does not load"
        kinds = self.nodes.NODE_CLASS_MAPPINGS
        (self.adapter,) = kinds["IPAdapterModelLoader"]().load_ipadapter_model(FILE)
        self.apply = kinds["IPAdapterEmbeds"]().apply_ipadapter
        self.seen = neo_features._random(1, neo_features.IMAGE_WIDTH)

    def found(self, scheme: str) -> dict[str, Any]:
        """What the adapter changes, in each of the ways, by its name. Afterwards all is as it was."""
        model = self.run("LoadDiffusionModel", model_name=comfy_features.MODEL, quantize=scheme)
        before = self.drawn(model)
        with_lora = self._with_lora(model)
        ways: dict[str, Callable[[], Any]] = {
            f"IP-Adapter, {scaling}": lambda scaling=scaling: self.drawn(self._adapted(model, scaling)) - before
            for scaling in SCALINGS
        }
        ways |= {
            "twice": lambda: self.drawn(self._adapted(self._adapted(model), weight=0.5)) - before,
            "behind a LoRA": lambda: self.drawn(self._adapted(with_lora)) - self.drawn(with_lora),
            "before a LoRA": lambda: self.drawn(self._with_lora(self._adapted(model))) - self.drawn(with_lora),
            "beside a ControlNet": lambda: (
                self.drawn(self._adapted(model), comfy_features.CONTROLNET)
                - self.drawn(model, comfy_features.CONTROLNET)
            ),
            "half of the model loaded": lambda: self._in_part(model) - before,
            "before Quantize Model": lambda: self._quantized_behind(scheme) - before,
        }
        found = {name: way() for name, way in ways.items()}
        assert bool((self.drawn(model) == before).all())
        return found

    def _adapted(self, model: Any, scaling: str = SCALINGS[0], weight: float = 1.0) -> Any:
        none = self.torch.zeros_like(self.seen)
        changed, *_ = self.apply(
            model, self.adapter, self.seen, weight, "linear", 0.0, 1.0, neg_embed=none, embeds_scaling=scaling
        )
        return changed

    def _with_lora(self, model: Any) -> Any:
        return self.nodes.LoraLoaderModelOnly().load_lora_model_only(model, LORA, 1.0)[0]

    def _in_part(self, model: Any) -> Any:
        """With room for half of the model, as ComfyUI's --lowvram leaves it (the memory is set here)."""
        import comfy.model_management as management  # type: ignore[import-not-found]

        load = management.LoadedModel.model_load
        management.unload_all_models()
        changed = self._adapted(model)
        budget = changed.model_size() // 2
        management.LoadedModel.model_load = lambda one, *args, **kwargs: load(one, budget)
        try:
            found = self.drawn(changed)
            assert 0 < changed.loaded_size() <= budget
        finally:
            management.LoadedModel.model_load = load
            management.unload_all_models()
        return found

    def _quantized_behind(self, scheme: str) -> Any:
        """The float model with the adapter on it, quantized by sdquant's node."""
        model = self.run("LoadDiffusionModel", model_name=comfy_features.MODEL, quantize="as found")
        changed = self._adapted(model)
        return self.drawn(
            changed if scheme == "as found" else self.run("QuantizeModel", model=changed, quantize=scheme)
        )


if __name__ == "__main__":
    measure.main("comfy_ipadapter", inside, write)
