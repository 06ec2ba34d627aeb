"""Helpers that know nothing of quantization: atomic writes, strict JSON and YAML, signals, byte sizes, processes.

In and out: plain values. Each file is a helper by itself, and its names need that of the file (`byte_sizes.size`):
other rooms import its files. May import `errors` alone.
"""
