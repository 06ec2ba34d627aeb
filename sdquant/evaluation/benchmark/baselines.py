"""Peers: other libraries' own ways to load a UNet or transformer in a format that sdquant has too.

One row each. They load a diffusers component's folder with float weights, or a GGUF file. The loaded model contains
nothing of sdquant: it is what a user of the library would run. Importing this module imports none of them.
"""

from __future__ import annotations

import importlib
import inspect
import warnings
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from torch import nn

    from ...models import Inputs
    from .specs import LoadSpec

NO_GPU = "diffusers refuses bitsandbytes on the CPU: bitsandbytes' own modules were put in the place of the linear ones"


@dataclass(frozen=True, kw_only=True)
class Peer:
    """A library's own way.

    Attributes:
        name: as rows are called.
        packages: distributions that it needs.
        formats: sdquant's schemes of the same format, each with what the library calls it.
        gguf: whether it reads a GGUF file, instead of a folder with float weights.
        load: `load(job, its name of the format, inputs)` gives the component, on the job's device.
        prepare: imports what loading imports, before the clock starts.
        notes: notes for its rows, by device type; "" for all devices.
    """

    name: str
    packages: tuple[str, ...]
    formats: Mapping[str, str]
    load: Callable[[LoadSpec, str, Inputs], nn.Module]
    prepare: Callable[[], object]
    gguf: bool = False
    notes: Mapping[str, str]

    def note(self, device: str) -> str | None:
        """Return the note for its rows on a device, or None."""
        return self.notes.get(device.partition(":")[0], self.notes.get(""))


def installed(scheme: str, versions: Mapping[str, str]) -> tuple[Peer, ...]:
    """Return the installed peers that have the format of a scheme."""
    return tuple(row for row in PEERS if scheme in row.formats and all(name in versions for name in row.packages))


def peer(name: str) -> Peer:
    """Return the peer of this name."""
    return next(row for row in PEERS if row.name == name)


def _pretrained(job: LoadSpec, config: Any = None) -> nn.Module:
    """Load the component with diffusers' `from_pretrained`."""
    values = {} if config is None else {"quantization_config": config, "device_map": {"": job.device}}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        model: nn.Module = _class(job).from_pretrained(job.asked.path, torch_dtype=_dtype(job), **values)
    return model


def _class(job: LoadSpec) -> Any:
    from ...models import model_class

    return model_class("diffusers", job.class_name)


def _dtype(job: LoadSpec) -> Any:
    from ...core import dtype_named

    return dtype_named(job.dtype)


def _bitsandbytes(job: LoadSpec, form: str, _: Inputs) -> nn.Module:
    import diffusers

    if job.device == "cpu":
        return _with_modules(_pretrained(job), form, _dtype(job))
    if form == "int8":
        config = diffusers.BitsAndBytesConfig(load_in_8bit=True)
    else:
        config = diffusers.BitsAndBytesConfig(
            load_in_4bit=True, bnb_4bit_quant_type=form, bnb_4bit_compute_dtype=_dtype(job)
        )
    return _pretrained(job, config)


def _with_modules(model: nn.Module, form: str, dtype: Any) -> nn.Module:
    """Replace all `nn.Linear` with bitsandbytes' modules, as diffusers does on a GPU."""
    from torch import nn

    from ...backends import bnb_library
    from ...models import set_module

    bnb = bnb_library()
    for path, old in [*model.named_modules()]:
        if type(old) is not nn.Linear:
            continue
        bias = old.bias is not None
        if form == "int8":
            new = bnb.nn.Linear8bitLt(
                old.in_features, old.out_features, bias, has_fp16_weights=False, threshold=6.0, device="meta"
            )
            new.weight = bnb.nn.Int8Params(old.weight.data, requires_grad=False, has_fp16_weights=False).to("cpu")
        else:
            new = bnb.nn.Linear4bit(
                old.in_features, old.out_features, bias, compute_dtype=dtype, quant_type=form, device="meta"
            )
            new.weight = bnb.nn.Params4bit(old.weight.data, requires_grad=False, quant_type=form, module=new).to("cpu")
        new.bias = old.bias
        set_module(model, path, new)
        old.weight = None  # type: ignore[assignment]  # the list above holds the module
    return model.eval().requires_grad_(False)


def _import_bitsandbytes() -> None:
    from ...backends import bnb_library

    bnb_library()


def _quanto(job: LoadSpec, form: str, _: Inputs) -> nn.Module:
    import diffusers

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # diffusers means to drop it, and says so
        config = diffusers.QuantoConfig(weights_dtype=form)
    return _pretrained(job, config)


def _import_quanto() -> None:
    from ...backends import without_compiler

    without_compiler()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        from optimum import quanto  # noqa: F401


def _sdnq(job: LoadSpec, form: str, _: Inputs) -> nn.Module:
    from sdnq import SDNQConfig

    return _pretrained(job, SDNQConfig(weights_dtype=form))


def _gguf(job: LoadSpec, _: str, __: Inputs) -> nn.Module:
    import diffusers

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        model: nn.Module = _class(job).from_single_file(
            job.asked.path,
            config=str(job.folder),
            quantization_config=diffusers.GGUFQuantizationConfig(compute_dtype=_dtype(job)),
            torch_dtype=_dtype(job),
        )
    return model.to(job.device)


def _nncf(job: LoadSpec, form: str, inputs: Inputs) -> nn.Module:
    import nncf

    args, values = inputs
    names = [*inspect.signature(_class(job).forward).parameters][1 : 1 + len(args)]  # without self
    example = dict(zip(names, args, strict=True)) | values  # NNCF follows one call before it compresses
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        model: nn.Module = nncf.compress_weights(
            _pretrained(job).to(job.device),
            mode=nncf.CompressWeightsMode[form],
            dataset=nncf.Dataset([example], lambda item: item),
        )
    return model


def _import_nncf() -> None:
    from ...models import quiet

    with quiet(), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        import nncf

        nncf.set_log_level(40)  # logging.ERROR: it tells each layer's name


def _torchao(job: LoadSpec, _: str, __: Inputs) -> nn.Module:
    import diffusers

    quantization = importlib.import_module("torchao.quantization")
    return _pretrained(job, diffusers.TorchAoConfig(quantization.Int8WeightOnlyConfig()))


def _importing(module: str) -> Callable[[], object]:
    return partial(importlib.import_module, module)


PEERS: tuple[Peer, ...] = (
    Peer(
        name="diffusers bitsandbytes", packages=("bitsandbytes",), load=_bitsandbytes, prepare=_import_bitsandbytes,
        formats={"nf4": "nf4", "fp4": "fp4", "bnb-int8": "int8"}, notes={"cpu": NO_GPU},
    ),
    Peer(
        name="diffusers quanto", packages=("optimum-quanto",), load=_quanto, prepare=_import_quanto,
        formats={"qint8": "int8", "qint4": "int4", "qint2": "int2", "qfloat8": "float8"}, notes={},
    ),
    Peer(
        name="diffusers GGUF", packages=("gguf",), load=_gguf, gguf=True, notes={},
        prepare=_importing("diffusers.quantizers.gguf.utils"),
        formats={name: name for name in (
            "q8_0", "q6_k", "q5_k", "q5_1", "q5_0", "q4_k", "q4_1", "q4_0", "q3_k", "q2_k", "q4_k_m", "q4_k_s",
            "q5_k_m", "q5_k_s", "q3_k_m", "q3_k_s",
        )},
    ),
    Peer(
        name="sdnq", packages=("sdnq",), load=_sdnq, prepare=_importing("sdnq"), notes={},
        formats={"sdnq-int8": "int8", "sdnq-uint4": "uint4", "sdnq-int4": "int4", "sdnq-int6": "int6"},
    ),
    Peer(
        name="nncf", packages=("nncf",), load=_nncf, prepare=_import_nncf, notes={},
        formats={"int8": "INT8_ASYM", "int8_sym": "INT8_SYM"},
    ),
    # Written from torchao's and diffusers' interfaces; torchao is in none of the environments that this was run in.
    Peer(
        name="diffusers torchao", packages=("torchao",), load=_torchao, prepare=_importing("torchao.quantization"),
        formats={"int8_sym": "int8"}, notes={"": "weights only, a scale per row"},
    ),
)  # fmt: skip


def can_read(row: Peer, job_path: Path) -> bool:
    """Return whether a peer can read the file or folder at a path."""
    return job_path.suffix == ".gguf" if row.gguf else (job_path / "config.json").is_file()
