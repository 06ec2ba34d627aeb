"""Quantize a checkpoint with several processes: `torchrun --nproc-per-node 4 -m sdquant quantize MODEL OUT -q nf4`.

Each process reads, quantizes and writes its share of every component's weights to files of its own; none needs more
memory than one file and one weight. The first process also writes configs, tokenizers, and the index of the files.
Everything goes into one temporary folder beside the target, which replaces the target when every process has reported
its files. The saved model is bit-identical to one written by a single process.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ..core import BIAS, LONE
from ..errors import BadFileError, DistributedError, SettingsError
from ..formats import safetensors_writer
from ..models import classes, key_names, pipeline_folders, pipelines
from ..planning import ComponentPlan, Plan, folder_of, source_of
from ..rules import Rules, RulesSpec, given_rules, model_rules, product_ranges
from ..saving import model_files
from ..utils.atomic_write import whole_folder
from ..utils.progress import byte_bar
from . import loader
from .shard_writer import Collector, ShardOutput

if TYPE_CHECKING:
    from torch import nn

    from ..planning import Request
    from ..utils.distributed import Processes


def quantize(
    request: Request, model_plan: Plan, target: Path, ranks: Processes, *, max_shard: int = safetensors_writer.MAX_SHARD
) -> Path:
    """Quantize and write a model as a folder; every process calls this with the same values.

    Args:
        max_shard: maximum bytes of a file, unless a single weight has more.

    Returns:
        The target.

    Raises:
        DistributedError: another process has ended. SettingsError: the processes do not see the same folder, or
            mode="post". Else as `load_model` and `save`.
    """
    if any(component.action == "encode" and component.mode == "post" for component in model_plan.components):
        raise SettingsError(
            "Cannot quantize with several processes and mode='post'",
            "no process loads the whole model",
            "Leave the mode out: the result is the same",
        )
    specs = [component.spec for component in model_plan.components if component.spec is not None]
    if any(BIAS in spec.scheme.options and spec[BIAS] for spec in specs):
        raise SettingsError(
            "Cannot correct biases with several processes",
            "a process writes a layer's bias that does not quantize its weight",
            "Leave the option bias out, or run it without torchrun",
        )
    for warning in model_plan.warnings if ranks.first else ():
        loader.log.warning("%s", warning)
    if model_plan.detected.container == "pipeline":
        pipeline_folders.check_pipeline(folder_of(model_plan))
    total = sum(info.nbytes for src in model_plan.detected.sources.values() for info in src.tensors.values())
    spec = next(component.spec for component in model_plan.components if component.spec is not None)
    with (
        _one_folder(target, model_plan.bytes, ranks) as folder,
        byte_bar(f"Writing {spec}", total // ranks.count, request.progress and ranks.first) as tick,
    ):
        models = {}
        for component in model_plan.components:
            home = folder if component.name == LONE else folder / component.name
            models[component.name] = _component(request, model_plan, component, home, ranks, tick, max_shard)
        if ranks.first:
            whole = loader.assemble(model_plan, models)
            if pipelines.is_pipeline(whole):
                model_files.write_rest(whole, folder)
    return target


@contextmanager
def _one_folder(target: Path, nbytes: int, ranks: Processes) -> Iterator[Path]:
    """Yield a new folder, created by the first process, for all. It becomes `target` when all have left the block.

    Raises:
        DistributedError: another process has ended. SettingsError: a process does not see the folder.
    """
    if ranks.first:
        with whole_folder(target, nbytes) as folder:
            ranks.gathered(str(folder))
            _require_seen(folder, ranks)
            yield folder
            ranks.barrier()  # all is written
        ranks.barrier()  # and in its place
        return
    folder = Path(ranks.gathered("")[0])
    _require_seen(folder, ranks)
    try:
        yield folder
    except (OSError, SettingsError) as error:
        if folder.is_dir():
            raise
        raise DistributedError(
            f"Cannot write {target} with several processes",
            "the first process has ended and has removed what was written",
            "See the error message of the first process",
        ) from error
    ranks.barrier()
    ranks.barrier()


def _require_seen(folder: Path, ranks: Processes) -> None:
    blind = [rank for rank, sees in enumerate(ranks.gathered(folder.is_dir())) if not sees]
    if blind:
        raise SettingsError(
            f"Cannot write {folder} with {ranks.count} processes",
            f"process {blind[0]} does not see it: it is on another machine's disk",
            "Choose a folder that all nodes share",
        )


def _component(
    request: Request,
    model_plan: Plan,
    component: ComponentPlan,
    home: Path,
    ranks: Processes,
    tick: Callable[[int], Any],
    max_shard: int,
) -> nn.Module:
    """Write one component into a folder, and return its empty model (weights on the meta device)."""
    src = source_of(model_plan, component)
    model = classes.meta_model(src)
    home.mkdir(exist_ok=True)
    key_names.remember(model, src.conversions, quantized=True)
    product_ranges.stand_in(model, ((key, info.shape) for key, info in src.plain.items()))
    if isinstance(component.spec, RulesSpec):
        model_rules.keep(model, component.spec.rules)
        product_ranges.register_ranges(
            model, product_ranges.ranges_of(model, Rules(component.spec.rules), component.spec.known())
        )
    out = ShardOutput(home, f"rank-{ranks.rank}", model_files.config_of(model), max_shard, given_rules(model))
    collector = Collector(model, component, model_plan, src, out)
    if ranks.first:
        collector.finish(src)
        collector.buffers()
    mine = shares(collector.sizes, ranks.count)[ranks.rank]
    loader.fill(collector, component, src, model_plan, tick, request.skip, only={collector.keys[name] for name in mine})
    for forms in ranks.gathered(collector.forms):
        collector.stand_in(forms)
    own_naming = model_files.write_config(model, home) if ranks.first else None
    naming = ranks.gathered(own_naming)[0]
    assert naming is not None
    stem, guard = naming
    out.finish(guard=guard)
    files = [file for each in ranks.gathered(out.files) for file in each]
    if ranks.first:
        _name(home, stem, files)
    return model


def _name(home: Path, stem: str, files: list[Any]) -> None:
    """Give the files of all processes their names, and write the index, if there are several.

    Raises:
        BadFileError: a file is missing or not of the reported size.
    """
    for file in files:
        path = home / file.name
        size = path.stat().st_size if path.is_file() else None
        if size != file.nbytes:
            raise BadFileError(
                f"Cannot use {path}, which another process wrote",
                f"that process reports {file.nbytes} bytes, but "
                + (f"{size} are here" if size is not None else "the file is not here"),
                "Choose a folder that all processes share",
            )
    if len(files) == 1:
        (home / files[0].name).rename(home / f"{stem}.safetensors")
        return
    places: dict[str, str] = {}
    for number, file in enumerate(files, 1):
        name = f"{stem}-{number:05}-of-{len(files):05}.safetensors"
        (home / file.name).rename(home / name)
        places |= dict.fromkeys(file.keys, name)
    total = sum(size for file in files for size in file.keys.values())
    index = {"metadata": {"total_size": total}, "weight_map": dict(sorted(places.items()))}
    (home / f"{stem}.safetensors.index.json").write_text(json.dumps(index, indent=2) + "\n")


def shares(sizes: Mapping[str, int], count: int) -> list[list[str]]:
    """Split the names, in order, into `count` lists of about equal bytes, so that each process reads one run of a file.

    A weight belongs to the process in whose byte range its middle lies. With few weights, some lists are empty.
    """
    groups: list[list[str]] = [[] for _ in range(count)]
    total, before = sum(sizes.values()), 0
    for name, size in sizes.items():
        middle = 2 * before + size  # in half bytes, so that all is whole numbers
        groups[min(count - 1, middle * count // (2 * total)) if total else 0].append(name)
        before += size
    return groups
