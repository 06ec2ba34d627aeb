"""The command line: one subcommand per file in `commands/`, and the one place where errors become sentences.

Exit codes: 0 done, 1 the answer is no (a doctor's finding, digits drawn wrong), 2 refused or bad input, 130 interrupted.
"""

from __future__ import annotations

import argparse
import importlib
import json
import logging
import sys
import warnings
from collections.abc import Sequence

from . import __version__
from .errors import SdquantError

# In the order of the help.
COMMANDS = ("demo", "generate", "inspect", "plan", "quantize", "matrix", "doctor")


def parser() -> argparse.ArgumentParser:
    """The whole command line."""
    top = argparse.ArgumentParser(prog="sdquant", description="Quantization for diffusion pipelines.")
    top.add_argument("--version", action="version", version=f"sdquant {__version__}")
    top.add_argument("-v", "--verbose", action="store_true", help="show the log")
    commands = top.add_subparsers(dest="command", metavar="COMMAND", required=True)
    for name in COMMANDS:
        module = importlib.import_module(f".commands.{name}", __package__)
        summary = (module.__doc__ or "").splitlines()[0]
        sub = commands.add_parser(name, help=summary, description=module.__doc__)
        module.add_arguments(sub)
        sub.set_defaults(run=module.run)
    return top


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command and return its exit code."""
    args = parser().parse_args(argv)
    logging.basicConfig(
        level=logging.INFO if args.verbose else logging.WARNING, format="%(levelname)s: %(message)s", stream=sys.stderr
    )
    if not args.verbose:
        warnings.simplefilter("ignore")  # other libraries' remarks are for developers; -v shows them
    logging.getLogger("sdquant").addHandler(_warnings_of_ours())
    try:
        return int(args.run(args))
    except SdquantError as error:
        print(f"sdquant: {error.what}\n   why: {error.why}\n   fix: {error.fix}", file=sys.stderr)
        if getattr(args, "json", False):
            row = {"kind": type(error).__name__, "what": error.what, "why": error.why, "fix": error.fix}
            print(json.dumps({"error": row}, indent=2))
        return 2
    except KeyboardInterrupt:
        print("sdquant: interrupted", file=sys.stderr)
        return 130
    except BrokenPipeError:  # the reader of our output went away, as `| head` does
        sys.stderr.close()
        return 0


def _warnings_of_ours() -> logging.Handler:
    """sdquant's own warnings (an untested combination, say) reach the user even where others' are hidden."""
    from .compat import SdquantWarning

    warnings.filterwarnings("always", category=SdquantWarning)

    def show(message: Warning | str, *_: object, **__: object) -> None:
        print(f"sdquant: {message}", file=sys.stderr)

    warnings.showwarning = show
    return logging.NullHandler()


if __name__ == "__main__":
    raise SystemExit(main())
