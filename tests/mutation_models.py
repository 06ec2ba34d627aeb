"""Sound models for `mutation_agreement` beside its tiny Flux in safetensors: the same in GGUF's and in torchao's types,
models in Nunchaku's files, and text encoders, which are read in the place of a pipeline's."""

from __future__ import annotations

import copy
import json
import shutil
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import gguf
import torch
from safetensors.torch import load_file
from torch import Tensor

from sdquant import demo
from sdquant.formats.gguf.writer import write_gguf

from . import gguf_text_encoders, hub_formats, malformed
from . import test_language_encoder_files as language
from .backends import nunchaku_layers, test_nunchaku_models, torchao_layers
from .foreign import WEIGHTS
from .test_gguf_text_encoders import ROWS as GGUF_ENCODERS
from .test_gguf_text_encoders import SEEING
from .test_malformed_gguf import NAME as GGUF_NAME
from .test_malformed_gguf import Row, _blocks

TYPES = ("q4_0", "q5_1", "q8_0", "q3_k", "q4_k", "q6_k", "iq2_xs", "iq4_nl", "iq1_m", "tq2_0", "mxfp4", "nvfp4")
ENCODER_KINDS = ("fp8 blocks", "ct fp8 rows", "ct w4a16", "ct w8a8", "ct nvfp4", "gptq", "awq", "auto-round", "hqq")
FLOATS = (torch.float32, torch.float16, torch.bfloat16)
_SOME = 3  # layers of a model that are changed


@dataclass
class GgufModel:
    """A GGUF file in memory, and the config.json beside it."""

    rows: dict[str, Row]
    metadata: dict[str, Any]
    config: dict[str, Any] | None = None

    @classmethod
    def read(cls, file: Path) -> GgufModel:
        reader = gguf.GGUFReader(file)
        rows = {
            one.name: Row(tuple(map(int, reversed(one.shape))), one.tensor_type.name.lower(), one.data.tobytes())
            for one in reader.tensors
        }
        fields = {name: field.contents() for name, field in reader.fields.items() if not name.startswith("GGUF.")}
        return cls(rows, fields)

    def write(self, folder: Path, *, lone: bool = False) -> Path:
        shutil.rmtree(folder, ignore_errors=True)
        folder.mkdir()
        rows = [(name, row.shape, row.type, row.data) for name, row in self.rows.items()]
        write_gguf(folder / "model.gguf", rows, self.metadata)
        if self.config is not None and not lone:
            (folder / "config.json").write_text(json.dumps(self.config))
        return folder / "model.gguf"

    def copy(self) -> GgufModel:
        return GgufModel(dict(self.rows), copy.deepcopy(self.metadata), copy.deepcopy(self.config))


@dataclass(frozen=True)
class Sound:
    """A sound model, and how it is asked about.

    Attributes:
        stems: what the names of the tensors begin with that are changed.
        lone: the file is asked about, not its folder. base: a pipeline in which the file takes a place, and
            others: files that are given with it.
        file: its name. owner: a file that is asked about in its stead, once it is beside it.
    """

    model: malformed.Model | GgufModel
    stems: tuple[str, ...]
    lone: bool = False
    base: Path | None = None
    others: tuple[Path, ...] = ()
    file: str = WEIGHTS
    owner: Path | None = None

    def copy(self) -> Sound:
        return replace(self, model=self.model.copy())

    def write(self, folder: Path) -> Path:
        """Write it; its file."""
        file = self.model.write(folder, lone=self.lone)
        if self.owner is not None:
            shutil.copy(self.owner, folder / self.owner.name)
            return file.rename(folder / self.file)
        return file.rename(folder / self.file) if isinstance(self.model, malformed.Model) else file

    def place(self, file: Path) -> Path:
        """What is asked about, of a file that `write` returned."""
        if self.owner is not None:
            return file.parent / self.owner.name
        return file if self.lone else file.parent

    def names(self) -> list[str]:
        """The tensors that are changed."""
        held = self.model.rows if isinstance(self.model, GgufModel) else self.model.tensors
        return sorted(name for name in held if name.startswith(self.stems))


def originals(folder: Path) -> Iterator[tuple[str, Sound]]:
    """Each model's name, and it. folder: to write in."""
    folder.mkdir(parents=True, exist_ok=True)
    source = malformed.Model.read(malformed.tiny(folder / "float"))
    yield from _in_gguf(source)
    yield from _in_torchao(source)
    yield from _in_nunchaku(folder)
    yield from _encoders(folder)


def _in_gguf(source: malformed.Model) -> Iterator[tuple[str, Sound]]:
    rows = {
        name: Row(tuple(one.shape), "bf16", one.contiguous().view(torch.uint8).numpy().tobytes())
        for name, one in source.tensors.items()
    }
    for kind in TYPES:
        quantized = rows | {GGUF_NAME: Row(rows[GGUF_NAME].shape, kind, _blocks(kind))}
        model = GgufModel(quantized, {"general.architecture": "flux"}, source.files["config.json"])
        yield f"gguf {kind}", Sound(model, (GGUF_NAME.removesuffix("weight"),))


def _in_torchao(source: malformed.Model) -> Iterator[tuple[str, Sound]]:
    dice = torch.Generator().manual_seed(0)
    said = {"quant_method": "torchao", "quant_type": {"default": {"_type": "FqnToConfig"}}}
    for name, (_, make) in torchao_layers.KINDS.items():
        layers: dict[str, Any] = dict(source.tensors)
        for key in (malformed.NAME, malformed.OTHER):
            layers[key] = make(torch.randn(source.tensors[key].shape, generator=dice) * 0.05)
        tensors, metadata = torchao_layers.flattened(layers)
        files = copy.deepcopy(source.files)
        files["config.json"]["quantization_config"] = said
        stems = tuple(key.removesuffix("weight") for key in (malformed.NAME, malformed.OTHER))
        yield f"torchao {name}", Sound(malformed.Model(tensors, metadata, files), stems)


def _in_nunchaku(folder: Path) -> Iterator[tuple[str, Sound]]:
    part = demo.path("digits-flux") / "transformer"
    weights, config = load_file(part / WEIGHTS), json.loads((part / "config.json").read_text())
    for kind in ("int4", "nvfp4"):
        said = nunchaku_layers.metadata(config, nvfp4=kind == "nvfp4")
        yield f"nunchaku flux {kind}", _lone(_stored(nunchaku_layers.flux(weights, nvfp4=kind == "nvfp4")), said)
        lite = _stored(nunchaku_layers.lite(weights, nvfp4=kind == "nvfp4"))
        method = {"quant_method": "nunchaku_lite", "compute_dtype": "bfloat16"}
        files = {"config.json": config | {"quantization_config": method}}
        yield f"nunchaku_lite {kind}", Sound(malformed.Model(lite, {"format": "pt"}, files), _stems(lite))
    for name, (_, make, _) in test_nunchaku_models.MODELS.items():
        random_weights, sizes = test_nunchaku_models._weights(name)
        yield f"nunchaku {name}", _lone(_stored(make(random_weights)), test_nunchaku_models._said(sizes))


def _stored(model: nunchaku_layers.Model) -> dict[str, Tensor]:
    return {name: one.contiguous() for name, one in (model.rest | model.file).items()}


def _lone(tensors: dict[str, Tensor], said: Mapping[str, Any]) -> Sound:
    texts = {name: text if isinstance(text, str) else json.dumps(text) for name, text in said.items()}
    return Sound(malformed.Model(tensors, texts, {}), _stems(tensors), lone=True)


def _stems(tensors: Mapping[str, Tensor]) -> tuple[str, ...]:
    """The layers whose tensors are changed: of codes if there are such, else the first ones."""
    matrices = {f"{name.rpartition('.')[0]}.": None for name, one in tensors.items() if one.ndim > 1}
    codes = (f"{name.rpartition('.')[0]}." for name, one in tensors.items() if one.ndim > 1 and one.dtype not in FLOATS)
    layers = list(dict.fromkeys(codes)) or list(matrices)
    return tuple(layers[:: max(1, len(layers) // _SOME)])[:_SOME]


def _encoders(folder: Path) -> Iterator[tuple[str, Sound]]:
    cases = {name: language._case(row, folder / name) for name, row in language.FILES.items()}
    for name, case in cases.items():
        states = {"float": case.state, "scaled fp8": language.scaled(case.state), "fp8": language.marked(case.state)}
        for kind, state in {**states, "fp4 mixed": language.fp4_mixed(case.state)[0]}.items():
            state = {key: one.contiguous() for key, one in state.items()}
            model = malformed.Model(state, {"format": "pt"}, {})
            yield f"{name} {kind}", Sound(model, _stems(state), lone=True, base=case.base)
    for name, (arch, _) in GGUF_ENCODERS.items():
        file = folder / f"{name}.gguf"
        gguf_text_encoders.write_text(cases[name].model, file, arch, gguf.GGMLQuantizationType.Q8_0)
        yield f"{name} gguf", _of_gguf(file, cases[name].base)
    for name, arch in SEEING.items():
        text, vision = folder / f"{name}-text.gguf", folder / f"{name}-vision.gguf"
        gguf_text_encoders.write_text(cases[name].model, text, arch, gguf.GGMLQuantizationType.Q8_0)
        gguf_text_encoders.write_vision(cases[name].model, vision, arch, gguf.GGMLQuantizationType.Q8_0)
        yield f"{name} gguf", replace(_of_gguf(text, cases[name].base), others=(vision,))
        yield f"{name} mmproj", replace(_of_gguf(vision, cases[name].base), owner=text, file="mmproj-F16.gguf")
    for kind in ENCODER_KINDS:
        place = Path(shutil.copytree(cases["umt5_xxl"].base / "text_encoder", folder / f"umt5 {kind}"))
        hub_formats.rewrite(place, hub_formats.KINDS[kind])
        (file,) = place.glob("*.safetensors")
        tensors, config = load_file(file), json.loads((place / "config.json").read_text())
        yield (
            f"umt5 {kind}",
            Sound(malformed.Model(tensors, {"format": "pt"}, {"config.json": config}), _stems(tensors), file=file.name),
        )


def _of_gguf(file: Path, base: Path) -> Sound:
    model = GgufModel.read(file)
    blocks = [name for name, row in model.rows.items() if row.type == "q8_0"]
    stems = tuple(name.removesuffix("weight") for name in blocks[:: len(blocks) // _SOME][:_SOME])
    return Sound(model, stems, lone=True, base=base)
