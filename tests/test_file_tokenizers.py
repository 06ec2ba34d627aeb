"""Tokenizers in text encoders' files, for pipelines whose folder has none, held against those in folders."""

from __future__ import annotations

import base64
import io
import json
import shutil
import struct
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
import tokenizers
import torch
import transformers
from safetensors.torch import save_file

import sdquant
from sdquant.errors import BackendUnavailableError, BadFileError, MissingComponentError
from sdquant.models import file_tokenizers, libraries, spelling_tables

from . import test_language_encoder_files as files
from .gguf_text_encoders import ARCH, write_text

if TYPE_CHECKING:
    import gguf

    from .test_language_encoder_files import Case

case_of = files.case_of  # the fixture
WORDS = "the quick brown fox jumps over the lazy dog, and draws a three beside a seven. "
TEXTS = ["a quick seven", "  two   foxes,\n draw  ", "\u00fcber \u65e5\u672c"]


def _base(case: Case, place: Path, kind: str) -> Path:
    """Copy a pipeline, and let it name a tokenizer that it has not."""
    shutil.copytree(case.base, place)
    index = place / "model_index.json"
    index.write_text(json.dumps({**json.loads(index.read_text()), "tokenizer": ["transformers", kind]}))
    return place


def _byte_level() -> tokenizers.Tokenizer:
    """A tokenizer such as Qwen's, of 160 words or fewer, as many as the tiny models know, but for its last ones."""
    made = tokenizers.Tokenizer(tokenizers.models.BPE())
    made.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    trainer = tokenizers.trainers.BpeTrainer(
        vocab_size=300, initial_alphabet=tokenizers.pre_tokenizers.ByteLevel.alphabet(), show_progress=False
    )
    made.train_from_iterator([WORDS * 4], trainer)
    return made


def _fields_of(made: tokenizers.Tokenizer) -> Callable[[gguf.GGUFWriter], None]:
    state = json.loads(made.to_str())["model"]
    words = [*sorted(state["vocab"], key=state["vocab"].__getitem__), "<|endoftext|>"]

    def add(writer: gguf.GGUFWriter) -> None:
        writer.add_tokenizer_model("gpt2")
        writer.add_tokenizer_pre("qwen2")
        writer.add_token_list(words)
        writer.add_token_types([1] * (len(words) - 1) + [3])
        writer.add_token_merges([" ".join(pair) if isinstance(pair, list) else pair for pair in state["merges"]])
        writer.add_eos_token_id(len(words) - 1)
        writer.add_chat_template("{{ messages[0]['content'] }}")

    return add


@pytest.fixture
def qwen(case_of: Callable[[str], Case], tmp_path: Path) -> tuple[Path, Path, tokenizers.Tokenizer]:
    """A pipeline without a tokenizer, a GGUF file with one, and that."""
    case, made, file = case_of("qwen_3_4b"), _byte_level(), tmp_path / "model.gguf"
    write_text(case.model, file, ARCH.QWEN3, None, fields=_fields_of(made))
    return _base(case, tmp_path / "base", "Qwen2Tokenizer"), file, made


def test_of_a_gguf_file(qwen: tuple[Path, Path, tokenizers.Tokenizer], caplog: pytest.LogCaptureFixture) -> None:
    base, file, made = qwen
    assert any("'gpt2' in its header is a tokenizer" in line for line in sdquant.detect(file).evidence)
    (warning,) = sdquant.plan(base, parts=[file]).warnings
    assert "has no tokenizer: it is made of what" in warning and file.name in warning
    pipe = sdquant.load_model(base, parts=[file], progress=False)
    assert [record.getMessage() for record in caplog.records if record.name.startswith("sdquant")] == [warning]
    for text in TEXTS:
        assert pipe.tokenizer(text).input_ids == made.encode(text).ids, text
    assert pipe.tokenizer("u\u0308ber").input_ids == pipe.tokenizer("\u00fcber").input_ids  # as Qwen's own
    padded = pipe.tokenizer(TEXTS, padding=True, return_tensors="pt")
    assert padded.input_ids.shape == padded.attention_mask.shape
    assert pipe.tokenizer.apply_chat_template([{"role": "user", "content": "a"}], tokenize=False) == "a"


def _charsmap(spelling: str, plain: str) -> bytes:
    """sentencepiece's table with one entry: a trie (darts-clone) whose leaf is an offset into texts, and those."""
    units, offsets, at = [0] * 0x400, (0x100, 0x300, 0x100, 0x200), 0
    key = spelling.encode()
    assert len(key) == 3
    units[0], at = offsets[0] << 10, offsets[0]
    for place, byte in enumerate(key):
        at ^= byte
        units[at] = offsets[place + 1] << 10 | (place == 2) << 8 | byte
        at ^= offsets[place + 1]
    units[at] = 1 << 31  # offset 0
    return struct.pack("<1025I", 0x1000, *units) + plain.encode() + b"\0"


def _with_table(case: Case, file: Path, table: bytes) -> None:
    words = ["<pad>", "</s>", "<unk>", "\u2581", "\u2581fi", "x", "\u2581fix"]

    def fields(writer: gguf.GGUFWriter) -> None:
        writer.add_tokenizer_model("t5")
        writer.add_token_list(words)
        writer.add_token_scores([0.0, 0.0, 0.0, -2.0, -1.0, -3.0, -0.5])
        writer.add_token_types([3, 3, 2, 1, 1, 1, 1])
        writer.add_eos_token_id(1)
        writer.add_pad_token_id(0)
        writer.add_precompiled_charsmap(table)

    write_text(case.model, file, ARCH.T5ENCODER, None, fields=fields)


def test_a_table_of_spellings(case_of: Callable[[str], Case], tmp_path: Path) -> None:
    """T5's pieces are of normal forms, which llama.cpp keeps in the header."""
    case, file = case_of("umt5_xxl"), tmp_path / "model.gguf"
    _with_table(case, file, _charsmap("\ufb01", "fi"))
    base = _base(case, tmp_path / "base", "T5TokenizerFast")
    (source,) = sdquant.detect(file).sources.values()
    made = file_tokenizers.built(base, {"text_encoder": source})["tokenizer"]
    assert made("\ufb01x fix").input_ids == made("fix fix").input_ids == [6, 6, 1]
    assert made("a").input_ids == [3, 2, 1] and made.pad_token == "<pad>"


@pytest.mark.parametrize(
    ("at", "word", "reason"),
    [
        (4, 0x3FF00 << 10, "has 1024 places, and points behind them"),
        (-7, 1 << 31 | 77, "points behind the texts that it has"),
        (-7, 1 << 31 | 1, "or into a character"),
    ],
    ids=["trie", "texts", "character"],
)
def test_a_broken_table_of_spellings(
    at: int, word: int, reason: str, case_of: Callable[[str], Case], tmp_path: Path
) -> None:
    """The package tokenizers panics at the first text that gets there."""
    case, file = case_of("umt5_xxl"), tmp_path / "model.gguf"
    table = bytearray(_charsmap("\ufb01", "\u00fc"))
    at = at if at > 0 else table.rindex((1 << 31).to_bytes(4, "little"))
    table[at : at + 4] = word.to_bytes(4, "little")
    _with_table(case, file, bytes(table))
    base = _base(case, tmp_path / "base", "T5TokenizerFast")
    (source,) = sdquant.detect(file).sources.values()
    with pytest.raises(BadFileError, match=rf"precompiled_charsmap.*{reason}"):
        file_tokenizers.built(base, {"text_encoder": source})


@pytest.mark.parametrize("table", [b"", b"\4\0\0\0", b"\xff\xff\xff\xff" + b"a" * 10])
def test_a_table_of_spellings_that_ends_early(table: bytes) -> None:
    assert "its trie should have" in str(spelling_tables._reason(table))


def test_with_the_constructor_of_transformers_4(
    qwen: tuple[Path, Path, tokenizers.Tokenizer], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Which reads the file that `vocab_file` names; 4.57.3 itself makes the same tokenizer of it."""
    base, file, _ = qwen
    asked: list[dict[str, Any]] = []
    whole = libraries.transformers()
    original: Any = whole.PreTrainedTokenizerFast

    class Older(original):  # type: ignore[misc]
        def __init__(self, **values: Any) -> None:
            asked.append(dict(values))
            path = Path(values.pop("vocab_file"))
            super().__init__(**values | {"name_or_path": str(path.parent), "gguf_file": path.name})

    monkeypatch.setattr(whole, "PreTrainedTokenizerFast", Older)
    monkeypatch.setattr(whole, "__version__", "4.57.3")
    (source,) = sdquant.detect(file).sources.values()
    made = file_tokenizers.built(base, {"text_encoder": source})["tokenizer"]
    assert made("a quick").input_ids and asked[0]["gguf_file"] == file.name


@pytest.mark.parametrize("kind", ["LlamaTokenizerFast", "Qwen2Tokenizer"])
def test_it_pads_after_the_text(kind: str, qwen: tuple[Path, Path, tokenizers.Tokenizer]) -> None:
    """Llama's, too, though its class pads before it: HunyuanVideo cuts its template off the start."""
    base, file, _ = qwen
    index = base / "model_index.json"
    index.write_text(json.dumps({**json.loads(index.read_text()), "tokenizer": ["transformers", kind]}))
    tokenizer = sdquant.load_model(base, parts=[file], progress=False).tokenizer
    assert tokenizer("a", padding="max_length", max_length=9).attention_mask == [1] + [0] * 8


def test_in_the_folder_saved_and_loaded(qwen: tuple[Path, Path, tokenizers.Tokenizer], tmp_path: Path) -> None:
    base, file, made = qwen
    for one in (base / "text_encoder").glob("*.safetensors"):
        one.unlink()
    shutil.move(file, base / "text_encoder" / "model.gguf")
    assert any("has no tokenizer" in line for line in sdquant.verify(base).warnings)
    pipe = sdquant.load_model(base, "int8", progress=False)
    sdquant.save(pipe, tmp_path / "saved")
    again = sdquant.load_model(tmp_path / "saved", progress=False)  # which has one of its own
    assert (tmp_path / "saved" / "tokenizer").is_dir()
    assert [again.tokenizer(text).input_ids for text in TEXTS] == [made.encode(text).ids for text in TEXTS]


def test_the_pipelines_own_is_preferred(qwen: tuple[Path, Path, tokenizers.Tokenizer]) -> None:
    base, file, _ = qwen
    own = transformers.PreTrainedTokenizerFast(
        tokenizer_object=tokenizers.Tokenizer(tokenizers.models.WordLevel({"a": 7, "?": 3}, unk_token="?"))
    )
    own.save_pretrained(base / "tokenizer")
    index = base / "model_index.json"
    row = {"tokenizer": ["transformers", "PreTrainedTokenizerFast"]}
    index.write_text(json.dumps({**json.loads(index.read_text()), **row}))
    assert not sdquant.plan(base, parts=[file]).warnings
    assert sdquant.load_model(base, parts=[file], progress=False).tokenizer("a").input_ids == [7]


def test_without_any(case_of: Callable[[str], Case], tmp_path: Path) -> None:
    case, file = case_of("qwen_3_4b"), tmp_path / "model.gguf"
    base = _base(case, tmp_path / "base", "Qwen2Tokenizer")
    write_text(case.model, file, ARCH.QWEN3, None)
    for call in (sdquant.detect, sdquant.plan, sdquant.load_model):
        with pytest.raises(MissingComponentError, match="names a tokenizer, but there is no folder") as error:
            call(base)
        assert "or use a file of the text_encoder that carries it" in error.value.fix
    with pytest.raises(MissingComponentError, match=r"model\.gguf carries none"):
        sdquant.plan(base, parts=[file])


def _in_a_tensor(case: Case, path: Path, name: str, content: bytes) -> Path:
    state = {key: tensor for key, tensor in case.state.items() if "_model" not in key}
    save_file({**state, name: torch.frombuffer(bytearray(content), dtype=torch.uint8)}, path)
    return path


def test_of_a_json_file(case_of: Callable[[str], Case], tmp_path: Path) -> None:
    """It does not say which word is the end of texts: that is told by its spelling."""
    case, made = case_of("qwen_3_4b"), _byte_level()
    bare = made.to_str().encode()
    made.add_special_tokens(["<|endoftext|>"])
    base = _base(case, tmp_path / "base", "PreTrainedTokenizerFast")
    file = _in_a_tensor(case, tmp_path / "model.safetensors", "tokenizer_json", made.to_str().encode())
    pipe = sdquant.load_model(base, parts=[file], progress=False)
    assert [pipe.tokenizer(text).input_ids for text in TEXTS] == [made.encode(text).ids for text in TEXTS]
    assert pipe.tokenizer.pad_token == "<|endoftext|>" and len(pipe.tokenizer(TEXTS, padding=True).input_ids[0])
    _in_a_tensor(case, file, "tokenizer_json", bare)
    with pytest.raises(BadFileError, match="neither a token to pad texts with nor one for their end"):
        sdquant.load_model(base, parts=[file], progress=False)
    _in_a_tensor(case, file, "tokenizer_json", made.to_str().encode()[:-40])
    with pytest.raises(BadFileError, match="transformers does not read tokenizer_json"):
        sdquant.load_model(base, parts=[file], progress=False)


def test_of_tekken(case_of: Callable[[str], Case], tmp_path: Path) -> None:
    """Mistral's, whose words are bytes in the order in which they are merged, after the special ones."""
    case, words = case_of("mistral_3_small_flux2"), [*(bytes([code]) for code in range(64, 128)), b"ab", b"abc"]
    base = _base(case, tmp_path / "base", "PreTrainedTokenizerFast")
    content = {
        "config": {
            "pattern": r"\\p{L}+| +", "num_vocab_tokens": len(words), "default_vocab_size": len(words) + 2,
            "default_num_special_tokens": 2, "version": "v7",
        },
        "vocab": [
            {"rank": rank, "token_bytes": base64.b64encode(word).decode(), "token_str": word.decode()}
            for rank, word in enumerate(words)
        ],
        "special_tokens": [
            {"rank": rank, "token_str": word, "is_control": True} for rank, word in enumerate(["<unk>", "</s>"])
        ],
    }  # fmt: skip
    file = _in_a_tensor(case, tmp_path / "model.safetensors", "tekken_model", json.dumps(content).encode())
    tokenizer = sdquant.load_model(base, parts=[file], progress=False).tokenizer
    wanted = [2 + words.index(b"abc"), 2 + words.index(b"d"), 2 + words.index(b"ab")]
    assert tokenizer("abcdab", add_special_tokens=False).input_ids == wanted


PIECES = {
    "umt5_xxl": (
        "T5TokenizerFast",
        "spiece.model",
        {"model_type": "unigram", "pad_id": 0, "eos_id": 1, "unk_id": 2, "bos_id": -1},
    ),
    "gemma_2_2b": (
        "GemmaTokenizerFast",
        "tokenizer.model",
        {"model_type": "bpe", "pad_id": 0, "eos_id": 1, "bos_id": 2, "unk_id": 3, "byte_fallback": True},
    ),
}


@pytest.mark.parametrize("name", PIECES)
def test_of_pieces(name: str, case_of: Callable[[str], Case], tmp_path: Path) -> None:
    """Against the same class of transformers, of the same file in a folder."""
    trainer: Any = pytest.importorskip("sentencepiece", reason="transformers reads ComfyUI's spiece_model by it")
    pytest.importorskip("google.protobuf", reason="transformers reads ComfyUI's spiece_model by it")
    (kind, called, options), content, case = PIECES[name], io.BytesIO(), case_of(name)
    trainer.SentencePieceTrainer.train(
        sentence_iterator=iter([WORDS] * 40), model_writer=content, vocab_size=310 if name == "gemma_2_2b" else 60,
        hard_vocab_limit=False, minloglevel=2, **options,
    )  # fmt: skip
    base = _base(case, tmp_path / "base", kind)
    file = _in_a_tensor(case, tmp_path / "model.safetensors", "spiece_model", content.getvalue())
    assert any("spiece_model is a tokenizer" in line for line in sdquant.detect(file).evidence)
    pipe = sdquant.load_model(base, parts=[file], progress=False)
    folder = tmp_path / "tokenizer"
    folder.mkdir()
    (folder / called).write_bytes(content.getvalue())
    wanted = getattr(transformers, kind).from_pretrained(folder)
    assert type(pipe.tokenizer) is type(wanted)
    assert [pipe.tokenizer(text).input_ids for text in TEXTS] == [wanted(text).input_ids for text in TEXTS]
    assert len(pipe.tokenizer("a quick seven").input_ids) > 3


def test_of_pieces_without_their_library(
    case_of: Callable[[str], Case], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from sdquant.models import file_tokenizers

    monkeypatch.setattr(file_tokenizers, "_is_there", lambda _: False)
    case = case_of("umt5_xxl")
    base = _base(case, tmp_path / "base", "T5TokenizerFast")
    file = _in_a_tensor(case, tmp_path / "model.safetensors", "spiece_model", bytes(64))
    with pytest.raises(BackendUnavailableError, match="sentencepiece and protobuf") as error:
        sdquant.plan(base, parts=[file])
    assert "pip install sentencepiece protobuf" in error.value.fix


def test_a_broken_vocabulary(case_of: Callable[[str], Case], tmp_path: Path) -> None:
    case, file = case_of("qwen_3_4b"), tmp_path / "model.gguf"
    base = _base(case, tmp_path / "base", "Qwen2Tokenizer")

    def fields(writer: gguf.GGUFWriter) -> None:
        writer.add_tokenizer_model("rwkv")
        writer.add_token_list(["a", "b"])

    write_text(case.model, file, ARCH.QWEN3, None, fields=fields)
    with pytest.raises(BadFileError, match="what its header says of it"):
        sdquant.load_model(base, parts=[file], progress=False)
