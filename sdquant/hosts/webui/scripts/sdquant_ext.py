"""sdquant in this web UI. All of it is in the package: this registers it."""

import sys
from pathlib import Path

bundle = Path(__file__).resolve().parent.parent / "bundle"  # of `install-extension --bundle`
if bundle.is_dir():
    sys.path[:] = [str(bundle / "code"), *(path for path in sys.path if not path.startswith(str(bundle)))]
    sys.path.append(str(bundle / "packages"))

from sdquant.hosts import extension  # noqa: E402

extension.start()
