"""SD.Next 058a7f0cf, modules/options.py and modules/options_handler.py: OptionInfo and Options."""

from modules import errors


class OptionInfo:
    def __init__(
        self,
        default=None,
        label="",
        component=None,
        component_args=None,
        onchange=None,
        section=None,
        refresh=None,
        folder=False,
        submit=None,
        comment_before="",
        comment_after="",
        category_id=None,
        *args,
        **kwargs,
    ):
        self.default, self.label, self.component, self.component_args = default, label, component, component_args
        self.onchange, self.section, self.refresh, self.folder, self.submit = onchange, section, refresh, folder, submit
        self.comment_before, self.comment_after = comment_before, comment_after
        args = {} if callable(component_args) else (component_args or {})
        self.visible = args.get("visible", True) and len(label) > 2

    def info(self, info):
        self.comment_after += f"<span class='info'>({info})</span>"
        return self


class Options:
    """`data` has what was stored; what nobody knows stays in it."""

    def __init__(self, options_templates, stored):
        super().__setattr__("data_labels", options_templates)
        super().__setattr__("data", {name: row.default for name, row in options_templates.items()} | stored)

    def __getattr__(self, item):
        if item in self.data:
            return self.data[item]
        if item in self.data_labels:
            return self.data_labels[item].default
        return super().__getattribute__(item)

    def __setattr__(self, key, value):
        if key in self.data_labels or key in self.data:
            self.data[key] = value
            return None
        return super().__setattr__(key, value)

    def set(self, key, value, force=False):
        before = self.data.get(key, self.data_labels[key].default)
        if before == value and not force:
            return False
        setattr(self, key, value)
        if self.data_labels[key].onchange is not None:
            try:
                self.data_labels[key].onchange()
            except Exception as error:
                errors.display(error, "Error in onchange callback")
                setattr(self, key, before)
                return False
        return True

    def add_option(self, key, info):
        self.data_labels[key] = info
