"""Stands in for SGLang's GPU kernel package, which cannot load where there is no GPU driver.

On a CPU SGLang imports kernels by name while its own modules load, then computes with plain torch: serving a
Llama-family model calls none of them. So every name asked of this package, or of a submodule, is a placeholder
that raises NotImplementedError naming the kernel once something does call it. Two operators are called at
start-up on an ARM machine; `threads` implements those.

The operators in `torch.ops.sgl_kernel` are another matter: SGLang probes them with hasattr to choose its path,
and what is not defined there has to stay undefined.
"""

import sys
from collections.abc import Sequence
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from types import ModuleType

from sgl_kernel import threads

__all__ = ["threads"]

OWN_FALLBACK = frozenset({"sgl_kernel.allreduce", "sgl_kernel.scalar_type"})
"""Submodules that SGLang replaces itself when their import fails: a placeholder would be in its way."""


def placeholder(kernel: str):
    """A function to import in place of `kernel`; calling it raises NotImplementedError."""

    def missing(*args, **kwargs):
        raise NotImplementedError(
            f"{kernel} is a GPU kernel without a CPU stand-in: "
            "radix-pages runs Llama-family models on the CPU, anything else needs a GPU"
        )

    missing.__name__ = missing.__qualname__ = kernel.rpartition(".")[2]
    return missing


def lend_names(module: ModuleType) -> None:
    """Let every public name be imported from `module`; names with two underscores stay absent."""

    def __getattr__(name: str):
        if name.startswith("__"):
            raise AttributeError(f"module {module.__name__!r} has no attribute {name!r}")
        return placeholder(f"{module.__name__}.{name}")

    module.__getattr__ = __getattr__


class Submodules(MetaPathFinder, Loader):
    """Finds any submodule of this package that is not a file here."""

    def find_spec(self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None):
        if not fullname.startswith(f"{__name__}.") or fullname in OWN_FALLBACK:
            return None
        return ModuleSpec(fullname, self, is_package=True)

    def create_module(self, spec: ModuleSpec) -> None:
        return None  # a plain module will do

    def exec_module(self, module: ModuleType) -> None:
        lend_names(module)


sys.meta_path.append(Submodules())  # last: files of this package come first
lend_names(sys.modules[__name__])
