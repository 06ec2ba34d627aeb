"""One file: a YAML config that `generate` and `train` read, with key=value overrides.

    row.py       what a row of the table of keys is
    keys/        the table: a key is a row
    kinds.py     kinds of values, and how the text of an override is read
    scalars.py   what a word of YAML stands for
    yamlfile.py  a YAML file as plain values; the one importer of yaml
    config.py    Config: the values, frozen
    loading.py   load: defaults, file, overrides
    quantization.py  what the keys of quantization come to: a scheme, rules, or nothing
    unused.py    keys of training that have no effect beside the others
    topology.py  over how many devices work counts as spread
    asked.py     what a config asks `load_model` for
    pictures.py  draw what a config says
    examples/    configs for the shipped models

Importing this imports neither torch nor yaml.
"""

from __future__ import annotations

from .config import Config
from .key import Key
from .keys import key, keys
from .loading import load, shards_of
from .quantization import Quantization, quantization_of
from .to_request import request_of, size_of
from .topology import Shards

__all__ = [
    "Config",
    "Key",
    "Quantization",
    "Shards",
    "key",
    "keys",
    "load",
    "quantization_of",
    "request_of",
    "shards_of",
    "size_of",
]
