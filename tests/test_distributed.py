"""Several real processes, which torchrun starts: what they find together has the bits of what one finds, and where one
dies nothing half-written stays."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

import sdquant
from sdquant.cli.commands.quantize import run
from sdquant.errors import BadFileError, SettingsError
from sdquant.loading import distributed_quantize
from sdquant.loading.distributed_quantize import shares
from sdquant.utils import distributed
from sdquant.utils.distributed import ALONE, processes

from . import distributed_worker as work

pytestmark = pytest.mark.skipif(not torch.distributed.is_available(), reason="this torch has no torch.distributed")

ROOT = Path(__file__).parents[1]


def torchrun(count: int, *words: str | Path, module: bool = False) -> subprocess.CompletedProcess[str]:
    """Run a module, or tests/distributed_worker.py, in several processes."""
    launcher = [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={count}"]
    what = ["-m", "sdquant"] if module else [str(Path(work.__file__))]
    return subprocess.run(
        [*launcher, *what, *map(str, words)],
        capture_output=True, text=True, timeout=300, cwd=ROOT,
        env={**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)},
    )  # fmt: skip


def tensors(folder: Path) -> dict[str, torch.Tensor]:
    """All tensors of a folder's files, which are of different names."""
    made: dict[str, torch.Tensor] = {}
    for file in sorted(folder.glob("*.safetensors")):
        rows = load_file(file)
        assert not made.keys() & rows.keys()
        made |= rows
    return made


def same_bits(one: dict[str, torch.Tensor], other: dict[str, torch.Tensor]) -> bool:
    def raw(tensor: torch.Tensor) -> tuple[torch.dtype, torch.Size, bytes]:
        return tensor.dtype, tensor.shape, tensor.contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()

    return one.keys() == other.keys() and all(raw(tensor) == raw(other[name]) for name, tensor in one.items())


def assert_same_model(one: Path, other: Path) -> None:
    """Two folders of a pipeline: the same tensors and the same JSON, in however many files."""
    configs = [path.relative_to(one) for path in one.rglob("*.json")]
    assert configs
    for path in configs:
        assert (other / path).read_bytes() == (one / path).read_bytes(), path
    for part in [path for path in one.iterdir() if path.is_dir()]:
        assert same_bits(tensors(part), tensors(other / part.name)), part.name


class TestTogether:
    @pytest.mark.parametrize("count", [2, pytest.param(4, marks=pytest.mark.slow)])
    def test_ranges_have_the_bits_that_one_process_finds(self, tmp_path: Path, count: int) -> None:
        done = torchrun(count, "ranges,numbers,again", tmp_path)
        assert done.returncode == 0, done.stderr
        wanted = work.packed()
        for rank in range(count):
            for made in torch.load(tmp_path / f"ranges-{rank}.pt"):
                assert all(same_bits(one, other) for one, other in zip(wanted, made, strict=True))
            found, gathered = torch.load(tmp_path / f"numbers-{rank}.pt")
            assert gathered == [{"rank": rank} for rank in range(count)]
            assert len(found) == 4
            for dtype in (*work.DTYPES, torch.float64):
                rows = work.rows(dtype, count)
                for mine, theirs in zip(found[str(dtype)], (rows.amax(0), rows.amin(0)), strict=True):
                    assert mine.dtype == dtype
                    assert torch.equal(mine.nan_to_num(7.5), theirs.nan_to_num(7.5))
                    assert torch.equal(mine.isnan(), theirs.isnan())

    @pytest.mark.slow
    def test_quantize(self, tmp_path: Path, saved: Callable[..., Path], flux: Path) -> None:
        out = tmp_path / "out"
        done = torchrun(2, "quantize", flux, out, "-q", "int8", module=True)
        assert done.returncode == 0, done.stderr
        assert done.stdout.count("int8") == 1  # one of them says it
        assert sorted(path.name for path in tmp_path.iterdir()) == ["out"]
        one = saved("int8", "digits-flux")
        assert_same_model(one, out)
        assert sorted(path.name for path in (out / "transformer").iterdir()) == [
            "config.json",
            "diffusion_pytorch_model-00001-of-00002.safetensors",
            "diffusion_pytorch_model-00002-of-00002.safetensors",
            "diffusion_pytorch_model.safetensors.index.json",
        ]
        sizes = [path.stat().st_size for path in (out / "transformer").glob("*.safetensors")]
        assert max(sizes) < 1.5 * min(sizes)
        quants = [{name: part.quant for name, part in sdquant.verify(home).parts.items()} for home in (one, out)]
        assert quants[0] == quants[1]
        assert quants[0]["text_encoder_2"] == "int8"
        wanted, mine = (sdquant.load_model(home, progress=False) for home in (one, out))
        for name in ("transformer", "text_encoder", "text_encoder_2", "vae"):
            assert same_bits(*(dict(getattr(pipe, name).state_dict()) for pipe in (wanted, mine))), name
        import diffusers
        import transformers

        for name, cls in (
            ("transformer", diffusers.FluxTransformer2DModel),
            ("text_encoder_2", transformers.T5EncoderModel),  # with a guarded norm, and tied tables
        ):
            assert same_bits(*(dict(cls.from_pretrained(home / name).state_dict()) for home in (one, out))), name

    @pytest.mark.slow
    @pytest.mark.parametrize("count", [2, 4])
    def test_every_kind_of_scheme_in_small_files(self, tmp_path: Path, count: int, flux: Path) -> None:
        done = torchrun(count, "quantize", tmp_path)
        assert done.returncode == 0, done.stderr
        for number, quant in enumerate(work.QUANTS):
            one = tmp_path / f"one-{number}"
            pipe = sdquant.load_model(flux, quant, runtime="plain" if "," in quant else None, progress=False)
            sdquant.save(pipe, one)
            assert_same_model(one, tmp_path / str(number))
            files = list((tmp_path / str(number) / "transformer").glob("*.safetensors"))
            assert len(files) > count
            assert max(path.stat().st_size for path in files) < 450_000  # one weight has 393,216 numbers

    @pytest.mark.slow
    def test_generate_finds_ranges_together(self, tmp_path: Path) -> None:
        keys = (
            "pretrained_model_name_or_path=digits-sd", "quantization=int8", "use_qwix_quantization=true",
            "prompt=a handwritten seven", "num_inference_steps=2", "quantization_local_shard_count=3",
        )  # fmt: skip
        config = tmp_path / "config.yml"
        config.write_text("".join(f"{key.replace('=', ': ')}\n" for key in keys))
        done = torchrun(2, "generate", config, f"output_dir={tmp_path / 'two'}", module=True)
        assert done.returncode == 0, done.stderr
        assert done.stdout.splitlines() == [str(tmp_path / "two" / "run" / "0.png")]
        from sdquant.cli import main

        one = ["quantization_local_shard_count=1", f"output_dir={tmp_path / 'one'}"]
        assert main(["generate", str(config), *one]) == 0
        pictures = [tmp_path / name / "run" / "0.png" for name in ("one", "two")]
        assert pictures[0].read_bytes() == pictures[1].read_bytes()


@pytest.mark.skipif(os.name != "posix", reason="kill -9 is POSIX's")
class TestDeath:
    def test_the_others_are_told_and_nothing_stays(self, tmp_path: Path) -> None:
        done = torchrun(2, "gone", tmp_path)
        assert done.returncode != 0
        assert "SIGKILL" in done.stderr
        assert [path.name for path in tmp_path.iterdir()] == ["told-0"]
        text = (tmp_path / "told-0").read_text()
        assert text.startswith("Gathering a value of each process failed: another process has ended (")
        assert "it says why that one ended" in text

    @pytest.mark.slow
    @pytest.mark.parametrize("count", [2, 4])
    def test_one_is_killed_while_it_quantizes(self, tmp_path: Path, count: int) -> None:
        done = torchrun(count, "killed", tmp_path)
        assert done.returncode != 0
        assert "SIGKILL" in done.stderr
        assert not list(tmp_path.iterdir())
        # Told by gloo, or ended by torchrun, whichever came first; each in its own name.
        for rank in range(count - 1):
            assert f"sdquant[{rank}]: " in done.stderr
        assert "look at" in done.stderr.lower()

    @pytest.mark.slow
    def test_a_disk_is_full(self, tmp_path: Path, flux: Path) -> None:
        limit = f'ulimit -f 100; exec {sys.executable} -m sdquant "$@"'  # blocks of 1 KiB: a file of 100 KiB
        script = tmp_path / "limited.sh"
        script.write_text(limit)
        launcher = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2", "--no-python"]
        done = subprocess.run(
            [*launcher, "bash", str(script), "quantize", str(flux), str(tmp_path / "out"), "-q", "nf4"],
            capture_output=True, text=True, timeout=300, cwd=ROOT,
            env={**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)},
        )  # fmt: skip
        assert done.returncode != 0
        assert "bytes are free there" in done.stderr or "are free there" in done.stderr
        assert [path.name for path in tmp_path.iterdir()] == ["limited.sh"]


class TestAlone:
    def test_without_torchrun_nothing_is_started(self, monkeypatch: pytest.MonkeyPatch) -> None:
        for name in ("RANK", "WORLD_SIZE"):
            monkeypatch.delenv(name, raising=False)
        with processes() as ranks:
            assert ranks == ALONE
            assert ranks.first
            assert ranks.group is None
            assert ranks.gathered("a") == ["a"]
            tensor = torch.tensor([1.0, -0.0])
            assert ranks.largest(tensor) is tensor
            assert ranks.least(tensor) is tensor
            ranks.barrier()
            assert not torch.distributed.is_initialized()
        assert not distributed.launched()
        assert distributed.label() == ""

    @pytest.mark.parametrize(
        ("environment", "word"),
        [
            ({"RANK": "2", "WORLD_SIZE": "2"}, "no such process"),
            ({"RANK": "x", "WORLD_SIZE": "2"}, "RANK='x'"),
            ({"RANK": "0", "WORLD_SIZE": "-2"}, "WORLD_SIZE='-2'"),
            ({"RANK": "0", "LOCAL_RANK": "1", "WORLD_SIZE": "2"}, "no such process"),
            ({"RANK": "0", "WORLD_SIZE": "2"}, "MASTER_ADDR is not"),
            ({"RANK": "0", "WORLD_SIZE": "2", "MASTER_ADDR": "localhost"}, "MASTER_PORT is not"),
        ],
    )
    def test_an_environment_that_torchrun_has_not_made(
        self, monkeypatch: pytest.MonkeyPatch, environment: dict[str, str], word: str
    ) -> None:
        for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT"):
            monkeypatch.delenv(name, raising=False)
        for name, value in environment.items():
            monkeypatch.setenv(name, value)
        with pytest.raises(SettingsError, match=word), processes():
            pass

    @pytest.mark.parametrize("text", ["0", "-1", "soon", "nan", "1e10"])
    def test_no_time_to_wait(self, monkeypatch: pytest.MonkeyPatch, text: str) -> None:
        rows = {
            "RANK": "0",
            "WORLD_SIZE": "2",
            "MASTER_ADDR": "localhost",
            "MASTER_PORT": "1",
            distributed.TIMEOUT: text,
        }
        for name, value in rows.items():
            monkeypatch.setenv(name, value)
        with pytest.raises(SettingsError, match=distributed.TIMEOUT), processes():
            pass

    @pytest.mark.parametrize(
        ("words", "word"),
        [
            (["out.safetensors", "-q", "nf4"], "Cannot write out.safetensors"),
            (["out", "-q", "q8_0"], "Cannot write q8_0"),
            (["out", "-q", "nf4", "--portable"], "Cannot use --portable"),
            (["out", "-q", "nf4", "--cache", "on"], "Cannot use --cache"),
        ],
    )
    def test_what_several_processes_cannot_write(
        self, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, sd: Path, words: list[str], word: str
    ) -> None:
        from sdquant.cli import parser

        rows = {"RANK": "0", "WORLD_SIZE": "2", "MASTER_ADDR": "localhost", "MASTER_PORT": "1"}
        for name, value in rows.items():
            monkeypatch.setenv(name, value)
        args = parser().parse_args(["quantize", str(sd), str(tmp_path / words[0]), *words[1:]])
        with pytest.raises(SettingsError, match=word):
            run(args)

    def test_after_the_load_is_for_one_process(self, tmp_path: Path, sd: Path) -> None:
        from sdquant.planning.preparation import prepare
        from sdquant.planning.request import make_request

        asked = make_request(sd, quant="nf4", mode="post")
        with pytest.raises(SettingsError, match="mode='post'"):
            distributed_quantize.quantize(asked, prepare(asked), tmp_path / "out", ALONE)


class TestShares:
    def test_runs_of_about_the_same_bytes(self) -> None:
        sizes = {f"w{i}": 1 + (i * 37) % 50 for i in range(100)}
        made = shares(sizes, 4)
        assert [name for run in made for name in run] == list(sizes)
        total = sum(sizes.values())
        assert all(abs(sum(sizes[name] for name in run) - total / 4) <= 50 for run in made)

    def test_few_weights_and_none(self) -> None:
        assert shares({"a": 5}, 3) == [[], ["a"], []]
        assert shares({"a": 0, "b": 0}, 2) == [["a", "b"], []]
        assert shares({}, 2) == [[], []]


class TestShards:
    @pytest.fixture
    def shards(self, tmp_path: Path, sd: Path) -> Path:
        """A UNet in files of 100 KB, each with the metadata of its own weights, written by one process."""
        from sdquant.planning.preparation import prepare
        from sdquant.planning.request import make_request

        asked = make_request(sd / "unet", quant="int8", progress=False)
        return distributed_quantize.quantize(asked, prepare(asked), tmp_path / "unet", ALONE, max_shard=100_000)

    def test_each_tells_of_its_own(self, shards: Path, saved: Callable[..., Path]) -> None:
        assert len(list(shards.glob("*.safetensors"))) > 3
        assert same_bits(tensors(shards), tensors(saved("int8") / "unet"))
        assert (shards / "config.json").read_bytes() == (saved("int8") / "unet" / "config.json").read_bytes()
        import diffusers

        cls = diffusers.UNet2DConditionModel
        read = [dict(cls.from_pretrained(home).state_dict()) for home in (shards, saved("int8") / "unet")]
        assert same_bits(*read)

    @pytest.mark.parametrize(
        ("old", "new", "why"),
        [
            ('"cross_attention_dim": ', '"cross_attention_dim":1', "config differs"),
            ('"format": 1', '"format": 9', "format 9"),
        ],
    )
    def test_that_contradict_each_other(self, shards: Path, old: str, new: str, why: str) -> None:
        file = sorted(shards.glob("*.safetensors"))[2]
        raw = file.read_bytes()
        old, new = (word.replace('"', '\\"') for word in (old, new))
        assert raw.count(old.encode()) == 1
        file.write_bytes(raw.replace(old.encode(), new.encode()))
        with pytest.raises(sdquant.SdquantError, match=why):
            sdquant.detect(shards)

    def test_one_that_is_not_as_reported(self, tmp_path: Path) -> None:
        from sdquant.loading.shard_writer import File

        (tmp_path / "rank-1-0.safetensors").write_bytes(b"half")
        for name in ("rank-1-0.safetensors", "rank-2-0.safetensors"):
            with pytest.raises(BadFileError, match="reports 5 bytes"):
                distributed_quantize._name(tmp_path, "model", [File(name, 5, {"a": 5})])
