"""reForge 3b56b268 (2026-03-11), ldm_patched/modules/patcher_extension.py: none here."""
