"""Inside the web UIs people already use: extensions and nodes that hand the work to sdquant."""
