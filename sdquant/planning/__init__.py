"""From what the user asks for to what will be done, before weights are loaded.

In: the arguments of `load_model`, as a `Request`. Out: a `Plan`, which says what is done with every weight, its bytes,
the device and the offload mode. `auto` and presets choose here, and memory and time are estimated.
May import `offload` and what is below. Importing this imports no torch.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from ..utils.lazy_exports import lazy_exports

if TYPE_CHECKING:
    from .candidates import CHOSEN, Opened, needed_bytes, open_model
    from .choice_verdicts import VERDICTS, Verdict, verdict_on
    from .component_types import ROLES, Role, is_quantized_by_default, role_of
    from .estimate import activation_allowance, meta_models, peak_memory, step_time
    from .loaded_models import resolve_loaded, source_of_model
    from .mix import Beside, BytesBeside
    from .mix_blocks import MixBlock, blocks_of
    from .mix_curve import CurvePoint, MixCurve
    from .plan import ComponentPlan, Peak, Plan, folder_of, source_of
    from .preparation import check_schemes, plan_resolved, prepare, rounded_twice
    from .request import AUTO, NOT_QUANTIZED, RULES, Quant, Request, make_request
    from .resolve import device_of
    from .scheme_rows import GROUPS, SORTS, SchemeRow, SchemeTable, scheme_table
    from .settings_fields import AS_FOUND, Field, field_named, fields
    from .settings_values import Settings
else:
    __getattr__ = lazy_exports(__name__)

__all__ = [
    "AS_FOUND", "AUTO", "CHOSEN", "GROUPS", "NOT_QUANTIZED", "ROLES", "RULES", "SORTS", "VERDICTS", "Beside",
    "BytesBeside", "ComponentPlan", "CurvePoint", "Field", "MixBlock", "MixCurve", "Opened", "Peak", "Plan", "Quant",
    "Request", "Role", "SchemeRow", "SchemeTable", "Settings", "Verdict", "activation_allowance", "blocks_of",
    "check_schemes", "device_of", "field_named", "fields", "folder_of", "is_quantized_by_default",
    "knapsack", "locate", "make_request", "meta_models", "mix", "mix_arguments", "mix_blocks", "mix_curve",
    "mix_errors", "mix_pool", "mix_presets", "needed_bytes", "open_model", "peak_memory",
    "plan_resolved", "planner", "preparation", "prepare", "presets", "resolve_loaded", "role_of", "rounded_twice",
    "rule_checks", "scheme_table", "source_of", "source_of_model", "statistics_arguments", "step_time", "verdict_on",
    "weight_selection",
]  # fmt: skip
