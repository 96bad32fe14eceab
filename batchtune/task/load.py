"""Finding and importing the user's code, and what it says of today's training."""

from __future__ import annotations

import ast
import contextlib
import gc
import importlib
import importlib.util
import inspect
import itertools
import math
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType

import torch
from torch.utils.data import DataLoader

from batchtune.device.failures import describe_user_error, short_path
from batchtune.device.host_memory import load_early
from batchtune.errors import UsageError, UserCodeError
from batchtune.protocol.data import CurrentSettings
from batchtune.task.adapting import highest_rate, require_no_arguments
from batchtune.task.contract import Task
from batchtune.task.lengths import reads
from batchtune.task.optimizers import Optimizers
from batchtune.task.spec import TEMPLATE, split_spec
from batchtune.task.state import seed_everything

_BATCH_SIZES = ("BATCH_SIZE", "batch_size", "TRAIN_BATCH_SIZE", "train_batch_size")
_RATES = ("LEARNING_RATE", "learning_rate", "LR", "lr")
_ADAPTED = {
    "lightning": ("LightningModule",),
    "pytorch_lightning": ("LightningModule",),
    "transformers": ("Trainer", "PreTrainedModel"),
}


def load_task(spec: str) -> Task:
    """Imports the user's code and checks what it carries.

    Raises:
        UsageError: no such file, module or attribute.
        UserCodeError: the code raised while it was imported, or lacks `build_model`.
    """
    place, attribute = split_spec(spec)
    seed_everything(0)  # what is drawn at random at import is the same in every process
    try:
        module = _import_file(place) if isinstance(place, Path) else _import_module(place)
    except (KeyboardInterrupt, UsageError):
        raise
    except SyntaxError as error:
        where, text = short_path(error.filename or str(place)), (error.text or "").strip()
        known = (where, error.lineno, f" {error.msg}", f" {text}")
        raise UserCodeError(":".join(str(part) for part in known if str(part or "").strip())) from None
    except BaseException as error:
        raise describe_user_error(error, f"importing {spec}", _hint(error, place)) from error
    return Task(_source(_attribute(module, attribute, spec), module, attribute, spec), spec)


def set_libraries_apart() -> None:
    """Leaves what was imported out of the garbage collections around each attempt, most of whose time it takes."""
    is_on = gc.isenabled()
    gc.disable()  # as while torch was imported, see `entry`
    try:
        load_early(lambda: torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=0.0))  # the first: half of torch
    finally:
        if is_on:
            gc.enable()
    gc.collect()
    gc.freeze()


def _hint(error: BaseException, place: Path | str) -> str:
    """What to do where the task's file hides the module that it imports, or a Trainer wants a launcher's ranks."""
    if "fsdp only works in distributed training" in str(error):
        return " Leave its fsdp out, and tune with --ranks N --strategy fsdp"
    if isinstance(error, SystemExit) and not isinstance(error.code, str) and isinstance(place, Path):
        return f"; {place.name} is imported, not run: what is to run as a script goes under if __name__ == '__main__'"
    if isinstance(error, ImportError) and "relative import" in str(error) and isinstance(place, Path):
        return _as_module(place.resolve())
    if isinstance(place, str) or not isinstance(error, ImportError) or not error.name:
        return ""
    if error.name.partition(".")[0] != place.stem:
        return ""
    return f"; this file hides your own module '{place.stem}': call it otherwise, e.g. {TEMPLATE}"


def _as_module(path: Path) -> str:
    """How to name a file of a package, whose relative imports then work."""
    folders = list(itertools.takewhile(lambda each: (each / "__init__.py").exists(), path.parents))
    name = ".".join([*(each.name for each in reversed(folders)), path.stem])
    return f"; it is part of a package: name it as a module, {name}, in {folders[-1].parent}" if folders else ""


def _import_file(path: Path) -> ModuleType:
    """The file as a module of its own name (so that loader processes find it), with its folder importable."""
    path = path.resolve()
    sys.path.insert(0, str(path.parent))
    taken = path.stem in sys.modules or path.stem in sys.stdlib_module_names or not path.stem.isidentifier()
    name = "batchtune_task" if taken else path.stem
    spec = importlib.util.spec_from_file_location(name, path)
    if spec is None or spec.loader is None:
        raise UsageError(f"{path}: not a Python file")
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    spec.loader.exec_module(module)
    return module


def _import_module(name: str) -> ModuleType:
    sys.path.insert(0, str(Path.cwd()))
    try:
        return importlib.import_module(name)
    except ModuleNotFoundError as error:
        if error.name and (name == error.name or name.startswith(f"{error.name}.")):
            raise UsageError(f"{name}: no such module here; is the folder that holds it the current one?") from None
        raise


def _attribute(module: ModuleType, attribute: str, spec: str) -> object:
    found: object = module
    for part in attribute.split(".") if attribute else []:
        if not hasattr(found, part):
            names = ", ".join(name for name in vars(module) if not name.startswith("_"))[:200]
            raise UsageError(f"{spec}: no attribute '{part}' there; it has {names}")
        found = getattr(found, part)
    return found


def _source(found: object, module: ModuleType, attribute: str, spec: str) -> object:
    """What carries the contract's names: the object, what a class or function makes, or an adapter around either."""
    make = found
    if inspect.isclass(found) or (inspect.isfunction(found) and not hasattr(found, "build_model")):
        if inspect.isclass(found) and _library_type(found):
            require_no_arguments(found, spec, f"a {found.__name__}")
        try:
            found = found()  # a class or a factory of tasks
        except (KeyboardInterrupt, UsageError):
            raise
        except BaseException as error:
            raise describe_user_error(error, f"calling {attribute}()", _hint(error, attribute)) from error
    if found is module and not hasattr(module, "build_model"):
        _suggest(module, spec)
    known = _library_type(type(found[0] if isinstance(found, tuple) and found else found))
    if known == "LightningModule":
        from batchtune.task.lightning import LightningTask

        return LightningTask(make, module, spec)
    if known == "Trainer":
        from batchtune.task.transformers import TrainerTask

        return TrainerTask(found, spec)
    if known == "PreTrainedModel":
        from batchtune.task.transformers import ModelTask

        return ModelTask(found, make, spec)
    return found


def _suggest(module: ModuleType, spec: str) -> None:
    """Raises UserCodeError where a module without build_model() has a class that an adapter knows."""
    own = [each for each in vars(module).values() if inspect.isclass(each) and each.__module__ == module.__name__]
    known = {each.__name__: kind for each in own if (kind := _library_type(each))}
    if known:
        name, kind = min(known.items(), key=lambda each: each[1] == "Trainer")  # which needs arguments
        if kind == "Trainer":
            raise UserCodeError(
                f"{spec}: no build_model(); name the function that returns your {name}: {spec}:FUNCTION"
            )
        raise UserCodeError(f"{spec}: no build_model(), but {name} is a {kind}; name it: {spec}:{name}")


def _library_type(kind: type) -> str | None:
    """The library's class that a class descends from, where an adapter knows it."""
    bases = ((base.__module__.partition(".")[0], base.__name__) for base in inspect.getmro(kind))
    return next((name for library, name in bases if name in _ADAPTED.get(library, ())), None)


def current_settings(task: Task) -> CurrentSettings:
    """What the user trains with.

    A constant of the usual name says it first; then the default of the argument that the contract's functions have for
    it; for the batch size then a DataLoader that stands in the file. Where every batch is one sample, as a whole graph,
    that is the batch size whatever these say. Objects of other libraries know it themselves.
    """
    if task.adapted:
        return task.adapted.current_settings()
    source = task.source
    sizes = [*_whole(source), *_constants(source, _BATCH_SIZES), *_default(source, "train_loader", 0)]
    sizes += _loaders(_module_of(source))
    rates = [*_constants(source, _RATES), *_default(source, "build_optimizer", 1), *_own_rate(task)]
    return CurrentSettings(
        batch_size=next(((each, where) for each, where in sizes if isinstance(each, int) and each >= 1), None),
        learning_rate=next(
            ((float(each), where) for each, where in rates if isinstance(each, int | float) and 0 < each < math.inf),
            None,
        ),
    )


def _module_of(source: object) -> ModuleType | None:
    return source if isinstance(source, ModuleType) else sys.modules.get(type(source).__module__)


def _constants(source: object, names: tuple[str, ...]) -> Iterator[tuple[object, str]]:
    module = _module_of(source)
    for holder in dict.fromkeys((source, module)):
        for name in names:
            value = getattr(holder, name, None)
            if value is not None and not isinstance(value, bool):
                yield value, f"{name} in {_place(module, name)}"


def _place(module: ModuleType | None, name: str) -> str:
    """The file, and the line in which the name is set, where one is."""
    path = Path(getattr(module, "__file__", None) or "the task")
    with contextlib.suppress(OSError, SyntaxError, ValueError):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            targets = node.targets if isinstance(node, ast.Assign) else [getattr(node, "target", None)]
            if any(isinstance(each, ast.Name) and each.id == name for each in targets):
                return f"{path.name}:{targets[0].lineno}"  # type: ignore[union-attr]
    return path.name


def _whole(source: object) -> Iterator[tuple[object, str]]:
    """The samples of every batch, where the user's code counts as many without a look at it, as of a whole graph."""
    count = getattr(source, "batch_size_of", None)
    with contextlib.suppress(Exception):  # whatever else it wants
        if count is not None and not reads(count, 0):
            yield count(None), "batch_size_of"


def _default(source: object, name: str, place: int) -> Iterator[tuple[object, str]]:
    """The default of a function's argument, by its place."""
    with contextlib.suppress(AttributeError, TypeError, ValueError, IndexError):
        yield list(inspect.signature(getattr(source, name)).parameters.values())[place].default, f"{name}'s default"


def _loaders(module: ModuleType | None) -> Iterator[tuple[object, str]]:
    """The batch size of the DataLoaders in the user's file, where they are of one mind."""
    names = vars(module) if module else {}
    found = {name: each.batch_size for name, each in names.items() if isinstance(each, DataLoader)}
    if len(set(found.values())) == 1:
        yield next(iter(found.values())), f"the batch size of {next(iter(found))}"


def _own_rate(task: Task) -> Iterator[tuple[object, str]]:
    """The learning rate of the optimizers that build_optimizer makes when it is left to choose."""
    with contextlib.suppress(Exception):  # one that cannot choose has none
        optimizers = Optimizers(task.source.build_optimizer(task.model()))
        yield highest_rate(optimizers), f"{optimizers.name}'s lr"
