"""One file: a YAML config that `generate` and `train` read, with key=value overrides.

    keys/            the table: a key is a row
    value_types.py   Key: a row of that table; types of values, and how the text of an override is parsed
    config.py        Config: the values, frozen
    loading.py       load: defaults, file, overrides; training keys that have no effect in combination with others
    quantization.py  resolve the quantization keys to a scheme, rules, or nothing
    topology.py      resolve the number of slices and shards
    to_request.py    the Request for `load_model`
    generate.py      generate the images of a config
    examples/        configs for the shipped models

Importing this imports neither torch nor yaml.
"""

from __future__ import annotations

from .config import RunConfig
from .keys import key, keys
from .loading import load, shards_of
from .quantization import Quantization, quantization_of
from .to_request import request_of, size_of
from .topology import Shards
from .value_types import Key

__all__ = [
    "Key",
    "Quantization",
    "RunConfig",
    "Shards",
    "key",
    "keys",
    "load",
    "quantization_of",
    "request_of",
    "shards_of",
    "size_of",
]
