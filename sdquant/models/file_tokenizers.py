"""Tokenizers that lie in the files of text encoders, for pipelines whose folder has none.

llama.cpp keeps a tokenizer's words in the header of a GGUF file, and ComfyUI a tokenizer's own file as the bytes of a
tensor. transformers reads both; a tokenizer in the pipeline's folder is always preferred, since it has more to it: what
it pads with, on which side, and the templates of chats. Importing this module imports no torch.
"""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import closing
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any

from packaging.version import Version

from ..errors import BackendUnavailableError, BadFileError, MissingComponentError
from ..formats import checkpoint, folders, gguf_file, text_encoders
from ..utils.install import install_packages
from ..utils.temp_dirs import temporary_folder

if TYPE_CHECKING:
    from ..formats import Checkpoint

_TENSORS: Mapping[str, tuple[str, tuple[str, ...]]] = {  # by the end of a tensor's name: its file, and what reads it
    "spiece_model": ("", ("sentencepiece", "google.protobuf")),  # called as its class calls it
    "tekken_model": ("tekken.json", ()),
    "tokenizer_json": ("tokenizer.json", ()),
}
_PIECES = "tokenizer.model"  # what transformers 5 looks for, whatever its class calls it
_GGUF = ("tokenizer.ggml.model", "tokenizer.ggml.tokens")
_SPLIT = "tokenizer.ggml.pre"  # how texts are split into words
_SPECIAL = {"bos_token": "bos", "eos_token": "eos", "unk_token": "unknown", "pad_token": "padding"}
_CHARSMAP = "tokenizer.ggml.precompiled_charsmap"  # sentencepiece's table of spellings, of T5 and UMT5
_PACKAGES = {"google.protobuf": "protobuf"}
# Classes that pad on the left unless a folder's config says otherwise, as it does in pipelines: HunyuanVideo's cuts its
# template off the start of what was padded.
_PAD_RIGHT = ("LlamaTokenizer", "LlamaTokenizerFast")


# What the models of pipelines pad with, or end texts with: of Mistral, Gemma and T5, of Qwen and CLIP, of Llama 3.
_PADDING = ("<pad>", "[PAD]", "<|endoftext|>", "<|end_of_text|>", "</s>", "<eos>")


@dataclass(frozen=True)
class _Carrier:
    """A tokenizer in a file: of the tensor of that name, or in the header if there is none."""

    file: Path
    tensor: str | None
    source: Checkpoint

    @property
    def kind(self) -> str:
        """Return which of the tensors' names it has; "" in a header."""
        return next((end for end in _TENSORS if self.tensor is not None and self.tensor.endswith(end)), "")


def in_words(src: Checkpoint) -> str | None:
    """Return what of a text encoder's file is a tokenizer, in words; None if nothing is."""
    carrier = _in(src)
    if carrier is None:
        return None
    what = carrier.tensor or f"{src.metadata.get(_GGUF[0])!r} in its header"
    return f"{what} is a tokenizer, which is used where a pipeline has none"


def lacking(folder: Path) -> dict[str, str]:
    """Return the tokenizers that a pipeline names and has no folder for: name -> class."""
    index = folders.read_json(folder / "model_index.json")
    return {
        name: kind
        for name, kind in folders.named_parts(index).items()
        if folders.is_tokenizer(kind) and not (folder / name).is_dir()
    }


def require(folder: Path, sources: Mapping[str, Checkpoint]) -> tuple[str, ...]:
    """Return a sentence for each tokenizer that comes from a text encoder's file.

    Args:
        sources: the components of the pipeline in this folder.

    Raises:
        MissingComponentError: there is none. BackendUnavailableError: a package that reads it is not installed.
    """
    return tuple(
        f"{folder} has no {name}: it is made of what {_required(folder, name, kind, sources).file} says"
        for name, kind in lacking(folder).items()
    )


def built(folder: Path, sources: Mapping[str, Checkpoint]) -> dict[str, Any]:
    """Return the tokenizers that a pipeline's folder lacks, of its text encoders' files; see `require`.

    Raises:
        BadFileError: transformers cannot make one of it.
    """
    return {name: _made(_required(folder, name, kind, sources), kind) for name, kind in lacking(folder).items()}


def bytes_of(folder: Path, sources: Mapping[str, Checkpoint]) -> int:
    """Return the bytes, at most, that those take in their files that `built` makes; raises as `require`."""
    carriers = [_required(folder, name, kind, sources) for name, kind in lacking(folder).items()]
    return sum(map(_bytes, carriers))


def _bytes(carrier: _Carrier) -> int:
    header = carrier.source.headers[carrier.file]
    if carrier.tensor is not None:
        return header.tensors[carrier.tensor].nbytes
    return header.data_offset if isinstance(header, gguf_file.GGUFHeader) else 0


def _in(src: Checkpoint) -> _Carrier | None:
    for file, header in src.headers.items():
        tensors = text_encoders.tokenizers(header.tensors)
        if tensors:
            return _Carrier(file, tensors[0], src)
        if isinstance(header, gguf_file.GGUFHeader) and all(key in header.metadata for key in _GGUF):
            return _Carrier(file, None, src)
    return None


def _required(folder: Path, name: str, kind: str, sources: Mapping[str, Checkpoint]) -> _Carrier:
    encoder = name.replace("tokenizer", "text_encoder", 1)
    src = sources.get(encoder)
    carrier = None if src is None else _in(src)
    if src is None or carrier is None:
        plain = folders.no_folder(folder, name, kind)
        carries = "" if src is None else f", and {src.path} carries none"
        raise MissingComponentError(
            plain.what,
            plain.why + carries,
            f"{plain.fix}, or use a file of the {encoder} that carries it, as GGUF files of llama.cpp do",
        )
    needs = _TENSORS[carrier.kind][1] if carrier.kind else ()
    lack = [_PACKAGES.get(package, package) for package in needs if not _is_there(package)]
    if lack:
        raise BackendUnavailableError(
            f"Cannot make the {name} of {folder} of {carrier.tensor!r} in {carrier.file}",
            f"{' and '.join(lack)}, by which transformers reads it, {'is' if len(lack) == 1 else 'are'} not installed",
            f"Run `{install_packages(*lack)}`, or put the {name} ({kind}) into {folder / name}",
        )
    return carrier


def _is_there(package: str) -> bool:
    try:
        return find_spec(package) is not None
    except ModuleNotFoundError:  # the package that it is in
        return False


def _made(carrier: _Carrier, class_name: str) -> Any:
    from . import libraries
    from .components import quiet
    from .spelling_tables import check_tables

    transformers = libraries.transformers()
    anyone: Any = transformers.PreTrainedTokenizerFast  # reads whatever a file says of itself
    named: Any = getattr(transformers, class_name, None) if class_name.isidentifier() else None
    sides = {key: getattr(named, key) for key in ("padding_side", "model_input_names") if hasattr(named, key)}
    if class_name in _PAD_RIGHT:
        sides["padding_side"] = "right"
    try:
        with quiet():
            if carrier.tensor is None:
                tokenizer = anyone(**_place(transformers, carrier.file), local_files_only=True, **sides)
                metadata = carrier.source.headers[carrier.file].metadata
                if metadata.get(_SPLIT) == "qwen2":
                    _compose(tokenizer)
                _name_tokens(tokenizer, metadata)
                _normalize(tokenizer, carrier.file, metadata.get(_CHARSMAP))
            else:
                own = carrier.kind != "tekken_model" and hasattr(named, "vocab_files_names")
                tokenizer = _of_bytes(carrier, named if own else anyone, sides)
        check_tables(tokenizer)
    except BaseException as error:  # whatever a tokenizer says to a vocabulary that nobody has written it for
        if not isinstance(error, Exception) and type(error).__name__ != "PanicException":  # of Rust's
            raise
        raise BadFileError(
            f"Cannot make a tokenizer of {carrier.file}",
            f"transformers does not read {carrier.tensor or 'what its header says of it'}: {_why(error)}".splitlines()[
                0
            ],
            f"Put the tokenizer ({class_name}) of the same model into the pipeline's folder",
        ) from error
    return _with_padding(tokenizer, carrier.file, class_name)


def _why(error: BaseException) -> str:
    return f"{error.what}: {error.why}" if isinstance(error, BadFileError) else str(error)


def _place(transformers: Any, file: Path) -> dict[str, str]:
    """Return the arguments by which a tokenizer finds a GGUF file: before transformers 5 the whole path is another."""
    place = {"name_or_path": str(file.parent), "gguf_file": file.name}
    return place if Version(transformers.__version__).major >= 5 else place | {"vocab_file": str(file)}


def _compose(tokenizer: Any) -> None:
    """Have a tokenizer compose accents (NFC), as Qwen's own does and no header says."""
    from tokenizers import normalizers

    tokenizer.backend_tokenizer.normalizer = normalizers.NFC()


def _normalize(tokenizer: Any, file: Path, table: Any) -> None:
    """Have a tokenizer spell characters as its pieces do (full width, ligatures), by the table in a GGUF header, which
    transformers leaves there. One whose words need no table has none."""
    from tokenizers import normalizers

    if isinstance(table, gguf_file.Skipped) and table.type in ("uint8", "int8"):
        with file.open("rb") as content:
            content.seek(table.offset)
            table = content.read(table.length)
    elif isinstance(table, list):
        table = bytes(value & 0xFF for value in table)
    if isinstance(table, bytes) and table and tokenizer.backend_tokenizer.normalizer is None:
        tokenizer.backend_tokenizer.normalizer = normalizers.Precompiled(table)


def _name_tokens(tokenizer: Any, metadata: Mapping[str, Any]) -> None:
    """Tell a tokenizer its special tokens that a header names, of which transformers 4 passes over some."""
    for word, key in _SPECIAL.items():
        index = metadata.get(f"tokenizer.ggml.{key}_token_id")
        if getattr(tokenizer, word) is None and type(index) is int and 0 <= index < len(tokenizer):
            setattr(tokenizer, word, tokenizer.convert_ids_to_tokens(index))


def _of_bytes(carrier: _Carrier, kind: Any, sides: Mapping[str, Any]) -> Any:
    with closing(checkpoint.open_file(carrier.file, carrier.source.headers[carrier.file])) as file:
        content = bytes(file.get(str(carrier.tensor)).view(-1).contiguous().numpy())
    name = _TENSORS[carrier.kind][0] or kind.vocab_files_names.get("vocab_file", _PIECES)
    with temporary_folder("sdquant-tokenizer-") as place:
        (place / name).write_bytes(content)
        return kind.from_pretrained(str(place), local_files_only=True, **sides)


def _with_padding(tokenizer: Any, file: Path, class_name: str) -> Any:
    """Return a tokenizer that can pad, as all pipelines ask it to: with the end of texts if nothing says with what.
    tokenizer.json and tekken.json do not say which word is the end, either: it is told by how it is spelled.

    Raises:
        BadFileError: it has no such word.
    """
    words = tokenizer.get_vocab()
    padding = tokenizer.pad_token or tokenizer.eos_token or next((word for word in _PADDING if word in words), None)
    if padding is None:
        raise BadFileError(
            f"Cannot use the tokenizer of {file}",
            "it has neither a token to pad texts with nor one for their end, and pipelines pad every prompt",
            f"Put the tokenizer ({class_name}) of the same model into the pipeline's folder",
        )
    if tokenizer.pad_token is None:
        tokenizer.pad_token = padding
    return tokenizer
