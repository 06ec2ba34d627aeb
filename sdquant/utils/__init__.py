"""Helpers that know nothing of quantization: atomic writes, strict JSON and YAML, signals, byte sizes, processes.

May import `errors` alone.
"""
