"""Whatever is done to an offloaded pipeline ends as without offload, or is refused by a sentence that names it."""

from __future__ import annotations

import contextlib
import copy
import functools
import gc
import importlib
import inspect
import pkgutil
import re
import tempfile
import types
import weakref
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
import torch

import sdquant
from sdquant import offload
from sdquant.compat import check
from sdquant.errors import BudgetError, SdquantError, SettingsError
from sdquant.models import pipelines
from sdquant.offload import actions
from sdquant.offload.state_guards import is_move
from tests.offload.pipeline_changes import ACTIONS, PROMPT

from ..file_only import FORMATS, quantized_folder
from .conftest import DEVICE, hooked

if TYPE_CHECKING:
    from collections.abc import Iterator

MODES = [row.name for row in offload.MODES if row.name != "none"]
MODELS = [("int8", "plain"), ("nf4", "library"), ("comfy", "plain"), ("gptq shuffled", "plain"), ("torchao", "plain")]
FAST = {"of_components", "textual_inversion", "another_layer"}
# What no mode may do, whatever the model: the word that the sentence has.
REFUSED = {
    "pipe_to_meta": "meta", "block_to_meta": "meta", "deep_copied": "copy", "pipe_deep_copied": "copy",
    "block_deep_copied": "copy", "pickled": "pickle", "saved_by_torch": "pickle", "shared_memory": "share",
    "emptied": "to_empty", "model_cpu_offload": "enable_model_cpu_offload",
    "sequential_cpu_offload": "enable_sequential_cpu_offload", "group_offload": "enable_group_offload",
    "layerwise_casting": "enable_layerwise_casting",
}  # fmt: skip


# What computes on the CPU afterwards without offload, and where it did with a mode.
ON_CPU = {"pipe_to_cpu"}
# What one mode cannot do: PEFT's function moves an adapter to the device of its layer, whose weights are on meta there.
REFUSED_BY = {("adapter_by_peft", "sequential"): "meta"}


@functools.cache
def loaded(scheme: str, runtime: str) -> Any:
    """digits-sd in float32, with a method of somebody's own: its UNet and text encoder in a scheme, or its UNet in a
    format of files."""
    given: dict[str, Any] = {"runtime": runtime, "device": DEVICE, "dtype": "float32", "progress": False}
    if scheme in FORMATS:
        with tempfile.TemporaryDirectory() as folder:
            pipe = sdquant.load_model(quantized_folder("digits-sd", scheme, Path(folder) / "model"), **given)
    else:
        pipe = sdquant.load_model(sdquant.demo.path("digits-sd"), scheme, **given)
    pipe.sdquant.offload.remove()
    pipe.sdquant = None
    pipe.__class__ = _with_a_method(type(pipe))
    return pipe


def pipeline(scheme: str, runtime: str, mode: str, *, own: bool = False) -> Any:
    """A copy with a mode on it; balanced streams the UNet. `own`: a UNet of somebody's own class, too, which diffusers
    would not take into another pipeline."""
    pipe = copy.deepcopy(loaded(scheme, runtime))
    if own:
        pipe.unet.__class__ = _with_a_method(type(pipe.unet))
    pipe.set_progress_bar_config(disable=True)
    largest = max(offload.weight_bytes(part) for part in pipelines.components_of(pipe).values())
    budget = int(0.95 * largest) if mode == "balanced" else None
    pipe.handle = offload.apply(pipe, mode, device=DEVICE, budget=budget)
    return pipe


@functools.cache
def _with_a_method(cls: Any) -> Any:
    """A subclass of somebody's own, with a method that nobody has classified."""

    def shift(self: Any, amount: float) -> None:
        getattr(self, "unet", self).conv_in.bias.data.add_(amount)

    return type(cls.__name__, (cls,), {"shift": shift, "__module__": cls.__module__})


def drawn(pipe: Any, more: dict[str, Any]) -> torch.Tensor:
    """[1, 16, 16, 3] of two steps."""
    given = {"prompt": PROMPT, "num_inference_steps": 2, "output_type": "pt", "generator": torch.manual_seed(0)} | more
    known = inspect.signature(pipe.__call__).parameters
    picture = torch.linspace(0, 1, 3 * 32 * 32).view(1, 3, 32, 32)
    if "strength" in known:
        given |= {"image": picture, "strength": 1.0}
    elif "image" in known:
        given |= {"image": picture}
    if "mask_image" in known:
        given |= {"mask_image": torch.ones(1, 1, 32, 32)}
    if "image" not in given:
        given |= {"height": 32, "width": 32}
    image: torch.Tensor = pipe(**given).images
    return image.cpu()


# What the model itself does not take, offloaded or not: sdquant's layers writes, bitsandbytes' modules what their
# library gives as an error, as they do in diffusers (joined projections, weights out of a state dict of their own).
RAISES = {
    "plain": {"lora_fused", "another_weight"},
    "library": {"lora_fused", "another_weight", "fused_projections", "unfused_projections", "other_weights"},
}


def outcome(pipe: Any, name: str) -> Any:
    """What the action and a call give, of each pipeline there is, or the error that ends it."""
    try:
        drawn(pipe, {})
        given = ACTIONS[name](pipe)
        more = given if isinstance(given, dict) else {}
        pipes = [pipe] if given is None or more else [given, pipe]
        for one in pipes:
            one.set_progress_bar_config(disable=True)
        images = [drawn(one, more) for one in pipes]
    except Exception as error:
        return error
    states = [
        {f"{path}.{key}": value.cpu() for path, part in sorted(pipelines.components_of(one).items())
         for key, value in part.state_dict().items()} for one in pipes
    ]  # fmt: skip
    with pipe.handle.suspended():
        flags = {f"{path}.{key}": value.requires_grad for path, part in pipelines.components_of(pipe).items()
                 for key, value in part.named_parameters()}  # fmt: skip
    return images, states, flags


@functools.lru_cache(maxsize=2)
def expected(scheme: str, runtime: str, name: str) -> Any:
    """The outcome without offload."""
    return outcome(pipeline(scheme, runtime, "none", own=name == "an_own_method"), name)


@functools.cache  # asked once for each action, while all workers collect
def refused_by_the_matrix(scheme: str, runtime: str, mode: str) -> bool:
    try:
        check(FORMATS.get(scheme, scheme), mode, runtime=runtime, device=DEVICE)
    except SdquantError:
        return True
    return False


CELLS = [
    pytest.param(
        scheme, runtime, name, mode, id=f"{name}-{scheme}-{runtime}-{mode}",
        marks=() if name in FAST and scheme == "int8" else pytest.mark.slow,
    )
    for scheme, runtime in MODELS for name in ACTIONS for mode in MODES
    if not refused_by_the_matrix(scheme, runtime, mode)  # which load_model refuses before there is a model
]  # fmt: skip


@pytest.fixture(scope="module", autouse=True)
def frozen() -> Iterator[None]:
    """Modes collect garbage when they are put on: leave out what is there for good."""
    loaded("int8", "plain")
    gc.collect()
    gc.freeze()
    yield
    gc.unfreeze()


@pytest.mark.filterwarnings("ignore::FutureWarning")
@pytest.mark.parametrize(("scheme", "runtime", "name", "mode"), CELLS)
def test_an_action(scheme: str, runtime: str, name: str, mode: str) -> None:
    pipe = pipeline(scheme, runtime, mode, own=name == "an_own_method")
    handle, found = pipe.handle, outcome(pipe, name)
    if (name, mode) in REFUSED_BY:
        assert isinstance(found, SdquantError) and REFUSED_BY[name, mode] in str(found), found
        assert mode in found.what and "suspended()" in found.fix
        return
    if name in REFUSED:
        assert isinstance(found, SdquantError) and REFUSED[name] in found.what, found
        assert mode in found.what and "remove()" in found.fix
        wanted = expected(scheme, runtime, "nothing")
        found = outcome(pipe, "nothing")  # and nothing is broken
    else:
        wanted = expected(scheme, runtime, name)
    if isinstance(wanted, Exception):
        assert name in RAISES[runtime], wanted
        assert type(found) is type(wanted) and str(found) == str(wanted), (found, wanted)
    else:
        if isinstance(found, Exception):
            raise found
        for images, others in zip(found[0], wanted[0], strict=True):
            if name in ON_CPU and DEVICE != "cpu":
                assert torch.allclose(images, others, atol=0.02)
            else:
                assert torch.equal(images, others)
        for state, other in zip(found[1], wanted[1], strict=True):
            assert state.keys() == other.keys()
            assert [k for k in state if state[k].dtype != other[k].dtype or not torch.equal(state[k], other[k])] == []
        assert found[2] == wanted[2] and handle.active
    handle.remove()
    assert not hooked(pipe) and not hasattr(type(pipe), "_sdquant_class")


ACTIONS["nothing"] = lambda pipe: None


def bases() -> set[type]:
    """The classes that diffusers' and transformers' pipelines and models have in common."""
    import diffusers
    import diffusers.loaders
    import diffusers.models
    import transformers
    from diffusers.pipelines import pipeline_utils

    found: set[type] = {pipeline_utils.DiffusionPipeline, pipeline_utils.StableDiffusionMixin}
    found |= {transformers.PreTrainedModel, transformers.GenerationMixin}
    for package in (diffusers.loaders, diffusers.models):
        for entry in pkgutil.walk_packages(package.__path__, f"{package.__name__}."):
            with contextlib.suppress(ImportError, RuntimeError):  # flax, onnx: what is not installed
                module = importlib.import_module(entry.name)
                found |= {v for k, v in vars(module).items() if inspect.isclass(v) and k.endswith("Mixin")}
    return {base for one in found for base in one.__mro__} - {object}


def test_every_method_has_a_row() -> None:
    """A new diffusers or transformers is noticed here. Until there is a row, the mode is suspended for the method."""
    rows = [actions.SAFE, actions.MOVES, actions.SUSPENDED, frozenset(actions.REFUSED)]
    own = {
        name
        for base in bases()
        for name, value in vars(base).items()
        if isinstance(value, types.FunctionType) and not name.startswith("_")
    }
    assert sorted(own - frozenset().union(*rows)) == []
    assert sum(map(len, rows)) == len(frozenset().union(*rows))  # no name is in two


def test_what_a_call_uses_is_no_reason_to_suspend() -> None:
    """Of every pipeline of diffusers: what its call uses by itself, and nothing that has a row of its own."""
    from diffusers import StableDiffusionPipeline, UNet2DConditionModel

    used = actions.used_by(StableDiffusionPipeline, ("__call__",))
    assert {"encode_prompt", "check_inputs", "run_safety_checker", "get_guidance_scale_embedding"} <= used
    assert actions.kind("to", used) is actions.CallTreatment.MOVES
    assert "process_encoder_hidden_states" in actions.used_by(UNet2DConditionModel)
    assert actions.kind("merge_everything", used) is actions.CallTreatment.UNKNOWN


@pytest.mark.parametrize("mode", ["model", "balanced"])
def test_another_tool_s_wrapper_stays(mode: str) -> None:
    """One that was put on after the mode: it is called once for each call, before and after the mode goes."""
    pipe = pipeline("int8", "plain", mode)
    wanted, calls, forward = drawn(pipe, {}), [], pipe.unet.forward

    def counted(*args: Any, **kwargs: Any) -> Any:
        calls.append(1)
        return forward(*args, **kwargs)

    pipe.unet.forward = counted
    for _ in range(2):
        assert torch.equal(drawn(pipe, {}), wanted)
        pipe.unet.to(torch.float32)  # which suspends the mode
    pipe.handle.remove()
    pipe.to(DEVICE)
    assert torch.equal(drawn(pipe, {}), wanted) and len(calls) == 6
    assert pipe.unet.forward is counted


def test_a_budget_is_held_against_the_new_sizes() -> None:
    pipe = copy.deepcopy(loaded("int8", "plain"))
    pipe.set_progress_bar_config(disable=True)
    with pytest.raises(BudgetError) as caught:
        offload.apply(pipe, "balanced", device="cpu", budget=1000)
    least = re.search(r"at least (\d+) bytes", caught.value.fix)
    assert least is not None
    handle = offload.apply(pipe, "balanced", device="cpu", budget=int(least[1]))
    wanted = drawn(pipe, {})
    with pytest.raises(BudgetError, match="needs") as caught:
        pipe.to(torch.float64)
    assert "at least" in caught.value.fix
    with pytest.raises(BudgetError):  # never beyond the budget without a word
        drawn(pipe, {})
    pipe.to(torch.float32)
    assert torch.equal(drawn(pipe, {}), wanted) and handle.report()["peak"] <= handle.facts["budget"]


def test_where_a_move_goes() -> None:
    cuda, one = torch.device("cuda"), torch.device("cuda", 1)
    assert actions.destination("cuda", (), {}) == (cuda, (), {})
    assert actions.destination("cuda", (1,), {}) == (one, (), {})
    assert actions.destination("to", ("cuda:1", torch.float16), {}) == (one, (torch.float16,), {})
    assert actions.destination("to", (), {"device": "cuda", "dtype": torch.float16}) == (
        cuda, (), {"dtype": torch.float16}
    )  # fmt: skip
    assert actions.destination("to", (torch.float16,), {}) == (None, (torch.float16,), {})
    handle = offload.OffloadHandle("model", "cuda:0", 0)
    assert not is_move(handle, cuda) and is_move(handle, torch.device("cpu"))
    for elsewhere in (one, torch.device("meta")):
        with pytest.raises(SettingsError, match=rf"^Cannot move a model with offload='model' to {elsewhere}"):
            is_move(handle, elsewhere)


def test_not_while_the_model_computes() -> None:
    pipe = pipeline("int8", "plain", "model")
    hook = pipe.unet.conv_in.register_forward_hook(lambda *_: pipe.unet.state_dict() and None)
    with pytest.raises(SettingsError, match=r"^Cannot call state_dict with offload='model' while the model is running"):
        drawn(pipe, {})
    hook.remove()
    assert torch.equal(drawn(pipe, {}), drawn(pipeline("int8", "plain", "none"), {}))


def test_a_component_that_goes_is_free() -> None:
    pipe = pipeline("int8", "plain", "balanced")
    drawn(pipe, {})
    gone = weakref.ref(pipe.vae)
    pipe.vae = None
    gc.collect()
    assert gone() is None and "vae" not in pipelines.components_of(pipe)
    unet, given = pipe.unet, (torch.zeros(1, 4, 8, 8, device=DEVICE), 1, torch.zeros(1, 77, 128, device=DEVICE))
    with torch.no_grad():
        wanted = unet(*given).sample
    handle = pipe.handle
    del pipe
    gc.collect()
    with torch.no_grad():  # the mode goes on with what is left
        assert torch.equal(unet.requires_grad_(False).to("cpu")(*given).sample, wanted)
        unet.load_state_dict(unet.state_dict())
        assert torch.equal(unet(*given).sample, wanted) and handle.report()["components"].keys() >= {"unet"}
