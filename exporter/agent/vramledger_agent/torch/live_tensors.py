"""Find what the program's optimizers and its last graph know of its tensors, without a call of the GPU.

It asks Python's collector for the objects (0.1 s for half a million), so it is used only for a snapshot that
the program has consented to, and only on the program's own thread: the answer refers to every object, so
nothing that another thread drops meanwhile is freed. Only tensors of PyTorch's own type are touched: a
subclass may run code of its own.
"""

from __future__ import annotations

import gc
from collections import Counter
from collections.abc import Iterable, Iterator
from math import prod
from types import ModuleType
from typing import Any

from vramledger_agent.program_errors import belongs_to_program
from vramledger_agent.protocol.messages import CATEGORIES

PARAMETERS, GRADIENTS, OPTIMIZER, ACTIVATIONS = CATEGORIES

MAX_NODES = 20_000
BATCH_NODES = 400
YOUNG_GENERATIONS = (0, 1)
"""The collector's generations in which a step's loss is: at most 22,000 objects in Python 3.13."""

MAX_YOUNG_OBJECTS = 30_000
"""With more young objects the batch is not looked for: a program may have turned the collector off."""

MAX_FORMS = 4
"""A parameter in another form (cast, transposed) is at most this number of operations from itself."""

MIN_SHARE_OF_BATCH = 0.25
"""A size counts as the batch's if it comes first in at least this share as many shapes as the commonest."""


class TensorFacts:
    """What is known of the program's tensors at one moment."""

    __slots__ = ("addresses", "batch", "forward_types", "known", "types")

    def __init__(self) -> None:
        self.known = False  # the tensors were read; without that, no category is known
        # the category of each tensor that an optimizer knows, by its address, by device
        self.addresses: dict[int, dict[int, str]] = {}
        # bytes by category and type of number, by device
        self.types: dict[int, dict[str, dict[str, int]]] = {}
        # bytes of the outputs of the forward operations, by type of number; empty where no graph is alive
        self.forward_types: dict[str, int] = {}
        self.batch: int | None = None  # the size of the batch of that graph


def read_tensors(torch: ModuleType) -> TensorFacts:
    """Read what the optimizers and the graphs of this process know now."""
    facts = TensorFacts()
    optimizers = getattr(getattr(torch, "optim", None), "Optimizer", None)
    roots = []
    for each in gc.get_objects():
        kind = type(each)
        if kind is torch.Tensor:
            roots.append(each)
        elif optimizers is not None and optimizers in kind.__mro__:
            for category, tensor in optimizer_tensors(each):
                _add(facts, category, tensor)
    nodes = list(_nodes(roots, MAX_NODES))
    del roots
    for node in nodes:
        for dtype, width, shape in _shapes(node):
            size = width * prod(shape)
            facts.forward_types[dtype] = facts.forward_types.get(dtype, 0) + size
    facts.batch = _batch(nodes)
    facts.known = True
    return facts


def young_batch(torch: ModuleType) -> int | None:
    """Return the size of the batch of the graph that was made last; None where that is not known."""
    youngest, younger, _ = gc.get_count()
    if youngest + younger * gc.get_threshold()[0] > MAX_YOUNG_OBJECTS:
        return None
    found = [
        each
        for generation in YOUNG_GENERATIONS
        for each in gc.get_objects(generation)
        if type(each) is torch.Tensor
    ]
    return _batch(list(_nodes(found, BATCH_NODES)))


def optimizer_tensors(optimizer: Any) -> Iterator[tuple[str, Any]]:  # noqa: ANN401 torch is not installed where this is checked
    state = getattr(optimizer, "state", {})
    for group in getattr(optimizer, "param_groups", ()):
        for parameter in group["params"]:
            yield PARAMETERS, parameter
            if parameter.grad is not None:
                yield GRADIENTS, parameter.grad
            for tensor in _state_tensors(state.get(parameter)):
                yield OPTIMIZER, tensor


def _state_tensors(state: object) -> Iterator[object]:
    """Yield what may be tensors in one parameter's state; Adam has plain ones, others keep lists of them."""
    values = tuple(state.values()) if isinstance(state, dict) else ()
    for value in values:
        if isinstance(value, (list, tuple)):
            yield from value
        else:
            yield value


def _add(facts: TensorFacts, category: str, tensor: Any) -> None:  # noqa: ANN401 as above
    """Add a tensor on a GPU; one that says nothing of itself, as a quantised one, is left out."""
    try:
        tensor = getattr(tensor, "_local_tensor", tensor)
        if tensor.device.type != "cuda":
            return
        device, address = int(tensor.device.index), int(tensor.data_ptr())
        size, dtype = int(tensor.nbytes), type_name(tensor.dtype)
    except (AttributeError, RuntimeError, TypeError, NotImplementedError) as error:
        if belongs_to_program(error):
            raise
        return
    facts.addresses.setdefault(device, {})[address] = category
    types = facts.types.setdefault(device, {}).setdefault(category, {})
    types[dtype] = types.get(dtype, 0) + size


def type_name(dtype: object) -> str:
    """Return PyTorch's name of a type of numbers, as ``bfloat16``."""
    return str(dtype).removeprefix("torch.")


def _nodes(tensors: Iterable[Any], most: int) -> Iterator[Any]:
    """Yield the operations of the graphs that end in the given tensors.

    A view whose base the optimizer's step has changed since has no operation any more: PyTorch raises an
    error for it.
    """
    waiting = []
    for tensor in tensors:
        try:
            node = tensor.grad_fn if tensor.device.type == "cuda" else None
        except RuntimeError as error:
            if belongs_to_program(error):
                raise
            continue
        if node is not None:
            waiting.append(node)
    seen = set(waiting)
    for node in waiting:  # it grows
        yield node
        for following, _ in node.next_functions:
            if following is not None and following not in seen and len(seen) < most:
                seen.add(following)
                waiting.append(following)


def _shapes(node: Any) -> Iterator[tuple[str, int, tuple[int, ...]]]:  # noqa: ANN401 as above
    """Yield type, bytes of a number and shape of each output of a forward operation, not of parameters."""
    if _is_of_parameter(node):
        return
    for metadata in getattr(node, "_input_metadata", ()):
        try:
            shape = tuple(int(length) for length in metadata.shape)
            yield type_name(metadata.dtype), int(metadata.dtype.itemsize), shape
        except (AttributeError, RuntimeError, TypeError) as error:
            if belongs_to_program(error):
                raise
            continue  # a size that is not a number yet, an old version


def _is_of_parameter(node: Any) -> bool:  # noqa: ANN401 as above
    """Return whether an operation gives a parameter, or one in another form: transposed, in another type."""
    for _ in range(MAX_FORMS):
        if type(node).__name__ == "AccumulateGrad":  # a program's own operation may have another ``name``
            return True
        following = node.next_functions
        if len(following) != 1 or following[0][0] is None:
            return False
        node = following[0][0]
    return False


def _batch(nodes: Iterable[Any]) -> int | None:
    """Return the size that comes first in most shapes; None where none does clearly.

    A batch and a sequence are often folded into one dimension, so the smallest size that divides the
    commonest and is common itself is the batch's.
    """
    firsts = Counter(
        shape[0] for node in nodes for _, _, shape in _shapes(node) if len(shape) > 1 and shape[0] > 1
    )
    if not firsts:
        return None
    size, times = firsts.most_common(1)[0]
    common = [
        each
        for each, count in firsts.items()
        if size % each == 0 and count >= max(2, MIN_SHARE_OF_BATCH * times)
    ]
    return min(common, default=None)
