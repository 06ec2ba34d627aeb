"""Put sdquant's extension into the folder of SD.Next, Forge or AUTOMATIC1111, or take it out again."""

from __future__ import annotations

import argparse
import configparser
import shutil
from importlib import resources
from pathlib import Path

from ..errors import ConflictError, SettingsError
from . import _shared

NAME = "sdquant"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The web UI's folder, and what is to be done."""
    parser.add_argument("folder", type=Path, metavar="WEBUI", help="the web UI's folder, which webui.py is in")
    parser.add_argument("--overwrite", action="store_true", help="replace the extension if it is there")
    parser.add_argument("--remove", action="store_true", help="take the extension out again")
    _shared.add_json_flag(parser)


def run(args: argparse.Namespace) -> int:
    """Copy the folder or remove it, and say which web UI it was."""
    from ..hosts import host
    from ..writing import remove, whole_folder

    if args.remove and args.overwrite:
        raise SettingsError("--remove and --overwrite were given", "they do different things", "Give one of them")
    found = host.in_folder(args.folder)
    target = args.folder / "extensions" / NAME
    there = target.exists() or target.is_symlink()
    if there:
        _refuse_others(target)
    if args.remove:
        if not there:
            raise SettingsError(f"{target} was to be removed", "it is not there", "Check the web UI's folder")
        remove(target)
    else:
        if there and not args.overwrite:
            raise ConflictError(f"{target} was to be written", "it exists", "Add --overwrite to replace it")
        with resources.as_file(resources.files("sdquant.hosts") / "webui") as source, whole_folder(target) as new:
            shutil.copytree(source, new, dirs_exist_ok=True, ignore=shutil.ignore_patterns("__pycache__"))
    done = "removed" if args.remove else "installed"
    if args.json:
        _shared.print_json({"host": found.name, "title": found.title, "extension": str(target), "done": done})
        return 0
    print(f"{found.title}: {done} {target}")
    if not args.remove:
        print("Start the web UI again. Its own Python needs sdquant: install it there with pip.")
        for text in found.cannot:
            print(f"  not there: {text}")
    return 0


def _refuse_others(target: Path) -> None:
    """Raise ConflictError unless what is at `target` is this extension, copied by this command."""
    said = configparser.ConfigParser()
    why = None
    try:
        said.read(target / "metadata.ini", encoding="utf-8")
    except (configparser.Error, UnicodeDecodeError) as error:
        why = f"its metadata.ini is not readable: {error}"
    if target.is_symlink():
        why = "it is a link, which somebody else made"
    elif why is None and said.get("Extension", "Name", fallback=None) != NAME:
        why = "it is another extension: its metadata.ini does not say that it is sdquant's"
    if why is not None:
        raise ConflictError(f"{target} was to be replaced or removed", why, "Move it away, then try again")
