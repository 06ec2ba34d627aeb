"""Folders whose weights are a variant (fp16, ema, ...), sharded or not, and folders that hold several."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import save_file

import sdquant
from sdquant.errors import BadFileError
from sdquant.nn.weights import plain

from . import layouts
from .layouts import State
from .test_load_modes import images

Write = Callable[[Path, str, State], None]


def whole(folder: Path, base: str, state: State, variant: str = "") -> None:
    save_file(state, folder / f"{base}{variant and '.'}{variant}.safetensors", {"format": "pt"})


def sharded(shard: str, index: str | None) -> Write:
    """Three files under names in which {base} and {number} are put."""

    def write(folder: Path, base: str, state: State) -> None:
        places = {}
        for n in range(3):
            name = shard.format(base=base, number=f"{n + 1:05}-of-00003")
            names = sorted(state)[n::3]
            save_file({key: state[key] for key in names}, folder / name, {"format": "pt"})
            places |= dict.fromkeys(names, name)
        if index is not None:
            (folder / index.format(base=base)).write_text(json.dumps({"metadata": {}, "weight_map": places}))

    return write


def of_variant(name: str) -> Write:
    return lambda folder, base, state: whole(folder, base, state, name)


SPELLINGS: dict[str, tuple[str, Write]] = {
    **{name: (name, of_variant(name)) for name in ("", "fp16", "bf16", "fp32", "ema", "non_ema", "of-mine")},
    "shards": ("", sharded("{base}-{number}.safetensors", "{base}.safetensors.index.json")),
    "fp16 shards": ("fp16", sharded("{base}.fp16-{number}.safetensors", "{base}.safetensors.index.fp16.json")),
    "fp16 shards of old": ("fp16", sharded("{base}-{number}.fp16.safetensors", "{base}.safetensors.index.fp16.json")),
    "non_ema shards of the hub": (
        "non_ema", sharded("{base}.non_ema-{number}.safetensors", "{base}.non_ema.safetensors.index.json"),
    ),
    "shards without index": ("", sharded("{base}-{number}.safetensors", None)),
    "ema shards without index": ("ema", sharded("{base}-{number}.ema.safetensors", None)),
}  # fmt: skip
BASES = {"unet": "diffusion_pytorch_model", "vae": "diffusion_pytorch_model", "text_encoder": "model"}


@pytest.fixture
def bare(sd: Path, tmp_path: Path) -> Path:
    """digits-sd without weights."""
    return Path(shutil.copytree(sd, tmp_path / "sd", ignore=shutil.ignore_patterns("*.safetensors")))


def _same(model: Any, state: State) -> bool:
    got = plain(model)
    return all(torch.equal(got[key], tensor) for key, tensor in state.items())


@pytest.mark.parametrize("spelling", SPELLINGS)
def test_a_pipeline_of_one_variant(spelling: str, bare: Path, sd: Path) -> None:
    variant, write = SPELLINGS[spelling]
    for part, base in BASES.items():
        write(bare / part, base, layouts.weights(sd / part))
    seen = sdquant.detect(bare)
    told = [line for line in seen.evidence if "variant" in line]
    assert len(told) == (3 if variant else 0) and all(line.endswith(f"of variant {variant}") for line in told)
    assert seen.warnings == []
    assert sdquant.verify(bare).tensors == sdquant.detect(sd).tensors
    pipe = sdquant.load_model(bare, progress=False)
    for part in BASES:
        assert _same(getattr(pipe, part), layouts.weights(sd / part)), part


def test_a_variant_quantizes_as_the_folder_does(bare: Path, sd: Path, loaded: Any) -> None:
    for part, base in BASES.items():
        whole(bare / part, base, layouts.weights(sd / part), "fp16")
    assert np.array_equal(images(sdquant.load_model(bare, "int8", progress=False)), images(loaded("int8")))


def _negated(state: State) -> State:
    return {key: tensor.neg() for key, tensor in state.items()}


@pytest.mark.parametrize("spelling", ["fp16", "fp16 shards", "ema shards without index"])
def test_the_one_without_a_variant_comes_first(spelling: str, bare: Path, sd: Path) -> None:
    """As in diffusers, and it is said that there is another."""
    from diffusers import UNet2DConditionModel

    variant, write = SPELLINGS[spelling]
    state = layouts.weights(sd / "unet")
    write(bare / "unet", BASES["unet"], _negated(state))
    whole(bare / "unet", BASES["unet"], state)
    seen = sdquant.detect(bare / "unet")
    assert f"the weights are those of no variant; other variants: {variant}" in seen.evidence
    assert seen.warnings == []
    assert _same(sdquant.load_model(bare / "unet", progress=False), state)
    assert _same(UNet2DConditionModel.from_pretrained(bare / "unet", torch_dtype=torch.bfloat16), state)


@pytest.mark.parametrize(
    ("variants", "taken"), [(("ema", "fp16"), "fp16"), (("non_ema", "ema"), "ema"), (("fp32", "bf16", "aaa"), "bf16")]
)
def test_of_several_variants_one_is_taken_and_named(
    variants: tuple[str, ...], taken: str, bare: Path, sd: Path, caplog: pytest.LogCaptureFixture
) -> None:
    state = layouts.weights(sd / "unet")
    for variant in variants:
        whole(bare / "unet", BASES["unet"], state if variant == taken else _negated(state), variant)
    others = ", ".join(sorted(set(variants) - {taken}))
    line = f"the weights are those of variant {taken}; other variants: {others}"
    assert line in sdquant.detect(bare / "unet").evidence
    assert _same(sdquant.load_model(bare / "unet", progress=False), state)
    assert [record.getMessage() for record in caplog.records] == [line]


def test_a_variant_by_its_own_path(bare: Path, sd: Path) -> None:
    """The config beside it is its own, though there is another."""
    state = layouts.weights(sd / "unet")
    whole(bare / "unet", BASES["unet"], _negated(state))
    whole(bare / "unet", BASES["unet"], state, "fp16")
    assert _same(sdquant.load_model(bare / "unet" / f"{BASES['unet']}.fp16.safetensors", progress=False), state)


@pytest.mark.parametrize("gone", [1, 3])
def test_a_shard_that_is_lost_is_told_without_an_index(gone: int, bare: Path, sd: Path) -> None:
    SPELLINGS["shards without index"][1](bare / "unet", BASES["unet"], layouts.weights(sd / "unet"))
    (bare / "unet" / f"{BASES['unet']}-{gone:05}-of-00003.safetensors").unlink()
    with pytest.raises(BadFileError, match="only 2 of 3 shards"):
        sdquant.detect(bare / "unet")
