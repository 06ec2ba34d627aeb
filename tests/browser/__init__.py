"""`sdquant ui` as a person uses it: Debian's chromium, driven by Playwright, on the page of a running server."""
