"""Put sdquant into the folder of SD.Next, Forge, AUTOMATIC1111 or ComfyUI, or take it out again."""

from __future__ import annotations

import configparser
import shutil
import sys
from importlib import resources
from pathlib import Path
from typing import TYPE_CHECKING

from ...errors import ConflictError, SettingsError
from ...utils import install
from .. import _common

if TYPE_CHECKING:
    import argparse

    from ...hosts import HostProgram

NAME = "sdquant"
# Where a web UI's folder has the Python that it runs with, if it has one of its own.
_PYTHONS = (
    "venv/bin/python", "venv/Scripts/python.exe", ".venv/bin/python", ".venv/Scripts/python.exe",
    "../system/python/python.exe", "../python_embeded/python.exe",
)  # fmt: skip


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the web UI's folder, and the flags to replace or remove the extension."""
    parser.add_argument(
        "folder", type=Path, metavar="WEBUI", help="the web UI's folder, which webui.py (ComfyUI: main.py) is in"
    )
    parser.add_argument(
        "--bundle",
        nargs="*",
        metavar="EXTRA",
        help="put sdquant itself, what it needs there and the packages of extras into the extension's folder, so that "
        "nothing is installed in the web UI's Python: --bundle, or --bundle bnb quanto",
    )
    parser.add_argument("--overwrite", action="store_true", help="replace the extension if it is there")
    parser.add_argument("--remove", action="store_true", help="take the extension out again")
    _common.add_json_flag(parser)


def run(args: argparse.Namespace) -> int:
    """Copy the folder or remove it, and say which web UI it was and what comes next."""
    from ...hosts import bundle, host, preflight
    from ...utils.atomic_write import remove, whole_folder

    if args.remove and args.bundle is not None:
        raise SettingsError("Cannot combine --remove with --bundle", "they do different things", "Use one of them")
    if args.remove and args.overwrite:
        raise SettingsError("Cannot combine --remove with --overwrite", "they do different things", "Use one of them")
    webui = host.in_folder(args.folder)
    target = args.folder / webui.into
    packages: list[str] = []
    there = target.exists() or target.is_symlink()
    if there:
        _refuse_others(target)
    if args.remove:
        if not there:
            raise SettingsError(f"Cannot remove {target}", "it does not exist", "Check the web UI's folder")
        remove(target)
    else:
        if there and not args.overwrite:
            raise ConflictError(f"Cannot write {target}", "it already exists", "Add --overwrite to replace it")
        with resources.as_file(resources.files("sdquant.hosts") / webui.source) as source, whole_folder(target) as new:
            ignore = shutil.ignore_patterns("__pycache__")
            shutil.copytree(source, new, dirs_exist_ok=True, ignore=ignore, copy_function=_copy)
            if args.bundle is not None:
                extras, python = tuple(args.bundle), _python(args.folder)
                environment = preflight.site_packages(args.folder)
                known = None if environment is None else preflight.in_folder(environment)
                packages = bundle.add_bundle(new, extras, python, known)
    if packages:
        print(f"Bundled beside sdquant: {', '.join(packages)}", file=sys.stderr)
    done = "removed" if args.remove else "installed"
    trouble = None if args.remove else preflight.warning(args.folder, webui, target / bundle.FOLDER / "packages")
    steps = [f"Start {webui.title} again"]
    if not args.remove:
        steps = [*([] if args.bundle is not None else [_install(args.folder, webui)]), *steps, webui.then]
    if args.json:
        answer = {"host": webui.name, "title": webui.title, "extension": str(target), "done": done, "next": steps}
        answer |= {"warning": trouble} if trouble is not None else {}
        _common.print_json(answer)
        return 0
    print(f"{webui.title}: {done} {target}")
    if trouble is not None:
        print(f"It will not run yet. {trouble}")
    for number, text in enumerate(steps, 1):
        print(f"  {number}. {text}")
    if not args.remove:
        print("What does not work there:")
        for text in webui.cannot:
            print(f"  - {text}")
    return 0


def _copy(source: str, target: str) -> None:
    """Copy a text that says how to install sdquant, and so cannot import what sdquant says of it."""
    text = Path(source).read_text(encoding="utf-8")
    Path(target).write_text(text.replace(install.CHECKOUT, install.SOURCE), encoding="utf-8")


def _python(folder: Path) -> Path | None:
    """Return the Python in a web UI's folder; None if there is none."""
    return next((place for name in _PYTHONS if (place := folder / name).exists()), None)


def _install(folder: Path, webui: HostProgram) -> str:
    """Return the step after the copy. The web UI runs the copy in its own Python, which must find the package."""
    python = _python(folder)
    name = f'"{python}"' if python is not None else "<its Python>"
    return f"Install sdquant in the Python that {webui.title} runs with: {install.install_alone(name)}"


def _refuse_others(target: Path) -> None:
    """Raise ConflictError unless what is at `target` is this extension, copied by this command."""
    metadata = configparser.ConfigParser()
    why = None
    try:
        metadata.read(target / "metadata.ini", encoding="utf-8")
    except (configparser.Error, UnicodeDecodeError) as error:
        why = f"its metadata.ini is not readable: {error}"
    if target.is_symlink():
        why = "it is a symbolic link, which sdquant did not create"
    elif why is None and metadata.get("Extension", "Name", fallback=None) != NAME:
        why = "it is another extension: its metadata.ini does not name sdquant"
    if why is not None:
        raise ConflictError(f"Cannot replace or remove {target}", why, "Move it away, then try again")
