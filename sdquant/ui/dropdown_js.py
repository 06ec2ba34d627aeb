"""What the page's script mends of boxes with a list of choices.

Gradio puts what one types behind the choice that the box shows, filters at keys only (not when a text is pasted), and,
where own words are allowed in a list of several, takes half of a name for one.
"""

from __future__ import annotations

DROPDOWNS = """
    // A click into a box selects its text, as Tab does: what one types then takes the place of the choice. At once and
    // not by a timer, which a busy browser runs after the first letter. A part selected by dragging stays.
    const isBox = part => part?.getAttribute?.("role") === "combobox";
    let entered = null;
    window.addEventListener("mousedown", event => {
        entered = event.target === document.activeElement ? null : event.target;
    }, true);
    window.addEventListener("focusin", event => { if (isBox(event.target)) event.target.select(); });
    window.addEventListener("click", event => {
        const box = event.target;
        if (box === entered && isBox(box) && box.selectionStart === box.selectionEnd) box.select();
        entered = null;
    }, true);
    // A text that came without a key, too, is what the list is searched for; not once a key has closed the list, which
    // would open again and stay open.
    let typed = null;
    window.addEventListener("keydown", event => {
        if (["Enter", "Escape", "Tab"].includes(event.key)) typed = null;
    }, true);
    window.addEventListener("input", event => {
        const box = event.target;
        if (!isBox(box)) return;
        const search = () => box.dispatchEvent(new KeyboardEvent("keydown", { key: "Unidentified", bubbles: true }));
        typed = box;
        setTimeout(() => { if (typed === box) search(); });
    });
    // In a list of several, Enter takes the first choice that has the text, as in all other boxes; a word with options
    // has a comma. What is left behind is taken if it is whole.
    const choices = box => [...box.closest(".container, .block")?.querySelectorAll("[role=option]") ?? []];
    const nameOf = choice => choice.getAttribute("aria-label").split(/\\s+[✕?◔]/)[0];
    const clear = box => { box.value = ""; box.dispatchEvent(new Event("input", { bubbles: true })); };
    const unfinished = box => isBox(box) && box.closest(".wrap-inner")?.querySelector(".secondary-wrap")
        && box.closest("#compare-schemes") && box.value && !box.value.includes(",");
    window.addEventListener("keydown", event => {
        const box = event.target;
        if (event.key !== "Enter" || !unfinished(box) || box.getAttribute("aria-activedescendant")) return;
        event.stopImmediatePropagation();
        event.preventDefault();
        const first = choices(box)[0];
        if (first?.ariaSelected === "true") clear(box);  // else the one that is chosen already would be removed
        else first?.dispatchEvent(new MouseEvent("mousedown", { bubbles: true, cancelable: true }));
    }, true);
    window.addEventListener("blur", event => {
        const box = event.target;
        const isTaken = choice => choice.ariaSelected !== "true" && nameOf(choice) === box.value.trim();
        if (unfinished(box) && !choices(box).some(isTaken)) clear(box);
    }, true);
"""
