"""AUTOMATIC1111 1.10.1 (82a973c0), modules/extras.py: the function behind the tab for merging, as Forge (dfdcbab6), Neo
(5692d2d) and reForge (3b56b268) have it. It reads the files again, and says in its last result what it did.
"""

import os

from modules import sd_models


def run_modelmerger(id_task, primary_model_name, secondary_model_name, tertiary_model_name, interp_method, *settings):
    tables = [getattr(sd_models, name, {}) for name in ("checkpoint_aliases", "checkpoints_list")]
    first = next(table[primary_model_name] for table in tables if primary_model_name in table)
    return [None, None, None, None, f"Checkpoint saved to {os.path.dirname(first.filename)}"]
