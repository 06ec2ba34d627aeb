"""Train the two shipped models from nothing: `python -m tools.digits_models.train`.

Three trainings, each with a fixed seed, a progress bar and a checkpoint it resumes from:

1. `vae`: one autoencoder for both pipelines (mean squared error and a little KL).
2. `sd`: the UNet and its CLIP text encoder together, v-prediction, with 10 % of the prompts dropped for classifier-free
   guidance. Noise is put on the encoder's weights at every step: a small encoder tells prompts apart by little, and
   one that was left at its random start lost half of the digits in 3 bits.
3. `flux`: the transformer over encoders at their random start, first by flow matching, then by guidance distillation:
   a frozen copy of itself is the teacher, and the student learns its guided velocity
   v_uncond + g (v_cond - v_uncond) for g in 1..4. This is how Flux.1-dev came to its guidance embedding
   (arXiv:2210.03142), and why one pass a step draws the right digit.

A few steps see up to 512 text tokens, because the pipeline pads to 512 without a mask.
"""

from __future__ import annotations

import argparse
import copy
import math
import os
import shutil
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

from sdquant.training import digits
from tools.digits_models import nets, text

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    import torch
    from torch import Tensor, nn

SHIPPED = Path(__file__).parents[2] / "sdquant" / "demo" / "models"
DROP = 0.1  # share of prompts replaced by the empty one
T5_LENGTHS = (
    8,
    8,
    8,
    8,
    8,
    8,
    8,
    8,
    8,
    8,
    8,
    16,
    32,
    64,
    128,
    512,
)  # drawn from evenly: most steps are short and quick


@dataclass(frozen=True, kw_only=True)
class TrainingRecipe:
    """Hyperparameters of one training: `steps` and `batch` are counts, `rate` is AdamW's peak learning rate."""

    steps: int
    batch: int
    rate: float
    decay: float
    seed: int
    betas: tuple[float, float] = (0.9, 0.999)
    warmup: int = 200


VAE = TrainingRecipe(steps=1100, batch=32, rate=2e-3, decay=1e-4, seed=11)
SD = TrainingRecipe(steps=3000, batch=32, rate=1e-3, decay=1e-3, seed=12)
FLUX = TrainingRecipe(steps=6000, batch=32, rate=1e-3, decay=1e-2, seed=13, betas=(0.9, 0.99))
TEXT_NOISE = 0.35  # most noise on the text encoder's weights, relative to their spread
DISTIL = TrainingRecipe(steps=3000, batch=32, rate=3e-4, decay=1e-3, seed=14, betas=(0.9, 0.99))


class Training:
    """One training loop: cosine rate with warm-up, clipped gradients, an averaged copy, a checkpoint every 250 steps.

    The state of the random generator is in the checkpoint, so that an interrupted training ends where a whole one does.
    """

    def __init__(
        self, name: str, net: nn.Module, recipe: TrainingRecipe, workdir: Path, *, average: bool = True
    ) -> None:
        import torch

        self.name, self.net, self.recipe = name, net, recipe
        self.path = workdir / f"{name}.pt"
        self.generator = torch.Generator().manual_seed(recipe.seed)
        self.optimizer = torch.optim.AdamW(
            net.parameters(), lr=recipe.rate, weight_decay=recipe.decay, betas=recipe.betas
        )
        self.averaged = copy.deepcopy(net).requires_grad_(False) if average else net
        self.step = 0
        if self.path.exists():
            state = torch.load(self.path, weights_only=True)
            self.step = state["step"]
            net.load_state_dict(state["net"])
            self.averaged.load_state_dict(state["averaged"])
            self.optimizer.load_state_dict(state["optimizer"])
            self.generator.set_state(state["generator"])

    def _save(self) -> None:
        import torch

        beside = self.path.with_suffix(".partial")
        torch.save(
            {
                "step": self.step,
                "net": self.net.state_dict(),
                "averaged": self.averaged.state_dict(),
                "optimizer": self.optimizer.state_dict(),
                "generator": self.generator.get_state(),
            },
            beside,
        )
        os.replace(beside, self.path)

    def _average(self) -> None:
        import torch

        if self.averaged is self.net:
            return
        keep = min(0.999, (1 + self.step) / (10 + self.step))
        with torch.no_grad():
            for mean, new in zip(self.averaged.parameters(), self.net.parameters(), strict=True):
                mean.lerp_(new, 1 - keep)

    def run(self, loss_of: Callable[[torch.Generator], Tensor]) -> nn.Module:
        """Train to the end and return the averaged network, in eval mode."""
        import torch
        from tqdm import tqdm

        recipe = self.recipe
        bar = tqdm(total=recipe.steps, initial=self.step, desc=self.name, unit="step", smoothing=0.05)
        self.net.train()
        while self.step < recipe.steps:
            done = self.step / recipe.steps
            rate = min(1.0, (self.step + 1) / recipe.warmup) * (0.02 + 0.98 * (1 + math.cos(math.pi * done)) / 2)
            for group in self.optimizer.param_groups:
                group["lr"] = recipe.rate * rate
            loss = loss_of(self.generator)
            self.optimizer.zero_grad(set_to_none=True)
            loss.backward()  # type: ignore[no-untyped-call]
            torch.nn.utils.clip_grad_norm_(self.net.parameters(), 1.0)
            self.optimizer.step()
            self.step += 1
            self._average()
            if self.step % 250 == 0 or self.step == recipe.steps:
                self._save()
            bar.update()
            bar.set_postfix(loss=f"{loss.item():.4f}", refresh=False)
        bar.close()
        return self.averaged.eval().requires_grad_(False)


def _images() -> tuple[Tensor, Tensor]:
    """Half B as [n, 3, 32, 32] in -1..1, and its labels [n]."""
    import torch
    from torch.nn.functional import interpolate

    half = digits.halves()[1]
    small = torch.tensor(half.pixels, dtype=torch.float32).reshape(-1, 1, 8, 8) / 16
    large = interpolate(small, size=(digits.SIZE, digits.SIZE), mode="bicubic", align_corners=False).clamp(0, 1)
    return large.expand(-1, 3, -1, -1) * 2 - 1, torch.tensor(half.labels)


def train_vae(workdir: Path) -> Any:
    """The autoencoder, with the scale and shift of its latents written into its config."""
    import torch

    torch.manual_seed(VAE.seed)
    vae = nets.vae()
    images, _ = _images()
    training = Training("vae", vae, VAE, workdir)

    def loss_of(generator: torch.Generator) -> Tensor:
        batch = images[torch.randint(len(images), (VAE.batch,), generator=generator)]
        if torch.rand((), generator=generator) < 0.5:
            shift = torch.randint(-4, 5, (2,), generator=generator).tolist()
            batch = torch.roll(batch, shift, dims=(2, 3))
        with torch.autocast("cpu", torch.bfloat16):
            posterior = vae.encode(batch).latent_dist
            noise = torch.randn(posterior.mean.shape, generator=generator)
            decoded = vae.decode(posterior.mean + posterior.std * noise).sample
        kl = 0.5 * (posterior.mean.float() ** 2 + posterior.var.float() - 1 - posterior.logvar.float()).mean()
        loss: Tensor = (decoded.float() - batch).square().mean() + 1e-3 * kl
        return loss

    trained = cast("Any", training.run(loss_of))
    with torch.no_grad():
        latents = trained.encode(images).latent_dist.mean
    trained.register_to_config(scaling_factor=1 / latents.std().item(), shift_factor=latents.mean().item())
    return trained


@dataclass(frozen=True, kw_only=True)
class Latents:
    """Training data of the generators: normalised latents [n, 4, 8, 8] and labels [n]."""

    latents: Tensor
    labels: Tensor

    def draw(self, count: int, generator: torch.Generator) -> tuple[Tensor, Tensor]:
        """Draw `count` latents, each with the index of a prompt: template * 10 + digit, or 60 for the empty prompt."""
        import torch

        rows = torch.randint(len(self.latents), (count,), generator=generator)
        templates = torch.randint(len(digits.TEMPLATES), (count,), generator=generator)
        prompts = templates * 10 + self.labels[rows]
        dropped = torch.rand(count, generator=generator) < DROP
        return self.latents[rows], torch.where(dropped, torch.tensor(EMPTY), prompts)


EMPTY = 10 * len(digits.TEMPLATES)


def _prompts() -> list[str]:
    """All prompts by number (see `Latents.draw`), the empty one last."""
    return [digits.prompt(d, t) for t in range(len(digits.TEMPLATES)) for d in range(10)] + [""]


def _latents(vae: Any) -> Latents:
    import torch

    images, labels = _images()
    with torch.no_grad():
        means = vae.encode(images).latent_dist.mean
    return Latents(latents=(means - vae.config.shift_factor) * vae.config.scaling_factor, labels=labels)


def _clip_states(tokenizer: Any, encoder: Any) -> tuple[Tensor, Tensor]:
    import torch

    ids = tokenizer(_prompts(), padding="max_length", max_length=text.CLIP_LENGTH, return_tensors="pt").input_ids
    with torch.no_grad():
        out = encoder(ids)
    return out.last_hidden_state, out.pooler_output


def train_sd(vae: Any, tokenizer: Any, encoder: Any, workdir: Path) -> tuple[Any, Any]:
    """The UNet, by v-prediction (arXiv:2202.00512), and the text encoder that it was trained with."""
    import torch
    from torch import nn

    torch.manual_seed(SD.seed)
    unet = nets.unet(text.WIDTH)
    encoder = copy.deepcopy(encoder).requires_grad_(True)
    data = _latents(vae)
    # StableDiffusionPipeline knows no shift: the UNet learns latents that are only scaled.
    latents = data.latents + vae.config.shift_factor * vae.config.scaling_factor
    data = Latents(latents=latents, labels=data.labels)
    ids = tokenizer(_prompts(), padding="max_length", max_length=text.CLIP_LENGTH, return_tensors="pt").input_ids
    scheduler = nets.sd_pipeline(vae=vae, text_encoder=encoder, tokenizer=tokenizer, unet=unet).scheduler
    both = nn.ModuleDict({"unet": unet, "text_encoder": encoder})
    training = Training("sd", both, SD, workdir)

    def loss_of(generator: torch.Generator) -> Tensor:
        clean, prompts = data.draw(SD.batch, generator)
        noise = torch.randn(clean.shape, generator=generator)
        t = torch.randint(1000, (SD.batch,), generator=generator)
        noisy = scheduler.add_noise(clean, noise, t)
        target = scheduler.get_velocity(clean, noise, t)
        unique, where = torch.unique(prompts, return_inverse=True)  # a prompt that comes twice is read once
        states = torch.func.functional_call(encoder, _shaken(encoder, generator), (ids[unique],))[0]
        loss: Tensor = (unet(noisy, t, states[where]).sample - target).square().mean()
        return loss

    trained = cast("Any", training.run(loss_of))
    return trained["unet"], trained["text_encoder"]


def _shaken(encoder: Any, generator: torch.Generator) -> dict[str, Tensor]:
    """The weights of the encoder's linear layers with noise of a random strength."""
    import torch
    from torch import nn

    level = TEXT_NOISE * torch.rand((), generator=generator)
    return {
        f"{path}.weight": module.weight
        + level * module.weight.detach().std() * torch.randn(module.weight.shape, generator=generator)
        for path, module in encoder.named_modules()
        if isinstance(module, nn.Linear)
    }


@dataclass(frozen=True, kw_only=True)
class FluxBatch:
    """One step's inputs for the transformer: tokens [b, 16, 16], noise alike, time [b] in 0..1, prompts [b]."""

    clean: Tensor
    noise: Tensor
    time: Tensor
    prompts: Tensor
    length: int

    @property
    def noisy(self) -> Tensor:
        """x_t = (1 - t) x + t noise."""
        t = self.time[:, None, None]
        return (1 - t) * self.clean + t * self.noise


class FluxData:
    """Batches for the Flux transformer, with the text states of every length it is trained at."""

    def __init__(self, vae: Any, clip: tuple[Any, Any], t5: tuple[Any, Any]) -> None:
        import torch

        self.data = _latents(vae)
        _, self.pooled = _clip_states(*clip)
        tokenizer, encoder = t5
        self.states: dict[int, Tensor] = {}
        with torch.no_grad():
            for length in sorted(set(T5_LENGTHS)):
                ids = tokenizer(_prompts(), padding="max_length", max_length=length, return_tensors="pt").input_ids
                self.states[length] = encoder(ids)[0]

    def draw(self, recipe: TrainingRecipe, generator: torch.Generator) -> FluxBatch:
        """Draw a batch, a quarter as large for long prompts, whose cost is dominated by the text tokens."""
        import torch
        from torch.nn.functional import pixel_unshuffle

        length = T5_LENGTHS[int(torch.randint(len(T5_LENGTHS), (), generator=generator))]
        count = recipe.batch if length <= 32 else recipe.batch // 4
        latents, prompts = self.data.draw(count, generator)
        clean = pixel_unshuffle(latents, 2).flatten(2).transpose(1, 2)
        noise = torch.randn(clean.shape, generator=generator)
        time = torch.randn(count, generator=generator).sigmoid()
        return FluxBatch(clean=clean, noise=noise, time=time, prompts=prompts, length=length)

    def velocity(self, net: Any, batch: FluxBatch, prompts: Tensor, guidance: Tensor) -> Tensor:
        """The transformer's answer [b, 16, 16] for the given prompts and guidance [b]."""
        import torch

        side = digits.SIZE // nets.VAE_FACTOR // 2
        image_ids = torch.zeros(side, side, 3)
        image_ids[..., 1] += torch.arange(side)[:, None]
        image_ids[..., 2] += torch.arange(side)[None, :]
        with torch.autocast("cpu", torch.bfloat16):
            out = net(
                hidden_states=batch.noisy,
                timestep=batch.time,
                guidance=guidance,
                pooled_projections=self.pooled[prompts],
                encoder_hidden_states=self.states[batch.length][prompts],
                txt_ids=torch.zeros(batch.length, 3),
                img_ids=image_ids.reshape(-1, 3),
                return_dict=False,
            )[0]
        return cast("Tensor", out.float())


def train_flux(data: FluxData, workdir: Path) -> Any:
    """The transformer, by flow matching; its guidance input is 1 throughout."""
    import torch

    torch.manual_seed(FLUX.seed)
    net = nets.flux(text.WIDTH)
    training = Training("flux", net, FLUX, workdir)

    def loss_of(generator: torch.Generator) -> Tensor:
        batch = data.draw(FLUX, generator)
        guess = data.velocity(net, batch, batch.prompts, torch.ones(len(batch.time)))
        return (guess - (batch.noise - batch.clean)).square().mean()

    return training.run(loss_of)


def distil_flux(teacher: Any, data: FluxData, workdir: Path) -> Any:
    """The same transformer, taught to give the guided velocity in one pass."""
    import torch

    student = copy.deepcopy(teacher).requires_grad_(True)
    training = Training("distil", student, DISTIL, workdir)

    def loss_of(generator: torch.Generator) -> Tensor:
        batch = data.draw(DISTIL, generator)
        count = len(batch.time)
        guidance = 1 + 3 * torch.rand(count, generator=generator)
        with torch.no_grad():
            ones = torch.ones(count)
            with_prompt = data.velocity(teacher, batch, batch.prompts, ones)
            without = data.velocity(teacher, batch, torch.full_like(batch.prompts, EMPTY), ones)
            target = without + guidance[:, None, None] * (with_prompt - without)
        return (data.velocity(student, batch, batch.prompts, guidance) - target).square().mean()

    return training.run(loss_of)


def write(pipeline: Any, folder: Path) -> None:
    """Save as bf16 to a temporary folder and rename it, so that an interrupted save never leaves half a model."""
    import torch

    beside = folder.with_name(folder.name + ".partial")
    shutil.rmtree(beside, ignore_errors=True)
    pipeline.to(torch.bfloat16).save_pretrained(beside, safe_serialization=True)
    for extra in beside.rglob("README.md"):
        extra.unlink()
    shutil.rmtree(folder, ignore_errors=True)
    beside.rename(folder)


def _parts(only: str) -> Iterator[str]:
    yield from (("sd", "flux") if only == "all" else (only,))


def main(argv: list[str] | None = None) -> int:
    """Train the selected models and write them below `--out`."""
    import torch

    parser = argparse.ArgumentParser(prog="python -m tools.digits_models.train", description=__doc__.splitlines()[0])
    parser.add_argument("--only", choices=("all", "sd", "flux"), default="all")
    parser.add_argument("--out", type=Path, default=SHIPPED, help="where the pipelines go (default: into the package)")
    parser.add_argument("--work", type=Path, default=Path("train-work"), help="checkpoints; delete it to start afresh")
    parser.add_argument("--threads", type=int, default=os.cpu_count() or 1)
    args = parser.parse_args(argv)
    torch.set_num_threads(args.threads)
    args.work.mkdir(parents=True, exist_ok=True)
    args.out.mkdir(parents=True, exist_ok=True)

    vae = train_vae(args.work)
    clip_tokenizer = text.clip_tokenizer(args.work / "clip-tokenizer")
    clip = text.clip_encoder(clip_tokenizer, seed=1)
    for part in _parts(args.only):
        if part == "sd":
            unet, trained = train_sd(vae, clip_tokenizer, clip, args.work)
            pipeline: Any = nets.sd_pipeline(vae=vae, text_encoder=trained, tokenizer=clip_tokenizer, unet=unet)
            write(copy.deepcopy(pipeline), args.out / "digits-sd")
        else:
            t5_tokenizer = text.t5_tokenizer()
            t5 = text.t5_encoder(t5_tokenizer, seed=2)
            data = FluxData(vae, (clip_tokenizer, clip), (t5_tokenizer, t5))
            transformer = distil_flux(train_flux(data, args.work), data, args.work)
            pipeline = nets.flux_pipeline(
                vae=vae,
                text_encoder=clip,
                tokenizer=clip_tokenizer,
                text_encoder_2=t5,
                tokenizer_2=t5_tokenizer,
                transformer=transformer,
            )
            write(copy.deepcopy(pipeline), args.out / "digits-flux")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
