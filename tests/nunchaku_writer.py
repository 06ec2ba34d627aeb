"""Run in a process of its own, with DeepCompressor: `python nunchaku_writer.py SOURCE TARGET WAY...`.

Quantizes the Flux transformer at SOURCE in a few lines, and lets DeepCompressor's own converter pack, order and name it
as Nunchaku's folders are, in TARGET/WAY; TARGET/WAY.safetensors has the weights that this stands for, by the names of
diffusers. A way is int4 or nvfp4. Or SOURCE is a T5, and its packer of AWQ writes TARGET/t5.safetensors, for t5.
"""

from __future__ import annotations

import contextlib
import io
import json
import re
import runpy
import shutil
import sys
import warnings
from pathlib import Path

import torch
from deepcompressor.backend.tinychat.utils import convert_to_tinychat_w4x16y16_linear_weight
from safetensors.torch import load_file, save_file
from torch import Tensor

RANK, SHIFT = 32, 0.171875
E2M1 = torch.tensor([0, 0.5, 1, 1.5, 2, 3, 4, 6])
MERGED = re.compile(r"(.*\.)(to_|add_)([kv])(_proj)?$")  # what has the smoothing and the branch of its q


class State:
    """What DeepCompressor saves before it converts, and the floats that it stands for."""

    def __init__(self, weights: dict[str, Tensor], nvfp4: bool) -> None:
        self.model, self.nvfp4 = dict(weights), nvfp4
        self.scale: dict[str, Tensor] = {}
        self.smooth: dict[str, Tensor] = {}
        self.branch: dict[str, dict[str, Tensor]] = {}
        self.floats = {name: tensor.float() for name, tensor in weights.items()}

    def linears(self, names: list[str], smooth_of: str, branch_of: str, *, fused: bool = False) -> list[Tensor]:
        """Layers of one input: a branch and a smoothing for all. Returns their weights as floats, without rounding."""
        weight = torch.cat([self.model[f"{name}.weight"] for name in names]).float()
        smooth = self.smooth.get(smooth_of)
        if smooth is None:
            smooth = self.smooth[smooth_of] = weight.abs().amax(0).clamp(min=1e-3).sqrt().bfloat16()
        stretched = weight if fused else weight * smooth.float()
        u, s, v = torch.linalg.svd(stretched, full_matrices=False)
        up, down = (u[:, :RANK] * s[:RANK]).bfloat16(), v[:RANK].bfloat16()
        self.branch[branch_of] = {"a.weight": down, "b.weight": up}
        rest, columns = stretched - up.float() @ down.float(), 1 if fused else smooth.float()
        stored = down if fused else (down.double() / smooth.double()).bfloat16()
        results, at = [], 0
        for name in names:
            rows = slice(at, at := at + len(self.model[f"{name}.weight"]))
            codes = self._codes(name, rest[rows])
            self.model[f"{name}.weight"] = codes.bfloat16()
            results.append(codes / columns)
            self.floats[f"{name}.weight"] = codes / columns + up[rows].float() @ stored.float()
        return results

    def _codes(self, name: str, rest: Tensor) -> Tensor:
        rows, key = len(rest), f"{name}.weight.scale"
        if not self.nvfp4:
            groups = rest.view(rows, -1, 64)
            scale = (groups.abs().amax(-1, keepdim=True).clamp(min=1e-6) / 7).bfloat16()
            self.scale[f"{key}.0"] = scale.view(rows, 1, -1, 1)
            return ((groups / scale.float()).round().clamp(-8, 7) * scale.float()).view(rows, -1)
        whole = (rest.abs().amax() / (6 * 448)).bfloat16()
        groups = (rest / whole.float()).view(rows, -1, 16)
        scale = (groups.abs().amax(-1, keepdim=True).clamp(min=0.1) / 6).to(torch.float8_e4m3fn).bfloat16()
        self.scale |= {f"{key}.0": whole.view(1, 1, 1, 1), f"{key}.1": scale.view(rows, 1, -1, 1)}
        each = groups / scale.float()
        values = E2M1[(each.abs().unsqueeze(-1) - E2M1).abs().argmin(-1)] * each.sign()
        return (values * scale.float()).view(rows, -1) * whole.float()

    def awq(self, name: str, chunks: int) -> None:
        weight = self.model[f"{name}.weight"].float()
        groups = weight.view(len(weight), -1, 64)
        scale = (groups.abs().amax(-1, keepdim=True).clamp(min=1e-6) / 7).bfloat16()
        codes = (groups / scale.float()).round()
        self.scale[f"{name}.weight.scale.0"] = scale.view(len(weight), 1, -1, 1)
        self.model[f"{name}.weight"] = (codes * scale.float()).view_as(weight).bfloat16()
        zero = (7 * scale.float()).bfloat16().float()
        self.floats[f"{name}.weight"] = ((codes + 7) * scale.float() - zero).view_as(weight)
        bias = self.model[f"{name}.bias"].view(chunks, -1).clone()
        for chunk in {1, chunks - 2}:
            bias[chunk] = ((bias[chunk] + 1).float() - 1).bfloat16()
        self.floats[f"{name}.bias"] = bias.flatten().float()

    def fuse(self, value: str, out: str, smooth_of: str) -> None:
        """Put the smoothing of an attention's output into its values."""
        if smooth_of not in self.smooth:
            self.smooth[smooth_of] = self.model[f"{out}.weight"].float().abs().amax(0).clamp(min=0.01).sqrt().bfloat16()
        smooth = self.smooth[smooth_of].float()
        self.model[f"{value}.weight"] = (self.model[f"{value}.weight"].float() / smooth[:, None]).bfloat16()
        self.model[f"{value}.bias"] = (self.model[f"{value}.bias"].float() / smooth).bfloat16()
        self.model[f"{out}.weight"] = (self.model[f"{out}.weight"].float() * smooth).bfloat16()
        self.floats[f"{value}.bias"] = self.model[f"{value}.bias"].float()

    def second(self, name: str, smooth_of: str) -> None:
        """The second layer of a feed-forward net, whose input is shifted where it is int4."""
        if self.nvfp4:
            self.linears([name], smooth_of, smooth_of)
            return
        inner = f"{name}.linear"
        weight, bias = self.model.pop(f"{name}.weight"), self.model.pop(f"{name}.bias")
        bias = (bias.double() - weight.double().sum(1) * SHIFT).bfloat16()
        self.model |= {f"{inner}.weight": weight, f"{inner}.bias": bias, f"{name}.shift": torch.tensor([SHIFT])}
        self.floats.pop(f"{name}.weight", None)
        (rest,) = self.linears([inner], f"{smooth_of}.linear", f"{smooth_of}.linear")
        low, smooth = self.branch[f"{smooth_of}.linear"], self.smooth[f"{smooth_of}.linear"]
        moved = low["b.weight"].double() @ (low["a.weight"].double() / smooth.double()).sum(1) * SHIFT
        stored = (bias.double() + moved).bfloat16().float()
        self.floats[f"{name}.weight"] = self.floats.pop(f"{inner}.weight")
        self.floats[f"{name}.bias"] = stored + SHIFT * rest.sum(1)


def flux(weights: dict[str, Tensor], nvfp4: bool) -> State:
    state = State(weights, nvfp4)
    block, single = "transformer_blocks.0.", "single_transformer_blocks.0."
    whole = state.model.pop(f"{single}proj_out.weight")
    bias = state.model.pop(f"{single}proj_out.bias")
    state.model[f"{single}proj_out.linears.0.weight"] = whole[:, : len(whole)].contiguous()
    state.model |= {f"{single}proj_out.linears.1.weight": whole[:, len(whole) :].contiguous()}
    state.model[f"{single}proj_out.linears.1.bias"] = bias
    state.fuse(f"{block}attn.to_v", f"{block}attn.to_out.0", f"{block}attn.to_out.0")
    state.fuse(f"{block}attn.add_v_proj", f"{block}attn.to_add_out", f"{block}attn.to_out.0")
    state.fuse(f"{single}attn.to_v", f"{single}proj_out.linears.0", f"{single}proj_out.linears.0")
    for one in (block, single):
        state.linears([f"{one}attn.to_{name}" for name in "qkv"], f"{one}attn.to_q", f"{one}attn.to_q")
    added = f"{block}attn.add_k_proj"
    state.linears([f"{block}attn.add_{name}_proj" for name in "qkv"], added, added)
    for out in ("to_out.0", "to_add_out"):
        state.linears([f"{block}attn.{out}"], f"{block}attn.to_out.0", f"{block}attn.{out}", fused=True)
    for ff in ("ff", "ff_context"):
        state.linears([f"{block}{ff}.net.0.proj"], f"{block}{ff}.net.0.proj", f"{block}{ff}.net.0.proj")
        state.second(f"{block}{ff}.net.2", f"{block}{ff}.net.2")
    state.linears([f"{single}proj_mlp"], f"{single}attn.to_q", f"{single}proj_mlp")
    left, right = (f"{single}proj_out.linears.{n}" for n in (0, 1))
    state.linears([left], left, left, fused=True)
    state.second(right, right)
    both = [state.floats.pop(f"{name}.weight") for name in (left, right)]
    state.floats[f"{single}proj_out.weight"] = torch.cat(both, dim=1)
    if not nvfp4:
        state.floats[f"{single}proj_out.bias"] = state.floats.pop(f"{right}.bias")
    for name, chunks in ((f"{block}norm1", 6), (f"{block}norm1_context", 6), (f"{single}norm", 3)):
        state.awq(f"{name}.linear", chunks)
    return state


def write_flux(source: Path, target: Path, way: str) -> dict[str, Tensor]:
    weights = load_file(source / "diffusion_pytorch_model.safetensors")
    state = flux({name: tensor.bfloat16() for name, tensor in weights.items()}, way == "nvfp4")
    parts = target / f"parts-{way}"
    parts.mkdir()
    for name in ("model", "scale", "smooth", "branch"):
        torch.save(getattr(state, name), parts / f"{name}.pt")
    sys.argv = ["convert", "--quant-path", str(parts), "--output-root", str(target / way), "--model-name", "flux"]
    sys.argv += ["--float-point"] if way == "nvfp4" else []
    with contextlib.redirect_stdout(io.StringIO()), contextlib.redirect_stderr(io.StringIO()):
        runpy.run_module("deepcompressor.backend.nunchaku.convert", run_name="__main__")
    shutil.copy(source / "config.json", target / way / "flux")
    return state.floats


def write_t5(source: Path, target: Path, way: str) -> dict[str, Tensor]:
    """As nunchaku-t5 is: AWQ by groups of 128, and a config in the metadata."""
    (path,) = source.glob("*.safetensors")
    file, floats = {}, {}
    for name, tensor in load_file(path).items():
        stem, weight = name.removesuffix("weight"), tensor.bfloat16()
        if not re.search(r"\.([qkvo]|wi_[01]|wo)\.weight$", name):
            file[name] = weight
            floats[name] = weight.float()
            continue
        groups = weight.float().view(len(weight), 1, -1, 128)
        low, high = groups.amin(-1, keepdim=True), groups.amax(-1, keepdim=True)
        scale = ((high - low) / 15).bfloat16()
        zero = (-low).bfloat16().float()
        codes = ((groups + zero) / scale.float()).round().clamp(0, 15)
        values = codes * scale.float() - zero
        packed, scales, zeros = convert_to_tinychat_w4x16y16_linear_weight(
            values.view_as(weight).bfloat16(), scale=scale, zero=zero
        )
        file |= {f"{stem}qweight": packed, f"{stem}scales": scales, f"{stem}scaled_zeros": zeros}
        floats[name] = values.view(weight.shape)
    said = {"config": (source / "config.json").read_text(), "model_class": "NunchakuT5EncoderModel"}
    (target / way).mkdir()
    save_file({key: part.contiguous() for key, part in file.items()}, target / way / "awq-int4-t5.safetensors", said)
    return floats


def main(source: Path, target: Path, ways: list[str]) -> None:
    done: dict[str, str | None] = {}
    for way in ways:
        made = (write_t5 if way == "t5" else write_flux)(source, target, way)
        save_file({key: part.contiguous() for key, part in made.items()}, target / f"{way}.safetensors")
        done[way] = None
    print(json.dumps(done))


if __name__ == "__main__":
    warnings.simplefilter("ignore")
    main(Path(sys.argv[1]), Path(sys.argv[2]), sys.argv[3:])
