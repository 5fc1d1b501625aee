"""`rekindle kubernetes trace`: what MindCluster's profiling of a job writes down."""

from __future__ import annotations

import argparse
import sys

from rekindle.engines.kubernetes.client.api import Api, load
from rekindle.engines.kubernetes.labels import Names
from rekindle.engines.kubernetes.mindcluster import clusterd
from rekindle.engines.kubernetes.mindcluster.clusterd import switch_trace, traced
from rekindle.errors import RekindleError
from rekindle.profiling.switch import Switch, switch_of


def run(options: argparse.Namespace) -> int:
    """Switch it, if that is asked for, and print what is on."""
    wanted = None
    if options.off or options.on is not None:
        wanted = switch_of(() if options.off else options.on.split(","))
    api = load(options.kubeconfig, options.context)
    try:
        if wanted is not None:
            _switch(api, options, wanted)
        now = wanted if wanted is not None else traced(api, options.namespace, options.job)
    finally:
        api.close()
    print(" ".join(now.words) or "off")
    return 0


def _switch(api: Api, options: argparse.Namespace, wanted: Switch) -> None:
    """Ask ClusterD where it can be reached, as TaskD's manager wants it; else write for it."""
    address = options.clusterd or (clusterd.ADDRESS if api.is_inside else "")
    if address:
        job = f"{options.namespace}/{Names.of(options.job).workload}"
        try:
            clusterd.modify_trace(address, job, wanted)
            return
        except RekindleError as error:
            if options.clusterd:
                raise
            print(f"rekindle: {error}; its ConfigMap is written instead", file=sys.stderr)
    switch_trace(api, options.namespace, options.job, wanted)
