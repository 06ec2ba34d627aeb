"""Run the C kernels under AddressSanitizer and UndefinedBehaviorSanitizer: reads and writes beyond a tensor, overflows,
shifts and addresses that C leaves open. On Linux, with gcc.

    python -m tests.kernels.sanitized FOLDER                                    every function on random shapes (`fuzz`)
    python -m tests.kernels.sanitized FOLDER tests/kernels/test_native.py ...   tests, with any options of pytest

FOLDER keeps the instrumented module: what has not changed is not compiled again. The first time takes ten minutes on
two cores. Kernels that this processor cannot run are left out, as nothing of them would be tried. The first error of
memory ends the run, with what was called; `fuzz` names the seeds of wrong results, and runs one again from
SDQUANT_FUZZ_SEED, for SDQUANT_FUZZ_SECONDS, 600 if unset.
"""

from __future__ import annotations

import hashlib
import importlib.util
import os
import re
import subprocess
import sys
import sysconfig
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from sdquant.kernels import cpu

SOURCES = Path(cpu.__file__).parent
NAME = f"{cpu.__name__}._kernels"
# -g1: the lines of functions, and no variables, which take gcc most of the time.
FLAGS = ("-fPIC", "-O1", "-g1", "-ffp-contract=off", "-fsanitize=address,undefined", "-fno-omit-frame-pointer")
_OTHERS = re.compile(r"(blocks_)?avx512|amx")
_INSTEAD = ("amx_int8", "amx_kernels", "avx512_int8", "avx512_kernels", "attend_amx", "attend_avx512")
_SETTINGS = {
    "ASAN_OPTIONS": "detect_leaks=0:halt_on_error=1",  # Python keeps what it has to the end
    "UBSAN_OPTIONS": "halt_on_error=1:print_stacktrace=1",
    "PYTHONMALLOC": "malloc",  # bytes objects have their own addresses, too
    "OMP_NUM_THREADS": "1",
}


def build(folder: Path) -> Path:
    """Compile what is not there yet. Return the module."""
    folder.mkdir(parents=True, exist_ok=True)
    runs_avx512 = "avx512bf16" in Path("/proc/cpuinfo").read_text().replace("avx512_bf16", "avx512bf16")
    headers = b"\0".join(path.read_bytes() for path in sorted(SOURCES.glob("*.h")))
    include = f"-I{sysconfig.get_paths()['include']}"

    def compiled(source: Path) -> str:
        key = hashlib.sha256(b"\0".join((repr(FLAGS).encode(), source.read_bytes(), headers))).hexdigest()[:16]
        done = folder / f"{source.stem}-{key}.o"
        if not done.exists():
            unfinished = done.with_suffix(".unfinished")
            subprocess.run(["gcc", *FLAGS, include, "-c", str(source), "-o", str(unfinished)], check=True)
            unfinished.replace(done)
        return str(done)

    sources = [path for path in sorted(SOURCES.glob("*.c")) if runs_avx512 or not _OTHERS.match(path.name)]
    if not runs_avx512:  # what the others refer to, and never look at
        instead = folder / "instead.c"
        instead.write_text("".join(f"char {name}[4096];\n" for name in _INSTEAD))
        sources.append(instead)
    with ThreadPoolExecutor(os.cpu_count() or 1) as pool:
        objects = list(pool.map(compiled, sorted(sources, key=lambda path: path.stat().st_size, reverse=True)))
    module = folder / "_kernels.abi3.so"
    subprocess.run(["gcc", "-shared", "-fsanitize=address,undefined", *objects, "-o", str(module)], check=True)
    return module


def load(module: Path) -> None:
    """Have the package use this module."""
    spec = importlib.util.spec_from_file_location(NAME, module)
    assert spec is not None and spec.loader is not None
    kernels = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(kernels)
    sys.modules[NAME] = kernels
    found = cpu.extension()
    assert found is not None and found.__file__ == str(module), "the package uses another module"


def run(module: Path, arguments: list[str]) -> int:
    """Run in a process whose memory the sanitizer's functions give and take."""
    libraries = [
        subprocess.run(["gcc", f"-print-file-name={name}"], capture_output=True, text=True, check=True).stdout.strip()
        for name in ("libasan.so", "libubsan.so", "libstdc++.so")  # the last: it looks up how exceptions are thrown
    ]
    environment = os.environ | _SETTINGS | {"LD_PRELOAD": " ".join(map(os.path.realpath, libraries))}
    inside = [sys.executable, "-m", __spec__.name, "--inside", str(module), *arguments]
    return subprocess.run(inside, env=environment).returncode


def main() -> int:
    if sys.argv[1] == "--inside":
        load(Path(sys.argv[2]))
        del os.environ["LD_PRELOAD"]  # programs that tests start have other modules
        if len(sys.argv) > 3:
            import pytest

            return int(pytest.main(["-n0", "-p", "no:cacheprovider", *sys.argv[3:]]))
        from . import fuzz

        return fuzz.main()
    return run(build(Path(sys.argv[1]).resolve()), sys.argv[2:])


if __name__ == "__main__":
    sys.exit(main())
