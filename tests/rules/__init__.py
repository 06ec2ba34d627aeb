"""Quantization by rules."""
