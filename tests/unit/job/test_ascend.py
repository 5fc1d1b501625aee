"""Requirements of ranks on NPUs: their order, the variables that Rekindle sets, refused values."""

from __future__ import annotations

import os
import re
import sys
import textwrap
from pathlib import Path

import pytest
from repository import ROOT
from waiting import run_command

from rekindle.errors import UsageError
from rekindle.job import ascend
from rekindle.job.ascend import ascend_environment, check_environment, count_npus, survey
from rekindle.recovery.policy.policy import Policy, Strategy

ALL = {"torch": "2.13.0+cpu", "torch-npu": "2.13.0.post1"}
LIBRARIES = {"libhccl.so", "libascend_hal.so"}
PROJECT, CONSTRAINTS = ROOT / "pyproject.toml", ROOT / "constraints.txt"
OUTER = Policy(strategies=(Strategy.RESTART, Strategy.RESCHEDULE_JOB))


def lacking(
    versions: dict[str, str] | None = None, libraries: set[str] = LIBRARIES, devices: int = 8
) -> list[str]:
    """Return the names of the missing parts of such a machine."""
    installed = ALL if versions is None else versions
    found = survey(lambda name: installed.get(name, ""), libraries.__contains__, devices)
    assert all(each.do for each in found)
    return [each.what for each in found if not each.is_there]


def test_a_machine_with_all_of_it_lacks_nothing() -> None:
    """survey() accepts a CPU build of torch and a later build of torch-npu."""
    assert lacking() == []


@pytest.mark.parametrize(
    ("versions", "first"),
    [
        ({}, "torch-npu"),
        ({"torch": "2.13.0"}, "torch-npu"),
        ({"torch-npu": "2.13.0"}, "torch of its version"),
        ({"torch": "2.13.1", "torch-npu": "2.13.0"}, "torch of its version"),
        ({"torch": "2.14.0", "torch-npu": "2.13.0"}, "torch of its version"),
    ],
)
def test_versions_have_to_be_a_pair(versions: dict[str, str], first: str) -> None:
    """torch-npu X.Y.Z needs torch X.Y.Z."""
    assert lacking(versions)[0] == first


def test_what_does_not_fit_is_told() -> None:
    """The finding names both versions of a wrong pair, and those of CANN and the driver."""
    installed = {"torch": "2.14.0", "torch-npu": "2.13.0"}
    versions = {"libhccl.so": "8.5.0", "libascend_hal.so": "25.3.rc1"}
    found = survey(lambda name: installed.get(name, ""), LIBRARIES.__contains__, 8, versions)
    findings = {each.what: (each.finding, each.do) for each in found}
    assert findings["torch of its version"] == (
        "2.14.0 does not fit torch-npu 2.13.0, which needs torch 2.13.0",
        "pip install torch==2.13.0",
    )
    assert findings["CANN"][0] == "8.5.0; libhccl.so is there"
    assert findings["driver"][0] == "25.3.rc1; libascend_hal.so is there"


def test_the_version_of_cann(tmp_path: Path) -> None:
    """The file of the active toolkit has the version. Without the file it is unknown."""
    environment = {"ASCEND_HOME_PATH": str(tmp_path)}
    assert ascend.cann_version(environment) == ""
    (tmp_path / "x86_64-linux").mkdir()
    file = tmp_path / "x86_64-linux" / "ascend_toolkit_install.info"
    file.write_text("package_name=Ascend-cann-toolkit\nversion=8.2.RC1\n")
    assert ascend.cann_version(environment) == "8.2.RC1"


def test_the_extra_and_the_pins_name_one_pair() -> None:
    """torch-npu X.Y needs torch X.Y, in the extra and in the constraints."""
    extra = re.findall(r'^npu = \["torch==(\S+)", "torch-npu==(\S+)"\]', PROJECT.read_text(), re.M)
    pins = re.findall(r"^torch(?:-npu)?==(\S+)", CONSTRAINTS.read_text(), re.M)
    assert [first == second for first, second in extra] == [True]
    assert len(pins) == 2
    assert len({pin.partition("+")[0] for pin in pins}) == 1
    assert pins[0].startswith(extra[0][0].rstrip("*"))


def test_what_is_missing_is_told_in_the_order_of_need() -> None:
    """survey() lists CANN before the driver, and the driver before the devices."""
    assert lacking(libraries=set(), devices=0) == ["CANN", "driver", "devices"]
    assert lacking(libraries={"libhccl.so"}, devices=0) == ["driver", "devices"]
    assert lacking(devices=0) == ["devices"]


def test_npus_are_counted(tmp_path: Path) -> None:
    """count_npus() counts NPUs, and ignores driver files that containers without NPUs may see."""
    for name in ("davinci_manager", "devmm_svm", "davinci0", "davinci11"):
        (tmp_path / name).touch()
    assert count_npus(tmp_path) == 2


def test_hccl_leaves_repairable_ranks_alive(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """If the policy repairs ranks, Rekindle sets HCCL variables on machines with NPUs.

    The values of the user stay.
    """
    assert ascend_environment({}, Policy()) == {}
    manager = tmp_path / "davinci_manager"
    manager.touch()
    monkeypatch.setattr(ascend, "NPU_MANAGER", manager)
    environment = ascend_environment({}, Policy())
    assert environment["HCCL_ASYNC_ERROR_HANDLING"] == "0"
    assert environment["HCCL_CONNECT_TIMEOUT"] == "600"
    check_environment(environment, Policy())
    assert "HCCL_ASYNC_ERROR_HANDLING" not in ascend_environment({}, OUTER)
    own = {"HCCL_OP_RETRY_ENABLE": "L0:0, L1:0, L2:0"}
    assert "HCCL_OP_RETRY_ENABLE" not in ascend_environment(own, Policy())


@pytest.mark.parametrize(
    ("name", "value", "text"),
    [
        ("HCCL_ASYNC_ERROR_HANDLING", "yes", "give 0, 1 or 2"),
        ("HCCL_ASYNC_ERROR_HANDLING", "1", "would end ranks before Rekindle can repair them"),
        ("HCCL_OP_RETRY_ENABLE", "L0:0 L1:1", "give levels"),
        ("HCCL_OP_RETRY_ENABLE", "L7:1", "give levels"),
        ("HCCL_EXEC_TIMEOUT", "180s", "a whole number of seconds"),
        ("HCCL_CONNECT_TIMEOUT", "", "a whole number of seconds"),
        ("HCCL_CONNECT_TIMEOUT", "5", "give 120 to 7200 seconds"),
        ("HCCL_OP_RETRY_ENABLE", "L1:0, L1:1", "give each level once"),
    ],
)
def test_wrong_values_are_refused(name: str, value: str, text: str) -> None:
    """check_environment() refuses a wrong value with the name and the valid values."""
    with pytest.raises(UsageError, match=f"{name} is .*{text}"):
        check_environment({name: value}, Policy())


def test_what_a_policy_without_repairs_allows() -> None:
    """If the policy does not repair ranks, HCCL may end ranks."""
    check_environment({"HCCL_ASYNC_ERROR_HANDLING": "2"}, OUTER)
    check_environment({"HCCL_OP_RETRY_ENABLE": "L0:0,L1:1, L2:1"}, OUTER)


@pytest.mark.parametrize(
    ("given", "corrected"),
    [
        ("{UCE:1 TTP:1}", "{UCE:1, TTP:1}"),
        ("{ UCE:1  TTP:1 HCCE:1 }", "{ UCE:1, TTP:1, HCCE:1 }"),
        ("{UCE:1, TTP:1}", None),
        ("{UCE : 1}", None),
        ("", None),
    ],
)
def test_a_switch_gets_its_missing_commas(given: str, corrected: str | None) -> None:
    """The switch of a document of MindSpore works, and a correct one stays as it is."""
    environment = {"MS_ENABLE_TFT": given}
    assert ascend.with_commas(environment) is (corrected is not None)
    assert environment == {"MS_ENABLE_TFT": given if corrected is None else corrected}


@pytest.mark.process
def test_ranks_load_torch_though_torch_npu_cannot(tmp_path: Path) -> None:
    """Without CANN, Rekindle disables the automatic import of torch-npu.

    Otherwise `import torch` would fail.
    """
    package = tmp_path / "torch_npu"
    package.mkdir()
    (package / "__init__.py").write_text('raise ImportError("libhccl.so: cannot open")\n')
    entry = tmp_path / "torch_npu-2.13.0.dist-info"
    entry.mkdir()
    (entry / "METADATA").write_text("Metadata-Version: 2.1\nName: torch-npu\nVersion: 2.13.0\n")
    (entry / "entry_points.txt").write_text("[torch.backends]\ntorch_npu = torch_npu:_autoload\n")
    script = textwrap.dedent(
        """
        import os, subprocess, sys
        from rekindle.recovery.policy.policy import Policy
        from rekindle.job.ascend import ascend_environment
        environment = ascend_environment(os.environ, Policy())
        plain = subprocess.run([sys.executable, "-c", "import torch"], capture_output=True)
        kept = subprocess.run([sys.executable, "-c", "import torch"], env=os.environ | environment)
        print(environment, plain.returncode, kept.returncode)
        """
    )
    path = os.pathsep.join([str(tmp_path), str(Path(ascend.__file__).parents[2])])
    output = run_command([sys.executable, "-c", script], env=os.environ | {"PYTHONPATH": path})
    assert output.returncode == 0, output.stderr
    assert output.stdout.split("\n")[-2] == "{'TORCH_DEVICE_BACKEND_AUTOLOAD': '0'} 1 0"


@pytest.mark.process
def test_the_command_tells_what_is_missing() -> None:
    """If a part is missing, `rekindle npu-check` prints the first action and returns status 1."""
    command = [sys.executable, "-m", "rekindle.cli.main", "npu-check"]
    output = run_command(command)
    assert output.returncode == 1
    assert "torch-npu" in output.stdout
    assert "pip install 'rekindle[npu]'" in output.stdout
