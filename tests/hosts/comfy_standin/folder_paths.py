"""Where models are and images go, as in `folder_paths.py`. Tests set the two folders."""

import os

folder_names_and_paths = {}
output_directory = ""


def get_output_directory():
    return output_directory


def get_folder_paths(folder_name):
    return list(folder_names_and_paths.get(folder_name, ([], set()))[0])


def is_within_directory(directory, target):
    directory, target = os.path.realpath(directory), os.path.realpath(target)
    return os.path.commonpath((directory, target)) == directory


def get_full_path(folder_name, filename):
    filename = os.path.relpath(os.path.join("/", filename), "/")
    for folder in folder_names_and_paths[folder_name][0]:
        path = os.path.join(folder, filename)
        if os.path.isfile(path):
            return path
    return None


def get_filename_list(folder_name):
    folders, extensions = folder_names_and_paths[folder_name]
    found = set()
    for folder in folders:
        for place, _, names in os.walk(folder, followlinks=True):
            found |= {os.path.relpath(os.path.join(place, name), folder) for name in names}
    return sorted(name for name in found if os.path.splitext(name)[-1].lower() in extensions)


def get_save_image_path(filename_prefix, output_dir, image_width=0, image_height=0):
    subfolder, filename = os.path.split(os.path.normpath(filename_prefix))
    folder = os.path.join(output_dir, subfolder)
    if not is_within_directory(output_dir, folder):
        raise Exception("**** ERROR: Saving image outside the output folder is not allowed.")
    os.makedirs(folder, exist_ok=True)
    counters = []
    for name in os.listdir(folder):
        digits = name[len(filename) + 1 :].split(".")[0].split("_")[0]
        if name.startswith(f"{filename}_") and digits.isdigit():
            counters.append(int(digits))
    return folder, filename, max(counters, default=0) + 1, subfolder, filename_prefix
