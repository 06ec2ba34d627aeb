"""A1111 82a973c0 and Forge dfdcbab6, modules/options.py: OptionInfo and Options."""

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
        comment_before="",
        comment_after="",
        infotext=None,
        restrict_api=False,
        category_id=None,
    ):
        self.default, self.label, self.component, self.component_args = default, label, component, component_args
        self.onchange, self.section, self.refresh, self.category_id = onchange, section, refresh, category_id
        self.comment_before, self.comment_after = comment_before, comment_after
        self.infotext, self.restrict_api, self.do_not_save = infotext, restrict_api, False

    def info(self, info):
        self.comment_after += f"<span class='info'>({info})</span>"
        return self


class Options:
    def __init__(self, data_labels, restricted_opts):
        object.__setattr__(self, "data_labels", data_labels)
        object.__setattr__(self, "data", {k: v.default for k, v in data_labels.items() if not v.do_not_save})

    def __getattr__(self, item):
        if item in self.data:
            return self.data[item]
        return self.data_labels[item].default

    def __setattr__(self, key, value):
        info = self.data_labels.get(key)
        if info is None or info.do_not_save:
            return
        args = info.component_args
        if isinstance(args, dict) and args.get("visible", True) is False:
            raise RuntimeError(f"not possible to set '{key}' because it is restricted")
        self.data[key] = value

    def set(self, key, value, is_api=False, run_callbacks=True):
        before, option = self.data.get(key), self.data_labels[key]
        if before == value or option.do_not_save or (is_api and option.restrict_api):
            return False
        setattr(self, key, value)
        if run_callbacks and option.onchange is not None:
            try:
                option.onchange()
            except Exception as error:
                errors.display(error, f"changing setting {key} to {value}")
                setattr(self, key, before)
                return False
        return True

    def add_option(self, key, info):
        self.data_labels[key] = info
        if key not in self.data and not info.do_not_save:
            self.data[key] = info.default
