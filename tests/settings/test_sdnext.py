"""SD.Next's options become settings, or a sentence says why one does not."""

from __future__ import annotations

import json
from typing import Any

import pytest

from sdquant import SettingsError, backends
from sdquant.compat.hardware import Device, Machine
from sdquant.planning.settings_fields import fields
from sdquant.settings import Settings
from sdquant.settings.file import dumps
from sdquant.settings.sdnext import LEFT, QUANTIZERS, ROLES_OF, read, read_any

CARD = Device(kind="cuda", index=0, name="a card", memory_total=12_000_000_000, memory_free=11_000_000_000)
CPU = Device(kind="cpu", index=0, name="a CPU", memory_total=32_000_000_000, memory_free=30_000_000_000)


def machine(*devices: Device) -> Machine:
    return Machine(
        platform="linux", wsl=False, python="3.11", devices=devices, ram_total=32_000_000_000,
        ram_available=30_000_000_000, has_compiler=True, has_ninja=True, has_triton=False,
    )  # fmt: skip


def taken(**config: Any) -> dict[str, Any]:
    """The settings of a config of which everything is taken."""
    found = read(json.dumps(config), machine=machine(CARD, CPU))
    assert set(found.taken) == set(config) and found.left == ()
    return found.settings.to_dict()


def left(**config: Any) -> dict[str, str]:
    """The sentences of a config, by option."""
    return dict(read(json.dumps(config)).left)


class TestTaken:
    @pytest.mark.parametrize(
        ("config", "settings"),
        [
            ({"bnb_quantization": ["Model"]}, {"quant.model": "nf4"}),
            ({"bnb_quantization": ["Model", "TE"], "bnb_quantization_type": "fp4"},
             {"quant.model": "fp4", "quant.text_encoder": "fp4"}),
            ({"bnb_quantization": ["VAE"], "bnb_quantization_type": "fp8"}, {"quant.vae": "bnb-int8"}),
            ({"quanto_quantization": ["TE"]}, {"quant.text_encoder": "qint8"}),
            ({"quanto_quantization": ["TE"], "quanto_quantization_type": "float8"}, {"quant.text_encoder": "qfloat8"}),
            ({"optimum_quanto_weights": ["Model"], "optimum_quanto_weights_type": "qfloat8_e4m3fn"},
             {"quant.model": "qfloat8", "mode": "post"}),
            ({"optimum_quanto_weights": ["Text Encoder"], "optimum_quanto_weights_type": "qint2"},
             {"quant.text_encoder": "qint2", "mode": "post"}),
            ({"nncf_compress_weights": ["Model", "VAE"]}, {"quant.model": "int8_sym", "quant.vae": "int8_sym"}),
            ({"nncf_compress_weights": ["Model"], "nncf_compress_weights_mode": "INT4_ASYM"}, {"quant.model": "int4"}),
            ({"sdnq_quantize_weights": ["Model"]}, {"quant.model": "sdnq-int8"}),
            ({"sdnq_quantize_weights": ["Model", "TE"], "sdnq_quantize_weights_mode": "uint4",
              "sdnq_quantize_weights_mode_te": "int8", "sdnq_quantize_mode": "post"},
             {"quant.model": "sdnq-uint4", "quant.text_encoder": "sdnq-int8", "mode": "post"}),
            ({"sdnq_quantize_weights": ["TE"], "sdnq_quantize_weights_mode_te": "Same as model",
              "sdnq_group_size": 128, "sdnq_modules_to_not_convert": "proj_out; norm|time_embed, x"},
             {"quant.text_encoder": "sdnq-int8,group_size=128", "skip": ["proj_out", "norm", "time_embed", "x"]}),
            ({"sdnq_quantize_weights": ["Model"], "sdnq_group_size": 64, "sdnq_use_svd": True, "sdnq_svd_rank": 64,
              "sdnq_use_hadamard": True, "sdnq_use_dynamic_quantization": True},
             {"quant.model": "sdnq-int8,group_size=64,hadamard,svd,rank=64,dynamic"}),
            ({"diffusers_offload_mode": "group"}, {"offload": "group"}),
            ({"diffusers_offload_mode": "none"}, {}),
            ({"diffusers_seq_cpu_offload": True}, {"offload": "sequential"}),
            ({"diffusers_model_cpu_offload": True}, {"offload": "model"}),
            ({"diffusers_offload_mode": "balanced", "diffusers_offload_max_gpu_memory": 0.6},
             {"offload": "balanced", "budget": "7.2GB"}),
            ({"diffusers_offload_mode": "balanced", "diffusers_offload_max_gpu_memory": 5.25},
             {"offload": "balanced", "budget": "5.2GB"}),
        ],
    )  # fmt: skip
    def test_all_of_it(self, config: dict[str, Any], settings: dict[str, Any]) -> None:
        assert taken(**config) == settings

    def test_what_the_matrix_refuses_is_taken_too(self) -> None:
        assert taken(bnb_quantization=["Model"], diffusers_offload_mode="sequential") == {
            "quant.model": "nf4",
            "offload": "sequential",
        }

    def test_what_is_off_is_nothing(self) -> None:
        found = read(
            json.dumps({"bnb_quantization": [], "torchao_quantization": [], "diffusers_seq_cpu_offload": False})
        )
        assert (found.settings, found.taken, found.left) == (Settings(), (), ())


class TestTwoForOnePart:
    def test_sdnext_asks_sdnq_then_bitsandbytes_then_quanto(self) -> None:
        every = {row.targets: ["Model"] for row in reversed(QUANTIZERS)}
        for row in QUANTIZERS:
            found = read(json.dumps(every))
            assert found.settings["quant.model"] == row.schemes[row.default]
            assert found.taken == (row.targets,)
            assert dict(found.left) == {
                name: f"{row.title} is ticked for Model too and takes precedence in SD.Next"
                for name in every
                if name != row.targets
            }
            del every[row.targets]

    def test_an_option_may_be_taken_for_one_part_and_left_for_another(self) -> None:
        found = read(json.dumps({"bnb_quantization": ["Model", "TE"], "sdnq_quantize_weights": ["Model"]}))
        assert found.settings.to_dict() == {"quant.model": "sdnq-int8", "quant.text_encoder": "nf4"}
        assert found.taken == ("sdnq_quantize_weights", "bnb_quantization")
        assert [name for name, _ in found.left] == ["bnb_quantization"]

    def test_modes_that_differ(self) -> None:
        found = read(json.dumps({"bnb_quantization": ["Model"], "optimum_quanto_weights": ["TE"]}))
        assert found.settings.to_dict() == {"quant.model": "nf4", "quant.text_encoder": "qint8"}
        assert "all components share one mode" in dict(found.left)["optimum_quanto_weights"]


class TestLeft:
    @pytest.mark.parametrize(
        ("config", "option", "said"),
        [
            ({"torchao_quantization": ["Model"]}, "torchao_quantization", "only reads TorchAO"),
            ({"torchao_quantization_type": "int8_weight_only"}, "torchao_quantization_type", "only reads TorchAO"),
            ({"layerwise_quantization": ["Model"]}, "layerwise_quantization", "fp8"),
            ({"trt_quantization": ["Model"]}, "trt_quantization", "TensorRT"),
            ({"nncf_compress_weights_ratio": 0.5}, "nncf_compress_weights_ratio", "nothing like it"),
            ({"optimum_quanto_activations_type": "qint8"}, "optimum_quanto_activations_type", "setting of their own"),
            ({"sdnq_use_svd": True}, "sdnq_use_svd", "no effect"),
            ({"sdnq_quantize_weights": ["Model"], "sdnq_svd_rank": 64}, "sdnq_svd_rank", "without svd"),
            ({"diffusers_offload_never": "T5"}, "diffusers_offload_never", "by need"),
            ({"bnb_quantization": ["LLM"]}, "bnb_quantization", "LLM is not loaded by sdquant"),
            ({"bnb_quantization": ["Soul"]}, "bnb_quantization", "Soul is not a component that sdquant knows"),
            ({"bnb_quantization": "Model"}, "bnb_quantization", "not a list"),
            ({"bnb_quantization": [["Model"]]}, "bnb_quantization", "not a list"),
            ({"bnb_quantization_type": "fp4"}, "bnb_quantization_type", "no effect"),
            ({"bnb_quantization": ["Model"], "bnb_quantization_type": ["nf4"]}, "bnb_quantization_type", "not ['nf4']"),
            ({"sdnq_quantize_weights": ["Model"], "sdnq_quantize_weights_mode": "uint2"},
             "sdnq_quantize_weights_mode", "not uint2"),
            ({"optimum_quanto_weights": ["Model"], "optimum_quanto_weights_type": "qfloat8_e5m2"},
             "optimum_quanto_weights_type", "not qfloat8_e5m2"),
            ({"nncf_compress_weights": ["TE"], "nncf_compress_weights_mode": "NF4"},
             "nncf_compress_weights_mode", "not nf4"),
            ({"sdnq_quantize_weights": ["Model"], "sdnq_group_size": 100}, "sdnq_group_size", "group_size"),
            ({"sdnq_quantize_weights": ["Model"], "sdnq_quantize_mode": "later"}, "sdnq_quantize_mode", "mode"),
            ({"diffusers_offload_mode": "smart"}, "diffusers_offload_mode", "smart"),
            ({"diffusers_offload_mode": {"a": 1}}, "diffusers_offload_mode", "must be a string"),
            ({"diffusers_offload_mode": "model", "diffusers_offload_max_gpu_memory": 6},
             "diffusers_offload_max_gpu_memory", "only balanced offload keeps to a budget"),
            ({"diffusers_offload_mode": "balanced", "diffusers_offload_max_gpu_memory": 0.6},
             "diffusers_offload_max_gpu_memory", "share of the graphics card's memory"),
            ({"diffusers_offload_mode": "balanced", "diffusers_offload_max_gpu_memory": -1},
             "diffusers_offload_max_gpu_memory", "not a share"),
            ({"diffusers_offload_mode": "balanced", "diffusers_offload_max_gpu_memory": "0.6"},
             "diffusers_offload_max_gpu_memory", "not a share"),
            ({"diffusers_offload_mode": "balanced", "diffusers_seq_cpu_offload": True},
             "diffusers_seq_cpu_offload", "already sets it"),
        ],
    )  # fmt: skip
    def test_with_a_sentence(self, config: dict[str, Any], option: str, said: str) -> None:
        why = left(**config)[option]
        assert said in why and len(why) < 400 and not why.endswith(".")

    def test_what_cannot_be_taken_gives_way_to_the_next(self) -> None:
        found = read(json.dumps({
            "sdnq_quantize_weights": ["Model"], "sdnq_quantize_weights_mode": "uint2", "bnb_quantization": ["Model"],
        }))  # fmt: skip
        assert found.settings.to_dict() == {"quant.model": "nf4"}

    def test_a_share_of_a_machine_without_a_card(self) -> None:
        config = {"diffusers_offload_mode": "balanced", "diffusers_offload_max_gpu_memory": 0.6}
        found = read(json.dumps(config), machine=machine(CPU))
        assert found.settings.to_dict() == {"offload": "balanced"}

    def test_other_options_are_not_spoken_of(self) -> None:
        config = {
            "sd_model_checkpoint": "a",
            "samples_save": True,
            "huggingface_token": "secret",
            "bnb_quantization": ["TE"],
        }
        assert read(json.dumps(config)).left == ()


class TestAny:
    def test_settings_of_sdquant(self) -> None:
        settings = Settings({"quant.model": "nf4", "offload": "balanced", "budget": "6GB"})
        found = read_any(dumps(settings))
        assert (found.settings, found.left) == (settings, ())
        assert found.taken == ("quant.model", "offload", "budget")

    def test_a_config(self) -> None:
        assert read_any('{"bnb_quantization": ["Model"]}').settings["quant.model"] == "nf4"
        assert read_any('{"torchao_quantization": ["Model"]}').left

    @pytest.mark.parametrize(
        "text",
        ["", "[1]", "null", "{}", '{"samples_save": true}', "[" * 9999, '{"format": "sdquant-settings", "version": 7}'],
    )
    def test_neither(self, text: str) -> None:
        with pytest.raises(SettingsError) as caught:
            read_any(text)
        assert caught.value.fix


class TestTables:
    def test_schemes_and_roles_are_those_of_sdquant(self) -> None:
        names = {row.name for row in fields()}
        assert {f"quant.{role}" for role in ROLES_OF.values() if role} <= names
        for row in QUANTIZERS:
            assert row.default in row.schemes
            assert all(backends.scheme(name).name == name for name in row.schemes.values())

    def test_no_pattern_of_what_is_left_takes_another_words_place(self) -> None:
        """Every row is the first to match something."""
        names = [
            "torchao_quantization", "layerwise_quantization", "trt_quantization", "nunchaku_offload", "nncf_quantize",
            "optimum_quanto_activations_type", "bnb_quantization_storage", "models_not_to_quant",
            "sdnq_modules_dtype_dict", "diffusers_offload_min_gpu_memory", "diffusers_offload_always", "sdnq_svd_steps",
        ]  # fmt: skip
        said = [left(**{name: 1})[name] for name in names]
        assert said == [why for _, why in LEFT]
