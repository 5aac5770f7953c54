"""A Slurm cluster for the tests that need one; installs it first where that is possible."""

from __future__ import annotations

import os
import shutil
import subprocess
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from multinode.slurm import SlurmCluster, is_installed, slurm_cluster


@pytest.fixture(scope="session")
def slurm() -> Iterator[SlurmCluster]:
    """Three nodes on this machine. Afterwards nothing of it is left."""
    if os.geteuid() != 0:
        pytest.skip("Slurm's daemons need root")
    if not is_installed():
        if shutil.which("apt-get") is None:
            pytest.skip("Slurm is not installed, and there is no apt-get to install it with")
        subprocess.run([Path(__file__).with_name("install_slurm.sh")], check=True, timeout=300)
    # Short, since the path of munge's socket must fit in 107 bytes.
    with tempfile.TemporaryDirectory(prefix="slurm-") as folder:
        with slurm_cluster(Path(folder)) as cluster:
            yield cluster
        assert cluster.processes() == {}
