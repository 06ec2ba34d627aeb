"""The command form that reads a config file: `COMMAND CONFIG.yml key=value ...`."""

from __future__ import annotations

import argparse
import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

from ..errors import SettingsError
from ..training import Key, RunConfig, config_keys, format_value, load_config
from . import _common

SUFFIXES = (".yml", ".yaml")
_KEYS = "--keys"
_OWN = ("-h", "--help", _KEYS, "--json", "--no-progress")


class ConfigParser(argparse.ArgumentParser):
    """Parser of a command, with a second parser for its form that reads a config file.

    That form is used if the first word that is not a flag has the extension of a YAML file.
    """

    form: argparse.ArgumentParser | None = None
    always = False

    def use_config(self, command: str, *, instead: Mapping[str, str] | None = None, always: bool = False) -> None:
        """Add the form that reads a config file.

        Args:
            instead: flags of this parser, each with its equivalent config key, beside those of fields of Request.
            always: whether the command has only this form.
        """
        self.form = argparse.ArgumentParser(
            prog=self.prog,
            usage=f"{self.prog} CONFIG.yml [key=value ...] [--json] [--no-progress]\n"
            f"       {self.prog} {_KEYS} [--json]",
            description=self.description,
        )
        self.always = always
        _add_form(self.form, command)
        if not always:
            keys = {row.field: row.name for row in config_keys() if row.field} | dict(instead or {})
            for action in self._actions:
                if action.option_strings and not set(action.option_strings) & set(_OWN):
                    self.form.add_argument(
                        *action.option_strings, action=_Refused, nargs=action.nargs, key=keys.get(action.dest, ""),
                        dest=argparse.SUPPRESS, help=argparse.SUPPRESS,
                    )  # fmt: skip
            self.epilog = (
                f"With a config file: {self.prog} CONFIG.yml [key=value ...] [--json]. `{self.prog} {_KEYS}` lists the "
                "keys that it may have."
            )

    def set_defaults(self, **values: Any) -> None:
        """Set the defaults of both forms."""
        super().set_defaults(**values)
        if self.form is not None:
            self.form.set_defaults(**values)

    def parse_known_args(self, args: Any = None, namespace: Any = None) -> Any:
        """Parse with the form that the words match."""
        if self.form is not None and args is not None and (self.always or names_config(args)):
            return self.form.parse_known_intermixed_args(args, namespace)
        return super().parse_known_args(args, namespace)


class _Refused(argparse.Action):
    """Flag that the form with a config file does not have: its error names the key to use instead."""

    def __init__(self, *args: Any, key: str, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.key = key

    def __call__(
        self, parser: argparse.ArgumentParser, namespace: object, values: object, option_string: str | None = None
    ) -> None:
        """Exit with an error that names the key to use instead."""
        value = str(values) if isinstance(values, str) and values else "VALUE"
        instead = f"write {self.key}={value}" if self.key else "a config file has no key for it"
        parser.error(f"{option_string} cannot be used with a config file: {instead}")


def names_config(words: Sequence[str]) -> bool:
    """Return whether the first word that is neither a flag nor possibly a flag's value names a YAML file."""
    if _KEYS in words:
        return True
    value = False  # whether the word may be a flag's value
    for word in words:
        if word.startswith("-"):
            value = "=" not in word
        elif word.lower().endswith(SUFFIXES):
            return True
        elif not value:
            return False
        else:
            value = False
    return False


def _add_form(parser: argparse.ArgumentParser, command: str) -> None:
    parser.add_argument("config", nargs="?", metavar="CONFIG.yml", help="the config file")
    parser.add_argument("overrides", nargs="*", metavar="key=value", help="a key's value instead of the file's")
    parser.add_argument(_KEYS, dest="list_keys", action="store_true", help="list the keys that it may have, and stop")
    parser.add_argument("--no-progress", dest="progress", action="store_false", help="show no progress bars")
    _common.add_json_flag(parser)
    parser.set_defaults(config_of=command)


def read(args: argparse.Namespace) -> RunConfig | None:
    """Read the config that the words name; with `--keys`, print the keys and return None.

    Raises:
        SdquantError: see `config.load`; or no file is named.
    """
    command = args.config_of
    if args.list_keys:
        _list(command, as_json=args.json)
        return None
    if args.config is None or not args.config.lower().endswith(SUFFIXES):
        raise SettingsError(
            f"Cannot read the config from {args.config}" if args.config else "Cannot run without a config file",
            f"{command} needs a config file whose name ends in {' or '.join(SUFFIXES)}",
            f"Run `sdquant {command} CONFIG.yml key=value`",
        )
    return load_config(args.config, args.overrides, command=command)


def _list(command: str, *, as_json: bool) -> None:
    rows = [row for row in config_keys() if command in row.commands]
    if as_json:
        _common.print_json([_row(row) for row in rows])
        return
    lines = [
        (row.name, row.kind, format_value(row.default), row.origin,
         row.help + (f" ({', '.join(row.choices)})" if row.choices else ""))
        for row in rows
    ]  # fmt: skip
    print(_common.table(("key", "type", "default", "name of", "what it is"), lines, left=5))


def _row(row: Key) -> dict[str, Any]:
    values = {field.name: getattr(row, field.name) for field in dataclasses.fields(row) if field.name != "check"}
    return {name: list(value) if isinstance(value, tuple) else value for name, value in values.items()}
