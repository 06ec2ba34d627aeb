"""Every scheme of the nodes' lists, through ComfyUI's own loader, sampler, patcher and compiler.

    python -m tools.hosts.comfy_schemes CHECKOUT --python VENV/bin/python

For each scheme: digits-flux is loaded, sampled, quantized from a float model, saved, loaded again, compiled, loaded to
half of its bytes, and run with an attention patch, with layers that a block-swap node moves, and with the LoRA
digits_lora.safetensors, if the folder of `--files` has it (`tools.hosts.comfy` makes it). Text encoders come as
files of other tools: GGUF, float8, nf4 and SVDQuant of a CLIP-L and a T5-base in their real sizes, of random weights.
"""

from __future__ import annotations

import os
import traceback
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

from . import comfy, flux_files, measure

# Name in the table, file, scheme, and how it is written.
ENCODERS = {"clip_l": "stable_diffusion", "t5base": "stable_audio"}
FORMS = ("as it is", "q8_0", "q4_k", "fp8", "nf4", "int8_convrot", "svdquant_w4a4")
FLOATS = "as it is"


def write(folder: Path) -> None:
    """Write the model, the inputs, and the text encoders in every form."""
    import torch
    from safetensors.torch import save_file

    from bench.lora import calls
    from sdquant import demo, load_model

    from . import lora_files

    pipe = load_model(demo.path("digits-flux"), dtype="float32", progress=False)
    save_file(flux_files._inputs(calls(pipe, lora_files.ASKED)), folder / flux_files.INPUTS)
    save_file(flux_files._authors(), folder / flux_files.MODEL)
    torch.manual_seed(0)
    for name, make in _MODELS.items():
        home = folder / f"{name}-folder"
        make().to(torch.bfloat16).save_pretrained(home)
        for form in FORMS:
            try:
                _write_form(home, name, form, folder)
            except Exception as error:  # a table row says so
                print(f"{name} in {form} cannot be written: {error}", flush=True)


def _clip() -> Any:
    from transformers import CLIPTextConfig, CLIPTextModel

    return CLIPTextModel(
        CLIPTextConfig(
            hidden_size=768, intermediate_size=3072, num_hidden_layers=12, num_attention_heads=12, eos_token_id=49407
        )
    )


def _t5() -> Any:
    from transformers import T5Config, T5EncoderModel

    return T5EncoderModel(
        T5Config(
            vocab_size=32128,
            d_model=768,
            d_kv=64,
            d_ff=3072,
            num_layers=12,
            num_heads=12,
            feed_forward_proj="relu",
            is_encoder_decoder=False,
        )
    )


_MODELS: dict[str, Callable[[], Any]] = {"clip_l": _clip, "t5base": _t5}


def _write_form(home: Path, name: str, form: str, folder: Path) -> None:
    from safetensors.torch import load_file, save_file

    import sdquant
    from sdquant.saving import export_gguf, export_single_file

    if form == FLOATS:
        state = load_file(home / "model.safetensors")
        save_file({key: one for key, one in state.items() if "_ids" not in key}, folder / f"{name}.safetensors")
    elif form.startswith("q"):
        export_gguf.quantize_file(home, form, folder / f"{name}-{form}.gguf", progress=False)
    elif export_single_file.suits(form):
        export_single_file.quantize_file(home, form, folder / f"{name}-{form}.safetensors", progress=False)
    else:
        model = sdquant.load_model(home, form, components=None, progress=False)
        sdquant.save(model, folder / f"{name}-{form}.safetensors")


def inside(checkout: Path, work: Path, schemes: list[str]) -> list[dict[str, Any]]:
    """Measure, in ComfyUI's process."""
    host = comfy._Host(checkout, work)
    from sdquant.hosts import comfy_load

    files = measure.loras()
    rows = [row for name, kind in ENCODERS.items() for row in _encoders(host, files, work, name, kind)]
    floats = host.load(comfy_load.AS_FOUND)
    expected, drawn = host.out(floats), host.sampled(floats)
    lora = host.features()["LoRA"] if (files / "digits_lora.safetensors").exists() else None
    changed = lora(floats) - expected if lora is not None else None
    names = [name for name in comfy_load.choices()[1:] if not schemes or "all" in schemes or name in schemes]
    for name in names:
        row = {"scheme": name}
        features = _features(host, name, floats, expected, drawn)
        if lora is not None:
            features["LoRA"] = partial(_with_lora, host, name, lora, changed)
        for feature, done in features.items():
            try:
                row[feature] = done()
            except Exception as error:
                row[feature] = f"FAILED {type(error).__name__}: {str(error)[:200]}"
        rows.append(row)
        print(row, flush=True)
    return rows


def _features(host: comfy._Host, name: str, floats: Any, expected: Any, drawn: Any) -> dict[str, Callable[[], Any]]:
    made: dict[str, Any] = {}

    def load() -> Any:
        made["model"] = host.load(name)
        made["out"] = host.out(made["model"])
        return _snr(made["out"], expected)

    def sample() -> Any:
        return _snr(host.sampled(made["model"]), drawn)

    def quantize() -> Any:
        model = host.run("QuantizeModel", model=floats, quantize=name)
        return bool((host.out(model) == made["out"]).all()) or _snr(host.out(model), made["out"])

    def save() -> Any:
        said = host.own["SdquantSaveDiffusionModel"].execute(
            model=made["model"], filename_prefix=f"sdquant/{_plain(name)}"
        )
        file = _newest(host, _plain(name))
        again = host.run("LoadDiffusionModel", model_name=file, quantize="as found")
        same = bool((host.out(again) == made["out"]).all())
        return f"{'equal' if same else _snr(host.out(again), made['out'])}{'' if said is not None else ', no text'}"

    def core() -> Any:
        (model,) = host.nodes.UNETLoader().load_unet(_newest(host, _plain(name)), "default")
        return _snr(host.out(model), expected)

    def swap() -> Any:
        return bool((_swapped(host, made["model"]) == made["out"]).all())

    def attention() -> Any:
        changed = host._patched(made["model"])
        return bool((host.out(changed) != made["out"]).any()) and bool((host.out(made["model"]) == made["out"]).all())

    def memory() -> Any:
        found = host.memory(made["model"])
        return f"{found['counted'] == found['real']} {found['half']} {found['freed']}"

    features = {
        "load": load, "sampler": sample, "quantize node": quantize, "save, load": save, "own loader": core,
        "memory": memory, "attention": attention, "block swap": swap,
    }  # fmt: skip
    if "SDQUANT_COMPILE" in os.environ:  # takes most of the time
        features["compile"] = lambda: host.compiled(made["model"])["compiled"]
    return features


def _with_lora(host: comfy._Host, name: str, lora: Callable[[Any], Any], expected: Any) -> str:
    """The cosine of a LoRA's effect with that on the float model, and whether it is gone after it."""
    model = host.load(name)
    before = host.out(model)
    effect = lora(model) - before
    gone = bool((host.out(model) == before).all())
    return f"{measure.cosine(effect, expected):.4f} {'gone' if gone else 'STAYS'}"


def _snr(found: Any, expected: Any) -> float:
    noise = (found.double() - expected.double()).square().mean()
    return round(float(10 * (expected.double().square().mean() / noise.clamp(min=1e-30)).log10()), 1)


def _plain(name: str) -> str:
    return name.replace(":", "-")


def _newest(host: comfy._Host, name: str) -> str:
    """The file that the node has saved, put where loaders look."""
    import folder_paths  # type: ignore[import-not-found]

    files = sorted(Path(folder_paths.get_output_directory(), "sdquant").glob(f"{name}_*.safetensors"))
    target = Path(folder_paths.get_folder_paths("diffusion_models")[0]) / f"saved-{name}.safetensors"
    if files:
        files[-1].replace(target)
    return target.name


def _swapped(host: comfy._Host, model: Any) -> Any:
    """The output while a hook brings each block to the device and away, as nodes for block swap do with `to`."""
    changed = model.clone()
    net, hooks = changed.model.diffusion_model, []
    for block in [*net.double_blocks, *net.single_blocks]:
        hooks.append(block.register_forward_pre_hook(lambda module, _: module.to("cpu") and None))
        hooks.append(block.register_forward_hook(lambda module, _, out: module.to("cpu", non_blocking=True) and out))
    try:
        return host.out(changed)
    finally:
        for hook in hooks:
            hook.remove()


def _encoders(host: comfy._Host, files: Path, work: Path, name: str, kind: str) -> list[dict[str, Any]]:
    import shutil

    rows, expected = [], None
    for form in FORMS:
        suffix = "" if form == FLOATS else f"-{form}"
        found = sorted(files.glob(f"{name}{suffix}.safetensors")) + sorted(files.glob(f"{name}{suffix}.gguf"))
        row: dict[str, Any] = {"encoder": name, "form": form}
        if not found:
            rows.append(row | {"load": "not written"})
            continue
        shutil.copy(found[0], work / "text_encoders")
        try:
            clip = host.run("LoadCLIP", clip_name=found[0].name, type=kind, quantize="as found")
            text = host.text(clip)
            expected = text if expected is None else expected
            patcher = clip.patcher
            row |= {"load": _snr(text, expected), "loaded again": bool((host.text(clip) == text).all())}
            row["counted"] = patcher.model_size()
        except Exception as error:
            row["load"] = f"FAILED {type(error).__name__}: {str(error)[:300]}"
            traceback.print_exc()
        rows.append(row)
        print(row, flush=True)
    return rows


if __name__ == "__main__":
    measure.main("comfy_schemes", inside, write)
