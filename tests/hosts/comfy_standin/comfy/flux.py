"""FLUX.1 under its authors' names, of any size, built from the layers of `operations` as ComfyUI's models are."""

import math

import torch
from torch import nn
from torch.nn import functional as F

AXES = (8, 28, 28)  # of digits-flux, whose heads are 64 wide


def detected(sd):
    """The sizes, by the shapes in a state dict; None if it is no Flux."""
    if "double_blocks.0.img_attn.norm.key_norm.scale" not in sd or "img_in.weight" not in sd:
        return None
    blocks = {
        kind: {key.split(".")[1] for key in sd if key.startswith(f"{kind}_blocks.")} for kind in ("double", "single")
    }
    return {
        "channels": sd["img_in.weight"].shape[1], "hidden": sd["img_in.weight"].shape[0],
        "text": sd["txt_in.weight"].shape[1], "pooled": sd["vector_in.in_layer.weight"].shape[1],
        "out": sd["final_layer.linear.weight"].shape[0], "mlp": sd["double_blocks.0.img_mlp.0.weight"].shape[0],
        "double": len(blocks["double"]), "single": len(blocks["single"]),
        "guidance": "guidance_in.in_layer.weight" in sd,
    }  # fmt: skip


def waves(t, width=256):
    frequencies = torch.exp(-math.log(10000) * torch.arange(width // 2, dtype=torch.float32) / (width // 2))
    angles = t[:, None].float() * 1000 * frequencies
    return torch.cat([angles.cos(), angles.sin()], -1)


def turned(x, ids):
    """Rotary embedding of [b, heads, n, 64] by positions [n, 3]."""
    angles = []
    for axis, width in enumerate(AXES):
        frequencies = 1 / 10000 ** (torch.arange(0, width, 2, dtype=torch.float64) / width)
        angles.append((ids[:, axis, None].double() * frequencies).float())
    angle = torch.cat(angles, -1)
    even, odd = x.float().unflatten(-1, (-1, 2)).unbind(-1)
    both = torch.stack([even * angle.cos() - odd * angle.sin(), even * angle.sin() + odd * angle.cos()], -1)
    return both.flatten(-2).to(x.dtype)


class Scaled(nn.Module):
    def __init__(self, width, dtype):
        super().__init__()
        self.scale = nn.Parameter(torch.ones(width, dtype=dtype))

    def forward(self, x):
        return F.rms_norm(x, x.shape[-1:], self.scale.to(x.dtype), 1e-6)


class Norms(nn.Module):
    def __init__(self, dtype):
        super().__init__()
        self.query_norm, self.key_norm = Scaled(64, dtype), Scaled(64, dtype)


def heads(qkv, norms):
    q, k, v = (part.unflatten(-1, (-1, 64)).transpose(1, 2) for part in qkv.chunk(3, -1))
    return norms.query_norm(q), norms.key_norm(k), v


def attend(q, k, v, ids):
    return F.scaled_dot_product_attention(turned(q, ids), turned(k, ids), v).transpose(1, 2).flatten(2)


class Attention(nn.Module):
    def __init__(self, hidden, dtype, ops):
        super().__init__()
        self.qkv, self.norm = ops.Linear(hidden, 3 * hidden, dtype=dtype), Norms(dtype)
        self.proj = ops.Linear(hidden, hidden, dtype=dtype)


class Modulation(nn.Module):
    def __init__(self, hidden, count, dtype, ops):
        super().__init__()
        self.count, self.lin = count, ops.Linear(hidden, count * hidden, dtype=dtype)

    def forward(self, vec):
        return self.lin(F.silu(vec))[:, None].chunk(self.count, -1)


class Double(nn.Module):
    def __init__(self, hidden, mlp, dtype, ops):
        super().__init__()
        for side in ("img", "txt"):
            setattr(self, f"{side}_mod", Modulation(hidden, 6, dtype, ops))
            setattr(self, f"{side}_norm1", ops.LayerNorm(hidden, elementwise_affine=False, eps=1e-6))
            setattr(self, f"{side}_attn", Attention(hidden, dtype, ops))
            setattr(self, f"{side}_norm2", ops.LayerNorm(hidden, elementwise_affine=False, eps=1e-6))
            up, down = ops.Linear(hidden, mlp, dtype=dtype), ops.Linear(mlp, hidden, dtype=dtype)
            setattr(self, f"{side}_mlp", nn.Sequential(up, nn.GELU(approximate="tanh"), down))

    def forward(self, img, txt, vec, ids):
        i, t = self.img_mod(vec), self.txt_mod(vec)
        mine = heads(self.img_attn.qkv(self.img_norm1(img) * (1 + i[1]) + i[0]), self.img_attn.norm)
        theirs = heads(self.txt_attn.qkv(self.txt_norm1(txt) * (1 + t[1]) + t[0]), self.txt_attn.norm)
        seen = attend(*(torch.cat(pair, 2) for pair in zip(theirs, mine, strict=True)), ids)
        words = txt.shape[1]
        img = img + i[2] * self.img_attn.proj(seen[:, words:])
        img = img + i[5] * self.img_mlp(self.img_norm2(img) * (1 + i[4]) + i[3])
        txt = txt + t[2] * self.txt_attn.proj(seen[:, :words])
        return img, txt + t[5] * self.txt_mlp(self.txt_norm2(txt) * (1 + t[4]) + t[3])


class Single(nn.Module):
    def __init__(self, hidden, mlp, dtype, ops):
        super().__init__()
        self.sizes = (3 * hidden, mlp)
        self.linear1 = ops.Linear(hidden, 3 * hidden + mlp, dtype=dtype)
        self.linear2 = ops.Linear(hidden + mlp, hidden, dtype=dtype)
        self.norm, self.modulation = Norms(dtype), Modulation(hidden, 3, dtype, ops)
        self.pre_norm = ops.LayerNorm(hidden, elementwise_affine=False, eps=1e-6)

    def forward(self, x, vec, ids):
        shift, scale, gate = self.modulation(vec)
        qkv, mlp = self.linear1(self.pre_norm(x) * (1 + scale) + shift).split(self.sizes, -1)
        seen = attend(*heads(qkv, self.norm), ids)
        return x + gate * self.linear2(torch.cat([seen, F.gelu(mlp, approximate="tanh")], -1))


class Embedder(nn.Module):
    def __init__(self, width, hidden, dtype, ops):
        super().__init__()
        self.in_layer, self.out_layer = ops.Linear(width, hidden, dtype=dtype), ops.Linear(hidden, hidden, dtype=dtype)

    def forward(self, x):
        return self.out_layer(F.silu(self.in_layer(x)))


class Last(nn.Module):
    def __init__(self, hidden, out, dtype, ops):
        super().__init__()
        self.norm_final = ops.LayerNorm(hidden, elementwise_affine=False, eps=1e-6)
        self.linear = ops.Linear(hidden, out, dtype=dtype)
        self.adaLN_modulation = nn.Sequential(nn.SiLU(), ops.Linear(hidden, 2 * hidden, dtype=dtype))

    def forward(self, x, vec):
        shift, scale = self.adaLN_modulation(vec)[:, None].chunk(2, -1)
        return self.linear(self.norm_final(x) * (1 + scale) + shift)


class Flux(nn.Module):
    def __init__(self, channels, hidden, text, pooled, out, mlp, double, single, guidance, dtype, operations):
        super().__init__()
        self.dtype = dtype
        self.img_in = operations.Linear(channels, hidden, dtype=dtype)
        self.txt_in = operations.Linear(text, hidden, dtype=dtype)
        self.time_in = Embedder(256, hidden, dtype, operations)
        self.vector_in = Embedder(pooled, hidden, dtype, operations)
        self.guidance_in = Embedder(256, hidden, dtype, operations) if guidance else None
        self.double_blocks = nn.ModuleList(Double(hidden, mlp, dtype, operations) for _ in range(double))
        self.single_blocks = nn.ModuleList(Single(hidden, mlp, dtype, operations) for _ in range(single))
        self.final_layer = Last(hidden, out, dtype, operations)

    def forward(self, img, txt, y, t, guidance, img_ids, txt_ids):
        vec = self.time_in(waves(t).to(img.dtype)) + self.vector_in(y)
        if self.guidance_in is not None:
            vec = vec + self.guidance_in(waves(guidance).to(img.dtype))
        img, txt, ids = self.img_in(img), self.txt_in(txt), torch.cat([txt_ids, img_ids])
        for block in self.double_blocks:
            img, txt = block(img, txt, vec, ids)
        x = torch.cat([txt, img], 1)
        for block in self.single_blocks:
            x = block(x, vec, ids)
        return self.final_layer(x[:, txt.shape[1] :], vec)
