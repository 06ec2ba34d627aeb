"""Train glyphs-flux from nothing, in an hour on one core: `python -m tools.glyphs_model.train`.

Two trainings, each with a fixed seed, a progress bar and a checkpoint it resumes from:

1. `vae`: the autoencoder (mean squared error and a little KL).
2. `flux`: the transformer and both text encoders together, by flow matching. The encoders have to learn as well: which
   of two colours is the glyph's is in the order of the words, and a Flux transformer gives text tokens no places.

Most steps see 8 text tokens and a few up to 512, because the pipeline pads to 512 without a mask. The shipped weights
took 2 and 35 minutes of one core; their first 1500 steps ran with the rates of a training of 3200.
"""

from __future__ import annotations

import argparse
import copy
import os
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

from tools.digits_models.train import Training, TrainingRecipe, write
from tools.glyphs_model import FOLDER, glyphs, nets

if TYPE_CHECKING:
    import torch
    from torch import Tensor

VAE = TrainingRecipe(steps=2000, batch=16, rate=3e-3, decay=1e-4, seed=21, warmup=30)
FLUX = TrainingRecipe(steps=4400, batch=64, rate=1e-3, decay=1e-2, seed=22, betas=(0.9, 0.99), warmup=100)
LENGTHS = (8,) * 24 + (24, 24, 24, 64, 64, 192, 192, 512)  # of text tokens, drawn from evenly
COUNTS = {24: 40, 64: 20, 192: 8, 512: 4}  # batches of about the same number of tokens
DRAWN = 32  # masks of each shape
# Mean and spread of the logit of time, before and from this step. Which character it is shows in what is left of a
# latent up to times of 0.7: only with more noise is there anything to learn from its name.
MORE_NOISE = 1500
TIMES = ((0.0, 1.0), (1.3, 1.2))
LATENTS = 24000  # images whose latents the transformer is trained on


class Images:
    """Batches of painted glyphs, from masks drawn once."""

    def __init__(self, workdir: Path) -> None:
        import numpy as np
        import torch

        kept = workdir / "masks.npy"
        self.shapes = glyphs.shapes()
        if not kept.exists():
            drawn = (255 * glyphs.masks(self.shapes * DRAWN, glyphs.MODEL_SEED)).round().astype(np.uint8)
            np.save(kept, drawn)
        self.masks = torch.from_numpy(np.load(kept))
        self.table = torch.tensor(list(glyphs.COLOURS.values())) / 255

    def draw(self, count: int, generator: torch.Generator) -> tuple[Tensor, list[glyphs.Glyph]]:
        """Draw `count` images [n, 3, 16, 16] in -1..1, and what they show."""
        from dataclasses import replace

        import torch

        names = list(glyphs.COLOURS)
        rows = torch.randint(len(self.masks), (count,), generator=generator)
        fronts = torch.randint(len(names), (count,), generator=generator)
        backs = (fronts + torch.randint(1, len(names), (count,), generator=generator)) % len(names)
        waver = 0.08 * torch.rand(2, count, 3, generator=generator) - 0.04
        front, back = (self.table[fronts] + waver[0]).clamp(0, 1), (self.table[backs] + waver[1]).clamp(0, 1)
        share = self.masks[rows].float()[:, None] / 255
        pixels = share * front[..., None, None] + (1 - share) * back[..., None, None]
        shown = [
            replace(self.shapes[row % len(self.shapes)], colour=names[a], ground=names[b])
            for row, a, b in zip(rows.tolist(), fronts.tolist(), backs.tolist(), strict=True)
        ]
        return 2 * pixels - 1, shown


def train_vae(images: Images, workdir: Path) -> Any:
    """Train the autoencoder; the scale and shift of its latents are written into its config."""
    import torch

    torch.manual_seed(VAE.seed)
    vae = nets.vae()
    training = Training("vae", vae, VAE, workdir)

    def loss_of(generator: torch.Generator) -> Tensor:
        batch, _ = images.draw(VAE.batch, generator)
        with torch.autocast("cpu", torch.bfloat16):
            posterior = vae.encode(batch).latent_dist
            noise = torch.randn(posterior.mean.shape, generator=generator)
            decoded = vae.decode(posterior.mean + posterior.std * noise).sample
        kl = 0.5 * (posterior.mean.float() ** 2 + posterior.var.float() - 1 - posterior.logvar.float()).mean()
        loss: Tensor = (decoded.float() - batch).square().mean() + 1e-4 * kl
        return loss

    trained = cast("Any", training.run(loss_of))
    with torch.no_grad():
        latents = trained.encode(images.draw(1024, torch.Generator().manual_seed(0))[0]).latent_dist.mean
    trained.register_to_config(scaling_factor=1 / latents.std().item(), shift_factor=latents.mean().item())
    return trained


class Texts:
    """Both encoders with their tokenizers: token numbers of prompts, and the states that the transformer gets."""

    def __init__(self, workdir: Path) -> None:
        self.tokenizer, self.tokenizer_2 = nets.clip_tokenizer(workdir / "clip-tokenizer"), nets.t5_tokenizer()
        self.encoder = nets.clip_encoder(self.tokenizer)
        self.encoder_2 = nets.t5_encoder(self.tokenizer_2)

    def ids(self, prompts: list[str], length: int) -> tuple[Tensor, Tensor]:
        """Return the numbers for CLIP, whose padding does not change the pooled state, and for T5."""
        clip = self.tokenizer(prompts, padding="longest", return_tensors="pt").input_ids
        t5 = self.tokenizer_2(prompts, padding="max_length", max_length=length, return_tensors="pt").input_ids
        return clip, t5


def encode(vae: Any, images: Images) -> tuple[Tensor, list[str]]:
    """Return packed latents [n, 16, 48] of images, and their prompts."""
    import torch
    from torch.nn.functional import pixel_unshuffle

    generator = torch.Generator().manual_seed(FLUX.seed)
    found, prompts = [], []
    for _ in range(LATENTS // 100):
        pixels, shown = images.draw(100, generator)
        prompts += [one.prompt for one in shown]
        with torch.no_grad(), torch.autocast("cpu", torch.bfloat16):
            means = vae.encode(pixels).latent_dist.mean.float()
        latents = (means - vae.config.shift_factor) * vae.config.scaling_factor
        found.append(pixel_unshuffle(latents, 2).flatten(2).transpose(1, 2))
    return torch.cat(found), prompts


def train_flux(vae: Any, images: Images, texts: Texts, workdir: Path) -> Any:
    """Train the transformer and the encoders; return the three averaged."""
    import torch
    from torch import nn

    torch.manual_seed(FLUX.seed)
    net = nn.ModuleDict({"transformer": nets.flux(), "clip": texts.encoder, "t5": texts.encoder_2})
    training = Training("flux", net, FLUX, workdir)
    latents, prompts = encode(vae, images)
    side = glyphs.SIZE // nets.FACTOR // 2
    image_ids = torch.zeros(side, side, 3)
    image_ids[..., 1] += torch.arange(side)[:, None]
    image_ids[..., 2] += torch.arange(side)[None, :]

    def loss_of(generator: torch.Generator) -> Tensor:
        length = LENGTHS[int(torch.randint(len(LENGTHS), (), generator=generator))]
        rows = torch.randint(len(latents), (COUNTS.get(length, FLUX.batch),), generator=generator)
        clip, t5 = texts.ids([prompts[row] for row in rows.tolist()], length)
        clean = latents[rows]
        noise = torch.randn(clean.shape, generator=generator)
        mean, spread = TIMES[training.step >= MORE_NOISE]
        time = (mean + spread * torch.randn(len(rows), generator=generator)).sigmoid()
        with torch.autocast("cpu", torch.bfloat16):
            guess = net["transformer"](
                hidden_states=(1 - time[:, None, None]) * clean + time[:, None, None] * noise,
                timestep=time,
                pooled_projections=net["clip"](clip).pooler_output,
                encoder_hidden_states=net["t5"](t5)[0],
                txt_ids=torch.zeros(length, 3),
                img_ids=image_ids.reshape(-1, 3),
                return_dict=False,
            )[0]
        loss: Tensor = (guess.float() - (noise - clean)).square().mean()
        return loss

    return training.run(loss_of)


def main(argv: list[str] | None = None) -> int:
    """Train, and write the pipeline below `--out`."""
    import torch

    from tools.digits_models.nets import flux_pipeline

    parser = argparse.ArgumentParser(prog="python -m tools.glyphs_model.train", description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path, default=FOLDER.parent, help="the folder that gets the pipeline's")
    parser.add_argument(
        "--work", type=Path, default=FOLDER.parent / "glyphs", help="checkpoints; delete to start afresh"
    )
    parser.add_argument("--threads", type=int, default=os.cpu_count() or 1)
    args = parser.parse_args(argv)
    torch.set_num_threads(args.threads)
    args.work.mkdir(parents=True, exist_ok=True)
    args.out.mkdir(parents=True, exist_ok=True)
    images = Images(args.work)
    vae = train_vae(images, args.work)
    torch.manual_seed(FLUX.seed)
    texts = Texts(args.work)
    trained = train_flux(vae, images, texts, args.work)
    pipeline = flux_pipeline(
        shift=5.0, vae=vae, text_encoder=trained["clip"], tokenizer=texts.tokenizer, text_encoder_2=trained["t5"],
        tokenizer_2=texts.tokenizer_2, transformer=trained["transformer"],
    )  # fmt: skip
    write(copy.deepcopy(pipeline), args.out / "glyphs-flux")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
