"""Providers as in Qwix: how a rule is applied to a layer or a product, after training or to what another tool quantized."""
