"""sdquant in this web UI. All of it is in the package: this registers it."""

from sdquant.hosts import extension

extension.start()
