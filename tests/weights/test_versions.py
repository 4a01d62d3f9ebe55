"""Versions of a full model: published, read, walked in both directions, and refused."""

from __future__ import annotations

import json
import os
import resource
import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from openrl.tasks.errors import InvalidRequest, NotFound
from openrl.workers.weights import links, specs
from openrl.workers.weights.publish import Publisher
from openrl.workers.weights.reader import Reader
from openrl.workers.weights.resident import Resident
from tests.weights.models import DTYPES, copied, go, model, publish, raw, reader, room, same, step, steps


def test_every_type_of_tensor_comes_out_with_the_same_bits(tmp_path: Path):
    shapes = {str(dtype).removeprefix("torch."): (dtype, (7, 5)) for dtype in DTYPES}
    before = model(3, shapes)
    after = step(before, seed=4, density=0.3)
    publish(tmp_path, before, after)
    reading = reader(tmp_path, before)
    assert same(go(reading, "v0"), before)
    assert same(go(reading, "v1"), after)


def test_an_anchor_is_a_file_that_stock_safetensors_reads(tmp_path: Path):
    shapes = {f"t{number}": (dtype, (3, number)) for number, dtype in enumerate(DTYPES)}
    weights = model(5, shapes)
    publish(tmp_path, weights)
    assert same(load_file(tmp_path / "v0" / "model.safetensors"), weights)


def test_two_optimizer_steps_in_one_version_count_from_the_last_published_one(tmp_path: Path):
    first, unpublished, second = steps(3)
    publish(tmp_path, first, second)
    reading = reader(tmp_path, first)
    go(reading, "v0")
    with reading.prepare("v1") as switch:
        assert str(switch.route) == "memory +v1"
        switch.apply()
    assert same(reading.resident.tensors, second)
    assert not same(unpublished, second)


def test_a_version_that_equals_the_one_before_touches_nothing(tmp_path: Path):
    weights = model()
    publish(tmp_path, weights, copied(weights))
    reading = reader(tmp_path, weights)
    go(reading, "v0")
    with reading.prepare("v1") as switch:
        assert switch.apply() == ()
    assert same(reading.resident.tensors, weights)
    assert reading.resident.at is not None and reading.resident.at.name == "v1"


def test_only_tensors_that_changed_are_said_to_be_touched(tmp_path: Path):
    before = model()
    after = copied(before)
    after["norm.weight"][3] = 1.5
    publish(tmp_path, before, after)
    reading = reader(tmp_path, before)
    go(reading, "v0")
    with reading.prepare("v1") as switch:
        assert switch.apply() == ("norm.weight",)


def test_skipped_versions_are_walked_forwards_and_back(tmp_path: Path):
    versions = steps(5)
    publish(tmp_path, *versions)
    reading = reader(tmp_path, versions[0])
    for number, route in [(1, "anchor v0 +v1"), (4, "memory +v2 +v3 +v4"), (1, "memory -v4 -v3 -v2"), (1, "memory")]:
        with reading.prepare(f"v{number}") as switch:
            assert str(switch.route) == route
            switch.apply()
        assert same(reading.resident.tensors, versions[number])


def test_two_branches_are_walked_by_way_of_where_they_part(tmp_path: Path):
    root, left, right = model(), step(model(), 1), step(model(), 2)
    publish(tmp_path, root, left)
    base = room(root)
    go(Reader(tmp_path, base), "v0")
    Publisher(tmp_path, base=base).publish("right", right, step=1)
    reading = reader(tmp_path, root)
    go(reading, "v1")
    with reading.prepare("right") as switch:
        assert str(switch.route) == "memory -v1 +right"
        switch.apply()
    assert same(reading.resident.tensors, right)


def test_a_restarted_sampler_begins_with_the_last_anchor(tmp_path: Path):
    versions = steps(6)
    publish(tmp_path, *versions, anchor_every=3)
    reading = reader(tmp_path, versions[0])
    with reading.prepare("v5") as switch:
        assert str(switch.route) == "anchor v3 +v4 +v5"
        switch.apply()
    assert same(reading.resident.tensors, versions[5])


def test_an_anchor_is_reached_by_its_delta_from_the_version_before(tmp_path: Path):
    versions = steps(4)
    publish(tmp_path, *versions, anchor_every=3)
    assert {path.name for path in (tmp_path / "v3").iterdir()} == {"manifest.json", "delta.bin", "model.safetensors"}
    reading = reader(tmp_path, versions[0])
    go(reading, "v2")
    with reading.prepare("v3") as switch:
        assert str(switch.route) == "memory +v3"
        switch.apply()
    assert same(reading.resident.tensors, versions[3])


def test_a_delta_larger_than_all_weights_is_left_out(tmp_path: Path):
    first, second = model(1), model(2)
    publish(tmp_path, first, second)
    assert {path.name for path in (tmp_path / "v1").iterdir()} == {"manifest.json", "model.safetensors"}
    assert same(go(reader(tmp_path, first), "v1"), second)


def test_a_chain_that_is_as_large_as_all_weights_ends_with_an_anchor(tmp_path: Path):
    versions = steps(8, density=0.3)
    publish(tmp_path, *versions)
    anchored = [number for number in range(8) if (tmp_path / f"v{number}" / "model.safetensors").exists()]
    assert anchored[0] == 0 and len(anchored) > 1
    assert same(go(reader(tmp_path, versions[0]), "v7"), versions[7])


def test_what_was_staged_is_published_as_the_very_files_of_what_was_not(tmp_path: Path):
    versions = steps(5)
    publish(tmp_path / "plain", *versions, anchor_every=3)
    publisher = Publisher(tmp_path / "staged", anchor_every=3, threads=1)
    for number, weights in enumerate(versions):
        staged = publisher.stage(copied(weights), gives=True)
        assert (staged is None) == (number == 0)
        publisher.publish(f"v{number}", staged or weights, step=number)
    for path in sorted(each for each in (tmp_path / "plain").rglob("*") if each.is_file()):
        assert (tmp_path / "staged" / path.relative_to(tmp_path / "plain")).read_bytes() == path.read_bytes()


def test_what_was_staged_before_another_version_leads_on_from_that_one(tmp_path: Path):
    first, between, second = steps(3)
    publisher = publish(tmp_path, first)
    staged = publisher.stage(second)
    assert staged is not None and [path.name for path in tmp_path.iterdir()] == ["v0"]
    publisher.publish("v1", between, step=1)
    link = publisher.publish("v2", staged, step=2)
    assert link.parent is not None and link.parent.name == "v1"
    reading = reader(tmp_path, first)
    for name, weights in [("v1", between), ("v2", second), ("v0", first)]:
        assert same(go(reading, name), weights)
    with pytest.raises(InvalidRequest, match="was given to the publisher before"):
        publisher.publish("v3", staged, step=3)


def test_weights_that_were_staged_and_not_given_away_may_change_before_they_are_published(tmp_path: Path):
    first, second = steps(2)
    publisher, kept = publish(tmp_path, first), copied(second)
    staged = publisher.stage(second)
    second["norm.weight"].fill_(7.0)
    publisher.publish("v1", staged, step=1)
    assert same(go(reader(tmp_path, first), "v1"), kept)


def test_another_set_of_tensors_is_published_as_an_anchor(tmp_path: Path):
    first = model()
    second = {name: tensor for name, tensor in first.items() if name != "norm.weight"}
    publish(tmp_path, first, second)
    assert same(go(reader(tmp_path, second), "v1"), second)
    with pytest.raises(InvalidRequest, match=r"'v1' is for another model: tensor norm.weight is missing"):
        reader(tmp_path, first).prepare("v1")


def test_two_replicas_switch_on_their_own(tmp_path: Path):
    versions = steps(3)
    publish(tmp_path, *versions)
    one, other = reader(tmp_path, versions[0]), reader(tmp_path, versions[0])
    go(one, "v2")
    go(other, "v1")
    assert same(one.resident.tensors, versions[2]) and same(other.resident.tensors, versions[1])


def test_preparing_leaves_the_weights_as_they_are(tmp_path: Path):
    versions = steps(2)
    publish(tmp_path, *versions)
    reading = reader(tmp_path, versions[0])
    go(reading, "v0")
    with reading.prepare("v1"):
        assert same(reading.resident.tensors, versions[0])
        assert reading.resident.at is not None and reading.resident.at.name == "v0"


def test_a_switch_that_was_prepared_on_other_weights_is_refused(tmp_path: Path):
    versions = steps(3)
    publish(tmp_path, *versions)
    reading = reader(tmp_path, versions[0])
    go(reading, "v0")
    with reading.prepare("v1") as switch:
        go(reading, "v2")
        with pytest.raises(InvalidRequest, match="prepare again"):
            switch.apply()
    assert same(reading.resident.tensors, versions[2])


def test_weights_that_somebody_changed_are_never_taken_for_a_base(tmp_path: Path):
    versions = steps(2)
    publish(tmp_path, *versions)
    reading = reader(tmp_path, versions[0])
    go(reading, "v0")
    reading.resident.tensors["norm.weight"][0] = 7.0
    with reading.prepare("v1") as switch:  # which doesn't come out right from memory
        assert str(switch.route) == "anchor v0 +v1"
        switch.apply()
    assert same(reading.resident.tensors, versions[1])


def test_weights_that_change_after_they_were_verified_are_disowned(tmp_path: Path):
    versions = steps(2)
    publish(tmp_path, *versions)
    reading = reader(tmp_path, versions[0])
    go(reading, "v0")
    with reading.prepare("v1") as switch:
        reading.resident.tensors["embed.weight"][0, 0] = 7.0
        with pytest.raises(InvalidRequest, match=r"tensor embed.weight .* doesn't come out right"):
            switch.apply()
    assert reading.resident.at is None
    assert same(go(reading, "v1"), versions[1])


def test_verifying_finds_a_changed_tensor(tmp_path: Path):
    weights = model()
    publish(tmp_path, weights)
    reading = reader(tmp_path, weights)
    go(reading, "v0")
    reading.resident.verify()
    reading.resident.tensors["norm.weight"][0] = 7.0
    with pytest.raises(InvalidRequest, match=r"norm\.weight in memory isn't what was loaded"):
        reading.resident.verify()
    assert reading.resident.at is None


def test_a_delta_for_another_base_is_refused_where_no_anchor_helps(tmp_path: Path):
    publish(tmp_path / "a", *steps(2, seed=1))
    publish(tmp_path / "b", *steps(2, seed=50))
    shutil.rmtree(tmp_path / "a" / "v0")
    shutil.copytree(tmp_path / "b" / "v0", tmp_path / "a" / "v0")
    reading = reader(tmp_path / "a", model(1))
    before = go(reading, "v0")
    assert same(before, model(50))
    with pytest.raises(InvalidRequest, match="version 'v1' can't be reached: version 'v0' has the digest"):
        reading.prepare("v1")
    assert same(reading.resident.tensors, model(50))


def test_a_torn_delta_falls_back_to_an_anchor_that_needs_it_not(tmp_path: Path):
    versions = steps(4)
    publish(tmp_path, *versions, anchor_every=2)
    reading = reader(tmp_path, versions[0])
    go(reading, "v1")
    os.truncate(tmp_path / "v2" / "delta.bin", 20)
    with reading.prepare("v3") as switch:
        assert str(switch.route) == "anchor v2 +v3"
        switch.apply()
    assert same(reading.resident.tensors, versions[3])


def test_a_torn_delta_without_another_way_is_refused_and_changes_nothing(tmp_path: Path):
    versions = steps(3)
    publish(tmp_path, *versions)
    reading = reader(tmp_path, versions[0])
    go(reading, "v1")
    path = tmp_path / "v2" / "delta.bin"
    os.truncate(path, path.stat().st_size - 1)
    with pytest.raises(InvalidRequest, match=r"delta.bin of version 'v2' has \d+ bytes; its manifest says .* torn"):
        reading.prepare("v2")
    assert same(reading.resident.tensors, versions[1])
    assert same(go(reading, "v0"), versions[0])


def test_a_missing_link_is_named_and_a_missing_version_is_not_found(tmp_path: Path):
    versions = steps(3)
    publish(tmp_path, *versions)
    shutil.rmtree(tmp_path / "v1")
    with pytest.raises(InvalidRequest, match="version 'v2' can't be reached: version 'v1' is no longer on disk"):
        reader(tmp_path, versions[0]).prepare("v2")
    with pytest.raises(NotFound, match="'v1' is no longer on disk"):
        reader(tmp_path, versions[0]).prepare("v1")


def test_a_dropped_parent_is_not_needed_by_who_is_there(tmp_path: Path):
    versions = steps(3)
    publish(tmp_path, *versions)
    reading = reader(tmp_path, versions[0])
    go(reading, "v1")
    shutil.rmtree(tmp_path / "v1")
    shutil.rmtree(tmp_path / "v0")
    assert same(go(reading, "v2"), versions[2])


def test_another_version_under_the_same_name_is_refused_where_the_digest_is_known(tmp_path: Path):
    first = publish(tmp_path, model(1))
    assert first is not None
    digest = links.read(tmp_path, "v0").ident.digest
    shutil.rmtree(tmp_path / "v0")
    publish(tmp_path, model(2))
    with pytest.raises(InvalidRequest, match="it is another, or altered"):
        reader(tmp_path, model(1)).prepare("v0", digest=digest)


def test_an_heir_goes_on_from_the_last_version_with_a_delta(tmp_path: Path):
    versions = steps(3)
    publish(tmp_path, *versions[:2])
    base = Resident.blank(links.read(tmp_path, "v1").specs)
    go(Reader(tmp_path, base), "v1")
    link = Publisher(tmp_path, base=base).publish("v2", versions[2], step=2)
    assert link.parent is not None and link.parent.name == "v1" and link.anchor is None
    assert same(go(reader(tmp_path, versions[0]), "v2"), versions[2])


def test_memory_that_the_publisher_keeps_is_not_taken_for_new_weights(tmp_path: Path):
    first, second = steps(2)
    publisher = Publisher(tmp_path, threads=1)
    publisher.publish("v0", first, step=0, gives=True)
    with pytest.raises(InvalidRequest, match=r"tensor embed\.weight was given to the publisher before"):
        publisher.publish("v1", first, step=1, gives=True)
    assert publisher.publish("v1", second, step=1).delta is not None


def test_weights_that_were_not_given_away_may_change_after_they_were_published(tmp_path: Path):
    weights, first, second = model(), model(), step(model(), 1)
    publisher = publish(tmp_path, weights)
    for name, tensor in second.items():
        weights[name].copy_(tensor)
    publisher.publish("v1", weights, step=1)
    reading = reader(tmp_path, weights)
    assert same(go(reading, "v0"), first)
    assert same(go(reading, "v1"), second)


def test_a_base_that_somebody_changed_never_becomes_wrong_weights(tmp_path: Path):
    first, second = steps(2)
    kept = copied(first)
    publisher = Publisher(tmp_path, threads=1)
    publisher.publish("v0", first, step=0, gives=True)
    first["norm.weight"][0] = 7.0
    publisher.publish("v1", second, step=1)
    reading = reader(tmp_path, kept)
    go(reading, "v0")
    with pytest.raises(InvalidRequest, match=r"tensor norm\.weight of version 'v1' doesn't come out right"):
        reading.prepare("v1")
    assert same(reading.resident.tensors, kept)


def test_tensors_of_each_width_are_joined_to_segments_that_cover_them_once():
    shapes = {"b": specs.Spec("BF16", (specs.BLOCK + 5,)), "a": specs.Spec("BF16", (9,)), "f": specs.Spec("F32", ())}
    found = specs.segments(shapes | {"none": specs.Spec("BF16", (0,))})
    assert [(each.width, each.size) for each in found] == [(2, 9), (2, specs.BLOCK), (2, 5), (4, 1)]
    assert [part.name for each in found for part in each.parts] == ["a", "b", "b", "f"]


def test_a_publisher_without_a_version_to_go_on_from_is_refused(tmp_path: Path):
    with pytest.raises(InvalidRequest, match="base is no version"):
        Publisher(tmp_path, base=room(model()))
    with pytest.raises(InvalidRequest, match="anchor_every is 0"):
        Publisher(tmp_path, anchor_every=0)


def test_a_version_is_never_replaced(tmp_path: Path):
    first, second, third = steps(3)
    publisher = publish(tmp_path, first)
    with pytest.raises(FileExistsError, match="versions are never replaced"):
        publisher.publish("v0", second, step=1)
    assert same(go(reader(tmp_path, first), "v0"), first)
    assert publisher.publish("v1", third, step=2).delta is not None


def test_a_publication_that_the_disk_refuses_leaves_nothing_and_the_next_is_an_anchor(tmp_path: Path):
    first, second = steps(2)
    publisher = publish(tmp_path, first)
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (64, hard))
    try:
        with pytest.raises(OSError, match="too large"):
            publisher.publish("v1", second, step=1)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert [path.name for path in tmp_path.iterdir()] == ["v0"]
    link = publisher.publish("v1", second, step=1)
    assert link.anchor is not None and link.delta is None
    assert same(go(reader(tmp_path, first), "v1"), second)


@pytest.mark.parametrize("name", ["", "..", "../v0", "/etc", ".v", "a/b", "a\0b", "x" * 300, "@/x"])
def test_a_name_that_leads_elsewhere_is_refused_on_both_sides(tmp_path: Path, name: str):
    with pytest.raises(InvalidRequest, match="is not allowed"):
        Publisher(tmp_path).publish(name, model(), step=0)
    with pytest.raises(InvalidRequest, match="is not allowed"):
        reader(tmp_path, model()).prepare(name)


def test_links_out_of_the_home_are_not_followed(tmp_path: Path):
    home, weights = tmp_path / "home", model()
    publish(tmp_path / "other", weights)
    publish(home, weights)
    (home / "out").symlink_to(tmp_path / "other" / "v0")
    with pytest.raises(InvalidRequest, match="not inside"):
        reader(home, weights).prepare("out")
    anchor = home / "v0" / "model.safetensors"
    anchor.unlink()
    anchor.symlink_to(tmp_path / "other" / "v0" / "model.safetensors")
    with pytest.raises(InvalidRequest, match="can't be opened"):
        reader(home, weights).prepare("v0")


@pytest.mark.parametrize(
    ("wrong", "says"),
    [
        ({"a/b": torch.zeros(2)}, "'a/b' is no tensor's name"),
        ({"..": torch.zeros(2)}, "is no tensor's name"),
        ({"a": torch.zeros(2, dtype=torch.complex64)}, "has type torch.complex64"),
        ({"a": torch.zeros(4, 4).t()[1:]}, "not contiguous on cpu"),
        ({}, "a model has 1 to"),
    ],
)
def test_tensors_that_no_version_can_hold_are_refused_by_name(tmp_path: Path, wrong: dict, says: str):
    with pytest.raises(InvalidRequest, match=says):
        Publisher(tmp_path).publish("v0", wrong, step=0)
    assert list(tmp_path.iterdir()) == []


def test_what_a_writer_says_is_checked_before_anything_is_written(tmp_path: Path):
    for said, says in [({"step": -1}, "step is -1"), ({"step": 0, "extra": {"a": {1}}}, "must be a JSON object")]:
        with pytest.raises(InvalidRequest, match=says):
            Publisher(tmp_path).publish("v0", model(), **said)
    assert list(tmp_path.iterdir()) == []


def test_tied_weights_are_taken_under_one_name_only():
    weight = torch.zeros(8)
    with pytest.raises(InvalidRequest, match="tensors embed and head share memory"):
        Resident({"embed": weight, "head": weight[4:]})


def manifest(home: Path, **changes: object) -> None:
    """Rewrite v1's manifest as a writer would that is wrong on purpose."""
    path = home / "v1" / "manifest.json"
    row = json.loads(path.read_text()) | changes
    path.write_bytes(json.dumps(row, sort_keys=True, separators=(",", ":")).encode() + b"\n")


HUGE = ["BF16", [1 << 50], "0" * 32, "0" * 32]
NINE = {"a": ["BF16", [9], "0" * 32, "0" * 32]}


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"name": "v0"}, "another version's"),
        ({"schema": 1}, "has schema 1, which is older than this version reads"),
        ({"schema": 3}, "reads up to 2"),
        ({"surprise": 1}, "surprise"),
        ({"step": True}, "step is True"),
        ({"parent": None}, "has a parent and a delta, or all weights, or both"),
        ({"delta": {"size_bytes": 1 << 60, "digest": "0" * 32}}, "size_bytes is"),
        ({"delta": {"size_bytes": 9, "digest": "0" * 32}}, "the frames of version 'v1' have"),
        ({"delta": {"size_bytes": 9, "digest": None}}, "digest is None"),
        ({"parent": {"name": "../v0", "digest": "0" * 64, "number": 0}}, "can't come before"),
        ({"tensors": {"embed.weight": HUGE}}, "has shape"),
        ({"tensors": {"../etc": HUGE}}, "is no tensor's name"),
        ({"tensors": {"a": ["PICKLE", [1], "0" * 32, "0" * 32]}}, "has type 'PICKLE'"),
        ({"tensors": {"a": ["BF16", [1 << 40], "0" * 32, "0" * 32]}}, "262144 segments or more have 2 blocks"),
        ({"tensors": NINE, "blocks": []}, "1 segments or more have 0 blocks"),
        ({"tensors": NINE, "blocks": [["gaps", 10, [1, 1, 1]]]}, "can't have 10 changed"),
        ({"tensors": NINE, "blocks": [["gaps", 1, [1, 1, -1]]]}, "a frame's length is -1"),
        ({"tensors": []}, "is damaged"),
    ],
)
def test_a_manifest_that_says_what_cannot_be_is_refused_by_name(tmp_path: Path, changes: dict, says: str):
    first, second = steps(2)
    publish(tmp_path, first, second)
    reading = reader(tmp_path, first)
    go(reading, "v0")
    manifest(tmp_path, **changes)
    with pytest.raises(InvalidRequest, match=says):
        reading.prepare("v1")
    assert same(reading.resident.tensors, first)


def test_tensors_of_several_blocks_are_read_by_several_threads(tmp_path: Path):
    shape = (specs.BLOCK + 4099,)
    before = {"large": torch.zeros(shape, dtype=torch.uint8), "small": torch.zeros(3)}
    after = copied(before)
    after["large"][torch.tensor([0, specs.BLOCK - 1, specs.BLOCK, specs.BLOCK + 4098])] = 9
    publisher = Publisher(tmp_path, threads=3)
    publisher.publish("v0", before, step=0)
    link = publisher.publish("v1", after, step=1)
    assert [block.count for block in link.blocks] == [2, 2, 0]
    reading = Reader(tmp_path, room(before), threads=3)
    for name, expected in [("v1", after), ("v0", before), ("v1", after)]:
        with reading.prepare(name) as switch:
            switch.apply(threads=3)
        assert same(reading.resident.tensors, expected)
    assert raw(after["small"]).shape == (3, 4)
