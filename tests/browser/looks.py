"""What a page looks like to people with poor sight or none: the contrast of its texts, and names of what one uses."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from playwright.sync_api import CDPSession, Page

ROLES = frozenset(
    (
        "button", "checkbox", "combobox", "img", "image", "link", "listbox", "option", "progressbar", "radio",
        "region", "searchbox", "slider", "spinbutton", "switch", "tab", "tabpanel", "textbox",
    )
)  # fmt: skip

# Each text that one sees, with the contrast of its colour to what is behind it (WCAG 2.2, 1.4.3): colours are read by
# drawing them, and what lets through is laid over what is below. Disabled parts are left out, as there.
CONTRAST = """() => {
    const canvas = document.createElement("canvas").getContext("2d", { willReadFrequently: true });
    const known = new Map();
    const rgba = text => {
        if (!known.has(text)) {
            canvas.clearRect(0, 0, 1, 1);
            canvas.fillStyle = text;
            canvas.fillRect(0, 0, 1, 1);
            const [r, g, b, a] = canvas.getImageData(0, 0, 1, 1).data;
            known.set(text, [r, g, b, a / 255]);
        }
        return known.get(text);
    };
    const over = ([r, g, b, a], below) => [r, g, b].map((part, n) => part * a + below[n] * (1 - a));
    const light = rgb => rgb.map(part => part / 255)
        .map(part => part <= 0.04045 ? part / 12.92 : ((part + 0.055) / 1.055) ** 2.4)
        .reduce((sum, part, n) => sum + part * [0.2126, 0.7152, 0.0722][n], 0);
    const behind = element => {
        const layers = [];
        for (let one = element; one; one = one.parentElement) {
            const style = getComputedStyle(one);
            if (style.backgroundImage.includes("gradient") || style.backgroundImage.includes("url(")) return null;
            layers.push(rgba(style.backgroundColor));
            if (layers.at(-1)[3] === 1) break;
        }
        return layers.reverse().reduce((below, layer) => over(layer, below), [255, 255, 255]);
    };
    const low = [], texts = document.createTreeWalker(document.body, NodeFilter.SHOW_TEXT);
    while (texts.nextNode()) {
        const text = texts.currentNode.data.trim(), element = texts.currentNode.parentElement;
        const isIcon = !/[\\p{L}\\p{N}★]/u.test(text);  // of which 3 is enough
        if (!text || element.closest("script, style, [aria-hidden=true], :disabled, [aria-disabled=true]")) continue;
        if (element.closest("tr.sq-refused label")) continue;  // of a radio button that is disabled
        if (element.closest("#start .empty")) continue;  // over white paper that is drawn on a canvas
        if (!element.checkVisibility({ checkOpacity: true, checkVisibilityCSS: true })) continue;
        const box = element.getBoundingClientRect(), style = getComputedStyle(element);
        if (box.width < 2 || box.height < 2) continue;
        const back = behind(element);
        if (back === null) continue;
        const inSvg = element instanceof SVGElement;
        const front = light(over(rgba(inSvg ? style.fill : style.color), back)), rest = light(back);
        const ratio = (Math.max(front, rest) + 0.05) / (Math.min(front, rest) + 0.05);
        const size = parseFloat(style.fontSize), isLarge = size >= 24 || (size >= 18.66 && style.fontWeight >= 700);
        if (ratio < (isLarge || isIcon ? 3 : 4.5)) low.push(`${ratio.toFixed(2)} ${text.slice(0, 50)}`);
    }
    return [...new Set(low)];
}"""


def faint(page: Page) -> list[str]:
    """The texts whose contrast is too low, each with its ratio."""
    found: list[str] = page.evaluate(CONTRAST)
    return found


def nameless(page: Page) -> list[str]:
    """The parts that one uses, sees or is told of which Chromium's accessibility tree has no name for."""
    session = page.context.new_cdp_session(page)
    found = []
    for node in _heard(session):
        role = _value(node, "role")
        if role not in (*ROLES, "group") or _value(node, "name"):
            continue
        described = session.send("DOM.describeNode", {"backendNodeId": node["backendDOMNodeId"]})["node"]
        pairs = iter(described.get("attributes", []))
        words = " ".join(f"{name}={value[:60]}" for name, value in zip(pairs, pairs, strict=True))
        if role in ROLES or described["localName"] == "fieldset":  # of radio buttons; <details> are groups, too
            found.append(f"{role}: <{described['localName']} {words}>")
    session.detach()
    return found


def misleading(page: Page) -> list[str]:
    """What a screen reader says twice, or of another part: descriptions, roles in names, arrows, buttons alike."""
    session = page.context.new_cdp_session(page)
    nodes = _heard(session)
    session.detach()
    found = []
    for node in nodes:
        role, name, more = (_value(node, key) for key in ("role", "name", "description"))
        twice = bool(name) and name == more
        if twice or (
            role in ROLES and re.search(r"[▼▲◀]|^(number input|range slider) |^Remove \d+$", f"{name}\n{more}")
        ):
            found.append(f"{role}: {name} ({more})")
    buttons = [_value(node, "name") for node in nodes if _value(node, "role") == "button"]
    return found + [f"button, twice: {name}" for name in set(buttons) if buttons.count(name) > 1]


def _heard(session: CDPSession) -> list[dict[str, Any]]:
    nodes: list[dict[str, Any]] = session.send("Accessibility.getFullAXTree")["nodes"]
    return [node for node in nodes if not node.get("ignored")]


def _value(node: dict[str, Any], key: str) -> str:
    return str(node.get(key, {}).get("value", "")).strip()
