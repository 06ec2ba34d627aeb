"""Quantize or convert a model: to a folder, one .safetensors, or a .gguf. Under torchrun, by several processes."""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from typing import TYPE_CHECKING

from ...core import AUTO, registry
from ...errors import SettingsError
from ...models import bundled_place
from ...planning import NOT_QUANTIZED, RULES
from ...utils import distributed
from .. import _common

if TYPE_CHECKING:
    import argparse

_FLAGS = (
    "quant", "components", "skip", "base", "runtime", "device", "dtype", "progress", "mode", "cache", "cache_limit",
    "allow_pickle", "parts", "variant", "rules", "quant_stats", "size", "quality", "revision", "subfolder", "token",
    "config",
)  # fmt: skip
_LOADING = ("base", "runtime", "device", "dtype", "mode", "cache", "parts", "variant", "rules", "quant_stats")
_DEFAULTS = {"mode": "auto"}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the model, the scheme, and the output path."""
    _common.add_request_flags(parser, only=_FLAGS)
    parser.add_argument(
        "target", type=Path, nargs="?", metavar="OUT", help="folder, or a file ending in .safetensors or .gguf"
    )
    parser.add_argument("-o", "--out", type=Path, help="the same as OUT")
    parser.add_argument("--overwrite", action="store_true", help="replace what is there")
    parser.add_argument(
        "--portable",
        action="store_true",
        help="a folder that diffusers loads without sdquant: what it cannot read quantized is written as floats",
    )
    parser.add_argument(
        "--portable-as",
        choices=("torchao", "bfl"),
        help="the same in the format of one of diffusers' quantizers: torchao (a folder; needs that package) or bfl "
        "(one .safetensors with Black Forest Labs' tensors)",
    )


def run(args: argparse.Namespace) -> int:
    """Load quantized, write, say what was written."""
    from ...loading import load_planned, rounding_loss
    from ...planning import locate, mix_arguments, prepare
    from ...saving import (
        comfy_mix,
        export_gguf,
        export_single_file,
        folder_size,
        library_formats,
        model_files,
        original_layout,
        portable,
        save,
    )  # fmt: skip
    from ...utils.atomic_write import require_space

    if (args.target is None) == (args.out is None):
        why = "no target is named" if args.out is None else f"two targets are named, {args.target} and {args.out}"
        raise SettingsError("Cannot quantize the model", why, f"Run: sdquant quantize {args.path} OUT --quant nf4")
    out = args.out or args.target
    if not args.quant and args.rules is None:
        raise SettingsError(
            "Cannot quantize the model", "no scheme is named", "Add --quant, such as --quant nf4, or --rules FILE"
        )
    quant = _common.quant_of(args.quant or [RULES])
    if isinstance(quant, str):  # "auto,size=6GB"
        options = mix_arguments.with_options_of_auto({"quant": quant, "size": args.size, "quality": args.quality})
        quant, args.size, args.quality = options["quant"], options["size"], options["quality"]
        args.quant = [quant] if args.quant else args.quant
    each = [quant] if isinstance(quant, str) else list(quant.values())
    named = [text for text in each if text.strip().lower() not in (NOT_QUANTIZED, AUTO)]
    _common.refuse_target(out)
    gguf = [text for text in named if registry.parse(text).scheme.backend == "gguf"]
    model_files.refuse_existing(out, args.overwrite)
    model_files.refuse_nested(Path(bundled_place(args.path)), out)
    form = library_formats.find_format(args.portable_as or False)
    for spec in map(registry.parse, named):
        if form is not None:
            library_formats.refuse_spec(form, spec)
        elif args.portable:
            portable.refuse_scheme(spec.scheme)
    if form is not None:
        library_formats.refuse_target(form, out)
    elif args.portable and out.suffix in (".safetensors", ".gguf"):
        model_files.refuse_portable_file(out)
    if distributed.launched():
        _refuse_together(args, out, [*gguf])
        return _run_together(args, out)
    more = ""
    alone = out.suffix == ".safetensors" and form is None
    quant = AUTO if isinstance(quant, str) and quant.strip().lower() == AUTO else quant
    into_gguf = bool(gguf) or (quant == AUTO and out.suffix == ".gguf")
    into_comfy = alone and quant == AUTO and not (args.size is None and args.quality is None)
    if into_gguf or into_comfy or (alone and isinstance(quant, str) and named and export_single_file.suits(quant)):
        if not isinstance(quant, str):
            raise SettingsError(
                f"Cannot write a GGUF file with {quant}",
                "GGUF uses one scheme for all components",
                f"Use -q {gguf[0]} --components {next(iter(quant))}",
            )
        _refuse_useless(args, quant)
        mixed = {name: getattr(args, name) for name in ("size", "quality")}
        write = export_gguf.quantize_file if into_gguf else export_single_file.quantize_file
        write = comfy_mix.write_comfy_mix if into_comfy else write
        write(
            locate.resolve_references(_common.request_of(args)), quant, out,
            components=args.components, skip=tuple(args.skip or ()), overwrite=args.overwrite,
            allow_pickle=args.allow_pickle, progress=args.progress,
            quant_stats=args.quant_stats, config=args.config, **(mixed if quant == AUTO else {}),
        )  # fmt: skip
    else:
        if out.suffix == ".gguf":
            raise SettingsError(f"Cannot write {out}", f"{each[0]} is not a GGUF type", "Use -q q8_0, q4_k, ...")
        request = _common.request_of(args)
        plan = prepare(request, convert=True, beside=folder_size.bytes_beside)
        require_space(out, plan.bytes)  # before the work, not after it
        model = load_planned(request, plan)
        original_layout.warn_of(rounding_loss(model, plan, progress=args.progress))
        if out.suffix == ".safetensors":
            from ...models import main_part

            model = main_part(model)
        floats = portable.of_model(model, form) if args.portable or form is not None else ()
        if floats:
            more = portable.said(floats, _common.size(sum(row.nbytes for row in floats)))
        save(model, out, overwrite=args.overwrite, portable=args.portable_as or args.portable)
    _say(out, mixed=quant == AUTO)
    if more:
        print(more)
    return 0


def _say(out: Path, *, mixed: bool = False) -> None:
    """Print the schemes and the size of the written model. mixed: its weights got schemes of their own."""
    from ...models import detect
    from ...saving import next_steps

    detected = detect(out)
    quants = dict.fromkeys(part.quant for part in (detected.parts or {"": detected}).values() if part.quant)
    counts = Counter(weight.scheme for src in detected.sources.values() for weight in src.prequantized.values())
    every = ", ".join(name for name, _ in counts.most_common())
    words = f"a mix of {every}" if mixed and len(counts) > 1 else " and ".join(quants) or "not quantized"
    print(f"{out}: {words}, {_common.size(detected.bytes)} of weights")
    if out.suffix in (".gguf", ".safetensors") and detected.component in ("transformer", "unet"):
        print(next_steps.opened_with(out, detected.quant))


def _run_together(args: argparse.Namespace, out: Path) -> int:
    """Quantize a share of the weights in each process of torchrun; the first prints the result."""
    from ...loading import distributed_quantize
    from ...planning import prepare
    from ...saving import folder_size

    request = _common.request_of(args)
    with distributed.processes() as ranks:
        distributed_quantize.quantize(
            request, prepare(request, convert=True, beside=folder_size.bytes_beside), out, ranks
        )
        if ranks.first:
            _say(out)
    return 0


def _refuse_together(args: argparse.Namespace, out: Path, gguf: list[str]) -> None:
    """Raise SettingsError for what several processes cannot do."""
    wrong = [
        (bool(gguf) or out.suffix in (".gguf", ".safetensors"), f"write {out.name if not gguf else gguf[0]}",
         "they write a folder of several safetensors files"),
        (args.portable or args.portable_as, "use --portable",
         "they write sdquant's own format, which diffusers reads with sdquant"),
        (args.cache is not None, "use --cache", "no process has the whole model to cache"),
    ]  # fmt: skip
    for is_so, what, why in wrong:
        if is_so:
            raise SettingsError(f"Cannot {what} with several torchrun processes", why, "Run it without torchrun")


def _refuse_useless(args: argparse.Namespace, scheme: str) -> None:
    """Raise SettingsError for flags about loading: such a file is made from the weights without loading a model."""
    used = {"quant_stats"} if scheme == AUTO or registry.parse(scheme).takes_statistics else set()
    flags = [name for name in _LOADING if getattr(args, name) != _DEFAULTS.get(name) and name not in used]
    if flags:
        raise SettingsError(
            f"Cannot use {_common.flag(flags[0])} for a file in {scheme}",
            "such a file is made from the weights alone, without loading the model",
            "Omit it",
        )
