"""Bring the agent into every Python process of a program; ``vramledger run`` puts this on PYTHONPATH.

Python imports the first ``sitecustomize`` that it finds, so this one imports the one that it hides. Every
Python that the program starts inherits PYTHONPATH and reads this file, so its syntax is that of old versions.
"""

import os
import sys

# exporter/framework_files.py writes what follows, from vramledger/agent_protocol/frameworks.py.
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
    """See imports, find nothing, and load the agent, which takes over, when a framework is imported."""

    def find_spec(self, name, path=None, target=None):  # type: (str, object, object) -> None # noqa: ANN001, ANN202, ARG002
        """Load the agent before a framework is found."""
        if name in IMPORTED_MODULES and self in sys.meta_path:
            sys.meta_path.remove(self)  # first: what the agent imports comes here too
            try:
                _load_agent(name)
            except BaseException as error:
                if not _is_ours(error):  # but of a signal handler of the program: the next import tries again
                    sys.meta_path.insert(0, self)
                    raise


def _load_agent(name):  # type: (str) -> None # noqa: ANN001, ANN202
    """Import the agent from its own directory, and leave the program's import path as it was."""
    sys.path.insert(0, _root)
    try:
        from vramledger.agent import import_hook

        import_hook.install()
    finally:
        sys.path.remove(_root)
    import_hook.notice(name)


def _is_ours(error):  # type: (BaseException) -> bool # noqa: ANN001, ANN202
    """Tell whether loading the agent failed by itself: its files have gone, or cannot be read."""
    entry = error.__traceback__
    while entry is not None:
        name = entry.tb_frame.f_code.co_filename
        if not name.startswith((_root, "<frozen importlib")):
            return False
        entry = entry.tb_next
    return isinstance(error, Exception)


def _install_finder():  # type: () -> None # noqa: ANN202
    """Watch imports, if the environment says so, this Python can run the agent, and no agent is there yet.

    The hook of ``vramledger run --install`` comes before this file.
    """
    if "vramledger.agent.import_hook" in sys.modules:
        return
    if sys.version_info[:2] >= (3, 10) and os.environ.get("VRAMLEDGER_AGENT") == "1":
        sys.meta_path.insert(0, _FrameworkFinder())


def _import_hidden_sitecustomize(directory):  # type: (str) -> None # noqa: ANN001, ANN202
    """Import the sitecustomize that the program would have without this one."""
    sys.path[:] = [entry for entry in sys.path if os.path.abspath(entry) != directory]
    this = sys.modules.pop("sitecustomize")
    try:
        __import__("sitecustomize")
    except ImportError as error:
        if getattr(error, "name", "sitecustomize") != "sitecustomize":
            raise
        sys.modules["sitecustomize"] = this


_directory = os.path.dirname(os.path.abspath(__file__))
_root = os.path.dirname(os.path.dirname(os.path.dirname(_directory)))
try:
    _install_finder()
except Exception:
    pass
_import_hidden_sitecustomize(_directory)
