"""Gradients and LoRA training on offloaded models: as without offload bit for bit, or refused before the first step."""

from __future__ import annotations

import functools
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import sdquant
from sdquant import lora
from sdquant.errors import IncompatibleError
from sdquant.models.components import quiet

from .conftest import DEVICE
from .test_balanced import BLOCK, REST, Net, Pipe
from .test_threads import MOVING, offloaded

# With a LoRA beside them: the blocks of the UNet take turns.
ROOM = {"int8": "1MB", "nf4": "1400KB", "bnb-int8": "1500KB", None: "2400KB"}
TRAIN, REFUSE = ("model", "balanced"), ("group", "sequential")
CHECKPOINTS = (None, False, True)  # the last two: of which kind, `use_reentrant`


def trained(scheme: str | None, mode: str, runtime: str | None, use_reentrant: bool | None, file: Path) -> list[Any]:
    """The losses, the gradients and the LoRA's file after three steps of training on the shipped model."""
    with quiet():
        pipe = sdquant.load_model(
            sdquant.demo.path("digits-sd"), scheme, mode, runtime=runtime, dtype="float32", progress=False,
            device=DEVICE, budget=ROOM[scheme] if mode == "balanced" else None,
        )  # fmt: skip
        torch.manual_seed(0)
        parameters = lora.add_lora(pipe.unet, rank=4)
    assert {(p.dtype, p.device.type) for p in parameters} == {(torch.float32, DEVICE)}
    with torch.no_grad():
        for parameter in parameters:
            parameter.normal_(0, 0.1)  # what is written before the first step is there in the first step
        text = pipe.text_encoder(torch.arange(10, device=DEVICE)[None])[0]
    if use_reentrant is not None:
        run = functools.partial(checkpoint, use_reentrant=use_reentrant)
        pipe.unet.train()._set_gradient_checkpointing(enable=True, gradient_checkpointing_func=run)
    x = torch.randn(1, 4, 8, 8).to(DEVICE).requires_grad_()
    optimizer = torch.optim.SGD(parameters, lr=0.5)
    found: list[Any] = []
    for _ in range(3):
        optimizer.zero_grad()
        x.grad = None
        latents = pipe.unet(x, 500, text).sample
        loss = (latents - 1).square().mean() + pipe.vae.decode(latents).sample.mean()  # which evicts the UNet
        loss.backward()
        found += [loss.item(), x.grad, *(p.grad.clone() for p in parameters)]
        optimizer.step()
    assert len({value for value in found if isinstance(value, float)}) == 3  # each step takes effect in the next
    saved = load_file(lora.save_lora(pipe.unet, file))
    assert any(torch.equal(parameters[0].cpu(), tensor) for tensor in saved.values())
    pipe.unet.to("cpu")
    handle = pipe.unet.__dict__["_sdquant_offload"]
    assert mode == "none" or handle.counters.evictions
    handle.remove()
    return [*found, *(saved[key] for key in sorted(saved))]


def alike(one: list[Any], other: list[Any]) -> bool:
    """Whether all numbers are the same; on a card, whose sums in backward have no fixed order and whose convolutions
    round to TF32, almost: to a hundredth of a tensor's norm."""
    exact = DEVICE == "cpu"
    pairs = [(torch.as_tensor(a).cpu(), torch.as_tensor(b).cpu()) for a, b in zip(one, other, strict=True)]
    return all(torch.equal(a, b) if exact else bool((a - b).norm() <= 0.01 * b.norm()) for a, b in pairs)


@functools.cache
def expected(scheme: str | None, runtime: str | None, use_reentrant: bool | None, folder: Path) -> list[Any]:
    return trained(scheme, "none", runtime, use_reentrant, folder / "none.safetensors")


FAST = {("nf4", "balanced", None)}
CASES = [
    pytest.param(scheme, mode, kind, marks=() if (scheme, mode, kind) in FAST else pytest.mark.slow)
    for scheme in ("nf4", "int8", None)
    for mode in TRAIN
    for kind in CHECKPOINTS
]


@pytest.mark.parametrize(("scheme", "mode", "use_reentrant"), CASES)
def test_the_docs_recipe_trains_as_without_offload(
    scheme: str | None, mode: str, use_reentrant: bool | None, tmp_path: Path
) -> None:
    runtime = None if scheme is None else "plain"
    got = trained(scheme, mode, runtime, use_reentrant, tmp_path / "lora.safetensors")
    assert alike(got, expected(scheme, runtime, use_reentrant, tmp_path))


@pytest.mark.parametrize(
    ("scheme", "mode"),
    [
        ("nf4", "balanced"),
        *(
            pytest.param(scheme, mode, marks=pytest.mark.slow)
            for scheme, mode in (("nf4", "model"), ("bnb-int8", "model"), ("bnb-int8", "balanced"), ("qint8", "model"))
        ),
    ],
)
def test_a_library_s_layers_give_the_right_gradients_or_none(scheme: str, mode: str, tmp_path: Path) -> None:
    try:
        got = trained(scheme, mode, "library", None, tmp_path / "lora.safetensors")
    except IncompatibleError as error:
        assert "gradients through the unet" in error.what and "runtime='plain'" in error.fix
    else:
        assert alike(got, expected(scheme, "library", None, tmp_path))


class Deep(Net):
    """Beside its blocks a norm and a convolution, whose weights autograd keeps; blocks can be checkpointed."""

    def __init__(self, keeps: bool | None = None) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(64)
        self.blocks = nn.ModuleList(
            [nn.Sequential(nn.Linear(64, 64), nn.LayerNorm(64), nn.Tanh(), nn.Linear(64, 64)) for _ in range(6)]
        )
        self.order, self.keeps = list(range(6)), keeps
        self.requires_grad_(False)

    def forward(self, x: Tensor) -> Tensor:
        x = self.norm(self.head(x))
        for block in self.blocks:
            x = x + (block(x) if self.keeps is None else checkpoint(block, x, use_reentrant=self.keeps))
        out: Tensor = self.tail(x)
        return out


def gradient(net: nn.Module) -> Tensor:
    x = torch.linspace(-1, 1, 64)[None].requires_grad_()
    net(x).square().sum().backward()
    assert x.grad is not None
    return x.grad


@pytest.mark.parametrize("use_reentrant", CHECKPOINTS)
@pytest.mark.parametrize("mode", MOVING)
def test_gradients_of_inputs(mode: str, use_reentrant: bool | None, tmp_path: Path) -> None:
    net, other = Deep(use_reentrant), Net(seed=5)
    wanted = gradient(net)
    handle = offloaded(mode, Pipe(net=net, other=other), tmp_path, 6 * BLOCK + REST)
    for _ in range(2):
        if mode in TRAIN:
            x = torch.linspace(-1, 1, 64)[None].requires_grad_()
            y = net(x)
            other(torch.ones(1, 64))  # in "model" it takes the place of the other one's weights
            y.square().sum().backward()
            assert x.grad is not None and torch.equal(x.grad, wanted)
        else:
            with pytest.raises(IncompatibleError, match="Cannot compute gradients"):
                gradient(net)
    handle.remove()
    assert torch.equal(gradient(net), wanted)


@pytest.mark.parametrize("mode", TRAIN)
def test_hooks_around_the_call_see_all_but_the_weights(mode: str, tmp_path: Path) -> None:
    net = Deep()
    wanted = gradient(net)
    handle = offloaded(mode, net, tmp_path, 6 * BLOCK + REST)
    with torch.autograd.graph.save_on_cpu():
        assert torch.equal(gradient(net), wanted)
    handle.remove()


@pytest.mark.parametrize("mode", TRAIN)
def test_a_backward_that_fails_leaves_no_hooks_to_the_next_call(mode: str, tmp_path: Path) -> None:
    net = Deep(False)
    wanted = gradient(net)
    handle = offloaded(mode, net, tmp_path, 6 * BLOCK + REST)

    before = [len(module._forward_pre_hooks) for module in net.modules()]

    def fail(grad: Tensor) -> None:
        raise RuntimeError("a hook of somebody's own")

    hook = net.head.weight.requires_grad_().register_hook(fail)
    with pytest.raises(RuntimeError, match="somebody's own"):
        gradient(net)
    assert [len(module._forward_pre_hooks) for module in net.modules()] != before
    hook.remove()
    net.head.weight.requires_grad_(False)
    with torch.no_grad():
        net(torch.ones(1, 64))
    assert [len(module._forward_pre_hooks) for module in net.modules()] == before
    assert torch.equal(gradient(net), wanted)
    handle.remove()


@pytest.mark.parametrize("mode", TRAIN)
def test_weights_that_a_mode_moves_are_not_trained(mode: str, tmp_path: Path) -> None:
    net = Net()
    handle = offloaded(mode, net, tmp_path, 4 * REST)
    x = torch.ones(1, 64, requires_grad=True)
    loss = net(x).sum()
    (of_x,) = torch.autograd.grad(loss, x, retain_graph=True)  # asks for no weight's gradient
    assert of_x.abs().sum() > 0
    with pytest.raises(IncompatibleError, match=r"Cannot train .* of the model with offload="):
        loss.backward()
    handle.remove()
    net(x).sum().backward()
    assert all(p.grad is not None for p in net.parameters())


@pytest.mark.parametrize("mode", REFUSE)
def test_a_lora_is_not_added_where_it_cannot_be_trained(mode: str, sd: Path) -> None:
    with quiet():
        pipe = sdquant.load_model(sd, None, mode, progress=False)
    with pytest.raises(IncompatibleError, match=f"with offload='{mode}'"):
        lora.add_lora(pipe.unet, rank=4)
    assert not hasattr(pipe.unet, "peft_config")


def test_a_lora_that_is_trained_is_never_moved(sd: Path) -> None:
    with quiet():
        pipe = sdquant.load_model(sd, "int8", "balanced", budget="700KB", device=DEVICE, progress=False)
        parameters = lora.add_lora(pipe.unet, rank=4)
    assert {p.dtype for p in parameters} == {torch.float32} != {pipe.unet.dtype}
    with torch.no_grad():
        given = [torch.ones(size, dtype=torch.bfloat16, device=DEVICE) for size in ((1, 4, 8, 8), (1, 10, 128))]
        before = pipe.unet(given[0], 500, given[1]).sample
        where = [p.data_ptr() for p in parameters]
        for parameter in parameters:
            parameter.fill_(0.05)
        after = pipe.unet(given[0], 500, given[1]).sample
    assert where == [p.data_ptr() for p in parameters] and not torch.equal(before, after)
    assert {id(p) for p in pipe.unet.parameters() if p.requires_grad} == {id(p) for p in parameters}
    pipe.unet.__dict__["_sdquant_offload"].remove()
