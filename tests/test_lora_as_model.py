"""A LoRA in the place of a model: told by its names, and refused with what to do."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

import sdquant
from sdquant.cli import main

NAMES = {
    "peft": ("transformer.transformer_blocks.0.attn.to_q.lora_A.weight", "transformer.x_embedder.lora_B.weight"),
    "diffusers": ("unet.mid_block.attentions.0.proj_in.lora.up.weight", "unet.mid_block.proj.lora.down.weight"),
    "kohya": ("lora_unet_mid_block_0_to_q.lora_down.weight", "lora_te_text_model_layers_0_fc1.lora_up.weight"),
    "LoHa": ("lora_unet_mid_block_0_to_q.hada_w1_a", "lora_unet_mid_block_0_to_q.hada_w2_b"),
    "LoKr": ("lora_unet_mid_block_0_to_q.lokr_w1", "lora_unet_mid_block_0_to_q.lokr_w2_a"),
}


@pytest.mark.parametrize("kind", NAMES)
def test_told_and_refused(kind: str, sd: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "style.safetensors"
    names = NAMES[kind]
    save_file({name: torch.ones(8, 4) for name in (*names, names[0].partition(".")[0] + ".alpha")}, file)
    seen = sdquant.detect(file)
    assert (seen.component, seen.family) == ("lora", None)
    assert min(names) in seen.evidence[0]
    said = re.escape(min(names))
    for base in (None, sd):
        with pytest.raises(sdquant.UnsupportedFileError, match=f"LoRA.*{said}.*load_lora_weights"):
            sdquant.load_model(file, "nf4", base=base, progress=False)
    with pytest.raises(sdquant.UnsupportedFileError, match="LoRA"):
        sdquant.load_model(sd, parts=[file], progress=False)
    for target, scheme in (("out.gguf", "q8_0"), ("out.safetensors", "fp8"), ("out", "int8")):
        assert main(["quantize", str(file), str(tmp_path / target), "--quant", scheme]) != 0
        assert "LoRA" in capsys.readouterr().err
    assert [path.name for path in tmp_path.iterdir()] == [file.name]


def test_models_are_none(sd: Path, flux: Path) -> None:
    for part in ("unet", "text_encoder", "vae"):
        assert sdquant.detect(sd / part).component != "lora"
    assert sdquant.detect(flux / "transformer").component != "lora"
