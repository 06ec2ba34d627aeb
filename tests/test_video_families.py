"""Video models in files of their authors: told by their names, read tensor by tensor, quantized as from a folder.

Small models with random weights. diffusers' own `from_single_file` is the judge of the names, where it serves.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import pytest
import torch
from safetensors.torch import save_file

import sdquant
from sdquant.models import components
from sdquant.nn.weights import plain, quantized

from . import video_models
from .video_models import MODELS

if TYPE_CHECKING:
    from pathlib import Path

    from .video_models import Made, State


@pytest.fixture(scope="module", params=MODELS)
def made(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Made]:
    yield video_models.made(request.param, tmp_path_factory.mktemp("video"))


def same_weights(one: torch.nn.Module, other: torch.nn.Module) -> int:
    """Both have the same tensors and packed weights, bit for bit; returns how many of the latter."""
    packed, floats = dict(quantized(one)), plain(one)
    others = dict(quantized(other)), plain(other)
    assert packed.keys() == others[0].keys() and floats.keys() == others[1].keys()
    for name, weight in packed.items():
        assert weight.spec == others[0][name].spec, name
        assert all(torch.equal(part, others[0][name].parts[key]) for key, part in weight.parts.items()), name
    for name, tensor in floats.items():
        assert torch.equal(tensor, others[1][name]), name
    return len(packed)


def of_diffusers(made: Made) -> State:
    """What diffusers itself makes of the authors' file."""
    import diffusers
    from diffusers.loaders.single_file_model import SINGLE_FILE_LOADABLE_CLASSES

    cls = getattr(diffusers, made.row.class_name)
    if not hasattr(cls, "from_single_file"):  # listed among those that have it, and without it
        return dict(SINGLE_FILE_LOADABLE_CLASSES[made.row.class_name]["checkpoint_mapping_fn"](dict(made.authors)))
    file, config = str(made.files[made.row.theirs]), str(made.folder)
    return dict(cls.from_single_file(file, config=config, torch_dtype=torch.bfloat16).state_dict())


def test_diffusers_reads_the_same_file(made: Made) -> None:
    """Or it does not, and then we do it ourselves: should it learn to, our own way is to go."""
    try:
        state = of_diffusers(made)
    except (RuntimeError, KeyError, NotImplementedError, ValueError):
        state = {}
    wanted = made.state
    same = state.keys() == wanted.keys() and all(torch.equal(tensor, wanted[name]) for name, tensor in state.items())
    assert same == made.row.served


def test_family_and_component_are_told(made: Made) -> None:
    for prefix in made.row.prefixes:
        seen = sdquant.detect(made.files[prefix])
        assert (seen.family, seen.component) == (made.row.family, made.row.component), prefix


def test_every_tensor_arrives(made: Made, caplog: pytest.LogCaptureFixture) -> None:
    for prefix in made.row.prefixes:
        with caplog.at_level(logging.WARNING):
            state = sdquant.load_model(made.files[prefix], progress=False).state_dict()
        assert state.keys() == made.state.keys()
        for name, tensor in made.state.items():
            assert torch.equal(state[name], tensor), name
    assert not caplog.records


def test_quantized_on_the_fly_as_from_a_folder(made: Made) -> None:
    prefix = made.row.prefixes[-1]
    got = sdquant.load_model(made.files[prefix], "int8", progress=False)
    assert same_weights(got, sdquant.load_model(made.folder, "int8", progress=False)) > 5


def test_quantized_after_loading(tmp_path: Path) -> None:
    made = video_models.made("hunyuan", tmp_path)
    got = sdquant.load_model(made.files[""], "int8", mode="post", progress=False)
    assert same_weights(got, sdquant.load_model(made.folder, "int8", mode="post", progress=False)) > 5


# Hand-written from the authors' classes, for what diffusers does not translate and so cannot judge.
NAMES = {
    "wan of two frames": {"condition_embedder.image_embedder.pos_embed": "img_emb.emb_pos"},
    "skyreels of frame rates": {
        "fps_embedding.weight": "fps_embedding.weight",
        "fps_projection.net.0.proj.weight": "fps_projection.0.weight",
        "fps_projection.net.2.bias": "fps_projection.2.bias",
    },
    "ltx 2.3": {
        "prompt_adaln.linear.weight": "prompt_adaln_single.linear.weight",
        "audio_prompt_adaln.emb.timestep_embedder.linear_1.bias":
            "audio_prompt_adaln_single.emb.timestep_embedder.linear_1.bias",
        "transformer_blocks.1.attn1.to_gate_logits.weight": "transformer_blocks.1.attn1.to_gate_logits.weight",
    },
    "wan 2.2 vae": {
        "encoder.down_blocks.1.resnets.0.conv_shortcut.weight": "encoder.downsamples.1.downsamples.0.shortcut.weight",
        "encoder.down_blocks.2.downsampler.time_conv.bias": "encoder.downsamples.2.downsamples.2.time_conv.bias",
        "decoder.up_blocks.0.resnets.2.norm2.gamma": "decoder.upsamples.0.upsamples.2.residual.3.gamma",
        "decoder.up_blocks.1.upsampler.resample.1.weight": "decoder.upsamples.1.upsamples.3.resample.1.weight",
        "decoder.mid_block.resnets.1.conv2.bias": "decoder.middle.2.residual.6.bias",
        "post_quant_conv.weight": "conv2.weight",
    },
}  # fmt: skip


@pytest.mark.parametrize("name", NAMES)
def test_names_that_diffusers_does_not_know(name: str, tmp_path: Path) -> None:
    made = video_models.made(name, tmp_path)
    for ours, theirs in NAMES[name].items():
        assert torch.equal(made.state[ours], made.authors[theirs]), ours


class Remembering(dict[str, Any]):
    """A dict that has what was taken out of it: diffusers looks for a name of Cosmos 1.0 after it has taken it away."""

    def __init__(self, state: State) -> None:
        super().__init__(state)
        self.once = frozenset(state)

    def __contains__(self, key: object) -> bool:
        return key in self.once


# Models of which diffusers' converter knows all names, and reads them if it is helped: as it is called, what it gets.
HELPED = {"cosmos 1": ("net.", {}), "hunyuan": ("", {"num_single_layers": 0}), "mochi": ("", {"num_layers": 48})}


@pytest.mark.parametrize("name", HELPED)
def test_diffusers_knows_the_names_of_what_it_fails_at(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """HunyuanVideo without the layers that it splits at the published width; Mochi with as many layers as published."""
    table, _ = components.single_file()
    prefix, config = HELPED[name]
    row = MODELS[name]
    small = {"attention_head_dim": 8} if name == "mochi" else {}
    monkeypatch.setitem(MODELS, name, video_models.changed(row, config | small))
    made = video_models.made(name, tmp_path)
    convert = table[row.class_name]["checkpoint_mapping_fn"]
    state = convert(Remembering({prefix + key: tensor for key, tensor in made.authors.items()}), config=row.config)
    assert state.keys() == made.state.keys()
    assert all(torch.equal(tensor, made.state[key]) for key, tensor in state.items())


# A pipeline, its components, and the prefixes that these have in a checkpoint of all.
PIPELINES = {
    "WanPipeline": {"transformer": ("wan", ""), "vae": ("wan vae", "")},
    "LTXPipeline": {"transformer": ("ltx", video_models.LDM), "vae": ("ltx vae", "vae.")},
    "LTX2Pipeline": {
        "transformer": ("ltx 2", video_models.LDM), "vae": ("ltx 2 vae", "vae."),
        "audio_vae": ("ltx 2 audio vae", "audio_vae."),
    },
}  # fmt: skip


@pytest.mark.parametrize("name", PIPELINES)
def test_a_pipeline_lends_what_the_file_lacks(name: str, tmp_path: Path) -> None:
    """Each file takes its own component's place and no other's."""
    rows = PIPELINES[name]
    parts = {part: video_models.made(row, tmp_path / part) for part, (row, _) in rows.items()}
    base = video_models.pipeline(tmp_path / "base", name, parts)
    for part, (_, prefix) in rows.items():
        other = {key: torch.zeros_like(tensor) for key, tensor in parts[part].authors.items()}
        save_file({prefix + key: tensor for key, tensor in other.items()}, tmp_path / "zeros.safetensors")
        pipe = sdquant.load_model(tmp_path / "zeros.safetensors", base=base, dtype="bfloat16", progress=False)
        got = getattr(pipe, part).state_dict()
        assert [key for key, tensor in got.items() if tensor.count_nonzero()] == []
        for there in parts.keys() - {part}:
            state = getattr(pipe, there).state_dict()
            assert all(torch.equal(state[key], tensor) for key, tensor in parts[there].state.items())


@pytest.mark.parametrize("name", ["LTXPipeline", "LTX2Pipeline"])
def test_a_checkpoint_of_all(
    name: str, tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    rows = PIPELINES[name]
    parts = {part: video_models.made(row, tmp_path / part) for part, (row, _) in rows.items()}
    base = video_models.pipeline(tmp_path / "base", name, parts)
    for part in parts:
        next((base / part).glob("*.safetensors")).unlink()
    prefixed = {
        prefix + key: tensor.contiguous()
        for part, (_, prefix) in rows.items()
        for key, tensor in parts[part].authors.items()
    }
    save_file(prefixed, tmp_path / "all.safetensors")
    seen = sdquant.detect(tmp_path / "all.safetensors")
    assert (seen.family, seen.component) == (parts["transformer"].row.family, "checkpoint")
    assert components.reference({key: tuple(tensor.shape) for key, tensor in prefixed.items()}) == {
        "ltx-video": "diffusers/LTX-Video-0.9.0", "ltx2": "Lightricks/LTX-2",
    }[parts["transformer"].row.family]  # fmt: skip
    caplog.clear()
    with caplog.at_level(logging.WARNING, "sdquant"):
        pipe = sdquant.load_model(tmp_path / "all.safetensors", base=base, progress=False)
    assert not caplog.records
    for part, made in parts.items():
        state = getattr(pipe, part).state_dict()
        assert state.keys() == made.state.keys()
        assert all(torch.equal(state[key], tensor) for key, tensor in made.state.items()), part


@pytest.mark.parametrize(
    ("change", "why"),
    [
        ({"adaln_t_table": torch.zeros(8, 64)}, "adaln_t_table"),
        (None, "alternate from head to head"),
    ],
)
def test_other_files_of_minimax_are_refused(change: State | None, why: str, tmp_path: Path) -> None:
    made = video_models.made("minimax", tmp_path)
    path = made.files[""]
    if change is not None:
        save_file(made.authors | change, path)
    else:  # in two parts
        names = sorted(made.authors)
        index = {name: f"model-0000{1 + (name > names[20])}-of-00002.safetensors" for name in names}
        for file in set(index.values()):
            save_file({name: made.authors[name] for name in names if index[name] == file}, path.parent / file)
        path.unlink()
        path = path.parent
        (path / "model.safetensors.index.json").write_text(json.dumps({"weight_map": index}))
    with pytest.raises(sdquant.UnsupportedFileError, match=why):
        sdquant.load_model(path, progress=False)


@pytest.mark.slow
def test_hunyuan_at_the_published_width(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """There diffusers splits the fused layers itself, and finds what our rows wrote."""
    config = {"num_attention_heads": 24, "attention_head_dim": 128, "rope_axes_dim": [16, 56, 56], "num_layers": 1,
              "num_single_layers": 1, "num_refiner_layers": 1, "mlp_ratio": 0.5}  # fmt: skip
    monkeypatch.setitem(MODELS, "wide", video_models.changed(MODELS["hunyuan"], config))
    made = video_models.made("wide", tmp_path)
    state = of_diffusers(made)
    assert state.keys() == made.state.keys()
    assert all(torch.equal(tensor, made.state[key]) for key, tensor in state.items())
    loaded = sdquant.load_model(made.files[""], progress=False).state_dict()
    assert all(torch.equal(tensor, made.state[key]) for key, tensor in loaded.items())


def test_an_optional_component_is_the_one_that_was_quantized(tmp_path: Path) -> None:
    """Wan's transformer is optional in its pipeline: asked wrongly, diffusers dropped ours and loaded the float one."""
    parts = {part: video_models.made(row, tmp_path / part) for part, (row, _) in PIPELINES["WanPipeline"].items()}
    base = video_models.pipeline(tmp_path / "base", "WanPipeline", parts)
    pipe = sdquant.load_model(base, "int8", progress=False)
    assert dict(quantized(pipe.transformer))
