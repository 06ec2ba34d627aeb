"""Presets choose what the planner says fits: for FLUX.1's shapes on many cards, and for models that are loaded."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import sdquant
from sdquant import BadFileError, BudgetError, SettingsError, backends
from sdquant.compat import Query, hardware, look_up
from sdquant.models.generate import draw
from sdquant.planning import auto as automatic
from sdquant.planning.candidates import candidates, open_model
from sdquant.planning.estimate import step_time
from sdquant.planning.estimate.activation_allowance import MOST, allowance
from sdquant.planning.estimate.scheme_snr import USABLE, snr
from sdquant.planning.presets import PRESETS, Chosen, choose
from sdquant.planning.request import make_request
from sdquant.settings import Settings
from sdquant.training import digits

from . import pretended_timings, sparse_pipelines

GB = 10**9


def with_memory(size: float | None, kind: str = "cuda", ram: float = 64 * GB) -> hardware.Machine:
    """This machine as if its only compute device were a card, or its CPU, with so much memory free."""
    here = hardware.probe()
    memory = None if size is None else int(size)
    device = hardware.Device(kind=kind, index=0, name="a device", memory_total=memory, memory_free=memory)
    devices = (device,) if kind == "cpu" else (device, here.devices[-1])
    return dataclasses.replace(here, devices=devices, ram_available=int(ram), ram_total=int(ram))


@pytest.fixture(scope="module")
def big(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """FLUX.1's shapes."""
    return sparse_pipelines.flux(tmp_path_factory.mktemp("big") / "flux")


def chosen(path: Path, here: hardware.Machine, **call: Any) -> dict[str, Chosen]:
    """What each preset chooses; none of them fails."""
    return {row.name: choose(row.name, path, machine=here, **call) for row in PRESETS}


def needed(got: Chosen) -> int:
    """Bytes of the fast memory that a choice takes, its activations allowed for."""
    rest = allowance(sum(part.bytes_bf16 for part in got.plan.components))
    return min(got.plan.bytes, got.plan.budget or got.plan.bytes) + rest


def precision(got: Chosen) -> float:
    """Decibels of the scheme that a choice has for the transformer."""
    scheme = got.settings["quant.model"]
    return math.inf if scheme is None else snr(scheme) or 0.0


class TestPrecision:
    def test_more_bits_are_more_precise(self) -> None:
        said = {row.name: snr(row.name) for row in backends.schemes() if row.on_the_fly}
        assert None not in said.values()
        by_bits = {bits: [said[row.name] for row in backends.schemes() if row.name in said and row.bits == bits]
                   for bits in (2, 3, 4, 8)}  # fmt: skip
        assert max(by_bits[2]) < min(by_bits[3]) and max(by_bits[3]) < USABLE < min(by_bits[4])
        assert max(by_bits[4]) < min(by_bits[8])

    def test_options_count(self) -> None:
        assert (snr("int4,group_size=32") or 0) > (snr("int4") or 0) > (snr("int4,group_size=-1") or 0)

    def test_a_library_that_fails_takes_its_schemes_out(self, monkeypatch: pytest.MonkeyPatch) -> None:
        def broken(*_: Any) -> None:
            raise RuntimeError("no kernel image")

        monkeypatch.setattr(type(backends.get("quanto")), "encode", broken)
        snr.cache_clear()
        assert snr("qint8") is None and snr("nf4") is not None
        snr.cache_clear()


class TestFullSize:
    def test_cards_of_6_and_8_gb(self, big: Path) -> None:
        got = chosen(big, with_memory(24 * GB))
        for name, size in (("fits-6gb", 6 * GB), ("fits-8gb", 8 * GB)):
            one = got[name]
            assert one.settings["offload"] == "balanced" and precision(one) >= USABLE
            assert size - 0.02 * GB <= needed(one) <= size
            largest = max(part.bytes for part in one.plan.components)
            assert one.plan.budget is not None and one.plan.budget >= largest * 2 / 3 - 0.01 * GB
            assert f"of {size // GB}.00 GB" in one.why and "would take" in one.why
        assert precision(got["fits-8gb"]) >= precision(got["fits-6gb"])
        assert all(part.bytes < part.bytes_bf16 for part in got["fits-6gb"].plan.components if "vae" not in part.name)

    def test_more_memory_is_never_less_precise(self, big: Path) -> None:
        rows = [chosen(big, with_memory(size * GB))["best-quality"] for size in (6, 12, 24, 48)]
        said = [precision(one) for one in rows]
        assert said == sorted(said)
        assert rows[-1].settings.to_dict() == {}

    def test_fastest(self, big: Path) -> None:
        rows = {size: chosen(big, with_memory(size * GB))["fastest"] for size in (8, 16, 48)}
        assert rows[8].settings["offload"] == "balanced"
        assert rows[16].settings["offload"] == "none" and precision(rows[16]) >= USABLE
        assert rows[16].plan.bytes <= min(rows[8].plan.bytes, 12 * GB)
        assert rows[48].settings.to_dict() == {}

    def test_what_is_chosen_works_by_the_matrix(self, big: Path) -> None:
        here = with_memory(8 * GB)
        for one in chosen(big, here).values():
            for scheme in {part.scheme for part in one.plan.components if part.scheme is not None}:
                query = Query(
                    backend=backends.scheme(scheme).backend, scheme=scheme, mode="pre", runtime="default",
                    offload=one.settings["offload"], device="cuda", versions=here.versions,
                )  # fmt: skip
                assert look_up(query).verdict in ("works", "slow")

    def test_only_what_is_installed_and_tried(self, big: Path) -> None:
        here = with_memory(24 * GB)
        less = {name: version for name, version in here.versions.items() if name not in ("nncf", "sdnq")}
        rows = candidates(open_model(big, Settings(), dataclasses.replace(here, versions=less), {}))
        used = {backends.of_scheme(scheme).name for row in rows for scheme in row.schemes.values()}
        wanted = {name for name in backends.names() if name not in ("gguf", "hub", "nncf", "sdnq")}
        assert used == wanted or used == wanted | {"nncf"}  # which needs no package of its own
        rocm = candidates(open_model(big, Settings(), with_memory(24 * GB, "rocm"), {}))
        assert [row.schemes for row in rocm] == [{}]  # nobody has tried it there

    def test_nothing_fits(self, big: Path) -> None:
        with pytest.raises(BudgetError, match=r"needs 2\.") as raised:
            choose("best-quality", big, machine=with_memory(1.5 * GB))
        assert str(big) not in str(raised.value)
        with pytest.raises(BudgetError, match="of RAM"):
            choose("fits-6gb", big, machine=with_memory(24 * GB, ram=1 * GB))

    def test_a_card_that_does_not_tell(self, big: Path) -> None:
        with pytest.raises(BudgetError):
            choose("best-quality", big, machine=with_memory(None))
        assert choose("fits-8gb", big, machine=with_memory(None)).settings.to_dict()

    def test_what_is_held_will_be_free(self, big: Path) -> None:
        full = choose("best-quality", big, machine=with_memory(4 * GB), held=44 * GB)
        assert full.settings.to_dict() == {}


class TestShipped:
    def test_all_fit(self, sd: Path, flux: Path) -> None:
        for path in (sd, flux):
            for one in chosen(path, dataclasses.replace(hardware.probe(), native="not built")).values():
                assert one.settings.to_dict() == {} and one.why.startswith("not quantized")

    def test_the_fastest_where_that_is_measured(
        self, sd: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
    ) -> None:
        pretended_timings.pretend(monkeypatch, tmp_path)
        here = with_memory(10 * GB, "cpu")
        got = chosen(sd, here)
        assert all(one.settings.to_dict() == {} for name, one in got.items() if name != "fastest")
        auto = automatic.resolve(make_request(sd, quant="auto", device="cpu"), here)
        assert {name: spec and str(spec) for name, spec in auto.specs.items()} == {
            "unet": got["fastest"].settings["quant.model"]
        }
        assert auto.foreseen is not None and step_time.said(auto.foreseen) in got["fastest"].why

    def test_settings_that_have_nothing_to_do_with_it_stay(self, sd: Path) -> None:
        kept = {"skip": ("mid_block",), "cache": "off", "dtype": "bfloat16", "device": "cpu", "runtime": "plain"}
        given = Settings(
            {**kept, "quant.vae": "int8", "quant.model": "nf4", "offload": "balanced", "budget": "1MB", "mode": "post"}
        )
        one = choose("fits-8gb", sd, settings=given)
        assert one.settings == Settings(kept)

    def test_a_runtime_that_schemes_do_not_have(self, flux: Path) -> None:
        here = with_memory(15 * 10**6, "cpu")
        rows = candidates(open_model(flux, Settings({"runtime": "library"}), here, {}))
        assert {backends.of_scheme(scheme).name for row in rows for scheme in row.schemes.values()} == {
            "bnb",
            "comfy",
            "quanto",
        }

    @pytest.mark.parametrize("memory", [13.2e6, 16e6])
    def test_what_is_chosen_runs_within_its_budget(self, memory: float, flux: Path) -> None:
        one = choose("best-quality", flux, machine=with_memory(memory, "cpu"))
        asked = one.settings.request(str(flux), [part.name for part in one.plan.components], progress=False)
        values = {field.name: getattr(asked, field.name) for field in dataclasses.fields(asked)}
        pipe = sdquant.load_model(**values)
        prompts = [digits.prompt(number) for number in range(4)]
        seen = digits.judge().read(draw(pipe, prompts, seeds=range(4), steps=10))
        assert sum(a == b for a, b in zip(seen, range(4), strict=True)) >= 3  # the smallest has 3 bits, and says so
        peak = pipe.sdquant.offload.report()["peak"]
        assert peak <= (one.plan.budget or one.plan.bytes * 1.01)
        assert needed(one) <= memory
        assert ("degrade the images" in one.why) == (precision(one) < USABLE)

    def test_quantized_on_disk_stays_as_found(self, saved: Callable[..., Path]) -> None:
        for one in chosen(saved("nf4"), hardware.probe()).values():
            assert one.settings.to_dict() == {} and one.why.startswith("as found (nf4)")

    def test_a_lone_transformer(self, flux: Path) -> None:
        one = choose("best-quality", flux / "transformer", machine=with_memory(12e6, "cpu"))
        assert one.settings["quant.model"] is not None and "for the model" in one.why
        whole = choose("best-quality", flux / "transformer", base=str(flux))
        assert len(whole.plan.components) == 4

    def test_no_such_preset(self, sd: Path) -> None:
        with pytest.raises(SettingsError, match="fits-6gb"):
            choose("fits-1gb", sd)

    def test_no_such_model(self, tmp_path: Path) -> None:
        (tmp_path / "a.txt").write_text("text")
        with pytest.raises(BadFileError):
            choose("fits-6gb", tmp_path / "a.txt")


def test_the_allowance_of_small_models_is_small() -> None:
    assert allowance(10**7) == 10**7 and allowance(24 * GB) == MOST
