"""reForge's start, of which only the name matters here."""
