"""State shared by all open pages: the engine, the model folders, the settings in force, and the pages' tasks."""

from __future__ import annotations

import contextlib
import secrets
import threading
from pathlib import Path
from typing import TYPE_CHECKING

from ..errors import SdquantError, SettingsError
from ..settings import Settings, settings_file
from . import readings
from .background_task import TaskList
from .model_manager import Engine
from .page_memory import PageMemory
from .plan_preview import Target
from .scheme_tables import SchemeTables
from .step_traces import StepTraces

if TYPE_CHECKING:
    from collections.abc import Sequence

    from .model_folders import Roots


class Desk:
    """Shared by all pages of one server.

    Attributes:
        engine: holds the model. roots: the model folders. memory: what the page keeps. tasks: what is under way.
        schemes: the tables of schemes. traces: by which these foresee speeds.
        notes: a message to show once about the settings file, such as that it is damaged.
    """

    def __init__(self, roots: Roots, settings_path: Path) -> None:
        self.engine, self.roots, self.settings_path = Engine(), roots, settings_path
        self.tasks = TaskList()
        self.traces = StepTraces(settings_path.with_name(f"{settings_path.stem}-traces"))
        self.schemes, self.memory = SchemeTables(self.traces), PageMemory(settings_path)
        self._lock = threading.Lock()
        self.settings, self.notes = _settings(settings_path)

    def keep(self, settings: Settings) -> SdquantError | None:
        """Put settings in force, and save them.

        Returns:
            The error if their file cannot be written; the settings are then in force until the server ends.
        """
        with self._lock:
            self.settings = settings
            try:
                settings_file.save(self.settings_path, settings)
            except SdquantError as error:
                return error
        return None

    @staticmethod
    def download_folder() -> Path:
        """Create a folder for downloads among gradio's own, with a name like theirs: the guard serves no others.

        The server deletes it when it ends.
        """
        from gradio.utils import get_upload_folder

        folder = Path(get_upload_folder()) / secrets.token_hex(32)
        folder.mkdir(mode=0o700, parents=True)
        return folder

    def models(self) -> list[str]:
        """Return the names of the models that can be loaded."""
        return [entry.name for entry in self.roots.models()]

    def bases(self) -> list[str]:
        """Return the names of the pipelines that can supply the missing components of a single file."""
        return [entry.name for entry in self.roots.models() if entry.kind == "pipeline"]

    def companions(self, model: str | None) -> list[tuple[str, str]]:
        """Return what a single file can be used with, each as the page shows it and as it comes back: what may be said
        of a file that does not say it itself, pipelines, files of other parts, and configs."""
        entries = sorted(self.roots.models(), key=lambda entry: entry.kind != "pipeline")
        names = [entry.name for entry in (*entries, *self.roots.configs()) if entry.name != model]
        return [*self.readings(model).items(), *((name, name) for name in names)]

    def readings(self, model: str | None) -> dict[str, str]:
        """Return what may be said of a file that cannot be read without: words, and the config that says it."""
        if not model or self.is_pipeline(model):
            return {}
        try:
            self.target(model, None).components(Settings())
        except SdquantError as error:
            return readings.readings(error)
        return {}

    def base_for(self, model: str) -> str | None:
        """Return the first pipeline that can supply the missing components of this model, or else the first of all."""
        bases, configs = self.bases(), [*self.readings(model).values()][:1]
        for base in bases:
            try:
                self.target(model, [base, *configs]).components(Settings())
            except SdquantError:  # of another family, or without a place for it
                continue
            return base
        return next(iter(bases), None)

    def is_pipeline(self, name: str) -> bool:
        """Return whether the model of this name is a whole pipeline."""
        return any(entry.name == name and entry.kind == "pipeline" for entry in self.roots.models())

    def target(self, model: str, others: Sequence[str] | str | None) -> Target:
        """Return the model of this name, with others for its missing components unless it is a pipeline.

        Args:
            others: names of at most one pipeline, of files of text encoders or a VAE, and at most one config, as the
                name of a file or as JSON.

        Raises:
            SettingsError: a name that is not below the folders of models, two pipelines, or two configs.
        """
        path = str(self.roots.resolve(model))
        if not others or self.is_pipeline(model):
            return Target(path=path)
        every = [others] if isinstance(others, str) else list(others)
        configs = [name for name in every if isinstance(name, str) and readings.is_config(name)]
        if len(configs) > 1:
            why = "each of them says what the file is"
            raise SettingsError(f"Cannot use {model} with two configs", why, "Remove one of them")
        names = [name for name in every if name not in configs]
        paths = {name: str(self.roots.resolve(name)) for name in names}
        bases = [name for name in paths if self.is_pipeline(name)]
        if len(bases) > 1:
            why = f"{' and '.join(bases)} are whole pipelines, and one of them lends what the file lacks"
            raise SettingsError(f"Cannot use {model} with two pipelines", why, "Remove one of them")
        base = paths.pop(bases[0]) if bases else None
        config = next(map(self.config_of, configs), None)
        return Target(path=path, base=base, parts=tuple(paths.values()), config=config)

    def config_of(self, name: str) -> str:
        """Return what `load_model` takes for a config: JSON as it is, or the path of a file of that name.

        Raises:
            SettingsError: a name that is not below the folders of models.
        """
        return name if readings.is_text(name) else str(self.roots.resolve(name))

    @staticmethod
    def stamp(target: Target) -> tuple[object, ...]:
        """Return what changes when files come into or leave a folder of a model, or one of its files is written."""
        files: list[object] = []
        config = target.config if target.config and not readings.is_text(target.config) else None
        for place in map(Path, filter(None, (target.path, target.base, *target.parts, config))):
            inside = (*place.glob("*"), *place.glob("*/*")) if place.is_dir() else ()
            for path in (place, *inside):
                with contextlib.suppress(OSError):
                    stat = path.stat()
                    files.append((str(path.relative_to(place.parent)), stat.st_mtime_ns, stat.st_size))
        return tuple(files)


def waiter(session: object, tab: str) -> str:
    """Return the name that a tab of an open page waits for a job by."""
    return f"{session} {tab}"


def _settings(path: Path) -> tuple[Settings, str]:
    """Read the settings file; return the settings, and a message about the file, if any.

    A damaged file is renamed, never overwritten. Anything that is not a file, or cannot be renamed, stays in place:
    settings then last until the server ends.
    """
    try:
        return settings_file.load(path), ""
    except SdquantError as error:
        message = f"The settings file cannot be used: {error.why}."
    not_kept = "All settings are at their defaults now, and changes cannot be saved."
    if not path.is_file():
        return Settings(), f"{message} {not_kept}"
    try:
        backup = settings_file.set_aside(path)
    except SdquantError as error:
        return Settings(), f"{message} It cannot be set aside: {error.why}. {not_kept}"
    return Settings(), f"{message} It is kept as {backup.name}; all settings are at their defaults now."
