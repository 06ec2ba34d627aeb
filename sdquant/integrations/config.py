"""`sdquant.Config`, the quantization config for `from_pretrained` of diffusers and transformers. No torch."""

from __future__ import annotations

import json
import os
from collections.abc import Iterable, Mapping
from enum import Enum
from pathlib import Path
from typing import Any

from ..compat import COMPUTES
from ..core import METHOD, QuantSpec, registry
from ..errors import SettingsError
from ..planning import rule_checks
from ..rules import calibrated_schemes, qconfig, rules_of, with_rules, with_statistics
from ..utils.arguments import answered

_ALWAYS = ("quant_method", "quant", "skip")


class QuantMethod(str, Enum):
    """The `quant_method`. diffusers expects an enum with a value; both libraries look it up as a string."""

    SDQUANT = METHOD


class Config:
    """Quantization settings for a model that diffusers or transformers loads.

    It has the attributes that both libraries use of their own configs, but derives from neither, so that one class
    serves both and creating one imports neither.

    Args:
        quant: a scheme with its options: "int8", "nf4,double_quant".
            The default is "int8", or "rules" if rules are given.
        skip: modules to leave unquantized, by a part of their path or a pattern with `*`.
        rules: what is done with which layers, as for `load_model`.
        quant_stats: file of `sdquant calibrate`, for rules with act_static_scale, and for SVDQuant. A saved model
            contains the ranges and names no file.
        component: name of the model in the calibrated pipeline, to select its ranges ("text_encoder"). "" is the UNet
            or transformer.
        compute: "int8", "fp8" or "fp4" for products in so few bits, as for `load_model`. Not stored in a saved model.

    Raises:
        UnknownQuantError, SettingsError: no such scheme or option, or invalid rules.
    """

    @answered
    def __init__(
        self,
        quant: str | None = None,
        skip: Iterable[str] = (),
        rules: Any = None,
        quant_stats: str | Path | None = None,
        component: str = "",
        compute: str | None = None,
    ) -> None:
        self.quant_method = QuantMethod.SDQUANT
        self.rules = rules_of(rules)
        parsed = registry.parse(quant or ("int8" if self.rules is None else "rules"))
        self.quant = str(parsed)
        self.skip = [skip] if isinstance(skip, str) else list(skip)
        self.quant_stats = None if quant_stats is None else os.path.expanduser(os.fspath(quant_stats))
        self.component = component
        self.compute = compute
        if compute not in (None, *COMPUTES):
            raise SettingsError(
                f"Unknown compute mode {compute!r}",
                f"compute is one of {', '.join(COMPUTES)}",
                "Choose one of them, or leave it out",
            )
        if self.rules is None and parsed.takes_statistics and self.quant_stats is not None:
            self.spec: QuantSpec = with_statistics(parsed, self.quant_stats, component)
        elif self.rules is None:
            if self.quant_stats is not None or component:
                raise SettingsError(
                    f"Cannot use quant_stats={quant_stats!r} and component={component!r} without rules",
                    f"only rules, {calibrated_schemes()} use what calibration found",
                    "Pass rules=, or leave both out",
                )
            self.spec = parsed
        else:
            self.spec = with_rules(parsed, self.rules, self.quant_stats, component)
        rule_checks.refuse_computing(self.spec, compute)

    def to_dict(self) -> dict[str, Any]:
        """Return it as in a config.json."""
        values: dict[str, Any] = {"quant_method": METHOD, "quant": self.quant, "skip": self.skip}
        if self.rules is not None:
            values["rules"] = [qconfig.to_dict(row) for row in self.rules]
        return values | {
            name: getattr(self, name) for name in ("quant_stats", "component", "compute") if getattr(self, name)
        }

    def saved(self) -> Config:
        """Return the config for a model quantized with this one, without quant_stats: the ranges are in the model."""
        return Config(self.quant, self.skip, self.rules)

    def to_diff_dict(self) -> dict[str, Any]:
        """Return the same as `to_dict`; both libraries print it."""
        return self.to_dict()

    def to_json_string(self, use_diff: bool = True) -> str:
        """Return `to_dict` as JSON."""
        return json.dumps(self.to_dict(), indent=2, sort_keys=True) + "\n"

    @classmethod
    def from_dict(cls, config_dict: Mapping[str, Any], return_unused_kwargs: bool = False, **kwargs: Any) -> Any:
        """Return the config for a result of `to_dict`."""
        known = {name: config_dict.get(name) for name in ("quant", "rules", "quant_stats", "compute")}
        config = cls(**known, skip=config_dict.get("skip") or [], component=config_dict.get("component") or "")
        return (config, kwargs) if return_unused_kwargs else config

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Config) and self.to_dict() == other.to_dict()

    __hash__ = None  # type: ignore[assignment]  # its lists may change

    def __repr__(self) -> str:
        more = "".join(f", {name}={value!r}" for name, value in self.to_dict().items() if name not in _ALWAYS)
        return f"Config(quant={self.quant!r}, skip={self.skip!r}{more})"
