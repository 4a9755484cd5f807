"""A handle finds the nodes as long as any that it has heard of answers."""

from __future__ import annotations

import pickle

import pytest

from persisting_torch.cluster.finder import Member
from persisting_torch.cluster.handle import Handle
from persisting_torch.cluster.plane import Server
from persisting_torch.cluster.secret import credentials
from persisting_torch.cluster.wire import Message


@pytest.fixture
def nodes():
    """Nodes, each of which tells of all that run; by name."""
    secret = credentials("a secret of tests")
    running: dict[str, Server] = {}

    def tell(request, table):
        assert request.header == {"op": "nodes"}
        return Message(
            {"nodes": [[name, server.address] for name, server in running.items()]}
        ), None

    def start(name):
        running[name] = Server("127.0.0.1", tell, secret)
        return Member(name, running[name].address)

    yield secret, running, start
    for server in running.values():
        server.close()


def names(finder):
    return [node.name for node in finder.nodes(0.0)]


def test_nodes_that_come_and_go_are_followed_without_any_that_was_known_at_first(nodes):
    secret, running, start = nodes
    handle = pickle.loads(pickle.dumps(Handle((start("a"), start("b")), secret)))
    finder = handle.finder()
    assert names(finder) == ["a", "b"]
    running.pop("a").close()
    assert names(finder) == ["b"]
    start("c")
    assert names(finder) == ["b", "c"]
    running.pop("b").close()
    assert names(finder) == ["c"]


def test_when_no_node_answers_the_last_ones_stay_known_until_one_does(nodes):
    secret, running, start = nodes
    handle = Handle((Member("gone", "127.0.0.1:1"), start("a")), secret)
    finder = handle.finder()
    assert names(finder) == ["a"]
    address = running["a"].address
    running.pop("a").close()
    assert names(finder) == ["a"]
    assert finder.nodes(0.0) == [Member("a", address)]


def test_a_process_has_one_finder_for_each_handle(nodes):
    secret, _, start = nodes
    handle = Handle((start("a"),), secret)
    assert handle.finder() is pickle.loads(pickle.dumps(handle)).finder()
    assert handle.finder() is not Handle((start("b"),), secret).finder()


def test_a_handle_shows_no_secret(nodes):
    secret, _, start = nodes
    shown = repr(Handle((start("a"),), secret))
    assert secret.passphrase not in shown
    assert "PRIVATE" not in shown
