"""The compatibility matrix: rows and nothing else. The first row that matches a combination decides.

Order: files and modes, combinations that a library's modules cannot do, what they need not do, devices, versions, what
works, what is untested. Refusals come before devices, so that a combination is refused on every device alike. `seen` of
a row that works names the generated test, which runs every cell of the devices of the testing machine.
"""

from __future__ import annotations

from .row import Row, any_of

# Runtimes: LIBRARY rows apply unless plain layers are requested by name, PLAIN rows unless the library is. Even where
# plain layers are the default, as on CPUs (`default_runtime`), a call that names no runtime is refused if the library's
# modules cannot do it, so that it is refused on every device alike.
LIBRARY = any_of("default", "library")
PLAIN = any_of("default", "plain")

FOUR_BIT = any_of("nf4", "fp4")
BNB_MODULES = any_of("nf4", "fp4", "bnb-int8")
QUANTO_MODULES = any_of("qint8", "qint4", "qint2", "qfloat8")

CELLS = "tests/test_matrix.py"
SEEN = "tests/compat/test_verdicts.py"  # with today's words of the libraries on a CPU
GUIDE = "SD.Next's quantization guide"
CUDA_CELLS = f"{CELLS} (its cuda cells are marked gpu and run where there is one)"

ROWS: tuple[Row, ...] = (
    # Files and modes.
    Row(
        backend="gguf",
        source="all-in-one",
        verdict="breaks",
        refuses="file",
        why="only the UNet/transformer is supported in GGUF, and this file holds a whole checkpoint",
        fix="Take a GGUF file of the UNet or transformer alone, and give the rest with base=<pipeline folder>",
        seen=f"tests/compat/test_check.py::test_an_all_in_one_gguf_is_refused_as_a_file; documented: {GUIDE}, GGUF",
    ),
    Row(
        backend="gguf",
        mode=any_of("pre", "post"),
        verdict="breaks",
        why="GGUF files can be loaded, but models cannot be quantized to GGUF at load time; "
        "`sdquant quantize` writes one",
        fix="Write the file once with `sdquant quantize` and load that, or use a scheme that quantizes while loading, "
        'such as quant="int8" or quant="nf4"',
        seen=CELLS,
    ),
    Row(
        origin="files",
        mode=any_of("pre", "post"),
        verdict="breaks",
        why="sdquant loads this format from files, and cannot quantize a model to it",
        fix='Use a scheme that sdquant quantizes to, such as quant="int8" or quant="nf4"',
        seen=CELLS,
    ),
    # Products of 8-bit numbers.
    Row(
        compute=any_of("int8", "fp8", "fp4"),
        runtime=any_of("library", "openvino"),
        verdict="breaks",
        why="compute= does not change how the libraries compute; only sdquant's plain layers support it",
        fix='Use runtime="plain", or remove runtime, since compute= selects plain layers',
        seen="tests/test_compute.py::test_the_librarys_modules_are_refused",
    ),
    Row(
        compute=any_of("int8", "fp4"),
        device="cuda",
        verdict="untested",
        why="it uses torch's own product of such numbers, and nobody has run it on a card",
        seen="nobody has run it",
    ),
    Row(
        compute="int8",
        device=any_of("rocm", "xpu", "mps", "directml"),
        verdict="untested",
        why='compute="int8" has no fast integer product on this device and computes with the float weights',
        fix='Remove compute="int8", which has no effect on this device',
        seen="sdquant/kernels/int8_linear.py",
    ),
    Row(
        compute="fp8",
        device=any_of("cpu", "xpu", "mps", "directml"),
        verdict="breaks",
        why="products of 8-bit floats need a card that supports them, such as NVIDIA's of compute capability 8.9 and "
        "later; on a CPU they take ten times as long as bf16 products",
        fix='Use compute="int8", or remove compute',
        seen="tests/test_compute.py::test_8_bit_floats_are_for_cards",
    ),
    Row(
        compute="fp8",
        device="rocm",
        verdict="untested",
        why="it uses torch's own fp8 product, and nobody has run it on such a card",
        fix="A card without fp8 products computes with the float weights, and the log says so",
        seen="nobody has run it",
    ),
    Row(
        compute="fp4",
        verdict="slow",
        why="this device does not multiply 4-bit floats: activations are rounded to 4 bits and multiplied as floats",
        seen="tests/kernels/test_block_scaled.py",
    ),
    # Combinations that the libraries' modules cannot do, on any device and in any version.
    Row(
        backend="bnb",
        scheme=FOUR_BIT,
        offload="sequential",
        runtime=LIBRARY,
        verdict="breaks",
        why="Blockwise quantization only supports 16/32-bit floats: sequential offload rebuilds each weight from its "
        "packed uint8, and bitsandbytes quantizes it a second time",
        fix='Use offload="balanced" or offload="model", or runtime="plain", or quant="int8", which runs in every mode',
        seen=f"{SEEN} (a CPU says: Cannot copy out of meta tensor); documented: diffusers#10800, bitsandbytes#1525",
    ),
    Row(
        backend="quanto",
        offload="balanced",
        runtime=LIBRARY,
        verdict="breaks",
        why="QBytesTensor.new() missing 5 required positional arguments: balanced offload moves single layers, and a "
        "quanto tensor cannot be rebuilt from its data alone",
        fix='Use offload="model", or runtime="plain", or quant="nf4", or quant="int8", which runs in every mode',
        seen=f"{SEEN} (sdquant's own mover meets: invalid python storage); documented: diffusers#10526, {GUIDE}",
    ),
    Row(
        backend="quanto",
        offload="sequential",
        runtime=LIBRARY,
        verdict="breaks",
        why="Expected all tensors to be on the same device: sequential offload moves a quanto tensor's outer shell and "
        "leaves the data inside behind",
        fix='Use offload="model", or runtime="plain", or quant="int8", which runs in every mode',
        seen=f"{SEEN} (a CPU says: missing 6 required positional arguments); documented: diffusers#10526, {GUIDE}",
    ),
    Row(
        backend="gguf",
        offload="model",
        runtime=LIBRARY,
        verdict="breaks",
        why="moving the model would trigger de-quantization",
        fix='Use offload="balanced", or runtime="plain", whose packed weights move as they are, or quant="int8"',
        seen=f"documented: {GUIDE}, GGUF",
    ),
    Row(
        backend="quanto",
        scheme=QUANTO_MODULES,
        offload="group",
        runtime=LIBRARY,
        device=any_of("cuda", "rocm"),
        verdict="breaks",
        why="mat2 is on cpu, different from cuda:0: group offload swaps a quanto tensor's outer shell and leaves the "
        "data inside behind",
        fix='Use offload="model", or runtime="plain", or quant="int8", which runs in every mode',
        seen="documented: diffusers#12610 (needs a GPU)",
    ),
    Row(
        backend="bnb",
        scheme=BNB_MODULES,
        offload="group",
        runtime=LIBRARY,
        device=any_of("cuda", "rocm", "xpu"),
        verdict="breaks",
        why="an illegal memory access was encountered: bitsandbytes keeps codes and scales outside the parameters, "
        "group offload leaves them in RAM, and bitsandbytes' kernels read them there; the process is lost then",
        fix='Use offload="balanced" or offload="model", or runtime="plain", which runs in every mode',
        seen="tests/offload/test_settings.py; an NVIDIA H200 with torch 2.11 and bitsandbytes 0.50.2",
    ),
    Row(
        backend="nncf",
        offload=any_of("model", "sequential", "balanced", "group"),
        runtime="openvino",
        verdict="breaks",
        why="OpenVINO packs the weights into memory of its own, which no offload mode can move",
        fix='Use offload="none", or runtime="plain", whose weights every mode can move',
        seen=CELLS,
    ),
    Row(
        scheme="svdquant_nvfp4",
        runtime="library",
        device=any_of("rocm", "xpu", "mps", "directml", "cpu"),
        verdict="breaks",
        why="comfy-kitchen has no kernels for it, and Nunchaku's are for NVIDIA's cards",
        fix='Use runtime="plain", which runs on every device',
        seen="documented: diffusers 0.42.1, quantizers/nunchaku; tests/backends/test_nunchaku_library.py",
    ),
    # What nobody has run.
    Row(
        scheme="svdquant_nvfp4",
        runtime="library",
        device="cuda",
        verdict="untested",
        why="products are by Nunchaku's kernels in diffusers' layers, and nobody has run these from sdquant on a card",
        seen="tests/backends/test_nunchaku_library.py, with a stand-in for the kernels",
    ),
    # What runs in plain layers unless the library's are asked for.
    Row(
        backend=any_of("bnb", "quanto"),
        runtime="default",
        device="cpu",
        verdict="works",
        why="on CPUs plain layers are the default, which every offload mode can move; without C kernels the library's "
        "modules, which need not move there",
        seen=CELLS,
    ),
    # Devices that a library does not support.
    Row(
        backend="nncf",
        runtime="openvino",
        device=any_of("cuda", "rocm", "xpu", "mps", "directml"),
        verdict="breaks",
        why="sdquant compiles models for OpenVINO's CPU plugin alone, and the rest of the pipeline would be elsewhere",
        fix='Use device="cpu", or runtime="plain", which runs on every device',
        seen="tests/openvino_runtime/test_pipelines.py",
    ),
    Row(
        backend="bnb",
        scheme=BNB_MODULES,
        device="directml",
        verdict="breaks",
        refuses="backend",
        why="bitsandbytes has no kernels for DirectML; it lists cuda, rocm, xpu, mps and cpu among its devices",
        fix='Use quant="int8" or quant="int4" (nncf), whose layers need nothing but torch, or device="cpu"',
        seen="documented: bitsandbytes 0.50.2, supported_torch_devices",
    ),
    Row(
        backend="quanto",
        scheme=QUANTO_MODULES,
        runtime=LIBRARY,
        device="directml",
        verdict="breaks",
        refuses="backend",
        why="optimum-quanto has no extension for DirectML; it has them for cpu, cuda, hip and mps",
        fix='Use quant="int8" or quant="int4" (nncf), whose layers need nothing but torch, or device="cpu"',
        seen="documented: optimum-quanto 0.2.7, library/extensions",
    ),
    Row(
        offload="group",
        device="directml",
        verdict="breaks",
        why="incompatible tensor type: group offload gives parameters of the CPU memory of the device, which torch "
        "refuses for devices whose makers bring their own backend",
        fix='Use offload="balanced" or offload="model", which put new parameters into the modules there',
        seen="tests/offload/test_card.py",
    ),
    Row(
        backend="quanto",
        scheme="qfloat8",
        device="mps",
        verdict="breaks",
        refuses="backend",
        why="Trying to convert Float8_e4m3fn to the MPS backend but it does not have support for that dtype",
        fix='Use quant="qint8" or quant="int8", which keep their weights as integers',
        seen="documented: pytorch#148420",
    ),
    # Versions.
    Row(
        backend="bnb",
        scheme="bnb-int8",
        offload="model",
        runtime=LIBRARY,
        versions={"transformers": "<4.58"},
        verdict="untested",
        why="diffusers skips the model-offload hook of 8-bit bitsandbytes modules if transformers is older than 4.58",
        fix="Upgrade transformers to 4.58 or newer",
        seen="documented: diffusers 0.42.1, pipelines/pipeline_utils.py, enable_model_cpu_offload",
    ),
    Row(
        backend="bnb",
        scheme="bnb-int8",
        offload="model",
        runtime=LIBRARY,
        versions={"accelerate": "<1.13"},
        verdict="untested",
        why="diffusers moves a pipeline with 8-bit bitsandbytes modules only if accelerate is 1.13 or newer",
        fix="Upgrade accelerate to 1.13 or newer",
        seen="documented: diffusers 0.42.1, pipelines/pipeline_utils.py, to",
    ),
    # What works: bitsandbytes' modules.
    Row(
        backend="bnb",
        scheme=BNB_MODULES,
        offload=any_of("none", "model", "balanced", "group"),
        runtime=LIBRARY,
        device="cpu",
        verdict="works",
        why="bitsandbytes runs on the CPU, where group offload moves nothing, and modules survive being moved whole",
        seen=CELLS,
    ),
    Row(
        backend="bnb",
        scheme=BNB_MODULES,
        offload=any_of("none", "model", "balanced"),
        runtime=LIBRARY,
        device="cuda",
        verdict="works",
        why="bitsandbytes' modules survive being moved whole, with their quantization state",
        seen=f"{CUDA_CELLS}; documented: {GUIDE} (balanced), diffusers' bitsandbytes guide (none, model)",
    ),
    Row(
        backend="bnb",
        scheme="bnb-int8",
        offload="sequential",
        runtime=LIBRARY,
        device="cpu",
        verdict="works",
        why="accelerate knows how to rebuild bitsandbytes' 8-bit parameters",
        seen=CELLS,
    ),
    # What works: quanto's modules.
    Row(
        backend="quanto",
        scheme=QUANTO_MODULES,
        offload=any_of("none", "model", "group"),
        runtime=LIBRARY,
        device="cpu",
        verdict="works",
        why="quanto's tensors survive being moved whole",
        seen=CELLS,
    ),
    Row(
        backend="quanto",
        scheme=QUANTO_MODULES,
        offload=any_of("none", "model"),
        runtime=LIBRARY,
        device="cuda",
        verdict="works",
        why="quanto's tensors survive being moved whole",
        seen=f"{CUDA_CELLS}; documented: diffusers#10526",
    ),
    # What works: OpenVINO.
    Row(
        backend="nncf",
        offload="none",
        runtime="openvino",
        device="cpu",
        verdict="works",
        why="OpenVINO's CPU plugin computes with NNCF's codes as they are",
        seen=CELLS,
    ),
    # What works: plain tensors, which every mover can move.
    Row(
        backend=any_of("comfy", "gguf", "hub", "nncf", "rules", "sdnq"),
        device=any_of("cpu", "cuda"),
        verdict="works",
        why="packed weights are plain parameters, which every offload mode can move",
        seen=CUDA_CELLS,
    ),
    Row(
        scheme=any_of("fp8", "qint3"),
        runtime=PLAIN,
        device=any_of("cpu", "cuda"),
        verdict="works",
        why="packed weights are plain parameters, which every offload mode can move",
        seen=CUDA_CELLS,
    ),
    Row(
        runtime="plain",
        device=any_of("cpu", "cuda"),
        verdict="works",
        why="packed weights are plain parameters, which every offload mode can move",
        seen=CUDA_CELLS,
    ),
    # What nobody has tried, with what is known about it.
    Row(
        backend="bnb",
        scheme=BNB_MODULES,
        offload="sequential",
        runtime=LIBRARY,
        device="cuda",
        verdict="untested",
        why="bitsandbytes keeps its quantization state outside the parameters, and this mode moves only parameters",
        fix='Use offload="balanced", or runtime="plain"',
        seen="nobody has run it",
    ),
    Row(
        runtime="plain",
        verdict="untested",
        why="the layers are plain torch and should run on any device, but nobody has run them on this one",
        seen="nobody has run it",
    ),
    Row(
        backend=any_of("comfy", "gguf", "hub", "nncf", "rules", "sdnq"),
        verdict="untested",
        why="the layers are plain torch and should run on any device, but nobody has run them on this one",
        seen="nobody has run it",
    ),
    Row(
        backend=any_of("bnb", "quanto"),
        device=any_of("rocm", "xpu", "mps"),
        verdict="untested",
        why="the library lists this device among those it supports, but nobody has run sdquant on it",
        seen="nobody has run it",
    ),
    Row(
        verdict="untested",
        why="nobody has run this combination",
        seen="nobody has run it",
    ),
)
