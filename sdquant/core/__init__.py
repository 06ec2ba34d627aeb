"""The vocabulary: `Scheme`, `QuantSpec`, packed weights and their layouts, `TensorInfo`, the registry, code tables.

In and out: values that every other room passes on. Nothing here reads a file of weights or knows diffusers, and only
what handles tensors imports torch. May import `utils` and `errors` alone; backends are found by name (`registry`).
"""
