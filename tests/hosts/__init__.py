"""sdquant in the web UIs that people use: each against a small stand-in that has its real signatures."""
