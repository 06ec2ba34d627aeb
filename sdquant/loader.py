"""From a path to a pipeline: the flow of the design, read top to bottom."""

from __future__ import annotations

import contextlib
import dataclasses
import logging
import time
from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from . import backends, compat, detection, machine, planner
from .errors import (
    BackendUnavailableError,
    BadFileError,
    MissingComponentError,
    UnsupportedFileError,
)
from .formats import families, source
from .formats.source import Source
from .request import Request, request

if TYPE_CHECKING:
    import torch
    from torch import Tensor, nn

    from .offload import OffloadHandle

log = logging.getLogger(__name__)


@dataclass(frozen=True, kw_only=True)
class Loaded:
    """What was done, kept as `.sdquant` on the pipeline or component that `load_model` returns."""

    plan: planner.Plan
    offload: OffloadHandle
    seconds: float

    def __deepcopy__(self, memo: object) -> Loaded:
        """A copy of a model was made in the same way; there is nothing in here to copy."""
        return self


def load_model(
    path: str | Path,
    quant: str | Mapping[str, str] | None = None,
    offload: str = "none",
    *,
    mode: str = "auto",
    components: tuple[str, ...] | list[str] | str | None = None,
    skip: tuple[str, ...] | list[str] | str = (),
    rules: Any = None,
    base: str | Path | None = None,
    runtime: str | None = None,
    device: str | torch.device | None = None,
    dtype: str | torch.dtype | None = None,
    budget: int | str | None = None,
    allow_incompatible: bool = False,
    progress: bool = True,
) -> Any:
    """Load a model, quantized and offloaded as asked, or raise a clear error before any weight is read.

    Args:
        path: pipeline folder, component folder, `.safetensors` or `.gguf` file, folder that `save` wrote, or hub id.
        quant: None for as found on disk; a scheme ("nf4", "bnb:nf4", "nf4,double_quant"); component -> scheme;
            "none" for not quantized.
        offload: "none", "model", "sequential", "balanced" or "group".
        mode: "pre" quantizes tensor by tensor while loading, "post" after it; "auto" is "pre".
        components: which to quantize; default the UNet or transformer and the text encoders, never the VAE.
        skip: modules to leave as they are, by a part of their path or a pattern with `*`.
        base: pipeline folder that has the rest, when `path` is a transformer or UNet alone.
        runtime: "library" or "plain"; default the library's modules where it has some.
        device: compute device; default the best there is. dtype: of what is not quantized; default as in the file.
        budget: bytes (or "6GB") that weights may take on the device, for balanced offload.
        allow_incompatible: turn a refusal of the matrix into a warning.
        progress: show a progress bar.

    Returns:
        A diffusers pipeline, or the component where `path` is one and `base` is not given. `.sdquant` on it tells
        what was done (`Loaded`).

    Raises:
        SdquantError: one of its kinds; see `sdquant.errors`.
    """
    asked = request(
        path,
        quant=quant, offload=offload, mode=mode, components=components, skip=skip, rules=rules, base=base,
        runtime=runtime, device=device, dtype=dtype, budget=budget, allow_incompatible=allow_incompatible,
        progress=progress,
    )  # fmt: skip
    return load(asked)


def plan(
    path: str | Path,
    quant: str | Mapping[str, str] | None = None,
    offload: str = "none",
    **values: Any,
) -> planner.Plan:
    """What `load_model` with the same arguments would do, and the bytes of it; headers are all that is read.

    Raises:
        SdquantError: what `load_model` would raise before reading weights.
    """
    return prepare(request(path, quant=quant, offload=offload, **values))


def load(asked: Request) -> Any:
    """`load_model` for a Request."""
    begin = time.perf_counter()
    made = prepare(asked)
    for warning in made.warnings:
        log.warning("%s", warning)
    with _one_bar(made, asked.progress) as tick:
        parts = {
            part.name: build(part, made.detected.sources["." if part.name == "model" else part.name], made, tick)
            for part in made.components
        }
    whole = _assemble(asked, made, parts)
    from . import offload
    from .offload.memory import trim

    trim()
    handle = offload.apply(whole, asked.offload, device=made.device, budget=made.budget)
    whole.sdquant = Loaded(plan=made, offload=handle, seconds=time.perf_counter() - begin)
    return whole


def prepare(asked: Request) -> planner.Plan:
    """Check and plan a request. Everything that can be refused is refused here, from headers at most.

    The matrix is asked twice: first with what the request says, before any file is opened; then with what the files
    hold. Only after that are the files held against their own headers.
    """
    here = machine.probe()
    device = asked.device or machine.default_device(here)
    kind = machine.device_kind(device, here)
    if kind not in here.kinds:
        raise BackendUnavailableError(
            f"Device {device!r} was asked for",
            f"torch sees {', '.join(here.kinds)} on this machine",
            "Leave device out, or see `sdquant doctor` for what is missing",
        )

    def check(quant: Any, mode: str, source: str = "weights") -> None:
        compat.check(
            quant, asked.offload, mode=mode, runtime=asked.runtime, device=device, machine=here, source=source,
            allow_incompatible=asked.allow_incompatible,
        )  # fmt: skip

    # A gguf scheme on a file that may hold it is not yet a refusal.
    named = {name: str(spec) for name, spec in asked.specs().items() if spec is not None}
    check(None if not named else (named.get("*") if set(named) == {"*"} else named), asked.mode)
    place = resolve(asked)
    asked = dataclasses.replace(asked, path=str(place))
    seen = whole_of(asked, complete=False)
    for scheme in sorted({part.quant for part in (seen.parts or {".": seen}).values() if part.quant}):
        check(scheme, "found")
    asked = dataclasses.replace(asked, dtype=asked.dtype or _one_dtype(asked, seen))
    planner.make(asked, seen, device=device)  # conflicts, and schemes that exist only in files
    return planner.make(asked, whole_of(asked, complete=True), device=device)


def _one_dtype(asked: Request, seen: detection.Detected) -> str | None:
    """The dtype to bring all floats to where the files hold several that do not compute together; None: as they are.

    That is so where a lone component joins the others of its base, and in GGUF files, which keep small tensors in F32.
    The dtype with the most bytes decides: in the base, else in the file.
    """
    if asked.base is not None:
        seen = detection.detect(asked.base, complete=False)
    elif seen.container != "gguf":
        return None
    sizes: Counter[str] = Counter()
    for src in seen.sources.values():
        for info in src.plain.values():
            if info.dtype in ("float32", "float16", "bfloat16"):
                sizes[info.dtype] += info.nbytes
    return sizes.most_common(1)[0][0] if sizes else None


def resolve(asked: Request) -> Path:
    """The file or folder of a request's path, downloaded if it is a hub id."""
    place = Path(asked.path).expanduser()
    if place.exists() or asked.path.count("/") != 1 or asked.path.startswith((".", "/", "~")):
        return place
    from . import components

    return components.hub_folder(asked.path, progress=asked.progress)


def whole_of(asked: Request, *, complete: bool) -> detection.Detected:
    """What the path holds; with a base, the base's components with the lone one in its place."""
    seen = detection.detect(asked.path, complete=complete)
    if asked.base is None:
        return seen
    base = detection.detect(asked.base, complete=complete)
    if seen.container == "pipeline" or base.container != "pipeline":
        raise MissingComponentError(
            f"{asked.path} was to be loaded with base={asked.base}",
            "base is for a lone component, and must be a pipeline folder",
            "Leave base out" if seen.container == "pipeline" else "Give the folder with the model_index.json",
        )
    name = _place(seen, base)
    lone = seen.sources["."]
    owner = base.sources[name]
    lone = dataclasses.replace(
        lone, config=lone.config or owner.config, library=owner.library, class_name=owner.class_name
    )
    parts = base.parts | {name: seen}
    return dataclasses.replace(
        base,
        path=asked.path,
        quant=seen.quant or base.quant,
        backend=seen.backend or base.backend,
        prequantized=seen.prequantized or base.prequantized,
        evidence=[f"{name}: {line}" for line in seen.evidence],
        warnings=[*base.warnings, *seen.warnings],
        parts=parts,
        sources={**base.sources, name: lone},
    )


def _place(seen: detection.Detected, base: detection.Detected) -> str:
    """Which component of the base a lone one replaces: of the same kind, and with its tensor names."""
    names = seen.sources["."].names
    kind = seen.component or ""
    for name, src in base.sources.items():
        shared = len(src.names & names) / max(len(src.names), 1)
        if shared > 0.9 or (kind and name == kind):
            return name
    raise MissingComponentError(
        f"{seen.path} was to take its place in {base.path}",
        f"it is {kind or 'of an unknown kind'}, and the pipeline has {', '.join(base.sources)}",
        "Give the pipeline folder of the same model as base",
    )


def build(part: planner.ComponentPlan, src: Source, made: planner.Plan, tick: Tick) -> nn.Module:
    """One component, its weights read one at a time, quantized ones packed as they come."""
    from . import components
    from .quantizer import quantize_module

    model = components.empty(*_class_of(src), src.config)
    encode = {weight.name for weight in part.weights} if part.action == "encode" and part.mode == "pre" else set()
    install = Installer(model, part.runtime)
    files = src.open()
    try:
        for key, info in src.plain.items():
            tensor = _cast(files[src.home[key]].get(key), made.dtype)
            if key in encode and part.spec is not None:
                install.encode(key, tensor, part.spec, made.device)
            else:
                install.plain(key, tensor)
            tick(info.nbytes)
        for found in src.found.values():
            install.found(found, src, files)
            tick(sum(src.tensors[key].nbytes for key in found.keys.values()))
    finally:
        for file in files.values():
            file.close()
    install.finish(src)
    if part.action == "encode" and part.mode == "post" and part.spec is not None:
        quantize_module(
            model, part.spec, runtime=part.runtime, only={weight.name for weight in part.weights}, device=made.device
        )
    return model


def _class_of(src: Source) -> tuple[str | None, str]:
    if src.class_name is None or not src.config:
        row = families.recognise(src.names)
        what = f"a {row.family} {row.component}" if row else "of a model that its tensor names do not tell"
        if row and row.layout not in ("diffusers", "transformers"):
            raise UnsupportedFileError(
                f"{src.path} was to be loaded",
                f"it is {what} in the {row.layout} layout, and this version reads diffusers' layout",
                "Use the same model as a diffusers folder",
            )
        raise MissingComponentError(
            f"{src.path} was to be loaded",
            f"it is {what}, without a config that gives its sizes",
            "Give base=<pipeline folder> of the same model, or put its config.json beside the weights",
        )
    return src.library, src.class_name


def _cast(tensor: Tensor, dtype: str | None) -> Tensor:
    if dtype is None or not tensor.is_floating_point() or tensor.element_size() == 1:
        return tensor
    from .components import dtype_named

    return tensor.to(dtype_named(dtype))


class Installer:
    """Puts tensors and packed weights into an empty model, and knows at the end whether all came."""

    def __init__(self, model: nn.Module, runtime: str) -> None:
        from . import components

        self.model, self.runtime = model, runtime
        self.parts = components
        self.known = frozenset(model.state_dict(keep_vars=True)) | frozenset(components.tied(model))
        self.ties = components.tied(model)
        self.unexpected: list[str] = []

    def plain(self, key: str, tensor: Tensor) -> None:
        """A float (or other unquantized) tensor, and all parameters that are tied to it."""
        name = self.parts.model_name(key, self.known)
        if name is None:
            self.unexpected.append(key)
            return
        wanted = tuple(self.model.get_parameter(name).shape) if name in self.ties else tuple(tensor.shape)
        if tuple(tensor.shape) != wanted:
            if tuple(n for n in tensor.shape if n != 1) != tuple(n for n in wanted if n != 1):
                raise BadFileError(
                    f"Tensor {key!r} was to be loaded",
                    f"it has shape {list(tensor.shape)}, the model wants {list(wanted)}",
                    "Check that the weights and the config belong together",
                )
            tensor = tensor.reshape(wanted)
        self.parts.set_tensor(self.model, self.ties.get(name, (name,)), tensor)

    def encode(self, key: str, tensor: Tensor, spec: backends.QuantSpec, device: str) -> None:
        """A float weight that is to be quantized now."""
        from .layers import kind_of

        name = self.parts.model_name(key, self.known)
        module = self._module(name) if name is not None else None
        if name is None or module is None or kind_of(module) is None:
            # Planned from the name and shape alone; the model says it is no linear or convolution layer.
            log.warning("%s stays as it is: its layer (%s) cannot be quantized", key, type(module).__name__)
            self.plain(key, tensor)
            return
        packed = backends.get(spec.scheme.backend).encode(tensor.to(device), spec)
        self.packed(name, packed, spec)

    def found(self, found: backends.Found, src: Source, files: Mapping[Path, Any]) -> None:
        """A weight that is quantized on disk."""
        from .backends.base import Packed
        from .layers import kind_of

        name = self.parts.model_name(found.name, self.known)
        if name is None:
            self.unexpected.append(found.name)
            return
        backend = backends.of_scheme(found.scheme)

        def get(key: str) -> Tensor:
            tensor: Tensor = files[src.home[key]].get(key)
            return tensor

        spec = src.specs.get(found.name)
        wanted = self.model.get_parameter(name)
        if spec is not None:
            packed = Packed(spec=spec, parts={part: get(key) for part, key in found.keys.items()})
        else:
            packed = backend.read(found, tuple(wanted.shape), get)
        if kind_of(self._module(name)) is None:
            # A table of embeddings in float8, say: no layer of ours runs it packed.
            log.info("%s is decoded: its layer (%s) cannot run it packed", name, type(self._module(name)).__name__)
            self.plain(name, backend.decode(packed, wanted.dtype))
            return
        self.packed(name, packed, None)

    def packed(self, name: str, packed: Any, spec: backends.QuantSpec | None) -> None:
        """A packed weight: its module is replaced by one that can run it."""
        install_packed(self.model, name, packed, self.runtime, spec)

    def _module(self, name: str) -> nn.Module:
        return self.model.get_submodule(name.rpartition(".")[0])

    def finish(self, src: Source) -> None:
        """Raise if a parameter got no value; tell of tensors that nobody wanted."""
        missing = self.parts.missing(self.model)
        if missing:
            raise BadFileError(
                f"{src.path} was to be loaded",
                f"{len(missing)} of the model's tensors are not in it, the first is {missing[0]!r}",
                "Check that the weights and the config belong together",
            )
        if self.unexpected:
            log.warning(
                "%s holds %d tensors that the model has no place for, the first is %r",
                src.path,
                len(self.unexpected),
                self.unexpected[0],
            )


def install_packed(
    model: nn.Module, name: str, packed: Any, runtime: str, spec: backends.QuantSpec | None = None
) -> None:
    """Replace the module that owns weight `name` by one that runs the packed weight.

    A weight of a kind that the library has no module for gets a plain layer: a file may hold more than its library runs.
    So does one whose owner reads the weight's dtype, which a plain layer answers with that of the float weight.
    """
    from . import components
    from .layers import kind_of, quantized_layer

    path = name.rpartition(".")[0]
    module = model.get_submodule(path)
    kind = kind_of(module)
    row = backends.scheme(packed.spec.scheme)
    if kind is None:
        raise UnsupportedFileError(
            f"Weight {name!r} is quantized to {row.name}",
            f"it belongs to a {type(module).__name__}, which sdquant cannot run quantized",
            "Quantize the model again without it (skip=)",
        )
    modules = runtime == "library" and "library" in row.runtimes and kind in row.library_kinds
    if modules and not components.weight_dtype_matters(model, path):
        made = backends.get(row.backend).to_library(module, packed, spec)
    else:
        made = quantized_layer(module, packed)
    components.set_module(model, path, made)


def _assemble(asked: Request, made: planner.Plan, parts: dict[str, nn.Module]) -> Any:
    if set(parts) == {"model"}:
        return parts["model"]
    from . import components

    folder = Path(asked.base) if asked.base is not None else resolve(asked)
    return components.pipeline(folder, parts)


class Tick:
    """Counts bytes read; `tick(n)` adds n."""

    def __init__(self, bar: Any) -> None:
        self._bar = bar

    def __call__(self, nbytes: int) -> None:
        """Add `nbytes`."""
        self._bar.update(nbytes)


@contextlib.contextmanager
def _one_bar(made: planner.Plan, progress: bool) -> Iterator[Tick]:
    """A progress bar over the bytes of all components, shown after two seconds."""
    from tqdm import tqdm

    total = sum(info.nbytes for src in made.detected.sources.values() for info in src.tensors.values())
    name = Path(made.path).name
    with tqdm(
        total=total, desc=f"Loading {name}", unit="B", unit_scale=True, disable=not progress, delay=2, leave=False
    ) as bar:
        yield Tick(bar)
