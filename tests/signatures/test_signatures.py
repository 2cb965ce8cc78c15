"""Calls of packages that need a GPU fit the signatures of their releases (`make signatures` fetches them)."""

import ast

import pytest

from tests import flash_stand_in
from tests.signatures import calls, releases
from tests.signatures.releases import Release, Signature

pytestmark = pytest.mark.long


@pytest.mark.parametrize("name", releases.RELEASES)
def test_every_call_fits_the_release(name):
    if (archive := releases.archive_of(name)) is None:
        pytest.skip(f"{name} was not downloaded: make signatures")
    release = Release(name, archive)
    ours = [use for use in calls.uses() if use.package == release.package]
    assert [use for use in ours if use.positions is not None]
    assert not [(use, problem) for use in ours if (problem := use.problem(release))]


@pytest.mark.parametrize("version", releases.FLASH_ATTENTION)
def test_every_flash_attention_takes_what_packed_rows_need(version):
    """The stand-in of the other tests has its parameters."""
    name, path = releases.FLASH_ATTENTION[version]
    use, stands_in = calls.of_flash_attention(version), flash_stand_in.signature_of(version)
    known = Signature(tuple(stands_in.parameters), (), frozenset())
    assert use.path == path and known.problem(3, set(use.names), False) is None
    if (archive := releases.archive_of(name)) is None:
        pytest.skip(f"{name} was not downloaded: make signatures")
    release = Release(name, archive, path.partition(".")[0])
    assert use.problem(release) is None
    assert release.signature(path).names == tuple(stands_in.parameters)


def test_what_does_not_fit_is_a_problem():
    signature = Signature(("a", "b"), ("c",), frozenset({"a"}))
    assert signature.problem(1, {"c"}, True) is None and signature.problem(0, set(), False) is None
    assert signature.problem(1, {"d"}, True) == "takes no d"
    assert signature.problem(3, set(), True) == "takes 2 arguments by position, and is given 3"
    assert signature.problem(2, {"b"}, True) == "is given b by position too"
    assert signature.problem(0, {"b"}, True) == "needs a"


def test_optimizers_are_among_the_calls():
    found = {use.path: use.names for use in calls.of_optimizers()}
    assert found["torchao.optim.AdamW4bit"] >= {"lr", "betas", "block_size"} and len(found) == 6
    assert found["bitsandbytes.optim.AdEMAMix"] >= {"t_beta3", "optim_bits", "is_paged"}


def test_arguments_are_read_from_dicts_and_what_they_are_made_of():
    source = """
def library():
    return require("torchao.float8", "torchao")

def usual():
    return {"lr": 1}

def made(more):
    options = usual() | {"eps": 2}
    options["extra"] = 3
    library().convert(*more, **options)
    return library().Kind, {"betas": 4} | more
"""
    reader = calls._Reader(calls.ROOT / "packages/made_up.py", ast.parse(source))
    found = {use.path: use for use in reader.uses() if use.positions is not None}
    call, kind = found["torchao.float8.convert"], found["torchao.float8.Kind"]
    assert (call.positions, set(call.names), call.complete) == (0, {"lr", "eps", "extra"}, False)
    assert (kind.positions, set(kind.names), kind.complete) == (1, {"betas"}, False)
