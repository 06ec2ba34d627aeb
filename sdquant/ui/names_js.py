"""A part of the page's script that names Gradio's parts for screen readers, and tells what is open."""

from __future__ import annotations

# What it mends: the panel of a tab and a group of radio buttons have no name; an accordion does not tell whether it is
# open, and is read out with its arrow; "number input for" is said before what a field is called, though its role is
# said too; several buttons share a name ("Refresh", "Reset to default value", "Click to upload").
NAMES = """
    const called = (part, name) => { if (part && name && part.ariaLabel !== name) part.ariaLabel = name; };
    const blockName = part => part.closest(".block")
        ?.querySelector("[data-testid=block-info], [data-testid=block-label]")?.textContent.trim();
    const namePanels = () => {
        for (const panel of document.querySelectorAll("[role=tabpanel][id]:not([id=''], [aria-labelledby])")) {
            panel.setAttribute("aria-labelledby", panel.id + "-button");
        }
        for (const group of document.querySelectorAll("fieldset:not([aria-label])")) {
            called(group, group.querySelector("[data-testid=block-info]")?.textContent.trim());
        }
        for (const button of document.querySelectorAll("button.label-wrap:not([aria-expanded])")) {
            const tell = () => { button.ariaExpanded = `${button.classList.contains("open")}`; };
            new MutationObserver(tell).observe(button, { attributes: true, attributeFilter: ["class"] });
            button.querySelector(".icon")?.setAttribute("aria-hidden", "true");
            tell();
        }
    };
    const nameFields = () => {
        for (const field of document.querySelectorAll("input[aria-label*=' for ']")) {
            called(field, field.ariaLabel.replace(/^(number input|range slider) for /, ""));
        }
        for (const button of document.querySelectorAll("[aria-label='Reset to default value']")) {
            const name = blockName(button);
            called(button, name && `Reset ${name} to its default`);
        }
        for (const button of document.querySelectorAll("[aria-label='Click to upload or drop files']")) {
            const name = blockName(button);
            called(button, name && `${name}: click to upload, or drop a file`);
        }
        called(document.getElementById("again"), "Refresh the models");
        called(document.getElementById("files-again"), "Refresh the files");
    };
"""
