"""Quantization schemes guessed from file names: a hint only, never trusted over the header. Nothing is opened."""

from __future__ import annotations

import re
from pathlib import Path

from ..core import registry

# Patterns in names, and the scheme that each suggests, or the "<rule>" that makes it from the match's groups. GGUF
# types stand between separators; the others may be glued to a word, as in "fluxnf4.safetensors".
_MARK, _END = r"(?:^|[-_. ])", r"(?=$|[-_. ])"
_HINTS: tuple[tuple[str, str], ...] = (
    (_MARK + r"q(?P<bits>[2-6])_?k(?:_?(?P<mix>s|m|l|xl))?" + _END, "<mix>"),
    (_MARK + r"q(?P<bits>[458])_?(?P<form>[01])" + _END, "<legacy>"),
    (_MARK + r"iq(?P<bits>[1-4])_?(?P<mix>xxs|xs|s|m|nl)" + _END, "<iq>"),
    (_MARK + r"tq(?P<bits>[12])_?0" + _END, "<tq>"),
    (r"mxfp4(?=.*\.gguf$)", "mxfp4"),
    (r"nvfp4(?=.*\.gguf$)", "nvfp4"),
    (_MARK + r"(?:(?P<b>b)f|fp?)(?P<bits>16|32)" + _END + r".*\.gguf$", "<float>"),
    (r"sdnq[-_ ]?(?P<code>u?int\d|fp8|other)", "<sdnq>"),
    (r"hub[-_ ]?int(?P<bits>[2-8])", "<hub>"),
    (r"bnb[-_ ]?int8", "bnb-int8"),
    (r"nf4", "nf4"),
    (r"qint8", "qint8"),
    (r"qint4", "qint4"),
    (r"qint3", "qint3"),
    (r"qint2", "qint2"),
    (r"qint(?!\d)", "qint8"),
    (r"qfloat8", "qfloat8"),
    (r"(?<!mx)fp8|float8", "fp8"),
    (r"(?<!mx)(?<!nv)fp4", "fp4"),
    (r"(?<!u)int8[-_]?(?:w8a8[-_]?)?convrot", "int8_convrot"),
    (r"(?<!u)int8[-_]?row", "int8_row"),
    (r"(?<!u)int8[-_]?tensor(?!-?wise)", "int8_tensor"),  # tensorwise is the format's name, with scales of rows too
    (r"svdquant[-_]w4a4", "svdquant_w4a4"),
    (r"svdquant[-_]nvfp4", "svdquant_nvfp4"),
    (r"awq[-_]w4a16", "awq_w4a16"),
    (r"w4a4", "w4a4"),
    (r"w4a8", "w4a8"),
    (r"w6a8", "w6a8"),
    (r"mxfp8", "mxfp8"),
    (r"nvfp4(?!.*\.gguf$)", "comfy:nvfp4"),
    (r"(?<!u)int8[-_]sym", "int8_sym"),
    (r"(?<!u)int4[-_]sym", "int4_sym"),
    (r"(?<!u)int8", "int8"),
    (r"(?<!u)int4", "int4"),
)


def suffix_hint(name: str) -> str | None:
    """Return the scheme that a file's name suggests, or None. Only the name is looked at; nothing is opened.

    The mark nearest to the end counts: "nf4-model-fp8.safetensors" suggests fp8.
    """
    base = Path(name).name.lower()
    best: tuple[int, str] | None = None
    for pattern, scheme in _HINTS:
        for match in re.finditer(pattern, base):
            # The whole match may go on to the end of the name; its mark ends where its last group does.
            end = match.end(match.lastindex or 0)
            hint = _hinted(scheme, match)
            if hint is not None and (best is None or end > best[0]):
                best = (end, hint)
    return best[1] if best else None


def _hinted(scheme: str, match: re.Match[str]) -> str | None:
    if not scheme.startswith("<"):
        return scheme
    known = {row.name for row in registry.schemes()}
    words = {name: text or "" for name, text in match.groupdict().items()}
    if scheme == "<sdnq>":
        names = [f"sdnq-{words['code']}"]
    elif scheme == "<hub>":
        names = [f"hub-int{words['bits']}"]
    elif scheme == "<float>":
        names = [f"{words['b']}f{words['bits']}"]
    elif scheme == "<iq>":
        names = [f"iq{words['bits']}_{words['mix']}"]
    elif scheme == "<tq>":
        names = [f"tq{words['bits']}_0"]
    elif scheme == "<legacy>":
        names = [f"q{words['bits']}_{words['form']}"]
    else:
        names = [f"q{words['bits']}_k_{words['mix']}", f"q{words['bits']}_k"]
    return next((name for name in names if name in known), None)
