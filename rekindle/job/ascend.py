"""Checks and sets the environment that ranks on Ascend NPUs need, without importing torch-npu.

Without CANN, an installed torch-npu makes `import torch` fail, because torch loads it by itself.
So this module examines it from outside, and prevents its loading if it cannot load.

Sources: torch_npu 2.13 and 2.14 (metadata, `torch_npu/__init__.py`), MindCluster's ascend-operator
(HCCL_ASYNC_ERROR_HANDLING with process-level recovery), HCCL's manual (HCCL_OP_RETRY_ENABLE;
HCCL_CONNECT_TIMEOUT from 120 to 7200 s).
"""

from __future__ import annotations

import ctypes
import functools
import importlib.metadata
import importlib.util
import os
import re
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from types import MappingProxyType

import msgspec

from rekindle.errors import UsageError
from rekindle.recovery.policy.policy import INNER, Policy

NPU_MANAGER = Path("/dev/davinci_manager")
AUTOLOAD = "TORCH_DEVICE_BACKEND_AUTOLOAD"
_ASYNC = "HCCL_ASYNC_ERROR_HANDLING"
_RETRY = "HCCL_OP_RETRY_ENABLE"
_SWITCH = "MS_ENABLE_TFT"
_NO_CACHING = "PYTORCH_NO_NPU_MEMORY_CACHING"
_ASCEND = "/usr/local/Ascend"
_SET_ENV = f"source {_ASCEND}/ascend-toolkit/set_env.sh"
DRIVER_FILES = (Path(_ASCEND, "driver/version.info"),)
_NO_COMMA = re.compile(r"(?<=\w)\s+(?=\w+\s*:)")
_VERSION = re.compile(r"^\s*version\s*=\s*(\S+)", re.IGNORECASE | re.MULTILINE)

_LEVELS = re.compile(r"L[0-2]:[01](\s*,\s*L[0-2]:[01])*")
_CONNECT, _EXEC = "HCCL_CONNECT_TIMEOUT", "HCCL_EXEC_TIMEOUT"
_LEAST_CONNECT_S, _MOST_CONNECT_S = 120, 7200
_SECONDS = re.compile(r"[0-9]{1,10}")
# The valid form of each variable, and its text in an error.
_FORMS: Mapping[str, tuple[re.Pattern[str], str]] = {
    _ASYNC: (re.compile("[012]"), "0, 1 or 2"),
    _RETRY: (_LEVELS, 'levels with 0 or 1, such as "L0:0, L1:1, L2:1"'),
    _CONNECT: (_SECONDS, "a whole number of seconds"),
    _EXEC: (_SECONDS, "a whole number of seconds"),
}


class Needed(msgspec.Struct, frozen=True):
    """One thing that ranks need. `finding` is the result, and `do` the remedy if it is missing."""

    what: str
    is_there: bool
    finding: str
    do: str = ""


def survey(
    version_of: Callable[[str], str],
    loads: Callable[[str], bool],
    devices: int,
    versions: Mapping[str, str] = MappingProxyType({}),
) -> list[Needed]:
    """Check what torch-npu needs, each item before those that depend on it.

    version_of: returns the version of a package; empty: it is not installed. loads: whether a
    library can be loaded. devices: the number of NPUs that the driver shows. versions: of CANN and
    driver, as far as their files show it.
    """
    torch, npu = version_of("torch"), version_of("torch-npu")
    wanted = re.match(r"\d+\.\d+\.\d+", npu)
    pair = wanted.group() if wanted else ""
    fits = bool(pair) and torch.partition("+")[0] == pair
    install = (
        f"pip install torch=={pair}" if pair else "pip install 'rekindle[npu]', which has one pair"
    )
    found = torch or "not installed"
    if pair and torch and not fits:
        found = f"{torch} does not fit torch-npu {npu}, which needs torch {pair}"
    return [
        Needed("torch-npu", bool(npu), npu or "not installed", "pip install 'rekindle[npu]'"),
        Needed("torch of its version", fits, found, install),
        Needed("CANN", loads("libhccl.so"), _loaded(loads, "libhccl.so", versions), _SET_ENV),
        Needed(
            "driver",
            loads("libascend_hal.so"),
            _loaded(loads, "libascend_hal.so", versions),
            "install Ascend's driver, and mount /usr/local/Ascend/driver into the container",
        ),
        Needed(
            "devices",
            devices > 0,
            f"{devices} at /dev/davinci*",
            "start the container with NPUs (Ascend Docker Runtime, or a device plugin)",
        ),
    ]


def survey_here() -> list[Needed]:
    """Check what torch-npu needs on this machine."""
    versions = {"libhccl.so": cann_version(os.environ), "libascend_hal.so": _in(DRIVER_FILES)}
    return survey(_version, _loads, count_npus(), versions)


def cann_version(environment: Mapping[str, str]) -> str:
    """Return the version of CANN that is active, or that is at its usual place; empty: unknown."""
    named = (environment.get(name, "") for name in ("ASCEND_HOME_PATH", "ASCEND_TOOLKIT_HOME"))
    homes = [Path(each) for each in named if each] or [Path(_ASCEND, "ascend-toolkit/latest")]
    patterns = ("ascend_toolkit_install.info", "*/ascend_toolkit_install.info")
    return _in(file for home in homes for each in patterns for file in sorted(home.glob(each)))


def _in(files: Iterable[Path]) -> str:
    """Return the version in the first of these files that states one."""
    for file in files:
        try:
            found = _VERSION.search(file.read_text(errors="replace"))
        except OSError:
            continue  # it is not installed there
        if found:
            return found[1]
    return ""


def count_npus(devices: Path = Path("/dev")) -> int:
    """Count the NPUs that the driver shows to this machine or container."""
    return sum(path.name[7:].isdigit() for path in devices.glob("davinci*"))


def ascend_environment(environment: Mapping[str, str], policy: Policy) -> dict[str, str]:
    """Return the variables that ranks also get: how HCCL handles failures, as the policy needs it.

    It leaves out each variable that the user has set. On a machine without NPUs the result at most
    keeps torch-npu from loading where CANN is missing.
    """
    variables: dict[str, str] = {}
    if importlib.util.find_spec("torch_npu") is not None and not _loads("libhccl.so"):
        variables[AUTOLOAD] = "0"
    if NPU_MANAGER.exists():
        # HCCL retries a failed operator between servers, which is the cheapest recovery of all.
        variables[_RETRY] = "L0:0, L1:1, L2:1"
        # Ranks wait for each other as long as the policy allows a rank to be late.
        late = round(policy.join_timeout_s)
        variables[_CONNECT] = str(min(max(late, _LEAST_CONNECT_S), _MOST_CONNECT_S))
        if _repairs(policy):
            # With 1 or 2, HCCL ends the process of a failed collective before a repair.
            variables[_ASYNC] = "0"
    return {name: value for name, value in variables.items() if name not in environment}


def with_commas(environment: dict[str, str]) -> bool:
    """Put the missing commas into MindSpore's switch of fault tolerance; False: none was missing.

    MindSpore's documents have '{UCE:1 TTP:1}'. Its C++ code splits that at the commas, and then
    UCE is off; its Python code takes UCE for on.
    """
    given = environment.get(_SWITCH, "")
    corrected = _NO_COMMA.sub(", ", given)
    if corrected == given:
        return False
    environment[_SWITCH] = corrected
    return True


def check_environment(environment: Mapping[str, str], policy: Policy) -> None:
    """Check the variables of HCCL and torch-npu.

    Raises UsageError: a value is invalid, or conflicts with the policy or the devices.
    """
    for name, (form, meaning) in _FORMS.items():
        value = environment.get(name)
        if value is not None and not form.fullmatch(value.strip()):
            raise UsageError(f"{name} is {value!r}; give {meaning}")
    levels = [each.strip()[:2] for each in environment.get(_RETRY, "").split(",") if each.strip()]
    if len(set(levels)) < len(levels):
        raise UsageError(f"{_RETRY} is {environment[_RETRY]!r}; give each level once")
    connect = environment.get(_CONNECT)
    if connect is not None and not _LEAST_CONNECT_S <= int(connect) <= _MOST_CONNECT_S:
        raise UsageError(
            f"{_CONNECT} is {connect}; give {_LEAST_CONNECT_S} to {_MOST_CONNECT_S} seconds"
        )
    asked = environment.get(_ASYNC, "0").strip()
    if asked != "0" and _repairs(policy):
        raise UsageError(
            f"{_ASYNC} is {asked}, so HCCL would end ranks before Rekindle can repair them; give "
            f"0, or remove {', '.join(s.value for s in INNER)} from the policy"
        )
    if environment.get(_NO_CACHING) and NPU_MANAGER.exists():
        raise UsageError(
            f"{_NO_CACHING} is set, so torch-npu cannot find out which tensors a memory error "
            "has damaged; unset it"
        )


def _repairs(policy: Policy) -> bool:
    return any(strategy in INNER for strategy in policy.strategies)


def _version(package: str) -> str:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return ""


@functools.cache
def _loads(library: str) -> bool:
    try:
        ctypes.CDLL(library)
    except OSError:
        return False
    return True


def _loaded(loads: Callable[[str], bool], library: str, versions: Mapping[str, str]) -> str:
    version = versions.get(library, "")
    known = f"{version}; " if version else ""
    return f"{known}{library} {'is there' if loads(library) else 'cannot be loaded'}"
