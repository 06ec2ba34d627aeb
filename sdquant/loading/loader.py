"""Load a pipeline or component from a path, quantized and offloaded. Reads top to bottom."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Container, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ..core import LONE, dtype_named
from ..errors import BadFileError
from ..formats import Readahead, closing_files
from ..models import class_of, meta_model
from ..planning import Request, folder_of, make_request, prepare, source_of
from ..rules import RulesSpec, rules_in
from ..utils.arguments import answered
from ..utils.inference_mode import ordinary
from ..utils.progress import Tick, byte_bar
from . import finishing
from .quantized_cache import cache_of

if TYPE_CHECKING:
    import torch
    from torch import nn

    from ..formats import Checkpoint, Given
    from ..models import WeightLoader
    from ..offload import OffloadHandle
    from ..planning import ComponentPlan, Plan

log = logging.getLogger(__name__)


@dataclass(frozen=True, kw_only=True)
class Loaded:
    """Record of a load, stored as `.sdquant` on the pipeline or component that `load_model` returns.

    Attributes:
        seconds: duration of the load. cached: components whose quantized weights came from the cache.
    """

    plan: Plan
    offload: OffloadHandle
    seconds: float
    cached: tuple[str, ...] = ()

    def __deepcopy__(self, memo: object) -> Loaded:
        """Return itself: a copy of a model was loaded in the same way, and nothing in here needs copying."""
        return self


@answered
def load_model(
    path: str | Path,
    quant: str | Mapping[str, str | None] | None = None,
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
    allow_pickle: bool = False,
    cache: bool | str | Path | None = None,
    cache_limit: int | str = "50GB",
    progress: bool = True,
    parts: Sequence[str | Path] | Mapping[str, str | Path] | Path = (),
    variant: str | None = None,
    quant_stats: str | Path | None = None,
    compute: str | None = None,
    size: int | str | None = None,
    quality: float | None = None,
    revision: str | None = None,
    subfolder: str | None = None,
    token: str | bool | None = None,
    config: Given | None = None,
) -> Any:
    """Load a model, quantized and offloaded as requested, or raise a clear error before any weight is read.

    Args:
        path: pipeline folder, component folder, `.safetensors` or `.gguf` file, folder that `save` wrote, or something
            on the hub: "owner/name", "owner/name/file.gguf", "owner/name/folder", or its URL. The same holds for base
            and parts.
        quant: None to load the model as stored; a scheme ("nf4", "bnb:nf4", "nf4,double_quant"); component -> scheme;
            "none" for unquantized; "auto" for the fastest that fits (`planning.auto`).
        offload: "none", "model", "sequential", "balanced", "group", or "auto" for the fastest that fits.
        mode: "pre" quantizes tensor by tensor while loading, "post" after loading; "auto" is "pre".
        components: which to quantize; default: the UNet or transformer and the text encoders, never the VAE.
        skip: modules to leave unquantized, by a part of their path or a pattern with `*`.
        rules: instead of quant: rules per layer, of which the first that matches a layer applies. A list of
            `rules.QuantizationRule` or of mappings of its fields, or a YAML or JSON file. quant_stats: file of
            `sdquant calibrate`, for rules with act_static_scale.
        base: pipeline folder with the rest, if `path` is a single component or a checkpoint of several models without
            configs and tokenizers. It needs no weights for components that the file contains.
        runtime: "library", "plain" or "openvino"; default: plain on CPUs, elsewhere the library's layers if it has any.
        device: compute device; default: the best available. dtype: of unquantized weights; default: as in the file.
        budget: bytes (or "6GB") that weights may take on the device, for balanced offload.
        allow_incompatible: load combinations that the compatibility matrix refuses, with a warning.
        allow_pickle: open .ckpt, .pt and .bin files too. They are pickles, which can execute code; they are opened only
            with torch's weights_only.
        cache: store quantized weights and reuse them in later loads: True, or a folder; None takes the environment
            variable SDQUANT_CACHE, else no cache. cache_limit: maximum bytes (or "50GB") of the cache.
        progress: show a progress bar.
        parts: files (or folders) of single components (text encoders, a VAE, a transformer), each assigned to its
            component by its contents. They replace components of the pipeline folder or checkpoint, or of the base of
            a single component, which may lack them. A mapping of component to file, or "component=file" in a list,
            assigns them explicitly. Two components of the same shapes (Wan 2.2's transformer and transformer_2) need
            that, or a word such as HighNoise in the file's name. `path` itself may be assigned too.
        variant: variant (fp16, ema, ...) of a folder or hub repository, for each component that has it; default: the
            one without a name. Only the files that are loaded are downloaded from the hub.
        compute: "int8" for matrix products with quantized weights in 8-bit integers, from tens of rows of activations,
            which are quantized dynamically: faster, and less exact (docs/compute.md). It needs plain layers, and
            selects them. None or "float" computes as the scheme does by itself.
        size: with quant="auto", bytes (or "6GB") that all weights together take at most: each weight gets the scheme
            that is worth its bytes most (docs/mixes.md), or stays as it is. Weights are read once before they are
            loaded, to measure what schemes do to them; that is remembered. `quant_stats` makes it better.
        quality: instead of size, the least signal-to-noise ratio of the outputs, in dB (30), for as few bytes as
            possible.
        revision: branch, tag or commit of the hub repository that `path` names; for others "owner/name@revision".
        subfolder: folder to load within the repository, or within the folder on disk.
        token: access token of the hub; None for $HF_TOKEN, or that of `hf auth login`. It is not stored.
        config: where the file or component folder `path` says not how its weights are quantized, what would say it: a
            `quantization_config`, such as {"quant_method": "modelopt"}, the model's config with one in it, or JSON of
            either, as a file or as text. What the file says itself cannot be said otherwise.

    Returns:
        A diffusers pipeline, or a component if `path` is one and `base` is not set. Its `.sdquant` is a record of the
        load (`Loaded`).

    Raises:
        SdquantError: one of its kinds; see `sdquant.errors`.
    """
    parsed = make_request(
        path,
        quant=quant, offload=offload, mode=mode, components=components, skip=skip, rules=rules, base=base,
        runtime=runtime, device=device, dtype=dtype, budget=budget, allow_incompatible=allow_incompatible,
        allow_pickle=allow_pickle, cache=cache, cache_limit=cache_limit, progress=progress, parts=parts,
        variant=variant, quant_stats=quant_stats, compute=compute, revision=revision, subfolder=subfolder, token=token,
        size=size, quality=quality, config=config,
    )  # fmt: skip
    return load(parsed)


def load(request: Request) -> Any:
    """Load a model as `load_model` does, for a Request."""
    return load_planned(request, prepare(request))


@ordinary
def load_planned(request: Request, plan: Plan, on_bytes: Callable[[int, int], None] | None = None) -> Any:
    """Load a model for a Request whose plan exists already.

    Args:
        on_bytes: called with the bytes read so far and the total. An exception from it ends the load and propagates.
    """
    begin = time.perf_counter()
    lone = plan.detected.sources.get(LONE)
    if lone is not None:
        class_of(lone)
    for warning in plan.warnings:
        log.warning("%s", warning)
    finishing.prepare_libraries(plan.components, plan.device)
    total = sum(info.nbytes for src in plan.detected.sources.values() for info in src.tensors.values())
    with byte_bar(f"Loading {Path(plan.path).name}", total, request.progress, on_bytes) as tick:
        parts, cached = _parts(request, plan, tick)
    whole = assemble(plan, parts)
    from .. import offload
    from ..models import peft_hooks
    from ..utils.malloc_trim import trim

    trim()
    peft_hooks.prepare_pipeline(whole)
    handle = offload.apply(whole, plan.offload_mode, device=plan.device, budget=plan.budget)
    whole.sdquant = Loaded(plan=plan, offload=handle, seconds=time.perf_counter() - begin, cached=cached)
    return whole


def import_classes(plan: Plan) -> None:
    """Import the classes of diffusers and transformers that the plan needs, so that import is not timed as loading."""
    from ..models import model_class, pipeline_folders
    from ..utils.quiet_imports import quiet_imports

    for component in plan.components:
        model_class(*class_of(source_of(plan, component)))
    if [component.name for component in plan.components] != [LONE]:
        with quiet_imports():
            pipeline_folders.pipeline_class(folder_of(plan))


def _parts(request: Request, plan: Plan, tick: Tick) -> tuple[dict[str, nn.Module], tuple[str, ...]]:
    """Return all components by name, and the names of those that came from the cache."""
    cache, parts, used = cache_of(request), {}, {}
    for component in plan.components:
        src = source_of(plan, component)
        if cache is None or component.action != "encode":
            parts[component.name] = build(component, src, plan, tick, request.skip)
            continue
        place = cache.place(component, src, plan.dtype, plan.device, progress=request.progress)
        cached = cache.found(place, src)
        if cached is not None:
            try:
                parts[component.name] = build(replace(component, action="found", mode="found"), cached, plan, tick)
                used[component.name] = place
                continue
            except BadFileError as error:
                cache.drop(place, str(error))
        parts[component.name] = build(component, src, plan, tick, request.skip)
        if cache.place(component, src, plan.dtype, plan.device, progress=request.progress) == place:
            cache.keep(place, parts[component.name], used.values())
        else:
            log.warning("%s changed while it was being loaded: its quantized weights are not cached", src.path)
    return parts, tuple(used)


def build(component: ComponentPlan, src: Checkpoint, plan: Plan, tick: Tick, skip: tuple[str, ...] = ()) -> nn.Module:
    """Return one component; its weights are read, and if need be quantized, one at a time.

    Args:
        skip: patterns of modules that are not quantized, as in the request.
    """
    from ..models import WeightLoader, key_names
    from ..nn import quantized
    from ..rules import product_ranges
    from .quantizer import quantize_module

    model = meta_model(src)
    product_ranges.stand_in(model, ((key, info.shape) for key, info in src.plain.items()))
    dtype = dtype_named(plan.dtype) if plan.dtype else None
    install = WeightLoader(model, component.runtime, dtype, plan.device, src.schemes)
    ahead = Readahead(src.files)

    def done(nbytes: int) -> None:
        ahead.advance(nbytes)
        tick(nbytes)

    try:
        fill(install, component, src, plan, done, skip)
    finally:
        ahead.close()
    install.finish(src)
    if component.action == "encode" and component.mode == "post" and component.spec is not None:
        named = (install.quantizable(weight.name, component.spec) for weight in component.weights)
        only = {name for name in named if name is not None}
        quantize_module(model, component.spec, runtime=component.runtime, only=only, device=plan.device)
    rules = component.spec if isinstance(component.spec, RulesSpec) else rules_in(src.files[0], src.rules)
    finishing.finish(model, component, rules)
    key_names.remember(model, src.conversions, quantized=any(True for _ in quantized(model)))
    return model


def fill(
    install: WeightLoader,
    component: ComponentPlan,
    src: Checkpoint,
    plan: Plan,
    tick: Callable[[int], None],
    skip: tuple[str, ...] = (),
    only: Container[str] | None = None,
) -> None:
    """Read a component's weights and hand them to `install`, one at a time.

    Args:
        tick: called with the bytes of each tensor. skip: as for `build`.
        only: keys of plain tensors and names of quantized weights; None for all.
    """
    from ..core import is_range, name_patterns
    from ..models import refuse_not_finite

    selected = {weight.name for weight in component.weights}
    encode = selected if component.action == "encode" and component.mode == "pre" else set()
    with closing_files(src.open()) as files:
        for key, info in src.plain.items():
            if only is not None and key not in only:
                continue
            read = src.read(files, key)
            tensor = read if is_range(key) else install.cast(key, read)
            if key in encode and component.spec is not None:
                install.encode(key, tensor, component.spec, plan.device, src.home[key])
            else:
                if component.spec is not None and component.action == "encode" and key not in selected:
                    refuse_not_finite(key, tensor, component.spec, skip, src.keys)
                install.plain(key, tensor, src.home[key], as_it_is=name_patterns.skipped(key, skip, src.keys))
            tick(info.nbytes)
        for name in src.prequantized:
            if only is None or name in only:
                install.load_prequantized(name, src, files, component.spec)
                tick(src.prequantized_bytes(name))


def assemble(plan: Plan, parts: Mapping[str, nn.Module]) -> Any:
    """Return the pipeline of these components, or the component itself if it is loaded alone."""
    if set(parts) == {LONE}:
        return parts[LONE]
    from ..models import file_tokenizers, pipeline_folders

    folder = folder_of(plan)
    return pipeline_folders.pipeline(folder, parts, file_tokenizers.built(folder, plan.detected.sources))
