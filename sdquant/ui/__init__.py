"""`sdquant ui`: a local web app to generate, choose a quantization, inspect and compare.

    model_folders.py      the folders whose models the page may open, and names for their contents
    server/guard.py       refuses requests before any page code runs: foreign origins, unknown hosts, unused paths
    server/basic_auth.py  the password, if the page is served to other machines
    server/serve.py       serves the page: socket, guard, temporary files, shutdown

    app.py                the page: a head and four tabs (header.py, tabs/)
    app_state.py          state shared by all open pages
    model_manager.py      the one model in memory;  background_task.py: runs a job and reports its progress to a page
    plan_preview.py       evaluates a choice of settings with matrix and planner;  support_view.py: shows the result
    widgets.py            a widget for each field of the settings;  validation.py: checks values from the page again
    html_components.py    parts of the page in HTML, text from files escaped;  theme.py: colours and fonts
    accessibility_js.py   a script in the page for the keyboard, screen readers, and a lost connection

Only `app.py` and its imports, and `server/serve.py` when it serves, import gradio; none imports torch at import.
"""
