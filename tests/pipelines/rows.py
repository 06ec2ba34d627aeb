"""What the annotations of a pipeline's constructor leave open: rows, each with its reason where it is not plain."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any


@dataclass(frozen=True)
class Given:
    """A component: its class, and what its config has other than the class's row."""

    kind: str
    config: dict[str, Any] = field(default_factory=dict)


# Where a constructor names a base class of schedulers.
SCHEDULERS = {"SchedulerMixin": "FlowMatchEulerDiscreteScheduler"}

# Components whose classes need torchvision, which the pinned environment has not: the processors of vision-language
# models make processors of videos. The pipelines are saved without.
NO_TORCHVISION = None

_AMUSED = {"scheduler": Given("AmusedScheduler", {"mask_token_id": 32})}
_GEMMA2 = {"text_encoder": Given("Gemma2Model")}
_QWEN3 = {"text_encoder": Given("Qwen3Model")}
_PROCESSOR = {"processor": NO_TORCHVISION}
_TOKENIZER = {"tokenizer": NO_TORCHVISION}
_TEXT_PROCESSOR = {"text_processor": NO_TORCHVISION}
_GUIDER = {"guider": Given("ClassifierFreeGuidance")}
_WAN = {"vae": Given("AutoencoderKLWan")}
# The classes' own config does not fit them in transformers 5: transformers cannot read what it writes.
_T5GEMMA = {"text_encoder": None}
_PAINTED = {"image_encoder": None}
_IF = {"safety_checker": None}
_XS = {"unet": Given("UNet2DConditionModel", {"layers_per_block": 2})}
_RFD4 = Given("RFD4ProteinaScheduler", {"schedule_mode": "log", "noise_mode": "1/t", "tsr_k": 1.0, "tsr_sigma": 0.1})

# pipeline -> component -> what it is.
COMPONENTS: dict[str, dict[str, Any]] = {
    "AceStepPipeline": _QWEN3,
    "AmusedImg2ImgPipeline": _AMUSED,
    "AmusedInpaintPipeline": _AMUSED,
    "AmusedPipeline": _AMUSED,
    "BriaFibo2Pipeline": _PROCESSOR,
    "DiffusionGemmaPipeline": {"model": Given("DiffusionGemmaForBlockDiffusion"), "processor": Given("GemmaTokenizer")},
    "DreamLiteMobilePipeline": _PROCESSOR,
    "DreamLitePipeline": _PROCESSOR,
    "Flux2Pipeline": _TOKENIZER,
    "GlmImagePipeline": _PROCESSOR,
    "IFImg2ImgPipeline": _IF,
    "IFImg2ImgSuperResolutionPipeline": _IF,
    "IFInpaintingPipeline": _IF,
    "IFInpaintingSuperResolutionPipeline": _IF,
    "IFPipeline": _IF,
    "IFSuperResolutionPipeline": _IF,
    "Ideogram4Pipeline": {"text_encoder": Given("Qwen3VLModel")},
    "JoyImageEditPipeline": _PROCESSOR,
    "JoyImageEditPlusPipeline": _PROCESSOR,
    "Kandinsky5I2IPipeline": _TOKENIZER,
    "Kandinsky5I2VPipeline": _TOKENIZER,
    "Kandinsky5T2IPipeline": _TOKENIZER,
    "Kandinsky5T2VPipeline": _TOKENIZER,
    "Kandinsky6TI2VAPipeline": _TOKENIZER,
    "LDMTextToImagePipeline": {"bert": Given("LDMBertModel")},
    "LLaDA2Pipeline": {
        "model": Given("Qwen3ForCausalLM"),
        "tokenizer": Given("Qwen2Tokenizer"),
    },  # its own is on the hub
    "LTX2VideoDiffusionDecodePipeline": {"scheduler": Given("FlowMatchEulerDiscreteScheduler")},
    "LongCatImageEditPipeline": {"text_processor": Given("CLIPProcessor")},  # it looks for an image processor in it
    "LongCatImagePipeline": _TEXT_PROCESSOR,
    "Lumina2Pipeline": _GEMMA2,
    "LuminaPipeline": {"text_encoder": Given("GemmaModel")},
    "MotifVideoImage2VideoPipeline": _GUIDER,
    "MotifVideoPipeline": _GUIDER,
    "NucleusMoEImagePipeline": _PROCESSOR,
    "PRXPipeline": _T5GEMMA,
    "PRXPixelPipeline": _QWEN3,
    "PaintByExamplePipeline": _PAINTED,
    "QwenImageEditInpaintPipeline": _PROCESSOR,
    "QwenImageEditPipeline": _PROCESSOR,
    "QwenImageEditPlusPipeline": _PROCESSOR,
    "QwenImageLayeredPipeline": _PROCESSOR,
    "RFD4ProteinaPipeline": {"bb_ca_scheduler": _RFD4, "local_latents_scheduler": _RFD4},
    "SanaControlNetPipeline": _GEMMA2,
    "SanaImageToVideoPipeline": {**_GEMMA2, **_WAN},
    "SanaPAGPipeline": _GEMMA2,
    "SanaPipeline": _GEMMA2,
    "SanaSprintImg2ImgPipeline": _GEMMA2,
    "SanaSprintPipeline": _GEMMA2,
    "SanaVideoPipeline": {**_GEMMA2, **_WAN},
    "SanaWMPipeline": _GEMMA2,
    "StableDiffusionControlNetXSPipeline": _XS,
    "StableDiffusionUpscalePipeline": {"safety_checker": None, "watermarker": None},
    "StableDiffusionXLControlNetXSPipeline": _XS,
    "VQDiffusionPipeline": {"scheduler": Given("VQDiffusionScheduler", {"num_vec_classes": 16})},
    "ZImageControlNetInpaintPipeline": _QWEN3,
    "ZImageControlNetPipeline": _QWEN3,
    "ZImageImg2ImgPipeline": _QWEN3,
    "ZImageInpaintPipeline": _QWEN3,
    "ZImageOmniPipeline": _QWEN3,
    "ZImagePipeline": _QWEN3,
}

# diffusers saves a class of these under a module that does not have it, and cannot load the folder. sdquant refuses it.
LOST = (
    "AltDiffusionImg2ImgPipeline",
    "AltDiffusionPipeline",
    "BlipDiffusionControlNetPipeline",
    "BlipDiffusionPipeline",
    "DiffusionGemmaPipeline",
    "KarrasVePipeline",
    "StableCascadeCombinedPipeline",
    "StableCascadeDecoderPipeline",
    "StableDiffusionPipelineSafe",
    "UnCLIPImageVariationPipeline",
    "UnCLIPPipeline",
    "VQDiffusionPipeline",
    "VersatileDiffusionDualGuidedPipeline",
    "VersatileDiffusionTextToImagePipeline",
    "WuerstchenCombinedPipeline",
    "WuerstchenDecoderPipeline",
    "WuerstchenPriorPipeline",
)

# Those of a VAE and what works on its latents, none of which is quantized unless `components=` names it.
FLOATS = ("LTX2LatentUpsamplePipeline", "LTX2VideoDiffusionDecodePipeline", "LTXLatentUpsamplePipeline")

# Pipelines that cannot be made here, or that diffusers cannot load again itself, by what they need: mostly a package
# that the pinned environment has not.
MISSING = {
    "AudioDiffusionPipeline": "librosa",
    "ConsisIDPipeline": "opencv",
    "Cosmos2TextToImagePipeline": "cosmos_guardrail",
    "Cosmos2VideoToWorldPipeline": "cosmos_guardrail",
    "Cosmos2_5_PredictBasePipeline": "cosmos_guardrail",
    "Cosmos2_5_TransferPipeline": "cosmos_guardrail",
    "Cosmos3OmniPipeline": "cosmos_guardrail",
    "CosmosTextToWorldPipeline": "cosmos_guardrail",
    "CosmosVideoToWorldPipeline": "cosmos_guardrail",
    "KolorsImg2ImgPipeline": "sentencepiece",
    "KolorsPAGPipeline": "sentencepiece",
    "KolorsPipeline": "sentencepiece",
    "LLaDA2Pipeline": "a tokenizer that diffusers loads: it hands on the names of library and class instead",
    "OmniGenPipeline": "torchvision",
    "OnnxStableDiffusionImg2ImgPipeline": "onnxruntime",
    "OnnxStableDiffusionInpaintPipeline": "onnxruntime",
    "OnnxStableDiffusionInpaintPipelineLegacy": "onnxruntime",
    "OnnxStableDiffusionPipeline": "onnxruntime",
    "OnnxStableDiffusionUpscalePipeline": "onnxruntime",
    "QwenImage21Pipeline": "torchvision",
    "SpectrogramDiffusionPipeline": "note_seq",
    "StableDiffusionOnnxPipeline": "onnxruntime",
}

# Those that CI runs, each with one of the schemes; all have a slow test with both.
FAST = {
    "StableDiffusionPipeline": "nf4",
    "StableDiffusionXLPipeline": "int8",
    "StableDiffusion3Pipeline": "nf4",
    "FluxPipeline": "int8",
    "Flux2Pipeline": "nf4",
    "QwenImagePipeline": "int8",
    "ZImagePipeline": "nf4",
    "WanPipeline": "int8",
    "HunyuanVideoPipeline": "nf4",
    "Kandinsky5T2VPipeline": "int8",
    "PixArtSigmaPipeline": "nf4",
    "SanaPipeline": "int8",
}
