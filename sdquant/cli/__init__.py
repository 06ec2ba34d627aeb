"""The command line: one subcommand per file in `commands/`, and the one place where errors become sentences.

In: the words of a command. Out: what it prints and writes, and its exit code. May import every other room.
Exit codes: 0 done, 1 the answer is no (doctor found no backend that can run, compare no scheme that draws, bench none
that runs), 2 refused or bad input, 130 interrupted, 143 terminated.
"""

from __future__ import annotations

import argparse
import contextlib
import importlib
import io
import json
import logging
import os
import re
import sys
import traceback
import warnings
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import NoReturn

from ..errors import SdquantError, SettingsError
from ..utils.distributed import label, launched
from ..utils.signals import Stop
from ..utils.suggestions import nearest
from ..utils.version import __version__
from . import _common
from ._command_words import in_command_words, in_config_words
from ._config_form import ConfigParser

__all__ = ["COMMANDS", "main", "parser"]

_SPEAKERS = ("", "[0]")  # of several processes the first says what all would say
# In the order of the help.
COMMANDS = (
    "demo", "generate", "train", "compare", "bench", "inspect", "schemes", "plan", "quantize", "dequantize",
    "calibrate", "ui", "install-extension", "matrix", "doctor",
)  # fmt: skip


_OF_ONE = (
    "demo",
    "compare",
    "bench",
    "dequantize",
    "ui",
)  # they write, or listen, and know of no other process


# What other tools call what a command here does.
_OTHER_NAMES = {
    "verify": "inspect --verify",
    "check": "inspect --verify",
    "detect": "inspect",
    "info": "inspect",
    "convert": "quantize",
    "save": "quantize",
    "load": "generate",
    "run": "generate",
    "draw": "generate",
    "settings": "ui",
    "webui": "ui",
    "install": "install-extension",
    "benchmark": "bench",
    "list": "schemes",
    "fit": "schemes",
    "recommend": "schemes",
}


class _TopParser(argparse.ArgumentParser):
    """The top-level parser, which suggests the commands and flags that unknown ones may stand for."""

    def error(self, message: str) -> NoReturn:
        """Exit as argparse does, and suggest the command or the flags that may be meant."""
        word = re.match(r"argument COMMAND: invalid choice: '(.*)' \(choose", message)
        near = word and (_OTHER_NAMES.get(word[1].lower()) or nearest(word[1], COMMANDS))
        if near:
            super().error(f"{message} (did you mean sdquant {near}?)")
        suggestions = _common.flags_meant(message.split()) if "unrecognized arguments" in message else {}
        super().error(message + "".join(f" (did you mean {name} for {word}?)" for word, name in suggestions.items()))


def parser(argv: Sequence[str] = ()) -> argparse.ArgumentParser:
    """Build the parser of the whole command line.

    Args:
        argv: if its first word is a command, the others are named only, and not imported: `install-extension` runs in a
            Python that has none of the packages that they need.
    """
    alone = argv[0] if argv and argv[0] in COMMANDS else None
    top = _TopParser(
        prog="sdquant",
        description="Quantization for diffusion pipelines.",
        epilog="`sdquant COMMAND --help` tells more. Start with: sdquant demo",
    )
    top.add_argument("--version", action="version", version=f"sdquant {__version__}")
    top.add_argument("-v", "--verbose", action="store_true", help="show the log, other libraries' remarks, tracebacks")
    commands = top.add_subparsers(dest="command", metavar="COMMAND", required=True, parser_class=ConfigParser)
    for name in COMMANDS:
        if alone not in (None, name):
            commands.add_parser(name)
            continue
        module = importlib.import_module(f".commands.{name.replace('-', '_')}", __package__)
        summary = (module.__doc__ or "").splitlines()[0]
        sub = commands.add_parser(name, help=summary, description=module.__doc__)
        module.add_arguments(sub)
        sub.set_defaults(run=module.run)
    return top


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command and return its exit code."""
    args = None
    stop = Stop()
    try:
        with _streams(), stop:
            argv = sys.argv[1:] if argv is None else argv
            args = parser(argv).parse_args(argv)
            if not sys.stderr.isatty() or label() not in _SPEAKERS:
                args.progress = False  # bars are for terminals, and for one process
            if args.command in _OF_ONE and launched():
                why = f"each of them would do all of the work: {args.command} is for one process"
                raise SettingsError("Cannot split the work across torchrun's processes", why, "Run it without torchrun")
            with _voices(args.verbose):
                code = int(args.run(args))
            sys.stdout.flush()
            return code
    except (Exception, KeyboardInterrupt) as error:
        if stop.signal is not None:
            return stop.say()
        if args is None:
            raise
        return _failed(error, args)


def _failed(error: BaseException, args: argparse.Namespace) -> int:
    """Return the exit code for an expected error; re-raise any other, which is a bug."""
    if isinstance(error, SdquantError):
        return _refused(error, args)
    if isinstance(error, BrokenPipeError):
        # The reader of our output went away, as `| head` does. Python flushes stdout once more at its end.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 0
    if isinstance(error, OSError) and error.filename is not None:
        what, why = f"Cannot read or write {error.filename}", str(error.strerror or error)
        return _refused(SdquantError(what, why, "Check the path, its permissions and the free space"), args)
    raise error


def _refused(error: SdquantError, args: argparse.Namespace) -> int:
    """Print what, why and fix to stderr, and as JSON to stdout if --json is set. Return exit code 2."""
    if args.verbose:
        traceback.print_exception(error)
    what, why, fix = map(_words(args), (error.what, error.why, error.fix))
    print(f"sdquant{label()}: {what}\n   why: {why}\n   fix: {fix}", file=sys.stderr)
    if getattr(args, "json", False):
        row = {"kind": type(error).__name__, "what": error.what, "why": error.why, "fix": error.fix}
        print(json.dumps({"error": row}, indent=2))
    return 2


def _words(args: argparse.Namespace) -> Callable[[str], str]:
    """Return what puts a sentence in the words of the form that the command was given in."""
    if getattr(args, "config_of", None) is None:
        return in_command_words
    from ..training import config_keys

    return partial(in_config_words, keys={row.field: row.name for row in config_keys() if row.field})


@contextlib.contextmanager
def _streams() -> Iterator[None]:
    """Write letters that the encoding of stdout lacks as escapes, such as those of a path in Windows' code pages.

    Streams that are closed, as under `pythonw` or after `>&-`, swallow what is written.
    """
    with contextlib.ExitStack() as stack:
        for name in ("stdout", "stderr"):
            if getattr(sys, name) is None:
                setattr(sys, name, stack.enter_context(open(os.devnull, "w", encoding="utf-8")))
                stack.callback(setattr, sys, name, None)
        out = sys.stdout
        if isinstance(out, io.TextIOWrapper) and out.errors == "strict":
            out.reconfigure(errors="backslashreplace")
            stack.callback(out.reconfigure, errors="strict")
        yield


@contextlib.contextmanager
def _voices(verbose: bool) -> Iterator[None]:
    """Show only sdquant's log, and errors of other libraries, while a command runs; everything with `verbose`."""
    from ..errors import SdquantWarning

    def ours(record: logging.LogRecord) -> bool:
        mine = record.name.partition(".")[0] == "sdquant" and label() in _SPEAKERS
        return verbose or record.levelno >= logging.ERROR or mine

    def show(message: Warning | str, *_: object, **__: object) -> None:
        print(f"sdquant: warning: {message}", file=sys.stderr)

    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(_Line())
    handler.addFilter(ours)
    root = logging.getLogger()
    level = root.level
    root.addHandler(handler)
    root.setLevel(logging.INFO if verbose else logging.WARNING)
    try:
        with warnings.catch_warnings():
            if not verbose:
                warnings.simplefilter("ignore")
            warnings.filterwarnings("always", category=SdquantWarning)
            warnings.showwarning = show
            yield
    finally:
        root.setLevel(level)
        root.removeHandler(handler)


class _Line(logging.Formatter):
    """Formatter for lines such as "sdquant: warning: text"; other libraries' records begin with their logger's name."""

    def format(self, record: logging.LogRecord) -> str:
        return f"{record.name.partition('.')[0]}: {record.levelname.lower()}: {super().format(record)}"


if __name__ == "__main__":
    raise SystemExit(main())
