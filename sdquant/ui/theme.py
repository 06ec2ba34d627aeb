"""The look of the page: gradio's own theme in our colours, and the style of its parts, in light and dark."""

from __future__ import annotations

from typing import Any

import gradio as gr

from . import thumbnails
from .accessibility_js import SCRIPT

# Fonts of the system, so that the page asks no other host for any.
_SANS = ("system-ui", "-apple-system", "Segoe UI", "Roboto", "Helvetica Neue", "sans-serif")
_MONO = ("ui-monospace", "SFMono-Regular", "Menlo", "Consolas", "monospace")


def look() -> dict[str, Any]:
    """Return theme, CSS and script, which Gradio takes in addition to the page."""
    return {"theme": theme(), "css": CSS + thumbnails.thumbnail_css(), "js": SCRIPT}


def theme() -> Any:
    """Return Gradio's Base theme in indigo and slate, with system fonts."""
    return gr.themes.Base(
        primary_hue="indigo", secondary_hue="indigo", neutral_hue="slate", radius_size="md",
        font=_SANS, font_mono=_MONO,
    ).set(
        block_border_width="1px",
        block_label_text_weight="600",
        block_title_text_weight="600",
        button_primary_background_fill="*primary_600",
        button_primary_background_fill_hover="*primary_700",
        button_primary_text_color="white",
        body_text_color_subdued="*neutral_600",
        body_text_color_subdued_dark="*neutral_400",
        block_info_text_color="*neutral_600",
        block_info_text_color_dark="*neutral_400",
        body_background_fill="*neutral_50",
        body_background_fill_dark="*neutral_950",
    )  # fmt: skip


CSS = """
html { scrollbar-gutter: stable; }
html:has(body.dark) { color-scheme: dark; background: #0a0f1e; }
.gradio-container { width: 100% !important; max-width: min(1180px, 100vw) !important; 
  margin: 0 auto !important; overflow-x: clip; }
.gradio-container .main { padding-inline: clamp(12px, 100vw - 420px, 32px) !important; }
.html-container { padding: 0 !important; }
.gradio-container :is(a, input, textarea, button, summary, [tabindex]):focus-visible {
  outline: 2px solid var(--color-accent) !important; outline-offset: 1px; }
.sq-at-top { position: fixed; z-index: 9999; inset: 12px 12px auto; margin: 0 auto; max-width: 640px;
  padding: 12px 16px; border: 1px solid #dc2626; border-left-width: 4px; border-radius: var(--radius-md);
  background: var(--body-background-fill); color: var(--body-text-color); box-shadow: 0 4px 16px #0004; }
.sq-at-top button { margin-left: 12px; text-decoration: underline; font-weight: 600; }
.sq-head { align-items: end; }
.sq-head > :has(.sq-brand) { flex: 0 0 clamp(160px, 22vw, 250px) !important; }
#base .wrap-inner { flex-wrap: nowrap; overflow: auto hidden; scrollbar-width: thin; height: 36px; padding-block: 0; }
#base .token { flex: none; white-space: nowrap; padding-block: 3px; }
#base .secondary-wrap { min-width: 96px; }
#base .wrap-inner:has(input:disabled) { opacity: 0.5; }
.sq-brand { display: flex; flex-direction: column; line-height: 1.25; padding: 4px 0; }
.sq-brand b { font-size: 1.5rem; letter-spacing: -0.02em; }
.sq-brand span, .sq-note, .sq-lead { color: var(--body-text-color-subdued); font-size: 0.875rem; }
.sq-note { margin: 6px 2px; }
.sq-chip { font-size: 0.875rem; padding: 6px 12px; border: 1px solid var(--border-color-primary);
  border-radius: 999px; display: inline-block; background: var(--background-fill-secondary); }
.sq-card { --tone: var(--border-color-accent); border: 1px solid var(--border-color-primary);
  border-left: 4px solid var(--tone); border-radius: var(--radius-md); padding: 10px 14px; margin: 2px 0 10px;
  background: var(--block-background-fill); overflow-wrap: anywhere; }
.sq-card p { margin: 4px 0 0; }
.sq-title { font-weight: 600; }
.sq-ok, .sq-works { --tone: #16a34a; }
.sq-slow, .sq-untested { --tone: #d97706; }
.sq-breaks { --tone: #dc2626; }
.sq-info { --tone: #6366f1; }
.sq-track { position: relative; height: 10px; border-radius: 5px; background: var(--background-fill-secondary);
  border: 1px solid var(--border-color-primary); overflow: hidden; }
.sq-fill, .sq-ghost { position: absolute; inset: 0 auto 0 0; min-width: 2px; }
.sq-fill { background: #6366f1; transition: width 0.2s; }
.sq-ghost { background: repeating-linear-gradient(45deg, #6366f155 0 4px, transparent 4px 8px); }
.sq-progress, .sq-bar { margin: 4px 0 10px; }
.sq-bar-head { display: flex; justify-content: space-between; gap: 12px; font-size: 0.875rem; margin-bottom: 3px; }
.sq-label { font-size: 0.875rem; margin-bottom: 4px; }
.sq-facts { display: grid; grid-template-columns: max-content 1fr; gap: 4px 14px; margin: 8px 0; font-size: 0.9rem; }
.sq-facts dt { color: var(--body-text-color-subdued); }
.sq-facts dd { margin: 0; overflow-wrap: anywhere; }
.sq-scroll { overflow-x: auto; width: 0; min-width: 100%; }
.sq-table { border: none !important; border-collapse: collapse; width: 100%; font-size: 0.875rem; }
.sq-table th, .sq-table td { text-align: left; padding: 5px 10px; border-bottom: 1px solid var(--border-color-primary);
  white-space: nowrap; border-left: none !important; border-right: none !important; border-top: none !important; }
.sq-table tbody th { font-weight: 400; }
.sq-image img { width: 100% !important; height: 100% !important; object-fit: contain !important;
  image-rendering: pixelated; }
#start .empty, #start .empty * { color: #475569 !important; }
#gallery .grid-wrap { padding-top: 36px; }
#gallery .grid-container { grid-template: none / repeat(auto-fill, minmax(72px, 1fr)) !important;
  grid-auto-rows: auto !important; }
#gallery .thumbnail-item .caption-label { display: none; }
:is(#start-said, #lora-said, #preset-said, #checked):not(:has(.sq-card, .sq-note)) { display: none; }
.sq-beside { align-self: flex-start; position: sticky; top: 12px; }
.sq-unseen, .form:not(:has(> :not(.sq-unseen))) { display: none !important; }
.sq-table :is(thead, tbody, tr) { border: none !important; }
.sq-schemes { overflow: auto; max-height: 32rem; width: 0; min-width: 100%; position: relative;
  border: 1px solid var(--border-color-primary); border-radius: var(--radius-md);
  background: var(--block-background-fill); }
.sq-schemes table { border-collapse: collapse; width: 100%; font-size: 0.875rem; margin: 0; }
.sq-schemes :is(th, td) { text-align: left; vertical-align: top; padding: 6px 10px; font-weight: 400; 
  border: none !important; border-bottom: 1px solid var(--border-color-primary) !important; white-space: nowrap; }
.sq-schemes :is(table, tr) { border: none !important; }
.sq-schemes thead th { position: sticky; top: 0; z-index: 2; background: var(--background-fill-secondary); }
.sq-schemes :is(thead th, .sq-group th), .sq-schemes thead button { font-weight: 600; }
.sq-schemes thead button { all: unset; cursor: pointer; font-weight: 600; }
.sq-schemes input[type=radio] { appearance: auto; accent-color: var(--color-accent); width: 1rem; height: 1rem;
  margin: 0 4px 0 0; vertical-align: -2px; background: none; border: revert; box-shadow: none; }
.sq-schemes thead button:hover { text-decoration: underline; }
.sq-schemes .sq-group th { background: var(--background-fill-primary); }
.sq-schemes tbody th[scope=row] { white-space: normal; width: 50%; min-width: 20rem; }
.sq-schemes label { cursor: pointer; }
.sq-schemes label > .sq-what, .sq-schemes .sq-why { margin-left: 1.5rem; }
.sq-schemes .sq-group .sq-why { margin-left: 12px; }
.sq-what { display: block; color: var(--body-text-color-subdued); font-size: 0.8125rem; white-space: normal; }
.sq-compared { box-shadow: 0 0 0 2px var(--color-accent); }
.sq-refused :is(b, td, label) { color: var(--body-text-color-subdued); cursor: default; }
.sq-chosen { background: color-mix(in srgb, var(--color-accent) 14%, transparent); }
.sq-badge { margin-left: 8px; padding: 1px 8px; border-radius: 999px; font-size: 0.75rem; white-space: nowrap;
  border: 1px solid var(--color-accent); color: var(--body-text-color); }
.sq-stars { letter-spacing: 1px; color: #92400e; }
.dark .sq-stars { color: #fbbf24; }
.sq-fit::before { content: ""; display: inline-block; width: 8px; height: 8px; border-radius: 50%; margin-right: 6px;
  background: var(--tone); }
.sq-why { font-size: 0.8125rem; font-weight: 400; white-space: normal; }
.sq-why summary { cursor: pointer; color: var(--body-text-color-subdued); text-decoration: underline;
  width: max-content; }
.sq-group .sq-why { display: inline-block; margin-left: 12px; max-width: 44rem; vertical-align: top; }
.sq-curve { width: 100%; min-width: 560px; max-width: 720px; font-size: 12px; overflow: visible; }
.sq-curve text { fill: var(--body-text-color-subdued); }
.sq-curve .sq-name { fill: var(--body-text-color); font-weight: 600; }
.sq-curve .sq-grid { stroke: var(--border-color-primary); }
.sq-curve .sq-line { fill: none; stroke: #6366f1; stroke-width: 2; }
.sq-curve circle { fill: #6366f1; }
.sq-curve .sq-picked { fill: #dc2626; }
.sq-parts { display: flex; height: 14px; }
.sq-part, .sq-bits::before { background: var(--tone); }
.sq-bits::before { content: ""; display: inline-block; width: 12px; height: 12px; margin: 0 6px 0 12px; }
.sq-over { background: #dc2626; }
@media (max-width: 640px) {
  .tab-container button { padding-inline: 4px !important; font-size: 0.875rem !important; }
  .sq-studio, .sq-picker { flex-direction: column; }
  .sq-picker > .form { flex-direction: column; width: 100%; }
  .sq-table { font-size: 0.75rem; }
  .sq-table :is(th, td) { padding: 4px; }
  .sq-table thead th { white-space: normal; }
  .sq-studio > .column { display: contents; }
  .sq-studio .sq-later { order: 1; }
  .sq-studio #facts { order: 2; }
  #start [data-testid="block-label"] { display: none; }
  .sq-schemes b { white-space: nowrap; }
  .sq-facts { grid-template-columns: 1fr; gap: 0; }
  .sq-facts dd { margin-bottom: 6px; }
  .sq-beside { position: static; align-self: stretch; }
  .sq-schemes { max-height: 28rem; }
  .sq-schemes thead { position: sticky; top: 0; z-index: 2; display: block; background: var(--block-background-fill); }
  .sq-schemes :is(table, tbody, tr, tbody th) { display: block; width: auto !important;
    white-space: normal !important; }
  .sq-schemes tbody :is(th, td) { border: none !important; }
  .sq-schemes thead tr { display: flex; flex-wrap: wrap; }
  .sq-schemes thead th { background: none; }
  .sq-schemes thead th:nth-child(3) { display: none; }
  .sq-schemes tbody tr { border-bottom: 1px solid var(--border-color-primary) !important; padding: 4px 0; }
  .sq-schemes tbody th[scope=row] { min-width: 0; width: auto; }
  .sq-schemes tbody td { display: inline-block !important; padding: 0 10px 4px; }
  .sq-schemes tbody th { padding: 4px 10px; }
  .sq-schemes tbody td:empty { display: none; }
  .sq-head > :is(:first-child, :has(.sq-brand)) { flex: 1 0 100% !important; }
  .sq-head > .form { flex-direction: column; }
  #in-memory { min-height: 53px; }
  .sq-bar-head span:last-child { white-space: nowrap; }
}
@media (prefers-reduced-motion: reduce) { .sq-fill { transition: none; } }
"""
