"""The fields of a settings page: made from Request, the registry and the roles, and nothing else."""

from __future__ import annotations

import dataclasses

import pytest

import sdquant
from sdquant import backends
from sdquant.planning.component_types import is_quantized_by_default
from sdquant.planning.request import Request
from sdquant.planning.settings_fields import fields
from sdquant.settings import ROLES, Field, Settings, field_named, role_of


def test_every_setting_of_request_has_a_field() -> None:
    there = {row.name for row in fields()}
    wanted = {row.name for row in dataclasses.fields(Request) if row.metadata["setting"] and row.name != "quant"}
    assert there == wanted | {f"quant.{role.name}" for role in ROLES}


def test_every_scheme_that_quantizes_on_the_fly_is_a_choice() -> None:
    for role in ROLES:
        choices = field_named(f"quant.{role.name}").choices
        assert set(choices[2:]) == {row.name for row in backends.schemes() if row.on_the_fly}


def test_fields_have_help_and_labels() -> None:
    assert all(row.help and len(row.label) > 2 for row in fields())  # SD.Next hides options with shorter labels


@pytest.mark.parametrize("row", fields(), ids=lambda row: row.name)
def test_defaults_go_through_their_widgets(row: Field) -> None:
    assert row.parse(row.shown(row.default)) == row.default


@pytest.mark.parametrize(
    ("name", "shown", "value"),
    [
        ("skip", "norm_out, proj_*,", ("norm_out", "proj_*")),
        ("skip", ["a", "b"], ("a", "b")),
        ("budget", " 6GB ", "6GB"),
        ("budget", "", None),
        ("budget", 5, 5),
        ("runtime", "default", None),
        ("runtime", "plain", "plain"),
        ("quant.model", "as found", None),
        ("quant.model", "nf4,double_quant", "nf4,double_quant"),
        ("cache_limit", "", "50GB"),
    ],
)
def test_what_widgets_hold(name: str, shown: object, value: object) -> None:
    assert field_named(name).parse(shown) == value


@pytest.mark.parametrize(("name", "shown"), [("allow_pickle", "yes"), ("allow_pickle", 1), ("offload", ["none"])])
def test_what_no_widget_holds(name: str, shown: object) -> None:
    with pytest.raises(sdquant.SettingsError, match=name):
        field_named(name).parse(shown)


@pytest.mark.parametrize(
    ("component", "role"),
    [
        ("unet", "model"), ("transformer", "model"), ("transformer_2", "model"), ("model", "model"),
        ("text_encoder", "text_encoder"), ("text_encoder_3", "text_encoder"), ("vae", "vae"),
        ("safety_checker", None), ("image_encoder", None),
        # diffusers' names of two words: Ideogram 4, Versatile Diffusion, Stable Cascade.
        ("unconditional_transformer", "model"), ("text_unet", "model"), ("prior_prior", "model"),
        ("prior_text_encoder", "text_encoder"), ("prior_image_encoder", None), ("vae_decoder", "vae"),
        ("diffusion_decoder", None),
    ],
)  # fmt: skip
def test_roles(component: str, role: str | None) -> None:
    found = role_of(component)
    assert (found.name if found else None) == role
    # What the page offers a scheme for is what is quantized by default, but for the VAE.
    assert (role in ("model", "text_encoder")) == is_quantized_by_default(component)


class TestSettings:
    def test_request_has_a_scheme_for_each_component_that_plays_a_role(self) -> None:
        chosen = Settings({"quant.model": "nf4", "quant.text_encoder": "int8", "offload": "balanced", "budget": "6GB"})
        asked = chosen.request("x", ["transformer", "text_encoder", "text_encoder_2", "vae"], base="y")
        assert asked.quant == {"transformer": "nf4", "text_encoder": "int8", "text_encoder_2": "int8"}
        assert (asked.offload, asked.budget, asked.base) == ("balanced", "6GB", "y")

    def test_nothing_chosen_is_as_found(self) -> None:
        assert Settings().request("x", ["unet", "vae"]) == Request(path="x")

    def test_to_dict_is_what_differs(self) -> None:
        values = {"quant.model": "nf4", "skip": ["norm_out"], "allow_pickle": True}
        assert Settings(values).to_dict() == values
        assert Settings(Settings(values).to_dict()) == Settings(values)
        assert Settings().to_dict() == {}

    def test_but(self) -> None:
        near = Settings({"offload": "balanced", "budget": "6GB"}).but({"offload": "none", "budget": None})
        assert near == Settings()

    @pytest.mark.parametrize(
        ("values", "error"),
        [
            ({"offload": "nowhere"}, sdquant.UnknownOffloadError),
            ({"quant.vae": "nf5"}, sdquant.UnknownQuantError),
            ({"colour": "red"}, sdquant.SettingsError),
            ({"budget": "6GB"}, sdquant.SettingsError),
            ({"budget": "much", "offload": "balanced"}, sdquant.SettingsError),
            ({"allow_incompatible": "no"}, sdquant.SettingsError),
            ({"device": "abacus"}, sdquant.SettingsError),
            ({"cache_limit": "-1"}, sdquant.SettingsError),
            ({"mode": 3}, sdquant.SettingsError),
        ],
    )
    def test_values_that_cannot_be(self, values: dict[str, object], error: type[Exception]) -> None:
        with pytest.raises(error):
            Settings(values)
