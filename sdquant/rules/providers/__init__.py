"""Providers, as in Qwix: how a rule is applied to a layer or a product, or to what another tool has quantized."""
