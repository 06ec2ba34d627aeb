"""Attention whose two products are quantized: scores = query x key, and probabilities x value.

Between them everything is float32, in the order of JAX's attentions as Qwix sees them (jax.nn.dot_product_attention,
diffusers' Flax attention): the quantized product, rounded to the model's dtype, then the scale, the mask, the softmax,
and its probabilities rounded to the model's dtype, which the second product quantizes. Because the scale comes after
the product, a range given by a rule ("fixed,8") applies to queries and keys as the preceding layers output them.
"""

from __future__ import annotations

import math
from dataclasses import replace
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from ...errors import SettingsError
from ..providers.product import Site, product
from .batched_matmul import multiply, plain_precision

if TYPE_CHECKING:
    from ..qconfig import QuantizationRule

# Scores held at once where no gradient needs all of them. On a CPU 4 MB of float32, which stay in its cache: 2 to 5
# times as fast as 64 MB, measured with 1024 and 4096 tokens.
BLOCK, CPU_BLOCK = 2**24, 2**20


def attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
    *,
    rule: QuantizationRule | tuple[Site, Site],
) -> Tensor:
    """Compute `torch.nn.functional.scaled_dot_product_attention`, with both products quantized by a rule.

    Args:
        query: [..., L, E]. key: [..., S, E]. value: [..., S, V].
        attn_mask: boolean (True takes part) or float (added), broadcast to [..., L, S].
        dropout_p: of the probabilities, before they are quantized.
        is_causal: row l sees the first l + 1 keys.
        scale: of the scores, 1 / sqrt(E) if None.
        enable_gqa: several heads of the query (axis -3) share one of key and value.
        rule: for both products; or a `Site` for each.

    Returns:
        [..., L, V] in the query's dtype. A row that the mask leaves no key is zero, as in torch.

    Raises:
        SettingsError: what `product` says; both a mask and is_causal.
    """
    sites = rule if isinstance(rule, tuple) else (Site(rule=rule, name="einsum0"), Site(rule=rule, name="einsum1"))
    if attn_mask is not None and is_causal:
        raise SettingsError(
            "Cannot use both a mask and is_causal", "torch accepts only one of them", "Put both into the mask"
        )
    if enable_gqa:
        key, value = (one.repeat_interleave(query.shape[-3] // one.shape[-3], -3) for one in (key, value))
    factor = 1 / math.sqrt(query.shape[-1]) if scale is None else scale
    with plain_precision(query):
        whole = torch.is_grad_enabled() and any(
            one is not None and one.requires_grad for one in (query, key, value, attn_mask)
        )
        keys = key.mT
        if whole or not all(site.by_row for site in sites):
            scores = product(query, keys, sites[0])
            odds = _odds(scores, factor, _bias(attn_mask, is_causal, scores, 0, scores.shape[-2]), dropout_p)
            return product(odds.to(query.dtype), value, sites[1])
        # A row of scores depends on no other row, so that some rows at a time give the same numbers.
        right, last = sites[0].quantized(keys, -2)[0], sites[1].quantized(value, -2)[0]
        rows = query.shape[-2]
        block = CPU_BLOCK if query.device.type == "cpu" else BLOCK
        step = max(1, block // max(1, math.prod(query.shape[:-2]) * key.shape[-2]))
        done = []
        for first in range(0, rows, step):
            some = sites[0].quantized(query[..., first : first + step, :], -1)[0]
            scores = multiply(some, right, right_first=sites[0].right_first)
            odds = _odds(scores, factor, _bias(attn_mask, is_causal, scores, first, rows), dropout_p)
            shares = sites[1].quantized(odds.to(query.dtype), -1)[0]
            done.append(multiply(shares, last, right_first=sites[1].right_first))
        return torch.cat(done, -2) if len(done) > 1 else done[0]


def _odds(scores: Tensor, factor: float, bias: Tensor | None, dropout_p: float) -> Tensor:
    """Return the softmax of scores, in float32, with dropout."""
    scaled = scores.float() * factor
    if bias is not None:
        scaled = scaled + bias
    odds = torch.softmax(scaled, -1)
    if bias is not None:  # where every key is masked
        odds = odds.masked_fill((scaled == -math.inf).all(-1, keepdim=True), 0.0)
    return torch.nn.functional.dropout(odds, dropout_p) if dropout_p > 0 else odds


def _bias(mask: Tensor | None, causal: bool, scores: Tensor, first: int, rows: int) -> Tensor | None:
    """Return the float32 mask to add to scores whose first row is row `first` of `rows`; None if there is none."""
    count, size = scores.shape[-2:]
    if causal:
        mask = torch.ones(rows, size, dtype=torch.bool, device=scores.device).tril()
    if mask is None:
        return None
    if mask.ndim > 1 and mask.shape[-2] > 1:
        mask = mask[..., first : first + count, :]
    if mask.dtype == torch.bool:
        return torch.zeros(mask.shape, dtype=torch.float32, device=mask.device).masked_fill(~mask, -math.inf)
    return mask.float()


def sites(site: Site, number: int) -> tuple[Site, Site]:
    """Return the sites of an attention's two products: the einsums `number` and `number + 1` of its module."""
    return replace(site, name=f"einsum{number}"), replace(site, name=f"einsum{number + 1}")
