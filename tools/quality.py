"""What `sdquant.planning.estimate.image_quality` knows of schemes, from measurements in bench/results/.

    python -m tools.quality            write sdquant/planning/estimate/image_quality.json
    python -m tools.quality --check    exit 1 if it does not hold what the results say

A scheme's line has `snr`, of images in dB to those of the unquantized model, the mean over the shipped models, and
`card`, the time of a layer on a graphics card relative to the unquantized one at 1024 rows and more.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
from collections import defaultdict
from pathlib import Path

from bench.fidelity import CALIBRATED, MIXES, PEERS
from sdquant import backends

ROOT = Path(__file__).parent.parent
FACTS = ROOT / "sdquant" / "planning" / "estimate" / "image_quality.json"
RESULTS = ROOT / "bench" / "results"
# A model's layers may be too narrow for a scheme, and get one with more bits. What it looks like then says nothing of
# the scheme; a measurement counts if it took no more than this over the smallest.
OWN = 1.15
ROWS = ("M=1024", "M=4608")


def quality() -> dict[str, float]:
    """The SNR of the images of each scheme, in dB."""
    rows = defaultdict(list)
    for row in json.loads((RESULTS / "fidelity.json").read_text(encoding="utf-8"))["rows"]:
        if row["scheme"] and row["snr"] is not None and row["scheme"] not in (*CALIBRATED, *MIXES, *PEERS):
            rows[str(backends.parse(row["scheme"]))].append((row["ratio"], row["snr"]))
    return {
        name: round(statistics.mean(snr for ratio, snr in found if ratio <= OWN * min(found)[0]), 1)
        for name, found in rows.items()
    }


def card() -> dict[str, float]:
    """The time of each scheme's layers on a card."""
    rows = defaultdict(list)
    for row in json.loads((RESULTS / "gpu-h200.json").read_text(encoding="utf-8"))["rows"]:
        scheme, _, who = row["name"].partition(" · ")
        if who == "sdquant" and row.get("ratio") and row["case"].endswith(ROWS):
            rows[scheme.partition(",")[0]].append(row["ratio"])
    return {str(backends.parse(name)): round(statistics.geometric_mean(found), 2) for name, found in rows.items()}


def text() -> str:
    """The file, a line for each scheme."""
    snr, times = quality(), card()
    lines = [
        f" {json.dumps(name)}: {json.dumps({'snr': snr.get(name), 'card': times.get(name)})}"
        for name in sorted({*snr, *times})
    ]
    return "{\n" + ",\n".join(lines) + "\n}\n"


def main() -> None:
    """Write, or look."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--check", action="store_true", help="write nothing; exit 1 if the file is another")
    args = parser.parse_args()
    made = text()
    if args.check:
        sys.exit(0 if FACTS.read_text(encoding="utf-8") == made else f"{FACTS}: run python -m tools.quality")
    FACTS.write_text(made, encoding="utf-8")


if __name__ == "__main__":
    main()
