"""Find the ranges of activations over prompts: `sdquant calibrate`.

Images are generated with the layers of a QtProvider, one prompt and seed at a time. Each call of a layer is a batch,
quantized with its own range, so images do not influence each other's statistics and can be divided among processes.
Sums are exact (`rules.qt.statistics`): results are bit-identical for one or several processes, resumed or not.
"""

from __future__ import annotations

import dataclasses
import logging
import math
import time
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ..errors import SettingsError
from ..planning import is_quantized_by_default
from ..rules import QuantizationRule, RulesSpec, qconfig
from ..utils.byte_sizes import parse_size
from ..utils.progress import count_bar
from . import input_magnitudes
from .partial_statistics import PartialStatistics

if TYPE_CHECKING:
    from torch import Tensor, nn

    from ..planning import Plan
    from ..utils.distributed import Processes

log = logging.getLogger(__name__)


@dataclass(frozen=True, kw_only=True)
class Calibration:
    """Calibration task: the prompts and settings used to find activation ranges.

    Attributes:
        model: path or name of the pipeline, for the record.
        rules: those with act_static_scale get ranges; all apply while images are generated.
        quant: instead of rules, a scheme that smooths inputs: what is found are their magnitudes, in the float model.
            Without rules and this: all that quality can use, see `quality_statistics`.
        prompts: `count` images each. Every image has a seed of its own, from `seed` on: images that start from one
            noise show layers so few directions of their inputs that codes are made to fit these alone.
        components: names of those that the rules apply to; () for the UNet or transformer and the text encoders.
        limit: bytes that the second moments of inputs may take in the file: a size, as "1GB".
        gradients: steps of each image whose output gets a gradient, which takes the time of about three more steps and
            the memory of training.
    """

    model: str
    rules: tuple[QuantizationRule, ...]
    prompts: tuple[str, ...]
    count: int = 1
    seed: int = 0
    steps: int = 20
    guidance: float | None = None
    width: int | None = None
    height: int | None = None
    components: tuple[str, ...] = ()
    quant: str | None = None
    limit: int | str = 10**9
    gradients: int = 3

    def __post_init__(self) -> None:
        if isinstance(self.gradients, bool) or not isinstance(self.gradients, int) or self.gradients < 0:
            raise SettingsError(
                f"Invalid gradients={self.gradients!r}", "it must be a whole number, of steps", "Use 3, or 0 for none"
            )
        if not self.prompts:
            raise SettingsError("Cannot calibrate", "there are no prompts", "Add --prompt or --prompts")
        if self.quant is not None:
            input_magnitudes.refuse_uncalibrated(self.quant)
        elif self.rules and not any(row.act_static_scale for row in self.rules):
            raise SettingsError(
                "Cannot calibrate",
                "no rule has act_static_scale, so all ranges are computed at run time",
                "Set act_static_scale: true in the rules whose layers need a static range",
            )

        object.__setattr__(self, "limit", parse_size(self.limit, "A limit"))

    @property
    def for_quality(self) -> bool:
        """Return whether all that quality can use is collected."""
        return not self.rules and self.quant is None

    @property
    def images(self) -> tuple[tuple[str, int], ...]:
        """Return prompt and seed of each image, in order."""
        return tuple((prompt, self.seed + number) for number, prompt in enumerate(self.prompts * self.count))

    def to_dict(self) -> dict[str, Any]:
        """As JSON values."""
        values = asdict(self)
        return values | {"rules": [qconfig.to_dict(row) for row in self.rules], "components": list(self.components),
                         "prompts": list(self.prompts)}  # fmt: skip


def calibrate(
    pipe: Any,
    task: Calibration,
    *,
    models: Mapping[str, nn.Module] | None = None,
    partial: Path | None = None,
    processes: Processes | None = None,
    progress: bool = False,
) -> dict[str, Tensor]:
    """Run the calibration and return the statistics of all static layers, by "<component>.<operand>.<statistic>", and
    with them a few values of their weights (`rules.weight_samples`), by which other models are refused.

    Args:
        pipe: a float pipeline. Its components get the layers of a QtProvider, and keep them.
        models: result of `prepare_models`, if it was already called.
        partial: a file for the statistics after each image; if it exists and belongs to the same task, calibration
            resumes from it. The caller deletes it once the result is saved.
        processes: those that share the images, each with a pipeline and a file of its own.

    Raises:
        SettingsError: a rule does not fit a layer; a layer with a static range saw no data (it is named); or the
            file belongs to another task.
    """
    from ..rules import weight_samples

    models = prepare_models(pipe, task) if models is None else models
    results = None if partial is None else PartialStatistics.of(partial, pipe, task.to_dict(), processes)
    done, known = _resumed(results, len(_mine(task, processes)))
    if task.for_quality:
        merged = _for_quality(pipe, task, models, results, done, known, processes, progress)
    else:
        merged = _ranges(pipe, task, models, results, done, known, processes, progress)
    layers = {name.rpartition(".")[0].rpartition(".")[0] for name in merged}
    return merged | weight_samples.samples_of(models, layers)


def _ranges(
    pipe: Any,
    task: Calibration,
    models: Mapping[str, nn.Module],
    results: PartialStatistics | None,
    done: int,
    known: Mapping[str, Tensor],
    processes: Processes | None,
    progress: bool,
) -> dict[str, Tensor]:
    """See `calibrate`: collect ranges of activations, or magnitudes of inputs."""
    from ..rules import collecting, load_quant_stats, merge_quant_stats, quant_stats

    for name, model in models.items() if known else ():
        prefix = f"{name}."
        load_quant_stats(model, {k.removeprefix(prefix): v for k, v in known.items() if k.startswith(prefix)})

    def found(*, exact: bool) -> dict[str, Tensor]:
        return {f"{name}.{k}": v for name, model in models.items() for k, v in quant_stats(model, exact=exact).items()}

    with ExitStack() as stack:
        for model in models.values():
            stack.enter_context(collecting(model, own_ranges=True))
        _draw(pipe, task, done, processes, progress, results, lambda: found(exact=True))
    if processes is None or processes.count == 1:
        merged = found(exact=False)
    else:
        merged = merge_quant_stats(processes.gathered(found(exact=True)))
        merged = {name: value for name, value in merged.items() if ".exact_of_" not in name}
    unseen = sorted(k.removesuffix(".count") for k, value in merged.items() if k.endswith(".count") and not int(value))
    if unseen and task.quant is None:
        raise SettingsError(
            "Cannot calibrate",
            f"{len(unseen)} layers saw no data, the first is {unseen[0].rpartition('.')[0]!r}",
            "Add prompts that reach it, or let an earlier rule without act_static_scale match it",
        )
    if unseen:
        first = unseen[0].rpartition(".")[0]
        log.warning("%d layers got no input, the first is %r: they will not be smoothed", len(unseen), first)
    _require_products(models, merged)
    return merged


def _for_quality(
    pipe: Any,
    task: Calibration,
    models: Mapping[str, nn.Module],
    results: PartialStatistics | None,
    done: int,
    known: Mapping[str, Tensor],
    processes: Processes | None,
    progress: bool,
) -> dict[str, Tensor]:
    """See `calibrate`: collect what quality can use."""
    from .quality_statistics import QualityCollector

    assert isinstance(task.limit, int)
    collector = QualityCollector(models, task.limit, task.steps, task.gradients)
    with collector.running():
        first = dataclasses.replace(task, steps=1, prompts=task.prompts[:1], count=1)
        collector.begin(lambda: _draw(pipe, first, 0, None, False, None, dict), processes)
        if known:
            collector.load(known)
        _draw(
            pipe,
            task,
            done,
            processes,
            progress,
            results,
            lambda: collector.statistics(exact=True),
            announce=collector.image,
        )
    alone = processes is None or processes.count == 1
    merged = collector.statistics(exact=False) if alone else collector.merged(processes)  # type: ignore[arg-type]
    unseen = sorted(name for name, value in merged.items() if name.endswith(".rows") and not int(value))
    if unseen:
        first_one = unseen[0].removesuffix(".rows").rpartition(".")[0]
        log.warning("%d layers got no input, the first is %r", len(unseen), first_one)
    return merged


def _resumed(results: PartialStatistics | None, count: int) -> tuple[int, Mapping[str, Tensor]]:
    """Return how many images are done and what they showed, by a file that was left of the same calibration."""
    if results is None or not results.file.exists():
        return 0, {}
    done, known = results.read(count)
    log.warning("resuming from %s: %d of %d images are already done", results.file, done, count)
    return done, known


def _mine(task: Calibration, processes: Processes | None) -> tuple[tuple[int, str, int], ...]:
    """Return number, prompt and seed of the images that this process draws."""
    numbered = tuple((number, *one) for number, one in enumerate(task.images))
    return numbered if processes is None else numbered[processes.rank :: processes.count]


def _draw(
    pipe: Any,
    task: Calibration,
    done: int,
    processes: Processes | None,
    progress: bool,
    results: PartialStatistics | None,
    statistics: Callable[[], Mapping[str, Tensor]],
    announce: Callable[[str, int, int], None] | None = None,
) -> None:
    """Draw the images of this process from the one numbered `done` on; write what is found so far to `results`.

    Args:
        announce: called with prompt, seed and number of each image before it is drawn.
    """
    import torch

    from ..models import draw

    mine = _mine(task, processes)
    shown = progress and (processes is None or processes.rank == 0)
    last, seconds = -math.inf, 0.0
    with (
        torch.no_grad(),
        count_bar("Calibrating", len(mine), "image", shown, initial=done, delay=0, leave=True) as bar,
    ):
        for count, (number, prompt, seed) in enumerate(mine[done:], start=done + 1):
            if announce is not None:
                announce(prompt, seed, number)
            draw(
                pipe, [prompt], seeds=[seed], steps=task.steps, guidance=task.guidance, width=task.width,
                height=task.height,
            )  # fmt: skip
            before = time.monotonic()
            if results is not None and (seconds < 1 or before - last > 20 * seconds):
                results.write(count, statistics())
                last, seconds = time.monotonic(), time.monotonic() - before
            bar.update()


def _require_products(models: Mapping[str, nn.Module], statistics: Mapping[str, Tensor]) -> None:
    """Raise SettingsError if a rule with a static range matched no product in any component."""
    from ..rules import interception, product_ranges

    unmatched: dict[QuantizationRule, str] = {}
    known = {}
    for name, model in models.items():
        for path, mark in interception.marks(model).items():
            known[f"{name}.{path}".rstrip(".")] = mark
            for rule in mark.rules.values():
                if rule.act_static_scale:
                    unmatched.setdefault(rule, f"{name}.{path}")
    for prefix in {key.rpartition(".")[0] for key in statistics}:
        path, _, operand = prefix.rpartition(".")
        match = (
            None
            if path not in known
            else product_ranges.static_rule(known[path].report.rules, known[path].path, operand)
        )
        if match is not None:
            unmatched.pop(match, None)
    for rule, path in unmatched.items():
        raise SettingsError(
            "Cannot calibrate",
            f"the rule for {rule.module_path!r} with op_names={list(rule.op_names)} saw no product of activations in "
            f"the modules that it applies to, the first is {path!r}",
            "Match modules that multiply activations with torch functions, or remove act_static_scale from this rule",
        )


def refuse_unfollowed(plan: Plan, task: Calibration) -> None:
    """Raise SettingsError for a rule that products of activations cannot follow; only headers are read."""
    from ..core import registry
    from ..planning import rule_checks

    spec = RulesSpec(registry.scheme("rules"), rules=task.rules)
    for name, src in plan.detected.sources.items():
        if spec.products and (name in task.components if task.components else is_quantized_by_default(name)):
            rule_checks.marked_in_file(name, src, spec)


def prepare_models(pipe: Any, task: Calibration) -> dict[str, nn.Module]:
    """Put the layers of a QtProvider into the pipeline's components; return those with static ranges, by name.

    Raises:
        SettingsError: there are none.
    """
    from ..core import registry
    from ..models import is_pipeline, weight_parts
    from ..nn import kind_of
    from ..rules import QtProvider, Rules, has_statistics, interception, quantize_model
    from . import quality_statistics

    if not is_pipeline(pipe):
        raise SettingsError(
            f"Cannot calibrate a {type(pipe).__name__}", "it cannot generate images on its own", "Pass its pipeline"
        )
    spec = RulesSpec(registry.scheme("rules"), rules=task.rules)
    if task.for_quality:
        return quality_statistics.models_to_watch(weight_parts(pipe), task.components)
    if task.quant is not None:
        return input_magnitudes.observe(weight_parts(pipe), task.components)
    models = {}
    for name, model in weight_parts(pipe).items():
        if name not in task.components if task.components else not is_quantized_by_default(name):
            continue
        weights = [
            (f"{path}.weight", tuple(module.weight.shape))
            for path, module in model.named_modules()
            if kind_of(module) in ("linear", "conv")
        ]  # fmt: skip
        if not spec.suits(weights) and not interception.matching(model, Rules(task.rules)):
            continue
        trained = quantize_model(model, QtProvider(task.rules))
        setattr(pipe, name, trained)
        if has_statistics(trained):
            models[name] = trained
    if not models:
        raise SettingsError(
            f"Cannot calibrate {task.model}",
            "no rule with act_static_scale is the first to match a layer",
            "Check module_path and op_names, and the rules before it",
        )
    return models
