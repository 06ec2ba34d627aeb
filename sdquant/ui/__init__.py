"""`sdquant ui`: a local web app to generate, choose a quantization, inspect and compare.

    roots.py    the folders whose models the page may open; names for what is in them
    guard.py    what is refused before any page code runs: foreign origins, unknown hosts, paths the page does not need
    signin.py   the password, where the page is served to other machines
    server.py   the page served: socket, guard, temporary files, a clean end
    html.py     text from files, made safe to stand in a page

    app.py      the page: a head and four tabs (head.py, tabs/)
    desk.py     what all open pages share;  engine.py: the one model in memory;  following.py: a job, seen from a page
    review.py   what the matrix and the planner say of a choice of settings
    widgets.py  a widget for each field of the settings;  checks.py: values from the page, checked again
    pieces.py, verdict.py    pieces of the page in HTML;  look.py: colours and fonts
    access.py   a script in the page: keyboard, screen readers, a server that went away

Only `app.py` and what it imports, and `server.py` when it serves, import gradio; nothing here imports torch at import.
"""
