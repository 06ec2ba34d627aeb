"""Schemes and what users ask for with them. A scheme and its backend refer to each other: see `backend`."""

from .backend import QuantSpec, Scheme, layer_name
from .options import EMBEDDINGS, Option, Requirement

__all__ = ["EMBEDDINGS", "Option", "QuantSpec", "Requirement", "Scheme", "layer_name"]
