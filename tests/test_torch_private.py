"""What torch does not promise is used in one file; what differs between versions is told there."""

import ast
import importlib
import inspect
import os
import re
import subprocess
import sys
from collections.abc import Callable, Collection, Iterator
from contextlib import suppress
from inspect import signature
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.elastic.agent.server import local_elastic_agent
from torch.distributed.elastic.agent.server.local_elastic_agent import LocalElasticAgent
from torch.distributed.fsdp._fully_shard import _fsdp_common
from torch.distributed.fsdp._fully_shard._fsdp_state import FSDPState
from torch.distributed.tensor import Shard
from torch.testing._internal.distributed.fake_pg import FakeStore
from torch.utils.checkpoint import checkpoint, create_selective_checkpoint_contexts

from shardyard.errors import RequestError
from shardyard.torch_private import (
    compile_seconds,
    placement_on_mesh,
    replaced_start_processes,
)

pytestmark = pytest.mark.heavy

ROOT = Path(__file__).parents[1]
SEAM = ROOT / "src/shardyard/torch_private.py"
SOURCES = [
    path
    for folder in ("src", "benchmarks")
    for path in sorted((ROOT / folder).rglob("*.py"))
    if path != SEAM
]
ENGINES = {"torch", "torchao", "transformers", "safetensors"}
PROMISED = {"_asdict", "_exit", "_fields", "_make", "_replace"}
"""Underscores of Python's own library."""
EXCEPTIONS = {
    # transformers documents it: what every model writes to say how a module begins
    ("src/shardyard/models/build.py", "model._init_weights"),
    # how it is told there, too, what of a model stays on one device
    ("src/shardyard/train/custom_model.py", "model._no_split_modules"),
    # measures the operator itself, on a machine where nothing of ours needs to be installed
    ("benchmarks/gpu/ceilings.py", "torch._scaled_mm"),
    # accelerate, and FSDP 1 with it, take accelerators only; a benchmark has them run on a CPU
    ("benchmarks/imported_framework.py", "PartialState._prepare_backend"),
    ("benchmarks/imported_framework.py", "torch.distributed.fsdp._init_utils"),
    ("benchmarks/imported_framework.py", "_init_utils._get_device_from_device_id"),
}
DOCUMENTED_HOOKS = {
    "_rendezvous", "_start_workers", "_stop_workers", "_monitor_workers", "_shutdown",
}  # fmt: skip
"""Private methods that torch documents for subclasses of SimpleElasticAgent (its page "Elastic
Agent", section "Extending the Agent")."""


def is_private(name: str) -> bool:
    return name.startswith("_") and not name.startswith("__") and name != "_"


def own_names(tree: ast.Module) -> set[str]:
    """Names with an underscore that a module itself gives: functions, classes, attributes."""
    found = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            found.add(node.name)
        elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            found.add(node.id)
        elif (
            isinstance(node, ast.Attribute)
            and isinstance(node.ctx, ast.Store)
            and ast.unparse(node.value) in ("self", "cls")
        ):
            found.add(node.attr)
    return found


def private_uses(
    source: str, ours: Collection[str] = (), inherited: Collection[str] = ()
) -> Iterator[tuple[int, str]]:
    """Lines and texts of what a module uses that is neither its own nor promised to it."""
    if not any(engine in source for engine in ENGINES):
        return
    tree = ast.parse(source)
    if not any(name.split(".")[0] in ENGINES for name in imported(tree)):
        return
    own = own_names(tree) | PROMISED | set(ours)
    for node in ast.walk(tree):
        if isinstance(node, ast.Import | ast.ImportFrom):
            for name in imported(node):
                if name.split(".")[0] in ENGINES and any(map(is_private, name.split("."))):
                    yield node.lineno, name
        elif isinstance(node, ast.Attribute) and is_private(node.attr):
            root = ast.unparse(node).split(".")[0]
            known = own | set(inherited) if root == "self" else own
            if root in {"torch", "dist", "F", "nn"} or node.attr not in known:
                yield node.lineno, ast.unparse(node)
        elif isinstance(node, ast.Call) and ast.unparse(node.func) in (
            "getattr", "setattr", "hasattr", "delattr",
        ):  # fmt: skip
            asked = node.args[1] if len(node.args) > 1 else None
            text = str(asked.value) if isinstance(asked, ast.Constant) else ""
            if is_private(text) and text not in own:
                yield node.lineno, ast.unparse(node)
        elif isinstance(node, ast.Constant) and re.match(r"^\w+::_\w+$", str(node.value)):
            yield node.lineno, str(node.value)


def imported(tree: ast.AST) -> Iterator[str]:
    """Dotted names of all imports; of `from a import b`, a.b."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            yield from (f"{node.module}.{alias.name}" for alias in node.names)


def test_what_torch_does_not_promise_is_used_in_one_file_alone() -> None:
    # benchmarks may use what is private of ours; what a class inherits from torch's is below
    ours = {name for path in SOURCES for name in own_names(ast.parse(path.read_text()))}
    found = {
        (str(path.relative_to(ROOT)), text): line
        for path in SOURCES
        for line, text in private_uses(
            path.read_text(), ours if "src" not in path.parts else (), inherited=ours
        )
    }
    others = [f"{path}:{line}: {text}" for (path, text), line in found.items()
              if (path, text) not in EXCEPTIONS]  # fmt: skip
    assert others == [], "name it in torch_private.py, with what for and since when"
    assert found.keys() >= EXCEPTIONS, "an exception that is gone"


@pytest.mark.parametrize(
    "line",
    [
        "from torch._subclasses.fake_tensor import FakeTensorMode",
        "import torch.testing._internal.distributed.fake_pg as fake",
        "from torch.distributed.tensor.placement_types import _StridedShard",
        "torch._foreach_mul_(tensors, 2.0)",
        "torch._C._current_graph_task_id()",
        "state._fsdp_param_group.post_backward()",
        "getattr(state, '_fsdp_param_groups')",
        "hasattr(state, '_fsdp_param_groups')",
        "storage._cdata",
        "torch.ops.aten._scaled_mm.default",
        "name == 'c10d::_reduce_scatter_base_'",
        "from torchao.float8 import _private",
    ],
)
def test_the_reader_of_sources_sees_each_kind_of_use(line: str) -> None:
    assert list(private_uses(f"import torch\n{line}\n")) != []


@pytest.mark.parametrize(
    "text",
    [
        "class A:\n    def __init__(self):\n        self._x = 1\ndef f(a):\n    return a._x",
        "import os\nos._exit(1)",
        "def _f(): ...\nglobals()['_f']",
        "torch.float32",
    ],
)
def test_a_modules_own_underscores_are_its_own(text: str) -> None:
    assert list(private_uses(f"import torch\n{text}\n")) == []


def own_subclasses() -> Iterator[type]:
    """Classes of ours with a base of torch's."""
    for path in SOURCES:
        if "src" not in path.parts or not any(
            base.startswith(("torch", "nn.")) or base[:1].isupper()
            for base in re.findall(r"^class \w+\(([\w.]+)", path.read_text(), re.MULTILINE)
        ):
            continue
        tree = ast.parse(path.read_text())
        if not any(name.split(".")[0] == "torch" for name in imported(tree)):
            continue
        relative = path.relative_to(ROOT / "src").with_suffix("")
        module = importlib.import_module(".".join(relative.parts))
        for kind in vars(module).values():
            if inspect.isclass(kind) and kind.__module__ == module.__name__ and bases(kind):
                yield kind


def bases(kind: type) -> list[type]:
    return [base for base in kind.__mro__ if base.__module__.split(".")[0] == "torch"]


def underscored(kinds: list[type]) -> set[str]:
    """Private names in the source of classes; of those built in C++ there is none."""
    text = ""
    for kind in kinds:
        with suppress(OSError, TypeError):
            text += inspect.getsource(kind)
    return {name for name in re.findall(r"\b(?:self\.|def )(_\w+)", text) if is_private(name)}


def test_no_subclass_of_a_class_of_torch_touches_its_private_parts() -> None:
    kinds = list(own_subclasses())
    assert {"GroupAgent", "Rendezvous", "AllocationLog"} <= {kind.__name__ for kind in kinds}
    shared = {
        f"{kind.__module__}.{kind.__name__}": found
        for kind in kinds
        if (found := underscored([kind]) & underscored(bases(kind)) - DOCUMENTED_HOOKS)
    }
    assert shared == {}


VERSION = tuple(int(part) for part in torch.__version__.split(".")[:2])
IS_OLD = VERSION < (2, 12)


def selective_storage() -> Any:
    """Where torch keeps one result of selective recompute: a list, or a mapping since 2.13."""
    policy = [torch.ops.aten.sin.default]
    caching, _ = create_selective_checkpoint_contexts(policy)  # type: ignore[no-untyped-call]
    with caching:
        torch.sin(torch.ones(1))
    return next(iter(caching.storage.values()))


@pytest.mark.parametrize(
    ("since", "has"),
    [
        ((2, 12), lambda: hasattr(_fsdp_common, "ShardPlacementResult")),
        ((2, 12), lambda: hasattr(FSDPState(), "_fsdp_param_groups")),
        ((2, 12), lambda: "shutdown_timeout" in signature(LocalElasticAgent).parameters),
        ((2, 13), lambda: isinstance(selective_storage(), dict)),
        ((2, 14), lambda: "respect_saved_tensors_hooks" in signature(checkpoint).parameters),
        ((2, 15), lambda: hasattr(FSDPState()._state_ctx, "manual_backward_finalization_active")),
    ],
)
def test_what_differs_between_versions_began_with_the_one_that_is_named(
    since: tuple[int, int], has: Callable[[], bool]
) -> None:
    assert has() == (since <= VERSION)


@pytest.fixture
def mesh() -> Iterator[DeviceMesh]:
    """Two replicas of two shards, seen from rank 0."""
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=4)
    yield init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp_replicate", "expert_shard"))
    dist.destroy_process_group()


@pytest.mark.skipif(not IS_OLD, reason="this torch can split experts over ranks of their own")
def test_an_old_torch_refuses_experts_over_other_ranks_than_their_block(mesh: DeviceMesh) -> None:
    with pytest.raises(RequestError) as refused:
        placement_on_mesh(mesh)
    message = str(refused.value)
    assert message.startswith("parallel.ep above 1 needs torch 2.12 or newer, and this is 2.11.0")
    assert message.endswith("Install a newer torch, or set parallel.ep=1.")


def test_seconds_of_compilation_are_counted() -> None:
    before = compile_seconds()
    doubled = torch.compile(lambda x: (2 * x).sum(), backend="aot_eager")
    doubled(torch.ones(3, requires_grad=True)).backward()
    assert before < compile_seconds() < before + 60


@pytest.mark.skipif(IS_OLD, reason="this torch has one mesh for all parameters of a group")
def test_a_newer_torch_is_told_where_experts_are(mesh: DeviceMesh) -> None:
    placed = placement_on_mesh(mesh)(Shard(1))
    assert placed.placement == Shard(1)
    assert (placed.mesh_info.shard_mesh_dim, placed.mesh_info.replicate_mesh_dim) == (1, 0)
    assert placement_on_mesh(mesh["expert_shard"])(None).mesh_info.mesh.size() == 2


def test_the_compiler_is_imported_without_a_thread_or_a_process() -> None:
    program = (
        "import os, sys; from shardyard.torch_private import import_compiler; import_compiler();"
        "tasks = os.listdir('/proc/self/task');"
        "children = open(f'/proc/self/task/{os.getpid()}/children').read();"
        "print('torch._inductor.compile_fx' in sys.modules, len(tasks), repr(children))"
    )
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, check=True, env=environment
    )
    assert done.stdout.split() == ["True", "1", "''"]


def test_an_agent_has_its_processes_started_by_the_function_that_it_is_given() -> None:
    names = vars(local_elastic_agent)
    usual = names["start_processes"]
    assert usual is torch.distributed.elastic.multiprocessing.start_processes
    starts: Any = inspect.unwrap(LocalElasticAgent._start_workers)
    assert "start_processes" in starts.__code__.co_names  # looked up in its module, each time

    def ours(**_asked: Any) -> None: ...

    with replaced_start_processes(ours):
        meanwhile = names["start_processes"]
    assert (meanwhile, names["start_processes"]) == (ours, usual)
