"""The command line: most of it in this process, what concerns processes in real ones."""

from __future__ import annotations

import io
import json
import logging
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
import warnings
from pathlib import Path
from typing import Any

import pytest

import sdquant
from sdquant import cli
from sdquant.cli import _common
from sdquant.cli._command_words import in_command_words, in_config_words
from sdquant.compat import hardware
from sdquant.errors import BackendUnavailableError, SettingsError
from sdquant.planning.estimate import meta_models, peak_memory, step_time
from sdquant.utils.install import install_extra

Capture = pytest.CaptureFixture[str]
ONE_THREAD = os.environ | {"OMP_NUM_THREADS": "1"}


def run(capsys: Capture, *words: str | Path) -> tuple[int, str, str]:
    """Exit code, stdout and stderr of one command in this process."""
    code = cli.main([str(word) for word in words])
    out, err = capsys.readouterr()
    return code, out, err


def process(*words: str, python: tuple[str, ...] = ()) -> subprocess.CompletedProcess[str]:
    """One command in a process of its own."""
    return subprocess.run(
        [sys.executable, *python, "-m", "sdquant", *words],
        env=ONE_THREAD, capture_output=True, text=True, timeout=120, check=False,
    )  # fmt: skip


def leftovers(folder: Path) -> list[str]:
    """What is in a folder and was not meant to stay."""
    return [path.name for path in folder.rglob("*") if path.name.startswith(".")]


# What is imported.


@pytest.mark.parametrize(
    "words",
    [("--version",), ("--help",), ("inspect", "FILE"), ("matrix", "--device", "cuda", "--scheme", "nf4")],
    ids=lambda words: words[0],
)
def test_these_import_no_torch(words: tuple[str, ...], sd: Path, tmp_path: Path) -> None:
    """A folder is held against its model; a lone file cannot be."""
    file = shutil.copy(sd / "unet" / "diffusion_pytorch_model.safetensors", tmp_path / "unet.safetensors")
    words = tuple(str(file) if word == "FILE" else word for word in words)
    done = process(*words, python=("-X", "importtime"))
    names = {line.rpartition("|")[2].strip() for line in done.stderr.splitlines()}
    assert done.returncode == 0 and done.stdout
    assert "sdquant.cli" in names
    assert not names & {"torch", "numpy", "diffusers", "transformers"}


# What each command says.


def test_help_names_every_command(capsys: Capture) -> None:
    with pytest.raises(SystemExit) as stopped:
        cli.main(["--help"])
    out = capsys.readouterr().out
    assert stopped.value.code == 0
    assert {line.split()[0] for line in out.splitlines() if line.startswith("    ")} >= set(cli.COMMANDS)


def test_plan_shows_bytes_and_what_stays(capsys: Capture, sd: Path) -> None:
    code, out, _ = run(capsys, "plan", "digits-sd", "-q", "nf4")
    made = sdquant.plan(sd, "nf4")
    unet = next(part for part in made.components if part.name == "unet")
    assert code == 0
    assert f"{len(unet.weights)} weights" in out
    assert _common.size(made.bytes) in out
    # Many weights that stay for one reason are one entry, not one line each.
    assert f"and {len(unet.kept) - 2} more" in out
    assert len(out.splitlines()) < 20


def test_plan_says_that_dynamic_bytes_are_the_least(capsys: Capture, sd: Path) -> None:
    """Which dtype a weight gets depends on its values, which no plan reads."""
    for quant, least in (("sdnq-uint4,dynamic", True), ("sdnq-uint4", False)):
        assert cli.main(["plan", str(sd / "unet"), "--quant", quant]) == 0
        (total,) = (line for line in capsys.readouterr().out.splitlines() if line.startswith("total"))
        assert ("at least" in total) == least
        assert sdquant.plan(sd / "unet", quant).to_dict()["components"][0]["bytes_are_least"] == least


def test_plan_as_json_is_the_plan(capsys: Capture, sd: Path) -> None:
    code, out, _ = run(capsys, "plan", "digits-sd", "--quant", "unet=nf4", "-q", "text_encoder=int8", "--json")
    assert code == 0
    made = sdquant.plan(sd, {"unet": "nf4", "text_encoder": "int8"})
    foreseen = step_time.step(made, meta_models.trace_plan(made), hardware.probe())
    assert json.loads(out) == made.to_dict() | {
        "peak": peak_memory.predict(made, hardware.probe()).to_dict(),
        "foreseen": foreseen,
    }


def test_inspect_as_json_is_detected(capsys: Capture, flux: Path) -> None:
    code, out, _ = run(capsys, "inspect", "digits-flux", "--json")
    assert code == 0
    assert json.loads(out) == sdquant.detect(flux).to_dict() | {"verified": False}


def test_inspect_shows_components_and_evidence(capsys: Capture, saved: Any) -> None:
    code, out, _ = run(capsys, "inspect", "--verify", saved("int8"))
    lines = out.splitlines()
    assert code == 0
    assert any(line.startswith("unet ") and "int8 (nncf)" in line for line in lines)
    assert any("sdquant's own metadata says int8" in line for line in lines)
    assert lines[-1] == "verified: every tensor was read and is sound"


def test_matrix_as_json_is_the_matrix(capsys: Capture) -> None:
    code, out, _ = run(capsys, "matrix", "--device", "cuda", "--scheme", "NF4", "--verdict", "breaks", "--json")
    cells = [cell for cell in sdquant.compat.matrix(device="cuda", schemes=["nf4"]) if cell.verdict == "breaks"]
    assert code == 0
    assert cells
    assert json.loads(out) == [cell.to_dict() for cell in cells]


def test_matrix_says_why(capsys: Capture) -> None:
    _, out, _ = run(capsys, "matrix", "--device", "cuda", "--scheme", "nf4")
    assert "Blockwise quantization only supports 16/32-bit floats" in out


def test_doctor(capsys: Capture) -> None:
    code, out, _ = run(capsys, "doctor", "--json")
    report = json.loads(out)
    assert code == 0
    assert {row["name"] for row in report["backends"]} == set(sdquant.backends.names())
    code, out, _ = run(capsys, "doctor")
    assert code == 0
    assert "bitsandbytes" in out


# Refusals.


@pytest.mark.parametrize(
    ("words", "kind"),
    [
        (("plan", "digits-sd", "-q", "nf5"), "UnknownQuantError"),
        (("plan", "digits-sd", "-q", "nf4,blocksize=3"), "SettingsError"),
        (("plan", "digits-sd", "-q", "nf4", "-q", "int8"), "SettingsError"),
        (("plan", "digits-sd", "-q", "unet=nf4", "-q", "unet=int8"), "SettingsError"),
        (("plan", "digits-sd", "--offload", "balanced", "--budget", "nonsense"), "SettingsError"),
        (("plan", "digits-sd", "--device", "abacus"), "SettingsError"),
        (("plan", "digits-sd", "-q", "nf4", "--offload", "sequential"), "IncompatibleError"),
        (("plan", "digits-sd", "-q", "q4_k"), "IncompatibleError"),
        (("plan", "no/such/place"), "MissingComponentError"),
        (("inspect", "no/such/place"), "MissingComponentError"),
        (("matrix", "--device", "abacus"), "SettingsError"),
        (("matrix", "--scheme", "nf5", "--device", "cpu"), "UnknownQuantError"),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, tuple) else None,
)
def test_a_refusal_is_three_lines_and_code_2(capsys: Capture, words: tuple[str, ...], kind: str) -> None:
    code, out, err = run(capsys, *words, "--json")
    error = json.loads(out)["error"]
    assert code == 2
    assert error["kind"] == kind
    said = {name: in_command_words(error[name]) for name in ("what", "why", "fix")}
    assert err.splitlines() == [f"sdquant: {said['what']}", f"   why: {said['why']}", f"   fix: {said['fix']}"]
    assert run(capsys, *words)[:2] == (2, "")


@pytest.mark.parametrize(
    ("python", "flags", "keys"),
    [
        ("with base=<pipeline folder>", "with --base FOLDER", "with base=FOLDER"),
        ("allow_incompatible=True", "--allow-incompatible", "allow_incompatible=true"),
        ("quant='int8', or quant=None", "--quant int8, or no --quant", "quantization=int8, or no quantization"),
        ("leave skip= out", "leave --skip out", "leave skip out"),
        (
            'config={"quant_method": "comfyui", "convrot": True} or budget="6GB"',
            '--config \'{"quant_method": "comfyui", "convrot": true}\' or --budget 6GB',
            'config=\'{"quant_method": "comfyui", "convrot": true}\' or budget=6GB',
        ),
    ],
)  # fmt: skip
def test_arguments_in_the_words_of_both_forms(python: str, flags: str, keys: str) -> None:
    assert in_command_words(python) == flags
    assert in_config_words(python, {"quant": "quantization"}) == keys


def test_a_config_files_error_names_its_keys(capsys: Capture, tmp_path: Path) -> None:
    """A file of ComfyUI's int8 without its marker: what has to be said of it is the key of the same name."""
    import torch
    from safetensors.torch import save_file

    codes = {"weight": torch.ones(32, 32, dtype=torch.int8), "weight_scale": torch.ones(32, 1)}
    save_file({f"layer.{key}": tensor for key, tensor in codes.items()}, tmp_path / "unsaid.safetensors")
    lines = [f"pretrained_model_name_or_path: {tmp_path / 'unsaid.safetensors'}", "base: digits-sd", "prompt: a seven"]
    (tmp_path / "run.yml").write_text("\n".join(lines))
    assert run(capsys, "generate", tmp_path / "run.yml", "--json")[0] == 2
    code, out, err = run(capsys, "generate", tmp_path / "run.yml")
    assert (code, out) == (2, "") and 'config=\'{"quant_method": "comfyui"' in err and "--config" not in err, err


@pytest.mark.parametrize(
    "words",
    [
        ("plan", "digits-sd", "--offload", "balanze"),
        ("generate", "digits-sd", "x", "--steps", "0"),
        ("generate", "digits-sd", "x", "--steps", "many"),
        ("generate", "digits-sd", "x", "--seed", "-1"),
        ("generate", "digits-sd", "x", "--seed", str(2**63)),
        ("compare", "digits-sd", "x", "--steps", "0"),
        ("compare", "digits-sd"),
        ("demo", "--images", "½"),
        ("demo", "--model", "digits-xl"),
        ("paint",),
        (),
    ],
    ids=" ".join,
)
def test_a_value_that_cannot_be_is_code_2(capsys: Capture, words: tuple[str, ...]) -> None:
    with pytest.raises(SystemExit) as stopped:
        cli.main(list(words))
    assert stopped.value.code == 2
    assert "error:" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("word", "command"),
    [("verify", "inspect --verify"), ("Convert", "quantize"), ("inspekt", "inspect"), ("dequant", "dequantize")],
)
def test_other_names_of_commands_are_told(capsys: Capture, word: str, command: str) -> None:
    with pytest.raises(SystemExit) as stopped:
        cli.main([word, "model.safetensors"])
    assert stopped.value.code == 2
    assert f"(did you mean sdquant {command}?)" in capsys.readouterr().err


@pytest.mark.parametrize(
    "words",
    [
        ("generate", "digits-sd", "x", "-o", "picture.txt"),
        ("compare", "digits-sd", "x", "-o", "picture.txt"),
        ("compare", "digits-sd", "x", "-o", "folder.png"),
        ("compare", "digits-sd", "x", "-q", "nf5"),
        ("compare", "digits-sd", "x", "-q", "nf4+int8"),
        ("demo", "-o", "picture.jpg"),
        ("demo", "-o", "folder.png"),
        ("demo", "-o", "file/picture.png"),
        ("quantize", "digits-sd", "-q", "nf4", "-o", "file/model"),
        ("quantize", "digits-sd", "-q", "nf4", "-o", "model.gguf"),
        ("quantize", "digits-sd", "-q", "nf4", "-o", "file"),
        ("quantize", "digits-sd", "-o", "model"),
        ("quantize", "digits-sd", "-q", "unet=q4_k", "-q", "text_encoder=nf4", "-o", "model"),
    ],
    ids=" ".join,
)
def test_a_target_that_cannot_be_is_refused_before_the_work(
    capsys: Capture, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, words: tuple[str, ...]
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "file").write_text("mine")
    (tmp_path / "folder.png").mkdir()
    begin = time.process_time()
    code, out, err = run(capsys, *words)
    assert (code, out) == (2, "")
    assert err.startswith("sdquant: ")
    assert time.process_time() - begin < 1
    assert (tmp_path / "file").read_text() == "mine"
    assert sorted(path.name for path in tmp_path.iterdir()) == ["file", "folder.png"]


def test_verbose_shows_where_it_happened(capsys: Capture) -> None:
    code, _, err = run(capsys, "-v", "plan", "digits-sd", "-q", "nf5")
    assert code == 2
    assert "Traceback" in err and "UnknownQuantError" in err


def test_a_system_error_is_a_sentence_too(capsys: Capture, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: Any, **__: Any) -> None:
        raise OSError(28, "No space left on device", "/disk/model.safetensors")

    monkeypatch.setattr("sdquant.planning.preparation.prepare", full)
    code, _, err = run(capsys, "plan", "digits-sd")
    assert code == 2
    assert err.splitlines()[:2] == [
        "sdquant: Cannot read or write /disk/model.safetensors",
        "   why: No space left on device",
    ]


def test_repeated_quants() -> None:
    assert _common.quant_of(["nf4"]) == "nf4"
    assert _common.quant_of(["int4,group_size=32"]) == "int4,group_size=32"
    assert _common.quant_of(["unet=int4,group_size=32"]) == {"unet": "int4,group_size=32"}
    assert _common.quant_of(["int8", "unet=nf4"]) == {"*": "int8", "unet": "nf4"}
    with pytest.raises(SettingsError, match="one scheme"):
        _common.quant_of(["int8", "nf4"])


def test_sizes() -> None:
    assert [_common.size(n) for n in (0, 999, 1000, 2_512_345, 7.6e9, 2e12)] == [
        "0 B", "999 B", "1.0 kB", "2.5 MB", "7.60 GB", "2000.00 GB",
    ]  # fmt: skip


# Who may speak.


def speak(args: Any) -> int:
    """A command that logs and warns as libraries do."""
    logging.getLogger("otherlib.part").warning("a remark")
    logging.getLogger("otherlib.part").error("a failure")
    logging.getLogger("sdquant.loading.loader").warning("a word of ours")
    warnings.warn("a deprecation", FutureWarning, stacklevel=1)
    warnings.warn("untested", sdquant.compat.UntestedWarning, stacklevel=1)
    return 0


def test_only_sdquant_and_errors_are_heard(capsys: Capture, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sdquant.cli.commands.plan.run", speak)
    handlers = list(logging.getLogger().handlers)
    _, _, err = run(capsys, "plan", "digits-sd")
    assert err.splitlines() == [
        "otherlib: error: a failure",
        "sdquant: warning: a word of ours",
        "sdquant: warning: untested",
    ]
    assert logging.getLogger().handlers == handlers


def test_verbose_lets_all_speak(capsys: Capture, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sdquant.cli.commands.plan.run", speak)
    with warnings.catch_warnings():
        warnings.simplefilter("default")
        _, _, err = run(capsys, "-v", "plan", "digits-sd")
    assert "a deprecation" in err
    assert "otherlib: warning: a remark" in err


# Work.


@pytest.mark.parametrize(
    ("model", "words", "name"),
    [
        ("digits-sd", ("-q", "unet=nf4", "-q", "text_encoder=int8"), "both"),
        ("digits-flux", ("-q", "q4_k"), "folder"),
        ("digits-flux", ("-q", "q4_k_m"), "flux.gguf"),
        ("digits-sd", ("-q", "int4"), "unet-int4.safetensors"),
    ],
)
def test_quantize_then_generate(capsys: Capture, tmp_path: Path, model: str, words: tuple[str, ...], name: str) -> None:
    from PIL import Image

    target, picture = tmp_path / "new" / name, tmp_path / "pictures" / "seven.png"
    code, out, err = run(capsys, "quantize", model, *words, "-o", target, "--no-progress")
    assert (code, err) == (0, "")
    assert out.startswith(f"{target}: ")
    base = ("--base", model) if target.suffix else ()
    code, out, err = run(
        capsys, "generate", target, "a handwritten seven", *base, "-o", picture, "--steps", "2", "--count", "2"
    )  # fmt: skip
    made = [picture.with_stem("seven-0"), picture.with_stem("seven-1")]
    assert (code, out.split(), err) == (0, [str(path) for path in made], "")
    for path in made:
        with Image.open(path) as image:
            assert image.size == (32, 32)
    assert run(capsys, "quantize", model, *words, "-o", target)[0] == 2
    assert not leftovers(tmp_path)


def test_a_component_takes_no_prompt(capsys: Capture, sd: Path, tmp_path: Path) -> None:
    code, _, err = run(capsys, "generate", sd / "unet", "a handwritten seven", "-o", tmp_path / "a.png")
    assert code == 2
    assert "a single component, not a pipeline" in err
    assert not list(tmp_path.iterdir())


def test_a_real_process_is_quiet(tmp_path: Path) -> None:
    done = process(
        "generate", "digits-sd", "a handwritten two", "--quant", "nf4", "--steps", "1", "-o", str(tmp_path / "a.png")
    )
    assert (done.returncode, done.stderr) == (0, "")


@pytest.mark.parametrize("encoding", ["cp1252", "ascii"])
def test_letters_that_the_output_lacks(
    encoding: str, monkeypatch: pytest.MonkeyPatch, sd: Path, tmp_path: Path
) -> None:
    """As a redirected output in one of Windows' code pages does those of other scripts."""
    (tmp_path / "модели 🎨").symlink_to(sd / "unet")
    raw = io.BytesIO()
    out = io.TextIOWrapper(raw, encoding=encoding)
    monkeypatch.setattr(sys, "stdout", out)
    assert cli.main(["inspect", str(tmp_path / "модели 🎨")]) == 0
    assert out.errors == "strict" and rb"\u043c\u043e\u0434" in raw.getvalue() and b"\nevidence" in raw.getvalue()


@pytest.mark.parametrize(("path", "code"), [(sdquant.demo.path("digits-sd") / "unet", 0), ("nowhere", 2)])
def test_no_output_at_all(path: object, code: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """As under `pythonw`, of which desktop shortcuts are."""
    monkeypatch.setattr(sys, "stdout", None)
    monkeypatch.setattr(sys, "stderr", None)
    assert cli.main(["plan", str(path), "--quant", "int8"]) == code
    assert (sys.stdout, sys.stderr) == (None, None)


def test_an_output_that_nobody_reads() -> None:
    with subprocess.Popen(
        [sys.executable, "-m", "sdquant", "matrix", "--device", "cuda", "--json"],
        stdout=subprocess.PIPE, stderr=subprocess.PIPE, env=ONE_THREAD,
    ) as child:  # fmt: skip
        assert child.stdout is not None and child.stderr is not None
        child.stdout.close()
        assert child.wait(60) == 0
        assert child.stderr.read() == b""


# Interrupts: nothing half-written stays.


def interrupted(tmp_path: Path, signal_: int, *words: str, at: Path, after: float = 0) -> tuple[int, str]:
    """Start a command, send the signal `after` seconds from when its work stands in `at`; exit code and stderr."""
    # torch makes a folder for what it compiles as soon as bitsandbytes is imported: that is not the command's.
    cache = tempfile.gettempdir() + "/torchinductor"
    with subprocess.Popen(
        [sys.executable, "-m", "sdquant", *words],
        stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True,
        env=ONE_THREAD | {"TMPDIR": str(tmp_path / "tmp"), "TORCHINDUCTOR_CACHE_DIR": cache},
    ) as child:  # fmt: skip
        until = time.monotonic() + 60
        while child.poll() is None and time.monotonic() < until and not any(at.glob("*sdquant-*")):
            time.sleep(0.002)
        time.sleep(after)
        child.send_signal(signal_)
        _, err = child.communicate(timeout=60)
    return child.returncode, err


@pytest.mark.skipif(os.name != "posix", reason="Ctrl-C reaches a child process otherwise on Windows")
@pytest.mark.parametrize(("signal_", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
def test_interrupted_quantize(tmp_path: Path, signal_: int, code: int) -> None:
    (tmp_path / "tmp").mkdir()
    out = tmp_path / "out"
    out.mkdir()
    words = ("quantize", "digits-flux", "-q", "q3_k", "-o", str(out / "model"))
    got, err = interrupted(tmp_path, signal_, *words, at=out)
    assert got == code
    assert err.startswith("sdquant: ") and "Traceback" not in err
    assert not list(out.iterdir())


@pytest.mark.slow
@pytest.mark.skipif(os.name != "posix", reason="Ctrl-C reaches a child process otherwise on Windows")
def test_interrupted_demo(tmp_path: Path) -> None:
    (tmp_path / "tmp").mkdir()
    words = ("demo", "--model", "digits-sd", "-o", str(tmp_path / "grid.png"))
    got, err = interrupted(tmp_path, signal.SIGINT, *words, at=tmp_path / "tmp", after=2)
    assert (got, err) == (130, "sdquant: interrupted\n")
    assert [path.name for path in tmp_path.rglob("*")] == ["tmp"]


@pytest.mark.skipif(os.name != "posix", reason="Ctrl-C reaches a child process otherwise on Windows")
def test_interrupted_compare(tmp_path: Path) -> None:
    """While the reference waits on disk, which is what balanced offload on the CPU keeps in the temporary folder."""
    (tmp_path / "tmp").mkdir()
    words = ("compare", "digits-sd", "a handwritten seven", "--offload", "balanced", "--budget", "2MB")
    got, err = interrupted(
        tmp_path, signal.SIGINT, *words, "--steps", "1000", "-o", str(tmp_path / "a.png"), at=tmp_path / "tmp"
    )
    assert (got, err) == (130, "sdquant: interrupted\n")
    assert [path.name for path in tmp_path.rglob("*")] == ["tmp"]


# The demo's skipped lines are tested in test_demo.py; here, that a missing extra is a sentence.


def test_the_demo_without_its_extra(capsys: Capture, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    from sdquant.demo import run as show

    monkeypatch.setattr(show, "EXTRA", {"no_such_module": "scikit-learn"})
    code, _, err = run(capsys, "demo", "-o", tmp_path / "grid.png")
    assert code == 2
    assert "scikit-learn" in err and install_extra("demo") in err
    with pytest.raises(BackendUnavailableError):
        show.need_extra()


def test_quantize_takes_the_target_in_either_way(tmp_path: Path, capsys: Capture) -> None:
    assert run(capsys, "quantize", "digits-sd", str(tmp_path / "a"), "--quant", "qint8")[0] == 0
    assert run(capsys, "quantize", "digits-sd", "-o", str(tmp_path / "b"), "--quant", "qint8")[0] == 0
    assert sorted(p.name for p in (tmp_path / "a").iterdir()) == sorted(p.name for p in (tmp_path / "b").iterdir())
    code, _, err = run(capsys, "quantize", "digits-sd", "--quant", "qint8")
    assert code == 2 and "no target" in err
    code, _, err = run(capsys, "quantize", "digits-sd", "c", "-o", "d", "--quant", "qint8")
    assert code == 2 and "two targets" in err


@pytest.mark.parametrize(
    "words",
    [("demo",), ("compare", "digits-sd", "a 7"), ("bench", "digits-sd"), ("dequantize", "digits-sd", "out"), ("ui",)],
)
def test_what_is_for_one_process_is_not_done_by_each(
    words: tuple[str, ...], capsys: Capture, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.chdir(tmp_path)
    for name, value in {"RANK": "1", "WORLD_SIZE": "2", "MASTER_ADDR": "localhost", "MASTER_PORT": "1"}.items():
        monkeypatch.setenv(name, value)
    code, _, error = run(capsys, *words)
    assert code == 2 and f"{words[0]} is for one process" in error and not [*tmp_path.iterdir()]


def test_tuning_measures_anew_and_keeps_what_it_finds(
    capsys: Capture, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    from sdquant.evaluation import tuning
    from sdquant.kernels import fastest, verdicts

    monkeypatch.setenv("SDQUANT_SETTINGS", str(tmp_path / "settings.json"))
    monkeypatch.setenv("SDQUANT_TUNE", "1")
    monkeypatch.setattr(fastest, "_verdicts", {})
    monkeypatch.setattr(verdicts, "_new", {})
    monkeypatch.setattr(tuning, "SIZES", [(512, 128)])
    monkeypatch.setattr(tuning, "ROWS", (8, 40))
    monkeypatch.setattr(tuning, "SCHEMES", (*tuning.SCHEMES, "int8"))  # one whose verdicts are there already
    verdicts._stored.cache_clear()
    code, out, _ = run(capsys, "doctor", "--tune", "--json")
    rows = json.loads(out)["tuned"]
    assert code == 0 and [(row["scheme"], row["rows"]) for row in rows] == [
        (scheme, count) for scheme in tuning.SCHEMES for count in (8, 40)
    ]
    assert all(row["seconds"] > 0 for row in rows)
    first, again = ([row for row in rows if row["scheme"] == "int8"][at : at + 2] for at in (0, 2))
    assert [row["by_torch"] for row in first] == [row["by_torch"] for row in again]
    found = [row["by_torch"] for row in rows[:-2] if row["by_torch"] is not None]
    assert len(found) == len(fastest.verdicts_so_far())
    assert not found or verdicts.path().exists()
    _, out, _ = run(capsys, "doctor", "--tune")
    assert "512 to 128" in out and "sdquant's, the only one" in out
    monkeypatch.setenv("SDQUANT_TUNE", "0")
    code, _, error = run(capsys, "doctor", "--tune")
    assert code == 2 and "Unset SDQUANT_TUNE" in error
    verdicts._stored.cache_clear()
