"""References to the Hugging Face hub: repositories, files and folders in them, and their URLs."""

from __future__ import annotations

import os
import re
from dataclasses import dataclass
from urllib.parse import unquote, urlsplit

from ..errors import MissingComponentError

_SHORT = "hf.co"  # what people call the hub's host besides its name
_NAME = re.compile(r"\w[\w.-]*")
_VIEWS = ("blob", "resolve", "tree", "raw", "blame", "edit")  # what stands before the revision in an address
_OTHERS = ("datasets", "spaces", "collections", "papers", "docs", "api")
_DOWNLOAD = "Download the file, and load it by its path"


@dataclass(frozen=True)
class Reference:
    """A repository, or a file or folder in one, on the hub.

    Attributes:
        repository: "owner/name". inside: path of a file or folder in it; "" for all of it.
        revision: branch, tag or commit; None for the main branch.
    """

    repository: str
    inside: str = ""
    revision: str | None = None

    def __str__(self) -> str:
        whole = self.repository + (f"/{self.inside}" if self.inside else "")
        return whole + (f" at revision {self.revision}" if self.revision else "")


def reference(text: str) -> Reference | None:
    """Parse a reference to the hub; return None if it can only be a path on this machine.

    Accepts "owner/name", "owner/name/folder", "owner/name/file.gguf", "owner/name@revision/...",
    "hf://owner/name/...", and URLs of the hub's pages.

    Raises:
        MissingComponentError: it is the URL of something else.
    """
    host, slashes, rest = text.partition("//")
    if slashes and host.lower() in ("http:", "https:"):
        return _of_address(text)
    if slashes and host.lower() == "hf:":
        return _of_words(text, rest)
    first = text.partition("/")[0]
    if "." in first.strip(".") and first.lower() in _hosts():
        return _of_address(f"https://{text}")
    if text.startswith((".", "/", "~")) or "\\" in text or ":" in text:
        return None
    # The folder is there, and what it is to hold is not: a misspelled path.
    if text.count("/") > 1 and os.path.isdir(first):
        return None
    words = text.rstrip("/").split("/")
    return _of_words(text, text) if len(words) > 1 and _NAME.fullmatch(words[0]) and all(words) else None


def _of_words(text: str, path: str) -> Reference | None:
    owner, _, rest = path.strip("/").partition("/")
    name, _, inside = rest.partition("/")
    name, _, revision = name.partition("@")
    if not _NAME.fullmatch(owner) or not _NAME.fullmatch(name):
        return None
    return Reference(f"{owner}/{name}", _sound(text, inside), revision or None)


def _of_address(text: str) -> Reference:
    address = urlsplit(text)
    if address.netloc.lower() not in _hosts():
        raise MissingComponentError(
            f"Cannot load {text}", f"{address.netloc or 'it'} is not the Hugging Face hub", _DOWNLOAD
        )
    words = [unquote(word) for word in address.path.strip("/").split("/")]
    if len(words) < 2 or words[0] in _OTHERS:
        raise MissingComponentError(
            f"Cannot load {text}", "it is not the URL of a model", f"Use one like {page('OWNER/NAME')}"
        )
    owner, name, *more = words
    if not more:
        return Reference(f"{owner}/{name}")
    if more[0] not in _VIEWS or len(more) < 2:
        raise MissingComponentError(
            f"Cannot load {text}",
            f"it is not the URL of a model or of a file in one: it contains {more[0]!r}",
            f"Use {page(f'{owner}/{name}')}, or the URL of a file",
        )
    cut = 4 if more[1] == "refs" and len(more) > 3 else 2  # "refs/pr/3" has signs of its own
    return Reference(f"{owner}/{name}", _sound(text, "/".join(more[cut:])), "/".join(more[1:cut]))


def page(repository: str) -> str:
    """Return the URL of a repository's page."""
    from huggingface_hub import constants

    return f"{constants.ENDPOINT.rstrip('/')}/{repository}"


def _hosts() -> set[str]:
    """Return the host names of the hub, including that of a mirror ($HF_ENDPOINT)."""
    from huggingface_hub import constants

    ends = (constants.ENDPOINT, getattr(constants, "_HF_DEFAULT_ENDPOINT", constants.ENDPOINT))
    names = {urlsplit(end).netloc.lower() for end in ends} | {_SHORT}
    return names | {f"www.{name}" for name in names}


def _sound(text: str, inside: str) -> str:
    """Normalize a path in a repository; raise MissingComponentError if it leaves the repository."""
    inside = inside.strip("/")
    if any(word in (".", "..") for word in inside.split("/")) or "\\" in inside:
        raise MissingComponentError(f"Cannot load {text}", "its path leads outside the repository", "Check the path")
    return inside
