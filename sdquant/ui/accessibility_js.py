"""A script in the page that adds what Gradio lacks for the keyboard, screen readers, and a lost connection."""

from __future__ import annotations

import json

from .dropdown_js import DROPDOWNS
from .names_js import NAMES
from .server.request_body import MAX_UPLOAD

# Boxes whose new content is to be read out: outcomes and verdicts. Their progress bars say `aria-live="off"`: a box of
# its own tells of them, now and then.
SPOKEN = (
    "status", "applied", "verdict", "found", "checked", "compare-status", "convert-status", "convert-seen", "in-memory",
    "start-said", "lora-said", "preset-said",
)  # fmt: skip

EVERY = 4000  # milliseconds between two looks whether the server is there

# A page whose server has ended waits for ever, with "Generate" disabled. What it says then, and when it is back.
AWAY = "✕ The server does not answer. It was ended, or the connection is lost. Start it again; this page notices it."
BACK = "The server is there again. The page shows what is under way when it is loaded again."
ANEW = "The server is there again. It was started anew, and what was under way has ended."

# Answers come by a stream that Gradio's server closes when nothing is under way. What is clicked while the word of that
# is still on its way finds the stream open, and its answer never comes. So a click waits for that word this long.
CLOSING = 150  # milliseconds

LARGEST = 32 << 20  # bytes of a picture or of settings
MOST_LORA = MAX_UPLOAD - 4096  # bytes of a LoRA; what is sent has more around it
TOO_LARGE = "MB, which is the most that this page takes here."

# What it mends: a list of choices opens again when Tab leaves it, and stays open; one that scrolls is a tab stop of its
# own in Chromium, and gone as soon as it has the focus; the button on a chosen scheme is called "Remove 3"; a group of
# choices has no name, and parts that open do not say whether they are; images have no name, and their download is a
# button within a link, two tab stops; icons are read out as images without a name; the slider between two images is for
# a mouse alone.
SCRIPT = """
() => {
    // Of a progress bar people hear the stage and each quarter: every step would be too much.
    const told = document.body.appendChild(document.createElement("div"));
    told.id = "progress-told";
    told.ariaLive = "polite";
    told.style.cssText = "position: fixed; width: 1px; height: 1px; overflow: hidden; clip-path: inset(50%)";
    const tell = () => {
        const bar = [...document.querySelectorAll(".sq-progress")].find(one => one.checkVisibility());
        const stage = bar?.ariaLabel.split(", ")[0] ?? "", share = bar?.ariaValueNow ?? 0;
        const text = share < 25 ? stage : `${stage}, ${25 * Math.floor(share / 25)} %`;
        if (told.textContent !== text) told.textContent = text;
    };
    NAMES
    const mend = () => {
        tell();
        namePanels();
        nameFields();
        for (const id of SPOKEN) document.getElementById(id)?.setAttribute("aria-live", "polite");
        for (const list of document.querySelectorAll("[role=listbox]:not([tabindex])")) {
            list.tabIndex = -1;
            list.ariaLabel = document.querySelector(`[aria-controls="${list.id}"]`)?.ariaLabel ?? "Choices";
        }
        for (const icon of document.querySelectorAll("svg:not([aria-hidden], [aria-label])")) icon.ariaHidden = "true";
        for (const button of document.querySelectorAll(".token > .token-remove")) {
            const name = "Remove " + button.parentElement.innerText.trim();
            if (button.ariaLabel !== name) button.ariaLabel = name;
            if (button.title) button.title = "";  // the number again
        }
        for (const handle of document.querySelectorAll("#compare-slider .outer:not([tabindex])")) {
            handle.tabIndex = 0;
            handle.role = "slider";
            handle.ariaLabel = "Where one image ends and the other begins";
            [handle.ariaValueMin, handle.ariaValueMax, handle.ariaValueNow] = ["0", "100", "50"];
        }
        for (const link of document.querySelectorAll("a.download-link:not([tabindex])")) {
            link.tabIndex = -1;
            link.querySelector("button")?.setAttribute("aria-label", "Download");
        }
        for (const image of document.querySelectorAll("#gallery img[title]:not([alt]), #gallery img[title][alt='']")) {
            image.alt = image.title;
        }
        for (const image of document.querySelectorAll("#image img, #compare-sheet img")) {
            const name = image.closest("#image") ? "The generated image" : "The images side by side";
            if (image.alt !== name) image.alt = name;
        }
    };
    window.addEventListener("keydown", event => {
        if (event.key === "Tab" && event.target.getAttribute("role") === "combobox") event.stopPropagation();
    }, true);
    DROPDOWNS
    // The arrow keys move the slider between two images, as the mouse drags it.
    window.addEventListener("keydown", event => {
        const handle = event.target.closest?.("#compare-slider .outer");
        const way = { ArrowLeft: -1, ArrowRight: 1 }[event.key];
        if (!handle || !way) return;
        event.preventDefault();
        const box = handle.getBoundingClientRect(), whole = handle.parentElement.getBoundingClientRect();
        const from = box.x + box.width / 2, to = from + way * whole.width / 20, clientY = box.y + box.height / 2;
        const drag = (target, type, clientX) => target.dispatchEvent(
            new MouseEvent(type, { bubbles: true, cancelable: true, view: window, button: 0, clientX, clientY }));
        drag(handle, "mousedown", from);
        drag(window, "mousemove", to);
        drag(window, "mouseup", to);
        const share = Math.round(100 * (to - whole.x) / whole.width);
        handle.ariaValueNow = `${Math.min(100, Math.max(0, share))}`;
    });
    // The table of schemes is replaced with every answer: what was used in it keeps the focus.
    let used = null, sent = 0;
    const send = (event) => {
        const part = event.target.closest?.("[data-do]");
        const box = document.querySelector("#scheme-do textarea, #scheme-do input");
        if (!part || !box || (event.type === "click") !== (part.tagName === "BUTTON")) return;
        used = part.dataset.do;
        box.value = `${used} ${++sent}`;  // another value each time: a change is what Gradio sees
        box.dispatchEvent(new Event("input", { bubbles: true }));
    };
    const refocus = () => {
        if (used === null || document.activeElement !== document.body) return;
        const name = used.split(" ").slice(0, 2).join(" ");
        const parts = `input[data-do^="${name} "]:checked, [data-do="${used}"]`;
        document.getElementById("schemes")?.querySelector(parts)?.focus({ preventScroll: true });
    };
    // An image of the gallery that is dropped on the start image: the server has it, and is told which it is.
    let dragged = -1, drops = 0;
    document.addEventListener("dragstart", event => {
        const image = event.target.closest?.("#image img, #gallery img, #gallery button");
        const source = image && (image.matches("img") ? image : image.querySelector("img"))?.src;
        const all = [...document.querySelectorAll("#gallery .thumbnail-item img")].map(one => one.src);
        dragged = image ? Math.max(0, all.indexOf(source)) : -1;
    });
    document.addEventListener("dragend", () => { dragged = -1; });
    const saidAtTop = (id, text) => {
        const box = document.getElementById(id) ?? document.body.appendChild(document.createElement("div"));
        if (box.firstChild?.data === text) return box;
        box.id = id;
        box.className = "sq-at-top";
        box.setAttribute("role", "alert");
        box.replaceChildren(text);
        return box;
    };
    const refuseLarge = event => {
        const files = [...event.dataTransfer?.files ?? event.target.files ?? []];
        const most = event.target.closest?.("#lora-file") ? MOST_LORA : LARGEST;
        const large = files.find(file => file.size > most);
        if (!large) return false;
        event.preventDefault();
        event.stopImmediatePropagation();
        const size = `${Math.ceil(most / 2 ** 20)} ${TOO_LARGE}`;
        const box = saidAtTop("file-refused", `✕ ${large.name} is larger than ${size}`);
        const close = box.querySelector("button") ?? box.appendChild(document.createElement("button"));
        close.textContent = "Close";
        close.onclick = () => box.remove();
        return true;
    };
    // A file for the start image goes to the server, which opens it.
    const sendStart = (event, files) => {
        const input = document.querySelector("#start-file input[type=file]");
        if (!input || !files.length) return;
        event.preventDefault();
        event.stopImmediatePropagation();
        const first = new DataTransfer();
        first.items.add(files[0]);
        input.files = first.files;
        input.dispatchEvent(new Event("change", { bubbles: true }));
    };
    window.addEventListener("change", event => {
        if (event.target.type !== "file" || refuseLarge(event) || !event.target.closest("#start")) return;
        sendStart(event, event.target.files);
        event.target.value = "";
    }, true);
    window.addEventListener("drop", event => {
        if (dragged >= 0 || !event.dataTransfer?.files.length || refuseLarge(event)) return;
        if (event.target.closest?.("#start")) sendStart(event, event.dataTransfer.files);
    }, true);
    const onStart = event => dragged >= 0 && event.target.closest?.("#start");
    document.addEventListener("dragover", event => { if (onStart(event)) event.preventDefault(); }, true);
    document.addEventListener("drop", event => {
        const box = document.querySelector("#start-take textarea, #start-take input");
        if (!box || !onStart(event)) return;
        event.preventDefault();
        event.stopPropagation();
        box.value = `${dragged} ${++drops}`;
        box.dispatchEvent(new Event("input", { bubbles: true }));
    }, true);
    document.addEventListener("click", send);
    document.addEventListener("change", send);
    document.addEventListener("focusin", event => { if (!event.target.closest("#schemes")) used = null; });
    let seen = 0;
    window.addEventListener("focus", () => {
        const box = document.querySelector("#page-seen textarea, #page-seen input");
        if (!box) return;
        box.value = `${++seen}`;
        box.dispatchEvent(new Event("input", { bubbles: true }));
    });
    new MutationObserver(refocus).observe(document.body, { childList: true, subtree: true });
    // A part is opened by its class; a progress bar is a new one or, if Gradio changes what is there, has a new label.
    const watched = { childList: true, subtree: true, attributeFilter: ["class", "aria-label"] };
    new MutationObserver(mend).observe(document.body, watched);
    mend();

    let stream = null;
    const ask = window.fetch;
    window.fetch = async (what, how) => {
        const url = what.url ?? String(what);
        if (url.includes("/queue/data?")) stream = what.signal ?? how?.signal;
        const answer = await ask(what, how);
        if (url.includes("/queue/join") && stream && !stream.aborted) {
            await new Promise(done => {
                setTimeout(done, CLOSING);
                stream.addEventListener("abort", done, { once: true });
            });
        }
        return answer;
    };

    let away = null;
    const say = text => { away = saidAtTop("server-away", text); };
    let first = null;
    const look = async () => {
        try {
            const answer = await fetch("gradio_api/app_id", { cache: "no-store" });
            if (!answer.ok) return;
            const id = (await answer.json()).app_id;
            first ??= id;
            if (first === id && away === null) return;
            say(first === id ? BACK : ANEW);
            if (away.querySelector("button")) return;
            const again = away.appendChild(document.createElement("button"));
            again.textContent = "Reload the page";
            again.onclick = () => location.reload();
        } catch {
            say(AWAY);
        }
    };
    setInterval(look, EVERY);
    look();
}
"""
_WORDS = {
    "TOO_LARGE": TOO_LARGE, "LARGEST": LARGEST, "MOST_LORA": MOST_LORA, "SPOKEN": SPOKEN,
    "EVERY": EVERY, "CLOSING": CLOSING, "AWAY": AWAY,
    "BACK": BACK, "ANEW": ANEW,
}  # fmt: skip
for name, value in _WORDS.items():
    SCRIPT = SCRIPT.replace(name, json.dumps(value))
SCRIPT = SCRIPT.replace("DROPDOWNS", DROPDOWNS).replace("NAMES", NAMES)
