"""README.md and docs/ agree with the code: generated tables, the two commands, links; test_docs.py runs examples."""

from __future__ import annotations

import json
import re
import subprocess
from pathlib import Path

import pytest

from sdquant import backends
from tools import families, readme

ROOT = Path(__file__).parent.parent
TEXT = readme.README.read_text(encoding="utf-8")


def test_generated_tables_are_up_to_date() -> None:
    found = set()
    for page in readme.PAGES:
        text = page.read_text(encoding="utf-8")
        found |= {match[2] for match in readme.BLOCK.finditer(text)}
        assert readme.render(text) == text, f"{page.name}: run python -m tools.readme"
    assert found == set(readme.TABLES)


def test_a_changed_table_is_noticed() -> None:
    text = readme.SCHEMES.read_text(encoding="utf-8")
    changed = text.replace("| `nf4` | bitsandbytes | 4-bit", "| `nf4` | bitsandbytes | 5-bit")
    assert changed != text
    assert readme.render(changed) == text


def test_the_readme_is_short() -> None:
    assert len(TEXT.splitlines()) <= 220


def test_every_backend_has_its_files_in_the_table_of_families() -> None:
    assert {*families.FILES, "rules"} == set(backends.names())
    for row in backends.schemes():
        if row.backend == "rules":
            continue
        ends = ("q8_0", "q2_k", "iq1_m", "iq4_xs") if row.name.startswith(("q", "iq")) and row.backend == "gguf" else ()
        assert all(f"`{name}`" in TEXT for name in ends or (row.name,)), row.name


def test_links_between_the_pages() -> None:
    for page in (readme.README, *readme.README.parent.glob("docs/*.md")):
        for target in re.findall(r"\]\(([^)\s]+)\)", page.read_text(encoding="utf-8")):
            name, _, anchor = target.partition("#")
            if "://" in target:
                continue
            there = page.parent / name if name else page
            assert there.exists(), f"{page.name}: {target}"
            if anchor:
                heads = re.findall(r"^#+ (.*)$", there.read_text(encoding="utf-8"), flags=re.MULTILINE)
                slugs = {re.sub(r"[^\w -]", "", head).lower().replace(" ", "-") for head in heads}
                assert anchor in slugs, f"{page.name}: {target}"


def test_whole_models_without_a_measurement(tmp_path: Path) -> None:
    assert "Not measured yet" in readme.whole_models(tmp_path)


def test_whole_models_with_rows_that_failed(tmp_path: Path) -> None:
    file = tmp_path / "bench" / "results" / "whole-sdxl.json"
    file.parent.mkdir(parents=True)
    row = {
        "quant": None, "error": None, "identical": False, "snr": None, "load_cpu_seconds": 0.5, "bytes": 5_135_000_000,
        "peak": 1000, "ratio": 1.0, "by": "sdquant", "name": "as found (bfloat16)",
    }  # fmt: skip
    theirs = row | {"quant": "nf4", "by": "x", "name": "x nf4", "ratio": 1.254, "snr": 20.04, "bytes": 10}
    failed = theirs | {"name": "y nf4", "error": "KeyError: 'a_b'. And more."}
    file.write_text(json.dumps({
        "size": [512, 512], "machine": {"cpu": "a cpu"}, "device": "cpu", "threads": 2, "weights": "random", "batch": 1,
        "versions": {"torch": "2"}, "clock": "cpu", "rounds": 3, "rows": [row, theirs, failed],
        "settings": {},
    }))  # fmt: skip
    lines = readme.whole_models(tmp_path).splitlines()
    assert lines[0].startswith("SDXL's UNet, random weights, 512x512 pixels, batch 1, 2 threads of a cpu, torch 2; ")
    assert lines[4:6] == [
        "| as found (bfloat16) | sdquant | 5.13 GB | 0.50 s | 1.0 kB | 1.00 | - |",
        "| `nf4` | x | 10 B | 0.50 s | 1.0 kB | 1.25 | 20.0 |",
    ]
    assert lines[-1] == "Did not run: `y nf4`: KeyError: 'a\\_b'."


def test_fidelity_without_a_measurement(tmp_path: Path) -> None:
    assert "Not measured yet" in readme.fidelity(tmp_path)


def test_fidelity_with_a_partial_measurement(tmp_path: Path) -> None:
    file = tmp_path / readme.FIDELITY.relative_to(readme.ROOT)
    file.parent.mkdir(parents=True)
    file.write_text(
        '{"images": 200, "steps": 10, "rows": ['
        '{"model": "a", "scheme": null, "steps": 10, "right": 199, "images": 200, "judge": 0.99, "ratio": null,'
        ' "snr": null, "psnr": null},'
        '{"model": "b", "scheme": "nf4", "steps": 10, "right": 198, "images": 200, "judge": 0.99, "ratio": 0.28125,'
        ' "snr": 20.04, "psnr": 25.55}]}'
    )
    assert readme.fidelity(tmp_path).splitlines()[-2:] == [
        "| bf16, 10 steps | 199/200 | - | - | - | - | - | - | - |",
        "| `nf4` | - | - | - | - | 198/200 | 0.281 | 20.0 | 25.6 |",
    ]


def test_ci_runs_the_readmes_test_command() -> None:
    script = (ROOT / ".ci" / "run").read_text(encoding="utf-8")
    (extract,) = re.findall(r"^tests=\$\((awk .*)\)$", script, flags=re.MULTILINE)
    found = subprocess.run(["bash", "-c", extract], cwd=ROOT, capture_output=True, text=True, check=True).stdout
    command = readme.command("test", TEXT)
    assert found.strip() == command
    halves = re.findall(r'^step \w+ bash -c ("\$\{tests.*")$', script, flags=re.MULTILINE)
    run = subprocess.run(
        ["bash", "-c", f'tests=$1; printf "%s && %s" {" ".join(halves)}', "bash", command],
        capture_output=True, text=True, check=True,
    )  # fmt: skip
    assert run.stdout == command


@pytest.mark.parametrize("name", ["demo", "test"])
def test_the_two_commands(name: str) -> None:
    line = readme.command(name, TEXT)
    assert "\n" not in line
    # The constraints file, and an extra that exists, so that a plain machine gets everything.
    assert re.search(r"pip install -c constraints\.txt -e \"\.\[(all|test)\]\"", line)
    assert (ROOT / "constraints.txt").exists()


def test_files_exist() -> None:
    named = re.findall(r"\]\(([\w./]+)\)", TEXT)
    assert len(named) > 3
    assert not [name for name in named if not (ROOT / name).exists()]


def test_no_host_names_of_registries() -> None:
    names = ["pypi" + ".org", "pythonhosted" + ".org", "download.pytorch" + ".org", "huggingface" + ".co"]
    files = subprocess.run(
        ["git", "grep", "-lIE", "|".join(re.escape(name) for name in names)],
        cwd=ROOT, capture_output=True, text=True, check=False,
    )  # fmt: skip
    if files.returncode > 1:  # a copy without .git, as .ci/run makes: look through the texts that people install from
        texts = [
            ROOT / name for name in ("README.md", "CONTRIBUTING.md", "constraints.txt", "pyproject.toml", ".ci/run")
        ]
        assert not [path for path in texts if any(name in path.read_text(encoding="utf-8") for name in names)]
        return
    assert not files.stdout.splitlines()
