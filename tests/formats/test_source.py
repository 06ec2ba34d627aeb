"""Folders and files that hold a component: what counts, what is refused, and that nothing outside is read."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

import sdquant
from sdquant.errors import BadFileError, MissingComponentError, SdquantError, UnsupportedFileError
from sdquant.formats import checkpoint
from sdquant.formats import folders as folders
from sdquant.formats.gguf.writer import write_gguf
from sdquant.formats.tensor_file import Recipe

A = {"x.weight": torch.ones(4, 8), "x.bias": torch.zeros(4)}
B = {"y.weight": torch.ones(8, 8, dtype=torch.bfloat16)}
INDEX = {"x.weight": "m-00001-of-00002.safetensors", "x.bias": "m-00001-of-00002.safetensors"} | {
    "y.weight": "m-00002-of-00002.safetensors"
}


def _sharded(folder: Path, weight_map: Any = INDEX, *, index: str = "model.safetensors.index.json") -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    save_file(A, folder / "m-00001-of-00002.safetensors")
    save_file(B, folder / "m-00002-of-00002.safetensors")
    (folder / index).write_text(json.dumps({"metadata": {}, "weight_map": weight_map}))
    return folder


def _refused(path: Path, kind: type[SdquantError] = BadFileError) -> SdquantError:
    with pytest.raises(kind) as caught:
        sdquant.detect(path)
    error = caught.value
    assert error.what and error.why and error.fix
    return error


class TestShards:
    @pytest.mark.parametrize(
        "index", ["model.safetensors.index.json", "diffusion_pytorch_model.safetensors.index.fp16.json"]
    )
    def test_all_tensors_of_all_shards(self, index: str, tmp_path: Path) -> None:
        src = checkpoint.component_folder(_sharded(tmp_path, index=index))
        assert set(src.tensors) == set(A) | set(B)
        assert {key: path.name for key, path in src.home.items()} == INDEX
        assert src.weight_bytes == 4 * 36 + 2 * 64
        files = src.open()
        assert torch.equal(files[src.home["y.weight"]].get("y.weight"), B["y.weight"])

    @pytest.mark.parametrize(
        "name",
        [
            "../m.safetensors",
            "/etc/passwd",
            "a/m.safetensors",
            "..",
            ".",
            "",
            "a\\m.safetensors",
            "c:m",
            "m\0",
            5,
            None,
            ["m"],
        ],
    )
    def test_a_name_that_leads_elsewhere_is_refused(self, name: Any, tmp_path: Path) -> None:
        save_file(A, tmp_path / "m.safetensors")
        error = _refused(_sharded(tmp_path / "model", INDEX | {"z.weight": name}))
        assert "shard" in error.why and "index.json" in error.what

    def test_a_missing_shard_is_named(self, tmp_path: Path) -> None:
        (_sharded(tmp_path) / INDEX["y.weight"]).unlink()
        assert INDEX["y.weight"] in _refused(tmp_path).why

    def test_a_tensor_in_two_shards(self, tmp_path: Path) -> None:
        save_file(A | B, _sharded(tmp_path) / INDEX["y.weight"])
        error = _refused(tmp_path)
        assert "'x.bias'" in error.why and all(name in error.why for name in INDEX.values())

    def test_a_tensor_that_no_shard_has(self, tmp_path: Path) -> None:
        error = _refused(_sharded(tmp_path, INDEX | {"ghost.weight": INDEX["x.weight"]}))
        assert "'ghost.weight'" in error.why and "no shard" in error.why

    def test_a_tensor_in_another_shard_than_the_index_says(self, tmp_path: Path) -> None:
        error = _refused(_sharded(tmp_path, INDEX | {"x.bias": INDEX["y.weight"]}))
        assert "'x.bias'" in error.why and INDEX["x.weight"] in error.why

    def test_a_tensor_that_is_not_in_the_index(self, tmp_path: Path) -> None:
        rows = {key: name for key, name in INDEX.items() if key != "x.bias"}
        error = _refused(_sharded(tmp_path, rows))
        assert "'x.bias'" in error.why and INDEX["x.bias"] in error.why

    def test_a_shard_that_is_the_other_once_more(self, tmp_path: Path) -> None:
        """Under another name: a link within the folder is fine, the same tensors twice are not."""
        path = _sharded(tmp_path) / INDEX["y.weight"]
        path.unlink()
        path.symlink_to(INDEX["x.weight"])
        assert "is both in" in _refused(tmp_path).why

    @pytest.mark.parametrize("make", [os.mkfifo, Path.mkdir, lambda path: path.symlink_to("/dev/zero")])
    def test_a_shard_that_is_no_file(self, make: Callable[[Path], None], tmp_path: Path) -> None:
        path = _sharded(tmp_path) / INDEX["y.weight"]
        path.unlink()
        make(path)
        assert INDEX["y.weight"] in _refused(tmp_path).why

    @pytest.mark.parametrize("weight_map", [None, {}, [], "m-00001-of-00002.safetensors", 7])
    def test_an_index_without_a_map(self, weight_map: Any, tmp_path: Path) -> None:
        assert "weight_map" in _refused(_sharded(tmp_path, weight_map)).why

    def test_a_truncated_shard_is_named(self, tmp_path: Path) -> None:
        path = _sharded(tmp_path) / INDEX["y.weight"]
        os.truncate(path, path.stat().st_size - 6)
        error = _refused(tmp_path)
        assert path.name in error.what and "6 bytes short" in error.why


class TestLinks:
    def _outside(self, folder: Path) -> Path:
        (folder / "elsewhere").mkdir()
        save_file(A, folder / "elsewhere" / "secret.safetensors")
        return folder / "elsewhere" / "secret.safetensors"

    def test_a_weight_file_outside_its_folder(self, tmp_path: Path) -> None:
        (tmp_path / "model").mkdir()
        (tmp_path / "model" / "model.safetensors").symlink_to(self._outside(tmp_path))
        assert "outside its folder" in _refused(tmp_path / "model").why

    def test_a_shard_outside_its_folder(self, tmp_path: Path) -> None:
        path = _sharded(tmp_path / "model") / INDEX["x.weight"]
        path.unlink()
        path.symlink_to(self._outside(tmp_path))
        assert "outside its folder" in _refused(tmp_path / "model").why

    @pytest.mark.parametrize("name", ["config.json", "model.safetensors.index.json", "quantization_map.json"])
    def test_a_json_file_outside_its_folder(self, name: str, tmp_path: Path) -> None:
        (tmp_path / "outside.json").write_text(json.dumps({"weight_map": INDEX}))
        path = _sharded(tmp_path / "model") / name
        path.unlink(missing_ok=True)
        path.symlink_to(tmp_path / "outside.json")
        assert "outside its folder" in _refused(tmp_path / "model").why

    def test_links_within_the_folder_and_of_the_folder_are_fine(self, tmp_path: Path) -> None:
        folder = _sharded(tmp_path / "model")
        (folder / INDEX["x.weight"]).rename(folder / "real.safetensors")
        (folder / INDEX["x.weight"]).symlink_to("real.safetensors")
        (tmp_path / "link").symlink_to(folder)
        assert sdquant.detect(tmp_path / "link").tensors == 3

    def test_a_single_file_may_be_a_link(self, tmp_path: Path) -> None:
        (tmp_path / "link.safetensors").symlink_to(self._outside(tmp_path))
        assert sdquant.detect(tmp_path / "link.safetensors").tensors == 2

    def test_the_hub_cache_is_made_of_links(self, sd: Path, tmp_path: Path) -> None:
        repository = tmp_path / "models--who--digits"
        snapshot = repository / "snapshots" / "0123abcd"
        (repository / "blobs").mkdir(parents=True)
        for number, path in enumerate(sorted(path for path in sd.rglob("*") if path.is_file())):
            place = snapshot / path.relative_to(sd)
            place.parent.mkdir(parents=True, exist_ok=True)
            shutil.copy(path, repository / "blobs" / str(number))
            place.symlink_to(os.path.relpath(repository / "blobs" / str(number), place.parent))
        assert sdquant.detect(snapshot).bytes == sdquant.detect(sd).bytes
        # Only to its own blobs, though.
        link = snapshot / "unet" / "diffusion_pytorch_model.safetensors"
        link.unlink()
        link.symlink_to(self._outside(tmp_path))
        assert "outside its folder" in _refused(snapshot).why

    def test_a_link_in_a_circle(self, tmp_path: Path) -> None:
        (tmp_path / "model.safetensors").symlink_to("model.safetensors")
        _refused(tmp_path / "model.safetensors", SdquantError)
        _refused(tmp_path, SdquantError)


class TestWhichFile:
    def test_pickles_are_refused(self, tmp_path: Path) -> None:
        for name in ("pytorch_model.bin", "model.ckpt", "model.PT", "model.pth", "model.pkl"):
            folder = tmp_path / name
            folder.mkdir()
            torch.save(A, folder / name)
            assert "pickle" in _refused(folder, UnsupportedFileError).why
            assert "pickle" in _refused(folder / name, UnsupportedFileError).why

    @pytest.mark.parametrize(
        ("names", "runtime"),
        [
            (("openvino_model.xml", "openvino_model.bin"), "OpenVINO"), (("model.onnx",), "ONNX Runtime"),
            (("unet.engine",), "TensorRT"), (("diffusion_flax_model.msgpack",), "Flax"),
        ],
    )  # fmt: skip
    def test_models_for_another_runtime_are_refused_by_its_name(
        self, names: tuple[str, ...], runtime: str, tmp_path: Path
    ) -> None:
        """OpenVINO's weights are called as torch's pickles are, and its graph begins like a web page."""
        for name in names:
            (tmp_path / name).write_bytes(b'<?xml version="1.0"?><net name="Model0" version="11"></net>')
        for path in (tmp_path, *(tmp_path / name for name in names)):
            error = _refused(path, UnsupportedFileError)
            assert runtime in error.why and "pickle" not in f"{error.why} {error.fix}"
            with pytest.raises(UnsupportedFileError, match=runtime):
                sdquant.load_model(path, allow_pickle=True, progress=False)
        torch.save(A, tmp_path / "pytorch_model.bin")  # beside it, as in many repositories
        assert "pickle" in _refused(tmp_path, UnsupportedFileError).why

    def test_safetensors_win_over_pickles(self, tmp_path: Path) -> None:
        (tmp_path / "pytorch_model.bin").write_bytes(b"anything")
        save_file(A, tmp_path / "model.safetensors")
        assert sdquant.detect(tmp_path).tensors == 2

    def test_a_damaged_file_does_not_make_room_for_another(self, tmp_path: Path) -> None:
        torch.save(A, tmp_path / "pytorch_model.bin")
        (tmp_path / "model.safetensors").write_bytes(b"damaged")
        _refused(tmp_path)

    def test_a_folder_without_weights(self, tmp_path: Path) -> None:
        assert "no weights" in _refused(tmp_path, MissingComponentError).why
        (tmp_path / "config.json").write_text("{}")
        (tmp_path / ".hidden.safetensors").write_bytes(b"")
        assert "no weights" in _refused(tmp_path, MissingComponentError).why

    def test_several_files_of_which_none_is_named_as_usual(self, tmp_path: Path) -> None:
        save_file(A, tmp_path / "one.safetensors")
        assert sdquant.detect(tmp_path).tensors == 2
        save_file(B, tmp_path / "two.safetensors")
        error = _refused(tmp_path, UnsupportedFileError)
        assert "one.safetensors, two.safetensors" in error.why
        assert sdquant.detect(tmp_path / "two.safetensors").tensors == 1

    def test_the_fp16_variant_is_taken_where_there_is_no_other(self, tmp_path: Path) -> None:
        save_file(A, tmp_path / "model.fp16.safetensors")
        assert sdquant.detect(tmp_path).tensors == 2
        save_file(B, tmp_path / "model.safetensors")
        assert sdquant.detect(tmp_path).tensors == 1

    def test_a_file_without_tensors(self, tmp_path: Path) -> None:
        save_file({}, tmp_path / "model.safetensors")
        assert "no tensors" in _refused(tmp_path).why

    @pytest.mark.parametrize("make", [os.mkfifo, Path.mkdir], ids=["pipe", "folder"])
    def test_weights_that_are_no_file(self, make: Callable[[Path], None], tmp_path: Path) -> None:
        make(tmp_path / "model.safetensors")
        assert "regular file" in _refused(tmp_path).why

    @pytest.mark.parametrize("name", ["model.safetensors", "config.json", "model_index.json", ""], ids=str)
    def test_a_link_that_leads_nowhere(self, name: str, tmp_path: Path) -> None:
        """As in a snapshot of the hub's cache that was copied without the files. Such a config was taken for none."""
        folder = tmp_path / "model"
        if name:
            folder.mkdir()
            save_file(A, folder / "model.safetensors")
            (folder / name).unlink(missing_ok=True)
        (folder / name).symlink_to(folder / "blob")
        error = _refused(folder)
        assert "link to" in error.why and "where there is no file" in error.why and "copy the file" in error.fix

    def test_a_pipe_itself(self, tmp_path: Path) -> None:
        os.mkfifo(tmp_path / "pipe.safetensors")
        assert "regular file" in _refused(tmp_path / "pipe.safetensors").why

    def test_a_name_longer_than_the_system_allows(self, tmp_path: Path) -> None:
        assert "too long" in _refused(tmp_path / ("a" * 300)).why

    def test_gguf_by_name_but_not_by_content(self, tmp_path: Path) -> None:
        save_file(A, tmp_path / "model.gguf")
        assert "GGUF" in _refused(tmp_path / "model.gguf").why

    def test_a_lone_file_takes_the_config_beside_it(self, sd: Path, tmp_path: Path) -> None:
        shutil.copytree(sd / "unet", tmp_path / "unet")
        lone = tmp_path / "unet" / "diffusion_pytorch_model.safetensors"
        assert sdquant.detect(lone).class_name == "UNet2DConditionModel"
        assert sdquant.detect(lone).sources["model"].config["cross_attention_dim"] == 128
        save_file(A, tmp_path / "unet" / "another.safetensors")  # whose config is it now?
        assert not sdquant.detect(lone).sources["model"].config


class TestJSON:
    @pytest.mark.parametrize(
        ("content", "said"),
        [
            (b"\xff\xfe\xfa", "utf-8"),
            ('{"a": 1}'.encode("utf-16"), "utf-8"),
            (b"{", "Expecting"),
            (b"", "Expecting"),
            (b"[1, 2]", "table"),
            (b"[" * 200_000, "recursion"),
            (b'{"a": ' + b"9" * 5000 + b"}", "digits"),
            (b'{"quantization_config": "nf4"}', "quantization_config"),
            (b'{"quantization_config": [1]}', "quantization_config"),
        ],
        ids=["bytes", "utf-16", "half", "empty", "list", "deep", "digits", "text", "list inside"],
    )
    def test_a_config_that_is_none(self, content: bytes, said: str, tmp_path: Path) -> None:
        save_file(A, tmp_path / "model.safetensors")
        (tmp_path / "config.json").write_bytes(content)
        error = _refused(tmp_path)
        assert "config.json" in error.what and said in error.why

    def test_a_config_larger_than_anyones(self, tmp_path: Path) -> None:
        save_file(A, tmp_path / "model.safetensors")
        with (tmp_path / "config.json").open("wb") as file:
            file.truncate(folders.MAX_JSON + 1)
        assert "64 MiB" in _refused(tmp_path).why

    @pytest.mark.parametrize("name", ["config.json", "quantization_map.json", "model.safetensors.index.json"])
    def test_a_pipe_does_not_hang(self, name: str, tmp_path: Path) -> None:
        save_file(A, tmp_path / "model.safetensors")
        os.mkfifo(tmp_path / name)
        assert "regular file" in _refused(tmp_path).why

    @pytest.mark.parametrize(
        "config",
        [
            {"quant_method": "sdnq", "modules_dtype_dict": ["a"]},
            {"quant_method": "sdnq", "modules_dtype_dict": {"int4": 5}},
            {"quant_method": "sdnq", "modules_quant_config": {"x.weight": 3}},
            {"quant_method": "sdnq", "weights_dtype": []},
        ],
    )
    def test_a_quantization_config_without_sense(self, config: dict[str, Any], tmp_path: Path) -> None:
        tensors = {"x.weight": torch.zeros(4, 64, dtype=torch.int8), "x.scale": torch.ones(4, 1)}
        save_file(tensors, tmp_path / "model.safetensors")
        (tmp_path / "config.json").write_text(json.dumps({"quantization_config": config}))
        _refused(tmp_path, SdquantError)


class TestPipeline:
    @pytest.fixture
    def pipeline(self, sd: Path, tmp_path: Path) -> Path:
        return Path(shutil.copytree(sd, tmp_path / "pipe"))

    def _index(self, pipeline: Path, **changes: Any) -> None:
        path = pipeline / "model_index.json"
        path.write_text(json.dumps(json.loads(path.read_text()) | changes))

    def test_the_parts_with_weights(self, sd: Path) -> None:
        index = folders.read_json(sd / "model_index.json")
        assert set(folders.pipeline_parts(sd, index)) == {"text_encoder", "unet", "vae"}

    @pytest.mark.parametrize("name", ["..", "../unet", "a/b", ".", "", "a\\b", "c:"])
    def test_a_component_that_lies_elsewhere(self, name: str, pipeline: Path) -> None:
        self._index(pipeline, **{name: ["diffusers", "UNet2DConditionModel"]})
        assert "not the name of a component" in _refused(pipeline).why

    def test_a_component_without_a_folder(self, pipeline: Path) -> None:
        shutil.rmtree(pipeline / "unet")
        error = _refused(pipeline, MissingComponentError)
        assert "unet" in error.why and "UNet2DConditionModel" in error.fix

    def test_a_component_that_is_null_is_not_there(self, pipeline: Path) -> None:
        self._index(
            pipeline, safety_checker=[None, None], feature_extractor=[None, None], requires_safety_checker=False
        )
        assert set(sdquant.detect(pipeline).parts) == {"text_encoder", "unet", "vae"}

    def test_a_component_that_lost_its_config_is_still_one(self, pipeline: Path) -> None:
        """It is not left out as if it had no weights: loading needs its config, and detect says so as well."""
        (pipeline / "unet" / "config.json").unlink()
        assert str(pipeline / "unet") in _refused(pipeline, MissingComponentError).what

    def test_an_index_without_components(self, pipeline: Path) -> None:
        (pipeline / "model_index.json").write_text('{"_class_name": "StableDiffusionPipeline"}')
        assert "no component" in _refused(pipeline, MissingComponentError).why


class TestOwnMetadata:
    """Files that say they are sdquant's, and are not as sdquant wrote them."""

    @pytest.fixture
    def path(self, saved: Callable[..., Path], tmp_path: Path) -> Path:
        return Path(
            shutil.copy(saved("nf4") / "unet" / "diffusion_pytorch_model.safetensors", tmp_path / "m.safetensors")
        )

    def _rewrite(self, path: Path, change: Callable[[dict[str, Any]], Any], *, drop: str | None = None) -> None:
        src = checkpoint.single_file(path)
        own = json.loads(src.metadata["sdquant"])
        changed = change(own)
        text = changed if isinstance(changed, str) else json.dumps(own)
        tensors = {key: tensor for key, tensor in load_file(path).items() if key != drop}
        save_file(tensors, path, {"sdquant": text})

    def _row(self, **changes: Any) -> Callable[[dict[str, Any]], None]:
        return lambda own: next(iter(own["weights"].values())).update(changes)

    def test_as_it_was_written(self, path: Path) -> None:
        self._rewrite(path, lambda own: None)
        assert sdquant.detect(path).quant == "nf4"

    @pytest.mark.parametrize("text", ["", "5", "[]", "null", "{}", "{", '{"format": 1}', "[" * 200_000])
    def test_something_else(self, text: str, path: Path) -> None:
        self._rewrite(path, lambda own: text)
        assert "metadata is damaged" in _refused(path).why

    @pytest.mark.parametrize(
        "changes",
        [
            {"shape": [-1, 5]}, {"shape": []}, {"shape": "x"}, {"shape": [True, 64]}, {"shape": None}, {"shape": [2.0]},
            {"shape": [1 << 40, 1 << 40]}, {"dtype": "exec"}, {"dtype": None}, {"details": []}, {"details": None},
            {"parts": None}, {"parts": "codes"}, {"parts": [5]}, {"extra": None}, {"extra": [["a"]]}, {"scheme": 5},
        ],
    )  # fmt: skip
    def test_a_weight_that_is_not_described(self, changes: dict[str, Any], path: Path) -> None:
        self._rewrite(path, self._row(**changes))
        assert "metadata is damaged" in _refused(path).why

    @pytest.mark.parametrize("rows", [[], None, "x", {"a.weight": None}, {"a.weight": []}])
    def test_no_table_of_weights(self, rows: Any, path: Path) -> None:
        self._rewrite(path, lambda own: own.update(weights=rows))
        assert "metadata is damaged" in _refused(path).why

    def test_a_missing_part_is_named(self, path: Path) -> None:
        key = next(key for key in checkpoint.single_file(path).tensors if key.endswith(".absmax"))
        self._rewrite(path, lambda own: None, drop=key)
        assert key in _refused(path).why

    def test_a_missing_extra_is_named(self, path: Path) -> None:
        key = next(key for key in checkpoint.single_file(path).tensors if key.endswith(".quant_map"))
        self._rewrite(path, lambda own: None, drop=key)
        assert key in _refused(path).why

    def test_a_later_format(self, path: Path) -> None:
        self._rewrite(path, lambda own: own.update(format=2))
        assert "format 2" in _refused(path, UnsupportedFileError).why

    def test_a_scheme_that_is_not_installed(self, path: Path) -> None:
        self._rewrite(path, self._row(scheme="round9"))
        assert "'round9'" in _refused(path, UnsupportedFileError).why

    def test_another_scheme_than_the_parts_are_of(self, path: Path) -> None:
        self._rewrite(path, self._row(scheme="qint8"))
        _refused(path)


def test_a_tensor_that_cannot_be_made_of_others(tmp_path: Path) -> None:
    """Read under another name and in another shape, it may be damaged in ways that only the computation shows."""
    src = checkpoint.single_file(_file(tmp_path))
    recipe = Recipe(("x.weight",), None, (4, 4), "float32", lambda get: get("x.weight").view(4, 4))
    src = replace(
        src, tensors=src.tensors | {"z": recipe.info}, home=src.home | {"z": src.files[0]}, recipes={"z": recipe}
    )
    files = src.open()
    with pytest.raises(BadFileError, match=r"Cannot read tensor 'z' of .*\.safetensors.*'x\.weight': shape") as caught:
        src.read(files, "z")
    assert caught.value.fix


def _file(folder: Path) -> Path:
    save_file(A, folder / "model.safetensors")
    return folder / "model.safetensors"


@pytest.mark.parametrize("suffix", ["safetensors", "gguf", "bin"])
def test_a_file_that_is_cut_while_it_is_open(suffix: str, tmp_path: Path) -> None:
    """Its pages are gone, and touching them would end the process; another file under its name changes nothing."""
    tensors = {"x.weight": torch.arange(4096.0).view(64, 64), "y.weight": torch.ones(64, 64)}

    def write(path: Path) -> Path:
        if suffix == "gguf":
            rows = [(key, (64, 64), "f32", t.numpy().tobytes()) for key, t in tensors.items()]
            write_gguf(path, rows, {"general.architecture": "flux"})
        elif suffix == "bin":
            torch.save(tensors, path)
        else:
            save_file(tensors, path)
        return path

    path = write(tmp_path / f"model.{suffix}")
    with checkpoint.open_file(path) as file:
        assert torch.equal(file.get("x.weight"), tensors["x.weight"])
        os.truncate(path, path.stat().st_size // 2)
        for key in tensors:
            with pytest.raises(BadFileError, match=r"when it was opened and has \d+ now") as caught:
                file.get(key)
        assert str(path) in caught.value.what
    write(path)
    with checkpoint.open_file(path) as file:
        file.get("y.weight")
        (tmp_path / "other").write_bytes(b"short")
        os.replace(tmp_path / "other", path)
        assert torch.equal(file.get("x.weight"), tensors["x.weight"])
