"""No Python on the page: whatever the matrix advises is said in the page's own words."""

from __future__ import annotations

import re

from sdquant.compat import matrix
from sdquant.settings import field_named
from sdquant.ui import widgets
from sdquant.ui.page_words import in_page_words

CODE = re.compile(r"""\w=["'\w]|\w\(\)|`|=\s""")


def test_what_the_matrix_says_has_no_python_in_it() -> None:
    texts = [in_page_words(text) for row in matrix() for text in (row.why, row.fix) if text]
    assert texts and [text for text in texts if CODE.search(text)] == []


def test_only_a_scheme_is_called_original() -> None:
    assert widgets.choices(field_named("quant.model"), {})[1] == ("Original (unquantized)", "none")
    assert widgets.choices(field_named("offload"), {})[0] == ("none", "none")


def test_words() -> None:
    said = 'Use offload="model", or runtime="plain", or quant="int8", which runs in every mode'
    assert in_page_words(said) == "Use model offload, or the plain runtime, or int8, which runs in every mode"
    said = "Write it with `sdquant quantize a b.gguf --quant q4_k`, or `sdquant quantize` --rules, on device='cuda:0'"
    assert in_page_words(said) == "Write it with the Convert tab, or the Convert tab, on the device cuda:0"
    assert in_page_words('What sdquant quantizes to, as quant="int8"') == "What sdquant quantizes to, as int8"
    assert in_page_words("quant='int8:group=32' for database=5") == "int8:group=32 for database=5"
    assert in_page_words("QBytesTensor.new() missing 5 required positional arguments: x moves") == "X moves"
