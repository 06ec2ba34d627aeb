"""A process that holds one model: `python -m sdquant.evaluation.benchmark.worker`, controlled by `worker_pool.Worker`.

It reads a pickled `Job` from standard input, then a JSON value per line: the name of a command and its arguments. It
answers each with a line of JSON on its original standard output: {"ok": {...}} or {"error": {...}}. Whatever libraries
print goes to standard error. It exits at the end of its input.
"""

from __future__ import annotations

import contextlib
import gc
import json
import os
import pickle
import sys
import time
import warnings
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from ...utils.signals import obey_only_parent

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from torch import nn

    from ...models import Inputs
    from .specs import LoadSpec


class HeldModel:
    """The model of a job, and the commands for it."""

    def __init__(self, job: LoadSpec) -> None:
        self.job = job
        self._pipe: Any = None
        self._main: nn.Module | None = None
        self._inputs: Inputs | None = None

    def prepare(self) -> dict[str, Any]:
        """Import all modules that a model of this kind needs, so that load times exclude imports."""
        import torch

        from ...models import quiet

        torch.set_num_threads(self.job.threads)
        self._load = self._prepare_peer() if self.job.peer else self._prepare_ours()
        with quiet():
            import diffusers.models.modeling_utils  # noqa: F401
        if self.on_gpu:
            torch.zeros(1, device=self.job.device, dtype=torch.float32)  # the context is not the model's
            torch.cuda.reset_peak_memory_stats(self.job.device)
        gc.collect()
        return {}

    def _prepare_ours(self) -> Callable[[], Any]:
        import torch

        from ...core import Unfit
        from ...loading import import_classes, load_planned
        from ...planning import prepare

        request = self.job.asked
        plan = prepare(request)
        import_classes(plan)
        from ...loading import quantizer  # noqa: F401

        for part in plan.components:
            spec = part.spec
            if spec is not None and part.action == "encode" and not hasattr(spec, "rules"):
                # The first quantization of a process imports the scheme's library: that is not loading.
                with contextlib.suppress(Unfit):
                    spec.scheme.codec.encode(torch.ones(64, 64, dtype=torch.bfloat16, device="cpu"), spec)
        return lambda: load_planned(request, plan)

    def _prepare_peer(self) -> Callable[[], Any]:
        from ...models import model_class
        from .baselines import peer

        assert self.job.peer is not None and self.job.scheme is not None
        row, scheme = peer(self.job.peer), self.job.scheme
        model_class("diffusers", self.job.class_name)
        row.prepare()
        inputs = self._read()
        return lambda: row.load(self.job, row.formats[scheme], inputs)

    @property
    def on_gpu(self) -> bool:
        """Return whether torch tracks the memory of the device."""
        return self.job.device.startswith("cuda")

    def _read(self) -> Inputs:
        import torch

        from ...models import dummy_inputs
        from .specs import INPUTS

        args, values = torch.load(self.job.work / INPUTS, weights_only=True)
        device, dtype = torch.device(self.job.device), getattr(torch, self.job.dtype)
        return dummy_inputs.moved(tuple(args), device, dtype), dummy_inputs.moved(values, device, dtype)

    def load(self) -> dict[str, Any]:
        """Load the model; return load times in seconds, the bytes of its weights and the runtime."""
        from ...models import main_part
        from ...offload import weight_bytes

        wall, cpu = time.perf_counter(), time.process_time()
        self._pipe = self._load()
        self._wait()
        wall, cpu = time.perf_counter() - wall, time.process_time() - cpu
        self._main = main_part(self._pipe).eval()
        self._inputs = self._read()
        kind = self._pipe.sdquant.plan.components if not self.job.peer else ()
        runtimes = sorted({part.runtime for part in kind if part.weights})
        return {
            "load_seconds": wall,
            "load_cpu_seconds": cpu,
            "bytes": weight_bytes(self._main),
            "runtime": "+".join(runtimes) or None,
        }

    def first(self, keep: bool) -> dict[str, Any]:
        """Run the first step; return its seconds and its SNR in dB. `keep`: save the output as the reference."""
        import torch

        from .inputs import output, snr
        from .specs import WANTED

        begin = time.perf_counter()
        result = self._step()
        self._wait()
        values: dict[str, Any] = {"first_seconds": time.perf_counter() - begin, "snr": None}
        if self.on_gpu:
            values["peak"] = torch.cuda.max_memory_allocated(self.job.device)
        out = output(result)
        if not bool(torch.isfinite(out).all()):
            raise ArithmeticError("its output has values that are not finite")
        if keep:
            torch.save(out, self.job.work / WANTED)
        else:
            far = snr(out, torch.load(self.job.work / WANTED, weights_only=True))
            values["snr"] = "inf" if far == float("inf") else far
        return values

    def turn(self, steps: int) -> dict[str, Any]:
        """Run some steps; return the wall time and the CPU time of one, in seconds."""
        wall, cpu = time.perf_counter(), time.process_time()
        for _ in range(steps):
            self._step()
        self._wait()
        return {
            "wall": (time.perf_counter() - wall) / steps,
            "cpu": (time.process_time() - cpu) / steps,
        }

    def profile(self, path: str) -> dict[str, Any]:
        """Profile one step with torch's profiler and write a Chrome trace."""
        from torch.profiler import ProfilerActivity, profile

        which = [ProfilerActivity.CPU, *([ProfilerActivity.CUDA] if self.on_gpu else [])]
        with self._layers_named(), profile(activities=which, record_shapes=True) as profiler:
            self._step()
            self._wait()
        profiler.export_chrome_trace(path)
        return {}

    @contextmanager
    def _layers_named(self) -> Iterator[None]:
        """Context in which traces show quantized layers by scheme and name: the profiler does not see kernels in C."""
        from torch.profiler import record_function

        from ...nn import QuantizedLayer

        running: list[Any] = []
        hooks = []
        assert self._main is not None
        for name, layer in self._main.named_modules():
            if not isinstance(layer, QuantizedLayer):
                continue

            def begin(*_: Any, text: str = f"sdquant {layer.spec.scheme} {name}") -> None:
                running.append(record_function(text))
                running[-1].__enter__()

            def end(*_: Any) -> None:
                running.pop().__exit__(None, None, None)

            hooks += [layer.register_forward_pre_hook(begin), layer.register_forward_hook(end)]
        try:
            yield
        finally:
            for hook in hooks:
                hook.remove()

    def inputs(self) -> dict[str, Any]:
        """Capture and save the inputs that the pipeline passes to its UNet or transformer."""
        import torch

        from ...loading import load
        from .inputs import batch_of, of_pipeline
        from .specs import INPUTS

        torch.set_num_threads(self.job.threads)
        pipe = load(self.job.asked)
        tensors, size = of_pipeline(pipe, self.job.prompt, self.job.size, self.job.seed)
        torch.save(tensors, self.job.work / INPUTS)
        pipe.sdquant.offload.remove()
        return {"size": size, "batch": batch_of(tensors)}

    def end(self) -> dict[str, Any]:
        """Release the model, and the files of its offload."""
        if hasattr(self._pipe, "sdquant"):
            self._pipe.sdquant.offload.remove()
        self._pipe = self._main = None
        return {}

    def _step(self) -> Any:
        import torch

        assert self._main is not None and self._inputs is not None
        args, values = self._inputs
        with torch.no_grad():
            return self._main(*args, **values)

    def _wait(self) -> None:
        """Wait until the GPU has finished its work."""
        if self.job.device != "cpu":
            import torch

            torch.accelerator.synchronize()


def _said(error: Exception) -> dict[str, Any]:
    from ...errors import SdquantError

    if isinstance(error, SdquantError):
        return {"kind": type(error).__name__, "text": str(error), "parts": [error.what, error.why, error.fix]}
    text = f"{type(error).__name__}: {error}".strip()
    return {"kind": type(error).__name__, "text": text, "parts": None}


def main() -> None:
    """Execute commands until the input ends."""
    obey_only_parent()  # whose SIGTERM leaves time to remove the folders of the offload
    answers = os.fdopen(os.dup(1), "wb", buffering=0)
    os.dup2(2, 1)
    warnings.simplefilter("ignore")
    commands = sys.stdin.buffer
    model = HeldModel(pickle.load(commands))
    for line in commands:
        name, values = json.loads(line)
        try:
            answer = {"ok": getattr(model, name)(**values)}
        except Exception as error:
            answer = {"error": _said(error)}
        answers.write(json.dumps(answer).encode() + b"\n")
    model.end()
    os._exit(0)  # the libraries' ends take seconds, and there is nothing left that they would tidy


if __name__ == "__main__":
    main()
