"""Merging, saving and the modes of offloading in SD.Next with a quantized model loaded, on digits-sd.

    python -m tools.hosts.sdnext_files CHECKOUT --python VENV/bin/python

By the functions behind its tabs *Models, Merge* and *Models, Save*, and by its setting 'Model offload mode'. Merging
needs tensordict, which SD.Next installs when it first merges: to leave its environment as it is, put that into a folder
and name it in the variable SDQUANT_PACKAGES.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from . import measure, merging, sd_checkpoint
from .classic import AS_FOUND, PROMPT
from .sdnext import _Host

FLOAT8 = "plain"  # a file in float8 without scales
MODES = ("none", "balanced", "group", "model", "sequential")  # all of 'Model offload mode' (ui_definitions.py)
_HALF = {"merge_mode": "weighted_sum", "alpha": 0.5, "device": "cpu"}


def inside(checkout: Path, work: Path, schemes: list[str]) -> list[dict[str, Any]]:
    """Measure, in SD.Next's process."""
    host = _Host(checkout, work)
    host.set(sd_textencoder_cache_size=0, diffusers_offload_mode="none")
    for file in (work / "data" / "models" / "embeddings").iterdir():
        file.unlink()  # with an embedding loaded, SD.Next itself cannot draw in mode `sequential`
    host.choose(AS_FOUND)
    before = host.draw(PROMPT)
    rows = [{"scheme": AS_FOUND, "offload": mode, **_offloaded(host, AS_FOUND, mode, before)} for mode in MODES]
    print(json.dumps(rows, indent=1), flush=True)
    for scheme in schemes:
        host.choose(scheme)
        before = host.draw(PROMPT)
        found = {**_merged(host, work), **_saved(host, scheme)}
        weights = _weights(host)
        found["drawn as before"] = bool((host.draw(PROMPT) == before).all())
        found |= _loaded_again(host, scheme, before, weights)
        rows.append({"scheme": scheme, **found})
        rows += [{"scheme": scheme, "offload": mode, **_offloaded(host, scheme, mode, before)} for mode in MODES]
        print(json.dumps(rows[-len(MODES) - 1 :], indent=1), flush=True)
    return rows


def _merged(host: _Host, work: Path) -> dict[str, Any]:
    """Merge two files, and one with a quantized one."""
    import torch
    from modules import extras, sd_models  # type: ignore[import-not-found]
    from safetensors.torch import load_file, save_file

    folder = work / "data" / "models" / "Stable-diffusion"
    folder.mkdir(exist_ok=True)
    host.set(ckpt_dir=str(folder))
    if not (folder / "packed.safetensors").exists():
        merging.write(folder)
        codes = {key: one.to(torch.float8_e4m3fn) for key, one in sd_checkpoint.tensors().items()}
        save_file(codes, folder / f"{FLOAT8}.safetensors")
    sd_models.list_models()

    def merge(other: str, precision: str = "fp32") -> str:
        titles = {Path(info.filename).stem: title for title, info in sd_models.checkpoints_list.items()}
        said = extras.run_modelmerger(
            "", primary_model_name=titles["digits"], secondary_model_name=titles[other], tertiary_model_name=None,
            custom_name="merged", checkpoint_format="safetensors", overwrite=True,
            precision=precision, **_HALF,
        )  # fmt: skip
        return str(said[-1])

    def is_mean(factor: float, tolerance: float) -> bool:
        found = load_file(folder / "merged.safetensors")
        (folder / "merged.safetensors").unlink()
        return all(
            torch.allclose(found[key].float(), factor * one.float(), rtol=tolerance, atol=1e-3)
            for key, one in sd_checkpoint.tensors().items()
        )

    done = {"said": merge("other"), "merged": is_mean(0.75, 1e-2), "of a quantized file": merge("packed")}
    done |= {"of float8": merge(FLOAT8), "of float8 in fp16": merge(FLOAT8, "fp16")}
    return done | {"merged float8": is_mean(1.0, 0.07)}


def _saved(host: _Host, scheme: str) -> dict[str, Any]:
    """Save the loaded model."""
    from modules import sd_models

    said = sd_models.save_model(f"saved-{scheme}", str(Path(host.shared.opts.diffusers_dir)))
    return {"saving": said}


def _weights(host: _Host) -> dict[str, Any]:
    """All values of the model's networks, packed ones decoded."""
    parts = {"unet": host.pipe.unet, "text_encoder": host.pipe.text_encoder, "vae": host.pipe.vae}
    decoded = measure.decoded(parts.values())
    packed = {f"{part}.{path}": one for part, of in zip(parts, decoded, strict=True) for path, one in of.items()}
    rest = {
        f"{part}.{path}": one.detach().float().clone()
        for part, module in parts.items()
        for path, one in module.named_parameters()
        if f"{part}.{path.rpartition('.')[0]}" not in packed
    }
    return packed | rest


def _equal(one: dict[str, Any], other: dict[str, Any]) -> Any:
    """Whether all are equal, bit for bit; or those that are not."""
    different = [key for key in one if key not in other or not bool((one[key] == other[key]).all())]
    return different[:4] or True


def _loaded_again(host: _Host, scheme: str, before: Any, weights: dict[str, Any]) -> dict[str, Any]:
    """Load what was saved, as it is, by SD.Next and by sdquant."""
    import sdquant
    from sdquant.hosts import load_hooks

    folder = Path(host.shared.opts.diffusers_dir) / f"saved-{scheme}"
    if not folder.exists():
        return {}
    found: dict[str, Any] = {}
    try:
        host.choose(AS_FOUND, model=folder.name)
        found["loaded again"] = sorted(load_hooks.schemes_in(host.pipe.unet))
        found["off"] = int(abs(host.draw(PROMPT).astype(int) - before.astype(int)).max())
        found["same weights"] = _equal(weights, _weights(host))
    except Exception as error:
        found["loaded again"] = f"{type(error).__name__}: {str(error)[:300]}"
    try:
        found["by sdquant"] = sorted(load_hooks.schemes_in(sdquant.load_model(folder, progress=False).unet))
    except Exception as error:
        found["by sdquant"] = f"{type(error).__name__}: {str(error)[:300]}"
    return found


def _offloaded(host: _Host, scheme: str, mode: str, before: Any) -> dict[str, Any]:
    """Load and draw in a mode of offloading; or what the tab sdquant says."""
    from sdquant.hosts import extension, load_hooks

    try:
        host.choose(scheme, diffusers_offload_mode=mode)
        drawn = host.draw(PROMPT)
        found = {
            "schemes": sorted(load_hooks.schemes_in(host.pipe.unet)),
            "off": int(abs(drawn.astype(int) - before.astype(int)).max()),
        }
    except Exception as error:
        found = {"error": f"{type(error).__name__}: {str(error)[:300]}"}
    if extension._session is not None:
        found["says"] = extension._session.status.to_dict()["error"]
    host.set(diffusers_offload_mode="none")
    return found


if __name__ == "__main__":
    measure.main("sdnext_files", inside)
