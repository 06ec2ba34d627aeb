"""Measure a model: processes that hold one variant each, and take turns."""

from __future__ import annotations

import logging
import os
import shutil
import statistics
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ...compat import hardware
from ...core import AUTO
from ...errors import SettingsError
from ...planning import make_request
from ...utils.atomic_write import whole_file
from ..compare import settings_of
from . import cases
from .progress import JobProgress
from .results import CLOCKS, Benchmark, BenchmarkRow
from .specs import INPUTS, LoadSpec, ModelUnderTest, trace_name, trace_path
from .target import find_model
from .worker_pool import Failed, start, working

if TYPE_CHECKING:
    from collections.abc import Iterator

    from ...utils.progress import OnProgress
    from .cases import Variant
    from .worker_pool import Worker

log = logging.getLogger(__name__)

INPUT_KINDS = ("auto", "pipeline", "random")
PROMPT = "a photograph of a lighthouse at dusk"
SHARE = 0.6  # of the memory that is free, for the models that are held at once
BESIDE = 1 << 29  # bytes of a worker that are not weights: imported libraries, activations
SIDE = 512  # pixels of the image of a lone component whose config names no size


@dataclass
class _Running:
    """A variant while it is measured. `wall` and `cpu`: seconds of a step in each round."""

    variant: Variant
    worker: Worker
    row: BenchmarkRow
    wall: list[float] = field(default_factory=list)
    cpu: list[float] = field(default_factory=list)


def bench(
    path: str | Path,
    schemes: Iterable[str] | None = None,
    *,
    steps: int = 1,
    rounds: int = 5,
    size: tuple[int, int] | None = None,
    batch: int = 1,
    seed: int = 0,
    threads: int | None = None,
    prompt: str = PROMPT,
    inputs: str = "auto",
    clock: str = "wall",
    peers: bool = True,
    profile: str | Path | None = None,
    on_progress: OnProgress | None = None,
    **values: Any,
) -> Benchmark:
    """Load a model's UNet or transformer in several ways, and run one step of each in turns.

    Every way runs in a process of its own, so that its memory and load time are measured alone. In each round every
    process runs `steps` steps while the others wait, alternately from first to last and from last to first. A row's
    ratio is the median over the rounds of its time divided by the reference's in the same round. If the models do not
    all fit into memory, they are measured in groups, each with the reference. A failure is a row with the reason.

    Args:
        path: as for `load_model`; the reference is this model as found.
        schemes: each as `load_model`'s quant; None for a set that the matrix allows. Those that exist only in GGUF
            files are written to one first, in a temporary folder.
        size: width and height of the image in pixels; default: the model's own.
        batch: images of a component without a pipeline.
        threads: of the CPU; default: torch's own number.
        prompt: where the pipeline gives the inputs.
        inputs: "pipeline", "random", or "auto": the pipeline's where there is one.
        clock: what ratios are of: "wall", or "cpu", the CPU time of all threads, for machines with other work.
        peers: measure other libraries' own ways of the same formats, where they are installed.
        profile: write a trace of one step of each row, for Perfetto and TensorBoard, beside this path.
        on_progress: called with the work done, the total and a line of text. Its exceptions are passed on.
        values: other arguments of `load_model` (offload, runtime, dtype, ...), the same for all of sdquant's rows.

    Raises:
        SdquantError: an invalid argument, a scheme that does not exist, or a reference that cannot be run.
    """
    _check(steps=steps, rounds=rounds, batch=batch, threads=threads, seed=seed, size=size, inputs=inputs, clock=clock)
    values.setdefault("progress", False)
    base_request = make_request(path, **values)
    for text in schemes or ():
        if make_request(path, **(values | {"quant": text})).quant == AUTO:  # one that does not exist is no row
            raise SettingsError(
                "Cannot measure auto",
                "it chooses by itself, and each row of a benchmark has a scheme that is named",
                "Save what it chooses with `sdquant quantize MODEL OUT -q auto --size 6GB`, and measure OUT",
            )
    if base_request.quant is not None:
        raise SettingsError(
            f"Cannot use quant={base_request.quant!r}",
            "the reference is the model as found",
            "Add it to the schemes instead",
        )
    target = find_model(base_request)
    here = hardware.probe()
    if threads is None:
        import torch

        threads = torch.get_num_threads()  # one for each core that this process may use
    scheme_names = cases.default_schemes(target) if schemes is None else tuple(schemes)
    with working() as (work, workers):
        tell = JobProgress(on_progress)
        kind, size, batch = _inputs(target, inputs, prompt, size, batch, seed, threads, work, workers)
        tell.text("writing GGUF files")
        todo = [
            *cases.make(
                target, scheme_names, work, threads, here.versions, with_peers=peers, with_bf16=schemes is None
            )
        ]  # fmt: skip
        groups = _groups(todo, _room(here, target.device))
        tell.total = sum(len(group) for group in groups) * (rounds + 2)
        rows: dict[str, BenchmarkRow] = {one.row.name: one.row for one in todo}
        for number, group in enumerate(groups):
            for row in _group(group, number, rounds, steps, clock, target, profile, work, workers, tell):
                if number == 0 or row.name != todo[0].row.name:
                    rows[row.name] = row
        tell.text("done")
        traced = _traced(_against_ours([*rows.values()]), profile, work)
    return Benchmark(
        model=str(path),
        class_name=target.class_name,
        inputs=kind,
        size=size,
        batch=batch,
        seed=seed,
        steps=steps,
        rounds=rounds,
        threads=threads,
        clock=clock,
        memory=_memory_kind(target.device),
        settings=settings_of(base_request),
        device=target.device,
        rows=tuple(traced),
        versions=here.versions,
        machine=described(here),
    )


def described(here: hardware.Machine) -> dict[str, Any]:
    """Describe the machine that the numbers were measured on, as JSON values."""
    return {
        "platform": here.platform,
        "python": here.python,
        "cpu": next((device.name for device in here.devices if device.kind == "cpu"), None),
        "native": here.native,
        "cores": os.cpu_count(),
        "ram": here.ram_total,
        "devices": [{"torch_name": device.torch_name, "name": device.name} for device in here.devices],
    }


def _check(**values: Any) -> None:
    def refuse(name: str, why: str, fix: str) -> SettingsError:
        return SettingsError(f"Cannot use {name}={values[name]!r}", why, fix)

    def number(value: object, least: int) -> bool:
        return isinstance(value, int) and not isinstance(value, bool) and least <= value < 2**63

    for name, least in (("steps", 1), ("rounds", 1), ("batch", 1), ("threads", 1), ("seed", 0)):
        if not number(values[name], least) and not (name == "threads" and values[name] is None):
            raise refuse(name, f"it must be a whole number, at least {least}", f"Use for example {max(least, 1)}")
    size = values["size"]
    if size is not None and not (isinstance(size, tuple) and len(size) == 2 and all(number(n, 1) for n in size)):
        raise refuse("size", "it must be a width and a height in pixels", "Use for example (512, 512)")
    for name, choices in (("inputs", INPUT_KINDS), ("clock", CLOCKS)):
        if values[name] not in choices:
            raise refuse(name, f"it must be one of {', '.join(choices)}", f"Use {choices[0]!r}")


def _inputs(
    target: ModelUnderTest, kind: str, prompt: str, size: tuple[int, int] | None, batch: int, seed: int, threads: int,
    work: Path, workers: list[Worker],
) -> tuple[str, tuple[int, int], int]:  # fmt: skip
    """Write the inputs to `work`; return their kind, the image's width and height, and the batch size."""
    if kind == "random" or (kind == "auto" and target.pipeline is None):
        import torch

        from ...models import dummy_inputs
        from .inputs import batch_of

        size = size or (dummy_inputs.side_of(target.config) or SIDE,) * 2
        tensors = dummy_inputs.random(target.class_name, target.config, size, batch, seed)
        torch.save(tensors, work / INPUTS)
        return "random", size, batch_of(tensors)
    if target.pipeline is None:
        raise SettingsError(
            f"Cannot run {target.asked.path} on its pipeline's inputs",
            "it is a component without a pipeline",
            "Add base=<pipeline folder>, or inputs='random'",
        )
    request = replace(target.pipeline, progress=False)
    job = LoadSpec(
        asked=request, work=work, threads=threads, device=target.device, class_name=target.class_name,
        dtype=target.dtype, prompt=prompt, size=size, seed=seed,
    )  # fmt: skip
    worker = start(job, workers)
    try:
        answer = worker.ask("inputs")
    except Failed as error:
        raise error.as_error(f"Cannot get the inputs of {target.asked.path} from its pipeline") from error
    finally:
        worker.end()
        workers.remove(worker)
    width, height = answer["size"]
    return "pipeline", (width, height), answer["batch"]


def _room(here: hardware.Machine, device: str) -> int:
    """Return the bytes of memory that the models of a group may take together."""
    card = next((row for row in here.devices if row.torch_name == device and row.kind != "cpu"), None)
    free = here.ram_available if card is None or card.memory_free is None else card.memory_free
    return int(SHARE * free)


def _groups(todo: Sequence[Variant], room: int) -> list[list[Variant]]:
    """Split the variants that can be measured into groups that fit into memory, each headed by the reference."""
    first, *others = [one for one in todo if one.job is not None]
    groups, used = [[first]], first.bytes + BESIDE
    for one in others:
        if used + one.bytes + BESIDE > room and len(groups[-1]) > 1:
            groups.append([first])
            used = first.bytes + BESIDE
        groups[-1].append(one)
        used += one.bytes + BESIDE
    return groups


def _group(
    group: Sequence[Variant], number: int, rounds: int, steps: int, clock: str, target: ModelUnderTest,
    profile: str | Path | None, work: Path, workers: list[Worker], tell: JobProgress,
) -> Iterator[BenchmarkRow]:  # fmt: skip
    """Measure a group of variants, the first of which is the reference; yield a row for each."""
    running: list[_Running] = []
    begun = [(variant, _begun(variant, workers)) for variant in group]
    for _, worker in begun:  # none loads while another imports
        worker.ready()
    for variant, worker in begun:
        with tell.counted(f"{variant.row.name}: loading", 2):
            loaded = _loaded(variant, worker, not running, target, workers)
        if isinstance(loaded, BenchmarkRow):
            tell.skip(rounds)
            yield replace(loaded, group=number)
        else:
            running.append(loaded)
    lost: list[BenchmarkRow] = []
    for turn in range(rounds):
        for one in [*running] if turn % 2 == 0 else [*reversed(running)]:
            with tell.counted(f"{one.row.name}: round {turn + 1} of {rounds}", 1):
                try:
                    timing = one.worker.ask("turn", steps=steps)
                except Failed as error:
                    if one is running[0]:
                        raise error.as_error(f"Cannot run {target.asked.path}") from error
                    running.remove(one)
                    lost.append(_failed(one.row, error))
                    tell.skip(rounds - turn - 1)
                    continue
                one.wall.append(timing["wall"])
                one.cpu.append(timing["cpu"])
    if profile is not None and number == 0:
        _profile(running[:1], work, tell)
    if profile is not None:
        _profile(running[1:], work, tell)
    yield from lost
    for one in running:
        one.worker.end()
        workers.remove(one.worker)
        yield _measured(one, running[0], clock, number)


def _begun(one: Variant, workers: list[Worker]) -> Worker:
    """Start a worker process that imports what it will need."""
    assert one.job is not None
    worker = start(one.job, workers)
    worker.tell("prepare")
    return worker


def _loaded(
    one: Variant, worker: Worker, reference: bool, target: ModelUnderTest, workers: list[Worker]
) -> _Running | BenchmarkRow:
    """Load a variant and run its first step; on failure return its row with the reason."""
    gpu = target.device.startswith("cuda")
    try:
        worker.answer()
        worker.mark()
        loaded = worker.ask("load", watch=True)
        first = worker.ask("first", watch=True, keep=reference)
    except Failed as error:
        worker.interrupt()
        worker.end()
        workers.remove(worker)
        if reference:
            raise error.as_error(f"Cannot run {target.asked.path}") from error
        return _failed(one.row, error)
    peak = first.pop("peak", worker.peak)
    values = loaded | first | {"snr": None if first["snr"] is None else float(first["snr"])}
    row = replace(one.row, peak=peak, peak_resident=None if gpu else worker.peak_resident, **values)
    return _Running(variant=one, worker=worker, row=row)


def _failed(row: BenchmarkRow, error: Failed) -> BenchmarkRow:
    log.info("%s was not measured: %s", row.name, error.text)
    return replace(row, error=error.text, kind=error.kind)


def _profile(running: Iterable[_Running], work: Path, tell: JobProgress) -> None:
    for one in running:
        tell.text(f"{one.row.name}: profiling")
        try:
            one.worker.ask("profile", path=str(work / trace_name(one.row.name)))
        except Failed as error:
            log.warning("%s could not be profiled: %s", one.row.name, error.text)


def _measured(one: _Running, reference: _Running, clock: str, group: int) -> BenchmarkRow:
    mine, theirs = (getattr(row, clock) for row in (one, reference))
    return replace(
        one.row,
        step_seconds=statistics.median(one.wall),
        step_cpu_seconds=statistics.median(one.cpu),
        step_spread=(min(mine), max(mine)),
        ratio=statistics.median(a / b for a, b in zip(mine, theirs, strict=True)),
        group=group,
    )


def _against_ours(rows: Sequence[BenchmarkRow]) -> list[BenchmarkRow]:
    """Return the rows, those of peers with their load time relative to sdquant's row of the same scheme."""
    ours = {row.quant: row.load_cpu_seconds for row in rows if row.by == "sdquant" and row.load_cpu_seconds}

    def ratio(row: BenchmarkRow) -> float | None:
        mine = ours.get(row.quant)
        return row.load_cpu_seconds / mine if row.by != "sdquant" and row.load_cpu_seconds and mine else None

    return [replace(row, load_ratio=ratio(row)) for row in rows]


def _traced(rows: Sequence[BenchmarkRow], profile: str | Path | None, work: Path) -> list[BenchmarkRow]:
    """Copy the traces to the requested path; return the rows with the paths of their traces."""
    if profile is None:
        return [*rows]
    traced = []
    for row in rows:
        source, target = work / trace_name(row.name), trace_path(profile, row.name)
        if source.exists():
            with source.open("rb") as read, whole_file(target, source.stat().st_size) as file:
                shutil.copyfileobj(read, file)
            row = replace(row, trace=str(target))
        traced.append(row)
    return traced


def _memory_kind(device: str) -> str:
    if device.startswith("cuda"):
        return "GPU"
    return "RssAnon" if Path("/proc/self/status").exists() else "RSS"
