"""Tokenizers and text encoders of the shipped models, made without a download."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, cast

from sdquant.training import digits

if TYPE_CHECKING:
    from pathlib import Path

    from transformers import CLIPTextModel, CLIPTokenizer, T5EncoderModel, T5Tokenizer

WIDTH = 128  # hidden size of both encoders
CLIP_LENGTH = 77
T5_LENGTH = 512


def _corpus() -> list[str]:
    return [digits.prompt(digit, t) for digit in range(10) for t in range(len(digits.TEMPLATES))]


def clip_tokenizer(workdir: Path, corpus: list[str] | None = None) -> CLIPTokenizer:
    """A byte-pair tokenizer with CLIP's own normaliser, trained on the prompts; `workdir` holds its two files."""
    import json

    from tokenizers import Tokenizer, models, pre_tokenizers, trainers
    from transformers import CLIPTokenizer

    donor = CLIPTokenizer()  # an empty one, for CLIP's own normaliser and pre-tokenizer
    tokenizer = Tokenizer(models.BPE(unk_token="<|endoftext|>", end_of_word_suffix="</w>"))
    tokenizer.normalizer = donor.backend_tokenizer.normalizer
    tokenizer.pre_tokenizer = donor.backend_tokenizer.pre_tokenizer
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    trainer = trainers.BpeTrainer(
        vocab_size=2048,
        initial_alphabet=alphabet,
        end_of_word_suffix="</w>",
        show_progress=False,
    )
    tokenizer.train_from_iterator(corpus or _corpus(), trainer)
    merges = [tuple(pair) for pair in json.loads(tokenizer.to_str())["model"]["merges"]]
    pieces = alphabet + [letter + "</w>" for letter in alphabet] + ["".join(pair) for pair in merges]
    vocab: dict[str, int] = {}
    for piece in [*pieces, "<|startoftext|>", "<|endoftext|>"]:
        vocab.setdefault(piece, len(vocab))
    converted = CLIPTokenizer(vocab=vocab, merges=cast("Any", merges), model_max_length=CLIP_LENGTH)
    converted.save_pretrained(workdir)
    return cast("CLIPTokenizer", CLIPTokenizer.from_pretrained(workdir, model_max_length=CLIP_LENGTH))


def t5_tokenizer() -> T5Tokenizer:
    """A unigram tokenizer whose pieces are the words of the prompts and single characters."""
    from transformers import T5Tokenizer

    words = sorted({word for line in _corpus() for word in line.split()})
    letters = [chr(c) for c in range(ord("a"), ord("z") + 1)] + [chr(c) for c in range(ord("A"), ord("Z") + 1)]
    letters += list("0123456789.,!?'-")
    pieces: dict[str, float] = {"<pad>": 0.0, "</s>": 0.0, "<unk>": 0.0}
    for word in words:
        pieces.setdefault("▁" + word, -3.0)
    pieces.setdefault("▁", -8.0)
    for letter in letters:
        pieces.setdefault(letter, -9.0)
    return T5Tokenizer(vocab=list(pieces.items()), extra_ids=0, model_max_length=T5_LENGTH)


def clip_encoder(tokenizer: CLIPTokenizer, seed: int) -> CLIPTextModel:
    """A CLIP text encoder of two layers. It stays at its random start: ten prompts need no more."""
    import torch
    from transformers import CLIPTextConfig, CLIPTextModel

    torch.manual_seed(seed)
    config = CLIPTextConfig(
        vocab_size=len(tokenizer),
        hidden_size=WIDTH,
        intermediate_size=2 * WIDTH,
        projection_dim=WIDTH,
        num_hidden_layers=2,
        num_attention_heads=4,
        max_position_embeddings=CLIP_LENGTH,
        bos_token_id=tokenizer.bos_token_id,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
    )
    return cast("CLIPTextModel", CLIPTextModel(config).train(False).requires_grad_(False))


def t5_encoder(tokenizer: T5Tokenizer, seed: int) -> T5EncoderModel:
    """A T5 encoder of two layers, at its random start."""
    import torch
    from transformers import T5Config, T5EncoderModel

    torch.manual_seed(seed)
    config = T5Config(
        vocab_size=len(tokenizer),
        d_model=WIDTH,
        d_kv=32,
        num_heads=4,
        d_ff=2 * WIDTH,
        num_layers=2,
        feed_forward_proj="gated-gelu",
        is_encoder_decoder=False,
        use_cache=False,
    )
    return cast("T5EncoderModel", T5EncoderModel(config).train(False).requires_grad_(False))
