"""The user's own functions that a recipe names as ``package.module:function``.

The command line reads only their source: the module, the name and its arguments, without an import.
The processes that train import them, call them and name file, function and line of what fails.
"""

import ast
import difflib
import hashlib
import os
import re
import sys
import sysconfig
import traceback
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from importlib import import_module
from importlib.machinery import ModuleSpec, PathFinder
from pathlib import Path
from types import FrameType, ModuleType
from typing import Any

from shardyard.errors import RequestError, ShardyardError
from shardyard.own_processes import add_current_folder_to_path

_FORM = re.compile(r"(?:[^\W\d]\w*\.)*[^\W\d]\w*:[^\W\d]\w*")
_OURS = Path(__file__).parent
_OUT_OF_MEMORY = ("out of memory", "can't allocate memory", "not enough memory")


@dataclass(frozen=True, kw_only=True)
class Contract:
    """Call of a function of the user's own, and what it must return."""

    call: str
    """Call as a user would write it: ``loss(outputs, batch)``."""
    arguments: int | None
    """Number of positional arguments; None: they are not checked."""
    returns: str
    """End of the sentence "It must return ..."."""


@dataclass(frozen=True, kw_only=True)
class FunctionSource:
    """Source of a named function, found without an import."""

    file: Path | None
    """None: a module without a source file, such as a compiled one."""
    wrong: str
    """Why the name cannot be used, with the likeliest fix; empty: nothing is known to be wrong."""
    is_missing: bool = False
    """Whether there is no such module on this machine."""


def find_source(import_path: str, contract: Contract) -> FunctionSource:
    """Find a function by its import path in the current folder and on Python's path."""
    if not _FORM.fullmatch(import_path):
        wrong = (
            f"={import_path!r} is not of the form package.module:function.{_as_form(import_path)}"
        )
        return FunctionSource(file=None, wrong=f"{wrong} It is called as {contract.call}.")
    module, _, name = import_path.partition(":")
    found, lacks = _spec(module)
    if found is None:
        meant = _as_form(import_path)
        text = (
            f"={import_path}: module {lacks} is neither in {Path.cwd()} nor installed.{meant} "
            "Start in its folder, set PYTHONPATH, or install it."
        )
        return FunctionSource(file=None, wrong=text, is_missing=True)
    if not found.origin or not found.origin.endswith(".py"):
        return FunctionSource(file=None, wrong="")
    file = Path(found.origin)
    try:
        tree = ast.parse(file.read_bytes())
    except SyntaxError as error:
        wrong = f"={import_path}: {file}:{error.lineno}: {error.msg}."
        return FunctionSource(file=file, wrong=wrong)
    except (OSError, ValueError) as error:
        return FunctionSource(file=file, wrong=f"={import_path}: {file} cannot be read: {error}.")
    return FunctionSource(file=file, wrong=_name_error(tree, import_path, name, file, contract))


def _as_form(text: str) -> str:
    """The sentence with the name that was meant: of a file, or with a dot before the function."""
    file, colon, name = text.partition(":")
    if colon and file.endswith(".py"):
        module = file.removesuffix(".py").removeprefix("./").replace("/", ".")
    elif not colon and "." in text:
        module, _, name = text.rpartition(".")
    else:
        files = [path.stem for path in Path.cwd().glob("*.py")] if colon else []
        module = next(iter(difflib.get_close_matches(file, files, n=1)), "")
    meant = f"{module}:{name}"
    return f" Did you mean {meant}?" if _FORM.fullmatch(meant) else ""


def installed_file(file: Path) -> bool:
    """Whether a file is of an installed package or of Python, not of the user's own folders."""
    if file.is_relative_to(Path(sysconfig.get_path("stdlib"))):
        return True
    return any(part in ("site-packages", "dist-packages") for part in file.parts)


def archive_names(import_path: str) -> tuple[str, str]:
    """Names of a function's module in a folder on Python's path, as a file or as a package."""
    name = import_path.partition(":")[0].replace(".", "/")
    return f"{name}.py", f"{name}/__init__.py"


def _spec(module: str) -> tuple[ModuleSpec | None, str]:
    """The module's spec, or None and the part of its name that is not there."""
    # Processes that this one starts have the variable, which may be newer than this one's path.
    given = [each for each in os.environ.get("PYTHONPATH", "").split(os.pathsep) if each]
    folders: list[str] | None = [str(Path.cwd()), *given, *sys.path]
    name, spec = "", None
    for part in module.split("."):
        name = f"{name}.{part}" if name else part
        spec = None if folders is None else PathFinder.find_spec(name, folders)
        if spec is None:
            return None, name
        inner = spec.submodule_search_locations
        folders = None if inner is None else list(inner)
    return spec, ""


def _name_error(
    tree: ast.Module, import_path: str, name: str, file: Path, contract: Contract
) -> str:
    names: dict[str, ast.stmt] = {}
    is_open = False
    for node in _top_level(tree.body):
        match node:
            case ast.FunctionDef() | ast.AsyncFunctionDef() | ast.ClassDef():
                names[node.name] = node
                is_open = is_open or node.name == "__getattr__"
            case ast.Import() | ast.ImportFrom():
                bound = [each.asname or each.name.partition(".")[0] for each in node.names]
                is_open = is_open or "*" in bound
                names |= dict.fromkeys(bound, node)
            case ast.Assign() | ast.AnnAssign():
                targets = node.targets if isinstance(node, ast.Assign) else [node.target]
                inside = (each for target in targets for each in ast.walk(target))
                names |= {each.id: node for each in inside if isinstance(each, ast.Name)}
            case _:
                pass
    if name not in names:
        if is_open:
            return ""
        callables = (ast.FunctionDef, ast.ClassDef)
        defined = [each for each, node in names.items() if isinstance(node, callables)]
        near = difflib.get_close_matches(name, defined, n=1, cutoff=0.7)
        there = f" It has {', '.join(defined[:5])}." if defined else ""
        there += f" Did you mean {import_path.partition(':')[0]}:{near[0]}?" if near else ""
        return f"={import_path}: {file} defines no {name}.{there} It is called as {contract.call}."
    node = names[name]
    if isinstance(node, ast.AsyncFunctionDef):
        return f"={import_path}: {file}:{node.lineno}: {name} is async. Write a plain function."
    if not isinstance(node, ast.FunctionDef) or contract.arguments is None:
        return ""
    return _argument_error(node, import_path, file, contract)


def _argument_error(node: ast.FunctionDef, import_path: str, file: Path, contract: Contract) -> str:
    given, wanted = node.args, contract.arguments
    assert wanted is not None
    most = len(given.posonlyargs) + len(given.args)
    least = most - len(given.defaults)
    named = [
        each.arg
        for each, default in zip(given.kwonlyargs, given.kw_defaults, strict=True)
        if default is None
    ]
    if least <= wanted and (wanted <= most or given.vararg) and not named:
        return ""
    takes = ", ".join([each.arg for each in (*given.posonlyargs, *given.args)] + named) or "nothing"
    return (
        f"={import_path}: {file}:{node.lineno}: {node.name} takes {takes}, and it is called as "
        f"{contract.call}. Change its arguments, or give the others defaults."
    )


def _top_level(body: Iterable[ast.stmt]) -> Iterator[ast.stmt]:
    """Statements of a module, also those under ``if``, ``try`` and ``with``."""
    for node in body:
        yield node
        if isinstance(node, ast.If | ast.Try | ast.With):
            yield from _top_level(node.body)
            yield from _top_level(getattr(node, "orelse", ()))
            for handler in getattr(node, "handlers", ()):
                yield from _top_level(handler.body)


@dataclass(frozen=True, kw_only=True)
class OwnFunction:
    """A function of the user's own, imported."""

    setting: str
    """Setting that names it."""
    import_path: str
    function: Callable[..., Any]
    contract: Contract

    @property
    def name(self) -> str:
        """Name of the function in its module."""
        return self.import_path.partition(":")[2]

    @property
    def location(self) -> str:
        """File and line of its definition."""
        code = getattr(self.function, "__code__", None)
        if code is None:
            module = sys.modules.get(self.import_path.partition(":")[0])
            return str(getattr(module, "__file__", "") or self.import_path)
        return f"{code.co_filename}:{code.co_firstlineno}"

    def __call__(self, *arguments: Any, **named: Any) -> Any:
        """Call it.

        Raises:
            RequestError: It raised; the message names its line, its arguments and its contract.
        """
        try:
            return self.function(*arguments, **named)
        except ShardyardError:
            raise
        except Exception as error:
            # An allocator's error has its own report, with what holds the memory.
            if any(words in str(error) for words in _OUT_OF_MEMORY):
                raise
            raise self.failed(error, *arguments) from error

    def failed(self, error: BaseException, *arguments: Any) -> RequestError:
        """The error to raise where the function raised one."""
        given = f" It got {', '.join(map(describe, arguments))}." if arguments else ""
        return RequestError(
            f"{self.setting}={self.import_path} failed at {self.line_of(error)}.{given} It is "
            f"called as {self.contract.call} and must return {self.contract.returns}."
        )

    def line_of(self, error: BaseException) -> str:
        """The last line of the user's code that an error went through, and the error."""
        root = root_of(self.import_path)
        where, text = self.location, ""
        for frame, line in traceback.walk_tb(error.__traceback__):
            if _is_below(frame, root):
                where = f"{frame.f_code.co_filename}:{line} in {frame.f_code.co_name}"
                text = _source_line(frame.f_code.co_filename, line)
        said = f"`{text}`: " if text else ""
        return f"{where}: {said}{type(error).__name__}: {error}"

    def returned(self, answer: Any, reason: str = "") -> RequestError:
        """The error to raise where the function returned something else than it must."""
        because = f" ({reason})" if reason else ""
        return RequestError(
            f"{self.setting}={self.import_path} ({self.location}) returned {describe(answer)}"
            f"{because}. It is called as {self.contract.call} and must return "
            f"{self.contract.returns}."
        )


def load_own(setting: str, import_path: str, contract: Contract) -> OwnFunction:
    """Import a function of the user's own.

    Raises:
        RequestError: There is none of the name, or its module fails as it is imported.
    """
    add_current_folder_to_path()
    module, _, name = import_path.partition(":")
    try:
        function = getattr(import_module(module), name)
    except ModuleNotFoundError as error:
        if error.name is None or not f"{module}.".startswith(f"{error.name}."):
            raise _not_imported(setting, import_path, error) from error
        raise RequestError(
            f"{setting}={import_path}: module {error.name} is not found here. Start the run in "
            "its folder, set PYTHONPATH, or install it; launched jobs take it by launch.code."
        ) from error
    except AttributeError as error:
        if not hasattr(sys.modules.get(module), "__file__"):
            raise _not_imported(setting, import_path, error) from error
        raise RequestError(
            f"{setting}={import_path}: {sys.modules[module].__file__} has no {name}. Define it: it "
            f"is called as {contract.call}."
        ) from error
    except Exception as error:
        raise _not_imported(setting, import_path, error) from error
    if not callable(function):
        raise RequestError(
            f"{setting}={import_path} is {describe(function)}, and no function. It is called as "
            f"{contract.call} and must return {contract.returns}."
        )
    return OwnFunction(
        setting=setting, import_path=import_path, function=function, contract=contract
    )


def _not_imported(setting: str, import_path: str, error: Exception) -> RequestError:
    root, where = root_of(import_path), ""
    for frame, line in traceback.walk_tb(error.__traceback__):
        if _is_below(frame, root):
            where = f" at {frame.f_code.co_filename}:{line}"
    return RequestError(
        f"{setting}={import_path}: its module fails as it is imported{where}: "
        f"{type(error).__name__}: {error}. Fix it: python -c 'import "
        f"{import_path.partition(':')[0]}'"
    )


def describe(value: Any) -> str:
    """A value in a few words: a tensor by format and shape, a mapping by those of its fields."""
    if hasattr(value, "shape") and hasattr(value, "dtype"):
        kind = str(value.dtype).removeprefix("torch.")
        return f"{kind} {tuple(value.shape)}"
    if isinstance(value, Mapping):
        inside = ", ".join(f"{name}: {describe(each)}" for name, each in list(value.items())[:8])
        return f"{{{inside}}}"
    if isinstance(value, tuple | list) and len(value) <= 4:
        return f"({', '.join(map(describe, value))})"
    if isinstance(value, bool | int | float | None):
        return repr(value)
    return f"a {type(value).__name__}"


def root_of(import_path: str) -> Path | None:
    """Folder of the code that a function's module belongs to: its package, or the module's own."""
    first = import_path.partition(":")[0].partition(".")[0]
    spec, _ = _spec(first)
    if spec is None:
        return None
    if spec.submodule_search_locations:
        return Path(next(iter(spec.submodule_search_locations)))
    return None if spec.origin is None else Path(spec.origin).parent


def source_digest(import_path: str) -> str:
    """First 16 hex digits of the SHA-256 of a function's module and of what it imported nearby.

    Modules count that are imported and below its ``root_of``; those of site-packages count only if
    the function itself is there. Call it after the function was imported.
    """
    root = root_of(import_path)
    digest = hashlib.sha256()
    for file in sorted(_files_below(root)):
        digest.update(file.read_bytes())
    return digest.hexdigest()[:16]


def _files_below(root: Path | None) -> set[Path]:
    if root is None:
        return set()
    files = {file for module in list(sys.modules.values()) if (file := _file_of(module))}
    return {file for file in files if _belongs(file, root)}


def _file_of(module: ModuleType | None) -> Path | None:
    file = getattr(module, "__file__", None)
    if not isinstance(file, str) or not file.endswith(".py"):
        return None
    path = Path(file)
    return path if path.is_file() else None


def _is_below(frame: FrameType, root: Path | None) -> bool:
    return root is not None and _belongs(Path(frame.f_code.co_filename), root)


def _belongs(file: Path, root: Path) -> bool:
    """Whether a file is of the user's code; a folder of it may hold an environment, too."""
    others = [Path(sysconfig.get_path("purelib")), Path(sysconfig.get_path("stdlib")), _OURS]
    return file.is_relative_to(root) and not any(
        file.is_relative_to(other) and not root.is_relative_to(other) for other in others
    )


def _source_line(file: str, line: int) -> str:
    try:
        return Path(file).read_text(encoding="utf-8").splitlines()[line - 1].strip()
    except (OSError, ValueError, IndexError):
        return ""
