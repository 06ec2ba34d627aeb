"""What Gradio's widgets lack for the keyboard and for screen readers, put in by a script in the page."""

from __future__ import annotations

import json

# Boxes whose new content is to be read out: outcomes and verdicts. Their progress bars say `aria-live="off"`.
SPOKEN = ("status", "applied", "verdict", "found", "compare-status", "in-memory")

# What it mends: a list of choices opens again when Tab leaves it, and stays open; one that scrolls is a tab stop of its
# own in Chromium, and gone as soon as it has the focus; the button on a chosen scheme is called "Remove 3"; images have
# no name, and their download is a button within a link, two tab stops.
SCRIPT = (
    """
() => {
    const mend = () => {
        for (const id of SPOKEN) document.getElementById(id)?.setAttribute("aria-live", "polite");
        for (const list of document.querySelectorAll("[role=listbox]:not([tabindex])")) list.tabIndex = -1;
        for (const button of document.querySelectorAll(".token > .token-remove")) {
            const name = "Remove " + button.parentElement.innerText.trim();
            if (button.getAttribute("aria-label") !== name) button.setAttribute("aria-label", name);
        }
        for (const link of document.querySelectorAll("a.download-link:not([tabindex])")) {
            link.tabIndex = -1;
            link.querySelector("button")?.setAttribute("aria-label", "Download");
        }
        for (const image of document.querySelectorAll("#image img, #compare-sheet img")) {
            const name = image.closest("#image") ? "The drawn image" : "The images side by side";
            if (image.alt !== name) image.alt = name;
        }
    };
    window.addEventListener("keydown", event => {
        if (event.key === "Tab" && event.target.getAttribute("role") === "combobox") event.stopPropagation();
    }, true);
    new MutationObserver(mend).observe(document.body, { childList: true, subtree: true });
    mend();
}
"""
).replace("SPOKEN", json.dumps(SPOKEN))
