"""ComfyUI's server and page with sdquant's nodes, in Chromium: what it offers, refuses and shows.

    python -m tools.hosts.comfy_page CHECKOUT --python VENV/bin/python [--picture FILE.png]

The nodes are to be in its custom_nodes, and a model in models/diffusion_models.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import subprocess
import time
import urllib.error
import urllib.parse
import urllib.request
from pathlib import Path
from typing import Any

from .measure import ROOT

URL = "http://127.0.0.1:8199"


def main() -> None:
    """Start the server, print what was found, and stop it."""
    parser = argparse.ArgumentParser(prog="python -m tools.hosts.comfy_page")
    parser.add_argument("checkout", type=Path)
    parser.add_argument("--python", required=True, help="the one of the host's environment")
    parser.add_argument("--picture", type=Path, help="where to leave a picture of the page")
    args = parser.parse_args()
    command = [args.python, "main.py", "--cpu", "--port", URL.rpartition(":")[2], "--disable-auto-launch"]
    with subprocess.Popen(
        command, cwd=args.checkout, env={**os.environ, "PYTHONPATH": str(ROOT)}, stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    ) as server:  # fmt: skip
        try:
            _wait(server)
            _offered()
            _page(args.picture)
        finally:
            server.terminate()


def _wait(server: Any) -> None:
    while server.poll() is None:
        with contextlib.suppress(OSError):
            _get("/system_stats")
            return
        time.sleep(1)
    raise SystemExit("ComfyUI has not started")


def _get(path: str, body: Any = None) -> Any:
    data = None if body is None else json.dumps(body).encode()
    request = urllib.request.Request(URL + path, data=data, headers={"Content-Type": "application/json"})
    try:
        with urllib.request.urlopen(request, timeout=60) as answer:
            return json.load(answer)
    except urllib.error.HTTPError as error:
        return json.loads(error.read())


def _offered() -> None:
    known = _get("/object_info")
    for name in sorted(name for name in known if name.startswith("Sdquant")):
        node = known[name]
        required = node["input"]["required"]
        tips = all(one[1].get("tooltip") for one in required.values())
        print(f"{name}: {node['category']}, {node['display_name']}, tooltips: {tips}, inputs: {', '.join(required)}")
    print("schemes:", _options(known["SdquantLoadDiffusionModel"]["input"]["required"]["quantize"]))
    print("workflows:", _get("/workflow_templates").get("sdquant"))
    refused = _get("/prompt", {"prompt": _prompt("nosuch")})
    print("nosuch:", [row["errors"][0]["details"] for row in refused["node_errors"].values()])


def _options(row: list[Any]) -> Any:
    return row[1]["options"] if row[0] == "COMBO" else row[0]


def _prompt(scheme: str) -> dict[str, Any]:
    name = "flux.safetensors"
    return {
        "1": {"class_type": "SdquantLoadDiffusionModel", "inputs": {"model_name": name, "quantize": scheme}},
        "2": {"class_type": "SdquantSaveDiffusionModel", "inputs": {"model": ["1", 0], "filename_prefix": "x/y"}},
    }


def _page(picture: Path | None) -> None:
    """Run the node Inspect, and read what is under it."""
    from playwright.sync_api import sync_playwright

    from tests.browser.conftest import CHROMIUM, FLAGS

    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=CHROMIUM, args=list(FLAGS))
        page = browser.new_page(viewport={"width": 1280, "height": 900})
        page.goto(URL, wait_until="domcontentloaded", timeout=180_000)
        page.wait_for_function(
            "Boolean(window.app?.graph && window.LiteGraph?.registered_node_types?.SdquantInspect)", timeout=180_000
        )
        page.evaluate(
            """async () => {
                app.graph.clear();
                const node = LiteGraph.createNode("SdquantInspect");
                node.pos = [300, 200];
                app.graph.add(node);
                await app.queuePrompt(0);
            }"""
        )
        shown = "app.graph._nodes[0].widgets.find((one) => one.name === 'sdquant_text')?.value"
        page.wait_for_function(shown, timeout=180_000)
        print("shown:", page.evaluate(shown).splitlines())
        print("in the prompt:", page.evaluate("app.graphToPrompt().then((p) => Object.values(p.output)[0].inputs)"))
        if picture is not None:
            page.keyboard.press("Escape")
            page.wait_for_timeout(3000)
            page.screenshot(path=str(picture))
        browser.close()


if __name__ == "__main__":
    main()
