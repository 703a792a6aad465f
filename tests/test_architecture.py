"""The layers of docs/architecture.md, and the size limits."""

import ast
import inspect
import re
import subprocess
import sys
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import flowrl
from flowrl.run.loop import Run

ROOT = Path(__file__).parents[1]

LAYERS = (
    ("recipes",),
    ("flowrl.cli",),
    ("flowrl.inference",),
    ("flowrl.run",),
    ("flowrl.schedules",),
    ("flowrl.weight_sync", "flowrl.report", "flowrl.timing"),
    ("flowrl.checkpoints", "flowrl.memory", "flowrl.workers"),
    ("flowrl.environments",),
    ("flowrl.controller", "flowrl.engines", "flowrl.rewards", "flowrl.health"),
    ("flowrl.algorithms", "flowrl.user_code"),
    ("flowrl.data", "flowrl.devices"),
    ("flowrl.config",),
)
"""Top to bottom. A package may import packages of lower layers; packages of one layer do not import each other."""

SUBPACKAGES: dict[str, dict[str, set[str]]] = {
    "flowrl.controller": {
        "placement": set(),
        "errors": set(),
        "worker": {"placement"},
        "dispatch": {"placement", "errors", "worker"},
        "wire": {"placement", "errors", "worker", "dispatch"},
        "host": {"placement", "errors", "worker", "wire"},
        "backends": {"placement", "errors", "wire", "host"},
        "calls": {"placement", "errors", "worker", "dispatch", "wire", "host", "backends"},
        "group": {"placement", "errors", "worker", "dispatch", "wire", "backends", "calls"},
        "group_stubs": {"dispatch", "worker", "group"},
        "cluster": {"placement", "errors", "worker", "wire", "backends", "calls", "group"},
    },
    "flowrl.engines": {
        "models": set(),
        "parallel": {"models"},
        "train": {"models", "parallel"},
        "checkpoint": {"models", "parallel", "train"},
        "rollout": {"models"},
    },
    "flowrl.engines.rollout": {
        "sampling": set(),
        "weight_check": set(),
        "weight_metadata": set(),
        "cuda_ipc": {"weight_metadata"},
        "broadcast": {"weight_metadata"},
        "base": {"broadcast", "weight_check"},
        "adapted_weights": {"base"},
        "response_tensors": {"sampling", "base"},
        "hf": {"sampling", "base", "weight_check"},
        "vllm": {"sampling", "base", "weight_check", "weight_metadata", "cuda_ipc", "broadcast"},
    },
    "flowrl.algorithms": {
        "masking": set(),
        "logprobs": set(),
        "registry": set(),
        "repetition": set(),
        "hidden_logprobs": {"masking", "logprobs"},
        "kl": {"masking", "logprobs", "registry"},
        "losses": {"masking", "kl", "registry"},
        "corrections": {"masking", "kl", "registry"},
        "preference": {"masking", "registry"},
        "advantages": {"masking", "registry"},
        "best_of_n": {"advantages"},
        "evaluation_estimates": set(),
    },
    "flowrl.data": {
        "folders": set(),
        "checksums": set(),
        "dtypes": set(),
        "console": set(),
        "events": set(),
        "metric": set(),
        "mixture": set(),
        "time_limit": set(),
        "messages": set(),
        "template": {"console", "messages", "time_limit"},
        "turn_layout": {"messages"},
        "order": {"messages"},
        "chat": {"folders", "messages", "template", "turn_layout"},
        "turn_delta": {"chat", "messages"},
        "reading": {"folders", "messages"},
        "batch": set(),
        "prompts": {"chat", "batch", "order", "messages", "reading", "template"},
        "preparation": {"folders", "chat", "checksums", "console", "messages", "prompts", "reading", "template"},
    },
    "flowrl.config": {
        "user_errors": set(),
        "base": {"user_errors"},
        "source": {"base", "user_errors"},
        "data": {"base"},
        "algorithm": {"base", "data"},
        "engines": {"base"},
        "model": {"base", "engines", "source"},
        "placement": {"base"},
        "schedule": {"base"},
        "roles": {"base", "algorithm", "model", "engines"},
        "rewards": {"base", "model", "engines", "roles", "source"},
        "setting_tree": {"base", "engines", "source"},
        "monitoring": {"base"},
        "run": {
            "base",
            "monitoring",
            "algorithm",
            "model",
            "data",
            "placement",
            "schedule",
            "roles",
            "rewards",
            "engines",
            "setting_tree",
        },
        "stages": {"base", "model", "algorithm", "data", "schedule", "engines", "roles", "rewards", "run"},
        "setting_reference": {"base", "placement", "engines", "setting_tree"},
        "setting_template": {"placement", "run", "setting_tree", "setting_reference", "base"},
        "error_messages": {"base", "algorithm", "source", "setting_tree"},
        "load": {"user_errors", "base", "placement", "source", "setting_tree", "error_messages"},
    },
}
"""Package -> its sub-packages and modules from bottom to top, each with those that it may import."""

UPWARD_TYPES = {("flowrl/controller/worker.py", "flowrl.controller.group")}
"""Upward imports for type checkers only: a worker class names the type of its groups."""

LEVELS = {package: level for level, layer in enumerate(LAYERS) for package in layer}

IMPORTERS = {
    "ray": tuple(f"flowrl/controller/backends/{name}.py" for name in ("ray_backend", "ray_nodes", "local_ray")),
    "vllm": ("flowrl/engines/rollout/vllm/",),
    "lm_eval": ("flowrl/inference/evaluation/",),
    "torchao": (
        "flowrl/engines/rollout/vllm/",
        "flowrl/engines/train/quantized_adamw.py",
        "flowrl/engines/models/adapters/quantized_base.py",
    ),
    "transformers": ("flowrl/engines/", "flowrl/data/"),
    "huggingface_hub": ("flowrl/data/folders/input_paths.py",),
    "httpx": ("flowrl/rewards/service.py",),
    "tenacity": ("flowrl/rewards/service.py",),
    "tensordict": (
        "flowrl/data/",
        "flowrl/engines/",
        "flowrl/workers/",
        "flowrl/run/",
        "flowrl/checkpoints/",
        "flowrl/schedules/",
        "flowrl/controller/group.py",
    ),
    "pydantic": ("flowrl/config/", "flowrl/environments/tools.py", "recipes/"),
    "textual": ("flowrl/report/viewer/",),
    "yaml": ("flowrl/config/", "flowrl/checkpoints/"),
}
"""Library -> path prefixes of the files that may import it."""

DATA_SCRIPTS = {
    "recipes/quickstart/prepare.py",
    "recipes/data/prepare.py",
    "recipes/pipeline/prepare.py",
    "recipes/moe/prepare.py",
}
"""Scripts that create a model or data for a recipe. They may import any library."""

CONFIG_LOOKUPS: dict[str, str] = {}
"""Path -> reason why the file looks up a config field by name."""

LONG_FILES: dict[str, str] = {}
"""Path -> reason why the file is longer than `MAX_LINES`."""

LONG_FUNCTIONS: dict[str, str] = {}
"""path:function -> reason why the body is longer than `MAX_BODY`."""

MAX_LINES, MAX_BODY, MAX_DRIVER = 600, 50, 100

SOURCES = sorted(path for folder in ("flowrl", "recipes") for path in (ROOT / folder).rglob("*.py"))
TESTS = sorted((ROOT / "tests").rglob("*.py"))


def name_of(path: Path) -> str:
    return path.relative_to(ROOT).as_posix()


@cache
def imports(path: Path) -> tuple[tuple[int, str], ...]:
    """Returns line and full name of every imported module, including lazy and type-only imports.

    `from package import module` gives the package and the module. Strings that name a module count as imports. Cached,
    because each test reads the imports of many files.
    """
    return tuple(_find_imports(path))


def _find_imports(path: Path) -> Iterator[tuple[int, str]]:
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            yield from ((node.lineno, alias.name) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{name_of(path)}:{node.lineno} imports relatively"
            yield node.lineno, node.module or ""
            names = (f"{node.module}.{alias.name}" for alias in node.names)
            yield from ((node.lineno, name) for name in names if is_module(name))
        elif isinstance(node, ast.Constant) and isinstance(node.value, str) and is_module(node.value):
            yield node.lineno, node.value


@cache
def is_module(name: str) -> bool:
    """Returns whether a name is a module or package of this repository, with a dot."""
    if not re.fullmatch(r"(flowrl|recipes)(\.\w+)+", name):
        return False
    path = ROOT / name.replace(".", "/")
    return path.with_suffix(".py").exists() or (path / "__init__.py").exists()


def package_of(module: str) -> str | None:
    """Returns the package of a module in the layers; None for flowrl itself and for third-party modules."""
    packages = (package for package in LEVELS if module == package or module.startswith(f"{package}."))
    return next(packages, None)


def upward_imports(path: Path) -> list[str]:
    """Returns the imports of packages that are not in a lower layer."""
    own = package_of(name_of(path).removesuffix(".py").removesuffix("/__init__").replace("/", "."))
    imported = [(line, module, package_of(module)) for line, module in imports(path)]
    return [
        f"{name_of(path)}:{line} imports {module}"
        for line, module, package in imported
        if own and package and package != own and LEVELS[package] <= LEVELS[own]
    ]


def test_every_package_is_in_the_layer_diagram():
    packages = {f"flowrl.{path.parent.name}" for path in (ROOT / "flowrl").glob("*/__init__.py")}
    assert packages | {"recipes"} == set(LEVELS)


def test_imports_point_to_lower_layers_only():
    assert [line for path in SOURCES for line in upward_imports(path)] == []


def test_layers_of_a_package_list_only_lower_ones():
    violations = [
        f"{package}.{name}"
        for package, layers in SUBPACKAGES.items()
        for i, name in enumerate(layers)
        if not layers[name] <= set(list(layers)[:i])
    ]
    assert violations == []


def test_the_layers_of_a_package_are_its_subpackages_and_modules():
    for package, layers in SUBPACKAGES.items():
        folder = ROOT / package.replace(".", "/")
        modules = {path.stem for path in folder.glob("*.py")} - {"__init__"}
        assert {path.parent.name for path in folder.glob("*/__init__.py")} | modules == set(layers), package


def test_subpackages_import_only_their_listed_dependencies():
    violations = [
        f"{name_of(path)}:{line} imports {module}"
        for package, folder in ((package, ROOT / package.replace(".", "/")) for package in SUBPACKAGES)
        for name, others in SUBPACKAGES[package].items()
        for path in [*(folder / name).rglob("*.py"), *folder.glob(f"{name}.py")]
        for line, module in imports(path)
        if module.startswith(f"{package}.")
        and module.split(".")[package.count(".") + 1] not in {name, *others}
        and (name_of(path), module) not in UPWARD_TYPES
    ]
    assert violations == []


def test_a_library_is_imported_only_in_its_package():
    violations = [
        f"{name_of(path)}:{line} imports {module}"
        for path in SOURCES
        for line, module in imports(path)
        if module.split(".")[0] in IMPORTERS
        and not name_of(path).startswith(IMPORTERS[module.split(".")[0]])
        and name_of(path) not in DATA_SCRIPTS
    ]
    assert violations == []


def cuda_calls(path: Path) -> Iterator[str]:
    """Yields every use of `torch.cuda`, of `torch.accelerator`, and of `cuda()` of a tensor or module."""
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Attribute) and (name := ast.unparse(node)).endswith((".cuda", "torch.accelerator")):
            yield f"{name_of(path)}:{node.lineno} uses {name}"
    yield from (
        f"{name_of(path)}:{line} imports {module}"
        for line, module in imports(path)
        if module.startswith(("torch.cuda", "torch.accelerator"))
    )


def test_one_module_calls_torch_for_gpus():
    assert [call for path in SOURCES if name_of(path) != "flowrl/devices/device.py" for call in cuda_calls(path)] == []
    assert list(cuda_calls(ROOT / "flowrl/devices/device.py")), "the rule finds calls"


def test_the_root_package_is_not_imported_by_the_library():
    """Names of `flowrl` load lazily from its packages, so an import from within would be circular."""
    library = [
        path for path in SOURCES if name_of(path).startswith("flowrl/") and not name_of(path).startswith("flowrl/cli/")
    ]
    assert [f"{name_of(p)}:{line}" for p in library for line, module in imports(p) if module == "flowrl"] == []


def test_algorithms_do_not_import_config():
    """Only the registry may, because it imports the user functions that settings name."""
    files = [path for path in (ROOT / "flowrl/algorithms").rglob("*.py") if path.name != "registry.py"]
    assert [name_of(p) for p in files for _, module in imports(p) if package_of(module) == "flowrl.config"] == []


def loaded_at_import(module: str) -> set[str]:
    """Returns the modules of flowrl, and the other libraries, that importing a module of flowrl loads."""
    loaded, remaining = set(), [module]
    while remaining:
        name = remaining.pop()
        if name in loaded:
            continue
        loaded.add(name)
        if not is_module(name):
            continue
        remaining += [".".join(name.split(".")[:end]) for end in range(2, name.count(".") + 1)]
        path = ROOT / name.replace(".", "/")
        tree = ast.parse((path / "__init__.py" if path.is_dir() else path.with_suffix(".py")).read_text())
        # Functions, and blocks for type checkers, do not run at the import.
        statements = [each for each in tree.body if not (isinstance(each, ast.If) and "TYPE" in ast.unparse(each.test))]
        for statement in statements:
            if isinstance(statement, ast.Import):
                remaining += [alias.name for alias in statement.names]
            elif isinstance(statement, ast.ImportFrom):
                names = [f"{statement.module}.{alias.name}" for alias in statement.names]
                remaining += [statement.module or "", *filter(is_module, names)]
    return loaded


def test_matplotlib_tensorboard_and_tenacity_are_loaded_only_when_used():
    """A slow test in tests/report/test_progress.py includes the imports of other libraries."""
    loaded = loaded_at_import("flowrl.run.loop") | loaded_at_import("flowrl.workers")
    assert {"flowrl.run.monitoring.step_log", "flowrl.workers.actor", "torch"} <= loaded
    assert {name.split(".")[0] for name in loaded}.isdisjoint({"matplotlib", "tensorboard", "tenacity"})


def test_importing_flowrl_does_not_load_torch_or_ray():
    code = "import sys, flowrl, flowrl.cli; print([m for m in ('torch', 'ray', 'transformers') if m in sys.modules])"
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


def test_every_public_name_is_exported_lazily():
    assert sorted(flowrl.__all__) == sorted(flowrl._HOMES)
    assert all(getattr(flowrl, name).__name__ == name for name in flowrl.__all__)


def test_type_checkers_see_all_public_names():
    tree = ast.parse((ROOT / "flowrl/__init__.py").read_text())
    (block,) = (n for n in tree.body if isinstance(n, ast.If) and ast.unparse(n.test) == "TYPE_CHECKING")
    typed = {alias.name: node.module for node in block.body if isinstance(node, ast.ImportFrom) for alias in node.names}
    assert typed == flowrl._HOMES


def config_lookups(path: Path) -> Iterator[str]:
    """Yields every `getattr(config, ...)`, `hasattr(config, ...)` and `config.get(...)`."""
    for node in ast.walk(ast.parse(path.read_text())):
        if not isinstance(node, ast.Call):
            continue
        if isinstance(node.func, ast.Name) and node.func.id in ("getattr", "hasattr", "setattr"):
            target = ast.unparse(node.args[0])
        elif isinstance(node.func, ast.Attribute) and node.func.attr == "get":
            target = ast.unparse(node.func.value)
        else:
            continue
        if target.split(".")[-1].endswith("config"):
            yield ast.unparse(node)


def test_configs_are_read_by_attribute():
    assert {name_of(path) for path in SOURCES if list(config_lookups(path))} == set(CONFIG_LOOKUPS)


def test_files_have_few_lines():
    long = {name_of(path) for path in [*SOURCES, *TESTS] if len(path.read_text().splitlines()) > MAX_LINES}
    assert long == set(LONG_FILES)


def functions(path: Path) -> Iterator[tuple[str, int]]:
    """Yields name and number of body lines, without the docstring, of every function."""
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            body = node.body[1:] if ast.get_docstring(node) is not None else node.body
            yield node.name, (node.end_lineno or 0) - body[0].lineno + 1 if body else 0


def test_functions_fit_on_a_screen():
    drivers = set((ROOT / "recipes").glob("*/train.py"))
    long = {
        f"{name_of(p)}:{name}" for p in SOURCES if p not in drivers for name, lines in functions(p) if lines > MAX_BODY
    }
    assert long == set(LONG_FUNCTIONS)


def test_a_driver_loop_is_short():
    drivers = sorted((ROOT / "recipes").glob("*/train.py"))
    assert drivers and [name_of(path) for path in drivers if len(path.read_text().splitlines()) > MAX_DRIVER] == []


def test_no_file_has_a_generic_name():
    generic = {"utils.py", "helpers.py", "common.py", "manager.py"}
    assert [name_of(path) for path in [*SOURCES, *TESTS] if path.name in generic] == []


def _public_methods(cls: type) -> set[str]:
    return {name for name, value in vars(cls).items() if inspect.isfunction(value) and not name.startswith("_")}


def test_run_has_few_methods_and_no_algorithm():
    assert len(_public_methods(Run)) <= 15
    tree = ast.parse(Path(inspect.getfile(Run)).read_text())
    imports = {node.module or "" for node in ast.walk(tree) if isinstance(node, ast.ImportFrom)}
    algorithms = ("flowrl.algorithms", "flowrl.run.advantages", "flowrl.workers")
    assert not any(name.startswith(algorithms) for name in imports)


PROGRAMS = [path for folder in ("recipes", "tests/recipes/programs") for path in sorted((ROOT / folder).rglob("*.py"))]


def test_recipes_have_no_untyped_values():
    nodes = {path: ast.walk(ast.parse(path.read_text())) for path in PROGRAMS}
    assert [name_of(path) for path in PROGRAMS if any(is_any(node) for node in nodes[path])] == []


def is_any(node: ast.AST) -> bool:
    return isinstance(node, ast.Name) and node.id == "Any"
