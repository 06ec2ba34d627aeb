"""What was tried as a user, from public bug reports, and failed at b11ebff: each piece, and what tries it again.

    pytest -m field

runs these tests and no others, the slow ones among them. A piece ends right, held against the same without sdquant,
without offload or without the thing under test, or with an SdquantError that names the thing and the way out.

T01 to T29 are the numbers of the reports that failed (those that passed have no row), Q1 to Q9 those of a comparison
with the real Qwix and with MaxDiffusion's pages, S what both called small.
"""

from __future__ import annotations

from dataclasses import dataclass

MODES = ("model", "sequential", "balanced", "group")


@dataclass(frozen=True)
class Piece:
    """A row.

    Attributes:
        number: of the report. what: was tried.
        tests: node ids; one without brackets means the test with all of its parameters.
    """

    number: str
    what: str
    tests: tuple[str, ...]


def _actions(*names: str, modes: tuple[str, ...] = MODES) -> tuple[str, ...]:
    """What people do to a pipeline, in these offload modes, with sdquant's layers."""
    place = "tests/offload/test_changes.py::test_an_action"
    return tuple(f"{place}[{name}-int8-plain-{mode}]" for name in names for mode in modes)


def _each(test: str, *parameters: str) -> tuple[str, ...]:
    return tuple(f"{test}[{one}]" for one in parameters)


_OWN = "tests/field/test_pieces.py::"
_ENCODERS = ("Qwen2_5_VL", "Qwen2VL", "Gemma3", "Mistral3", "Llava")
_RENAMED = (*(f"{name}ForConditionalGeneration" for name in _ENCODERS), "Dinov2Model")
_PLACES = "tests/test_component_places.py::"
_TRAINING = "tests/offload/test_training.py::"
_RECIPE = f"{_TRAINING}test_the_docs_recipe_trains_as_without_offload"
_FLOAT32 = "tests/test_keep_in_fp32.py::"
_THREADS = "tests/offload/test_threads.py::"
_COMPILE = "tests/offload/test_compile.py::"
_METHODS = "tests/formats/test_methods.py::"
_KINDS = "tests/test_library_kinds.py::"
_FLOATS = "tests/test_float_state_dicts.py::"
_LOADERS = "tests/test_loaders_of_libraries.py::"
_REACH = "tests/rules/test_rule_matches.py::"
_CONFIG = "tests/config/test_loading.py::"
_BAD = "tests/test_bad_input.py::"

PIECES = (
    Piece("T01", "vision-language text encoders, whose names in files are others",
          _each("tests/test_encoders.py::test_floats", *_RENAMED)),
    Piece("T01", "the same in nf4, int8 and others, planned, saved, verified",
          _each("tests/test_encoders.py::test_quantized", *(f"{name}-{quant}" for name in _RENAMED
                                                            for quant in ("nf4", "int8")))),
    Piece("T01", "a whole QwenImagePipeline with its transformer in nf4, by call and by command",
          (f"{_OWN}test_qwen_image_by_call_and_by_command",)),
    Piece("T01", "FLUX.2, Kandinsky 5 and other pipelines of today, whole",
          ("tests/pipelines/test_pipelines.py::test_a_pipeline_of_today",)),
    Piece("T02", "a lone low-noise file with a base", (f"{_PLACES}test_a_lone_one_by_its_name_says_so",)),
    Piece("T02", "a pair of files, in either order", (f"{_PLACES}test_a_pair_by_its_names",)),
    Piece("T02", "a file whose name tells nothing, and parts= that says it",
          (f"{_PLACES}test_a_name_that_says_nothing_is_refused", f"{_PLACES}test_the_user_says_it")),
    Piece("T02", "two text encoders of one kind and size", (f"{_PLACES}test_which_text_encoder",)),
    Piece("T03", "the docs' training of a LoRA with offload, gradients compared",
          _each(_RECIPE, *(f"{quant}-{mode}-{kind}" for quant in ("int8", "nf4") for mode in ("model", "balanced")
                           for kind in ("None", "False", "True")))),
    Piece("T03", "gradients in modes that do not give them", (f"{_TRAINING}test_gradients_of_inputs",)),
    Piece("T03", "a LoRA where it cannot be trained",
          (f"{_TRAINING}test_a_lora_is_not_added_where_it_cannot_be_trained",)),
    Piece("T03", "a LoRA's parameters: float32, written in place, never moved",
          (f"{_TRAINING}test_a_lora_that_is_trained_is_never_moved",)),
    Piece("T04", "T5 in float16, by dtype= and as the file has it",
          (f"{_FLOAT32}test_t5_in_float16", f"{_FLOAT32}test_quantized_it_is_as_right_as_in_float32",
           f"{_FLOAT32}test_through_transformers")),
    Piece("T04", "Wan's parameters in the dtypes of from_pretrained", (f"{_FLOAT32}test_wan",)),
    Piece("T05", "textual inversion on an offloaded pipeline",
          _actions("textual_inversion", "textual_inversion_unloaded")),
    Piece("T05", "other calls that exchange or add modules",
          _actions("ip_adapter_loaded", "ip_adapter_unloaded", "resized_embeddings", "fused_projections")),
    Piece("T06", "writes into packed weights that have nothing to do with a LoRA",
          (f"{_FLOATS}test_the_way_out_fits_the_write",)),
    Piece("T08", "pipe.to(float32) of a quantized pipeline, and a pipeline made from it",
          ("tests/test_casts.py::test_a_cast_is_told_once", f"{_OWN}test_a_cast_of_a_pipeline_is_told")),
    Piece("T09", "pipe.to(dtype) and pipe.to('cpu') of an offloaded pipeline",
          _actions("pipe_to_dtype", "components_to_dtype", "pipe_to_cpu")),
    Piece("T09", "from_pipe of an offloaded pipeline, and the pipeline it was made from",
          _actions("from_pipe", "image_to_image", "auto_pipeline")),
    Piece("T12", "what group and sequential failed at with a raw error",
          _actions("other_weights", "another_layer", "adapter_by_peft", "deep_copied", "pickled", "saved",
                   modes=("group", "sequential"))),
    Piece("T13", "SDNQ folders with use_quantized_matmul",
          ("tests/backends/test_sdnq.py::test_a_folder_for_quantized_products_is_loaded",)),
    Piece("T13", "parts with a last dimension of one and a foreign stride, in any scheme",
          ("tests/test_packed_rows.py::test_whatever_the_stride_of_a_dimension_of_size_one",)),
    Piece("T15", "folders in SDNQ's format, run by SDNQ",
          ("tests/backends/test_sdnq.py::test_sdnq_runs_a_text_encoder_that_we_write",
           "tests/backends/test_sdnq.py::test_sdnq_runs_a_transformer_that_we_write")),
    Piece("T16", "quanto's modules and Conv3d: Wan's patches and Qwen2.5-VL's",
          (f"{_KINDS}test_the_plan_says_it", f"{_KINDS}test_every_kind_of_layer",
           f"{_OWN}test_quantos_modules_in_a_vision_language_encoder")),
    Piece("T17", "torch.compile of a UNet in nf4 with offload, whole and by its blocks",
          (f"{_COMPILE}test_compiled", f"{_OWN}test_a_compiled_unet_with_offload")),
    Piece("T18", "one graph: of a component that is fetched whole, and of blocks that take turns",
          (f"{_COMPILE}test_one_graph_of_a_component_that_is_fetched_whole",
           f"{_COMPILE}test_one_graph_of_blocks_that_take_turns_is_refused_with_the_reason",)),
    Piece("T21", "a thread for each request, on one offloaded pipeline",
          (f"{_THREADS}test_requests_of_a_server", f"{_THREADS}test_a_second_thread_waits_until_the_first_is_out")),
    Piece("T22", "joined weights become floats; a pipeline saved while its projections are fused",
          ("tests/test_dequantize_warning.py::test_joining_packed_weights_is_said_once",
           f"{_OWN}test_saved_while_projections_are_fused")),
    Piece("T23", "quantize of a pipeline one of whose components has nothing to quantize",
          (f"{_KINDS}test_layerwise_casting_is_refused",
           f"{_REACH}test_a_component_that_was_named_is_not_passed_over")),
    Piece("T24", "models that diffusers builds out of a quantized UNet",
          (f"{_FLOATS}test_models_that_diffusers_builds",)),
    Piece("T24", "a quantized state dict for a model of floats",
          (f"{_FLOATS}test_a_model_of_floats", f"{_FLOATS}test_bytes_that_nobody_can_read_are_refused")),
    Piece("T25", "files of GPTQ and other methods that are not read here",
          (f"{_METHODS}TestTensors::test_a_method_shows", f"{_METHODS}TestTensors::test_metadata_name_it",
           f"{_METHODS}TestConfigs::test_a_method_is_named")),
    Piece("T26", "GGUF files of something else, as parts",
          ("tests/test_gguf_refused.py::test_parts_are_told_what_to_do_as_parts",)),
    Piece("T26", "a GGUF that is one of several files and does not say so",
          ("tests/test_gguf_refused.py::TestOneOfSeveral",)),
    Piece("T27", "addresses and files of the hub",
          ("tests/test_hub.py::test_references", "tests/test_hub.py::test_a_file_and_a_folder_of_a_repository",
           "tests/test_hub.py::test_revisions")),
    Piece("T27", "torch_dtype= and other names that other loaders have",
          ("tests/test_arguments.py::test_of_load_model",
           "tests/test_arguments.py::test_no_call_ends_in_a_type_error")),
    Piece("T28", "what README promises of diffusers' and transformers' own loaders",
          (f"{_LOADERS}test_every_scheme_in_all_three",
           "tests/test_save_pretrained.py::test_what_it_writes_is_what_save_writes",
           f"{_LOADERS}test_a_folder_of_gguf_files_is_for_load_model",
           f"{_LOADERS}test_quantized_by_diffusers_they_load_on_cpus_too",
           f"{_LOADERS}test_portable_says_what_diffusers_refuses_here")),
    Piece("T28", "a whole folder without a dtype", (f"{_LOADERS}test_a_whole_folder_without_a_dtype",)),
    Piece("T29", "classes in model_index.json that nobody has",
          _each("tests/test_entry_points.py::test_one_answer", "unknown class of transformers",
                "unknown class of diffusers", "unknown pipeline", "unknown library")),
    Piece("S", "advice names arguments that exist", (f"{_OWN}test_advice_names_arguments_that_exist",)),
    Piece("S", "quant='4bit'", _each(f"{_BAD}TestNames::test_a_loose_word", "4bit-nf4")),
    Piece("S", "the plan finds T01 and T16",
          ("tests/test_encoders.py::test_a_missing_tensor_is_said_by_the_plan",
           "tests/test_encoders.py::test_another_shape_is_said_by_the_plan", f"{_KINDS}test_the_plan_says_it")),
    Piece("S", "deepcopy of models with quanto's own modules",
          ("tests/backends/test_quanto.py::test_the_librarys_modules_are_copied",)),
    Piece("S", "pipe.to('meta'), and what is done with it then",
          (f"{_BAD}TestConflicts::test_quantizing_what_has_no_values",
           f"{_BAD}TestConflicts::test_saving_what_has_no_values", f"{_OWN}test_a_pipeline_on_the_meta_device",
           *_actions("pipe_to_meta", "block_to_meta"))),
    Piece("Q1", "a preset or rules that match nothing",
          (f"{_REACH}test_rules_that_match_nothing_are_refused", f"{_REACH}test_commands_end_with_2_and_write_nothing",
           f"{_REACH}test_modules_that_match_and_multiply_nothing_end_the_first_run",
           "tests/training/test_run.py::test_rules_that_reach_nothing_in_the_network_are_refused")),
    Piece("Q2", "torchrun -m sdquant train without a card",
          ("tests/training/test_processes.py::test_two_processes_train_as_one_does",
           "tests/training/test_processes.py::test_processes_that_accelerate_lets_train_alone_are_refused")),
    Piece("Q3", "the memory that load_params takes",
          ("tests/rules/test_load_params.py::test_the_peak_is_that_of_what_is_quantized_and_little_more",)),
    Piece("Q4", "presets whose activations have a zero point",
          (f"{_REACH}test_what_products_cannot_follow_is_refused_before_weights_are_read",
           "tests/test_calibration.py::test_what_products_cannot_follow_is_refused_before_weights_are_read")),
    Piece("Q5", "scales of mxfp8 and mxfp4",
          ("tests/rules/test_numerics.py::test_powers_of_two_are_outlier_aware",
           *_each("tests/rules/test_golden.py::test_scales_and_numbers",
                  *(f"quantize|{kind}|absmax|float32" for kind in ("mxfp8|32", "mxfp4|32", "mxfp8_16|16"))))),
    Piece("Q6", "int16, and names of the Qwix that is meant",
          (*_each("tests/rules/test_golden.py::test_scales_and_numbers", "quantize|int16|0|minmax|float32"),
           "tests/test_qwix_names.py::test_every_name_of_theirs_is_there")),
    Piece("Q7", "the order of an einsum's scales",
          ("tests/rules/test_golden.py::test_einsum",
           "tests/rules/test_products.py::test_einsum_scales_by_the_right_operand_first")),
    Piece("Q8", "functional_call with float weights",
          ("tests/rules/test_quantize_model.py::test_functional_call_takes_float_weights",)),
    Piece("Q9", "a million shards, and a batch size of 1.0",
          (*_each(f"{_CONFIG}test_a_wrong_override",
                  "quantization_local_shard_count=1000000-from -1 to 4096-Use a number in this range"),
           f"{_CONFIG}test_a_whole_number_may_be_written_with_a_point",
           "tests/rules/test_sharding.py::test_there_are_no_more_parts_than_rows")),
    Piece("Q9", "shards that do not divide a batch",
          ("tests/training/test_run.py::test_shards_that_do_not_divide_the_batch_are_refused_first",)),
    Piece("Q9", "an input of a wrong size", ("tests/rules/test_wrong_sizes.py::test_an_input_that_does_not_fit",)),
    Piece("Q9", "a preset for linear layers alone",
          (f"{_REACH}test_a_preset_for_linear_layers_says_nothing_of_products",)),
    Piece("Q9", "calibrate with a preset or a config",
          ("tests/test_calibration.py::test_a_preset_and_a_config_have_ranges_without_rules_being_written_out",)),
)  # fmt: skip


TESTS = frozenset(test for row in PIECES for test in row.tests)


def rows_of(node: str) -> set[str]:
    """The node ids in the table that mean this test: its own, it with all parameters, and its class."""
    test = node.partition("[")[0]
    return TESTS & {node, test, test.rpartition("::")[0]}
