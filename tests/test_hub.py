"""Hub ids: of a repository only what will be loaded is downloaded. A server on this machine stands in for the hub."""

from __future__ import annotations

import hashlib
import json
import shutil
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
from safetensors.torch import save_file

import sdquant
from sdquant.errors import MissingComponentError, SdquantError, UnsupportedFileError
from sdquant.hub import needed

from . import layouts
from .test_three_ways import same_bits

if TYPE_CHECKING:
    from .layouts import State

NAME, COMMIT = "somebody/digits", "0123456789" * 4


class Hub:
    """Serves the files of a folder as the repository NAME, and remembers which were asked for."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.fetched = folder, set[str]()
        hub = self

        class Handler(BaseHTTPRequestHandler):
            def do_HEAD(self) -> None:
                self.answer(body=False)

            def do_GET(self) -> None:
                self.answer(body=True)

            def answer(self, *, body: bool) -> None:
                path = self.path.partition("?")[0]
                prefix = f"/{NAME}/resolve/"
                if path.startswith(f"/api/models/{NAME}/tree/"):
                    self.send(json.dumps(hub.tree()).encode(), body)
                elif path.startswith(f"/api/models/{NAME}"):
                    self.send(json.dumps(hub.about()).encode(), body)
                elif path.startswith(prefix) and (file := path.removeprefix(prefix).partition("/")[2]) in hub.files():
                    if body:
                        hub.fetched.add(file)
                    self.send((hub.folder / file).read_bytes(), body)
                else:
                    self.send_response(404)
                    self.send_header("X-Error-Code", "RepoNotFound")
                    self.send_header("Content-Length", "0")
                    self.end_headers()

            def send(self, data: bytes, body: bool) -> None:
                self.send_response(200)
                self.send_header("Content-Length", str(len(data)))
                self.send_header("X-Repo-Commit", COMMIT)
                self.send_header("ETag", f'"{hashlib.sha1(data).hexdigest()}"')
                self.end_headers()
                if body:
                    self.wfile.write(data)

            def log_message(self, *_: object) -> None:
                pass

        self.server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.url = f"http://127.0.0.1:{self.server.server_port}"

    def files(self) -> list[str]:
        return sorted(path.relative_to(self.folder).as_posix() for path in self.folder.rglob("*") if path.is_file())

    def about(self) -> dict[str, Any]:
        return {"id": NAME, "modelId": NAME, "sha": COMMIT, "siblings": [{"rfilename": file} for file in self.files()]}

    def tree(self) -> list[dict[str, Any]]:
        return [
            {"type": "file", "path": file, "size": (self.folder / file).stat().st_size, "oid": "0" * 40}
            for file in self.files()
        ]


@pytest.fixture
def hub(sd: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Hub]:
    """digits-sd as a repository, with all that people put beside the weights."""
    from huggingface_hub import constants

    folder = Path(shutil.copytree(sd, tmp_path / "repository"))
    for part in ("unet", "vae", "text_encoder"):
        (weights,) = (folder / part).glob("*.safetensors")
        state = {key: tensor.neg() for key, tensor in layouts.weights(folder / part).items()}
        if part != "vae":  # which has no variant
            save_file(state, weights.with_suffix(".fp16.safetensors"), {"format": "pt"})
        if part == "unet":
            _sharded(folder / part, state)
        for suffix in (".bin", ".fp16.bin", ".msgpack", ".onnx"):
            weights.with_suffix(suffix).write_bytes(b"weights of another kind")
    for place in ("openvino_model.xml", "openvino_model.bin", "unet/model.onnx_data", "vae_1_0/config.json"):
        (folder / place).parent.mkdir(exist_ok=True)
        (folder / place).write_text("{}")
    for place in ("digits.safetensors", "digits.ckpt", "digits-Q8_0.gguf", "vae_1_0/model.safetensors", "preview.png"):
        (folder / place).write_bytes(b"another file")
    made = Hub(folder)
    for name, value in (
        ("ENDPOINT", made.url),
        ("HUGGINGFACE_CO_URL_TEMPLATE", made.url + "/{repo_id}/resolve/{revision}/{filename}"),
        ("HF_HUB_CACHE", str(tmp_path / "cache")),
        ("HF_HUB_DISABLE_XET", True),
        ("HF_HUB_OFFLINE", False),
    ):
        monkeypatch.setattr(constants, name, value)
    thread = threading.Thread(target=made.server.serve_forever)
    thread.start()
    yield made
    made.server.shutdown()
    made.server.server_close()
    thread.join()


def _sharded(folder: Path, state: State) -> None:
    """Variant "ema" in two shards, with their index."""
    index = {}
    for number, half in enumerate((sorted(state)[::2], sorted(state)[1::2])):
        file = f"diffusion_pytorch_model.ema-{number + 1:05}-of-00002.safetensors"
        save_file({key: state[key] for key in half}, folder / file, {"format": "pt"})
        index |= dict.fromkeys(half, file)
    text = json.dumps({"metadata": {}, "weight_map": index})
    (folder / "diffusion_pytorch_model.safetensors.index.ema.json").write_text(text)


CONFIGS = {
    "model_index.json", "scheduler/scheduler_config.json", "text_encoder/config.json", "unet/config.json",
    "vae/config.json",
}  # fmt: skip
VAE = "vae/diffusion_pytorch_model.safetensors"
WEIGHTS = {
    None: {"unet/diffusion_pytorch_model.safetensors", "text_encoder/model.safetensors", VAE},
    "fp16": {"unet/diffusion_pytorch_model.fp16.safetensors", "text_encoder/model.fp16.safetensors", VAE},
    "ema": {
        "unet/diffusion_pytorch_model.safetensors.index.ema.json",
        "unet/diffusion_pytorch_model.ema-00001-of-00002.safetensors",
        "unet/diffusion_pytorch_model.ema-00002-of-00002.safetensors",
        "text_encoder/model.safetensors", VAE,
    },
}  # fmt: skip


@pytest.mark.parametrize("variant", WEIGHTS)
def test_what_will_be_loaded_is_downloaded(variant: str | None, hub: Hub, monkeypatch: Any) -> None:
    from huggingface_hub import constants

    pipe = sdquant.load_model(NAME, "int8", variant=variant, progress=False)
    tokenizer = {file for file in hub.fetched if file.startswith("tokenizer/")}
    assert tokenizer and all(file.endswith((".json", ".txt")) for file in tokenizer)
    assert hub.fetched - tokenizer == CONFIGS | WEIGHTS[variant]
    # The same as from the whole folder.
    same_bits(pipe, sdquant.load_model(hub.folder, "int8", variant=variant, progress=False))
    # The next time it comes out of the cache, with a connection or without one.
    hub.fetched.clear()
    for offline in (False, True):
        monkeypatch.setattr(constants, "HF_HUB_OFFLINE", offline)
        assert sdquant.plan(NAME, "int8", variant=variant).bytes == pipe.sdquant.plan.bytes
    assert not hub.fetched


def test_a_variant_that_is_not_there(hub: Hub) -> None:
    for path in (NAME, hub.folder, hub.folder / "text_encoder"):
        with pytest.raises(MissingComponentError) as error:
            sdquant.load_model(path, variant="bf16", progress=False)
        assert "'bf16'" in error.value.what and "no variant and fp16" in error.value.why
        assert ("ema" in error.value.why) == (path != hub.folder / "text_encoder")
    assert hub.fetched <= {"model_index.json"}
    with pytest.raises(MissingComponentError):
        sdquant.plan(hub.folder / VAE, variant="fp16")


def test_a_repository_that_is_not_there(hub: Hub) -> None:
    with pytest.raises(MissingComponentError, match="as a hub id it could not be had"):
        sdquant.load_model("somebody/else", progress=False)


def test_the_configs_alone(hub: Hub, sd: Path, tmp_path: Path, monkeypatch: Any) -> None:
    """For a checkpoint that comes without them."""
    monkeypatch.setattr("sdquant.components.reference", lambda shapes: NAME)
    file = layouts.checkpoint(sd, tmp_path / "model.safetensors")
    same_bits(sdquant.load_model(file, "int8", progress=False), sdquant.load_model(sd, "int8", progress=False))
    assert hub.fetched >= CONFIGS
    assert not any(file.endswith(".safetensors") or ".index." in file for file in hub.fetched)


COMPONENT = [
    "config.json",
    "README.md",
    "diffusion_pytorch_model.safetensors",
    "sdxl_vae.safetensors",
    "a/b.safetensors",
]


@pytest.mark.parametrize(
    ("files", "wanted"),
    [
        (COMPONENT, COMPONENT[:3:2]),
        (["config.json", "mine.gguf", "mine.onnx"], ["config.json", "mine.gguf"]),
        (["config.json", "model.fp16.safetensors", "pytorch_model.bin"], ["config.json", "model.fp16.safetensors"]),
        (["model.safetensors.index.json", "model-00001-of-00001.safetensors", "model.bf16.safetensors"],
         ["model-00001-of-00001.safetensors", "model.safetensors.index.json"]),
    ],
)  # fmt: skip
def test_of_one_component(files: list[str], wanted: list[str]) -> None:
    assert sorted(needed("a/b", files, None)) == wanted


@pytest.mark.parametrize(
    ("files", "error", "words"),
    [
        (["a-Q4_0.gguf", "a-Q8_0.gguf", "b.gguf", "c.gguf", "d.gguf"], UnsupportedFileError, "c.gguf and 1 more"),
        (["config.json", "pytorch_model.bin"], MissingComponentError, "pytorch_model.bin"),
    ],
)
def test_what_cannot_be_chosen(files: list[str], error: type[SdquantError], words: str) -> None:
    with pytest.raises(error) as caught:
        needed("a/b", files, None)
    assert "a/b" in caught.value.what and words in caught.value.why


def test_a_variant_of_a_folder(hub: Hub) -> None:
    """What was asked for by name needs no warning; the VAE, which has none, comes as it is."""
    made = sdquant.plan(hub.folder, "int8", variant="fp16")
    assert {name: src.variant for name, src in made.detected.sources.items()} == {
        "unet": "fp16", "text_encoder": "fp16", "vae": "",
    }  # fmt: skip
    assert not made.warnings
