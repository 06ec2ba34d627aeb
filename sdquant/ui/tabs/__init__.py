"""The tabs of the page, a file each: `add(desk, head, ...)` creates one inside an open `gr.Tab`."""
