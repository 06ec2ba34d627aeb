"""SD.Next 058a7f0cf, modules/extras.py: the function behind the tab for merging, which is called by names alone."""

from modules import sd_models


def run_modelmerger(id_task, **kwargs):
    return [
        None,
        None,
        None,
        None,
        f"Model saved to {sd_models.checkpoints_list[kwargs['primary_model_name']].filename}",
    ]
