"""The bundles that tests share, and which test files need PyTorch."""

import ast
import os
import shutil
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path

import pytest
from bundles import write_bundles

TESTS = Path(__file__).parent
EXPORT_ONLY = {"torch", "onnx", "onnxscript", "tiktoken", "regex", "psutil"}


def _imports(path: Path) -> Iterator[str]:
    """Yields the modules that a file imports at its top level."""
    for node in ast.parse(path.read_text(encoding="utf-8")).body:
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module:
            yield from (f"{node.module}.{alias.name}" for alias in node.names)


def needs_torch(path: Path) -> bool:
    """Tells whether a file imports what only the export extra installs, itself or through another file of the tests."""
    for module in _imports(path):
        package = module.split(".")[0]
        helper = TESTS / f"{package}.py"
        if package in EXPORT_ONLY or module.startswith("infer.exporter") or (helper.exists() and needs_torch(helper)):
            return True
    return False


# `make test` runs one layer in an environment without PyTorch, and of the other environment only what is left.
LEFT_OUT = True if find_spec("torch") is None else False if os.environ.get("INFER_TEST_LAYER") == "torch" else None
collect_ignore = [path.name for path in TESTS.glob("test_*.py") if needs_torch(path) is LEFT_OUT]


@pytest.fixture(scope="session", autouse=True)
def device_cache(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """The cache of prepacked weights that every test and its processes use, in place of the user's own."""
    folder = tmp_path_factory.mktemp("device-cache")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("INFER_CACHE_DIR", str(folder))
        yield folder


@pytest.fixture(scope="session")
def bundles(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the bundles `modern` and `classic`, see `bundles.py`; not to be changed."""
    if given := os.environ.get("INFER_TEST_BUNDLE"):
        return Path(given)
    if find_spec("torch") is None:
        pytest.fail("without PyTorch the bundles must exist: set INFER_TEST_BUNDLE to a folder by tests/make_bundle.py")
    folder = tmp_path_factory.mktemp("bundles")
    write_bundles(folder)
    return folder


@pytest.fixture(scope="session")
def bundle(bundles: Path) -> Path:
    """A small modern bundle, fp32 and int8; not to be changed."""
    return bundles / "modern"


@pytest.fixture(scope="session")
def classic_bundle(bundles: Path) -> Path:
    """A small classic bundle, fp32; not to be changed."""
    return bundles / "classic"


@pytest.fixture
def copied(bundle: Path, tmp_path: Path) -> Path:
    """A copy of the modern bundle, to be damaged."""
    return shutil.copytree(bundle, tmp_path / "copied")
