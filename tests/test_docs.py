"""What README.md and docs/ show works: the code blocks of a page run from top to bottom, as a reader would run them.

A page has a folder and a Python namespace of its own. ```python blocks are executed. In ```sh blocks every command is
checked (flags, extras and modules exist), and `sdquant ...` is run; those in `SLOW_COMMANDS` by the slow tests only.
```yaml is read as a config (a mapping) or as rules (a list). A block with title="FILE" is written to that file. Files
that pages take as given (`STAND_INS`) are made from the shipped models. A block after `<!-- not run: REASON -->` is
checked and not run; `NOT_RUN` counts these.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import re
import shlex
import shutil
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import pytest

import sdquant
from sdquant import cli
from sdquant.rules.parse import rules_of
from sdquant.training import config

ROOT = Path(__file__).parent.parent
PAGES = (ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md")))
NOT_RUN = {"README.md": 2, "lora.md": 1, "rules.md": 1, "schemes.md": 1, "walks.md": 3, "web-uis.md": 3}
OTHER_FLAGS = (  # of pip and web UIs
    "--no-deps", "--no-half", "--precision", "--lowvram", "--medvram", "--novram", "--always-low-vram",
    "--always-no-vram",
)  # fmt: skip
SLOW_COMMANDS = ("bench", "calibrate", "compare", "generate", "train")  # of sdquant

_FENCE = re.compile(
    r"^(?:<!-- not run: (?P<reason>[^\n]+) -->\n+)?(?:<!-- command: \w+ -->\n+)?"
    r'```(?P<language>\w*)(?: title="(?P<title>[\w.-]+)")?\n(?P<text>.*?)^```$',
    flags=re.MULTILINE | re.DOTALL,
)


@dataclass(frozen=True, kw_only=True)
class Block:
    """A fenced block of a page; `line` is that of its first line of text, `reason` why it is not run."""

    page: str
    line: int
    language: str
    text: str
    title: str | None
    reason: str | None

    def __str__(self) -> str:
        return f"{self.page}:{self.line}"


def _blocks(page: Path) -> Iterator[Block]:
    text = page.read_text(encoding="utf-8")
    for found in _FENCE.finditer(text):
        line = text.count("\n", 0, found.start("text")) + 1
        yield Block(page=page.name, line=line, **found.groupdict())


BLOCKS = [block for page in PAGES for block in _blocks(page)]


def _quantize(target: Path) -> None:
    assert cli.main(["quantize", "digits-flux", str(target), "--quant", "q4_0", "--no-progress"]) == 0


def _save_lora(target: Path) -> None:
    from sdquant import lora

    unet = sdquant.load_model(sdquant.demo.path("digits-sd") / "unet")
    lora.add_lora(unet, rank=2)
    lora.save_lora(unet, target)


def _copy(name: str) -> Callable[[Path], None]:
    """Return a function that copies a file or folder of the shipped models; configs alone of a folder of configs."""

    def copy(target: Path) -> None:
        model, _, rest = name.partition("/")
        source = sdquant.demo.path(model) / rest
        if source.is_file():
            shutil.copy(source, target)
        else:
            no_weights = shutil.ignore_patterns("*.safetensors") if "configs" in target.name else None
            shutil.copytree(source, target, ignore=no_weights)

    return copy


# Files that the pages take as given: a page that names one finds it in its folder.
STAND_INS: dict[str, Callable[[Path], None]] = {
    "flux1-dev-Q4_0.gguf": _quantize,
    "flux-configs": _copy("digits-flux"),
    "clip_l.safetensors": _copy("digits-flux/text_encoder/model.safetensors"),
    "t5xxl_fp16.safetensors": _copy("digits-flux/text_encoder_2/model.safetensors"),
    "ae.safetensors": _copy("digits-flux/vae/diffusion_pytorch_model.safetensors"),
    "unet.safetensors": _copy("digits-sd/unet/diffusion_pytorch_model.safetensors"),
    "my-pipeline": _copy("digits-sd"),
    "my-lora.safetensors": _save_lora,
}


def _runs() -> Iterator[Any]:
    """Yield (page, whether slow commands are run), for pages with code."""
    for page in PAGES:
        text = "".join(block.text for block in _blocks(page) if block.reason is None)
        if text:
            yield pytest.param(page, False, id=page.name)
        if any(f"sdquant {command} " in text for command in SLOW_COMMANDS):
            yield pytest.param(page, True, id=f"{page.name}-slow", marks=pytest.mark.slow)


@pytest.mark.parametrize(("page", "slow"), [*_runs()])
def test_blocks_run_in_order(page: Path, slow: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    names: dict[str, Any] = {}
    blocks = [block for block in _blocks(page) if block.reason is None]
    for name, make in STAND_INS.items():
        if any(f'"{name}"' in block.text or f" {name}" in block.text for block in blocks):
            make(tmp_path / name)
    for block in blocks:
        if block.title is not None:
            Path(block.title).write_text(block.text, encoding="utf-8")
        elif block.language == "python":
            exec(compile("\n" * (block.line - 1) + block.text, page.name, "exec"), names)
        elif block.language == "sh":
            for words in _commands(block.text):
                assert words[0] == "sdquant", f"{block}: say why {words[0]} is not run"
                if slow or words[1] not in SLOW_COMMANDS:
                    assert cli.main(words[1:]) == 0, f"{block}: {shlex.join(words)}"


def test_every_block_that_is_not_run_is_counted() -> None:
    assert Counter(block.page for block in BLOCKS if block.reason) == NOT_RUN


@pytest.mark.parametrize("block", BLOCKS, ids=str)
def test_block_is_valid(block: Block, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    if block.language == "python":
        compile(block.text, block.page, "exec")
    elif block.language == "sh":
        for words in _commands(block.text):
            _check(words)
    elif block.language == "json":
        json.loads(block.text)
    elif block.language == "yaml":
        _check_yaml(block.text, tmp_path / "file.yml")
    else:
        assert block.language == "text", f"{block}: no check for {block.language!r}"


def test_all_code_blocks_are_fenced() -> None:
    for page in PAGES:
        rest = _FENCE.sub("", page.read_text(encoding="utf-8"))
        assert "```" not in rest, page.name
        assert not re.findall(r"^ {4}\S.*", rest, flags=re.MULTILINE), f"{page.name} has an indented code block"


def _commands(text: str) -> Iterator[list[str]]:
    """Yield the words of each command, without comments, assignments of variables and the program's folder."""
    for line in text.replace("\\\n", " ").splitlines():
        for part in line.split("&&"):
            words = shlex.split(part, comments=True)
            while words and re.match(r"[A-Z_]+=", words[0]):
                del words[0]
            if words:
                yield [words[0].rpartition("/")[2], *words[1:]]


def _check(words: list[str]) -> None:
    """Check a command: its flags, the extras that it installs, the module that it runs."""
    program, *rest = words
    if program == "sdquant":
        cli.parser().parse_args(rest)
    elif "install" in rest and (program == "pip" or "pip" in rest):
        extras = {name for word in rest for found in re.findall(r"\[([\w,]+)\]", word) for name in found.split(",")}
        assert extras <= _extras(), words
    elif "-m" in rest and program in ("python", "python3", "torchrun"):
        module, *arguments = rest[rest.index("-m") + 1 :]
        assert importlib.util.find_spec(module) is not None, module
        if module == "sdquant":
            cli.parser().parse_args(arguments)
    else:
        assert program == "pytest", f"no check for {program}: add one"


@cache
def _extras() -> frozenset[str]:
    text = (ROOT / "pyproject.toml").read_text(encoding="utf-8")
    (table,) = re.findall(r"^\[project\.optional-dependencies\]\n(.*?)^\[", text, flags=re.MULTILINE | re.DOTALL)
    return frozenset(re.findall(r"^(\w+) = \[", table, flags=re.MULTILINE))


def _check_yaml(text: str, file: Path) -> None:
    file.write_text(text, encoding="utf-8")
    if text.lstrip().startswith("- "):
        rules_of(file)
    else:
        config.quantization_of(config.load(file))


# Code within sentences.


def _inline(page: Path) -> Iterator[str]:
    text = _FENCE.sub("", page.read_text(encoding="utf-8"))
    for found in re.findall(r"`([^`]+)`", text):
        yield " ".join(found.split())


@cache
def _parsers() -> dict[str, argparse.ArgumentParser]:
    (action,) = (action for action in cli.parser()._actions if isinstance(action, argparse._SubParsersAction))
    return dict(action.choices)


def _flags(command: str) -> set[str]:
    parser = _parsers()[command]
    form = getattr(parser, "form", None)
    return {*parser._option_string_actions, *(form._option_string_actions if form else ())}


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_names_in_sentences_exist(page: Path) -> None:
    """Commands and flags of sdquant, modules, files of the repository, public names."""
    wrong = [code for code in _inline(page) if not _exists(code)]
    assert not wrong


def _exists(code: str) -> bool:
    words = code.split()
    if words[0] == "sdquant" and len(words) > 1 and words[1] in _parsers():
        return {word.partition("=")[0] for word in words if word.startswith("--")} <= _flags(words[1])
    if module := re.search(r"python -m ([\w.]+)", code):
        return importlib.util.find_spec(module[1]) is not None
    if re.fullmatch(r"(sdquant|bench|tools|tests|docs)/[\w./-]*", code):
        return (ROOT / code).exists()
    if re.fullmatch(r"--[a-z]+(-[a-z]+)*( [A-Z]\S*)?", code) and code not in OTHER_FLAGS:
        return any(words[0] in _flags(command) for command in _parsers())
    if public := re.match(r"sdquant(?:\.[A-Za-z]\w*)+", code):
        return _resolves(public[0])
    return words[0] != "sdquant" or words[1:] in ([], ["-v"])


def _resolves(name: str) -> bool:
    found: Any = sdquant
    path = "sdquant"
    for part in name.split(".")[1:]:
        path += f".{part}"
        if not hasattr(found, part):
            if importlib.util.find_spec(path) is None:
                return False
            importlib.import_module(path)
        found = getattr(found, part)
    return True
