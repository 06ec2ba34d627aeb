"""Merging in the web UIs: floats are left to them, and a quantized file is refused in the tab's own line."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import TYPE_CHECKING

import pytest
import torch
from safetensors.torch import save_file

from sdquant.saving import export_single_file

if TYPE_CHECKING:
    from .conftest import Running


@pytest.mark.parametrize("name", ["a1111", "sdnext", "forge"])
def test_a_quantized_file_is_not_merged(host: Callable[[str], Running], tmp_path: Path, name: str) -> None:
    floats, packed = tmp_path / "floats.safetensors", tmp_path / "packed.safetensors"
    save_file({f"blocks.{at}.weight": torch.randn(64, 64) for at in range(4)}, floats)
    export_single_file.quantize_file(floats, "fp8", packed, progress=False)
    plain = tmp_path / "plain.safetensors"  # the values are the weights, and torch adds no float8
    save_file({f"blocks.{at}.weight": torch.randn(64, 64).to(torch.float8_e4m3fn) for at in range(4)}, plain)
    running = host(name)
    running.start()
    table = "checkpoint_aliases" if name == "forge" else "checkpoints_list"
    models = {file.name: SimpleNamespace(filename=str(file)) for file in (floats, packed, plain)}
    setattr(running.modules.sd_models, table, models)
    from modules import extras

    def merged(*names: str) -> str:
        if name == "sdnext":
            files = {"primary_model_name": names[0], "secondary_model_name": names[1]}
            said = extras.run_modelmerger(None, **files, precision="fp16")[-1]
        else:
            said = extras.run_modelmerger("", *names, "", "Weighted sum", 0.5)[-1]
        return str(said)

    assert "saved" in merged(floats.name, floats.name)
    refusal = merged(floats.name, packed.name)
    assert refusal.startswith("Cannot merge packed.safetensors")
    assert "quantized (fp8)" in refusal
    said = merged(floats.name, plain.name)
    expected = "Model saved" if name == "sdnext" else "Cannot merge plain.safetensors: its weights are float8"
    assert expected in said
