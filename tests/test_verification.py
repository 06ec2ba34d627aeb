"""`verify` passes what is sound and names what is not: tensor, file, and fault."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from torch import Tensor

import sdquant
from sdquant import backends
from sdquant.backends import comfy
from sdquant.errors import BadFileError, UnsupportedFileError
from sdquant.formats import sdquant_metadata
from sdquant.models import lone_files

from .foreign import ROWS as FOREIGN
from .foreign import WEIGHTS

ON_THE_FLY = [row.name for row in backends.schemes() if row.on_the_fly]
STATE = ".quant_state.bitsandbytes__nf4"


class TestSound:
    def test_the_shipped_models(self, sd: Path, flux: Path) -> None:
        for path in (sd, flux, sd / "unet", sd / "unet" / WEIGHTS):
            assert sdquant.verify(path) == sdquant.detect(path)

    @pytest.mark.parametrize(
        "scheme", [*ON_THE_FLY, "nf4,double_quant", "fp8,packing=float8", "q8_0", "q4_k_m", "bf16"]
    )
    def test_everything_that_sdquant_writes(self, scheme: str, saved: Callable[..., Path]) -> None:
        path = saved(scheme)
        seen = sdquant.verify(path)
        assert seen == sdquant.detect(path) and seen.warnings == []

    @pytest.mark.parametrize("name", FOREIGN)
    def test_everything_that_others_write(self, name: str, foreign: Callable[[str], Path]) -> None:
        seen = sdquant.verify(foreign(name))
        assert seen.quant == FOREIGN[name].quant
        if name == "lone qint4":  # its groups do not say which rows they were cut from
            (line,) = seen.warnings
            assert "118 weights" in line and "only in part" in line and seen.to_dict()["warnings"] == [line]
        else:
            assert seen.warnings == []

    def test_the_index_of_a_pipeline_tells_the_class(
        self, foreign: Callable[[str], Path], sd: Path, tmp_path: Path
    ) -> None:
        """A config of a class that nobody has does not keep a part of a pipeline from being held against its model."""
        pipe = Path(shutil.copytree(sd, tmp_path / "pipe"))
        shutil.copy(foreign("lone qint4"), pipe / "unet" / WEIGHTS)
        (pipe / "unet" / "config.json").write_text('{"_class_name": "UNetOfTomorrow"}')
        with pytest.raises(BadFileError, match="but the model expects"):
            sdquant.verify(pipe)

    def test_the_model_tells_the_shape_where_its_config_is_there(
        self, foreign: Callable[[str], Path], tmp_path: Path
    ) -> None:
        """The same file beside its config is checked in full; beside another model's it is refused."""
        folder = tmp_path / "unet"
        shutil.copytree(foreign("quanto qint4"), folder)
        (folder / "quantization_map.json").unlink()
        assert sdquant.verify(folder).warnings == []
        config = json.loads((folder / "config.json").read_text())
        config["cross_attention_dim"] *= 2
        (folder / "config.json").write_text(json.dumps(config))
        with pytest.raises(BadFileError, match="attn2"):
            sdquant.verify(folder)


def _edit(path: Path, change: Callable[[dict[str, Tensor]], Any]) -> None:
    """Change the tensors of a file; its metadata stays."""
    with safe_open(str(path), framework="pt") as file:
        metadata = file.metadata()
    tensors = {key: tensor.clone() for key, tensor in load_file(path).items()}
    change(tensors)
    save_file(tensors, path, metadata)


def _fault(path: Path, *words: str, of: Path | None = None, in_contents: bool = True) -> BadFileError:
    """The fault that `verify` finds must name the file and each of the words; `detect` alone does not see it."""
    if in_contents:
        sdquant.detect(path)
    with pytest.raises(BadFileError) as caught:
        sdquant.verify(path)
    error = caught.value
    assert str(of or path) in error.what and error.why and error.fix
    for word in words:
        assert word in error.what + " " + error.why, str(error)
    return error


class TestDamaged:
    @pytest.fixture
    def copy(self, saved: Callable[..., Path], tmp_path: Path) -> Callable[..., Path]:
        """copy(scheme, part="unet"): a copy of that part in that scheme: its weight file, its config beside it."""

        def make(scheme: str, part: str = "unet") -> Path:
            folder = Path(shutil.copytree(saved(scheme) / part, tmp_path / part, dirs_exist_ok=True))
            return next(path for path in folder.iterdir() if path.suffix in (".safetensors", ".gguf"))

        return make

    @pytest.mark.parametrize("scheme", ON_THE_FLY)
    @pytest.mark.parametrize("value", [float("nan"), float("inf")])
    def test_a_scale_that_is_not_finite(self, value: float, scheme: str, copy: Callable[..., Path]) -> None:
        path = copy(scheme, "text_encoder")
        found = sdquant.detect(path).sources["model"].prequantized
        scales = [
            key
            for row in found.values()
            for part, key in row.keys.items()
            if part in ("scale", "absmax", "scb", "s_rel")
        ]
        key = scales[len(scales) // 2]

        def change(tensors: dict[str, Tensor]) -> None:
            # E4M3 has no infinity.
            tensors[key].view(-1)[-1] = torch.nan if tensors[key].dtype == torch.float8_e4m3fn else value

        _edit(path, change)
        _fault(path, key)

    @pytest.mark.parametrize("scheme", ON_THE_FLY)
    @pytest.mark.parametrize("what", ["longer", "shorter", "a dimension more", "another dtype"])
    def test_a_part_of_the_wrong_size(self, what: str, scheme: str, copy: Callable[..., Path]) -> None:
        """Of the codes, and of the scales, the same: nothing is read in a way that its writer did not mean."""
        for part in (0, 1):
            path = copy(scheme, "text_encoder")
            found = list(sdquant.detect(path).sources["model"].prequantized.values())
            row = found[len(found) // 2]
            key = list(row.keys.values())[part]

            def change(tensors: dict[str, Tensor], key: str = key) -> None:
                tensor = tensors[key]
                rows = tensor.reshape(1) if tensor.ndim == 0 else tensor  # a scale of the whole weight
                tensors[key] = {
                    "longer": lambda: torch.cat([rows, rows[-1:]]),
                    "shorter": lambda: rows[:-1].clone(),
                    "a dimension more": lambda: tensor[None].clone(),
                    "another dtype": lambda: tensor.to(torch.int16),
                }[what]()

            _edit(path, change)
            with pytest.raises(BadFileError) as caught:  # `detect` may see it as well, by the header
                sdquant.verify(path)
            assert str(path) in caught.value.what and row.name.removesuffix("weight") in str(caught.value)

    @pytest.mark.parametrize("scheme", ["nf4", "qint8", "int4", "q8_0"])
    @pytest.mark.parametrize("value", [float("nan"), float("-inf")])
    def test_a_plain_weight_that_is_not_finite(self, value: float, scheme: str, sd: Path, tmp_path: Path) -> None:
        unet = Path(shutil.copytree(sd / "unet", tmp_path / "unet"))

        def change(tensors: dict[str, Tensor]) -> None:
            tensors["mid_block.resnets.0.conv1.weight"][3, 2, 1, 0] = value

        _edit(unet / WEIGHTS, change)
        _fault(unet, "'mid_block.resnets.0.conv1.weight'", "not finite", of=unet / WEIGHTS)

    @pytest.mark.parametrize("scheme", ["nf4", "q8_0"])
    def test_a_plain_weight_beside_quantized_ones(self, scheme: str, copy: Callable[..., Path]) -> None:
        path = copy(scheme)
        src = sdquant.detect(path).sources["model"]
        if scheme == "nf4":

            def change(tensors: dict[str, Tensor]) -> None:
                tensors["conv_norm_out.bias"][1] = float("nan")

            _edit(path, change)
        else:
            info: Any = src.tensors["conv_norm_out.bias"]
            with path.open("r+b") as file:
                file.seek(info.offset)
                file.write(b"\xff\xff" * (info.nbytes // 2))
        _fault(path, "'conv_norm_out.bias'", "not finite")
        with pytest.raises(BadFileError, match=r"'conv_norm_out\.bias' of .*not finite"):  # it is small
            sdquant.load_model(path.parent, progress=False)

    def test_a_scale_inside_a_gguf_block(self, copy: Callable[..., Path]) -> None:
        path = copy("q8_0")
        src = sdquant.detect(path).sources["model"]
        name = sorted(src.prequantized)[5]
        info: Any = src.tensors[name]
        with path.open("r+b") as file:
            file.seek(info.offset + 34)  # the scale of the second block
            file.write(b"\x00\x7e")  # NaN in half precision
        _fault(path, name, "not finite")

    @pytest.mark.parametrize("short", [1, 1000])
    def test_a_truncated_file(self, short: int, sd: Path, saved: Callable[..., Path], tmp_path: Path) -> None:
        for number, source in enumerate((sd, saved("nf4"), saved("q8_0"))):
            pipe = Path(shutil.copytree(source, tmp_path / str(number)))
            path = next(path for path in (pipe / "unet").iterdir() if path.suffix in (".safetensors", ".gguf"))
            os.truncate(path, path.stat().st_size - short)
            for each in (pipe, pipe / "unet", path):
                with pytest.raises(BadFileError) as caught:
                    sdquant.verify(each)
                assert str(path) in caught.value.what and f"{short} bytes short" in caught.value.why


class TestLies:
    """Files in bitsandbytes' format whose words do not fit their tensors: ours, beside a config, and alone."""

    @pytest.fixture(params=["own", "folder", "lone"])
    def path(
        self, request: pytest.FixtureRequest, saved: Callable[..., Path], foreign: Callable[[str], Path], tmp_path: Path
    ) -> Path:
        if request.param == "own":
            folder = Path(shutil.copytree(saved("nf4", "digits-flux") / "transformer", tmp_path / "transformer"))
        elif request.param == "folder":
            folder = Path(shutil.copytree(foreign("diffusers nf4"), tmp_path / "transformer"))
        else:
            return Path(shutil.copy(foreign("lone nf4"), tmp_path / "model.safetensors"))
        return folder / WEIGHTS

    NAME = "transformer_blocks.0.attn.to_q.weight"

    def _says(self, path: Path, **changes: Any) -> None:
        """Change what the quant_state says of one weight."""

        def change(tensors: dict[str, Tensor]) -> None:
            state = json.loads(bytes(tensors[self.NAME + STATE].tolist())) | changes
            tensors[self.NAME + STATE] = torch.tensor(list(json.dumps(state).encode()), dtype=torch.uint8)

        _edit(path, change)

    @pytest.mark.parametrize(
        "changes",
        [
            {"shape": [128, 512]}, {"shape": [-256, -256]}, {"shape": [256, 0]}, {"shape": None}, {"shape": "big"},
            {"shape": [True, 65536]}, {"shape": [256.0, 256]}, {"shape": [1 << 40, 1 << 40]}, {"blocksize": 128},
            {"blocksize": 0}, {"blocksize": -64}, {"blocksize": "64"}, {"quant_type": "fp4"}, {"dtype": "float8"},
            {"dtype": "__class__"}, {"nested_offset": 0.1},
        ],
    )  # fmt: skip
    def test_a_state_that_does_not_fit(self, changes: dict[str, Any], path: Path) -> None:
        if changes == {"shape": [128, 512]} and path.name != WEIGHTS:
            self._says(path, shape=[128, 500])  # of a lone file only a shape of another size shows
        else:
            self._says(path, **changes)
        _fault(path, self.NAME)

    @pytest.mark.parametrize("text", [b"{", b"", b"[]", b"\xff\xff", b"null", b"[" * 4000])
    def test_a_state_that_is_no_table(self, text: bytes, path: Path) -> None:
        def change(tensors: dict[str, Tensor]) -> None:
            tensors[self.NAME + STATE] = torch.tensor(list(text), dtype=torch.uint8)

        _edit(path, change)
        _fault(path, self.NAME)

    def test_another_code_table(self, path: Path) -> None:
        def change(tensors: dict[str, Tensor]) -> None:
            tensors[self.NAME + ".quant_map"] = tensors[self.NAME + ".quant_map"].flip(0)

        _edit(path, change)
        _fault(path, f"{self.NAME}.quant_map", "code table")

    def test_a_code_table_with_a_nan(self, path: Path) -> None:
        def change(tensors: dict[str, Tensor]) -> None:
            tensors[self.NAME + ".quant_map"][0] = float("nan")

        _edit(path, change)
        _fault(path, f"{self.NAME}.quant_map")

    @pytest.mark.parametrize("part", ["", ".absmax", ".quant_map"])
    def test_a_missing_part(self, part: str, path: Path) -> None:
        _edit(path, lambda tensors: tensors.pop(self.NAME + part))
        with pytest.raises(BadFileError) as caught:
            sdquant.verify(path)
        assert str(path) in caught.value.what and self.NAME in str(caught.value)

    def test_a_missing_part_of_others(self, foreign: Callable[[str], Path], tmp_path: Path) -> None:
        for name, ending in (("quanto qint4", "._shift"), ("lone qint4", "._scale"), ("sdnq", "zero_point")):
            target = tmp_path / name
            if foreign(name).is_dir():
                shutil.copytree(foreign(name), target)
                file = target / WEIGHTS
            else:
                target.mkdir()
                file = Path(shutil.copy(foreign(name), target / "model.safetensors"))
            gone = next(key for key in load_file(file) if key.endswith(ending))
            _edit(file, lambda tensors, gone=gone: tensors.pop(gone))  # type: ignore[misc]
            for look in (sdquant.detect, sdquant.verify):  # a header shows it
                with pytest.raises(BadFileError) as caught:
                    look(file if file.name == "model.safetensors" else target)
                assert str(file) in caught.value.what and gone.removesuffix(ending).rstrip(".") in caught.value.why


class TestOwnMetadataAgainstTheTensors:
    @pytest.mark.parametrize(
        ("scheme", "details"),
        [("nf4", {"block_size": 128}), ("nf4,double_quant", {"offset": 0.5}), ("qint4", {"group_size": 32})],
    )
    def test_a_contradiction(
        self, scheme: str, details: dict[str, Any], saved: Callable[..., Path], tmp_path: Path
    ) -> None:
        folder = Path(shutil.copytree(saved(scheme) / "unet", tmp_path / "unet"))
        path = folder / WEIGHTS
        with safe_open(str(path), framework="pt") as file:
            metadata = file.metadata()
        said = json.loads(metadata[sdquant_metadata.METADATA_KEY])
        name = sorted(said["weights"])[7]
        said["weights"][name]["details"] |= details
        save_file(load_file(path), path, metadata | {sdquant_metadata.METADATA_KEY: json.dumps(said)})
        _fault(folder, name, of=path, in_contents=False)

    @pytest.mark.parametrize("scheme", ["int8", "int4", "fp8", "nf4", "qint8", "qint3", "sdnq-uint4", "bnb-int8"])
    def test_a_shape_that_is_not_that_of_the_parts(
        self, scheme: str, saved: Callable[..., Path], tmp_path: Path
    ) -> None:
        folder = Path(shutil.copytree(saved(scheme) / "unet", tmp_path / "unet"))
        path = folder / WEIGHTS
        with safe_open(str(path), framework="pt") as file:
            metadata = file.metadata()
        said = json.loads(metadata[sdquant_metadata.METADATA_KEY])
        name = next(name for name, row in said["weights"].items() if "attn1.to_q" in name)
        out, columns = said["weights"][name]["shape"]
        said["weights"][name]["shape"] = [out - 8, columns]
        save_file(load_file(path), path, metadata | {sdquant_metadata.METADATA_KEY: json.dumps(said)})
        _fault(folder, name, of=path, in_contents=False)


def test_the_command_says_what_was_found(sd: Path, tmp_path: Path, capsys: Any) -> None:
    from sdquant.cli import main

    unet = Path(shutil.copytree(sd / "unet", tmp_path / "unet"))
    assert main(["inspect", "--verify", "--json", str(unet)]) == 0
    assert json.loads(capsys.readouterr().out)["verified"] is True

    def change(tensors: dict[str, Tensor]) -> None:
        tensors["conv_in.bias"][0] = float("nan")

    _edit(unet / WEIGHTS, change)
    assert main(["inspect", "--verify", str(unet)]) == 2
    said = capsys.readouterr().err
    assert "'conv_in.bias'" in said and str(unet / WEIGHTS) in said and "Traceback" not in said


def test_a_class_that_nobody_has(foreign: Callable[[str], Path], tmp_path: Path) -> None:
    """A model class of a later diffusers: the sentence is that of loading, which could not go on either."""
    folder = Path(shutil.copytree(foreign("diffusers nf4"), tmp_path / "transformer"))
    config = json.loads((folder / "config.json").read_text()) | {"_class_name": "TransformerOfTomorrow"}
    (folder / "config.json").write_text(json.dumps(config))
    texts = set()
    for call in (sdquant.detect, sdquant.verify, sdquant.load_model):
        with pytest.raises(UnsupportedFileError, match="TransformerOfTomorrow") as caught:
            call(folder)
        texts.add(str(caught.value))
    assert len(texts) == 1


class TestLoneFiles:
    """What a file without a config shows of itself: `load_model` would refuse it whatever the pipeline."""

    NAME = "transformer_blocks.0.ff.net.0.proj.weight"
    PLAIN = "single_transformer_blocks.0.proj_mlp"

    @pytest.fixture
    def path(self, flux: Path, tmp_path: Path) -> Path:
        tensors = load_file(flux / "transformer" / WEIGHTS)
        packed = comfy.BACKEND.encode(tensors.pop(self.NAME).bfloat16(), backends.parse("int8_row"))
        save_file(tensors | comfy.BACKEND.export(self.NAME, packed), tmp_path / "model.safetensors")
        assert sdquant.verify(tmp_path / "model.safetensors").warnings == []
        return tmp_path / "model.safetensors"

    @pytest.mark.parametrize(
        ("key", "change", "words"),
        [
            (NAME, lambda weight: weight[:, :128], ("[1024, 128]", "[1024, 256]")),
            (f"{PLAIN}.weight", lambda weight: weight.repeat(1, 2), ("[1024, 512]", "[1024, 256]")),
            (f"{PLAIN}.weight", lambda weight: weight[:512], ("its bias has [1024]",)),
            (f"{PLAIN}.bias", lambda bias: bias.to(torch.int16), ("integers",)),
            (f"{PLAIN}.bias", None, ("lacks it",)),
            ("transformer_blocks.0.attn.add_q_proj.weight", None, ("lacks it",)),  # one that tells the family
        ],
    )
    def test_one_tensor_cannot_be_right(
        self, key: str, change: Callable[[Tensor], Tensor] | None, words: tuple[str, ...], path: Path, flux: Path
    ) -> None:
        def edit(tensors: dict[str, Tensor]) -> None:
            tensor = tensors.pop(key)
            if change is not None:
                tensors[key] = change(tensor).contiguous()

        _edit(path, edit)
        _fault(path, repr(key), *words)
        with pytest.raises(BadFileError):
            sdquant.load_model(path, base=str(flux), progress=False)

    def test_weights_whose_shape_nothing_records(self, saved: Callable[..., Path], tmp_path: Path) -> None:
        """optimum-quanto's 4 bits: by their bias and the number of their values."""
        path = tmp_path / "model.safetensors"
        save_file(load_file(saved("qint4", "digits-flux") / "transformer" / WEIGHTS), path)
        (line,) = sdquant.verify(path).warnings
        assert "only in part" in line

        def change(tensors: dict[str, Tensor]) -> None:
            for part in ("_data._data", "_scale", "_shift"):
                key = f"{self.PLAIN}.weight.{part}"
                tensors[key] = tensors[key][: len(tensors[key]) // 2].clone()

        _edit(path, change)
        _fault(path, f"'{self.PLAIN}.weight'", "[1024, 128]", "[1024, 256]")

    def test_an_input_that_its_last_layer_does_not_give(self, path: Path) -> None:
        """That may be another variant: a warning."""
        key = "x_embedder.weight"
        _edit(path, lambda tensors: tensors.update({key: tensors[key][:, :-1].contiguous()}))
        (line,) = sdquant.verify(path).warnings
        assert repr(key) in line and "multiple" in line

    def test_a_file_with_its_config_inside_lacks_a_tensor(self, saved: Callable[..., Path], tmp_path: Path) -> None:
        path = Path(shutil.copy(saved("nf4", "digits-flux") / "transformer" / WEIGHTS, tmp_path / "model.safetensors"))
        _edit(path, lambda tensors: tensors.pop(f"{self.PLAIN}.bias"))
        _fault(path, "lacks 1 of the model's tensors")

    def test_a_shard_is_not_incomplete(self, path: Path) -> None:
        _edit(path, lambda tensors: tensors.pop(f"{self.PLAIN}.bias"))
        sdquant.verify(path.rename(path.with_name("model-00001-of-00002.safetensors")))

    @pytest.mark.parametrize(
        ("changes", "found"),
        [
            ({2: (8, 4)}, 2), ({2: None}, 2), ({0: (8, 4)}, 0),
            ({5: (4, 8)}, None), ({0: None}, None), ({2: (8, 4), 3: (8, 4)}, None), ({}, None),
        ],
    )  # fmt: skip
    def test_a_block_unlike_all_others(self, changes: dict[int, tuple[int, int] | None], found: int | None) -> None:
        """The last block may have fewer rows, the first may lack what the others have, and kinds may alternate."""
        shapes: dict[str, Any] = {"txt_norm.weight": (8,)}
        for number in range(6):
            shapes[f"transformer_blocks.{number}.img_mod.1.weight"] = (48, 8)
            shapes[f"transformer_blocks.{number}.attn.to_q.weight"] = changes.get(number, (8, 8))
        shapes = {name: shape for name, shape in shapes.items() if shape is not None}
        file = lone_files.LoneFile(shapes=shapes, family="qwen-image", filename="model.safetensors")
        fault = lone_files.fault(file)
        assert (fault and fault.name) == (None if found is None else f"transformer_blocks.{found}.attn.to_q.weight")
