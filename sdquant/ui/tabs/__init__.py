"""The tabs of the page, a file each: `add(desk, head, ...)` makes one inside an open `gr.Tab`."""
