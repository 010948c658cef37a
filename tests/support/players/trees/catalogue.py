"""Every tree, in the order of the documents: a new module is added here, a new tree in its module."""

from tests.support.players.tree import Tree
from tests.support.players.trees import containers, launchers, programs, services, shells, states

MODULES = (shells, services, containers, launchers, programs, states)
TREES = tuple(
    tree
    for module in MODULES
    for tree in (*vars(module).values(), *getattr(module, "SHORT", ()))
    if isinstance(tree, Tree)
)
HEALTHY = tuple(tree for tree in TREES if tree.kind == "healthy")
LEFTOVERS = tuple(tree for tree in TREES if tree.kind == "leftover")
OTHERS = tuple(tree for tree in TREES if tree.kind == "other")
