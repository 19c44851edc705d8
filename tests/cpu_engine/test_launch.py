"""What `radix-pages serve` starts: its arguments and environment, with and without a GPU."""

import os
import subprocess
import sys
from importlib import metadata
from pathlib import Path

import pytest
from typer.testing import CliRunner

from radix_pages_sglang import cli, cpu_engine
from radix_pages_sglang.cpu_engine import STANDIN, arguments, cores

CPU_FLAGS = [
    "--device=cpu",
    "--attention-backend=torch_native",
    "--disable-overlap-schedule",
    "--mem-fraction-static=0.3",
    "--max-total-tokens=32768",
]
BACKEND_FLAG = "--radix-cache-backend=radix_pages"


def test_options_are_read_in_both_forms_and_the_last_one_counts():
    argv = ["model", "--device", "cuda", "--trust-remote-code", "--page-size=16", "--device=cpu", "--seed", "-1"]
    assert arguments.options(argv) == {
        "device": "cpu",
        "trust-remote-code": None,
        "page-size": "16",
        "seed": "-1",
    }


def test_options_of_a_configuration_file_stand_below_the_command_line(tmp_path):
    config = tmp_path / "server.yaml"
    config.write_text("device: cuda\nattention_backend: triton\ntrust-remote-code: true\nskip-warmup: false\n")
    found = arguments.options(["--config", str(config), "--device", "cpu"])
    assert found == {
        "config": str(config),
        "device": "cpu",
        "attention-backend": "triton",
        "trust-remote-code": "True",
    }


def test_an_unreadable_configuration_file_is_left_to_sglang(tmp_path):
    assert arguments.options(["--config", str(tmp_path / "none.yaml")]).keys() == {"config"}


@pytest.mark.parametrize(
    ("argv", "ranks"),
    [
        ([], 1),
        (["--tp", "2"], 2),
        (["--tensor-parallel-size=2", "--dp", "3"], 6),
        (["--pp-size", "2"], 2),
        (["--tp", "many"], 1),
        (["--tp", "0"], 1),
    ],
)
def test_ranks_are_counted_over_all_spellings(argv, ranks):
    assert arguments.num_ranks(argv) == ranks


def test_hardware_threads_of_one_core_count_once(tmp_path, monkeypatch):
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: {0, 1, 2, 3, 5})
    for cpu, siblings in {0: "0,4", 1: "1,5", 2: "2", 5: "1,5"}.items():
        folder = tmp_path / f"cpu{cpu}" / "topology"
        folder.mkdir(parents=True)
        (folder / "thread_siblings_list").write_text(siblings + "\n")
    assert cores.physical_cores(tmp_path) == [0, 1, 2, 3]  # cpu3 has no topology and counts by itself


def test_ranks_share_cores_evenly_and_take_turns_when_there_are_too_few():
    assert cores.split([0, 2, 4, 6, 8], 2) == [[0, 2], [4, 6]]
    assert cores.split([0, 2], 3) == [[0], [2], [0]]


def test_a_cpu_server_gets_the_flags_it_lacks_after_its_model():
    assert cpu_engine.server_arguments(["model", "--port", "1"]) == ["model", *CPU_FLAGS, "--port", "1"]
    assert cpu_engine.server_arguments(["--model=model"]) == [*CPU_FLAGS, "--model=model"]


@pytest.mark.parametrize("given", [["--attention-backend", "intel_amx"], ["--attention-backend=intel_amx"]])
def test_a_flag_given_is_kept(given):
    rest = [flag for flag in CPU_FLAGS if not flag.startswith("--attention-backend")]
    assert cpu_engine.server_arguments(["model", *given]) == ["model", *rest, *given]


def test_a_memory_fraction_given_sizes_the_cache_alone():
    added = cpu_engine.server_arguments(["model", "--mem-fraction-static", "0.5"])
    assert added == ["model", *CPU_FLAGS[:3], "--mem-fraction-static", "0.5"]


def test_the_environment_puts_the_stand_in_first_and_keeps_what_the_user_set(monkeypatch):
    monkeypatch.setattr(cores, "physical_cores", lambda: [0, 1, 2, 3])
    base = {"PYTHONPATH": "mine", "OMP_WAIT_POLICY": "ACTIVE", "HOME": "home"}
    assert cpu_engine.environment(base) == {
        "HOME": "home",
        "OMP_NUM_THREADS": "4",
        "OMP_WAIT_POLICY": "ACTIVE",
        "PYTHONPATH": f"{STANDIN}{os.pathsep}mine",
        "SGLANG_USE_CPU_ENGINE": "1",
        "TORCHDYNAMO_DISABLE": "1",
    }


def test_two_ranks_are_bound_to_cores_of_their_own_and_do_without_nccl(monkeypatch):
    monkeypatch.setattr(cores, "physical_cores", lambda: [0, 1, 2, 3])
    found = cpu_engine.environment({}, ["model", "--tp", "2"])
    assert found["OMP_NUM_THREADS"] == "2"
    assert found["SGLANG_CPU_OMP_THREADS_BIND"] == "0,1|2,3"
    assert found["SGLANG_NCCL_SO_PATH"] == "/nonexistent"


class Driver:
    """The CUDA driver of a machine with `devices` GPUs; without it, `error` is what starting it returns."""

    def __init__(self, devices, error=0):
        self.devices, self.error = devices, error

    def cuInit(self, flags):
        return self.error

    def cuDeviceGetCount(self, count):
        count._obj.value = self.devices
        return 0


@pytest.mark.parametrize(
    ("driver", "needed"), [(Driver(1), False), (Driver(0), True), (Driver(1, error=100), True), (None, True)]
)
def test_the_cpu_engine_is_needed_where_the_driver_shows_no_device(monkeypatch, driver, needed):
    def load(name):
        if driver is None:
            raise OSError(name)
        return driver

    monkeypatch.setattr(cpu_engine.ctypes, "CDLL", load)
    assert cpu_engine.is_needed() is needed


class Started(BaseException):
    """Raised where the server would take the place of this process."""


@pytest.fixture
def serve(monkeypatch):
    """`radix-pages serve` up to the moment the server starts: the server's arguments and environment.

    `serve.gpu` says whether the machine has a GPU.
    """
    monkeypatch.delenv("PYTHONPATH", raising=False)
    monkeypatch.delenv("SGLANG_USE_CPU_ENGINE", raising=False)

    def execve(program, command, environment):
        raise Started(program, command, environment)

    def run(*argv):
        monkeypatch.setattr(cpu_engine, "is_needed", lambda: not run.gpu)
        with pytest.raises(Started) as started:
            CliRunner().invoke(cli.app, ["serve", *argv])
        program, command, environment = started.value.args
        assert program == command[0] == sys.executable
        assert Path(command[1]).name == "sglang"
        assert command[2] == "serve"
        return command[3:], environment

    monkeypatch.setattr(os, "execve", execve)
    run.gpu = True
    return run


@pytest.mark.parametrize(
    "argv",
    [
        ["model"],
        ["model", "--tp", "2", "--json-model-override-args", '{"a": 1}', "--trust-remote-code"],
        ["--model-path", "model", "--host=::1", "-h"],
        ["--model", "model", "--lora-paths", "a=b", "c=d", "--log-level", "info"],
    ],
)
def test_with_a_gpu_only_the_cache_is_added(serve, argv):
    assert serve(*argv) == ([*argv, BACKEND_FLAG], os.environ)


def test_without_a_gpu_the_cpu_engine_is_added(serve):
    serve.gpu = False
    argv, environment = serve("model", "--page-size", "16")
    assert argv == ["model", *CPU_FLAGS, "--page-size", "16", BACKEND_FLAG]
    assert environment == cpu_engine.environment(os.environ, argv)


def test_a_gpu_stays_unused_when_the_cpu_is_asked_for(serve):
    argv, environment = serve("model", "--device", "cpu")
    assert argv == ["model", *CPU_FLAGS[1:], "--device", "cpu", BACKEND_FLAG]
    assert environment["SGLANG_USE_CPU_ENGINE"] == "1"


def test_another_device_is_never_turned_into_a_cpu(serve):
    serve.gpu = False
    assert serve("model", "--device=xpu")[0] == ["model", "--device=xpu", BACKEND_FLAG]


def test_the_cache_may_be_named_twice(serve):
    argv = ["model", "--radix-cache-backend", "radix_pages"]
    assert serve(*argv)[0] == argv


def refused(*argv):
    """The one line that a command ends with, after checking that it ends with status 2."""
    result = CliRunner().invoke(cli.app, ["serve", *argv])
    assert result.exit_code == 2
    assert result.stderr.count("\n") == 1
    return result.stderr.strip()


def test_another_cache_is_refused():
    assert refused("model", "--radix-cache-backend=flexkv") == (
        "radix-pages: --radix-cache-backend flexkv is another cache: "
        "leave it out to use radix_pages, or run `sglang serve` instead"
    )


@pytest.mark.parametrize("argv", [[], ["--port", "1"]])
def test_a_missing_model_is_refused(argv):
    assert refused(*argv) == ("radix-pages: which model? Give its path or name first, as in: radix-pages serve MODEL")


def test_a_missing_sglang_is_refused(monkeypatch):
    def version(name):
        raise metadata.PackageNotFoundError(name)

    monkeypatch.setattr(metadata, "version", version)
    assert refused("model") == "radix-pages: SGLang is not installed: pip install sglang==0.5.23"


def test_an_unsupported_sglang_is_refused(monkeypatch):
    monkeypatch.setattr(metadata, "version", lambda name: "0.5.22")
    assert refused("model") == (
        "radix-pages: SGLang 0.5.22 is installed, which this release does not support: pip install sglang==0.5.23"
    )


def test_a_plugin_list_without_this_one_is_refused(monkeypatch):
    monkeypatch.setenv("SGLANG_PLUGINS", "other, another")
    assert refused("model") == (
        "radix-pages: SGLANG_PLUGINS=other, another keeps this plugin out: add radix_pages or unset it"
    )


def test_help_names_where_other_arguments_go():
    result = CliRunner().invoke(cli.app, ["serve", "--help"])
    assert result.exit_code == 0
    assert "all other arguments go to `sglang serve` untouched" in " ".join(result.stdout.split())


def test_help_loads_neither_torch_nor_sglang():
    code = (
        "import sys\n"
        "from radix_pages_sglang.cli import app\n"
        "try: app(['serve', '--help'])\n"
        "except SystemExit: pass\n"
        "print({'torch', 'sglang', 'transformers', 'numpy'} & set(sys.modules))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.splitlines()[-1] == "set()"


def test_version_names_both_packages():
    result = CliRunner().invoke(cli.app, ["version"])
    assert result.stdout.splitlines() == [
        f"radix-pages {metadata.version('radix-pages')}",
        f"sglang {metadata.version('sglang')} (supported: 0.5.23)",
    ]
