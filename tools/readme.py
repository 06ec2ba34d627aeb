"""The generated tables of README.md and of the pages in docs/.

    python -m tools.readme            write them
    python -m tools.readme --check    exit 1 if a page does not hold what the code says

A table stands between `<!-- generated: NAME -->` and `<!-- end -->`. What it says about versions is said for those in
constraints.txt, whatever is installed.
"""

from __future__ import annotations

import argparse
import json
import re
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tools import better_codes, compute, families, memory, offload, output, speed
from tools.tables import markdown

if TYPE_CHECKING:
    from sdquant.backends import Scheme
    from sdquant.compat import Cell
    from sdquant.compat.hardware import Machine

ROOT = Path(__file__).parent.parent
README = ROOT / "README.md"
WEB_UIS = ROOT / "docs" / "web-uis.md"
CONFIG = ROOT / "docs" / "config.md"
RULES = ROOT / "docs" / "rules.md"
LORAS = ROOT / "docs" / "lora.md"
SPEED = ROOT / "docs" / "speed.md"
BENCHMARKS = ROOT / "docs" / "benchmarks.md"
COMPUTE = ROOT / "docs" / "compute.md"
SCHEMES = ROOT / "docs" / "schemes.md"
QUALITY = ROOT / "docs" / "quality.md"
LOADS = ROOT / "docs" / "loading.md"
MIXES = ROOT / "docs" / "mixes.md"
MEASURED = ROOT / "docs" / "mixes-measured.md"
PAGES = (README, WEB_UIS, CONFIG, RULES, LORAS, SPEED, COMPUTE, BENCHMARKS, SCHEMES, QUALITY, LOADS, MIXES, MEASURED)
WHOLE = ROOT / "bench" / "results"  # whole-*.json
LOADING = ROOT / "bench" / "results" / "load.json"
FIDELITY = ROOT / "bench" / "results" / "fidelity.json"
GLYPHS = ROOT / "bench" / "results" / "fidelity-glyphs.json"
LORA = ROOT / "bench" / "results" / "lora.json"
QAT = ROOT / "bench" / "results" / "qat.json"
SHAPE = (3072, 3072)  # of the layer whose bytes the table of schemes gives: FLUX.1's inner dimension
BLOCK = re.compile(r"(<!-- generated: (\w+) -->\n).*?(<!-- end -->)", re.DOTALL)
COMMAND = re.compile(r"<!-- command: (\w+) -->\n+```\w*\n(.*?)\n```", re.DOTALL)


def render(text: str, root: Path = ROOT) -> str:
    """A page's text with every generated table made anew."""

    def fill(match: re.Match[str]) -> str:
        return f"{match[1]}\n{TABLES[match[2]](root)}\n\n{match[3]}"

    return BLOCK.sub(fill, text)


def command(name: str, text: str) -> str:
    """The one-line command after `<!-- command: NAME -->`."""
    return next(match[2] for match in COMMAND.finditer(text) if match[1] == name)


def schemes(_: Path) -> str:
    """Every scheme with its size, by backend."""
    from sdquant import backends

    rows = []
    for row in backends.schemes():
        title = backends.get(row.backend).title
        runtimes = ", ".join(row.runtimes)
        options = ", ".join(f"`{name}`" for name in row.options)
        way = "on the fly" if row.on_the_fly else "files"
        rows.append((f"`{row.name}`", title, row.summary, way, runtimes, options, _ratio(row)))
    header = ("scheme", "backend", "what it is", "made", "runtimes", "options", "bytes / bf16")
    return markdown(header, rows, left=6)


def _ratio(row: Scheme) -> str:
    """Bytes of a packed 3072 x 3072 weight against bf16; for a mix, of its base type, which most weights get."""
    from sdquant import backends
    from sdquant.core.backend import Unfit
    from sdquant.core.gguf_mixes import BASES

    try:
        layout = backends.get(row.backend).layout(backends.parse(row.name), SHAPE, "bfloat16")
    except Unfit:
        return "-"
    ratio = sum(part.nbytes for part in layout.values()) / (2 * SHAPE[0] * SHAPE[1])
    return f"{'≥ ' if row.name in BASES else ''}{ratio:.3f}"


# The schemes that README's table shows, with what each is for.
CHOICE = {
    "nf4": "the usual choice for 4 bits",
    "sdnq-uint4": "4 bits, precise",
    "int4": "4 bits without a GPU library",
    "q4_k": "4 bits, in GGUF files",
    "w4a8": "4 bits, with 8-bit products",
    "qint3": "the smallest that is usable",
    "int8_convrot": "8 bits, with 8-bit products; ComfyUI's",
    "int8": "8 bits, on every device",
    "qint8": "8 bits",
    "fp8": "8-bit floats",
    "q8_0": "8 bits, in GGUF files",
}
GPU = ROOT / "bench" / "results" / "gpu-h200.json"
# The libraries whose modules were measured there, by backend.
LIBRARIES = {"bnb": "bitsandbytes", "quanto": "quanto"}


WITHOUT_LIBRARY = ("fp8",)  # packed as float8 where bitsandbytes is missing


def choice(root: Path) -> str:
    """Return a few schemes with what a user chooses by: bits, size, quality, speed and what they need."""
    from sdquant import backends
    from sdquant.compat import default_runtime

    snr = {row["scheme"]: row["snr"] for row in _rows(FIDELITY, root) if row["model"] == "digits-flux"}
    steps = {row["name"]: row["ratio"] for row in _rows(GPU, root) if row.get("phase") == "flux"}
    rows = []
    for name, purpose in CHOICE.items():
        scheme = backends.scheme(name)
        needs = backends.get(scheme.backend).requires
        by_library = default_runtime(scheme, "cuda:0", isa=None, triton=True) == "library"
        ratio = steps.get(f"{name} · {LIBRARIES.get(scheme.backend)}" if by_library else name)
        rows.append((
            f"`{name}`", purpose, f"{scheme.bits:g}", f"{float(_ratio(scheme)):.2f}",
            "-" if snr.get(name) is None else f"{snr[name]:.0f} dB", "-" if ratio is None else f"{ratio:.2f}",
            "nothing else" if needs is None or name in WITHOUT_LIBRARY else f"extra `{needs.extra}`",
        ))  # fmt: skip
    header = ("scheme", "for", "bits", "size", "quality", "GPU time", "needs")
    legend = (
        "Size: bytes relative to bf16. Quality: signal-to-noise ratio of digits-flux's transformer; higher is better.\n"
        "GPU time: a step of Flux 12B at 1024 px on an H200, relative to bf16, where it was measured."
    )
    return f"{markdown(header, rows, left=2)}\n\n{legend}"


def _rows(file: Path, root: Path) -> list[dict[str, Any]]:
    """Return the rows of a file of results; none where it was not measured."""
    there = root / file.relative_to(ROOT)
    return list(json.loads(there.read_text(encoding="utf-8"))["rows"]) if there.exists() else []


def offload_choice(root: Path) -> str:
    """Return the offload modes with the verdict on a few schemes on an NVIDIA GPU."""
    from sdquant import backends, compat, offload

    kind, names_ = "cuda", ("nf4", "qint8", "q4_k", "int8")
    cells = {
        (cell.scheme, cell.mode, cell.offload, cell.runtime): cell
        for cell in compat.matrix(device=kind, machine=pinned(root, kind), schemes=names_)
    }
    rows = [
        (f"`{mode.name}`", mode.summary, *(_word(backends.scheme(name), mode.name, cells) for name in names_))
        for mode in offload.MODES
    ]
    return markdown(("mode", "what it does", *(f"`{name}`" for name in names_)), rows, left=2 + len(names_))


def matrix(root: Path) -> str:
    """What can be combined, for a CPU and an NVIDIA GPU: schemes that agree share a line."""
    from sdquant import backends, compat
    from sdquant.compat.row import OFFLOADS

    parts = []
    for kind, title in (("cuda", "NVIDIA GPU"), ("cpu", "CPU")):
        cells = {
            (cell.scheme, cell.mode, cell.offload, cell.runtime): cell
            for cell in compat.matrix(device=kind, machine=pinned(root, kind))
        }
        lines: dict[tuple[str, ...], list[str]] = {}
        for row in backends.schemes():
            words = tuple(_word(row, offload, cells) for offload in OFFLOADS)
            lines.setdefault((backends.get(row.backend).title, *words), []).append(f"`{row.name}`")
        rows = [(title_, " ".join(names), *words) for (title_, *words), names in lines.items()]
        parts.append(f"{title}:\n\n" + markdown(("backend", "schemes", *OFFLOADS), rows, left=7))
    return "\n\n".join(parts)


def _word(row: Scheme, offload: str, cells: Mapping[tuple[str, str, str, str], Cell]) -> str:
    """The verdict on a scheme in its usual mode; "plain" where it takes `runtime="plain"`."""
    mode = "pre" if row.on_the_fly else "found"
    words = {"works": "yes", "slow": "slow", "untested": "untested", "breaks": "no"}
    usual = words[cells[row.name, mode, offload, "default"].verdict]
    plain = words[cells[row.name, mode, offload, "plain"].verdict] if "plain" in row.runtimes else usual
    return "plain" if usual in ("no", "untested") and plain == "yes" else usual


def pinned(root: Path, kind: str) -> Machine:
    """A machine with the packages of constraints.txt and one device of a kind."""
    from sdquant.compat.hardware import Device, Machine

    pins = re.findall(r"^([\w-]+)==([\w.]+)", (root / "constraints.txt").read_text(encoding="utf-8"), re.MULTILINE)
    gib = 1 << 30
    device = Device(kind=kind, index=0, name=kind, memory_total=24 * gib, memory_free=24 * gib)
    return Machine(
        platform="linux", wsl=False, python="3.11", devices=(device,), versions=dict(pins), ram_total=32 * gib,
        ram_available=32 * gib, has_compiler=True, has_ninja=True, has_triton=False,
    )  # fmt: skip


def fidelity(root: Path, kept: Path = FIDELITY, drawn: str = "real digits") -> str:
    """What `python -m bench.fidelity` measured."""
    file = root / kept.relative_to(ROOT)
    if not file.exists():
        return "Not measured yet: `python -m bench.fidelity` does it."
    measured = json.loads(file.read_text(encoding="utf-8"))
    models = list(dict.fromkeys(row["model"] for row in measured["rows"]))
    lines: dict[tuple[str, int], dict[str, dict[str, Any]]] = {}
    for row in measured["rows"]:
        name = f"`{row['scheme']}`" if row["scheme"] else f"bf16, {row['steps']} steps"
        lines.setdefault((name, row["steps"]), {})[row["model"]] = row
    header = ["scheme"]
    for model in models:
        header += [f"{model}: right", "bytes / bf16", "SNR", "PSNR"]
    rows = [[name, *(cell for model in models for cell in _measured(by.get(model)))] for (name, _), by in lines.items()]
    judge = max(row["judge"] for row in measured["rows"])
    head = (
        f"{measured['images']} images a scheme, {measured['steps']} steps, judged by a classifier that is right on "
        f"{judge:.1%} of {drawn}. SNR is of the UNet's or transformer's output at the first step, PSNR of the "
        "images, both in dB against the unquantized model; bytes are of the quantized layers, those of the text "
        "encoders among them."
    )
    return head + _of_one_component(measured["rows"]) + "\n\n" + markdown(header, rows)


def _of_one_component(rows: Sequence[Mapping[str, Any]]) -> str:
    """Return a sentence about lines that leave text encoders as floats, which are no comparison with the others."""
    names = dict.fromkeys(f"`{row['scheme']}`" for row in rows if len(row.get("components", ())) == 1)
    if not names:
        return ""
    verb = "leaves" if len(names) == 1 else "leave"
    return f" {', '.join(names)} {verb} the text encoders as floats, which is no comparison with the other lines."


def glyphs(root: Path) -> str:
    """The same of glyphs-flux."""
    return fidelity(root, GLYPHS, "drawn glyphs, in every respect")


def _measured(row: Mapping[str, Any] | None) -> tuple[str, str, str, str]:
    if row is None:
        return ("-", "-", "-", "-")
    snr, psnr = ("-" if row[name] is None else f"{row[name]:.1f}" for name in ("snr", "psnr"))
    ratio = "-" if row["ratio"] is None else f"{row['ratio']:.3f}"
    return (f"{row['right']}/{row['images']}", ratio, snr, psnr)


def loading(root: Path) -> str:
    """What `python -m bench.load` measured."""
    file = root / LOADING.relative_to(ROOT)
    if not file.exists():
        return "Not measured yet: `python -m bench.load --out bench/results/load.json` does it."
    sizes = json.loads(file.read_text(encoding="utf-8"))["sizes"]
    if "1.2b" not in sizes:
        return "Not measured yet: `python -m bench.load --out bench/results/load.json` does it."
    measured = sizes["1.2b"]["rows"]
    peers = {(row["makes"], row["files"]): row for row in measured if row["peer"]}  # the same from the same
    lines = []
    for row in measured:
        if row["peer"]:
            continue
        peer = peers.get((row["makes"], row["files"]))
        times = f"{peer['cpu'] / row['cpu']:.1f}" if peer else ""
        theirs = (f"{peer['name']}", f"{peer['cpu']:.1f}", f"{peer['peak'] / 1e6:.0f}") if peer else ("", "", "")
        model = f"{row['bytes'] / 1e6:.0f}"
        lines.append((f"{row['name']}", f"{row['cpu']:.2f}", f"{row['peak'] / 1e6:.0f}", model, *theirs, times))
    header = ("row", "CPU s", "peak MB", "model MB", "the library's own way", "CPU s", "peak MB", "times slower")
    runs = min(row["runs"] for row in measured)
    head = (
        "A Flux-shaped transformer of 1.17 billion parameters, 2.3 GB of bfloat16 in five files, in the page cache; a "
        f"fresh process and one thread each, medians of {runs}. CPU seconds are user and system after the imports, "
        "peak is anonymous memory. `post-` quantizes after loading, `saved-` reads what sdquant wrote."
    )
    big = "".join(
        f"\n\nAll of FLUX.1's shape, 24 GB of bfloat16: {row['name']} in {row['wall']:.0f} s of wall time, "
        f"{row['peak'] / 1e9:.1f} GB of anonymous memory at most, {row['bytes'] / 1e9:.1f} GB in the end (run once)."
        for row in sizes.get("12b", {}).get("rows", [])
    )
    return head + "\n\n" + markdown(header, lines) + big


def hosts(_: Path) -> str:
    """What sdquant does in each web UI, and what it does not."""
    from sdquant.hosts.host import PLACES

    rows = [(f"**{row.title}**", _lines(row.can), _lines(row.cannot)) for row in PLACES]
    return markdown(("", "what you get", "what does not work there, and why"), rows, left=3)


def hosts_settings(_: Path) -> str:
    """Every setting, and who decides it in each web UI that has settings."""
    from sdquant.hosts.host import HOSTS
    from sdquant.planning.settings_fields import fields

    ours = "in sdquant's section"
    rows = [(row.label, *(host.theirs.get(row.name, ours) for host in HOSTS)) for row in fields()]
    return markdown(("setting", *(host.title for host in HOSTS)), rows, left=1 + len(HOSTS))


def _lines(texts: Iterable[str]) -> str:
    return "<br>".join(f"{text}." for text in texts)


def config_keys(_: Path) -> str:
    """Every key of a config file."""
    from sdquant.training.config import keys
    from sdquant.training.config.value_types import format_value

    rows = (
        (
            f"`{row.name}`", row.kind, f"`{format_value(row.default)}`", ", ".join(row.commands), row.origin,
            row.help + (f": {', '.join(f'`{one}`' for one in row.choices)}" if row.choices else ""),
        )
        for row in keys()
    )  # fmt: skip
    return markdown(("key", "type", "default", "used by", "name of", "what it is"), rows, left=6)


def rule_presets(_: Path) -> str:
    """Every preset of rules."""
    from sdquant.rules.presets import PRESETS

    rows = (
        (f"`{row.name}`", row.help, *("; ".join(_of_part(one, name) for one in row.parts) for name in _PARTS))
        for row in PRESETS
    )
    return markdown(("preset", "what it does", *_PARTS.values()), rows, left=2 + len(_PARTS))


_PARTS = {"ops": "operations", "weight": "weights", "act": "activations", "bwd": "gradients (training)", "tile": "tile"}


def _of_part(part: Any, name: str) -> str:
    value = getattr(part, name)
    return ", ".join(value) if isinstance(value, tuple) else str(value or "-")


def qtypes(_: Path) -> str:
    """Every type that rules know."""
    from sdquant.rules.core.qtypes import QTYPES
    from sdquant.rules.packed_layout import layout
    from sdquant.rules.qconfig import QuantizationRule

    rows = []
    for row in QTYPES:
        tile = row.tile or (32 if row.bits < 8 else None)
        parts = layout(QuantizationRule(weight_qtype=row.name, tile_size=tile), SHAPE, "bfloat16")
        ratio = sum(part.nbytes for part in parts.values()) / (2 * SHAPE[0] * SHAPE[1])
        scales = {"": "the weight's dtype", "power of two": "powers of two"}.get(row.scale_type, row.scale_type)
        if row.scale_type == "power of two":
            scales += ", outlier-aware" if row.bias is not None else ", rounded up"
        zero = "yes" if row.asymmetric else "no"
        tiles = f"{row.tile}, always" if row.tile else f"any, or none; here {tile or 'none'}"
        rows.append((f"`{row.name}`", str(row.bits), f"{row.bound:g}", zero, scales, tiles, f"{ratio:.3f}"))
    header = ("type", "bits", "largest, in scales", "zero point", "scales are", "tile_size", "bytes / bf16")
    return markdown(header, rows, left=6)


def trained(root: Path) -> str:
    """What rules cost on the shipped models, and what training with them brings back."""
    file = root / QAT.relative_to(ROOT)
    rows = json.loads(file.read_text(encoding="utf-8"))["rows"] if file.exists() else []
    lines = []
    for row in sorted(rows, key=lambda row: (row["model"], row["rule"])):
        after = f"{row['qat_right']}/{row['images']}" if row.get("qat_right") is not None else "-"
        steps = str(row["training"]["max_train_steps"]) if row.get("training") else "-"
        snr = f"{row['qat_snr']:.1f}" if row.get("qat_snr") is not None else "-"
        right = f"{row['right']}/{row['images']}"
        lines.append((row["model"], row["rule"], right, f"{row['snr']:.1f}", steps, after, snr))
    header = ("model", "rule for all layers", "right", "SNR", "steps trained", "right after", "SNR after")
    return markdown(header, lines, left=2)


def lora(root: Path) -> str:
    """The effect of a LoRA on quantized models against that on the float ones, by bits of the schemes."""
    from sdquant import backends

    file = root / LORA.relative_to(ROOT)
    rows = json.loads(file.read_text(encoding="utf-8"))["rows"] if file.exists() else []
    groups: dict[tuple[str, int], list[Mapping[str, Any]]] = {}
    for row in rows:
        if row["scheme"] is not None:
            bits = int(backends.parse(row["scheme"]).scheme.bits)
            groups.setdefault((row["model"], -bits), []).append(row)
    lines = []
    for (model, bits), some in sorted(groups.items()):
        ratios, threes = [row["ratio"] for row in some], [row["threes_with"] for row in some]
        lines.append((
            model, str(-bits), str(len(some)), f"{min(row['cosine'] for row in some):.4f}",
            f"{min(ratios):.3f} to {max(ratios):.3f}", f"{max(row['threes_without'] for row in some)}",
            f"{min(threes)} to {max(threes)}" if min(threes) < max(threes) else str(min(threes)),
        ))  # fmt: skip
    header = ("model", "bits", "schemes", "cosine at least", "ratio", "threes without, at most", "threes with")
    return markdown(header, lines)


# Whole models in the order of the table, and how they are called there.
_WHOLE = {
    "sd15": "Stable Diffusion 1.5's UNet", "sdxl": "SDXL's UNet", "flux-1.2b": "FLUX.1's transformer, 2 + 3 blocks",
    "flux-12b": "FLUX.1's transformer", "digits-sd": "digits-sd", "digits-flux": "digits-flux",
}  # fmt: skip


def whole_models(root: Path) -> str:
    """What `python -m bench.whole_models` measured: every scheme with the peers of the same format behind it."""
    folder = root / WHOLE.relative_to(ROOT)
    tables = []
    for name in _WHOLE:
        # As loaded by default, and with the settings that a file's name goes on with.
        files = [folder / f"whole-{name}.json", *sorted(folder.glob(f"whole-{name}-*.json"))]
        tables += [_whole(name, json.loads(file.read_text(encoding="utf-8"))) for file in files if file.exists()]
    return "\n\n".join(tables) or "Not measured yet: `python -m bench.whole_models` does it."


def _whole(name: str, made: Mapping[str, Any]) -> str:
    side, here = "x".join(map(str, made["size"])), made["machine"]
    device = here["cpu"] if made["device"] == "cpu" else next(
        row["name"] for row in here["devices"] if row["torch_name"] == made["device"]
    )  # fmt: skip
    threads = f"{made['threads']} thread{'s' if made['threads'] > 1 else ''} of " if made["device"] == "cpu" else ""
    asked = "".join(f", `{key}={value}`" for key, value in made["settings"].items())
    device += f" (`{here['native']}`)" if made["device"] == "cpu" and "native" in here else ""
    head = (
        f"{_WHOLE[name]}{asked}, {made['weights']} weights, {side} pixels, batch {made['batch']}, {threads}{device}, "
        f"torch {made['versions']['torch']}; ratios of {made['clock']} time, medians of {made['rounds']} rounds:"
    )
    lines = [_whole_row(row) for row in made["rows"] if row["error"] is None]
    header = ("", "by", "weights", "load", "peak", "step", "SNR, dB")
    failed = [f"`{row['name']}`: {_first_sentence(row['error'])}" for row in made["rows"] if row["error"] is not None]
    tail = "\n\nDid not run: " + "; ".join(failed) + "." if failed else ""
    return head + "\n\n" + markdown(header, lines, left=2) + tail


def _whole_row(row: Mapping[str, Any]) -> tuple[str, ...]:
    from sdquant.utils.byte_sizes import size

    name = f"`{row['quant']}`" if row["quant"] else row["name"]
    snr = "same" if row["identical"] else "-" if row["snr"] is None else f"{row['snr']:.1f}"
    load = f"{row['load_cpu_seconds']:.2f} s"
    return (name, row["by"], size(row["bytes"]), load, size(row["peak"]), f"{row['ratio']:.2f}", snr)


def _first_sentence(text: str) -> str:
    """Of an error, short enough for a table's foot, and without what markdown would take for its own."""
    first = text.splitlines()[0].partition(". ")[0].rstrip(".")
    return re.sub(r"([|<>*_`\[\]])", r"\\\1", first[:160])


def names(name: str) -> Callable[[Path], str]:
    """What names of Qwix and MaxDiffusion are here: one of the tables of `qwix_names`."""
    return lambda _: _names(name)


def _names(name: str) -> str:
    from tools.qwix_names import TABLES as rows_of
    from tools.qwix_names import Row, shown

    def theirs(row: Row) -> str:
        names = [row.theirs] if name == "names_rest" else [f"`{one}`" for one in row.theirs.split(", ")]
        return ", ".join(names)

    rows = ((theirs(row), ", ".join(map(shown, row.ours)) or "not here, because:", row.note) for row in rows_of[name])
    return markdown(("there", "here", ""), rows, left=3)


TABLES: dict[str, Callable[[Path], str]] = {
    "better_codes": better_codes.table, "better_codes_goals": better_codes.goals,
    "better_codes_larger": better_codes.larger, "mixes_predicted": better_codes.predicted,
    "better_codes_sizes": better_codes.by_size, "mixes_sizes": better_codes.sizes,
    "mixes_folders": better_codes.folders, "mixes_advice": better_codes.advice,
    "mixes_full_width": better_codes.full_width, "code_options": better_codes.code_options,
    "mixes_more_schemes": better_codes.more_schemes,
    "schemes": schemes, "choice": choice, "families": families.table,
    "offload_choice": offload_choice, "matrix": matrix, "fidelity": fidelity, "glyphs": glyphs, "loading": loading,
    "hosts": hosts,
    "hosts_settings": hosts_settings, "config_keys": config_keys, "rule_presets": rule_presets,
    "qtypes": qtypes, "trained": trained, "lora": lora, "whole_models": whole_models,
    "plan_memory": memory.table, "one_step": output.one_step,
    "offload": offload.table, "offload_card": offload.card_table,
    "speed_side_by_side": speed.side_by_side, "speed_goals": speed.goals, "speed_linear": speed.linear,
    "speed_rules": speed.rules, "speed_pairs": speed.pairs,
    "speed_cards": speed.cards, "speed_convolutions": speed.convolutions,
    "compute_snr": compute.snr, "compute_outliers": compute.outliers,
    "compute_errors": compute.errors, "compute_step": compute.step,
    "names_qwix": names("names_qwix"), "names_fields": names("names_fields"),
    "names_keys": names("names_keys"), "names_rest": names("names_rest"),
}  # fmt: skip


def main() -> int:
    """Write or check."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--check", action="store_true", help="change nothing; exit 1 if something would change")
    args = parser.parse_args()
    stale = 0
    for page in PAGES:
        old = page.read_text(encoding="utf-8")
        new = render(old)
        if args.check and old != new:
            print(f"{page.name} is out of date: run python -m tools.readme", file=sys.stderr)
            stale = 1
        elif not args.check:
            page.write_text(new, encoding="utf-8")
    return stale


if __name__ == "__main__":
    raise SystemExit(main())
