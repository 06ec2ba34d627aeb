"""The plan foretells the load: which weights, and their bytes to the last one."""

from __future__ import annotations

import json
import shutil
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import nn

import sdquant
from sdquant import backends
from sdquant.core.name_patterns import skipped
from sdquant.errors import ConflictError, IncompatibleError, SettingsError
from sdquant.models.pipelines import weight_bytes
from sdquant.nn import kind_of
from sdquant.nn.weights import quantized
from sdquant.planning.preparation import prepare
from sdquant.planning.request import make_request
from sdquant.planning.weight_selection import SKIPPED, candidates, select

from .compat.machines import card, machine
from .foreign import ROWS as FOREIGN
from .foreign import WEIGHTS

ON_THE_FLY = [row for row in backends.schemes() if row.on_the_fly]
ON_CARDS = ("svdquant_nvfp4", "library")  # by Nunchaku's kernels alone
RUNS = [("digits-sd", row.name, one) for row in ON_THE_FLY for one in row.runtimes if (row.name, one) != ON_CARDS]
# All layers of digits-flux are linear, so that every runtime holds the same ones.
RUNS += [
    pytest.param("digits-flux", row.name, row.runtimes[0], marks=[pytest.mark.slow] if number % 2 else [])
    for number, row in enumerate(ON_THE_FLY)
]
RUNS += [
    ("digits-flux", "nf4", "plain"),
    ("digits-sd", "nf4,double_quant", "plain"),
    ("digits-sd", "fp8,packing=float8", "plain"),
]


@pytest.fixture(scope="session")
def pipelines() -> dict[str, Any]:
    """The shipped models, as they are."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # what other libraries say while they are imported
        return {name: sdquant.load_model(sdquant.demo.path(name), progress=False) for name in sdquant.demo.MODELS}


class TestBytes:
    @pytest.mark.parametrize(("model", "scheme", "runtime"), RUNS)
    def test_foretold_loaded_and_saved_are_the_same(
        self, model: str, scheme: str, runtime: str, loaded: Callable[..., Any], saved: Callable[..., Path]
    ) -> None:
        plan = sdquant.plan(sdquant.demo.path(model), scheme, runtime=runtime)
        pipe = loaded(scheme, model, runtime)
        assert plan.bytes == weight_bytes(pipe) == pipe.sdquant.plan.bytes
        for part in plan.components:
            assert part.bytes == weight_bytes(getattr(pipe, part.name))
            made = {name: packed.nbytes for name, packed in quantized(getattr(pipe, part.name))}
            assert {weight.name: weight.bytes for weight in part.weights} == made
        path = saved(scheme, model, runtime)
        assert sdquant.detect(path).bytes == plan.bytes == sdquant.plan(path).bytes

    @pytest.mark.parametrize("model", sdquant.demo.MODELS)
    def test_of_the_models_as_they_are(self, model: str, pipelines: dict[str, Any]) -> None:
        path = sdquant.demo.path(model)
        plan = sdquant.plan(path)
        assert plan.bytes == weight_bytes(pipelines[model]) == sdquant.detect(path).bytes
        assert plan.to_dict()["bytes_bf16"] == plan.bytes  # they are shipped in bf16
        assert all((part.action, part.weights, part.scheme) == ("keep", (), None) for part in plan.components)
        assert plan.to_dict()["bytes_bf16"] == sdquant.plan(path, "nf4").to_dict()["bytes_bf16"]

    @pytest.mark.parametrize("scheme", ["nf4", "qint4", "int4", "sdnq-uint4"])
    def test_after_loading_as_while_loading(self, scheme: str, sd: Path) -> None:
        plan = sdquant.plan(sd / "unet", scheme, mode="post")
        model = sdquant.load_model(sd / "unet", scheme, mode="post", progress=False)
        assert plan.bytes == weight_bytes(model) == sdquant.plan(sd / "unet", scheme).bytes
        assert plan.components[0].mode == "post"

    @pytest.mark.parametrize("dtype", ["float32", "float16"])
    @pytest.mark.parametrize("scheme", [None, "nf4", "qint8", "int4", "sdnq-int8"])
    def test_in_another_dtype(self, scheme: str | None, dtype: str, sd: Path) -> None:
        plan = sdquant.plan(sd / "unet", scheme, dtype=dtype)
        model = sdquant.load_model(sd / "unet", scheme, dtype=dtype, progress=False)
        assert plan.bytes == weight_bytes(model)
        assert plan.to_dict()["bytes_bf16"] == sdquant.detect(sd / "unet").bytes

    @pytest.mark.parametrize("scheme", ["q8_0", "q4_k", "q2_k", "bf16", "f32"])
    @pytest.mark.parametrize("model", sdquant.demo.MODELS)
    def test_of_gguf(self, model: str, scheme: str, saved: Callable[..., Path]) -> None:
        path = saved(scheme, model)
        assert sdquant.plan(path).bytes == weight_bytes(sdquant.load_model(path, progress=False))

    @pytest.mark.parametrize("name", FOREIGN)
    def test_of_what_others_wrote(self, name: str, foreign: Callable[[str], Path], sd: Path, flux: Path) -> None:
        made_of = (
            sd / "unet" if "quanto" in FOREIGN[name].evidence and "diffusers" not in name else flux / "transformer"
        )
        base = None if FOREIGN[name].config else made_of.parent
        plan = sdquant.plan(foreign(name), base=base)
        assert plan.bytes == weight_bytes(sdquant.load_model(foreign(name), base=base, progress=False))
        if base is None:
            assert plan.bytes == sdquant.detect(foreign(name)).bytes
        main = max(plan.components, key=lambda part: len(part.weights))
        assert (main.action, main.scheme, main.mode) == ("found", FOREIGN[name].quant, "found")
        # What they would take in bf16, which the files themselves do not say.
        original = load_file(made_of / WEIGHTS)
        for weight in main.weights:
            assert abs(weight.bytes_bf16 / original[weight.name].nbytes - 1) < 0.02

    def test_promises_of_the_readme(self, flux: Path) -> None:
        """Bytes of the quantized layers against bf16: DESIGN's numbers, on the model whose layers fit every group."""
        most = {8: 0.54, 6: 0.42, 4: 0.30, 3: 0.22, 2: 0.17}
        for row in ON_THE_FLY:
            if row.calibrated:  # SVDQuant's branch is large beside narrow layers
                continue
            parts = [part.to_dict() for part in sdquant.plan(flux / "transformer", row.name).components]
            share = parts[0]["quantized_bytes"] / parts[0]["quantized_bytes_bf16"]
            assert share <= most[int(row.bits)], row.name


class TestWhatWasAsked:
    def _schemes(self, plan: sdquant.Plan) -> dict[str, str | None]:
        return {part.name: part.scheme for part in plan.components}

    def test_by_default_the_unet_and_the_text_encoders(self, sd: Path, flux: Path) -> None:
        assert self._schemes(sdquant.plan(sd, "nf4")) == {"unet": "nf4", "text_encoder": "nf4", "vae": None}
        assert self._schemes(sdquant.plan(flux, "nf4")) == {
            "transformer": "nf4", "text_encoder": "nf4", "text_encoder_2": "nf4", "vae": None,
        }  # fmt: skip

    def test_components(self, sd: Path) -> None:
        assert self._schemes(sdquant.plan(sd, "nf4", components="unet")) == {
            "unet": "nf4", "text_encoder": None, "vae": None,
        }  # fmt: skip
        assert self._schemes(sdquant.plan(sd, "nf4", components=["vae"], runtime="plain")) == {
            "unet": None, "text_encoder": None, "vae": "nf4",
        }  # fmt: skip

    def test_a_scheme_for_each(self, sd: Path, loaded: Callable[..., Any]) -> None:
        quant = {"unet": "nf4", "vae": "int8"}
        plan = sdquant.plan(sd, quant)
        assert self._schemes(plan) == {"unet": "nf4", "text_encoder": None, "vae": "int8"}
        assert plan.bytes == weight_bytes(sdquant.load_model(sd, quant, progress=False))
        others = sdquant.plan(sd, {"unet": "nf4", "*": "int8", "text_encoder": "none"})
        assert self._schemes(others) == {"unet": "nf4", "text_encoder": None, "vae": None}
        others = sdquant.plan(sd, {"unet": "nf4", "*": "int8", "text_encoder": None})
        assert self._schemes(others) == {"unet": "nf4", "text_encoder": "int8", "vae": None}

    def test_none_is_as_it_is(self, sd: Path) -> None:
        assert sdquant.plan(sd, "none").bytes == sdquant.plan(sd).bytes
        assert self._schemes(sdquant.plan(sd, "none")) == {"unet": None, "text_encoder": None, "vae": None}

    @pytest.mark.parametrize(
        "values",
        [
            {"quant": "nf4", "components": ["transformer"]}, {"quant": {"transformer": "nf4"}},
            {"quant": {"unet": "nf4", "text_encoder_2": None}}, {"quant": "nf4", "components": ["unett", "vae"]},
        ],
    )  # fmt: skip
    def test_a_component_that_is_not_there(self, values: dict[str, Any], sd: Path) -> None:
        with pytest.raises(SettingsError) as caught:
            sdquant.plan(sd, **values)
        error = caught.value
        assert "Unknown component" in error.what and "unet, vae" in error.why and error.fix
        if "components" in values and "unett" in values["components"]:
            assert "Did you mean 'unet'?" in error.fix

    def test_nothing_that_would_be_quantized(self, sd: Path) -> None:
        rows: list[tuple[dict[str, Any], str]] = [
            ({"components": []}, "no weight that would be quantized"),
            ({"skip": "*"}, SKIPPED),
            ({"components": "vae"}, "bitsandbytes has no module for Conv2d layers"),
        ]
        for values, why in rows:
            with pytest.raises(IncompatibleError) as caught:
                sdquant.plan(sd, "nf4", **values)
            assert why in caught.value.why and caught.value.fix

    def test_quantized_already(self, saved: Callable[..., Path], sd: Path, tmp_path: Path) -> None:
        unet, *_ = sorted(sdquant.plan(saved("nf4")).components, key=lambda part: part.name != "unet")
        assert (unet.action, unet.scheme, unet.mode, unet.class_name) == (
            "found",
            "nf4",
            "found",
            "UNet2DConditionModel",
        )
        with pytest.raises(ConflictError, match="use the unquantized model"):
            sdquant.plan(saved("nf4"), {"unet": "fp4"})
        with pytest.raises(ConflictError, match="quantized to nf4"):
            sdquant.plan(saved("nf4"), "none")
        # One component quantized already, the other on the fly, in the same scheme.
        pipe = Path(shutil.copytree(sd, tmp_path / "pipe"))
        shutil.rmtree(pipe / "unet")
        shutil.copytree(saved("nf4") / "unet", pipe / "unet")
        plan = sdquant.plan(pipe, "nf4", runtime="plain")
        assert {part.name: part.action for part in plan.components} == {
            "unet": "found", "text_encoder": "encode", "vae": "keep",
        }  # fmt: skip
        assert plan.bytes == sdquant.detect(saved("nf4")).bytes
        mixed = sdquant.plan(pipe, {"text_encoder": "int8"})
        assert {part.name: part.scheme for part in mixed.components} == {
            "unet": "nf4", "text_encoder": "int8", "vae": None,
        }  # fmt: skip

    def test_a_gguf_scheme_on_float_weights(self, sd: Path) -> None:
        with pytest.raises(IncompatibleError) as caught:
            sdquant.plan(sd, "q4_k")
        assert "models cannot be quantized to GGUF at load time" in caught.value.why
        assert "sdquant quantize" in caught.value.fix


class TestSkip:
    NAMES = ("mid_block.attentions.0.proj_in", "down_blocks.1.attentions.0.transformer_blocks.0.attn2.to_k", "conv_in")

    @pytest.mark.parametrize(
        ("pattern", "hits"),
        [
            ("mid_block", (0,)), ("proj_in", (0,)), ("attentions.0", (0, 1)), ("attn2.to_k", (1,)), ("conv_in", (2,)),
            ("*", (0, 1, 2)), ("*.to_?", (1,)), ("down_blocks.*", (1,)), ("*proj_in", (0,)), ("conv_[io]n", (2,)),
            ("conv_[i]n", (2,)), ("mid", ()), ("block", ()), ("to_q", ()), ("attn2.to", ()), ("conv_in.weight", ()),
            ("Conv_in", ()),
        ],
    )  # fmt: skip
    def test_patterns(self, pattern: str, hits: tuple[int, ...]) -> None:
        assert [skipped(f"{name}.weight", (pattern,)) for name in self.NAMES] == [at in hits for at in range(3)]

    def test_what_is_skipped_stays_and_is_reported(self, sd: Path) -> None:
        plan = sdquant.plan(sd, "int8", skip=["attn2", "conv_in"])
        whole = sdquant.plan(sd, "int8")
        unet = next(part for part in plan.components if part.name == "unet")
        all_of_it = next(part for part in whole.components if part.name == "unet")
        gone = {weight.name for weight in all_of_it.weights} - {weight.name for weight in unet.weights}
        assert gone == {name for name, why in unet.kept.items() if why == SKIPPED}
        assert "conv_in.weight" in gone and len(gone) > 5
        assert all("attn2" in name or name == "conv_in.weight" for name in gone)
        assert plan.bytes > whole.bytes and plan.warnings == whole.warnings == ()
        assert plan.bytes == weight_bytes(sdquant.load_model(sd, "int8", skip=["attn2", "conv_in"], progress=False))

    @pytest.mark.parametrize("pattern", ["attn3", "*.to_z", "conv_out.weight", "norm1", "decoder"])
    def test_a_pattern_without_effect_is_said(self, pattern: str, sd: Path) -> None:
        """Of no module, of a norm that is never quantized, of a component that is not quantized."""
        plan = sdquant.plan(sd, "int8", skip=["conv_in", pattern])
        (line,) = plan.warnings
        assert repr(pattern) in line and "conv_in" not in line.replace(pattern, "")
        assert line in plan.to_dict()["warnings"]

    def test_nor_has_it_one_on_what_is_quantized_already(self, saved: Callable[..., Path]) -> None:
        assert "'conv_in'" in sdquant.plan(saved("int8"), skip=["conv_in"]).warnings[0]

    def test_components_without_effect(self, sd: Path) -> None:
        assert "components=" in sdquant.plan(sd, components=["unet"]).warnings[0]
        assert "components=" in sdquant.plan(sd, {"unet": "nf4"}, components=["unet"]).warnings[0]


@pytest.mark.parametrize(
    ("native", "dtype", "device", "is_slow"),
    [
        ("amx", "float16", "cpu", True), ("avx512bf16", "float16", "cpu", True), ("avx2", "float16", "cpu", False),
        ("amx", "bfloat16", "cpu", False), ("amx", "float16", "cuda", False),
    ],
)  # fmt: skip
@pytest.mark.parametrize("quant", [None, "nf4"])
def test_float16_is_slow_on_a_cpu_with_instructions_for_bfloat16(
    native: str, dtype: str, device: str, is_slow: bool, quant: str | None, sd: Path
) -> None:
    here = machine(card("cuda"), native=native)
    plan = prepare(make_request(sd, quant=quant, offload="none", dtype=dtype, device=device), here)
    assert ["float16" in line and "choose bfloat16" in line for line in plan.warnings] == [True] * is_slow


def test_the_dtype_of_a_file_is_slow_as_well(sd: Path, tmp_path: Path) -> None:
    """Where none is named, float16 stays; and files that were quantized have it beside their packed weights."""
    for quant in (None, "int8"):
        pipe = sdquant.load_model(sd, quant, dtype="float16", progress=False)
        pipe.save_pretrained(folder := tmp_path / str(quant))
        plan = prepare(make_request(folder, quant=None, offload="none"), machine(native="amx"))
        assert len(plan.warnings) == 1 and "choose bfloat16" in plan.warnings[0]


class TestKept:
    def test_every_float_weight_of_a_layer_is_quantized_or_has_a_reason(
        self, sd: Path, pipelines: dict[str, Any]
    ) -> None:
        for row in ON_THE_FLY:
            for runtime in row.runtimes:
                if (row.name, runtime) == ON_CARDS:
                    continue
                plan = sdquant.plan(sd, row.name, runtime=runtime)
                for part in plan.components:
                    layers = {
                        f"{name}.weight"
                        for name, module in getattr(pipelines["digits-sd"], part.name).named_modules()
                        if kind_of(module) in ("linear", "conv")
                    }
                    planned = {weight.name for weight in part.weights}
                    assert planned | set(part.kept) == (layers if part.action == "encode" else set())
                    assert not planned & set(part.kept) and all(part.kept.values())

    def test_reasons(self, sd: Path) -> None:
        def kept(scheme: str, runtime: str) -> dict[str, str]:
            plan = sdquant.plan(sd / "unet", scheme, runtime=runtime)
            return dict(plan.components[0].kept)

        assert kept("int8", "plain") == kept("qint8", "library") == {}
        library = kept("nf4", "library")
        assert "conv_in.weight" in library and "runtime=plain" in library["conv_in.weight"]
        assert kept("nf4", "plain") == {}
        assert "input channels" in kept("sdnq-uint4", "plain")["conv_in.weight"]


def _full_size() -> dict[str, Callable[[], nn.Module]]:
    """Models at the sizes that people run, without memory: layer counts of Flux, SD3 and T5 cut down."""
    import diffusers
    import transformers
    from accelerate import init_empty_weights

    def unet(**values: Any) -> Callable[[], nn.Module]:
        return lambda: diffusers.UNet2DConditionModel(**values)

    rows: dict[str, Callable[[], nn.Module]] = {
        "sd1.5 unet": unet(cross_attention_dim=768, attention_head_dim=8, sample_size=64),
        "sd2.1 unet": unet(
            cross_attention_dim=1024, attention_head_dim=[5, 10, 20, 20], use_linear_projection=True, sample_size=96
        ),
        "x4 upscaler unet": unet(cross_attention_dim=1024, num_class_embeds=1000, in_channels=7),
        "sdxl unet": unet(
            addition_embed_type="text_time", addition_time_embed_dim=256, attention_head_dim=[5, 10, 20],
            block_out_channels=(320, 640, 1280), cross_attention_dim=2048,
            down_block_types=("DownBlock2D", "CrossAttnDownBlock2D", "CrossAttnDownBlock2D"),
            up_block_types=("CrossAttnUpBlock2D", "CrossAttnUpBlock2D", "UpBlock2D"),
            transformer_layers_per_block=[1, 2, 10], use_linear_projection=True,
            projection_class_embeddings_input_dim=2816, sample_size=128,
        ),
        "flux": lambda: diffusers.FluxTransformer2DModel(num_layers=2, num_single_layers=2, guidance_embeds=True),
        "sd3": lambda: diffusers.SD3Transformer2DModel(num_layers=2, pos_embed_max_size=192),
        "dit": lambda: diffusers.DiTTransformer2DModel(num_layers=2),
        "wan": lambda: diffusers.WanTransformer3DModel(num_layers=1),
        "vae": lambda: diffusers.AutoencoderKL(
            block_out_channels=(128, 256, 512, 512), down_block_types=("DownEncoderBlock2D",) * 4,
            up_block_types=("UpDecoderBlock2D",) * 4, layers_per_block=2, latent_channels=16,
        ),
        "clip l": lambda: transformers.CLIPTextModel(
            transformers.CLIPTextConfig(hidden_size=768, intermediate_size=3072, num_attention_heads=12)
        ),
        "clip g": lambda: transformers.CLIPTextModelWithProjection(
            transformers.CLIPTextConfig(
                hidden_size=1280, intermediate_size=5120, num_attention_heads=20, num_hidden_layers=32,
                projection_dim=1280,
            )
        ),
        "t5 xxl": lambda: transformers.T5EncoderModel(
            transformers.T5Config(
                d_model=4096, d_ff=10240, d_kv=64, num_heads=64, num_layers=2, feed_forward_proj="gated-gelu"
            )
        ),
        "umt5": lambda: transformers.UMT5EncoderModel(transformers.UMT5Config(num_layers=2)),
        "qwen2": lambda: transformers.Qwen2ForCausalLM(
            transformers.Qwen2Config(num_hidden_layers=1, tie_word_embeddings=False)
        ),
        "bert": lambda: transformers.BertModel(transformers.BertConfig(num_hidden_layers=1)),
        "clip vision": lambda: transformers.CLIPVisionModelWithProjection(transformers.CLIPVisionConfig()),
    }  # fmt: skip

    def without_memory(make: Callable[[], nn.Module]) -> Callable[[], nn.Module]:
        def made() -> nn.Module:
            with init_empty_weights():
                return make()

        return made

    return {name: without_memory(make) for name, make in rows.items()}


class TestNamesTellTheLayers:
    """The plan knows names and shapes only; the model knows its modules. They must say the same."""

    @staticmethod
    def _compare(model: nn.Module) -> None:
        shapes = {name: (tuple(t.shape), str(t.dtype).removeprefix("torch.")) for name, t in model.state_dict().items()}
        real = {f"{name}.weight": kind_of(module) for name, module in model.named_modules() if kind_of(module)}
        assert dict(candidates(shapes)) == real and real
        tables = [f"{name}.weight" for name, module in model.named_modules() if isinstance(module, nn.Embedding)]
        planned, _ = select(shapes, backends.parse("int8"), "plain", ())
        assert not {weight.name for weight in planned} & set(tables)

    @pytest.mark.parametrize("model", sdquant.demo.MODELS)
    def test_of_the_shipped_models(self, model: str, pipelines: dict[str, Any]) -> None:
        for part in pipelines[model].components.values():
            if isinstance(part, nn.Module):
                self._compare(part)

    def test_of_models_in_full_size(self) -> None:
        for name, make in _full_size().items():
            model = make()
            assert all(parameter.device.type == "meta" for parameter in model.parameters()), name
            self._compare(model)

    def test_sizes_in_full(self) -> None:
        """The plan's arithmetic at sizes that no test loads: the UNet of SDXL and the layers of T5-XXL."""
        for name in ("sdxl unet", "t5 xxl"):
            model = _full_size()[name]()
            shapes = {key: (tuple(t.shape), "bfloat16") for key, t in model.state_dict().items()}
            for scheme, most in {"nf4": 0.30, "int8": 0.54, "qint4": 0.30, "qint3": 0.22, "sdnq-uint4": 0.31}.items():
                weights, kept = select(shapes, backends.parse(scheme), "plain", ())
                assert sum(w.bytes for w in weights) <= most * sum(w.bytes_bf16 for w in weights)
                assert len(kept) <= 2, kept


class TestPlan:
    @pytest.mark.parametrize("quant", [None, "nf4", {"unet": "int8"}])
    def test_as_json(self, quant: Any, sd: Path) -> None:
        plan = sdquant.plan(sd, quant, "balanced", budget="1MB", skip="conv_in")
        values = plan.to_dict()
        assert json.loads(json.dumps(values)) == values
        assert (values["budget"], values["offload"], values["container"]) == (1_000_000, "balanced", "pipeline")
        assert [part["name"] for part in values["components"]] == ["text_encoder", "unet", "vae"]
        assert values["bytes"] == sum(part["bytes"] for part in values["components"]) == plan.bytes

    def test_options_are_part_of_it(self, sd: Path) -> None:
        plan = sdquant.plan(sd / "unet", "nf4,double_quant", runtime="plain")
        assert plan.to_dict()["components"][0]["scheme"] == "nf4,double_quant"
        assert plan.bytes < sdquant.plan(sd / "unet", "nf4", runtime="plain").bytes

    def test_it_reads_no_weights(self, sd: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        from sdquant.formats import safetensors

        def refuse(*_: object) -> None:
            raise AssertionError("a weight was read")

        monkeypatch.setattr(safetensors.SafetensorsFile, "__init__", refuse)
        assert sdquant.plan(sd, "nf4").bytes

    def test_a_lone_transformer_with_its_base(self, saved: Callable[..., Path], flux: Path) -> None:
        file = saved("q8_0", "digits-flux") / "transformer" / "model.gguf"
        plan = sdquant.plan(file, base=flux)
        pipe = sdquant.load_model(file, base=flux, progress=False)
        assert plan.bytes == weight_bytes(pipe)
        assert {part.name: part.action for part in plan.components} == {
            "transformer": "found", "text_encoder": "keep", "text_encoder_2": "keep", "vae": "keep",
        }  # fmt: skip


def test_torch_is_what_it_is_about() -> None:
    """Dtypes that the plan counts exist in torch under these names, with these sizes."""
    from sdquant.core.backend import DTYPE_BITS

    assert {name: getattr(torch, name).itemsize * 8 for name in DTYPE_BITS} == dict(DTYPE_BITS)
