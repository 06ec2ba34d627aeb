"""A1111's start, of which only the name matters here."""
