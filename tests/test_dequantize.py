"""`dequantize`: every quantized file gives the weights that its library has, under their names and with nothing left
over; what the command writes, and what it refuses."""

from __future__ import annotations

import json
import os
import re
import shutil
import signal
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from torch import Tensor

import sdquant
from sdquant import backends, cli
from sdquant.backends import without_compiler
from sdquant.errors import (
    BadFileError,
    ConflictError,
    MissingComponentError,
    SettingsError,
    UnsupportedFileError,
)
from sdquant.formats import write_gguf
from sdquant.models import float_weights
from sdquant.nn import quantized
from sdquant.saving import dequantize_to
from sdquant.utils import buffers

from .foreign import ROWS as FOREIGN
from .foreign import WEIGHTS
from .test_cli import interrupted, leftovers

GOLDEN = Path(__file__).parent / "backends" / "golden"
# Nunchaku's say not what model they are of, and are refused for that: they go through under a model's names.
LAYERS = sorted(
    path.name for path in GOLDEN.glob("*.safetensors") if not path.name.startswith(("comfy_hadamard", "nunchaku"))
)
# Relative error of the weights of libraries that compute them in bfloat16 or float16; of the others 1e-6.
IN_HALVES = 3e-3
# With rows and columns of zeros, which only a model's shapes tell from others.
PADDED = ("comfy_mxfp8.safetensors", "comfy_nvfp4_padded.safetensors")
Get = Callable[[str], Path]
Capture = pytest.CaptureFixture[str]


@pytest.mark.parametrize("name", LAYERS)
def test_golden_vectors(name: str) -> None:
    """Each library's own dequantized weight, of a layer that the library wrote."""
    with safe_open(GOLDEN / name, "pt") as file:
        settings = (file.metadata() or {}).get("quantization_config")
        values = ("golden.weight_effective", "golden.weight", "golden.weight_fakequant")
        want = file.get_tensor(next(key for key in values if key in file.keys()))  # noqa: SIM118 - not a mapping
    halves = not name.startswith("comfy_int8")
    config = {"quant_method": "sdnq", **json.loads(settings)} if settings else None
    config = {"quant_method": "modelopt"} if name.startswith("modelopt_export") else config
    tensors = dict(sdquant.dequantize(GOLDEN / name, config=config))
    layer = {key for key in tensors if key.startswith("layer.")}
    assert {"layer.weight"} <= layer <= {"layer.weight", "layer.bias"}
    weight = tensors["layer.weight"]
    if name in PADDED:
        rows, columns = want.shape
        assert not weight[rows:].any() and not weight[:, columns:].any()
        weight = weight[:rows, :columns]
    assert weight.dtype == torch.float32 and weight.shape == want.shape
    assert (weight - want.float()).norm() <= (IN_HALVES if halves else 1e-6) * want.float().norm()


def test_the_golden_rotations(tmp_path: Path) -> None:
    """comfy-kitchen's matrices as codes of its ConvRot: each is the identity, rotated."""
    file = {}
    for signs in load_file(GOLDEN / "comfy_hadamard_regular.safetensors").values():
        size = len(signs)
        said = json.dumps({"format": "int8_tensorwise", "convrot": True, "convrot_groupsize": size})
        file |= {f"h{size}.weight": signs, f"h{size}.weight_scale": torch.full((size, 1), size**-0.5)}
        file[f"h{size}.comfy_quant"] = torch.tensor(list(said.encode()), dtype=torch.uint8)
    save_file(file, tmp_path / "model.safetensors")
    tensors = dict(sdquant.dequantize(tmp_path / "model.safetensors"))
    assert tensors.keys() == {"h4.weight", "h16.weight", "h64.weight"}
    for weight in tensors.values():
        assert torch.allclose(weight, torch.eye(len(weight)), rtol=0, atol=1e-6)


@pytest.mark.parametrize(
    ("name", "layer", "own"),
    [
        ("svdq_int4", "out_proj", "attn.to_out.0"), ("svdq_nvfp4_wcscales", "out_proj", "attn.to_out.0"),
        ("svdq_int4_unsigned_fc2", "mlp_fc2", "ff.net.2"), ("awq_w4a16_splits6", "norm1.linear", "norm1.linear"),
    ],
)  # fmt: skip
def test_nunchakus_golden_vectors(name: str, layer: str, own: str, tmp_path: Path) -> None:
    """Rows interleaved and biases changed by its packer are undone, which a model's names tell."""
    golden = load_file(GOLDEN / f"nunchaku_{name}.safetensors")
    block, file = "transformer_blocks.0", tmp_path / "model.safetensors"
    rows = {f"{block}.{layer}.{key[6:]}": tensor for key, tensor in golden.items() if key.startswith("layer.")}
    # The layer that tells Nunchaku's own file from diffusers': of three tiles, which lie one after another.
    tile = load_file(GOLDEN / "nunchaku_svdq_int4.safetensors")
    for key in ("qweight", "wscales", "lora_up", "bias"):
        one = tile[f"layer.{key}"]
        shape = (2, 384) if key == "wscales" else (384, *one.shape[1:])
        rows[f"{block}.qkv_proj.{key}"] = torch.cat([one.flatten()] * 3).view(shape)
    rows |= {f"{block}.qkv_proj.{key}": tile[f"layer.{key}"].clone() for key in ("lora_down", "smooth")}
    save_file(rows, file)
    tensors = dict(sdquant.dequantize(file))
    bias = golden.get("golden.bias_effective", golden["natural.bias"])
    if "awq" in name:  # whose packer was given a bias with 1 added to both scales, as its runtime wants it
        bias = bias - torch.tensor([0, 1, 0, 0, 1, 0]).repeat_interleave(len(bias) // 6)
    wanted = {own: (golden["golden.weight"], bias)}
    wanted |= dict.fromkeys((f"attn.to_{one}" for one in "qkv"), (tile["golden.weight"], tile["natural.bias"]))
    assert tensors.keys() == {f"{block}.{key}.{leaf}" for key in wanted for leaf in ("weight", "bias")}
    for key, pair in wanted.items():
        for leaf, want in zip(("weight", "bias"), pair, strict=True):
            assert (tensors[f"{block}.{key}.{leaf}"] - want.float()).norm() <= IN_HALVES * want.float().norm()


@pytest.mark.parametrize("name", ["svdq_int4", "svdq_nvfp4_wcscales"])
def test_nunchakus_layers_of_no_model(name: str, tmp_path: Path) -> None:
    """Nothing tells whose rows they are; with what the error says to pass, they are as in nunchaku_lite."""
    golden, file = load_file(GOLDEN / f"nunchaku_{name}.safetensors"), tmp_path / "model.safetensors"
    save_file({key: tensor for key, tensor in golden.items() if key.startswith("layer.")}, file)
    with pytest.raises(UnsupportedFileError, match="nothing tells whether its rows are interleaved") as error:
        sdquant.dequantize(file)
    config = re.search(r"config=(\{.*?\})", error.value.fix)
    assert config is not None
    weight = dict(sdquant.dequantize(file, config=json.loads(config[1])))["layer.weight"]
    want = golden["golden.weight"].float()
    assert (weight - want).norm() <= IN_HALVES * want.norm()
    tensors = load_file(file)
    save_file(tensors | {"layer.wscales": tensors["layer.wscales"].view(torch.uint8)}, file)  # AutoRound's MXFP4
    for given in (None, json.loads(config[1])):
        with pytest.raises(UnsupportedFileError, match=r"in a variant of (it|SVDQuant)"):
            sdquant.dequantize(file, config=given)


@pytest.mark.parametrize("name", [name for name in FOREIGN if name != "lone qint4"])
def test_what_others_write(name: str, foreign: Get) -> None:
    """The names of the float model, its shapes, and weights as near as the scheme is."""
    path = foreign(name)
    pipe, part = ("digits-sd", "unet") if _is_unet(path) else ("digits-flux", "transformer")
    floats = load_file(sdquant.demo.path(pipe) / part / WEIGHTS)
    tensors = dict(sdquant.dequantize(path))
    assert {key: tensor.shape for key, tensor in tensors.items()} == {key: t.shape for key, t in floats.items()}
    assert {tensor.dtype for tensor in tensors.values()} == {torch.float32}
    coarse = 0.6 if "qint2" in name else 0.2
    for key, tensor in tensors.items():
        assert (tensor - floats[key].float()).norm() <= coarse * floats[key].float().norm(), key


def _is_unet(path: Path) -> bool:
    config = path / "config.json"
    return path.name.startswith("unet") or (config.exists() and "UNet" in json.loads(config.read_text())["_class_name"])


def _nibbles(codes: torch.Tensor) -> torch.Tensor:
    """bitsandbytes' codes: the first in the high half."""
    return torch.stack((codes.flatten() >> 4, codes.flatten() & 15), 1).flatten().long()


class TestLibraries:
    """Bit for bit what the library itself makes of its file."""

    def test_bitsandbytes(self, foreign: Get) -> None:
        from bitsandbytes.functional import QuantState, dequantize_4bit

        path = foreign("diffusers nf4")
        (file,) = path.glob("*.safetensors")
        stored, mine = load_file(file), dict(sdquant.dequantize(path, dtype="bfloat16"))
        states = [key.partition(".quant_state.")[0] for key in stored if ".quant_state." in key]
        assert states
        for name in states:
            rows = {key: tensor for key, tensor in stored.items() if key.startswith(f"{name}.")}
            state = QuantState.from_dict(rows, device=torch.device("cpu"))
            # Its kernel for AVX-512 takes another block's scale where a block is longer than a row (0.50, seen on an
            # AMD EPYC); what it does without that kernel is the same on every machine.
            if state.shape[1] % state.blocksize:
                values = state.code[_nibbles(stored[name])].view(-1, state.blocksize) * state.absmax.unsqueeze(1)
                assert torch.equal(mine[name], values.view(state.shape).bfloat16())
            else:
                assert torch.equal(mine[name], dequantize_4bit(stored[name], state).bfloat16())

    def test_gguf(self, tmp_path: Path) -> None:
        """With the authors' names, as they are in the file."""
        from gguf import GGUFReader
        from gguf.quants import dequantize

        path = _gguf(tmp_path)
        mine = dict(sdquant.dequantize(path))
        theirs = {row.name: dequantize(row.data, row.tensor_type) for row in GGUFReader(path).tensors}
        assert mine.keys() == theirs.keys() and "double_blocks.0.img_attn.qkv.weight" in mine
        for name, weight in theirs.items():
            assert torch.equal(mine[name].flatten(), torch.from_numpy(weight.copy()).float().flatten())

    def test_comfy_kitchen(self, foreign: Get) -> None:
        from comfy_kitchen.tensor import TensorWiseINT8Layout

        stored = load_file(foreign("comfy convrot"))
        mine = dict(sdquant.dequantize(foreign("comfy convrot")))
        markers = {key: json.loads(bytes(t.tolist())) for key, t in stored.items() if key.endswith("comfy_quant")}
        assert markers
        for key, said in markers.items():
            stem, codes = key.removesuffix("comfy_quant"), stored[key.removesuffix("comfy_quant") + "weight"]
            params = TensorWiseINT8Layout.Params(
                scale=stored[f"{stem}weight_scale"], orig_dtype=torch.float32, orig_shape=tuple(codes.shape),
                convrot=True, convrot_groupsize=said["convrot_groupsize"],
            )  # fmt: skip
            theirs = TensorWiseINT8Layout.dequantize(codes, params)
            assert (mine[f"{stem}weight"] - theirs).norm() <= 1e-6 * theirs.norm()

    def test_scaled_float8(self, foreign: Get) -> None:
        stored, mine = load_file(foreign("fp8 scale_weight")), dict(sdquant.dequantize(foreign("fp8 scale_weight")))
        scales = [key for key in stored if key.endswith("scale_weight")]
        assert scales
        for key in scales:
            name = key.replace("scale_weight", "weight")
            assert torch.equal(mine[name], stored[name].float() * stored[key].float())

    def test_quanto(self, foreign: Get) -> None:
        from diffusers import UNet2DConditionModel
        from optimum import quanto

        without_compiler()
        path = foreign("quanto qint4")
        model = UNet2DConditionModel.from_config(json.loads((path / "config.json").read_text()))
        quanto.requantize(model, load_file(path / WEIGHTS), json.loads((path / "quantization_map.json").read_text()))
        mine = dict(sdquant.dequantize(path, dtype="bfloat16"))
        weights = {name: p for name, p in model.named_parameters() if isinstance(p, quanto.QTensor)}
        assert weights
        assert all(torch.equal(mine[name], weight.dequantize()) for name, weight in weights.items())


def test_integers_of_another_shape_than_the_models() -> None:
    """Like the position ids of a text encoder: reshaped, and held against no float type's end."""
    src = sdquant.detect(sdquant.demo.path("digits-flux") / "transformer").sources["model"]
    ids = torch.arange(3)
    assert float_weights._cast(src, "position_ids", ids, "int64") is ids


@pytest.mark.parametrize(
    "scheme", [*(row.name for row in backends.schemes() if row.on_the_fly), "q8_0", "q4_k", "iq4_nl"]
)
def test_a_pipeline_that_we_wrote(scheme: str, saved: Callable[..., Path]) -> None:
    """Names begin with the component; a vector that `save` writes as a matrix is a vector again."""
    path = saved(scheme)
    mine = dict(sdquant.dequantize(path, dtype=torch.bfloat16))
    pipe = sdquant.load_model(path, progress=False)
    for part in ("unet", "text_encoder", "vae"):
        model = getattr(pipe, part)
        packs = dict(quantized(model))
        assert part == "vae" or packs or scheme == "q4_k"
        for name, packed in packs.items():
            weight = packed.spec.scheme.codec.decode(packed, torch.bfloat16)
            assert torch.equal(mine[f"{part}.{name}"], weight)
    bare = dict(sdquant.dequantize(sdquant.demo.path("digits-sd")))
    assert {key: tensor.shape for key, tensor in mine.items()} == {key: t.shape for key, t in bare.items()}


class TestConfig:
    def test_a_file_whose_config_is_elsewhere(self, foreign: Get, tmp_path: Path) -> None:
        folder = foreign("sdnq")
        lone = Path(shutil.copy(folder / WEIGHTS, tmp_path / "lone.safetensors"))
        want = dict(sdquant.dequantize(folder))
        config = json.loads((folder / "config.json").read_text())["quantization_config"]
        with pytest.raises(UnsupportedFileError):
            sdquant.dequantize(lone)
        for given in (folder / "config.json", str(folder / "config.json"), config):
            got = dict(sdquant.dequantize(lone, config=given))
            assert got.keys() == want.keys() and all(torch.equal(got[key], want[key]) for key in want)

    def test_a_model_that_tells_the_shapes(self, foreign: Get, sd: Path) -> None:
        with pytest.raises(UnsupportedFileError, match="does not record the weight's shape") as error:
            sdquant.dequantize(foreign("lone qint4"))
        assert "config" in error.value.fix
        got = dict(sdquant.dequantize(foreign("lone qint4"), config=sd / "unet" / "config.json"))
        assert {k: t.shape for k, t in got.items()} == {k: t.shape for k, t in load_file(sd / "unet" / WEIGHTS).items()}

    def test_what_it_must_not_be(self, foreign: Get, sd: Path, tmp_path: Path) -> None:
        (tmp_path / "list.json").write_text("[]")
        other = {"quant_method": "sdnq", "weights_dtype": "int8"}
        with pytest.raises(ConflictError, match="another quantization_config"):
            sdquant.dequantize(foreign("sdnq"), config=other)
        with pytest.raises(SettingsError, match="is a pipeline"):
            sdquant.dequantize(sd, config=other)
        for given in ({}, {"quantization_config": "sdnq"}, {"_class_name": "X", "quantization_config": 3}, 7):
            with pytest.raises(SettingsError):
                sdquant.dequantize(foreign("sdnq"), config=given)  # type: ignore[arg-type]
        for path in (tmp_path / "none.json", tmp_path / "list.json"):
            with pytest.raises(BadFileError):
                sdquant.dequantize(foreign("sdnq"), config=path)
        with pytest.raises(BadFileError, match="GPTQ"):
            sdquant.dequantize(sd / "unet", config={"quant_method": "gptq"})
        with pytest.raises(UnsupportedFileError, match="AQLM"):
            sdquant.dequantize(sd / "unet", config={"quant_method": "aqlm"})


class TestReading:
    def test_it_is_lazy(self, foreign: Get) -> None:
        rows = sdquant.dequantize(foreign("lone nf4"))
        assert isinstance(rows, Iterator)
        name, tensor = next(rows)
        assert name in load_file(foreign("lone nf4")) and tensor.dtype == torch.float32
        rows.close()  # type: ignore[attr-defined]

    def test_dtypes(self, foreign: Get, flux: Path) -> None:
        each = {str(dtype): dict(sdquant.dequantize(foreign("fp8 scale_weight"), dtype=dtype))  # type: ignore[arg-type]
                for dtype in ("float16", torch.bfloat16, None)}  # fmt: skip
        for name, tensors in each.items():
            want = torch.float16 if name == "float16" else torch.bfloat16
            assert {tensor.dtype for tensor in tensors.values()} == {want}
        with pytest.raises(SettingsError, match="Cannot dequantize to int8"):
            sdquant.dequantize(flux / "transformer", dtype="int8")

    def test_integers_stay(self, tmp_path: Path) -> None:
        save_file({"x.weight": torch.ones(2, 2), "ids": torch.arange(3)}, tmp_path / "a.safetensors")
        tensors = dict(sdquant.dequantize(tmp_path / "a.safetensors", dtype="float16"))
        assert tensors["ids"].dtype == torch.int64 and tensors["x.weight"].dtype == torch.float16

    def test_what_float16_does_not_reach(self, tmp_path: Path) -> None:
        save_file({"x.weight": torch.full((2, 2), 1e6)}, tmp_path / "a.safetensors")
        with pytest.raises(BadFileError, match="float16 does not reach"):
            dict(sdquant.dequantize(tmp_path / "a.safetensors", dtype="float16"))

    def test_what_other_dtypes_do_not_reach(self, tmp_path: Path) -> None:
        for dtype, value in (("bfloat16", torch.finfo(torch.float32).max), ("float32", 1e300)):
            wide = torch.full((2, 2), value, dtype=torch.float64 if dtype == "float32" else torch.float32)
            save_file({"x.weight": wide}, tmp_path / "a.safetensors")
            with pytest.raises(BadFileError, match=f"{dtype} does not reach"):
                dict(sdquant.dequantize(tmp_path / "a.safetensors", dtype=dtype))

    def test_a_file_of_no_known_model(self, tmp_path: Path) -> None:
        weight, scale = torch.randn(8, 16).to(torch.float8_e4m3fn), torch.tensor(0.5)
        tensors = {"deep.thought.weight": weight, "deep.thought.weight_scale": scale, "answer": torch.tensor([42.0])}
        save_file(tensors, tmp_path / "a.safetensors")
        torch.save(tensors, tmp_path / "a.pt")
        with pytest.raises(UnsupportedFileError, match="pickle"):
            sdquant.dequantize(tmp_path / "a.pt")
        for name in ("a.safetensors", "a.pt"):
            mine = dict(sdquant.dequantize(tmp_path / name, allow_pickle=True))
            assert [*mine] == [key for key in mine if key in ("deep.thought.weight", "answer")] and len(mine) == 2
            assert torch.equal(mine["deep.thought.weight"], weight.float() * 0.5)

    def test_a_text_encoder_in_gguf(self, tmp_path: Path) -> None:
        """`load_model` has no use for it."""
        spec, weight = backends.parse("q8_0"), torch.randn(4, 64)
        packed = spec.scheme.codec.encode(weight, spec)
        name = "enc.blk.0.attn_q.weight"
        rows = [(name, (4, 64), "q8_0", lambda: packed.parts["blocks"])]
        write_gguf(tmp_path / "t5.gguf", rows, {"general.architecture": "t5encoder"})
        with pytest.raises(UnsupportedFileError):
            sdquant.detect(tmp_path / "t5.gguf")
        assert torch.equal(
            dict(sdquant.dequantize(tmp_path / "t5.gguf"))[name], spec.scheme.codec.decode(packed, torch.float32)
        )

    def test_one_shard_of_several(self, foreign: Get, tmp_path: Path) -> None:
        one = tmp_path / "diffusion_pytorch_model-00001-of-00002.safetensors"
        shutil.copy(foreign("lone nf4"), one)
        assert dict(sdquant.dequantize(one)).keys() == dict(sdquant.dequantize(foreign("lone nf4"))).keys()

    def test_rules(self, sd: Path, tmp_path: Path) -> None:
        """The ranges of quantized activations go with the codes."""
        rules = [{"module_path": ".*attn.*", "weight_qtype": "int8", "act_qtype": "int8"}]
        unet = sdquant.load_model(sd / "unet", rules=rules, progress=False)
        sdquant.save(unet, tmp_path / "unet")
        mine = dict(sdquant.dequantize(tmp_path / "unet"))
        assert mine.keys() == load_file(sd / "unet" / WEIGHTS).keys()

    def test_a_weight_that_is_there_twice(self, tmp_path: Path) -> None:
        weight = torch.randn(8, 32)
        scale = weight.abs().amax(1, keepdim=True) / 127
        codes = (weight / scale).round().to(torch.int8)
        rows = {"x.weight._data": codes, "x.weight._scale": scale, "x.weight": weight}
        save_file(rows, tmp_path / "a.safetensors")
        with pytest.raises(BadFileError, match="both as it is and quantized"):
            sdquant.dequantize(tmp_path / "a.safetensors")

    def test_what_is_damaged(self, foreign: Get, tmp_path: Path) -> None:
        tensors = load_file(foreign("fp8 scale_weight"))
        key = next(key for key in tensors if key.endswith("scale_weight"))
        save_file(tensors | {key: torch.tensor(float("nan"))}, tmp_path / "nan.safetensors")
        with pytest.raises(BadFileError, match=r"nan\.safetensors"):
            dict(sdquant.dequantize(tmp_path / "nan.safetensors"))
        with pytest.raises(MissingComponentError):
            sdquant.dequantize(tmp_path / "nothing")


def _gguf(folder: Path, scheme: str = "q4_k") -> Path:
    from sdquant.saving import quantize_file

    return quantize_file(sdquant.demo.path("digits-flux"), scheme, folder / f"flux-{scheme}.gguf", progress=False)


class TestWriting:
    def test_a_file(self, capsys: Capture, tmp_path: Path) -> None:
        path, target = _gguf(tmp_path), tmp_path / "out" / "flux.safetensors"
        assert cli.main(["dequantize", str(path), str(target), "--dtype", "bfloat16"]) == 0
        out = capsys.readouterr().out
        assert "from q4_k" in out and "what quantization lost does not come back" in out and "bfloat16" in out
        mine = load_file(target)
        assert mine.keys() == dict(sdquant.dequantize(path)).keys()
        assert all(torch.equal(mine[key], row) for key, row in sdquant.dequantize(path, dtype="bfloat16"))
        assert sdquant.detect(target).quant is None and leftovers(tmp_path) == []
        assert cli.main(["dequantize", str(path), str(target), "--json"]) == 2  # it is there
        assert json.loads(capsys.readouterr().out)["error"]["kind"] == "SettingsError"
        assert cli.main(["dequantize", str(path), str(target), "--json", "--overwrite"]) == 0
        said = json.loads(capsys.readouterr().out)
        assert said["dtype"] == "float32" and said["tensors"] == len(mine) and set(said["schemes"]) == {"q4_k"}

    def test_a_pipeline(self, saved: Callable[..., Path], tmp_path: Path) -> None:
        """diffusers loads it, without sdquant's help; in shards where they would be large."""
        from diffusers import DiffusionPipeline

        source, target = saved("sdnq-uint4"), tmp_path / "floats"
        dequantize_to(source, target, dtype="bfloat16", progress=False, max_shard=10**6)
        index = json.loads((target / "unet" / f"{WEIGHTS}.index.json").read_text())
        assert len(set(index["weight_map"].values())) > 1
        config = json.loads((target / "unet" / "config.json").read_text())
        assert "quantization_config" not in config and config["_class_name"] == "UNet2DConditionModel"
        pipe: Any = DiffusionPipeline.from_pretrained(target, dtype=torch.bfloat16)
        mine = dict(sdquant.dequantize(source, dtype="bfloat16"))
        for name, tensor in pipe.unet.state_dict().items():
            assert torch.equal(tensor, mine[f"unet.{name}"])
        assert sdquant.verify(target).quant is None

    def test_what_it_refuses(self, saved: Callable[..., Path], tmp_path: Path) -> None:
        folder = Path(shutil.copytree(saved("int8"), tmp_path / "int8"))
        (file,) = (folder / "unet").glob("*.safetensors")
        for source, target, why in (
            (folder, folder, "read from it"),
            (folder / "unet", file, "read from it"),
            (folder, tmp_path / "one.safetensors", "several components"),
            (file, tmp_path / "folder", "becomes a single file"),
            (folder, tmp_path / "one.gguf", "written as safetensors"),
            (folder, folder / "unet" / "deep", "inside the model's own folder"),
        ):
            with pytest.raises(SettingsError, match=why):
                dequantize_to(source, target, overwrite=True, progress=False)
        assert sdquant.verify(folder).quant == "int8" and [path.name for path in tmp_path.iterdir()] == ["int8"]

    @pytest.mark.skipif(os.name != "posix", reason="Ctrl-C reaches a child process otherwise on Windows")
    def test_interrupted(self, tmp_path: Path) -> None:
        weight = torch.randn(2048, 2048).to(torch.float8_e4m3fn)
        save_file({f"blocks.{i}.weight": weight.clone() for i in range(64)}, tmp_path / "a.safetensors")
        (tmp_path / "tmp").mkdir()
        out = tmp_path / "out"
        out.mkdir()
        words = ("dequantize", str(tmp_path / "a.safetensors"), str(out / "b.safetensors"))
        assert interrupted(tmp_path, signal.SIGINT, *words, at=out) == (130, "sdquant: interrupted\n")
        assert not list(out.iterdir())

    def test_nothing_is_left_of_what_is_stopped(
        self, foreign: Get, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        def stop(tensor: Tensor) -> memoryview:
            raise KeyboardInterrupt

        sources = (foreign("lone nf4"), "out/a.safetensors"), (foreign("sdnq"), "out/folder")
        monkeypatch.setattr(buffers, "raw_bytes", stop)
        for source, name in sources:
            with pytest.raises(KeyboardInterrupt):
                dequantize_to(source, tmp_path / name, progress=False)
        assert list(tmp_path.iterdir()) == []
