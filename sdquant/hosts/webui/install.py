"""Looks whether sdquant can be used by this web UI. It installs nothing: that is the user's choice."""

import importlib
import sys

try:
    importlib.import_module("sdquant.hosts.extension")
except ImportError as error:
    print(f"sdquant: the extension cannot run: {error}. Run: {sys.executable} -m pip install --no-deps PATH/TO/SDQUANT")
