"""Files that cannot be loaded by themselves: one of several shards, and a LoRA, which changes a model. No torch."""

from __future__ import annotations
