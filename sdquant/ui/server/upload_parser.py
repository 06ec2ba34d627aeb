"""Has Gradio take an upload as a whole or not at all.

Gradio's parser writes files to disk while they arrive, and keeps all other parts of a form in memory, up to the length
of the body. Of a sender that goes away, or a disk that is full, it leaves the beginning of a file behind. The page
sends nothing but files.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

MOST_FILES = 16  # in one upload


@contextlib.contextmanager
def whole_uploads() -> Iterator[None]:
    """Have Gradio's uploads parsed by a stricter parser within the block."""
    from gradio import route_utils

    class Parser(route_utils.GradioMultiPartParser):  # type: ignore[misc]
        """Parser that refuses what is no file, and removes the files of an upload that does not end."""

        def __init__(self, *args: Any, **more: Any) -> None:
            super().__init__(*args, **{**more, "max_files": MOST_FILES, "max_fields": 0})

        async def parse(self) -> Any:
            try:
                return await super().parse()
            except BaseException:
                for file in self._files_to_close_on_error:
                    file.close()
                    Path(file.name).unlink(missing_ok=True)
                raise

    before = route_utils.GradioMultiPartParser
    route_utils.GradioMultiPartParser = Parser
    try:
        yield
    finally:
        route_utils.GradioMultiPartParser = before
