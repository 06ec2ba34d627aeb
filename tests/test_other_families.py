"""Transformers of other families in their authors' names, alone beside a config.json: every tensor arrives.

Small models with random weights; the names are written by our own rules, not by diffusers' converters that read them.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor

import sdquant
from sdquant import backends
from sdquant.nn import packed_of

State = dict[str, Tensor]


def renamed(name: str, rules: tuple[tuple[str, str], ...]) -> str:
    for pattern, text in rules:
        name = re.sub(pattern, text, name)
    return name


def z_image(state: State) -> State:
    made: State = {}
    for name, tensor in state.items():
        if ".attention.to_q." in name:
            parts = [state[name.replace("to_q", f"to_{part}")] for part in "qkv"]
            made[name.replace("to_q", "qkv")] = torch.cat(parts)
        elif ".attention.to_k." not in name and ".attention.to_v." not in name:
            made[renamed(name, Z_IMAGE)] = tensor
    return made


Z_IMAGE = (
    (r"^all_final_layer\.2-1\.", "final_layer."), (r"^all_x_embedder\.2-1\.", "x_embedder."),
    (r"\.attention\.to_out\.0\.", ".attention.out."), (r"\.attention\.norm_([qk])\.", r".attention.\1_norm."),
)  # fmt: skip


def wan(state: State) -> State:
    return {renamed(name, WAN): tensor for name, tensor in state.items()}


WAN = (
    (r"^condition_embedder\.(time|text)_embedder\.linear_1", r"\1_embedding.0"),
    (r"^condition_embedder\.(time|text)_embedder\.linear_2", r"\1_embedding.2"),
    (r"^condition_embedder\.time_proj", "time_projection.1"),
    (r"^scale_shift_table", "head.modulation"), (r"^proj_out", "head.head"),
    (r"\.scale_shift_table", ".modulation"),
    (r"\.attn1\.", ".self_attn."), (r"\.attn2\.", ".cross_attn."),
    (r"\.to_([qkv])\.", r".\1."), (r"\.to_out\.0\.", ".o."),
    (r"\.ffn\.net\.0\.proj\.", ".ffn.0."), (r"\.ffn\.net\.2\.", ".ffn.2."),
    (r"\.norm2\.", ".norm3."),
)  # fmt: skip

MODELS: dict[str, tuple[str, Callable[[State], State], dict[str, Any]]] = {
    "z-image": (
        "ZImageTransformer2DModel", z_image,
        {"in_channels": 4, "dim": 64, "n_layers": 2, "n_refiner_layers": 1, "n_heads": 2, "n_kv_heads": 2,
         "cap_feat_dim": 32, "axes_dims": [8, 12, 12]},
    ),
    "wan": (
        "WanTransformer3DModel", wan,
        {"num_attention_heads": 2, "attention_head_dim": 12, "in_channels": 4, "out_channels": 4, "text_dim": 16,
         "freq_dim": 32, "ffn_dim": 64, "num_layers": 2, "rope_max_seq_len": 32},
    ),
    "qwen-image": (
        "QwenImageTransformer2DModel", dict,
        {"in_channels": 16, "out_channels": 4, "num_layers": 2, "attention_head_dim": 16, "num_attention_heads": 2,
         "joint_attention_dim": 16, "axes_dims_rope": [8, 4, 4]},
    ),
}  # fmt: skip


@pytest.fixture(params=MODELS)
def made(request: pytest.FixtureRequest, tmp_path: Path) -> tuple[str, Path, State]:
    """A family, its file, and the state that was written there."""
    import diffusers

    name, write, config = MODELS[request.param]
    torch.manual_seed(0)
    model = getattr(diffusers, name)(**config).bfloat16()
    state = {key: torch.randn(value.shape).to(value.dtype) for key, value in model.state_dict().items()}
    model.save_config(tmp_path)
    prefix = "" if request.param == "qwen-image" else "model.diffusion_model."
    save_file({prefix + key: value.contiguous() for key, value in write(state).items()}, tmp_path / "model.safetensors")
    return request.param, tmp_path / "model.safetensors", state


def test_the_family_is_told_by_the_names(made: tuple[str, Path, State]) -> None:
    family, path, _ = made
    seen = sdquant.detect(path)
    assert (seen.family, seen.component) == (family, "transformer")


def test_every_tensor_arrives(made: tuple[str, Path, State]) -> None:
    _, path, state = made
    got = sdquant.load_model(path, progress=False).state_dict()
    assert set(got) == set(state)
    for name, tensor in state.items():
        assert torch.equal(got[name], tensor), name


def test_quantized_on_the_fly(made: tuple[str, Path, State]) -> None:
    _, path, state = made
    model = sdquant.load_model(path, "int8", progress=False)
    seen = 0
    for name, module in model.named_modules():
        packed = packed_of(module) if name else None
        if packed is not None:
            wanted = backends.get("nncf").encode(state[f"{name}.weight"], backends.parse("int8"))
            assert all(torch.equal(packed.parts[part], wanted.parts[part]) for part in wanted.parts), name
            seen += 1
    assert seen > 10


def test_without_a_config_it_is_named(made: tuple[str, Path, State]) -> None:
    family, path, _ = made
    (path.parent / "config.json").unlink()
    with pytest.raises(sdquant.MissingComponentError, match=family):
        sdquant.load_model(path, progress=False)
