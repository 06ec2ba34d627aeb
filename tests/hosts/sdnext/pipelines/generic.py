"""SD.Next 058a7f0cf, pipelines/generic_text_encoder.py: it takes a text encoder from a repository of its own, by class.

`SHARED` stands for that repository; without "te_shared_te" the subfolder `text_encoder` is loaded.
"""

from modules import model_quant, shared

SHARED = {}


def load_text_encoder(
    repo_id, cls_name, load_config=None, subfolder="text_encoder", allow_quant=True, allow_shared=True, **kwargs
):
    allow_shared = allow_shared and shared.opts.te_shared_te
    load_args, quant_args = model_quant.get_dit_args(load_config or {}, module="TE", allow_quant=allow_quant)
    load_args["dtype"] = load_args.pop("torch_dtype")
    if allow_shared:
        return cls_name.from_pretrained(SHARED[cls_name.__name__], **load_args, **quant_args)
    return cls_name.from_pretrained(repo_id, subfolder=subfolder, **load_args, **quant_args, **kwargs)
