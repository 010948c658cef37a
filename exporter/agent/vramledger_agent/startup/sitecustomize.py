"""Bring the agent into every Python process of a program; ``vramledger-agent run`` puts this in its path.

Python imports the first ``sitecustomize`` that it finds, so this one imports the one that it hides. Every
Python that the program starts inherits PYTHONPATH and reads this file, so its syntax is that of old versions.
"""

import os
import sys

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any  # noqa: F401 for the comments: the syntax is that of old versions

# exporter/framework_files.py writes what follows, from vramledger_agent/protocol/frameworks.py.
IMPORTED_MODULES = (
    "torch.cuda",
    "jax._src.xla_bridge",
    "tensorflow.python.eager.context",
    "rmm",
    "cupy",
)
# End of what is written.
"""Until one of these is imported, Python has loaded nothing else of the agent."""


class _FrameworkFinder:
    """Load the agent once a framework is executed; that it is looked for is not enough: it may be missing."""

    def __init__(self):  # type: () -> None # noqa: ANN204
        self.asked = False
        self.loading = False

    def find_spec(self, name, path=None, target=None):  # type: (str, Any, Any) -> Any # noqa: ANN001, ANN202, ARG002
        """Load the agent at the first import that follows on the begin of a framework's own."""
        if self.loading:
            return _find_own(name, path)
        if name in IMPORTED_MODULES:
            self.asked = True
        elif self.asked and self in sys.meta_path:
            for each in IMPORTED_MODULES:
                if each in sys.modules:
                    self._load(name)
                    break
        return None

    def _load(self, name):  # type: (str) -> None # noqa: ANN001, ANN202
        self.loading = True  # first: what the agent imports comes here too
        try:
            from vramledger_agent import import_hook

            import_hook.install(self, _find_own)
        except BaseException as error:
            if not _is_ours(error):  # but of a signal handler of the program: the next import tries again
                raise
            self.asked = False
            return
        finally:
            self.loading = False
        import_hook.notice(name)


def _find_own(name, path):  # type: (str, Any) -> Any # noqa: ANN001, ANN202
    """Find a module of the agent in its own directory: the program's import path stays as it is.

    Where the program has imported an agent of its own, that one goes on.
    """
    if name.partition(".")[0] != "vramledger_agent":
        return None
    package, _, last = name.rpartition(".")
    directory = (path or (None,))[0] if package else _root if name == "vramledger_agent" else None
    if directory is None or not (directory + os.sep).startswith(_root + os.sep):
        return None
    file = os.path.join(directory, last)
    is_package = os.path.isdir(file)
    file = os.path.join(file, "__init__.py") if is_package else file + ".py"
    loader = _make_loader()(name, file)
    spec = type(__spec__)(name, loader, origin=file, is_package=is_package)  # type: Any
    spec.has_location = True
    if is_package:
        spec.submodule_search_locations.append(os.path.dirname(file))
    return spec


def _make_loader():  # type: () -> Any # noqa: ANN202
    """Make the class that loads our modules, once."""
    if not _loaders:
        kind = type(__spec__.loader)  # type: Any

        def get_code(self, fullname):  # type: (Any, str) -> Any # noqa: ANN001, ANN202
            return _rename(kind.get_code(self, fullname))

        def set_data(self, path, data, **options):  # type: (Any, str, bytes, Any) -> None # noqa: ANN001, ANN003, ANN202
            """Write no compiled file: ours may be another Python's package, and the program root's."""

        get_code.__code__ = _rename(get_code.__code__)
        set_data.__code__ = _rename(set_data.__code__)
        _loaders.append(type("Loader", (kind,), {"get_code": get_code, "set_data": set_data}))
    return _loaders[0]


_loaders = []  # type: list[Any]


def _rename(code):  # type: (Any) -> Any # noqa: ANN001, ANN202
    """Return code that says of itself, as Python's own frozen modules do, that it is in no file.

    What measures a program (coverage, trace, debuggers) leaves out such code. It would count our files as the
    program's own, because they are not among the packages of its environment.
    """
    constants = tuple(_rename(each) if isinstance(each, type(code)) else each for each in code.co_consts)
    name = "<" + code.co_filename[len(_root) + 1 :] + ">"
    return code.replace(co_filename=name, co_consts=constants)


def _is_ours(error):  # type: (BaseException) -> bool # noqa: ANN001, ANN202
    """Tell whether loading the agent failed by itself: its files have gone, or cannot be read."""
    entry = error.__traceback__
    while entry is not None:
        name = entry.tb_frame.f_code.co_filename
        if not name.startswith(("<vramledger_agent" + os.sep, "<frozen importlib")):
            return False
        entry = entry.tb_next
    return isinstance(error, Exception)


def _install_finder():  # type: () -> None # noqa: ANN202
    """Watch imports, if the environment says so, this Python can run the agent, and none is there yet."""
    if "vramledger_agent.import_hook" in sys.modules:
        return
    if sys.version_info[:2] >= (3, 10) and os.environ.get("VRAMLEDGER_AGENT") == "1":
        for each in [_find_own, _make_loader, _rename, _is_ours] + list(vars(_FrameworkFinder).values()):  # noqa: RUF005 old Python
            if hasattr(each, "__code__"):
                each.__code__ = _rename(each.__code__)
        sys.meta_path.insert(0, _FrameworkFinder())


def _remove_compiled():  # type: () -> None # noqa: ANN202
    """Remove what this Python has just compiled of this file, unless the package is this Python's own."""
    cached = getattr(__spec__, "cached", None)
    tag = getattr(getattr(sys, "implementation", None), "cache_tag", None)
    if cached and tag and os.path.exists(cached):
        own = os.path.join(_root, "vramledger_agent", "__pycache__", "__init__." + tag + ".pyc")
        if not os.path.exists(own):
            os.unlink(cached)


def _import_hidden_sitecustomize(directory):  # type: (str) -> None # noqa: ANN001, ANN202
    """Import the sitecustomize that this one hides; without one, our import fails as one not found."""
    ours = [entry for entry in sys.path if os.path.abspath(entry) == directory]
    sys.path[:] = [entry for entry in sys.path if entry not in ours]
    for entry in ours:
        sys.path_importer_cache.pop(entry, None)
    this = sys.modules.pop("sitecustomize")  # noqa: F841 Python 2 would empty what nothing refers to
    __import__("sitecustomize")


_directory = os.path.dirname(os.path.abspath(__file__))
_root = os.path.dirname(os.path.dirname(_directory))
for _step in (_install_finder, _remove_compiled):
    try:
        _step()
    except Exception:
        pass
_import_hidden_sitecustomize(_directory)
