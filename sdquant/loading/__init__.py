"""From a plan to a model: load, quantize what is loaded, keep quantized weights in a cache, verify files.

In: a `Request` and its `Plan`. Out: a diffusers pipeline or a component, with `.sdquant` on it.
May import `saving`, `planning` and what is below. `integrations` is called through the table in `finishing`.
"""
