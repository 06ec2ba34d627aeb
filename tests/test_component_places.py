"""Pipelines with two components of one class and size: a lone file takes no place there without a reason."""

from __future__ import annotations

import json
import shutil
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
import torch
from safetensors.torch import load_file, save_file

import sdquant
from sdquant.cli import main
from sdquant.errors import ConflictError, MissingComponentError, SdquantError, SettingsError
from sdquant.nn.weights import plain
from sdquant.planning.component_files import ComponentFile
from sdquant.planning.component_places import hinted
from sdquant.planning.request import make_request
from sdquant.saving import export_gguf
from sdquant.training.config import load as load_config
from sdquant.training.config.to_request import request_of

from . import layouts, video_models
from .conftest import shell

if TYPE_CHECKING:
    from .layouts import State

PLACES = ("transformer", "transformer_2")
HIGH, LOW = "Wan2.2-T2V-A14B-HighNoise", "wan2.2_t2v_low_noise_14B"


@dataclass(frozen=True)
class Wan:
    """Wan 2.2 with random weights.

    Attributes:
        base: the pipeline folder. configs: the same without weights.
        high, low: other weights for each expert, of which file names tell. plain: the low one, whose name does not.
        states: what the files hold, by place.
    """

    base: Path
    configs: Path
    high: Path
    low: Path
    plain: Path
    states: dict[str, State]


@pytest.fixture(scope="module", params=["gguf", "safetensors"])
def wan(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Wan:
    home = tmp_path_factory.mktemp("wan")
    made = video_models.made("wan", home / "made")
    base = video_models.pipeline(home / "base", "WanPipeline", dict.fromkeys(PLACES, made))
    files, states = {}, {}
    for place, name, factor in (("transformer", HIGH, 2), ("transformer_2", LOW, 3)):
        states[place] = {key: tensor * factor for key, tensor in made.state.items()}
        authors = {key: (tensor * factor).contiguous() for key, tensor in made.authors.items()}
        files[place] = home / f"{name}.safetensors"
        save_file(authors, files[place])
        if request.param == "gguf":  # of floats: which weights came where is told by their values
            source = home / f"of {place}"
            shutil.copytree(made.folder, source)
            save_file(states[place], source / "diffusion_pytorch_model.safetensors", {"format": "pt"})
            files[place] = export_gguf.quantize_file(source, "bf16", home / f"{name}.gguf", progress=False)
    unnamed = Path(shutil.copy(files["transformer_2"], home / f"wan-14b{files['transformer_2'].suffix}"))
    return Wan(base, shell(base, home / "configs"), files["transformer"], files["transformer_2"], unnamed, states)


def places(pipe: Any, wan: Wan) -> dict[str, str]:
    """Whose weights each of the pipeline's two has: "high", "low" or "base"."""
    factors = {1: "base", 2: "high", 3: "low"}
    base = layouts.weights(wan.base / "transformer")["proj_out.weight"].float()
    return {
        place: factors[round((plain(getattr(pipe, place))["proj_out.weight"].float() / base).median().item())]
        for place in PLACES
    }


PAIR = {"transformer": "high", "transformer_2": "low"}


@pytest.mark.parametrize("order", [("high", "low"), ("low", "high")])
@pytest.mark.parametrize("main_file", [True, False])
def test_a_pair_by_its_names(wan: Wan, order: tuple[str, str], main_file: bool, caplog: Any) -> None:
    """In either order; nothing of the base's weights is needed, and there is nothing to be warned of."""
    first, second = (getattr(wan, name) for name in order)
    asked: dict[str, Any] = {"base": wan.configs, "parts": [second]} if main_file else {"parts": [first, second]}
    pipe = sdquant.load_model(first if main_file else wan.configs, progress=False, **asked)
    assert places(pipe, wan) == PAIR
    rows = pipe.sdquant.plan.to_dict()["components"]
    assert {row["name"]: row["path"] for row in rows} == {"transformer": str(wan.high), "transformer_2": str(wan.low)}
    assert not caplog.records


def test_a_lone_one_by_its_name_says_so(wan: Wan, caplog: Any) -> None:
    for path, asked in ((wan.low, {"base": wan.base}), (wan.base, {"parts": [wan.low]})):
        caplog.clear()
        pipe = sdquant.load_model(path, progress=False, **asked)
        assert places(pipe, wan) == {"transformer": "base", "transformer_2": "low"}
        (line,) = pipe.sdquant.plan.warnings
        assert str(wan.low) in line and "transformer_2 because of its name; transformer is taken from" in line
        assert [record.getMessage() for record in caplog.records] == [line]


def test_a_name_that_says_nothing_is_refused(wan: Wan) -> None:
    for path, asked in (
        (wan.plain, {"base": wan.base}),
        (wan.plain, {"base": wan.configs}),
        (wan.base, {"parts": [wan.plain]}),
        (wan.base, {"parts": [wan.plain], "quant": {"transformer": "int8"}}),
    ):
        with pytest.raises(MissingComponentError) as error:
            sdquant.load_model(path, progress=False, **asked)
        assert str(wan.plain) in error.value.what
        for place in PLACES:
            assert f'parts={{"{place}": "{wan.plain}"}}' in error.value.fix


def test_the_user_says_it(wan: Wan) -> None:
    """Of a part, and of the path itself; a file's own name does not matter then. The other one takes what is left."""
    for path, asked, there in (
        (wan.base, {"parts": {"transformer_2": wan.plain}}, {"transformer": "base", "transformer_2": "low"}),
        (wan.base, {"parts": f"transformer={wan.plain}"}, {"transformer": "low", "transformer_2": "base"}),
        (wan.base, {"parts": {"transformer": wan.low}}, {"transformer": "low", "transformer_2": "base"}),
        (wan.plain, {"base": wan.base, "parts": {"transformer": wan.plain}},
         {"transformer": "low", "transformer_2": "base"}),
        (wan.plain, {"base": wan.configs, "parts": [wan.high]}, PAIR),
        (wan.high, {"base": wan.configs, "parts": {"transformer": wan.plain}},
         {"transformer": "low", "transformer_2": "high"}),
        (wan.configs, {"parts": {"transformer": wan.low, "transformer_2": wan.high}},
         {"transformer": "low", "transformer_2": "high"}),
    ):  # fmt: skip
        if path == wan.high:  # both say transformer, one by its name and one by the user
            with pytest.raises(ConflictError, match="parts="):
                sdquant.plan(path, **asked)
            continue
        pipe = sdquant.load_model(path, progress=False, **asked)
        assert places(pipe, wan) == there
        assert not pipe.sdquant.plan.warnings


def test_two_that_say_the_same(wan: Wan, tmp_path: Path) -> None:
    other = Path(shutil.copy(wan.low, tmp_path / f"low_noise_v2{wan.low.suffix}"))
    with pytest.raises(ConflictError) as error:
        sdquant.plan(wan.base, parts=[wan.low, other])
    assert str(wan.low) in error.value.what and str(other) in error.value.what
    assert f'"transformer_2": "{wan.low}", "transformer": "{other}"' in error.value.fix


def test_component_folders(wan: Wan, tmp_path: Path) -> None:
    """Their own names tell, as those that `save_pretrained` gives them."""
    source = Path(shutil.copytree(wan.base, tmp_path / "other"))
    for place in PLACES:
        save_file(wan.states[place], source / place / "diffusion_pytorch_model.safetensors", {"format": "pt"})
    pipe = sdquant.load_model(wan.configs, parts=[source / "transformer_2", source / "transformer"], progress=False)
    assert places(pipe, wan) == PAIR
    lone = source / "transformer_2" / "diffusion_pytorch_model.safetensors"
    assert sdquant.plan(lone, base=wan.base).detected.parts["transformer_2"].path == str(lone)
    (source / "transformer").rename(tmp_path / "mine")
    with pytest.raises(MissingComponentError, match="its name indicates neither"):
        sdquant.plan(tmp_path / "mine", base=wan.base)


@pytest.mark.parametrize(
    ("name", "place"),
    [
        ("Wan2.2-I2V-A14B-HighNoise-Q4_K_M.gguf", "transformer"),
        ("wan2.2_i2v_low_noise_14B_fp8_scaled.safetensors", "transformer_2"),
        ("Wan2_2-T2V-A14B-LOW_fp8_e4m3fn_scaled_KJ.safetensors", "transformer_2"),
        ("HighNoise/model.gguf", "transformer"),
        ("low-noise/Wan2.2-T2V.gguf", "transformer_2"),
        ("transformer_2/diffusion_pytorch_model.safetensors", "transformer_2"),
        ("transformer/diffusion_pytorch_model.safetensors", "transformer"),
        ("wan-transformer_2.fp16.safetensors", "transformer_2"),
        ("high_noise/wan_low_noise.gguf", "transformer_2"),  # the file's name before that of its folder
        ("wan_high_noise_low_noise_merge.gguf", None),
        ("wan2.2_t2v_lowvram.gguf", None),
        ("wan2.2_high_res.gguf", None),
        ("wan2.2_slow_follow.gguf", None),
        ("wan-transformer-2.2.gguf", None),
        ("wan-transformer.gguf", None),
    ],
)
def test_names_are_hints(name: str, place: str | None) -> None:
    assert hinted(Path("/models") / name, PLACES) == place


@pytest.mark.parametrize(
    ("names", "each"),
    [
        (("transformer", "unconditional_transformer"),
         {"ideogram4_unconditional_fp8.safetensors": "unconditional_transformer", "ideogram4-cond.gguf": "transformer",
          "unconditional_transformer/a.safetensors": "unconditional_transformer", "ideogram4.gguf": None}),
        (("text_encoder", "prior_text_encoder"),
         {"prior_text_encoder/model.safetensors": "prior_text_encoder",
          "text_encoder/model.safetensors": "text_encoder", "clip_g.safetensors": None}),
        (("text_encoder", "text_encoder_2"),
         {"text-encoder-2.safetensors": "text_encoder_2", "textencoder2.gguf": "text_encoder_2",
          "my_text_encoder.fp16.safetensors": "text_encoder", "clip.safetensors": None}),
        (("super_res_first", "super_res_last"),
         {"super_res_last/a.safetensors": "super_res_last", "super-res-first.safetensors": "super_res_first"}),
    ],
)  # fmt: skip
def test_names_in_other_pipelines(names: tuple[str, ...], each: dict[str, str | None]) -> None:
    """The pairs of Ideogram 4, Stable Cascade and Würstchen, Stable Diffusion XL and 3, unCLIP."""
    assert {name: hinted(Path("/m") / name, names) for name in each} == each


def test_every_pair_of_diffusers_is_known() -> None:
    """Of each pipeline class, components of one class: a pair that this test does not know needs a look at HINTS."""
    import inspect

    import diffusers

    pairs = set()
    for name in dir(diffusers):
        if not name.endswith("Pipeline") or not inspect.isclass(made := getattr(diffusers, name)):
            continue
        rows: dict[str, list[str]] = {}
        for row in inspect.signature(made.__init__).parameters.values():
            text = row.annotation if isinstance(row.annotation, str) else inspect.formatannotation(row.annotation)
            if ".models." in text and "tokenization" not in text and "processing" not in text:
                rows.setdefault(text.replace("typing.Optional", "").replace(" | None", "").strip("[]"), []).append(
                    row.name
                )
        pairs |= {tuple(some) for some in rows.values() if len(some) > 1}
    assert pairs == {
        ("transformer", "transformer_2"), ("transformer", "unconditional_transformer"),
        ("text_encoder", "text_encoder_2"), ("text_encoder", "prior_text_encoder"), ("decoder", "prior_prior"),
        ("super_res_first", "super_res_last"), ("image_unet", "text_unet"),
    }  # fmt: skip


@pytest.fixture(scope="module")
def twins(sd: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """digits-sd with two text encoders of one kind and size."""
    folder = Path(shutil.copytree(sd, tmp_path_factory.mktemp("twins") / "twins"))
    shutil.copytree(folder / "text_encoder", folder / "text_encoder_2")
    index = json.loads((folder / "model_index.json").read_text())
    (folder / "model_index.json").write_text(json.dumps(index | {"text_encoder_2": index["text_encoder"]}))
    return folder


def test_which_text_encoder(twins: Path, sd: Path, tmp_path: Path) -> None:
    state = layouts.weights(sd / "text_encoder")
    save_file(state, tmp_path / "clip.safetensors")
    save_file(state, tmp_path / "text_encoder_2.safetensors")
    with pytest.raises(MissingComponentError) as error:
        sdquant.plan(twins, parts=[tmp_path / "clip.safetensors"])
    assert '{"text_encoder": ' in error.value.fix and '{"text_encoder_2": ' in error.value.fix
    for parts in (
        [tmp_path / "text_encoder_2.safetensors"],
        {"text_encoder_2": tmp_path / "clip.safetensors"},
        [tmp_path / "clip.safetensors", tmp_path / "text_encoder_2.safetensors"],
    ):
        made = sdquant.plan(twins, parts=parts)
        paths = {part.name: Path(str(part.path)) for part in made.components}
        assert paths["text_encoder_2"].parent == tmp_path
        assert (paths["text_encoder"].parent == tmp_path) == (len(parts) == 2)


class TestWrong:
    def test_names(self, flux: Path, sd: Path) -> None:
        for name, words in (("transfomer", "Did you mean 'transformer'?"), ("colour", "Name one of these")):
            with pytest.raises(SettingsError) as error:
                sdquant.plan(flux, parts={name: sd / "vae"})
            assert repr(name) in error.value.what and words in error.value.fix and "text_encoder_2" in error.value.why

    def test_files(self, flux: Path, sd: Path) -> None:
        """What does not fit is refused with what it is and what it was to be."""
        for name, part, words in (
            ("text_encoder", flux / "text_encoder_2", ("T5", "CLIPTextModel", '{"text_encoder_2": ')),
            ("text_encoder_2", flux / "text_encoder", ("CLIP", "T5EncoderModel", '{"text_encoder": ')),
            ("transformer", flux / "vae", ("vae", "FluxTransformer2DModel", '{"vae": ')),
            ("vae", flux / "transformer", ("transformer", "AutoencoderKL", '{"transformer": ')),
            ("transformer", sd / "unet", ("UNet2DConditionModel", "FluxTransformer2DModel", "same model")),
        ):
            with pytest.raises(ConflictError) as error:
                sdquant.plan(flux, parts={name: part})
            text = str(error.value)
            assert str(part) in error.value.what and name in error.value.what and str(flux) in error.value.what
            assert all(word in text for word in words), text

    def test_values(self) -> None:
        for value in ({"": "x"}, {5: "x"}, {"vae": 5}, {"vae": ""}, [{"vae": "x"}], ["vae=a", "vae=b"]):
            with pytest.raises(SettingsError, match=r"vae|parts"):
                make_request("model", parts=value)


class TestEverywhere:
    """Python, the command line and config files say it alike."""

    PARTS = (ComponentFile("a.gguf"), ComponentFile("b.gguf", "transformer_2"))

    def test_values(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setenv("HOME", "/home/me")
        for value, made in (
            ({"vae": Path("x"), "unet": "~/y"}, (ComponentFile("x", "vae"), ComponentFile("/home/me/y", "unet"))),
            (["a.gguf", "transformer_2=b.gguf"], self.PARTS),
            ("./vae=x.gguf", (ComponentFile("./vae=x.gguf"),)),
            (Path("vae=x.gguf"), (ComponentFile("vae=x.gguf"),)),
            ("https://host/x.gguf?download=true", (ComponentFile("https://host/x.gguf?download=true"),)),
            (None, ()),
        ):
            asked = make_request("model", parts=value)
            assert asked.parts == made
            assert make_request("model", parts=asked.parts) == asked
            again = make_request("model", parts=[str(one) for one in asked.parts]).parts
            assert [(Path(one.path), one.component) for one in again] == [(Path(o.path), o.component) for o in made]

    def test_config_files(self, tmp_path: Path) -> None:
        file = tmp_path / "a.yml"
        for text in (
            "parts: [a.gguf, transformer_2=b.gguf]", "parts:\n- a.gguf\n- transformer_2=b.gguf",
            f"parts: {json.dumps(list(map(str, self.PARTS)))}",
        ):  # fmt: skip
            file.write_text(f"pretrained_model_name_or_path: x\n{text}\n")
            config = load_config(file)
            assert request_of(config).parts == self.PARTS
            file.write_text(config.to_yaml())
            assert request_of(load_config(file)).parts == self.PARTS
        file.write_text("pretrained_model_name_or_path: x\nparts: {transformer_2: b.gguf}\n")
        assert request_of(load_config(file)).parts == self.PARTS[1:]
        file.write_text(load_config(file).to_yaml())
        assert request_of(load_config(file, command="train")).parts == self.PARTS[1:]
        over = load_config(file, ['parts={"transformer": "c.gguf"}'])
        assert request_of(over).parts == (ComponentFile("c.gguf", "transformer"),)
        file.write_text("parts: {transformer_2: 5}\n")
        with pytest.raises(SettingsError, match="mapping from components"):
            load_config(file)

    def test_command_line(self, wan: Wan, tmp_path: Path, capsys: Any) -> None:
        words = [str(wan.plain), "--base", str(wan.configs), "--part", f"transformer={wan.plain}"]
        words += ["--part", f"transformer_2={wan.low}"]
        assert main(["plan", *words, "--json"]) == 0
        rows = json.loads(capsys.readouterr().out)["components"]
        assert {row["name"]: row["path"] for row in rows} == {
            "transformer": str(wan.plain), "transformer_2": str(wan.low)
        }  # fmt: skip
        assert main(["plan", *words]) == 0
        assert f"transformer_2 is read from {wan.low}" in capsys.readouterr().out
        assert main(["plan", str(wan.base), "--part", str(wan.plain)]) == 2
        assert "--part transformer_2=FILE" in capsys.readouterr().err
        if wan.plain.suffix == ".safetensors":
            out = tmp_path / "made"
            assert (
                main(["quantize", str(wan.base), str(out), "-q", "int8", "--part", f"transformer_2={wan.plain}"]) == 0
            )
            low = sdquant.load_model(out / "transformer_2", progress=False)
            assert torch.equal(plain(low)["patch_embedding.bias"], wan.states["transformer_2"]["patch_embedding.bias"])


def test_a_checkpoint_of_several_models(wan: Wan, sd: Path) -> None:
    """Is no part, whatever it was given for."""
    with pytest.raises(SdquantError, match="several components"):
        sdquant.plan(wan.base, parts={"transformer_2": sd})


@pytest.mark.parametrize(
    ("part", "more", "kind"),
    [
        (
            "unet",
            [f"transformer_in.{name}.weight" for name in ("proj_in", *map(str, range(999)))],
            "UNet3DConditionModel",
        ),
        ("unet", ["transformer_in.proj_in.weight"], "UNet3DConditionModel"),
        ("vae", ["quantize.embedding.weight"], "VQModel"),
    ],
)
def test_a_model_of_another_class_with_all_names_of_the_pipelines(
    part: str, more: list[str], kind: str, sd: Path, tmp_path: Path
) -> None:
    """What it has beside them would be left out, and what is drawn would be of neither."""
    (file,) = (sd / part).glob("*.safetensors")
    save_file(load_file(file), tmp_path / "same.safetensors")
    assert sdquant.plan(sd, parts=[tmp_path / "same.safetensors"]).components
    save_file(load_file(file) | {name: torch.ones(2) for name in more}, tmp_path / "other.safetensors")
    for parts in ([tmp_path / "other.safetensors"], {part: tmp_path / "other.safetensors"}):
        with pytest.raises((ConflictError, MissingComponentError), match=kind):
            sdquant.plan(sd, parts=parts)
