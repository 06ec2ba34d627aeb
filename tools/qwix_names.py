"""What each name of Qwix at aa623acb and MaxDiffusion is here: the rows of the tables in docs/rules.md.

A row says where the thing is here, as references that a test looks up: "sdquant.rules.QArray" is an attribute,
"QtRule.bwd_qtype" a field, "key quantization" a key of a config file, "sdquant calibrate" a command. Without any, the
note says why there is none.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Row:
    """A name.

    Attributes:
        theirs: as they write it. ours: references. note: what differs, or why it is not here.
    """

    theirs: str
    ours: tuple[str, ...] = ()
    note: str = ""


R = "sdquant.rules."

# qwix/__init__.py
QWIX = (
    Row("quantize_model", (f"{R}quantize_model",), "of any torch module; sample inputs are optional, and `methods=` is "
        "not needed: layers are exchanged, so that every method of a model sees them"),
    Row("quantize_params", (f"{R}quantize_params", f"{R}assign", f"{R}load_params", f"{R}missing_params",
        f"{R}require_complete"), "tensor by tensor from disk, and a check that nothing is missing"),
    Row("PtqProvider", (f"{R}PtqProvider",), "float weights may be fed to its model at any time"),
    Row("QtProvider", (f"{R}QtProvider",)),
    Row("QtRule", (f"{R}QtRule",)),
    Row("QuantizationRule", (f"{R}QuantizationRule",)),
    Row("QuantizationProvider", ("sdquant.rules.providers.ptq.Provider",), "a protocol: a class with rules, `layer`"),
    Row("QuantizationProvider.get_unused_rules", ("sdquant.rules.PtqProvider.get_unused_rules",
        "sdquant.rules.QtProvider.get_unused_rules"), "also logged, and in the warnings of a plan"),
    Row("LoraProvider", ("sdquant.lora.add_lora",), "PEFT on packed layers of every scheme"),
    Row("LoraRule", ("sdquant.lora.add_lora",), "rank, alpha, ... are its arguments; the base has rules of its own"),
    Row("apply_lora_to_model", ("sdquant.lora.add_lora", "sdquant.lora.save_lora")),
    Row("OdmlQatProvider", (), "for LiteRT on phones, which runs no diffusers model"),
    Row("OdmlConversionProvider", (), "the same"),
    Row("QArray", (f"{R}QArray",), "layers keep it packed, as `packed_qvalue`, `packed_scale`, ..."),
    Row("quantize", (f"{R}quantize", f"{R}HowToQuantize")),
    Row("dequantize", (f"{R}dequantize",)),
    Row("dot_general", ("sdquant.rules.core.dot_general.linear", "sdquant.rules.core.batched_matmul.multiply")),
    Row("dot", ("sdquant.rules.core.dot_general.linear",)),
    Row("einsum", ("sdquant.rules.core.einsum.einsum",), "of two operands"),
    Row("conv_general_dilated", ("sdquant.rules.core.conv_general.convolve",),
        "weights alone, types that differ, and zero points of weights as well"),
    Row("ragged_dot", (), "experts of diffusers' models are ordinary linear layers, which rules are for"),
    Row("ragged_dot_general", (), "the same"),
    Row("QuantStat", ("sdquant.rules.qt.statistics.QuantStat",), "sums are exact, so that their order does not matter"),
    Row("process_prequantized_params", (f"{R}process_prequantized_params",)),
    Row("restore_quantization_rules", (f"{R}restore_quantization_rules",), "tiles are inferred from the scales; "
        "activations are floats unless `act_qtype` is given; layers that differ from their neighbours get rules too"),
    Row("contrib", (), "AWQ, GPTQ, SmoothQuant, QEP, Hadamard rotations, padding and sparsity: not part of Qwix's own "
        "flow, and made for language models"),
    Row("pallas", (), "kernels for TPUs; integer products here are by sdquant's kernels in C, or torch's"),
)  # fmt: skip

# QuantizationRule, QtRule, LoraRule
FIELDS = (
    Row("module_path", ("QuantizationRule.module_path",), "matched with dots and with slashes: `blocks.0.attn` and "
        "`blocks/0/attn` are one path; torch's names differ from Flax's (`blocks.0` is `blocks_0` there)"),
    Row("op_names", ("QuantizationRule.op_names",), "torch's names too: linear, conv2d, matmul, sdpa, ...; products of "
        "two activations only where they are named"),
    Row("weight_qtype", ("QuantizationRule.weight_qtype",), "names as text"),
    Row("act_qtype", ("QuantizationRule.act_qtype",)),
    Row("tile_size", ("QuantizationRule.tile_size",), "of convolutions' weights, too"),
    Row("act_static_scale", ("QuantizationRule.act_static_scale",), "of products of two activations, too: buffers "
        "`<op_id>_lhs_scale` of their module"),
    Row("weight_calibration_method", ("QuantizationRule.weight_calibration_method",)),
    Row("act_calibration_method", ("QuantizationRule.act_calibration_method",)),
    Row("act_batch_axes", ("QuantizationRule.act_batch_axes",), "default: all axes but the summed one, where Qwix has "
        "`(0,)`, which ties a model to one sequence length"),
    Row("bwd_qtype", ("QtRule.bwd_qtype",)),
    Row("bwd_calibration_method", ("QtRule.bwd_calibration_method",)),
    Row("bwd_weight_grad_tile_size", ("QtRule.bwd_weight_grad_tile_size",)),
    Row("disable_channelwise_axes", ("QtRule.disable_channelwise_axes",)),
    Row("bwd_stochastic_rounding", ("QtRule.bwd_stochastic_rounding",)),
    Row("channelwise_noise_axes", ("QtRule.channelwise_noise_axes",)),
    Row("additional_qt_config", (), "overrides of single operands inside one product; write a rule for the layer"),
    Row("rank, alpha, dropout, lora_a_initializer, lora_b_initializer", ("sdquant.lora.add_lora",),
        "of LoraRule; first values are PEFT's"),
)  # fmt: skip

# MaxDiffusion's keys about quantization
KEYS = (
    Row("quantization", ("key quantization",), "in force for every model; there the AQT path is not connected"),
    Row("use_qwix_quantization", ("key use_qwix_quantization",), "false chooses a scheme of a backend"),
    Row("qwix_module_path", ("key qwix_module_path",)),
    Row("weight_quantization_calibration_method", ("key weight_quantization_calibration_method",), "for every mode"),
    Row("act_quantization_calibration_method", ("key act_quantization_calibration_method",), "for every mode"),
    Row("bwd_quantization_calibration_method", ("key bwd_quantization_calibration_method",)),
    Row("quantization_calibration_method", (), "their older name for the three above, which nothing reads"),
    Row("compile_topology_num_slices", ("key compile_topology_num_slices",), "not set: nodes, or accelerators"),
    Row("quantization_local_shard_count", ("key quantization_local_shard_count", "QtRule.bwd_weight_grad_shards")),
    Row("replicate_quant_scale", (), "a layout of TPU meshes; in no config of theirs"),
    Row("run_name, output_dir, per_device_batch_size",
        ("key run_name", "key output_dir", "key per_device_batch_size")),
)  # fmt: skip

# What else their pages and code speak of
REST = (
    Row("key=value after the config", ("sdquant generate", "sdquant train")),
    Row("quantize_transformer (after loading)", ("sdquant.quantize", "sdquant.load_model"),
        "while loading as well; weights are stored quantized, which saves the memory"),
    Row("jax.eval_shape", (f"{R}quantize_model",), "of a model on the meta device: a template that allocates nothing"),
    Row("WithAux.how", ("sdquant.rules.HowToQuantize",), "`.how` of a template's parameters"),
    Row("pipelined loading", (f"{R}load_params", "sdquant.load_model")),
    Row("offline quantization", ("sdquant.save", "sdquant quantize"), "with a version, in safetensors"),
    Row("the rules of a saved model", (f"{R}rules_of_model",)),
    Row("online quantization in diffusers", ("sdquant.Config",)),
    Row("apply(..., mutable='quant_stats')", ("sdquant.rules.collecting", "sdquant.rules.quant_stats",
        "sdquant calibrate")),
    Row("interception of operations", ("sdquant.rules.interception.mark",),
        "for products of activations; weights are in layers of their own"),
    Row("training loops", ("sdquant train",), "accelerate is the engine"),
    Row("disable_jit", (), "torch runs eagerly unless it is compiled"),
    Row(
        "shardings, logical axes", ("sdquant.utils.distributed.processes",), "processes of `torchrun`; no layer is cut"
    ),
    Row("hijax QArray", (), "of JAX's tracing"),
    Row("checkpoints (orbax)", ("sdquant train", "sdquant.save")),
    Row("profiling, comparing", ("sdquant compare",)),
)  # fmt: skip

TABLES = {"names_qwix": QWIX, "names_fields": FIELDS, "names_keys": KEYS, "names_rest": REST}


def shown(reference: str) -> str:
    """A reference as the page has it."""
    return f"`{reference.removeprefix('key ')}`"
