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
from urllib.parse import unquote

import pytest
from safetensors.torch import save_file

import sdquant
from sdquant.cli import main
from sdquant.errors import MissingComponentError, SdquantError, SettingsError, UnsupportedFileError
from sdquant.models.hub import needed
from sdquant.models.hub_references import Reference, reference
from sdquant.planning.request import make_request
from sdquant.training.config import keys as config_keys

from . import layouts
from .test_load_modes import same_bits

if TYPE_CHECKING:
    from .layouts import State

NAME, COMMIT = "somebody/digits", "0123456789" * 4
HOST = "huggingface" + ".co"  # see test_readme.py


class Hub:
    """Serves the files of a folder as the repository NAME, and remembers which were asked for."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.fetched = folder, set[str]()
        self.revisions, self.tokens, self.refusal = set[str](), set[str](), ""
        hub = self

        class Handler(BaseHTTPRequestHandler):
            def do_HEAD(self) -> None:
                self.answer(body=False)

            def do_GET(self) -> None:
                self.answer(body=True)

            def answer(self, *, body: bool) -> None:
                path = self.path.partition("?")[0]
                prefix = f"/{NAME}/resolve/"
                hub.tokens.add(self.headers.get("Authorization", ""))
                for place in (prefix, f"/api/models/{NAME}/revision/"):
                    if path.startswith(place):
                        hub.revisions.add(unquote(path.removeprefix(place).partition("/")[0]))
                if hub.refusal and path.startswith(prefix):
                    self.refuse(403, hub.refusal)
                    return
                if "no-such-revision" in path:
                    self.refuse(404, "RevisionNotFound")
                    return
                if path.startswith(f"/api/models/{NAME}/tree/"):
                    self.send(json.dumps(hub.tree()).encode(), body)
                elif path.startswith(f"/api/models/{NAME}"):
                    self.send(json.dumps(hub.about()).encode(), body)
                elif (
                    path.startswith(prefix)
                    and (file := unquote(path.removeprefix(prefix).partition("/")[2])) in hub.files()
                ):
                    if body:
                        hub.fetched.add(file)
                    self.send((hub.folder / file).read_bytes(), body)
                else:
                    self.refuse(404, "RepoNotFound")

            def refuse(self, status: int, code: str) -> None:
                self.send_response(status)
                self.send_header("X-Error-Code", code)
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
    with pytest.raises(MissingComponentError, match="it cannot be fetched from the hub"):
        sdquant.load_model("somebody/else", progress=False)


def test_the_configs_alone(hub: Hub, sd: Path, tmp_path: Path, monkeypatch: Any) -> None:
    """For a checkpoint that comes without them."""
    monkeypatch.setattr("sdquant.models.components.reference", lambda shapes: NAME)
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


@pytest.mark.parametrize(
    ("text", "repository", "inside", "revision"),
    [
        ("a/b", "a/b", "", None),
        ("a/b/", "a/b", "", None),
        ("a/b.c-d_e/x/y.gguf", "a/b.c-d_e", "x/y.gguf", None),
        ("a/b@v1.0/x", "a/b", "x", "v1.0"),
        ("hf://a/b@v1/x.gguf", "a/b", "x.gguf", "v1"),
        (f"https://{HOST}/a/b", "a/b", "", None),
        (f"https://{HOST}/a/b/", "a/b", "", None),
        (f"{HOST}/a/b", "a/b", "", None),
        ("http://hf.co/a/b/tree/main", "a/b", "", "main"),
        (f"https://{HOST}/a/b/tree/main/unet", "a/b", "unet", "main"),
        (f"https://{HOST}/a/b/blob/main/x/y.gguf", "a/b", "x/y.gguf", "main"),
        (f"https://{HOST}/a/b/resolve/0123abc/y%20z.gguf?download=true", "a/b", "y z.gguf", "0123abc"),
        (f"https://{HOST}/a/b/blob/refs%2Fpr%2F3/y.gguf#L1", "a/b", "y.gguf", "refs/pr/3"),
        (f"https://{HOST}/a/b/blob/refs/pr/3/y.gguf", "a/b", "y.gguf", "refs/pr/3"),
    ],
)
def test_references(text: str, repository: str, inside: str, revision: str | None) -> None:
    assert reference(text) == Reference(repository, inside, revision)


def test_paths_are_no_references(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "models").mkdir()
    for text in (
        "model",
        "./a/b",
        "../a/b",
        "/a/b",
        "~/a/b",
        "C:\\a\\b",
        "C:/a/b",
        "models/flux/x.gguf",
        "a//b",
        "a b/c",
    ):
        assert reference(text) is None, text
    for text in ("https://civitai.com/models/1", f"https://{HOST}/a", f"https://{HOST}/datasets/a/b",
                 f"https://{HOST}/a/b/discussions/3", "a/b/../c", "https://"):  # fmt: skip
        with pytest.raises(MissingComponentError) as error:
            reference(text)
        assert text in error.value.what
        with pytest.raises(MissingComponentError):
            sdquant.plan(text)


UNET = "unet/diffusion_pytorch_model.safetensors"


@pytest.mark.parametrize(
    ("path", "values"),
    [
        (f"{NAME}/{UNET}", {}),
        (f"https://{HOST}/{NAME}/blob/main/{UNET}", {}),
        (f"https://{HOST}/{NAME}/resolve/main/{UNET}?download=true", {}),
        (f"{NAME}/{UNET.partition('/')[2]}", {"subfolder": "unet"}),
        (f"{NAME}/unet", {}),
        (f"https://{HOST}/{NAME}/tree/main/unet/", {}),
        (NAME, {"subfolder": "unet"}),
    ],
)
def test_a_file_and_a_folder_of_a_repository(path: str, values: dict[str, str], hub: Hub) -> None:
    """One component, and nothing else is downloaded; without a connection it comes out of the cache."""
    from huggingface_hub import constants

    made = sdquant.load_model(path, "int8", progress=False, **values)
    assert hub.fetched == {UNET, "unet/config.json"}
    same_bits(made, sdquant.load_model(hub.folder / "unet", "int8", progress=False))
    hub.fetched.clear()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(constants, "HF_HUB_OFFLINE", True)
        assert sdquant.plan(path, "int8", **values).bytes == made.sdquant.plan.bytes
        with pytest.raises(MissingComponentError):
            sdquant.plan(f"{NAME}/digits-Q8_0.gguf")
    assert not hub.fetched


def test_what_a_repository_has_not(hub: Hub) -> None:
    with pytest.raises(MissingComponentError) as error:
        sdquant.plan(f"{NAME}/digits-Q4_0.gguf")
    assert "has no digits-Q4_0.gguf" in error.value.why and "Did you mean digits-Q8_0.gguf?" in error.value.fix
    with pytest.raises(MissingComponentError, match=r"has no transformer"):
        sdquant.plan(NAME, subfolder="transformer")
    assert not hub.fetched


def test_a_pipeline_in_a_subfolder(hub: Hub, sd: Path) -> None:
    shutil.copytree(sd, hub.folder / "small" / "sd")
    made = sdquant.load_model(f"{NAME}/small/sd", "int8", progress=False)
    same_bits(made, sdquant.load_model(sd, "int8", progress=False))
    assert all(file.startswith("small/sd/") for file in hub.fetched)
    assert sdquant.plan(hub.folder, "int8", subfolder="small/sd").bytes == made.sdquant.plan.bytes


def test_revisions(hub: Hub, sd: Path) -> None:
    for path, values in (
        (NAME, {"revision": "v1"}),
        (f"{NAME}@v1", {}),
        (f"https://{HOST}/{NAME}/tree/v1", {}),
        (f"https://{HOST}/{NAME}/tree/v1", {"revision": "v1"}),
        (NAME, {"revision": "refs/pr/1"}),
    ):
        hub.revisions.clear()
        sdquant.plan(path, **values)
        assert hub.revisions <= {"v1", "refs/pr/1", COMMIT} and hub.revisions - {COMMIT}
    for path, values, words in (
        (f"{NAME}@v1", {"revision": "v2"}, "Remove one of the two"),
        (str(sd), {"revision": "v1"}, "Remove revision"),
        (str(sd / VAE), {"subfolder": "vae"}, "Remove subfolder"),
    ):
        with pytest.raises(SettingsError) as error:
            sdquant.plan(path, **values)
        assert words in error.value.fix
    with pytest.raises(MissingComponentError, match="has no revision no-such-revision"):
        sdquant.plan(NAME, revision="no-such-revision")


def test_of_a_base_only_what_is_lacking(hub: Hub, sd: Path, tmp_path: Path) -> None:
    """What lone files hold is not downloaded, be they on the hub themselves."""
    unet = Path(shutil.copy(sd / UNET, tmp_path / "unet.safetensors"))
    vae = Path(shutil.copy(sd / VAE, tmp_path / "vae.safetensors"))
    whole = sdquant.plan(hub.folder, "int8").bytes
    for path, values, without in (
        (unet, {"base": NAME}, {UNET}),
        (NAME, {"parts": [vae]}, {VAE}),
        (NAME, {"parts": {"unet": unet, "vae": vae}}, {UNET, VAE}),
        (unet, {"base": f"{NAME}@v1", "parts": [f"{NAME}/{VAE}"]}, {UNET}),
    ):
        hub.fetched.clear()
        shutil.rmtree(tmp_path / "cache", ignore_errors=True)
        assert sdquant.plan(path, "int8", **values).bytes == whole
        assert {file for file in hub.fetched if file.endswith(".safetensors")} == WEIGHTS[None] - without


SECRET = "hf_verysecret"


def test_a_token_goes_to_the_hub_and_nowhere_else(
    hub: Hub, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: Any, capsys: Any
) -> None:
    import pickle

    caplog.set_level("DEBUG")
    asked = make_request(NAME, quant="int8", token=SECRET, cache=tmp_path / "kept", progress=False)
    made = sdquant.plan(NAME, "int8", token=SECRET)
    pipe = sdquant.load_model(NAME, "int8", token=SECRET, cache=tmp_path / "kept", progress=False)
    assert f"Bearer {SECRET}" in hub.tokens
    assert pickle.dumps(asked).count(SECRET.encode()) == 1  # as one who gives it on has it
    said = [repr(asked), repr(made), json.dumps(made.to_dict()), repr(pipe.sdquant), caplog.text]
    said += [str(pickle.dumps(sdquant.plan(NAME, "int8", token=SECRET)))]
    said += [str(path) + path.read_text(errors="replace") for path in (tmp_path / "kept").rglob("*") if path.is_file()]
    for path, values in (
        ("somebody/else", {}),
        (NAME, {"quant": "nf5"}),
        (NAME, {"base": "x"}),
        (NAME, {"dtype": "x"}),
    ):
        with pytest.raises(SdquantError) as error:
            sdquant.load_model(path, token=SECRET, progress=False, **values)
        said.append(str(error.value))
    with pytest.raises(SettingsError) as error:
        make_request(NAME, token=SECRET.encode())
    said.append(str(error.value))
    assert main(["plan", NAME, "-q", "int8", "--token", SECRET, "--json"]) == 0
    said += capsys.readouterr()
    assert len(said) > 10 and not any(SECRET in text for text in said)
    assert "token" not in {row.name for row in config_keys()}  # a config is written beside what is made by it
    hub.tokens.clear()
    monkeypatch.setenv("HF_TOKEN", "hf_of_environment")
    sdquant.plan(NAME)
    assert hub.tokens == {"Bearer hf_of_environment"}
    hub.tokens.clear()
    sdquant.plan(NAME, token=False)
    assert hub.tokens == {""}


def test_who_may_not(hub: Hub) -> None:
    hub.refusal = "GatedRepo"
    with pytest.raises(MissingComponentError) as error:
        sdquant.plan(NAME)
    assert "is gated" in error.value.why
    assert "hf auth login" in error.value.fix and "token=" in error.value.fix and "HF_TOKEN" in error.value.fix
    with pytest.raises(MissingComponentError) as error:
        sdquant.plan("somebody/private")
    assert "private" in error.value.fix and "token=" in error.value.fix


def test_by_the_command_line(hub: Hub, tmp_path: Path, capsys: Any) -> None:
    words = [f"{NAME}/{UNET}", "--revision", "v1", "--token", SECRET]
    assert main(["plan", *words, "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["container"] == "safetensors"
    assert "v1" in hub.revisions and f"Bearer {SECRET}" in hub.tokens
    out = tmp_path / "unet.gguf"
    assert main(["quantize", NAME, str(out), "-q", "q8_0", "--subfolder", "unet", "--no-progress"]) == 0
    assert sdquant.detect(out).quant == "q8_0"
    assert main(["inspect", NAME]) == 2
    assert "hf download" in capsys.readouterr().err
