"""What several files of tests here use."""

from .card_launches import launched as launched
