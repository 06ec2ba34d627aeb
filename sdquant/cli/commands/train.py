"""Train a UNet or transformer as a config file says: in floats, quantized, or a LoRA on a quantized base."""

from __future__ import annotations

from typing import TYPE_CHECKING

from .. import _common, _config_form

if TYPE_CHECKING:
    import argparse

    from ...training import Summary


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the config file, and the keys that override it."""
    if isinstance(parser, _config_form.ConfigParser):
        parser.use_config("train", always=True)


def run(args: argparse.Namespace) -> int:
    """Train, write the model, and print the results."""
    config = _config_form.read(args)
    if config is None:
        return 0
    from ...training import train

    done = train(config, progress=args.progress)
    if done.first and args.json:
        _common.print_json(done.to_dict())
    elif done.first:
        print(render_training(done))
    return 0


def render_training(done: Summary) -> str:
    """Format the results of a training as a table."""
    rows = [
        ("steps", str(done.steps) + (f", the first {done.begun} before" if done.begun else "")),
        ("loss", f"{done.first_loss:.4g} at first, {done.loss:.4g} at last"),
        ("time", f"{done.seconds:.0f} s, {done.processes} process{'es' if done.processes > 1 else ''}"),
        ("data", f"{done.examples} pictures"),
        ("trained", f"{done.weights} weights"),
        ("model", done.model),
        ("pictures", done.pictures[0]),
        *(("", path) for path in done.pictures[1:]),
        ("checkpoints", ", ".join(done.checkpoints)),
    ]
    return _common.table(("training", done.folder), rows, left=2)
