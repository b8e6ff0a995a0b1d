"""Cache sizes from the layouts, and a table that a person can read."""

from __future__ import annotations

from moec.builder.report import BuildReport, cache_sizes, size_table, token_bytes
from moec.reference.kv_layout import KVLayout


def test_cache_sizes_of_one_slot():
    layouts = {0: KVLayout("mkv2", 2, 64, 64, 1024), 1: KVLayout("mkv2", 2, 64, 64, 1024, window=32)}
    blocks, ring = (1024 - 80) // 64 * 2560, (16 + 64 + 64) * 128 * 2
    assert cache_sizes(layouts) == {
        "cache_slot": 2 * (blocks + ring) + (2 * 32 * 128 * 2 + 1),
        "cache_slot_bf16": 2 * (1024 * 128 * 2) + 2 * 32 * 128 * 2 + 2,
        "cache_token": 2 * 2560 // 64,
        "cache_token_bf16": 2 * 128 * 2,
    }


def test_a_token_in_each_format():
    assert token_bytes(KVLayout("fp32", 2, 64, 64, 100)) == 2 * 128 * 4
    assert token_bytes(KVLayout("fp16", 2, 64, 64, 100, window=10)) == 0
    # 2.5 bits an element, all metadata included
    assert token_bytes(KVLayout("mkv2", 8, 128, 128, 100)) == 8 * 256 * 2.5 / 8


def test_the_table_compares_with_bf16():
    sizes = {"dense": 10**6, "dense_bf16": 4 * 10**6, "vocabulary": 10**6, "vocabulary_bf16": 2 * 10**6}
    sizes |= {
        "experts": 3 * 10**6,
        "experts_bf16": 9 * 10**6,
        "other": 5,
        "total": 5 * 10**6,
        "total_bf16": 15 * 10**6,
    }
    sizes |= cache_sizes({0: KVLayout("mkv2", 2, 64, 64, 1024)})
    table = size_table(sizes, {"context": 1024, "weights": "int4", "experts": "bf16", "kv": "mkv2"})
    assert table.rows[0] == ["dense weights", "int4", "1.0 MB", "4.0 MB", "25.0 %"]
    assert table.rows[3][2:] == ["0.0 MB", "", ""]
    assert table.rows[-1] == ["KV cache, one more token", "mkv2", "80 B", "512 B", "15.6 %"]


def test_the_report_has_no_path_of_this_machine(tmp_path):
    report = BuildReport(tmp_path / "bundle", {"kv": "mkv2"}, seconds={"a": 1.23456})
    tree = report.to_json()
    assert "path" not in tree
    assert tree["seconds"] == {"a": 1.235}
