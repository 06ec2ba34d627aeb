"""Tokenizers, processors and feature extractors without the hub."""

from __future__ import annotations

import json
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import sdquant

# Of these the shipped models have one. The others begin without any vocabulary but their special tokens.
_T5 = ("T5Tokenizer", "AutoTokenizer", "TokenizersBackend", "PreTrainedTokenizerBase")


def made(kind: Any) -> Any:
    """A tokenizer or processor of that class; None if its constructor needs nothing."""
    import transformers

    name = kind.__name__
    if name == "CLIPTokenizer":
        return transformers.CLIPTokenizer.from_pretrained(sdquant.demo.path("digits-sd") / "tokenizer")
    if name in _T5:
        return transformers.AutoTokenizer.from_pretrained(sdquant.demo.path("digits-flux") / "tokenizer_2")
    if name == "PythonBackend":  # what tokenizers without a library's speed are
        return transformers.ByT5Tokenizer()
    if name == "VitsTokenizer":
        with TemporaryDirectory() as place:
            file = Path(place) / "vocab.json"
            file.write_text(
                json.dumps({letter: number for number, letter in enumerate("_ abcdefghijklmnopqrstuvwxyz'")})
            )
            return kind(str(file), pad_token="_", unk_token="_")
    if name == "CLIPProcessor":
        clip = transformers.CLIPTokenizer.from_pretrained(sdquant.demo.path("digits-sd") / "tokenizer")
        return kind(transformers.CLIPImageProcessorPil(), clip)
    if name == "BlipProcessor":
        return kind(transformers.BlipImageProcessorPil(), transformers.BertTokenizer())
    return None
