"""`sdquant ui`: a local web app to generate, choose a quantization, inspect and compare.

    roots.py    the folders whose models the page may open; names for what is in them
    guard.py    what is refused before any page code runs: foreign origins, unknown hosts, paths the page does not need
    signin.py   the password, where the page is served to other machines
    server.py   the page served: socket, guard, temporary files, a clean end
    html.py     text from files, made safe to stand in a page

The page itself is in `app.py` and the modules that it names. Only `app.py` and what it imports, and `server.py` when it
serves, import gradio; nothing here imports torch at import.
"""
