"""Say what a file or folder holds: container, family, quantization, evidence, types."""

from __future__ import annotations

import argparse

from . import _shared


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The path, and whether to look into the contents."""
    parser.add_argument("path", metavar="MODEL", help="pipeline or component folder, .safetensors or .gguf file")
    parser.add_argument("--verify", action="store_true", help="read the contents too: sizes, scales, values")
    _shared.add_json_flag(parser)


def run(args: argparse.Namespace) -> int:
    """Detect, and print."""
    from ..detection import Detected, detect

    path = _shared.place(args.path)
    if args.verify:
        from ..verification import verify

        seen = verify(path, progress=not args.json)
    else:
        seen = detect(path)
    if args.json:
        _shared.print_json(seen.to_dict() | {"verified": args.verify})
        return 0

    def show(one: Detected, indent: str = "") -> None:
        types = ", ".join(f"{name} x{count}" for name, count in sorted(one.types.items(), key=lambda kv: -kv[1]))
        rows = {
            "container": one.container,
            "family": one.family or "unknown",
            "component": one.component or "unknown",
            "quantization": f"{one.quant} ({one.backend})" if one.quant else "none",
            "weights": f"{_shared.size(one.bytes)} in {one.tensors} tensors",
            "types": types,
        }
        for name, value in rows.items():
            print(f"{indent}{name + ':':14} {value}")
        for line in one.evidence if not one.parts else ():
            print(f"{indent}{'evidence:':14} {line}")
        for line in one.warnings if not one.parts else ():
            print(f"{indent}{'warning:':14} {line}")

    print(seen.path)
    show(seen, "  ")
    for name, part in seen.parts.items():
        print(f"  {name}")
        show(part, "    ")
    if args.verify:
        print("  verified: every tensor was read and is sound")
    return 0
