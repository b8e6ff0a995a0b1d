"""What is found out about the CPU, against psutil-free sources of the system."""

import os
import subprocess

from moec.runtime import cpu_info


def test_cores_are_allowed_ones():
    assert 1 <= cpu_info.physical_cores() <= len(os.sched_getaffinity(0))


def test_affinity_limits_the_cores():
    one = str(min(os.sched_getaffinity(0)))
    code = "from moec.runtime.cpu_info import physical_cores; print(physical_cores())"
    command = ["taskset", "-c", one, os.sys.executable, "-c", code]
    assert subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip() == "1"


def test_hyperthreads_count_once(tmp_path, monkeypatch):
    for cpu, siblings in enumerate(["0,2", "1,3", "0,2", "1,3"]):
        folder = tmp_path / f"cpu{cpu}/topology"
        folder.mkdir(parents=True)
        (folder / "thread_siblings_list").write_text(siblings + "\n")
    monkeypatch.setattr(cpu_info, "_TOPOLOGY", tmp_path)
    monkeypatch.setattr(cpu_info, "_CPU_MAX", tmp_path / "none")
    monkeypatch.setattr(os, "sched_getaffinity", lambda _pid: {0, 1, 2, 3})
    assert cpu_info.physical_cores() == 2


def test_quota_of_a_container(tmp_path, monkeypatch):
    monkeypatch.setattr(cpu_info, "_CPU_MAX", tmp_path / "cpu.max")
    (tmp_path / "cpu.max").write_text("150000 100000\n")
    monkeypatch.setattr(os, "sched_getaffinity", lambda _pid: set(range(64, 96)))
    assert cpu_info.physical_cores() == 2
    (tmp_path / "cpu.max").write_text("max 100000\n")
    assert cpu_info.physical_cores() == 32


def test_memory():
    total, available = cpu_info.memory_bytes()
    assert total == os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    assert 0 < available <= total


def test_instruction_sets_are_in_cpuinfo():
    with open("/proc/cpuinfo") as file:
        flags = file.read().split()
    assert all(name in flags for name in cpu_info.instruction_sets())
